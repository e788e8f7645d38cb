"""Model of PyTorch's eager autograd that tracks the size and the lifetime of each tensor, without PyTorch.

`decoder.py` writes a layer's forward pass line by line as the model's source does, with the operators of
`operators.py`. Python's reference counts then free a size at the same line where PyTorch frees the tensor. Each
operator saves for the backward pass the tensors that PyTorch's derivative formula saves, and its backward function
allocates what PyTorch's does.

A size is a polynomial with three coefficients, `(per token, per score, constant)`:

    size = per_token x tokens + per_score x scores + constant

`tokens` = rows x row length; `scores` = rows x row length squared; the constant comes from the weights. One run of a
layer therefore answers for every batch size and row length.

Sources: pytorch v2.13 `torch/csrc/autograd/engine.cpp` (`evaluate_function`, `validate_outputs`), `input_buffer.cpp`
(`accumulate`), `functions/accumulate_grad.h`, `torch/utils/checkpoint.py`. `tests/test_activations.py` compares the
resulting bytes with the CPU allocator under real autograd; they are equal to the byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

from msgspec import Struct, field

Size = tuple[int, int, int]  # coefficients: per token, per score, constant
MemoryKind = Literal[
    "transients",  # temporaries that no node saves
    "activations",  # inputs and outputs of layers, and saved tensors whose size grows with tokens
    "attention_scores",  # saved tensors whose size grows with scores
    "autocast_copies",  # weights cast by autocast
    "gradients",  # `.grad` of weights
]

NOTHING: Size = (0, 0, 0)
ACCUMULATE_GRAD_ORDER = 1 << 62  # AccumulateGrad has the largest sequence number: the engine takes it first


def scaled(size: Size, factor: int) -> Size:
    """`size` times `factor`."""
    return (size[0] * factor, size[1] * factor, size[2] * factor)


class Storage:
    """Memory of one tensor and its views; Python frees it when the last reference to it goes."""

    __slots__ = ("kind", "number", "size", "tape")

    def __init__(self, tape: Tape, size: Size, kind: MemoryKind) -> None:
        self.tape, self.size, self.kind = tape, size, kind
        tape.storages += 1
        self.number = tape.storages
        tape.count(size, kind, 1)
        tape.record()

    def keep_as(self, kind: MemoryKind) -> None:
        """Count these bytes under `kind` instead of "transients", since something now keeps them.

        Saved activations whose size depends on scores are counted as "attention_scores". Storages of another kind stay.
        """
        if self.kind == "transients":
            self.tape.count(self.size, self.kind, -1)
            self.kind = "attention_scores" if kind == "activations" and self.size[1] else kind
            self.tape.count(self.size, self.kind, 1)

    def __del__(self) -> None:
        self.tape.count(self.size, self.kind, -1)


class Parameter(Struct, eq=False):
    """A trainable weight: the backward pass adds its gradient to `.grad` as soon as it is computed (AccumulateGrad)."""

    order: int = ACCUMULATE_GRAD_ORDER
    outputs: int = 1


class Edge(Struct, frozen=True):
    """Destination of a gradient: output number `slot` of node `target`, and the size and dtype width expected there."""

    target: Node | Parameter | None
    slot: int
    elements: Size
    width: int


class Node(Struct, eq=False):
    """One step of the backward pass. `backward` takes one gradient per output and returns one gradient per edge."""

    order: int
    edges: tuple[Edge, ...]
    saved: list[Storage | None]  # None: the storage of a weight, or the placeholder of a checkpoint
    backward: Backward
    outputs: int = 1


class Tensor(Struct, eq=False):
    """A tensor of `elements` elements of `width` bytes each.

    A view shares the storage of its base. `storage` is None for a weight, whose bytes are counted in
    `memory/weights.py`.
    """

    storage: Storage | None
    elements: Size
    width: int
    node: Node | Parameter | None = None  # the node that computed it (grad_fn); None: it needs no gradient
    is_view: bool = False
    slot: int = 0  # number of this tensor among the outputs of `node`

    @property
    def requires_grad(self) -> bool:
        """True if the backward pass computes a gradient for this tensor."""
        return self.node is not None


Backward = Callable[..., list[Tensor | None]]
Pending = dict[Node | Parameter, list[Tensor | None]]


class LiveBytes(Struct, frozen=True):
    """Bytes alive on one GPU at one point of a pass, as polynomials of tokens and scores: in total and by kind."""

    total: Size
    kinds: tuple[tuple[MemoryKind, Size], ...]


class Bucket(NamedTuple):
    """DeepSpeed's bucket of gradients: one of more `elements` is reduced alone, when the next one is there.

    `copy_width`: bytes of an element of the copy that is then reduced; 0: the gradient itself is.
    """

    elements: int
    copy_width: int = 0


class Tape(Struct, eq=False):
    """Record of the live bytes during the passes of one layer.

    `saving` is False during the forward pass of a checkpoint, when nodes keep placeholders instead of tensors.
    `stop_after_saves` is the number of saved tensors after which recording stops: non-reentrant checkpointing ends a
    recomputation once it has the last tensor that the backward pass needs (torch/utils/checkpoint.py, `early_stop`), so
    the allocations of the rest of the layer do not happen.
    """

    saving: bool = True
    grad_enabled: bool = True
    # The saved tensors were recomputed: each is freed once its node has used it (`unpack_hook` drops its handle).
    recomputed: bool = False
    gradients_exist: bool = False  # `.grad` is set already: a new gradient is added to it and freed
    bucket: Bucket | None = None
    waiting: Tensor | None = None  # a gradient that is reduced alone
    alive: dict[MemoryKind, list[int]] = field(default_factory=dict)
    total: list[int] = field(default_factory=lambda: [0, 0, 0])
    snapshots: list[LiveBytes] = field(default_factory=list)
    gradients: list[Storage] = field(default_factory=list)
    autocast_cache: list[Tensor] = field(default_factory=list)
    order: int = 0
    storages: int = 0  # allocated so far
    saves: int = 0
    stop_after_saves: int | None = None  # None: never
    muted: bool = False  # True: take no snapshots

    # -- accounting ------------------------------------------------------------------------------------------------

    def count(self, size: Size, kind: MemoryKind, sign: int) -> None:
        """Add `sign` x `size` to the live bytes of `kind` and to the total."""
        held, total = self.alive.setdefault(kind, [0, 0, 0]), self.total
        for i in (0, 1, 2):
            amount = sign * size[i]
            held[i] += amount
            total[i] += amount

    def record(self) -> None:
        """Keep a snapshot of the live bytes if it can be the peak for some batch.

        It can if no kept snapshot is as large in all three coefficients. Drops the snapshots that the new one exceeds
        in all three.
        """
        if self.muted:
            return
        tokens, scores, constant = self.total
        for snapshot in self.snapshots:
            other = snapshot.total
            if other[0] >= tokens and other[1] >= scores and other[2] >= constant:
                return
        self.snapshots = [
            m for m in self.snapshots if m.total[0] > tokens or m.total[1] > scores or m.total[2] > constant
        ]
        self.snapshots.append(self.snapshot())

    def snapshot(self) -> LiveBytes:
        """The bytes alive now."""
        kinds = tuple((kind, (held[0], held[1], held[2])) for kind, held in self.alive.items() if any(held))
        return LiveBytes((self.total[0], self.total[1], self.total[2]), kinds)

    def close(self) -> None:
        """Drop the storages that refer to the tape, so that reference counts free it without the garbage collector."""
        self.gradients.clear()
        self.autocast_cache.clear()
        self.waiting = None

    # -- forward ---------------------------------------------------------------------------------------------------

    def empty(self, elements: Size, width: int, kind: MemoryKind = "transients") -> Tensor:
        """Allocate a tensor of `elements` elements of `width` bytes each (torch.empty), counted under `kind`."""
        return Tensor(Storage(self, scaled(elements, width), kind), elements, width)

    def save(self, *tensors: Tensor | None, kind: MemoryKind = "activations") -> list[Storage | None]:
        """Save tensors for a node's backward pass and return their storages; arguments None are ignored.

        Returns placeholders (None) under a checkpoint's forward pass, and nothing under `no_grad`.
        """
        if not self.grad_enabled:
            return []
        needed = [tensor.storage for tensor in tensors if tensor is not None]
        self.saves += len(needed)
        if not self.saving:
            return [None for _ in needed]
        for storage in needed:
            if storage is not None:
                storage.keep_as(kind)
        if self.stop_after_saves is not None and self.saves >= self.stop_after_saves:
            self.muted = True
        return needed

    def save_in_context(self, tensor: Tensor) -> list[Storage | None]:
        """Save a tensor as an attribute of a Python function's `ctx`; checkpointing does not replace attributes."""
        if not self.grad_enabled or tensor.storage is None:
            return []
        tensor.storage.keep_as("activations")
        return [tensor.storage]

    def output(
        self, result: Tensor, inputs: tuple[Tensor, ...], saved: list[Storage | None], backward: Backward
    ) -> Tensor:
        """Attach to `result` the node that autograd creates, if any input needs a gradient; return `result`."""
        return self.outputs((result,), inputs, saved, backward)[0]

    def outputs(
        self, results: tuple[Tensor, ...], inputs: tuple[Tensor, ...], saved: list[Storage | None], backward: Backward
    ) -> tuple[Tensor, ...]:
        """Attach one node with several outputs to `results`, if any input needs a gradient; return `results`."""
        if self.grad_enabled and any(tensor.requires_grad for tensor in inputs):
            self.order += 1
            edges = tuple(Edge(tensor.node, tensor.slot, tensor.elements, tensor.width) for tensor in inputs)
            node = Node(self.order, edges, saved, backward, len(results))
            for slot, result in enumerate(results):
                result.node, result.slot = node, slot
        return results

    def leaf(self, elements: Size, width: int, learns: bool = True) -> Tensor:
        """Allocate a layer's input, whose gradient is the result of the backward pass, if it `learns`."""
        tensor = self.empty(elements, width, "activations")
        self.order += 1
        if learns:
            tensor.node = Node(self.order, (), [], lambda gradient: [])
        return tensor

    def weight(self, elements: int, width: int, trainable: bool) -> Tensor:
        """A weight of the layer; it takes no memory here."""
        return Tensor(None, (0, 0, elements), width, Parameter() if trainable else None)

    @contextmanager
    def without_gradients(self) -> Iterator[None]:
        """Compute without nodes inside the block (torch.no_grad)."""
        before, self.grad_enabled = self.grad_enabled, False
        try:
            yield
        finally:
            self.grad_enabled = before

    # -- backward --------------------------------------------------------------------------------------------------

    def run_backward(self, pending: Pending) -> Tensor | None:
        """Evaluate every node once, the latest first; return the gradient of the layer's input, if it needs one."""
        while pending:
            node = max(pending, key=order_of)
            if isinstance(node, Parameter):
                self.keep_gradient(pending.pop(node)[0])
            elif node.edges:
                self.evaluate(pending, node)
            else:
                return pending.pop(node)[0]
        return None

    def run_until_saved(self, pending: Pending) -> None:
        """Evaluate the nodes up to the first one that needs a saved tensor, where a checkpoint starts to recompute."""
        while True:
            node = max(pending, key=order_of)
            if isinstance(node, Parameter) or node.saved or not node.edges:
                return
            self.evaluate(pending, node)

    def evaluate(self, pending: Pending, node: Node) -> None:
        """Run one node's backward function and pass its gradients on.

        As in PyTorch's engine, the incoming gradients stay alive until the outgoing ones are validated; the node's
        saved tensors are freed after that.
        """
        incoming = pending.pop(node)
        outgoing = node.backward(*incoming)
        if self.recomputed:
            node.saved.clear()
        for i, edge in enumerate(node.edges):
            self.validate(outgoing, i, edge)
        del incoming
        node.saved.clear()
        for edge in node.edges:
            flowing = outgoing.pop(0)
            if edge.target is not None and flowing is not None:
                self.accumulate(pending, edge.target, edge.slot, flowing)
            del flowing

    def validate(self, outgoing: list[Tensor | None], i: int, edge: Edge) -> None:
        """Sum gradient number `i` over broadcast dimensions, then cast it to the dtype of the input, if needed."""
        gradient = outgoing[i]
        if gradient is None or edge.target is None:
            return
        if gradient.elements != edge.elements:
            gradient = outgoing[i] = self.empty(edge.elements, gradient.width)
        if gradient.width != edge.width:
            outgoing[i] = self.empty(edge.elements, edge.width)

    def accumulate(self, pending: Pending, target: Node | Parameter, slot: int, flowing: Tensor) -> None:
        """Add a gradient to the one that waits for the same tensor, if there is one.

        The sum is written into the waiting gradient if nothing else holds its storage, else into a new tensor; a view
        holds the storage of its base (input_buffer.cpp, `can_accumulate_inplace`).
        """
        buffer = pending.setdefault(target, [None] * target.outputs)
        held = buffer[slot]
        if held is None:
            buffer[slot] = flowing
        elif (
            held.is_view
            or sum(
                other is not None and other.storage is held.storage for buffers in pending.values() for other in buffers
            )
            > 1
        ):
            buffer[slot] = self.empty(held.elements, held.width)

    def keep_gradient(self, gradient: Tensor | None) -> None:
        """Keep a weight's gradient as `.grad`; if `.grad` exists already, the gradient is added to it and freed.

        One that is larger than DeepSpeed's bucket is not copied to it, and freed when the next one is there.
        """
        if self.bucket is not None:
            if self.waiting is not None and self.bucket.copy_width:
                self.empty(self.waiting.elements, self.bucket.copy_width)
            alone = gradient is not None and gradient.elements[2] > self.bucket.elements
            self.waiting = gradient if alone else None
        if not self.gradients_exist and gradient is not None and gradient.storage is not None:
            gradient.storage.keep_as("gradients")
            self.gradients.append(gradient.storage)


def order_of(node: Node | Parameter) -> int:
    """The sequence number by which the engine chooses the next node: the largest first."""
    return node.order


def transfer_gradients(pending: Pending, old: Node, new: Node) -> Pending:
    """Give the gradients that wait for nodes of a graph to the same nodes of the recomputed graph.

    `old` and `new` are the last nodes of the two graphs.
    """
    shift = new.order - old.order
    nodes: dict[int, Node] = {}
    waiting = [new]
    while waiting:
        node = waiting.pop()
        if node.order not in nodes:
            nodes[node.order] = node
            waiting += [edge.target for edge in node.edges if isinstance(edge.target, Node)]
    return {nodes.get(node.order + shift, node): gradients for node, gradients in pending.items()}

"""What PyTorch's eager autograd keeps and for how long, without PyTorch: sizes only.

A layer's forward pass is written with the operators of `operators.py` as its source writes it (`decoder.py`); Python's own
reference counts then free the sizes when PyTorch would free the tensors. Each operator keeps for the backward pass what
PyTorch's derivative keeps, and its backward pass allocates what PyTorch's does.

A size is a polynomial of three terms, `(per token, per score, constant)`: tokens are rows x row length, scores rows x row
length squared, constants belong to the weights. One run answers for every batch size and length.

Sources: pytorch v2.13 `torch/csrc/autograd/engine.cpp` (`evaluate_function`, `validate_outputs`), `input_buffer.cpp`
(`accumulate`), `functions/accumulate_grad.h`, `torch/utils/checkpoint.py`. What comes out is checked to the byte against
the CPU allocator under real autograd in `tests/test_activations.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

Size = tuple[int, int, int]  # per token, per score, constant
Kind = Literal["transients", "activations", "attention_scores", "autocast_copies", "gradients"]

NOTHING: Size = (0, 0, 0)
FIRST = 1 << 62  # the engine takes AccumulateGrad before any other node (its sequence number is the largest)


def scaled(size: Size, factor: int) -> Size:
    return (size[0] * factor, size[1] * factor, size[2] * factor)


class Storage:
    """Memory of one tensor and its views; it is freed when the last reference goes."""

    __slots__ = ("kind", "size", "tape")

    def __init__(self, tape: Tape, size: Size, kind: Kind) -> None:
        self.tape, self.size, self.kind = tape, size, kind
        tape.move(size, kind, 1)
        tape.record()

    def keep_as(self, kind: Kind) -> None:
        """The same bytes under another name: a temporary that a node has saved."""
        if self.kind == "transients":
            self.tape.move(self.size, self.kind, -1)
            self.kind = "attention_scores" if kind == "activations" and self.size[1] else kind
            self.tape.move(self.size, self.kind, 1)

    def __del__(self) -> None:
        self.tape.move(self.size, self.kind, -1)


@dataclass(slots=True, eq=False)
class Parameter:
    """A weight that learns: its gradient goes into `.grad` as soon as it is there (AccumulateGrad)."""

    order: int = FIRST
    outputs: int = 1


@dataclass(frozen=True, slots=True)
class Edge:
    """Where a gradient goes: which output of which node, and what it must be like there."""

    target: Node | Parameter | None
    slot: int
    elements: Size
    width: int


@dataclass(slots=True, eq=False)
class Node:
    """One step of the backward pass. `backward` takes a gradient for every output and gives one for every edge."""

    order: int
    edges: tuple[Edge, ...]
    saved: list[Storage | None]  # None: a weight's, or a checkpoint's placeholder
    backward: Backward
    outputs: int = 1


@dataclass(slots=True, eq=False)
class Tensor:
    """`elements` in a dtype of `width` bytes. A view shares its storage; a weight's storage is counted elsewhere (None)."""

    storage: Storage | None
    elements: Size
    width: int
    node: Node | Parameter | None = None  # None: no gradient flows into it
    is_view: bool = False
    slot: int = 0  # which of its node's outputs it is

    @property
    def requires_grad(self) -> bool:
        return self.node is not None


Backward = Callable[..., list[Tensor | None]]
Pending = dict[Node | Parameter, list[Tensor | None]]


@dataclass(frozen=True, slots=True)
class LiveBytes:
    """What was alive when memory had just grown: bytes of each kind, as polynomials."""

    total: Size
    kinds: tuple[tuple[Kind, Size], ...]


@dataclass(slots=True, eq=False)
class Tape:
    """Records one layer's passes. `saving` is off under a checkpoint's forward pass, where placeholders are kept.

    `stop_after_saves`: non-reentrant checkpointing ends a recomputation when the last tensor that backward needs is back
    (torch/utils/checkpoint.py, `early_stop`); what the rest of the layer would allocate is not recorded then.
    """

    saving: bool = True
    grad_enabled: bool = True
    recomputed: bool = (
        False  # a recomputed tensor goes as soon as its node has used it (`unpack_hook` drops its handle)
    )
    gradients_exist: bool = False  # accumulation: a new gradient is added to the old one and freed
    alive: dict[Kind, list[int]] = field(default_factory=dict)
    total: list[int] = field(default_factory=lambda: [0, 0, 0])
    snapshots: list[LiveBytes] = field(default_factory=list)
    gradients: list[Storage] = field(default_factory=list)
    autocast_cache: list[Tensor] = field(default_factory=list)
    order: int = 0
    saves: int = 0
    stop_after_saves: int | None = None  # None: never
    muted: bool = False

    # -- accounting ------------------------------------------------------------------------------------------------

    def move(self, size: Size, kind: Kind, sign: int) -> None:
        held, total = self.alive.setdefault(kind, [0, 0, 0]), self.total
        for i in (0, 1, 2):
            amount = sign * size[i]
            held[i] += amount
            total[i] += amount

    def record(self) -> None:
        """Remember this moment if it can be the peak for some size: no other is as large in all three coefficients."""
        if self.muted:
            return
        tokens, scores, constant = self.total
        for moment in self.snapshots:
            other = moment.total
            if other[0] >= tokens and other[1] >= scores and other[2] >= constant:
                return
        self.snapshots = [
            m for m in self.snapshots if m.total[0] > tokens or m.total[1] > scores or m.total[2] > constant
        ]
        self.snapshots.append(self.snapshot())

    def snapshot(self) -> LiveBytes:
        kinds = tuple((kind, (held[0], held[1], held[2])) for kind, held in self.alive.items() if any(held))
        return LiveBytes((self.total[0], self.total[1], self.total[2]), kinds)

    def close(self) -> None:
        """Let go of what refers back to the tape, so that reference counts alone free it."""
        self.gradients.clear()
        self.autocast_cache.clear()

    # -- forward ---------------------------------------------------------------------------------------------------

    def empty(self, elements: Size, width: int, kind: Kind = "transients") -> Tensor:
        return Tensor(Storage(self, scaled(elements, width), kind), elements, width)

    def save(self, *tensors: Tensor | None, kind: Kind = "activations") -> list[Storage | None]:
        """What a node holds for its backward pass; None stands for what it does not need."""
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

    def hold(self, tensor: Tensor) -> list[Storage | None]:
        """An attribute of a Python function's context, which no checkpoint replaces by a placeholder."""
        if not self.grad_enabled or tensor.storage is None:
            return []
        tensor.storage.keep_as("activations")
        return [tensor.storage]

    def output(
        self, result: Tensor, inputs: tuple[Tensor, ...], saved: list[Storage | None], backward: Backward
    ) -> Tensor:
        """Attach the node that autograd would; without an input that needs a gradient there is none."""
        return self.outputs((result,), inputs, saved, backward)[0]

    def outputs(
        self, results: tuple[Tensor, ...], inputs: tuple[Tensor, ...], saved: list[Storage | None], backward: Backward
    ) -> tuple[Tensor, ...]:
        """One node with several outputs, whose gradients it takes together."""
        if self.grad_enabled and any(tensor.requires_grad for tensor in inputs):
            self.order += 1
            edges = tuple(Edge(tensor.node, tensor.slot, tensor.elements, tensor.width) for tensor in inputs)
            node = Node(self.order, edges, saved, backward, len(results))
            for slot, result in enumerate(results):
                result.node, result.slot = node, slot
        return results

    def leaf(self, elements: Size, width: int, kind: Kind = "activations") -> Tensor:
        """A tensor from outside whose gradient is wanted: a layer's input."""
        tensor = self.empty(elements, width, kind)
        self.order += 1
        tensor.node = Node(self.order, (), [], lambda gradient: [])
        return tensor

    def weight(self, elements: int, width: int, trainable: bool) -> Tensor:
        return Tensor(None, (0, 0, elements), width, Parameter() if trainable else None)

    # -- backward --------------------------------------------------------------------------------------------------

    def run_backward(self, pending: Pending) -> Tensor:
        """Every node once, latest first. Returns the gradient of the leaf the pass began with."""
        while True:
            node = max(pending, key=in_order)
            if isinstance(node, Parameter):
                self.keep_gradient(pending.pop(node)[0])
            elif node.edges:
                self.evaluate(pending, node)
            else:
                gradient_of_input = pending.pop(node)[0]
                assert gradient_of_input is not None
                return gradient_of_input

    def run_until_saved(self, pending: Pending) -> None:
        """The nodes that need no saved tensor: a checkpoint recomputes when the first one that does comes."""
        while True:
            node = max(pending, key=in_order)
            if isinstance(node, Parameter) or node.saved or not node.edges:
                return
            self.evaluate(pending, node)

    def evaluate(self, pending: Pending, node: Node) -> None:
        """The incoming gradients are held until the outgoing ones are as they must be; then the saved tensors go."""
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
        """Sum a gradient over what was broadcast, then cast it to its input's dtype."""
        gradient = outgoing[i]
        if gradient is None or edge.target is None:
            return
        if gradient.elements != edge.elements:
            gradient = outgoing[i] = self.empty(edge.elements, gradient.width)
        if gradient.width != edge.width:
            outgoing[i] = self.empty(edge.elements, edge.width)

    def accumulate(self, pending: Pending, target: Node | Parameter, slot: int, flowing: Tensor) -> None:
        """Two gradients of one tensor become one: in place in the first if nobody else holds its storage, else in a new one.

        A view holds its base (input_buffer.cpp, `can_accumulate_inplace`).
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
        """A weight's gradient stays in `.grad`; where there is one already it is added to it and freed."""
        if not self.gradients_exist and gradient is not None and gradient.storage is not None:
            gradient.storage.keep_as("gradients")
            self.gradients.append(gradient.storage)


def in_order(node: Node | Parameter) -> int:
    return node.order


def moved(pending: Pending, old: Node, new: Node) -> Pending:
    """The same gradients on their way into the same nodes of a recomputed graph, whose last node is `new`."""
    shift = new.order - old.order
    nodes: dict[int, Node] = {}
    waiting = [new]
    while waiting:
        node = waiting.pop()
        if node.order not in nodes:
            nodes[node.order] = node
            waiting += [edge.target for edge in node.edges if isinstance(edge.target, Node)]
    return {nodes.get(node.order + shift, node): gradients for node, gradients in pending.items()}

"""What PyTorch's eager autograd keeps and for how long, without PyTorch: sizes only.

A layer's forward pass is written with these operators as its source writes it (`planner/memory/decoder.py`); Python's own
reference counts then free the sizes when PyTorch would free the tensors. Each operator keeps for the backward pass what
PyTorch's derivative keeps, and its backward pass allocates what PyTorch's does.

A size is a polynomial of three terms, `(per token, per score, constant)`: tokens are rows x row length, scores rows x row
length squared, constants belong to the weights. One run answers for every batch size and length.

Sources: pytorch v2.13 `tools/autograd/derivatives.yaml` (what each operator saves), `torch/csrc/autograd/FunctionsManual.cpp`
(what each backward allocates), `torch/csrc/autograd/engine.cpp` and `input_buffer.cpp` (order, release and accumulation).
The formulas that come out are checked to the byte against real autograd in `tests/test_activations.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

Size = tuple[int, int, int]  # per token, per score, constant
Kind = Literal["transients", "activations", "attention_scores", "autocast_copies", "gradients"]

NOTHING: Size = (0, 0, 0)


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
    """A weight that learns: where its gradient ends, in its own dtype of `width` bytes."""

    width: int


@dataclass(slots=True, eq=False)
class Node:
    """One step of the backward pass. `backward` takes the gradient of the output and gives one for every input."""

    order: int
    inputs: tuple[Node | Parameter | None, ...]
    saved: list[Storage]
    backward: Callable[[Tensor], tuple[Tensor | None, ...]]


@dataclass(slots=True, eq=False)
class Tensor:
    """`elements` in a dtype of `width` bytes. A view shares its storage."""

    storage: Storage
    elements: Size
    width: int
    node: Node | None = None  # None: no gradient flows into it

    @property
    def requires_grad(self) -> bool:
        return self.node is not None


@dataclass(frozen=True, slots=True)
class Moment:
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
    gradients_exist: bool = False  # accumulation: a new gradient is added to the old one and freed
    alive: dict[Kind, list[int]] = field(default_factory=dict)
    total: list[int] = field(default_factory=lambda: [0, 0, 0])
    moments: list[Moment] = field(default_factory=list)
    gradients: list[Storage] = field(default_factory=list)
    autocast_cache: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    order: int = 0
    saves: int = 0
    stop_after_saves: int | None = None  # None: never
    muted: bool = False

    # -- accounting ------------------------------------------------------------------------------------------------

    def move(self, size: Size, kind: Kind, sign: int) -> None:
        held = self.alive.setdefault(kind, [0, 0, 0])
        for i, amount in enumerate(size):
            held[i] += sign * amount
            self.total[i] += sign * amount

    def record(self) -> None:
        if not self.muted:
            self.moments.append(self.now())

    def now(self) -> Moment:
        kinds = tuple((kind, (held[0], held[1], held[2])) for kind, held in self.alive.items() if any(held))
        return Moment((self.total[0], self.total[1], self.total[2]), kinds)

    # -- building blocks -------------------------------------------------------------------------------------------

    def empty(self, elements: Size, width: int, kind: Kind = "transients") -> Tensor:
        return Tensor(Storage(self, scaled(elements, width), kind), elements, width)

    def save(self, *tensors: Tensor | None, kind: Kind = "activations", parameters: int = 0) -> list[Storage]:
        """What a node holds for its backward pass. `parameters`: weights it holds besides, which cost nothing."""
        if not self.grad_enabled:
            return []
        kept = [tensor.storage for tensor in tensors if tensor is not None]
        self.saves += len(kept) + parameters
        if not self.saving:
            return []
        for storage in kept:
            storage.keep_as(kind)
        if self.stop_after_saves is not None and self.saves >= self.stop_after_saves:
            self.muted = True
        return kept

    def output(
        self,
        result: Tensor,
        inputs: tuple[Tensor, ...],
        saved: list[Storage],
        backward: Callable[[Tensor], tuple[Tensor | None, ...]],
        parameter_width: int = 0,
    ) -> Tensor:
        """Attach the node that autograd would; without an input that needs a gradient there is none.

        `parameter_width`: the last gradient that `backward` gives is that of a parameter of so many bytes an element.
        """
        if self.grad_enabled and (parameter_width or any(tensor.requires_grad for tensor in inputs)):
            self.order += 1
            nodes: tuple[Node | Parameter | None, ...] = tuple(tensor.node for tensor in inputs)
            if parameter_width:
                nodes += (Parameter(parameter_width),)
            result.node = Node(self.order, nodes, saved, backward)
        return result

    def leaf(self, elements: Size, width: int, kind: Kind = "activations") -> Tensor:
        """A tensor from outside whose gradient is wanted: a layer's input."""
        tensor = self.empty(elements, width, kind)
        self.order += 1
        tensor.node = Node(self.order, (), [], lambda gradient: ())
        return tensor

    # -- elementwise operators -------------------------------------------------------------------------------------

    def unary(self, x: Tensor, save: Literal["input", "output", "nothing"], width: int = 0, backward_temporaries: int = 0) -> Tensor:
        """y = f(x): silu and gelu save their input, tanh and rsqrt their output, neg and scalar multiplication nothing.

        `backward_temporaries`: further tensors of the input's size that are alive while its gradient is computed.
        """
        saved = self.save(x) if save == "input" and x.requires_grad else []
        result = self.empty(x.elements, width or x.width)
        if save == "output" and x.requires_grad:
            saved = self.save(result)
        elements, x_width = x.elements, x.width

        def backward(gradient: Tensor) -> tuple[Tensor]:
            held = [self.empty(elements, x_width) for _ in range(backward_temporaries)]
            gradient_x = self.empty(elements, x_width)
            held.clear()
            return (gradient_x,)

        return self.output(result, (x,), saved, backward)

    def cast(self, x: Tensor, width: int) -> Tensor:
        """x.to(dtype): the same tensor when it has that dtype already."""
        if x.width == width:
            return x
        result = self.empty(x.elements, width)
        elements, x_width = x.elements, x.width
        return self.output(result, (x,), [], lambda gradient: (self.empty(elements, x_width),))

    def view(self, x: Tensor) -> Tensor:
        """transpose, reshape of contiguous memory, slicing: the same storage, and the gradient passes as it is."""
        return self.output(Tensor(x.storage, x.elements, x.width), (x,), [], lambda gradient: (gradient,))

    def copy(self, x: Tensor, elements: Size | None = None) -> Tensor:
        """contiguous(), clone(), expand().reshape(): a new tensor; an expanded one sums its gradient."""
        size, old, width = elements or x.elements, x.elements, x.width
        result = self.empty(size, width)
        return self.output(result, (x,), [], lambda gradient: (gradient,) if size == old else (self.empty(old, width),))

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """a + b keeps nothing; both inputs receive the same gradient, cast where their dtype is narrower."""
        width = max(a.width, b.width)
        result = self.empty(larger(a.elements, b.elements), width)
        shapes = ((a.elements, a.width), (b.elements, b.width))

        def backward(gradient: Tensor) -> tuple[Tensor, ...]:
            return tuple(gradient if gradient.width == w and gradient.elements == e else self.empty(e, w) for e, w in shapes)

        return self.output(result, (a, b), [], backward)

    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        """a * b: each side is kept for the other's gradient; a gradient is as large as the product until it is summed."""
        width, elements = max(a.width, b.width), larger(a.elements, b.elements)
        saved = self.save(b if a.requires_grad else None, a if b.requires_grad else None)
        result = self.empty(elements, width)
        shapes = ((a.elements, a.width, a.requires_grad), (b.elements, b.width, b.requires_grad))

        def backward(gradient: Tensor) -> tuple[Tensor | None, ...]:
            products = [self.empty(elements, width) if needed else None for _, _, needed in shapes]
            return tuple(
                product if product is None or (size == elements and w == width) else self.empty(size, w)
                for product, (size, w, _) in zip(products, shapes, strict=True)
            )

        return self.output(result, (a, b), saved, backward)

    def mean(self, x: Tensor, features: int) -> Tensor:
        """mean(-1, keepdim=True): nothing is kept; the gradient is spread to x's size and divided (mean_backward)."""
        return self.sum_to(x, (x.elements[0] // features, 0, 0))

    def sum_to(self, x: Tensor, elements: Size) -> Tensor:
        """A reduction that keeps nothing and whose gradient is as large as x."""
        result = self.empty(elements, x.width)
        size, width = x.elements, x.width
        return self.output(result, (x,), [], lambda gradient: (self.empty(size, width),))

    # -- backward --------------------------------------------------------------------------------------------------

    def keep_gradient(self, gradient: Tensor, parameter_width: int) -> None:
        """A weight's gradient, cast to the weight's own dtype, stays in `.grad`.

        Under accumulation the old `.grad` is resident elsewhere and the new one is freed (AccumulateGrad adds in place).
        """
        gradient = self.cast(gradient, parameter_width)
        if not self.gradients_exist:
            gradient.storage.keep_as("gradients")
            self.gradients.append(gradient.storage)

    def run_backward(self, last: Node, gradient: Tensor) -> Tensor:
        """Every node once, latest first; a node's saved tensors and its gradient go when it is done.

        Returns the gradient of the leaf the pass began with.
        """
        pending: dict[Node, Tensor] = {last: gradient}
        del gradient
        while True:
            node = max(pending, key=lambda candidate: candidate.order)
            incoming = pending.pop(node)
            if not node.inputs:
                return incoming
            outgoing = node.backward(incoming)
            node.saved.clear()
            del incoming
            targets = list(zip(node.inputs, outgoing, strict=True))
            del outgoing
            self.pass_on(pending, targets)


    def pass_on(self, pending: dict[Node, Tensor], targets: list[tuple[Node | Parameter | None, Tensor | None]]) -> None:
        """Gradients go to their nodes; a parameter's goes into `.grad` at once, with its node's own memory freed already."""
        for target, flowing in targets:
            if isinstance(target, Node) and flowing is not None:
                pending[target] = accumulated(pending, target, flowing)
        while targets:
            target, flowing = targets.pop()
            if isinstance(target, Parameter) and flowing is not None:
                self.keep_gradient(flowing, target.width)


def larger(a: Size, b: Size) -> Size:
    """The broadcast shape of two operands, one of which broadcasts along a dimension of the other."""
    return a if a >= b else b


def accumulated(pending: dict[Node, Tensor], target: Node, flowing: Tensor) -> Tensor:
    """Two gradients of one tensor become one, in place in whichever nobody else holds (input_buffer.cpp, accumulate)."""
    held = pending.get(target)
    if held is None:
        return flowing
    shared = any(other is not held and other.storage is held.storage for node, other in pending.items() if node is not target)
    return flowing if shared else held

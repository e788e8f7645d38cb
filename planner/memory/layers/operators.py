"""PyTorch's operators as sizes: what each allocates, what it keeps for its backward pass, what that allocates.

Sources: pytorch v2.13 `tools/autograd/derivatives.yaml` (what is saved), `torch/csrc/autograd/FunctionsManual.cpp` (what a
backward pass allocates), `aten/src/ATen/native/` (Linear.cpp, LinearAlgebra.cpp, SoftMax.cpp, Dropout.cpp).
"""

from typing import Literal

from planner.memory.layers.autograd import Backward, Kind, Size, Tape, Tensor


def larger(a: Size, b: Size) -> Size:
    """The broadcast shape of two operands, one of which broadcasts along a dimension of the other."""
    return a if a >= b else b


def fresh(tape: Tape, x: Tensor, temporaries: int = 0) -> Backward:
    """A backward pass that makes one tensor of x's size, with so many more of that size alive beside it."""
    elements, width = x.elements, x.width

    def backward(gradient: Tensor) -> list[Tensor | None]:
        held = [tape.empty(elements, width) for _ in range(temporaries)]
        result = tape.empty(elements, width)
        held.clear()
        return [result]

    return backward


def unary(tape: Tape, x: Tensor, save: Literal["input", "output", "nothing"], temporaries: int = 0) -> Tensor:
    """y = f(x): silu and gelu save their input, tanh and rsqrt their output, neg and multiplication by a number nothing."""
    saved = tape.save(x) if save == "input" and x.requires_grad else []
    result = tape.empty(x.elements, x.width)
    if save == "output" and x.requires_grad:
        saved = tape.save(result)
    return tape.output(result, (x,), saved, fresh(tape, x, temporaries))


def scale(tape: Tape, x: Tensor) -> Tensor:
    """x * number, x / number, -x."""
    return unary(tape, x, "nothing")


def square(tape: Tape, x: Tensor) -> Tensor:
    """x.pow(2) and x**3; `pow_backward` holds the power and its product with the exponent."""
    return unary(tape, x, "input", temporaries=2)


def rsqrt(tape: Tape, x: Tensor) -> Tensor:
    """-0.5 * grad * result.pow(3)."""
    return unary(tape, x, "output", temporaries=2)


def plus_number(tape: Tape, x: Tensor) -> Tensor:
    """x + number: the gradient passes as it is."""
    return tape.output(tape.empty(x.elements, x.width), (x,), [], lambda gradient: [gradient])


def cast(tape: Tape, x: Tensor, width: int) -> Tensor:
    """x.to(dtype): the same tensor when it has that dtype already."""
    if x.width == width:
        return x
    return tape.output(tape.empty(x.elements, width), (x,), [], fresh(tape, x))


def view(tape: Tape, x: Tensor, elements: Size | None = None) -> Tensor:
    """transpose, view, expand within a row: the same storage; so is the gradient."""

    def backward(gradient: Tensor) -> list[Tensor | None]:
        return [Tensor(gradient.storage, gradient.elements, gradient.width, is_view=True)]

    return tape.output(Tensor(x.storage, elements or x.elements, x.width, is_view=True), (x,), [], backward)


def view_copied_back(tape: Tape, x: Tensor) -> Tensor:
    """A view whose gradient comes in another order of dimensions, so that its reshape must copy it (ViewBackward0)."""
    return tape.output(Tensor(x.storage, x.elements, x.width, is_view=True), (x,), [], fresh(tape, x))


def in_place(tape: Tape, x: Tensor) -> Tensor:
    """A kernel that writes its result over its input, and the gradient over the gradient."""
    return tape.output(Tensor(x.storage, x.elements, x.width), (x,), [], lambda gradient: [gradient])


def part(tape: Tape, x: Tensor, elements: Size) -> Tensor:
    """A slice or chunk: a view; its gradient is spread into zeros of the whole (slice_backward)."""
    return tape.output(Tensor(x.storage, elements, x.width, is_view=True), (x,), [], fresh(tape, x))


def clone(tape: Tape, x: Tensor) -> Tensor:
    """contiguous() of a strided tensor; the gradient passes as it is."""
    return tape.output(tape.empty(x.elements, x.width), (x,), [], lambda gradient: [gradient])


def expanded(tape: Tape, x: Tensor, elements: Size) -> Tensor:
    """expand().reshape(): a new, larger tensor; its gradient is summed."""
    return tape.output(tape.empty(elements, x.width), (x,), [], fresh(tape, x))


def cat(tape: Tape, parts: tuple[Tensor, ...], width: int = 0) -> Tensor:
    """Joined along the features, in the widest dtype or the given one; every part's gradient is a view."""
    width = width or max(x.width for x in parts)
    elements = (sum(x.elements[0] for x in parts), sum(x.elements[1] for x in parts), 0)
    sizes = tuple(x.elements for x in parts)

    def backward(gradient: Tensor) -> list[Tensor | None]:
        return [Tensor(gradient.storage, size, gradient.width, is_view=True) for size in sizes]

    return tape.output(tape.empty(elements, width), parts, [], backward)


def with_column(tape: Tape, x: Tensor, column: Tensor, heads: int) -> Tensor:
    """cat of scores and one expanded number a head; both gradients are views, the number's is summed."""
    size, wide, width = x.elements, (x.elements[0] + heads, x.elements[1], 0), max(x.width, column.width)

    def backward(gradient: Tensor) -> list[Tensor | None]:
        parts = (size, (heads, 0, 0))
        return [Tensor(gradient.storage, elements, gradient.width, is_view=True) for elements in parts]

    return tape.output(tape.empty(wide, width), (x, column), [], backward)


def add(tape: Tape, a: Tensor, b: Tensor) -> Tensor:
    """a + b keeps nothing; both inputs receive the same gradient."""
    result = tape.empty(larger(a.elements, b.elements), max(a.width, b.width))
    return tape.output(result, (a, b), [], lambda gradient: [gradient, gradient])


def subtract(tape: Tape, a: Tensor, b: Tensor) -> Tensor:
    """a - b: b's gradient is negated."""
    elements, width, needs_b = larger(a.elements, b.elements), max(a.width, b.width), b.requires_grad

    def backward(gradient: Tensor) -> list[Tensor | None]:
        return [gradient, tape.empty(elements, width) if needs_b else None]

    return tape.output(tape.empty(elements, width), (a, b), [], backward)


def mul(tape: Tape, a: Tensor, b: Tensor) -> Tensor:
    """a * b: each side is kept for the other's gradient; a gradient is as large as the product until it is summed."""
    elements, width = larger(a.elements, b.elements), max(a.width, b.width)
    needed = (a.requires_grad, b.requires_grad)
    saved = tape.save(a if needed[1] else None, b if needed[0] else None)

    def backward(gradient: Tensor) -> list[Tensor | None]:
        return [tape.empty(elements, width) if needs else None for needs in needed]

    return tape.output(tape.empty(elements, width), (a, b), saved, backward)


def reduce(tape: Tape, x: Tensor, elements: Size, width: int = 0) -> Tensor:
    """mean(-1): keeps nothing; the gradient is spread to x's size and divided."""
    return tape.output(tape.empty(elements, width or x.width), (x,), [], fresh(tape, x))


def maximum(tape: Tape, x: Tensor, elements: Size) -> tuple[Tensor, Tensor]:
    """max(-1): the values and their int64 positions, which are kept."""
    values, positions = tape.empty(elements, x.width), tape.empty(elements, 8)
    saved = tape.save(positions) if x.requires_grad else []
    return tape.output(values, (x,), saved, fresh(tape, x)), positions


def total(tape: Tape, x: Tensor, elements: Size, width: int = 0) -> Tensor:
    """sum(-1): keeps nothing; the gradient is expanded, which is a view."""
    size = x.elements

    def backward(gradient: Tensor) -> list[Tensor | None]:
        return [Tensor(gradient.storage, size, gradient.width, is_view=True)]

    return tape.output(tape.empty(elements, width or x.width), (x,), [], backward)


def dropout(tape: Tape, x: Tensor, on_cuda: bool) -> Tensor:
    """CUDA's native_dropout keeps a bool mask; the CPU multiplies by a mask of x's dtype (Dropout.cpp, `_dropout_impl`)."""
    mask = None if on_cuda else tape.empty(x.elements, x.width)
    result = tape.empty(x.elements, x.width)
    if mask is None:
        mask = tape.empty(x.elements, 1)
    saved = tape.save(mask) if x.requires_grad else []
    return tape.output(result, (x,), saved, fresh(tape, x))


def softmax(tape: Tape, x: Tensor, float32: bool = True) -> Tensor:
    """softmax(x, dtype=float32): casts x first (SoftMax.cpp: only fp16 on CUDA has a kernel that need not); keeps its result."""
    wide = cast(tape, x, 4) if float32 else x
    result = tape.empty(wide.elements, wide.width)
    return tape.output(result, (wide,), tape.save(result) if wide.requires_grad else [], fresh(tape, wide))


def index(tape: Tape, x: Tensor, indices: Tensor | None, elements: Size) -> Tensor:
    """x[indices]: a new tensor; the indices are kept, the gradient is added into zeros of x's size."""
    saved = tape.save(indices) if x.requires_grad else []
    return tape.output(tape.empty(elements, x.width), (x,), saved, fresh(tape, x))


def gather(tape: Tape, x: Tensor, indices: Tensor) -> Tensor:
    return index(tape, x, indices, indices.elements)


def masked(tape: Tape, x: Tensor, mask: Tensor) -> Tensor:
    """masked_fill: keeps its mask."""
    saved = tape.save(mask) if x.requires_grad else []
    return tape.output(tape.empty(x.elements, x.width), (x,), saved, fresh(tape, x))


def mm(
    tape: Tape,
    x: Tensor,
    weight: Tensor,
    out: Size,
    bias: Tensor | None = None,
    extra: Tensor | None = None,
    weight_kind: Kind = "autocast_copies",
) -> Tensor:
    """x @ weight (+ bias): x is kept if the weight learns, the weight (or autocast's copy of it) if x needs a gradient.

    The weight's gradient is made first. The bias's is the gradient itself, summed. `extra`: what a grouped product keeps besides.
    """
    in_size, weight_size, width = x.elements, weight.elements, x.width
    needs_x, needs_weight = x.requires_grad, weight.requires_grad
    saved = tape.save(x if needs_weight else None)
    saved += tape.save(weight if needs_x else None, kind=weight_kind)
    saved += tape.save(extra)

    def backward(gradient: Tensor) -> list[Tensor | None]:
        weight_gradient = tape.empty(weight_size, width) if needs_weight else None
        x_gradient = tape.empty(in_size, width) if needs_x else None
        return [x_gradient, weight_gradient] if bias_node is None else [x_gradient, weight_gradient, gradient]

    bias_node = bias.node if bias is not None else None
    inputs = (x, weight) if bias is None or bias_node is None else (x, weight, bias)
    return tape.output(tape.empty(out, width), inputs, saved, backward)


def folded(tape: Tape, elements: int, width: int, left: Tensor, right: Tensor) -> Tensor:
    """baddbmm(weight, left, right, alpha=number) of a frozen weight: both factors are kept; each one's gradient is made twice."""
    sizes, needed = (left.elements, right.elements), (left.requires_grad, right.requires_grad)
    saved = tape.save(left if needed[1] else None, right if needed[0] else None)

    def backward(gradient: Tensor) -> list[Tensor | None]:
        return [twice(tape, size, width) if needs else None for size, needs in zip(sizes, needed, strict=True)]

    return tape.output(tape.empty((0, 0, elements), width), (left, right), saved, backward)


def twice(tape: Tape, elements: Size, width: int) -> Tensor:
    """A product and its multiple."""
    product = tape.empty(elements, width)
    result = tape.empty(elements, width)
    del product
    return result


def bmm(tape: Tape, a: Tensor, b: Tensor, out: Size) -> Tensor:
    """Batched a @ b of two activations, each kept for the other's gradient."""
    sizes, width, needed = (a.elements, b.elements), a.width, (a.requires_grad, b.requires_grad)
    saved = tape.save(a if needed[1] else None, b if needed[0] else None)

    def backward(gradient: Tensor) -> list[Tensor | None]:
        return [tape.empty(size, width) if needs else None for size, needs in zip(sizes, needed, strict=True)]

    return tape.output(tape.empty(out, width), (a, b), saved, backward)


def split(tape: Tape, x: Tensor, features: tuple[int, ...]) -> tuple[Tensor, ...]:
    """chunk and split: views of one node, which joins their gradients in a new tensor (`split_with_sizes_backward`)."""
    elements, width = x.elements, x.width
    results = tuple(Tensor(x.storage, (count, 0, 0), width, is_view=True) for count in features)
    return tape.outputs(results, (x,), [], lambda *gradients: [tape.empty(elements, width)])

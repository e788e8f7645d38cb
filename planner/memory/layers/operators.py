"""Memory of PyTorch's operators: the output, the tensors saved for the backward pass, the backward pass' own tensors.

Sources: pytorch v2.13 `tools/autograd/derivatives.yaml` (what is saved), `torch/csrc/autograd/FunctionsManual.cpp`
(what a backward pass allocates), `aten/src/ATen/native/` (Linear.cpp, LinearAlgebra.cpp, SoftMax.cpp, Dropout.cpp).
"""

from typing import Literal

from planner.memory.layers.autograd import Backward, MemoryKind, Size, Tape, Tensor


def broadcast(a: Size, b: Size) -> Size:
    """Size of the result of an elementwise operator, where one operand broadcasts to the size of the other."""
    return a if a >= b else b


def same_size_backward(tape: Tape, x: Tensor, temporaries: int = 0) -> Backward:
    """Backward function that allocates a gradient of x's size, with `temporaries` more tensors of that size alive."""
    elements, width = x.elements, x.width

    def backward(gradient: Tensor) -> list[Tensor | None]:
        held = [tape.empty(elements, width) for _ in range(temporaries)]
        result = tape.empty(elements, width)
        held.clear()
        return [result]

    return backward


def unary(tape: Tape, x: Tensor, save: Literal["input", "output", "nothing"], temporaries: int = 0) -> Tensor:
    """y = f(x): silu and gelu save their input, tanh and rsqrt their output, neg and x * number nothing."""
    saved = tape.save(x) if save == "input" and x.requires_grad else []
    result = tape.empty(x.elements, x.width)
    if save == "output" and x.requires_grad:
        saved = tape.save(result)
    return tape.output(result, (x,), saved, same_size_backward(tape, x, temporaries))


def scale(tape: Tape, x: Tensor) -> Tensor:
    """x * number, x / number, -x: saves nothing."""
    return unary(tape, x, "nothing")


def power(tape: Tape, x: Tensor) -> Tensor:
    """x.pow(2) and x**3: saves x; `pow_backward` also holds a lower power of x and its product with the exponent."""
    return unary(tape, x, "input", temporaries=2)


def rsqrt(tape: Tape, x: Tensor) -> Tensor:
    """x.rsqrt(): saves its result; the gradient is -0.5 * grad * result.pow(3), with two temporaries."""
    return unary(tape, x, "output", temporaries=2)


def add_number(tape: Tape, x: Tensor) -> Tensor:
    """x + number: saves nothing; the gradient of x is the incoming gradient itself."""
    return tape.output(tape.empty(x.elements, x.width), (x,), [], lambda gradient: [gradient])


def cast(tape: Tape, x: Tensor, width: int) -> Tensor:
    """x.to(dtype): returns x itself if it has that dtype already."""
    return x if x.width == width else copy_to(tape, x, width)


def copy_to(tape: Tape, x: Tensor, width: int) -> Tensor:
    """x.to(dtype) of another dtype, also of one of the same width; its gradient is cast back."""
    return tape.output(tape.empty(x.elements, width), (x,), [], same_size_backward(tape, x))


def view(tape: Tape, x: Tensor, elements: Size | None = None) -> Tensor:
    """transpose, view, expand within a row: the result shares x's storage, the gradient shares the incoming one's."""

    def backward(gradient: Tensor) -> list[Tensor | None]:
        return [Tensor(gradient.storage, gradient.elements, gradient.width, is_view=True)]

    return tape.output(Tensor(x.storage, elements or x.elements, x.width, is_view=True), (x,), [], backward)


def view_with_copied_gradient(tape: Tape, x: Tensor) -> Tensor:
    """A view whose incoming gradient has another memory layout, so that reshaping it copies it (ViewBackward0)."""
    return tape.output(Tensor(x.storage, x.elements, x.width, is_view=True), (x,), [], same_size_backward(tape, x))


def in_place(tape: Tape, x: Tensor) -> Tensor:
    """A kernel that overwrites its input with the result, and the incoming gradient with the outgoing one."""
    return tape.output(Tensor(x.storage, x.elements, x.width), (x,), [], lambda gradient: [gradient])


def overwritten(tape: Tape, x: Tensor, elements: Size) -> Tensor:
    """A loss whose forward pass writes the gradient of x over x, and saves it: the backward pass allocates nothing."""
    saved = tape.save(x) if x.requires_grad else []
    size, width, held = x.elements, x.width, [x.storage]
    return tape.output(tape.empty(elements, x.width), (x,), saved, lambda gradient: [Tensor(held.pop(), size, width)])


def slice_view(tape: Tape, x: Tensor, elements: Size) -> Tensor:
    """x[..., a:b] and chunk: a view; the gradient is copied into zeros of x's size (slice_backward)."""
    return tape.output(Tensor(x.storage, elements, x.width, is_view=True), (x,), [], same_size_backward(tape, x))


def clone(tape: Tape, x: Tensor) -> Tensor:
    """contiguous() of a strided tensor: a copy; the gradient of x is the incoming gradient itself."""
    return tape.output(tape.empty(x.elements, x.width), (x,), [], lambda gradient: [gradient])


def expand_copy(tape: Tape, x: Tensor, elements: Size) -> Tensor:
    """expand().reshape(): a new, larger tensor; the backward pass sums its gradient into one of x's size."""
    return tape.output(tape.empty(elements, x.width), (x,), [], same_size_backward(tape, x))


def expand_view(tape: Tape, x: Tensor, elements: Size) -> Tensor:
    """expand().reshape() that needs no copy: of one head to many; the gradient is summed into one of x's size."""
    return tape.output(Tensor(x.storage, elements, x.width, is_view=True), (x,), [], same_size_backward(tape, x))


def cat(tape: Tape, parts: tuple[Tensor, ...], width: int = 0) -> Tensor:
    """torch.cat along the features, in the widest dtype or in `width`; every part's gradient is a view."""
    width = width or max(x.width for x in parts)
    elements = (sum(x.elements[0] for x in parts), sum(x.elements[1] for x in parts), 0)
    sizes = tuple(x.elements for x in parts)

    def backward(gradient: Tensor) -> list[Tensor | None]:
        return [Tensor(gradient.storage, size, gradient.width, is_view=True) for size in sizes]

    return tape.output(tape.empty(elements, width), parts, [], backward)


def cat_column(tape: Tape, x: Tensor, column: Tensor, heads: int) -> Tensor:
    """torch.cat of scores and one more column per head; both gradients are views, the column's is then summed."""
    size, wide, width = x.elements, (x.elements[0] + heads, x.elements[1], 0), max(x.width, column.width)

    def backward(gradient: Tensor) -> list[Tensor | None]:
        parts = (size, (heads, 0, 0))
        return [Tensor(gradient.storage, elements, gradient.width, is_view=True) for elements in parts]

    return tape.output(tape.empty(wide, width), (x, column), [], backward)


def add(tape: Tape, a: Tensor, b: Tensor) -> Tensor:
    """a + b: saves nothing; both inputs get the incoming gradient itself."""
    result = tape.empty(broadcast(a.elements, b.elements), max(a.width, b.width))
    return tape.output(result, (a, b), [], lambda gradient: [gradient, gradient])


def subtract(tape: Tape, a: Tensor, b: Tensor) -> Tensor:
    """a - b: saves nothing; a gets the incoming gradient itself, b a negated copy."""
    elements, width, needs_b = broadcast(a.elements, b.elements), max(a.width, b.width), b.requires_grad

    def backward(gradient: Tensor) -> list[Tensor | None]:
        return [gradient, tape.empty(elements, width) if needs_b else None]

    return tape.output(tape.empty(elements, width), (a, b), [], backward)


def mul(tape: Tape, a: Tensor, b: Tensor) -> Tensor:
    """a * b: saves each factor for the other's gradient; gradients have the product's size until they are summed."""
    elements, width = broadcast(a.elements, b.elements), max(a.width, b.width)
    needed = (a.requires_grad, b.requires_grad)
    saved = tape.save(a if needed[1] else None, b if needed[0] else None)

    def backward(gradient: Tensor) -> list[Tensor | None]:
        return [tape.empty(elements, width) if needs else None for needs in needed]

    return tape.output(tape.empty(elements, width), (a, b), saved, backward)


def quotient(tape: Tape, a: Tensor, b: Tensor) -> Tensor:
    """a / b of a `b` that needs no gradient: saves `b`."""
    saved = tape.save(b) if a.requires_grad else []
    return tape.output(tape.empty(a.elements, max(a.width, b.width)), (a,), saved, same_size_backward(tape, a))


def mean_last(tape: Tape, x: Tensor, elements: Size, width: int = 0) -> Tensor:
    """x.mean(-1): saves nothing; the gradient is expanded to x's size and divided, which allocates it."""
    return tape.output(tape.empty(elements, width or x.width), (x,), [], same_size_backward(tape, x))


def max_last(tape: Tape, x: Tensor, elements: Size) -> tuple[Tensor, Tensor]:
    """x.max(-1): the values and their int64 positions; saves the positions."""
    values, positions = tape.empty(elements, x.width), tape.empty(elements, 8)
    saved = tape.save(positions) if x.requires_grad else []
    return tape.output(values, (x,), saved, same_size_backward(tape, x)), positions


def sum_last(tape: Tape, x: Tensor, elements: Size) -> Tensor:
    """x.sum(-1): saves nothing; the gradient is expanded to x's size, which is a view."""
    size = x.elements

    def backward(gradient: Tensor) -> list[Tensor | None]:
        return [Tensor(gradient.storage, size, gradient.width, is_view=True)]

    return tape.output(tape.empty(elements, x.width), (x,), [], backward)


def dropout(tape: Tape, x: Tensor, on_cuda: bool) -> Tensor:
    """Dropout: CUDA's native_dropout saves a bool mask; the CPU multiplies by a mask of x's dtype and saves it.

    Source: Dropout.cpp, `_dropout_impl`.
    """
    mask = None if on_cuda else tape.empty(x.elements, x.width)
    result = tape.empty(x.elements, x.width)
    if mask is None:
        mask = tape.empty(x.elements, 1)
    saved = tape.save(mask) if x.requires_grad else []
    return tape.output(result, (x,), saved, same_size_backward(tape, x))


def softmax(tape: Tape, x: Tensor, on_cuda: bool, float32: bool = True, half: bool = False) -> Tensor:
    """softmax(x, dtype=float32): casts x to float32 first and saves the result.

    `half`: 16-bit numbers are float16, which CUDA's kernel reads itself, and whose gradient it writes: neither is in
    float32.

    CUDA's backward pass allocates the product of the gradient and the result besides its own result, for every dtype
    and size; the CPU's does not, nor does log_softmax.
    Source: pytorch 2.13, aten/src/ATen/native/cuda/SoftMax.cu, `softmax_backward_cuda_out` (`Tensor tmp = grad *
    output`) and SoftMax.cpp, `softmax` (`half_to_float`); results/softmax_backward.md.
    """
    reads_half = float32 and half and on_cuda and x.width == 2
    wide = cast(tape, x, 4) if float32 and not reads_half else x
    result_width = 4 if float32 else wide.width
    result = tape.empty(wide.elements, result_width)
    elements, width = wide.elements, wide.width

    def backward(gradient: Tensor) -> list[Tensor | None]:
        found = tape.empty(elements, width)
        if on_cuda:
            tape.empty(elements, result_width)  # the product
        return [found]

    return tape.output(result, (wide,), tape.save(result) if wide.requires_grad else [], backward)


def log_softmax(tape: Tape, x: Tensor) -> Tensor:
    """x.log_softmax(-1): saves its result."""
    return unary(tape, x, "output")


def logsumexp(tape: Tape, x: Tensor, elements: Size) -> Tensor:
    """x.logsumexp(0): saves x and its result; the gradient is that of the result times exp(x - result).

    Source: torch/csrc/autograd/FunctionsManual.cpp, `logsumexp_backward`.
    """
    result = tape.empty(elements, x.width)
    saved = tape.save(x, result) if x.requires_grad else []
    return tape.output(result, (x,), saved, same_size_backward(tape, x, temporaries=2))


def kl_div(tape: Tape, x: Tensor, target: Tensor) -> Tensor:
    """F.kl_div(x, target, log_target=True): target.exp() * (target - x)."""
    return mul(tape, unary(tape, target, "output"), subtract(tape, target, x))


def index(tape: Tape, x: Tensor, indices: Tensor | None, elements: Size) -> Tensor:
    """x[indices]: a new tensor; saves the indices; the gradient is added into zeros of x's size."""
    saved = tape.save(indices) if x.requires_grad else []
    return tape.output(tape.empty(elements, x.width), (x,), saved, same_size_backward(tape, x))


def gather(tape: Tape, x: Tensor, indices: Tensor) -> Tensor:
    """x.gather(-1, indices): saves the indices; the gradient is scattered into zeros of x's size."""
    return index(tape, x, indices, indices.elements)


def masked_fill(tape: Tape, x: Tensor, mask: Tensor) -> Tensor:
    """x.masked_fill(mask, number): saves the mask."""
    saved = tape.save(mask) if x.requires_grad else []
    return tape.output(tape.empty(x.elements, x.width), (x,), saved, same_size_backward(tape, x))


def mm(
    tape: Tape,
    x: Tensor,
    weight: Tensor,
    out: Size,
    bias: Tensor | None = None,
    extra: Tensor | None = None,
    weight_kind: MemoryKind = "autocast_copies",
) -> Tensor:
    """x @ weight (+ bias): saves x if the weight is trained, the weight (or autocast's copy) if x needs a gradient.

    The backward pass allocates the weight's gradient first. The bias' gradient is the incoming one, summed later.
    `extra` is one more saved tensor, for a grouped product.
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


def baddbmm(tape: Tape, elements: int, width: int, left: Tensor, right: Tensor) -> Tensor:
    """torch.baddbmm(weight, left, right, alpha=number) with a frozen weight: saves both factors.

    Each factor's gradient is a product that is then multiplied by `alpha` into a second tensor.
    """
    sizes, needed = (left.elements, right.elements), (left.requires_grad, right.requires_grad)
    saved = tape.save(left if needed[1] else None, right if needed[0] else None)

    def backward(gradient: Tensor) -> list[Tensor | None]:
        return [scaled_product(tape, size, width) if needs else None for size, needs in zip(sizes, needed, strict=True)]

    return tape.output(tape.empty((0, 0, elements), width), (left, right), saved, backward)


def scaled_product(tape: Tape, elements: Size, width: int) -> Tensor:
    """Allocate a product and its multiple by a number; the product is freed."""
    product = tape.empty(elements, width)
    result = tape.empty(elements, width)
    del product
    return result


def bmm(tape: Tape, a: Tensor, b: Tensor, out: Size) -> Tensor:
    """torch.bmm(a, b) of two activations: saves each factor for the other's gradient."""
    sizes, width, needed = (a.elements, b.elements), a.width, (a.requires_grad, b.requires_grad)
    saved = tape.save(a if needed[1] else None, b if needed[0] else None)

    def backward(gradient: Tensor) -> list[Tensor | None]:
        return [tape.empty(size, width) if needs else None for size, needs in zip(sizes, needed, strict=True)]

    return tape.output(tape.empty(out, width), (a, b), saved, backward)


def split(tape: Tape, x: Tensor, features: tuple[int, ...]) -> tuple[Tensor, ...]:
    """chunk and split: views with one node, which copies their gradients into one (`split_with_sizes_backward`)."""
    elements, width = x.elements, x.width
    results = tuple(Tensor(x.storage, (count, 0, 0), width, is_view=True) for count in features)
    return tape.outputs(results, (x,), [], lambda *gradients: [tape.empty(elements, width)])

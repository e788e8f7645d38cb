"""Dense MLPs: with or without a gate, as separate operators or as a fused kernel of Liger.

Sources: transformers 5.23 `activations.py`, `models/llama/modeling_llama.py` (`LlamaMLP`), `models/phi3` (`Phi3MLP`);
liger-kernel `ops/swiglu.py`, `ops/geglu.py`.
"""

from planner.memory.layers import operators as op
from planner.memory.layers.autograd import Tape, Tensor
from planner.memory.layers.linear import linear
from planner.memory.layers.recipe import Recipe
from planner.models.layers import Activation, Mlp


def activate(tape: Tape, recipe: Recipe, activation: Activation, x: Tensor) -> Tensor:
    """Activation function: silu and gelu save their input, relu its result; gelu_new is several operators."""
    if activation == "gelu_new":
        return gelu_new(tape, recipe, x)
    if activation == "quick_gelu":  # x * sigmoid(1.702 * x) (activations.py, `QuickGELUActivation`)
        gate = op.scale(tape, x)
        gate = op.unary(tape, gate, "output")
        return op.mul(tape, x, gate)
    return op.unary(tape, x, "output" if activation == "relu" else "input")


def gelu_new(tape: Tape, recipe: Recipe, x: Tensor) -> Tensor:
    """0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3))) (activations.py, NewGELUActivation).

    Autocast on CUDA computes powers, and therefore all later operators, in float32 (autocast_mode.h, `AT_FORALL_FP32`);
    autocast on the CPU does not.
    """
    half = op.scale(tape, x)
    cubed = op.power(tape, op.cast(tape, x, 4 if recipe.autocast_width and recipe.on_cuda else x.width))
    weighted = op.scale(tape, cubed)
    del cubed
    summed = op.add(tape, x, weighted)
    del weighted
    inner = op.scale(tape, summed)
    del summed
    outer = op.unary(tape, inner, "output")
    del inner
    shifted = op.add_number(tape, outer)
    del outer
    return op.mul(tape, half, shifted)


def mlp(tape: Tape, recipe: Recipe, block: Mlp, x: Tensor, flat: bool = False) -> Tensor:
    """down(act(gate(x)) * up(x)), or without a gate down(act(up(x))); phi3 has gate and up in one projection."""
    down = block.linears[-1]
    held: list[Tensor] = []  # phi3's local variable: a view of the gate, which keeps the fused projection alive
    if not block.gated:
        h = linear(tape, recipe, block.linears[0], x, flat)
        h = activate(tape, recipe, block.activation, h)
    elif "mlp" in recipe.liger_blocks:
        h, *held = liger_gate(tape, recipe, block, x)
    elif len(block.linears) == 2:
        h, *held = gate_of_fused_projection(tape, recipe, block, x)
    else:
        h = gate_product(tape, recipe, block, x, flat)
    result = linear(tape, recipe, down, h, flat)
    del held
    return result


def gate_product(tape: Tape, recipe: Recipe, block: Mlp, x: Tensor, flat: bool) -> Tensor:
    """act(gate(x)) * up(x), from two projections."""
    gate = linear(tape, recipe, block.linears[0], x, flat)
    active = activate(tape, recipe, block.activation, gate)
    del gate
    up = linear(tape, recipe, block.linears[1], x, flat)
    return op.mul(tape, active, up)


def gate_of_fused_projection(tape: Tape, recipe: Recipe, block: Mlp, x: Tensor) -> tuple[Tensor, Tensor]:
    """up * act(gate), from the two halves of one projection's output; returns also the gate, a view of that output."""
    together = linear(tape, recipe, block.linears[0], x)
    gate, up = op.split(tape, together, (block.intermediate_size, block.intermediate_size))
    active = activate(tape, recipe, block.activation, gate)
    return op.mul(tape, up, active), gate


def liger_gate(tape: Tape, recipe: Recipe, block: Mlp, x: Tensor) -> tuple[Tensor, ...]:
    """Liger's SwiGLU and GeGLU: save only gate and up; the backward pass overwrites both with their gradients.

    Returns also the halves of a fused projection, local variables that keep its output alive.

    Source: liger-kernel 0.8.5, ops/swiglu.py, `LigerSiLUMulFunction`; transformers/swiglu.py, `LigerPhi3SwiGLUMLP`.
    """
    halves: tuple[Tensor, ...] = ()
    if len(block.linears) == 2:  # a fused projection, whose halves are copied (ops/utils.py, `ensure_contiguous`)
        halves = tuple(op.split(tape, linear(tape, recipe, block.linears[0], x), (block.intermediate_size,) * 2))
        gate, up = (op.clone(tape, half) for half in halves)
    else:
        gate, up = linear(tape, recipe, block.linears[0], x), linear(tape, recipe, block.linears[1], x)
    product = tape.empty(gate.elements, gate.width)
    saved = tape.save(gate, up)
    elements, width = gate.elements, gate.width

    def backward(gradient: Tensor) -> list[Tensor | None]:
        return [Tensor(storage, elements, width) for storage in saved]

    return tape.output(product, (gate, up), saved, backward), *halves

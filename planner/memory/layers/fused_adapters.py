"""Axolotl's fused kernels of LoRA: one autograd function for the projections of one input, and one for the whole MLP.

PEFT's layers keep the input in float32 for each adapter, the product with A and the scaled product with B. These
functions add LoRA's product in place, keep the input once and the adapters in its dtype, and the MLP keeps gate and up
instead of the activation's output and their product.

Source: axolotl 0.21, kernels/lora.py (`LoRA_QKV`, `LoRA_O`, `LoRA_MLP`, `matmul_lora`, `_lora_parameter_gradients`),
kernels/swiglu.py, monkeypatch/lora_kernels.py (which layers have them).
"""

from planner.memory.layers import operators as op
from planner.memory.layers.autograd import Storage, Tape, Tensor
from planner.memory.layers.recipe import Recipe, tokens
from planner.models.layers import Linear, Mlp
from planner.models.lora_targets import AdapterKernel


def fuses(recipe: Recipe, kernel: AdapterKernel, modules: tuple[Linear, ...]) -> bool:
    """Return whether a kernel replaces these modules, which it does if each of them has an adapter."""
    return kernel in recipe.adapter_kernels and all(module.name in recipe.lora_targets for module in modules)


def fused_projections(tape: Tape, recipe: Recipe, modules: tuple[Linear, ...], x: Tensor) -> tuple[Tensor, ...]:
    """The projections of x with their adapters: queries, keys and values together, or the output projection.

    kept      x, dropout(x) where it differs, A and B of each module in x's dtype
    backward  gradients of A and B, grad @ B of each module, and the gradients of x and dropout(x)
    """
    dropped = op.dropout(tape, x, recipe.on_cuda) if recipe.lora_dropout else x
    results = tuple(adapted_product(tape, recipe, module, x.width, module.out_features) for module in modules)
    saved = tape.save(x, dropped) + narrow_adapters(tape, recipe, modules, x.width)
    in_size, x_width, compute = x.elements, x.width, recipe.compute_width

    def backward(*gradients: Tensor) -> list[Tensor | None]:
        held = [of_adapter(tape, recipe, module, x_width) for module in modules]
        weight = dequantized(tape, recipe, modules[0])
        inputs: list[Tensor | None] = [tape.empty(in_size, compute)]
        del weight
        if recipe.lora_dropout:
            inputs.append(tape.empty(in_size, compute))
        return inputs + [gradient for _, *both in held for gradient in both]

    inputs = (x, dropped) if recipe.lora_dropout else (x,)
    return tape.outputs(results, inputs + trained(tape, recipe, modules), saved, backward)


def fused_mlp(tape: Tape, recipe: Recipe, block: Mlp, x: Tensor) -> Tensor:
    """down(act(gate(x)) * up(x)) with the adapters of the three.

    kept      x, dropout(x) where it differs, gate, up, A and B of each module in x's dtype
    backward  one new buffer for the gradient of down's input, which the kernel overwrites with act(gate) * up; the
              gradients of gate and up overwrite these. Then as `fused_projections`
    """
    gate_module, up_module, down_module = block.linears
    dropped = op.dropout(tape, x, recipe.on_cuda) if recipe.lora_dropout else x
    gate, up = (adapted_product(tape, recipe, each, x.width, each.out_features) for each in block.linears[:2])
    hidden = tape.empty(gate.elements, gate.width)
    result = adapted_product(tape, recipe, down_module, x.width, down_module.out_features)
    saved = tape.save(x, dropped, gate, up) + narrow_adapters(tape, recipe, block.linears, x.width)
    del hidden, gate, up
    in_size, x_width, compute = x.elements, x.width, recipe.compute_width

    def backward(gradient: Tensor) -> list[Tensor | None]:
        inner = adapted_product(tape, recipe, down_module, compute, down_module.in_features)
        held = [of_adapter(tape, recipe, module, x_width) for module in (down_module, up_module, gate_module)]
        weight = dequantized(tape, recipe, up_module)
        inputs: list[Tensor | None] = [tape.empty(in_size, compute)]
        del weight
        if recipe.lora_dropout:
            inputs.append(tape.empty(in_size, compute))
        del inner
        return inputs + [gradient for _, *both in reversed(held) for gradient in both]

    inputs = (x, dropped) if recipe.lora_dropout else (x,)
    modules = (gate_module, up_module, down_module)
    return tape.output(result, inputs + trained(tape, recipe, modules), saved, backward)


def adapted_product(tape: Tape, recipe: Recipe, module: Linear, width: int, out_features: int) -> Tensor:
    """`matmul_lora`: the base's product, to which LoRA's is added in place."""
    weight = dequantized(tape, recipe, module)
    result = tape.empty(tokens(out_features), recipe.compute_width)
    del weight
    pair = adapters_in(tape, recipe, module, width)
    tape.empty(tokens(recipe.lora_r), recipe.compute_width)
    del pair
    return result


def dequantized(tape: Tape, recipe: Recipe, module: Linear) -> Tensor:
    """Return a copy of a 4-bit weight in 16 bits, or the weight itself if it is not quantized."""
    if recipe.quantized == "none":
        return tape.weight(module.weight_params, recipe.weight_width, False)
    return tape.empty((0, 0, module.weight_params), recipe.quantized_width or recipe.weight_width)


def adapters_in(tape: Tape, recipe: Recipe, module: Linear, width: int) -> tuple[Tensor, ...]:
    """Return copies of A and B in a dtype; () if they are stored in it."""
    if recipe.adapter_width == width:
        return ()
    sizes = (module.in_features, module.out_features)
    return tuple(tape.empty((0, 0, recipe.lora_r * size), width) for size in sizes)


def narrow_adapters(tape: Tape, recipe: Recipe, modules: tuple[Linear, ...], width: int) -> list[Storage | None]:
    """Save A and B of each module in a dtype."""
    return tape.save(*(each for module in modules for each in adapters_in(tape, recipe, module, width)))


def of_adapter(tape: Tape, recipe: Recipe, module: Linear, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return grad @ B, which the gradient of x uses again, and the gradients of A and B; frees A @ x."""
    first = tape.empty(tokens(recipe.lora_r), width)
    of_a = tape.empty((0, 0, recipe.lora_r * module.in_features), recipe.adapter_width)
    second = tape.empty(tokens(recipe.lora_r), width)
    of_b = tape.empty((0, 0, recipe.lora_r * module.out_features), recipe.adapter_width)
    del second
    return first, of_a, of_b


def trained(tape: Tape, recipe: Recipe, modules: tuple[Linear, ...]) -> tuple[Tensor, ...]:
    """Return the parameters A and B of each module, which get gradients."""
    sizes = (recipe.lora_r * size for module in modules for size in (module.in_features, module.out_features))
    return tuple(tape.weight(size, recipe.adapter_width, True) for size in sizes)

"""Linear layers with what tuning puts on them: LoRA's update, a quantized base.

Sources: pytorch 2.13 `aten/src/ATen/native/Linear.cpp`, `aten/src/ATen/autocast_mode.h` (`cached_cast`); peft 0.21.2
`tuners/lora/layer.py` (`Linear.forward`) and `tuners/lora/bnb.py`; bitsandbytes 0.50.2 `autograd/_functions.py`.
"""

from dataclasses import dataclass

from planner.memory.layers import operators as op
from planner.memory.layers.autograd import Tape, Tensor
from planner.memory.layers.recipe import Recipe, tokens
from planner.models.shape import Linear


def linear(tape: Tape, recipe: Recipe, module: Linear, x: Tensor, flat: bool = False) -> Tensor:
    """A projection with whatever tuning put on it: base layer, then LoRA's update (peft `Linear.forward`).

    `flat`: rows and length are one dimension already, so that no view stands between (a view's gradient is not added to in place).
    """
    adapted = recipe.lora_r > 0 and module.name in recipe.lora_targets
    if recipe.quantized == "none":
        result = plain_linear(tape, recipe, module, x, flat)
    else:
        result = quantized_linear(tape, recipe, module, x)
        if adapted and recipe.quantized == "4bit":
            result = op.clone(tape, result)  # peft bnb.py:531, a defensive copy
    if not adapted:
        return result
    width = result.width
    result = lora_update(tape, recipe, module, x, result, flat)
    return op.cast(tape, result, width)


def plain_linear(tape: Tape, recipe: Recipe, module: Linear, x: Tensor, flat: bool) -> Tensor:
    return product(tape, recipe, module, x, Stored(recipe.weight_width, recipe.trainable), flat)


@dataclass(frozen=True, slots=True)
class Stored:
    """How a weight lies in memory: the bytes of an element, and whether it learns."""

    width: int
    trainable: bool


def product(tape: Tape, recipe: Recipe, module: Linear, x: Tensor, stored: Stored, flat: bool) -> Tensor:
    """F.linear(x, weight, bias).

    Under autocast a weight of another dtype is copied; the copy of one that learns lives until autocast ends. The bias is
    cast first, the input last.
    """
    compute = recipe.autocast_width or max(stored.width, x.width)
    offset = None
    if module.bias:
        offset = cast_weight(tape, tape.weight(module.out_features, stored.width, stored.trainable), compute)
    weight = cast_weight(tape, tape.weight(module.weight_params, stored.width, stored.trainable), compute)
    narrow = op.cast(tape, x, compute)
    if flat:
        return op.mm(tape, narrow, op.view(tape, weight), tokens(module.out_features), offset)
    if offset is None:
        weight = op.view(tape, weight)
        rows = op.view(tape, narrow)
    else:
        rows = op.view(tape, narrow)
        weight = op.view(tape, weight)
    del narrow
    return op.view(tape, op.mm(tape, rows, weight, tokens(module.out_features), offset))


def cast_weight(tape: Tape, weight: Tensor, width: int) -> Tensor:
    """autocast's copy of a weight, kept for the rest of the forward pass if the weight itself learns (`cached_cast`)."""
    if weight.width == width:
        return weight
    copy = op.cast(tape, weight, width)
    if weight.requires_grad and weight.storage is None and copy.storage is not None:
        copy.storage.keep_as("autocast_copies")
        tape.autocast_cache.append(copy)
    return copy


def lora_update(tape: Tape, recipe: Recipe, module: Linear, x: Tensor, result: Tensor, flat: bool) -> Tensor:
    """result + lora_B(lora_A(dropout(x))) * scaling, x in the adapter's dtype (`_cast_input_dtype`).

    A 4-bit base leaves that cast to autocast where there is one (bnb.py:543).
    """
    rank, width = recipe.lora_r, recipe.adapter_width
    first = Linear(name="lora_A", in_features=module.in_features, out_features=rank)
    second = Linear(name="lora_B", in_features=rank, out_features=module.out_features)
    if recipe.quantized == "none" or not recipe.autocast_width:
        x = op.cast(tape, x, width)
    dropped = op.dropout(tape, x, recipe.on_cuda) if recipe.lora_dropout else x
    down = product(tape, recipe, first, dropped, Stored(width, True), flat)
    del dropped
    up = product(tape, recipe, second, down, Stored(width, True), flat)
    del down
    update = op.scale(tape, up)
    del up
    return op.add(tape, result, update)


def quantized_linear(tape: Tape, recipe: Recipe, module: Linear, x: Tensor) -> Tensor:
    """A frozen quantized projection: the weight is dequantized for each pass and freed.

    4-bit computes in `bnb_4bit_compute_dtype`, which TRL sets to the load dtype (trl/trainer/utils.py, `get_quantization_config`),
    and casts back to x's dtype (bitsandbytes `Linear4bit.forward`). Above 1,536 tokens it dequantizes (backends/cuda/ops.py,
    `_dequant_linear_fallback`); nothing of x is kept. The backward pass dequantizes in the quantization state's dtype and casts
    (`MatMul4Bit.backward`). GPTQ and AWQ dequantize to 16 bits.
    """
    if recipe.quantized == "8bit":
        return int8_linear(tape, module, x)
    elements, stored = (0, 0, module.weight_params), recipe.weight_width
    compute = stored if recipe.quantized == "4bit" else recipe.compute_width
    narrow = op.cast(tape, x, compute)
    dequantized = tape.empty(elements, compute)
    result = tape.empty(tokens(module.out_features), compute)
    del dequantized
    in_size = x.elements

    def backward(gradient: Tensor) -> list[Tensor | None]:
        first = tape.empty(elements, stored)
        weight = first if stored == compute else tape.empty(elements, compute)
        del first
        gradient_x = tape.empty(in_size, compute)
        del weight
        return [gradient_x]

    result = tape.output(result, (narrow,), [], backward)
    return op.cast(tape, result, x.width)


def int8_linear(tape: Tape, module: Linear, x: Tensor) -> Tensor:
    """`MatMul8bitLt`: x cast to fp16, quantized, int32 products, scaled into x's dtype; backward dequantizes in x's dtype.

    It keeps x as an attribute of its context, so that checkpointing does not drop it (autograd/_functions.py:187).
    """
    held = tape.hold(x) if x.requires_grad else []
    half = tape.empty(x.elements, 2) if x.width != 2 else None
    quantized = tape.empty(x.elements, 1)
    del half
    products = tape.empty(tokens(module.out_features), 4)
    result = tape.empty(tokens(module.out_features), x.width)
    del quantized, products
    in_size, width, elements = x.elements, x.width, (0, 0, module.weight_params)

    def backward(gradient: Tensor) -> list[Tensor | None]:
        weight = tape.empty(elements, width)
        gradient_x = tape.empty(in_size, width)
        del weight
        return [gradient_x]

    return tape.output(result, (x,), held, backward)

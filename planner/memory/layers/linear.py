"""Linear layers: plain or quantized, with or without a LoRA or DoRA adapter.

Sources: pytorch 2.13 `aten/src/ATen/native/Linear.cpp`, `aten/src/ATen/autocast_mode.h` (`cached_cast`); peft 0.21.2
`tuners/lora/layer.py` (`Linear.forward`), `tuners/lora/bnb.py` and `tuners/lora/dora.py`; bitsandbytes 0.50.2
`autograd/_functions.py`.
"""

from collections.abc import Callable

from msgspec import Struct

from planner.memory.dtypes import FLOAT32_BYTES, SIXTEEN_BIT_BYTES
from planner.memory.layers import operators as op
from planner.memory.layers.autograd import Size, Tape, Tensor
from planner.memory.layers.recipe import GPTQ, KEEPS_WEIGHT, Recipe, tokens
from planner.models.layers import Linear
from planner.quantizations import QuantizedLinear


def linear(tape: Tape, recipe: Recipe, module: Linear, x: Tensor, flat: bool = False) -> Tensor:
    """One projection: the plain or quantized base layer, then LoRA's update if it is targeted (peft `Linear.forward`).

    `flat`: x has one dimension for rows and length, so that F.linear needs no view around its product. It matters
    because autograd does not add a second gradient in place into a view.
    """
    adapted = recipe.lora_r > 0 and module.name in recipe.lora_targets
    if recipe.quantized == "none":
        own = StoredWeight(recipe.weight_width, recipe.trainable)
        result = functional_linear(tape, recipe, module, x, own, flat)
    elif recipe.quantized in KEEPS_WEIGHT:
        result = dequantized_linear(tape, recipe, module, x)
    else:
        result = quantized_linear(tape, recipe, module, x)
        if adapted and recipe.quantized == "4bit":
            result = op.clone(tape, result)  # peft bnb.py, `Linear4bit.forward`, a defensive copy
    if not adapted:
        return result
    width = result.width
    update = dora_update if recipe.magnitude_width else lora_update
    result = update(tape, recipe, module, x, result, flat)
    return result if keeps_wide_result(recipe) else op.cast(tape, result, width)


def keeps_wide_result(recipe: Recipe) -> bool:
    """True if PEFT does not cast an adapter's result back to the base layer's dtype: with bitsandbytes under autocast.

    It matters for DoRA only: its float32 magnitudes make the result, and all that follows in the residual stream,
    float32.
    Source: peft 0.21.2, tuners/lora/bnb.py, `Linear4bit.forward` (`requires_conversion`).
    """
    return recipe.quantized in ("4bit", "8bit") and recipe.autocast_width > 0


class StoredWeight(Struct, frozen=True):
    """Bytes of one element of a weight, and whether it is trained."""

    width: int
    trainable: bool


def functional_linear(
    tape: Tape, recipe: Recipe, module: Linear, x: Tensor, stored: StoredWeight, flat: bool
) -> Tensor:
    """F.linear(x, weight, bias).

    Autocast casts the bias first, then the weight, then x, each if its dtype differs. The copy of a trainable weight
    lives until autocast ends (`cast_weight`). The sum over the GPUs that share the projection (`Linear.split`) is a new
    tensor: of the gradient of x, or of the result.
    Source: torch 2.13, distributed/_functional_collectives.py, `all_reduce`.
    """
    if module.split == "out":
        x = op.view_with_copied_gradient(tape, x)
    compute = recipe.autocast_width or max(stored.width, x.width)
    offset = None
    if module.bias:
        offset = cast_weight(tape, recipe, tape.weight(module.out_features, stored.width, stored.trainable), compute)
    weight = cast_weight(tape, recipe, tape.weight(module.weight_params, stored.width, stored.trainable), compute)
    saves_input = recipe.saves_frozen_inputs and not stored.trainable
    result = product(tape, x, weight, tokens(module.out_features), flat, offset, saves_input)
    return op.clone(tape, result) if module.split == "in" else result


def product(
    tape: Tape,
    x: Tensor,
    weight: Tensor,
    out: Size,
    flat: bool,
    offset: Tensor | None = None,
    saves_input: bool = False,
) -> Tensor:
    """F.linear of a weight in the compute dtype, to which x is cast; `saves_input`: even if the weight is frozen."""
    narrow = op.cast(tape, x, weight.width)
    extra = narrow if saves_input and x.requires_grad else None
    if flat:
        return op.mm(tape, narrow, op.view(tape, weight), out, offset, extra)
    if offset is None:
        weight = op.view(tape, weight)
        rows = op.view(tape, narrow)
    else:
        rows = op.view(tape, narrow)
        weight = op.view(tape, weight)
    del narrow
    return op.view(tape, op.mm(tape, rows, weight, out, offset, extra))


def cast_weight(tape: Tape, recipe: Recipe, weight: Tensor, width: int) -> Tensor:
    """Autocast's copy of a weight; that of a trainable weight is cached until the forward pass ends (`cached_cast`)."""
    if weight.width == width and not recipe.mixes_halves:
        return weight
    copy = op.copy_to(tape, weight, width)
    if weight.requires_grad and weight.storage is None and copy.storage is not None:
        copy.storage.keep_as("autocast_copies")
        tape.autocast_cache.append(copy)
    return copy


def lora_update(tape: Tape, recipe: Recipe, module: Linear, x: Tensor, result: Tensor, flat: bool) -> Tensor:
    """result + lora_B(lora_A(dropout(x))) * scaling, with x cast to the adapter's dtype (`_cast_input_dtype`).

    With a quantized base and autocast, PEFT skips that cast and autocast does its own (bnb.py, `Linear4bit.forward`).
    """
    rank, width = recipe.lora_r, recipe.adapter_width
    rows, columns = module.split == "in", module.split == "out"
    first = Linear(name="lora_A", in_features=module.in_features, out_features=rank, split="in" if rows else "")
    second = Linear(name="lora_B", in_features=rank, out_features=module.out_features, split="out" if columns else "")
    x = adapter_input(tape, recipe, x)
    dropped = op.dropout(tape, x, recipe.on_cuda) if recipe.lora_dropout else x
    down = functional_linear(tape, recipe, first, dropped, StoredWeight(width, True), flat)
    del dropped
    up = functional_linear(tape, recipe, second, down, StoredWeight(width, True), flat)
    del down
    update = op.scale(tape, up)
    del up
    return op.add(tape, result, update)


def adapter_input(tape: Tape, recipe: Recipe, x: Tensor) -> Tensor:
    """x in the adapter's dtype, which a quantized base under autocast leaves as it is, unless it is GPTQ's.

    Source: peft 0.21.2, tuners/lora/bnb.py and awq.py (`requires_conversion`), gptq.py, `GPTQLoraLinear.forward`.
    """
    casts = recipe.quantized in ("none", *GPTQ) or not recipe.autocast_width
    return op.cast(tape, x, recipe.adapter_width) if casts else x


def dora_update(tape: Tape, recipe: Recipe, module: Linear, x: Tensor, result: Tensor, flat: bool) -> Tensor:
    """result + (m - 1) * base + m * lora_B(lora_A(x)) * scaling, with m = magnitude / norm of the rows of W + B A.

    The norms take B A from the adapters' pass over a unit matrix of in x in, and two matrices of out x in of x's dtype
    beside it; all of them are freed with the layer's forward pass. The graph keeps `base` and LoRA's product. Without
    a dropout module `base` is `result`, less its bias; with one a second product of the dropped x and the weight, which
    is dequantized for it and, in the compute dtype, kept for the gradient of x.

    Source: peft 0.21.2, tuners/lora/variants.py, `DoraLinearVariant.forward`, tuners/lora/dora.py, `DoraLinearLayer`.

    Example: Qwen2.5-7B's down_proj, 18,944 inputs: the unit matrix alone is 1.34 GiB in float32.
    """
    width, compute = recipe.adapter_width, recipe.autocast_width or recipe.adapter_width
    size, out = (0, 0, module.weight_params), module.out_features
    x = adapter_input(tape, recipe, x)
    dropped = op.dropout(tape, x, recipe.on_cuda) if recipe.lora_dropout else x
    down = cast_weight(tape, recipe, tape.weight(recipe.lora_r * module.in_features, width, True), compute)
    unit = tape.empty((0, 0, module.in_features**2), width)
    first = product(tape, unit, down, (0, 0, recipe.lora_r * module.in_features), True)
    up = cast_weight(tape, recipe, tape.weight(recipe.lora_r * out, width, True), compute)
    update = product(tape, first, up, size, True)
    del unit, first
    update = op.cast(tape, op.view(tape, update), dropped.width)
    weight = op.cast(tape, stored_weight(tape, recipe, module), dropped.width)
    norms = row_norms(tape, recipe, module, weight)
    magnitude = op.view(tape, op.quotient(tape, tape.weight(out, recipe.magnitude_width, True), norms))
    added = product(tape, product(tape, dropped, down, tokens(recipe.lora_r), flat), up, tokens(out), flat)
    if recipe.dora_product:
        base = product(tape, dropped, op.cast(tape, weight, compute), tokens(out), flat)
    else:
        base = op.subtract(tape, result, tape.weight(out, recipe.weight_width, False)) if module.bias else result
    scaled_base = op.mul(tape, op.add_number(tape, magnitude), base)
    scaled_update = op.scale(tape, op.mul(tape, magnitude, added))
    del base, added, update, weight, norms
    change = op.add(tape, scaled_base, scaled_update)
    del scaled_base, scaled_update
    return op.add(tape, result, change)


def stored_weight(tape: Tape, recipe: Recipe, module: Linear) -> Tensor:
    """The base layer's weight as `dequantize_module_weight` returns it: itself, or 4-bit and 8-bit ones dequantized."""
    if recipe.quantized == "none":
        return tape.weight(module.weight_params, recipe.weight_width, False)
    return tape.empty((0, 0, module.weight_params), recipe.quantized_width or recipe.weight_width)


def row_norms(tape: Tape, recipe: Recipe, module: Linear, weight: Tensor) -> Tensor:
    """The norms of the rows of W + scaling * B A, beside the scaled matrix and the sum.

    CUDA's kernel reads 16-bit numbers into the float32 norms that autocast wants (pytorch 2.13,
    aten/src/ATen/native/ReduceOpsUtils.h, `make_reduction`, `gpu_lowp_to_f32`).
    """
    scaled = tape.empty(weight.elements, weight.width)
    total = tape.empty(weight.elements, weight.width)
    del scaled
    width = FLOAT32_BYTES if recipe.autocast_width and recipe.on_cuda else total.width
    return op.cast(tape, tape.empty((0, 0, module.out_features), width), weight.width)


def quantized_linear(tape: Tape, recipe: Recipe, module: Linear, x: Tensor) -> Tensor:
    """A frozen quantized projection: each pass dequantizes the weight into a temporary; x is not saved.

    4-bit: computes in `bnb_4bit_compute_dtype`, which TRL sets to the dtype the model is loaded in
    (trl/trainer/utils.py, `get_quantization_config`), and casts the result back to x's dtype (bitsandbytes
    `Linear4bit.forward`). It dequantizes above 1,536 tokens (backends/cuda/ops.py, `_dequant_linear_fallback`), which
    is assumed here. The backward pass dequantizes in the dtype of the quantization state and casts that copy
    (`MatMul4Bit.backward`). AWQ: dequantizes to 16 bits, or see
    `dequantized_linear`. 8-bit: `int8_linear`.
    """
    if recipe.quantized == "8bit":
        return int8_linear(tape, recipe, module, x)
    elements, stored = (0, 0, module.weight_params), recipe.quantized_width or recipe.weight_width
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


def dequantized_linear(tape: Tape, recipe: Recipe, module: Linear, x: Tensor) -> Tensor:
    """x @ W with W of GPTQ, or AWQ, dequantized by PyTorch, which autograd keeps for the gradient of x.

        n parameters: 2n bytes kept in the layer's graph; beside them, until the product,
        gptq        2n    float16 W, of the scales' dtype, unless it is the compute dtype (torch.compile fuses the rest)
        gptq_eager  4n    codes n, W - zeros n, scales 2n
        awq_eager   26n   codes, zeros and their difference 8n each, as shifts by int64 numbers are int64; scales 2n

    Source: gptqmodel 7.6, nn_modules/qlinear/torch.py, `TorchLinear._forward_eager`, `optimize` (and tritonv2.py, which
    trains with them), torch_aten_kernel.py, `TorchAtenLinear.forward`, nn_modules/qlinear/__init__.py,
    `dequantize_weight`; torch_aten_kernel_awq.py, quantization/awq/utils/packing_utils.py, `dequantize_gemm`.

    Example: gate_proj of Qwen2.5-7B, 67.9 M parameters: 129.5 MiB kept, 259 MiB more in eager mode, 1.64 GiB of AWQ.
    """
    elements, compute = (0, 0, module.weight_params), recipe.compute_width
    weight = _DEQUANTIZE[recipe.quantized](tape, elements)
    if not recipe.half or compute != SIXTEEN_BIT_BYTES:
        stored, weight = weight, tape.empty(elements, compute)
        del stored
    return product(tape, x, weight, tokens(module.out_features), flat=False)


def _compiled(tape: Tape, elements: Size) -> Tensor:
    return tape.empty(elements, SIXTEEN_BIT_BYTES)


def _eager_gptq(tape: Tape, elements: Size) -> Tensor:
    shifted = tape.empty(elements, 4)
    narrow = tape.empty(elements, 1)
    del shifted
    codes = tape.empty(elements, 1)
    del narrow
    scales = tape.empty(elements, SIXTEEN_BIT_BYTES)
    zeros = tape.empty(elements, 1)
    difference = tape.empty(elements, 1)
    del zeros
    weight = tape.empty(elements, SIXTEEN_BIT_BYTES)
    del codes, scales, difference
    return weight


def _eager_awq(tape: Tape, elements: Size) -> Tensor:
    codes = tape.empty(elements, 8)  # unpacked, put in order and masked: at most two at once
    scales = tape.empty(elements, SIXTEEN_BIT_BYTES)
    zeros = tape.empty(elements, 8)
    difference = tape.empty(elements, 8)
    weight = tape.empty(elements, SIXTEEN_BIT_BYTES)
    del codes, scales, zeros, difference
    return weight


_DEQUANTIZE: dict[QuantizedLinear, Callable[[Tape, Size], Tensor]] = {
    "gptq": _compiled,
    "gptq_eager": _eager_gptq,
    "awq_eager": _eager_awq,
}


def int8_linear(tape: Tape, recipe: Recipe, module: Linear, x: Tensor) -> Tensor:
    """bitsandbytes `MatMul8bitLt`: casts x to fp16, quantizes it, multiplies into int32, scales into x's dtype.

        n inputs: 2n float16 (unless x is), n int8, |x| 2n and a mask n of the outliers: up to 6n
        m outputs, beside n: 4m int32, 2m float16, and their cast to x's dtype (unless that is float16)

    Outliers are looked for with Transformers' `llm_int8_threshold`, 6.0, which TRL leaves; none is counted. The
    backward pass dequantizes the weight in x's dtype. The function keeps x as an attribute of `ctx`, which
    non-reentrant checkpoints do not free.
    Source: bitsandbytes 0.50.2, autograd/_functions.py, `MatMul8bitLt.forward`, backends/cuda/ops.py,
    `int8_vectorwise_quant`, `int8_mm_dequant`, backends/default/ops.py, `int8_scaled_mm`.
    """
    held = tape.save_in_context(x) if x.requires_grad else []
    is_half = recipe.half and x.width == SIXTEEN_BIT_BYTES
    half = None if is_half else tape.empty(x.elements, SIXTEEN_BIT_BYTES)
    quantized = tape.empty(x.elements, 1)
    absolute = tape.empty(x.elements, SIXTEEN_BIT_BYTES)
    outliers = tape.empty(x.elements, 1)
    del absolute, outliers, half
    products = tape.empty(tokens(module.out_features), 4)
    result = tape.empty(tokens(module.out_features), SIXTEEN_BIT_BYTES)
    if not is_half:
        scaled, result = result, tape.empty(tokens(module.out_features), x.width)
        del scaled
    del quantized, products
    in_size, width, elements = x.elements, x.width, (0, 0, module.weight_params)

    def backward(gradient: Tensor) -> list[Tensor | None]:
        weight = tape.empty(elements, width)
        gradient_x = tape.empty(in_size, width)
        del weight
        return [gradient_x]

    return tape.output(result, (x,), held, backward)

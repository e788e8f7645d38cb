"""Normalisation layers, one function for each implementation in Transformers and Liger.

Sources: transformers 5.23 `models/llama/modeling_llama.py` (`LlamaRMSNorm`), `models/olmo2` (`Olmo2RMSNorm`),
`models/gemma3` (`Gemma3RMSNorm`), `models/cohere` (`CohereLayerNorm`), `models/olmo` (`OlmoLayerNorm`); pytorch 2.13
`aten/src/ATen/native/layer_norm.cpp`, `aten/src/ATen/autocast_mode.h`; liger-kernel `ops/rms_norm.py`.
"""

from planner.memory.layers import operators as op
from planner.memory.layers.autograd import Size, Tape, Tensor
from planner.memory.layers.recipe import Recipe
from planner.models.layers import LigerBlock, Norm


def norm(tape: Tape, recipe: Recipe, module: Norm, x: Tensor, part: LigerBlock = "norm") -> Tensor:
    """Apply a norm of any `planner.models.layers.NormKind` over the last `module.features` elements.

    `part`: what the norm is to Liger: a norm of the layer, or of its queries or keys.
    """
    if module.kind == "none":
        return x
    if part in recipe.liger_blocks and module.kind.startswith("rms"):
        return fused_rms_norm(tape, recipe, module, x)
    if module.kind in ("layer", "layer_unweighted"):
        return layer_norm(tape, recipe, module, x)
    if module.kind == "layer_cohere":
        return cohere_norm(tape, recipe, module, x)
    if module.kind == "rms_gemma":
        return gemma_norm(tape, recipe, module, x)
    return rms_norm(tape, recipe, module, x)


def one_per_row(x: Tensor, module: Norm) -> Size:
    """Element count of a statistic with one number for each normalised row."""
    return (x.elements[0] // module.features, 0, 0)


def rms_norm(tape: Tape, recipe: Recipe, module: Norm, x: Tensor) -> Tensor:
    """LlamaRMSNorm and its like: weight * (x * rsqrt(mean(x ** 2) + eps)).to(x.dtype), computed in float32.

    "rms_fp32_weight" multiplies by the weight before the cast back, "rms_unweighted" has no weight.
    """
    h = op.cast(tape, x, 4)
    variance = op.mean_last(tape, op.power(tape, h), one_per_row(x, module))
    shifted = op.add_number(tape, variance)
    inverse = op.rsqrt(tape, shifted)
    del shifted
    h = op.mul(tape, h, inverse)
    del inverse
    if module.kind == "rms_unweighted":
        return op.cast(tape, h, x.width)
    weight = tape.weight(module.params, recipe.weight_width, recipe.trainable)
    if module.kind == "rms_fp32_weight":
        weighted = op.mul(tape, weight, h)
        return op.cast(tape, weighted, x.width)
    narrow = op.cast(tape, h, x.width)
    return op.mul(tape, weight, narrow)


def gemma_norm(tape: Tape, recipe: Recipe, module: Norm, x: Tensor) -> Tensor:
    """Gemma3RMSNorm: the RMS norm in one expression, times (1 + weight.float()), cast back at the end."""
    output = gemma_normalised(tape, module, x)
    weight = op.cast(tape, tape.weight(module.params, recipe.weight_width, recipe.trainable), 4)
    weight = op.add_number(tape, weight)
    output = op.mul(tape, output, weight)
    del weight
    return op.cast(tape, output, x.width)


def gemma_normalised(tape: Tape, module: Norm, x: Tensor) -> Tensor:
    """Gemma3RMSNorm._norm: x * rsqrt(mean(x ** 2) + eps) in float32."""
    h = op.cast(tape, x, 4)
    variance = op.mean_last(tape, op.power(tape, h), one_per_row(x, module))
    shifted = op.add_number(tape, variance)
    del variance
    inverse = op.rsqrt(tape, shifted)
    del shifted
    return op.mul(tape, h, inverse)


def layer_norm(tape: Tape, recipe: Recipe, module: Norm, x: Tensor) -> Tensor:
    """native_layer_norm: saves its input, the mean and the reciprocal deviation.

    Autocast runs it in float32 on CUDA; on the CPU it does not.
    """
    h = x
    if module.kind == "layer_unweighted" or (recipe.autocast_width and recipe.on_cuda):
        h = op.cast(tape, x, 4)
    rows = one_per_row(x, module)
    result = tape.empty(h.elements, h.width)
    statistics_width = 4 if recipe.on_cuda else max(h.width, recipe.weight_width) if module.params else h.width
    mean, deviation = tape.empty(rows, statistics_width), tape.empty(rows, statistics_width)
    elements, width, half = h.elements, h.width, module.params // 2
    saved = tape.save(h, mean, deviation)
    del mean, deviation
    inputs: tuple[Tensor, ...] = (h,)
    if module.params:
        weight = tape.weight(half, recipe.weight_width, recipe.trainable)
        tape.save(weight if h.requires_grad else None)
        inputs = (h, weight, tape.weight(half, recipe.weight_width, recipe.trainable))
    needed = [tensor.requires_grad for tensor in inputs]

    def backward(gradient: Tensor) -> list[Tensor | None]:
        sizes = (elements, (0, 0, half), (0, 0, half))
        return [tape.empty(size, width) if needs else None for size, needs in zip(sizes, needed, strict=False)]

    result = tape.output(result, inputs, saved, backward)
    del h, inputs
    return op.cast(tape, result, x.width) if module.kind == "layer_unweighted" else result


def cohere_norm(tape: Tape, recipe: Recipe, module: Norm, x: Tensor) -> Tensor:
    """CohereLayerNorm: mean, variance and normalisation as separate float32 operators, times the weight in float32."""
    h = op.cast(tape, x, 4)
    mean = op.mean_last(tape, h, one_per_row(x, module))
    variance = op.mean_last(tape, op.power(tape, op.subtract(tape, h, mean)), one_per_row(x, module))
    difference = op.subtract(tape, h, mean)
    shifted = op.add_number(tape, variance)
    inverse = op.rsqrt(tape, shifted)
    del shifted
    h = op.mul(tape, difference, inverse)
    del difference, inverse
    weight = op.cast(tape, tape.weight(module.params, recipe.weight_width, recipe.trainable), 4)
    h = op.mul(tape, weight, h)
    del weight
    return op.cast(tape, h, x.width)


def fused_rms_norm(tape: Tape, recipe: Recipe, module: Norm, x: Tensor) -> Tensor:
    """Liger's RMSNorm: saves its input and one float32 per row (liger_kernel/ops/rms_norm.py)."""
    statistics = tape.empty(one_per_row(x, module), 4)
    result = tape.empty(x.elements, x.width)
    weight = tape.weight(module.params, recipe.weight_width, recipe.trainable)
    saved = tape.save(x, statistics, weight)
    elements, width, params, trainable = x.elements, x.width, (0, 0, module.params), recipe.trainable

    def backward(gradient: Tensor) -> list[Tensor | None]:
        return [tape.empty(elements, width), tape.empty(params, width) if trainable else None]

    return tape.output(result, (x, weight), saved, backward)

"""The modules of a decoder layer, written with the operators of `autograd.py` as Transformers and PEFT write them.

Sources: transformers 5.23 `models/llama/modeling_llama.py`, `integrations/sdpa_attention.py`, `integrations/moe.py`;
peft 0.21.2 `tuners/lora/layer.py` and `tuners/lora/bnb.py`; bitsandbytes 0.50.2 `autograd/_functions.py`;
pytorch 2.13 `aten/src/ATen/native/transformers/cuda/`, `aten/src/ATen/autocast_mode.h`.
"""

from dataclasses import dataclass
from typing import Literal

from planner.memory.autograd import Size, Tape, Tensor
from planner.model import Activation, Attention, Experts, Linear, Mlp, Norm

Kernel = Literal["eager", "eager_masked", "flash", "efficient", "math", "flash_varlen"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How a layer computes: everything but its shape and the size of the batch. Widths in bytes.

    `autocast_width` is 0 without autocast. `quantized`: the kind of quantized `nn.Linear`, "none" for plain ones.
    `device` selects where CPU and CUDA kernels keep different things; plans are for "cuda", tests can run "cpu".
    """

    weight_width: int
    autocast_width: int
    trainable: bool
    quantized: Literal["none", "4bit", "8bit", "dequantized"] = "none"
    lora_r: int = 0
    lora_targets: frozenset[str] = frozenset()
    adapter_width: int = 4
    lora_dropout: bool = False
    kernel: Kernel = "flash"
    several_rows: bool = True  # one row lets views stand where several need copies
    liger: bool = False
    device: Literal["cuda", "cpu"] = "cuda"

    @property
    def compute_width(self) -> int:
        return self.autocast_width or self.weight_width


def tokens(features: int) -> Size:
    """Elements of a `[rows, length, features]` tensor."""
    return (features, 0, 0)


# -- linear layers -----------------------------------------------------------------------------------------------------


def linear(tape: Tape, recipe: Recipe, module: Linear, x: Tensor) -> Tensor:
    """A projection with whatever tuning put on it: base layer, then LoRA's update (peft `Linear.forward`)."""
    adapted = recipe.lora_r > 0 and module.name in recipe.lora_targets
    if recipe.quantized == "none":
        result = base_linear(tape, recipe, module, x)
    else:
        result = quantized_linear(tape, recipe, module, x)
        if adapted and recipe.quantized == "4bit":
            result = tape.copy(result)  # peft bnb.py:531, a defensive clone
    if not adapted:
        return result
    if recipe.quantized == "none" or not recipe.autocast_width:
        x = tape.cast(x, recipe.adapter_width)
    update = lora_update(tape, recipe, module, x)
    width = result.width
    return tape.cast(tape.add(result, update), width)


def base_linear(tape: Tape, recipe: Recipe, module: Linear, x: Tensor) -> Tensor:
    elements = module.weight_params
    bias = module.out_features if module.bias else 0
    return matmul_weight(tape, recipe, x, module.name, module.out_features, elements, bias, recipe.weight_width, recipe.trainable)


def matmul_weight(
    tape: Tape, recipe: Recipe, x: Tensor, name: str, out_features: int, elements: int, bias: int, width: int, trainable: bool
) -> Tensor:
    """x @ weight.T (+ bias). Keeps x if the weight learns, and autocast's copy of the weight if x needs a gradient.

    Autocast keeps the copy of a weight that learns until the forward pass ends (autocast_mode.cpp, `cached_cast`).
    """
    compute = recipe.autocast_width or max(width, x.width)
    x = tape.cast(x, compute)
    copy = weight_copy(tape, name, elements, trainable) if width != compute else None
    saved = tape.save(x) if trainable else []
    if x.requires_grad:
        saved += tape.save(copy, kind="autocast_copies", parameters=copy is None)
    result = tape.empty(tokens(out_features), compute)
    in_size, needs_x = x.elements, x.requires_grad

    def backward(gradient: Tensor) -> tuple[Tensor | None, ...]:
        weight_gradient = (tape.empty((0, 0, elements + bias), compute),) if trainable else ()
        return (tape.empty(in_size, compute) if needs_x else None, *weight_gradient)

    return tape.output(result, (x,), saved, backward, width if trainable else 0)


def weight_copy(tape: Tape, name: str, elements: int, cached: bool) -> Tensor:
    key = (elements, name)
    if key in tape.autocast_cache:
        return tape.autocast_cache[key]
    copy = tape.empty((0, 0, elements), 2, "autocast_copies" if cached else "transients")
    if cached:
        tape.autocast_cache[key] = copy
    return copy


def lora_update(tape: Tape, recipe: Recipe, module: Linear, x: Tensor) -> Tensor:
    """lora_B(lora_A(dropout(x))) * scaling."""
    rank, width = recipe.lora_r, recipe.adapter_width
    if recipe.lora_dropout:
        x = dropout(tape, x)
    down = matmul_weight(tape, recipe, x, f"{module.name}.lora_A", rank, rank * module.in_features, 0, width, True)
    up = matmul_weight(tape, recipe, down, f"{module.name}.lora_B", module.out_features, rank * module.out_features, 0, width, True)
    del down
    return tape.unary(up, "nothing")


def dropout(tape: Tape, x: Tensor) -> Tensor:
    """native_dropout keeps a bool mask, one byte an element (CPU training dropout multiplies by a mask of x's dtype)."""
    mask = tape.empty(x.elements, 1)
    result = tape.empty(x.elements, x.width)
    elements, width = x.elements, x.width
    saved = tape.save(mask) if x.requires_grad else []
    return tape.output(result, (x,), saved, lambda gradient: (tape.empty(elements, width),))


def quantized_linear(tape: Tape, recipe: Recipe, module: Linear, x: Tensor) -> Tensor:
    """A frozen quantized projection: nothing of x is kept; the weight is dequantized for each pass and freed.

    4-bit: bitsandbytes `backends/cuda/ops.py` `_dequant_linear_fallback` above 1,536 tokens, in x's dtype; backward
    dequantizes in the quantization state's dtype and casts (`autograd/_functions.py:384`). 8-bit keeps x for
    `MatMul8bitLt` and quantizes it to int8; GPTQ and AWQ dequantize to 16 bits.
    """
    elements, compute = module.weight_params, recipe.compute_width
    x = tape.cast(x, compute)
    saved = tape.save(x) if recipe.quantized == "8bit" and x.requires_grad else []
    if recipe.quantized == "8bit":
        quantized_x = tape.empty(x.elements, 1)
        products = tape.empty(tokens(module.out_features), 4)  # int32 accumulators before they are scaled
        result = tape.empty(tokens(module.out_features), compute)
        del quantized_x, products
    else:
        dequantized = tape.empty((0, 0, elements), compute)
        result = tape.empty(tokens(module.out_features), compute)
        del dequantized
    in_size, stored = x.elements, recipe.weight_width

    def backward(gradient: Tensor) -> tuple[Tensor]:
        weight = tape.empty((0, 0, elements), stored)
        weight = tape.cast(weight, compute)
        gradient_x = tape.empty(in_size, compute)
        del weight
        return (gradient_x,)

    return tape.output(result, (x,), saved, backward)


# -- normalisation -----------------------------------------------------------------------------------------------------


def norm(tape: Tape, recipe: Recipe, module: Norm, x: Tensor) -> Tensor:
    """Any of the norms of `planner.model.NormKind`, over the last `features` elements."""
    if module.kind == "none":
        return x
    if recipe.liger and module.kind.startswith("rms"):
        return fused_rms_norm(tape, recipe, module, x)
    if module.kind in ("layer", "layer_unweighted"):
        return layer_norm(tape, recipe, module, x)
    if module.kind == "layer_cohere":
        return cohere_norm(tape, recipe, module, x)
    return rms_norm(tape, recipe, module, x)


def rms_norm(tape: Tape, recipe: Recipe, module: Norm, x: Tensor) -> Tensor:
    """x * rsqrt(mean(x ** 2) + eps) in float32, and the weight in the kind's own way."""
    width = x.width
    h = tape.cast(x, 4)
    del x
    inverse = inverse_root(tape, tape.mean(tape.unary(h, "input", backward_temporaries=2), module.features))
    h = tape.mul(h, inverse)
    del inverse
    if module.kind == "rms_gemma":
        return tape.cast(times_parameter(tape, recipe, h, module.features, 4, offset=True), width)
    if module.kind == "rms_fp32_weight":
        return tape.cast(times_parameter(tape, recipe, h, module.features, recipe.weight_width), width)
    h = tape.cast(h, width)
    return h if module.kind == "rms_unweighted" else times_parameter(tape, recipe, h, module.features, recipe.weight_width)


def inverse_root(tape: Tape, variance: Tensor) -> Tensor:
    return tape.unary(tape.unary(variance, "nothing"), "output", backward_temporaries=2)


def times_parameter(tape: Tape, recipe: Recipe, x: Tensor, features: int, width: int, offset: bool = False) -> Tensor:
    """weight * x: x is kept when the weight learns. `offset`: gemma's (1 + weight), a tensor of its own."""
    saved = tape.save(x) if recipe.trainable else []
    if x.requires_grad:
        saved += tape.save(tape.empty((0, 0, features), 4) if offset else None, parameters=not offset)
    result_width = max(x.width, width)
    result = tape.empty(x.elements, result_width)
    elements, x_width, needs_x, trainable, stored = x.elements, x.width, x.requires_grad, recipe.trainable, recipe.weight_width

    def backward(gradient: Tensor) -> tuple[Tensor | None, ...]:
        product = tape.empty(elements, result_width) if trainable else None
        gradient_x = tape.empty(elements, result_width) if needs_x else None
        summed = (tape.empty((0, 0, features), result_width),) if trainable else ()
        del product
        return (tape.cast(gradient_x, x_width) if gradient_x is not None else None, *summed)

    return tape.output(result, (x,), saved, backward, stored if trainable else 0)


def layer_norm(tape: Tape, recipe: Recipe, module: Norm, x: Tensor) -> Tensor:
    """native_layer_norm keeps its input, mean and reciprocal deviation; autocast runs it in float32."""
    own_width = x.width
    if recipe.autocast_width or module.kind == "layer_unweighted":
        x = tape.cast(x, 4)
    statistics = tape.empty((2 * x.elements[0] // module.features, 0, 0), 4)
    result = tape.empty(x.elements, x.width)
    saved = tape.save(x, statistics, parameters=module.params > 0)
    elements, width, params, trainable = x.elements, x.width, module.params, recipe.trainable and module.params > 0

    def backward(gradient: Tensor) -> tuple[Tensor, ...]:
        return (tape.empty(elements, width), *((tape.empty((0, 0, params), width),) if trainable else ()))

    result = tape.output(result, (x,), saved, backward, recipe.weight_width if trainable else 0)
    return tape.cast(result, own_width) if module.kind == "layer_unweighted" else result


def cohere_norm(tape: Tape, recipe: Recipe, module: Norm, x: Tensor) -> Tensor:
    """CohereLayerNorm: mean, variance and normalisation written out in float32, then the weight in float32."""
    width = x.width
    h = tape.cast(x, 4)
    del x
    centred = tape.add(h, tape.mean(h, module.features))
    variance = tape.mean(tape.unary(centred, "input", backward_temporaries=2), module.features)
    del centred
    difference = tape.add(h, tape.mean(h, module.features))
    del h
    h = tape.mul(difference, inverse_root(tape, variance))
    del difference, variance
    return tape.cast(times_parameter(tape, recipe, h, module.features, 4), width)


def fused_rms_norm(tape: Tape, recipe: Recipe, module: Norm, x: Tensor) -> Tensor:
    """Liger's RMSNorm keeps its input and one number a row of it (liger_kernel/ops/rms_norm.py)."""
    statistics = tape.empty((x.elements[0] // module.features, 0, 0), 4)
    result = tape.empty(x.elements, x.width)
    saved = tape.save(x, statistics, parameters=1)
    elements, width = x.elements, x.width

    def backward(gradient: Tensor) -> tuple[Tensor, ...]:
        weight = (tape.empty((0, 0, module.params), recipe.weight_width),) if recipe.trainable else ()
        return (tape.empty(elements, width), *weight)

    return tape.output(result, (x,), saved, backward, recipe.weight_width if recipe.trainable else 0)


# -- attention ---------------------------------------------------------------------------------------------------------


def rotary(tape: Tape, x: Tensor) -> Tensor:
    """x * cos + rotate_half(x) * sin. Only cos and sin are kept, which the whole model shares."""
    straight = tape.unary(x, "nothing", width=x.width)
    turned = tape.unary(rotate_half(tape, x), "nothing", width=x.width)
    return tape.add(straight, turned)


def rotate_half(tape: Tape, x: Tensor) -> Tensor:
    """cat((-x2, x1)): a negated half and the whole; backward spreads each half into zeros of the whole (slice_backward)."""
    negated = tape.empty((x.elements[0] // 2, 0, 0), x.width)
    result = tape.empty(x.elements, x.width)
    del negated
    elements, width = x.elements, x.width

    def backward(gradient: Tensor) -> tuple[Tensor]:
        first = tape.empty(elements, width)
        half = tape.empty((elements[0] // 2, 0, 0), width)
        second = tape.empty(elements, width)
        del half, second
        return (first,)

    return tape.output(result, (x,), [], backward)


def attend(tape: Tape, recipe: Recipe, block: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores, softmax and the weighted sum of values, by the kernel that would run."""
    if recipe.kernel in ("eager", "eager_masked"):
        return eager_attention(tape, recipe, block, q, k, v)
    if recipe.autocast_width:
        q, k, v = (tape.cast(tensor, recipe.autocast_width) for tensor in (q, k, v))
    if recipe.kernel in ("efficient", "math"):
        k, v = repeat_kv(tape, block, k, block.head_dim), repeat_kv(tape, block, v, block.v_head_dim)
    if recipe.kernel == "math":
        return math_attention(tape, block, q, k, v)
    return fused_attention(tape, recipe, block, q, k, v)


def repeat_kv(tape: Tape, block: Attention, x: Tensor, head_dim: int) -> Tensor:
    """Keys or values copied to every query head; free where each head has its own."""
    if block.num_attention_heads == block.num_key_value_heads:
        return x
    return tape.copy(x, tokens(block.num_attention_heads * head_dim))


def fused_attention(tape: Tape, recipe: Recipe, block: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FlashAttention or the memory-efficient kernel: keeps q, k, v, the output and one float32 a head and token.

    The efficient kernel runs where there is a mask, which it takes in the compute dtype: 2 bytes a score, made for every
    layer and kept. Backward: dq in float32 besides dq (flash_api.cpp `mha_bwd`: dq_accum; efficient: its workspace), dk and dv for
    every query head before they are summed (GQA), and one float32 a head and token (softmax_d).
    """
    heads, out_features = block.num_attention_heads, block.num_attention_heads * block.v_head_dim
    masked = recipe.kernel == "efficient"
    mask = tape.empty((0, 1, 0), q.width) if masked else None
    result = tape.empty(tokens(out_features), q.width)
    logsumexp = tape.empty(tokens(heads), 4)
    saved = tape.save(q, k, v, mask, result, logsumexp) if q.requires_grad else []
    sizes, width = (q.elements, k.elements, v.elements), q.width
    expanded = (block.q_dim, out_features) if block.num_key_value_heads < heads and not masked else ()
    accumulator = recipe.device == "cuda"

    def backward(gradient: Tensor) -> tuple[Tensor, ...]:
        gradients = tuple(tape.empty(size, width) for size in sizes)
        held = [tape.empty(tokens(heads), 4)]
        if accumulator:
            held += [tape.empty(sizes[0], 4)] + [tape.empty(tokens(features), width) for features in expanded]
        held.clear()
        return gradients

    return tape.output(result, (q, k, v), saved, backward)


def eager_attention(tape: Tape, recipe: Recipe, block: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The whole matrix of scores for every head (modeling_llama.py, `eager_attention_forward`)."""
    heads = block.num_attention_heads
    scores: Size = (0, heads, 0)
    k = repeat_kv(tape, block, k, block.head_dim)
    v = repeat_kv(tape, block, v, block.v_head_dim)
    weights = matmul(tape, recipe, q, k, scores, copies=(block.num_attention_heads == block.num_key_value_heads, True))
    del q, k
    weights = tape.unary(weights, "nothing")  # * scaling
    if block.softcap:
        weights = tape.unary(weights, "nothing")  # / softcap
        weights = tape.unary(weights, "output", backward_temporaries=1)  # tanh
        weights = tape.unary(weights, "nothing")  # * softcap
    if recipe.kernel == "eager_masked":
        weights = tape.unary(weights, "nothing")  # + mask
    narrow = weights.width
    if block.sink_params:
        weights = with_sink(tape, weights, heads)
    weights = softmax(tape, weights)
    weights = tape.cast(weights, narrow)
    result = matmul(tape, recipe, weights, v, tokens(heads * block.v_head_dim), copies=(False, True))
    del weights, v
    return tape.copy(result)  # transpose(1, 2).contiguous()


def with_sink(tape: Tape, weights: Tensor, heads: int) -> Tensor:
    """cat((weights, sinks)), then minus the row's maximum (modeling_gpt_oss.py, `eager_attention_forward`)."""
    joined = tape.copy(weights)
    return tape.unary(joined, "nothing")


def softmax(tape: Tape, x: Tensor) -> Tensor:
    """softmax(x, dtype=float32) casts x first (aten SoftMax.cpp; only fp16 on CUDA has a kernel that need not) and keeps its result."""
    x = tape.cast(x, 4)
    result = tape.empty(x.elements, 4)
    saved = tape.save(result) if x.requires_grad else []
    elements, width = x.elements, x.width
    return tape.output(result, (x,), saved, lambda gradient: (tape.empty(elements, width),))


def matmul(tape: Tape, recipe: Recipe, a: Tensor, b: Tensor, out: Size, copies: tuple[bool, bool]) -> Tensor:
    """Batched a @ b, both kept. `copies`: an operand with strided heads is copied for bmm when there are several rows."""
    if recipe.autocast_width:
        a, b = tape.cast(a, recipe.autocast_width), tape.cast(b, recipe.autocast_width)
    saved = tape.save(b if a.requires_grad else None, a if b.requires_grad else None)
    result = tape.empty(out, a.width)
    sizes, width = ((a.elements, a.requires_grad), (b.elements, b.requires_grad)), a.width
    return tape.output(result, (a, b), saved, lambda gradient: tuple(tape.empty(size, width) if needs else None for size, needs in sizes))


def math_attention(tape: Tape, block: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """sdpa's fallback (`_scaled_dot_product_attention_math`): the scores of every head, in the compute dtype."""
    heads = block.num_attention_heads
    scores = tape.unary(tape.empty((0, heads, 0), q.width), "nothing")
    result = tape.empty(tokens(heads * block.v_head_dim), q.width)
    saved = tape.save(q, k, v, scores) if q.requires_grad else []
    sizes, width = (q.elements, k.elements, v.elements), q.width

    def backward(gradient: Tensor) -> tuple[Tensor, ...]:
        held = [tape.empty((0, heads, 0), width), tape.empty((0, heads, 0), width)]
        gradients = tuple(tape.empty(size, width) for size in sizes)
        held.clear()
        return gradients

    return tape.output(result, (q, k, v), saved, backward)


# -- feed forward ------------------------------------------------------------------------------------------------------

# Tensors of the input's size that an activation keeps besides its result, and that its backward holds.
# Source: transformers/activations.py; NewGELUActivation is written with pow, tanh and three products.
ACTIVATION_IS_ONE_KERNEL: dict[Activation, bool] = {"silu": True, "gelu": True, "gelu_tanh": True, "relu": True, "gelu_new": False}


def activate(tape: Tape, activation: Activation, x: Tensor) -> Tensor:
    if activation == "relu":
        return tape.unary(x, "output")
    if ACTIVATION_IS_ONE_KERNEL[activation]:
        return tape.unary(x, "input")
    cubed = tape.unary(tape.unary(x, "input", backward_temporaries=2), "nothing")  # 0.044715 * x ** 3
    inner = tape.unary(tape.add(x, cubed), "nothing")
    del cubed
    outer = tape.unary(tape.unary(inner, "output", backward_temporaries=1), "nothing")  # 1 + tanh
    del inner
    return tape.mul(tape.unary(x, "nothing"), outer)


def mlp(tape: Tape, recipe: Recipe, block: Mlp, x: Tensor) -> Tensor:
    """down(act(gate(x)) * up(x)), or down(act(up(x))); phi3 computes gate and up in one projection."""
    if not block.gated:
        up, down = block.linears
        return linear(tape, recipe, down, activate(tape, block.activation, linear(tape, recipe, up, x)))
    if recipe.liger:
        return fused_gated_mlp(tape, recipe, block, x)
    if len(block.linears) == 2:
        both, down = block.linears
        together = linear(tape, recipe, both, x)
        return linear(tape, recipe, down, gate_product(tape, block, together))
    gate, up, down = block.linears
    return linear(tape, recipe, down, tape.mul(activate(tape, block.activation, linear(tape, recipe, gate, x)), linear(tape, recipe, up, x)))


def gate_product(tape: Tape, block: Mlp, together: Tensor) -> Tensor:
    """up * act(gate) of one tensor's halves: both halves are views of it, so the whole is kept."""
    half = tokens(block.intermediate_size)
    gate, up = half_of(tape, together, half), half_of(tape, together, half)
    return tape.mul(up, activate(tape, block.activation, gate))


def half_of(tape: Tape, x: Tensor, half: Size) -> Tensor:
    """A view of a part; its gradient is spread into zeros of the whole."""
    whole, width = x.elements, x.width
    return tape.output(Tensor(x.storage, half, width), (x,), [], lambda gradient: (tape.empty(whole, width),))


def fused_gated_mlp(tape: Tape, recipe: Recipe, block: Mlp, x: Tensor) -> Tensor:
    """Liger's SwiGLU and GeGLU keep gate and up only, and overwrite them with their gradients (ops/swiglu.py)."""
    gate_linear, up_linear, down = block.linears
    gate, up = linear(tape, recipe, gate_linear, x), linear(tape, recipe, up_linear, x)
    product = tape.empty(gate.elements, gate.width)
    saved = tape.save(gate, up)
    elements, width = gate.elements, gate.width

    def backward(gradient: Tensor) -> tuple[Tensor, ...]:
        return tuple(Tensor(storage, elements, width) for storage in saved)

    product = tape.output(product, (gate, up), saved, backward)
    del gate, up
    return linear(tape, recipe, down, product)


def experts(tape: Tape, recipe: Recipe, block: Experts, x: Tensor) -> Tensor:
    """A router, `grouped_mm` over gathered tokens, and the weighted sum (integrations/moe.py, `grouped_mm_experts_forward`).

    grouped_mm is not autocast-enabled: experts compute in the dtype of their weights.
    """
    hidden, top_k = x.elements[0], block.num_experts_per_tok
    weights = route(tape, recipe, block, x)
    pairs, inner = tokens(top_k * hidden), block.moe_intermediate_size * top_k
    gathered = tape.cast(gather(tape, x, pairs), recipe.weight_width)
    up_share, down_share = 2 * block.expert_params // 3, block.expert_params // 3
    together = grouped(tape, recipe, gathered, tokens(2 * inner), up_share)
    del gathered
    gate, up = half_of(tape, together, tokens(inner)), half_of(tape, together, tokens(inner))
    del together
    product = tape.mul(activate(tape, block.activation, gate), up)
    del gate, up
    out = grouped(tape, recipe, product, pairs, down_share)
    del product
    weighted = tape.mul(out, weights)
    del out, weights
    ordered = gather(tape, weighted, pairs)
    del weighted
    return tape.cast(tape.sum_to(ordered, tokens(hidden)), x.width)


def route(tape: Tape, recipe: Recipe, block: Experts, x: Tensor) -> Tensor:
    """softmax of the router's logits in float32, kept; the top-k weights (one a token and expert) and their indices."""
    logits = matmul_weight(
        tape, recipe, x, "router", block.num_experts, block.router_params, 0, recipe.weight_width, recipe.trainable
    )
    probabilities = softmax(tape, tape.cast(logits, 4))
    indices = tape.empty(tokens(block.num_experts_per_tok), 8)
    values = tape.sum_to(probabilities, tokens(block.num_experts_per_tok))
    if values.requires_grad:
        tape.save(indices)
    return tape.unary(values, "nothing")


def gather(tape: Tape, x: Tensor, size: Size) -> Tensor:
    """x[indices]: backward scatters into zeros of x's size."""
    result = tape.empty(size, x.width)
    elements, width = x.elements, x.width
    return tape.output(result, (x,), [], lambda gradient: (tape.empty(elements, width),))


def grouped(tape: Tape, recipe: Recipe, x: Tensor, out: Size, elements: int) -> Tensor:
    """One grouped matrix product over all experts' weights, in the weights' dtype."""
    width = recipe.weight_width
    result = tape.empty(out, width)
    saved = tape.save(x if recipe.trainable else None, parameters=1)
    in_size, trainable = x.elements, recipe.trainable

    def backward(gradient: Tensor) -> tuple[Tensor, ...]:
        weight_gradient = (tape.empty((0, 0, elements), width),) if trainable else ()
        return (tape.empty(in_size, width), *weight_gradient)

    return tape.output(result, (x,), saved, backward, width if trainable else 0)

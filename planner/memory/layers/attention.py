"""Scores, softmax and the weighted sum of values, by the kernel that would run.

Sources: transformers 5.23 `integrations/sdpa_attention.py`, `models/llama/modeling_llama.py` (`eager_attention_forward`); pytorch 2.13
`aten/src/ATen/native/transformers/attention.cpp` and `transformers/cuda/`.
"""

from planner.memory.layers import operators as op
from planner.memory.layers.autograd import Tape, Tensor
from planner.memory.layers.recipe import Recipe, scores, tokens
from planner.memory.layers.rotary import JOINED
from planner.models.shape import Attention

WIDEST_IN_REGISTERS = 128  # features of a head


def attend(
    tape: Tape, recipe: Recipe, block: Attention, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor | None]:
    """The mixed values, and the scores that eager attention returns besides (its layer drops them when it is done)."""
    if recipe.kernel in ("eager", "eager_masked"):
        return eager_attention(tape, recipe, block, q, k, v)
    mixed = sdpa(tape, recipe, block, q, k, v)
    return (op.clone(tape, mixed) if in_query_order(recipe, block) else mixed), None


def in_query_order(recipe: Recipe, block: Attention) -> bool:
    """Whether the kernel's output is in the order [rows, heads, length, head_dim], so that `contiguous()` copies it.

    FlashAttention's is like its queries (flash_api.cpp `empty_like(q)`, on the CPU too); the efficient kernel's never is.
    """
    follows = recipe.kernel == "flash" or (recipe.kernel == "efficient" and not recipe.on_cuda)
    return recipe.kernel == "math" or (follows and block.rotary and block.rotary_style in JOINED)


def repeat_kv(tape: Tape, block: Attention, x: Tensor, head_dim: int) -> Tensor:
    """Keys or values copied to every query head; free where each head has its own."""
    if block.num_attention_heads == block.num_key_value_heads:
        return x
    return op.expanded(tape, x, tokens(block.num_attention_heads * head_dim))


def math_attention(tape: Tape, recipe: Recipe, block: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """sdpa's fallback (attention.cpp `_scaled_dot_product_attention_math`): the scores of every head, in float32.

    16-bit inputs are cast first. The causal triangle is one float32 a score of one row, which is counted for every row; the
    probabilities are cast back as well, though nobody asks for them.
    """
    heads, width = block.num_attention_heads, q.width
    wide_q, wide_k, wide_v = op.cast(tape, q, 4), op.cast(tape, k, 4), op.cast(tape, v, 4)
    scaled_q = op.scale(tape, wide_q)
    mask = tape.empty(scores(1), 4)
    scaled_k = op.scale(tape, wide_k)
    raw = op.bmm(tape, scaled_q, scaled_k, scores(heads))
    del scaled_k
    probabilities = op.softmax(tape, raw)
    tape.empty(scores(heads), 1)  # `_safe_softmax` looks for rows without any score
    del raw
    narrow = tape.empty(scores(heads), width)
    copied_v = op.clone(tape, wide_v) if recipe.several_rows else op.view(tape, wide_v)
    mixed = op.bmm(tape, probabilities, copied_v, tokens(heads * block.v_head_dim))
    result = op.cast(tape, mixed, width)
    del mask, narrow
    return result


def sdpa(tape: Tape, recipe: Recipe, block: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """scaled_dot_product_attention, or the flash-attention package for rows of different lengths."""
    if recipe.kernel in ("efficient", "efficient_unmasked", "math"):
        k, v = repeat_kv(tape, block, k, block.head_dim), repeat_kv(tape, block, v, block.v_head_dim)
    width = recipe.autocast_width or q.width
    narrow_v, narrow_k, narrow_q = op.cast(tape, v, width), op.cast(tape, k, width), op.cast(tape, q, width)
    if recipe.kernel == "math":
        return math_attention(tape, recipe, block, narrow_q, narrow_k, narrow_v)
    if recipe.kernel == "flash_varlen":
        return unpadded_attention(tape, recipe, block, narrow_q, narrow_k, narrow_v)
    return fused_attention(tape, recipe, block, narrow_q, narrow_k, narrow_v)


def unpadded_attention(tape: Tape, recipe: Recipe, block: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Real tokens gathered, attended, put back (modeling_flash_attention_utils.py `_upad_input`, `_pad_input`).

    Sizes are those of rows without any padding, the worst case.
    """
    k, v = op.index(tape, k, None, k.elements), op.index(tape, v, None, v.elements)
    q = op.index(tape, q, None, q.elements)
    mixed = fused_attention(tape, recipe, block, q, k, v)
    return op.index(tape, mixed, None, mixed.elements)


def fused_attention(tape: Tape, recipe: Recipe, block: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FlashAttention or the memory-efficient kernel: keeps q, k, v, the output and one float32 a head and token.

    The efficient kernel runs where there is a mask, which it takes in the compute dtype: 2 bytes a score, made for every
    layer and kept (attention.cpp `convert_boolean_attn_mask`). Above 128 features a head it sums its output in float32
    (mem_eff_attention/kernel_forward.h `kNeedsOutputAccumulatorBuffer`).

    Leaves out: rounding of rows to 128 tokens, of masks to 16 columns, and split keys and values.
    """
    heads, out_features = block.num_attention_heads, block.num_attention_heads * block.v_head_dim
    mask = tape.empty(scores(1), q.width) if recipe.kernel == "efficient" else None
    saved = tape.save(q, k, v, mask) if q.requires_grad else []
    result = tape.empty(tokens(out_features), q.width)
    logsumexp = tape.empty(tokens(heads), 4)
    if recipe.on_cuda and recipe.kernel.startswith("efficient") and block.v_head_dim > WIDEST_IN_REGISTERS:
        tape.empty(tokens(out_features), 4)
    saved += tape.save(result, logsumexp) if q.requires_grad else []
    workspace = backward_workspace(recipe, block) if recipe.on_cuda else ()
    sizes, width = (q.elements, k.elements, v.elements), q.width

    def backward(gradient: Tensor) -> list[Tensor | None]:
        gradients: list[Tensor | None] = [tape.empty(size, width) for size in sizes]
        held = [tape.empty(tokens(features), bytes_each or width) for features, bytes_each in workspace]
        held.clear()
        return gradients

    return tape.output(result, (q, k, v), saved, backward)


def backward_workspace(recipe: Recipe, block: Attention) -> tuple[tuple[int, int], ...]:
    """What a fused kernel's backward pass allocates besides the gradients: features a token, and their bytes (0: the inputs').

        float32 a head (softmax_d, delta) + dq summed in float32, a head rounded up to 32 features, above 128 to 64
        + dk and dv of every query head, where keys are shared by several (FlashAttention; the efficient kernel gets copies)

    Source: pytorch v2.13 aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp `mha_bwd`; attention_backward.cu
    `_efficient_attention_backward` with mem_eff_attention/kernel_backward.h `workspace_size` (`kNeedsAccumGradQ`).

    Example: Llama-3-8B (32 heads of 128, 8 of keys): 4 x 32 + 4 x 4,096 + 2 x 2 x 4,096 = 32,896 bytes a token.
    """
    heads = block.num_attention_heads
    multiple = 32 if block.head_dim <= WIDEST_IN_REGISTERS else 64
    rounded = -(-block.head_dim // multiple) * multiple
    shared = block.num_key_value_heads < heads and not recipe.kernel.startswith("efficient")
    return ((heads, 4), (heads * rounded, 4), *(((block.q_dim, 0), (heads * block.v_head_dim, 0)) if shared else ()))


def eager_attention(
    tape: Tape, recipe: Recipe, block: Attention, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """The whole matrix of scores for every head, masked always (masking_utils.py `eager_mask`: no skip)."""
    heads = block.num_attention_heads
    own_heads = heads == block.num_key_value_heads and recipe.several_rows
    all_k = repeat_kv(tape, block, k, block.head_dim)
    all_v = repeat_kv(tape, block, v, block.v_head_dim)
    strided = not (block.rotary and block.rotary_style in JOINED)
    raw = matmul(tape, recipe, q, all_k, heads, 0, copies=(recipe.several_rows and strided, own_heads and strided))
    weights = op.scale(tape, raw)
    del raw
    if block.softcap:
        weights = op.scale(tape, weights)
        weights = op.unary(tape, weights, "output", temporaries=0)  # tanh
        weights = op.scale(tape, weights)
    weights = op.add(tape, weights, Tensor(None, scores(1), recipe.weight_width))
    softened = (
        with_sinks(tape, recipe, block, weights, v.width)
        if block.sink_params
        else narrow_softmax(tape, recipe, block, weights, q.width)
    )
    weights = softened
    del softened
    if block.dropout and recipe.dropout:
        weights = op.dropout(tape, weights, recipe.on_cuda)
    result = matmul(tape, recipe, weights, all_v, 0, heads * block.v_head_dim, copies=(False, own_heads))
    return op.clone(tape, result), weights


def narrow_softmax(tape: Tape, recipe: Recipe, block: Attention, weights: Tensor, width: int) -> Tensor:
    """softmax(weights, dtype=float32).to(query.dtype); gpt2 and falcon leave the dtype to autocast, which takes float32 on CUDA."""
    wide = block.softmax_float32 or (recipe.autocast_width > 0 and recipe.on_cuda)
    probabilities = op.softmax(tape, weights, wide)
    return op.cast(tape, probabilities, width)


def with_sinks(tape: Tape, recipe: Recipe, block: Attention, weights: Tensor, width: int) -> Tensor:
    """gpt_oss: one more score a row, the row's largest subtracted, softmax in their dtype, the added score dropped, then the dtype of the values.

    All of these are still there when the last is made (transformers 5.23, modeling_gpt_oss.py:244-252). The softmax names its dtype, which CUDA's
    autocast then leaves (autocast_mode.h, `fp32_set_opt_dtype`).
    """
    sinks = tape.weight(block.sink_params, recipe.weight_width, recipe.trainable)
    joined = op.with_column(tape, weights, sinks, block.num_attention_heads)
    largest, positions = op.maximum(tape, joined, tokens(block.num_attention_heads))
    shifted = op.subtract(tape, joined, largest)
    del largest, positions, joined
    probabilities = op.softmax(tape, shifted, float32=False)
    return op.cast(tape, op.part(tape, probabilities, weights.elements), width)


def matmul(
    tape: Tape, recipe: Recipe, a: Tensor, b: Tensor, heads: int, features: int, copies: tuple[bool, bool]
) -> Tensor:
    """torch.matmul of four dimensions: a copy of what cannot be viewed as a batch of matrices, then bmm.

    The result has `heads` scores or `features` a token.
    """
    width = recipe.autocast_width or a.width
    narrow_b, narrow_a = op.cast(tape, b, width), op.cast(tape, a, width)
    first = op.clone(tape, narrow_a) if copies[0] else op.view(tape, narrow_a)
    second = op.clone(tape, narrow_b) if copies[1] else op.view(tape, narrow_b)
    return op.bmm(tape, first, second, (features, heads, 0))

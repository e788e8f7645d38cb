"""Attention scores, softmax and the weighted sum of values, for each attention kernel.

Sources: transformers 5.23 `integrations/sdpa_attention.py`, `models/llama/modeling_llama.py`
(`eager_attention_forward`); pytorch 2.13 `aten/src/ATen/native/transformers/attention.cpp` and `transformers/cuda/`.
"""

from planner.memory.dtypes import FLOAT32_BYTES
from planner.memory.layers import operators as op
from planner.memory.layers.autograd import Tape, Tensor
from planner.memory.layers.recipe import Recipe, scores, tokens
from planner.memory.layers.rotary import CONCATENATED_STYLES
from planner.models.layers import Attention

# Float32 copies of a layer's attention output while a ring merges two blocks: the sum so far, the new block, their
# difference and its product with the weight.
# Source: torch 2.13, distributed/tensor/experimental/_context_parallel/_attention.py, `_SDPAMerger._merge_one`.
MERGED_OUTPUTS = 4
# Float32 copies of the gradients of keys and values: the sum, the sum side by side to be sent, and the received one.
# Source: the same file, `_templated_ring_attention_backward`.
RING_GRADIENTS = 3
# Kernels that get keys and values repeated for every query head.
REPEATING = ("efficient", "efficient_unmasked", "math")
WIDEST_IN_REGISTERS = 128  # features of a head that the efficient kernel accumulates in registers


def attend(
    tape: Tape, recipe: Recipe, block: Attention, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor | None]:
    """The attention output, and the probabilities that eager attention returns too (kept by the layer)."""
    if recipe.kernel in ("eager", "eager_masked"):
        return eager_attention(tape, recipe, block, q, k, v)
    mixed = sdpa(tape, recipe, block, q, k, v)
    return (op.clone(tape, mixed) if output_needs_copy(recipe, block) else mixed), None


def output_needs_copy(recipe: Recipe, block: Attention) -> bool:
    """True if the kernel's output lies in memory as [rows, heads, length, head_dim], so that `contiguous()` copies it.

    FlashAttention's output has the layout of its queries (flash_api.cpp `empty_like(q)`, on the CPU too); the efficient
    kernel's output never has this layout on CUDA.
    """
    follows = recipe.kernel == "flash" or (recipe.kernel == "efficient" and not recipe.on_cuda)
    return recipe.kernel == "math" or (follows and block.rotary and block.rotary_style in CONCATENATED_STYLES)


def ulysses_copies(recipe: Recipe, block: Attention) -> int:
    """Copies of each head of keys and values, of which every GPU of Ulysses needs one at least.

        copies = GPUs // heads of keys, or 1

    Source: deepspeed 0.19.8, runtime/sequence_parallel/ulysses_sp.py, `UlyssesSPAttentionHF.__init__`
    (`kv_replication_factor`), `_combine_local_sequences` (`repeat_interleave`).
    Example: Qwen2.5-3B has 2 heads of keys: 4 copies on 8 GPUs.
    """
    if recipe.ulysses_gpus == 1:  # a GPU's part of a layer that tensor parallelism divides may have no head of keys
        return 1
    return max(1, recipe.ulysses_gpus // block.num_key_value_heads)


def repeat_kv(tape: Tape, block: Attention, x: Tensor, head_dim: int) -> Tensor:
    """Keys or values repeated for every query head: a copy if several query heads share them, else x itself."""
    if block.num_attention_heads == block.num_key_value_heads:
        return x
    return op.expand_copy(tape, x, tokens(block.num_attention_heads * head_dim))


def view_kv(tape: Tape, block: Attention, x: Tensor, head_dim: int) -> Tensor:
    """Keys or values of a single head, repeated for every query head: `repeat_kv` makes a view of them."""
    return op.expand_view(tape, x, tokens(block.num_attention_heads * head_dim))


def math_attention(tape: Tape, recipe: Recipe, block: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The fallback kernel of sdpa, which computes the scores of every head in float32.

    It casts 16-bit inputs to float32 first, and casts the probabilities back although nothing uses them. The causal
    mask is one float32 per score of a single row; it is counted for every row.

    Source: attention.cpp, `_scaled_dot_product_attention_math`.
    """
    heads, width = block.num_attention_heads, q.width
    wide_q, wide_k, wide_v = op.cast(tape, q, 4), op.cast(tape, k, 4), op.cast(tape, v, 4)
    scaled_q = op.scale(tape, wide_q)
    mask = tape.empty(scores(1), 4)
    scaled_k = op.scale(tape, wide_k)
    raw = op.bmm(tape, scaled_q, scaled_k, scores(heads))
    del scaled_k
    probabilities = op.softmax(tape, raw, recipe.on_cuda)
    tape.empty(scores(heads), 1)  # mask of `_safe_softmax`: rows without any score
    del raw
    if block.dropout and recipe.dropout:
        probabilities = op.dropout(tape, probabilities, recipe.on_cuda)
    narrow = tape.empty(scores(heads), width)
    copied_v = op.clone(tape, wide_v) if recipe.several_rows else op.view(tape, wide_v)
    mixed = op.bmm(tape, probabilities, copied_v, tokens(heads * block.v_head_dim))
    result = op.cast(tape, mixed, width)
    del mask, narrow
    return result


def sdpa(tape: Tape, recipe: Recipe, block: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch scaled_dot_product_attention, or for "flash_varlen" the flash-attn package, which removes padding.

    "tree" gathers the keys and values before each completion and its own (trl 1.16,
    experimental/async_grpo/packing.py, `tree_attention`).
    """
    if recipe.kernel in REPEATING:
        repeat = view_kv if block.num_key_value_heads == 1 else repeat_kv
        k, v = repeat(tape, block, k, block.head_dim), repeat(tape, block, v, block.v_head_dim)
    width = recipe.autocast_width or q.width
    narrow_v, narrow_k, narrow_q = op.cast(tape, v, width), op.cast(tape, k, width), op.cast(tape, q, width)
    if (copies := ulysses_copies(recipe, block)) > 1 and recipe.kernel not in REPEATING:
        narrow_k = op.expand_copy(tape, narrow_k, tokens(copies * block.k_dim))
        narrow_v = op.expand_copy(tape, narrow_v, tokens(copies * block.v_dim))
    if recipe.kernel == "math":
        return math_attention(tape, recipe, block, narrow_q, narrow_k, narrow_v)
    if recipe.kernel == "tree":
        k, v = (op.index(tape, x, None, tokens(round(x.elements[0] * recipe.key_copies))) for x in (narrow_k, narrow_v))
        return fused_attention(tape, recipe, block, narrow_q, k, v)
    if recipe.kernel == "flash_varlen":
        return unpadded_attention(tape, recipe, block, narrow_q, narrow_k, narrow_v)
    return fused_attention(tape, recipe, block, narrow_q, narrow_k, narrow_v)


def unpadded_attention(tape: Tape, recipe: Recipe, block: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Gather the tokens that are not padding, run FlashAttention on them, and scatter the result.

    Counts rows without any padding, the worst case.
    Source: transformers 5.23, modeling_flash_attention_utils.py, `_upad_input` and `_pad_input`.
    """
    k, v = op.index(tape, k, None, k.elements), op.index(tape, v, None, v.elements)
    q = op.index(tape, q, None, q.elements)
    mixed = fused_attention(tape, recipe, block, q, k, v)
    return op.index(tape, mixed, None, mixed.elements)


def fused_attention(tape: Tape, recipe: Recipe, block: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FlashAttention or the memory-efficient kernel: saves q, k, v, the output, and one float32 per head and token.

    Of a row that GPUs share, `exchanged_bytes` beside them.

    The memory-efficient kernel runs if there is a mask. It converts the mask to the compute dtype (2 bytes per score)
    in every layer and saves it (attention.cpp, `convert_boolean_attn_mask`). For heads of more than 128 features it
    also accumulates its output in float32 (mem_eff_attention/kernel_forward.h, `kNeedsOutputAccumulatorBuffer`).

    Leaves out: rounding of rows to 128 tokens and of masks to 16 columns, and the buffers of split keys and values.
    """
    heads, out_features = block.num_attention_heads, block.num_attention_heads * block.v_head_dim
    mask = tape.empty(scores(1), q.width) if recipe.kernel == "efficient" else None
    saved = tape.save(q, k, v, mask) if q.requires_grad else []
    result = tape.empty(tokens(out_features), q.width)
    logsumexp = tape.empty(tokens(heads), 4)
    if recipe.on_cuda and recipe.kernel.startswith("efficient") and block.v_head_dim > WIDEST_IN_REGISTERS:
        tape.empty(tokens(out_features), 4)
    exchanged, exchanged_backward = exchanged_bytes(recipe, block, q.width)
    tape.empty(tokens(exchanged), 1)
    saved += tape.save(result, logsumexp) if q.requires_grad else []
    workspace = backward_workspace(recipe, block) if recipe.on_cuda else ()
    sizes, width = (q.elements, k.elements, v.elements), q.width

    def backward(gradient: Tensor) -> list[Tensor | None]:
        gradients: list[Tensor | None] = [tape.empty(size, width) for size in sizes]
        held = [tape.empty(tokens(features), bytes_each or width) for features, bytes_each in workspace]
        held.append(tape.empty(tokens(exchanged_backward), 1))
        held.clear()
        return gradients

    return tape.output(result, (q, k, v), saved, backward)


def exchanged_bytes(recipe: Recipe, block: Attention, width: int) -> tuple[int, int]:
    """Bytes a token with which n GPUs exchange a row, beside a fused kernel's own: (forward, backward); without, 0.

    With q, kv the elements of a token's query, and of its key and value together, in 16 bits unless noted:

        ring      forward: n kv gathered + 4 q in float32, merged outputs
                  backward: n kv gathered + kv side by side + (q + 3 kv) in float32, sums of gradients + (q + kv) of the
                  block before - half of this block's kv, and of their copies for each query head
        Ulysses   forward: q + kv before the exchange + 2 q, the output when it is received and copied

    These are the bytes of the last of the GPUs. The others merge halves of their outputs, in less.

    Source: torch 2.13, distributed/tensor/experimental/_context_parallel/_attention.py, `_templated_ring_attention`,
    `_SDPAMerger._merge_one`, `_templated_ring_attention_backward` (accelerate 1.15 sets its "allgather",
    utils/dataclasses.py, `TorchContextParallelConfig.__post_init__`); deepspeed 0.19.8,
    runtime/sequence_parallel/ulysses_sp.py, `_combine_local_sequences`, `_partition_global_sequence`.

    Example: Qwen3-4B on 8 GPUs that share a row in a ring: 98,304 bytes forward, 92,160 backward.

    Keys and values that Ulysses repeats are the kernel's own: `ulysses_copies`.
    """
    q, kv = block.q_dim, block.k_dim + block.v_dim
    if recipe.ulysses_gpus > 1:
        return (3 * q + kv) * width, 0
    if recipe.ring_gpus == 1:
        return 0, 0
    gathered = recipe.ring_gpus * kv * width
    repeated = (block.q_dim + block.num_attention_heads * block.v_head_dim) if block.k_dim < block.q_dim else 0
    sums = (q + RING_GRADIENTS * kv) * FLOAT32_BYTES
    backward = gathered + sums + (kv + q + kv - (kv + repeated) // 2) * width
    return gathered + MERGED_OUTPUTS * q * FLOAT32_BYTES, backward


def backward_workspace(recipe: Recipe, block: Attention) -> tuple[tuple[int, int], ...]:
    """Temporaries of a fused kernel's backward pass on one GPU, as pairs (features per token, width of one).

        heads x 4 bytes (softmax_d, delta)
        + heads x padded head x 4 bytes (dq accumulated in float32)
        + heads x (head_dim + v_head_dim) x input width (dk and dv of every query head, if several share keys)

    A padded head is head_dim rounded up to a multiple of 32, above 128 features to a multiple of 64. The last term is
    FlashAttention's, and the memory-efficient kernel's since torch 2.14 (results/torch_releases.md); before, that one
    gets repeated keys and values. Width 0 means the inputs' width.

    Source: pytorch v2.13 aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp `mha_bwd`;
    attention_backward.cu `_efficient_attention_backward` with mem_eff_attention/kernel_backward.h `workspace_size`
    (`kNeedsAccumGradQ`).

    Example: Llama-3-8B (32 heads of 128, 8 of keys): 4 x 32 + 4 x 4,096 + 2 x 2 x 4,096 = 32,896 bytes per token.
    """
    heads = block.num_attention_heads
    multiple = 32 if block.head_dim <= WIDEST_IN_REGISTERS else 64
    rounded = -(-block.head_dim // multiple) * multiple
    shared = block.num_key_value_heads < heads and recipe.kernel not in ("efficient", "efficient_unmasked")
    return ((heads, 4), (heads * rounded, 4), *(((block.q_dim, 0), (heads * block.v_head_dim, 0)) if shared else ()))


def eager_attention(
    tape: Tape, recipe: Recipe, block: Attention, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention with the whole score matrix of every head in memory.

    A mask is always added, also where a causal kernel would need none (masking_utils.py, `eager_mask`).
    """
    heads = block.num_attention_heads
    own_heads = heads == block.num_key_value_heads and recipe.several_rows
    all_k = repeat_kv(tape, block, k, block.head_dim)
    all_v = repeat_kv(tape, block, v, block.v_head_dim)
    strided = not (block.rotary and block.rotary_style in CONCATENATED_STYLES)
    raw = matmul(tape, recipe, q, all_k, heads, 0, copies=(recipe.several_rows and strided, own_heads and strided))
    weights = op.scale(tape, raw)
    del raw
    if block.softcap:
        weights = op.scale(tape, weights)
        weights = op.unary(tape, weights, "output", temporaries=0)  # tanh
        weights = op.scale(tape, weights)
    weights = op.add(tape, weights, Tensor(None, scores(1), recipe.stream_width))
    probabilities = (
        softmax_with_sinks(tape, recipe, block, weights, v.width)
        if block.sink_params
        else attention_softmax(tape, recipe, block, weights, q.width)
    )
    weights = probabilities
    del probabilities
    if block.dropout and recipe.dropout:
        weights = op.dropout(tape, weights, recipe.on_cuda)
    result = matmul(tape, recipe, weights, all_v, 0, heads * block.v_head_dim, copies=(False, own_heads))
    return op.clone(tape, result), weights


def attention_softmax(tape: Tape, recipe: Recipe, block: Attention, weights: Tensor, width: int) -> Tensor:
    """softmax(weights, dtype=float32).to(query.dtype).

    gpt2 and falcon pass no dtype; for them autocast chooses float32 on CUDA.
    """
    wide = block.softmax_float32 or (recipe.autocast_width > 0 and recipe.on_cuda)
    probabilities = op.softmax(tape, weights, recipe.on_cuda, wide, recipe.half)
    return op.cast(tape, probabilities, width)


def softmax_with_sinks(tape: Tape, recipe: Recipe, block: Attention, weights: Tensor, width: int) -> Tensor:
    """Softmax of gpt_oss with attention sinks.

    Appends one sink score per head and query, subtracts the largest score, applies softmax in the scores' dtype,
    removes the sink's column and casts to the dtype of the values. All intermediate results are alive at the end
    (transformers 5.23, modeling_gpt_oss.py, `eager_attention_forward`). The softmax call names its dtype, so autocast
    on CUDA does not change it (autocast_mode.h, `fp32_set_opt_dtype`).
    """
    sinks = tape.weight(block.sink_params, recipe.weight_width, recipe.trainable)
    joined = op.cat_column(tape, weights, sinks, block.num_attention_heads)
    largest, positions = op.max_last(tape, joined, tokens(block.num_attention_heads))
    shifted = op.subtract(tape, joined, largest)
    del largest, positions, joined
    probabilities = op.softmax(tape, shifted, recipe.on_cuda, float32=False)
    return op.cast(tape, op.slice_view(tape, probabilities, weights.elements), width)


def matmul(
    tape: Tape, recipe: Recipe, a: Tensor, b: Tensor, heads: int, features: int, copies: tuple[bool, bool]
) -> Tensor:
    """torch.matmul of two 4-dimensional tensors: copies those that cannot be viewed as a batch of matrices, then bmm.

    `copies` says which of a and b are copied. The result has `heads` elements per score or `features` per token; the
    other one is 0.
    """
    width = recipe.autocast_width or a.width
    narrow_b, narrow_a = op.cast(tape, b, width), op.cast(tape, a, width)
    first = op.clone(tape, narrow_a) if copies[0] else op.view(tape, narrow_a)
    second = op.clone(tape, narrow_b) if copies[1] else op.view(tape, narrow_b)
    return op.bmm(tape, first, second, (features, heads, 0))

"""The attention block around its kernel: projections, norms of queries and keys, rotary positions, output projection.

Source: transformers 5.23 `models/<family>/modeling_<family>.py`, `*Attention.forward`.

Heads are views [rows, heads, length, head_dim] of a projection's output. A gradient that has that order in memory is
copied by the backward pass of the view.
"""

from msgspec.structs import replace

from planner.memory.dtypes import FLOAT32_BYTES, INT32_BYTES, INT64_BYTES
from planner.memory.layers import operators as op
from planner.memory.layers.attention import attend
from planner.memory.layers.autograd import Size, Tape, Tensor
from planner.memory.layers.fused_adapters import fused_projections, fuses
from planner.memory.layers.linear import linear
from planner.memory.layers.norm import norm
from planner.memory.layers.recipe import Recipe, scores, tokens
from planner.memory.layers.rotary import rotary
from planner.models.layers import Attention, Layer, Norm

Held = Tensor | tuple[Tensor | None, ...] | None  # tensors that variables of a layer's forward pass hold to its end
INDEXER = 3  # projections of the indexer of sparse attention, the last ones of a layer's attention


def self_attention(tape: Tape, recipe: Recipe, block: Attention, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """The block's output, and the probabilities that eager attention also returns."""
    q, k, v = query_key_value_heads(tape, recipe, block, x)
    if block.qkv_layout == "grouped_repeated":
        block = replace(block, num_key_value_heads=block.num_attention_heads)
    if block.rotary:
        rotated = rotary(tape, recipe, block, q, k)
        q, k = rotated[:2]
    if block.in_pieces:
        mixed, pieces = attend_in_pieces(tape, recipe, block, q, k, v)
        result = linear(tape, recipe, block.linears[-1], mixed, flat=True)
        del pieces
        return result, None
    mixed, weights = attend(tape, recipe, block, q, k, v)
    if fuses(recipe, "o", block.linears[-1:]):
        return fused_projections(tape, recipe, block.linears[-1:], mixed)[0], weights
    return linear(tape, recipe, block.linears[-1], mixed, flat=block.qkv_layout == "unbound"), weights


def attend_in_pieces(
    tape: Tape, recipe: Recipe, block: Attention, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor | None]]:
    """Attention of each image or window apart; the outputs are joined, and lists of the model's code hold the parts.

    Source: transformers 5.23, models/qwen2_vl/modeling_qwen2_vl.py, `VisionAttention.forward`.
    """
    parts = [op.split(tape, each, (each.elements[0],))[0] for each in (q, k, v)]
    pieces = attend(tape, recipe, block, *parts)
    return op.cat(tape, (pieces[0],)), pieces


def query_key_value_heads(tape: Tape, recipe: Recipe, block: Attention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of every head, after their norms."""
    if block.qkv_layout != "separate":
        return fused_heads(tape, recipe, block, x)
    if fuses(recipe, "qkv", block.linears[:3]):
        joined = fused_projections(tape, recipe, block.linears[:3], x)
        q, k, v = (heads_of(tape, recipe, block, i, each) for i, each in enumerate(joined))
        del joined
    elif block.qk_norm_each:
        q = norm(tape, recipe, query_norm(block, block.q_dim), project_heads(tape, recipe, block, 0, x), "query_norm")
        k = norm(tape, recipe, query_norm(block, block.k_dim), project_heads(tape, recipe, block, 1, x), "query_norm")
        return q, k, project_heads(tape, recipe, block, 2, x)
    else:
        q = project_heads(tape, recipe, block, 0, x)
        if block.query_scaled:
            q = op.scale(tape, q)
        k, v = project_heads(tape, recipe, block, 1, x), project_heads(tape, recipe, block, 2, x)
    if block.qk_norm != "none":
        q = norm(tape, recipe, query_norm(block, block.q_dim), q, "query_norm")
        k = norm(tape, recipe, query_norm(block, block.k_dim), k, "query_norm")
    return q, k, v


def project_heads(tape: Tape, recipe: Recipe, block: Attention, i: int, x: Tensor) -> Tensor:
    """The heads of query (`i` 0), key (1) or value (2) projection."""
    return heads_of(tape, recipe, block, i, linear(tape, recipe, block.linears[i], x))


def heads_of(tape: Tape, recipe: Recipe, block: Attention, i: int, out: Tensor) -> Tensor:
    """The heads of a projection's output.

    FlashAttention returns the gradients of values, and of queries and keys without rotary positions, in the memory
    order of the projection, so that the view does not copy them.
    """
    in_order = (i == 2 or not block.rotary) and recipe.kernel == "flash"
    return op.view(tape, out) if in_order else op.view_with_copied_gradient(tape, out)


def query_norm(block: Attention, features: int) -> Norm:
    """The norm of queries or keys: its weight is shared by all heads, or has one number per feature of every head."""
    over = block.head_dim if block.qk_norm == "head" else features
    shared = block.qk_norm_params % (block.q_dim + block.k_dim) > 0
    params = block.qk_norm_params // 2 if shared else block.qk_norm_params * features // (block.q_dim + block.k_dim)
    return Norm(kind=block.qk_norm_kind, features=over, params=params)


def fused_heads(tape: Tape, recipe: Recipe, block: Attention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as parts of one projection.

    Falcon with a single key and value head ("multi_query") indexes them, which copies; with several
    ("grouped_repeated") it repeats them for every query head.
    """
    joined = linear(tape, recipe, block.linears[0], x, flat=block.qkv_layout == "unbound")
    sizes = (block.q_dim, block.k_dim, block.v_dim)
    if block.qkv_layout == "unbound":  # the backward pass stacks three gradients, then puts them side by side
        joined = op.view_with_copied_gradient(tape, joined)
    if block.qkv_layout in ("split", "heads_chunked", "unbound"):
        q, k, v = op.split(tape, joined, sizes)
        return q, k, v
    q = op.slice_view(tape, joined, tokens(sizes[0]))
    if block.qkv_layout == "multi_query":
        return q, op.index(tape, joined, None, tokens(sizes[1])), op.index(tape, joined, None, tokens(sizes[2]))
    k, v = op.slice_view(tape, joined, tokens(sizes[1])), op.slice_view(tape, joined, tokens(sizes[2]))
    if block.qkv_layout == "grouped_repeated":
        return op.clone(tape, q), op.expand_copy(tape, k, tokens(sizes[0])), op.expand_copy(tape, v, tokens(sizes[0]))
    return q, k, v


def latent_attention(tape: Tape, recipe: Recipe, layer: Layer, x: Tensor) -> tuple[Tensor, Held]:
    """DeepSeek's multi-head latent attention (modeling_deepseek_v3.py), sparse with `index_topk`.

    Queries, and keys with values, each pass two low-rank projections with a norm between. Returns the output and what
    the layer holds beside it to its end: the probabilities that eager attention also returns, and the chosen tokens.
    """
    block = layer.attention
    *queries, down, up, out = block.linears[:-INDEXER] if block.index_heads else block.linears
    latent_norms = layer.norms[2:4]
    q = linear(tape, recipe, queries[0], x)
    latent_query = None
    if len(queries) == 2:
        q = norm(tape, recipe, latent_norms[0], q)
        latent_query = q if block.index_topk else None  # a variable of the sparse attention
        q = linear(tape, recipe, queries[1], q)
    rope = block.kv_latent_dim - up.in_features
    turning = rope * block.num_attention_heads
    q_pass, q_turn = op.split(tape, op.view_with_copied_gradient(tape, q), (block.q_dim - turning, turning))
    compressed = linear(tape, recipe, down, x)
    latent, k_turn = op.split(tape, compressed, (up.in_features, rope))
    latent = norm(tape, recipe, latent_norms[-1], latent)
    q_turn, k_turn = rotary(tape, recipe, block, q_turn, k_turn)[:2]
    q_all = op.cat(tape, (q_pass, q_turn))
    expanded = linear(tape, recipe, up, latent)
    k_pass, v = op.split(tape, expanded, (block.k_dim - turning, block.v_dim))
    k = op.cat(tape, (k_pass, op.view(tape, k_turn, tokens(turning))), width=expanded.width)
    if not block.index_topk:
        mixed, weights = attend(tape, recipe, block, q_all, k, v)
        return linear(tape, recipe, out, mixed), weights
    chosen = None
    if latent_query is not None and block.index_heads:
        chosen = index_tokens(tape, recipe, layer, x, latent_query)
    masks = sparse_masks(tape, recipe, block)
    mixed, weights = attend(tape, recipe, block, q_all, k, v)
    mixed = linear(tape, recipe, out, mixed)
    del masks, latent_query
    return mixed, (weights, chosen)


def index_tokens(tape: Tape, recipe: Recipe, layer: Layer, x: Tensor, latent_query: Tensor) -> Tensor:
    """Return the `index_topk` tokens before each token that an indexer chooses, as int32, without gradients.

    Scores of every head and pair of tokens are computed in float32, by autocast in 16 bits; several rows copy the keys
    for each token, because their expanded view is no batch of matrices.
    Source: transformers 5.23, models/glm_moe_dsa/modeling_glm_moe_dsa.py, `GlmMoeDsaIndexer.forward`; torch 2.13,
    aten/src/ATen/native/LinearAlgebra.cpp, `_matmul_impl`.
    """
    block = layer.attention
    heads, features = block.index_heads, block.index_head_dim
    to_queries, to_key, to_weights = block.linears[-INDEXER:]
    with tape.without_gradients():
        q = linear(tape, recipe, to_queries, latent_query)
        k = norm(tape, recipe, layer.norms[-1], linear(tape, recipe, to_key, x))
        turning = block.rotary_dim
        still = features - turning
        q_turn, q_pass = (op.slice_view(tape, q, tokens(heads * each)) for each in (turning, still))
        k_turn, k_pass = (op.slice_view(tape, k, tokens(each)) for each in (turning, still))
        q_turn, k_turn = rotary(tape, recipe, block, q_turn, k_turn)[:2]
        q, k = op.cat(tape, (q_turn, q_pass)), op.cat(tape, (k_turn, k_pass))
        width = recipe.autocast_width or FLOAT32_BYTES
        wide_q, wide_k = op.cast(tape, q, FLOAT32_BYTES), op.cast(tape, k, FLOAT32_BYTES)
        narrow_k, narrow_q = op.cast(tape, wide_k, width), op.cast(tape, wide_q, width)
        copied = tape.empty(scores(features), width) if recipe.several_rows else None
        found = tape.empty(scores(heads), width)
        del wide_q, wide_k, narrow_q, narrow_k, copied
        found = op.scale(tape, found)
        found = op.scale(tape, found)  # relu
        weights = op.cast(tape, linear(tape, recipe, to_weights, op.cast(tape, x, FLOAT32_BYTES)), FLOAT32_BYTES)
        weights = op.scale(tape, weights)
        sums = tape.empty(scores(1), width)
        inverted = tape.empty(scores(1), 1)
        sums = tape.empty(scores(1), sums.width)
        del inverted
        kept = kept_tokens(recipe, block)
        values, places = tape.empty(kept, sums.width), tape.empty(kept, INT64_BYTES)
        del values
        chosen = tape.empty(kept, INT32_BYTES)
        del places
        return chosen


def kept_tokens(recipe: Recipe, block: Attention) -> Size:
    """Element count of a tensor with the chosen tokens of each token: all of a short row, `index_topk` of a longer."""
    return scores(1) if recipe.row_length <= block.index_topk else tokens(block.index_topk)


def sparse_masks(tape: Tape, recipe: Recipe, block: Attention) -> tuple[Tensor, Tensor]:
    """Return the masks of the tokens that were not chosen, and of all that a token does not see.

    Source: modeling_glm_moe_dsa.py, `GlmMoeDsaAttention.forward` (`index_mask`).
    """
    eager = recipe.kernel == "eager_masked"
    ones = tape.empty(scores(1), 1)
    places = tape.empty(kept_tokens(recipe, block), INT64_BYTES)
    not_chosen = tape.empty(scores(1), 1)
    del ones, places
    if eager:
        return not_chosen, tape.empty(scores(1), recipe.stream_width)
    inverted = tape.empty(scores(1), 1)
    both = tape.empty(scores(1), 1)
    del inverted
    return not_chosen, both

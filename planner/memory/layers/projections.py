"""The attention block around its kernel: projections, norms of queries and keys, rotary positions, output projection.

Source: transformers 5.23 `models/<family>/modeling_<family>.py`, `*Attention.forward`.

Heads are views [rows, heads, length, head_dim] of a projection's output. A gradient that has that order in memory is
copied by the backward pass of the view.
"""

from msgspec.structs import replace

from planner.memory.layers import operators as op
from planner.memory.layers.attention import attend
from planner.memory.layers.autograd import Tape, Tensor
from planner.memory.layers.fused_adapters import fused_projections, fuses
from planner.memory.layers.linear import linear
from planner.memory.layers.norm import norm
from planner.memory.layers.recipe import Recipe, tokens
from planner.memory.layers.rotary import rotary
from planner.models.layers import Attention, Layer, Norm


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


def latent_attention(tape: Tape, recipe: Recipe, layer: Layer, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """DeepSeek's multi-head latent attention (modeling_deepseek_v3.py).

    Queries, and keys with values, each pass two low-rank projections with a norm between. Returns the output and the
    probabilities that eager attention also returns.
    """
    block = layer.attention
    *queries, down, up, out = block.linears
    latent_norms = layer.norms[2:]
    q = linear(tape, recipe, queries[0], x)
    if len(queries) == 2:
        q = norm(tape, recipe, latent_norms[0], q)
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
    mixed, weights = attend(tape, recipe, block, q_all, k, v)
    return linear(tape, recipe, out, mixed), weights

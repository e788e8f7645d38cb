"""Around the scores: projections, norms of queries and keys, rotary positions, the output projection.

Source: transformers 5.23 `models/<family>/modeling_<family>.py`, `*Attention.forward`. Heads are views `[rows, heads, length, head_dim]` of
what a projection gives; a gradient that comes back in that order of memory is copied by the view's backward.
"""

from dataclasses import replace

from planner.memory.layers import operators as op
from planner.memory.layers.attention import attend
from planner.memory.layers.autograd import Tape, Tensor
from planner.memory.layers.linear import linear
from planner.memory.layers.norm import norm
from planner.memory.layers.recipe import Recipe, tokens
from planner.memory.layers.rotary import rotary
from planner.models.shape import Attention, Layer, Norm


def self_attention(tape: Tape, recipe: Recipe, block: Attention, x: Tensor) -> tuple[Tensor, Tensor | None]:
    q, k, v = heads(tape, recipe, block, x)
    if block.qkv_layout == "grouped_repeated":
        block = replace(block, num_key_value_heads=block.num_attention_heads)
    if block.rotary:
        turned = rotary(tape, recipe, block, q, k)
        q, k = turned[:2]
    mixed, weights = attend(tape, recipe, block, q, k, v)
    return linear(tape, recipe, block.linears[-1], mixed), weights


def heads(tape: Tape, recipe: Recipe, block: Attention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of every head."""
    if block.qkv_layout != "separate":
        return fused_heads(tape, recipe, block, x)
    if block.qk_norm_each:
        q = norm(tape, recipe, query_norm(block, block.q_dim), projected(tape, recipe, block, 0, x))
        k = norm(tape, recipe, query_norm(block, block.k_dim), projected(tape, recipe, block, 1, x))
        return q, k, projected(tape, recipe, block, 2, x)
    q = projected(tape, recipe, block, 0, x)
    if block.query_scaled:
        q = op.scale(tape, q)
    k, v = projected(tape, recipe, block, 1, x), projected(tape, recipe, block, 2, x)
    if block.qk_norm != "none":
        q = norm(tape, recipe, query_norm(block, block.q_dim), q)
        k = norm(tape, recipe, query_norm(block, block.k_dim), k)
    return q, k, v


def projected(tape: Tape, recipe: Recipe, block: Attention, i: int, x: Tensor) -> Tensor:
    """One projection's heads. Flash attention gives the gradient of values in the projection's own order."""
    out = linear(tape, recipe, block.linears[i], x)
    in_order = (i == 2 or not block.rotary) and recipe.kernel == "flash"
    return op.view(tape, out) if in_order else op.view_copied_back(tape, out)


def query_norm(block: Attention, features: int) -> Norm:
    """One weight for all heads, or one for every feature of every head (cohere)."""
    over = block.head_dim if block.qk_norm == "head" else features
    shared = block.qk_norm_params % (block.q_dim + block.k_dim) > 0
    params = block.qk_norm_params // 2 if shared else block.qk_norm_params * features // (block.q_dim + block.k_dim)
    return Norm(kind=block.qk_norm_kind, features=over, params=params)


def fused_heads(tape: Tape, recipe: Recipe, block: Attention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Parts of one projection. Falcon's single key and value head are gathered, its shared ones copied to every query head."""
    joined = linear(tape, recipe, block.linears[0], x)
    sizes = (block.q_dim, block.k_dim, block.v_dim)
    if block.qkv_layout in ("split", "heads_chunked"):
        q, k, v = op.split(tape, joined, sizes)
        return q, k, v
    q = op.part(tape, joined, tokens(sizes[0]))
    if block.qkv_layout == "multi_query":
        return q, op.index(tape, joined, None, tokens(sizes[1])), op.index(tape, joined, None, tokens(sizes[2]))
    k, v = op.part(tape, joined, tokens(sizes[1])), op.part(tape, joined, tokens(sizes[2]))
    if block.qkv_layout == "grouped_repeated":
        return op.clone(tape, q), op.expanded(tape, k, tokens(sizes[0])), op.expanded(tape, v, tokens(sizes[0]))
    return q, k, v


def latent_attention(tape: Tape, recipe: Recipe, layer: Layer, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """DeepSeek's: queries, and keys and values, through low-rank projections with norms between (modeling_deepseek_v3.py)."""
    block = layer.attention
    *queries, down, up, out = block.linears
    latent_norms = layer.norms[2:]
    q = linear(tape, recipe, queries[0], x)
    if len(queries) == 2:
        q = norm(tape, recipe, latent_norms[0], q)
        q = linear(tape, recipe, queries[1], q)
    rope = block.kv_latent_dim - up.in_features
    turning = rope * block.num_attention_heads
    q_pass, q_turn = op.split(tape, op.view_copied_back(tape, q), (block.q_dim - turning, turning))
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

"""The forward pass of one decoder layer, one function a program, as the model's source writes it.

Sources: transformers 5.23 `models/<family>/modeling_<family>.py`, `*DecoderLayer.forward`, `*Attention.forward`.
"""

from collections.abc import Callable

from planner.memory.autograd import Tape, Tensor
from planner.memory.modules import Recipe, attend, experts, linear, mlp, norm, rotary, tokens
from planner.model import Attention, Experts, Layer, LayerProgram, Norm


def self_attention(tape: Tape, recipe: Recipe, block: Attention, x: Tensor) -> Tensor:
    """Projections, norms of queries and keys, rotary positions, scores, output projection."""
    if len(block.linears) == 2:  # one projection for queries, keys and values
        q, k, v = fused_qkv(tape, recipe, block, x)
    else:
        q, k, v = (linear(tape, recipe, module, x) for module in block.linears[:3])
    del x
    if block.qk_norm != "none":
        q = norm(tape, recipe, query_norm(block, block.q_dim), q)
        k = norm(tape, recipe, query_norm(block, block.k_dim), k)
    if block.rotary:
        q, k = rotary(tape, q), rotary(tape, k)
        if recipe.autocast_width == 0 or q.width != recipe.autocast_width:
            q, k = q, k
    mixed = attend(tape, recipe, block, q, k, v)
    return linear(tape, recipe, block.linears[-1], mixed)


def fused_qkv(tape: Tape, recipe: Recipe, block: Attention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views of one tensor; the gradient of each is spread into zeros of the whole."""
    joined = linear(tape, recipe, block.linears[0], x)
    whole, width = joined.elements, joined.width

    def part(features: int) -> Tensor:
        view = Tensor(joined.storage, tokens(features), width)
        return tape.output(view, (joined,), [], lambda gradient: (tape.empty(whole, width),))

    return part(block.q_dim), part(block.k_dim), part(block.v_dim)


def query_norm(block: Attention, features: int) -> Norm:
    over = block.head_dim if block.qk_norm == "head" else features
    return Norm(kind=block.qk_norm_kind, features=over, params=over)


def feed_forward(tape: Tape, recipe: Recipe, layer: Layer, x: Tensor) -> Tensor:
    block = layer.feed_forward
    if not isinstance(block, Experts):
        return mlp(tape, recipe, block, x)
    routed = experts(tape, recipe, block, x)
    if block.shared is None:
        return routed
    return tape.add(routed, mlp(tape, recipe, block.shared, x))


def llama(tape: Tape, recipe: Recipe, layer: Layer, x: Tensor) -> Tensor:
    """norm, attention, add, norm, MLP, add."""
    before, after = layer.norms
    residual = x
    x = norm(tape, recipe, before, x)
    x = self_attention(tape, recipe, layer.attention, x)
    x = tape.add(residual, x)
    residual = x
    x = norm(tape, recipe, after, x)
    x = feed_forward(tape, recipe, layer, x)
    return tape.add(residual, x)


def gemma2(tape: Tape, recipe: Recipe, layer: Layer, x: Tensor) -> Tensor:
    """Norms before and after both blocks."""
    before_attention, after_attention, before_mlp, after_mlp = layer.norms
    residual = x
    x = norm(tape, recipe, before_attention, x)
    x = self_attention(tape, recipe, layer.attention, x)
    x = norm(tape, recipe, after_attention, x)
    x = tape.add(residual, x)
    residual = x
    x = norm(tape, recipe, before_mlp, x)
    x = feed_forward(tape, recipe, layer, x)
    x = norm(tape, recipe, after_mlp, x)
    return tape.add(residual, x)


def olmo2(tape: Tape, recipe: Recipe, layer: Layer, x: Tensor) -> Tensor:
    """Norms after both blocks only."""
    after_attention, after_mlp = layer.norms
    residual = x
    x = self_attention(tape, recipe, layer.attention, x)
    x = norm(tape, recipe, after_attention, x)
    x = tape.add(residual, x)
    residual = x
    x = feed_forward(tape, recipe, layer, x)
    x = norm(tape, recipe, after_mlp, x)
    return tape.add(residual, x)


def parallel(tape: Tape, recipe: Recipe, layer: Layer, x: Tensor) -> Tensor:
    """Attention and MLP both read the layer's input, through one norm or one each."""
    first, second = (*layer.norms, layer.norms[0])[:2]
    residual = x
    normed = norm(tape, recipe, first, x)
    attended = self_attention(tape, recipe, layer.attention, normed)
    if len(layer.norms) == 2:
        normed = norm(tape, recipe, second, x)
    del x
    fed = feed_forward(tape, recipe, layer, normed)
    del normed
    return tape.add(tape.add(fed, attended), residual)


def multi_latent(tape: Tape, recipe: Recipe, layer: Layer, x: Tensor) -> Tensor:
    """DeepSeek's attention: queries, and keys and values, through low-rank projections with norms between."""
    before, after = layer.norms
    residual = x
    x = norm(tape, recipe, before, x)
    x = latent_attention(tape, recipe, layer.attention, x)
    x = tape.add(residual, x)
    residual = x
    x = norm(tape, recipe, after, x)
    x = feed_forward(tape, recipe, layer, x)
    return tape.add(residual, x)


def latent_attention(tape: Tape, recipe: Recipe, block: Attention, x: Tensor) -> Tensor:
    """modeling_deepseek_v3.py, `DeepseekV3Attention.forward`; q_proj, or q_a_proj, norm and q_b_proj."""
    *queries, down, up, out = block.linears
    q = linear(tape, recipe, queries[0], x)
    if len(queries) == 2:
        q = norm(tape, recipe, Norm(kind="rms", features=queries[0].out_features, params=queries[0].out_features), q)
        q = linear(tape, recipe, queries[1], q)
    compressed = linear(tape, recipe, down, x)
    del x
    latent = tape.output(
        Tensor(compressed.storage, tokens(up.in_features), compressed.width), (compressed,), [], spread(tape, compressed)
    )
    latent = norm(tape, recipe, Norm(kind="rms", features=up.in_features, params=up.in_features), latent)
    expanded = linear(tape, recipe, up, latent)
    del latent
    v = tape.output(Tensor(expanded.storage, tokens(block.v_dim), expanded.width), (expanded,), [], spread(tape, expanded))
    k = tape.copy(expanded, tokens(block.k_dim))  # cat((k_nope, k_rope expanded to every head))
    q = tape.copy(q)  # cat((q_nope, q_rope))
    del compressed, expanded
    return linear(tape, recipe, out, attend(tape, recipe, block, q, k, v))


def spread(tape: Tape, whole: Tensor) -> Callable[[Tensor], tuple[Tensor]]:
    """The gradient of a part: zeros of the whole, and the part written into them."""
    elements, width = whole.elements, whole.width
    return lambda gradient: (tape.empty(elements, width),)


PROGRAMS: dict[LayerProgram, Callable[[Tape, Recipe, Layer, Tensor], Tensor]] = {
    "llama": llama,
    "gemma2": gemma2,
    "olmo2": olmo2,
    "parallel": parallel,
    "gpt2": llama,
    "opt": llama,
    "mla": multi_latent,
    "gpt_oss": llama,
}

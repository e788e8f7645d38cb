"""The forward pass of one decoder layer, one function per `LayerProgram`, line by line as the model's source.

Sources: transformers 5.23 `models/<family>/modeling_<family>.py`, `*DecoderLayer.forward`. A local variable of the
source that keeps a tensor alive is a local variable here: eager attention's probabilities live until the layer returns.
"""

from collections.abc import Callable

from planner.memory.layers import operators as op
from planner.memory.layers.autograd import Tape, Tensor
from planner.memory.layers.experts import experts
from planner.memory.layers.feed_forward import activate, mlp
from planner.memory.layers.fused_adapters import fused_mlp, fuses
from planner.memory.layers.linear import linear
from planner.memory.layers.norm import norm
from planner.memory.layers.projections import Held, latent_attention, self_attention
from planner.memory.layers.recipe import Recipe
from planner.models.layers import Experts, Layer, LayerProgram, Mlp, QkvLayout

# Layout of Falcon's projections in models with two norms in a layer.
FALCON_TWO_NORMS: QkvLayout = "grouped_repeated"


def feed_forward(tape: Tape, recipe: Recipe, layer: Layer, x: Tensor) -> Tensor:
    """The layer's MLP or its experts."""
    block = layer.feed_forward
    if isinstance(block, Experts):
        return experts(tape, recipe, block, x)
    if block.gated and len(block.linears) == 3 and fuses(recipe, "mlp", block.linears):
        return fused_mlp(tape, recipe, block, x)
    # the patches of a vision tower of qwen have no dimension for rows
    return mlp(tape, recipe, block, x, flat=layer.attention.qkv_layout == "unbound")


def block_dropout(tape: Tape, recipe: Recipe, layer: Layer, x: Tensor) -> Tensor:
    """Dropout on a block's output before it is added to the residual stream (gpt2, opt, phi3)."""
    if layer.residual_dropout and recipe.dropout:
        return op.dropout(tape, x, recipe.on_cuda)
    return x


def add_residual(tape: Tape, layer: Layer, residual: Tensor, x: Tensor) -> Tensor:
    """residual + x; granite computes residual + x * number."""
    return op.add(tape, residual, op.scale(tape, x) if layer.residual_scaled else x)


def attention_block(tape: Tape, recipe: Recipe, layer: Layer, x: Tensor) -> tuple[Tensor, Held]:
    """The attention block's output, and what it returns beside that, such as the probabilities of eager attention."""
    if layer.program == "mla":
        return latent_attention(tape, recipe, layer, x)
    return self_attention(tape, recipe, layer.attention, x)


def llama(tape: Tape, recipe: Recipe, layer: Layer, x: Tensor) -> Tensor:
    """Norm, attention, residual add, norm, MLP or experts, residual add."""
    before, after = layer.norms[:2]
    residual = x
    h = norm(tape, recipe, before, x)
    h, weights = attention_block(tape, recipe, layer, h)
    h = block_dropout(tape, recipe, layer, h)
    h = add_residual(tape, layer, residual, h)
    residual = h
    h = norm(tape, recipe, after, h)
    h = feed_forward(tape, recipe, layer, h)
    h = block_dropout(tape, recipe, layer, h)
    result = add_residual(tape, layer, residual, h)
    del weights
    return result


def gpt2(tape: Tape, recipe: Recipe, layer: Layer, x: Tensor) -> Tensor:
    """As `llama`, but the attention's output stays in a local variable to the end of the layer."""
    normed = norm(tape, recipe, layer.norms[0], x)
    mixed, weights = attention_block(tape, recipe, layer, normed)
    mixed = block_dropout(tape, recipe, layer, mixed)
    del normed
    residual = op.add(tape, mixed, x)
    result = second_half(tape, recipe, layer, residual)
    del weights, mixed
    return result


def stablelm(tape: Tape, recipe: Recipe, layer: Layer, x: Tensor) -> Tensor:
    """As `llama`, but the attention's output and the first norm's output stay in local variables to the end."""
    normed = norm(tape, recipe, layer.norms[0], x)
    mixed, weights = attention_block(tape, recipe, layer, normed)
    residual = op.add(tape, x, mixed)
    result = second_half(tape, recipe, layer, residual)
    del normed, mixed, weights
    return result


def second_half(tape: Tape, recipe: Recipe, layer: Layer, residual: Tensor) -> Tensor:
    """residual + MLP(norm(residual))."""
    h = norm(tape, recipe, layer.norms[1], residual)
    h = feed_forward(tape, recipe, layer, h)
    h = block_dropout(tape, recipe, layer, h)
    return op.add(tape, residual, h)


def opt(tape: Tape, recipe: Recipe, layer: Layer, x: Tensor) -> Tensor:
    """As `llama`, but the MLP is part of the layer, which frees the norm's output after the first projection."""
    before, after = layer.norms
    block = layer.feed_forward
    assert isinstance(block, Mlp)
    residual = x
    h = norm(tape, recipe, before, x)
    h, weights = attention_block(tape, recipe, layer, h)
    h = block_dropout(tape, recipe, layer, h)
    h = op.view(tape, op.add(tape, residual, h))
    residual = h
    h = norm(tape, recipe, after, h)
    h = linear(tape, recipe, block.linears[0], h, flat=True)
    h = activate(tape, recipe, block.activation, h)
    h = linear(tape, recipe, block.linears[1], h, flat=True)
    h = block_dropout(tape, recipe, layer, h)
    result = op.view(tape, op.add(tape, residual, h))
    del weights
    return result


def opt_post_norm(tape: Tape, recipe: Recipe, layer: Layer, x: Tensor) -> Tensor:
    """As `opt`, with a norm after each block, whose float32 output under autocast the next layer gets."""
    after_attention, after_mlp = layer.norms
    block = layer.feed_forward
    assert isinstance(block, Mlp)
    h, weights = attention_block(tape, recipe, layer, x)
    h = block_dropout(tape, recipe, layer, h)
    h = op.add(tape, x, h)
    h = op.view(tape, norm(tape, recipe, after_attention, h))
    residual = h
    h = linear(tape, recipe, block.linears[0], h, flat=True)
    h = activate(tape, recipe, block.activation, h)
    h = linear(tape, recipe, block.linears[1], h, flat=True)
    h = block_dropout(tape, recipe, layer, h)
    h = op.view(tape, op.add(tape, residual, h))
    result = norm(tape, recipe, after_mlp, h)
    del weights
    return result


def gemma2(tape: Tape, recipe: Recipe, layer: Layer, x: Tensor) -> Tensor:
    """As `llama`, with a norm before and a norm after each block."""
    before_attention, after_attention, before_mlp, after_mlp = layer.norms
    residual = x
    h = norm(tape, recipe, before_attention, x)
    h, weights = attention_block(tape, recipe, layer, h)
    h = norm(tape, recipe, after_attention, h)
    h = op.add(tape, residual, h)
    residual = h
    h = norm(tape, recipe, before_mlp, h)
    h = feed_forward(tape, recipe, layer, h)
    h = norm(tape, recipe, after_mlp, h)
    result = op.add(tape, residual, h)
    del weights
    return result


def olmo2(tape: Tape, recipe: Recipe, layer: Layer, x: Tensor) -> Tensor:
    """As `llama`, with a norm after each block instead of before it."""
    after_attention, after_mlp = layer.norms
    residual = x
    h, weights = attention_block(tape, recipe, layer, x)
    h = norm(tape, recipe, after_attention, h)
    h = op.add(tape, residual, h)
    residual = h
    h = feed_forward(tape, recipe, layer, h)
    h = norm(tape, recipe, after_mlp, h)
    result = op.add(tape, residual, h)
    del weights
    return result


def parallel(tape: Tape, recipe: Recipe, layer: Layer, x: Tensor) -> Tensor:
    """Attention and MLP both read the layer's input, through one shared norm or one norm each.

    Falcon computes both norms first, and variables hold them to the end.
    """
    normed = norm(tape, recipe, layer.norms[0], x)
    held = norm(tape, recipe, layer.norms[1], x) if layer.attention.qkv_layout == FALCON_TWO_NORMS else None
    mixed, weights = attention_block(tape, recipe, layer, normed)
    mixed = block_dropout(tape, recipe, layer, mixed)
    if held is None and len(layer.norms) == 2:
        del normed
        normed = norm(tape, recipe, layer.norms[1], x)
    fed = feed_forward(tape, recipe, layer, normed if held is None else held)
    fed = block_dropout(tape, recipe, layer, fed)
    result = sum_of_three(tape, layer, x, mixed, fed)
    del weights
    return result


def sum_of_three(tape: Tape, layer: Layer, residual: Tensor, mixed: Tensor, fed: Tensor) -> Tensor:
    """residual + mixed + fed: cohere adds the residual first, other models last."""
    first, last = (residual, fed) if layer.norms[0].kind == "layer_cohere" else (fed, residual)
    both = op.add(tape, first, mixed)
    return op.add(tape, both, last)


PROGRAMS: dict[LayerProgram, Callable[[Tape, Recipe, Layer, Tensor], Tensor]] = {
    "llama": llama,
    "gemma2": gemma2,
    "olmo2": olmo2,
    "parallel": parallel,
    "gpt2": gpt2,
    "stablelm": stablelm,
    "opt": opt,
    "opt_post_norm": opt_post_norm,
    "mla": llama,
    "gpt_oss": llama,
}

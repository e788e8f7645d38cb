"""The forward pass of one decoder layer, one function a program, as the model's source writes it.

Sources: transformers 5.23 `models/<family>/modeling_<family>.py`, `*DecoderLayer.forward`. A local variable that the source keeps
is kept here: eager attention's scores live until the layer returns.
"""

from collections.abc import Callable

from planner.memory.layers import operators as op
from planner.memory.layers.autograd import Tape, Tensor
from planner.memory.layers.experts import experts
from planner.memory.layers.feed_forward import activate, mlp
from planner.memory.layers.linear import linear
from planner.memory.layers.norm import norm
from planner.memory.layers.projections import latent_attention, self_attention
from planner.memory.layers.recipe import Recipe
from planner.models.shape import Experts, Layer, LayerProgram, Mlp


def feed_forward(tape: Tape, recipe: Recipe, layer: Layer, x: Tensor) -> Tensor:
    block = layer.feed_forward
    return experts(tape, recipe, block, x) if isinstance(block, Experts) else mlp(tape, recipe, block, x)


def weighed(tape: Tape, recipe: Recipe, layer: Layer, x: Tensor) -> Tensor:
    """What some families do to a block's output before it is added: dropout (gpt2, opt, phi3), a number (granite)."""
    if layer.residual_dropout and recipe.dropout:
        return op.dropout(tape, x, recipe.on_cuda)
    return x


def added(tape: Tape, layer: Layer, residual: Tensor, x: Tensor) -> Tensor:
    """residual + x, or residual + x * number (granite)."""
    return op.add(tape, residual, op.scale(tape, x) if layer.residual_scaled else x)


def attended(tape: Tape, recipe: Recipe, layer: Layer, x: Tensor) -> tuple[Tensor, Tensor | None]:
    if layer.program == "mla":
        return latent_attention(tape, recipe, layer, x)
    return self_attention(tape, recipe, layer.attention, x)


def llama(tape: Tape, recipe: Recipe, layer: Layer, x: Tensor) -> Tensor:
    """norm, attention, add, norm, MLP, add."""
    before, after = layer.norms[:2]
    residual = x
    h = norm(tape, recipe, before, x)
    h, weights = attended(tape, recipe, layer, h)
    h = weighed(tape, recipe, layer, h)
    h = added(tape, layer, residual, h)
    residual = h
    h = norm(tape, recipe, after, h)
    h = feed_forward(tape, recipe, layer, h)
    h = weighed(tape, recipe, layer, h)
    result = added(tape, layer, residual, h)
    del weights
    return result


def gpt2(tape: Tape, recipe: Recipe, layer: Layer, x: Tensor) -> Tensor:
    """The same; the attention's output is a local variable of its own."""
    normed = norm(tape, recipe, layer.norms[0], x)
    mixed, weights = attended(tape, recipe, layer, normed)
    mixed = weighed(tape, recipe, layer, mixed)
    del normed
    residual = op.add(tape, mixed, x)
    result = second_half(tape, recipe, layer, residual)
    del weights, mixed
    return result


def stablelm(tape: Tape, recipe: Recipe, layer: Layer, x: Tensor) -> Tensor:
    """The same; so is the first norm's output."""
    normed = norm(tape, recipe, layer.norms[0], x)
    mixed, weights = attended(tape, recipe, layer, normed)
    residual = op.add(tape, x, mixed)
    result = second_half(tape, recipe, layer, residual)
    del normed, mixed, weights
    return result


def second_half(tape: Tape, recipe: Recipe, layer: Layer, residual: Tensor) -> Tensor:
    h = norm(tape, recipe, layer.norms[1], residual)
    h = feed_forward(tape, recipe, layer, h)
    h = weighed(tape, recipe, layer, h)
    return op.add(tape, residual, h)


def opt(tape: Tape, recipe: Recipe, layer: Layer, x: Tensor) -> Tensor:
    """The same; the MLP is written into the layer, which drops the norm's output after its first projection."""
    before, after = layer.norms
    block = layer.feed_forward
    assert isinstance(block, Mlp)
    residual = x
    h = norm(tape, recipe, before, x)
    h, weights = attended(tape, recipe, layer, h)
    h = weighed(tape, recipe, layer, h)
    h = op.view(tape, op.add(tape, residual, h))
    residual = h
    h = norm(tape, recipe, after, h)
    h = linear(tape, recipe, block.linears[0], h, flat=True)
    h = activate(tape, recipe, block.activation, h)
    h = linear(tape, recipe, block.linears[1], h, flat=True)
    h = weighed(tape, recipe, layer, h)
    result = op.view(tape, op.add(tape, residual, h))
    del weights
    return result


def gemma2(tape: Tape, recipe: Recipe, layer: Layer, x: Tensor) -> Tensor:
    """Norms before and after both blocks."""
    before_attention, after_attention, before_mlp, after_mlp = layer.norms
    residual = x
    h = norm(tape, recipe, before_attention, x)
    h, weights = attended(tape, recipe, layer, h)
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
    """Norms after both blocks only."""
    after_attention, after_mlp = layer.norms
    residual = x
    h, weights = attended(tape, recipe, layer, x)
    h = norm(tape, recipe, after_attention, h)
    h = op.add(tape, residual, h)
    residual = h
    h = feed_forward(tape, recipe, layer, h)
    h = norm(tape, recipe, after_mlp, h)
    result = op.add(tape, residual, h)
    del weights
    return result


def parallel(tape: Tape, recipe: Recipe, layer: Layer, x: Tensor) -> Tensor:
    """Attention and MLP both read the layer's input, through one norm or one each."""
    normed = norm(tape, recipe, layer.norms[0], x)
    mixed, weights = attended(tape, recipe, layer, normed)
    mixed = weighed(tape, recipe, layer, mixed)
    if len(layer.norms) == 2:
        del normed
        normed = norm(tape, recipe, layer.norms[1], x)
    fed = feed_forward(tape, recipe, layer, normed)
    fed = weighed(tape, recipe, layer, fed)
    result = sum_of_three(tape, layer, x, mixed, fed)
    del weights
    return result


def sum_of_three(tape: Tape, layer: Layer, residual: Tensor, mixed: Tensor, fed: Tensor) -> Tensor:
    """cohere adds the residual first, the others last."""
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
    "mla": llama,
    "gpt_oss": llama,
}

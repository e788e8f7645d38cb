"""Memory of the module that joins the patches of an image to tokens of the language model.

Source: transformers 5.23, models/qwen2_vl/modeling_qwen2_vl.py, `PatchMerger`; models/qwen2_5_vl/modeling_qwen2_5_vl.py
(puts the tokens of windows back into the order of the image); models/mistral3/modeling_mistral3.py.
"""

from functools import lru_cache

from msgspec import Struct

from planner.memory.layers import operators as op
from planner.memory.layers.autograd import LiveBytes, Node, Tape, Tensor
from planner.memory.layers.feed_forward import activate
from planner.memory.layers.linear import linear
from planner.memory.layers.norm import norm
from planner.memory.layers.one_layer import PassPeak, above, take_peak
from planner.memory.layers.recipe import Recipe, tokens
from planner.models.image_tower import Merger


class MergerMemory(Struct, frozen=True):
    """The passes of a merger, for each token that it makes, above its input: the tower's output.

    `kept`: alive after the forward pass; `saved`: the part of it that the backward pass needs, less the input if that
    is freed. `backward` begins with the gradient of the tokens alive.
    """

    kept: LiveBytes
    saved: LiveBytes
    forward: PassPeak
    backward: PassPeak | None  # None: it has no backward pass


@lru_cache(maxsize=256)
def merger_memory(merger: Merger, recipe: Recipe, learns: bool, gradients_exist: bool) -> MergerMemory:
    """Run both passes of a merger. `learns`: the tower below builds a graph; `recipe.input_width`: of its output."""
    tape = Tape(grad_enabled=learns, gradients_exist=gradients_exist)
    x = tape.leaf(tokens(merger.linears[0].in_features), recipe.input_width or recipe.weight_width)
    before = tape.snapshot()
    joined, parts = _tokens(tape, recipe, merger, x)
    kept, forward = above(tape.snapshot(), before), take_peak(tape, before)
    tape.autocast_cache.clear()
    last, elements, width = joined.node, joined.elements, joined.width
    stays = x if merger.inside else None  # the next layer's input
    del x, joined, parts
    saved, tape.snapshots = above(tape.snapshot(), before), []
    backward = None
    if isinstance(last, Node):
        tape.run_backward({last: [tape.empty(elements, width)]})
        backward = take_peak(tape, before)
    del stays
    tape.close()
    return MergerMemory(kept, saved, forward, backward)


def _tokens(tape: Tape, recipe: Recipe, merger: Merger, x: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens of all images in one tensor, and those in one for each image, which the model's output holds."""
    *first, last = merger.linears
    h = norm(tape, recipe, merger.norm, x)
    squares = _unfolded(tape, h) if merger.unfolded else (h,)
    h = linear(tape, recipe, first[0], squares[-1], flat=True)
    del squares
    for each in first[1:]:
        h = linear(tape, recipe, each, h, flat=True)
    h = activate(tape, recipe, "gelu", h)
    h = linear(tape, recipe, last, h, flat=True)
    if merger.reordered:
        h = op.index(tape, h, None, h.elements)
    parts = op.split(tape, h, (h.elements[0],))[0]
    return op.cat(tape, (parts,)), parts


def _unfolded(tape: Tape, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The squares of all images, last, and what lives beside them until they are projected.

    Each image's squares are copied out of its grid (`unfold`, whose backward pass makes a new grid), then all are
    joined. Source: transformers 5.23, models/mistral3/modeling_mistral3.py, `Mistral3PatchMerger`.
    """
    each = op.index(tape, h, None, h.elements)
    return h, each, op.cat(tape, (each,))

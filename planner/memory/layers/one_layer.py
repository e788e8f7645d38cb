"""Saved activations and what one layer needs besides: coefficients per token, per score and constant, one run a recipe.

`layer_memory` plays a layer's forward and backward pass on the tape once; every batch size and length then costs a few
multiplications. `tests/test_activations.py` holds the saved bytes against real autograd, to the byte.
"""

from dataclasses import dataclass
from functools import lru_cache

from planner.memory.layers.autograd import NOTHING, LiveBytes, Node, Pending, Size, Tape, Tensor, moved
from planner.memory.layers.decoder import PROGRAMS
from planner.memory.layers.recipe import Recipe
from planner.models.shape import Layer


@dataclass(frozen=True, slots=True)
class PassPeak:
    """The moments of a pass that can be its peak for some size: none is below another in all three coefficients."""

    snapshots: tuple[LiveBytes, ...]

    def at(self, tokens: int, scores: int) -> tuple[int, LiveBytes]:
        """The peak's bytes and its moment for `tokens` = rows x length and `scores` = rows x length squared."""
        best, best_bytes = self.snapshots[0], -1
        for moment in self.snapshots:
            per_token, per_score, constant = moment.total
            total = per_token * tokens + per_score * scores + constant
            if total > best_bytes:
                best, best_bytes = moment, total
        return best_bytes, best


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """One layer among its like. All is counted above what was alive when its forward pass began, its input included.

    `saved` and `checkpoint`: what the layer adds for good, without and with checkpointing, its output included (which is
    the next one's input); autocast's copies, which go when the forward pass ends, are named apart in the moment.
    `forward`, `backward`: the moments of each pass; a backward pass begins with the gradient of the layer's output alive and its
    output gone. `inference`: a forward pass without gradients.
    """

    saved: LiveBytes
    checkpoint: LiveBytes
    forward: PassPeak
    checkpointed_forward: PassPeak
    backward: PassPeak
    checkpointed_backward: PassPeak
    inference: PassPeak


def upper_envelope(moments: list[LiveBytes]) -> PassPeak:
    """Drop every moment that another one is at least as large as in all coefficients."""
    kept: list[LiveBytes] = []
    for moment in sorted(moments, key=lambda moment: moment.total, reverse=True):
        if not any(all(a >= b for a, b in zip(other.total, moment.total, strict=True)) for other in kept):
            kept.append(moment)
    return PassPeak(tuple(kept))


def residual_width(recipe: Recipe) -> int:
    """Bytes of the residual stream: the embedding's dtype."""
    return recipe.weight_width


def peaks(tape: Tape, base: LiveBytes) -> PassPeak:
    """The tape's moments without what was alive before they began, and a fresh start for the next pass."""
    moments = [minus(moment, base) for moment in tape.snapshots]
    tape.snapshots = []
    return upper_envelope(moments)


def minus(moment: LiveBytes, base: LiveBytes) -> LiveBytes:
    before = dict(base.kinds)
    kinds = tuple((kind, subtract(size, before.get(kind, NOTHING))) for kind, size in moment.kinds)
    return LiveBytes(subtract(moment.total, base.total), kinds)


def subtract(a: Size, b: Size) -> Size:
    return (a[0] - b[0], a[1] - b[1], a[2] - b[2])


@lru_cache(maxsize=4096)
def layer_memory(layer: Layer, recipe: Recipe, gradients_exist: bool) -> LayerMemory:
    """Both passes of `layer`, with and without checkpointing. `gradients_exist`: an accumulation step after the first."""
    if layer.measure is not None:
        measured: LayerMemory = layer.measure(recipe, gradients_exist)
        return measured
    saved, forward, backward = plain_passes(layer, recipe, gradients_exist)
    checkpoint, checkpointed_forward, checkpointed_backward = checkpointed_passes(layer, recipe, gradients_exist)
    return LayerMemory(
        saved=saved,
        checkpoint=checkpoint,
        forward=forward,
        checkpointed_forward=checkpointed_forward,
        backward=backward,
        checkpointed_backward=checkpointed_backward,
        inference=inference_peaks(layer, recipe),
    )


def plain_passes(layer: Layer, recipe: Recipe, gradients_exist: bool) -> tuple[LiveBytes, PassPeak, PassPeak]:
    """Forward, everything kept; backward."""
    tape = Tape(gradients_exist=gradients_exist)
    x, before = layer_input(tape, layer, recipe)
    x = PROGRAMS[layer.program](tape, recipe, layer, x)
    keep(x)
    forward = peaks(tape, before)
    tape.autocast_cache.clear()
    saved = minus(tape.snapshot(), before)
    last, elements, width = x.node, x.elements, x.width
    assert isinstance(last, Node)
    del x
    tape.run_backward({last: [tape.empty(elements, width)]})
    tape.close()
    return saved, forward, peaks(tape, before)


def checkpointed_passes(layer: Layer, recipe: Recipe, gradients_exist: bool) -> tuple[LiveBytes, PassPeak, PassPeak]:
    """Forward, only the input kept; recomputation in the backward pass up to the last tensor it needs; backward."""
    tape = Tape(gradients_exist=gradients_exist, saving=False)
    x, before = layer_input(tape, layer, recipe)
    held = x
    x = PROGRAMS[layer.program](tape, recipe, layer, x)
    keep(x)
    checkpoint = minus(tape.snapshot(), before)
    forward = peaks(tape, before)
    last, elements, width = x.node, x.elements, x.width
    assert isinstance(last, Node)
    del x
    tape.autocast_cache.clear()
    tape.saving, tape.stop_after_saves, tape.saves = True, tape.saves, 0
    pending: Pending = {last: [tape.empty(elements, width)]}
    tape.run_until_saved(pending)
    again = PROGRAMS[layer.program](tape, recipe, layer, held)  # held until its last tensor is taken
    first, last = last, again.node
    assert isinstance(last, Node)
    del again
    tape.autocast_cache.clear()
    tape.muted = False
    tape.recomputed = True
    pending = moved(pending, first, last)
    tape.run_backward(pending)
    tape.close()
    return checkpoint, forward, peaks(tape, before)


def keep(output: Tensor) -> None:
    """The layer's output is the next one's input."""
    assert output.storage is not None
    output.storage.keep_as("activations")


def layer_input(tape: Tape, layer: Layer, recipe: Recipe) -> tuple[Tensor, LiveBytes]:
    """The output of the layer before, and what is alive with it."""
    x = tape.leaf((layer.hidden_size, 0, 0), residual_width(recipe))
    before = tape.snapshot()
    tape.snapshots = []
    return x, before


def inference_peaks(layer: Layer, recipe: Recipe) -> PassPeak:
    """A forward under no_grad; the layer's input is alive already."""
    tape = Tape(saving=False, grad_enabled=False)
    x, before = layer_input(tape, layer, recipe)
    PROGRAMS[layer.program](tape, recipe, layer, x)
    tape.close()
    return peaks(tape, before)

"""Memory of one decoder layer during its forward and backward pass, as polynomials of tokens and scores.

`layer_passes` runs both passes on a `Tape` once for each layer shape and recipe, `layer_inference` one without
gradients; the bytes for any batch size and row length then take a few multiplications. `tests/test_activations.py`
compares the saved bytes with real autograd; they are equal to the byte.
"""

from functools import lru_cache

from msgspec import Struct
from msgspec.structs import replace

from planner.memory.layers.attention import exchanged_bytes
from planner.memory.layers.autograd import (
    NOTHING,
    Bucket,
    LiveBytes,
    Node,
    Pending,
    Size,
    Tape,
    Tensor,
    transfer_gradients,
)
from planner.memory.layers.decoder import PROGRAMS
from planner.memory.layers.norm import norm
from planner.memory.layers.recipe import Recipe
from planner.models.layers import Experts, Layer, Norm


class PassPeak(Struct, frozen=True):
    """Peak of one pass for any batch: the snapshots of live bytes that are the largest for some tokens and scores.

    No snapshot is below another one in all three coefficients.
    """

    snapshots: tuple[LiveBytes, ...]

    def at(self, tokens: int, scores: int) -> tuple[int, LiveBytes]:
        """The peak in bytes and its snapshot, for `tokens` = rows x length and `scores` = rows x length squared."""
        best, best_bytes = self.snapshots[0], -1
        for snapshot in self.snapshots:
            per_token, per_score, constant = snapshot.total
            total = per_token * tokens + per_score * scores + constant
            if total > best_bytes:
                best, best_bytes = snapshot, total
        return best_bytes, best


class LayerPasses(Struct, frozen=True):
    """Memory that one layer of a stack adds on one GPU to what was alive before its forward pass (its input included).

    `saved`: the bytes that stay after the forward pass. They contain the layer's output, which is the next layer's
    input. Autocast's weight copies, which are freed when the forward pass of the model ends, are the kind
    "autocast_copies". `forward` and `backward` are the peaks of the passes. A backward pass begins after the layer's
    output was freed, with the gradient of that output alive. `output_width`: bytes of one element of the output.
    `tensors`: sizes of the saved tensors in the order of their nodes; none of a checkpointed or a measured layer.
    """

    saved: LiveBytes
    forward: PassPeak
    backward: PassPeak
    output_width: int
    tensors: tuple[Size, ...] = ()


class LayerInference(Struct, frozen=True):
    """A forward pass of one layer under `no_grad`: its peak, and autocast's copies of weights that stay to its end."""

    peak: PassPeak
    copies: int
    output_width: int


class LayerMemory(Struct, frozen=True):
    """All passes of a measured layer: without and with gradient checkpointing (`LayerPasses`), and under `no_grad`.

    Its output has the width of its input.
    """

    saved: LiveBytes
    checkpoint: LiveBytes
    forward: PassPeak
    checkpointed_forward: PassPeak
    backward: PassPeak
    checkpointed_backward: PassPeak
    inference: PassPeak


def upper_envelope(snapshots: list[LiveBytes]) -> PassPeak:
    """Drop every snapshot for which another one is at least as large in all three coefficients."""
    kept: list[LiveBytes] = []
    for snapshot in sorted(snapshots, key=lambda snapshot: snapshot.total, reverse=True):
        if not any(all(a >= b for a, b in zip(other.total, snapshot.total, strict=True)) for other in kept):
            kept.append(snapshot)
    return PassPeak(tuple(kept))


def take_peak(tape: Tape, base: LiveBytes) -> PassPeak:
    """Take the tape's snapshots as the peak of the pass that just ended, less `base`, the bytes alive before the layer.

    Clears the snapshots for the next pass.
    """
    snapshots = [above(snapshot, base) for snapshot in tape.snapshots]
    tape.snapshots = []
    return upper_envelope(snapshots)


def beside(peak: PassPeak, bytes_per_token: int, constant: int = 0) -> PassPeak:
    """The peak of a measured layer with more transient bytes: `bytes_per_token` for each token, and a constant."""
    if not bytes_per_token and not constant:
        return peak
    less = (-bytes_per_token, 0, -constant)
    return PassPeak(tuple(above(each, LiveBytes(less, (("transients", less),))) for each in peak.snapshots))


def larger(live: LiveBytes, constant: int) -> LiveBytes:
    """`live` with more bytes that are kept for the backward pass."""
    more = (0, 0, -constant)
    return above(live, LiveBytes(more, (("activations", more),))) if constant else live


def dequantized_bytes(layer: Layer, recipe: Recipe) -> tuple[int, int]:
    """Bytes of a measured layer's quantized experts, dequantized: those that it keeps, and with what makes the last.

    Layers are measured with experts as they compute. Taken to be beside every moment of both passes: the heaviest is
    among the experts, whose weights are a gibibyte in large models.
    """
    block = layer.feed_forward
    if not recipe.expert_width or not isinstance(block, Experts):
        return 0, 0
    last = layer.hidden_size * block.num_experts * block.moe_intermediate_size
    kept = block.expert_params * recipe.expert_width
    return kept, kept + round(last * recipe.expert_scratch)


def above(live: LiveBytes, base: LiveBytes) -> LiveBytes:
    """`live` minus `base`, by kind and in total."""
    before = dict(base.kinds)
    kinds = tuple((kind, subtract_sizes(size, before.get(kind, NOTHING))) for kind, size in live.kinds)
    return LiveBytes(subtract_sizes(live.total, base.total), kinds)


def subtract_sizes(a: Size, b: Size) -> Size:
    """a - b, coefficient by coefficient."""
    return (a[0] - b[0], a[1] - b[1], a[2] - b[2])


@lru_cache(maxsize=4096)
def layer_passes(
    layer: Layer, recipe: Recipe, gradients_exist: bool, checkpointed: bool, bucket: Bucket | None = None
) -> LayerPasses:
    """Memory of `layer` in both passes, with or without gradient checkpointing.

    `gradients_exist`: the weights have `.grad` already, as in every micro-batch after the first of an accumulation.
    `bucket`: see `StackGradients`; measured layers leave it out.
    Architectures without formulas have a `measure` function instead (`probes/layers`).
    """
    if layer.measure is not None:
        measured: LayerMemory = layer.measure(recipe, gradients_exist)
        saved, forward, backward = measured.saved, measured.forward, measured.backward
        if checkpointed:
            saved, forward = measured.checkpoint, measured.checkpointed_forward
            backward = measured.checkpointed_backward
        exchanged = exchanged_bytes(recipe, layer.attention, recipe.compute_width)
        kept, most = dequantized_bytes(layer, recipe)
        forward, backward = beside(forward, exchanged[0], most), beside(backward, max(exchanged), most)
        return LayerPasses(saved if checkpointed else larger(saved, kept), forward, backward, recipe.input_width)
    if not checkpointed:
        return plain_passes(layer, recipe, gradients_exist, bucket)
    # checkpointing makes the embedding's output require a gradient
    passes = reentrant_passes if recipe.reentrant else checkpointed_passes
    return passes(layer, replace(recipe, input_learns=True), gradients_exist, bucket)


@lru_cache(maxsize=4096)
def layer_inference(layer: Layer, recipe: Recipe) -> LayerInference:
    """Memory of a forward pass of `layer` under `no_grad`, above the layer's input."""
    if layer.measure is not None:
        measured: LayerMemory = layer.measure(recipe, True)
        peak = beside(measured.inference, 0, dequantized_bytes(layer, recipe)[1])
        return LayerInference(peak, cached_copies(measured.checkpoint), recipe.input_width)
    tape = Tape(saving=False, grad_enabled=False)
    x, before = layer_input(tape, layer, recipe)
    width = PROGRAMS[layer.program](tape, recipe, layer, x).width
    copies = cached_copies(tape.snapshot())
    tape.close()
    return LayerInference(take_peak(tape, before), copies, width)


def cached_copies(live: LiveBytes) -> int:
    """Bytes of autocast's copies of weights among live bytes."""
    return dict(live.kinds).get("autocast_copies", NOTHING)[2]


class NormMemory(Struct, frozen=True):
    """Memory of a norm after the last layer, above what was alive before it (its input included).

    `saved`: alive until its backward pass, less its input if that is freed. `backward` begins with the gradient of its
    output alive.
    """

    saved: Size
    backward: PassPeak
    output_width: int


@lru_cache(maxsize=256)
def norm_memory(module: Norm, recipe: Recipe) -> NormMemory:
    """Memory of one norm in both passes."""
    tape = Tape()
    x = tape.leaf((module.features, 0, 0), recipe.input_width or recipe.stream_width)
    before = tape.snapshot()
    x = norm(tape, recipe, module, x)
    last, elements, width = x.node, x.elements, x.width
    assert isinstance(last, Node)
    del x
    tape.autocast_cache.clear()
    saved, tape.snapshots = above(tape.snapshot(), before), []
    tape.run_backward({last: [tape.empty(elements, width)]})
    tape.close()
    return NormMemory(saved.total, take_peak(tape, before), width)


def plain_passes(layer: Layer, recipe: Recipe, gradients_exist: bool, bucket: Bucket | None) -> LayerPasses:
    """Run both passes without checkpointing.

    A layer below the first adapters has no graph: it keeps its output until the next layer has run, and has no backward
    pass.
    """
    tape = Tape(gradients_exist=gradients_exist, bucket=bucket)
    x, before = layer_input(tape, layer, recipe)
    x = PROGRAMS[layer.program](tape, recipe, layer, x)
    keep_output(x)
    forward = take_peak(tape, before)
    tape.autocast_cache.clear()
    saved = above(tape.snapshot(), before)
    last, elements, width = x.node, x.elements, x.width
    tensors = saved_sizes(x, saved)
    del x
    if not isinstance(last, Node):
        tape.close()
        return LayerPasses(saved, forward, PassPeak(()), width)
    tape.run_backward({last: [tape.empty(elements, width)]})
    tape.close()
    return LayerPasses(saved, forward, take_peak(tape, before), width, tensors)


@lru_cache(maxsize=4096)
def checkpointed_passes(layer: Layer, recipe: Recipe, gradients_exist: bool, bucket: Bucket | None) -> LayerPasses:
    """Run both passes with non-reentrant checkpointing.

    The forward pass keeps only the layer's input. The backward pass first runs the layer again, up to the last tensor
    that it needs.
    """
    tape = Tape(gradients_exist=gradients_exist, bucket=bucket, saving=False)
    x, before = layer_input(tape, layer, recipe)
    held = x
    x = PROGRAMS[layer.program](tape, recipe, layer, x)
    keep_output(x)
    saved = above(tape.snapshot(), before)
    forward = take_peak(tape, before)
    last, elements, width = x.node, x.elements, x.width
    assert isinstance(last, Node)
    del x
    tape.autocast_cache.clear()
    tape.saving, tape.stop_after_saves, tape.saves = True, tape.saves, 0
    pending: Pending = {last: [tape.empty(elements, width)]}
    tape.run_until_saved(pending)
    again = PROGRAMS[layer.program](tape, recipe, layer, held)  # deleted below, once its node is read
    first, last = last, again.node
    assert isinstance(last, Node)
    del again
    tape.autocast_cache.clear()
    tape.muted = False
    tape.recomputed = True
    pending = transfer_gradients(pending, first, last)
    tape.run_backward(pending)
    tape.close()
    return LayerPasses(saved, forward, take_peak(tape, before), width)


@lru_cache(maxsize=4096)
def reentrant_passes(layer: Layer, recipe: Recipe, gradients_exist: bool, bucket: Bucket | None) -> LayerPasses:
    """Run both passes with reentrant checkpointing.

    The forward pass runs without gradients, so that not even attributes of a function's `ctx` stay. The backward pass
    first runs the whole layer again; its output and the gradient of that stay until the layer's backward pass ends.
    Source: torch 2.13, utils/checkpoint.py, `CheckpointFunction`.
    """
    tape = Tape(gradients_exist=gradients_exist, bucket=bucket)
    x, before = layer_input(tape, layer, recipe)
    held = x
    with tape.without_gradients():
        x = PROGRAMS[layer.program](tape, recipe, layer, x)
    keep_output(x)
    saved = above(tape.snapshot(), before)
    forward = take_peak(tape, before)
    elements, width = x.elements, x.width
    del x
    tape.autocast_cache.clear()
    gradient = tape.empty(elements, width)
    again = PROGRAMS[layer.program](tape, recipe, layer, held)
    tape.autocast_cache.clear()
    assert isinstance(again.node, Node)
    tape.run_backward({again.node: [gradient]})
    tape.close()
    return LayerPasses(saved, forward, take_peak(tape, before), width)


def keep_output(output: Tensor) -> None:
    """Count the layer's output as an activation, since it is the next layer's input."""
    assert output.storage is not None
    output.storage.keep_as("activations")


def saved_sizes(output: Tensor, saved: LiveBytes) -> tuple[Size, ...]:
    """Sizes of what stays after a layer's forward pass, in the order of allocation: saved tensors and the output.

    The layer's input, the first storage of the tape, is the output of the layer before it. If nothing keeps it, it is
    freed, as this layer's output will be.
    """
    kept: dict[int, Size] = {}
    nodes, seen = [output.node], set[int]()
    while nodes:
        node = nodes.pop()
        if not isinstance(node, Node) or node.order in seen:
            continue
        seen.add(node.order)
        nodes += [edge.target for edge in node.edges]
        kept |= {storage.number: storage.size for storage in node.saved if storage is not None}
    kept.pop(1, None)
    if output.storage and sum(size[0] for size in kept.values()) < saved.total[0]:
        kept[output.storage.number] = output.storage.size
    return tuple(kept[number] for number in sorted(kept))


def layer_input(tape: Tape, layer: Layer, recipe: Recipe) -> tuple[Tensor, LiveBytes]:
    """The layer's input, and the bytes alive before the layer runs."""
    x = tape.leaf((layer.hidden_size, 0, 0), recipe.input_width or recipe.stream_width, learns=recipe.input_learns)
    before = tape.snapshot()
    tape.snapshots = []
    return x, before

"""Module calls of a training step under ZeRO-3, and the peak of gathered bytes in each `GatherMoment` of the step."""

from functools import lru_cache, reduce
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from planner.candidate import RepeatedCalls
from planner.memory.schemes.contract import FrozenGather, GatherMoment
from planner.memory.schemes.zero3.coordinator import (
    BACKWARD,
    BACKWARD_DONE,
    FORWARD,
    FORWARD_DONE,
    RECOMPUTED,
    CachingCoordinator,
    Coordinator,
    Event,
    FirstCoordinator,
    Limits,
    SecondCoordinator,
)
from planner.memory.schemes.zero3.modules import Node, Tree, params_within

# "reentrant" recomputes a layer before its backward pass begins. "other" starts to recompute when the backward pass
# needs the first saved tensor, and stops when the last one is recomputed. Source: torch 2.13, utils/checkpoint.py,
# `CheckpointFunction.backward`, `_checkpoint_hook`, `_recomputation_hook`.
Checkpointing = Literal["none", "reentrant", "other"]


class Backward(Struct, frozen=True, kw_only=True):
    """Settings of a backward pass.

    `counted`: DeepSpeed's counters `ds_grads_remaining` are those of this pass. False if a pass without gradients runs
    between the forward and the backward pass: it resets the counters to 0, so that DeepSpeed never notices the end of
    the backward pass of modules that are not recomputed.
    Source: deepspeed 0.19.8, zero/parameter_offload.py, `_post_backward_module_hook`.
    """

    checkpointing: Checkpointing
    reaches_embedding: bool
    counted: bool = True


def forward_calls(node: Node, call: int = FORWARD, *, adapters: bool = True) -> list[Event]:
    """Return the events of the forward pass of a module and its children."""
    called = [child for child in node.children if adapters or not child.adapter]
    inner = [event for child in called for event in forward_calls(child, call, adapters=adapters)]
    return [(call, node.module), *inner, (FORWARD_DONE, node.module)]


def backward_calls(node: Node) -> list[Event]:
    """Return the events of the backward pass of a module and its children, the last child first."""
    events: list[Event] = [(BACKWARD, node.module)]
    for child in reversed(node.children):
        events += backward_calls(child)
    if not node.by_keyword:
        events.append((BACKWARD_DONE, node.module))
    return events


def recomputed_calls(layer: Node) -> list[Event]:
    """Return the events of recomputing a layer: its children's, since its own hooks are outside the checkpoint."""
    return [event for child in layer.children for event in forward_calls(child, RECOMPUTED)]


def layer_backward_calls(layer: Node, checkpointing: Checkpointing) -> list[Event]:
    """Return the events of the backward pass of one layer, recomputation included."""
    events = backward_calls(layer)
    if checkpointing == "none":
        return events
    again = recomputed_calls(layer)
    if checkpointing == "reentrant":
        return [events[0], *again, *events[1:]]
    while again and again[-1][0] == FORWARD_DONE:  # an exception ends the recomputation inside these modules
        again.pop()
    first = next(number for number, (call, _) in enumerate(events) if call == BACKWARD_DONE)
    return [*events[:first], *again, *events[first:]]


def forward_pass(tree: Tree, *, adapters: bool = True) -> list[tuple[GatherMoment, list[Event]]]:
    """Return the events of a forward pass, by moment."""
    layers = [event for layer in tree.layers for event in forward_calls(layer, adapters=adapters)]
    above = tree.above
    after: list[Event] = [*forward_calls(tree.norm), (FORWARD_DONE, above[-1])]
    after += forward_calls(tree.head) if tree.head else []
    after += [(FORWARD_DONE, module) for module in reversed(above[:-1])]
    return [
        ("embedding", [(FORWARD, module) for module in above] + forward_calls(tree.embedding)),
        ("forward", forward_calls(tree.between) + layers),
        ("loss", after),
    ]


def backward_pass(tree: Tree, backward: Backward) -> list[tuple[GatherMoment, list[Event]]]:
    """Return the events of a backward pass, by moment: head, layers from the last to the first, embedding."""
    head: list[Event] = [(BACKWARD, module) for module in tree.above[:-1]]
    head += backward_calls(tree.head) if tree.head else []
    head += [(BACKWARD, tree.above[-1]), *backward_calls(tree.norm)]
    found: list[tuple[GatherMoment, list[Event]]] = [("head_backward", head)]
    found += [("backward", layer_backward_calls(layer, backward.checkpointing)) for layer in reversed(tree.layers)]
    if not backward.counted:
        first = {tree.layers[0].module} if backward.reaches_embedding else set()
        found = [(moment, _without_lost_ends(events, first)) for moment, events in found]
    if backward.reaches_embedding:
        found.append(("embedding_backward", [(BACKWARD, tree.embedding.module)]))
    return found


def _without_lost_ends(events: list[Event], first: set[int]) -> list[Event]:
    """Drop the end events that DeepSpeed misses: those of modules that are not recomputed, except in the `first` layer.

    The input of the first layer requires a gradient in a pass without gradients too, so that such a pass sets the
    layer's counters again. Source: transformers 5.23, modeling_utils.py, `enable_input_require_grads`.
    """
    ending = first | {module for call, module in events if call == RECOMPUTED}
    return [(call, module) for call, module in events if call != BACKWARD_DONE or module in ending]


END_LAYERS = 6  # layers that a shortened model keeps beyond the reach of the coordinator from both ends


class Gathered(Struct, frozen=True):
    """Most bytes of gathered parameters at the moments of a training step.

        in_backward   in each layer's backward pass, the last layer first
        computing     the same, but only while the layer's modules compute, after they have waited for their parameters
        inside        after the decoder's forward pass, while the modules around the decoder still run
        kept          after the whole forward pass
        in_graph      the part of `kept` that the autograd graph keeps as well

    Two kinds of bytes are counted elsewhere and left out here. Weights that only the graph keeps after the forward pass
    (`Zero3.kept_by_graph`) are subtracted from `at`, `in_backward` and `computing` at every moment. Weights that a
    layer has yet to merge with adapters are part of the layer's own memory.
    """

    at: dict[GatherMoment, int]
    in_backward: tuple[int, ...]
    computing: tuple[int, ...]
    inside: int
    kept: int
    in_graph: int


@lru_cache(maxsize=256)
def gathered_by_moment(
    tree: Tree,
    limits: Limits,
    backward: Backward,
    repeated: RepeatedCalls,
    earlier: Limits | None = None,
    sampled: bool = False,
) -> Gathered:
    """Most bytes of gathered parameters at each moment of a training step.

    `sampled`: the model generates with its hooks on, so that a token's pass was traced before (`CachingCoordinator`).
    `earlier`: the limits of an engine whose hooks were on the model before (`FirstCoordinator`). The result is then
    the most of several steps, as both engines drop and record traces, and no layer is left out: an engine still counts
    elements that it gathered and the other one freed, so how far it gathers ahead differs from layer to layer.
    """
    short = shortened(tree, limits)
    if backward.counted and short is not tree and earlier is None:
        found = gathered_by_moment(short, limits, backward, repeated, sampled=sampled)
        return with_all_layers(found, tree, short, backward.checkpointing)
    forward, step = forward_pass(tree), [*forward_pass(tree), *backward_pass(tree, backward)]
    known = {"step": step, "forward": forward, "nothing": []}[repeated]
    trace, in_graph = _events(known), in_graph_of(tree, backward.checkpointing)
    recomputed = backward.checkpointing != "none"
    if earlier is None:
        plain = Coordinator(tree.modules, limits, trace, in_graph)
        cached = CachingCoordinator(tree.modules, limits, trace, _events(forward), in_graph) if sampled else plain
        return _followed(cached, tree, step, recomputed=recomputed)
    alone, nothing = _events(forward_pass(tree, adapters=False)), list[Event]()
    traces = [(trace, trace)] if repeated != "step" else [(alone, nothing), (nothing, trace), (trace, trace)]
    pairs = (
        SecondCoordinator(tree.modules, limits, second, FirstCoordinator(tree.modules, earlier, first, alone, in_graph))
        for first, second in traces
    )
    return reduce(_most, (_followed(pair, tree, step, recomputed=recomputed) for pair in pairs))


def _events(moments: list[tuple[GatherMoment, list[Event]]]) -> list[Event]:
    return [event for _, events in moments for event in events]


def _followed(
    coordinator: Coordinator, tree: Tree, step: list[tuple[GatherMoment, list[Event]]], *, recomputed: bool
) -> Gathered:
    """Run the events of a step and return what the coordinator gathers at its moments."""
    at: dict[GatherMoment, int] = {}
    layers: list[int] = []
    computing: list[int] = []
    inside = kept = in_graph = alone = 0
    for moment, events in step:
        decoder_done = (FORWARD_DONE, tree.above[-1])
        if decoder_done in events:
            for event in events[: events.index(decoder_done) + 1]:
                coordinator.run(event)
            inside, events = coordinator.gathered_bytes, events[events.index(decoder_done) + 1 :]
        peak, most = run_moment(coordinator, events, tree.to_merge, recomputed=recomputed)
        # a head that runs as a module is released before the logits grow
        at[moment] = coordinator.held_bytes if moment == "loss" and tree.head else max(peak, at.get(moment, 0))
        if moment == "backward":
            layers.append(peak)
            computing.append(most)
        if moment == "loss":
            kept, in_graph, alone = coordinator.gathered_bytes, coordinator.in_graph_bytes, coordinator.graph_bytes
    beside = {moment: size - alone for moment, size in at.items()}
    return Gathered(
        beside, tuple(size - alone for size in layers), tuple(size - alone for size in computing), inside, kept,
        in_graph,
    )  # fmt: skip


def _most(one: Gathered, other: Gathered) -> Gathered:
    """The larger figures of two steps."""
    return Gathered(
        at={moment: max(size, other.at[moment]) for moment, size in one.at.items()},
        in_backward=tuple(map(max, one.in_backward, other.in_backward)),
        computing=tuple(map(max, one.computing, other.computing)),
        inside=max(one.inside, other.inside),
        kept=max(one.kept, other.kept),
        in_graph=max(one.in_graph, other.in_graph),
    )


def run_moment(
    coordinator: Coordinator, events: list[Event], to_merge: dict[int, int], *, recomputed: bool
) -> tuple[int, int]:
    """Run events; return the most bytes held, and the most held while backward passes of modules compute.

    Leaves out the bytes that a layer has yet to merge with adapters (`Tree.to_merge`), in a backward pass only if the
    layer is `recomputed`.
    """
    peak = most = missing = 0
    for call, module in events:
        coordinator.run((call, module))
        peak = max(peak, coordinator.reset_peak() - missing)
        if call == BACKWARD:
            most = max(most, coordinator.held_bytes)
        if call <= BACKWARD and (call != BACKWARD or recomputed):
            missing = to_merge.get(module, missing)
    return peak, most


def in_graph_of(tree: Tree, checkpointing: Checkpointing) -> frozenset[int]:
    """Return the parameters that the graph of a training step keeps if all layers have this kind of checkpoint."""
    modules = tree.modules
    of_form = {"none": modules.viewed | modules.attributes, "other": modules.attributes, "reentrant": frozenset[int]()}
    return of_form[checkpointing]


def with_all_layers(found: Gathered, tree: Tree, short: Tree, checkpointing: Checkpointing) -> Gathered:
    """Extend the bytes of a shortened tree to all layers of the tree.

    The graph keeps the same parameters of each layer that was left out: from the middle of the forward pass until the
    backward pass drops the views, one layer after another. Since `Gathered` subtracts what the graph keeps at the end
    of the forward pass, moments at which it keeps less become smaller by these bytes.
    """
    missing = len(tree.layers) - len(short.layers)
    above = len(short.layers) - short.equal.first - short.equal.count // 2  # layers kept above the ones left out
    sizes, own = tree.modules.size_bytes, params_within(short.layers[short.equal.first], tree.modules.params_of)
    kept = in_graph_of(tree, checkpointing) & own
    every = sum(sizes[param] for param in kept)
    viewed = sum(sizes[param] for param in kept & tree.modules.viewed)
    at = found.at.copy()
    at["embedding"] -= missing * every
    if "embedding_backward" in at:
        at["embedding_backward"] -= missing * viewed
    longer = [
        (
            *layers[:above],
            *(layers[above - 1] - viewed * (number + 1) for number in range(missing)),
            *(size - viewed * missing for size in layers[above:]),
        )
        for layers in (found.in_backward, found.computing)
    ]
    return replace(found, at=at, in_backward=longer[0], computing=longer[1])


@lru_cache(maxsize=64)
def shortened(tree: Tree, limits: Limits) -> Tree:
    """Return a tree with fewer layers and the same peaks: the longest run of equal layers loses its middle.

    Returns `tree` itself if the run is short. The coordinator looks ahead by at most `stage3_max_live_parameters` and
    `stage3_max_reuse_distance` elements, so that modules before and after the run influence only the layers within that
    distance. tests/test_zero3_coordinator.py compares models with all of their layers.

    Example: DeepSeek-V3 has 3 dense layers and 58 equal ones, of which 8 are simulated.
    """
    reach, equal = max(limits.max_live_parameters, limits.max_reuse_distance), tree.equal
    kept = 2 * -(-reach // max(equal.elements, 1)) + END_LAYERS
    if kept >= equal.count:
        return tree
    start = equal.first + kept // 2
    layers = (*tree.layers[:start], *tree.layers[start + equal.count - kept :])
    return replace(tree, layers=layers, equal=replace(equal, count=kept))


@lru_cache(maxsize=256)
def forward_alone(tree: Tree, limits: Limits, *, traced: bool = True) -> dict[GatherMoment, int]:
    """Return the most bytes of gathered parameters, by moment, in a forward pass without a backward pass.

    A reference model, a teacher and a policy that samples run such passes. `traced`: the same pass has run before, so
    that DeepSpeed has its trace. The moments are "embedding", "forward" and "loss".
    """
    moments = forward_pass(shortened(tree, limits))
    known = [event for _, events in moments for event in events] if traced else []
    coordinator = Coordinator(tree.modules, limits, known)
    at: dict[GatherMoment, int] = {}
    for moment, events in moments:
        for event in events:
            coordinator.run(event)
        at[moment] = coordinator.reset_peak()
    return at


@lru_cache(maxsize=64)
def without_adapters(tree: Tree, limits: Limits, *, traced: bool) -> FrozenGather:
    """Return the most bytes of gathered parameters while the policy runs without its adapters, as its own reference.

    `traced`: DeepSpeed has recorded a pass with adapters, and prefetches by that trace until it meets the first skipped
    adapter module. If one projection makes queries, keys and values, the first layer computes attention before that:
    what is prefetched by then is counted with the layers.
    """
    short = shortened(tree, limits)
    recorded = [event for _, events in forward_pass(short) for event in events] if traced else []
    coordinator, computes = Coordinator(short.modules, limits, recorded), (FORWARD, _last_of_attention(short.layers[0]))
    at: dict[GatherMoment, int] = {}
    first = beside_attention = 0
    for moment, events in forward_pass(short, adapters=False):
        for event in events:
            if event == computes:
                beside_attention = coordinator.gathered_bytes
            coordinator.run(event)
            if event == computes:
                first = coordinator.reset_peak()
        at[moment] = coordinator.reset_peak()
    return FrozenGather(max(first, at["embedding"]), max(beside_attention, at["forward"]), at["loss"])


def _last_of_attention(layer: Node) -> int:
    """Return the last module that a layer calls in attention, before which the attention kernel runs."""
    attention = layer.children[1].children if layer.children else ()
    return attention[-1].module if attention else layer.module

"""Bytes of each component in snapshots of a pass, in its heaviest snapshot, and in sums."""

from planner.memory.layers.autograd import LiveBytes
from planner.memory.layers.one_layer import PassPeak
from planner.quantities import Component

Components = dict[Component, int]


def peak_components(peaks: PassPeak, tokens: int, scores: int) -> Components:
    """Components of the heaviest snapshot of a pass over `tokens` tokens and `scores` query-key pairs."""
    return component_bytes(peaks.at(tokens, scores)[1], tokens, scores)


def component_bytes(snapshot: LiveBytes, tokens: int, scores: int) -> Components:
    """Bytes of each component of a snapshot: per token x tokens + per score x scores + constant."""
    return {kind: size[0] * tokens + size[1] * scores + size[2] for kind, size in snapshot.kinds}


def add_components(first: Components, *parts: Components) -> Components:
    """The sum of components, one by one."""
    components = first.copy()
    known = components.get
    for part in parts:
        for component, size in part.items():
            components[component] = known(component, 0) + size
    return components


def negative(components: Components) -> Components:
    """The components with the opposite sign."""
    return {kind: -size_bytes for kind, size_bytes in components.items()}


def total_bytes(components: Components) -> int:
    """Bytes of all components."""
    return sum(components.values())

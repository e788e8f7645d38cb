"""A trace: the allocations of a pass, each with the events at which it is made and freed."""

from msgspec import Struct

from planner.quantities import Component, Phase

STAYS = 2**62  # the value of `died` for an allocation that is not freed within the trace


class Allocation(Struct, frozen=True, kw_only=True):
    """One storage of a tensor.

    `born` and `died` are the indices of the trace's events that allocate and free it; all events are counted, from 0.
    `accumulated` is the event from which a gradient is complete.
    """

    size_bytes: int
    born: int
    died: int
    phase: Phase
    component: Component
    accumulated: int = STAYS


class Trace(Struct, frozen=True, kw_only=True):
    """All allocations of a pass, ordered by `born`. `phase_starts`: the events at which phases began, in order."""

    allocations: tuple[Allocation, ...]
    phase_starts: tuple[tuple[int, Phase], ...]

"""What a step reserves on the card: its trace replayed through the caching allocator, phase by phase."""

from dataclasses import dataclass, replace

from planner.allocator.caching_allocator import NO_LIMIT, AllocatorSettings, OutOfMemory
from planner.allocator.loading import warm_up_bytes
from planner.allocator.replay import replay
from planner.allocator.trace import Trace
from planner.candidate import Candidate
from planner.gpus.cluster import Gpu
from planner.quantities import Phase


@dataclass(frozen=True, kw_only=True, slots=True)
class Shortfall:
    """Where a card runs out: in the phase of the allocation that finds no room, with the figures of PyTorch's message."""

    phase: Phase
    figures: OutOfMemory


@dataclass(frozen=True, kw_only=True, slots=True)
class Reserved:
    """What PyTorch's allocator reserves, for each phase of a trace.

    `most`: the most while the phase lasts, the cache it keeps included, on a card without end. `slack`: of it, at the phase's heaviest moment,
    what is neither allocated nor in a segment that is wholly free: those are given back before the allocator raises (`release_cached_blocks`).
    """

    most: dict[Phase, int]
    slack: dict[Phase, int]
    shortfall: Shortfall | None  # None: the card is large enough

    @property
    def peak_bytes(self) -> int:
        return max(self.most.values(), default=0)


def reserved_of(trace: Trace, candidate: Candidate, gpu: Gpu, outside_bytes: int) -> Reserved:
    """A candidate's trace on a card of which `outside_bytes` are taken by what is outside PyTorch's allocator."""
    settings = AllocatorSettings(expandable_segments=candidate.expandable_segments)
    warm_up = warm_up_bytes(trace, candidate, gpu)
    endless = replay(trace.events, NO_LIMIT, settings, frozenset(trace.heaviest_events.values()), warm_up)
    card_bytes = gpu.free_bytes - outside_bytes
    return Reserved(
        most=_most(trace, endless.reserved),
        slack={phase: endless.slack[event] for phase, event in trace.heaviest_events.items()},
        shortfall=_shortfall(trace, card_bytes, gpu, settings, warm_up)
        if endless.peak_reserved_bytes > card_bytes
        else None,
    )


def _most(trace: Trace, reserved: tuple[int, ...]) -> dict[Phase, int]:
    found: dict[Phase, int] = {}
    for (index, size_bytes), reserved_bytes in zip(trace.events, reserved, strict=True):
        phase = trace.allocations[index].phase
        if size_bytes > 0 and reserved_bytes > found.get(phase, 0):
            found[phase] = reserved_bytes
    return found


def _shortfall(trace: Trace, card_bytes: int, gpu: Gpu, settings: AllocatorSettings, warm_up: int) -> Shortfall | None:
    """The message counts the whole card; what is outside PyTorch is neither free nor its own."""
    figures = replay(trace.events, card_bytes, settings, free_before=warm_up).out_of_memory
    if figures is None:
        return None
    phase = trace.allocations[trace.events[figures.event][0]].phase
    return Shortfall(phase=phase, figures=replace(figures, total_bytes=gpu.total_bytes))

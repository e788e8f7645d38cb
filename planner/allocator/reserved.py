"""The memory that PyTorch's allocator reserves during a step, phase by phase: the step's trace, replayed."""

from msgspec import Struct
from msgspec.structs import replace

from planner.allocator.caching_allocator import NO_LIMIT, OutOfMemory
from planner.allocator.loading import warm_up_bytes
from planner.allocator.replay import replay
from planner.allocator.trace import Trace
from planner.candidate import Candidate
from planner.gpus.cluster import Gpu
from planner.quantities import Phase


class Shortfall(Struct, frozen=True, kw_only=True):
    """Out of memory on a GPU: the phase of the allocation that finds no room, and the numbers of PyTorch's message."""

    phase: Phase
    figures: OutOfMemory


class Reserved(Struct, frozen=True, kw_only=True):
    """Bytes that PyTorch's allocator reserves in each phase of a trace.

    `most`: the peak of the reserved bytes in the phase, cached free blocks included, on a GPU without a limit.
    `slack`: the part of them, at the moment when the phase allocates most, that is neither in a tensor nor in a wholly
    free segment. Wholly free segments are returned to the GPU before the allocator raises (`release_cached_blocks`);
    slack is not.
    """

    most: dict[Phase, int]
    slack: dict[Phase, int]
    shortfall: Shortfall | None  # None: the GPU is large enough

    @property
    def peak_bytes(self) -> int:
        return max(self.most.values(), default=0)


def reserved_of(trace: Trace, candidate: Candidate, gpu: Gpu, outside_bytes: int) -> Reserved:
    """Replay a candidate's trace on a GPU; `outside_bytes` of it are used outside PyTorch's allocator (CUDA, NCCL)."""
    expandable = candidate.expandable_segments
    warm_up = warm_up_bytes(trace, candidate, gpu)
    unlimited = replay(trace.events, NO_LIMIT, expandable, frozenset(trace.heaviest_events.values()), warm_up)
    card_bytes = gpu.free_bytes - outside_bytes
    return Reserved(
        most=_most(trace, unlimited.reserved),
        slack={phase: unlimited.slack[event] for phase, event in trace.heaviest_events.items()},
        shortfall=_shortfall(trace, card_bytes, gpu, expandable, warm_up)
        if unlimited.peak_reserved_bytes > card_bytes
        else None,
    )


def _most(trace: Trace, reserved: tuple[int, ...]) -> dict[Phase, int]:
    """Return the peak of the reserved bytes in each phase, over the events that allocate."""
    found: dict[Phase, int] = {}
    for (index, size_bytes), reserved_bytes in zip(trace.events, reserved, strict=True):
        phase = trace.allocations[index].phase
        if size_bytes > 0 and reserved_bytes > found.get(phase, 0):
            found[phase] = reserved_bytes
    return found


def _shortfall(trace: Trace, card_bytes: int, gpu: Gpu, expandable: bool, warm_up: int) -> Shortfall | None:
    """Replay the trace on the GPU's size; return where it runs out of memory, if it does.

    PyTorch's message gives the GPU's total size, so the memory used outside PyTorch is in the total, but not in the
    free bytes.
    """
    figures = replay(trace.events, card_bytes, expandable, free_before=warm_up).out_of_memory
    if figures is None:
        return None
    phase = trace.allocations[trace.events[figures.event][0]].phase
    return Shortfall(phase=phase, figures=replace(figures, total_bytes=gpu.total_bytes))

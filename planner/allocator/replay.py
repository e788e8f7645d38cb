"""A trace run through the caching allocator: what is reserved after each event, what fragments, and where a card would run out."""

from collections.abc import Iterable
from dataclasses import dataclass

from planner.allocator.caching_allocator import Allocator, AllocatorSettings, Block, OutOfMemory


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """What a trace does to the card. `reserved` after every event, up to the one that ran out."""

    reserved: tuple[int, ...]
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    fragmentation_bytes: int  # reserved beyond what was allocated when most was reserved
    out_of_memory: OutOfMemory | None  # None: the card was large enough
    slack: dict[
        int, int
    ]  # after the events that were asked about: reserved, in no tensor, and in no segment that could be given back


def replay(
    events: Iterable[tuple[int, int]],
    card_bytes: int,
    settings: AllocatorSettings | None = None,
    slack_at: frozenset[int] = frozenset(),
    free_before: int = 0,
) -> Replay:
    """Events of (allocation, +bytes or -bytes) run on a card that has `card_bytes` for the allocator.

    An allocation is identified by its number; its sign says whether it is born or dies, as in `Trace.events`. `slack_at`: events to be asked about.
    `free_before`: bytes of a block that was taken and given back before the first event (loading.py).
    """
    allocator = Allocator(card_bytes, settings or AllocatorSettings())
    if free_before and (block := allocator.allocate(free_before)) is not None:
        allocator.free(block)
    live: dict[int, Block] = {}
    reserved: list[int] = []
    slack: dict[int, int] = {}
    failure: OutOfMemory | None = None
    peak_allocated, unused_at_peak, peak_reserved, requested = 0, 0, 0, 0
    for event, (allocation, size_bytes) in enumerate(events):
        if size_bytes > 0:
            block = allocator.allocate(size_bytes)
            if block is None:
                failure = allocator.out_of_memory(event, size_bytes)
                break
            live[allocation] = block
        else:
            allocator.free(live.pop(allocation))
        requested += size_bytes
        reserved.append(allocator.reserved_bytes)
        peak_allocated = max(peak_allocated, allocator.allocated_bytes)
        if allocator.reserved_bytes > peak_reserved:
            peak_reserved, unused_at_peak = (
                allocator.reserved_bytes,
                allocator.reserved_bytes - allocator.allocated_bytes,
            )
        if event in slack_at:
            slack[event] = allocator.reserved_bytes - allocator.idle_bytes() - requested
    return Replay(
        reserved=tuple(reserved), peak_allocated_bytes=peak_allocated, peak_reserved_bytes=peak_reserved, fragmentation_bytes=unused_at_peak,
        out_of_memory=failure, slack=slack,
    )  # fmt: skip

"""Replay a trace through the model of the caching allocator: reserved bytes, fragmentation, and out of memory."""

from collections.abc import Iterable

from msgspec import Struct

from planner.allocator.caching_allocator import Allocator, Block, OutOfMemory


class Replay(Struct, frozen=True, kw_only=True):
    """The allocator during a trace. `reserved`: bytes after every event, up to the one that ran out of memory."""

    reserved: tuple[int, ...]
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    out_of_memory: OutOfMemory | None  # None: the GPU was large enough
    # By event: bytes reserved that no tensor asked for and that lie in no segment that could be returned to the GPU.
    slack: dict[int, int]


def replay(
    events: Iterable[tuple[int, int]],
    card_bytes: int,
    expandable_segments: bool = False,
    slack_at: frozenset[int] = frozenset(),
    free_before: int = 0,
) -> Replay:
    """Run the events of a trace through an allocator that has `card_bytes` of the GPU.

    Args:
        events: pairs (index of the allocation, +bytes when made or -bytes when freed), as in `Trace.events`.
        card_bytes: bytes of the GPU that the allocator may reserve.
        expandable_segments: of PYTORCH_CUDA_ALLOC_CONF.
        slack_at: indices of the events after which `Replay.slack` is computed.
        free_before: bytes of a block that is allocated and freed before the first event (loading.py).
    """
    allocator = Allocator(card_bytes, expandable_segments)
    if free_before and (block := allocator.allocate(free_before)) is not None:
        allocator.free(block)
    live: dict[int, Block] = {}
    reserved: list[int] = []
    slack: dict[int, int] = {}
    failure: OutOfMemory | None = None
    peak_allocated, peak_reserved, requested = 0, 0, 0
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
        peak_reserved = max(peak_reserved, allocator.reserved_bytes)
        if event in slack_at:
            slack[event] = allocator.reserved_bytes - allocator.idle_bytes() - requested
    return Replay(
        reserved=tuple(reserved),
        peak_allocated_bytes=peak_allocated,
        peak_reserved_bytes=peak_reserved,
        out_of_memory=failure,
        slack=slack,
    )

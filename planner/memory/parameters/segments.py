"""Bytes of blocks that PyTorch's caching allocator leaves unsplit, and counts as allocated."""

from bisect import bisect_left, insort
from collections.abc import Iterable
from functools import lru_cache

from planner.memory.parameters.tensors import rounded_bytes
from planner.units import MIB

# Source: pytorch 2.13, c10/core/AllocatorConfig.h (`kSmallSize`, `kLargeBuffer`, `kMinLargeAlloc`, `kRoundLarge`).
SMALL_BYTES = 1 * MIB  # larger tensors are in the large pool
SEGMENT_BYTES = 20 * MIB  # shared by tensors smaller than the next
LARGE_BYTES = 10 * MIB  # tensors from here on have a segment each,
ROUNDING_BYTES = 2 * MIB  # rounded up to this


class _LargePool:
    """Segments of the large pool in which tensors are placed in the order of allocation.

    A block is split only if more than 1 MiB of it is left over; otherwise the tensor has all of it. Tensors from 10 MiB
    on take a segment that is rounded up to 2 MiB, smaller ones the smallest rest that has room, the oldest of equal
    ones, or a segment of 20 MiB.

    Source: pytorch 2.13, c10/cuda/CUDACachingAllocator.cpp, `should_split`, `get_allocation_size`, `get_free_block`.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []  # of the segments
        self.unsplit = 0  # bytes that tensors have beyond their own
        self._rests: list[tuple[int, int]] = []  # bytes, and the place of the segment

    def place(self, size: int) -> tuple[int, int]:
        """Place a tensor, and return its segment's place and the bytes that it has there."""
        place = bisect_left(self._rests, (size, 0))
        if size < LARGE_BYTES and place < len(self._rests):
            room, segment = self._rests.pop(place)
        else:
            room, segment = SEGMENT_BYTES if size < LARGE_BYTES else size + -size % ROUNDING_BYTES, len(self.sizes)
            self.sizes.append(room)
        rest = room - size
        if rest > SMALL_BYTES:
            insort(self._rests, (rest, segment))
            return segment, size
        self.unsplit += rest
        return segment, room


@lru_cache(maxsize=4096)
def unsplit_bytes(sizes: tuple[int, ...]) -> int:
    """Bytes that tensors which stay, allocated in this order, take beyond their own (`_LargePool`).

    Example: an activation of 19 MiB has a segment of 20 MiB, and counts as that; two of 9.5 MiB share one.

    Leaves out temporaries, whose blocks stay in the cache for others.
    """
    pool = _LargePool()
    for size in map(rounded_bytes, large(sizes)):
        pool.place(size)
    return pool.unsplit


@lru_cache(maxsize=256)
def held_by_states_bytes(gradients: tuple[int, ...], states: tuple[int, ...]) -> int:
    """Unused bytes of the segments that hold an optimizer's states, once the gradients are freed.

    The first step allocates gradients and then states, which take the rests of segments in which gradients are, so that
    the allocator cannot return these when the gradients are gone. Both in the order of allocation.

    Example: in full float32 Qwen2.5-1.5B has 84 gradients of 52.5 MiB, in segments of 54 MiB. 56 of their rests have
    the gradients of key and value projections, 1.5 MiB each, and 28 get states of these: 1.4 GiB (emulated: 27).

    Leaves out the blocks of activations, in which gradients and states may lie, too: 0.6 GiB of Qwen2.5-0.5B.
    """
    pool = _LargePool()
    for size in map(rounded_bytes, large(gradients)):
        pool.place(size)
    held: dict[int, int] = {}  # bytes of states by segment
    for size in map(rounded_bytes, large(states)):
        segment, own = pool.place(size)
        held[segment] = held.get(segment, 0) + own
    return sum(pool.sizes[segment] - own for segment, own in held.items())


def large(sizes: Iterable[int]) -> Iterable[int]:
    """The sizes of the large pool. Small tensors share segments of 2 MiB, whose blocks are split to 512 bytes."""
    return (size for size in sizes if size > SMALL_BYTES)

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


@lru_cache(maxsize=4096)
def unsplit_bytes(sizes: tuple[int, ...]) -> int:
    """Bytes that tensors which stay, allocated in this order, take beyond their own.

    A block is split only if more than 1 MiB of it is left over; otherwise the tensor has all of it. Tensors from 10 MiB
    on take a segment that is rounded up to 2 MiB, smaller ones the smallest rest of a segment of 20 MiB that has room.

    Source: pytorch 2.13, c10/cuda/CUDACachingAllocator.cpp, `should_split`, `get_allocation_size`, `get_free_block`.
    Example: an activation of 19 MiB has a segment of 20 MiB, and counts as that; two of 9.5 MiB share one.

    Leaves out temporaries, whose blocks stay in the cache for others.
    """
    rests: list[int] = []
    unsplit = 0
    for size in map(rounded_bytes, large(sizes)):
        if size >= LARGE_BYTES:
            rest = -size % ROUNDING_BYTES
        else:
            place = bisect_left(rests, size)
            rest = (rests.pop(place) if place < len(rests) else SEGMENT_BYTES) - size
        if rest > SMALL_BYTES:
            insort(rests, rest)
        else:
            unsplit += rest
    return unsplit


def large(sizes: Iterable[int]) -> Iterable[int]:
    """The sizes of the large pool. Small tensors share segments of 2 MiB, whose blocks are split to 512 bytes."""
    return (size for size in sizes if size > SMALL_BYTES)

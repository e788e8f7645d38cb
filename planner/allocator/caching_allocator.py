"""Model of PyTorch's caching allocator for CUDA: it reserves segments on a GPU, splits them into blocks and merges
them.

Source: pytorch 2.13, c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h, for one stream. Leaves out
further streams, captured graphs and pinned memory.
"""

import bisect
from dataclasses import dataclass, field

from planner.quantities import CUDA_BLOCK_BYTES
from planner.units import MIB, format_size

# AllocatorConfig.h: kSmallSize, kSmallBuffer, kLargeBuffer, kMinLargeAlloc, kRoundLarge.
SMALL_BYTES = 1 * MIB  # requests up to this size come from the small pool, larger ones from the large pool
SMALL_SEGMENT_BYTES = 2 * MIB  # size of the small pool's segments
LARGE_SEGMENT_BYTES = 20 * MIB  # size of the segments for requests between 1 and 10 MiB
MIN_OWN_SEGMENT_BYTES = 10 * MIB  # a request of at least this size gets a segment of its own size,
SEGMENT_ROUND_BYTES = 2 * MIB  # rounded up to a multiple of this
# Page size of expandable segments, by pool: True is the small pool.
EXPANDABLE_PAGE_BYTES = {True: 2 * MIB, False: 20 * MIB}
NO_LIMIT = 2**62


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatorSettings:
    """The settings in PYTORCH_CUDA_ALLOC_CONF.

    Blocks larger than `max_split_size_bytes` are not split. A `garbage_collection_threshold` of 0 switches it off.
    """

    expandable_segments: bool = False
    max_split_size_bytes: int = NO_LIMIT
    garbage_collection_threshold: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class OutOfMemory:
    """The numbers in PyTorch's out-of-memory message, and the index of the trace's event at which it is raised."""

    event: int
    tried_bytes: int
    total_bytes: int
    free_bytes: int
    allocated_bytes: int
    unallocated_bytes: int  # reserved by PyTorch but unallocated

    @property
    def message(self) -> str:
        return (
            f"CUDA out of memory. Tried to allocate {format_size(self.tried_bytes)}. "
            f"GPU 0 has a total capacity of {format_size(self.total_bytes)} "
            f"of which {format_size(self.free_bytes)} is free. "
            f"Of the allocated memory {format_size(self.allocated_bytes)} is allocated by PyTorch, "
            f"and {format_size(self.unallocated_bytes)} is reserved by PyTorch but unallocated."
        )


@dataclass(slots=True, eq=False)
class Block:
    """A piece of a segment, linked to its neighbours. `address` orders blocks of equal size, as pointers do."""

    address: int
    size_bytes: int
    small: bool
    allocated: bool = False
    previous: "Block | None" = None
    following: "Block | None" = None
    freed_at: int = 0  # number of allocations before it was last freed: its age, for garbage collection

    @property
    def is_whole_segment(self) -> bool:
        return self.previous is None and self.following is None


@dataclass(slots=True)
class _Pool:
    """The free blocks of a pool, sorted by size, then by address; bisection finds the smallest that fits."""

    keys: list[tuple[int, int]] = field(default_factory=list)
    blocks: dict[tuple[int, int], Block] = field(default_factory=dict)

    def add(self, block: Block) -> None:
        key = (block.size_bytes, block.address)
        bisect.insort(self.keys, key)
        self.blocks[key] = block

    def remove(self, block: Block) -> None:
        key = (block.size_bytes, block.address)
        del self.keys[bisect.bisect_left(self.keys, key)]
        del self.blocks[key]

    def smallest(self, size_bytes: int) -> Block | None:
        index = bisect.bisect_left(self.keys, (size_bytes, 0))
        return self.blocks[self.keys[index]] if index < len(self.keys) else None


class Allocator:
    """The allocator's state: `reserved_bytes` counts its segments, `allocated_bytes` the blocks in use.

    A block's pool is given as a boolean: True is the small pool, False the large one.
    """

    def __init__(self, card_bytes: int, settings: AllocatorSettings) -> None:
        self.card_bytes = card_bytes
        self.settings = settings
        self.reserved_bytes = 0
        self.allocated_bytes = 0
        self._pools = {True: _Pool(), False: _Pool()}
        self._next_address = 0
        self._count = 0
        # With expandable_segments: the last block of each pool's one segment.
        self._tails: dict[bool, Block | None] = {True: None, False: None}

    def allocate(self, size_bytes: int) -> Block | None:
        """Allocate a block for a request; None if the GPU is full even after the free segments were returned to it."""
        size_bytes = rounded_bytes(size_bytes)
        small = size_bytes <= SMALL_BYTES
        self._count += 1
        block = self._free_block(size_bytes, small)
        if block is None:
            self._collect_garbage()
            block = self._new_segment(size_bytes, small)
        if block is None:
            self.empty_cache()
            block = self._new_segment(size_bytes, small)
        if block is None:
            return None
        if self._is_split(block, size_bytes):
            self._split(block, size_bytes)
        block.allocated = True
        self.allocated_bytes += block.size_bytes
        return block

    def free(self, block: Block) -> None:
        """Put a block back into its pool, merged with its free neighbours."""
        self.allocated_bytes -= block.size_bytes
        block.allocated = False
        block.freed_at = self._count
        for neighbour in (block.previous, block.following):
            if neighbour is not None and not neighbour.allocated:
                self._pools[block.small].remove(neighbour)
                block = self._merge(block, neighbour)
        self._pools[block.small].add(block)

    def empty_cache(self) -> None:
        """Return every wholly free segment to the GPU; of expandable segments the free pages at the end.

        Source: `release_cached_blocks`.
        """
        for small, pool in self._pools.items():
            for block in list(pool.blocks.values()):
                if self.settings.expandable_segments:
                    self._unmap(block, small)
                elif block.is_whole_segment:
                    pool.remove(block)
                    self.reserved_bytes -= block.size_bytes

    def idle_bytes(self) -> int:
        """Bytes that could be returned to the GPU: wholly free segments; of expandable segments, pages of free blocks.

        Source: `unmap_block`.
        """
        free = [block for pool in self._pools.values() for block in pool.blocks.values()]
        if self.settings.expandable_segments:
            return sum(block.size_bytes - block.size_bytes % EXPANDABLE_PAGE_BYTES[block.small] for block in free)
        return sum(block.size_bytes for block in free if block.is_whole_segment)

    def out_of_memory(self, event: int, size_bytes: int) -> OutOfMemory:
        """Return the numbers of the message for a request that found no room."""
        return OutOfMemory(
            event=event,
            tried_bytes=_segment_bytes(rounded_bytes(size_bytes)),
            total_bytes=self.card_bytes,
            free_bytes=self.card_bytes - self.reserved_bytes,
            allocated_bytes=self.allocated_bytes,
            unallocated_bytes=self.reserved_bytes - self.allocated_bytes,
        )

    def _free_block(self, size_bytes: int, small: bool) -> Block | None:
        """Take the smallest free block that fits out of its pool; None if there is none.

        None also if the block is too large to be split and would waste too much as a whole. Source: `get_free_block`.
        """
        block = self._pools[small].smallest(size_bytes)
        if block is None:
            return None
        limit = self.settings.max_split_size_bytes
        if not self.settings.expandable_segments:
            if size_bytes < limit and block.size_bytes >= limit:
                return None
            if size_bytes >= limit and block.size_bytes >= size_bytes + LARGE_SEGMENT_BYTES:
                return None
        self._pools[small].remove(block)
        return block

    def _collect_garbage(self) -> None:
        """Return the large segments that have been free for longest to the GPU, if more than the threshold is reserved.

        Source: `garbage_collect_cached_blocks`.
        """
        threshold = int(self.settings.garbage_collection_threshold * self.card_bytes)
        if not threshold or self.reserved_bytes <= threshold:
            return
        pool = self._pools[False]
        target = self.reserved_bytes - threshold
        whole = [block for block in pool.blocks.values() if block.is_whole_segment]
        while target > 0 and whole:
            ages = [self._count - block.freed_at for block in whole]
            mean = sum(ages) / len(ages)
            old = [block for block, age in zip(whole, ages, strict=True) if age >= mean]
            for block in old:
                if target > 0:
                    pool.remove(block)
                    self.reserved_bytes -= block.size_bytes
                    target -= block.size_bytes
            whole = [block for block in whole if block not in old]

    def _new_segment(self, size_bytes: int, small: bool) -> Block | None:
        """Reserve a new segment and return it as one block; None if the GPU is full. Source: `alloc_block`."""
        if self.settings.expandable_segments:
            return self._expand_segment(size_bytes, small)
        segment_bytes = _segment_bytes(size_bytes)
        if self.reserved_bytes + segment_bytes > self.card_bytes:
            return None
        self.reserved_bytes += segment_bytes
        return self._new_block(segment_bytes, small)

    def _expand_segment(self, size_bytes: int, small: bool) -> Block | None:
        """Add pages to the pool's one segment and return them, merged with its free end, as a block; None if full.

        Source: `try_allocate_expandable_block`.
        """
        page = EXPANDABLE_PAGE_BYTES[small]
        tail = self._tails[small]
        spare = tail if tail is not None and not tail.allocated else None
        mapped = -(-(size_bytes - (spare.size_bytes if spare else 0)) // page) * page
        if self.reserved_bytes + mapped > self.card_bytes:
            return None
        self.reserved_bytes += mapped
        block = self._new_block(mapped, small)
        block.previous, self._tails[small] = tail, block
        if tail is not None:
            tail.following = block
        if spare is not None:
            self._pools[small].remove(spare)
            block = self._merge(block, spare)
        return block

    def _new_block(self, size_bytes: int, small: bool) -> Block:
        block = Block(address=self._next_address, size_bytes=size_bytes, small=small)
        self._next_address += size_bytes
        return block

    def _is_split(self, block: Block, size_bytes: int) -> bool:
        """Return whether a block is split for a request: the rest must be worth keeping. Source: `should_split`."""
        left = block.size_bytes - size_bytes
        if block.small or self.settings.expandable_segments:
            return left >= CUDA_BLOCK_BYTES
        return size_bytes < self.settings.max_split_size_bytes and left > SMALL_BYTES

    def _split(self, block: Block, size_bytes: int) -> None:
        """Cut a block to a request's size and put the rest into the pool."""
        rest = Block(
            address=block.address + size_bytes,
            size_bytes=block.size_bytes - size_bytes,
            small=block.small,
            previous=block,
            following=block.following,
            freed_at=block.freed_at,
        )
        if rest.following is not None:
            rest.following.previous = rest
        if self._tails[block.small] is block:
            self._tails[block.small] = rest
        block.size_bytes, block.following = size_bytes, rest
        self._pools[block.small].add(rest)

    def _merge(self, block: Block, neighbour: Block) -> Block:
        """Merge two neighbouring free blocks into the first of them, and return it."""
        first, second = (neighbour, block) if neighbour is block.previous else (block, neighbour)
        first.size_bytes += second.size_bytes
        first.following = second.following
        first.freed_at = max(first.freed_at, second.freed_at)
        first.allocated = False
        if first.following is not None:
            first.following.previous = first
        if self._tails[first.small] is second:
            self._tails[first.small] = first
        return first

    def _unmap(self, block: Block, small: bool) -> None:
        """Return the whole pages of a free block at the end of an expandable segment to the GPU."""
        pages = block.size_bytes // EXPANDABLE_PAGE_BYTES[small] * EXPANDABLE_PAGE_BYTES[small]
        if self._tails[small] is not block or not pages:
            return
        self._pools[small].remove(block)
        self.reserved_bytes -= pages
        block.size_bytes -= pages
        if block.size_bytes:
            self._pools[small].add(block)
        else:
            self._tails[small] = block.previous
            if block.previous is not None:
                block.previous.following = None


def rounded_bytes(size_bytes: int) -> int:
    """Round a request up to whole blocks of 512 bytes, at least one. Source: `round_size`."""
    return max(CUDA_BLOCK_BYTES, -(-size_bytes // CUDA_BLOCK_BYTES) * CUDA_BLOCK_BYTES)


def _segment_bytes(size_bytes: int) -> int:
    """Return the size of the new segment for a request that no free block fits. Source: `get_allocation_size`."""
    if size_bytes <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size_bytes < MIN_OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size_bytes // SEGMENT_ROUND_BYTES) * SEGMENT_ROUND_BYTES

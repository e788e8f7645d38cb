"""Model of PyTorch's caching allocator for CUDA: segments on a GPU are split into blocks and merged again.

Source: pytorch, c10/cuda/CUDACachingAllocator.cpp (`DeviceCachingAllocator`, `ExpandableSegment`) and, for the
constants of 2.13, c10/core/AllocatorConfig.h. Each function names the one that it ports. Of PYTORCH_CUDA_ALLOC_CONF it
knows `expandable_segments`, the only setting that plans have. Leaves out captured graphs and private pools. Tested
against a second, naive implementation (tests/naive_allocator.py).
"""

import bisect

from msgspec import Struct

from planner.quantities import CUDA_BLOCK_BYTES
from planner.units import MIB, format_size

# AllocatorConfig.h: kSmallSize, kSmallBuffer, large_segment_size, kMinLargeAlloc, kRoundLarge.
SMALL_BYTES = 1 * MIB  # requests up to this size come from the small pool, larger ones from the large pool
SMALL_SEGMENT_BYTES = 2 * MIB  # size of the small pool's segments, and of its pages with expandable segments
LARGE_SEGMENT_BYTES = 20 * MIB  # size of the segments for requests between 1 and 10 MiB, and of the large pool's pages
MIN_OWN_SEGMENT_BYTES = 10 * MIB  # a request of at least this size gets a segment of its own size,
SEGMENT_ROUND_BYTES = 2 * MIB  # rounded up to a multiple of this
NO_LIMIT = 2**62


class OutOfMemory(Struct, frozen=True, kw_only=True):
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


class Block(Struct, eq=False):
    """A piece of a segment, linked to its neighbours. `address` orders blocks of equal size, as pointers do.

    `segment`: the first address of its expandable segment, -1 in a segment of its own. An unmapped block is address
    space of an expandable segment without memory behind it.
    """

    address: int
    size_bytes: int
    pool: "Pool"
    stream: int
    segment: int = -1
    allocated: bool = False
    mapped: bool = True
    previous: "Block | None" = None
    following: "Block | None" = None

    @property
    def is_split(self) -> bool:
        return self.previous is not None or self.following is not None

    @property
    def end(self) -> int:
        return self.address + self.size_bytes


class Pool:
    """The free blocks of a pool by stream, size and address, and its unmapped blocks by stream and address."""

    def __init__(self, small: bool) -> None:
        self.small = small
        self.page_bytes = SMALL_SEGMENT_BYTES if small else LARGE_SEGMENT_BYTES
        self.keys: list[tuple[int, int, int]] = []
        self.blocks: dict[tuple[int, int, int], Block] = {}
        self.unmapped: list[Block] = []  # few: one for each hole and the end of a segment

    def add(self, block: Block) -> None:
        key = (block.stream, block.size_bytes, block.address)
        bisect.insort(self.keys, key)
        self.blocks[key] = block

    def remove(self, block: Block) -> None:
        key = (block.stream, block.size_bytes, block.address)
        del self.keys[bisect.bisect_left(self.keys, key)]
        del self.blocks[key]

    def in_order(self) -> list[Block]:
        return [self.blocks[key] for key in self.keys]


class Allocator:
    """The allocator's state: `reserved_bytes` counts its segments and mapped pages, `allocated_bytes` blocks in use."""

    def __init__(self, card_bytes: int, expandable_segments: bool = False, total_bytes: int = 0) -> None:
        """`card_bytes`: what PyTorch may reserve; `total_bytes` of the GPU, if more, sizes the address space."""
        self.card_bytes = card_bytes
        self.total_bytes = max(total_bytes, card_bytes)
        self.expandable_segments = expandable_segments
        self.reserved_bytes = 0
        self.allocated_bytes = 0
        self.small_pool, self.large_pool = Pool(small=True), Pool(small=False)
        self._next_address = 0

    def allocate(self, size_bytes: int, stream: int = 0) -> Block | None:
        """Allocate a block for a request; None if the GPU is full even after cached memory was returned to it.

        Source: `malloc`.
        """
        size_bytes = rounded_bytes(size_bytes)
        pool = self.small_pool if size_bytes <= SMALL_BYTES else self.large_pool
        block = self._free_block(pool, size_bytes, stream)
        if block is None:
            block = self._new_block(pool, size_bytes, stream)
        if block is None:
            self.empty_cache()
            block = self._new_block(pool, size_bytes, stream)
        if block is None:
            return None
        if self._splits(block, size_bytes):
            self._split(block, size_bytes)
        block.allocated = True
        self.allocated_bytes += block.size_bytes
        return block

    def free(self, block: Block) -> None:
        """Put a block back into its pool, merged with its free neighbours. Source: `free_block`."""
        self.allocated_bytes -= block.size_bytes
        block.allocated = False
        self._merge(block, block.previous)
        self._merge(block, block.following)
        block.pool.add(block)

    def empty_cache(self) -> None:
        """Return unused memory to the GPU: whole free segments; of expandable segments, whole pages of free blocks.

        Source: `release_cached_blocks`, `release_blocks`.
        """
        for pool in (self.large_pool, self.small_pool):
            expandable: list[Block] = []
            for block in pool.in_order():
                if block.segment >= 0:
                    expandable.append(block)
                elif not block.is_split:
                    self._release(block)
            for block in expandable:
                self._unmap(block)
                if not block.mapped and not block.is_split:
                    pool.unmapped.remove(block)  # `release_expandable_segment`

    def idle_bytes(self) -> int:
        """Bytes that `empty_cache` would return to the GPU."""
        free = [*self.large_pool.blocks.values(), *self.small_pool.blocks.values()]
        return sum(
            _whole_pages(block)[1] if block.segment >= 0 else 0 if block.is_split else block.size_bytes
            for block in free
        )

    def out_of_memory(self, event: int, size_bytes: int) -> OutOfMemory:
        """Return the numbers of the message for a request that found no room."""
        return OutOfMemory(
            event=event,
            tried_bytes=segment_bytes(rounded_bytes(size_bytes)),
            total_bytes=self.card_bytes,
            free_bytes=self.card_bytes - self.reserved_bytes,
            allocated_bytes=self.allocated_bytes,
            unallocated_bytes=self.reserved_bytes - self.allocated_bytes,
        )

    # -- cached blocks -------------------------------------------------------------------------------------------------

    def _free_block(self, pool: Pool, size_bytes: int, stream: int) -> Block | None:
        """Take the best free block for a request out of its pool; None if there is none. Source: `get_free_block`.

        With expandable segments the size of a block at the end of its mapped pages is the size that it can grow to.
        """
        index = bisect.bisect_left(pool.keys, (stream, size_bytes, -1))
        if index == len(pool.keys) or pool.keys[index][0] != stream:
            return None
        block = pool.blocks[pool.keys[index]]
        while block.segment >= 0 and index + 1 < len(pool.keys):
            following = pool.blocks[pool.keys[index + 1]]
            if following.stream != stream or _expandable_bytes(following) >= _expandable_bytes(block):
                break
            block, index = following, index + 1
        pool.remove(block)
        return block

    def _release(self, block: Block) -> None:
        """Return a whole segment to the GPU. Source: `release_block`."""
        block.pool.remove(block)
        self.reserved_bytes -= block.size_bytes

    # -- new memory ----------------------------------------------------------------------------------------------------

    def _new_block(self, pool: Pool, size_bytes: int, stream: int) -> Block | None:
        """Reserve memory for a request and return it as one block; None if the GPU is full. Source: `alloc_block`."""
        if self.expandable_segments:
            return self._expand(pool, size_bytes, stream)
        wanted = segment_bytes(size_bytes)
        if self.reserved_bytes + wanted > self.card_bytes:
            return None
        self.reserved_bytes += wanted
        block = Block(address=self._next_address, size_bytes=wanted, pool=pool, stream=stream)
        self._next_address += wanted
        return block

    def _expand(self, pool: Pool, size_bytes: int, stream: int) -> Block | None:
        """Map pages at the lowest address where the request fits, filling holes; None if the GPU is full.

        Pages that were mapped before the GPU was full stay in the pool. Source: `try_allocate_expandable_block`.
        """
        block = self._expandable_block(pool, size_bytes, stream)
        if not block.mapped and not self._map(block, min(block.size_bytes, size_bytes)):
            return None
        while block.size_bytes < size_bytes:
            following = block.following
            if following is None:  # the request is larger than the address space, which is larger than the GPU
                return None
            if not self._map(following, min(size_bytes - block.size_bytes, following.size_bytes)):
                return None
            block = following  # merged with the free block before it
        pool.remove(block)
        return block

    def _expandable_block(self, pool: Pool, size_bytes: int, stream: int) -> Block:
        """The first of the free and unmapped blocks that have room for the request, at the lowest address.

        Source: `find_expandable_block`; a new segment has address space for 1 1/8 of the GPU.
        """
        for hole in sorted((hole for hole in pool.unmapped if hole.stream == stream), key=lambda each: each.address):
            first = hole.previous if hole.previous is not None and not hole.previous.allocated else hole
            room = 0
            candidate: Block | None = first
            while room < size_bytes and candidate is not None and not candidate.allocated:
                room, candidate = room + candidate.size_bytes, candidate.following
            if room >= size_bytes:
                return first
        space = -(-(self.total_bytes + self.total_bytes // 8) // pool.page_bytes) * pool.page_bytes
        start = self._next_address
        self._next_address += space
        block = Block(address=start, size_bytes=space, pool=pool, stream=stream, segment=start, mapped=False)
        pool.unmapped.append(block)
        return block

    def _map(self, block: Block, size_bytes: int) -> bool:
        """Map whole pages at the start of an unmapped block; False if the GPU is full. Source: `map_block`, `map`."""
        pool = block.pool
        mapped = min(-(-size_bytes // pool.page_bytes) * pool.page_bytes, block.size_bytes)
        if self.reserved_bytes + mapped > self.card_bytes:
            return False
        pool.unmapped.remove(block)
        if mapped < block.size_bytes:
            rest = Block(
                address=block.address + mapped,
                size_bytes=block.size_bytes - mapped,
                pool=pool,
                stream=block.stream,
                segment=block.segment,
                mapped=False,
            )
            _link(block, rest, block.following)
            pool.unmapped.append(rest)
            block.size_bytes = mapped
        block.mapped = True
        self._merge(block, block.previous)
        self._merge(block, block.following)
        pool.add(block)
        self.reserved_bytes += mapped
        return True

    def _unmap(self, block: Block) -> None:
        """Return the whole pages of a free block to the GPU; what is left at its ends stays free.

        Source: `unmap_block`, `ExpandableSegment::unmap`.
        """
        pool = block.pool
        start, size_bytes = _whole_pages(block)
        if not size_bytes:
            return
        pool.remove(block)
        for address, end, before in ((block.address, start, True), (start + size_bytes, block.end, False)):
            if end > address:
                rest = Block(
                    address=address, size_bytes=end - address, pool=pool, stream=block.stream, segment=block.segment
                )
                if before:
                    _link(block.previous, rest, block)
                else:
                    _link(block, rest, block.following)
                pool.add(rest)
        block.address, block.size_bytes, block.mapped = start, size_bytes, False
        self._merge(block, block.previous)
        self._merge(block, block.following)
        pool.unmapped.append(block)
        self.reserved_bytes -= size_bytes

    # -- blocks --------------------------------------------------------------------------------------------------------

    def _splits(self, block: Block, size_bytes: int) -> bool:
        """Return whether the rest of a block is worth keeping. Source: `should_split`."""
        left = block.size_bytes - size_bytes
        if block.pool.small or self.expandable_segments:
            return left >= CUDA_BLOCK_BYTES
        return left > SMALL_BYTES

    def _split(self, block: Block, size_bytes: int) -> None:
        """Cut a block to a request's size and put the rest into the pool. Source: `alloc_found_block`."""
        rest = Block(
            address=block.address + size_bytes,
            size_bytes=block.size_bytes - size_bytes,
            pool=block.pool,
            stream=block.stream,
            segment=block.segment,
        )
        _link(block, rest, block.following)
        block.size_bytes = size_bytes
        block.pool.add(rest)

    def _merge(self, block: Block, neighbour: Block | None) -> None:
        """Merge a neighbour into a block if both are free, and both mapped or both not. Source: `try_merge_blocks`."""
        if neighbour is None or neighbour.allocated or neighbour.mapped != block.mapped:
            return
        if neighbour.mapped:
            neighbour.pool.remove(neighbour)
        else:
            neighbour.pool.unmapped.remove(neighbour)
        if neighbour is block.previous:
            block.address, block.previous = neighbour.address, neighbour.previous
            if block.previous is not None:
                block.previous.following = block
        else:
            block.following = neighbour.following
            if block.following is not None:
                block.following.previous = block
        block.size_bytes += neighbour.size_bytes


def rounded_bytes(size_bytes: int) -> int:
    """Round a request up to whole blocks of 512 bytes. Source: `round_size`."""
    return max(-(-size_bytes // CUDA_BLOCK_BYTES), 1) * CUDA_BLOCK_BYTES


def segment_bytes(size_bytes: int) -> int:
    """Return the size of the new segment for a request that no free block fits. Source: `get_allocation_size`."""
    if size_bytes <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size_bytes < MIN_OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size_bytes // SEGMENT_ROUND_BYTES) * SEGMENT_ROUND_BYTES


def _expandable_bytes(block: Block) -> int:
    """The size that a block can grow to: its own, and the unmapped address space behind it."""
    following = block.following
    return block.size_bytes + (following.size_bytes if following is not None and not following.mapped else 0)


def _whole_pages(block: Block) -> tuple[int, int]:
    """Address and bytes of the whole pages of a block in an expandable segment; 0 bytes if there are none."""
    page = block.pool.page_bytes
    start = block.segment + -(-(block.address - block.segment) // page) * page
    end = block.segment + (block.end - block.segment) // page * page
    return start, max(end - start, 0)


def _link(before: Block | None, block: Block, after: Block | None) -> None:
    """Insert a block between two neighbours. Source: `Block::splice`."""
    block.previous, block.following = before, after
    if before is not None:
        before.following = block
    if after is not None:
        after.previous = block

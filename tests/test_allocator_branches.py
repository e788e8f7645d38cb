"""Each branch of PyTorch's caching allocator on a case worked out by hand from the C++, and random traces against a
second implementation."""

import os
import random

import pytest
from naive_allocator import NaiveAllocator

from planner.allocator.caching_allocator import Allocator, Block
from planner.units import MIB

TRACES = int(os.environ.get("PLAN_TRACES", "1000"))


def allocated(allocator: Allocator, *mebibytes: float, stream: int = 0) -> list[Block]:
    """Allocate blocks of these sizes in MiB one after the other; all must fit."""
    blocks = [allocator.allocate(int(size * MIB), stream) for size in mebibytes]
    assert all(block is not None for block in blocks)
    return [block for block in blocks if block is not None]


def test_a_free_block_at_the_start_of_an_expandable_segment_gives_its_pages_back() -> None:
    # 40 on pages 0-1, 20 on page 2; 40 is freed. 60 more need 3 pages, and 100 MiB have room for 2 beside the 3:
    # the 2 free pages are unmapped (60 - 40 = 20), then 3 are mapped behind (80).
    allocator = Allocator(100 * MIB, expandable_segments=True)
    first, _ = allocated(allocator, 40, 20)
    allocator.free(first)
    assert allocator.idle_bytes() == 40 * MIB
    allocated(allocator, 60)
    assert allocator.reserved_bytes == 80 * MIB


def test_whole_pages_in_the_middle_of_a_segment_are_unmapped_and_the_hole_is_filled_first() -> None:
    # 30 at 0, 50 at 30, 30 at 80: 6 pages. Of the free 50 at 30 the pages from 40 to 80 are whole.
    allocator = Allocator(1000 * MIB, expandable_segments=True)
    first, middle, _ = allocated(allocator, 30, 50, 30)
    assert allocator.reserved_bytes == 120 * MIB
    allocator.free(middle)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 80 * MIB
    (again,) = allocated(allocator, 40)  # 10 are free at 30, and 2 pages are mapped behind them
    assert again.address - first.address == 30 * MIB
    assert allocator.reserved_bytes == 120 * MIB


def test_a_free_block_within_a_segment_is_preferred_to_a_smaller_one_at_its_end() -> None:
    # 20 at 0, 30 at 20, 10 free at 50 before unmapped address space. For 8 the 10 would be the best fit by size,
    # but it can grow to the end of the address space, so the 20 at 0 is taken.
    allocator = Allocator(1000 * MIB, expandable_segments=True)
    first, _ = allocated(allocator, 20, 30)
    start = first.address
    allocator.free(first)
    (taken,) = allocated(allocator, 8)
    assert taken.address == start


def test_the_pages_of_the_small_pool_have_two_mebibytes() -> None:
    allocator = Allocator(1000 * MIB, expandable_segments=True)
    allocated(allocator, 1, 1, 0.5)
    assert allocator.reserved_bytes == 4 * MIB


def test_a_full_card_maps_no_page() -> None:
    # 30 on 2 pages; 30 more need the 10 that are free and one page: 60 of 50 MiB
    allocator = Allocator(50 * MIB, expandable_segments=True)
    allocated(allocator, 30)
    assert allocator.allocate(30 * MIB) is None
    assert allocator.reserved_bytes == 40 * MIB


def test_an_empty_expandable_segment_is_released_whole() -> None:
    allocator = Allocator(100 * MIB, expandable_segments=True)
    (block,) = allocated(allocator, 90)
    allocator.free(block)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0
    assert allocator.large_pool.unmapped == []


def test_expandable_blocks_are_split_down_to_512_bytes_and_others_down_to_one_mebibyte() -> None:
    for expandable, size in ((True, 11), (False, 12)):
        allocator = Allocator(1000 * MIB, expandable)
        (block,) = allocated(allocator, 12)
        allocator.free(block)
        allocated(allocator, 11)
        assert allocator.allocated_bytes == size * MIB


@pytest.mark.parametrize("expandable", [False, True])
def test_a_stream_does_not_use_the_free_blocks_of_another(expandable: bool) -> None:
    allocator = Allocator(1000 * MIB, expandable)
    (block,) = allocated(allocator, 40, stream=1)
    allocator.free(block)
    allocated(allocator, 40)
    assert allocator.reserved_bytes == 80 * MIB


def random_size(draw: random.Random) -> int:
    low, high = draw.choice(((1, MIB), (MIB, 12 * MIB), (10 * MIB, 90 * MIB)))
    return draw.randint(low, high)


def test_random_traces_reserve_the_same_in_a_second_implementation() -> None:
    """PLAN_TRACES=10000 runs so many; a third of the requests finds no room."""
    for number in range(TRACES):
        draw = random.Random(f"trace {number}")
        expandable, card_bytes = draw.random() < 0.5, draw.choice((64, 200, 400, 1000)) * MIB
        first = Allocator(card_bytes, expandable)
        second = NaiveAllocator(card_bytes, expandable)
        live: dict[int, Block] = {}
        for step in range(draw.randint(5, 80)):
            if live and draw.random() < 0.45:
                name = draw.choice(sorted(live))
                first.free(live.pop(name))
                second.free(name)
            elif draw.random() < 0.03:
                first.empty_cache()
                second.empty_cache()
            else:
                size_bytes, stream = random_size(draw), draw.choice((0, 0, 0, 1))
                block, fits = first.allocate(size_bytes, stream), second.allocate(step, size_bytes, stream)
                assert (block is not None) == fits, (number, step)
                if block is not None:
                    live[step] = block
            assert (first.reserved_bytes, first.allocated_bytes) == (second.reserved, second.allocated), (number, step)

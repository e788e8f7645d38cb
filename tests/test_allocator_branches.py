"""Each branch of PyTorch's caching allocator on a case worked out by hand from the C++, and random traces against a
second implementation."""

import os
import random

import pytest
from naive_allocator import NaiveAllocator

from planner.allocator.caching_allocator import Allocator, AllocatorSettings, Block
from planner.units import MIB

EXPANDABLE = AllocatorSettings(expandable_segments=True)
TRACES = int(os.environ.get("PLAN_TRACES", "1000"))


def allocated(allocator: Allocator, *mebibytes: float, stream: int = 0) -> list[Block]:
    """Allocate blocks of these sizes in MiB one after the other; all must fit."""
    blocks = [allocator.allocate(int(size * MIB), stream) for size in mebibytes]
    assert all(block is not None for block in blocks)
    return [block for block in blocks if block is not None]


def test_a_free_block_at_the_start_of_an_expandable_segment_gives_its_pages_back() -> None:
    # 40 on pages 0-1, 20 on page 2; 40 is freed. 60 more need 3 pages, and 100 MiB have room for 2 beside the 3:
    # the 2 free pages are unmapped (60 - 40 = 20), then 3 are mapped behind (80).
    allocator = Allocator(100 * MIB, EXPANDABLE)
    first, _ = allocated(allocator, 40, 20)
    allocator.free(first)
    assert allocator.idle_bytes() == 40 * MIB
    allocated(allocator, 60)
    assert allocator.reserved_bytes == 80 * MIB


def test_whole_pages_in_the_middle_of_a_segment_are_unmapped_and_the_hole_is_filled_first() -> None:
    # 30 at 0, 50 at 30, 30 at 80: 6 pages. Of the free 50 at 30 the pages from 40 to 80 are whole.
    allocator = Allocator(1000 * MIB, EXPANDABLE)
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
    allocator = Allocator(1000 * MIB, EXPANDABLE)
    first, _ = allocated(allocator, 20, 30)
    start = first.address
    allocator.free(first)
    (taken,) = allocated(allocator, 8)
    assert taken.address == start


def test_the_pages_of_the_small_pool_have_two_mebibytes() -> None:
    allocator = Allocator(1000 * MIB, EXPANDABLE)
    allocated(allocator, 1, 1, 0.5)
    assert allocator.reserved_bytes == 4 * MIB


def test_a_full_card_maps_no_page() -> None:
    # 30 on 2 pages; 30 more need the 10 that are free and one page: 60 of 50 MiB
    allocator = Allocator(50 * MIB, EXPANDABLE)
    allocated(allocator, 30)
    assert allocator.allocate(30 * MIB) is None
    assert allocator.reserved_bytes == 40 * MIB


def test_an_empty_expandable_segment_is_released_whole() -> None:
    allocator = Allocator(100 * MIB, EXPANDABLE)
    (block,) = allocated(allocator, 90)
    allocator.free(block)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0
    assert allocator.large_pool.unmapped == []


def test_expandable_blocks_are_split_down_to_512_bytes_and_others_down_to_one_mebibyte() -> None:
    for settings, size in ((EXPANDABLE, 11), (AllocatorSettings(), 12)):
        allocator = Allocator(1000 * MIB, settings)
        (block,) = allocated(allocator, 12)
        allocator.free(block)
        allocated(allocator, 11)
        assert allocator.allocated_bytes == size * MIB


def test_garbage_is_collected_only_where_a_memory_fraction_is_set() -> None:
    for fraction, reserved in ((0.0, 140), (1.0, 100)):
        settings = AllocatorSettings(garbage_collection_threshold=0.5, memory_fraction=fraction)
        allocator = Allocator(150 * MIB, settings)
        first, _ = allocated(allocator, 40, 40)
        allocator.free(first)
        allocated(allocator, 60)
        assert allocator.reserved_bytes == reserved * MIB


def test_a_pass_of_garbage_collection_goes_beyond_its_target() -> None:
    # 120 reserved, threshold 100: 20 would do, but all three segments are of the same age
    allocator = Allocator(200 * MIB, AllocatorSettings(garbage_collection_threshold=0.5, memory_fraction=1.0))
    for block in allocated(allocator, 40, 40, 40):
        allocator.free(block)
    allocated(allocator, 60)
    assert allocator.reserved_bytes == 60 * MIB


def test_garbage_collection_takes_the_segments_that_have_been_free_for_longest() -> None:
    # the first 40 is free for two searches when 60 are asked, the second for one: the mean is 1.5
    allocator = Allocator(200 * MIB, AllocatorSettings(garbage_collection_threshold=0.5, memory_fraction=1.0))
    old, young = allocated(allocator, 40, 40)
    allocator.free(old)
    allocated(allocator, 50)
    allocator.free(young)
    allocated(allocator, 60)
    assert allocator.reserved_bytes == (40 + 50 + 60) * MIB


def test_a_memory_fraction_limits_what_is_reserved() -> None:
    allocator = Allocator(100 * MIB, AllocatorSettings(memory_fraction=0.5))
    allocated(allocator, 40)
    assert allocator.allocate(20 * MIB) is None


def test_an_oversize_block_is_released_for_a_request_that_it_may_not_serve() -> None:
    # a free block of 64, not to be split: too large for 40 (40 + 20 < 64), and 64 + 40 do not fit
    allocator = Allocator(100 * MIB, AllocatorSettings(max_split_size_bytes=32 * MIB))
    (block,) = allocated(allocator, 64)
    allocator.free(block)
    allocated(allocator, 40)
    assert allocator.reserved_bytes == 40 * MIB


def test_several_oversize_blocks_are_released_the_largest_first() -> None:
    # 90 do not fit beside 40 + 50 + 4; 50 and 40 make room. The segment of 20 with 4 in use stays.
    allocator = Allocator(120 * MIB, AllocatorSettings(max_split_size_bytes=32 * MIB))
    for block in allocated(allocator, 4, 40, 50)[1:]:
        allocator.free(block)
    allocated(allocator, 90)
    assert allocator.reserved_bytes == (20 + 90) * MIB


def test_an_oversize_block_serves_a_request_within_the_rounding() -> None:
    settings = AllocatorSettings(max_split_size_bytes=32 * MIB, max_non_split_rounding_bytes=40 * MIB)
    allocator = Allocator(100 * MIB, settings)
    (block,) = allocated(allocator, 64)
    allocator.free(block)
    allocated(allocator, 40)
    assert (allocator.reserved_bytes, allocator.allocated_bytes) == (64 * MIB, 64 * MIB)


def test_requests_are_rounded_to_divisions_of_a_power_of_two() -> None:
    # 5000 lies between 4096 and 8192: 4 steps of 1024; 5 MiB + 1 between 4 and 8 MiB: steps of 1 MiB
    settings = AllocatorSettings(roundup_power2_divisions=(4,) * 16)
    for size, rounded in ((5000, 5120), (4096, 4096), (2048, 2048), (5 * MIB + 1, 6 * MIB)):
        allocator = Allocator(100 * MIB, settings)
        allocator.allocate(size)
        assert allocator.allocated_bytes == rounded


def test_the_divisions_of_each_power_of_two_from_one_mebibyte_on_are_its_own() -> None:
    settings = AllocatorSettings(roundup_power2_divisions=(1, 2, *(8,) * 14))
    for size, rounded in ((MIB + 1, MIB + 512), (2 * MIB + 1, 3 * MIB), (4 * MIB + 1, 4 * MIB + MIB // 2)):
        allocator = Allocator(100 * MIB, settings)
        allocator.allocate(size)
        assert allocator.allocated_bytes == rounded


@pytest.mark.parametrize("settings", [AllocatorSettings(), EXPANDABLE])
def test_a_stream_does_not_use_the_free_blocks_of_another(settings: AllocatorSettings) -> None:
    allocator = Allocator(1000 * MIB, settings)
    (block,) = allocated(allocator, 40, stream=1)
    allocator.free(block)
    allocated(allocator, 40)
    assert allocator.reserved_bytes == 80 * MIB


def random_settings(draw: random.Random) -> dict[str, object]:
    found: dict[str, object] = {}
    if draw.random() < 0.5:
        found["expandable_segments"] = True  # which release_block refuses beside max_split_size and garbage collection
    elif draw.random() < 0.4:
        found["max_split_size_bytes"] = draw.choice((21, 32, 64)) * MIB
        found["max_non_split_rounding_bytes"] = draw.choice((20, 40)) * MIB
    if draw.random() < 0.4:
        found["memory_fraction"] = draw.choice((0.5, 0.8, 1.0))
        if "expandable_segments" not in found and draw.random() < 0.7:
            found["garbage_collection_threshold"] = draw.choice((0.3, 0.6, 0.9))
    if draw.random() < 0.3:
        found["roundup_power2_divisions"] = tuple(draw.choice((0, 1, 2, 4, 8)) for _ in range(16))
    return found


def random_size(draw: random.Random) -> int:
    low, high = draw.choice(((1, MIB), (MIB, 12 * MIB), (10 * MIB, 90 * MIB)))
    return draw.randint(low, high)


def test_random_traces_reserve_the_same_in_a_second_implementation() -> None:
    """PLAN_TRACES=10000 runs so many; every setting is drawn, and a third of the requests finds no room."""
    for number in range(TRACES):
        draw = random.Random(f"trace {number}")
        settings, card_bytes = random_settings(draw), draw.choice((64, 200, 400, 1000)) * MIB
        first = Allocator(card_bytes, AllocatorSettings(**settings))  # type: ignore[arg-type]
        second = NaiveAllocator(card_bytes, **settings)
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

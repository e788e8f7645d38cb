"""Facts of the caching allocator, computed by hand from c10/cuda/CUDACachingAllocator.cpp, and laws of any sequence."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from planner.allocator.caching_allocator import Allocator
from planner.allocator.loading import warm_up_bytes
from planner.allocator.replay import replay
from planner.allocator.reserved import reserved_of
from planner.allocator.trace import STAYS, Allocation, Trace
from planner.candidate import Candidate
from planner.gpus.catalogue import load_gpu
from planner.gpus.cluster import Gpu
from planner.models.catalogue import load_model
from planner.quantities import Phase
from planner.units import GIB, MIB


def reserved(*events: tuple[int, int], card_bytes: int = GIB, expandable: bool = False) -> tuple[int, ...]:
    return replay(events, card_bytes, expandable).reserved


def test_small_requests_share_a_segment_of_two_mebibytes() -> None:
    assert reserved((0, 1), (1, MIB), (2, MIB - 512)) == (2 * MIB, 2 * MIB, 2 * MIB)
    assert reserved((0, MIB), (1, MIB), (2, 1)) == (2 * MIB, 2 * MIB, 4 * MIB)


def test_requests_above_one_mebibyte_share_segments_of_twenty() -> None:
    assert reserved((0, MIB + 1), (1, 9 * MIB + 512), (2, 10 * MIB - 512)) == (20 * MIB, 20 * MIB, 40 * MIB)


def test_requests_from_ten_mebibytes_get_their_own_segment_of_whole_pairs_of_mebibytes() -> None:
    assert reserved((0, 10 * MIB), (1, 10 * MIB + 1)) == (10 * MIB, 22 * MIB)


def test_every_request_takes_whole_blocks_of_512_bytes() -> None:
    assert replay([(0, 1), (1, 513)], GIB).peak_allocated_bytes == 512 + 1024


def test_the_smallest_free_block_that_fits_is_taken() -> None:
    # 40 and 12 MiB become free; 11 MiB goes into the 12, so that 40 fits once more without a new segment
    events = ((0, 40 * MIB), (1, 12 * MIB), (0, -40 * MIB), (1, -12 * MIB), (2, 11 * MIB), (3, 40 * MIB))
    assert reserved(*events)[-1] == 52 * MIB


def test_what_is_left_of_a_large_block_is_kept_whole_up_to_one_mebibyte() -> None:
    # 11 of 12 MiB: the last one is not split off, so it counts as allocated
    assert replay([(0, 12 * MIB), (0, -12 * MIB), (1, 11 * MIB)], GIB).peak_allocated_bytes == 12 * MIB
    assert reserved((0, 14 * MIB), (0, -14 * MIB), (1, 11 * MIB), (2, 3 * MIB))[-1] == 14 * MIB


def test_free_neighbours_are_joined() -> None:
    events = ((0, 9 * MIB), (1, 9 * MIB), (0, -9 * MIB), (1, -9 * MIB), (2, 20 * MIB))
    assert reserved(*events)[-1] == 20 * MIB


def test_a_full_card_gives_free_segments_back_before_it_raises() -> None:
    assert reserved((0, 60 * MIB), (0, -60 * MIB), (1, 70 * MIB), card_bytes=100 * MIB) == (
        60 * MIB,
        60 * MIB,
        70 * MIB,
    )


def test_running_out_says_the_figures_of_the_message() -> None:
    events = ((0, 30 * MIB), (1, 30 * MIB), (0, -30 * MIB), (2, 25 * MIB), (3, 50 * MIB))
    replayed = replay(events, 100 * MIB)
    failure = replayed.out_of_memory
    assert failure is not None
    assert (failure.event, failure.tried_bytes, failure.free_bytes) == (4, 50 * MIB, 40 * MIB)
    assert (failure.allocated_bytes, failure.unallocated_bytes) == (55 * MIB, 5 * MIB)
    assert failure.message == (
        "CUDA out of memory. Tried to allocate 50.00 MiB. GPU 0 has a total capacity of 100.00 MiB of which 40.00 MiB "
        "is free. "
        "Of the allocated memory 55.00 MiB is allocated by PyTorch, and 5.00 MiB is reserved by PyTorch but "
        "unallocated."
    )


def test_expandable_segments_grow_by_pages_and_leave_no_holes() -> None:
    # three of 30 MiB: 2 pages of 20, then 1 more with the 10 left over, then 2 more
    assert reserved((0, 30 * MIB), (1, 30 * MIB), (2, 30 * MIB), expandable=True) == (40 * MIB, 60 * MIB, 100 * MIB)
    grown = ((0, 30 * MIB), (1, 30 * MIB), (0, -30 * MIB), (1, -30 * MIB), (2, 55 * MIB))
    assert reserved(*grown, expandable=True)[-1] == 60 * MIB
    assert reserved(*grown)[-1] == 60 * MIB + 56 * MIB


def test_slack_is_what_no_free_segment_gives_back() -> None:
    # 4 of 20 MiB used: the rest of the segment stays. The free segment of 30 MiB could be given back: not counted.
    events = ((0, 4 * MIB), (1, 30 * MIB), (1, -30 * MIB))
    replayed = replay(events, GIB, False, frozenset({0, 1, 2}))
    assert replayed.slack == {0: 16 * MIB, 1: 16 * MIB, 2: 16 * MIB}
    assert replayed.reserved[-1] == 50 * MIB


def test_slack_of_expandable_segments_is_less_than_a_page() -> None:
    # 50 MiB on three pages of 20 leave 10; when 20 MiB of them are free, their whole page can be given back
    events = ((0, 30 * MIB), (1, 20 * MIB), (1, -20 * MIB))
    assert replay(events, GIB, True, frozenset({1, 2})).slack == {1: 10 * MIB, 2: 10 * MIB}


def made(index: int, mebibytes: int, phase: Phase, died: int = STAYS) -> Allocation:
    return Allocation(
        size_bytes=mebibytes * MIB,
        born=index,
        died=died,
        phase=phase,
        component="transients",
        operator="aten.mm.default",
        module="",
    )


# weights of 60 MiB, 30 MiB in the forward that die with it (event 3), 48 MiB in the backward
STEP = Trace(
    allocations=(made(0, 60, "load"), made(1, 30, "forward", died=2), made(3, 48, "backward")), phase_starts=()
)


# Of several processes each loads onto the host, and moves one tensor after the other.
IN_SEVERAL = Candidate(model=load_model("Qwen2.5-0.5B"), method="sft", num_processes=2, sharding="ddp")
ALONE = replace(IN_SEVERAL, num_processes=1, sharding="none")


def card(mebibytes: int) -> Gpu:
    return replace(load_gpu("A100-40G"), total_bytes=2 * mebibytes * MIB, free_bytes=mebibytes * MIB)


def test_each_phase_reserves_what_the_ones_before_have_left() -> None:
    found = reserved_of(STEP, IN_SEVERAL, card(1000), 0)
    assert found.most == {"load": 60 * MIB, "forward": 90 * MIB, "backward": 138 * MIB}
    assert found.slack == {"load": 0, "forward": 0, "backward": 0}
    assert found.peak_bytes == 138 * MIB
    assert found.shortfall is None


def test_weights_that_one_process_loads_lie_side_by_side_in_one_segment() -> None:
    weights = tuple(
        replace(made(index, 0, "load"), size_bytes=11 * MIB + 512, component="weights") for index in range(4)
    )
    assert [
        reserved_of(Trace(allocations=weights, phase_starts=()), case, load_gpu("T4"), 0).most["load"]
        for case in (IN_SEVERAL, ALONE)
    ] == [
        4 * 12 * MIB,
        46 * MIB,
    ]


def test_of_quantized_weights_the_statistics_are_not_taken_in_one_piece() -> None:
    packed, statistics = (
        replace(made(index, 60, "load"), component="weights", module=f"layer.{name}")
        for index, name in enumerate(("weight", "absmax"))
    )
    trace = Trace(allocations=(packed, statistics), phase_starts=())
    assert warm_up_bytes(trace, ALONE, load_gpu("T4")) == 60 * MIB
    assert warm_up_bytes(trace, IN_SEVERAL, load_gpu("T4")) == 0


def test_a_card_that_gives_its_cache_back_is_large_enough() -> None:
    assert reserved_of(STEP, IN_SEVERAL, card(110), 0).shortfall is None


def test_a_card_that_runs_out_says_where_and_counts_all_of_itself() -> None:
    shortfall = reserved_of(STEP, IN_SEVERAL, card(110), 5 * MIB).shortfall
    assert shortfall is not None
    assert shortfall.phase == "backward"
    assert shortfall.figures.message == (
        "CUDA out of memory. Tried to allocate 48.00 MiB. GPU 0 has a total capacity of 220.00 MiB of which 45.00 MiB "
        "is free. "
        "Of the allocated memory 60.00 MiB is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated."
    )


sizes = st.integers(min_value=1, max_value=64 * MIB)
moves = st.lists(st.tuples(sizes, st.integers(min_value=0, max_value=30)), min_size=1, max_size=60)


@given(moves, st.booleans())
def test_reserved_is_never_below_allocated_and_all_comes_back(steps: list[tuple[int, int]], expandable: bool) -> None:
    allocator = Allocator(16 * GIB, expandable)
    live = []
    for size_bytes, choice in steps:
        block = allocator.allocate(size_bytes)
        assert block is not None
        live.append(block)
        if choice < len(live):
            allocator.free(live.pop(choice))
        assert allocator.allocated_bytes == sum(block.size_bytes for block in live)
        assert allocator.reserved_bytes >= allocator.allocated_bytes
    for block in live:
        allocator.free(block)
    allocator.empty_cache()
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, 0)

"""Two sequences are laid beside each other where the longer repeats what the shorter has."""

import pytest

from planner.trace.in_step import AGREEING_BIRTHS, beside
from planner.trace.profile import NoProfile


def test_equal_sequences_are_in_step() -> None:
    assert beside("abcd", "abcd") == [0, 1, 2, 3]


@pytest.mark.parametrize(("short", "long"), [("xABABy", "xABABABy"), ("xAAy", "xAAAAAy"), ("xABABy", "xABABABABABy")])
def test_the_first_of_what_is_repeated_stays_first_and_the_last_stays_last(short: str, long: str) -> None:
    places = beside(short, long)
    further, half = len(long) - len(short), (len(short) - 2) // 2
    assert places == [*range(1 + half), *range(1 + half + further, len(long))]
    assert [long[place] for place in places] == list(short)


def test_each_repetition_is_found_by_itself() -> None:
    short, long = "-" + "aa" + "+" + "xyxy" + ".", "-" + "aaaa" + "+" + "xyxyxyxy" + "."
    assert [index for index in range(len(long)) if index not in beside(short, long)] == [2, 3, 8, 9, 10, 11]


def test_repetitions_that_follow_one_another_are_halved_each_for_itself() -> None:
    step = [*range(AGREEING_BIRTHS)]
    batches, steps = [0, 3], [*range(4, 4 + len(step)), *range(4 + 3 * len(step), 4 + 4 * len(step))]
    assert beside([*"aa", *step, *step, "."], [*"aaaa", *step, *step, *step, *step, "."]) == [*batches, *steps, 4 + 4 * len(step)]


def test_places_do_not_go_backwards() -> None:
    with pytest.raises(NoProfile, match="not what it repeats"):
        beside("abb" + "bbccab" * 2 + "bbc", "abb" + "bbccab" * 5 + "bbc")


@pytest.mark.parametrize("long", ["xABy", "xBABAy", "xABABz"])
def test_what_is_no_repetition_is_refused(long: str) -> None:
    with pytest.raises(NoProfile):
        beside("xABABy", long)

"""Combinations of settings as test cases: each pair of values in every run, every combination in `make nightly`.

The package allpairspy 2.5.1 is no help: where some pairs are impossible it leaves out possible ones too.
"""

from collections.abc import Iterable
from itertools import combinations
from typing import Any

import pytest

Case = tuple[Any, ...]


def pairs(case: Case) -> set[Case]:
    """Each two values of a case, with their positions."""
    return set(combinations(enumerate(case), 2))


def selection(cases: list[Case]) -> set[Case]:
    """Few cases in which each pair of values occurs that occurs in any case.

    Takes the case with the most new pairs, again and again. Example: 22 of the 88 cases of
    `product(range(11), range(2), range(2), range(2))`, in which 11 x 2 pairs cannot be fewer.
    """
    missing = set().union(*map(pairs, cases))
    selected = set()
    while missing:
        best = max(cases, key=lambda case: len(pairs(case) & missing))
        selected.add(best)
        missing -= pairs(best)
    return selected


def pairwise_cases(cases: Iterable[Case]) -> list[Any]:
    """The cases for `pytest.mark.parametrize`; those beyond the pairwise selection are marked `nightly`."""
    every = list(cases)
    selected = selection(every)
    return [
        pytest.param(*case, marks=() if case in selected else pytest.mark.nightly, id=case_id(case)) for case in every
    ]


def case_id(case: Case) -> str:
    """The values in a test's name: `gemma3-0-lora-False`."""
    return "-".join(case_id(value) if isinstance(value, tuple) else str(value) for value in case)

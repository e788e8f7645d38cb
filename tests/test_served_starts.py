"""AsyncGRPO folders that were started beside their servers (results/served_starts.jsonl): today's estimates."""

from typing import Any

import pytest

from planner.errors import InputError
from scripts.drawn_starts import SERVED_STARTS
from scripts.served_starts import (
    ALLOCATED_WITHIN,
    CAUSES,
    ENGINE_WITHIN,
    FURTHER_OFF,
    PAGE,
    load_rows,
    measured,
    page,
    planned,
)
from tests.test_results import rewrite_or_compare

ROWS = load_rows()


@pytest.mark.parametrize("row", [row for row in ROWS if measured(row)], ids=lambda row: row["name"])
def test_trainer_and_engine_hold_what_is_estimated(row: dict[str, Any]) -> None:
    plan, found = planned(row), measured(row)
    for name, size in found.items():
        within = ENGINE_WITHIN if name.startswith(("engine_", "teacher_")) else ALLOCATED_WITHIN
        close = plan[name] == pytest.approx(size, rel=within)
        assert close is ((row["name"], name) not in FURTHER_OFF), name


def test_what_vllm_refused_is_not_planned() -> None:
    (refused,) = [row for row in ROWS if not measured(row)]
    with pytest.raises(InputError, match=r"among 2 GPUs: the 896 inputs of o_proj.*groups of 128.*size=1"):
        planned(refused)


def test_the_starts_cover_tunings_schemes_and_engines() -> None:
    assert [row["name"] for row in ROWS] == list(SERVED_STARTS)
    assert {row["name"] for row in ROWS if row["outcome"] != "passed"} == set(CAUSES)


def test_the_page_is_that_of_today_s_formulas() -> None:
    rewrite_or_compare(PAGE, page(ROWS))

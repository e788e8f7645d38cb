"""Plans beside emulated runs of 50 steps (results/growth.jsonl): the need of the grown state, and what it reserves."""

from typing import Any

import pytest

from planner.memory.runtime import context_bytes
from scripts.growth import PAGE, STEPS, case_of, load_rows, page, planned

ROWS = [row for row in load_rows() if case_of(row["name"]).steps == STEPS]
ALLOCATED_WITHIN, NEED_WITHIN, RESERVED_WITHIN = 0.01, 0.05, 0.15
# Equal rows need as much there: the slack of full fine-tuning, not growth.
FURTHER_OFF = {"SFT full, 4 rows": 0.06}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
class TestFiftySteps:
    def test_the_last_step_allocates_what_is_planned(self, row: dict[str, Any]) -> None:
        assert len(row["steps"]["allocated"]) == STEPS
        found = max(row["steps"]["allocated"])
        assert abs(planned(case_of(row["name"]))["allocated"] / found - 1) <= ALLOCATED_WITHIN

    def test_all_steps_run_on_a_card_of_the_need(self, row: dict[str, Any]) -> None:
        if "card" not in row:
            pytest.skip("the smallest card was not looked for")
        case = case_of(row["name"])
        need = planned(case)["need"] + context_bytes(case.cluster.gpu)
        within = FURTHER_OFF.get(row["name"], NEED_WITHIN)
        assert row["card"]["died"] * (1 - within) <= need <= row["card"]["ran"] * (1 + within)

    def test_the_planned_cache_is_that_of_the_last_step(self, row: dict[str, Any]) -> None:
        plan, reserved = planned(case_of(row["name"])), row["steps"]["reserved"]
        assert abs(plan["shown"] / max(reserved) - 1) <= RESERVED_WITHIN
        assert max(reserved) <= plan["shown_most"]


def test_the_page_shows_the_rows() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(load_rows())

"""Pages of results/: each is computed anew by a test, or dated with the commit that measured it."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import emulated_cells, emulated_engine, fit_verdict, peers_page

ROOT = Path(__file__).resolve().parents[1]
RESULTS, ACCURACY = ROOT / "results", ROOT / "docs" / "accuracy.md"
LISTED = re.compile(r"^\| ([\w.]+\.md)[^|]*\|(.*)\|$", re.MULTILINE)
DATED = re.compile(r"^# .+\n\nMeasured at commit [0-9a-f]{7}; nothing computes these figures anew\.\n")
TEST = re.compile(r"tests/(test_\w+\.py)")
BLOCKS: dict[str, Callable[[], str]] = {
    "peers": lambda: "\n".join(peers_page.score_table(peers_page.TITLES["All figures"])),
    "verdict": fit_verdict.summary,
}


def listed(section: str) -> dict[str, str]:
    """The pages of a section of results/README.md, with the rest of their lines."""
    text = (RESULTS / "README.md").read_text(encoding="utf-8").split(f"## {section}\n")[1].split("\n## ")[0]
    return dict(LISTED.findall(text))


def rewrite_or_compare(path: Path, found: str) -> None:
    if os.environ.get("PLAN_REWRITE_GOLDEN") == "1":
        path.write_text(found, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == found


def test_every_page_is_computed_by_a_test_or_dated() -> None:
    pages = {path.name for path in RESULTS.glob("*.md")} - {"README.md"}
    computed, dated = listed("Computed by a test"), listed("Dated")
    assert pages == computed.keys() | dated.keys()
    assert not computed.keys() & dated.keys()


@pytest.mark.parametrize("page", listed("Dated"))
def test_a_dated_page_says_at_which_commit_it_was_measured(page: str) -> None:
    assert DATED.match((RESULTS / page).read_text(encoding="utf-8"))


@pytest.mark.parametrize(("page", "line"), listed("Computed by a test").items())
def test_a_computed_page_names_the_test_that_computes_it(page: str, line: str) -> None:
    (name,) = TEST.findall(line)
    assert (ROOT / "tests" / name).exists()
    assert not DATED.match((RESULTS / page).read_text(encoding="utf-8"))


@pytest.mark.parametrize("module", [peers_page, emulated_cells, emulated_engine], ids=lambda module: module.__name__)
def test_the_page_is_that_of_today_s_formulas(module: object) -> None:
    rewrite_or_compare(module.PAGE, module.page())  # type: ignore[attr-defined]


@pytest.mark.parametrize("block", BLOCKS)
def test_the_figures_of_the_page_on_accuracy_are_today_s(block: str) -> None:
    begin, end = f"<!-- {block} -->\n", f"\n<!-- end of {block} -->"
    before, _, rest = ACCURACY.read_text(encoding="utf-8").partition(begin)
    assert end in rest
    rewrite_or_compare(ACCURACY, before + begin + BLOCKS[block]() + end + rest.partition(end)[2])


ANSWER = {"bytes": 100, "slack_bytes": 10, "context_bytes": 5}


@pytest.mark.parametrize(("quantity", "bytes_"), [("allocated", 85), ("reserved", 95), ("process", 100)])
def test_an_answer_is_compared_without_what_a_quantity_does_not_measure(quantity: str, bytes_: int) -> None:
    assert peers_page.comparable_bytes(ANSWER, quantity) == bytes_


def test_a_score_counts_answers_more_than_3_percent_too_low() -> None:
    assert peers_page.score([0.5, -0.02, -0.1]) == "-2.0% | 20.7% | +50.0% | 33%"

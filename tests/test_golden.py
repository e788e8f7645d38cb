"""The whole JSON of `plan` against golden files, and pages of errors, computed anew; `make golden` rewrites them."""

import json
import os
import re
import runpy
from pathlib import Path

import pytest

from planner.commands.main import run
from scripts import emulated_grid
from scripts.accuracy_table import accuracy_table, short_table

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "golden"
README = ROOT / "README.md"
ANSWER = ROOT / "docs" / "answer.md"
ACCURACY_PAGE = ROOT / "docs" / "accuracy.md"
REWRITE = os.environ.get("PLAN_REWRITE_GOLDEN") == "1"
OUTPUT = re.compile(r"<!-- output of (plan [^\n]+) -->\n```\n(.*?)```\n", re.DOTALL)
ACCURACY = re.compile(r"(?<=<!-- accuracy -->\n).*?(?=<!-- end of accuracy -->)", re.DOTALL)

COMMANDS = {
    "grpo-colocate": "--model Qwen2.5-7B --gpus 2xA100-40G --method grpo",
    "sft-4gb": "--model Qwen2.5-0.5B --gpus 1xRTX-3050-4G --method sft --effective-batch-size 8",
    "dpo-zero3": "--model Llama-3.1-70B --gpus 8xH100 --method dpo",
    "nothing-fits": "--model Llama-3.1-8B --gpus 1xT4 --method sft --tuning full --set optim=adamw_torch "
    "--set offload_optimizer=false",
}


def rewrite_or_compare(path: Path, found: str) -> None:
    if REWRITE:
        path.parent.mkdir(exist_ok=True)
        path.write_text(found, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == found


@pytest.mark.parametrize("name", COMMANDS)
def test_the_report_is_the_golden_one(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    run([*COMMANDS[name].split(), "--json", "--quiet"])
    rewrite_or_compare(GOLDEN / f"{name}.json", capsys.readouterr().out)


def test_the_same_question_gives_the_same_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    run([*COMMANDS["grpo-colocate"].split(), "--json", "--quiet"])
    first = capsys.readouterr().out
    run([*COMMANDS["grpo-colocate"].split(), "--json", "--quiet"])
    assert capsys.readouterr().out == first


@pytest.mark.slow
def test_the_tables_of_accuracy_are_those_of_today_s_formulas() -> None:
    for page, table in ((README, short_table("results")), (ACCURACY_PAGE, accuracy_table("../results"))):
        rewrite_or_compare(page, ACCURACY.sub(f"{table}\n", page.read_text(encoding="utf-8")))


@pytest.mark.slow
def test_the_page_of_the_emulated_grid_is_that_of_today_s_formulas() -> None:
    rewrite_or_compare(emulated_grid.PAGE, emulated_grid.page())


def test_the_answer_that_is_explained_is_what_the_command_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    page = ANSWER.read_text(encoding="utf-8")

    def printed(match: re.Match[str]) -> str:
        run([*match.group(1).split()[1:], "--quiet"])
        return f"<!-- output of {match.group(1)} -->\n```\n{capsys.readouterr().out.rstrip()}\n```\n"

    rewrite_or_compare(ANSWER, OUTPUT.sub(printed, page))


@pytest.mark.slow
def test_the_estimates_of_60_candidates_are_as_they_were() -> None:
    freeze = runpy.run_path(str(ROOT / "scripts" / "freeze_estimates.py"))
    before = [json.loads(line) for line in freeze["FILE"].read_text(encoding="utf-8").splitlines()]
    assert [freeze["estimated"](line["arguments"].split()) for line in before] == before

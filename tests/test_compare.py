"""`--gpus A,B`: the same job on several clusters."""

import json
from pathlib import Path

import jsonschema
import pytest

from planner.cli import run
from planner.report.documents import json_schema

JOB = ["--model", "Llama-3.1-8B", "--method", "sft", "--tuning", "lora"]
Capture = pytest.CaptureFixture[str]


def compared(gpus: str, capsys: Capture, *more: str, code: int = 0) -> dict[str, dict[str, object]]:
    assert run([*JOB, "--gpus", gpus, "--json", "--quiet", *more]) == code
    document = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator(json_schema()).validate(document)
    return {row["gpus"]: row for row in document["clusters"]}


def test_each_cluster_has_the_plan_that_it_has_alone(capsys: Capture) -> None:
    rows = compared("1xL4, 2xA100-40G", capsys)
    assert run([*JOB, "--gpus", "2xA100-40G", "--json", "--quiet"]) == 0
    assert rows["2xA100-40G"]["plan"] == json.loads(capsys.readouterr().out) and list(rows) == ["1xL4", "2xA100-40G"]


def test_prices_are_of_all_gpus_for_a_million_tokens(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "prices.toml").write_text("A100-40G = 1.5\n")
    rows = compared("1xL4,2xA100-40G", capsys, "--prices", str(tmp_path / "prices.toml"))
    plan = rows["2xA100-40G"]["plan"]
    assert isinstance(plan, dict)
    expected = 2 * 1.5 / (plan["best"]["throughput"]["tokens_per_second"] * 3600) * 1e6
    assert rows["2xA100-40G"]["price_per_million_tokens"] == pytest.approx(expected, rel=1e-4)
    assert rows["1xL4"]["price_per_million_tokens"] is None


def test_the_table_has_a_row_for_each_and_3_is_nowhere_fits(capsys: Capture) -> None:
    assert run(["--model", "Llama-3.1-70B", "--method", "sft", "--gpus", "1xT4,2xT4", "--quiet"]) == 3
    said = capsys.readouterr().out
    assert said.index("1xT4") < said.index("2xT4") and "no," in said


@pytest.mark.parametrize(
    ("more", "message"),
    [(["--gpus", "1xL4,2xNone"], "Unknown GPU 'None'"), (["--gpus", "1xL4,,1xT4"], "names no GPU"),
     (["--gpus", "1xL4,1xT4", "--probe"], "--probe is for one plan"),
     (["--gpus", "1xL4,1xT4", "--set", "zero_stag=3"], "Did you mean zero_stage"),
     (["--gpus", "1xL4,1xT4", "--out", "x"], "--out is for one plan"),
     (["--gpus", "1xL4", "--prices", "x.toml"], "--prices compares clusters"),
     (["--gpus", "1xL4,1xT4", "--prices", "none.toml"], "none.toml cannot be read")],
    ids=range(7),
)  # fmt: skip
def test_what_cannot_be_compared_is_one_line(more: list[str], message: str, capsys: Capture) -> None:
    assert run([*JOB, *more, "--quiet"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("text", ["L4 = -1", "L4 = true", "L4 = inf", "L4 = 'a'", "L5 = 1.0", "= 3", "\x00"])
def test_prices_that_cannot_be(text: str, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "prices.toml").write_text(text)
    assert run([*JOB, "--gpus", "1xL4,1xT4", "--prices", str(tmp_path / "prices.toml"), "--quiet"]) == 2
    assert capsys.readouterr().err.count("\n") == 1

"""`--gpus A,B`: the same job on several clusters."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from huggingface_hub import JobHardware

from planner.commands.main import run
from planner.report.documents.schema import json_schema

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
    said = capsys.readouterr()
    assert said.out.index("1xT4") < said.out.index("2xT4") and "no," in said.out and "next" not in said.out
    assert said.err.startswith("Error: No candidate fits 2 x T4") and "To fit:" in said.err


def test_a_comparison_ends_with_the_command_of_the_fastest(capsys: Capture) -> None:
    assert run([*JOB, "--gpus", "1xL4,1xH100", "--tokens", "200M"]) == 0
    command = capsys.readouterr().out.splitlines()[-1].removeprefix("next: ")
    assert command == "plan --model Llama-3.1-8B --gpus 1xH100 --method sft --tuning lora"
    assert run(shlex.split(command)[1:]) == 0


@pytest.mark.parametrize(
    ("more", "message"),
    [(["--gpus", "1xL4,2xNone"], "Unknown GPU 'None'"), (["--gpus", "1xL4,,1xT4"], "names no GPU"),
     (["--gpus", "1xL4,1xT4", "--probe"], "--probe is for a single plan"),
     (["--gpus", "1xL4,1xT4", "--set", "zero_stag=3"], "Did you mean zero_stage"),
     (["--gpus", "1xL4,1xT4", "--out", "x"], "--out is for a single plan"),
     (["--gpus", "1xL4", "--optimize", "cost"], "--optimize cost needs prices"),
     (["--gpus", "1xL4,1xT4", "--max-cost", "3"], "--max-cost needs prices"),
     (["--gpus", "1xL4,1xT4", "--price-per-hour", "3"], "is the price of one cluster"),
     (["--gpus", "hf-jobs", "--price-per-hour", "99"], "is the price of one cluster"),
     (["--gpus", "1xL4", "--price-per-hour", "-3"], "--price-per-hour -3 is no price"),
     (["--gpus", "1xL4", "--price-per-hour", "1e300"], "--price-per-hour 1e+300 is no price"),
     (["--gpus", "1xL4", "--tokens", "many"], "is no number of tokens"),
     (["--gpus", "1xL4", "--prices", "x.toml", "--price-per-hour", "3"], "contradict each other"),
     (["--gpus", "1xL4,1xT4", "--prices", "none.toml"], "none.toml cannot be read")],
    ids=range(14),
)  # fmt: skip
def test_what_cannot_be_compared_is_one_line(more: list[str], message: str, capsys: Capture) -> None:
    assert run([*JOB, *more, "--quiet"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("deadline", ["0h", "-5h", "nan", "soon"])
def test_a_deadline_that_is_no_time_is_refused_before_anything_is_planned(
    deadline: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("planner.ask.answer_of_cluster", lambda *_: pytest.fail("a cluster was planned"))
    assert run([*JOB, "--gpus", "1xL4,1xT4", "--tokens", "1B", f"--deadline={deadline}", "--quiet"]) == 2
    assert f"{deadline!r} is not a duration" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["L4 = -1", "L4 = true", "L4 = inf", "L4 = 'a'", "L5 = 1.0", "= 3", "\x00",
                                  "L4 = " + "9" * 400, "L4 = " + "9" * 5000, "L4 = 1e300"])  # fmt: skip
def test_prices_that_cannot_be(text: str, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "prices.toml").write_text(text)
    assert run([*JOB, "--gpus", "1xL4,1xT4", "--prices", str(tmp_path / "prices.toml"), "--quiet"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.fixture
def prices(tmp_path: Path) -> str:
    (tmp_path / "prices.toml").write_text("A100-40G = 1.5\nH100 = 3\n")
    return f"--prices={tmp_path / 'prices.toml'}"


def test_by_cost_the_cheapest_tokens_come_first_and_what_has_no_price_last(prices: str, capsys: Capture) -> None:
    rows = compared("1xL4,8xA100-40G,1xH100,1xA100-40G", capsys, prices, "--optimize", "cost")
    costs = [row["cost"] for row in rows.values()]
    assert costs[:3] == sorted(costs[:3]) and costs[3] is None and list(rows)[3] == "1xL4"


def test_hours_and_cost_of_a_number_of_tokens(prices: str, capsys: Capture) -> None:
    row = compared("1xH100,1xL4", capsys, prices, "--tokens", "300M")["1xH100"]
    plan = row["plan"]
    assert isinstance(plan, dict) and row["tokens"] == 300_000_000
    hours = 3e8 / plan["best"]["throughput"]["tokens_per_second"] / 3600
    assert row["hours"] == pytest.approx(hours, rel=1e-4) and row["cost"] == pytest.approx(3 * hours, rel=1e-4)


def test_one_cluster_with_a_price_has_its_cost_too(capsys: Capture) -> None:
    assert run([*JOB, "--gpus", "8xH100", "--price-per-hour", "20", "--tokens", "1B", "--quiet"]) == 0
    job, header, *_ = capsys.readouterr().out.splitlines()
    assert job.strip() == "meta-llama/Llama-3.1-8B · sft · trl 1.16"
    assert "hours" in header and "cost" in header


def test_a_card_without_a_price_says_so(prices: str, capsys: Capture) -> None:
    assert run([*JOB, "--gpus", "1xL4,1xH100", prices, "--quiet"]) == 0
    assert "no price" in capsys.readouterr().out


def test_more_than_the_most_ends_with_3(prices: str, capsys: Capture) -> None:
    command = [*JOB, "--gpus", "1xH100,1xA100-40G", prices, "--tokens", "1B", "--quiet", "--max-cost"]
    assert (run([*command, "100000"]), run([*command, "0.01"])) == (0, 3)
    assert "more than --max-cost 0.01" in capsys.readouterr().err
    assert run([*JOB, "--gpus", "1xL4,1xT4", prices, "--quiet", "--max-cost", "1"]) == 3
    assert "no cluster on which the job fits has a price" in capsys.readouterr().err


def test_the_cheapest_tuning_is_searched_unless_one_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    """4-bit weights leave room for larger batches, which train more tokens an hour than LoRA on 16-bit ones."""
    job = ["--model", "Llama-3.1-8B", "--method", "sft", "--gpus", "1xRTX-4090", "--json", "--quiet"]
    price = ["--tokens", "300M", "--price-per-hour", "0.4", "--optimize", "cost"]
    (lora,) = answered([*job, *price, "--tuning", "lora"], capsys)
    (qlora,) = answered([*job, *price, "--tuning", "qlora"], capsys)
    (cheapest,) = answered([*job, *price], capsys)
    assert lora["cost"] > qlora["cost"] == cheapest["cost"]
    between = str((lora["cost"] + qlora["cost"]) / 2)
    assert run([*job, *price, "--max-cost", between]) == 0
    assert run([*job, *price, "--max-cost", between, "--tuning", "lora"]) == 3


def answered(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """The clusters of a comparison, as JSON."""
    assert run(arguments) == 0
    clusters: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["clusters"]
    return clusters


def test_hugging_face_jobs_are_compared_with_their_main_memory_and_prices(capsys: pytest.CaptureFixture[str]) -> None:
    rows = compared("hf-jobs", capsys, "--tokens", "300M", "--optimize", "cost", "--deadline", "20h")
    assert {*rows} == {each.value for each in JobHardware if not each.value.startswith("cpu")}
    plan = rows["a100x4"]["plan"]
    assert isinstance(plan, dict) and rows["a100x4"]["price_per_hour"] == 10
    assert plan["cluster"]["gpus_per_node"] == 4 and plan["cluster"]["host"]["origin"] == "given"
    assert plan["cluster"]["host"]["total_bytes"] == pytest.approx(568e9, rel=1e-3)
    costs = [row["cost"] for row in rows.values() if row["cost"] is not None]
    assert costs == sorted(costs)


def test_a_deadline_that_no_cluster_keeps_ends_with_3(prices: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = [*JOB, "--gpus", "1xH100,1xA100-40G", "--tokens", "1B", "--quiet", "--deadline"]
    assert (run([*command, "900h"]), run([*command, "1h"])) == (0, 3)
    assert "the fastest, 1xH100, needs" in capsys.readouterr().err
    assert run([*JOB, "--gpus", "1xH100,2xH100", "--tokens", "1M", "--quiet", "--deadline", "1s"]) == 3
    assert re.search(r"needs \d[\d.]* (s|min), more than --deadline 1s", capsys.readouterr().err)
    assert run([*command, "900h", prices, "--max-cost", "0.01"]) == 3
    assert "of those that keep --deadline 900h" in capsys.readouterr().err
    assert run([*JOB, "--gpus", "1xH100", "--deadline", "1h"]) == 2


def test_many_clusters_are_one_screen(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run([*JOB, "--gpus", "hf-jobs", "--quiet"]) == 0
    lines = capsys.readouterr().out.rstrip().splitlines()
    assert len(lines) == 24 and max(map(len, lines)) <= 80


def test_many_clusters_show_hours_and_cost_on_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With both, the table lost all columns but the name, the peak and the settings."""
    monkeypatch.setenv("COLUMNS", "80")
    assert run([*JOB, "--gpus", "hf-jobs", "--tokens", "300M", "--quiet"]) == 0
    title, heads, *rows = capsys.readouterr().out.rstrip().splitlines()
    assert title.rstrip().endswith("dollars (prices: hub-docs 0b8c07f)")
    assert heads.split() == ["GPUs", "fits", "peak", "GiB", "tokens/s", "hours", "cost", "with"]
    fitting = [row for row in rows if " no" not in row]
    assert [row.split()[1:3] for row in rows if row not in fitting] == [["no,", "host"]] * (len(rows) - len(fitting))
    assert len(rows) == 22 and all(re.search(r" %  .* \d+\.\d  +[\d,]+\.\d\d  +LoRA", row) for row in fitting)


# -- less than a job: a first answer, not an error about what is missing -----------------------------------------------


def test_a_model_alone_is_compared_on_usual_cards(capsys: Capture) -> None:
    assert run(["--model", "Llama-3.1-8B", "--quiet"]) == 0
    job, _, *rows = capsys.readouterr().out.splitlines()
    assert job.strip() == "meta-llama/Llama-3.1-8B · sft · trl 1.16"
    assert {"1xRTX-4090", "1xH100", "8xH100"} <= {row.split()[0] for row in rows if row[0] != " "}


def test_gpus_alone_say_what_they_train(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.commands.begin.FAVOURITES", ("Qwen2.5-0.5B", "Qwen2.5-32B", "Llama-3.1-70B"))
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["--gpus", "1xRTX-4090", "--quiet"]) == 0
    title, heads, small, large, largest, ending = capsys.readouterr().out.splitlines()
    assert title == "1 x RTX-4090 (23.5 GiB) · what it can train, tokens a second"
    assert heads.split() == ["model", "sft", "dpo", "grpo"]
    assert "full, " in small and "QLoRA, " in large and largest.split() == ["Llama-3.1-70B", "no", "no", "no"]
    assert run([*shlex.split(ending.removeprefix("next: plan ")), "--quiet"]) == 0


def test_an_option_that_is_wrong_for_every_model_is_refused(capsys: Capture) -> None:
    assert run(["--gpus", "1xL4", "--trl-version", "9.9", "--quiet"]) == 2
    said = capsys.readouterr()
    assert "9.9" in said.err and said.out == ""


@pytest.mark.parametrize(
    "options",
    ["--gpus 1xL4 --price-per-hour 1", "--gpus 1xL4 --optimize cost", "--gpus 1xL4 --tokens 1B --deadline 5h",
     "--gpus hf-jobs", "--optimize cost"],
)  # fmt: skip
def test_prices_without_a_model_ask_for_one(options: str, capsys: Capture) -> None:
    assert run([*shlex.split(options), "--quiet"]) == 2
    assert "Prices are compared for a job: give --model too." in capsys.readouterr().err


def test_nothing_shows_three_commands_where_no_gpu_is(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run([]) == 2
    shown = [line.split("   ")[0].strip() for line in capsys.readouterr().out.splitlines()[1:]]
    monkeypatch.setattr("planner.commands.begin.FAVOURITES", ("Qwen2.5-0.5B",))
    assert len(shown) == 3 and all(run([*shlex.split(line)[1:], "--quiet"]) == 0 for line in shown)

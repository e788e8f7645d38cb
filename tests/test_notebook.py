"""The command in Python: the same answers, shown as the table, as frames, and one line for what the command refuses."""

import json
from pathlib import Path

import pytest

from planner import Job, load_model, parse_cluster, plan, sweep
from planner.commands.main import run
from planner.errors import PlanError
from planner.quantities import Note
from planner.report.json import json_text, plan_report
from planner.report.sentences import sentence

JOB = "--model Qwen2.5-7B --gpus 2xA100-40G --method grpo"


def test_it_answers_as_the_command_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*JOB.split(), "--tuning", "lora", "--set", "zero_stage=3", "--json", "--quiet"]) == 0
    answer = plan("Qwen2.5-7B", "2xA100-40G", method="grpo", tuning="lora", zero_stage=3)
    assert json.loads(json_text(plan_report(answer))) == json.loads(capsys.readouterr().out)


def test_a_job_and_a_cluster_are_taken_as_they_are() -> None:
    job = Job(model=load_model("Qwen2.5-0.5B"), method="sft", pinned={"zero_stage": 3, "lora_r": 8})
    assert job.pinned == {"lora_r": 8, "sharding": "zero3"}
    assert plan(job, parse_cluster("2xT4")).best.candidate.sharding == "zero3"


def test_settings_have_the_types_of_python() -> None:
    answer = plan(
        "Qwen2.5-0.5B", "1xL4", method="sft", tuning="lora", packing=False, lora_target_modules=["q_proj", "v_proj"],
        max_length=512, batch_size=None,
    )  # fmt: skip
    assert answer.best.candidate.lora_target_modules == ("q_proj", "v_proj")


def test_a_notebook_shows_the_table_and_nothing_of_it_is_markup() -> None:
    shown = plan("Qwen2.5-0.5B", "1xT4", method="sft")._repr_html_()
    assert shown.startswith("<pre") and "recommended" in shown and "per_device_train_batch_size" in shown
    assert "<script" not in shown and "color" not in shown


def test_a_frame_has_a_row_for_every_alternative() -> None:
    answer = plan("Qwen2.5-7B", "2xA100-40G", method="grpo")
    frame = answer.to_frame()
    assert list(frame.index) == ["best", *(sentence(other.change) for other in answer.alternatives)]
    assert frame.loc["best", "tokens_per_second"] == answer.best.throughput.tokens_per_second


def test_lists_are_the_axes_of_a_sweep_and_what_is_refused_is_a_row() -> None:
    lengths = [2048, 32768, "many"]
    frame = sweep("Llama-3.1-8B", ["1xL4", "1xA100-40G"], method="sft", tuning="lora", max_length=lengths)
    assert list(frame["gpus"]) == ["1xL4"] * 3 + ["1xA100-40G"] * 3 and list(frame["max_length"]) == lengths * 2
    assert list(frame["fits"]) == [True, False, False, True, True, False]
    assert frame["reason"][0] == "" and "No candidate fits" in frame["reason"][1]
    assert frame["reason"][2] == "max_length must be a whole number, not many."


@pytest.mark.parametrize(
    ("asked", "message"),
    [({"method": "grp"}, "Did you mean grpo"), ({"method": "grpo", "zerostage": 3}, "Did you mean zero_stage"),
     ({"method": "grpo", "max_length": "x"}, "max_length must be a whole number"),
     ({"method": "grpo", "risk": "x"}, "risk must be a number"), ({}, "method is missing")],
    ids=["method", "setting", "value", "risk", "nothing"],
)  # fmt: skip
def test_what_the_command_refuses_is_refused_in_its_words(asked: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan("Qwen2.5-7B", "2xA100-40G", **asked)


def test_tuples_and_ranges_are_axes_and_lists_of_names_are_not() -> None:
    frame = sweep("Qwen2.5-0.5B", ("1xL4", "1xT4"), method="sft", max_length=range(512, 1025, 512))
    assert len(frame) == 4
    modules = {"tuning": "lora", "lora_target_modules": ["q_proj", "v_proj"]}
    assert len(sweep("Qwen2.5-0.5B", "1xL4", method="sft", **modules)) == 1


def test_what_every_combination_is_refused_for_is_raised_once() -> None:
    with pytest.raises(PlanError, match="Did you mean zero_stage"):
        sweep("Qwen2.5-0.5B", ["1xL4", "1xT4"], method="sft", zerostage=3)


def test_a_job_of_names_says_what_to_write() -> None:
    with pytest.raises(PlanError, match="load_model"):
        Job(model="Qwen2.5-7B", method="sft")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"planner\.plan\('Qwen2.5-7B', .*, method='sft'\)"):
        Job(model="Qwen2.5-7B", method="sft")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="two names"):
        plan("Qwen2.5-7B", parse_cluster("1xT4"), method="sft")


@pytest.mark.parametrize(
    ("pinned", "message"),
    [({"lora_r": "x"}, "lora_r must be a whole number, not x"), ({"packing": 3}, "packing must be true or false"),
     ({"max_length": -1}, "max_length must be at least 1"), ({"zero_stage": "x"}, "zero_stage")],
    ids=["text", "boolean", "negative", "spelled"],
)  # fmt: skip
def test_a_pinned_value_of_another_type_is_refused_as_by_set(pinned: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Job(model=load_model("Qwen2.5-0.5B"), method="sft", pinned=pinned)


def test_every_structure_that_was_considered_has_a_reason() -> None:
    answer = plan("Qwen2.5-7B", "2xA100-40G", method="sft")
    frame = answer.considered()
    assert set(frame.index) == {"full fine-tuning", "LoRA", "QLoRA"}
    assert (frame["reason"] != "").all() and len(frame) > 50
    same = frame[frame["tokens_per_second"] == answer.best.throughput.tokens_per_second]
    assert (same["reason"] == "within 2 % of the best speed").any()
    assert frame["reason"].str.startswith("at most ").any()


def test_a_job_without_a_method_names_the_methods() -> None:
    with pytest.raises(PlanError, match=r"A Job needs a method: sft, dpo, .*ppo"):
        Job(model=load_model("Qwen2.5-0.5B"))


def test_a_rank_is_a_number_as_well_as_a_list_in_text() -> None:
    one = plan("Qwen2.5-0.5B", "1xL4", method="sft", tuning="lora", lora_r=32)
    assert one.best.candidate.lora_r == 32
    assert plan("Qwen2.5-0.5B", "1xL4", method="sft", tuning="lora", lora_r="16,32").best.candidate.lora_r == 32


def test_prices_which_only_the_command_compares_are_no_silent_setting() -> None:
    with pytest.raises(PlanError, match="Unknown setting 'prices'"):
        plan("Qwen2.5-0.5B", "1xL4", method="sft", prices="prices.toml")


def test_a_config_is_followed_by_what_the_plan_changes_in_it(tmp_path: Path) -> None:
    config = tmp_path / "train.yaml"
    config.write_text("model_name_or_path: Qwen/Qwen2.5-0.5B\nuse_peft: true\n")
    answer = plan("Qwen2.5-0.5B", "1xL4", method="sft", config=str(config), lora_r=32)
    assert Note("config_change", {"setting": "lora_r", "after": 32}) in answer.warnings


def test_an_answer_starts_what_it_plans(tmp_path: Path) -> None:
    """Names of arguments are taken too; without a method it was a TypeError."""
    answer = plan(model="Qwen2.5-0.5B", gpus="1xL4", method="sft", tuning="lora")
    assert answer.settings["use_peft"] is True and json.loads(answer.json())["verdict"] == "fits"
    assert answer.launch is not None and answer.launch.argv[0] == "accelerate"
    assert {path.name for path in answer.export(tmp_path / "run")} == {*answer.launch.files}
    large = plan("Llama-3.1-70B", "1xT4", method="sft")
    assert large.launch is None
    with pytest.raises(PlanError, match=r"nothing to export\. It does not fit\."):
        large.export(tmp_path / "large")


def test_an_incomplete_job_is_a_plan_error() -> None:
    with pytest.raises(PlanError, match="method is missing"):
        plan(model="Qwen2.5-0.5B", gpus="1xL4")
    with pytest.raises(PlanError, match="model, gpus and method are missing"):
        plan()
    several: list[object] = ["1xL4,1xT4", ["1xL4", "1xT4"], ("1xL4", "1xT4")]
    for gpus in several:
        with pytest.raises(PlanError, match=r"plan takes one cluster. Compare several: sweep"):
            plan("Qwen2.5-0.5B", gpus, method="sft")  # type: ignore[arg-type]

"""The command that has the options of a job, as a page shows it."""

import json
import shlex

from msgspec.structs import fields

from planner.commands import options as command_options
from planner.jobs.job import LARGEST_RISK, SMALLEST_RISK
from planner.requests.command_line import command_line
from planner.requests.options import TABLE, CandidateOptions, SearchOptions, described
from planner.settings.setting import MAX_BATCH_SIZE, MAX_NUMBER


def test_defaults_are_left_out():
    assert command_line(SearchOptions(model="Qwen2.5-7B", gpus="1xL4", method="sft")) == (
        "plan --model Qwen2.5-7B --gpus 1xL4 --method sft"
    )


def test_values_are_written_as_a_shell_and_set_read_them():
    options = CandidateOptions(
        model="a folder", padded=False, set={"packing": True, "lora_target_modules": ("q_proj", "v_proj"), "beta": 0.1}
    )
    assert shlex.split(command_line(options, "estimate")) == [
        "plan", "estimate", "--model", "a folder", "--set", "packing=true",
        "--set", "lora_target_modules=q_proj,v_proj", "--set", "beta=0.1", "--no-padded",
    ]  # fmt: skip


def test_a_repeatable_option_is_repeated():
    assert command_line(SearchOptions(free=["lora_r", "optim"])) == "plan --free lora_r --free optim"


def test_every_option_is_described_and_bounded_as_its_setting_is():
    groups = json.loads(TABLE.read_bytes())
    for group in (SearchOptions, CandidateOptions):
        assert described(group).keys() == {entry.name for entry in fields(group)}
    assert {name: described(SearchOptions)[name].max for name in ("max_length", "batch_size", "risk")} == {
        "max_length": MAX_NUMBER, "batch_size": MAX_BATCH_SIZE, "risk": LARGEST_RISK,
    }  # fmt: skip
    assert described(SearchOptions)["risk"].min == SMALLEST_RISK
    assert groups.keys() - {"JobOptions", "SearchOptions", "CandidateOptions"} <= vars(command_options).keys()

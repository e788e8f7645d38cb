"""The command that has the options of a job, as a page shows it."""

import shlex

from planner.requests.command_line import command_line
from planner.requests.options import CandidateOptions, SearchOptions


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

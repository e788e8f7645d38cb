"""Keys of a TRL config that its release does not have: misspelt ones, and those of older releases."""

import argparse
import importlib
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.commands.main import run
from planner.errors import UnknownName
from planner.methods import METHODS
from planner.requests.file_keys import refuse_misspelt

JOB = ["--model=Qwen2.5-7B-Instruct", "--gpus=8xA100-80G", "--accelerate-config=zero3", "--json", "--quiet"]


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("per_device_train_batchsize", "per_device_train_batch_size"),
        ("gradient_acumulation_steps", "gradient_accumulation_steps"),
        ("vllm_gpu_memory_utilisation", "vllm_gpu_memory_utilization"),
        ("max-length", "max_length"),
        ("max_lenght", "max_length"),
        ("bf_16", "bf16"),
        ("learning_rte", "learning_rate"),
        ("load_in_4_bit", "load_in_4bit"),
    ],
)
def test_a_misspelt_key_is_refused_with_the_key_that_was_meant(key: str, meant: str) -> None:
    with pytest.raises(UnknownName, match=rf"^Unknown key '{key}'\. Did you mean {meant}"):
        refuse_misspelt({key: 1})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_no_argument_of_the_libraries_is_taken_for_a_misspelt_one() -> None:
    from accelerate.commands.launch import launch_command_parser
    from transformers import TrainingArguments
    from trl import DatasetMixtureConfig, ModelConfig
    from trl.scripts.grpo import GRPOScriptArguments

    configs: list[Any] = [TrainingArguments, ModelConfig, DatasetMixtureConfig, GRPOScriptArguments]
    rows = [row for row in METHODS.values() if row.last_trl == "current"]
    configs += [getattr(importlib.import_module(row.module), row.config) for row in rows]
    names = {field.name for config in configs for field in fields(config)}
    parser: argparse.ArgumentParser = launch_command_parser()
    refuse_misspelt(dict.fromkeys(names | {action.dest for action in parser._actions}))


def planned(keys: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    """The estimate of a config file, as JSON."""
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(keys), encoding="utf-8")
    assert run(["estimate", f"--config={tmp_path / 'train.yaml'}", *JOB, *more]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


OPEN_R1 = {
    "use_vllm": True, "vllm_device": "auto", "vllm_gpu_memory_utilization": 0.7, "max_prompt_length": 512,
    "max_completion_length": 1024, "num_generations": 7, "per_device_train_batch_size": 1,
    "gradient_checkpointing": True,
}  # fmt: skip


def test_an_engine_of_an_older_release_has_a_gpu_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """huggingface/open-r1#475. Source: trl 0.14 to 0.16, trainer/grpo_trainer.py, `vllm_device`."""
    settings = planned(OPEN_R1, tmp_path, capsys, "--method=grpo")["settings"]
    assert (settings["vllm_mode"], settings["num_processes"]) == ("server", 7)


@pytest.mark.parametrize(
    ("key", "value"), [("max_prompt_length", 512), ("use_liger_loss", True), ("vllm_max_model_len", 2048)]
)
def test_without_a_mode_an_older_release_has_a_server(
    key: str, value: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Source: trl 0.18 to 0.29, trainer/grpo_config.py, `vllm_mode`; trl 1.0 has "colocate"."""
    keys = {"use_vllm": True, key: value, "per_device_train_batch_size": 8, "gradient_checkpointing": True}
    assert planned(keys, tmp_path, capsys, "--method=grpo")["settings"]["vllm_mode"] == "server"
    own = planned(keys | {"vllm_mode": "colocate"}, tmp_path, capsys, "--method=grpo")["settings"]
    assert own["vllm_mode"] == "colocate"


def test_a_key_of_older_releases_may_be_another_method_s_today(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SDFT cuts prompts at `max_prompt_length`. Source: trl 1.16, experimental/sdft/sdft_config.py."""
    keys = {"use_vllm": True, "max_prompt_length": 300, "per_device_train_batch_size": 8}
    report = planned(keys, tmp_path, capsys, "--method=sdft")
    assert (report["settings"]["vllm_mode"], report["settings"]["max_prompt_length"]) == ("colocate", 300)
    assert report["launch"]["files"]["requirements.txt"].startswith("trl[vllm]==1.16.*\n")
    assert "prompts of 300 tokens and completions" in report["launch"]["files"]["README.md"]
    assert "max_prompt_length: 300" in report["launch"]["files"]["train.yaml"]


def test_a_loss_of_an_older_release_is_liger_s(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = {"use_liger_loss": True, "max_completion_length": 4096}
    report = planned(keys, tmp_path, capsys, "--method=grpo")
    assert report["settings"]["use_liger_kernel"] is True
    assert report["launch"]["files"]["requirements.txt"].startswith("trl==0.27.*\n")


def test_a_release_without_a_key_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.yaml").write_text("vllm_device: auto\nuse_vllm: true\n", encoding="utf-8")
    job = ["estimate", f"--config={tmp_path / 'train.yaml'}", *JOB, "--method=grpo"]
    assert run([*job, "--trl-version=1.16"]) == 2
    said = capsys.readouterr().err
    assert "TRL 1.16 stops at vllm_device, which only releases until 0.17 have." in said
    assert "vllm_mode: server" in said
    assert run([*job, "--trl-version=0.15", "--set=num_generations=7"]) == 0


def test_no_files_are_written_for_releases_that_stop_at_dtype(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """TRL 0.19's parser raised "Unknown arguments from config file: ['--dtype', 'bfloat16']" at such a train.yaml."""
    report = planned({"max_seq_length": 1024, "per_device_train_batch_size": 1}, tmp_path, capsys, "--method=sft")
    assert report["launch"] is None
    assert report["why_no_launch"].startswith("Files are written for TRL 0.23 and newer: 0.19 stops at the key dtype")

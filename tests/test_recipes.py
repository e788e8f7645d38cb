"""Published recipes, with their launch files and the overrides of their launch commands, run where they ran.

The rows of tests/data/recipes.jsonl have the settings of a recipe that memory and speed depend on; the file and the
hardware that its authors name are beside them. The other names in those files are in `OTHERS`. `host_memory`: it ran
with a release of Transformers that loaded on one process of a node; releases 5 load on each (transformers#43749).
"""

import importlib.util
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.commands.main import run
from planner.requests.train_config import load_train_config

ROWS = [json.loads(line) for line in (Path(__file__).parent / "data" / "recipes.jsonl").read_text().splitlines()]
# Names in the recipes of open-r1 and of the alignment-handbook that neither memory nor speed depends on.
OTHERS: dict[str, Any] = {
    "assistant_only_loss": True, "average_tokens_across_devices": True, "benchmarks": ["lcb"], "callbacks": ["push"],
    "chat_template": "{% for message in messages %}{{ message }}{% endfor %}", "dataset_config": "all",
    "dataset_kwargs": {"skip": True}, "dataset_mixer": {"a/b": 1.0}, "dataset_name": "a/b", "dataset_num_proc": 48,
    "dataset_prompt_column": "problem", "dataset_splits": ["train"], "dataset_test_split": "test",
    "dataset_train_split": "train", "ddp_timeout": 7200, "do_eval": False, "do_train": True, "eos_token": "<|im_end|>",
    "hub_always_push": True, "hub_model_id": "a/c", "hub_model_revision": "main", "hub_private_repo": True,
    "hub_strategy": "every_save", "learning_rate": 4.0e-05, "log_completions": True, "log_level": "info",
    "logging_first_step": True, "logging_steps": 1, "logging_strategy": "steps",
    "lr_scheduler_kwargs": {"min_lr_rate": 0.1}, "lr_scheduler_type": "cosine_with_min_lr", "max_grad_norm": 0.2,
    "max_steps": -1, "model_revision": "main", "num_train_epochs": 1, "output_dir": "out",
    "overwrite_output_dir": True, "push_to_hub": True, "remove_unused_columns": False, "report_to": ["wandb"],
    "reward_funcs": ["accuracy", "format"], "reward_weights": [1.0, 0.2], "run_name": "first", "save_only_model": True,
    "save_steps": 100, "save_strategy": "epoch", "save_total_limit": 1, "seed": 42, "system_prompt": "You are.",
    "temperature": 0.7, "trust_remote_code": True, "wandb_entity": "a", "wandb_project": "b", "warmup_ratio": 0.1,
    "warmup_steps": 10,
}  # fmt: skip
LIKELY = 0.9  # that it ran there is known: what fits only by luck would be a wrong verdict


def answered(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The JSON report of `plan`, which exits without an error."""
    code = run([*arguments, "--json", "--quiet"])
    printed = capsys.readouterr()
    assert code == 0, printed.out[:400] + printed.err
    report: dict[str, Any] = json.loads(printed.out)
    return report


@pytest.mark.parametrize("row", ROWS, ids=[row["id"] for row in ROWS])
def test_a_recipe_fits_where_it_ran(row: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({**OTHERS, **row["settings"]}))
    overrides = [f"--set={name}={str(value).lower()}" for name, value in row["overrides"].items()]
    model = [f"--model={row['model']}"] if "model" in row else []
    launch = [f"--config={config}", f"--accelerate-config={row['accelerate']}", f"--method={row['method']}"]
    host = [f"--host-memory={row['host_memory']}"] if "host_memory" in row else []
    report = answered([*launch, f"--gpus={row['gpus']}", *model, *overrides, *host], capsys)
    assert report["verdict"] == "fits" and report["best"]["fit_probability"] >= LIKELY
    planned = report["best"]["settings"]
    kept = {**row["settings"], **row["overrides"]}
    for name in (
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "max_completion_length",
        "num_processes",
    ):
        assert planned[name] == kept[name] if name in kept else True


def test_recipes_of_every_kind_are_there() -> None:
    assert len(ROWS) >= 8
    assert {row["method"] for row in ROWS} >= {"sft", "dpo", "orpo", "grpo"}
    assert {row["accelerate"] for row in ROWS} == {"multi_gpu", "zero2", "zero3", "fsdp1"}


# All recipes of the alignment-handbook (925acdf) and of open-r1 (1416fa0), both Apache 2.0, with texts cut.
FILES = [json.loads(line) for line in (Path(__file__).parent / "data" / "recipe_files.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("row", FILES, ids=[row["file"] for row in FILES])
def test_every_recipe_is_read_as_it_is(row: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(row["settings"]))
    read = load_train_config(path)
    assert read.unmodelled == ()
    kept = ("model_name_or_path", "per_device_train_batch_size", "gradient_accumulation_steps", "max_length", "lora_r")
    assert all(read.settings[name] == row["settings"][name] for name in kept if name in row["settings"])


def commands_of_trl() -> list[tuple[str, list[str]]]:
    """The commands in the docstrings of TRL's scripts, as (method, flags)."""
    found = importlib.util.find_spec("trl")
    if found is None or not found.submodule_search_locations:
        return []
    scripts = Path(found.submodule_search_locations[0]) / "scripts"
    commands = []
    for name in ("sft", "dpo", "reward", "grpo", "rloo", "kto", "distillation"):
        text = (scripts / f"{name}.py").read_text() if (scripts / f"{name}.py").is_file() else ""
        commands += [
            (name, shlex.split(block.replace("\\\n", " "))[2:])
            for block in re.findall(r"```bash\n(python trl/scripts/.*?)```", text, flags=re.DOTALL)
        ]
    return commands


def as_settings(flags: list[str]) -> dict[str, Any]:
    """Flags of a command as the keys of a config file: `--name value`, `--name=value`, or a switch."""
    settings: dict[str, Any] = {}
    name = ""
    for word in flags:
        if word.startswith("--"):
            name, _, value = word.removeprefix("--").partition("=")
            settings[name] = yaml.safe_load(value) if value else True
        else:
            settings[name] = yaml.safe_load(word)
    return {key.removeprefix("no_"): key == key.removeprefix("no_") and value for key, value in settings.items()}


@pytest.mark.parametrize(("method", "flags"), commands_of_trl())
def test_the_commands_of_trl_s_scripts_are_understood(
    method: str, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    settings = as_settings(flags)
    config.write_text(yaml.safe_dump(settings))
    named = str(settings["model_name_or_path"])
    model = ["--model=Qwen2-1.5B"] if named.startswith("trl-lib/") else []  # as large; its config is on the Hub
    report = answered([f"--config={config}", f"--method={method}", "--gpus=1xA100-80G", *model], capsys)
    assert report["verdict"] == "fits"
    planned = report["best"]["settings"]
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        assert planned[name] == settings.get(name, planned[name])

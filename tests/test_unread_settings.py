"""Arguments of TRL that `--set` accepts without an effect, or refuses because their effect is not counted."""

import importlib
import json
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from planner.errors import InputError, UnknownName, edits, nearest
from planner.gpus.catalogue import gpu_rows
from planner.jobs.settings import candidate_fields, parse_assignments, setting_names
from planner.methods import METHODS
from planner.models.shape import ModelShape
from planner.report.sentences import sentence
from planner.report.shown_settings import flags, shown_settings
from planner.requests.options import JobOptions
from planner.requests.read_options import JobRequest, read_options
from planner.requests.train_config import plain_assignments, train_config
from planner.settings.unread import UNMODELLED, WITHOUT_EFFECT
from scripts import emulated_jobs

ROWS = [json.loads(line) for line in Path("results/emulated.jsonl").read_text().splitlines()]
OLDER_NAMES = {"warmup_ratio", "logging_dir"}  # of releases of transformers before 5


def complete(model: ModelShape) -> ModelShape:
    return model


def asked(**settings: Any) -> JobRequest:
    options = JobOptions(model="Qwen2.5-0.5B", gpus="1xL4", method="grpo", set=settings)
    return read_options(options, complete)


def test_an_argument_without_effect_is_named_and_changes_nothing() -> None:
    given = asked(learning_rate=1e-4, lora_r=8, seed="7")
    assert [sentence(note) for note in given.warnings] == ["no matter of memory or speed: learning_rate, seed"]
    assert asked(lora_r=8).warnings == ()
    assert given.job == asked(lora_r=8).job


def test_an_argument_that_the_plan_decides_itself_is_named() -> None:
    """`--set use_reentrant=true` was exported as false, and nothing said so."""
    given = asked(**parse_assignments(["use_reentrant=true", "lora_task_type=SEQ_CLS"]))
    assert [sentence(note) for note in given.warnings] == ["not used by the plan: use_reentrant"]
    assert given.job == asked().job


@pytest.mark.parametrize("text", ["learning_rate=1e-4", "report_to=wandb", "warmup_ratio=0.1", "lora_alpha=32"])
def test_a_command_takes_an_argument_without_effect(text: str) -> None:
    name, _, value = text.partition("=")
    assert parse_assignments([text]) == {name: value}


@pytest.mark.parametrize("name", UNMODELLED)
def test_an_argument_whose_effect_is_not_counted_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"^{name} changes memory or speed in a way that is not counted"):
        asked(**{name: "1"})


def test_a_config_names_what_of_its_generation_is_not_counted() -> None:
    keys = {
        "generation_kwargs": {"num_beams": 4, "top_k": 5},
        "cache_implementation": "static",
        "vllm_model_impl": None,
    }
    assert train_config(keys, Path()).unmodelled == ("cache_implementation", "generation_kwargs: num_beams")


def test_an_evaluation_in_a_config_is_no_matter_of_warnings() -> None:
    keys = {"eval_strategy": "no", "per_device_eval_batch_size": 4, "eval_accumulation_steps": None}
    read = train_config(keys, Path())
    assert (read.unmodelled, read.ignored) == ((), ())


@pytest.mark.parametrize("name", ["lr_of_head", "max_grad_norm", "dataloader_num_workers", "foo"])
def test_an_argument_that_is_unknown_is_refused_without_an_absurd_suggestion(name: str) -> None:
    with pytest.raises(UnknownName) as caught:
        asked(**{name: "1"})
    assert "Did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "suggested"),
    [
        ("zerostage", "zero_stage"),
        ("batch_size", "per_device_train_batch_size"),
        ("lora_rank", "lora_r"),
        ("vllm_gpu_util", "vllm_gpu_memory_utilization"),
        ("load_4bit", "load_in_4bit"),
    ],
)
def test_a_similar_name_is_suggested_first(name: str, suggested: str) -> None:
    assert nearest(name, setting_names())[0] == suggested


@pytest.mark.parametrize("name", ["learning_rate", "warmup_ratio", "seed", "adam_beta1", "report_to", "weight_decay"])
def test_a_name_of_other_meaning_is_not_suggested(name: str) -> None:
    assert nearest(name, setting_names()) == []


@pytest.mark.parametrize("name", ["MI300X", "X1", "K80"])
def test_a_card_of_other_letters_is_not_suggested(name: str) -> None:
    assert nearest(name, [row.gpu.name for row in gpu_rows()]) == []


@pytest.mark.parametrize(
    ("name", "known", "count"),
    [("modle", "model", 1), ("bogus", "gpus", 3), ("lenght", "length", 1), ("", "abc", 3), ("kitten", "sitting", 3)],
)
def test_edits_are_counted_a_swap_as_one(name: str, known: str, count: int) -> None:
    assert edits(name, known) == edits(known, name) == count


def test_a_misspelt_argument_without_effect_is_suggested() -> None:
    with pytest.raises(UnknownName, match=r"Did you mean learning_rate\?"):
        asked(learning_rte="1")


def test_a_name_with_many_other_letters_is_not_suggested() -> None:
    assert nearest("bogus", ["gpus", "logs", "out"]) == []
    assert nearest("modle", ["model", "method"]) == ["model"]


def test_no_argument_is_in_two_lists() -> None:
    assert not WITHOUT_EFFECT & {*setting_names(), *UNMODELLED}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
def test_every_argument_without_effect_is_one_of_trl() -> None:
    trl = pytest.importorskip("trl")
    rows = [row for row in METHODS.values() if row.last_trl == "current"]
    classes = [getattr(importlib.import_module(row.module), row.config) for row in rows]
    names = {field.name for each in (*classes, trl.ModelConfig, trl.ScriptArguments) for field in fields(each)}
    assert names >= WITHOUT_EFFECT - OLDER_NAMES


def test_every_flag_and_setting_that_a_screen_shows_is_accepted() -> None:
    given: dict[str, str] = {}
    for row in ROWS:
        candidate = emulated_jobs.Job(kind=row["kind"], gpus=row["gpus"], settings=row["settings"]).candidate
        for flag in flags(candidate):
            name, _, value = flag.removeprefix("--").partition(" ")
            given.setdefault(f"{name}={' '.join(shlex.split(value)) or 'true'}", name)
        for item in (item for line in shown_settings(candidate).values() for item in line):
            name, _, value = item.partition(" ")
            given.setdefault(f"{name}={value}", name)
    names = {*given.values()}
    holders = {"accelerator_config", "teacher_model_init_kwargs", "liger_kernel_config", "router_aux_loss_coef"}
    assert {*holders, "lora_task_type", "gradient_checkpointing_kwargs"} <= names
    for text, name in given.items():
        if not name.isdecimal():  # 8 samples a step
            parse_assignments(plain_assignments([text]))


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("teacher_model_init_kwargs={dtype: float32}", "teacher_dtype", "float32"),
        ('accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": true}}', "sync_each_batch", True),
        ('gradient_checkpointing_kwargs={"offload": true}', "checkpoint_offload", True),
        ('deepspeed={"zero_optimization": {"stage": 3}}', "sharding", "zero3"),
    ],
)
def test_a_mapping_sets_what_it_holds(text: str, name: str, value: object) -> None:
    given = candidate_fields(parse_assignments(plain_assignments([text])), "bfloat16")
    assert given[name] == value

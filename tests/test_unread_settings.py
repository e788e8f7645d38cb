"""Arguments of TRL that `--set` accepts without an effect, or refuses because their effect is not counted."""

import importlib
import json
import shlex
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from planner.ask import estimated
from planner.candidate import MODEL_FIELDS, Candidate
from planner.errors import InputError, UnknownName, edits, nearest
from planner.gpus.catalogue import gpu_rows
from planner.jobs.settings import candidate_fields, parse_assignments, setting_names, settings_of_fields
from planner.launch.files import launch_files
from planner.methods import METHODS
from planner.models.shape import ModelShape
from planner.report.sentences import sentence
from planner.report.shown_settings import flags, shown_settings
from planner.requests.options import CandidateOptions, JobOptions, SearchOptions
from planner.requests.read_options import JobRequest, read_options
from planner.requests.train_config import plain_assignments, train_config
from planner.settings.table import SETTINGS
from planner.settings.unread import UNMODELLED, WITHOUT_EFFECT
from scripts import emulated_jobs
from tests.test_cache_keys import OTHER_VALUES

ROWS = [json.loads(line) for line in Path("results/emulated.jsonl").read_text().splitlines()]
OLDER_NAMES = {"warmup_ratio", "logging_dir"}  # of releases of transformers before 5


def complete(model: ModelShape) -> ModelShape:
    return model


def asked(**settings: Any) -> JobRequest:
    options = JobOptions(model="Qwen2.5-0.5B", gpus="1xL4", method="grpo", set=settings)
    return read_options(options, complete)


def test_an_argument_without_effect_is_named_and_changes_nothing() -> None:
    given = asked(learning_rate=1e-4, lora_r=8, seed="7")
    assert [sentence(note) for note in given.warnings] == ["no effect on memory or speed: learning_rate, seed"]
    assert asked(lora_r=8).warnings == ()
    assert given.job == asked(lora_r=8).job


@pytest.mark.parametrize(
    "argument",
    [
        "teacher_model_kind=ema", "distillation_mode=full_logits", "use_teacher_server=true", "tpo_alpha=0",
        "use_extended_uld=false", "distillation_objective=jsd", "include_environment_feedback=true",
    ],
)  # fmt: skip
def test_what_methods_do_beside_their_defaults_is_refused(argument: str) -> None:
    """In a file they were taken, and nothing said that no figure follows them."""
    with pytest.raises(InputError, match="changes memory or speed"):
        asked(**parse_assignments([argument]))


def test_an_argument_that_the_plan_decides_itself_is_named() -> None:
    """`--set use_reentrant=true` was exported as false, and nothing said so."""
    given = asked(**parse_assignments(["use_reentrant=true", "lora_task_type=SEQ_CLS"]))
    assert [sentence(note) for note in given.warnings] == ["not used by the plan: use_reentrant"]
    assert given.job == asked().job


# Jobs in which some settings have nothing that reads them: the GPUs and the settings.
JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    "one GPU": ("1xA100-80G", {}),
    "an evaluation": ("1xA100-80G", {"eval_strategy": "steps"}),
    "DDP": ("2xA100-80G", {}),
    "ZeRO-3": ("2xA100-80G", {"zero_stage": 3}),
    "FSDP2": ("2xA100-80G", {"fsdp_version": 2}),
    "a colocated engine": ("1xA100-80G", {"use_vllm": True, "vllm_mode": "colocate"}),
    "a server": ("2xH100", {"use_vllm": True, "vllm_mode": "server", "attn_implementation": "flash_attention_3"}),
}


def answered(method: str, gpus: str, settings: dict[str, Any]) -> tuple[Candidate, tuple[object, ...]]:
    """The candidate of a job, and its answer: figures, the files that start it, and the sentences of its notes."""
    needed = {"teacher_model": "Qwen2.5-0.5B"} if METHODS[method].teacher else {}
    options = CandidateOptions(model="Qwen2.5-0.5B", gpus=gpus, method=method, set=needed | settings)
    answer, notes = estimated(read_options(options, complete))
    try:
        files = launch_files(answer.candidate)
    except InputError as error:
        files = {"error": str(error)}
    said = tuple(map(sentence, notes))
    return answer.candidate, (answer.gpus, answer.host_peak_bytes, answer.throughput, files, said)


@pytest.mark.parametrize("method", METHODS)
def test_every_setting_acts_or_is_refused_or_named(method: str) -> None:
    """`--set num_generations_eval=2` and nine others were dropped without a word where nothing reads them."""
    silent = []
    for name, (gpus, settings) in JOBS.items():
        try:
            candidate, before = answered(method, gpus, settings)
        except InputError:
            continue
        for row in SETTINGS:
            if row.role == "question" or (name != "one GPU" and not row.owner_values):
                continue
            value = next(each for each in OTHER_VALUES[row.field] if each != getattr(candidate, row.field))
            other = "Qwen2.5-1.5B" if row.field in MODEL_FIELDS else value
            given = settings_of_fields({row.field: other})
            with suppress(InputError):
                if answered(method, gpus, settings | given)[1] == before:
                    silent.append((name, row.field, value))
    assert silent == []


def test_a_setting_that_nothing_reads_is_named_with_what_it_needs() -> None:
    given = {"ds3_gather_for_generation": False, "num_generations_eval": 2, "vllm_enable_sleep_mode": True}
    _, (*_, said) = answered("grpo", "2xA100-80G", given)
    assert said[-1] == (
        "not used: ds3_gather_for_generation (without ZeRO-3); num_generations_eval (without an evaluation); "
        "vllm_enable_sleep_mode (without a vLLM engine in the training processes)"
    )


def test_a_config_that_sets_what_trl_does_not_read_is_told_so() -> None:
    keys = {"use_vllm": False, "vllm_gpu_memory_utilization": 0.5, "lora_r": 64, "load_in_4bit": False}
    assert [*map(sentence, train_config(keys, Path()).warnings)] == [
        "not used: vllm_gpu_memory_utilization (without use_vllm); lora_r (without use_peft)"
    ]


@pytest.mark.parametrize("flags", [{"tuning": "lora"}, {"set": {"use_peft": True}}, {"tuning": "qlora"}])
def test_a_flag_turns_on_what_the_file_leaves_off(flags: dict[str, Any], tmp_path: Path) -> None:
    """TRL reads `lora_r` of the file as soon as `--use_peft` stands beside it."""
    file = tmp_path / "train.yaml"
    file.write_text("lora_r: 64\nuse_bnb_nested_quant: true\n", encoding="utf-8")
    options = {"model": "Qwen2.5-7B", "gpus": "2xA100-80G", "method": "sft", "config": file, **flags}
    request = read_options(CandidateOptions(**options), complete)
    nested = "use_bnb_nested_quant (without load_in_4bit)"
    assert request.job.pinned["lora_r"] == 64
    assert ["not used: " + nested] * (flags != {"tuning": "qlora"}) == [*map(sentence, request.warnings)]


@pytest.mark.parametrize(("key", "value"), [("lora_r", 64), ("lora_dropout", 0.1), ("lora_target_modules", ["q_proj"])])
def test_a_search_takes_adapters_from_a_file_without_use_peft(key: str, value: object, tmp_path: Path) -> None:
    """`lora_r: 64` was named as not used beside a plan of rank 16, whose change `use_peft: true` trains rank 64."""
    file = tmp_path / "train.yaml"
    file.write_text(f"{key}: {value}\n", encoding="utf-8")
    options = {"model": "Qwen2.5-7B", "gpus": "1xA100-80G", "method": "sft", "config": file}
    request = read_options(SearchOptions(**options), complete)
    by_flag = read_options(SearchOptions(**options, set={"use_peft": True}), complete)
    assert request.job.pinned == by_flag.job.pinned
    assert request.warnings == ()
    file.write_text(f"{key}: {value}\nuse_peft: false\n", encoding="utf-8")
    assert [*map(sentence, read_options(SearchOptions(**options), complete).warnings)] == [
        f"not used: {key} (without use_peft)"
    ]


@pytest.mark.parametrize(
    ("set_", "installed"), [({}, "0.30"), ({"use_vllm": True}, "0.30"), ({"use_vllm": False}, None)]
)
def test_the_vllm_of_a_file_is_the_installed_one(set_: dict[str, Any], installed: str | None, tmp_path: Path) -> None:
    """TRL has no such key: a release says nothing about the engine's use."""
    file = tmp_path / "train.yaml"
    file.write_text("vllm_version: 0.30\n", encoding="utf-8")
    options = {"model": "Qwen2.5-7B", "gpus": "2xA100-80G", "method": "grpo", "config": file, "set": set_}
    request = read_options(SearchOptions(**options), complete)
    assert request.job.pinned.get("vllm_version") == installed


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

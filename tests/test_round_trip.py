"""A candidate's launch files, read back by `plan estimate --config`, give the same memory and the same speed."""

import contextlib
import io
import json
import os
import re
import shlex
import tempfile
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from planner.candidate import Candidate
from planner.commands.main import app
from planner.errors import InputError, PlanError
from planner.estimation import accepted, estimate
from planner.files.write import write_files
from planner.gpus.parse import parse_cluster
from planner.jobs.base_candidate import single_candidate
from planner.jobs.job import Job
from planner.launch.files import launch_files
from planner.launch.trl_config import Launcher
from planner.memory.engine.budget import EngineDoesNotFit
from planner.memory.engine.settings import engine_settings
from planner.methods import METHODS, NEWEST_TRL, MethodName
from planner.models.catalogue import load_model
from planner.report.json import estimate_report, json_text
from planner.requests.saved_report import read_run
from planner.schemes import SCHEMES
from planner.settings.table import has_setting

PLAN = typer.main.get_command(app).main
TWO_PAIRS: dict[str, Any] = {"sharding": "distributed", "tp_size": 2}
MODEL, GPTQ, AWQ = "Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B-Instruct-GPTQ-Int4", "Qwen/Qwen2.5-0.5B-Instruct-AWQ"

SHARDINGS: dict[str, dict[str, object]] = {
    "one": {"num_processes": 1, "sharding": "none"},
    "ddp": {"sharding": "ddp"},
    "zero1": {"sharding": "zero1"},
    "zero2": {"sharding": "zero2"},
    "zero2 optimizer offloaded": {"sharding": "zero2", "offload_optimizer": True},
    "zero3": {"sharding": "zero3"},
    "zero3 optimizer offloaded": {"sharding": "zero3", "offload_optimizer": True, "reduce_bucket_size": 10**7},
    "zero3 all offloaded": {"sharding": "zero3", "offload_optimizer": True, "offload_param": True},
    "fsdp2": {"sharding": "fsdp2"},
    "fsdp2 offloaded": {"sharding": "fsdp2", "offload_param": True},
    "fsdp1": {"sharding": "fsdp1"},
}
TUNINGS: dict[str, tuple[str, dict[str, object]]] = {
    "full": (MODEL, {"tuning": "full"}),
    "lora": (MODEL, {"tuning": "lora", "dtype": "bfloat16", "lora_r": 8}),
    "nf4": (MODEL, {"tuning": "lora", "dtype": "bfloat16", "quantization": "nf4"}),
    "nf4-double": (MODEL, {"tuning": "lora", "dtype": "bfloat16", "quantization": "nf4-double"}),
    "int8": (MODEL, {"tuning": "lora", "dtype": "bfloat16", "quantization": "int8"}),
    "gptq": (GPTQ, {"tuning": "lora", "dtype": "float16"}),
    "awq": (AWQ, {"tuning": "lora", "dtype": "float16"}),
    "fp8": ("Qwen/Qwen3-8B-FP8", {"tuning": "lora", "dtype": "bfloat16"}),
    "fp8 kept": ("Qwen/Qwen3-8B-FP8", {"tuning": "lora", "dtype": "bfloat16", "quantization": "fp8"}),
}
ENGINES: dict[str, dict[str, object]] = {
    "colocate": {"vllm": "colocate", "vllm_max_model_length": 1024, "vllm_gpu_memory_utilization": 0.4},
    "server": {
        "vllm": "server",
        "num_processes": 2,
        "vllm_tensor_parallel_size": 1,
        "vllm_data_parallel_size": 2,
        "vllm_max_model_length": 700,
    },
}


def read_back(
    held: Candidate, gpus: str, folder: Path, launcher: Launcher = "accelerate"
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The report of a candidate, and that of `plan estimate` from the files that `plan export` makes of it.

    The command is the one in the README.md of the files, which names everything that no file says.
    """
    cluster = parse_cluster(gpus)
    before = json_text(estimate_report(accepted(estimate(held, cluster)), cluster=cluster))
    (folder / "plan.json").write_text(before)
    run = read_run(folder / "plan.json", lambda model: model)
    write_files(launch_files(run.candidate, launcher, run.site), folder / "run", overwrite=False)
    (line,) = re.findall(r"^    plan (estimate .*)$", (folder / "run" / "README.md").read_text(), re.MULTILINE)
    printed = io.StringIO()
    with contextlib.chdir(folder / "run"), contextlib.redirect_stdout(printed):
        PLAN([*shlex.split(line), "--json", "--quiet"], standalone_mode=False)
    return plain(json.loads(before)), plain(json.loads(printed.getvalue()))


def plain(report: dict[str, Any]) -> dict[str, Any]:
    """A report without its notes and the launch files made of its settings, which keep lines of the file read."""
    apart = ("warnings", "reasons", "launch")
    return {name: value for name, value in report.items() if not name.startswith(apart)}


def single(model: str, method: MethodName, gpus: str, **pinned: object) -> Candidate:
    """The candidate of a job without a search."""
    return single_candidate(Job(model=load_model(model), method=method, pinned=pinned), parse_cluster(gpus))


@pytest.mark.parametrize(
    ("method", "sharding"),
    [
        (method, sharding)
        for method, sharding in product(METHODS, SHARDINGS)
        if METHODS[method].runs_under_fsdp2 or not sharding.startswith("fsdp")
        if not METHODS[method].generates or sharding != "fsdp1"  # a stop
        if METHODS[method].reference != "always" or sharding != "fsdp1"  # a stop
        if not METHODS[method].asynchronous or not sharding.startswith("zero")  # a stop
        if not METHODS[method].samples_values or not sharding.startswith("zero3")  # a stop
    ],
)
def test_files_of_any_sharding_are_read_back(method: MethodName, sharding: str, tmp_path: Path) -> None:
    held = single(MODEL, method, "4xA100-40G", dtype="bfloat16", max_length=700, **SHARDINGS[sharding])
    before, after = read_back(held, "4xA100-40G", tmp_path)
    assert after == before


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_files_for_torchrun_are_read_back(sharding: str, tmp_path: Path) -> None:
    method: MethodName = "sft" if sharding == "fsdp1" else "grpo"
    held = single(MODEL, method, "4xA100-40G", dtype="bfloat16", **SHARDINGS[sharding])
    before, after = read_back(held, "4xA100-40G", tmp_path, "torchrun")
    assert after == before


@pytest.mark.parametrize("launcher", get_args(Launcher))
def test_files_of_divided_experts_are_read_back(launcher: Launcher, tmp_path: Path) -> None:
    held = single(
        "OLMoE-1B-7B-0924", "sft", "4xA100-40G", tuning="full", dtype="bfloat16", sharding="distributed", ep_size=2
    )
    before, after = read_back(held, "4xA100-40G", tmp_path, launcher)
    assert after == before
    assert held.ep_size == 2


@pytest.mark.parametrize("launcher", get_args(Launcher))
@pytest.mark.parametrize(("gpus", "beside"), [("2xA100-40G", {"sharding": "tensor"}), ("4xA100-80G", TWO_PAIRS)])
def test_files_of_tensor_parallelism_are_read_back(
    launcher: Launcher, gpus: str, beside: dict[str, Any], tmp_path: Path
) -> None:
    held = single("Llama-3.1-8B", "sft", gpus, tuning="full", dtype="bfloat16", **beside)
    before, after = read_back(held, gpus, tmp_path, launcher)
    assert after == before
    assert held.layer_gpus == 2


@pytest.mark.parametrize(
    ("method", "tuning"),
    [
        (method, tuning)
        for method, tuning in product(METHODS, TUNINGS)
        if not METHODS[method].asynchronous or tuning in ("full", "lora")  # it has no argument for a quantization
        if METHODS[method].takes_adapters or tuning == "full"
    ],
)
def test_files_of_any_tuning_and_quantization_are_read_back(method: MethodName, tuning: str, tmp_path: Path) -> None:
    model, pinned = TUNINGS[tuning]
    gpus = "2xA100-40G" if METHODS[method].asynchronous else "1xA100-40G"  # one for the server
    held = single(model, method, gpus, per_device_train_batch_size=4, gradient_accumulation_steps=2, **pinned)
    before, after = read_back(held, gpus, tmp_path)
    assert after == before


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "method", [name for name, row in METHODS.items() if row.supports_vllm and "vllm" not in row.fixed]
)
def test_files_of_an_engine_are_read_back(method: MethodName, engine: str, tmp_path: Path) -> None:
    held = single(MODEL, method, "4xA100-40G", **ENGINES[engine])
    before, after = read_back(held, "4xA100-40G", tmp_path)
    assert after == before


@pytest.mark.parametrize("model", ["gemma-2-2b", "gpt-oss-20b"])
def test_the_file_of_a_model_without_sdpa_says_eager(model: str, tmp_path: Path) -> None:
    before, after = read_back(single(model, "sft", "8xH100"), "8xH100", tmp_path)
    assert "attn_implementation: eager" in (tmp_path / "run" / "train.yaml").read_text()
    assert after == before


def test_the_engine_of_a_distillation_has_the_rows_of_a_whole_optimizer_step() -> None:
    held = single(MODEL, "distillation", "2xH100", gradient_accumulation_steps=4, **ENGINES["colocate"])
    gpu = parse_cluster("2xH100").gpu
    assert engine_settings(replace(held, steps_per_generation=1), gpu).max_num_seqs == 8 * 4


def test_a_candidate_that_splits_groups_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"^A generation batch of 2 completions .* is no multiple of num_generations 4"
    ):
        single(MODEL, "grpo", "2xH100", per_device_train_batch_size=1, steps_per_generation=1, num_generations=4)


def test_pefts_default_targets_are_read_back_by_name(tmp_path: Path) -> None:
    held = single(MODEL, "sft", "1xA100-40G", tuning="lora", lora_target_modules=("default",))
    before, after = read_back(held, "1xA100-40G", tmp_path)
    assert after.pop("settings") == before.pop("settings") | {"lora_target_modules": ["q_proj", "v_proj"]}
    assert after.pop("settings_by_library")["peft"] == before.pop("settings_by_library")["peft"] | {
        "target_modules": ["q_proj", "v_proj"]
    }
    assert after == before


def test_a_reward_model_that_ppo_must_be_given_is_marked(tmp_path: Path) -> None:
    write_files(launch_files(single(MODEL, "ppo", "1xA100-40G")), tmp_path, overwrite=False)
    assert "reward_model_path: Qwen/Qwen2.5-0.5B  # FILL IN" in (tmp_path / "train.yaml").read_text()


def some(values: dict[str, list[object]]) -> st.SearchStrategy[dict[str, object]]:
    """Any of these settings, each with one of its values."""
    return st.fixed_dictionaries({}, optional={name: st.sampled_from(each) for name, each in values.items()})


OF_ALL: dict[str, list[object]] = {
    "per_device_train_batch_size": [1, 2, 3, 8],
    "gradient_accumulation_steps": [1, 2, 8],
    "max_length": [256, 1000, 4096],
    "prompt_length": [64, 500],
    "max_completion_length": [32, 700],
    "padded": [True, False],
    "dtype": ["float32", "bfloat16", "float16"],
    "precision": ["bf16", "fp16", "no"],
    "gradient_checkpointing": [True, False],
    "checkpoint_every_n_layers": [1, 3],
    "checkpoint_offload": [True, False],
    "attn_implementation": ["eager", "sdpa", "flash_attention_2"],
    "use_liger_kernel": [True, False],
    "optim": ["adamw_torch", "adamw_torch_fused", "paged_adamw_8bit", "adafactor", "sgd", "galore_adamw"],
    "expandable_segments": [True, False],
    "num_processes": [1, 2, 3, 4, 8, 16],
}
OF_A_METHOD: dict[str, list[object]] = {
    "num_generations": [2, 4],
    "steps_per_generation": [1, 2, 16],
    "num_iterations": [1, 3],
    "packing": [True, False],
    "packing_strategy": ["bfd", "wrapped"],
    "padding_free": [True, False],
    "beta": [0.0, 0.04],
    "lmbda": [0.0, 0.25, 1.0],
    "use_uld_loss": [True, False],
    "precompute_ref_log_probs": [True, False],
    "activation_offloading": [True, False],
    "ds3_gather_for_generation": [True, False],
    "reward_model": ["Qwen2.5-0.5B", "Qwen2.5-1.5B"],
    "teacher_model": ["Qwen2.5-0.5B", "Qwen2.5-7B"],
}
OF_LORA: dict[str, list[object]] = {
    "lora_r": [8, 64],
    "lora_dropout": [0.0, 0.1],
    "lora_target_modules": [("all-linear",), ("q_proj", "v_proj")],
    "quantization": ["nf4", "nf4-double", "int8"],
    "bnb_4bit_quant_storage": ["uint8", "bfloat16"],
}
OF_SHARDS: dict[str, list[object]] = {
    "offload_optimizer": [True, False],
    "offload_param": [True, False],
    "dp_replicate_size": [1, 2],
    "cp_size": [1, 2],
    "sp_size": [1, 2],
    "sync_each_batch": [True, False],
    "reduce_bucket_size": ["auto", 10**6],
    "stage3_prefetch_bucket_size": ["auto", 0, 10**7],
    "stage3_param_persistence_threshold": ["auto", 10**5],
    "stage3_max_live_parameters": [10**8],
    "stage3_max_reuse_distance": [10**8],
    "sub_group_size": [10**7],
}
OF_VLLM: dict[str, list[object]] = {
    "vllm_gpu_memory_utilization": [0.3, 0.45],
    "vllm_tensor_parallel_size": [1, 2],
    "vllm_data_parallel_size": [1, 2],
    "vllm_max_model_length": [0, 2000],
    "vllm_enable_sleep_mode": [True, False],
}


@st.composite
def drawn_settings(draw: st.DrawFn, method: MethodName) -> dict[str, object]:
    """Settings that the method has, with a tuning, a sharding, and vLLM or none."""
    pinned: dict[str, object] = {"tuning": draw(st.sampled_from(["full", "lora"]))}
    pinned["sharding"] = draw(st.sampled_from(["none", "ddp", "zero1", "zero2", "zero3", "fsdp2"]))
    pinned |= draw(some(OF_ALL)) | draw(some(OF_A_METHOD))
    if pinned["tuning"] == "lora":
        pinned |= draw(some(OF_LORA))
    if not SCHEMES[pinned["sharding"]].whole:
        pinned |= draw(some(OF_SHARDS))
    if METHODS[method].supports_vllm and draw(st.booleans()):
        pinned |= {"vllm": draw(st.sampled_from(["colocate", "server"]))} | draw(some(OF_VLLM))
    return {name: value for name, value in pinned.items() if has_setting(method, name)}


@st.composite
def questions(draw: st.DrawFn) -> tuple[str, MethodName, str, str, dict[str, object]]:
    """A model, a method, a cluster, a release of TRL and settings."""
    method = draw(st.sampled_from(sorted(METHODS)))
    return (
        draw(st.sampled_from([MODEL, "Qwen3-1.7B", "gemma-2-2b", "gpt-oss-20b", GPTQ, AWQ])),
        method,
        draw(st.sampled_from(["1xA100-40G", "4xA100-80G", "8xH100", "2x8xH100", "2xT4"])),
        draw(st.sampled_from([NEWEST_TRL, "1.14", "1.4"])),
        draw(drawn_settings(method)),
    )


def candidate_of(model: str, method: MethodName, gpus: str, version: str, pinned: dict[str, object]) -> Candidate:
    """The candidate of a question that no rule refuses; tries another question if one does."""
    others = {role: load_model(str(pinned[role])) for role in ("reward_model", "teacher_model") if role in pinned}
    try:
        job = Job(model=load_model(model), method=method, pinned=pinned | others, trl_version=version)
        candidate = single_candidate(job, parse_cluster(gpus))
        launch_files(candidate)
        estimate(candidate, parse_cluster(gpus))
    except (PlanError, EngineDoesNotFit):
        assume(False)
    return candidate


@pytest.mark.slow
@settings(
    max_examples=int(os.environ.get("PLAN_LAWS", 50)),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(questions())
def test_files_of_any_candidate_are_read_back(question: tuple[str, MethodName, str, str, dict[str, object]]) -> None:
    held = candidate_of(*question)
    with tempfile.TemporaryDirectory() as folder:
        before, after = read_back(held, question[2], Path(folder))
    assert after == before

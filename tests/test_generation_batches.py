"""Batches of the methods that sample completions: TRL takes those that the planner lets through."""

import importlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.candidate import Candidate
from planner.errors import InputError, PlanError
from planner.estimation import estimate
from planner.gpus.parse import parse_cluster
from planner.jobs.base_candidate import single_candidate
from planner.jobs.job import Job
from planner.launch.trl_config import placeholders, trl_config
from planner.methods import METHODS, MethodName
from planner.models.catalogue import load_model
from planner.planning import plan
from planner.units import MIB
from scripts.emulated_grid import torch_bytes
from scripts.emulated_jobs import Job as EmulatedJob

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

MODEL = load_model("Qwen/Qwen2.5-0.5B")
SAMPLING = [name for name, row in METHODS.items() if row.generates and row.last_trl == "current"]
GROUPED = [name for name in SAMPLING if METHODS[name].grouped_completions]
SIZES = st.integers(1, 12)
BATCH = {"per_device_train_batch_size": SIZES, "gradient_accumulation_steps": SIZES, "num_processes": st.integers(1, 8)}
GROUPS = {"num_generations": st.integers(2, 12), "steps_per_generation": SIZES, "num_iterations": st.integers(1, 3)}
ENGINE = {"vllm": st.sampled_from(["off", "colocate", "server"])}


def pins(method: MethodName, **others: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Any selection of the settings that a generation batch is made of."""
    return st.fixed_dictionaries({}, optional=BATCH | (GROUPS if method in GROUPED else {}) | others)


def read_by_trl(held: Candidate) -> None:
    """Build the method's own config of a candidate, in as many processes as the candidate has."""
    row = held.method_row
    module = f"trl.experimental.{held.method.replace('-', '_')}" if row.experimental else "trl"
    base = getattr(importlib.import_module(module), row.config)
    config = type(row.config, (base,), {"world_size": property(lambda self: held.num_processes)})
    exported = placeholders(held) | trl_config(held)
    written = {name: value for name, value in exported.items() if name in base.__dataclass_fields__}
    config(**{**written, "output_dir": "unused", "use_cpu": True})


def job(method: MethodName, drawn: st.DataObject, **others: st.SearchStrategy[Any]) -> Job:
    """A job with any batch."""
    return Job(
        model=MODEL,
        method=method,
        pinned=drawn.draw(pins(method, **others)),
        effective_batch_size=drawn.draw(st.none() | st.integers(1, 64)),
    )


@pytest.mark.parametrize("method", SAMPLING)
@settings(max_examples=15, deadline=None)
@given(drawn=st.data(), gpus=st.integers(1, 8))
def test_trl_takes_every_batch_of_a_single_candidate(method: MethodName, drawn: st.DataObject, gpus: int) -> None:
    try:
        held = single_candidate(job(method, drawn), parse_cluster(f"{gpus}xH100"))
    except InputError:
        return  # refused in one line
    read_by_trl(held)


@pytest.mark.parametrize("method", GROUPED)
@settings(max_examples=4, deadline=None)
@given(drawn=st.data(), gpus=st.sampled_from(["1xL4", "3xL4", "6xL4", "2x4xL4"]))
def test_trl_takes_every_batch_that_a_search_finds(method: MethodName, drawn: st.DataObject, gpus: str) -> None:
    try:
        answer = plan(job(method, drawn, **ENGINE), parse_cluster(gpus))
    except PlanError:
        return  # refused in one line
    for found in (answer.best, *(other.estimate for other in (*answer.alternatives, *answer.remedies))):
        read_by_trl(found.candidate)


@pytest.mark.parametrize(
    ("gpus", "settings", "emulated_mib", "within"),
    [
        # beside the gradients of an earlier micro-step
        (
            "1xA100-80G",
            {
                "model": "Qwen2.5-1.5B", "method": "gkd", "dtype": "bfloat16", "gradient_accumulation_steps": 2,
                "max_length": 2048, "prompt_length": 1024, "max_completion_length": 8, "optim": "rmsprop",
                "teacher_model": "Qwen2.5-1.5B",
            },
            11865,
            0.01,
        ),
        (
            "1xA100-80G",
            {
                "model": "Qwen2.5-0.5B", "method": "online-dpo", "per_device_train_batch_size": 4,
                "gradient_accumulation_steps": 2, "max_length": 512, "prompt_length": 256, "max_completion_length": 16,
                "beta": 0.1, "gradient_checkpointing": False, "attn_implementation": "eager",
            },
            10517,
            0.025,
        ),
        # under autocast, which the trainer's own forward pass does not have
        (
            "1xA100-80G",
            {
                "model": "Qwen2.5-0.5B", "method": "distillation", "dtype": "float32", "prompt_length": 480,
                "max_completion_length": 32, "teacher_model": "Qwen2.5-0.5B", "per_device_train_batch_size": 2,
            },
            8552,
            0.03,
        ),
        # the layers of the prompts, before the logits
        (
            "1xH100",
            {
                "model": "google/gemma-3-270m", "method": "grpo", "tuning": "lora", "lora_r": 128,
                "per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "steps_per_generation": 4,
                "prompt_length": 128, "max_completion_length": 16, "num_generations": 4,
            },
            1763,
            0.01,
        ),
    ],
)  # fmt: skip
def test_a_rollout_allocates_what_an_emulated_gpu_did(
    gpus: str, settings: dict[str, Any], emulated_mib: int, within: float
) -> None:
    """Source: results/emulated.jsonl."""
    cluster = parse_cluster(gpus, None)
    held = EmulatedJob(kind="rollout", gpus=gpus, settings={"padded": True, **settings}).candidate
    rollout = next(phase for phase in estimate(held, cluster).gpus[0].phases if phase.name == "rollout")
    assert torch_bytes(held, cluster, rollout) == pytest.approx(emulated_mib * MIB, rel=within)


@pytest.mark.parametrize(
    ("method", "settings", "within"),
    [
        ("grpo", {"steps_per_generation": 4}, False),
        ("grpo", {"steps_per_generation": 1}, True),
        ("grpo", {"steps_per_generation": 2, "num_iterations": 2}, False),
        ("grpo", {"steps_per_generation": 6}, True),
        ("online-dpo", {}, True),
        ("a2po", {}, True),
        ("distillation", {}, False),
        ("ppo", {}, False),
        ("sft", {}, False),
    ],
)
def test_rollouts_within_a_step_lie_beside_gradients(
    method: MethodName, settings: dict[str, int], within: bool
) -> None:
    held = Candidate(model=MODEL, method=method, gradient_accumulation_steps=4, eval_strategy="steps", **settings)
    assert held.samples_within_step is within
    assert held.evaluation is not None
    assert not held.evaluation.samples_within_step


@pytest.mark.parametrize("method", GROUPED)
def test_only_methods_that_say_so_score_all_samples_at_once(method: MethodName) -> None:
    """Whether a pass runs at all is another column (`forward_if_outdated`)."""
    settings: dict[str, Any] = {"per_device_train_batch_size": 2, "steps_per_generation": 4, "num_generations": 2}
    held = Candidate(model=MODEL, method=method, gradient_accumulation_steps=8, **settings)
    assert (held.scored_batch is not None) is METHODS[method].scores_at_once

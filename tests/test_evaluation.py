"""Evaluations: a phase of the estimate, equal to what the installed trainers allocate in one."""

from typing import Any

import pytest
from msgspec.structs import replace

from planner.candidate import Candidate
from planner.errors import InputError
from planner.estimation import estimate
from planner.gpus.parse import parse_cluster
from planner.jobs.job import Job
from planner.memory.runtime import context_bytes
from planner.models.catalogue import load_model
from planner.planning import plan
from planner.quantities import PhaseMemory

CLUSTER = parse_cluster("1xA100-80G", None)
MODEL = load_model("Qwen2.5-0.5B")
WORDS = 151_936
WITHIN = 0.01  # of the whole phase: the dry run and the formulas


def candidate(method: str = "sft", **settings: Any) -> Candidate:
    given: dict[str, Any] = {
        "model": MODEL, "method": method, "dtype": "bfloat16", "per_device_train_batch_size": 2, "max_length": 512,
        "prompt_length": 128, "max_completion_length": 128, "num_generations": 2, "eval_strategy": "steps",
    }  # fmt: skip
    return Candidate(**(given | settings))


def evaluation(case: Candidate) -> PhaseMemory:
    return next(phase for phase in estimate(case, CLUSTER).gpus[0].phases if phase.name == "evaluation")


def test_without_an_evaluation_there_is_no_phase() -> None:
    names = [phase.name for phase in estimate(candidate(eval_strategy="no"), CLUSTER).gpus[0].phases]
    assert "evaluation" not in names


def test_an_evaluation_has_a_batch_of_its_own_and_no_gradients() -> None:
    few, many = (evaluation(candidate(per_device_eval_batch_size=rows)) for rows in (1, 64))
    assert many.total_bytes > few.total_bytes
    assert "gradients" not in many.components
    assert many.components["optimizer_states"] == few.components["optimizer_states"] > 0


def test_blocks_of_batches_of_another_size_stay_reserved() -> None:
    """The example of `evaluation_cache_bytes`: 10,286 MiB reserved on an emulated L4, of which 6,942 were allocated."""
    case = Candidate(
        model=load_model("pythia-410m"), method="kto", tuning="lora", lora_r=128, use_dora=True, dtype="bfloat16",
        per_device_train_batch_size=2, gradient_accumulation_steps=2, max_length=2048, beta=0.1,
        eval_strategy="steps", attn_implementation="eager",
    )  # fmt: skip
    cluster = parse_cluster("1xL4", None)
    gpu = estimate(case, cluster).gpus[0]
    phase = next(each for each in gpu.phases if each.name == "evaluation")
    allocated = phase.total_bytes - phase.components["fragmentation"] - context_bytes(cluster.gpu)
    assert allocated / 2**20 == pytest.approx(6942, rel=0.005)
    assert gpu.reserved_bytes / 2**20 == pytest.approx(10286, rel=0.035)  # 0.2 to 1.3 of its cache stays
    same_rows = estimate(replace(case, per_device_eval_batch_size=2), CLUSTER).gpus[0]
    assert same_rows.cache_base_bytes < gpu.cache_base_bytes
    with_pages = estimate(replace(case, expandable_segments=True), CLUSTER).gpus[0]
    assert with_pages.cache_base_bytes == 0


def test_the_logits_of_all_batches_are_kept_twice_for_a_function_of_metrics() -> None:
    """Two batches: 2 x 2 x 8 rows x 512 tokens x 151,936 words x 4 bytes."""
    kept = evaluation(candidate(compute_metrics=True, eval_rows=16))
    assert kept.components["loss"] == 2 * 2 * 8 * 512 * WORDS * 4


@pytest.mark.parametrize(("rows", "steps", "batches"), [(0, 1, 1), (100, 1, 1), (100, 0, 13), (100, 4, 4), (8, 4, 1)])
def test_accumulation_steps_bound_the_batches_whose_logits_are_kept(rows: int, steps: int, batches: int) -> None:
    case = candidate(compute_metrics=True, eval_rows=rows, eval_accumulation_steps=steps)
    assert case.kept_eval_batches == batches


def test_the_logits_of_all_rows_are_on_the_host_at_the_end() -> None:
    rows = 100_000
    plain, kept = (
        estimate(candidate(compute_metrics=True, eval_rows=rows, eval_accumulation_steps=steps), CLUSTER)
        for steps in (1, 2)
    )
    assert plain.host_peak_bytes == kept.host_peak_bytes > 2 * rows * 512 * WORDS * 4
    assert not kept.fits


def test_a_method_that_evaluates_no_logits_keeps_none() -> None:
    assert candidate("grpo", compute_metrics=True, eval_rows=8).kept_eval_batches == 0


def test_a_plan_evaluates_as_many_rows_as_it_trains_at_once() -> None:
    job = Job(model=load_model("Qwen2.5-7B"), method="sft", pinned={"max_length": 4096, "eval_strategy": "epoch"})
    best = plan(job, parse_cluster("1xL4", None)).best.candidate
    assert best.per_device_eval_batch_size == best.per_device_train_batch_size < 8


@pytest.mark.parametrize(
    ("method", "pinned", "message"),
    [
        ("sft", {"compute_metrics": True}, "Add their number, such as --set eval_rows=100"),
        ("online-dpo", {}, "OnlineDPOTrainer evaluates no rows of text"),
        ("grpo", {"per_device_eval_batch_size": 3}, "Use --set per_device_eval_batch_size=8"),
    ],
)
def test_an_evaluation_that_cannot_be_is_refused(method: Any, pinned: dict[str, Any], message: str) -> None:
    from planner.jobs.base_candidate import single_candidate

    with pytest.raises(InputError, match=message):
        single_candidate(Job(model=MODEL, method=method, pinned={"eval_strategy": "steps", **pinned}), CLUSTER)

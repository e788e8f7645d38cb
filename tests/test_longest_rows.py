"""Law of `--optimize max-length`: no way to run has longer rows than the longest that the plan names."""

import random
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
from msgspec.structs import replace

from planner.candidate import Candidate
from planner.errors import PlanError
from planner.gpus.parse import parse_cluster
from planner.jobs.candidate_rules import refuse_candidate, refuse_single_candidate
from planner.jobs.job import Job
from planner.jobs.stop import can_precompute
from planner.methods import METHODS, MethodName
from planner.models.catalogue import load_model
from planner.models.liger import has_liger_formulas
from planner.planning import Plan, plan
from planner.rows.reading import row_lengths
from planner.search import search as search_module
from planner.search.fit import estimate_or_none
from planner.search.knobs import SearchProblem, TuningClass
from planner.search.search import best_of_structure, longest_row
from planner.search.sizes import LENGTH_STEP, batch_sizes, length_field, length_limit, with_length
from planner.search.structures import structures
from planner.settings.table import has_setting

MODELS = (
    "Qwen2.5-0.5B", "Qwen2.5-1.5B", "Llama-3.2-3B", "Qwen3-4B", "Qwen2.5-7B", "gemma-2-2b", "Llama-3.1-8B", "Qwen3-14B",
)  # fmt: skip
CLUSTERS = ("1xT4", "1xRTX-4090", "1xL4", "2xRTX-3090", "2xA100-40G", "4xA100-40G", "1xH100", "4xL40S", "8xH100")
TRAINERS: tuple[MethodName, ...] = ("sft", "dpo", "reward", "kto", "orpo", "grpo")
TUNINGS: tuple[TuningClass, ...] = ("full", "lora", "qlora")
DATASETS = (row_lengths("p50=380,p95=1900,max=7000"), row_lengths("p50=2000,p90=9000,max=31000"))
ON_ONE_GPU: tuple[dict[str, Any], ...] = (
    {"sharding": "none"},
    {"sharding": "zero2"},
    {"sharding": "zero2", "offload_optimizer": True},
)
ON_ALL_GPUS: tuple[dict[str, Any], ...] = (
    *({"sharding": name} for name in ("ddp", "zero1", "zero2", "zero3", "fsdp2")),
    {"sharding": "zero2", "offload_optimizer": True},
)
WITHOUT_PARAMETERS: dict[str, Any] = {"sharding": "zero3", "offload_optimizer": True, "offload_param": True}
FINER = 8  # the steps of a climb: this part of what is left to the longest row
JOBS, JOBS_OF_A_CASE = 100, 10


def planned(number: int) -> Plan:
    """The plan of the first random job of a seed that fits; a third of the datasets have lengths of rows."""
    dice = random.Random(number)
    while True:
        method, tuning = dice.choice(TRAINERS), dice.choice(TUNINGS)
        generates = METHODS[method].generates
        known = {"lengths": dice.choice(DATASETS)} if not generates and dice.random() < 1 / 3 else {}
        pinned: dict[str, Any] = {"vllm": "off"} if generates else known
        job = Job(
            model=load_model(dice.choice(MODELS)), method=method, tuning=tuning, pinned=pinned, optimize="max-length"
        )  # fmt: skip
        try:
            answer = plan(job, parse_cluster(dice.choice(CLUSTERS), None))
        except PlanError:
            continue
        if answer.best.fits:
            return answer


def shards(problem: SearchProblem) -> list[dict[str, Any]]:
    """Every division among one or all GPUs; ZeRO-3 and FSDP2 beside replicated 4-bit weights are last resorts."""
    qlora = problem.tuning_class == "qlora"
    ways = [{"num_processes": 1, **way} for way in (*ON_ONE_GPU, *(() if qlora else (WITHOUT_PARAMETERS,)))]
    count = problem.cluster.num_gpus
    whole = [
        way for way in (*ON_ALL_GPUS, WITHOUT_PARAMETERS) if not qlora or way["sharding"] not in ("zero3", "fsdp2")
    ]
    return ways if count == 1 else [*ways, *({"num_processes": count, **way} for way in whole)]


def every_way(problem: SearchProblem) -> Iterator[Candidate]:
    """The product of shards, kernels, checkpoints and what precedes a training, without those that the card lacks."""
    job, gpu = problem.job, problem.cluster.gpu
    base = next(structures(replace(problem, offload=False)))
    kernels = (
        "sdpa",
        "eager",
        "flash_attention_2",
        *(("flash_attention_3",) if gpu.supports_flash_attention_3 else ()),
    )
    can_fuse = gpu.runs_triton and has_liger_formulas(job.model)
    offloading = [name for name in ("checkpoint_offload", "activation_offloading") if has_setting(job.method, name)]
    checkpoints: list[dict[str, bool]] = [
        {"gradient_checkpointing": False},
        {"gradient_checkpointing": True},
        *({"gradient_checkpointing": True, name: True} for name in offloading),
    ]
    for shard, kernel, checkpointing, liger, ahead, segments in product(
        shards(problem), kernels, checkpoints, (True, False), (True, False), (True, False)
    ):
        way = replace(
            base, **shard, **checkpointing, attn_implementation=kernel, checkpoint_every_n_layers=1,
            use_liger_kernel=liger, precompute_ref_log_probs=ahead, expandable_segments=segments,
        )  # fmt: skip
        known = (can_fuse or not liger) and (can_precompute(way, problem.cluster) or not ahead)
        if known and (kernel != "sdpa" or job.model.supports_sdpa):
            yield way


def fits(candidate: Candidate, problem: SearchProblem) -> bool:
    """Whether a candidate runs and its estimate fits."""
    try:
        refuse_candidate(candidate, problem.job, problem.cluster)
        refuse_single_candidate(candidate, problem.job, problem.cluster)
    except PlanError:
        return False
    answer = estimate_or_none(candidate, problem)
    return answer is not None and answer.fits


def longest_named(answer: Plan) -> int:
    """The longest row of the recommended candidate and of the alternatives of its tuning."""
    best = answer.best.candidate
    others = (each.estimate for each in answer.alternatives if each.estimate.fits)
    same = (other.candidate for other in others if other.candidate.tuning == best.tuning)
    return max(longest_row(candidate) for candidate in (best, *same))


def longer_than_named(number: int) -> str:
    """A way to run whose rows are longer than all that the plan names; empty if there is none."""
    answer = planned(number)
    job = answer.job
    assert job.tuning != "auto"
    problem = SearchProblem(job=job, cluster=answer.cluster, tuning_class=job.tuning, offload=True)
    longest = named = longest_named(answer)
    found = ""
    for way in every_way(problem):
        sizes = batch_sizes(way, job)
        if not sizes:
            continue
        lengths, most = sizes[0].lengths, length_limit(sizes[0])
        extra = 0  # a prompt beside the completion whose length is looked for
        if lengths is None:
            extra = longest_row(sizes[0]) - getattr(sizes[0], length_field(sizes[0]))
        else:
            most = min(most, lengths.longest)
        length = longest - extra + LENGTH_STEP
        while length <= most and fits(with_length(sizes[0], length, problem), problem):
            longest, found = length + extra, f"job {number}: {named} tokens named, {length + extra} fit with {way}"
            length += max(LENGTH_STEP, (most - length) // FINER // LENGTH_STEP * LENGTH_STEP)
    return found


@pytest.mark.parametrize("number", range(4))
def test_no_way_to_run_has_longer_rows(number: int) -> None:
    assert not longer_than_named(number)


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(0, JOBS, JOBS_OF_A_CASE))
def test_no_way_to_run_any_job_has_longer_rows(first: int) -> None:
    assert not [line for number in range(first, first + JOBS_OF_A_CASE) if (line := longer_than_named(number))]


@pytest.mark.parametrize("packing", [None, True, False])
def test_no_row_is_longer_than_those_of_the_dataset(packing: bool | None) -> None:
    """It named 79,104 tokens for rows of up to 7,000, after two minutes."""
    pinned = {"lengths": DATASETS[0], **({} if packing is None else {"packing": packing})}
    model, cluster = load_model("Qwen2.5-1.5B"), parse_cluster("1xRTX-4090", None)
    job = Job(model=model, method="sft", tuning="lora", pinned=pinned, optimize="max-length")
    best = plan(job, cluster).best
    assert best.candidate.max_length == 7168
    assert best.candidate.packing is (packing is not False)  # packed rows are faster


def test_few_lengths_are_estimated_though_those_of_the_rows_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    model, cluster = load_model("Qwen2.5-1.5B"), parse_cluster("1xRTX-4090", None)
    job = Job(model=model, method="sft", tuning="lora", pinned={"lengths": DATASETS[1]}, optimize="max-length")
    problem = SearchProblem(job=job, cluster=cluster, tuning_class="lora")
    estimated: list[Candidate] = []
    real = search_module.estimate_with_engine

    def counted(candidate: Candidate, asked: SearchProblem) -> Any:
        estimated.append(candidate)
        return real(candidate, asked)

    monkeypatch.setattr(search_module, "estimate_with_engine", counted)
    assert best_of_structure(next(structures(problem)), problem) is not None
    assert len(estimated) <= 3


def test_one_gpu_with_offloading_is_named_where_its_rows_are_the_longest() -> None:
    """The first process of several needs NCCL's buffers: 77,824 tokens fit on one of four GPUs, 69,632 were named."""
    job = Job(model=load_model("Qwen2.5-7B"), method="dpo", tuning="full", optimize="max-length")
    answer = plan(job, parse_cluster("4xA100-40G", None))
    alone = next(each.estimate for each in answer.alternatives if each.change.code == "on_one_gpu")
    assert alone.candidate.num_processes == 1 and alone.candidate.offload_optimizer
    assert longest_row(alone.candidate) > longest_row(answer.best.candidate)


def test_eager_attention_is_named_where_its_rows_are_longer() -> None:
    """A T4 has no kernel of sdpa for grouped queries: 5,120 tokens were named, and 5,376 fit."""
    job = Job(model=load_model("Qwen2.5-0.5B"), method="orpo", tuning="lora", optimize="max-length")
    answer = plan(job, parse_cluster("1xT4", None))
    eager = next(each.estimate for each in answer.alternatives if each.change.code == "with_eager_attention")
    assert eager.candidate.attn_implementation == "eager" and eager.candidate.offload_optimizer is False
    assert (longest_row(answer.best.candidate), longest_row(eager.candidate)) == (5120, 5376)

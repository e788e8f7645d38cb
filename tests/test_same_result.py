"""Laws of the search over settings that leave what is learned as it is.

No pin of one makes a plan more than 2 % faster, and no combination of them, estimated one by one, is more than 2 %
faster than the search.
"""

import random
from collections.abc import Iterator
from itertools import product

import pytest
from msgspec import Struct
from msgspec.structs import replace

from planner.candidate import FLASH, Candidate
from planner.errors import PlanError
from planner.gpus.parse import parse_cluster
from planner.jobs.candidate_rules import refuse_candidate, refuse_single_candidate
from planner.jobs.job import Job, TuningOption
from planner.jobs.stop import can_precompute
from planner.methods import METHODS, MethodName
from planner.models.catalogue import load_model
from planner.models.liger import has_liger_formulas
from planner.planning import Plan, plan
from planner.search.choice import MUCH_FASTER
from planner.search.fit import estimate_or_none
from planner.search.knobs import SearchProblem, TuningClass
from planner.search.search import NEAR_BEST, best_of_class
from planner.search.sizes import batch_sizes
from planner.search.structures import structures
from planner.settings.table import with_role

MODELS = (
    "Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-7B", "Llama-3.1-8B", "Llama-3.2-1B", "Llama-3.2-3B", "Qwen3-4B",
    "Qwen3-8B", "Qwen3-14B", "Qwen2.5-32B", "Llama-3.1-70B", "gemma-2-9b", "gpt-oss-20b", "Qwen3-30B-A3B",
    "Mistral-7B-v0.1", "Phi-4",
)  # fmt: skip
CLUSTERS = (
    "1xRTX-3090", "1xRTX-4090", "1xT4", "2xRTX-3090", "1xA100-40G", "2xA100-40G", "4xA100-40G", "8xA100-80G", "1xH100",
    "2xH100", "8xH100", "4xL40S", "1xL4", "2x8xH100", "8xB200",
)  # fmt: skip
TRAINERS: tuple[MethodName, ...] = (
    "sft", "dpo", "grpo", "rloo", "reward", "kto", "online-dpo", "gkd", "orpo", "ppo",
)  # fmt: skip
LENGTHS = (512, 1024, 2048, 4096, 8192)

# Settings that change memory and speed only, and values to pin.
LEVERS: dict[str, tuple[object, ...]] = {
    "use_liger_kernel": (True, False),
    "attn_implementation": ("sdpa", "flash_attention_2", "flash_attention_3"),
    "precompute_ref_log_probs": (True, False),  # on several nodes it is named with its price
    "gradient_checkpointing": (True, False),
    "checkpoint_every_n_layers": (2, 4),
    "checkpoint_offload": (True,),
    "activation_offloading": (True,),
    "per_device_train_batch_size": (1, 2, 4),
    "gradient_accumulation_steps": (1, 4),
    "num_processes": (1, 2, 4),
    "sharding": ("none", "ddp", "zero1", "zero2", "zero3", "fsdp2"),
    "dp_replicate_size": (2,),
    "cp_size": (2,),
    "sp_size": (2,),
    "bnb_4bit_quant_storage": ("bfloat16",),
    "offload_optimizer": (True,),
    "offload_param": (True,),
    "ds3_gather_for_generation": (False,),
    "vllm": ("off", "colocate", "server"),
    "vllm_tensor_parallel_size": (1, 2, 4),
    "vllm_enable_sleep_mode": (True, False),
    "vllm_gpu_memory_utilization": (0.3, 0.6),
    "expandable_segments": (True, False),
}
# The other settings of that role, each with the reason why no pin of it can be better than the search.
NO_LEVERS = {
    "torch_version": "a fact of the environment",
    "vllm_version": "a fact of the environment",
    "num_nodes": "a fact of the cluster; fewer nodes are tried by the plan itself",
    "steps_per_generation": "a rollout for several steps is named with its price (planner/search/variations.py)",
    "sync_each_batch": "follows from sharding and accumulation",
    "teacher_server_gpus": "decided by the job, before the search (planner/jobs/teacher.py)",
    "teacher_server_gpu_memory_utilization": "of the teacher's server, not of the trainer",
    "use_kernels": "replaces norms that Liger's package replaces too, and nothing else",
    "cut_cross_entropy": "Axolotl's plugin",
    "lora_kernels": "Axolotl's kernels",
    "ep_size": "tried where nothing else fits on the GPUs",
    "tp_size": "FSDP2 alone is faster",
    "token_budget": "async-grpo's, follows from the micro-batch",
    "vllm_data_parallel_size": "follows from the server's GPUs",
    "vllm_max_model_length": "follows from the rows",
    **dict.fromkeys(
        ("eval_strategy", "per_device_eval_batch_size", "num_generations_eval", "compute_metrics",
         "prediction_loss_only", "eval_accumulation_steps"), "an evaluation is no part of a step",
    ),
    **dict.fromkeys(
        ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold",
         "stage3_max_live_parameters", "stage3_max_reuse_distance", "sub_group_size"), "DeepSpeed's own defaults",
    ),
}  # fmt: skip
PINS = [(name, value) for name, values in LEVERS.items() for value in values]
JOBS, JOBS_OF_A_CASE, FEW_PINS = 200, 10, 3


class Asked(Struct, frozen=True, kw_only=True):
    """A random job: its model, GPUs, method, tuning and length."""

    model: str
    gpus: str
    method: MethodName
    tuning: TuningOption
    lengths: dict[str, object]

    def planned(self, pins: dict[str, object], samples: int | None = None) -> Plan | None:
        """The plan with pins at an effective batch size; None if the pins contradict the job."""
        try:
            job = Job(
                model=load_model(self.model), method=self.method, tuning=self.tuning,
                pinned={**self.lengths, **pins}, effective_batch_size=samples,
            )  # fmt: skip
            return plan(job, parse_cluster(self.gpus, None))
        except PlanError:
            return None


def questions(number: int) -> Iterator[Asked]:
    """Random jobs of one seed."""
    dice = random.Random(number)
    while True:
        method = dice.choice(TRAINERS)
        field = "max_completion_length" if METHODS[method].generates else "max_length"
        yield Asked(
            model=dice.choice(MODELS),
            gpus=dice.choice(CLUSTERS),
            method=method,
            tuning=dice.choice(("auto", "full", "lora", "qlora")),
            lengths={field: dice.choice(LENGTHS)} if dice.random() < 0.5 else {},
        )


def first_that_fits(number: int) -> tuple[Asked, Plan]:
    """The first job of a seed whose plan fits, with its plan."""
    plans = ((asked, asked.planned({})) for asked in questions(number))
    return next((asked, found) for asked, found in plans if found is not None and found.best.fits)


def needs_more(candidate: Candidate) -> bool:
    """Whether a way to run takes host memory, another launcher that rounds to 16 bits, or shared rows.

    It is recommended where nothing else fits, or where it is much faster.
    """
    offloads = candidate.offload_optimizer or candidate.offload_param or candidate.checkpoint_offload
    alone = candidate.num_processes == 1 and candidate.sharding != "none"
    return offloads or candidate.activation_offloading or alone or candidate.row_gpus > 1


def is_last_resort(candidate: Candidate) -> bool:
    """Whether 4-bit weights are sharded, or what is beside them: planned where nothing else fits, or pinned."""
    return candidate.quantization != "none" and candidate.sharding in ("zero3", "fsdp2")


def is_same_training(candidate: Candidate, other: Candidate) -> bool:
    """Whether two candidates learn the same."""
    fields = with_role("learning", "data")
    samples = candidate.effective_batch_size == other.effective_batch_size
    return samples and all(getattr(candidate, field) == getattr(other, field) for field in fields)


def is_searched(name: str, value: object, asked: Asked) -> bool:
    """Whether a search may take a value.

    Not Liger's kernels for experts, whose layers are measured, or on cards that Triton does not support; FlashAttention
    3 on Hopper only; beside vLLM, which sets its own bounds on transformers, no settings of the newest one. No engine
    beside a 4-bit base, which would sample without the adapters.
    """
    model, gpu = load_model(asked.model), parse_cluster(asked.gpus, None).gpu
    sinks = any(layer.attention.sink_params for layer, _ in model.layer_kinds)
    if name == "precompute_ref_log_probs":
        return parse_cluster(asked.gpus, None).nodes == 1
    if name.startswith("vllm") and value != "off" and asked.tuning == "qlora":
        return False
    if name == "use_liger_kernel":
        return has_liger_formulas(model) and gpu.runs_triton
    if name in ("checkpoint_every_n_layers", "checkpoint_offload"):
        return not METHODS[asked.method].supports_vllm
    newest = value == "flash_attention_3" or (sinks and value in FLASH)
    return name != "attn_implementation" or not newest or gpu.supports_flash_attention_3


def beaten_by(number: int, pins: list[tuple[str, object]]) -> list[str]:
    """The pins with which the plan of a job is faster than without, each as a sentence."""
    asked, free = first_that_fits(number)
    best, found = free.best, []
    for name, value in pins:
        pinned = asked.planned({name: value}, best.candidate.effective_batch_size)
        if pinned is None or not pinned.best.fits or not is_searched(name, value, asked):
            continue
        if pinned.best.tight and pinned.best.fit_probability < best.fit_probability:  # less surely than the free one
            continue
        factor = pinned.best.throughput.tokens_per_second / best.throughput.tokens_per_second
        most = MUCH_FASTER if needs_more(pinned.best.candidate) else 1 / NEAR_BEST
        compared = is_same_training(best.candidate, pinned.best.candidate) and not is_last_resort(pinned.best.candidate)
        if factor > most and compared:
            found.append(f"job {number}, {asked}: {name}={value} is {factor:.3f} times as fast")
    return found


def test_every_setting_about_memory_and_speed_is_pinned() -> None:
    assert LEVERS.keys() | NO_LEVERS.keys() == with_role("run")
    assert not LEVERS.keys() & NO_LEVERS.keys()


@pytest.mark.parametrize("number", range(10))
def test_no_pin_beats_the_free_plan(number: int) -> None:
    assert not beaten_by(number, random.Random(number).sample(PINS, FEW_PINS))


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(0, JOBS, JOBS_OF_A_CASE))
def test_no_pin_of_any_lever_beats_the_free_plan(first: int) -> None:
    assert not [line for number in range(first, first + JOBS_OF_A_CASE) for line in beaten_by(number, PINS)]


# -- brute force -------------------------------------------------------------------------------------------------------

WITHOUT_ROLLOUTS: tuple[MethodName, ...] = ("sft", "dpo", "reward", "kto", "orpo")
SMALL_MODELS = ("Qwen2.5-0.5B", "Qwen2.5-1.5B", "Llama-3.2-3B", "Qwen3-4B", "Qwen2.5-7B", "gemma-2-2b")
SMALL_CLUSTERS = ("1xT4", "1xRTX-4090", "1xL4", "2xRTX-3090", "4xA100-40G", "1xH100", "8xH100")


def problem_of(number: int) -> SearchProblem:
    """A random job of a method without rollouts, and one tuning class."""
    dice = random.Random(number)
    tuning: TuningClass = dice.choice(("full", "lora", "qlora"))
    job = Job(
        model=load_model(dice.choice(SMALL_MODELS)),
        method=dice.choice(WITHOUT_ROLLOUTS),
        tuning=tuning,
        pinned={"max_length": dice.choice(LENGTHS), **({"dtype": "float32"} if tuning == "full" else {})},
    )
    return SearchProblem(job=job, cluster=parse_cluster(dice.choice(SMALL_CLUSTERS), None), tuning_class=tuning)


def every_combination(problem: SearchProblem) -> Iterator[Candidate]:
    """The product of kernels, reference, checkpoints, shards and batches, without what the rules or the card refuse.

    ZeRO-1 is for full fine-tuning only: of adapters, whose gradients are small, it is no faster than ZeRO-2 (see
    `test_zero_1_of_adapters_is_no_faster_than_zero_2`).
    """
    job, gpu = problem.job, problem.cluster.gpu
    base = next(structures(problem))
    attention = (
        "sdpa",
        "eager",
        "flash_attention_2",
        *(("flash_attention_3",) if gpu.supports_flash_attention_3 else ()),
    )
    several = {
        "full": ("ddp", "zero1", "zero2", "zero3", "fsdp2"),
        "lora": ("ddp", "zero2", "zero3", "fsdp2"),
        "qlora": ("ddp", "zero2"),
    }
    shards = ("none",) if base.num_processes == 1 else several[job.tuning]
    for kernels, liger, ahead, shard, layers in product(attention, (True, False), (True, False), shards, (0, 1, 2, 4)):
        structure = replace(
            base, attn_implementation=kernels, use_liger_kernel=liger, precompute_ref_log_probs=ahead, sharding=shard,
            gradient_checkpointing=layers > 0, checkpoint_every_n_layers=layers or 1,
        )  # fmt: skip
        if liger and not (gpu.runs_triton and has_liger_formulas(job.model)):
            continue
        if layers > 1 and not structure.method_row.keeps_checkpointing_details:
            continue
        if ahead and not can_precompute(structure, problem.cluster):
            continue
        if kernels == "sdpa" and not job.model.supports_sdpa:
            continue
        for candidate in batch_sizes(structure, job):
            try:
                refuse_candidate(candidate, job, problem.cluster)
                refuse_single_candidate(candidate, job, problem.cluster)
            except PlanError:
                continue
            yield candidate


def beaten_by_brute_force(number: int) -> str:
    """The fastest combination that fits, if it is more than 2 % faster than what the search finds; else empty.

    Where only a combination fits that no search tries (eager attention, three times as slow with padded rows), a plan
    offloads, which is searched then.
    """
    problem = problem_of(number)
    answers = (best_of_class(replace(problem, offload=offload)) for offload in (False, True))
    answer = next((each for each in answers if each is not None and each.fits), None)
    found = answer.throughput.tokens_per_second if answer is not None else 0.0
    estimates = (estimate_or_none(candidate, problem) for candidate in every_combination(problem))
    fastest = max(
        (each for each in estimates if each is not None and each.fits),
        key=lambda each: each.throughput.tokens_per_second,
        default=None,
    )
    if fastest is None or found >= NEAR_BEST * fastest.throughput.tokens_per_second:
        return ""
    return f"job {number}, {problem.job}: {fastest.candidate}"


@pytest.mark.parametrize("gpus", ["2xRTX-3090", "4xA100-40G", "8xH100"])
def test_zero_1_of_adapters_is_no_faster_than_zero_2(gpus: str) -> None:
    job = Asked(model="Llama-3.2-3B", gpus=gpus, method="dpo", tuning="lora", lengths={"max_length": 1024})
    whole, cut = (job.planned({"sharding": each}) for each in ("zero1", "zero2"))
    assert whole is not None and cut is not None
    assert whole.best.throughput.tokens_per_second < 1.005 * cut.best.throughput.tokens_per_second


@pytest.mark.parametrize("number", range(3))
def test_no_combination_beats_the_search(number: int) -> None:
    assert not beaten_by_brute_force(number)


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(0, JOBS, JOBS_OF_A_CASE))
def test_no_combination_of_any_job_beats_the_search(first: int) -> None:
    assert not [line for number in range(first, first + JOBS_OF_A_CASE) if (line := beaten_by_brute_force(number))]

"""The candidate of a job without a search: TRL's defaults and the job's pinned settings."""

from typing import Any

from msgspec.structs import replace

from planner.candidate import Candidate, Elements
from planner.errors import InputError
from planner.gpus.cluster import Cluster
from planner.jobs.candidate_rules import refuse_candidate, refuse_single_candidate
from planner.jobs.job import Job, TuningOption, server_gpus
from planner.jobs.rules import refuse_contradictions
from planner.jobs.stops import HEAD_IN_FLIGHT
from planner.jobs.usual import usual_settings
from planner.methods import METHODS, release
from planner.models.shape import ModelShape
from planner.quantizations import QLORA, QUANTIZATIONS
from planner.rows.lengths import RowLengths

# Default of `trl vllm-serve --gpu_memory_utilization` (trl/scripts/vllm_serve.py,
# `ScriptArguments.gpu_memory_utilization`).
SERVER_GPU_MEMORY_UTILIZATION = 0.9

# Candidate fields that a tuning class pins.
TUNING_PINS: dict[TuningOption, dict[str, str]] = {
    "auto": {},
    "full": {"tuning": "full"},
    "lora": {"tuning": "lora"},
    "qlora": {"tuning": "lora", "quantization": QLORA},
}


def base_candidate(job: Job, cluster: Cluster, searched: bool = False) -> Candidate:
    """Return the candidate of TRL's defaults and the pinned settings, with one process on each GPU.

    `searched`: a search changes it (see `Method.defaults_in`).

    Raises:
        InputError: pinned settings contradict each other, the method or the cluster.
    """
    usual = usual_settings(job.model, job.method, trl_version(job), cluster, searched)
    settings: dict[str, object] = {**usual, **job.pinned}
    completions = job.pinned.get("completion_lengths")
    if isinstance(completions, RowLengths) and "max_completion_length" not in job.pinned:
        settings["max_completion_length"] = completions.longest
    if METHODS[job.method].bounded_rows and "prompt_length" not in job.pinned:
        whole, completion = settings.get("max_length", 1024), settings.get("max_completion_length", 512)
        assert isinstance(whole, int) and isinstance(completion, int)
        settings["prompt_length"] = max(1, whole - completion)
    if settings.get("vllm") == "server":
        settings = _beside_server(job, cluster) | settings
    settings.setdefault("num_processes", cluster.num_gpus)
    settings.setdefault("num_nodes", cluster.nodes)
    if "gradient_accumulation_steps" in settings:
        settings.setdefault("steps_per_generation", settings["gradient_accumulation_steps"])
    if METHODS[job.method].reward_model == "always" and _is_policy(settings.get("reward_model"), job.model):
        del settings["reward_model"]  # without one it has the policy's shape
    candidate = Candidate(model=job.model, method=job.method, trl_version=trl_version(job), **settings)  # type: ignore[arg-type]
    if "sync_each_batch" not in job.pinned:
        candidate = replace(candidate, sync_each_batch=syncs_each_batch(candidate))
    if "stage3_prefetch_bucket_size" not in job.pinned:
        candidate = replace(candidate, stage3_prefetch_bucket_size=prefetch_bucket(candidate, cluster))
    refuse_candidate(candidate, job, cluster)
    return candidate


def _beside_server(job: Job, cluster: Cluster) -> dict[str, object]:
    """Return the settings of a candidate with a vLLM server that pins none of them.

    Source: trl 1.16, experimental/async_grpo/async_grpo_config.py, `token_budget` (the server's longest sequence).
    """
    longest = job.pinned.get("vllm_max_model_length") or job.model.max_position_embeddings
    return {
        "vllm_gpu_memory_utilization": SERVER_GPU_MEMORY_UTILIZATION,
        "num_processes": cluster.trainer_gpus(server_gpus(job.pinned)),
        "token_budget": longest if METHODS[job.method].asynchronous else 0,
    }


def syncs_each_batch(candidate: Candidate) -> bool:
    """Return the default of `sync_each_batch`: true where whole gradients would be large.

    That is full fine-tuning with FSDP2 and gradient accumulation: a job shards because the model does not fit, and its
    whole gradients would stay on every GPU (see `Candidate.keeps_whole_gradients`). It costs a reduce-scatter in each
    micro-step.

    Example: Llama-3.1-8B in full on 8 GPUs: 16.1 GB of whole gradients instead of 4 GB of shards.
    """
    return candidate.scheme_row.defers_reduction and candidate.tuning == "full" and candidate.accumulates


def prefetch_bucket(candidate: Candidate, cluster: Cluster) -> Elements:
    """Return the `stage3_prefetch_bucket_size` of a candidate that pins none: 0 where gathering ahead ends the run."""
    ahead = replace(candidate, stage3_prefetch_bucket_size="auto")
    return 0 if HEAD_IN_FLIGHT.when(ahead, cluster) else "auto"


def evaluation_rows(batch: int, candidate: Candidate) -> int:
    """Return the rows of an evaluation batch that is about as heavy as a micro-batch of `batch` rows.

    Rounded up to whole groups of completions of one prompt.
    Source: trl 1.16, trainer/grpo_config.py, `GRPOConfig.__post_init__` (`num_generations_eval`).
    """
    if not candidate.method_row.grouped_completions:
        return batch
    group = candidate.num_generations_eval or candidate.num_generations
    return -(-batch // group) * group


def _is_policy(other: object, policy: ModelShape) -> bool:
    """Return whether another model's shape was loaded from the same place as the policy's."""
    return isinstance(other, ModelShape) and (other.id, other.path) == (policy.id, policy.path)


def trl_version(job: Job) -> str:
    """Return the TRL release to plan for: the job's, or the first or last one that has the method."""
    first, last = METHODS[job.method].first_trl, METHODS[job.method].last_trl
    if first != "oldest" and release(job.trl_version) < release(first):
        return first
    return last if last != "current" and release(job.trl_version) > release(last) else job.trl_version


def single_candidate(job: Job, cluster: Cluster) -> Candidate:
    """Return the candidate of a job that is not searched: TRL's defaults, with DDP on the GPUs beside a vLLM server.

    Raises:
        InputError: settings contradict each other, or the effective batch is not made of whole micro-batches.
    """
    refuse_contradictions(job, cluster)
    pinned: dict[str, Any] = {**TUNING_PINS[job.tuning], **job.pinned}
    if job.model.quantization_row.kept:
        pinned["quantization"] = job.model.quantization
    if QUANTIZATIONS[pinned.get("quantization", job.model.quantization)].kept:
        pinned.setdefault("tuning", "lora")  # quantized weights do not learn
    if pinned.get("vllm") == "server" and "num_processes" not in pinned:
        pinned["num_processes"] = cluster.trainer_gpus(server_gpus(pinned))
    if pinned.get("num_processes", cluster.num_gpus) != 1:
        pinned.setdefault("sharding", "ddp")
    candidate = base_candidate(replace(job, pinned=pinned), cluster)
    if job.effective_batch_size is None:
        refuse_single_candidate(candidate, job, cluster)
        return candidate
    if "gradient_accumulation_steps" in pinned and candidate.effective_batch_size != job.effective_batch_size:
        raise InputError(
            f"--effective-batch-size {job.effective_batch_size} contradicts gradient_accumulation_steps "
            f"{candidate.gradient_accumulation_steps}, which makes {candidate.effective_batch_size}."
        )
    pinned["gradient_accumulation_steps"] = _accumulation(job.effective_batch_size, candidate)
    candidate = base_candidate(replace(job, pinned=pinned), cluster)
    refuse_single_candidate(candidate, job, cluster)
    return candidate


def _accumulation(effective_batch_size: int, candidate: Candidate) -> int:
    """Return effective batch / (micro-batch x batches), the gradient_accumulation_steps of the effective batch.

    Raises:
        InputError: the division leaves a rest.
    """
    together = candidate.per_device_train_batch_size * candidate.batches
    if effective_batch_size % together:
        raise InputError(
            f"--effective-batch-size {effective_batch_size} is no multiple of "
            f"{candidate.per_device_train_batch_size} samples on each of {candidate.batches} data-parallel ranks. "
            "Give a --batch-size that divides it."
        )
    return effective_batch_size // together

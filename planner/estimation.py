"""Candidate -> Estimate: memory of each GPU phase by phase, memory of the host, and speed."""

from functools import lru_cache

from msgspec import Struct
from msgspec.structs import replace

from planner.cache_keys import TrainingSettings, state_settings, training_settings
from planner.candidate import Candidate
from planner.confidence import EDGE_RISK, fit_probability_of, interval_bytes, kind_of, nvidia_smi_miss, quantile
from planner.gpus.cluster import Cluster, Gpu
from planner.memory.communication import nccl_bytes
from planner.memory.disk import disk_bytes
from planner.memory.engine.budget import EngineMemory, engine_memory, rows_at_once
from planner.memory.engine.settings import engine_settings, teacher_settings
from planner.memory.host import host_peak_bytes
from planner.memory.runtime import context_bytes
from planner.memory.schemes.tensor import of_one_gpu
from planner.memory.slack import (
    cache_base_bytes,
    cache_base_reach_bytes,
    cache_shares,
    evaluation_cache_bytes,
    late_share,
)
from planner.memory.stack_recipe import shares_keys
from planner.memory.states import state_memory
from planner.memory.step import training_phases, with_engine
from planner.quantities import DEFAULT_RISK, Estimate, GpuMemory, GpuRole, PhaseMemory
from planner.throughput.rows import completions
from planner.throughput.step import training_seconds, with_generation


def estimate(candidate: Candidate, cluster: Cluster, risk: float = DEFAULT_RISK) -> Estimate:
    """Memory of every GPU and of the host, and speed, of one candidate.

    Raises:
        EngineDoesNotFit: the vLLM engine would refuse to start.
        NotMeasured: a layer has neither formulas nor measurements for the candidate's settings.
    """
    engine = engine_of(candidate, cluster.gpu)
    training = training_estimate(training_settings(of_one_gpu(candidate)), cluster)
    worst = worst_batch(candidate, cluster)
    if worst is not candidate:
        heavier = training_estimate(training_settings(of_one_gpu(worst)), cluster)
        training = replace(training, phases=heavier.phases, host_peak_bytes=heavier.host_peak_bytes)
    gpus = gpus_of(candidate, cluster, training, engine, risk)
    host_fits = training.host_peak_bytes <= cluster.host.usable_bytes
    probability = fit_probability_of(gpus, kind_of(candidate)) if host_fits else 0.0
    host_tight = host_fits and training.host_peak_bytes > cluster.host.safe_bytes
    fits = host_fits and not host_tight and _gpus_fit(gpus)
    return Estimate(
        candidate=candidate,
        fits=fits,
        tight=not fits and probability >= 1 - EDGE_RISK,
        host_tight=host_tight,
        fit_probability=probability,
        evidence="estimated",
        gpus=gpus,
        host_peak_bytes=training.host_peak_bytes,
        host_capacity_bytes=cluster.host.usable_bytes,
        throughput=with_generation(training.seconds, candidate, cluster, rollout_rows(candidate, cluster.gpu, engine)),
        reasons=(),
    )


def disk_bytes_of(candidate: Candidate) -> int:
    """Return `disk_bytes` of a candidate."""
    return disk_bytes(state_settings(candidate))


def worst_batch(candidate: Candidate, cluster: Cluster) -> Candidate:
    """Return the candidate, or its `full_batch` if that needs more memory: where sdpa without a mask has no kernel."""
    if not lacks_unmasked_kernel(candidate, cluster.gpu):
        return candidate
    full = candidate.full_batch
    if full is None:
        return candidate
    return max(
        (candidate, full), key=lambda each: training_estimate(training_settings(of_one_gpu(each)), cluster).peak_bytes
    )


def lacks_unmasked_kernel(candidate: Candidate, gpu: Gpu) -> bool:
    """Return whether sdpa may have no fused kernel for batches without a mask, and has one for those with a mask.

    So it is with grouped queries up to torch 2.13, without FlashAttention or in a pass in float32.
    Source: `kernel`, planner/memory/stack_recipe.py.
    """
    if candidate.attn_implementation != "sdpa" or candidate.groups_efficiently:
        return False
    wide = candidate.float32_attention or candidate.teacher_dtype == "float32"
    fused = gpu.supports_flash_attention_2 and not wide
    return not fused and any(map(shares_keys, candidate.models))


class TrainingEstimate(Struct, frozen=True, kw_only=True):
    """The part of an estimate that does not depend on the share of the GPU that a vLLM engine gets."""

    phases: tuple[PhaseMemory, ...]  # of a training GPU, without an engine in the same process
    weights_by_role: dict[str, int]
    host_peak_bytes: int
    seconds: dict[str, float]  # of a step, without rollouts

    @property
    def peak_bytes(self) -> int:
        return max(phase.total_bytes for phase in self.phases)


@lru_cache(maxsize=256)
def training_estimate(settings: TrainingSettings, cluster: Cluster) -> TrainingEstimate:
    """Memory and seconds of a training without its engine. Cached: a search tries many shares for one training."""
    return TrainingEstimate(
        phases=training_phases(settings, cluster.gpu),
        weights_by_role=state_memory(state_settings(settings), cluster.gpu).weights_by_role,
        host_peak_bytes=host_peak_bytes(settings, cluster),
        seconds=training_seconds(settings, cluster),
    )


def with_residual(answer: Estimate, residual: float, risk: float) -> Estimate:
    """Add `residual` x its bytes to every phase of the training GPUs, as the component "unexplained".

    `residual` is the error of an estimate of the same tuning class in a dry run: emulated / estimated peak - 1.
    """
    train, *others = answer.gpus
    phases = tuple(
        replace(phase, components={**phase.components, "unexplained": round(residual * phase.total_bytes)})
        for phase in train.phases
    )
    kind = kind_of(answer.candidate)
    gpus = (replace(train, phases=phases, interval_bytes=interval_bytes(phases, kind, risk)), *others)
    host_fits = answer.host_over_bytes <= 0
    probability = fit_probability_of(gpus, kind) if host_fits else 0.0
    fits = host_fits and not answer.host_tight and _gpus_fit(gpus)
    return replace(
        answer,
        gpus=gpus,
        fits=fits,
        tight=not fits and probability >= 1 - EDGE_RISK,
        fit_probability=probability,
    )


def accepted(answer: Estimate) -> Estimate:
    """Return a tight estimate as one that fits: nothing safer was found, and it is more likely to run than not."""
    return replace(answer, fits=True) if answer.tight else answer


def _gpus_fit(gpus: tuple[GpuMemory, ...]) -> bool:
    """Return whether the upper bound of the peak is within the capacity of every GPU."""
    return all(gpu.interval_bytes[1] <= gpu.capacity_bytes for gpu in gpus)


def engine_of(candidate: Candidate, gpu: Gpu) -> EngineMemory | None:
    """The vLLM engine of a candidate on one of its GPUs, None without vLLM."""
    return None if candidate.vllm == "off" else engine_memory(candidate.model, gpu, engine_settings(candidate, gpu))


def teacher_engine_of(candidate: Candidate, gpu: Gpu) -> EngineMemory | None:
    """The engine of the teacher's vLLM server on one of its GPUs; None without one, or if it is elsewhere."""
    if not candidate.teacher_server_gpus or candidate.teacher_server_model is None:
        return None
    settings = teacher_settings(candidate, candidate.teacher_server_model, gpu)
    return engine_memory(candidate.teacher_server_model, gpu, settings)


def rollout_rows(candidate: Candidate, gpu: Gpu, engine: EngineMemory | None) -> float:
    """Rows that a candidate's engine decodes at once, each with its own prompt and completion; 0 without vLLM."""
    if engine is None:
        return 0.0
    row_tokens = candidate.prompt_length + round(completions(candidate).mean)
    return rows_at_once(candidate.model, engine_settings(candidate, gpu), engine, row_tokens)


def gpus_of(
    candidate: Candidate, cluster: Cluster, training: TrainingEstimate, engine: EngineMemory | None, risk: float
) -> tuple[GpuMemory, ...]:
    """Memory of the GPUs of each role. A vLLM server has GPUs of its own; a colocated engine shares the trainer's."""
    role: GpuRole = "train"
    phases, details = training.phases, {"weights": training.weights_by_role}
    if candidate.vllm == "colocate" and engine is not None:
        role = "train+vllm"
        phases, details = tuple(with_engine(phase, engine) for phase in phases), details | engine_details(engine)
    kind = kind_of(candidate)
    cache = cache_shares(candidate, quantile(risk))
    train = gpu_memory(role, candidate.num_processes, cluster.gpu, phases, details, interval_bytes(phases, kind, risk))
    gpus = [
        replace(
            train,
            cache_base_bytes=cache_base_bytes(candidate) + evaluation_cache_bytes(candidate, training.phases),
            cache_base_reach_bytes=cache_base_reach_bytes(candidate, quantile(risk)),
            cache_share=cache[0],
            cache_reach=cache[1],
            late_share=late_share(candidate),
            context_bytes=context_bytes(cluster.gpu),
            nccl_bytes=nccl_bytes(candidate),
            nvidia_smi_miss=nvidia_smi_miss(kind),
        ),
    ]
    if candidate.vllm == "server" and engine is not None:
        serving = PhaseMemory(name="rollout", components={"engine": engine.total_bytes})
        interval = interval_bytes((serving,), "server", risk)
        gpus.append(
            gpu_memory("vllm", candidate.server_gpus, cluster.gpu, (serving,), engine_details(engine), interval)
        )
    if teacher := teacher_engine_of(candidate, cluster.gpu):
        serving = PhaseMemory(name="score", components={"engine": teacher.total_bytes})
        interval = interval_bytes((serving,), "server", risk)
        details = engine_details(teacher)
        gpus.append(gpu_memory("teacher", candidate.teacher_server_gpus, cluster.gpu, (serving,), details, interval))
    return tuple(gpus)


def gpu_memory(
    role: GpuRole,
    count: int,
    gpu: Gpu,
    phases: tuple[PhaseMemory, ...],
    details: dict[str, dict[str, int]],
    interval: tuple[int, int],
) -> GpuMemory:
    """Memory of the GPUs of one role."""
    return GpuMemory(
        role=role,
        count=count,
        capacity_bytes=gpu.free_bytes,
        phases=phases,
        interval_bytes=interval,
        details=details,
    )


def engine_details(engine: EngineMemory) -> dict[str, dict[str, int]]:
    """An engine's bytes by purpose, within its budget and outside, and the tokens that its KV cache holds."""
    return {
        "engine_budget": {
            "weights": engine.weights_bytes,
            "kv_cache": engine.kv_cache_bytes,
            "activations": engine.activation_peak_bytes,
            "cuda_graphs": engine.cuda_graph_bytes,
            "buffers": engine.persistent_buffer_bytes + engine.expert_workspace_bytes,
            "non_torch": engine.non_torch_bytes,
            "kv_cache_tokens": engine.kv_tokens,
            "sequences": int(engine.max_concurrency),
        },
        "engine_outside_its_budget": {"block_tables_and_nccl": engine.outside_budget_bytes},
    }

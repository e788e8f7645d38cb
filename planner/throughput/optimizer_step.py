"""Seconds of the optimizer's step: it reads gradients and states and writes parameters."""

from planner.cache_keys import TrainingInput
from planner.gpus.cluster import Gpu
from planner.memory.dtypes import DTYPE_BYTES
from planner.memory.parameters.policy import policy_parameters
from planner.memory.parameters.widths import adapter_dtype_bytes, copied_dtype_bytes
from planner.throughput.rates import memory_rate
from planner.throughput.work import Work, trained_models

# Passes over the gradients per step: the norm reads them, clipping reads and writes them, the optimizer reads them.
# Source: torch 2.13, nn/utils/clip_grad.py, `clip_grad_norm_`.
CLIPPED_GRADIENT_PASSES = 4
# Passes per addition into `.grad`: two reads, one write. Source: torch 2.13, csrc/autograd/functions/accumulate_grad.h.
ACCUMULATED_GRADIENT_PASSES = 3
FLOAT32 = 4.0


def optimizer_seconds(candidate: TrainingInput, gpu: Gpu, work: Work) -> float:
    """Seconds of one optimizer step on one GPU, and of adding the gradients of all micro-steps but the first.

        step        = params x (4 gradients + 2 parameters + 2 states) bytes / bandwidth
        accumulated = params x 3 gradients x (accumulation - 1) bytes / bandwidth

    ZeRO and FSDP2: params / n in float32 (`Candidate.narrow_shards`: as loaded); ZeRO reads and writes its float32
    master weights too. An offloaded optimizer keeps states and master weights on the host. Bandwidth: `memory_rate`.

    Example: Qwen2.5-7B, full, bf16, adamw_torch_fused: (4 x 2 + 2 x 2 + 2 x 4) x 7.6e9 / 1.53e12 = 0.10 s.

    Leaves out the projections of GaLore and APOLLO, and states that paged optimizers fetch from the host.
    """
    moved = sum(
        _moved_bytes(candidate, params, float(width))
        for each in trained_models(candidate, work)
        for params, width in _trained_params(candidate, each)
    )
    return moved / memory_rate(gpu)


def _trained_params(candidate: TrainingInput, work: Work) -> tuple[tuple[int, int], ...]:
    """Return the trained parameters of a model with their bytes: of the model, or of adapters and copied modules."""
    if not work.adapter_only:
        return ((work.trainable_params, DTYPE_BYTES[candidate.dtype]),)
    copied = policy_parameters(candidate).copied_tensors.params
    return (
        (work.trainable_params - copied, adapter_dtype_bytes(candidate)),
        (copied, copied_dtype_bytes(candidate)),
    )


def _moved_bytes(candidate: TrainingInput, trained: int, width: float) -> float:
    """Bytes that one GPU moves to update `trained` parameters of `width` bytes."""
    row, params, master = candidate.optimizer_row, float(trained), 0.0
    accumulated = ACCUMULATED_GRADIENT_PASSES * width * params * (candidate.gradient_accumulation_steps - 1)
    if candidate.scheme_row.casts == "module":
        master = 2 * FLOAT32
    if not candidate.scheme_row.whole:
        width = width if candidate.narrow_shards else FLOAT32
        params /= candidate.shard_gpus
    states = row.buffers * width + row.float32_buffers * FLOAT32 + row.codes * row.bits / 8
    if candidate.offload_optimizer:
        states, master = 0.0, 0.0
    return params * (CLIPPED_GRADIENT_PASSES * width + 2 * width + 2 * states + master) + accumulated

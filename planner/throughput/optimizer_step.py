"""The optimizer's step: reading gradients and states, writing parameters."""

from planner.cache_keys import TrainingInput
from planner.candidate import DEEPSPEED, DTYPE_BYTES
from planner.gpus.cluster import Gpu
from planner.memory.adapters import adapter_dtype_bytes
from planner.memory.optimizer import OPTIMIZERS
from planner.throughput.rates import memory_rate
from planner.throughput.work import Work

CLIPPED_GRADIENT_PASSES = (
    4  # norm reads, clipping reads and writes, the optimizer reads (torch 2.13, nn/utils/clip_grad.py)
)
ACCUMULATED_GRADIENT_PASSES = 3  # torch 2.13, csrc/autograd/functions/accumulate_grad.h: two read, one written
FLOAT32 = 4.0


def optimizer_seconds(candidate: TrainingInput, gpu: Gpu, work: Work) -> float:
    """One optimizer step and the additions into `.grad` of all micro-steps but the first, on one card.

        (4 gradients + 2 parameters + 2 states) bytes / bandwidth; sharded: of params / n; ZeRO: float32 master weights besides

    Example: Qwen2.5-7B, full, bf16, adamw_torch_fused: (4 x 2 + 2 x 2 + 2 x 4) x 7.6e9 / 1.53e12 = 0.10 s.

    Leaves out galore's and apollo's projections, and states that paged optimizers have to fetch from the host.
    """
    row = OPTIMIZERS[candidate.optim]
    width = float(adapter_dtype_bytes(candidate) if work.adapter_only else DTYPE_BYTES[candidate.dtype])
    params, master = float(work.trainable_params), 0.0
    accumulated = ACCUMULATED_GRADIENT_PASSES * width * params * (candidate.gradient_accumulation_steps - 1)
    if candidate.sharding in DEEPSPEED:
        master = 2 * FLOAT32
    if candidate.sharding in DEEPSPEED or candidate.sharding == "fsdp2":
        width = FLOAT32
        params /= candidate.num_processes
    states = row.buffers * width + row.float32_buffers * FLOAT32 + row.codes * row.bits / 8
    if candidate.offload_optimizer:
        states, master = 0.0, 0.0
    step = params * (CLIPPED_GRADIENT_PASSES * width + 2 * width + 2 * states + master)
    return (step + accumulated) / memory_rate(gpu)

"""The quantities that estimates and measurements share: memory by phase and component on each GPU, and speed."""

from dataclasses import dataclass, field
from operator import attrgetter
from typing import Literal

from planner.candidate import Candidate

Evidence = Literal["estimated", "simulated", "measured"]
Phase = Literal["load", "rollout", "score", "forward", "loss", "backward", "optimizer_step", "weight_sync", "save"]
Component = Literal[
    "weights",  # of every role that is resident, as stored
    "adapters",  # LoRA matrices
    "gradients",
    "optimizer_states",
    "autocast_copies",  # 16-bit copies of float32 weights that autocast keeps
    "activations",  # saved for the backward pass
    "attention_scores",  # what grows with the square of the length
    "transients",  # alive only inside one layer's forward, recomputation or backward; optimizer temporaries
    "loss",  # head, logits, log-probabilities
    "kv_cache",  # of generate()
    "engine",  # the vLLM engine's share of the card
    "communication",  # gathered parameters, buckets, NCCL
    "fragmentation",  # reserved by the allocator, not allocated
    "runtime",  # CUDA context, cuBLAS workspaces
    "unexplained",  # measured, and in none of the others as the lower rung has them
]
GpuRole = Literal["train", "vllm", "train+vllm"]

# The smallest block of PyTorch's CUDA caching allocator: every tensor takes a whole number of them.
# Source: pytorch 2.13, c10/core/AllocatorConfig.h, `kMinBlockSize`.
CUDA_BLOCK_BYTES = 512


TOTAL_BYTES = attrgetter("total_bytes")


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseMemory:
    """One row of the table phase x component on one GPU; a component that is 0 is left out."""

    name: Phase
    components: dict[Component, int]
    total_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "total_bytes", sum(self.components.values()))


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuMemory:
    """The GPUs of one role: `count` of them, all alike. `details` explains components: {"engine": {"weights": ..}}."""

    role: GpuRole
    count: int
    capacity_bytes: int  # what this run may use of the card
    phases: tuple[PhaseMemory, ...]
    interval_bytes: tuple[int, int]  # of the peak, at the stated risk
    details: dict[str, dict[str, int]]
    peak: PhaseMemory = field(init=False)  # the heaviest phase, the first of equals

    def __post_init__(self) -> None:
        object.__setattr__(self, "peak", max(self.phases, key=TOTAL_BYTES))

    @property
    def peak_bytes(self) -> int:
        return self.peak.total_bytes

    @property
    def peak_phase(self) -> Phase:
        return self.peak.name


@dataclass(frozen=True, kw_only=True, slots=True)
class Throughput:
    """Speed of the whole run. `tokens_per_second` counts trained tokens over all GPUs; `seconds` splits a step by cause."""

    tokens_per_second: float
    step_seconds: float
    seconds: dict[str, float]
    evidence: Evidence


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What a candidate needs and gives. `fits`: the peak's upper bound at the accepted risk is within every card."""

    candidate: Candidate
    fits: bool
    fit_probability: float
    evidence: Evidence
    gpus: tuple[GpuMemory, ...]
    host_peak_bytes: int  # on one node
    throughput: Throughput
    reasons: tuple[str, ...]
    versions: tuple[tuple[str, str], ...] = ()  # of the libraries that a simulated or measured answer comes from
    device: Literal["none", "cuda", "cpu", "simulated"] = "none"  # what a probe of it ran on

    @property
    def over_bytes(self) -> int:
        """How much the worst GPU lacks at the accepted risk; 0 or less when it fits."""
        return max(gpu.interval_bytes[1] - gpu.capacity_bytes for gpu in self.gpus)


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseDifference:
    """One phase of a probed candidate on its heaviest GPU.

    `measured_bytes` is all that was taken; `needed_bytes` is that without what the allocator kept and would have given back, which is what an
    estimate speaks of.
    """

    name: Phase
    expected_bytes: int
    measured_bytes: int
    needed_bytes: int

    @property
    def error(self) -> float:
        """Of what was expected, as a share of what was needed; below 0 too little was expected."""
        return self.expected_bytes / self.needed_bytes - 1

"""Quantities of estimates and measurements: memory by phase and component on each GPU, and speed."""

import math
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Literal

from planner.candidate import Candidate

# The device of a probe that decided; "none": it was not probed.
ProbedOn = Literal["none", "cuda", "cpu", "simulated", "emulated"]
Evidence = Literal["estimated", "simulated", "emulated", "measured"]
Phase = Literal["load", "rollout", "score", "forward", "loss", "backward", "optimizer_step", "weight_sync", "save"]
Component = Literal[
    "weights",  # of every model on the GPU, as stored
    "adapters",  # LoRA matrices
    "gradients",
    "optimizer_states",
    "autocast_copies",  # 16-bit copies of float32 weights that autocast keeps
    "activations",  # saved for the backward pass
    "attention_scores",  # grows with the square of the length: scores, probabilities, masks
    "transients",  # alive within one layer's forward or backward pass only; optimizer temporaries
    "loss",  # head, logits, log-probabilities
    "kv_cache",  # of `generate`
    "engine",  # the vLLM engine in the same process
    "communication",  # gathered parameters, buckets, NCCL
    "fragmentation",  # reserved by the allocator, not allocated
    "runtime",  # CUDA context, cuBLAS workspaces
    "unexplained",  # measured bytes beyond the estimated components
]
GpuRole = Literal["train", "vllm", "train+vllm"]

# The smallest block of PyTorch's CUDA caching allocator: every tensor takes a whole number of them.
# Source: pytorch 2.13, c10/core/AllocatorConfig.h, `kMinBlockSize`.
CUDA_BLOCK_BYTES = 512


TOTAL_BYTES = attrgetter("total_bytes")


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseMemory:
    """One row of the table phase x component on one GPU, without components of 0 bytes."""

    name: Phase
    components: dict[Component, int]
    total_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "total_bytes", sum(self.components.values()))


# Components that are alive in every phase, and those that PyTorch's allocator does not hand out.
RESIDENT: tuple[Component, ...] = ("weights", "adapters", "optimizer_states")
OUTSIDE_THE_ALLOCATOR: tuple[Component, ...] = ("runtime", "engine", "fragmentation")


def coming_and_going_bytes(components: dict[Component, int]) -> int:
    """Bytes of tensors that are allocated and freed within a step, which PyTorch's allocator keeps blocks for."""
    kept = sum(components.get(component, 0) for component in RESIDENT + OUTSIDE_THE_ALLOCATOR)
    return sum(components.values()) - kept


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuMemory:
    """Memory of the `count` equal GPUs of one role. `details` splits components: {"engine_budget": {"weights": ..}}."""

    role: GpuRole
    count: int
    capacity_bytes: int  # that this run may use of the GPU
    phases: tuple[PhaseMemory, ...]
    interval_bytes: tuple[int, int]  # of the peak, at the job's risk
    details: dict[str, dict[str, int]]
    # What PyTorch's allocator keeps where there is room, as a share of what comes and goes, and by how much more it may
    # be at the job's risk (planner/memory/slack.py).
    cache_share: float = 0.0
    cache_reach: float = 0.0
    nvidia_smi_miss: float = 0.0  # by how much more the driver showed in published runs (planner/confidence.py)
    peak: PhaseMemory = field(init=False)  # the heaviest phase, the first of equals

    def __post_init__(self) -> None:
        object.__setattr__(self, "peak", max(self.phases, key=TOTAL_BYTES))

    @property
    def peak_bytes(self) -> int:
        return self.peak.total_bytes

    @property
    def peak_phase(self) -> Phase:
        return self.peak.name

    @property
    def reserved_bytes(self) -> int:
        """Return the memory that PyTorch's allocator reserves on a card with room, `torch.cuda.max_memory_reserved`.

        A colocated engine lies in the same process and allocator.
        """
        outside = max(phase.components.get("runtime", 0) for phase in self.phases)
        return self.nvidia_smi_bytes - outside

    @property
    def nvidia_smi_bytes(self) -> int:
        """Return the process's memory as the driver shows it: the allocator keeps cached blocks while there is room."""
        return min(
            max(self.capacity_bytes, self.peak_bytes),
            max(
                phase.total_bytes - phase.components.get("fragmentation", 0) + self._cache_bytes(phase)
                for phase in self.phases
            ),
        )

    @property
    def nvidia_smi_interval_bytes(self) -> tuple[int, int]:
        """Interval of `nvidia_smi_bytes` from those of the peak and of the cache, at the job's risk.

        The upper end is at least what nine of ten published runs stayed below; no card shows more than it has.
        """
        shown, most = self.nvidia_smi_bytes, max(self.capacity_bytes, self.interval_bytes[1])
        reach = self.nvidia_smi_reach_bytes
        high = max(shown + reach, shown * (1 + self.nvidia_smi_miss))
        return max(0, min(self.interval_bytes[0], shown), int(shown - reach)), min(most, int(high))

    @property
    def nvidia_smi_reach_bytes(self) -> float:
        """Half of that interval, on a card without a limit."""
        cache = max(self.cache_reach * coming_and_going_bytes(phase.components) for phase in self.phases)
        return math.hypot(self.interval_bytes[1] - self.peak_bytes, cache)

    def _cache_bytes(self, phase: PhaseMemory) -> int:
        """The allocator's cache in a phase, its slack included."""
        cache = int(self.cache_share * coming_and_going_bytes(phase.components))
        return max(cache, phase.components.get("fragmentation", 0))


@dataclass(frozen=True, kw_only=True, slots=True)
class Throughput:
    """Speed of a run: trained tokens per second of all GPUs, and the seconds of an optimizer step, by cause too."""

    tokens_per_second: float
    step_seconds: float
    seconds: dict[str, float]
    evidence: Evidence


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Memory and speed of a candidate.

    `fits`: on every GPU the upper bound of the peak is within the capacity, and on a node the main memory is enough.
    """

    candidate: Candidate
    fits: bool
    fit_probability: float
    evidence: Evidence
    gpus: tuple[GpuMemory, ...]
    host_peak_bytes: int  # on one node
    host_capacity_bytes: int
    throughput: Throughput
    reasons: tuple[str, ...]
    versions: tuple[tuple[str, str], ...] = ()  # of the libraries in a dry run or probe
    device: ProbedOn = "none"  # that a probe of it ran on

    @property
    def over_bytes(self) -> int:
        """Bytes by which the upper bound of the peak exceeds the capacity on the worst GPU; 0 or less if it fits."""
        return max(gpu.interval_bytes[1] - gpu.capacity_bytes for gpu in self.gpus)

    @property
    def host_over_bytes(self) -> int:
        """Bytes by which the main memory of a node is too small; 0 or less if it is enough."""
        return self.host_peak_bytes - self.host_capacity_bytes

    @property
    def distance(self) -> tuple[int, int]:
        """Sort key of candidates that do not fit: bytes too many on the worst GPU, then those on a node.

        Main memory is the easier one to add.
        """
        return max(self.over_bytes, 0), max(self.host_over_bytes, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseDifference:
    """One phase of a probed candidate on its heaviest GPU.

    `measured_bytes`: all bytes in use. `needed_bytes`: the same without cached blocks that the allocator would have
    returned under pressure; compare it with `expected_bytes`, the estimate.
    """

    name: Phase
    expected_bytes: int
    measured_bytes: int
    needed_bytes: int

    @property
    def error(self) -> float:
        """Relative error of the expectation, expected / needed - 1: below 0 if too little was expected."""
        return self.expected_bytes / self.needed_bytes - 1

"""Uncertainty of an estimate: an interval of the peak, and the probability that it fits.

The errors of the components that a training pass allocates are taken as one error; those of other components are
independent. Each has a standard deviation proportional to its bytes:

    sigma^2 = (0.05 x pass)^2 + sum over the others of (share x bytes)^2
    P(fits) = Phi((capacity - peak) / sigma), with the normal distribution function Phi
"""

import math
from functools import lru_cache
from statistics import NormalDist

from planner.quantities import Component, GpuMemory, PhaseMemory

# Components that a forward and backward pass allocates, and the standard deviation of their sum as a share of it.
# Source: results/published.md, the eleven rows of LoRA with published allocated bytes: (measured - computed) / computed
# of these components has a mean of 0.02 and a standard deviation of 0.05. It is smaller against the dry run
# (results/estimated_vs_simulated.md).
PASS: frozenset[Component] = frozenset({"activations", "attention_scores", "transients", "autocast_copies", "loss"})
PASS_SPREAD = 0.05

# Standard deviations of other components as shares of them; those without a row are exact.
# Source: planner/memory/kv_cache.py (equal to the cache of `generate` but for one token); the allocator's slack:
# results/replay_slack.md; for the others the spread around the median of contexts and NCCL's buffers in out-of-memory
# messages, results/allocator_slack.md.
SPREAD: dict[Component, float] = {"kv_cache": 0.01, "communication": 0.10, "fragmentation": 1.0, "runtime": 0.20}
LEAST_SIGMA_BYTES = 2**20  # so that an interval is never a single number


def sigma_bytes(phase: PhaseMemory) -> float:
    """Standard deviation of a phase's total, in bytes."""
    passed, squares = 0, 0.0
    for component, size in phase.components.items():
        if component in PASS:
            passed += size
        elif component in SPREAD:
            squares += (SPREAD[component] * size) ** 2
    squares += (PASS_SPREAD * passed) ** 2
    return max(math.sqrt(squares), LEAST_SIGMA_BYTES)


@lru_cache(maxsize=64)
def quantile(risk: float) -> float:
    """The value that a standard normal variable exceeds with probability `risk`. Example: 2.33 for 0.01."""
    return NormalDist().inv_cdf(1 - risk)


def interval_bytes(phase: PhaseMemory, risk: float) -> tuple[int, int]:
    """Interval of a phase's bytes: they are below it with probability `risk`, and above it with probability `risk`."""
    reach = quantile(risk) * sigma_bytes(phase)
    return max(0, int(phase.total_bytes - reach)), int(phase.total_bytes + reach)


def fit_probability(phase: PhaseMemory, capacity_bytes: int) -> float:
    """Probability that a phase needs at most `capacity_bytes`."""
    return 0.5 * math.erfc((phase.total_bytes - capacity_bytes) / (sigma_bytes(phase) * math.sqrt(2)))


def fit_probability_of(gpu: GpuMemory, risk: float) -> float:
    """Probability that a GPU's peak fits, from its interval: the upper end is `quantile(risk)` sigma above the peak."""
    sigma = (gpu.interval_bytes[1] - gpu.peak_bytes) / quantile(risk)
    return 0.5 * math.erfc((gpu.peak_bytes - gpu.capacity_bytes) / (sigma * math.sqrt(2)))

"""How sure an estimate is: from the spread of its parts to an interval of the peak and a probability of fitting.

What one training pass allocates misses together, the other parts each on its own, all as a share of themselves:

    sigma^2 = (0.05 x pass)^2 + sum over the others of (share x bytes)^2;   P(fits) = Phi((capacity - peak) / sigma)
"""

import math
from functools import lru_cache
from statistics import NormalDist

from planner.quantities import Component, GpuMemory, PhaseMemory

# What a forward and backward pass allocates, and its standard deviation as a share of itself.
# Source: results/published.md, the eleven rows of LoRA whose allocated bytes were published: (measured - computed) over these components has
# a mean of 0.02 and a standard deviation of 0.05. Against the dry run it is less (results/estimated_vs_simulated.md).
PASS: frozenset[Component] = frozenset({"activations", "attention_scores", "transients", "autocast_copies", "loss"})
PASS_SPREAD = 0.05

# Standard deviation of the other parts; what is counted exactly has none.
# Source: planner/memory/kv_cache.py (equal to generate's cache but for a token), results/allocator_slack.md for the last three: contexts,
# NCCL's buffers and what the allocator could not give in out-of-memory messages, spread over the median.
SPREAD: dict[Component, float] = {"kv_cache": 0.01, "communication": 0.10, "fragmentation": 0.50, "runtime": 0.20}
LEAST_SIGMA_BYTES = 2**20  # an interval is never a point


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
    """How many standard deviations lie below the value that is exceeded with probability `risk`."""
    return NormalDist().inv_cdf(1 - risk)


def interval_bytes(phase: PhaseMemory, risk: float) -> tuple[int, int]:
    """The peak's interval: below it and above it with probability `risk` each."""
    reach = quantile(risk) * sigma_bytes(phase)
    return max(0, int(phase.total_bytes - reach)), int(phase.total_bytes + reach)


def fit_probability(phase: PhaseMemory, capacity_bytes: int) -> float:
    """Probability that a phase stays within the card."""
    return 0.5 * math.erfc((phase.total_bytes - capacity_bytes) / (sigma_bytes(phase) * math.sqrt(2)))


def fit_probability_of(gpu: GpuMemory, risk: float) -> float:
    """The same from an interval that is there already: its upper end is `quantile(risk)` standard deviations above the peak."""
    sigma = (gpu.interval_bytes[1] - gpu.peak_bytes) / quantile(risk)
    return 0.5 * math.erfc((gpu.peak_bytes - gpu.capacity_bytes) / (sigma * math.sqrt(2)))

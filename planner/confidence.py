"""How sure an estimate is: from the spread of each component to an interval of the peak and a probability of fitting.

Components miss independently of each other, each by a share of itself:

    sigma^2 = sum over components of (share x bytes)^2;   P(fits) = Phi((capacity - peak) / sigma)
"""

import math
from functools import lru_cache
from statistics import NormalDist

from planner.quantities import Component, PhaseMemory

# Standard deviation of each component as a share of itself. What is counted exactly has none.
# Source: `results/estimated_vs_simulated.md` for what a training pass allocates, `results/allocator_slack.md` for the allocator,
# `results/engine.md` for vLLM (its share of the card is set, not guessed), PEERS' range of 226 to 501 MiB for the context of a card.
SPREAD: dict[Component, float] = {
    "activations": 0.02,
    "attention_scores": 0.03,
    "transients": 0.10,
    "autocast_copies": 0.02,
    "loss": 0.03,
    "kv_cache": 0.01,
    "communication": 0.10,
    "fragmentation": 0.50,
    "runtime": 0.20,
}
LEAST_SIGMA_BYTES = 2**20  # an interval is never a point


def sigma_bytes(phase: PhaseMemory) -> float:
    """Standard deviation of a phase's total, in bytes."""
    squares = sum((SPREAD[component] * size) ** 2 for component, size in phase.components.items() if component in SPREAD)
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

"""Uncertainty of an estimate: an interval of the peak, and the probability that it fits.

The errors of the components that a training pass allocates are taken as one error; those of other components are
independent. Each has a standard deviation proportional to its bytes:

    sigma^2 = (0.05 x pass)^2 + sum over the others of (share x bytes)^2
    P(fits) = Phi((capacity - peak) / sigma), with the normal distribution function Phi

but never more than published runs of the same kind carry (`earned_probability`), and the interval reaches at least as
far as those runs but the worst (`reach`).
"""

import math
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist
from typing import Literal

import msgspec

from planner.candidate import Candidate
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

# Kinds of job whose errors are alike: each GPU holds all weights, or gathers those of a layer from the others.
Kind = Literal["whole", "gathered"]
KINDS: tuple[Kind, ...] = ("whole", "gathered")
Figure = Literal["need", "nvidia_smi"]  # what a published run is compared with
NVIDIA_SMI_LEVEL = 0.9  # share of published runs below the upper end of the interval of nvidia-smi's figure
COMPARISONS = Path(__file__).parent / "data" / "comparisons.jsonl"  # written by scripts/compare_published.py


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """A published run beside its estimate.

    `score`: measured less predicted bytes, in standard deviations of the estimate. `miss`: the same over the predicted
    bytes. `figure`: "need" where probabilities rest on it, "nvidia_smi" where the interval of that figure does.
    """

    id: str
    source: str
    kind: Kind
    figure: Figure
    score: float
    miss: float


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


def interval_bytes(phases: Iterable[PhaseMemory], reach: float) -> tuple[int, int]:
    """Interval of the peak over phases: each end is the largest of the phases' ends.

    The interval of a phase is `reach` standard deviations to both sides. A lighter phase that is less certain than the
    heaviest one can reach higher: a backward pass beside a vLLM engine's fixed budget.
    """
    ends = [(phase.total_bytes, reach * sigma_bytes(phase)) for phase in phases]
    return max(0, int(max(total - sigma for total, sigma in ends))), int(max(total + sigma for total, sigma in ends))


def fit_probability(phase: PhaseMemory, capacity_bytes: int) -> float:
    """Probability that a phase needs at most `capacity_bytes`."""
    return 0.5 * math.erfc((phase.total_bytes - capacity_bytes) / (sigma_bytes(phase) * math.sqrt(2)))


def fit_probability_of(gpu: GpuMemory, risk: float, kind: Kind) -> float:
    """Probability that a GPU's peak fits, from its interval: the upper end is `reach(kind, risk)` sigma above it."""
    sigma = (gpu.interval_bytes[1] - gpu.peak_bytes) / reach(kind, risk)
    score = (gpu.capacity_bytes - gpu.peak_bytes) / sigma
    return min(NormalDist().cdf(score), earned_probability(kind, score))


# -- what published runs carry -----------------------------------------------------------------------------------------


def kind_of(candidate: Candidate) -> Kind:
    """The kind of job that a candidate is compared with."""
    gathers = candidate.sharding in ("zero3", "fsdp2") and candidate.num_processes > 1
    return "gathered" if gathers else "whole"


@lru_cache(maxsize=1)
def comparisons() -> dict[Kind, tuple[Comparison, ...]]:
    """The published runs that stand behind a probability, by kind of job."""
    return {kind: _compared(kind, "need") for kind in KINDS}


def _compared(kind: Kind, figure: Figure) -> tuple[Comparison, ...]:
    found = (msgspec.json.decode(line, type=Comparison) for line in COMPARISONS.read_bytes().splitlines())
    return tuple(one for one in found if one.kind == kind and one.figure == figure)


@lru_cache(maxsize=8)
def nvidia_smi_miss(kind: Kind) -> float:
    """The share by which nvidia-smi may show more than computed: 90 % of the published runs of a kind stay below it.

    Split-conformal, as `earned_probability`: the ceil(0.9 (n + 1))-th of n misses in order; of too few, the largest.
    """
    misses = sorted(run.miss for run in _compared(kind, "nvidia_smi"))
    rank = min(math.ceil(NVIDIA_SMI_LEVEL * (len(misses) + 1)), len(misses))
    return max(misses[rank - 1], 0.0)


@lru_cache(maxsize=4096)
def earned_probability(kind: Kind, score: float) -> float:
    """The most that can be said of a need that is `score` standard deviations below the capacity (split-conformal).

        P = (published runs whose measured figure was at most `score` standard deviations above ours) / (runs + 1)

    It holds whatever the distribution of the errors, if the job is like the published ones.
    Source: Vovk et al., Algorithmic Learning in a Random World (2005); tests/test_confidence.py.
    """
    runs = comparisons()[kind]
    return sum(run.score <= score for run in runs) / (len(runs) + 1)


@lru_cache(maxsize=64)
def reach(kind: Kind, risk: float) -> float:
    """Standard deviations from a peak to the ends of its interval.

    Those of a normal distribution, or those within which published runs stayed, if that is more: the share 1 - risk of
    them, but never the worst one alone (split-conformal: the ceil((1 - risk)(n + 1))-th of n scores in order).
    """
    scores = sorted(run.score for run in comparisons()[kind])
    rank = min(math.ceil((1 - risk) * (len(scores) + 1)), len(scores) - 1)
    return max(quantile(risk), scores[rank - 1])


def most_earned(kind: Kind) -> float:
    """The highest probability that the published runs of a kind carry."""
    return earned_probability(kind, math.inf)


def worst_miss(kind: Kind) -> float:
    """The largest share by which a published run of a kind needed more than predicted."""
    return max(run.miss for run in comparisons()[kind])

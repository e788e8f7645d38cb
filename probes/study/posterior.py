"""What probes have taught about the device and its runtime: a Gaussian over a few constants, and what it says of a candidate's memory.

An estimate's phase needs `total + sum of (bytes x constant)`. The constants belong to the card, the driver, the allocator and the kernels,
never to a model. A probe that fits gives equalities, one that runs out of memory inequalities; an inequality replaces the Gaussian by the
one with the same mean and covariance as the cut one (assumed density filtering; Minka 2001, "Expectation propagation", section 3.2).
"""

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from planner.confidence import PASS, PASS_SPREAD, SPREAD
from planner.measurements.measurement import DeviceName
from planner.quantities import Component, Estimate, Phase, PhaseMemory
from planner.units import GIB, MIB

Kind = Literal["equal", "at_least", "at_most"]
Coefficients = Mapping[str, float]  # constant -> bytes for one of it
Vector = Any  # a numpy array of floats


@dataclass(frozen=True, slots=True)
class Prior:
    """Mean and standard deviation of a constant before any probe."""

    mean: float
    deviation: float


# By the part of a constant's name before its colon. Shares are of the bytes named.
PRIORS: dict[str, Prior] = {
    # bytes outside torch beside what the estimate counts: the spread of contexts over all cards of results/allocator_slack.md
    "runtime": Prior(0.0, 184 * MIB),
    # of what is allocated, beside the 1.1 % counted: mean 1.7 % and deviation 2.0 % of the rows of results/allocator_slack.jsonl that do not gather
    "slack": Prior(0.006, 0.020),
    "activations": Prior(0.0, PASS_SPREAD),  # of one training pass: planner/confidence.py
    # of what one attention implementation's layers keep, and of one structure's pass: formulas against the dry run,
    # results/estimated_vs_simulated.md, whose errors are 0.4 % in the mean and 5 % at worst, most where attention differs
    "kernel": Prior(0.0, 0.02),
    "structure": Prior(0.0, 0.01),
    "engine": Prior(0.0, 0.015),  # of the engine's bytes: results/engine.md, its mean absolute error
    "communication": Prior(0.0, SPREAD["communication"]),
    "kv_cache": Prior(0.0, SPREAD["kv_cache"]),
    # bytes that torch counts for an engine in its process, which depend on its sleep mode: nothing is assumed
    "counted": Prior(0.0, 256 * GIB),
}
# What is left of a phase when all constants are known: sizes that the allocator rounds (to 2 MiB: c10/cuda/CUDACachingAllocator.cpp).
RESIDUAL_SHARE = 0.001
RESIDUAL_BYTES = 2 * MIB

# What does not count against a device's capacity, and what is no unknown there.
UNCHARGED: dict[DeviceName, frozenset[Component]] = {
    "cuda": frozenset(),
    "simulated": frozenset(),
    "cpu": frozenset({"runtime", "fragmentation"}),
}
KNOWN: dict[DeviceName, frozenset[str]] = {
    "cuda": frozenset(),
    "simulated": frozenset({"runtime"}),
    "cpu": frozenset({"runtime", "slack"}),
}
OUTSIDE_TORCH: frozenset[Component] = frozenset({"runtime", "engine", "fragmentation"})
OF_KERNELS: tuple[Component, ...] = ("activations", "attention_scores")
# A phase so much lighter than the heaviest cannot become it.
LIGHT = 0.7
# What is so many deviations off is a sign that the device is another than the priors speak of: they are widened, and an equality is taken for less exact.
SURPRISE = 4.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One phase on the GPUs of one role: its bytes by the estimate, and what they move with."""

    phase: Phase
    gpus: int  # index in the estimate's gpus
    total_bytes: float
    allocated_bytes: float  # of the trainer's tensors
    outside_bytes: float  # of the process beside torch: runtime and NCCL
    slack_bytes: float
    engine_bytes: float
    capacity_bytes: int
    coefficients: Coefficients

    def covers(self, other: "Row") -> bool:
        """Whether this phase needs at least as much as another of the same structure, whatever the constants are."""
        return self.total_bytes >= other.total_bytes and all(
            self.coefficients.get(name, 0) >= size for name, size in other.coefficients.items()
        )


def rows_of(estimate: Estimate, structure: str, nccl: int, device: DeviceName) -> tuple[Row, ...]:
    """The phases of an estimate that count on a device. `nccl`: bytes of NCCL's buffers in the estimate."""
    names = (f"kernel:{estimate.candidate.attn_implementation}", f"structure:{structure}")
    return tuple(
        row_of(phase, index, gpu.capacity_bytes, names, nccl if gpu.role != "vllm" else 0, device)
        for index, gpu in enumerate(estimate.gpus)
        for phase in gpu.phases
    )


def row_of(
    phase: PhaseMemory, gpus: int, capacity_bytes: int, names: tuple[str, str], nccl: int, device: DeviceName
) -> Row:
    charged = {name: size for name, size in phase.components.items() if name not in UNCHARGED[device]}
    if device == "cpu" and nccl:
        charged["communication"] = charged["communication"] - nccl
        nccl = 0
    allocated = sum(size for name, size in charged.items() if name not in OUTSIDE_TORCH) - nccl
    passed = sum(size for name, size in charged.items() if name in PASS)
    coefficients: dict[str, float] = {
        "runtime": 1.0,
        "slack": allocated,
        "activations": passed,
        names[0]: sum(charged.get(name, 0) for name in OF_KERNELS),
        names[1]: passed,
        "engine": charged.get("engine", 0),
        "communication": charged.get("communication", 0) - nccl,
        "kv_cache": charged.get("kv_cache", 0),
    }
    return Row(
        phase=phase.name,
        gpus=gpus,
        total_bytes=sum(charged.values()),
        allocated_bytes=allocated,
        outside_bytes=charged.get("runtime", 0) + nccl,
        slack_bytes=charged.get("fragmentation", 0),
        engine_bytes=charged.get("engine", 0),
        capacity_bytes=capacity_bytes,
        coefficients={name: size for name, size in coefficients.items() if size and name not in KNOWN[device]},
    )


def heavy(rows: Sequence[Row]) -> list[Row]:
    """The rows that could be the heaviest of their GPUs, or too much for them."""
    most: dict[int, float] = {}
    for each in rows:
        most[each.gpus] = min(max(most.get(each.gpus, 0.0), each.total_bytes), each.capacity_bytes)
    return [each for each in rows if each.total_bytes >= LIGHT * most[each.gpus]]


# -- the Gaussian ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """`sum of (coefficient x constant)` is, is at least or is at most `value`, give or take `noise`: all in bytes."""

    kind: Kind
    coefficients: Coefficients
    value: float
    noise: float


@lru_cache(maxsize=1024)
def prior_of(name: str) -> Prior:
    return PRIORS[name.partition(":")[0]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Belief:
    """Constants that something was seen of, their means and their covariance; all others are as their priors say."""

    names: tuple[str, ...] = ()
    mean: Vector
    covariance: Vector
    doubt: float = (
        1.0  # all deviations are so many times those of the priors, and what is left unexplained is as much larger
    )
    at: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "at", {name: index for index, name in enumerate(self.names)})

    def split(self, coefficients: Coefficients) -> tuple[Vector, float, float]:
        """What was seen as a vector; mean and variance of what was not."""
        seen = np.zeros(len(self.names))
        mean = variance = 0.0
        for name, size in coefficients.items():
            index = self.at.get(name)
            if index is not None:
                seen[index] = size
            else:
                prior = prior_of(name)
                mean, variance = mean + size * prior.mean, variance + (self.doubt * size * prior.deviation) ** 2
        return seen, mean, variance

    def predicted(self, coefficients: Coefficients) -> tuple[float, float]:
        """Mean and standard deviation of a sum."""
        seen, mean, variance = self.split(coefficients)
        return mean + float(seen @ self.mean), math.sqrt(max(variance + float(seen @ self.covariance @ seen), 0.0))

    def needs(self, row: Row) -> tuple[float, float]:
        """Bytes of a phase: mean and standard deviation."""
        mean, deviation = self.predicted(row.coefficients)
        return row.total_bytes + mean, math.hypot(deviation, self.doubt * residual_bytes(row.total_bytes))

    def fit_probability(self, rows: Iterable[Row]) -> float:
        """An upper bound of the probability that every phase stays within its card: that of the worst phase."""
        return min(
            (
                chance((each.capacity_bytes - mean) / deviation)
                for each in rows
                for mean, deviation in (self.needs(each),)
            ),
            default=1.0,
        )

    def constant(self, name: str) -> tuple[float, float]:
        return self.predicted({name: 1.0})


def no_belief(doubt: float = 1.0) -> Belief:
    return Belief(mean=np.zeros(0), covariance=np.zeros((0, 0)), doubt=doubt)


def residual_bytes(total_bytes: float) -> float:
    return RESIDUAL_BYTES + RESIDUAL_SHARE * total_bytes


def chance(score: float) -> float:
    """The standard normal distribution."""
    return 0.5 * math.erfc(-score / math.sqrt(2))


def believed(observations: Sequence[Observation]) -> Belief:
    """The prior, updated: first by what is known exactly, then by inequalities in the order in which they were seen.

    Where something was seen that the priors hardly allow, they are widened until they do: the device is another than they speak of, and what
    they say of other candidates is as uncertain.
    """
    doubt = max((surprise(each) / SURPRISE for each in observations), default=1.0)
    belief = widened(no_belief(max(doubt, 1.0)), [name for each in observations for name in each.coefficients])
    for each in sorted(observations, key=lambda each: each.kind != "equal"):
        belief = updated(belief, each)
    return belief


def surprise(seen: Observation) -> float:
    """How many deviations what was seen is from what the priors say; nothing for an inequality that they hold to."""
    mean, deviation = no_belief().predicted(seen.coefficients)
    score = (seen.value - mean) / math.hypot(deviation, seen.noise)
    return {"equal": abs(score), "at_least": score, "at_most": -score}[seen.kind]


def widened(belief: Belief, names: Iterable[str]) -> Belief:
    new = [name for name in dict.fromkeys(names) if name not in belief.names]
    old = len(belief.names)
    mean, covariance = np.zeros(old + len(new)), np.zeros((old + len(new), old + len(new)))
    mean[:old], covariance[:old, :old] = belief.mean, belief.covariance
    for index, name in enumerate(new, old):
        mean[index], covariance[index, index] = prior_of(name).mean, (belief.doubt * prior_of(name).deviation) ** 2
    return Belief(names=(*belief.names, *new), mean=mean, covariance=covariance, doubt=belief.doubt)


LEAST_SCORE = -30.0  # beyond it the normal distribution's tail is not a double


def updated(belief: Belief, seen: Observation) -> Belief:
    """The belief after one observation.

    equal:     gain = S h / v;  mean += gain (y - m);  S -= gain (S h)^T                  with m = h mean, v = h S h + noise^2 >= ((y - m) / 4)^2
    at least:  mean += S h r / sqrt(v);  S -= S h (S h)^T r (r + a) / v                   with a = (m - y) / sqrt(v), r = phi(a) / Phi(a)
    """
    h, _, _ = belief.split(seen.coefficients)
    sign = -1.0 if seen.kind == "at_most" else 1.0
    spread = belief.covariance @ h
    variance = float(h @ spread) + (belief.doubt * seen.noise) ** 2
    miss = sign * (float(h @ belief.mean) - seen.value)
    if seen.kind == "equal":
        variance = max(variance, (miss / SURPRISE) ** 2)
        step, shrink = -miss / variance, 1.0 / variance
    else:
        score = max(miss / math.sqrt(variance), LEAST_SCORE)
        ratio = math.exp(-score * score / 2) / math.sqrt(2 * math.pi) / chance(score)
        step, shrink = sign * ratio / math.sqrt(variance), ratio * (ratio + score) / variance
    covariance = belief.covariance - shrink * np.outer(spread, spread)
    return Belief(
        names=belief.names,
        mean=belief.mean + spread * step,
        covariance=(covariance + covariance.T) / 2,
        doubt=belief.doubt,
    )


# -- samples -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Draws:
    """Worlds that the belief allows: each constant's value in each of `count` of them, the same for the same seed."""

    belief: Belief
    count: int
    seed: int
    seen: Vector  # names x worlds

    def of(self, name: str) -> Vector:
        if name in self.belief.at:
            return self.seen[self.belief.at[name]]
        prior = prior_of(name)
        noise = np.random.default_rng((self.seed, zlib.crc32(name.encode()))).standard_normal(self.count)
        return prior.mean + self.belief.doubt * prior.deviation * noise

    def fit(self, rows: Sequence[Row]) -> Vector:
        """In which worlds all these phases stay within their cards."""
        within: Vector = np.ones(self.count, dtype=bool)
        for each in rows:
            total = each.total_bytes + sum(size * self.of(name) for name, size in each.coefficients.items())
            within &= total <= each.capacity_bytes
        return within


def draws(belief: Belief, count: int, seed: int) -> Draws:
    size = len(belief.names)
    scale = np.sqrt(np.maximum(np.diag(belief.covariance), 0.0))
    units = np.where(
        scale > 0, scale, 1.0
    )  # shares and bytes side by side: their covariances have no eigenvectors in floating point, correlations do
    values, vectors = (
        np.linalg.eigh(belief.covariance / np.outer(units, units)) if size else (np.zeros(0), np.zeros((0, 0)))
    )
    noise = np.random.default_rng(seed).standard_normal((size, count))
    seen = belief.mean[:, None] + scale[:, None] * (vectors @ (np.sqrt(np.maximum(values, 0.0))[:, None] * noise))
    return Draws(belief=belief, count=count, seed=seed, seen=seen)

"""Posterior of the device's constants: a Gaussian that probes update, and what it predicts for a candidate's memory.

A phase of an estimate needs `total_bytes + sum of (coefficient x constant)` bytes. The constants are errors of the
estimate that belong to the GPU, the driver, the allocator and the kernels, never to a model. A probe that fits gives
equalities, one that runs out of memory gives inequalities. An inequality cuts the Gaussian; it is replaced by the
Gaussian with the mean and covariance of the cut one (assumed density filtering; Minka 2001, "Expectation propagation",
section 3.2).
"""

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, Literal

import numpy as np
from msgspec import Struct

from planner.candidate import Candidate
from planner.confidence import JobKind, fit, kind_of
from planner.measurements.measurement import DeviceName
from planner.quantities import PASS, Component, Estimate, Phase, PhaseMemory
from planner.units import GIB, MIB

BoundKind = Literal["equal", "at_least", "at_most"]
Coefficients = Mapping[str, float]  # name of a constant -> bytes for each unit of it
Vector = Any  # a numpy array of floats
STANDARD_LOGISTIC_DEVIATION = math.pi / math.sqrt(3)


class Prior(Struct, frozen=True):
    """Mean and standard deviation of a constant before any probe."""

    mean: float
    deviation: float


def fitted_prior(unit: float) -> Prior:
    """Return mean and standard deviation of a share whose error is logistic, as planner/confidence.py has it."""
    return Prior(fit().location * unit, STANDARD_LOGISTIC_DEVIATION * unit)


# Unit of the formulas' share of the error of jobs with whole models: what is not the driver's and the allocator's.
FORMULAS_UNIT = math.sqrt(fit().units["whole"] ** 2 - fit().units["unseen"] ** 2)


def formulas_bytes(kind: JobKind, need: float, allocated: float, passed: float) -> float:
    """Return the bytes that "formulas" is a share of: with it, "slack" and "activations" make the unit of the verdict.

        (formulas x FORMULAS_UNIT)^2 = (unit x need)^2 - (unseen x allocated)^2 - (pass_unit x passed)^2

    About the need, without an engine; more where layers are gathered from other GPUs, less where most is a pass.
    """
    units = fit().units
    rest = (units[kind] * need) ** 2 - (units["unseen"] * allocated) ** 2 - (fit().pass_unit * passed) ** 2
    return math.sqrt(max(rest, 0.0)) / FORMULAS_UNIT


# Priors, by the part of a constant's name before its colon. "runtime" and "counted" are bytes, all others shares.
# Before any probe a study is as uncertain as the verdict of a plan: both rest on one fit (results/verdict.md).
PRIORS: dict[str, Prior] = {
    # bytes outside torch beyond the estimate: the spread of CUDA contexts over all GPUs of results/allocator_slack.md
    "runtime": Prior(0.0, 184 * MIB),
    "slack": fitted_prior(fit().units["unseen"]),  # share of the allocated bytes
    "activations": fitted_prior(fit().pass_unit),  # share of the bytes of a training pass
    "formulas": Prior(  # share of `formulas_bytes`
        fit().location * (fit().units["whole"] - fit().units["unseen"]), STANDARD_LOGISTIC_DEVIATION * FORMULAS_UNIT
    ),
    "engine": fitted_prior(fit().units["engine"]),  # share of the engine's bytes
    # "kernel": share of the activations that one attention implementation keeps; "structure": share of the bytes of one
    # structure's pass. Source: formulas beside the emulated card (results/emulated.jsonl); tests/test_study.py has the
    # errors of one model between its structures, and between attention implementations.
    "kernel": Prior(0.0, 0.02),
    "structure": Prior(0.0, 0.01),
    # NCCL's buffers in out-of-memory messages around their median, results/allocator_slack.md
    "communication": Prior(0.0, 0.10),
    "kv_cache": Prior(0.0, 0.01),  # planner/memory/generation.py: equal to the cache of `generate` but for one token
    # Logits of a micro-batch in float32 that the CPU's kernels keep beyond the estimate, which is of a GPU's kernels.
    # Source: results/cpu_kernels.md
    "logits": Prior(2.0, 1.9),
    # bytes that torch counts for a colocated engine, which depend on its sleep mode: the prior is uninformative
    "counted": Prior(0.0, 256 * GIB),
}
# Error of a phase that no constant explains: the allocator rounds sizes to 2 MiB (c10/cuda/CUDACachingAllocator.cpp).
RESIDUAL_SHARE = 0.001
RESIDUAL_BYTES = 2 * MIB

# Components that do not count against a device's capacity.
UNCHARGED: dict[DeviceName, frozenset[Component]] = {
    "cuda": frozenset(),
    "emulated": frozenset(),
    "cpu": frozenset({"runtime", "fragmentation"}),
}
# Constants that are 0 on a device by definition.
KNOWN: dict[DeviceName, frozenset[str]] = {
    "cuda": frozenset({"logits"}),
    "emulated": frozenset({"runtime", "logits"}),
    "cpu": frozenset({"runtime", "slack"}),
}
WITH_LOGITS: frozenset[Phase] = frozenset({"loss", "backward"})
OUTSIDE_TORCH: frozenset[Component] = frozenset({"runtime", "engine", "fragmentation"})
KERNEL_COMPONENTS: tuple[Component, ...] = ("activations", "attention_scores")
# A phase below this share of the heaviest one cannot become the heaviest.
LIGHT_SHARE = 0.7
# An observation that is this many standard deviations from its prediction shows that the priors do not describe the
# device: the priors are widened, and the variance of an equality is raised, until it is no further off than this.
MAX_DEVIATIONS = 4.0


class PhaseModel(Struct, frozen=True, kw_only=True):
    """Linear model of one phase's memory on the GPUs of one role.

    It needs `total_bytes + sum of (coefficient x constant)` bytes: the estimate, and its sensitivity to each constant.
    """

    phase: Phase
    gpus: int  # index in the estimate's gpus
    total_bytes: float
    allocated_bytes: float  # of the trainer's tensors
    outside_bytes: float  # of the process outside torch's allocator: runtime and NCCL
    slack_bytes: float
    engine_bytes: float
    capacity_bytes: int
    coefficients: Coefficients

    def covers(self, other: "PhaseModel") -> bool:
        """Return whether this phase needs at least as much as another of its structure, whatever the constants are."""
        return self.total_bytes >= other.total_bytes and all(
            self.coefficients.get(name, 0) >= size for name, size in other.coefficients.items()
        )


def phase_models(estimate: Estimate, structure: str, nccl: int, device: DeviceName) -> tuple[PhaseModel, ...]:
    """Return the models of all phases of an estimate. `nccl`: bytes of NCCL's buffers within it."""
    names = (f"kernel:{estimate.candidate.attn_implementation}", f"structure:{structure}")
    return tuple(
        phase_model(
            phase,
            index,
            gpu.capacity_bytes,
            names,
            nccl if gpu.role != "vllm" else 0,
            device,
            float32_logits_bytes(estimate.candidate) if phase.name in WITH_LOGITS else 0,
            job=kind_of(estimate.candidate),
        )
        for index, gpu in enumerate(estimate.gpus)
        for phase in gpu.phases
    )


def float32_logits_bytes(candidate: Candidate) -> int:
    """Return the bytes of a micro-batch's logits in float32: 4 x rows x tokens x vocabulary."""
    rows = candidate.per_device_train_batch_size * candidate.method_row.rows_per_sample
    return 4 * rows * candidate.row_tokens * candidate.model.vocab_size


def phase_model(
    phase: PhaseMemory,
    gpus: int,
    capacity_bytes: int,
    names: tuple[str, str],
    nccl: int,
    device: DeviceName,
    logits: int = 0,
    *,
    job: JobKind,
) -> PhaseModel:
    """Return the model of one phase. `names`: the constants of its attention kernel and of its structure."""
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
        "formulas": formulas_bytes(job, sum(charged.values()) - charged.get("engine", 0), allocated, passed),
        names[0]: sum(charged.get(name, 0) for name in KERNEL_COMPONENTS),
        names[1]: passed,
        "engine": charged.get("engine", 0),
        "communication": charged.get("communication", 0) - nccl,
        "kv_cache": charged.get("kv_cache", 0),
        "logits": logits,
    }
    return PhaseModel(
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


def heavy_phases(phases: Sequence[PhaseModel]) -> list[PhaseModel]:
    """Return the phases that could be the heaviest of their GPUs, or exceed them."""
    most: dict[int, float] = {}
    for each in phases:
        most[each.gpus] = min(max(most.get(each.gpus, 0.0), each.total_bytes), each.capacity_bytes)
    return [each for each in phases if each.total_bytes >= LIGHT_SHARE * most[each.gpus]]


# -- the Gaussian ------------------------------------------------------------------------------------------------------


class Observation(Struct, frozen=True, kw_only=True):
    """A constraint: `sum of (coefficient x constant)` equals, is at least, or is at most `value`; all in bytes.

    `noise`: its standard deviation.
    """

    kind: BoundKind
    coefficients: Coefficients
    value: float
    noise: float


@lru_cache(maxsize=1024)
def prior_of(name: str) -> Prior:
    """Return the prior of a constant, by the part of its name before the colon."""
    return PRIORS[name.partition(":")[0]]


class Belief(Struct, frozen=True, kw_only=True, eq=False, dict=True):
    """Gaussian over the constants that were observed (`names`); all others are independent, with their priors.

    `prior_scale`: factor on the standard deviations of all priors and on the residual, at least 1.
    """

    names: tuple[str, ...] = ()
    mean: Vector
    covariance: Vector
    prior_scale: float = 1.0

    @cached_property
    def at(self) -> dict[str, int]:
        """Return the index of each name in `mean` and `covariance`."""
        return {name: index for index, name in enumerate(self.names)}

    def split(self, coefficients: Coefficients) -> tuple[Vector, float, float]:
        """Split a sum: the coefficients of observed constants as a vector, mean and variance of the rest."""
        observed = np.zeros(len(self.names))
        mean = variance = 0.0
        for name, size in coefficients.items():
            index = self.at.get(name)
            if index is not None:
                observed[index] = size
            else:
                prior = prior_of(name)
                mean, variance = mean + size * prior.mean, variance + (self.prior_scale * size * prior.deviation) ** 2
        return observed, mean, variance

    def predict(self, coefficients: Coefficients) -> tuple[float, float]:
        """Return mean and standard deviation of `sum of (coefficient x constant)`."""
        observed, mean, variance = self.split(coefficients)
        deviation = math.sqrt(max(variance + float(observed @ self.covariance @ observed), 0.0))
        return mean + float(observed @ self.mean), deviation

    def needs(self, phase: PhaseModel) -> tuple[float, float]:
        """Return mean and standard deviation of the bytes that a phase needs."""
        mean, deviation = self.predict(phase.coefficients)
        return phase.total_bytes + mean, math.hypot(deviation, self.prior_scale * residual_bytes(phase.total_bytes))

    def fit_probability(self, phases: Iterable[PhaseModel]) -> float:
        """Return an upper bound of the probability that every phase fits its GPU: that of the least likely one."""
        return min(
            (
                normal_cdf((each.capacity_bytes - mean) / deviation)
                for each in phases
                for mean, deviation in (self.needs(each),)
            ),
            default=1.0,
        )

    def constant(self, name: str) -> tuple[float, float]:
        """Return mean and standard deviation of a constant."""
        return self.predict({name: 1.0})


def prior_belief(prior_scale: float = 1.0) -> Belief:
    """Return the belief before any observation."""
    return Belief(mean=np.zeros(0), covariance=np.zeros((0, 0)), prior_scale=prior_scale)


def residual_bytes(total_bytes: float) -> float:
    """Return the standard deviation of the part of a phase that no constant explains."""
    return RESIDUAL_BYTES + RESIDUAL_SHARE * total_bytes


def normal_cdf(score: float) -> float:
    """Return the cumulative distribution function of the standard normal distribution."""
    return 0.5 * math.erfc(-score / math.sqrt(2))


def belief_from(observations: Sequence[Observation]) -> Belief:
    """Return the posterior: the prior updated by all equalities, then by the inequalities in the given order.

    If an observation is more than `MAX_DEVIATIONS` standard deviations from the prior, the priors do not describe this
    device: all their deviations are multiplied until it is not, so that other candidates become as uncertain.
    """
    prior_scale = max((deviations_from_prior(each) / MAX_DEVIATIONS for each in observations), default=1.0)
    belief = add_constants(
        prior_belief(max(prior_scale, 1.0)), [name for each in observations for name in each.coefficients]
    )
    for each in sorted(observations, key=lambda each: each.kind != "equal"):
        belief = update(belief, each)
    return belief


def deviations_from_prior(observation: Observation) -> float:
    """Return how many standard deviations an observation is from the prior; at most 0 for an inequality that holds."""
    mean, deviation = prior_belief().predict(observation.coefficients)
    score = (observation.value - mean) / math.hypot(deviation, observation.noise)
    return {"equal": abs(score), "at_least": score, "at_most": -score}[observation.kind]


def add_constants(belief: Belief, names: Iterable[str]) -> Belief:
    """Add constants to the Gaussian, with their priors and independent of those in it."""
    new = [name for name in dict.fromkeys(names) if name not in belief.names]
    old = len(belief.names)
    mean, covariance = np.zeros(old + len(new)), np.zeros((old + len(new), old + len(new)))
    mean[:old], covariance[:old, :old] = belief.mean, belief.covariance
    for index, name in enumerate(new, old):
        mean[index], covariance[index, index] = (
            prior_of(name).mean,
            (belief.prior_scale * prior_of(name).deviation) ** 2,
        )
    return Belief(names=(*belief.names, *new), mean=mean, covariance=covariance, prior_scale=belief.prior_scale)


LEAST_SCORE = -30.0  # below it the normal distribution's tail underflows to 0


def update(belief: Belief, observation: Observation) -> Belief:
    """Return the belief after one observation.

        equal:     gain = S h / v;  mean += gain (y - m);  S -= gain (S h)^T
        at least:  mean += S h r / sqrt(v);  S -= S h (S h)^T r (r + a) / v
        with       m = h mean, v = h S h + noise^2 (equal: at least ((y - m) / 4)^2),
                   a = (m - y) / sqrt(v), r = phi(a) / Phi(a)

    h: coefficients, y: the observation's value, S: covariance, phi and Phi: density and distribution function of the
    standard normal distribution. "at most" is "at least" with the signs reversed.
    """
    h, _, _ = belief.split(observation.coefficients)
    sign = -1.0 if observation.kind == "at_most" else 1.0
    spread = belief.covariance @ h
    variance = float(h @ spread) + (belief.prior_scale * observation.noise) ** 2
    miss = sign * (float(h @ belief.mean) - observation.value)
    if observation.kind == "equal":
        variance = max(variance, (miss / MAX_DEVIATIONS) ** 2)
        step, shrink = -miss / variance, 1.0 / variance
    else:
        score = max(miss / math.sqrt(variance), LEAST_SCORE)
        ratio = math.exp(-score * score / 2) / math.sqrt(2 * math.pi) / normal_cdf(score)
        step, shrink = sign * ratio / math.sqrt(variance), ratio * (ratio + score) / variance
    covariance = belief.covariance - shrink * np.outer(spread, spread)
    return Belief(
        names=belief.names,
        mean=belief.mean + spread * step,
        covariance=(covariance + covariance.T) / 2,
        prior_scale=belief.prior_scale,
    )


# -- samples -----------------------------------------------------------------------------------------------------------


class Samples(Struct, frozen=True, kw_only=True, eq=False):
    """Samples of a belief: values of all constants in each of `count` samples, the same for the same seed.

    `observed`: values of the constants in `belief.names`, names x samples. Others are drawn when they are needed.
    """

    belief: Belief
    count: int
    seed: int
    observed: Vector

    def values(self, name: str) -> Vector:
        """Return a constant's value in each sample."""
        if name in self.belief.at:
            return self.observed[self.belief.at[name]]
        prior = prior_of(name)
        noise = np.random.default_rng((self.seed, zlib.crc32(name.encode()))).standard_normal(self.count)
        return prior.mean + self.belief.prior_scale * prior.deviation * noise

    def fit(self, phases: Sequence[PhaseModel]) -> Vector:
        """Return, as booleans, the samples in which all these phases fit their GPUs."""
        within: Vector = np.ones(self.count, dtype=bool)
        for each in phases:
            total = each.total_bytes + sum(size * self.values(name) for name, size in each.coefficients.items())
            within &= total <= each.capacity_bytes
        return within


def draw_samples(belief: Belief, count: int, seed: int) -> Samples:
    """Draw samples of a belief.

    The eigenvectors are those of the correlations: a covariance of shares beside bytes is too badly scaled for floats.
    """
    size = len(belief.names)
    scale = np.sqrt(np.maximum(np.diag(belief.covariance), 0.0))
    units = np.where(scale > 0, scale, 1.0)
    values, vectors = (
        np.linalg.eigh(belief.covariance / np.outer(units, units)) if size else (np.zeros(0), np.zeros((0, 0)))
    )
    noise = np.random.default_rng(seed).standard_normal((size, count))
    observed = belief.mean[:, None] + scale[:, None] * (vectors @ (np.sqrt(np.maximum(values, 0.0))[:, None] * noise))
    return Samples(belief=belief, count=count, seed=seed, observed=observed)

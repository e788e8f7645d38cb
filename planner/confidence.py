"""Confidence of an estimate: interval of a peak, probability that a candidate runs, and similar published runs.

The error of a need, measured less predicted bytes, is logistic around a location, in units that depend on what the
memory is (`unit_bytes`):

    P(runs) = 1 / (1 + exp(location - margin / unit)), margin = card less need

The units and the location are fitted to published figures and to published runs that ran or ran out of memory
(scripts/fit_verdict.py, results/verdict.md).
"""

import math
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist
from typing import Literal, NamedTuple

import msgspec

from planner.candidate import Candidate
from planner.quantities import GpuMemory, PhaseMemory

LEAST_UNIT_BYTES = 2**20  # so that an interval is never a single number

# Kinds of job whose errors are alike: each GPU holds all weights, or gathers those of a layer from the others.
JobKind = Literal["whole", "gathered"]
KINDS: tuple[JobKind, ...] = ("whole", "gathered")
# Kinds of memory with a unit: that of a job, of a vLLM engine, and what an emulated probe does not see:
# the driver, kernels, and how the allocator's cache breaks up over time. A vLLM server on GPUs of its own has the least
# one: it measures itself and gives its KV cache what is left of its share.
UnitKind = Literal["whole", "gathered", "engine", "unseen", "server"]
EDGE_RISK = 0.5  # a candidate that runs with less than the other half is refused

# Seconds of a step, predicted over measured: 10th and 90th percentile of published speeds from which no constant was
# read (results/throughput.md).
SPEED_RATIOS = (0.69, 1.13)

Figure = Literal["need", "nvidia_smi"]  # what a published run is compared with
NVIDIA_SMI_LEVEL = 0.9  # share of published runs below the upper end of the interval of nvidia-smi's figure
DATA = Path(__file__).parent / "data"
COMPARISONS = DATA / "comparisons.jsonl"  # written by scripts/compare_published.py
FIT, OUTCOMES = DATA / "verdict.json", DATA / "outcomes.jsonl"  # written by scripts/fit_verdict.py


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """A published figure beside its estimate: measured less predicted bytes over the predicted, `miss`."""

    id: str
    source: str
    kind: JobKind
    figure: Figure
    miss: float


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """The distribution of the errors of needs: a location in units, and each unit as a share of the need.

    `pass_unit`: unit of the error of what a forward and backward pass allocates, as a share of it.
    """

    location: float
    units: dict[UnitKind, float]
    pass_unit: float


class PublishedOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """A published run: what it needs by our formulas on its fullest GPU, the card, and if it ran.

    `differs`: why the settings do not describe the run; empty if they do.
    """

    id: str
    source: str
    kind: UnitKind
    need_bytes: int
    card_bytes: int
    ran: bool
    differs: str = ""

    @property
    def spare(self) -> float:
        """Share of the card that the run leaves free; below 0 if it needs more."""
        return 1 - self.need_bytes / self.card_bytes


class Like(NamedTuple):
    """The number of published runs with as much headroom as a candidate, and how many of them succeeded.

    `spare`: the share of the card that each of them left free, at least (`at_least`) or at most.
    """

    runs: int
    ran: int
    spare: float
    at_least: bool


@lru_cache(maxsize=1)
def fit() -> Fit:
    """The fitted distribution."""
    return msgspec.json.decode(FIT.read_bytes(), type=Fit)


@lru_cache(maxsize=64)
def quantile(risk: float) -> float:
    """The value that a standard normal variable exceeds with probability `risk`. Example: 2.33 for 0.01."""
    return NormalDist().inv_cdf(1 - risk)


@lru_cache(maxsize=64)
def reach(risk: float) -> float:
    """Units of headroom above a need with which a candidate runs out of memory with probability `risk`."""
    return fit().location + math.log(1 / risk - 1)


def unit_bytes(phase: PhaseMemory, kind: UnitKind) -> float:
    """The unit of a phase's error: its share of the engine's bytes and that of the kind of job of all others.

        unit = units[kind] x (need - engine) + units["engine"] x engine

    Example: 35 GiB of LoRA on one GPU and units of 2.2 %: 0.77 GiB.
    """
    if kind == "server":
        return LEAST_UNIT_BYTES
    units, engine = fit().units, phase.components.get("engine", 0)
    of_engine = units["unseen" if kind == "unseen" else "engine"]
    return max(units[kind] * (phase.total_bytes - engine) + of_engine * engine, LEAST_UNIT_BYTES)


def interval_bytes(phases: Iterable[PhaseMemory], kind: UnitKind, risk: float) -> tuple[int, int]:
    """Interval of the peak over phases, within which it stays with probability 1 - `risk` to each side.

    Each end is the largest of the phases' ends: a lighter phase that is less certain than the heaviest one can reach
    higher, such as a backward pass beside a vLLM engine's fixed budget.
    """
    location, high = fit().location, reach(risk)
    low = min(2 * location - high, 0.0)
    ends = [(phase.total_bytes, unit_bytes(phase, kind)) for phase in phases]
    return max(0, int(max(total + low * unit for total, unit in ends))), int(
        max(total + high * unit for total, unit in ends)
    )


def margin_units(phases: Iterable[PhaseMemory], kind: UnitKind, capacity_bytes: int) -> float:
    """The margin between a card and its least certain phase, in units of the phase."""
    return min((capacity_bytes - phase.total_bytes) / unit_bytes(phase, kind) for phase in phases)


def run_probability(margin: float) -> float:
    """Probability that a candidate with a margin in units runs."""
    return 1 / (1 + math.exp(min(fit().location - margin, 700.0)))  # exp(709) is the largest float


def unit_kind(gpu: GpuMemory, job: UnitKind) -> UnitKind:
    """The kind of the memory on a GPU of a job."""
    return "server" if gpu.serves else job


def fit_probability_of(gpus: Iterable[GpuMemory], kind: UnitKind) -> float:
    """Probability that a candidate runs, that of its least certain GPU."""
    return min(run_probability(margin_units(gpu.phases, unit_kind(gpu, kind), gpu.capacity_bytes)) for gpu in gpus)


def shown_probability(probability: float) -> float:
    """A probability in whole percent, rounded down: the same number in text and JSON. Example: 0.97 for 0.9786.

    At most 0.99: no estimate is sure, and a hundred published runs are too few to say more.
    """
    return min(math.floor(100 * probability), 99) / 100


# -- what published runs carry -----------------------------------------------------------------------------------------


def kind_of(candidate: Candidate) -> JobKind:
    """The kind of job that a candidate is compared with."""
    gathers = candidate.scheme_row.shards_weights and candidate.num_processes > 1
    return "gathered" if gathers else "whole"


@lru_cache(maxsize=1)
def outcomes() -> tuple[PublishedOutcome, ...]:
    """The published runs that ran or ran out of memory."""
    return tuple(msgspec.json.decode(line, type=PublishedOutcome) for line in OUTCOMES.read_bytes().splitlines())


# More to spare is as good: most published runs have less.
MOST_SPARE = 0.5
TIGHT_STEP = 0.1  # of a card: a tight candidate is compared with runs that left at most so many tenths free


@lru_cache(maxsize=4096)
def runs_like(spare: float, tight: bool) -> Like:
    """Return the published runs that left at least as much of their card free; if `tight`, at most as much.

    `spare`: the free share of the fullest GPU.
    """
    if tight:
        most = TIGHT_STEP * max(math.ceil(spare / TIGHT_STEP), 1)
        found = [run.ran for run in outcomes() if 0 <= run.spare < most]
        return Like(runs=len(found), ran=sum(found), spare=most, at_least=False)
    least = min(max(spare, 0.0), MOST_SPARE)
    found = [run.ran for run in outcomes() if run.spare >= least]
    return Like(runs=len(found), ran=sum(found), spare=least, at_least=True)


@lru_cache(maxsize=4)
def compared(kind: JobKind, figure: Figure) -> tuple[Comparison, ...]:
    """The published figures of a kind of job beside ours."""
    found = (msgspec.json.decode(line, type=Comparison) for line in COMPARISONS.read_bytes().splitlines())
    return tuple(one for one in found if one.kind == kind and one.figure == figure)


@lru_cache(maxsize=1)
def comparisons() -> dict[JobKind, tuple[Comparison, ...]]:
    """Published needs beside ours, by kind of job."""
    return {kind: compared(kind, "need") for kind in KINDS}


@lru_cache(maxsize=8)
def nvidia_smi_miss(kind: JobKind) -> float:
    """The share by which nvidia-smi may show more than computed: 90 % of the published runs of a kind stay below it.

    Split-conformal: the ceil(0.9 (n + 1))-th of n misses in order; of too few, the largest.
    Source: Vovk et al., Algorithmic Learning in a Random World (2005).
    """
    misses = sorted(run.miss for run in compared(kind, "nvidia_smi"))
    rank = min(math.ceil(NVIDIA_SMI_LEVEL * (len(misses) + 1)), len(misses))
    return max(misses[rank - 1], 0.0)


def worst_miss(kind: JobKind) -> float:
    """The largest share by which a published run of a kind needed more than predicted."""
    return max(run.miss for run in comparisons()[kind])

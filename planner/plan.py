"""The answer to a job: the best candidate, its runners-up, the reasons."""

from dataclasses import dataclass
from typing import Literal

from planner.cluster import Cluster
from planner.job import Job
from planner.quantities import Estimate


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """A runner-up: the best of another tuning class, or of another way to run."""

    label: str
    estimate: Estimate
    note: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """A change that was tried and makes a job fit that did not."""

    change: str
    estimate: Estimate
    note: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What `plan` answers. `more`: what limits more, one line each; `versions`: of the libraries the estimate stands for."""

    job: Job
    cluster: Cluster
    verdict: Literal["fits", "does_not_fit"]
    best: Estimate
    alternatives: tuple[Alternative, ...]
    remedies: tuple[Remedy, ...]
    more: tuple[str, ...]
    warnings: tuple[str, ...]
    versions: dict[str, str]

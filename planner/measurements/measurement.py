"""A measurement: what a probe saw of one candidate, in the phases and components of an estimate; and its JSON, one line.

A probe runs on a device: `cuda`, the GPUs; `cpu`, where tensors' bytes are counted; `simulated`, a dry run in an allocator of a card's size.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from planner.candidate import Candidate
from planner.errors import InputError
from planner.models.architectures.published import Published
from planner.models.from_config import Counts, shape_of
from planner.models.shape import ModelShape
from planner.quantities import Component, Evidence, Phase

SCHEMA = 1
DeviceName = Literal["cuda", "cpu", "simulated"]
# How a probe ended. Only the first two say anything about memory; the others are told apart so that none of them is taken for it.
Outcome = Literal[
    "fits",
    "out_of_memory",  # of the device
    "host_out_of_memory",  # the host's memory watch or the kernel ended it
    "hung",  # the time limit passed
    "killed",  # by a signal that was not ours
    "crashed",  # an exception or an exit code
    "disk_full",
    "garbage",  # it ended well and printed no measurement
    "gpu_in_use",  # others hold memory of the GPU; nothing was started
]
EVIDENCE: dict[DeviceName, Evidence] = {"cuda": "measured", "cpu": "measured", "simulated": "simulated"}


@dataclass(frozen=True, kw_only=True, slots=True)
class PhasePeak:
    """One phase of the heaviest step on one device. Figures that a device does not have are 0: `cpu` has no allocator, `simulated` no driver."""

    name: Phase
    allocated_bytes: int  # most that tensors held
    reserved_bytes: int  # most that PyTorch's allocator had taken from the driver
    driver_bytes: int  # most that the driver counted for the process, context and libraries included
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """One process' device. `state_bytes`: what stays between steps, by component, with the bytes of its tensors."""

    rank: int
    phases: tuple[PhasePeak, ...]
    state_bytes: dict[Component, int]
    capacity_bytes: int  # what the process could have; 0: no limit
    allocator: dict[str, int]  # the allocator's own statistics, under its own names

    @property
    def allocated_bytes(self) -> int:
        return max((phase.allocated_bytes for phase in self.phases), default=0)

    @property
    def reserved_bytes(self) -> int:
        return max((phase.reserved_bytes for phase in self.phases), default=0)

    @property
    def driver_bytes(self) -> int:
        return max((phase.driver_bytes for phase in self.phases), default=0)

    @property
    def peak_bytes(self) -> int:
        """The most inclusive figure that the device has: the driver's, else the allocator's, else the tensors'."""
        return self.driver_bytes or self.reserved_bytes or self.allocated_bytes

    @property
    def peak_phase(self) -> Phase:
        return max(
            self.phases,
            key=lambda phase: (
                phase.driver_bytes or phase.reserved_bytes or phase.allocated_bytes,
                phase.allocated_bytes,
            ),
        ).name


@dataclass(frozen=True, kw_only=True, slots=True)
class Shortage:
    """Where a device ran out of memory, in the figures of the allocator's message."""

    rank: int
    phase: Phase
    tried_bytes: int
    free_bytes: int
    allocated_bytes: int
    reserved_bytes: int

    @property
    def over_bytes(self) -> int:
        """At least so much was missing."""
        return max(self.tried_bytes - self.free_bytes, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """What one probe saw. Bytes and seconds; speed is that of the steps after the first, over all processes."""

    candidate: Candidate
    device: DeviceName
    outcome: Outcome
    ranks: tuple[RankMemory, ...]
    shortage: Shortage | None  # None: memory sufficed, or it ended otherwise
    step_seconds: float  # of an optimizer step; 0: none was finished
    tokens_per_second: float
    wall_seconds: float  # of the whole probe, loading included
    message: str  # the last line of what went wrong; empty where nothing did
    log: str  # path of the worker's log; empty where it has none
    versions: dict[str, str]  # of the libraries, the driver and the device

    @property
    def evidence(self) -> Evidence:
        return EVIDENCE[self.device]

    @property
    def decided(self) -> bool:
        """Whether the probe says if the candidate fits."""
        return self.outcome in ("fits", "out_of_memory")

    @property
    def peak_bytes(self) -> int:
        """Of the heaviest rank."""
        return max((rank.peak_bytes for rank in self.ranks), default=0)


# -- JSON --------------------------------------------------------------------------------------------------------------


def measurement_report(measurement: Measurement) -> dict[str, object]:
    """A measurement as a JSON object."""
    report = {field.name: getattr(measurement, field.name) for field in fields(Measurement)}
    return {
        **report,
        "schema": SCHEMA,
        "candidate": candidate_report(measurement.candidate),
        "ranks": [_plain(rank) | {"phases": [_plain(phase) for phase in rank.phases]} for rank in measurement.ranks],
        "shortage": None if measurement.shortage is None else _plain(measurement.shortage),
    }


def measurement_line(measurement: Measurement) -> str:
    """A measurement as one line of JSON, the same line for the same measurement."""
    return json.dumps(measurement_report(measurement), sort_keys=True, allow_nan=False)


def measurement_of(report: Mapping[str, Any]) -> Measurement:
    """The measurement that `measurement_report` has written.

    Raises:
        InputError: it is none, or of another schema.
    """
    try:
        if report["schema"] != SCHEMA:
            raise InputError(f"A measurement of schema {report['schema']!r}; this release reads {SCHEMA}.")
        ranks = tuple(
            RankMemory(**{**rank, "phases": tuple(PhasePeak(**phase) for phase in rank["phases"])})
            for rank in report["ranks"]
        )
        shortage = None if report["shortage"] is None else Shortage(**report["shortage"])
        rest = {
            field.name: report[field.name]
            for field in fields(Measurement)
            if field.name not in ("candidate", "ranks", "shortage")
        }
        return Measurement(candidate=candidate_of_report(report["candidate"]), ranks=ranks, shortage=shortage, **rest)
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"That is no measurement: {type(error).__name__} {error}.") from error


def candidate_report(candidate: Candidate) -> dict[str, object]:
    """Every field of a candidate, its models with their whole config: what another process needs to run it, with nothing to look up."""
    values = {field.name: getattr(candidate, field.name) for field in fields(Candidate)}
    return {
        name: _model_report(value)
        if isinstance(value, ModelShape)
        else list(value)
        if isinstance(value, tuple)
        else value
        for name, value in values.items()
    }


def candidate_of_report(report: Mapping[str, Any]) -> Candidate:
    """The candidate that `candidate_report` has written; its models are new objects, equal in all they say."""
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in report.items()
    }
    for role in ("model", "reward_model", "teacher_model"):
        values[role] = None if values[role] is None else _model_of(values[role])
    return Candidate(**values)


def _model_report(model: ModelShape) -> dict[str, object]:
    counts = {
        "params": model.params,
        "embed": model.embed_params,
        "lm_head": model.lm_head_params,
        "vision": model.vision_params,
    }
    published = {"quantization": model.quantization, "group_size": model.quantization_group_size}
    return {
        "id": model.id,
        "config": model.config,
        "counts": counts,
        "dtype": model.dtype,
        "auto_class": model.auto_class,
        "published": published,
    }


def _model_of(report: Mapping[str, Any]) -> ModelShape:
    return shape_of(
        report["config"],
        id=report["id"],
        counts=Counts(**report["counts"]),
        dtype=report["dtype"],
        auto_class=report["auto_class"],
        published=Published(**report["published"]),
    )


def _plain(value: RankMemory | PhasePeak | Shortage) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value)}

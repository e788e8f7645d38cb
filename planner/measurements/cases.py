"""Cases to validate on: points of a grid, measurements, and figures that other people published; one JSON object a line."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from planner.candidate import Candidate
from planner.errors import InputError, PlanError, UnknownName
from planner.gpus.catalogue import bare_gpu, load_gpu
from planner.gpus.cluster import Gpu
from planner.measurements.corrected_estimate import heaviest_rank
from planner.measurements.grid import as_setting, known_keys, point_candidate
from planner.measurements.measurement import Measurement, measurement_of
from planner.models.catalogue import load_model
from planner.models.from_config import shape_of
from planner.models.shape import ModelShape
from planner.units import GIB

Quantity = Literal[
    "tensors",  # what tensors hold, without cuBLAS workspaces: what a CPU sees
    "allocated",  # torch.cuda.max_memory_allocated: with workspaces
    "reserved",  # torch.cuda.max_memory_reserved: with what the allocator keeps besides
    "driver",  # the driver's: with the CUDA context and NCCL
]

PUBLISHED_QUANTITIES: dict[str, Quantity] = {"allocated": "allocated", "reserved": "reserved", "process": "driver"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One candidate, and what was measured of it."""

    line: int
    label: str
    candidate: Candidate
    gpu: Gpu | None  # None: the line names none
    measured: Mapping[Quantity, int]  # empty: not measured, or out of memory
    outcome: Literal["not measured", "fits", "out_of_memory"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """A line that nothing can be compared with, and why."""

    line: int
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Cases:
    cases: tuple[Case, ...]
    left_out: tuple[LeftOut, ...]


def read_cases(path: Path, with_layers: Callable[[ModelShape], ModelShape] | None = None) -> Cases:
    """The cases of a file; empty lines and lines that begin with # are none. `with_layers` completes a model whose layers have no formulas.

    Raises:
        InputError: the file cannot be read, or a line is no case; the message names the line and the nearest key that there is.
    """
    try:
        texts = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}.") from error
    numbered = [(number, text) for number, text in enumerate(texts, 1) if text.strip() and not text.startswith("#")]
    read = [_read(path, number, text) for number, text in numbered]
    return Cases(
        cases=tuple(_completed(case, with_layers) for case in read if isinstance(case, Case)),
        left_out=tuple(case for case in read if isinstance(case, LeftOut)),
    )


def case_of_measurement(measurement: Measurement, line: int, gpu: Gpu | None = None) -> Case | LeftOut:
    """What a probe said, as a case."""
    if not measurement.decided:
        return LeftOut(line=line, why=f"{measurement.outcome.replace('_', ' ')}: {measurement.message}")
    if measurement.device == "simulated":
        return LeftOut(line=line, why="simulated, not measured")
    out_of_memory = measurement.outcome == "out_of_memory"
    return Case(
        line=line,
        label=label_of(measurement.candidate),
        candidate=measurement.candidate,
        gpu=gpu or _card(measurement),
        measured={} if out_of_memory or not measurement.ranks else _figures(measurement),
        outcome="out_of_memory" if out_of_memory else "fits",
    )


def label_of(candidate: Candidate) -> str:
    """A candidate in a few words: `Qwen/Qwen2.5-0.5B sft lora 4 x 2048`."""
    quantized = f" {candidate.quantization}" if candidate.quantization != "none" else ""
    tuning = f"{candidate.tuning}{quantized}"
    return f"{candidate.model.id} {candidate.method} {tuning} {candidate.per_device_train_batch_size} x {candidate.row_tokens}"


def _completed(case: Case, with_layers: Callable[[ModelShape], ModelShape] | None) -> Case:
    candidate = case.candidate
    if with_layers is None or candidate.model.known:
        return case
    teacher = with_layers(candidate.teacher_model) if candidate.teacher_model is not None else None
    return replace(case, candidate=replace(candidate, model=with_layers(candidate.model), teacher_model=teacher))


def _read(path: Path, number: int, text: str) -> Case | LeftOut:
    try:
        row = json.loads(text)
        if not isinstance(row, dict):
            raise InputError("it is no JSON object")
        kind = next((read for key, read in KINDS if key in row), _unknown)
        return kind(row, number)
    except ValueError as error:
        raise InputError(f"{path}, line {number}: it is no JSON ({error}).") from error
    except PlanError as error:
        raise InputError(f"{path}, line {number}: {error}") from error


# -- kinds of lines ----------------------------------------------------------------------------------------------------


def _point(row: Mapping[str, Any], number: int) -> Case:
    return _case(row, number, None)


def _case(point: Mapping[str, Any], number: int, gpu: Gpu | None) -> Case:
    candidate = point_candidate(point)
    return Case(
        line=number, label=label_of(candidate), candidate=candidate, gpu=gpu, measured={}, outcome="not measured"
    )


def _measured_point(row: Mapping[str, Any], number: int) -> Case | LeftOut:
    """A point with its peaks beside it: `peak_allocated` and `peak_reserved`, or that memory ran out."""
    outcome = row.get("outcome", "fits")
    if outcome not in ("fits", "oom"):
        return LeftOut(line=number, why=f"{outcome}: {' '.join(str(row.get('message', '')).split())[-100:]}")
    case = _case(row["point"], number, _gpu_named(row.get("gpu"), row.get("total_bytes")))
    if outcome == "oom":
        return replace(case, outcome="out_of_memory")
    figures: dict[Quantity, int] = {
        name: int(row[f"peak_{name}"]) for name in ("allocated", "reserved") if row.get(f"peak_{name}")
    }
    return (
        replace(case, measured=figures, outcome="fits")
        if figures
        else LeftOut(line=number, why="no memory was measured (no GPU)")
    )


def _measurement(row: Mapping[str, Any], number: int) -> Case | LeftOut:
    return case_of_measurement(measurement_of(row), number)


def _published(row: Mapping[str, Any], number: int) -> Case | LeftOut:
    """A figure that somebody published, with the settings that stand for it as Candidate fields."""
    quantity = row.get("quantity")
    if quantity not in (*PUBLISHED_QUANTITIES, "over"):
        return LeftOut(line=number, why=f"what was published ({quantity}) is no peak of a step")
    candidate = Candidate(model=published_model(row), **_published_settings(row["settings"]))
    case = Case(
        line=number,
        label=f"{row.get('id') or label_of(candidate)}",
        candidate=candidate,
        gpu=_gpu_named(row.get("gpu"), None),
        measured={},
        outcome="out_of_memory",
    )
    if quantity == "over":
        return case
    size = row["measured_bytes"] if "measured_bytes" in row else row["measured_gib"] * GIB
    return replace(case, measured={PUBLISHED_QUANTITIES[quantity]: round(size)}, outcome="fits")


def _left_out(row: Mapping[str, Any], number: int) -> LeftOut:
    return LeftOut(line=number, why=str(row["left_out"]))


def _prose(row: Mapping[str, Any], number: int) -> LeftOut:
    return LeftOut(
        line=number, why="its `config` is prose: say it as `settings` (Candidate fields) with `measured_bytes`"
    )


def _unknown(row: Mapping[str, Any], number: int) -> Case:
    """Not even a model is named: the nearest key says what was meant."""
    for key in row:
        raise UnknownName("key", key, known_keys())
    raise InputError("it is an empty object.")


Kind = Callable[[Mapping[str, Any], int], "Case | LeftOut"]
# The first key that a line has says what it is.
KINDS: tuple[tuple[str, Kind], ...] = (
    ("left_out", _left_out),
    ("point", _measured_point),
    ("candidate", _measurement),
    ("settings", _published),
    ("measured", _prose),
    ("model", _point),
    ("method", _point),
)


# -- what others published ---------------------------------------------------------------------------------------------


def _published_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    known = {field.name for field in fields(Candidate)} - {"model", "reward_model", "teacher_model"}
    for key in settings:
        if key not in known:
            raise UnknownName("setting", key, known)
    return {key: as_setting(value) for key, value in settings.items()}


def published_model(row: Mapping[str, Any]) -> ModelShape:
    """The model of a row: from the catalogue, with what the row changes of its config, or of a config of the row's own."""
    if "config" in row:
        return shape_of(row["config"], id=row["model"])
    model = load_model(row["model"])
    return shape_of({**model.config, **row["config_changes"]}, id=model.id) if "config_changes" in row else model


# -- cards -------------------------------------------------------------------------------------------------------------


def _gpu_named(name: object, total_bytes: object) -> Gpu | None:
    """The card of a line: known by its name, of the size that its driver reported; None where the line names none."""
    if not isinstance(name, str) or not name:
        return None
    try:
        gpu = load_gpu(name)
    except UnknownName:
        if not isinstance(total_bytes, int):
            raise
        gpu = replace(bare_gpu(total_bytes), name=name)
    return replace(gpu, total_bytes=total_bytes, free_bytes=total_bytes) if isinstance(total_bytes, int) else gpu


def _card(measurement: Measurement) -> Gpu | None:
    capacities: Iterable[int] = [rank.capacity_bytes for rank in measurement.ranks]
    return _gpu_named(measurement.versions.get("gpu"), max(capacities, default=0) or None)


def _figures(measurement: Measurement) -> dict[Quantity, int]:
    rank = heaviest_rank(measurement)
    if measurement.device == "cpu":
        return {"tensors": rank.allocated_bytes}
    figures: dict[Quantity, int] = {
        "allocated": rank.allocated_bytes,
        "reserved": rank.reserved_bytes,
        "driver": rank.driver_bytes,
    }
    return {name: size for name, size in figures.items() if size}

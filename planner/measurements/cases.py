"""Cases of `plan validate`, one JSON object on each line: points of a grid, measurements, and published figures."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from msgspec import UNSET, Struct
from msgspec.structs import asdict, replace

from planner.candidate import MODEL_FIELDS, Candidate
from planner.errors import InputError, PlanError, UnknownName
from planner.files.decode import convert_json, decode_json
from planner.files.read import MAX_LINES_BYTES, read_text
from planner.gpus.catalogue import bare_gpu, load_gpu
from planner.gpus.cluster import Gpu
from planner.measurements.corrected_estimate import heaviest_rank
from planner.measurements.documents import PublishedSettings, measurement_of
from planner.measurements.grid import known_keys, point_candidate
from planner.measurements.measurement import Measurement, Quantity
from planner.models.catalogue import load_model
from planner.models.from_config import shape_of
from planner.models.shape import ModelShape
from planner.quantities import Evidence
from planner.units import GIB

PUBLISHED_QUANTITIES: dict[str, Quantity] = {"allocated": "allocated", "reserved": "reserved", "process": "driver"}


class Case(Struct, frozen=True, kw_only=True):
    """One candidate and its measured figures."""

    line: int
    label: str
    candidate: Candidate
    gpu: Gpu | None  # None: the line names none
    measured: Mapping[Quantity, int]  # empty: not measured, or out of memory
    outcome: Literal["not measured", "fits", "out_of_memory"]
    evidence: Evidence = "measured"  # of the figures


class LeftOut(Struct, frozen=True, kw_only=True):
    """A line that nothing is compared with, and the reason."""

    line: int
    why: str


class Cases(Struct, frozen=True, kw_only=True):
    """The lines of a file."""

    cases: tuple[Case, ...]
    left_out: tuple[LeftOut, ...]


def read_cases(path: Path, complete_model: Callable[[ModelShape], ModelShape] | None = None) -> Cases:
    """Read the cases of a file, without empty lines and lines that begin with #.

    Args:
        complete_model: completes a model whose layers have no formulas; None: such models stay as they are.

    Raises:
        InputError: the file cannot be read, or a line is no case; the message names the line, and for an unknown key
            the nearest key that there is.
    """
    texts = read_text(path, MAX_LINES_BYTES).splitlines()
    numbered = [(number, text) for number, text in enumerate(texts, 1) if text.strip() and not text.startswith("#")]
    read = [_read_line(path, number, text) for number, text in numbered]
    return Cases(
        cases=tuple(_complete(case, complete_model) for case in read if isinstance(case, Case)),
        left_out=tuple(case for case in read if isinstance(case, LeftOut)),
    )


def case_of_measurement(measurement: Measurement, line: int, gpu: Gpu | None = None) -> Case | LeftOut:
    """Return a measurement as a case; a probe that decided nothing is left out."""
    if not measurement.decided:
        return LeftOut(line=line, why=f"{measurement.outcome.replace('_', ' ')}: {measurement.message}")
    out_of_memory = measurement.outcome == "out_of_memory"
    return Case(
        line=line,
        label=label_of(measurement.candidate),
        candidate=measurement.candidate,
        gpu=gpu or _card(measurement),
        measured={} if out_of_memory or not measurement.ranks else figures_of(measurement),
        outcome="out_of_memory" if out_of_memory else "fits",
        evidence=measurement.evidence,
    )


def label_of(candidate: Candidate) -> str:
    """Return a candidate in a few words: `Qwen/Qwen2.5-0.5B sft lora 4 x 2048`."""
    quantized = f" {candidate.quantization}" if candidate.quantization_row.quantized else ""
    batch = f"{candidate.per_device_train_batch_size} x {candidate.row_tokens}"
    return f"{candidate.model.id} {candidate.method} {candidate.tuning}{quantized} {batch}"


def _complete(case: Case, complete_model: Callable[[ModelShape], ModelShape] | None) -> Case:
    candidate = case.candidate
    if complete_model is None:
        return case
    others = {field: getattr(candidate, field) for field in MODEL_FIELDS}
    completed: dict[str, Any] = {name: complete_model(model) for name, model in others.items() if model is not None}
    return replace(case, candidate=replace(candidate, **completed))


def _read_line(path: Path, number: int, text: str) -> Case | LeftOut:
    try:
        row = decode_json(text, dict[str, Any], "That is no JSON object")
        read = next((read for key, read in KINDS if key in row), _refuse_unknown)
        return read(row, number)
    except PlanError as error:
        raise InputError(f"{path}, line {number}: {error}") from error


# -- kinds of lines ----------------------------------------------------------------------------------------------------


class LeftOutLine(Struct, frozen=True):
    """A line that is left out on purpose, with the reason."""

    left_out: str


class MeasuredPoint(Struct, frozen=True):
    """A point of a grid with the peaks of its run, or with the word that memory ran out."""

    point: dict[str, Any]
    outcome: str = "fits"  # "fits", "oom", or how else the run ended
    message: str = ""
    gpu: str | None = None
    total_bytes: int | None = None
    peak_allocated: int | None = None
    peak_reserved: int | None = None


class PublishedFigure(Struct, frozen=True):
    """A figure that somebody published, with the candidate as Candidate fields."""

    model: str
    settings: dict[str, Any]
    quantity: str | None = None
    measured_bytes: int | None = None
    measured_gib: float | None = None
    id: str = ""
    gpu: str | None = None
    config: dict[str, Any] | None = None  # of a model that is not in the catalogue
    config_changes: dict[str, Any] = {}  # to the config in the catalogue


def _read_point(row: Mapping[str, Any], number: int) -> Case:
    return _unmeasured(row, number, None)


def _unmeasured(point: Mapping[str, Any], number: int, gpu: Gpu | None) -> Case:
    candidate = point_candidate(point)
    return Case(
        line=number, label=label_of(candidate), candidate=candidate, gpu=gpu, measured={}, outcome="not measured"
    )


def _read_measured_point(row: Mapping[str, Any], number: int) -> Case | LeftOut:
    measured = convert_json(row, MeasuredPoint, "That is no measured point")
    if measured.outcome not in ("fits", "oom"):
        return LeftOut(line=number, why=f"{measured.outcome}: {' '.join(measured.message.split())[-100:]}")
    case = _unmeasured(measured.point, number, _gpu_named(measured.gpu, measured.total_bytes))
    if measured.outcome == "oom":
        return replace(case, outcome="out_of_memory")
    figures: dict[Quantity, int] = {}
    if measured.peak_allocated:
        figures["allocated"] = measured.peak_allocated
    if measured.peak_reserved:
        figures["reserved"] = measured.peak_reserved
    if not figures:
        return LeftOut(line=number, why="no memory was measured (no GPU)")
    return replace(case, measured=figures, outcome="fits")


def _read_measurement(row: Mapping[str, Any], number: int) -> Case | LeftOut:
    return case_of_measurement(measurement_of(row), number)


def _read_published(row: Mapping[str, Any], number: int) -> Case | LeftOut:
    figure = convert_json(row, PublishedFigure, "That is no published figure")
    if figure.quantity not in (*PUBLISHED_QUANTITIES, "over"):
        return LeftOut(line=number, why=f"what was published ({figure.quantity}) is no peak of a step")
    candidate = published_candidate(figure)
    case = Case(
        line=number,
        label=figure.id or label_of(candidate),
        candidate=candidate,
        gpu=_gpu_named(figure.gpu, None),
        measured={},
        outcome="out_of_memory",
    )
    if figure.quantity == "over":
        return case
    if figure.measured_bytes is None and figure.measured_gib is None:
        raise InputError("it has neither measured_bytes nor measured_gib.")
    size = figure.measured_bytes if figure.measured_bytes is not None else (figure.measured_gib or 0.0) * GIB
    return replace(case, measured={PUBLISHED_QUANTITIES[figure.quantity]: round(size)}, outcome="fits")


def _read_left_out(row: Mapping[str, Any], number: int) -> LeftOut:
    return LeftOut(line=number, why=convert_json(row, LeftOutLine, "That is no line that is left out").left_out)


def _read_prose(row: Mapping[str, Any], number: int) -> LeftOut:
    return LeftOut(
        line=number, why="its `config` is prose: say it as `settings` (Candidate fields) with `measured_bytes`"
    )


def _refuse_unknown(row: Mapping[str, Any], number: int) -> Case:
    """Refuse a line with none of the keys of `KINDS`.

    Raises:
        UnknownName: names the line's first key and the nearest key that there is.
        InputError: the line is an empty object.
    """
    for key in row:
        raise UnknownName("key", key, known_keys())
    raise InputError("it is an empty object.")


ReadLine = Callable[[Mapping[str, Any], int], "Case | LeftOut"]
# The kinds of lines: the first of these keys that a line has decides.
KINDS: tuple[tuple[str, ReadLine], ...] = (
    ("left_out", _read_left_out),
    ("point", _read_measured_point),
    ("candidate", _read_measurement),
    ("settings", _read_published),
    ("measured", _read_prose),
    ("model", _read_point),
    ("method", _read_point),
)


# -- published figures -------------------------------------------------------------------------------------------------


def published_candidate(figure: PublishedFigure) -> Candidate:
    """Return the candidate of a published figure.

    Raises:
        UnknownName: a setting is no Candidate field; the message has the nearest.
        InputError: a setting has the wrong type.
    """
    for key in figure.settings:
        if key not in PublishedSettings.__struct_fields__:
            raise UnknownName("setting", key, PublishedSettings.__struct_fields__)
    settings = asdict(convert_json(figure.settings, PublishedSettings, "That is no setting"))
    given = {name: value for name, value in settings.items() if value is not UNSET}
    if "method" not in given:
        raise InputError("its `settings` have no method.")
    return Candidate(model=_published_model(figure), **given)


def _published_model(figure: PublishedFigure) -> ModelShape:
    """Return the model of the figure's own config, or of the catalogue's config with the figure's changes."""
    if figure.config is not None:
        return shape_of(figure.config, id=figure.model)
    model = load_model(figure.model)
    if not figure.config_changes:
        return model
    return shape_of({**model.config, **figure.config_changes}, id=model.id)


# -- cards -------------------------------------------------------------------------------------------------------------


def _gpu_named(name: str | None, total_bytes: int | None) -> Gpu | None:
    """Return the card of a name with the memory that its driver reported; None if the line names no card."""
    if not name:
        return None
    try:
        gpu = load_gpu(name)
    except UnknownName:
        if total_bytes is None:
            raise
        gpu = replace(bare_gpu(total_bytes), name=name)
    return gpu if total_bytes is None else replace(gpu, total_bytes=total_bytes, free_bytes=total_bytes)


def _card(measurement: Measurement) -> Gpu | None:
    capacities: Iterable[int] = [rank.capacity_bytes for rank in measurement.ranks]
    return _gpu_named(measurement.versions.get("gpu"), max(capacities, default=0) or None)


def figures_of(measurement: Measurement) -> dict[Quantity, int]:
    """Return the figures of a measurement's heaviest process."""
    rank = heaviest_rank(measurement)
    if measurement.device == "cpu":
        return {"tensors": rank.allocated_bytes}
    figures: dict[Quantity, int] = {
        "allocated": rank.allocated_bytes,
        "reserved": rank.reserved_bytes,
        "driver": rank.driver_bytes,
    }
    return {name: size for name, size in figures.items() if size}

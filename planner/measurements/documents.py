"""JSON of measurements and candidates: their fields as msgspec types, each model with its whole config.

Other processes read these documents and look nothing up. Only modules that read or write measurements import this one:
msgspec and its types take milliseconds that `plan` without measurements does not need.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_type_hints

from msgspec import UNSET, Struct, UnsetType, defstruct, to_builtins
from msgspec.structs import asdict, fields

from planner.candidate import FIELDS, MODEL_FIELDS, Candidate
from planner.errors import InputError
from planner.files.decode import convert_json, decode_json
from planner.measurements.measurement import SCHEMA, Measurement
from planner.models.architectures.published import Published
from planner.models.from_config import Counts, shape_of
from planner.models.shape import ModelShape
from planner.quantizations import Quantization
from planner.rows.lengths import lengths_in_words
from planner.settings.table import ROW_LENGTHS


class PublishedDocument(Struct, frozen=True):
    """The quantization of a published checkpoint."""

    quantization: Quantization
    group_size: int


class ModelDocument(Struct, frozen=True):
    """A model: its `config.json` and the facts that the config does not hold."""

    id: str
    config: dict[str, Any]
    counts: Counts
    dtype: str
    auto_class: str
    published: PublishedDocument


def _json_types(kind: type, names: Iterable[str]) -> dict[str, Any]:
    """Return the named fields of a type with their types in JSON.

    A `float` may be written without a decimal point and stays as written: the runner compares the documents of a
    worker's candidate and of its task as text.
    """
    hints = get_type_hints(kind)
    return {name: int | float if hints[name] is float else hints[name] for name in names}


CANDIDATE_TYPES = _json_types(Candidate, FIELDS)
# Fields that documents of earlier releases lack, with their types in JSON and their defaults.
LATER_FIELDS: tuple[tuple[str, Any, Any], ...] = (
    ("lengths", str | None, None),
    ("completion_lengths", str | None, None),
    ("teacher_server_model", ModelDocument | None, None),
    ("teacher_server_gpus", int, 0),
    ("teacher_server_gpu_memory_utilization", float, 0.9),
    ("train_sampling_strategy", CANDIDATE_TYPES["train_sampling_strategy"], "random"),
)
OBJECTS = (*MODEL_FIELDS, *(name for name, _, _ in LATER_FIELDS))
CandidateDocument = defstruct(
    "CandidateDocument",
    [
        *((name, hint) for name, hint in CANDIDATE_TYPES.items() if name not in OBJECTS),
        ("model", ModelDocument),
        ("reward_model", ModelDocument | None),
        ("teacher_model", ModelDocument | None),
        *LATER_FIELDS,
    ],
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
)
MEASURED = [field.name for field in fields(Measurement) if field.name != "candidate"]
MeasurementDocument = defstruct(
    "MeasurementDocument",
    [
        *_json_types(Measurement, MEASURED).items(),
        ("candidate", CandidateDocument),
        ("schema", Literal[1]),
    ],
    frozen=True,
    kw_only=True,
)
# Candidate fields that a published figure gives; a field that it does not give is `UNSET`.
PublishedSettings = defstruct(
    "PublishedSettings",
    [(name, hint | UnsetType, UNSET) for name, hint in CANDIDATE_TYPES.items() if name not in OBJECTS],
    frozen=True,
    forbid_unknown_fields=True,
)


def measurement_report(measurement: Measurement) -> dict[str, object]:
    """Return a measurement as a JSON object."""
    values = {field.name: getattr(measurement, field.name) for field in fields(Measurement)}
    report: dict[str, object] = to_builtins({**values, "candidate": None, "schema": SCHEMA})
    return {**report, "candidate": candidate_report(measurement.candidate)}


def measurement_line(measurement: Measurement) -> str:
    """Return a measurement as one line of JSON with sorted keys: equal measurements give equal lines."""
    return json.dumps(measurement_report(measurement), sort_keys=True, allow_nan=False)


def measurement_of(report: Mapping[str, Any]) -> Measurement:
    """Return the measurement of a JSON object that `measurement_report` wrote.

    Raises:
        InputError: the object is no measurement, or has another schema.
    """
    if isinstance(report, dict) and report.get("schema", SCHEMA) != SCHEMA:
        raise InputError(f"A measurement of schema {report['schema']!r}; this release reads {SCHEMA}.")
    values = asdict(convert_json(report, MeasurementDocument, "That is no measurement"))
    del values["schema"]
    return Measurement(**{**values, "candidate": _candidate(values["candidate"])})


def stored_measurement(text: str) -> Measurement:
    """Return the measurement that a study stores as text.

    Raises:
        InputError: the text is no measurement, such as that of a study that something else has written.
    """
    try:
        return measurement_of(decode_json(text, dict[str, Any], "Its text"))
    except InputError as error:
        raise InputError(f"A stored trial holds no measurement: {error} Give another --storage.") from error


def candidate_report(candidate: Candidate) -> dict[str, object]:
    """Return every field of a candidate as a JSON object, its models with their whole config.

    Lengths of rows and completions are quantiles in words, which have the longest one.
    """
    values = {field: getattr(candidate, field) for field in FIELDS}
    values |= {name: values[name] and values[name].words for name in ROW_LENGTHS}
    models = {name: _model_document(values[name]) for name in MODEL_FIELDS if values[name] is not None}
    report: dict[str, object] = to_builtins({**values, **models})
    return report


def candidate_of_report(report: Mapping[str, Any]) -> Candidate:
    """Return the candidate of a JSON object that `candidate_report` wrote; its models are new, equal objects.

    Raises:
        InputError: the object is no candidate.
    """
    return _candidate(convert_json(report, CandidateDocument, "That is no candidate"))


def _candidate(document: Struct) -> Candidate:
    values = asdict(document)
    models = {name: _model(values[name]) for name in MODEL_FIELDS if values[name] is not None}
    values |= {name: values[name] and lengths_in_words(values[name]) for name in ROW_LENGTHS}
    return Candidate(**{**values, **models})


def _model_document(model: ModelShape) -> ModelDocument:
    return ModelDocument(
        id=model.id,
        config=model.config,
        counts=Counts(
            params=model.params,
            embed=model.embed_params,
            lm_head=model.lm_head_params,
            vision=model.vision_params,
        ),
        dtype=model.dtype,
        auto_class=model.auto_class,
        published=PublishedDocument(quantization=model.quantization, group_size=model.quantization_group_size),
    )


def _model(document: ModelDocument) -> ModelShape:
    published = document.published
    return shape_of(
        document.config,
        id=document.id,
        counts=document.counts,
        dtype=document.dtype,
        auto_class=document.auto_class,
        published=Published(quantization=published.quantization, group_size=published.group_size),
    )

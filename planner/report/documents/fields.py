"""Types of fields that several documents have: sizes, notes, and the settings of a candidate."""

from typing import Annotated, Any, Literal, get_type_hints

from msgspec import UNSET, Meta, Struct, UnsetType, defstruct

from planner.candidate import FIELDS, MODEL_FIELDS, Candidate, Elements
from planner.methods import METHODS
from planner.quantities import NoteCode
from planner.settings.setting import Setting
from planner.settings.table import ROW_LENGTHS, SETTINGS

SCHEMA: Literal[1] = 1

Version = Annotated[Literal[1], Meta(description="The version of this schema.")]
Bytes = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
Share = Annotated[float, Meta(ge=0, le=1)]
Probability = Annotated[float, Meta(ge=0, le=1, description="Probability that no GPU runs out of memory.")]
Interval = Annotated[tuple[Bytes, Bytes], Meta(description="Lower and upper bound of the peak at the accepted risk.")]
ProbeDevice = Literal["cuda", "cpu", "emulated"]
Warnings = Annotated[tuple[str, ...], Meta(description="Notes for the reader, one line each.")]
Versions = Annotated[dict[str, str], Meta(description="Releases of the libraries that the figures stand for.")]


class Document(Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all objects in a document: frozen, and without unknown keys."""


class NoteReport(Document, frozen=True):
    """A reason, a limit, a note or a change as data, and its sentence."""

    code: Annotated[NoteCode, Meta(description="Identifies what is said; it does not change.")]
    values: Annotated[
        dict[str, Any],
        Meta(description="The values in the sentence; one that is a note itself has `code`, `values` and `text` too."),
    ]
    text: Annotated[str, Meta(description="The sentence in English; it may change.")]


SummaryText = Annotated[str, Meta(description="The answer in one line, for a person.")]
WarningsData = Annotated[tuple[NoteReport, ...], Meta(description="The warnings as data.")]


# -- settings ----------------------------------------------------------------------------------------------------------


class CheckpointingArguments(Document, frozen=True):
    """`gradient_checkpointing_kwargs` of Transformers' TrainingArguments."""

    use_reentrant: Annotated[bool, Meta(description="True for adapters under ZeRO-3, where TRL forces it.")]
    every_n_layers: Annotated[Count, Meta(description="Only every n-th layer is recomputed.")] | UnsetType = UNSET
    offload: Annotated[bool, Meta(description="Inputs of layers wait in pinned host memory.")] | UnsetType = UNSET


class Environment(Document, frozen=True):
    """Environment variables to launch with."""

    PYTORCH_CUDA_ALLOC_CONF: str | UnsetType = UNSET


def _settings_types() -> dict[str, tuple[Any, bool]]:
    """Return every setting of a candidate by its library name: its type in JSON, and whether every candidate has it."""
    types = get_type_hints(Candidate)
    found: dict[str, tuple[Any, bool]] = {}
    for row in sorted(SETTINGS, key=lambda row: FIELDS.index(row.field)):
        always = not (row.methods or row.owner_values or row.needs) and row.unset is ...
        if row.values:
            for name in row.library_names:
                values = list(dict.fromkeys(each[name] for each in row.values.values() if name in each))
                kind = bool if isinstance(values[0], bool) else str if row.file == "environment" else _one_of(values)
                note = row.names[name].sentence if name in row.names else row.sentence
                found[name] = _described(kind, note), always and all(name in each for each in row.values.values())
        else:
            found[row.written or row.field] = _described(_json_type(row, types[row.field]), row.sentence), always
        for other in (name for name in row.names if name not in row.library_names):
            found[other] = _described(bool, row.names[other].sentence), False
        for other in dict.fromkeys(method.argument_names.get(row.field, "") for method in METHODS.values()):
            if other:
                users = ", ".join(
                    method.name for method in METHODS.values() if method.argument_names.get(row.field) == other
                )
                found[other] = _described(_json_type(row, types[row.field]), f"{row.sentence} ({users})"), False
    return found


def _json_type(row: Setting, hint: object) -> object:
    """Return the type that a field's value has in JSON."""
    if row.field in (*MODEL_FIELDS, *ROW_LENGTHS):
        return str
    if row.field == "lora_target_modules":
        return Literal["all-linear"] | tuple[str, ...] | None
    if row.field == "image_size":
        return Annotated[str, Meta(pattern="^[0-9]{1,6}x[0-9]{1,6}$")]
    if row.field == "vllm_max_model_length":
        return Count | None
    if row.bounds is None:
        return hint
    least, most = row.bounds
    if hint is float:
        return Annotated[float, Meta(ge=0, le=1) if most == 1 else Meta(ge=0)]
    whole = Annotated[int, Meta(ge=int(least))]
    return whole | Literal["auto"] if hint == Elements else whole


def _one_of(values: list[Any]) -> object:
    return Literal[tuple(values)]


def _described(kind: object, sentence: str) -> object:
    return Annotated[kind, Meta(description=sentence)]


SETTINGS_TYPES = _settings_types()
# Settings that are keys of others in a candidate's.
NESTED = tuple(name for row in SETTINGS if row.file in ("checkpointing", "environment") for name in row.library_names)
_Settings: Any = defstruct(
    "Settings",
    [
        *((name, kind) for name, (kind, always) in SETTINGS_TYPES.items() if always and name not in NESTED),
        ("environment", Environment),
        *(
            (name, kind | UnsetType, UNSET)
            for name, (kind, always) in SETTINGS_TYPES.items()
            if not always and name not in NESTED
        ),
        ("gradient_checkpointing_kwargs", CheckpointingArguments | UnsetType, UNSET),
    ],
    bases=(Document,),
    frozen=True,
    kw_only=True,
)
_PinnedSettings: Any = defstruct(
    "PinnedSettings",
    [
        *((name, kind | UnsetType, UNSET) for name, (kind, _) in SETTINGS_TYPES.items()),
        ("gradient_checkpointing_kwargs", CheckpointingArguments | UnsetType, UNSET),
    ],
    bases=(Document,),
    frozen=True,
)


class Settings(_Settings):  # type: ignore[misc]
    """A candidate's settings, named as TRL, Transformers, PEFT, accelerate, DeepSpeed and vLLM name them.

    A setting that the method, the tuning or the sharding does not read is left out.
    """


class PinnedSettings(_PinnedSettings):  # type: ignore[misc]
    """Settings that the user decided and the search keeps."""

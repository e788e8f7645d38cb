"""A point of a grid of training runs, written with the names of TRL's configs: JSON -> candidate."""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from planner.candidate import MODEL_FIELDS, Candidate
from planner.errors import InputError, UnknownName
from planner.files.decode import convert_json
from planner.jobs.settings import candidate_fields, fields_named, setting_names
from planner.methods import METHODS, NEWEST_TRL
from planner.models.catalogue import load_model
from planner.models.from_config import shape_of
from planner.models.shape import ModelShape


class Point(Struct, frozen=True):
    """The keys of a point and their defaults. Further keys of a point, and those of `extra`, are settings."""

    model: str = "Qwen/Qwen2.5-0.5B"
    method: str = "sft"
    tuning: str = "lora"
    dtype: str | None = None  # None: the trainer's own
    quantization: str | None = None
    per_device_train_batch_size: int = 1
    gradient_accumulation_steps: int = 1
    max_length: int = 1024  # tokens of a whole row: prompt and completion, for methods that generate
    max_completion_length: int = 256
    num_generations: int = 2
    gradient_checkpointing: bool = True
    attn_implementation: str = "sdpa"
    padded: bool = False
    optim: str = "adamw_torch_fused"
    lora_r: int = 16
    lora_dropout: float = 0.0
    lora_target_modules: str | tuple[str, ...] = "all-linear"
    beta: float | None = None  # None: the trainer's own
    activation_offloading: bool = False
    bf16: bool = True
    layers: int | None = None  # None: as many as published
    steps: int = 3  # of the measured run; no setting
    history: object = None  # of the measured run; no setting
    extra: dict[str, Any] = {}


POINT_KEYS = Point.__struct_fields__
# Keys of a point that are no settings under the same name.
NO_SETTINGS = (
    "model",
    "method",
    "layers",
    "steps",
    "history",
    "extra",
    "bf16",
    "max_length",
    "max_completion_length",
    "num_generations",
)
# Lists in a config with one entry for each layer.
PER_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers")


def point_candidate(row: Mapping[str, Any]) -> Candidate:
    """Return the candidate of a point, a JSON object.

    Raises:
        UnknownName: a key is neither a key of points nor a setting, or a name is unknown; the message has the nearest.
        InputError: a value has the wrong type, or the settings contradict each other.
    """
    point = convert_json({key: value for key, value in row.items() if key in POINT_KEYS}, Point, "That is no point")
    for key in (*row, *point.extra):
        if key not in known_keys():
            raise UnknownName("key", key, known_keys())
    if point.method not in METHODS:
        raise UnknownName("method", point.method, METHODS)
    method = METHODS[point.method]
    model = _with_layers(load_model(point.model), point.layers)
    settings = {
        key: value
        for key, value in (asdict(point) | _plain(row) | _plain(point.extra)).items()
        if key not in NO_SETTINGS and value is not None
    }
    settings |= _lengths(point, method.generates)
    chosen: dict[str, Any] = {
        **method.defaults_in(settings.get("trl_version", NEWEST_TRL)),
        **candidate_fields(settings, model.dtype),
    }
    for field in chosen.keys() & MODEL_FIELDS:
        chosen[field] = load_model(chosen[field])
    if method.grouped_completions:
        chosen["num_generations"] = point.num_generations
        chosen.setdefault("steps_per_generation", point.gradient_accumulation_steps)
    if method.teacher:
        chosen.setdefault("teacher_model", model)
    chosen.setdefault("precision", "bf16" if point.bf16 else "no")
    return Candidate(model=model, method=method.name, **chosen)


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of JSON with lists of names as tuples."""
    return {key: tuple(map(str, value)) if isinstance(value, list) else value for key, value in settings.items()}


def _lengths(point: Point, generates: bool) -> dict[str, int]:
    if not generates:
        return {"max_length": point.max_length}
    prompt_length = point.max_length - point.max_completion_length
    if prompt_length < 1:
        raise InputError(
            f"max_length {point.max_length} leaves no room for a prompt beside "
            f"max_completion_length {point.max_completion_length}."
        )
    return {"prompt_length": prompt_length, "max_completion_length": point.max_completion_length}


def _with_layers(model: ModelShape, layers: int | None) -> ModelShape:
    """Return the model with another number of layers; None: as published."""
    if layers is None:
        return model
    config = {**model.config, "num_hidden_layers": layers}
    for key in PER_LAYER:
        if isinstance(listed := config.get(key), list):
            config[key] = listed[:layers]
    return shape_of(config, id=f"{model.id} of {layers} layers")


def known_keys() -> tuple[str, ...]:
    """Return all keys that a point may have: its own, then every setting but other names of its own keys."""
    others = (name for name in setting_names() if name not in POINT_KEYS and fields_named([name]).isdisjoint({"model"}))
    return (*POINT_KEYS, *others)

"""A point of a grid: one training run in the words of TRL's configs, as a candidate."""

from collections.abc import Mapping
from typing import Any

from planner.candidate import Candidate
from planner.errors import InputError, UnknownName
from planner.jobs.settings import candidate_fields, setting_names
from planner.methods import METHODS
from planner.models.catalogue import load_model
from planner.models.from_config import shape_of
from planner.models.shape import ModelShape

# A point of a grid and what its keys are where it does not say: one training run in the words of TRL's configs. `max_length` is the whole row,
# for methods that generate prompt and completion; `dtype` and `beta` null are the trainer's own; `extra` are further settings.
POINT: dict[str, Any] = {
    "model": "Qwen/Qwen2.5-0.5B", "method": "sft", "tuning": "lora", "dtype": None, "quantization": None, "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1, "max_length": 1024, "max_completion_length": 256, "num_generations": 2, "gradient_checkpointing": True,
    "attn_implementation": "sdpa", "padded": False, "optim": "adamw_torch_fused", "lora_r": 16, "lora_dropout": 0.0, "lora_target_modules": "all-linear",
    "beta": None, "activation_offloading": False, "bf16": True, "layers": None, "steps": 3, "extra": {},
}  # fmt: skip
NO_SETTINGS = (
    "model",
    "method",
    "layers",
    "steps",
    "extra",
    "bf16",
    "max_length",
    "max_completion_length",
    "num_generations",
    "history",
)
# Layers of another number than published: what in a config has one entry a layer.
PER_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers")


def point_candidate(given: Mapping[str, Any]) -> Candidate:
    """The candidate that a point of a grid stands for.

    Raises:
        UnknownName: a key that is none of a point's, nor a setting.
        InputError: a value that its key cannot have.
    """
    for key in (*given, *given.get("extra", {})):
        if key not in known_keys():
            raise UnknownName("key", key, known_keys())
    point = POINT | dict(given)
    if point["method"] not in METHODS:
        raise UnknownName("method", str(point["method"]), METHODS)
    row = METHODS[point["method"]]
    model = _with_layers(load_model(point["model"]), point["layers"])
    settings = {
        key: as_setting(value)
        for key, value in {**point, **point["extra"]}.items()
        if key not in NO_SETTINGS and value is not None
    }
    settings |= _lengths(point, row.generates)
    chosen: dict[str, Any] = {**row.defaults, **candidate_fields(settings, model.dtype)}
    if row.grouped_completions:
        chosen["num_generations"] = point["num_generations"]
        chosen.setdefault("steps_per_generation", point["gradient_accumulation_steps"])
    if row.teacher:
        chosen.setdefault("teacher_model", model)
    chosen.setdefault("precision", "bf16" if point["bf16"] else "no")
    return Candidate(model=model, method=row.name, **chosen)


def _lengths(point: Mapping[str, Any], generates: bool) -> dict[str, Any]:
    if not generates:
        return {"max_length": point["max_length"]}
    prompt = point["max_length"] - point["max_completion_length"]
    if prompt < 1:
        raise InputError(
            f"max_length {point['max_length']} leaves no room for a prompt beside max_completion_length {point['max_completion_length']}."
        )
    return {"prompt_length": prompt, "max_completion_length": point["max_completion_length"]}


def _with_layers(model: ModelShape, layers: int | None) -> ModelShape:
    """The model with another number of layers."""
    if layers is None:
        return model
    config = {**model.config, "num_hidden_layers": layers}
    for key in PER_LAYER:
        if isinstance(listed := config.get(key), list):
            config[key] = listed[:layers]
    return shape_of(config, id=f"{model.id} of {layers} layers")


def known_keys() -> tuple[str, ...]:
    """All that a point can say: its own keys, then every setting."""
    return (*POINT, "history", *(name for name in setting_names() if name not in POINT))


def as_setting(value: Any) -> Any:
    """A value of JSON as a candidate has it: names in a tuple."""
    return tuple(map(str, value)) if isinstance(value, list) else value

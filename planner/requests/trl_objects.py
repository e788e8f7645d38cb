"""Read the objects that a training script has: TRL's config, a model's config, PEFT's LoraConfig."""

import json
from collections.abc import Collection, Mapping
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from planner.errors import InputError, shortened
from planner.jobs.settings import fields_named, setting_names
from planner.methods import METHOD_OF, MethodName, method_of_config
from planner.models.catalogue import load_model
from planner.models.from_config import NOT_COUNTED, shape_of
from planner.models.shape import ModelShape
from planner.requests.read_options import LoadModel
from planner.requests.train_config import TrainConfig, train_config
from planner.settings.table import has_setting
from planner.settings.unread import UNMODELLED

HINT = f"It can be {', '.join(METHOD_OF)}."
# Fields of peft's LoraConfig -> settings of TRL's ModelConfig, and those that change memory and are not modelled.
# Source: peft 0.21, tuners/lora/config.py; trl 1.16, trainer/utils.py, `get_peft_config`.
LORA_SETTINGS = {
    "r": "lora_r",
    "lora_dropout": "lora_dropout",
    "target_modules": "lora_target_modules",
    "modules_to_save": "lora_modules_to_save",
    "target_parameters": "lora_target_parameters",
    "use_dora": "use_dora",
}
LORA_UNMODELLED = (
    "exclude_modules", "bias", "layers_to_transform", "rank_pattern", "trainable_token_indices",
    "alora_invocation_tokens", "ensure_weight_tying", "layer_replication", "lora_bias",
)  # fmt: skip
DERIVED = ("generation_batch_size",)  # of steps_per_generation, by the config itself: trl 1.16, grpo_config.py
NESTED = ("BitsAndBytesConfig", "ParallelismConfig")  # classes of a config inside a config
BITSANDBYTES = "bitsandbytes"  # as `quant_method` of a config


class TrainingObjects(Struct, frozen=True, kw_only=True):
    """The settings that the objects of a training script hold. `load`: returns the shape of a model that they name."""

    method: MethodName
    model: str | None
    train: TrainConfig
    load: LoadModel


def read_objects(args: Any, model: Any, peft_config: Any) -> TrainingObjects:
    """Read TRL's config of a method, a model's config or name, and PEFT's LoraConfig (None: there is none).

    Raises:
        InputError: an object is of another kind, or has adapters that are not counted.
    """
    method = method_of_config(type(args), HINT)
    # a class of configs may inherit settings that its method does not have
    lacking = {name for name in setting_names() if not all(has_setting(method, each) for each in fields_named([name]))}
    keys, name, load = _of_model(model)
    values = {**keys, **_lora_keys(peft_config), **_field_values(args, lacking)}
    train = _config(values, {*_chosen(args), *(_chosen(model) if keys and name is None else ())})
    return TrainingObjects(method=method, model=name, train=train, load=load)


def _of_model(model: Any) -> tuple[dict[str, Any], str | None, LoadModel]:
    """Return a model's settings, its name, and the function that returns the shapes of it and of other models.

    Raises:
        InputError: it is neither a name nor a config.
    """
    kinds = {kind.__name__ for kind in type(model).__mro__}
    if isinstance(model, str):
        return {}, model, load_model
    if "ModelConfig" in kinds:
        return _field_values(model), None, load_model
    if kinds.isdisjoint({"PreTrainedConfig", "PretrainedConfig"}):
        raise InputError(
            f"estimate takes a model's config, TRL's ModelConfig or a name, not {shortened(type(model).__name__)}. "
            "Of a loaded model, give model.config."
        )
    config = json.loads(model.to_json_string(use_diff=False))
    name = str(model._name_or_path or config.get("model_type"))
    keys: dict[str, Any] = {}
    if (config.get("quantization_config") or {}).get("quant_method") == BITSANDBYTES:
        keys["quantization_config"] = config.pop("quantization_config")  # made while loading: not the checkpoint's
    shape = shape_of(config, id=name, counts=NOT_COUNTED)

    def load(other: str) -> ModelShape:
        return shape if other == name else load_model(other)

    return keys, name, load


def _field_values(config: Any, unread: Collection[str] = ()) -> dict[str, Any]:
    """Return the fields of a config. Those that nothing reads, or whose effect is not modelled, only if they are set.

    `to_dict()` of Transformers' arguments would replace the quantization config inside the caller's own object.
    """
    read = {
        field.name: getattr(config, field.name) for field in fields(config) if field.init and field.name not in DERIVED
    }
    if_set = {*UNMODELLED, *unread}
    defaults = {field.name: field.default for field in fields(config)}
    return {
        name: _plain(value) for name, value in read.items() if name not in if_set or value not in (defaults[name], None)
    }


def _lora_keys(peft_config: Any) -> dict[str, Any]:
    """Return a LoraConfig as TRL's ModelConfig would have it; raise InputError if it is another kind of adapters."""
    if peft_config is None:
        return {}
    if type(peft_config).__name__ != "LoraConfig":
        raise InputError(f"Adapters of {type(peft_config).__name__} are not counted, only those of a LoraConfig.")
    named = {name: _plain(getattr(peft_config, field)) for field, name in LORA_SETTINGS.items()}
    beyond = {
        field.name: _plain(getattr(peft_config, field.name))
        for field in fields(peft_config)
        if field.name in LORA_UNMODELLED and getattr(peft_config, field.name) not in (field.default, {}, None)
    }
    return {"use_peft": True, **named, **beyond}


def _chosen(config: Any) -> set[str]:
    """Return the fields of a config that have another value than its class's default."""
    return {field.name for field in fields(config) if getattr(config, field.name) != field.default}


def _config(keys: Mapping[str, Any], chosen: set[str]) -> TrainConfig:
    """Return the settings of configs. A dataclass has every key of its class: those without effect need no warning."""
    read = train_config(keys, Path(), chosen=chosen)
    return replace(read, ignored=(), unmodelled=(*read.unmodelled, *(keys.keys() & LORA_UNMODELLED)))


def _plain(value: Any) -> Any:
    """Return a value of a config as YAML has it: the value of an enum, "bfloat16" for torch.bfloat16."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [_plain(each) for each in (sorted(value) if isinstance(value, set) else value)]
    if type(value).__name__ in NESTED:
        return {name.removeprefix("_"): _plain(each) for name, each in vars(value).items()}
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value).removeprefix("torch.")

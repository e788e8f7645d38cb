"""Settings by the names of TRL, PEFT, Transformers, accelerate, DeepSpeed and vLLM <-> fields of a Candidate.

Names and values that differ from the Candidate's are listed in `spellings.py`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from functools import cache
from typing import Literal, NoReturn, get_args, get_origin, get_type_hints

from planner.candidate import DEEPSPEED, Candidate
from planner.errors import InputError, UnknownName
from planner.jobs.spellings import ALIASES, FSDP_OFFLOAD, METHOD_NAMES, NAMES, OWNER, SPELLINGS, VALUE_ALIASES, Value
from planner.methods import has_setting
from planner.models.shape import ModelShape

# Upper bounds of what a user can mean: of a batch in samples, of any other number.
MANY, LARGEST = 10**6, 10**9
# The smallest and largest value of a number; a count that is not here is at least 1.
RANGES: dict[str, tuple[float, float]] = {
    "vllm_gpu_memory_utilization": (0.01, 1.0),
    "vllm_max_model_length": (0, LARGEST),
    "lora_dropout": (0.0, 1.0),
    "beta": (0.0, LARGEST),
    "num_generations": (2, LARGEST),  # trl 1.16, grpo_config.py:1137
    "per_device_train_batch_size": (1, MANY),
    "gradient_accumulation_steps": (1, MANY),
}

# Conditions under which a candidate has a setting that its method has (planner/methods.py); others are always shown.
SHOWN: dict[str, Callable[[Candidate], bool]] = {
    "checkpoint_every_n_layers": lambda c: c.gradient_checkpointing,
    "checkpoint_offload": lambda c: c.gradient_checkpointing,
    "lora_r": lambda c: c.tuning == "lora",
    "lora_target_modules": lambda c: c.tuning == "lora",
    "lora_dropout": lambda c: c.tuning == "lora",
    "autocast_adapter_dtype": lambda c: c.tuning == "lora",
    "offload_optimizer": lambda c: c.sharding in DEEPSPEED,
    "offload_param": lambda c: c.sharding == "zero3",
    "ds3_gather_for_generation": lambda c: c.sharding == "zero3",
    "vllm": lambda c: c.method_row.supports_vllm,
    "vllm_gpu_memory_utilization": lambda c: c.vllm != "off",
    "vllm_tensor_parallel_size": lambda c: c.vllm != "off",
    "vllm_max_model_length": lambda c: c.vllm != "off",
    "vllm_data_parallel_size": lambda c: c.vllm == "server",
    "vllm_enable_sleep_mode": lambda c: c.vllm == "colocate",
    "reward_model": lambda c: c.reward_model is not None,
    "teacher_model": lambda c: c.teacher_model is not None,
}

FLAGS_OF_THEIR_OWN = ("method", "trl_version")
AUTO = "auto"  # as `dtype`: that of the published weights (transformers/modeling_utils.py:4177)
NAMED_AS = "Settings are named as in TRL's configs, PEFT, accelerate, DeepSpeed and vLLM."
LISTED_CHOICES = 10  # an error lists no more; of a longer list it names the nearest
_MODELS = ("model", "reward_model", "teacher_model")
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


@cache
def field_types() -> dict[str, object]:
    """Every Candidate field that can be set, with its type; a model is set by its name."""
    hints = get_type_hints(Candidate)
    return {
        field.name: str if field.name in _MODELS else hints[field.name]
        for field in fields(Candidate)
        if field.name not in FLAGS_OF_THEIR_OWN
    }


@cache
def setting_names() -> tuple[str, ...]:
    """Every name that `--set` and a config file may use."""
    return tuple(dict.fromkeys((*field_types(), *OWNER, *ALIASES)))


def parse_assignments(assignments: Iterable[str]) -> dict[str, Value]:
    """`["lora_r=16", "vllm_mode=server"]` as names and values, checked one by one.

    Raises:
        InputError: a text without `=`, a name given twice with two values, or a value of the wrong type.
        UnknownName: a name that no library has.
    """
    given: dict[str, Value] = {}
    for assignment in assignments:
        name, equals, text = (part.strip() for part in assignment.partition("="))
        if not equals:
            raise InputError(f"--set {assignment} has no value. Write it as name=value, such as --set lora_r=16.")
        if name not in setting_names():
            if name in FLAGS_OF_THEIR_OWN:
                raise InputError(f"{name} has a flag of its own: --{name.replace('_', '-')}.")
            raise UnknownName("setting", name, setting_names(), hint=NAMED_AS)
        value = _checked(name, text)
        if name in given and given[name] != value:
            raise InputError(f"{name} is set twice: {given[name]} and {value}.")
        given[name] = value
    return given


def fields_named(names: Iterable[str]) -> set[str]:
    """The Candidate fields that these settings decide."""
    return {OWNER.get(name) or ALIASES.get(name, name) for name in names}


def candidate_fields(given: Mapping[str, Value], published_dtype: str) -> dict[str, Value]:
    """Settings under any of their names as Candidate fields; a model stays its name, for whoever loads it.

    `published_dtype` is what `dtype=auto` means: that of the model's weights.

    Raises:
        InputError: two settings contradict each other, or a value is none that the setting can have.
    """
    chosen: dict[str, Value] = {}
    said: dict[str, str] = {}
    spelled: dict[str, dict[str, Value]] = {}
    for name, raw in given.items():
        value = _checked(name, raw)
        value = published_dtype if value == AUTO and ALIASES.get(name, name) == "dtype" else value
        if name in OWNER:
            spelled.setdefault(OWNER[name], {})[name] = value
        else:
            _choose(chosen, said, ALIASES.get(name, name), value, f"{name}={_text(value)}")
    for field, names in spelled.items():
        _choose(
            chosen,
            said,
            field,
            _row_of(field, names),
            " ".join(f"{name}={_text(value)}" for name, value in names.items()),
        )
    return chosen


def settings_of(candidate: Candidate) -> dict[str, object]:
    """Settings of a candidate by the libraries' names, to paste into a TRL config, an accelerate file or the environment."""
    values: dict[str, object] = {}
    for field in fields(Candidate):
        if not _is_shown(candidate, field.name):
            continue
        value = getattr(candidate, field.name)
        if field.name in SPELLINGS:
            values.update(SPELLINGS[field.name][value])
        else:
            values[_name_of(candidate, field.name)] = (
                (value.path or value.id) if field.name in _MODELS else _plain(field.name, value)
            )
    if candidate.sharding == "fsdp2":
        values[FSDP_OFFLOAD] = candidate.offload_param
    return _nested(candidate, values)


def settings_of_fields(chosen: Mapping[str, object]) -> dict[str, object]:
    """Some Candidate fields by the libraries' names, such as those that a job pins."""
    values: dict[str, object] = {}
    for field, value in chosen.items():
        if field in SPELLINGS and isinstance(value, (str, bool)):
            values.update(SPELLINGS[field][value])
        else:
            values[NAMES.get(field, field)] = (
                (value.path or value.id) if isinstance(value, ModelShape) else _plain(field, value)
            )
    return values


def settings_text(settings: Mapping[str, object]) -> str:
    """Settings as `--set` takes them: `use_vllm=true vllm_mode=server`."""
    return " ".join(
        f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in settings.items()
    )


def _nested(candidate: Candidate, values: dict[str, object]) -> dict[str, object]:
    """Put settings that are part of another one in its place: keyword arguments and environment variables."""
    environment = {"PYTORCH_CUDA_ALLOC_CONF": values.pop("PYTORCH_CUDA_ALLOC_CONF")}
    # Source: trl/trainer/sft_trainer.py:870-895: adapters under ZeRO-3 are checkpointed reentrantly, everything else is not.
    kwargs: dict[str, object] = {"use_reentrant": candidate.tuning == "lora" and candidate.sharding == "zero3"}
    every, offload = values.pop("checkpoint_every_n_layers", 1), values.pop("checkpoint_offload", False)
    values["gradient_checkpointing_kwargs"] = (
        kwargs | ({"every_n_layers": every} if every != 1 else {}) | ({"offload": True} if offload else {})
    )
    values["environment"] = {name: value for name, value in environment.items() if value}
    return values


def _is_shown(candidate: Candidate, field: str) -> bool:
    """Whether the candidate's method, tuning and sharding read the setting."""
    return has_setting(candidate.method, field) and (field not in SHOWN or SHOWN[field](candidate))


def _name_of(candidate: Candidate, field: str) -> str:
    return METHOD_NAMES.get((candidate.method, field)) or NAMES.get(field, field)


def _plain(field: str, value: object) -> object:
    """A field's value as TRL and JSON write it: a list for a tuple, None for vLLM's whole context."""
    if field == "vllm_max_model_length" and value == 0:
        return None
    if field == "lora_target_modules" and value == ("all-linear",):
        return "all-linear"  # a string, not a list, means PEFT's shorthand
    if field == "lora_target_modules" and value == ("default",):
        return None  # PEFT's own choice
    return list(value) if isinstance(value, tuple) else value


def _choose(chosen: dict[str, Value], said: dict[str, str], field: str, value: Value, words: str) -> None:
    if field in chosen and chosen[field] != value:
        raise InputError(f"{words} contradicts {said[field]}.")
    chosen[field], said[field] = value, words


def _row_of(field: str, names: Mapping[str, Value]) -> str | bool:
    """The first value of `field` whose spelling agrees with everything given; off and unset are the same."""
    for value, row in SPELLINGS[field].items():
        if all((row.get(name) or None) == (given or None) for name, given in names.items()):
            return value
    words = [f"{name}={_text(given)}" for name, given in names.items()]
    if len(words) > 1:
        raise InputError(f"{' and '.join(words)} contradict each other.")
    (name,) = names
    raise InputError(f"{words[0]} is not supported. {name} can be {', '.join(_spelled_values(name))}.")


def _spelled_values(name: str) -> list[str]:
    return list(dict.fromkeys(_text(row[name]) for row in SPELLINGS[OWNER[name]].values() if name in row))


def _type_of(name: str) -> object:
    if name not in OWNER:
        return field_types()[ALIASES.get(name, name)]
    return type(next(row[name] for row in SPELLINGS[OWNER[name]].values() if name in row))


def _checked(name: str, value: Value) -> Value:
    """`value` in the type of the setting, from text or from YAML."""
    kind = _type_of(name)
    field = ALIASES.get(name, name)
    text = VALUE_ALIASES.get(field, {}).get(_text(value), _text(value)).strip()
    if field == "dtype" and text == AUTO:
        return AUTO
    if get_origin(kind) is Literal:
        return _one_of(name, text, get_args(kind))
    if kind is bool:
        return _truth(name, text)
    if kind in (int, float):
        return _number(name, text, field, whole=kind is int)
    if get_origin(kind) is tuple:
        return tuple(part for part in text.replace(",", " ").split() if part)
    return text


def _one_of(name: str, text: str, choices: tuple[str, ...]) -> str:
    if text not in choices:
        hint = f"{name} can be {', '.join(choices)}." if len(choices) <= LISTED_CHOICES else ""
        raise UnknownName(name, text, choices, hint=hint)
    return text


def _truth(name: str, text: str) -> bool:
    if text.lower() not in (*_TRUE, *_FALSE):
        _refuse(name, text, "true or false")
    return text.lower() in _TRUE


def _number(name: str, text: str, field: str, whole: bool) -> int | float:
    if text.lower() in ("none", "null") and field == "vllm_max_model_length":
        return 0  # vLLM takes the model's whole context
    try:
        number = int(text.replace("_", "")) if whole else float(text)
    except ValueError:
        wanted = "one number a run" if "," in text else "a whole number" if whole else "a number"
        _refuse(name, text, wanted)
    low, high = RANGES.get(field, (1 if whole else 0.0, LARGEST))
    if not low <= number <= high:
        _refuse(
            name,
            text,
            f"from {low:g} to {high:g}"
            if high < MANY
            else f"at most {high:,}"
            if number > high
            else f"at least {low:g}",
        )
    return number


def _refuse(name: str, text: str, wanted: str) -> NoReturn:
    raise InputError(f"{name} must be {wanted}, not {text or 'empty'}.")


def _text(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)

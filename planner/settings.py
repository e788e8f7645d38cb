"""Settings, both ways: from the names of TRL, PEFT, Transformers, accelerate, DeepSpeed and vLLM to a Candidate's fields, and back.

A field that has the same name and value there needs no entry here; the tables below hold the others.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from functools import cache
from typing import Literal, NoReturn, get_args, get_origin, get_type_hints

from planner.candidate import ROWS_OF_MAX_LENGTH, Candidate
from planner.errors import InputError, UnknownName
from planner.model import ModelShape

Value = str | int | float | bool | tuple[str, ...] | None

# One field of ours, several settings of theirs: for each value, how they spell it. A setting that a row does not name is off or unset there.
# Of the rows that agree with what was given, the first one counts.
SPELLINGS: dict[str, dict[str | bool, dict[str, Value]]] = {
    # Source: trl/trainer/model_config.py.
    "tuning": {"full": {"use_peft": False}, "lora": {"use_peft": True}},
    # Source: trl/trainer/model_config.py, get_quantization_config; quant_method as in the `quantization_config` of a published checkpoint.
    "quantization": {
        "none": {"load_in_4bit": False, "load_in_8bit": False},
        "nf4": {"load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4", "use_bnb_nested_quant": False},
        "nf4-double": {"load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4", "use_bnb_nested_quant": True},
        "int8": {"load_in_4bit": False, "load_in_8bit": True},
        "gptq": {"load_in_4bit": False, "load_in_8bit": False, "quant_method": "gptq"},
        "awq": {"load_in_4bit": False, "load_in_8bit": False, "quant_method": "awq"},
        "fp8": {"load_in_4bit": False, "load_in_8bit": False, "quant_method": "fp8"},
        "mxfp4": {"load_in_4bit": False, "load_in_8bit": False, "quant_method": "mxfp4"},
    },
    # Source: transformers/training_args.py. `bf16: false` alone trains without autocast.
    "precision": {"bf16": {"bf16": True, "fp16": False}, "no": {"bf16": False, "fp16": False}, "fp16": {"bf16": False, "fp16": True}},
    # Source: accelerate's launch file, trl/accelerate_configs/*.yaml.
    "sharding": {
        "none": {"distributed_type": "NO"},
        "ddp": {"distributed_type": "MULTI_GPU"},
        "zero1": {"distributed_type": "DEEPSPEED", "zero_stage": 1},
        "zero2": {"distributed_type": "DEEPSPEED", "zero_stage": 2},
        "zero3": {"distributed_type": "DEEPSPEED", "zero_stage": 3},
        "fsdp2": {"distributed_type": "FSDP", "fsdp_version": 2},
    },
    "offload_optimizer": {False: {"offload_optimizer_device": "none"}, True: {"offload_optimizer_device": "cpu"}},
    "offload_param": {False: {"offload_param_device": "none"}, True: {"offload_param_device": "cpu"}},
    # Source: trl/trainer/grpo_config.py, use_vllm and vllm_mode.
    "vllm": {"off": {"use_vllm": False}, "colocate": {"use_vllm": True, "vllm_mode": "colocate"}, "server": {"use_vllm": True, "vllm_mode": "server"}},
    # Source: torch/cuda/memory.py; read from the environment before the first allocation.
    "expandable_segments": {False: {"PYTORCH_CUDA_ALLOC_CONF": ""}, True: {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}},
}

FSDP_OFFLOAD = "fsdp_offload_params"  # accelerate's name; FSDP moves parameters, gradients and optimizer together

# One field, another name. Read everywhere; the second table is what is written.
ALIASES: dict[str, str] = {
    "model_name_or_path": "model",
    "reward_model_name_or_path": "reward_model",  # trl/scripts/grpo.py
    "teacher_model_name_or_path": "teacher_model",  # trl/trainer/distillation_config.py
    "torch_dtype": "dtype",  # transformers 4
    "max_seq_length": "max_length",  # trl before 0.20
    "max_new_tokens": "max_completion_length",  # online DPO, GKD
    "response_length": "max_completion_length",  # PPO
    "max_prompt_length": "prompt_length",  # trl before 1.0
    "kl_coef": "beta",  # PPO
    "activation_checkpointing": "gradient_checkpointing",  # transformers 5.23, training_args.py:908
    "every_n_layers": "checkpoint_every_n_layers",  # a key of gradient_checkpointing_kwargs
    "offload": "checkpoint_offload",  # a key of gradient_checkpointing_kwargs
    "num_machines": "num_nodes",  # accelerate
    "mixed_precision": "precision",  # accelerate
    FSDP_OFFLOAD: "offload_param",
    "offload_params": "offload_param",  # the same in an fsdp_config
}
NAMES: dict[str, str] = {
    "model": "model_name_or_path",
    "reward_model": "reward_model_name_or_path",
    "teacher_model": "teacher_model_name_or_path",
    "num_nodes": "num_machines",
}
METHOD_NAMES: dict[tuple[str, str], str] = {
    ("online-dpo", "max_completion_length"): "max_new_tokens",
    ("gkd", "max_completion_length"): "max_new_tokens",
    ("ppo", "max_completion_length"): "response_length",
    ("ppo", "beta"): "kl_coef",
}

# Another way to write a value.
VALUE_ALIASES: dict[str, dict[str, str]] = {
    "dtype": {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"},
    "attn_implementation": {  # the flash kernels of the Hub, trl/docs kernels_hub
        "kernels-community/flash-attn2": "flash_attention_2",
        "kernels-community/flash-attn3": "flash_attention_3",
        "kernels-community/vllm-flash-attn3": "flash_attention_3",
    },
}

MANY, LARGEST = 10**6, 10**9  # of samples, of anything: more is a slip of the finger
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

# Which settings a candidate has: those that its method, tuning and sharding read. A field that is not here is always shown.
SHOWN: dict[str, Callable[[Candidate], bool]] = {
    "max_length": lambda c: not c.method_row.generates or c.method in ROWS_OF_MAX_LENGTH,
    "prompt_length": lambda c: c.method_row.generates,
    "max_completion_length": lambda c: c.method_row.generates,
    "num_generations": lambda c: c.method in ("grpo", "rloo"),
    "steps_per_generation": lambda c: c.method in ("grpo", "rloo"),
    "num_iterations": lambda c: c.method in ("grpo", "rloo"),
    "packing": lambda c: c.method == "sft",
    "padding_free": lambda c: c.method in ("sft", "dpo"),
    "beta": lambda c: c.method_row.reference != "never" or c.method_row.teacher,
    "precompute_ref_log_probs": lambda c: c.method in ("dpo", "kto"),
    "activation_offloading": lambda c: not c.method_row.generates or c.activation_offloading,
    "checkpoint_every_n_layers": lambda c: c.gradient_checkpointing,
    "checkpoint_offload": lambda c: c.gradient_checkpointing,
    "lora_r": lambda c: c.tuning == "lora",
    "lora_target_modules": lambda c: c.tuning == "lora",
    "lora_dropout": lambda c: c.tuning == "lora",
    "autocast_adapter_dtype": lambda c: c.tuning == "lora",
    "offload_optimizer": lambda c: c.sharding in ("zero1", "zero2", "zero3"),
    "offload_param": lambda c: c.sharding == "zero3",
    "ds3_gather_for_generation": lambda c: c.sharding == "zero3" and c.method_row.generates,
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
_OWNER: dict[str, str] = {name: field for field, rows in SPELLINGS.items() for row in rows.values() for name in row}
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


@cache
def field_types() -> dict[str, object]:
    """Every Candidate field that can be set, with its type; a model is set by its name."""
    hints = get_type_hints(Candidate)
    return {field.name: str if field.name in _MODELS else hints[field.name] for field in fields(Candidate) if field.name not in FLAGS_OF_THEIR_OWN}


@cache
def setting_names() -> tuple[str, ...]:
    """Every name that `--set` and a config file may use."""
    return tuple(dict.fromkeys((*field_types(), *_OWNER, *ALIASES)))


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
    return {_OWNER.get(name) or ALIASES.get(name, name) for name in names}


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
        if name in _OWNER:
            spelled.setdefault(_OWNER[name], {})[name] = value
        else:
            _choose(chosen, said, ALIASES.get(name, name), value, f"{name}={_text(value)}")
    for field, names in spelled.items():
        _choose(chosen, said, field, _row_of(field, names), " ".join(f"{name}={_text(value)}" for name, value in names.items()))
    return chosen


def settings_of(candidate: Candidate) -> dict[str, object]:
    """A candidate as its libraries spell it: keys that can be pasted into a TRL config, an accelerate file or an environment."""
    values: dict[str, object] = {}
    for field in fields(Candidate):
        if not SHOWN.get(field.name, _always)(candidate):
            continue
        value = getattr(candidate, field.name)
        if field.name in SPELLINGS:
            values.update(SPELLINGS[field.name][value])
        else:
            values[_name_of(candidate, field.name)] = (value.path or value.id) if field.name in _MODELS else _plain(field.name, value)
    if candidate.sharding == "fsdp2":
        values[FSDP_OFFLOAD] = candidate.offload_param
    return _nested(candidate, values)


def settings_of_fields(chosen: Mapping[str, object]) -> dict[str, object]:
    """Some Candidate fields as their libraries spell them, such as what a job pins."""
    values: dict[str, object] = {}
    for field, value in chosen.items():
        if field in SPELLINGS and isinstance(value, (str, bool)):
            values.update(SPELLINGS[field][value])
        else:
            values[NAMES.get(field, field)] = (value.path or value.id) if isinstance(value, ModelShape) else _plain(field, value)
    return values


def settings_text(settings: Mapping[str, object]) -> str:
    """Settings as `--set` takes them: `use_vllm=true vllm_mode=server`."""
    return " ".join(f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in settings.items())


def _nested(candidate: Candidate, values: dict[str, object]) -> dict[str, object]:
    """Moves what travels inside another setting to its place: keyword arguments and the environment."""
    environment = {"PYTORCH_CUDA_ALLOC_CONF": values.pop("PYTORCH_CUDA_ALLOC_CONF")}
    # Source: trl/trainer/sft_trainer.py:870-895: adapters under ZeRO-3 are checkpointed reentrantly, everything else is not.
    kwargs: dict[str, object] = {"use_reentrant": candidate.tuning == "lora" and candidate.sharding == "zero3"}
    every, offload = values.pop("checkpoint_every_n_layers", 1), values.pop("checkpoint_offload", False)
    values["gradient_checkpointing_kwargs"] = kwargs | ({"every_n_layers": every} if every != 1 else {}) | ({"offload": True} if offload else {})
    values["environment"] = {name: value for name, value in environment.items() if value}
    return values


def _always(candidate: Candidate) -> bool:
    return True


def _name_of(candidate: Candidate, field: str) -> str:
    return METHOD_NAMES.get((candidate.method, field)) or NAMES.get(field, field)


def _plain(field: str, value: object) -> object:
    """A field's value as JSON and TRL have it: a list for a tuple, None for vLLM's whole context."""
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
    return list(dict.fromkeys(_text(row[name]) for row in SPELLINGS[_OWNER[name]].values() if name in row))


def _type_of(name: str) -> object:
    if name not in _OWNER:
        return field_types()[ALIASES.get(name, name)]
    return type(next(row[name] for row in SPELLINGS[_OWNER[name]].values() if name in row))


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
        _refuse(name, text, f"from {low:g} to {high:g}" if high < MANY else f"at most {high:,}" if number > high else f"at least {low:g}")
    return number


def _refuse(name: str, text: str, wanted: str) -> NoReturn:
    raise InputError(f"{name} must be {wanted}, not {text or 'empty'}.")


def _text(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)

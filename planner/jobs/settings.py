"""Convert settings between the libraries' names (TRL, PEFT, Transformers, ...) and the fields of a Candidate.

The names, values and bounds are those of the settings table (planner/data/settings.json).
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from operator import attrgetter

from planner.candidate import FIELDS, MODEL_FIELDS, Candidate
from planner.errors import InputError, UnknownName, shortened
from planner.jobs.setting_values import AUTO, OWN_FLAGS, as_text, field_types, parse_value
from planner.methods import LAYERS_ONLY, NEWEST_TRL
from planner.models.lora_targets import is_expression
from planner.models.shape import ModelShape
from planner.rows.lengths import RowLengths
from planner.settings.setting import Value
from planner.settings.table import ALIASES, FIELD_OF_SETTING, SETTING_OF, SETTINGS, SPELLINGS, has_setting
from planner.settings.unread import UNMODELLED, WITHOUT_EFFECT

CHECKPOINTING_KWARGS = "gradient_checkpointing_kwargs"
GROUPS = (CHECKPOINTING_KWARGS, "environment")  # settings that are dicts of others
NAMING_HINT = "Settings are named as in TRL's configs, PEFT, accelerate, DeepSpeed and vLLM."
# Arguments (or their keys) that `trl_arguments` adds where they are needed, with the values that it may add. A user who
# gives one of these values changes nothing: the plan decides.
IMPLIED: dict[str, tuple[object, ...]] = {
    "chat_template_kwargs": ({"return_tensors": None},),
    "liger_kernel_config": (LAYERS_ONLY,),
    "lora_task_type": ("SEQ_CLS",),
    "optim_target_modules": ("all-linear",),
    "router_aux_loss_coef": (0.0,),
    "save_only_model": (True, False),  # the one kind of checkpoint of `DISTRIBUTED` (transformers 5.23, trainer.py)
    "use_reentrant": (False, True),  # TRL decides, by the scheme and the adapters (`_nested`)
}


@cache
def setting_names() -> tuple[str, ...]:
    """Return every name that `--set` and a config file may use."""
    return tuple(dict.fromkeys((*field_types(), *FIELD_OF_SETTING, *ALIASES)))


def parse_assignments(assignments: Iterable[str]) -> dict[str, Value]:
    """Parse `["lora_r=16", "vllm_mode=server"]` into names and values, each checked by itself.

    Raises:
        InputError: a text without `=`, a name given twice with two values, or a value of the wrong type.
        UnknownName: a name that no library has.
    """
    given: dict[str, Value] = {}
    for assignment in assignments:
        name, equals, text = (part.strip() for part in assignment.partition("="))
        if not equals:
            raise InputError(
                f"--set {shortened(assignment)} has no value. Write it as name=value, such as --set lora_r=16."
            )
        if is_implied(name, text):
            given[name] = text
            continue
        refuse_unknown(name)
        value = text if name in WITHOUT_EFFECT else parse_value(name, text)
        if name in given and given[name] != value:
            raise InputError(f"{name} is set twice: {given[name]} and {value}.")
        given[name] = value
    return given


def is_implied(name: str, value: object) -> bool:
    """Return whether an argument has a value of `IMPLIED`, in its type or as text."""
    if name not in IMPLIED:
        return False
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            value = json.loads(value)
    return value in IMPLIED[name]


def refuse_unknown(name: str) -> None:
    """Refuse a name that `--set` cannot use. It can use an argument without effect, which no field reads.

    Raises:
        InputError: it has a flag of its own, or its effect is not counted.
        UnknownName: no library has it.
    """
    if name in OWN_FLAGS:
        raise InputError(f"{name} has a flag of its own: --{name.replace('_', '-')}.")
    if name in UNMODELLED:
        raise InputError(f"{name} changes memory or speed in a way that is not counted. Plan without it.")
    if name not in setting_names() and name not in WITHOUT_EFFECT:
        raise UnknownName("setting", name, (*setting_names(), *WITHOUT_EFFECT), hint=NAMING_HINT)


def setting_field(name: str) -> str:
    """Return the Candidate field that a setting of this name decides."""
    return FIELD_OF_SETTING.get(name) or ALIASES.get(name, name)


def fields_named(names: Iterable[str]) -> set[str]:
    """Return the Candidate fields that settings of these names decide."""
    return {setting_field(name) for name in names}


def candidate_fields(
    given: Mapping[str, Value], published_dtype: str, published_quantization: str = "none"
) -> dict[str, Value]:
    """Convert settings by any of their names to Candidate fields. A model stays a name; the caller loads it.

    `published_dtype`: the dtype of the published weights, which `dtype=auto` means. `published_quantization`: the
    quantization that the weights have without one at load, which `load_in_4bit=false` means.

    Raises:
        InputError: two settings contradict each other, or a setting cannot have the value.
    """
    chosen: dict[str, Value] = {}
    sources: dict[str, str] = {}  # the text of the setting that decided a field, for error messages
    spelled: dict[str, dict[str, Value]] = {}
    for name, raw in given.items():
        value = parse_value(name, raw)
        value = published_dtype if value == AUTO and ALIASES.get(name, name) == "dtype" else value
        if name in FIELD_OF_SETTING:
            spelled.setdefault(FIELD_OF_SETTING[name], {})[name] = value
        else:
            _decide(chosen, sources, ALIASES.get(name, name), value, f"{name}={as_text(value)}")
    for field, names in spelled.items():
        words = " ".join(f"{name}={as_text(given[name])}" for name in names)
        kept = published_quantization if field == "quantization" else "none"
        spelled_value = value_spelled(field, names, given)
        _decide(chosen, sources, field, kept if spelled_value == "none" else spelled_value, words)
    return chosen


def settings_of(candidate: Candidate) -> dict[str, object]:
    """Convert a candidate to settings by the libraries' names, to paste into a TRL config or an accelerate file."""
    values: dict[str, object] = {}
    for field in FIELDS:
        if not is_shown(candidate, field):
            continue
        value = getattr(candidate, field)
        if field in SPELLINGS:
            values.update(SPELLINGS[field][value])
        else:
            name = candidate.method_row.argument_names.get(field) or SETTING_OF[field].written or field
            values[name] = (value.path or value.id) if field in MODEL_FIELDS else library_value(field, value)
    if candidate.scheme_row.offload_setting:
        values[candidate.scheme_row.offload_setting] = candidate.offload_param
    return _nested(candidate, values)


# The key of `model_init_kwargs` with the sizes of Transformers' own FSDP2.
DISTRIBUTED = "distributed_config"

# Settings that no config class of TRL has a field for.
NOT_TRL_ARGUMENTS = frozenset(
    (
        "environment",
        *(
            name
            for row in SETTINGS
            for name in (*row.library_names, *row.names)
            if row.file_of(name) not in ("trl", "checkpointing")
        ),
    )
)
# Configs of the trainers whose fused head has an auxiliary loss of routers, which a coefficient of 0 turns off.
# Source: trl 1.16, trainer/sft_trainer.py (`aux_loss_enabled`), whose trainer and config GKD's extend.
ROUTER_LOSS_CONFIGS = frozenset(
    {
        "SFTConfig",
        "DPOConfig",
        "KTOConfig",
        "GRPOConfig",
        "GMPOConfig",
        "RLOOConfig",
        "GKDConfig",
        "GOLDConfig",
        "AsyncGRPOConfig",
    }
)


def trl_arguments(candidate: Candidate) -> dict[str, object]:
    """Return the settings that the config class of the candidate's method or TRL's `ModelConfig` has a field for.

    A single target of adapters is written as a regular expression: TRL makes a string of a list of one, which PEFT
    takes as an expression for the whole path of a module; sdpa is not named to a model that stops at its name.
    Source: trl 1.16, trainer/model_config.py, `ModelConfig.__post_init__`; peft 0.21.2, utils/other.py,
    `match_target_against_key`.
    """
    missing = NOT_TRL_ARGUMENTS | candidate.method_row.missing_arguments
    arguments = {name: value for name, value in settings_of(candidate).items() if name not in missing}
    targets = candidate.lora_target_modules
    single = len(targets) == 1 and not is_expression(targets)
    if single and arguments.get("lora_target_modules") == [*targets]:
        arguments["lora_target_modules"] = [rf".*\.{re.escape(targets[0])}"]
    if candidate.attn_implementation == "sdpa" and any(model.stops_at_named_sdpa for model in candidate.models):
        arguments["attn_implementation"] = None
    return arguments | _implied_arguments(candidate)


def _implied_arguments(candidate: Candidate) -> dict[str, object]:
    """Return the arguments that follow from settings of other names, or that a trainer needs beside them."""
    arguments: dict[str, object] = {}
    if candidate.optimizer_row.projects:
        arguments["optim_target_modules"] = IMPLIED["optim_target_modules"][0]
    if candidate.sync_each_batch and is_shown(candidate, "sync_each_batch"):
        arguments["accelerator_config"] = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    if candidate.method_row.teacher and candidate.teacher_dtype != "student":
        arguments["teacher_model_init_kwargs"] = {"dtype": candidate.teacher_dtype}
    if loading := loading_arguments(candidate):
        arguments["model_init_kwargs"] = loading
        arguments |= {"save_only_model": IMPLIED["save_only_model"][0]} if DISTRIBUTED in loading else {}
    if candidate.use_liger_kernel and candidate.method_row.liger_layers == "config":
        arguments["liger_kernel_config"] = dict(LAYERS_ONLY)
    return arguments | _arguments_of_the_model(candidate)


def _arguments_of_the_model(candidate: Candidate) -> dict[str, object]:
    """Return the arguments without which a trainer stops at a model of this type, or with this head.

    PEFT's class for the task of `ModelConfig`'s default, CAUSAL_LM, stops at a model with a score head.
    Source: peft 0.21.2, peft_model.py, `PeftModelForCausalLM.__init__`.
    """
    arguments: dict[str, object] = {}
    row, method = candidate.model.architecture, candidate.method_row
    stops = row.stops_at_router_loss and candidate.trl_version == NEWEST_TRL
    if stops and method.config in ROUTER_LOSS_CONFIGS:
        arguments["router_aux_loss_coef"] = IMPLIED["router_aux_loss_coef"][0]
    if candidate.images_per_row and method.generates and row.stacks_texts:
        arguments["chat_template_kwargs"] = IMPLIED["chat_template_kwargs"][0]
    if candidate.tuning == "lora" and method.head == "score":
        arguments["lora_task_type"] = IMPLIED["lora_task_type"][0]
    return arguments


def loading_arguments(candidate: Candidate) -> dict[str, object]:
    """Return the `model_init_kwargs` that follow from settings."""
    loading: dict[str, object] = {"use_kernels": True} if candidate.use_kernels else {}
    if candidate.scheme_row.loads_divided:
        sizes = {"fsdp_size": candidate.shard_gpus, "ep_size": candidate.ep_size, "tp_size": candidate.layer_gpus}
        loading[DISTRIBUTED] = {name: size for name, size in sizes.items() if size > 1}
    return loading


def settings_of_fields(chosen: Mapping[str, object]) -> dict[str, object]:
    """Convert some Candidate fields, such as the pinned ones of a job, to settings by the libraries' names."""
    values: dict[str, object] = {}
    for field, value in chosen.items():
        if field in SPELLINGS and isinstance(value, (str, bool)):
            values.update(SPELLINGS[field][value])
        else:
            values[(SETTING_OF[field].written or field)] = (
                (value.path or value.id) if isinstance(value, ModelShape) else library_value(field, value)
            )
    return values


def settings_text(settings: Mapping[str, object]) -> str:
    """Return settings in words: `use_vllm=true vllm_mode=server`."""
    return " ".join(_assignments(settings))


def settings_flags(settings: Mapping[str, object]) -> str:
    """Return settings as a command line takes them: `--set use_vllm=true --set lora_target_modules=q_proj,k_proj`."""
    return " ".join(f"--set {assignment}" for assignment in _assignments(settings))


def _assignments(settings: Mapping[str, object]) -> Iterator[str]:
    for name, value in settings.items():
        text = ",".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)
        yield f"{name}={text.lower() if isinstance(value, bool) else text}"


def _nested(candidate: Candidate, values: dict[str, object]) -> dict[str, object]:
    """Move keys of `gradient_checkpointing_kwargs` and of `environment` into dicts of these names."""
    environment = {"PYTORCH_CUDA_ALLOC_CONF": values.pop("PYTORCH_CUDA_ALLOC_CONF")}
    # Adapters under ZeRO-3 use reentrant checkpointing, everything else does not (trl/trainer/sft_trainer.py,
    # `SFTTrainer.__init__`).
    kwargs: dict[str, object] = {
        "use_reentrant": candidate.tuning == "lora" and candidate.scheme_row.reentrant_with_adapters
    }
    every, offload = values.pop("every_n_layers", 1), values.pop("checkpoint_offload", False)
    values[CHECKPOINTING_KWARGS] = (
        kwargs | ({"every_n_layers": every} if every != 1 else {}) | ({"offload": True} if offload else {})
    )
    values["environment"] = {name: value for name, value in environment.items() if value}
    return values


def is_shown(candidate: Candidate, field: str) -> bool:
    """Return whether the libraries read the setting, and would behave otherwise without it."""
    row = SETTING_OF[field]
    return is_read(candidate, field) and (row.unset is ... or getattr(candidate, field) != row.unset)


def is_read(candidate: Candidate, field: str) -> bool:
    """Return whether the candidate's method, tuning and sharding read the setting."""
    row = SETTING_OF[field]
    return (
        has_setting(candidate.method, field)
        and (not row.owner_values or getattr(candidate, row.owner) in row.owner_values)
        and (not row.needs or bool(attrgetter(row.needs)(candidate)))
    )


def library_value(field: str, value: object) -> object:
    """Return a field's value as TRL and JSON write it: a list for a tuple, None for vLLM's whole context."""
    if isinstance(value, RowLengths):
        return value.words
    if field == "vllm_max_model_length" and value == 0:
        return None
    if field == "lora_target_modules" and value == ("all-linear",):
        return "all-linear"  # a string, not a list, means PEFT's shorthand
    if field == "lora_target_modules" and value == ("default",):
        return None  # PEFT's own choice
    return list(value) if isinstance(value, tuple) else value


def _decide(chosen: dict[str, Value], sources: dict[str, str], field: str, value: Value, words: str) -> None:
    """Set a field in `chosen`; `words`: the setting as the user wrote it.

    Raises:
        InputError: another setting gave the field another value.
    """
    if field in chosen and chosen[field] != value:
        raise InputError(f"{words} contradicts {sources[field]}.")
    chosen[field], sources[field] = value, words


def values_spelled(field: str, names: Mapping[str, Value]) -> list[str | bool]:
    """Return the values of `field` whose spelling agrees with all settings of `names`; off and unset are equal."""
    return [
        value
        for value, row in SPELLINGS[field].items()
        if all((row.get(name) or None) == (given or None) for name, given in names.items())
    ]


def value_spelled(field: str, names: Mapping[str, Value], written: Mapping[str, Value]) -> str | bool:
    """Return the first value of `field` of `values_spelled`.

    `written`: these settings as the user wrote them, for error messages.

    Raises:
        InputError: no value agrees.
    """
    if agreeing := values_spelled(field, names):
        return agreeing[0]
    words = {name: f"{name}={as_text(written[name])}" for name in names}
    alone = [
        name
        for name, given in names.items()
        if all((row.get(name) or None) != (given or None) for row in SPELLINGS[field].values())
    ]
    if not alone:
        raise InputError(f"{' and '.join(words.values())} contradict each other.")
    name = alone[0]
    raise InputError(f"{words[name]} is not supported. {name} can be {', '.join(_spelled_values(name))}.")


def _spelled_values(name: str) -> list[str]:
    """Return the values that a setting of `SPELLINGS` can have, as text."""
    rows = (row for rows in SPELLINGS.values() for row in rows.values())
    return list(dict.fromkeys(as_text(row[name]) or "empty" for row in rows if name in row))

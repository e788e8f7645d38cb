"""train.yaml made of the user's own: the same text with the plan's changes, each marked with a comment."""

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct

from planner.candidate import Candidate
from planner.errors import InputError, PlanError
from planner.files.edit_yaml import Edits, KeyChange, edit_yaml
from planner.files.yaml import parse_yaml
from planner.jobs.setting_values import typed_value
from planner.jobs.settings import (
    CHECKPOINTING_KWARGS,
    is_read,
    setting_field,
    setting_names,
    settings_of_fields,
    trl_arguments,
)
from planner.launch.trl_config import (
    FACTS,
    FILE,
    FILL_IN,
    NEWER_NAMES,
    Launcher,
    facts,
    facts_line,
    placeholders,
    trl_config,
)
from planner.settings.table import FIELD_OF_SETTING, SETTING_OF

# Keys of a TRL config that start processes or shard the model, which accelerate.yaml or launch.sh says.
# Source: trl 1.16, cli/commands/training.py; accelerate 1.15, commands/launch.py; transformers 5.23, training_args.py.
LAUNCH_KEYS = frozenset(
    (
        "accelerate_config", "config_file", "deepspeed", "fsdp", "fsdp_config", "parallelism_config",
        *(
            name
            for row in SETTING_OF.values()
            for name in (row.field, *row.library_names, *row.names, *row.aliases)
            if row.file_of(name) in ("accelerate", "deepspeed")
        ),
    )
)  # fmt: skip
# Keys with which a file names its rows: trl 1.16, scripts/utils.py, `ScriptArguments` and `DatasetMixtureConfig`.
ROWS = ("dataset_name", "datasets")
NESTED = "model_init_kwargs"  # overrides TRL's ModelConfig: trl 1.16, scripts/sft.py, `main`
CHECKPOINTING_DETAILS = ("every_n_layers", "offload")


def merged_yaml(
    text: str, candidate: Candidate, launcher: Launcher = "accelerate", sharding: Mapping[str, object] | None = None
) -> str:
    """The text of the user's train.yaml with the settings of the candidate, each change marked where it stands.

    `sharding`: the trainer's arguments that shard the model, for a launcher that does not.

    Raises:
        InputError: the text holds no keys and values, or cannot be changed where it must.
    """
    own = "".join(line for line in text.splitlines(keepends=True) if not line.startswith(FACTS))
    keys = user_keys(own)
    run = _Run(
        candidate=candidate,
        wanted={**trl_config(candidate), **(sharding or {})},
        unset=frozenset(name for name, value in trl_arguments(candidate).items() if value is None),
        facts=facts(candidate, launcher),
        launch_file="accelerate.yaml" if launcher == "accelerate" else "launch.sh",
    )
    return facts_line(candidate, launcher) + edit_yaml(own, keys, _edits(keys, run), FILE)


def user_keys(text: str) -> dict[str, object]:
    """The keys and values of the user's train.yaml; raise InputError if the text holds something else."""
    read = parse_yaml(text, FILE)
    if read is None:
        return {}
    if not isinstance(read, dict):
        raise InputError(f"{FILE} should hold keys and values, such as model_name_or_path: Qwen/Qwen2.5-7B.")
    return read


class _Run(Struct, frozen=True, kw_only=True):
    """A file's contents. `wanted`: arguments of TRL; `unset`: those that are None; `facts`: the line of facts."""

    candidate: Candidate
    wanted: Mapping[str, object]
    unset: frozenset[str]
    facts: Mapping[str, object]
    launch_file: str


def _edits(keys: Mapping[str, object], run: _Run) -> Edits:
    """The edits that make the file say the candidate's settings."""
    edits = Edits(fill_in=FILL_IN)
    for key, value in keys.items():
        _edit_key(edits, key, value, run, keys)
    names = {_name_in(run.wanted, key) for key in keys}
    usual = _usual(run)
    for name, value in run.wanted.items():
        if name not in names and (name in NOT_TRLS_DEFAULTS or name not in usual or value != usual[name]):
            edits.added[name] = value
    missing = placeholders(run.candidate)
    edits.to_complete.update({name: missing[name] for name in missing if _is_missing(name, keys, edits)})
    return edits


def _usual(run: _Run) -> dict[str, object]:
    """TRL's arguments of the method with its defaults."""
    candidate = run.candidate
    plain = Candidate(
        model=candidate.model,
        method=candidate.method,
        trl_version=candidate.trl_version,
        **candidate.method_row.defaults_in(candidate.trl_version),  # type: ignore[arg-type]
    )
    usual = trl_config(plain)
    older = {old: usual[new] for old, new in NEWER_NAMES.items() if new in usual}
    return {**usual, **older, "steps_per_generation": run.wanted.get("gradient_accumulation_steps")}


def _edit_key(edits: Edits, key: str, value: object, run: _Run, keys: Mapping[str, object]) -> None:
    """Add the edit of one key, if there is one."""
    name = _name_in(run.wanted, key)
    if name != key and name in keys:
        edits.dropped[key] = f"{name} says this"
    elif name in run.wanted and name != NESTED:
        new = _value(name, value, run.wanted[name])
        if name != key or not _same(name, value, new):
            edits.changed[key] = KeyChange(name=name, value=new)
    elif key in LAUNCH_KEYS and key not in run.unset:
        edits.dropped[key] = f"{run.launch_file} says this"
    else:
        _edit_other(edits, key, value, run)


def _edit_other(edits: Edits, key: str, value: object, run: _Run) -> None:
    """Add the edit of a key that is none of the plan's arguments, if there is one."""
    new = value
    if key in run.unset:
        new = None
    elif key == NESTED and isinstance(value, Mapping):
        new = dict(_nested(value, {**dict.fromkeys(run.unset), **run.wanted}))
        new |= {"use_kernels": True} if run.candidate.use_kernels else {}
    elif key in setting_names() and key not in FIELD_OF_SETTING:
        if SETTING_OF[setting_field(key)].file == "data":
            edits.dropped[key] = "no argument of TRL; plan reads it in the line at the top"
            return
        new = _value_of_plan(key, value, run)
    if not _same(key, value, new):
        edits.changed[key] = KeyChange(name=key, value=new)


def _value_of_plan(key: str, value: object, run: _Run) -> object:
    """The plan's value of a setting that it leaves at the library's default, or gives to a server; else the file's."""
    field = setting_field(key)
    unset = SETTING_OF[field].unset
    if key in run.facts:
        return run.facts[key]
    if unset is not ... and is_read(run.candidate, field) and getattr(run.candidate, field) == unset:
        return next(iter(settings_of_fields({field: unset}).values()))
    return value


# Arguments whose default in `Candidate` is not TRL's: a file that leaves them out has TRL's default.
NOT_TRLS_DEFAULTS = (
    "model_name_or_path",
    "dtype",
    "attn_implementation",
    "lora_target_modules",
    "lora_dropout",
    "optim",
)


def _is_missing(name: str, keys: Mapping[str, object], edits: Edits) -> bool:
    """Return True if the user must complete an argument: TRL has no default for it, and the file does not have it."""
    if name == "dataset_name":
        return not any(row in keys for row in ROWS)
    return name not in keys and name not in edits.added and name != "output_dir"


def _name_in(wanted: Mapping[str, object], key: str) -> str:
    """The name under which `wanted` has the setting of a key; the key itself if it has none."""
    if key in wanted:
        return key
    pairs = {**NEWER_NAMES, **{new: old for old, new in NEWER_NAMES.items()}}
    if pairs.get(key) in wanted:
        return pairs[key]
    if key not in setting_names() or key in FIELD_OF_SETTING:
        return key
    same = (name for name in wanted if name in setting_names() and setting_field(name) == setting_field(key))
    return next(same, key)


def _value(name: str, value: object, wanted: object) -> object:
    """The new value of a key: the plan's; of a mapping, the user's with the plan's keys."""
    if not isinstance(wanted, Mapping):
        return wanted
    own = dict(value) if isinstance(value, Mapping) else {}
    if name in (CHECKPOINTING_KWARGS, NEWER_NAMES[CHECKPOINTING_KWARGS]):
        own = {key: each for key, each in own.items() if key not in CHECKPOINTING_DETAILS}
    return {**own, **{key: _value(key, own.get(key), each) for key, each in wanted.items()}}


def _same(name: str, value: object, wanted: object) -> bool:
    """Return True if two values of a setting mean the same: 5e8 and 500000000, bf16 and bfloat16."""
    if value == wanted and isinstance(value, bool) == isinstance(wanted, bool):
        return True
    if isinstance(value, Mapping) or isinstance(wanted, Mapping) or name not in setting_names():
        return False
    try:
        return typed_value(name, _option(value)) == typed_value(name, _option(wanted))
    except PlanError:
        return False


def _option(value: Any) -> Any:
    return tuple(map(str, value)) if isinstance(value, list) else value


def _nested(kwargs: Mapping[Any, object], wanted: Mapping[str, object]) -> Iterator[tuple[Any, object]]:
    """Yield the keys of `model_init_kwargs` with the plan's values; without a quantization that the plan has not."""
    for key, value in kwargs.items():
        name = _name_in(wanted, str(key))
        if key == "use_kernels":
            continue  # the plan's own argument has it
        if key == "quantization_config":
            if isinstance(value, Mapping) and all(
                wanted.get(each) == value[each] for each in ("load_in_4bit", "load_in_8bit") if each in value
            ):
                yield key, value
        elif name in wanted and not _same(name, value, wanted[name]):
            yield key, wanted[name]
        else:
            yield key, value

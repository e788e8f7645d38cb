"""The settings of a candidate that a report shows: the important ones, and those that differ from TRL's defaults."""

import json
import shlex
from typing import Literal

from msgspec.structs import replace

from planner.candidate import Candidate
from planner.errors import InputError
from planner.jobs.settings import CHECKPOINTING_KWARGS, GROUPS, setting_field, settings_of, trl_arguments
from planner.launch.consumers import settings_by_consumer
from planner.launch.requirements import pins_releases
from planner.launch.trl_config import NEWER_NAMES, SERVER_ARGUMENTS, facts_line, settings_lines
from planner.methods import NEWEST_TRL, defaults_of_all
from planner.settings.setting import File
from planner.settings.table import SETTING_OF, SETTINGS, SPELLINGS
from planner.units import format_count

LABELS = tuple(dict.fromkeys(row.line for row in SETTINGS if row.shown != "never"))  # of lines, in order
PLACES = {row.field: place for place, row in enumerate(SETTINGS)}

# Fields whose values have settings of their own; the defaults of those settings are not shown.
STRUCTURE = ("tuning", "quantization", "precision", "sharding", "vllm")
SettingsForm = Literal["yaml", "flags", "json"]

# TRL arguments that hold or follow from a setting of another name (planner/jobs/settings.py, `trl_arguments`).
HOLDERS = (
    "accelerator_config", "teacher_model_init_kwargs", "liger_kernel_config", "router_aux_loss_coef", "lora_task_type",
    "optim_target_modules", "model_init_kwargs", "chat_template_kwargs",
)  # fmt: skip
# TRL's defaults of arguments for which `Candidate` has another default or none. None: PEFT decides.
# Source: trl 1.16, trainer/model_config.py; trainer/grpo_config.py, `vllm_mode` (since trl 1.0).
DEFAULTS_OF_TRL: dict[str, object] = {
    "lora_dropout": 0.05, "lora_target_modules": None, "vllm_mode": "colocate", "bnb_4bit_quant_type": "nf4",
    "use_bnb_nested_quant": False,
}  # fmt: skip
LAUNCH_FILES: tuple[File, ...] = ("accelerate", "deepspeed")
SIZES = ("batch", "lengths")  # lines whose settings every reader looks for


def shown_settings(candidate: Candidate) -> dict[str, list[str]]:
    """Return lines of settings by label, written as `--set` takes them."""
    settings = settings_of(candidate)
    lines: dict[str, list[str]] = {label: [] for label in LABELS}
    for name in _shown_names(candidate):
        line = "model" if name == CHECKPOINTING_KWARGS else SETTING_OF[setting_field(name)].line
        lines[line].append(f"{name} {_value(settings[name])}")
    lines["batch"].append(f"{format_count(candidate.effective_batch_size)} samples a step")
    return {label: items for label, items in lines.items() if items}


def flags(candidate: Candidate) -> list[str]:
    """Return the settings that are arguments of TRL as flags of `trl <method>`; others are at TRL's defaults."""
    names_now = NEWER_NAMES if pins_releases(candidate) else {}
    usual = _defaults(candidate)
    return [
        f"--{names_now.get(name, name)}{_flag_value(value)}"
        for name, value in _flag_arguments(candidate).items()
        if value != usual.get(name)
    ]


def sizes_at_defaults(candidate: Candidate) -> list[str]:
    """Return the sizes that `flags` leaves out, as TRL's defaults are the same: every reader looks for them."""
    usual = _defaults(candidate)
    return [
        f"{name} {_value(value)}"
        for name, value in _flag_arguments(candidate).items()
        if value == usual.get(name) and SETTING_OF[setting_field(name)].line in SIZES
    ]


def _flag_arguments(candidate: Candidate) -> dict[str, object]:
    """Return the arguments of TRL that reports show, and those that others imply, but for arguments of a server."""
    arguments = trl_arguments(candidate)
    served = SERVER_ARGUMENTS.values() if candidate.server_gpus else ()
    names = (*_shown_names(candidate, implied_too=True), *HOLDERS)
    return {name: arguments[name] for name in names if arguments.get(name) is not None and name not in served}


def _defaults(candidate: Candidate) -> dict[str, object]:
    """Return TRL's defaults of settings, sizes only of the newest release: older ones had others."""
    plain = replace(_plain(candidate), **candidate.method_row.defaults_in(candidate.trl_version))
    chosen = {name for field in STRUCTURE for name in SPELLINGS[field][getattr(candidate, field)]}
    details = settings_of(replace(plain, **{field: getattr(candidate, field) for field in STRUCTURE}))
    found = {name: value for name, value in details.items() if name not in chosen} | settings_of(plain)
    if candidate.trl_version == NEWEST_TRL:
        return found | DEFAULTS_OF_TRL
    sizes = {name for name in found if name not in GROUPS and SETTING_OF[setting_field(name)].line in SIZES}
    return {name: value for name, value in found.items() if name not in sizes and name not in DEFAULTS_OF_TRL}


def pasted_settings(candidate: Candidate, form: SettingsForm) -> str:
    """Return all settings alone: YAML for train.yaml, flags of `trl <method>`, or JSON by the library that reads them.

    Raises:
        InputError: TRL has no argument for a setting, or the candidate is of another tool's config.
    """
    if candidate.tool != "trl":
        raise InputError(
            f"--format prints arguments of TRL, which {candidate.tool_row.name} does not read. Use --export: it gives "
            "the config back with the plan's values."
        )
    if form == "flags":
        model = shlex.quote(candidate.model.path or candidate.model.id)
        return " ".join([f"--model_name_or_path {model}", *flags(candidate)])
    if form == "json":
        return json.dumps(settings_by_consumer(candidate), indent=2, ensure_ascii=False)
    started = "".join(f"# for the launcher: {setting}\n" for setting in launch_settings(candidate))
    return f"{facts_line(candidate)}{started}{settings_lines(candidate)}".rstrip()


def launch_settings(candidate: Candidate) -> list[str]:
    """Return the shown settings that are no arguments of TRL: those of accelerate, DeepSpeed and the environment."""
    arguments, settings = trl_arguments(candidate), settings_of(candidate)
    served = SERVER_ARGUMENTS.values() if candidate.server_gpus else ()
    names = [name for name in _shown_names(candidate) if name not in (*arguments, *served)]
    files = {name: SETTING_OF[setting_field(name)].file_of(name) for name in names}
    read = (*LAUNCH_FILES, "code") if candidate.tool == "trl" else LAUNCH_FILES  # "code": the training script
    return [
        *(f"{name} {_value(settings[name])}" for name, file in files.items() if file in read),
        *(f"{name}={value}" for name, value in launch_environment(candidate)),
    ]


def _shown_names(candidate: Candidate, implied_too: bool = False) -> list[str]:
    """Return the names of the settings to show, those that every report shows first.

    `implied_too`: also those that a reader takes from others, such as use_vllm from vllm_mode.
    """
    settings, plain = settings_of(candidate), _plain(candidate)
    usual = settings_of(plain) | {
        "steps_per_generation": candidate.gradient_accumulation_steps
    }  # trl 1.16, grpo_config.py, `GRPOConfig.__post_init__`
    chosen = {name for field in STRUCTURE for name in SPELLINGS[field][getattr(candidate, field)]}
    implied = settings_of(replace(plain, **{field: getattr(candidate, field) for field in STRUCTURE}))
    rows = {name: SETTING_OF[setting_field(name)] for name in settings if name not in GROUPS}
    shown = []
    for name in sorted(rows, key=lambda name: (rows[name].shown != "always", PLACES[rows[name].field])):
        row = rows[name]
        differs = settings[name] != usual.get(name) and (name in chosen or settings[name] != implied.get(name))
        if (row.shown == "always" or (row.shown != "never" and differs)) and (implied_too or name not in row.hidden):
            shown.append(name)
    if settings[CHECKPOINTING_KWARGS] not in (usual[CHECKPOINTING_KWARGS], implied[CHECKPOINTING_KWARGS]):
        shown.append(CHECKPOINTING_KWARGS)
    return shown


def _plain(candidate: Candidate) -> Candidate:
    """Return the candidate with the defaults of every setting that are those of every config."""
    of_all = defaults_of_all(candidate.trl_version)
    return replace(
        Candidate(model=candidate.model, method=candidate.method, trl_version=candidate.trl_version), **of_all
    )


def _flag_value(value: object) -> str:
    """Return a flag's value as a shell and TRL's parser read it, after a space; a flag alone means true."""
    if isinstance(value, bool):
        return "" if value else " false"
    if isinstance(value, dict):
        return f" {shlex.quote(json.dumps(value))}"
    return "".join(f" {shlex.quote(str(each))}" for each in (value if isinstance(value, list) else [value]))


def _value(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return "default" if value is None else str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_value(inner)}" for name, inner in value.items()) + "}"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def launch_environment(candidate: Candidate) -> list[tuple[str, object]]:
    """Return the environment variables to launch the run with."""
    environment = settings_of(candidate)["environment"]
    return list(environment.items()) if isinstance(environment, dict) else []

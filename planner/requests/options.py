"""The options of a job, as typed values: those of a command line, a request over HTTP, or a notebook's arguments.

A group is a `Struct`, each of its fields an option, which data/options.json describes. `planner/commands/options.py`
makes flags of them and `planner/requests/bodies.py` the types of requests.
"""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct
from msgspec.structs import fields

from planner.errors import InputError
from planner.methods import METHODS
from planner.quantities import DEFAULT_RISK
from planner.settings.setting import Value

# Groups of options, as the command's help shows them.
Panel = Literal["job", "hardware", "pins", "goal"]


class Option(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The description of an option: one sentence, the word for its value, and the bounds of a number (None: none).

    Of options of commands alone: `argument`: it has no flag; `short`: another flag; `envvar`: a variable that gives it.
    """

    help: str
    panel: Panel = "job"
    metavar: str | None = None
    min: int | float | None = None
    max: int | float | None = None
    argument: bool = False
    short: str = ""
    envvar: str | None = None


TABLE = Path(__file__).resolve().parents[1] / "data" / "options.json"  # group -> option -> its description


@lru_cache
def described(group: type[Struct]) -> Mapping[str, Option]:
    """Return the description of each option of a group, its own and those of the groups that it extends."""
    text = TABLE.read_text(encoding="utf-8").replace("{methods}", ", ".join(METHODS))
    table = msgspec.json.decode(text, type=dict[str, dict[str, Option]])
    groups = [table.get(each.__name__, {}) for each in reversed(group.__mro__)]
    return {name: option for each in groups for name, option in each.items()}


class JobOptions(Struct, frozen=True, kw_only=True):
    """The job: model, method and GPUs, and the files that a training is started with."""

    model: str | None = None
    gpus: str | None = None
    method: str | None = None
    tuning: str = "auto"
    config: str | None = None
    accelerate_config: str | None = None
    deepspeed_config: str | None = None
    max_length: int | None = None
    prompt_length: int | None = None
    max_completion_length: str | int | None = None
    batch_size: int | None = None
    effective_batch_size: int | None = None
    lora_r: str | int | None = None
    set: Mapping[str, Value] | None = None
    images_per_row: int | None = None
    image_size: str | None = None
    lengths: str | None = None
    completion_lengths: str | None = None
    padded: bool | None = None
    free_memory: str | None = None
    host_memory: str | None = None
    network: str | None = None
    risk: float = DEFAULT_RISK
    trl_version: str | None = None
    vllm_version: str | None = None


class SearchOptions(JobOptions, frozen=True, kw_only=True):
    """The options of a job whose candidates are searched."""

    free: list[str] | None = None
    optimize: str = "throughput"


class CandidateOptions(JobOptions, frozen=True, kw_only=True):
    """The options of one candidate without a search: a setting that is not given has TRL's default."""

    tuning: str = "auto"
    batch_size: int | None = None


def config_paths(options: JobOptions) -> tuple[str | None, str | None, str | None]:
    """Return the paths of the TRL, accelerate and DeepSpeed configs; None: not given."""
    return options.config, options.accelerate_config, options.deepspeed_config


def names_a_job(options: JobOptions) -> bool:
    """Return whether the options say which job it is: one of the model, the GPUs, the method or a config file."""
    given = (options.model, options.gpus, options.method, *config_paths(options))
    return any(option is not None for option in given)


def refuse_empty(options: JobOptions) -> None:
    """Raise InputError for an empty option, such as `--gpus ""` from an unset variable of a shell script."""
    for entry in fields(options):
        value = getattr(options, entry.name)
        if isinstance(value, str) and not value.strip():
            raise InputError(f"--{entry.name.replace('_', '-')} is empty.")

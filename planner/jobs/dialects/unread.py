"""Tools whose configs are recognized by their keys and refused by name, with the flags that say the same."""

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from planner.errors import InputError, shortened
from planner.methods import METHODS, MethodName


class UnreadTool(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tool whose configs are not read, a row of data/unread_tools.json.

    `marks`: keys of which no other tool's config has one. `flags`: options of the command and the keys that say them.
    `method`: keys whose value is a method's name; `usual_method`: that of a config without. A dot in a key leads into a
    mapping: `training.batch_size`.
    """

    name: str
    marks: tuple[str, ...]
    flags: Mapping[str, tuple[str, ...]]
    method: tuple[str, ...] = ()
    usual_method: MethodName = "sft"


# Source: torchtune recipes/configs/llama3_1/8B_lora.yaml; verl verl/trainer/config/sft_trainer.yaml, ppo_trainer.yaml;
# unsloth studio/backend/assets/configs/model_defaults, skills/unsloth/assets; ms-swift examples/yaml; LLaMA-Factory
# examples/v1.
TABLE = Path(__file__).resolve().parents[2] / "data" / "unread_tools.json"
GPUS = "--gpus 1xA100-80G"  # an example: no such file says which


def refuse_unread(keys: Mapping[str, object], file: str) -> None:
    """Refuse a config of a tool that is not read.

    Raises:
        InputError: names the tool, and the flags that say what the file says.
    """
    for tool in msgspec.json.decode(TABLE.read_bytes(), type=tuple[UnreadTool, ...]):
        if any(value_at(keys, mark) is not None for mark in tool.marks):
            flags = " ".join(_flags(tool, keys))
            raise InputError(
                f"{file} is a config of {tool.name}, which plan does not read. Say it in flags, with your GPUs: plan "
                f"{flags} {GPUS}, or in a config of TRL."
            )


def value_at(keys: Mapping[str, object], name: str) -> object:
    """Return the value of a key, where a dot leads into a mapping; None if there is none."""
    value: object = keys
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _flags(tool: UnreadTool, keys: Mapping[str, object]) -> Iterator[str]:
    for flag, names in tool.flags.items():
        value = next((each for each in (value_at(keys, name) for name in names) if each), None)
        if isinstance(value, (str, int)):
            yield f"{flag}{'=' if flag.startswith('--set') else ' '}{shlex.quote(shortened(value))}"
    named = (str(value_at(keys, name)).lower() for name in tool.method)
    yield f"--method {next((name for name in named if name in METHODS), tool.usual_method)}"

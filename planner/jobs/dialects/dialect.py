"""The form of a dialect: the keys of another tool's config, as settings by TRL's names."""

from collections.abc import Callable, Iterator, Mapping
from os.path import isfile
from pathlib import Path

from msgspec import Struct

from planner.candidate import Candidate
from planner.errors import InputError, shortened
from planner.files.read import read_json
from planner.methods import MethodName
from planner.models.lora_targets import read_targets
from planner.models.shape import ModelShape
from planner.settings.setting import Value
from planner.settings.tools import TOOLS, Tool

Keys = Mapping[str, object]
Pairs = Iterator[tuple[str, object]]  # settings by TRL's names, with their values
OFF: tuple[object, ...] = (None, False, "", 0)
# `gradient_checkpointing_kwargs` by default: axolotl 0.21, core/builders/base.py, `_configure_gradient_checkpointing`.
NON_REENTRANT = {"use_reentrant": False}
DEEPSPEED_FILE = "deepspeed.json"  # of an export, beside the config
CPU = {"device": "cpu"}  # of an offload in a DeepSpeed config


class Refused(Struct, frozen=True, kw_only=True):
    """A key that is refused: it is not counted, or the tool stops at it. `harmless`: values that change nothing."""

    because: str
    harmless: tuple[object, ...] = OFF


class Dialect(Struct, frozen=True, kw_only=True):
    """The table of one tool's keys.

    marks       keys that only this tool's configs have
    names       key -> the setting of the same meaning
    defaults    the tool's own, for keys that a file leaves out
    settings    yields the settings that follow from several keys or other values; `read` are the keys that it reads
    method      returns the method of a file
    unmodelled  keys that change memory or speed, which a plan warns about; every other key is without effect
    writes      Candidate field -> keys that express its value
    targets     returns the modules of a model that get adapters, of `lora_target_modules` as PEFT would take them
    """

    tool: Tool
    marks: tuple[str, ...]
    names: Mapping[str, str]
    defaults: Mapping[str, Value]
    settings: Callable[[Keys], Pairs]
    read: frozenset[str]
    method: Callable[[Keys], MethodName]
    refused: Mapping[str, Refused]
    unmodelled: frozenset[str]
    writes: Mapping[str, Callable[[Candidate], Mapping[str, object]]]
    targets: Callable[[ModelShape, tuple[str, ...]], tuple[str, ...]] = read_targets


class Reading(Struct, frozen=True, kw_only=True):
    """A config in settings by TRL's names. `unused`, `unmodelled`: keys that the plan does not count."""

    method: MethodName
    settings: dict[str, object]
    unused: tuple[str, ...]
    unmodelled: tuple[str, ...]


def read_keys(dialect: Dialect, keys: Keys) -> Reading:
    """Return the settings of a tool's config.

    Raises:
        InputError: keys are not counted, or the tool stops at them: all of the table, and the first of the others.
    """
    refused = [
        str(refusal(dialect.tool, f"{name}: {keys[name]}", row.because))
        for name, row in dialect.refused.items()
        if name in keys and keys[name] not in row.harmless
    ]
    try:
        method = dialect.method(keys)
        settings = dict(dialect.settings(keys))
    except InputError as error:
        refused.append(str(error))
    if refused:
        raise InputError(" ".join(refused))
    same = {setting: keys[name] for name, setting in dialect.names.items() if keys.get(name) is not None}
    known = {*dialect.names, *dialect.read, *dialect.refused, *dialect.unmodelled}
    return Reading(
        method=method,
        settings={**same, **settings, "tool": dialect.tool},
        unused=tuple(sorted(keys.keys() - known)),
        unmodelled=tuple(
            name for name in sorted(dialect.unmodelled & keys.keys()) if keys[name] not in (*OFF, NON_REENTRANT)
        ),
    )


def deepspeed_config(value: object, shipped: Mapping[str, Mapping[str, object]]) -> object:
    """Return a DeepSpeed config: a path or a mapping, or one that the tool ships under the name of a missing file.

    `shipped`: name without .json -> `zero_optimization`.
    """
    name = value.rpartition("/")[2].removesuffix(".json") if isinstance(value, str) else ""
    return {"zero_optimization": shipped[name]} if name in shipped and not isfile(str(value)) else value


def zero_stage(value: object, shipped: Mapping[str, Mapping[str, object]]) -> int:
    """Return the stage of ZeRO of a DeepSpeed config, as `deepspeed_config` takes it; 0: none, or no file yet."""
    config = deepspeed_config(value, shipped) if value else {}
    if isinstance(config, str):
        try:
            config = read_json(Path(config))
        except InputError:
            return 0  # reading the config itself reports the error
    zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
    stage = zero.get("stage") if isinstance(zero, Mapping) else 0
    return stage if isinstance(stage, int) else 0


def listed(value: object) -> list[str]:
    """Return the names of a list, or of a text with commas."""
    parts = value if isinstance(value, list) else str(value).split(",")
    return [str(part).strip() for part in parts]


def refusal(tool: Tool, what: str, because: str) -> InputError:
    """Return the error of a key: `Axolotl's tiled_mlp: True ...`."""
    return InputError(f"{TOOLS[tool].name}'s {shortened(what)}: {because}")

"""The settings table: one row of data/settings.json for each field of `Candidate`.

The rows stand in the order in which a report shows them. Every other list of settings, and `docs/settings.md`, is
derived from them.
"""

from collections.abc import Callable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from planner.methods import METHODS, Method, MethodName
from planner.quantizations import QUANTIZATIONS, QuantizationRow
from planner.schemes import SCHEMES, SchemeRow
from planner.settings.setting import Role, Search, Setting, Value

TABLE = Path(__file__).resolve().parents[1] / "data" / "settings.json"
STAGE_3 = tuple(name for name, row in SCHEMES.items() if row.traces_modules)
FSDP_VERSION = "fsdp_version"  # of accelerate
# Values of `Setting.methods` that are not one column of `METHODS`.
CONDITIONS: dict[str, Callable[[Method], bool]] = {
    "groups or streams": lambda method: method.grouped_completions or method.packs_trees,
    "bounded rows": lambda method: not method.generates or method.bounded_rows,
    "no rollouts": lambda method: not method.generates,
    "unprepared": lambda method: method.kbit_preparation == "none",
    "casts adapters": lambda method: method.bfloat16_adapters != "never",
    "reward model": lambda method: method.reward_model in ("optional", "always"),
    "gathers by choice": lambda method: method.generates and not method.always_gathers,
}
# Fields whose values are the rows of another table, which spell them.
TABLES: dict[str, Mapping[Any, SchemeRow | QuantizationRow]] = {"quantization": QUANTIZATIONS, "sharding": SCHEMES}
# Fields whose values are minor releases, and the older releases for which a known one stands.
RELEASES: dict[str, dict[str, str]] = {
    "torch_version": {str(minor): "2.13" for minor in ("2.6", "2.7", "2.8", "2.9", "2.10", "2.11", "2.12")},
    "vllm_version": {},
}
TRUTHS = {"true": True, "false": False}  # keys of JSON


def _completed(row: Setting) -> Setting:
    """Return a row of the file with what other tables say, in Python's types."""
    values: Mapping[str | bool, Mapping[str, Value]]
    values = {TRUTHS.get(str(value), value): names for value, names in row.values.items()}
    if row.field in TABLES:
        values = {name: other.spelling for name, other in TABLES[row.field].items()}
    readers = row.owner_values
    if row.owner_has:
        readers = tuple(name for name, other in TABLES[row.owner].items() if attrgetter(row.owner_has)(other))
    aliases = RELEASES.get(row.field, row.value_aliases)
    unset = tuple(row.unset) if isinstance(row.unset, list) else row.unset
    return replace(row, values=values, owner_values=readers, value_aliases=aliases, unset=unset)


SETTINGS = tuple(map(_completed, msgspec.json.decode(TABLE.read_bytes(), type=tuple[Setting, ...])))
SETTING_OF = {row.field: row for row in SETTINGS}  # row by Candidate field
SPELLINGS = {row.field: row.values for row in SETTINGS if row.values}
# DeepSpeed's sizes, and those of them that only stage 3 reads.
ZERO_SIZES = tuple(row.field for row in SETTINGS if row.file == "deepspeed" and row.bounds is not None)
STAGE_3_SIZES = tuple(name for name in ZERO_SIZES if SETTING_OF[name].owner_values == STAGE_3)
# A setting of a library that spells a field together with others -> that field.
FIELD_OF_SETTING = {name: row.field for row in SETTINGS if row.values for name in row.library_names}
# Other names of a field, accepted wherever settings are read.
ALIASES = {alias: row.field for row in SETTINGS for alias in row.aliases}
ROW_LENGTHS = ("lengths", "completion_lengths")  # fields whose value is `RowLengths`
LENGTH_SETTINGS = tuple(row.field for row in SETTINGS if row.search == "length")  # a method without one ignores it
# Options of a job that stand for one setting: field of `JobOptions` -> setting.
SHORTHANDS = {
    "vllm_version": "vllm_version",
    "max_length": "max_length",
    "prompt_length": "prompt_length",
    "max_completion_length": "max_completion_length",
    "batch_size": "per_device_train_batch_size",
    "lengths": "lengths",
    "completion_lengths": "completion_lengths",
    "padded": "padded",
    "images_per_row": "images_per_row",
    "image_size": "image_size",
}
FSDP_OFFLOAD = "fsdp_offload_params"  # of accelerate; FSDP offloads parameters, gradients and optimizer together


def with_role(*roles: Role) -> frozenset[str]:
    """Return the fields of these roles."""
    return frozenset(row.field for row in SETTINGS if row.role in roles)


def searched_as(*ways: Search) -> frozenset[str]:
    """Return the fields that a search decides in these ways."""
    return frozenset(row.field for row in SETTINGS if row.search in ways)


def details_of(field: str, *roles: Role) -> tuple[str, ...]:
    """Return the fields that are details of another one, of these roles or of all."""
    return tuple(row.field for row in SETTINGS if row.owner == field and (not roles or row.role in roles))


def has_setting(method: MethodName, field: str) -> bool:
    """Return whether a method has a setting."""
    condition = SETTING_OF[field].methods
    return not condition or bool((CONDITIONS.get(condition) or attrgetter(condition))(METHODS[method]))

"""Remedies: changed Candidate fields as flags that work beside the settings that the user gave."""

from collections.abc import Mapping
from itertools import combinations

from msgspec import Struct

from planner.jobs.settings import library_value, settings_flags, value_spelled
from planner.quantizations import QLORA
from planner.settings.setting import Setting, Value
from planner.settings.table import ALIASES, FSDP_VERSION, SETTING_OF, SHORTHANDS

FLAG_OF_FIELD = {field: f"--{option.replace('_', '-')}" for option, field in SHORTHANDS.items()}


class Remedy(Struct, frozen=True):
    """Flags to add to a command, and the given settings that contradict them, which they replace."""

    flags: str
    replaced: Mapping[str, Value]

    def __str__(self) -> str:
        return f"{self.flags} instead of {settings_flags(self.replaced)}" if self.replaced else self.flags


def remedy(change: Mapping[str, object], given: Mapping[str, Value]) -> Remedy:
    """Return the fewest flags that make a change of Candidate fields, beside the given settings.

    `tuning` may be a tuning class. `given`: settings of `--set`, by any of their names; a flag wins over a file.

    Example: nf4 is `--set load_in_4bit=true`, beside load_in_8bit=true "instead of --set load_in_8bit=true", too.
    """
    flags: list[str] = []
    replaced: dict[str, Value] = {}
    if change.get("tuning") == "qlora" and any(_spells(SETTING_OF["quantization"], name) for name in given):
        change = {**change, "quantization": change.get("quantization", QLORA)}
    for field, value in change.items():
        own = {name: each for name, each in given.items() if _spells(SETTING_OF[field], name)}
        stale = {name: each for name, each in own.items() if not _agrees(SETTING_OF[field], name, each, value)}
        replaced |= stale
        if not (field == "quantization" and value == "none" and "tuning" in change):  # --tuning lora says that
            flags.append(_flags(SETTING_OF[field], value, own, stale))
    return Remedy(" ".join(filter(None, flags)), replaced)


def _spells(row: Setting, name: str) -> bool:
    """Return whether a setting of this name decides the row's field, alone or with others."""
    return ALIASES.get(name, name) == row.field or (bool(row.values) and name in row.library_names)


def _agrees(row: Setting, name: str, given: Value, value: object) -> bool:
    """Return whether a given setting can stay if the field gets the value; off and unset are equal."""
    wanted = "lora" if value == "qlora" else value
    if ALIASES.get(name, name) == row.field:
        return given == wanted
    return (row.values[wanted].get(name) or None) == (given or None)  # type: ignore[index]


def _flags(row: Setting, value: object, own: Mapping[str, Value], stale: Mapping[str, Value]) -> str:
    """Return the fewest flags of a value, none if the given settings mean it; under the name that the user took."""
    taken = next((name for name in stale if ALIASES.get(name, name) == row.field), "")
    if row.field == "tuning":
        return f"--tuning {value}"
    if row.values and row.file != "environment" and not taken and isinstance(value, (str, bool)):
        kept = {name: each for name, each in own.items() if name not in stale and name in row.library_names}
        spelled = sorted(row.values[value].items(), key=lambda item: (item[0] != FSDP_VERSION, item[0] in row.hidden))
        counts = range(0 if kept and not stale else 1, len(spelled) + 1)
        parts = (dict(part) for count in counts for part in combinations(spelled, count))
        return settings_flags(next(p for p in parts if value_spelled(row.field, {**kept, **p}, {**kept, **p}) == value))
    if row.field in FLAG_OF_FIELD and not own:
        return f"{FLAG_OF_FIELD[row.field]} {value}"
    usual = row.aliases[0] if row.file == "checkpointing" else row.field
    return settings_flags({taken or usual: library_value(row.field, value)})

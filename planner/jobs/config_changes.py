"""The changes that turn the settings of config files into those of a candidate."""

from collections.abc import Mapping
from typing import Any

from planner.candidate import FIELDS, Candidate
from planner.jobs.settings import is_shown, settings_of_fields

NOT_SET = "not set"
# Fields that only the user decides.
NOT_SEARCHED = (
    "model",
    "method",
    "trl_version",
    "reward_model",
    "teacher_model",
    "prompt_length",
    "padded",
    "images_per_row",
    "image_size",
)


def config_changes(in_files: Mapping[str, Any], candidate: Candidate) -> list[str]:
    """Return one line for each setting that differs: `gradient_checkpointing: false -> true`.

    `in_files`: the Candidate fields that the files set. A setting that no file sets is listed if it differs from TRL's
    default.
    """
    usual = Candidate(model=candidate.model, method=candidate.method, **candidate.method_row.defaults)  # type: ignore[arg-type]
    lines: list[str] = []
    for name in (field for field in FIELDS if field not in NOT_SEARCHED):
        is_set, value = name in in_files, getattr(candidate, name)
        before = settings_of_fields({name: in_files[name] if is_set else getattr(usual, name)})
        after = settings_of_fields({name: value}) if is_set or is_shown(candidate, name) else before
        for setting in dict.fromkeys((*before, *after)):
            old, new = before.get(setting), after.get(setting)
            if old != new:
                lines.append(f"{setting}: {_text(old) if is_set else NOT_SET} -> {_text(new)}")
    return lines


def _text(value: object) -> str:
    """Return a value as YAML writes it."""
    if value is None:
        return NOT_SET
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(str, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)

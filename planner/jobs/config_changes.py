"""The changes that turn the settings of config files into those of a candidate."""

from collections.abc import Mapping
from typing import Any

from planner.candidate import FIELDS, MODEL_FIELDS, Candidate
from planner.jobs.settings import is_shown, settings_of_fields
from planner.quantities import Note
from planner.settings.table import SETTING_OF

# Fields that a search or TRL's defaults may decide: not the question, another model or a fact of the data.
IN_FILES = tuple(
    row.field
    for row in (SETTING_OF[field] for field in FIELDS)
    if row.role != "question" and row.file != "data" and row.field not in MODEL_FIELDS
)


def config_changes(in_files: Mapping[str, Any], candidate: Candidate) -> list[Note]:
    """Return a note for each setting that differs: `config gradient_checkpointing: false -> true`.

    `in_files`: the Candidate fields that the files set. A setting that no file sets is listed if it differs from TRL's
    default.
    """
    usual = Candidate(model=candidate.model, method=candidate.method, **candidate.method_row.defaults)  # type: ignore[arg-type]
    changes: list[Note] = []
    for name in IN_FILES:
        is_set, value = name in in_files, getattr(candidate, name)
        before = settings_of_fields({name: in_files[name] if is_set else getattr(usual, name)})
        after = settings_of_fields({name: value}) if is_set or is_shown(candidate, name) else before
        for setting in dict.fromkeys((*before, *after)):
            old, new = before.get(setting), after.get(setting)
            if old != new:
                before_too = {"before": old} if is_set else {}
                changes.append(Note("config_change", {"setting": setting, "after": new, **before_too}))
    return changes

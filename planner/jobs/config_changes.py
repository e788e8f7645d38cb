"""Compare the user's settings with a candidate: changes of config files, and settings that nothing reads."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from planner.candidate import FIELDS, MODEL_FIELDS, Candidate, usual_values
from planner.jobs.dialects.table import DIALECTS, planned_targets
from planner.jobs.settings import candidate_fields, is_read, is_shown, setting_field, settings_of_fields
from planner.quantities import Note
from planner.settings.table import SETTING_OF, has_setting

# Fields that a search or TRL's defaults may decide: neither the model, method and release, nor other models or facts of
# the data.
IN_FILES = tuple(
    row.field
    for row in (SETTING_OF[field] for field in FIELDS)
    if row.role != "question" and row.file != "data" and row.field not in MODEL_FIELDS
)


class Needs(NamedTuple):
    """The condition under which a setting is read.

    `decided_by`: another field, which must have one of `values`; without values, a property of the candidate that must
    be true.
    """

    decided_by: str
    values: tuple[str | bool, ...] = ()


def config_changes(in_files: Mapping[str, Any], candidate: Candidate) -> list[Note]:
    """Return a note for each setting that the candidate changes: `config gradient_checkpointing: false -> true`.

    `in_files`: the Candidate fields that the files set. A setting that no file sets is listed if it differs from TRL's
    default.
    """
    usual = Candidate(model=candidate.model, method=candidate.method, **_defaults(candidate))  # type: ignore[arg-type]
    changes: list[Note] = []
    for name in IN_FILES:
        is_set, value = name in in_files, getattr(candidate, name)
        old_value = in_files[name] if is_set else getattr(usual, name)
        if name == "lora_target_modules":
            old_value = planned_targets(candidate.tool, candidate.model, old_value)
        before = settings_of_fields({name: old_value})
        after = settings_of_fields({name: value}) if is_set or is_shown(candidate, name) else before
        for setting in dict.fromkeys((*before, *after)):
            old, new = before.get(setting), after.get(setting)
            if old != new:
                before_too = {"before": old} if is_set else {}
                changes.append(Note("config_change", {"setting": setting, "after": new, **before_too}))
    return changes


def _defaults(candidate: Candidate) -> dict[str, object]:
    """Return the Candidate fields of a file that sets nothing: TRL's and PEFT's defaults, and those of another tool.

    Source: trl 1.16, trainer/model_config.py (lora_dropout 0.05; without targets PEFT takes those of the model type).
    """
    dialect = next((each for each in DIALECTS if each.tool == candidate.tool), None)
    of_tool = candidate_fields(dialect.defaults, candidate.model.dtype) if dialect is not None else {}
    of_peft = {"lora_dropout": 0.05, "lora_target_modules": candidate.model.architecture.lora_targets}
    return {**candidate.method_row.defaults_in(candidate.trl_version), **of_peft, **of_tool}


def unread_settings(pinned: Mapping[str, object], given: Iterable[str], candidate: Candidate) -> dict[str, Needs]:
    """Return the user's settings that nothing reads in this candidate, with the condition under which each is read.

    `pinned`: Candidate fields with values; `given`: the names under which the user gave some, which the result uses.
    A value equal to the default counts as not given. A setting that the method does not have is refused or named
    elsewhere.
    """
    usual = usual_values(candidate.method_row, candidate.trl_version)
    names = {setting_field(name): name for name in given}
    unread = {}
    for field, value in pinned.items():
        row = SETTING_OF[field]
        if is_read(candidate, field) or not has_setting(candidate.method, field) or value == usual.get(field, ...):
            continue
        owned = row.owner_values and getattr(candidate, row.owner) not in row.owner_values
        needs = Needs(row.owner, row.owner_values) if owned else Needs(row.needs)
        unread[names.get(field) or row.written or field] = needs
    return unread


def unread_note(unread: Mapping[str, Needs]) -> tuple[Note, ...]:
    """Return the note that names settings that nothing reads, if there are any."""
    return (Note("settings_not_read", {"settings": {**unread}}),) if unread else ()

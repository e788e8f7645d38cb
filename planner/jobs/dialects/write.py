"""Another tool's config with a plan's values: the user's own text, each change marked where it stands."""

from collections.abc import Iterator, Mapping

from planner.candidate import DEFAULTS, Candidate
from planner.errors import InputError
from planner.files.edit_yaml import Edits, KeyChange, edit_yaml
from planner.files.yaml import parse_yaml
from planner.jobs.dialects.dialect import DEEPSPEED_FILE, Dialect, read_keys
from planner.jobs.dialects.table import dialect_of
from planner.jobs.settings import candidate_fields, setting_names, settings_of_fields, settings_text
from planner.models.shape import ModelShape


def config_of_tool(candidate: Candidate, text: str | None, file: str) -> str:
    """The text of the user's config with the settings of the candidate. `file`: its name, for errors.

    Raises:
        InputError: there is no config of the candidate's tool, or it has no key for a setting.
    """
    read = parse_yaml(text or "", file)
    keys: dict[str, object] = read if isinstance(read, dict) else {}
    dialect = dialect_of(keys)
    if text is None or dialect is None or dialect.tool != candidate.tool:
        name = candidate.tool_row.name
        raise InputError(f"The files of a plan for {name} are its own config with the plan's values. Give --config.")
    before = _fields(dialect, keys, candidate.model)
    wanted: dict[str, object] = {}
    for field, write in dialect.writes.items():
        if getattr(candidate, field) != before.get(field, DEFAULTS.get(field)):
            wanted |= _beside(keys, write(candidate))
    changed = {key: value for key, value in wanted.items() if key in keys and keys[key] != value}
    added = {key: value for key, value in wanted.items() if key not in keys and value is not None}
    written = {**keys, **wanted}
    if written.get("deepspeed") == DEEPSPEED_FILE:  # which is written beside it
        written["deepspeed"] = {"zero_optimization": {"stage": candidate.scheme_row.stage}}
    after = _fields(dialect, written, candidate.model)
    if unsaid := dict(_unsaid(after, candidate, dialect)):
        raise InputError(
            f"{candidate.tool_row.name}'s config cannot say {settings_text(settings_of_fields(unsaid))}. "
            "Write the files of a plan without it."
        )
    edits = Edits(changed={key: KeyChange(name=key, value=value) for key, value in changed.items()}, added=added)
    return edit_yaml(text, keys, edits, file)


def _beside(keys: Mapping[str, object], written: Mapping[str, object]) -> dict[str, object]:
    """Return what is written, with the other keys that the user's own mappings `trl` and `vllm` have."""
    beside = dict(written)
    for key in written.keys() & {"trl", "vllm"}:
        own, new = keys.get(key), written[key]
        if isinstance(own, dict) and isinstance(new, dict):
            beside[key] = {**own, **new}
    return beside


def _fields(dialect: Dialect, keys: Mapping[str, object], model: ModelShape) -> dict[str, object]:
    """The Candidate fields that a config sets, but those of DeepSpeed's file and of a reward or teacher model."""
    reading = read_keys(dialect, keys)
    known = {*setting_names()} - {"model_name_or_path", "lora_target_modules", "fsdp_offload_params"}
    settings = {name: value for name, value in {**dialect.defaults, **reading.settings}.items() if name in known}
    fields: dict[str, object] = dict(candidate_fields(settings, model.dtype))  # type: ignore[arg-type]
    if (targets := reading.settings.get("lora_target_modules")) is not None:
        names = (targets,) if isinstance(targets, str) else tuple(targets)  # type: ignore[arg-type]
        fields["lora_target_modules"] = dialect.targets(model, names)
    if "fsdp_offload_params" in reading.settings:
        fields["offload_param"] = bool(reading.settings["fsdp_offload_params"])
    return fields


def _unsaid(after: Mapping[str, object], candidate: Candidate, dialect: Dialect) -> Iterator[tuple[str, object]]:
    """Yield the fields whose values the written config does not express."""
    for field, value in after.items():
        own = getattr(candidate, field)
        if own != value and field not in ("precision", "sharding", "lora_dropout") and (own or value):
            yield field, own

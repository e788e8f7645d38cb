"""The settings of a candidate that the table shows: the important ones, and those that differ from TRL's defaults."""

from msgspec.structs import replace

from planner.candidate import Candidate
from planner.jobs.settings import CHECKPOINTING_KWARGS, GROUPS, setting_field, settings_of
from planner.settings.table import SETTING_OF, SETTINGS, SPELLINGS
from planner.units import format_count

LABELS = tuple(dict.fromkeys(row.line for row in SETTINGS if row.shown != "never"))  # of lines, in order
PLACES = {row.field: place for place, row in enumerate(SETTINGS)}

# Fields whose values have settings of their own; the defaults of those settings are not shown.
STRUCTURE = ("tuning", "quantization", "precision", "sharding", "vllm")


def shown_settings(candidate: Candidate) -> dict[str, list[str]]:
    """Return lines of settings by label, written as `--set` takes them."""
    settings = settings_of(candidate)
    plain = Candidate(model=candidate.model, method=candidate.method, trl_version=candidate.trl_version)
    usual = settings_of(plain) | {
        "steps_per_generation": candidate.gradient_accumulation_steps
    }  # trl 1.16, grpo_config.py, `GRPOConfig.__post_init__`
    chosen = {name for field in STRUCTURE for name in SPELLINGS[field][getattr(candidate, field)]}
    implied = settings_of(replace(plain, **{field: getattr(candidate, field) for field in STRUCTURE}))
    lines: dict[str, list[str]] = {label: [] for label in LABELS}
    rows = {name: SETTING_OF[setting_field(name)] for name in settings if name not in GROUPS}
    for name in sorted(rows, key=lambda name: (rows[name].shown != "always", PLACES[rows[name].field])):
        row = rows[name]
        differs = settings[name] != usual.get(name) and (name in chosen or settings[name] != implied.get(name))
        if (row.shown == "always" or (row.shown != "never" and differs)) and name not in row.hidden:
            lines[row.line].append(f"{name} {_value(settings[name])}")
    kwargs = settings[CHECKPOINTING_KWARGS]
    if kwargs not in (usual[CHECKPOINTING_KWARGS], implied[CHECKPOINTING_KWARGS]):
        lines["model"].append(f"{CHECKPOINTING_KWARGS} {_value(kwargs)}")
    lines["batch"].append(f"{format_count(candidate.effective_batch_size)} samples a step")
    return {label: items for label, items in lines.items() if items}


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

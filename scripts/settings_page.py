"""Write docs/settings.md from the settings table: `python -m scripts.settings_page`."""

from collections.abc import Iterator
from pathlib import Path

from planner.candidate import DEFAULTS, MODEL_FIELDS
from planner.methods import METHODS
from planner.settings.setting import MAX_NUMBER, File, Role, Setting
from planner.settings.table import SETTINGS, has_setting

PAGE = Path(__file__).resolve().parents[1] / "docs" / "settings.md"
FILES: dict[File, str] = {
    "trl": "TRL's config",
    "checkpointing": "`gradient_checkpointing_kwargs`",
    "accelerate": "accelerate's file",
    "deepspeed": "DeepSpeed's file",
    "server": "`trl vllm-serve`",
    "environment": "the environment",
    "requirements": "requirements.txt",
    "code": "the script",
    "loading": "`model_init_kwargs`",
    "checkpoint": "the checkpoint",
    "data": "the data",
    "command": "the command",
}
ROLES: dict[Role, str] = {
    "question": "What is asked",
    "data": "Facts of the data",
    "learning": "What changes what is learned",
    "run": "What changes memory and speed only",
}


def names(row: Setting) -> str:
    """Return the names of a row: those that we write, then those that are accepted."""
    argument_names = {method.argument_names.get(row.field, "") for method in METHODS.values()} - {""}
    written = dict.fromkeys((*row.library_names, *row.names, *sorted(argument_names)))
    others = [name for name in dict.fromkeys((row.field, *row.aliases)) if name not in written]
    also = f" (also {', '.join(f'`{name}`' for name in others)})" if others else ""
    return ", ".join(f"`{name}`" for name in written) + also


def values(row: Setting) -> str:
    """Return the values that a row can have: choices, or bounds."""
    if row.bounds is not None:
        low, high = row.bounds
        return f"{low:g} to {high:g}" if high < MAX_NUMBER else f"from {low:g}"
    choices = [f"`{value}`" for value in row.values if isinstance(value, str)]
    return ", ".join(choices)


def default(row: Setting) -> str:
    """Return the default of a row; methods may have others."""
    value = DEFAULTS.get(row.field)
    if isinstance(value, bool) and row.values:
        value = next(iter(row.values[value].values()))  # as the first name of the row spells it
    if value in (None, "") or row.field in MODEL_FIELDS:
        return ""
    return (
        f"`{str(value).lower() if isinstance(value, bool) else ','.join(value) if isinstance(value, tuple) else value}`"
    )


def reader(row: Setting) -> str:
    """Return when the libraries read a row."""
    wanted = ", ".join(f"`{str(value).lower()}`" for value in row.owner_values)
    owner = f"{row.owner} {wanted}".strip() if row.owner else ""
    some = [name for name in METHODS if row.methods and has_setting(name, row.field)]
    return "; ".join(part for part in (owner, ", ".join(some)) if part)


def page() -> str:
    """Return the text of the page."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield "# The settings\n"
    yield "Written by `python -m scripts.settings_page` from planner/data/settings.json. Any of the names can be given"
    yield "to `--set` and in a config file. Those with a search are decided by `plan` unless they are pinned.\n"
    for role, title in ROLES.items():
        yield f"## {title}\n"
        yield "| names | meaning | values | default | search | written to | read with |"
        yield "|---|---|---|---|---|---|---|"
        for row in SETTINGS:
            if row.role == role:
                search = "" if row.search == "never" else row.search
                cells = (names(row), row.sentence, values(row), default(row), search, FILES[row.file], reader(row))
                yield f"| {' | '.join(cells)} |"
        yield ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

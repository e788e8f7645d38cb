"""Writing of reports: all files of a command, or none."""

import os
from collections.abc import Mapping
from pathlib import Path

from planner.errors import InputError


def refuse_unwritable(out: str | None, html: str | None) -> None:
    """Check before anything is computed that the folders of --out and --html exist or can be created.

    Raises:
        InputError: an option is empty, a folder cannot be written, or --html is a folder.
    """
    for flag, value in (("--out", out), ("--html", html)):
        if value is not None and not value.strip():
            raise InputError(f"{flag} is empty.")
    page = Path(html) if html is not None else None
    folders = [Path(out)] if out is not None else []
    try:
        if page is not None and page.is_dir():
            raise InputError(f"--html {page} is a folder. Give a file, such as {page / 'plan.html'}.")
        for folder in folders + ([page.parent] if page is not None else []):
            existing = next(each for each in (folder, *folder.parents) if each.exists())
            if not existing.is_dir() or not os.access(existing, os.W_OK):
                raise InputError(
                    f"{folder} cannot be written: {existing} is {'not writable' if existing.is_dir() else 'no folder'}."
                )
    except OSError as error:
        raise InputError(f"{error.filename} cannot be written: {error.strerror}.") from error


def write_all(texts: Mapping[Path, str]) -> None:
    """Write all files or none: each is written beside its path, and moved to it after all are written.

    Raises:
        InputError: a file cannot be written.
    """
    parts = {path: path.with_name(f"{path.name}.part") for path in texts}
    try:
        for path, part in parts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(texts[path], encoding="utf-8")
        for path, part in parts.items():
            part.replace(path)
    except OSError as error:
        for part in filter(Path.is_file, parts.values()):
            part.unlink()
        raise InputError(f"{error.filename} cannot be written: {error.strerror}.") from error

"""Writing of reports: all files of a command, or none."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from planner.errors import InputError

REPORT_FILE = "plan.json"  # in the folder of `--out`


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
    """Write all files or none: each is written beside its path under a new name, and moved to it after all are written.

    Raises:
        InputError: a file cannot be written.
    """
    parts: dict[Path, Path] = {}
    try:
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            parts[path] = _written_beside(path, text)
        for path, part in parts.items():
            part.replace(path)
    except OSError as error:
        for part in parts.values():
            part.unlink(missing_ok=True)
        raise InputError(f"{error.filename} cannot be written: {error.strerror}.") from error


def _written_beside(path: Path, text: str) -> Path:
    """Write to a file with a random name in the path's folder, made anew so that no link is followed; return it."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    part = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(descriptor, 0o666 & ~_umask())
            file.write(text)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return part


def _umask() -> int:
    """The permissions that new files of this process do not get."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask

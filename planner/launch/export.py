"""Write the launch files into a folder: all or none, without overwriting changed files unless requested."""

from collections.abc import Mapping
from pathlib import Path

from planner.errors import InputError
from planner.files.read import read_text
from planner.files.write import write_all


def texts_in(folder: Path, files: Mapping[str, str], overwrite: bool) -> dict[Path, str]:
    """Return launch files, texts by name, as texts by path.

    Raises:
        InputError: a file exists with other content and `overwrite` is False.
    """
    texts = {folder / name: text for name, text in files.items()}
    changed = [path for path, text in texts.items() if not overwrite and _differs(path, text)]
    if changed:
        raise InputError(
            f"{', '.join(map(str, changed))} would be overwritten and {'says' if len(changed) == 1 else 'say'} "
            "something else. Use --overwrite."
        )
    return texts


def write_files(files: Mapping[str, str], folder: Path, overwrite: bool) -> tuple[Path, ...]:
    """Write launch files, texts by name, into a folder and return their paths.

    Raises:
        InputError: as `texts_in`; or a file cannot be written.
    """
    texts = texts_in(folder, files, overwrite)
    write_all(texts)
    return tuple(texts)


def _differs(path: Path, text: str) -> bool:
    """True if something else than `text` exists at the path."""
    try:
        return path.exists() and read_text(path) != text
    except (OSError, InputError):
        return True  # a folder or a pipe of that name, or a file that is no text

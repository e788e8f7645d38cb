"""Launch files in a folder: all of them or none, and nothing of the user's overwritten unasked."""

from pathlib import Path

from planner.candidate import Candidate
from planner.errors import InputError
from planner.files.write import write_all
from planner.launch.files import launch_files


def export(candidate: Candidate, folder: Path, overwrite: bool = False) -> tuple[Path, ...]:
    """Writes the launch files of `candidate` and returns their paths.

    Raises:
        InputError: a file of that name is there, says something else and `overwrite` was not asked for; or one cannot be written.
    """
    texts = {folder / name: text for name, text in launch_files(candidate).items()}
    changed = [path for path, text in texts.items() if not overwrite and _differs(path, text)]
    if changed:
        raise InputError(
            f"{', '.join(map(str, changed))} would be overwritten and {'says' if len(changed) == 1 else 'say'} something else. Use --overwrite."
        )
    write_all(texts)
    return tuple(texts)


def _differs(path: Path, text: str) -> bool:
    try:
        return path.exists() and path.read_text(encoding="utf-8") != text
    except (OSError, UnicodeDecodeError):
        return True  # a folder of that name, or a file that is not ours

"""Writing of reports and of folders that start a run: all files of a command, or none."""

import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from planner.errors import InputError
from planner.files.cache import make_folder
from planner.files.read import read_text

REPORT_FILE = "plan.json"  # in the folder of `--out`


def refuse_unwritable(html: str | None, folders: Mapping[str, str | None]) -> None:
    """Check before anything is computed that the folders of options and of --html exist or can be created.

    `folders`: by option, such as --out; None: it is not given.

    Raises:
        InputError: an option is empty, a folder cannot be written, or --html is a folder.
    """
    for flag, value in (*folders.items(), ("--html", html)):
        if value is not None and not value.strip():
            raise InputError(f"{flag} is empty.")
        if value is not None and "\0" in value:
            raise InputError(f"{flag} has a null character.")
    page = Path(html) if html is not None else None
    given = [Path(folder) for folder in folders.values() if folder is not None]
    try:
        if page is not None and page.is_dir():
            raise InputError(f"--html {page} is a folder. Give a file, such as {page / 'plan.html'}.")
        for folder in given + ([page.parent] if page is not None else []):
            existing = next(each for each in (folder, *folder.parents) if each.exists())
            if not existing.is_dir() or not os.access(existing, os.W_OK):
                raise InputError(
                    f"{folder} cannot be written: {existing} is {'not writable' if existing.is_dir() else 'no folder'}."
                )
    except OSError as error:
        raise InputError(f"{error.filename} cannot be written: {error.strerror}.") from error


def texts_in(folder: Path, files: Mapping[str, str], overwrite: bool) -> dict[Path, str]:
    """Return the files of a folder, texts by name, as texts by path.

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
    """Write files, texts by name, into a folder and return their paths.

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


def write_all(texts: Mapping[Path, str]) -> None:
    """Write files: each under a random name beside its path, then moved there when all are written.

    A symbolic link at the path is replaced, not followed. If several processes write the same files at once, the files
    that remain are all from one of them. After an error nothing has changed. A process that is killed between two moves
    leaves some files missing, but no mixture of old and new ones: all old files but the first are removed before.

    Raises:
        InputError: a file cannot be written, or the path is a folder, a pipe or a device.
    """
    parts: dict[Path, Path] = {}
    path = Path()
    try:
        for path, text in texts.items():
            _refuse_other_kinds(path)
            make_folder(path.parent)
            parts[path] = _write_beside(path, text)
        with _locked({path.parent for path in parts}):
            for path in [*parts][1:]:
                path.unlink(missing_ok=True)
            for path, part in parts.items():
                part.replace(path)
    except (OSError, ValueError) as error:  # ValueError: a null character in a path, a text that is no UTF-8
        for part in parts.values():
            part.unlink(missing_ok=True)
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(f"{path} cannot be written: {reason}.") from error


def _refuse_other_kinds(path: Path) -> None:
    """Raise InputError if something else than a regular file is at a path.

    It is looked at once: another process may remove a file and move its own there meanwhile.
    """
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(path.stat().st_mode):
            raise InputError(f"{path} cannot be written: it is no regular file.")


@contextmanager
def _locked(folders: Set[Path]) -> Iterator[None]:
    """Hold the locks of folders, in one order for all processes. A file system without locks has none."""
    with ExitStack() as held:
        for folder in sorted({folder.resolve() for folder in folders}):
            with suppress(OSError):
                descriptor = os.open(folder, os.O_RDONLY)
                held.callback(os.close, descriptor)  # ends the lock
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def _write_beside(path: Path, text: str) -> Path:
    """Write a text to a new file in the folder of `path`, with the permissions of `path` or of a new file."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, _permissions(path))
    except BaseException:
        Path(name).unlink()
        raise
    return Path(name)


def _permissions(path: Path) -> int:
    """Return the permissions of a file; if there is none, those that the process gives to new files."""
    with suppress(OSError):
        return path.lstat().st_mode & 0o777 if not path.is_symlink() else _new_permissions()
    return _new_permissions()


def _new_permissions() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask

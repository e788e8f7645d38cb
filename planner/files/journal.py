"""Files that several processes append lines to. A line that was cut off, by a full disk or a signal, is skipped."""

import fcntl
import os
from collections.abc import Iterator, Set
from pathlib import Path

from planner.errors import PlanError
from planner.files.cache import make_folder


def append_line(path: Path, line: str) -> None:
    """Append one line by one write, so that lines of several processes do not mix.

    If the last line has no end, because its writer was killed or its disk was full, it is ended first.

    Raises:
        PlanError: the file cannot be written.
    """
    try:
        make_folder(path.parent)
        descriptor = _open_locked(path)
        try:
            data = (("" if _ends_with_newline(descriptor) else "\n") + line + "\n").encode()
            if os.write(descriptor, data) != len(data):
                raise OSError(None, "only a part was written", str(path))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise PlanError(f"{path} cannot be written: {error.strerror}.") from error


def rewrite_lines(path: Path, forgotten: Set[str]) -> int:
    """Remove lines from a file; return how many it had. Lines that others append meanwhile are kept.

    Raises:
        PlanError: the file cannot be written.
    """
    try:
        if not path.is_file():
            return 0
        descriptor = _open_locked(path)
        try:
            lines = list(lines_of(path))
            kept = [line for line in lines if line not in forgotten]
            new = path.with_name(f"{path.name}.{os.getpid()}")
            with new.open("w", encoding="utf-8") as file:
                file.writelines(line + "\n" for line in kept)
                file.flush()
                os.fsync(file.fileno())
            new.replace(path)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise PlanError(f"{path} cannot be written: {error.strerror}.") from error
    return len(lines) - len(kept)


def _open_locked(path: Path) -> int:
    """Open a file for appending, and lock it until it is closed: `rewrite_lines` replaces it by another."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        except FileNotFoundError:
            pass  # it was removed while we waited
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)


def lines_of(path: Path) -> Iterator[str]:
    """Yield the complete lines of a file; none if there is no file.

    Raises:
        PlanError: the file cannot be read.
    """
    try:
        if not path.is_file():
            return
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.endswith("\n") and line.strip():
                    yield line.strip()
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {error.strerror}. Set PLAN_CACHE to a folder of yours.") from error


def _ends_with_newline(descriptor: int) -> bool:
    size = os.fstat(descriptor).st_size
    return size == 0 or os.pread(descriptor, 1, size - 1) == b"\n"

"""Files that several processes append lines to. A line that was cut off, by a full disk or a signal, is skipped."""

import os
from collections.abc import Iterator
from pathlib import Path

from planner.errors import PlanError


def append_line(path: Path, line: str) -> None:
    """Append one line by one write, so that lines of several processes do not mix.

    If the last line has no end, because its writer was killed or its disk was full, it is ended first.

    Raises:
        PlanError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            data = (("" if _ends_with_newline(descriptor) else "\n") + line + "\n").encode()
            if os.write(descriptor, data) != len(data):
                raise OSError(None, "only a part was written", str(path))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise PlanError(f"{path} cannot be written: {error.strerror}.") from error


def lines_of(path: Path) -> Iterator[str]:
    """Yield the complete lines of a file; none if there is no file."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.endswith("\n") and line.strip():
                yield line.strip()


def _ends_with_newline(descriptor: int) -> bool:
    size = os.fstat(descriptor).st_size
    return size == 0 or os.pread(descriptor, 1, size - 1) == b"\n"

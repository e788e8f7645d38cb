"""Files that grow by lines: one writer after another, none in the middle of another's line, and what was cut off is no line."""

import os
from collections.abc import Iterator
from pathlib import Path

from planner.errors import PlanError


def append_line(path: Path, line: str) -> None:
    """Adds one line, by one write to a file that is open for appending, so that lines of several processes do not mix.

    A line that an earlier writer could not finish (its disk was full, it was killed) is closed first: it stays unreadable, this one does not.

    Raises:
        PlanError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            data = (("" if _ends_well(descriptor) else "\n") + line + "\n").encode()
            if os.write(descriptor, data) != len(data):
                raise OSError(None, "only a part was written", str(path))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise PlanError(f"{path} cannot be written: {error.strerror}.") from error


def lines_of(path: Path) -> Iterator[str]:
    """The lines of a file that were finished; none where there is no file."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.endswith("\n") and line.strip():
                yield line.strip()


def _ends_well(descriptor: int) -> bool:
    size = os.fstat(descriptor).st_size
    return size == 0 or os.pread(descriptor, 1, size - 1) == b"\n"

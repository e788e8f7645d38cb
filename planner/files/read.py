"""Files that a user names, read within bounds: regular files, of a limited size, in one line of error."""

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from planner.errors import InputError, shortened

# Largest document, such as a config.json, a report or a YAML file, and largest file of one document a line. Far above
# what there is (results/emulated.jsonl has 900 kB), and low enough that its objects in Python, up to ten
# times the text, fit in any machine.
MAX_DOCUMENT_BYTES = 8 * 2**20
MAX_LINES_BYTES = 64 * 2**20


@contextmanager
def open_regular(path: Path, most_bytes: int | None = None) -> Iterator[BinaryIO]:
    """Open a regular file for reading in binary mode; `most_bytes`: its largest size, None: any.

    A pipe, a device or a folder is refused without being opened, since such an open may wait for ever.

    Raises:
        InputError: the file cannot be read, is no regular file, or is larger.
    """
    try:
        _refuse_special(path, os.stat(path))
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            _refuse_special(path, status)
            if most_bytes is not None and status.st_size > most_bytes:
                raise InputError(
                    f"{path} cannot be read: it has {status.st_size:,} bytes, more than the {most_bytes:,} that such "
                    "a file may have."
                )
            yield file
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InputError(f"{path} cannot be read: {reason}.") from error


def read_bytes(path: Path, most_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
    """Return the content of a regular file of at most `most_bytes`.

    Raises:
        InputError: as `open_regular`; or the file grows while it is read.
    """
    with open_regular(path, most_bytes) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise InputError(f"{path} cannot be read: it has more than {most_bytes:,} bytes.")
    return content


def read_text(path: Path, most_bytes: int = MAX_DOCUMENT_BYTES) -> str:
    """Return the text of a regular file of at most `most_bytes` in UTF-8, with or without a byte order mark.

    Raises:
        InputError: as `read_bytes`; or the file is no UTF-8.
    """
    content = read_bytes(path, most_bytes)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} cannot be read: it is no UTF-8 text (byte {error.start:,}).") from error


def read_json(path: Path) -> object:
    """Return the parsed content of a JSON file; Infinity and NaN are numbers, as in configs of Transformers.

    Raises:
        InputError: as `read_text`; or the file is no JSON, is nested too deeply, or a text in it holds half of a
            surrogate pair, such as "\\ud800", which no answer could repeat.
    """
    return parse_json(read_text(path), path)


def parse_json(text: str, path: Path) -> object:
    """Return the parsed text of a JSON file; raise InputError as `read_json`."""
    try:
        value: object = json.loads(text)
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except RecursionError as error:
        raise InputError(f"{path} is no JSON: it is nested too deeply.") from error
    except ValueError as error:
        raise InputError(f"{path} is no JSON: {shortened(error)}.") from error


def _refuse_special(path: Path, status: os.stat_result) -> None:
    """Raise OSError for a folder and InputError for a pipe, a socket or a device."""
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"{path} cannot be read: it is no regular file.")

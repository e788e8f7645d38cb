"""Reading of files that a user names: regular files of a bounded size, as JSON or YAML; anything else is one line."""

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from planner.errors import InputError
from planner.units import MIB, format_gib

# Far above any config.json, train.yaml, report or case file: the largest config of the catalogue has 5 kB.
MAX_BYTES = 64 * MIB
# Values of a YAML file, those behind an alias counted each time: nine aliases on nine levels are 4e8.
MAX_YAML_VALUES = 100_000
SHOWN_CHARACTERS = 120  # of what a parser says, which quotes the input


@contextmanager
def regular_file(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading; pipes, devices and folders are refused without waiting for them.

    Raises:
        InputError: the file cannot be read, or is no regular file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode):
                kind = "a folder" if stat.S_ISDIR(mode) else "a pipe or device"
                raise InputError(f"{path} cannot be read: it is {kind}, not a file.")
            yield file
    except (OSError, ValueError) as error:
        raise InputError(f"{short(str(path))} cannot be read: {_reason(error)}.") from error


def read_bytes(path: Path) -> bytes:
    """Read a regular file of at most MAX_BYTES.

    Raises:
        InputError: as `regular_file`, or the file is larger.
    """
    with regular_file(path) as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise InputError(f"{path} cannot be read: it has more than {format_gib(MAX_BYTES, 2)}.")
    return data


def read_text(path: Path) -> str:
    """Read a UTF-8 file like `read_bytes`.

    Raises:
        InputError: as `read_bytes`, or the file is no UTF-8 text.
    """
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is no UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}.") from error


def read_json(path: Path) -> object:
    """Read a JSON file.

    Raises:
        InputError: as `read_text`, or the file is no JSON.
    """
    try:
        return json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is no JSON: {_reason(error)}.") from error


def read_yaml(path: Path) -> object:
    """Read a YAML file.

    Raises:
        InputError: as `read_text`, the file is no YAML, or has more than MAX_YAML_VALUES values.
    """
    import yaml  # takes 20 ms, and only config files need it

    try:
        read = yaml.safe_load(read_text(path))
        values = _values(read)
    except (yaml.YAMLError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise InputError(f"{path} is not YAML: {_reason(error)}.") from error
    if values > MAX_YAML_VALUES:
        raise InputError(f"{path} cannot be read: it has more than {MAX_YAML_VALUES:,} values.")
    return read


def short(text: str) -> str:
    """The text on one line, cut to SHOWN_CHARACTERS."""
    line = " ".join(text.split())
    return line if len(line) <= SHOWN_CHARACTERS else f"{line[: SHOWN_CHARACTERS - 3]}..."


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return short(str(error)).rstrip(".")


def _values(read: object) -> int:
    """The number of values in parsed YAML, up to MAX_YAML_VALUES + 1, where counting stops."""
    waiting, count = [read], 0
    while waiting and count <= MAX_YAML_VALUES:
        value = waiting.pop()
        count += 1
        if isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, (list, tuple, set)):
            waiting.extend(value)
    return count

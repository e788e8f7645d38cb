"""Conversion between numbers and text. 1 GiB is 2**30 bytes, 1 GB 10**9; answers are in GiB."""

import re

from planner.errors import InputError, shortened

KIB = 2**10
MIB = 2**20
GIB = 2**30

_SUFFIXES = {
    "": 1, "kib": KIB, "mib": MIB, "gib": GIB, "tib": 2**40, "k": KIB, "m": MIB, "g": GIB,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip


def format_gib(size_bytes: float, digits: int = 2) -> str:
    """Bytes as text: `format_gib(64.2e9)` is `"59.79 GiB"`."""
    return f"{size_bytes / GIB:,.{digits}f} GiB"


def format_size(size_bytes: int) -> str:
    """Bytes as PyTorch writes them in its out-of-memory message: `"20.00 MiB"`, `"1.50 GiB"`."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.2f} {name}"
    return f"{size_bytes} bytes"


def format_count(count: int) -> str:
    """A count with thousands separators: `format_count(148000)` is `"148,000"`."""
    return f"{count:,}"


def format_seconds(seconds: float) -> str:
    """A duration with two or three digits: `format_seconds(0.834)` is `"0.83 s"`, of 1830 it is `"30.5 min"`."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.1f} min"


MAX_DIGITS = 30  # of a number that a user writes


def parse_bytes(text: str) -> int:
    """Bytes from text: `"24GiB"`, `"512MiB"`, `"39.5 GiB"`, `"744GB"` (10**9 bytes) or a plain number of bytes.

    Raises:
        InputError: the text is not a size.
    """
    match = re.fullmatch(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([a-zA-Z]*)\s*", text)
    suffix = match.group(2).lower() if match else "?"
    if match is None or suffix not in _SUFFIXES:
        raise InputError(f"{shortened(text)!r} is not a size. Write it in GiB, MiB or GB, such as 24GiB.")
    return int(float(match.group(1)) * _SUFFIXES[suffix])


def parse_count(text: str) -> int:
    """A number of tokens from text: `"4096"`, `"4k"` (4,096) or `"1M"` (1,048,576), as lengths of context are named.

    Raises:
        InputError: the text is no such number.
    """
    match = re.fullmatch(r"\s*(\d{1,30})\s*([kKmM]?)\s*", text)
    if match is None:
        raise InputError(f"{shortened(text)!r} is no number of tokens. Write it as 4096 or 4k.")
    return int(match[1]) * {"": 1, "k": KIB, "m": MIB}[match[2].lower()]


_SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600}


def parse_seconds(text: str) -> float:
    """Seconds from text: `"90s"`, `"10m"`, `"1.5h"` or a plain number of seconds.

    Raises:
        InputError: the text is not a duration, or the duration is 0.
    """
    match = re.fullmatch(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([a-zA-Z]*)\s*", text)
    suffix = match.group(2).lower() if match else "?"
    if match is None or suffix not in _SECONDS or float(match.group(1)) == 0:
        raise InputError(
            f"{shortened(text)!r} is not a duration. Write it in seconds, minutes or hours, such as 90s, 10m or 1h."
        )
    return float(match.group(1)) * _SECONDS[suffix]


def format_share(share: float) -> str:
    """Return a share in percent with two or three digits: `38 %`, `1.3 %`, `99.7 %`; `0 %` for none."""
    return f"{100 * share:.1f} %" if 0 < share < 0.1 or 0.98 < share < 1 else f"{100 * share:.0f} %"

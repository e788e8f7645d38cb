"""Texts in parts, from files of planner/data/: those of launch files, and sentences."""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "data"


@lru_cache
def text_parts(file: str) -> Mapping[str, str]:
    """Return the parts by name: a part begins below the line `%% name`; a line that begins with `%#` is a comment."""
    lines = (FOLDER / f"{file}.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    text = "".join(line for line in lines if not line.startswith("%#"))
    return dict(part.split("\n", 1) for part in text.split("%% ")[1:])


def launch_text(file: str, part: str) -> str:
    """Return a part of a text of launch files; fields in braces are to be filled in."""
    return text_parts(f"launch/{file}")[part]

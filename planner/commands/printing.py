"""What a command says: the answer on stdout, everything else on stderr."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from planner.commands.options import Printed, Written

if TYPE_CHECKING:
    from rich.text import Text

PHASE_WIDTH = 20  # columns that wipe the phase before
PIPE_WIDTH = 100  # columns of the table where there is no terminal to ask


def sayer(printed: Printed) -> Callable[[str], None]:
    """Progress, on stderr; nowhere where it is not wanted."""
    return (lambda line: None) if printed.quiet else (lambda line: print(line, file=sys.stderr))


def ticker(printed: Printed) -> Callable[[str], None]:
    """What a probe is at, on a line that the next one overwrites; only where somebody watches."""
    if printed.quiet or not sys.stderr.isatty():
        return lambda phase: None
    return lambda phase: print(f"  {phase.replace('_', ' '):<{PHASE_WIDTH}}", end="\r", file=sys.stderr, flush=True)


def show(printed: Written, report: "dict[str, object]", table: "Text", page: Callable[[], str]) -> None:
    """Prints the answer in the form that was asked for, and writes it where --out and --html say."""
    from rich.console import Console

    from planner.files.write import write_all
    from planner.report.json import json_text

    texts = {}
    if printed.out is not None:
        folder = Path(printed.out)
        texts = {folder / "plan.json": json_text(report) + "\n", folder / "plan.txt": table.plain + "\n"}
    if printed.html is not None:
        texts[Path(printed.html)] = page()
    write_all(texts)
    for path in texts if not printed.quiet else ():
        print(f"wrote {path}", file=sys.stderr)
    if printed.json:
        print(json_text(report))
    else:
        Console(width=width(), highlight=False).print(table, soft_wrap=True)


def width() -> int:
    return shutil.get_terminal_size(fallback=(PIPE_WIDTH, 0)).columns


def say_error(message: str) -> None:
    print(f"Error: {' '.join(message.split())}", file=sys.stderr)

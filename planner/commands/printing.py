"""Printing of the commands: the answer on stdout; progress, notes about files and errors on stderr."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from planner.commands.options import OutputOptions, ReportOptions

if TYPE_CHECKING:
    from msgspec import Struct
    from rich.text import Text

PHASE_WIDTH = 20  # columns that wipe the phase before
PIPE_WIDTH = 100  # columns of the table where there is no terminal to ask


def progress(output: OutputOptions) -> Callable[[str], None]:
    """Return a function that prints a line of progress on stderr, or nothing with --quiet."""
    return (lambda line: None) if output.quiet else (lambda line: print(line, file=sys.stderr))


def progress_line(output: OutputOptions) -> Callable[[str], None]:
    """Return a function that shows the current phase on one line of a terminal, overwritten by the next phase."""
    if output.quiet or not sys.stderr.isatty():
        return lambda phase: None
    return lambda phase: print(f"  {phase.replace('_', ' '):<{PHASE_WIDTH}}", end="\r", file=sys.stderr, flush=True)


def print_report(output: ReportOptions, report: "Struct", table: "Text", page: Callable[[], str]) -> None:
    """Print the answer as a table or as JSON, and write the files of --out and --html."""
    from rich.console import Console

    from planner.files.write import write_all
    from planner.report.json import json_text

    texts = {}
    if output.out is not None:
        folder = Path(output.out)
        texts = {folder / "plan.json": json_text(report) + "\n", folder / "plan.txt": table.plain + "\n"}
    if output.html is not None:
        texts[Path(output.html)] = page()
    write_all(texts)
    for path in texts if not output.quiet else ():
        print(f"wrote {path}", file=sys.stderr)
    if output.json:
        print(json_text(report))
    else:
        Console(width=width(), highlight=False).print(table, soft_wrap=True)


def width() -> int:
    return shutil.get_terminal_size(fallback=(PIPE_WIDTH, 0)).columns


def print_error(message: str) -> None:
    print(f"Error: {' '.join(message.split())}", file=sys.stderr)

"""Printing of the commands: the answer on stdout; progress, notes about files and errors on stderr."""

import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from planner.commands.options import AnswerOptions, OutputOptions, ReportOptions
from planner.errors import InputError, one_line, visible
from planner.files.write import REPORT_FILE

if TYPE_CHECKING:
    from msgspec import Struct
    from rich.text import Text

    from planner.gpus.cluster import Cluster
    from planner.planning import Plan
    from planner.quantities import Estimate, Note
    from planner.report.screen import Screen

PIPE_WIDTH = 100  # columns of the table if stdout is no terminal


def progress(output: OutputOptions) -> Callable[[str], None]:
    """Return a function that prints a line of progress on stderr, or nothing with --quiet."""
    return (lambda line: None) if output.quiet else (lambda line: print(visible(line), file=sys.stderr))


class LiveLine(Struct, frozen=True, kw_only=True):
    """A line at the bottom of a terminal: the work in progress, its phase, and the elapsed time."""

    say: Callable[[str], None]  # set the work; without a terminal: print it as a line
    phase: Callable[[str], None]  # set the phase; without a terminal: nothing


@contextmanager
def live_line(output: OutputOptions, work: str = "") -> Iterator[LiveLine]:
    """Show a line with the elapsed time on stderr until the block ends, if stderr is a terminal.

    Lines that are printed on stderr meanwhile stand above it.
    """
    if output.quiet or not sys.stderr.isatty():
        yield LiveLine(say=progress(output), phase=lambda phase: None)
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(file=sys.stderr)  # this stream, whatever sys.stderr is while the libraries' output is dropped
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[phase]}"),
    )
    with Progress(*columns, console=console, transient=True, redirect_stdout=False) as line:
        task = line.add_task(work, total=None, phase="")
        yield LiveLine(
            say=lambda text: line.update(task, description=escape(visible(text)), phase=""),
            phase=lambda phase: line.update(task, phase=escape(phase.replace("_", " "))),
        )


def print_plan(
    output: ReportOptions, plan: "Plan", config: str | None, command: str, exported: Mapping[Path, str]
) -> None:
    """Print a plan as text or as JSON, and write the files of --out, --html and --export.

    `config`: the text of the user's own train.yaml. `command`: what was asked, for the page. `exported`: see
    `export_texts`.
    """
    from planner.report.screen import plan_screen
    from planner.report.table import plan_table

    def document() -> "Struct":
        from planner.report.json import plan_report  # imports msgspec, which a table does not need

        return plan_report(plan, config)

    def page() -> str:
        from planner.report.page.answer import Origin, plan_html

        return plan_html(plan, Origin(command=command, config=config))

    table = plan_table(plan, width())
    short = table if output.verbose else plan_screen(plan, _screen(output))
    _print_report(output, document, table, short, page, plan.best, exported)


def print_estimate(
    output: ReportOptions,
    answer: "Estimate",
    cluster: "Cluster",
    notes: "Sequence[Note]",
    config: str | None,
    command: str,
    exported: Mapping[Path, str],
) -> None:
    """Print an estimate as text or as JSON, and write the files of --out, --html and --export.

    `config`: the text of the user's own train.yaml. `command`: what was asked, for the page. `exported`: see
    `export_texts`.
    """
    from planner.report.screen import estimate_screen
    from planner.report.table import estimate_table

    def document() -> "Struct":
        from planner.report.json import estimate_report

        return estimate_report(answer, notes, cluster, config)

    def page() -> str:
        from planner.report.page.answer import Origin, estimate_html

        return estimate_html(answer, cluster, notes, Origin(command=command, config=config))

    table = estimate_table(answer, cluster, notes, width())
    short = table if output.verbose else estimate_screen(answer, cluster, notes, _screen(output))
    _print_report(output, document, table, short, page, answer, exported)


def _screen(output: ReportOptions) -> "Screen":
    """Return the size of the terminal, and which files the command writes."""
    from planner.report.screen import MIN_LINES, Screen

    lines = shutil.get_terminal_size(fallback=(PIPE_WIDTH, MIN_LINES)).lines
    exported = isinstance(output, AnswerOptions) and output.export is not None
    return Screen(width=width(), lines=lines, out=output.out or "", exported=exported)


def export_texts(
    output: AnswerOptions, config: str | None, estimate: "Estimate", cluster: "Cluster"
) -> Mapping[Path, str]:
    """Return the files of --export that run a candidate, texts by path; none if it is not given.

    `config`: the text of the user's own train.yaml.

    Raises:
        InputError: a file says something else, or TRL has no argument for a setting.
    """
    if output.export is None:
        return {}
    from planner.files.write import texts_in
    from planner.launch.files import launch_files
    from planner.report.resources import site_of

    site = site_of(estimate, cluster)
    files = launch_files(estimate.candidate, site=site, config=config)
    return texts_in(Path(output.export), files, output.overwrite)


def refuse_contradicting_output(output: AnswerOptions) -> None:
    """Refuse output options that exclude each other or cannot be kept, before anything is computed.

    Raises:
        InputError: names them.
    """
    from planner.files.write import refuse_unwritable

    refuse_unwritable(output.html, {"--out": output.out, "--export": output.export})
    if output.format is not None and output.json:
        raise InputError("--format prints the settings alone and --json the whole report: give one of them.")
    if output.overwrite and output.export is None:
        raise InputError("--overwrite says how to write the files of --export: give --export too.")


def _print_report(
    output: ReportOptions,
    document: Callable[[], "Struct"],
    table: "Text",
    short: "Text",
    page: Callable[[], str],
    answer: "Estimate",
    exported: Mapping[Path, str],
) -> None:
    """Write the files of --out, --html and --export; print the short answer, the document, or the settings alone.

    Their paths go to stderr. Nothing is printed if a file cannot be written. `table`: the whole answer, for plan.txt.
    `answer`: whose settings are printed with --format, if it fits.
    """
    from planner.files.write import write_all

    text, settings = "", _settings_alone(output, answer)
    if output.json or output.out is not None:
        from planner.report.json import json_text

        text = json_text(document())
    texts: dict[Path, str] = {}
    if output.out is not None:
        folder = Path(output.out)
        texts = {folder / REPORT_FILE: text + "\n", folder / "plan.txt": table.plain + "\n"}
    if output.html is not None:
        texts[Path(output.html)] = page()
    texts |= exported
    write_all(texts)
    for path in texts if not output.quiet else ():
        print(visible(f"wrote {path}"), file=sys.stderr)
    if output.json:
        print(text)
    elif isinstance(output, AnswerOptions) and output.format is not None:
        print(settings, end="")
    else:
        print_table(short)


def _settings_alone(output: ReportOptions, answer: "Estimate") -> str:
    """Return what --format prints: the settings of an answer that fits, else nothing.

    Raises:
        InputError: they are not TRL's, or TRL has no argument for one.
    """
    if not isinstance(output, AnswerOptions) or output.format is None or not answer.fits:
        return ""
    from planner.report.shown_settings import pasted_settings

    return "".join(f"{visible(line)}\n" for line in pasted_settings(answer.candidate, output.format).splitlines())


def print_table(table: "Text") -> None:
    """Print a table as wide as the terminal; control characters in names are escaped."""
    from rich.console import Console

    table.plain = visible(table.plain)
    Console(width=width(), highlight=False).print(table, soft_wrap=True)


def width() -> int:
    """Return the columns of the terminal."""
    return shutil.get_terminal_size(fallback=(PIPE_WIDTH, 0)).columns


def print_error(message: str) -> None:
    """Print an error message on stderr, as one line."""
    print(f"Error: {one_line(message)}", file=sys.stderr)

"""The `plan` command: its subcommands, and the conversion of errors to exit codes."""

import codecs
import os
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from io import StringIO
from typing import Any, TextIO

import typer

from planner.commands import diagnose, estimate, export, lists, plan, probe, serve, validate
from planner.commands.exit_codes import EXIT_NOTHING_FITS, EXIT_OTHER, EXIT_PLANNED, exit_code_of
from planner.commands.help import Command, PlanGroup
from planner.commands.printing import print_error
from planner.errors import InputError, PlanError, nearest

app = typer.Typer(
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.callback(cls=PlanGroup, invoke_without_command=True)(plan.search)
COMMANDS: dict[str, Callable[..., int]] = {
    "estimate": estimate.estimate,
    "diff": estimate.diff,
    "dry-run": estimate.dry_run,
    "probe": probe.probe,
    "diagnose": diagnose.diagnose,
    "lengths": lists.lengths,
    "validate": validate.validate,
    "export": export.export,
    "serve": serve.serve,
    "mcp": serve.mcp,
    "models": lists.models,
    "gpus": lists.gpus,
    "schema": lists.schema,
    "measurements": lists.measurements,
}
for name, command in COMMANDS.items():
    app.command(name, cls=Command)(command)
COMMAND_LINE = typer.main.get_command(app)


def main() -> None:
    """Run the command with the arguments of the process and exit; the console script `plan`."""
    codecs.register_error(ASCII, _in_ascii)
    signal.signal(signal.SIGTERM, _interrupt)
    with ExitStack() as null:
        # Where the shell has closed a stream (`>&-`), Python has None.
        if sys.stderr is None:
            null.enter_context(redirect_stderr(null.enter_context(open(os.devnull, "w"))))
        if sys.stdout is not None:
            sys.exit(_run_and_flush())
        lost = null.enter_context(redirect_stdout(StringIO()))
        code = run(sys.argv[1:])
        if lost.getvalue() and code in (EXIT_PLANNED, EXIT_NOTHING_FITS):
            print_error("The answer cannot be written: stdout is closed.")
            code = EXIT_OTHER
        sys.exit(code)


def _interrupt(*_: object) -> None:
    """End as by Ctrl-C: a study says how to go on, and temporary folders are removed."""
    raise KeyboardInterrupt


# Characters of tables for streams that have no others, such as under LC_ALL=C and code page 1252.
ASCII = "ascii-tables"
ASCII_CHARACTERS = {"█": "#", "▓": "=", "▒": "-", "▚": "%", "░": ":", "·": ".", "▏": "|", "◂": "<", "…": "~"}


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    """Return the ASCII characters for those that a stream cannot encode: an error handler of `codecs`."""
    assert isinstance(error, UnicodeEncodeError)
    found = error.object[error.start : error.end]
    return "".join(ASCII_CHARACTERS.get(character, "?") for character in found), error.end


def _run_and_flush() -> int:
    """Run the command with the arguments of the process; return its exit code, `EXIT_OTHER` if stdout takes no text."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors=ASCII)  # type: ignore[union-attr]
    try:
        code = run(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        code = _discard(sys.stdout)  # its reader has read enough, as `head` does
    except OSError as error:
        if error.filename is not None:
            raise  # of another file than stdout
        code = _discard(sys.stdout)
        try:
            print_error(f"The answer cannot be written: {error.strerror}.")
        except OSError:
            _discard(sys.stderr)
    return code


def _discard(stream: TextIO) -> int:
    """Let a stream be /dev/null, so that its buffer is not written again at exit; return the exit code."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
    return EXIT_OTHER


def run(arguments: list[str]) -> int:
    """Run the command and return its exit code; print a `PlanError` or a usage error."""
    # The parent class of typer.BadParameter is the class of all usage errors. Some releases of Typer do not export it.
    usage_error: type[Exception] = typer.BadParameter.__mro__[1]
    try:
        code = COMMAND_LINE.main(arguments, prog_name="plan", standalone_mode=False)
    except PlanError as error:
        return _refused(error, arguments)
    except usage_error as error:
        return _refused(InputError(_usage_message(error)), arguments)
    return int(code or EXIT_PLANNED)


def _refused(error: PlanError, arguments: list[str]) -> int:
    """Print an error on stderr, with `--json` also as a document on stdout; return its exit code."""
    if "--json" in arguments:
        from planner.report.json import error_document, json_text  # lazy import: a table does not need it

        print(json_text(error_document(error)))
    print_error(str(error))
    return exit_code_of(error)


def _usage_message(error: Any) -> str:
    """Return the message of a usage error.

    An unknown option is shown with similar ones, an unknown command with similar ones or else all commands.
    """
    message = str(error.format_message())
    name, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
    if message.startswith("No such option") and name and context is not None:
        known = {option.lstrip("-"): option for param in context.command.params for option in param.opts}
        near = [known[option] for option in nearest(name.lstrip("-"), known)]
        command = f"plan {context.info_name}" if context.parent is not None else "plan"
        hint = f"Did you mean {' or '.join(near)}?" if near else f"{command} --help lists all."
        return f"No such option: {name}. {hint}"
    if not message.startswith("No such command") or "Did you mean" in message:
        return message
    return f"{message} There are {', '.join(COMMANDS)}, and plan alone, with a model as --model NAME."

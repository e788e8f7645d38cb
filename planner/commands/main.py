"""The `plan` command: its subcommands, and the conversion of errors to exit codes."""

import codecs
import os
import sys
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from io import StringIO

import typer

from planner.commands import diagnose, dry_run, estimate, export, lists, mcp, plan, probe, serve, validate
from planner.commands.exit_codes import EXIT_NOTHING_FITS, EXIT_OTHER, EXIT_PLANNED, exit_code_of
from planner.commands.printing import print_error
from planner.errors import InputError, PlanError

EPILOG = """\
Exit codes: 0 planned, 2 wrong input, 3 nothing fits, 4 the probe contradicts the plan, 1 anything else.

\b
plan --model Qwen2.5-7B --gpus 2xA100-40G --method grpo
plan estimate --model Qwen2.5-0.5B --gpus 1xRTX-3090 --method sft --tuning lora --max-length 2048
"""

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.callback(invoke_without_command=True, epilog=EPILOG)(plan.search)
app.command("estimate", epilog=EPILOG)(estimate.estimate)
app.command("dry-run", epilog=EPILOG)(dry_run.dry_run)
app.command("probe", epilog=EPILOG)(probe.probe)
app.command("diagnose", epilog=EPILOG)(diagnose.diagnose)
app.command("validate", epilog=EPILOG)(validate.validate)
app.command("export", epilog=EPILOG)(export.export)
app.command("serve", epilog=EPILOG)(serve.serve)
app.command("mcp", epilog=EPILOG)(mcp.mcp)
app.command()(lists.models)
app.command()(lists.gpus)
app.command()(lists.schema)
app.command(epilog=EPILOG)(lists.measurements)


def main() -> None:
    """Run the command with the arguments of the process and exit; the console script `plan`."""
    codecs.register_error(ASCII, _in_ascii)
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
        code = _discard_output()  # its reader has read enough, as `head` does
    except OSError as error:
        if error.filename is not None:
            raise  # of another file than stdout
        code = _discard_output()
        print_error(f"The answer cannot be written: {error.strerror}.")
    return code


def _discard_output() -> int:
    """Let stdout be /dev/null, so that its buffer is not written again at exit; return the exit code."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
    return EXIT_OTHER


def run(arguments: list[str]) -> int:
    """Run the command and return its exit code; print a `PlanError` or a usage error."""
    # The parent class of typer.BadParameter is the class of all usage errors. Some releases of Typer do not export it.
    usage_error: type[Exception] = typer.BadParameter.__mro__[1]
    try:
        code = typer.main.get_command(app).main(arguments, prog_name="plan", standalone_mode=False)
    except PlanError as error:
        return _refused(error, arguments)
    except usage_error as error:
        return _refused(InputError(_with_commands(error.format_message())), arguments)  # type: ignore[attr-defined]
    return int(code or EXIT_PLANNED)


def _refused(error: PlanError, arguments: list[str]) -> int:
    """Print an error on stderr, with `--json` also as a document on stdout; return its exit code."""
    if "--json" in arguments:
        from planner.report.json import error_document, json_text  # lazy import: a table does not need it

        print(json_text(error_document(error)))
    print_error(str(error))
    return exit_code_of(error)


def _with_commands(message: str) -> str:
    """Return the error message with the list of commands, if it is about an unknown command without a similar one."""
    if not message.startswith("No such command") or "Did you mean" in message:
        return message
    commands = [
        command.name or (command.callback.__name__ if command.callback else "") for command in app.registered_commands
    ]
    return f"{message} There are {', '.join(commands)}, and plan alone."

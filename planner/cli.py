"""The command: parses, calls, prints. The only printer and the only exit."""

import contextlib
import io
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from planner.errors import EXIT_NOTHING_FITS, EXIT_PLANNED, EXIT_WRONG_INPUT, DryRunUnsupported, InputError, PlanError, UnknownArchitecture
from planner.options import AskedOne, Checked, Printed, Saved, Searched, Written, given, grouped

if TYPE_CHECKING:
    from rich.text import Text

    from planner.cluster import Cluster
    from planner.model import ModelShape
    from planner.quantities import Estimate
    from planner.trace.compose import Simulation

EPILOG = """\
Exit codes: 0 planned, 2 wrong input, 3 nothing fits, 4 the probe contradicts the plan, 1 anything else.

\b
plan --model Qwen2.5-7B --gpus 2xA100-40G --method grpo
plan estimate --model Qwen2.5-0.5B --gpus 1xRTX-3090 --method sft --tuning lora --max-length 2048
"""
DRY_RUN_PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets")
PIPE_WIDTH = 100  # columns of the table where there is no terminal to ask

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]})


@app.callback(invoke_without_command=True, epilog=EPILOG)
@grouped
def search(ctx: typer.Context, asked: Searched, printed: Checked) -> int:
    """Find the largest, fastest configuration of a TRL method that fits the GPUs."""
    if ctx.invoked_subcommand is not None:
        _refuse_leading_options(ctx)
        return EXIT_PLANNED
    from planner.plan import plan
    from planner.question import read_question
    from planner.report.files import refuse_unwritable
    from planner.report.html import plan_html
    from planner.report.json import plan_report
    from planner.report.table import plan_table, refusal

    question = read_question(given(asked, printed), _with_layers(printed.quiet))
    refuse_unwritable(printed.out, printed.html)
    answer = plan(question.job, question.cluster)
    checked, said = _dry_run_of(answer.best, question.cluster, printed)
    answer = replace(answer, warnings=(*question.warnings, *said, *answer.warnings))
    _answer(printed, plan_report(answer), plan_table(answer, _width(), checked), lambda: plan_html(answer))
    if answer.verdict == "fits":
        return EXIT_PLANNED
    _say_error(refusal(answer))
    return EXIT_NOTHING_FITS


@app.command(epilog=EPILOG)
@grouped
def estimate(asked: AskedOne, printed: Checked) -> int:
    """One candidate, no search: what is not set is as TRL has it. Exit 3: it does not fit."""
    from planner.estimate import estimate as estimated
    from planner.notes import notes
    from planner.question import of_one, read_question, single_candidate
    from planner.report.files import refuse_unwritable
    from planner.report.html import estimate_html
    from planner.report.json import estimate_report
    from planner.report.table import estimate_table, shortfall

    question = read_question(given(asked, printed), _with_layers(printed.quiet))
    refuse_unwritable(printed.out, printed.html)
    cluster = question.cluster
    answer = estimated(single_candidate(question), cluster, question.job.risk)
    checked, said = _dry_run_of(answer, cluster, printed)
    warnings = (*question.warnings, *said, *notes(answer, of_one(question, answer)))
    table = estimate_table(answer, cluster, warnings, _width(), checked)
    _answer(printed, estimate_report(answer, warnings), table, lambda: estimate_html(answer, cluster, warnings))
    if answer.fits:
        return EXIT_PLANNED
    _say_error(shortfall(answer, question.job.risk))
    return EXIT_NOTHING_FITS


@app.command("dry-run", epilog=EPILOG)
@grouped
def dry_run(report: Saved, asked: AskedOne, printed: Printed) -> int:
    """Run one candidate's real trainer on fake tensors, without weights and GPU, beside the estimate."""
    from rich.console import Console

    from planner.estimate import estimate as estimated
    from planner.question import read_question, single_candidate
    from planner.report.json import json_text
    from planner.report.simulated import disagreement, simulation_report, simulation_table
    from planner.saved import read_plan

    if report.saved is not None:
        candidate, cluster = read_plan(Path(report.saved), asked.gpus, asked.free_memory, _with_layers(printed.quiet))
    else:
        question = read_question(given(asked, printed), _with_layers(printed.quiet))
        candidate, cluster = single_candidate(question), question.cluster
    simulation = _simulated(estimated(candidate, cluster), cluster, printed.quiet)
    if printed.json:
        print(json_text(simulation_report(simulation)))
    else:
        Console(width=_width(), highlight=False).print(simulation_table(simulation, cluster), soft_wrap=True)
        for line in disagreement(simulation) if not printed.quiet else ():
            print(line, file=sys.stderr)
    return EXIT_PLANNED


@app.command()
def models() -> int:
    """List the models that are known by name."""
    from planner.catalogue import model_rows
    from planner.report.listing import models_listing

    print(models_listing(model_rows()))
    return EXIT_PLANNED


@app.command()
def gpus() -> int:
    """List the GPUs that are known by name."""
    from planner.gpus import gpu_rows
    from planner.report.listing import gpus_listing

    print(gpus_listing(gpu_rows()))
    return EXIT_PLANNED


@app.command()
def schema() -> int:
    """Print the JSON Schema of --json."""
    print(files("planner").joinpath("data/report.schema.json").read_text(encoding="utf-8"), end="")
    return EXIT_PLANNED


def main() -> None:
    """The console script."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal that cannot draw a bar still gets the numbers
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Runs the command and returns its exit code; what the user can act on is one line on stderr."""
    # typer.BadParameter is a usage error; its parent, the class of all of them, has no public name in every release of Typer.
    usage_error: type[Exception] = typer.BadParameter.__mro__[1]
    try:
        code = typer.main.get_command(app).main(arguments, prog_name="plan", standalone_mode=False)
    except PlanError as error:
        _say_error(str(error))
        return error.exit_code
    except usage_error as error:
        _say_error(_with_commands(error.format_message()))  # type: ignore[attr-defined]
        return EXIT_WRONG_INPUT
    return int(code or EXIT_PLANNED)


def _with_commands(message: str) -> str:
    """An unknown command that is like none: with all there are."""
    if not message.startswith("No such command") or "Did you mean" in message:
        return message
    commands = [command.name or (command.callback.__name__ if command.callback else "") for command in app.registered_commands]
    return f"{message} There are {', '.join(commands)}, and plan alone."


def _dry_run_of(answer: "Estimate", cluster: "Cluster", printed: Checked) -> tuple[str, tuple[str, ...]]:
    """What a dry run says in the header and in a note; nothing where none is wanted. Where it fails the estimate stands, and a line says why."""
    if not _wants_dry_run(answer, printed):
        return "", ()
    from planner.report.simulated import agreement, disagreement

    try:
        simulation = _simulated(answer, cluster, printed.quiet)
    except PlanError as error:
        if not printed.quiet:
            print(f"no dry run: {error}", file=sys.stderr)
        return "", ()
    checked = agreement(simulation)
    in_report = (checked.removeprefix("; "),) if checked and printed.json else ()
    return checked, (*in_report, *disagreement(simulation))


def _wants_dry_run(answer: "Estimate", printed: Checked) -> bool:
    """The flag decides, then the environment; else a table about something that fits is checked where the packages are."""
    said: bool | None = printed.dry_run
    if said is None and os.environ.get("PLAN_DRY_RUN") in ("0", "1"):
        said = os.environ["PLAN_DRY_RUN"] == "1"
    if said is not None:
        return said
    return answer.fits and not printed.json and all(find_spec(name) is not None for name in DRY_RUN_PACKAGES)


def _simulated(answer: "Estimate", cluster: "Cluster", quiet: bool) -> "Simulation":
    """The dry run on a card of the cluster, with what its libraries print kept from the streams."""
    from planner.trace.compose import with_reserved

    if not quiet:
        print(f"simulating the step: {answer.candidate.method} of {answer.candidate.model.id} ...", file=sys.stderr)
    with _libraries_kept_silent():
        try:
            from probes.simulate import simulate
        except Exception as error:
            raise DryRunUnsupported(f"A dry run needs {_missing_extra(error)}") from error
        return with_reserved(simulate(answer), cluster.gpu)


def _with_layers(quiet: bool) -> "Callable[[ModelShape], ModelShape]":
    """What completes a model whose layers have no formulas: they are measured on fake tensors, where that was not done before."""
    announced = set[str]()

    def completed(model: "ModelShape") -> "ModelShape":
        @contextlib.contextmanager
        def measuring() -> Iterator[None]:
            if not quiet and model.id not in announced:
                print(f"no formulas for {model.model_type}: measuring the layers of {model.id} ...", file=sys.stderr)
            announced.add(model.id)
            with _libraries_kept_silent():
                yield

        if model.known:
            return model
        try:
            from probes.coefficients import measured

            return measured(model, measuring)
        except ImportError as error:
            reason = f"{model.id} ({model.model_type}) has no formulas here, and measuring its layers needs {_missing_extra(error)}"
            raise UnknownArchitecture(reason) from error

    return completed


def _missing_extra(error: Exception) -> str:
    missing = [name for name in DRY_RUN_PACKAGES if find_spec(name) is None]
    reason = f"{', '.join(missing)} not installed" if missing else f"{type(error).__name__}: {' '.join(str(error).split())}"
    return f"the extra dryrun (pip install 'finetune-plan[dryrun]'): {reason}."


@contextlib.contextmanager
def _libraries_kept_silent() -> Iterator[None]:
    """What the libraries print is kept from the streams, and torch's compiler from leaving the folder that it makes when it is imported."""
    import tempfile
    from unittest import mock

    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(mock.patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": folder}))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        yield


def _answer(printed: Written, report: "dict[str, object]", table: "Text", page: Callable[[], str]) -> None:
    """Prints the answer in the form that was asked for, and writes it where --out and --html say."""
    from rich.console import Console

    from planner.report.files import write_all
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
        Console(width=_width(), highlight=False).print(table, soft_wrap=True)


def _width() -> int:
    return shutil.get_terminal_size(fallback=(PIPE_WIDTH, 0)).columns


def _say_error(message: str) -> None:
    print(f"Error: {' '.join(message.split())}", file=sys.stderr)


def _refuse_leading_options(ctx: typer.Context) -> None:
    """`plan --model M estimate` would drop --model: a subcommand's options come after its name."""
    given = [option.opts[0] for option in ctx.command.params if (ctx.params.get(option.name or "") or None) != (option.default or None)]
    if given:
        raise InputError(f"{given[0]} stands before {ctx.invoked_subcommand}. Put it behind: plan {ctx.invoked_subcommand} {given[0]} ...")

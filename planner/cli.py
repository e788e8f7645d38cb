"""The command: parses, calls, prints. The only printer and the only exit."""

import atexit
import contextlib
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from planner.errors import EXIT_NOTHING_FITS, EXIT_OTHER, EXIT_PLANNED, EXIT_PROBE_CONTRADICTS, EXIT_WRONG_INPUT, InputError, PlanError
from planner.options import AskedOne, Checked, Compared, Exported, Printed, Probing, Proving, Saved, Searched, Written, given, grouped

if TYPE_CHECKING:
    from rich.text import Text

    from planner.candidate import Candidate
    from planner.cluster import Cluster
    from planner.quantities import Estimate

EPILOG = """\
Exit codes: 0 planned, 2 wrong input, 3 nothing fits, 4 the probe contradicts the plan, 1 anything else.

\b
plan --model Qwen2.5-7B --gpus 2xA100-40G --method grpo
plan estimate --model Qwen2.5-0.5B --gpus 1xRTX-3090 --method sft --tuning lora --max-length 2048
"""
PHASE_WIDTH = 20  # columns that wipe the phase before
PIPE_WIDTH = 100  # columns of the table where there is no terminal to ask

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]})


@app.callback(invoke_without_command=True, epilog=EPILOG)
@grouped
def search(ctx: typer.Context, asked: Searched, printed: Checked, proving: Proving) -> int:
    """Find the largest, fastest configuration of a TRL method that fits the GPUs."""
    if ctx.invoked_subcommand is not None:
        _refuse_leading_options(ctx)
        return EXIT_PLANNED
    from planner.own_results import own_results, with_own_results
    from planner.plan import plan
    from planner.question import read_question
    from planner.report.files import refuse_unwritable
    from planner.report.html import plan_html
    from planner.report.json import plan_report
    from planner.report.table import plan_table, refusal
    from planner.rungs import prober, profile_made, proven, refuse_unusable, runnable_here, with_layers

    say = _sayer(printed)
    refuse_unusable(proving)
    question = read_question(given(asked, printed), with_layers(say))
    refuse_unwritable(printed.out, printed.html)
    probe = prober(question.cluster, proving, _ticker(printed)) if proving.probe else None
    job, unable = runnable_here(question.job, question.cluster, proving) if proving.probe else (question.job, ())
    answer = with_own_results(plan(job, question.cluster), own_results())
    if _wants_profile(answer.best, printed) and profile_made(answer.best, question.cluster, say):
        answer = with_own_results(plan(job, question.cluster), own_results())
    checked, said = _dry_run_of(answer.best, question.cluster, printed) if probe is None else ("", ())
    answer = replace(answer, warnings=(*question.warnings, *unable, *said, *answer.warnings))
    proof = proven(answer, probe, proving, say) if probe is not None else None
    answer = proof.plan if proof is not None else answer
    _answer(printed, plan_report(answer), plan_table(answer, _width(), checked), lambda: plan_html(answer))
    if proof is not None and proof.exit_code != EXIT_PLANNED:
        _say_error(proof.reason)
        return proof.exit_code
    if answer.verdict == "fits":
        return EXIT_PLANNED
    _say_error(refusal(answer))
    return EXIT_NOTHING_FITS


@app.command(epilog=EPILOG)
@grouped
def estimate(asked: AskedOne, printed: Checked) -> int:
    """One candidate, no search: what is not set is as TRL has it. Exit 3: it does not fit."""
    from planner.notes import notes
    from planner.own_results import own_answer, own_notes, own_results
    from planner.question import of_one, read_question, single_candidate
    from planner.report.files import refuse_unwritable
    from planner.report.html import estimate_html
    from planner.report.json import estimate_report
    from planner.report.table import estimate_table, shortfall
    from planner.rungs import profile_made, with_layers
    from planner.trace.decide import answer_of

    say = _sayer(printed)
    question = read_question(given(asked, printed), with_layers(say))
    refuse_unwritable(printed.out, printed.html)
    cluster = question.cluster
    risk, own = question.job.risk, own_results()
    expected = answer_of(single_candidate(question), cluster, risk)
    if _wants_profile(expected, printed) and profile_made(expected, cluster, say):
        expected = answer_of(expected.candidate, cluster, risk)
    answer = own_answer(expected, cluster.gpu, own, risk)
    checked, said = _dry_run_of(answer, cluster, printed)
    warnings = (*question.warnings, *said, *own_notes(expected, cluster.gpu, own), *notes(answer, of_one(question, answer)))
    table = estimate_table(answer, cluster, warnings, _width(), checked)
    _answer(printed, estimate_report(answer, warnings), table, lambda: estimate_html(answer, cluster, warnings))
    if answer.fits:
        return EXIT_PLANNED
    _say_error(shortfall(answer, risk))
    return EXIT_NOTHING_FITS


@app.command("dry-run", epilog=EPILOG)
@grouped
def dry_run(report: Saved, asked: AskedOne, printed: Printed) -> int:
    """Run one candidate's real trainer on fake tensors, without weights and GPU, beside the estimate."""
    from rich.console import Console

    from planner.estimate import estimate as estimated
    from planner.report.json import json_text
    from planner.report.simulated import disagreement, simulation_report, simulation_table
    from planner.rungs import simulated

    say = _sayer(printed)
    candidate, cluster, _ = _candidate_of(report, asked, printed)
    simulation = simulated(estimated(candidate, cluster), cluster, say)
    if printed.json:
        print(json_text(simulation_report(simulation)))
    else:
        Console(width=_width(), highlight=False).print(simulation_table(simulation, cluster), soft_wrap=True)
        for line in disagreement(simulation) if not printed.quiet else ():
            print(line, file=sys.stderr)
    return EXIT_PLANNED


@app.command(epilog=EPILOG)
@grouped
def probe(report: Saved, asked: AskedOne, printed: Written, probing: Probing) -> int:
    """Run one candidate's real trainer for a few steps in a process of its own, beside what was expected. Exit 4: it contradicts that."""
    from planner.confirmed import contradiction
    from planner.measured import measured_estimate
    from planner.report.files import refuse_unwritable
    from planner.report.html import estimate_html
    from planner.report.json import estimate_report
    from planner.report.proof import seen_lines
    from planner.report.table import estimate_table, shortfall
    from planner.rungs import beside_a_dry_run, probed, prober
    from planner.trace.decide import answer_of

    candidate, cluster, risk = _candidate_of(report, asked, printed)
    refuse_unwritable(printed.out, printed.html)
    expected = answer_of(candidate, cluster, risk)
    measurement = probed(candidate, prober(cluster, probing, _ticker(printed)), cluster.gpu.name)
    answer = measured_estimate(expected, measurement, risk)
    lines = (*seen_lines(expected, measurement), *beside_a_dry_run(expected, measurement, _sayer(printed)))
    _answer(printed, estimate_report(answer, lines), estimate_table(answer, cluster, lines, _width()), lambda: estimate_html(answer, cluster, lines))
    if wrong := contradiction(expected, measurement):
        _say_error(wrong)
        return EXIT_PROBE_CONTRADICTS
    if answer.fits:
        return EXIT_PLANNED
    _say_error(shortfall(answer, risk))
    return EXIT_NOTHING_FITS


@app.command(epilog=EPILOG)
@grouped
def validate(compared: Compared, printed: Printed, probing: Probing) -> int:
    """Compare what is predicted with what was measured, for a file of cases; with --measure, measure first what nobody has."""
    from rich.console import Console

    from planner.cases import read_cases
    from planner.gpus import parse_cluster
    from planner.report.files import write_all
    from planner.report.json import json_text
    from planner.report.validation import validation_csv, validation_report, validation_table
    from planner.rungs import prober, traced, with_layers
    from planner.validate import validate as validated

    say = _sayer(printed)
    if compared.measure and probing.device == "simulated":
        raise InputError("--device simulated measures nothing: compare with dry runs by --dry-run, or --measure on --device cuda or cpu.")
    cluster = parse_cluster(compared.gpus, compared.free_memory) if compared.gpus is not None else None
    cases = read_cases(Path(compared.cases), with_layers(say))
    if compared.measure and cluster is None:
        raise InputError("--measure needs --gpus: the cards that probes run on, such as --gpus local.")
    probe = prober(cluster, probing, _ticker(printed)) if compared.measure and cluster is not None else None
    simulate = (lambda answer, gpu: traced(answer, say, None if probing.device == "cpu" else gpu)) if compared.dry_run else None
    record = Path(compared.record) if compared.record is not None else None
    found = validated(cases, cluster, probe=probe, simulate=simulate, record=record, say=say)
    if compared.csv is not None:
        write_all({Path(compared.csv): validation_csv(found)})
    if printed.json:
        print(json_text(validation_report(found)))
    else:
        Console(width=_width(), highlight=False).print(validation_table(found), soft_wrap=True)
    return EXIT_OTHER if found.interrupted else EXIT_PLANNED


@app.command(epilog=EPILOG)
@grouped
def export(written: Exported) -> int:
    """Write the files that run a plan's candidate: accelerate, DeepSpeed, TRL, vLLM, SLURM, requirements. Prints their paths."""
    from planner.launch.export import export as write_launch_files
    from planner.rungs import with_layers
    from planner.saved import read_candidate

    candidate = read_candidate(Path(written.saved), with_layers(lambda line: print(line, file=sys.stderr)))
    for path in write_launch_files(candidate, Path(written.folder), written.overwrite):
        print(path)
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
    code = run(sys.argv[1:])
    if "torch" in sys.modules:
        _leave(code)
    sys.exit(code)


def _leave(code: int) -> None:
    """Ends the process without freeing one by one what the libraries imported, which takes a second (as mypy's `hard_exit` does)."""
    with contextlib.suppress(OSError):  # a reader that went away is sys.exit's to tell of
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        atexit._run_exitfuncs()
        os._exit(code)


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
    from planner.rungs import simulated

    say = _sayer(printed)
    try:
        simulation = simulated(answer, cluster, say)
    except PlanError as error:
        say(f"no dry run: {error}")
        return "", ()
    checked = agreement(simulation)
    in_report = (checked.removeprefix("; "),) if checked and printed.json else ()
    return checked, (*in_report, *disagreement(simulation))


def _wants_dry_run(answer: "Estimate", printed: Checked) -> bool:
    """The flag decides, then the environment; else an estimate that no profile stands for is checked where the packages are."""
    if printed.dry_run is not None:
        return printed.dry_run
    if os.environ.get("PLAN_DRY_RUN") in ("0", "1"):
        return os.environ["PLAN_DRY_RUN"] == "1"
    return _wants_profile(answer, printed)


def _wants_profile(answer: "Estimate", printed: Checked) -> bool:
    """Where nothing is said: a table about something that fits is simulated where the packages are, and the profile kept."""
    from planner.rungs import can_dry_run

    unsaid = printed.dry_run is None and os.environ.get("PLAN_DRY_RUN") not in ("0", "1")
    return unsaid and answer.fits and answer.evidence == "estimated" and not printed.json and can_dry_run()


def _candidate_of(report: Saved, asked: AskedOne, printed: Printed) -> "tuple[Candidate, Cluster, float]":
    """The candidate that a saved report or the options speak of, its cluster, and the accepted risk."""
    from planner.question import read_question, read_risk, single_candidate
    from planner.rungs import with_layers
    from planner.saved import read_plan

    complete = with_layers(_sayer(printed))
    if report.saved is not None:
        return *read_plan(Path(report.saved), asked.gpus, asked.free_memory, complete), read_risk(asked.risk)
    question = read_question(given(asked, printed), complete)
    return single_candidate(question), question.cluster, question.job.risk


def _sayer(printed: Printed) -> Callable[[str], None]:
    """Progress, on stderr; nowhere where it is not wanted."""
    return (lambda line: None) if printed.quiet else (lambda line: print(line, file=sys.stderr))


def _ticker(printed: Printed) -> Callable[[str], None]:
    """What a probe is at, on a line that the next one overwrites; only where somebody watches."""
    if printed.quiet or not sys.stderr.isatty():
        return lambda phase: None
    return lambda phase: print(f"  {phase.replace('_', ' '):<{PHASE_WIDTH}}", end="\r", file=sys.stderr, flush=True)


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

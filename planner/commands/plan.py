"""`plan`: search the largest, fastest configuration that fits, and check or prove it on request."""

from dataclasses import fields, replace
from typing import TYPE_CHECKING

import typer

from planner.commands.compare import compare, compares
from planner.commands.options import CheckOptions, PriceOptions, StudyOptions, grouped
from planner.commands.printing import live_line, print_error, print_plan, progress
from planner.errors import EXIT_NOTHING_FITS, EXIT_PLANNED, InputError
from planner.requests.options import SearchOptions

if TYPE_CHECKING:
    from planner.plan import Plan
    from planner.requests.read_options import JobRequest


@grouped
def search(
    ctx: typer.Context, options: SearchOptions, pricing: PriceOptions, output: CheckOptions, study: StudyOptions
) -> int:
    """Find the largest, fastest configuration of a TRL method that fits the GPUs."""
    if ctx.invoked_subcommand is not None:
        _refuse_leading_options(ctx)
        return EXIT_PLANNED
    from planner.files.write import refuse_unwritable
    from planner.report.table import refusal
    from planner.report.words import DRY_RUN_HINT
    from planner.requests.read_options import read_options
    from planner.training_stack import complete_models, dry_run_installed

    _refuse_study_options_without_probe(study)
    if study.probe and output.dry_run:
        raise InputError("--probe measures what --dry-run simulates: give one of them.")
    if compares(options, pricing):
        return compare(options, pricing, output, study)
    refuse_unwritable(output.out, output.html)
    with live_line(output, "reading the job") as line:
        request = read_options(options, complete_models(line.say))
    if study.probe:
        answer, exit_code, error = _proven(request, study, output)
    else:
        with live_line(output, "searching"):
            answer = planned(request)
        if output.dry_run:
            answer = _checked(answer, output)
        elif dry_run_installed() and answer.verdict == "fits" and not output.json:
            progress(output)(DRY_RUN_HINT)
        exit_code, error = (EXIT_PLANNED, "") if answer.verdict == "fits" else (EXIT_NOTHING_FITS, refusal(answer))
    print_plan(output, with_notes(request, answer))
    if exit_code != EXIT_PLANNED:
        print_error(error)
    return exit_code


def planned(request: "JobRequest") -> "Plan":
    """Return the plan of a job, corrected by this machine's own probes."""
    from planner.measurements.own_results import apply_own_results, read_own_results
    from planner.plan import plan

    return apply_own_results(plan(request.job, request.cluster), read_own_results())


def with_notes(request: "JobRequest", answer: "Plan") -> "Plan":
    """Return the plan with the warnings about the options and the changes to the config files."""
    return replace(answer, warnings=(*request.warnings, *_changes(request, answer), *answer.warnings))


def _changes(request: "JobRequest", answer: "Plan") -> tuple[str, ...]:
    """Return a line for each change that turns the given config files into the plan's settings."""
    from planner.jobs.config_changes import config_changes

    if not request.in_files:
        return ()
    changes = config_changes(request.in_files, answer.best.candidate)
    return tuple(f"config {change}" for change in changes) or ("the config needs no change",)


def _checked(answer: "Plan", output: CheckOptions) -> "Plan":
    """Return the plan with a note about a dry run of its best candidate.

    If the dry run needs more than the estimate's interval allows, the search runs again with estimates raised by that.
    """
    from planner.commands.dry_run import check_by_dry_run
    from planner.measurements.own_results import apply_own_results, read_own_results
    from planner.plan import plan
    from planner.report.dry_run import second_search_note
    from planner.search.knobs import tuning_class_of

    note, residual = check_by_dry_run(answer.best, answer.cluster, output)
    notes = [note]
    if residual:
        residuals = {tuning_class_of(answer.best.candidate, answer.job): residual}
        with live_line(output) as line:
            line.say(f"{note}; searching again")
            answer = apply_own_results(plan(answer.job, answer.cluster, residuals), read_own_results())
        notes.append(second_search_note(residual))
    return replace(answer, warnings=(*notes, *answer.warnings))


def _proven(request: "JobRequest", study: StudyOptions, output: CheckOptions) -> "tuple[Plan, int, str]":
    """Return the plan after a study of probes, the exit code and, if that is not 0, the error message."""
    from planner.commands.probe import probe_settings
    from planner.files.database import storage_url
    from planner.measurements.own_results import apply_own_results, read_own_results
    from planner.plan import plan
    from planner.report.table import refusal
    from planner.training_stack import open_device, probe_room, prove, runnable_here
    from planner.units import parse_seconds

    settings, storage = probe_settings(study), storage_url(study.storage)
    budget_seconds = parse_seconds(study.budget) if study.budget is not None else float("inf")
    limit = f", at most {study.budget}" if study.budget is not None else ""
    with live_line(output, f"probing{limit}") as line:
        run = open_device(request.cluster, settings, line.phase)
        line.phase("search")
        job, changes = runnable_here(request.job, request.cluster, settings.device)
        answer = apply_own_results(plan(job, request.cluster), read_own_results(storage))
        answer = replace(answer, warnings=(*changes, *answer.warnings))
        proof = prove(
            answer,
            run,
            device=settings.device,
            storage=storage,
            budget_seconds=budget_seconds,
            say=progress(output),
            room=probe_room(request.cluster, settings),
        )
    if proof.exit_code != EXIT_PLANNED:
        return proof.plan, proof.exit_code, proof.reason
    if proof.plan.verdict != "fits":
        return proof.plan, EXIT_NOTHING_FITS, refusal(proof.plan)
    return proof.plan, EXIT_PLANNED, ""


def _refuse_study_options_without_probe(study: StudyOptions) -> None:
    """Refuse an option about probes where `--probe` is not given.

    Raises:
        InputError: names the option.
    """
    for entry in fields(StudyOptions) if not study.probe else ():
        if getattr(study, entry.name) != entry.default:
            raise InputError(f"--{entry.name.replace('_', '-')} says how to probe: give --probe too.")


def _refuse_leading_options(ctx: typer.Context) -> None:
    """Refuse `plan --model M estimate`, which would drop --model: options come after a subcommand's name."""
    leading = [
        option.opts[0]
        for option in ctx.command.params
        if (ctx.params.get(option.name or "") or None) != (option.default or None)
    ]
    if leading:
        command = ctx.invoked_subcommand
        raise InputError(f"{leading[0]} stands before {command}. Put it behind: plan {command} {leading[0]} ...")

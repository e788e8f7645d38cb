"""`plan`: search the largest, fastest configuration that fits, and check or prove it on request."""

import sys
from typing import TYPE_CHECKING

import typer
from msgspec.structs import fields

from planner.commands.begin import begin, begins
from planner.commands.compare import compare, compares
from planner.commands.exit_codes import EXIT_NOTHING_FITS, EXIT_OTHER, EXIT_PLANNED, EXIT_PROBE_CONTRADICTS
from planner.commands.options import AnswerOptions, PriceOptions, ProbeOptions, ProofOptions, VersionOption, grouped
from planner.commands.printing import (
    export_texts,
    live_line,
    print_error,
    print_plan,
    progress,
    refuse_contradicting_output,
)
from planner.errors import InputError
from planner.requests.options import SearchOptions

if TYPE_CHECKING:
    from planner.requests.read_options import JobRequest
    from planner.training_stack import ProvenPlan


@grouped
def search(
    ctx: typer.Context,
    options: SearchOptions,
    pricing: PriceOptions,
    output: AnswerOptions,
    study: ProofOptions,
    probing: ProbeOptions,
    release: VersionOption,
) -> int:
    """Find the largest, fastest configuration of a TRL training that fits the GPUs, and say how sure that is."""
    if ctx.invoked_subcommand is not None or release.version:
        return _without_job(ctx)
    from planner.ask import checked_plan, planned
    from planner.report.table import nearest_refusal
    from planner.requests.command_line import command_line
    from planner.requests.read_config import config_text
    from planner.requests.read_options import read_options
    from planner.training_stack import complete_models

    _refuse_options_about_probes(study, probing)
    if study.probe and output.dry_run:
        raise InputError("--probe runs more than --dry-run does: give one of them.")
    if begins(options, output) and not study.probe:
        return begin(options, pricing, output, study)
    if compares(options, pricing):
        return compare(options, pricing, output, study)
    refuse_contradicting_output(output)
    with live_line(output, "reading the job") as line:
        request = read_options(options, complete_models(line.say))
    exit_code, error = EXIT_PLANNED, ""
    if study.probe:
        proof = _proven(request, study, probing, output)
        answer, error = proof.plan, proof.reason
        exit_code = {"proven": EXIT_PLANNED, "contradicted": EXIT_PROBE_CONTRADICTS, "broken off": EXIT_OTHER}[
            proof.ending
        ]
    else:
        with live_line(output, "searching") as line:
            answer = checked_plan(request, line.say, line.phase) if output.dry_run else planned(request)
    if exit_code == EXIT_PLANNED and answer.verdict == "does_not_fit":
        exit_code, error = EXIT_NOTHING_FITS, nearest_refusal(answer)
    config = config_text(options)
    files = export_texts(output, config, answer.best, answer.cluster) if exit_code == EXIT_PLANNED else {}
    print_plan(output, answer, config, "" if study.probe else command_line(options), files)
    if exit_code != EXIT_PLANNED:
        print_error(error)
    return exit_code


def _proven(request: "JobRequest", study: ProofOptions, probing: ProbeOptions, output: AnswerOptions) -> "ProvenPlan":
    """Return the plan after a study of probes.

    Raises:
        InputError: an option of the probes cannot be read, or the probes cannot run here.
    """
    from planner.ask import StudySettings, proven_plan
    from planner.commands.probe import probe_settings
    from planner.files.database import storage_url
    from planner.units import parse_seconds

    settings = StudySettings(
        probes=probe_settings(probing),
        storage=storage_url(study.storage),
        budget_seconds=parse_seconds(study.budget) if study.budget is not None else float("inf"),
    )
    limit = f", at most {study.budget}" if study.budget is not None else ""
    with live_line(output, f"probing{limit}") as line:
        return proven_plan(request, settings, progress(output), line.phase)


def _refuse_options_about_probes(study: ProofOptions, probing: ProbeOptions) -> None:
    """Refuse an option about probes where `--probe` is not given.

    Raises:
        InputError: names the option.
    """
    for group in (study, probing) if not study.probe else ():
        for entry in fields(group):
            if getattr(group, entry.name) == entry.default:
                continue
            raise InputError(f"--{entry.name.replace('_', '-')} says how to probe: give --probe too.")


def _without_job(ctx: typer.Context) -> int:
    """Print the installed release, or nothing before a subcommand that answers itself.

    Warn about other distributions that have written into our packages.
    """
    if ctx.invoked_subcommand is not None:
        _refuse_leading_options(ctx)
        return EXIT_PLANNED
    from planner.files.installed import DISTRIBUTION, installed_version, other_owners

    print(f"plan {installed_version()}")
    for name, owners in other_owners().items():
        listed = " and ".join(owners)
        print(
            f"Warning: {listed} installed a package {name} too, over that of {DISTRIBUTION}. "
            "Use an environment for each.",
            file=sys.stderr,
        )
    return EXIT_PLANNED


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

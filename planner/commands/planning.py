"""`plan` and `plan estimate`: what fits, by formulas, profiles and dry runs, and on request by probes."""

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from planner.commands.printing import say_error, sayer, show, ticker, width
from planner.errors import EXIT_NOTHING_FITS, EXIT_PLANNED, InputError, PlanError
from planner.options import AskedOne, Checked, Proving, Searched, given, grouped

if TYPE_CHECKING:
    from planner.ahead import Run
    from planner.cluster import Cluster
    from planner.quantities import Estimate


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
    from planner.rungs import dry_runs_ahead, prober, profile_made, proven, refuse_unusable, runnable_here, with_layers

    say = sayer(printed)
    refuse_unusable(proving)
    question = read_question(given(asked, printed), with_layers(say))
    refuse_unwritable(printed.out, printed.html)
    probe = prober(question.cluster, proving, ticker(printed)) if proving.probe else None
    job, unable = runnable_here(question.job, question.cluster, proving) if proving.probe else (question.job, ())
    with dry_runs_ahead(job, question.cluster, _unsaid(printed) and probe is None) as run:
        answer = with_own_results(plan(job, question.cluster), own_results())
        from planner.report.html import plan_html  # while the other process imports, if there is one
        from planner.report.json import plan_report
        from planner.report.table import plan_table, refusal

        if _wants_profile(answer.best, printed) and profile_made(answer.best, question.cluster, say, run):
            answer = with_own_results(plan(job, question.cluster), own_results())
        checked, said = _dry_run_of(answer.best, question.cluster, printed, run) if probe is None else ("", ())
    answer = replace(answer, warnings=(*question.warnings, *unable, *said, *answer.warnings))
    proof = proven(answer, probe, proving, say) if probe is not None else None
    answer = proof.plan if proof is not None else answer
    show(printed, plan_report(answer), plan_table(answer, width(), checked), lambda: plan_html(answer))
    if proof is not None and proof.exit_code != EXIT_PLANNED:
        say_error(proof.reason)
        return proof.exit_code
    if answer.verdict == "fits":
        return EXIT_PLANNED
    say_error(refusal(answer))
    return EXIT_NOTHING_FITS


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

    say = sayer(printed)
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
    table = estimate_table(answer, cluster, warnings, width(), checked)
    show(printed, estimate_report(answer, warnings), table, lambda: estimate_html(answer, cluster, warnings))
    if answer.fits:
        return EXIT_PLANNED
    say_error(shortfall(answer, risk))
    return EXIT_NOTHING_FITS


def _dry_run_of(answer: "Estimate", cluster: "Cluster", printed: Checked, run: "Run | None" = None) -> tuple[str, tuple[str, ...]]:
    """What a dry run says in the header and in a note; nothing where none is wanted. Where it fails the estimate stands, and a line says why."""
    if not _wants_dry_run(answer, printed):
        return "", ()
    from planner.ahead import run_here
    from planner.report.simulated import agreement, disagreement
    from planner.rungs import simulated

    say = sayer(printed)
    try:
        simulation = simulated(answer, cluster, say, run or run_here)
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

    return _unsaid(printed) and answer.fits and answer.evidence == "estimated" and can_dry_run()


def _unsaid(printed: Checked) -> bool:
    """A table is asked for, and neither the flag nor the environment says whether to simulate."""
    return printed.dry_run is None and os.environ.get("PLAN_DRY_RUN") not in ("0", "1") and not printed.json


def _refuse_leading_options(ctx: typer.Context) -> None:
    """`plan --model M estimate` would drop --model: a subcommand's options come after its name."""
    given = [option.opts[0] for option in ctx.command.params if (ctx.params.get(option.name or "") or None) != (option.default or None)]
    if given:
        raise InputError(f"{given[0]} stands before {ctx.invoked_subcommand}. Put it behind: plan {ctx.invoked_subcommand} {given[0]} ...")

"""`plan` and `plan estimate`: what fits, by formulas, profiles and dry runs, and on request by probes."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import TYPE_CHECKING

import typer

from planner.commands.options import AskedOne, Checked, Proving, Searched, given, grouped
from planner.commands.printing import say_error, sayer, show, ticker, width
from planner.errors import EXIT_NOTHING_FITS, EXIT_PLANNED, DryRunUnsupported, InputError
from planner.units import parse_seconds

if TYPE_CHECKING:
    from planner.gpus.cluster import Cluster
    from planner.quantities import Estimate


@grouped
def search(ctx: typer.Context, asked: Searched, printed: Checked, proving: Proving) -> int:
    """Find the largest, fastest configuration of a TRL method that fits the GPUs."""
    if ctx.invoked_subcommand is not None:
        _refuse_leading_options(ctx)
        return EXIT_PLANNED
    from planner.files.write import refuse_unwritable
    from planner.jobs.from_options import read_question
    from planner.measurements.own_results import own_results, with_own_results
    from planner.plan import plan
    from planner.report.html import plan_html
    from planner.report.json import plan_report
    from planner.report.simulated import HINT, searched_again
    from planner.report.table import plan_table, refusal
    from planner.search.knobs import tuning_class_of
    from planner.training_stack import can_dry_run, prober, proven, runnable_here, with_layers

    say = sayer(printed)
    refuse_unusable(proving)
    question = read_question(given(asked, printed), with_layers(say))
    refuse_unwritable(printed.out, printed.html)
    probe = prober(question.cluster, proving, ticker(printed)) if proving.probe else None
    job, unable = runnable_here(question.job, question.cluster, proving) if proving.probe else (question.job, ())
    answer = with_own_results(plan(job, question.cluster), own_results())
    checked: tuple[str, ...] = ()
    if printed.dry_run:
        checked, residual = _dry_run(answer.best, question.cluster, say)
        if residual:
            say(f"{checked[0]}; searching again")
            answer = with_own_results(
                plan(job, question.cluster, {tuning_class_of(answer.best.candidate): residual}), own_results()
            )
            checked = (*checked, searched_again(residual))
    elif can_dry_run() and answer.verdict == "fits" and probe is None and not printed.json:
        say(HINT)
    answer = replace(answer, warnings=(*question.warnings, *unable, *checked, *answer.warnings))
    proof = proven(answer, probe, proving, say) if probe is not None else None
    answer = proof.plan if proof is not None else answer
    show(printed, plan_report(answer), plan_table(answer, width()), lambda: plan_html(answer))
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
    from planner.estimate import estimate as estimated
    from planner.files.write import refuse_unwritable
    from planner.jobs.from_options import read_question, single_candidate
    from planner.measurements.own_results import own_answer, own_notes, own_results
    from planner.report.html import estimate_html
    from planner.report.json import estimate_report
    from planner.report.table import estimate_table, shortfall
    from planner.search.explain import notes
    from planner.search.knobs import problem_of
    from planner.training_stack import with_layers

    say = sayer(printed)
    question = read_question(given(asked, printed), with_layers(say))
    refuse_unwritable(printed.out, printed.html)
    cluster = question.cluster
    risk, own = question.job.risk, own_results()
    expected = estimated(single_candidate(question), cluster, risk)
    answer = own_answer(expected, cluster.gpu, own, risk)
    checked = _dry_run(expected, cluster, say)[0] if printed.dry_run else ()
    warnings = (
        *question.warnings,
        *checked,
        *own_notes(expected, cluster.gpu, own),
        *notes(answer, problem_of(question.job, cluster, answer)),
    )
    table = estimate_table(answer, cluster, warnings, width())
    show(printed, estimate_report(answer, warnings), table, lambda: estimate_html(answer, cluster, warnings))
    if answer.fits:
        return EXIT_PLANNED
    say_error(shortfall(answer, risk))
    return EXIT_NOTHING_FITS


def _dry_run(answer: "Estimate", cluster: "Cluster", say: Callable[[str], None]) -> tuple[tuple[str, ...], float]:
    """Run the dry run of an estimate; return a note about it, and the share by which it exceeds what the estimate allows, 0 if it does not."""
    from planner.allocator.simulation import exceeded_by
    from planner.report.simulated import agreement
    from planner.training_stack import simulated

    try:
        simulation = simulated(answer, cluster, say)
    except DryRunUnsupported as error:
        return (f"no dry run: {error}",), 0.0
    return (agreement(simulation),), exceeded_by(simulation, answer)


def _refuse_leading_options(ctx: typer.Context) -> None:
    """`plan --model M estimate` would drop --model: a subcommand's options come after its name."""
    given = [
        option.opts[0]
        for option in ctx.command.params
        if (ctx.params.get(option.name or "") or None) != (option.default or None)
    ]
    if given:
        raise InputError(
            f"{given[0]} stands before {ctx.invoked_subcommand}. Put it behind: plan {ctx.invoked_subcommand} {given[0]} ..."
        )


def refuse_unusable(options: Proving) -> None:
    """Before anything is computed: how to probe, where nothing is to be probed; and a budget that is none.

    Raises:
        InputError: names the option.
    """
    for entry in fields(Proving) if not options.probe else ():
        if getattr(options, entry.name) != entry.default:
            raise InputError(f"--{entry.name.replace('_', '-')} says how to probe: give --probe too.")
    if options.budget is not None:
        parse_seconds(options.budget)

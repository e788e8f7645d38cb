"""`plan dry-run`, `plan probe` and `plan validate`: real trainers, on fake tensors or on devices, beside what was expected of them."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from planner.commands.options import AskedOne, Compared, Printed, Probing, Saved, Written, given, grouped
from planner.commands.printing import say_error, sayer, show, ticker, width
from planner.errors import EXIT_NOTHING_FITS, EXIT_OTHER, EXIT_PLANNED, EXIT_PROBE_CONTRADICTS, InputError

if TYPE_CHECKING:
    from planner.candidate import Candidate
    from planner.gpus.cluster import Cluster


@grouped
def dry_run(report: Saved, asked: AskedOne, printed: Printed) -> int:
    """Run one candidate's real trainer on fake tensors, without weights and GPU, beside the estimate."""
    from rich.console import Console

    from planner.estimate import estimate as estimated
    from planner.report.json import json_text
    from planner.report.simulated import disagreement, simulation_report, simulation_table
    from planner.training_stack import simulated

    say = sayer(printed)
    candidate, cluster, _ = _candidate_of(report, asked, printed)
    simulation = simulated(estimated(candidate, cluster), cluster, say)
    if printed.json:
        print(json_text(simulation_report(simulation)))
    else:
        Console(width=width(), highlight=False).print(simulation_table(simulation, cluster), soft_wrap=True)
        for line in disagreement(simulation) if not printed.quiet else ():
            print(line, file=sys.stderr)
    return EXIT_PLANNED


@grouped
def probe(report: Saved, asked: AskedOne, printed: Written, probing: Probing) -> int:
    """Run one candidate's real trainer for a few steps in a process of its own, beside what was expected. Exit 4: it contradicts that."""
    from planner.estimate import estimate as estimated
    from planner.files.write import refuse_unwritable
    from planner.measurements.corrected_estimate import measured_estimate
    from planner.measurements.corrected_plan import contradiction
    from planner.report.html import estimate_html
    from planner.report.json import estimate_report
    from planner.report.proof import seen_lines
    from planner.report.table import estimate_table, shortfall
    from planner.training_stack import beside_a_dry_run, probed, prober

    candidate, cluster, risk = _candidate_of(report, asked, printed)
    refuse_unwritable(printed.out, printed.html)
    expected = estimated(candidate, cluster, risk)
    measurement = probed(candidate, prober(cluster, probing, ticker(printed)), cluster.gpu.name)
    answer = measured_estimate(expected, measurement, risk)
    lines = (*seen_lines(expected, measurement), *beside_a_dry_run(expected, measurement, sayer(printed)))
    show(
        printed,
        estimate_report(answer, lines),
        estimate_table(answer, cluster, lines, width()),
        lambda: estimate_html(answer, cluster, lines),
    )
    if wrong := contradiction(expected, measurement):
        say_error(wrong)
        return EXIT_PROBE_CONTRADICTS
    if answer.fits:
        return EXIT_PLANNED
    say_error(shortfall(answer, risk))
    return EXIT_NOTHING_FITS


@grouped
def validate(compared: Compared, printed: Printed, probing: Probing) -> int:
    """Compare what is predicted with what was measured, for a file of cases; with --measure, measure first what nobody has."""
    from rich.console import Console

    from planner.files.write import write_all
    from planner.gpus.parse import parse_cluster
    from planner.measurements.cases import read_cases
    from planner.measurements.validate import validate as validated
    from planner.report.json import json_text
    from planner.report.validation import validation_csv, validation_report, validation_table
    from planner.training_stack import prober, traced, with_layers

    say = sayer(printed)
    if compared.measure and probing.device == "simulated":
        raise InputError(
            "--device simulated measures nothing: compare with dry runs by --dry-run, or --measure on --device cuda or cpu."
        )
    cluster = parse_cluster(compared.gpus, compared.free_memory) if compared.gpus is not None else None
    cases = read_cases(Path(compared.cases), with_layers(say))
    if compared.measure and cluster is None:
        raise InputError("--measure needs --gpus: the cards that probes run on, such as --gpus local.")
    probe = prober(cluster, probing, ticker(printed)) if compared.measure and cluster is not None else None
    simulate = (
        (lambda answer, gpu: traced(answer, say, None if probing.device == "cpu" else gpu))
        if compared.dry_run
        else None
    )
    record = Path(compared.record) if compared.record is not None else None
    found = validated(cases, cluster, probe=probe, simulate=simulate, record=record, say=say)
    if compared.csv is not None:
        write_all({Path(compared.csv): validation_csv(found)})
    if printed.json:
        print(json_text(validation_report(found)))
    else:
        Console(width=width(), highlight=False).print(validation_table(found), soft_wrap=True)
    return EXIT_OTHER if found.interrupted else EXIT_PLANNED


def _candidate_of(report: Saved, asked: AskedOne, printed: Printed) -> "tuple[Candidate, Cluster, float]":
    """The candidate that a saved report or the options speak of, its cluster, and the accepted risk."""
    from planner.jobs.from_options import read_question, read_risk, single_candidate
    from planner.report.read_json import read_plan
    from planner.training_stack import with_layers

    complete = with_layers(sayer(printed))
    if report.saved is not None:
        return *read_plan(Path(report.saved), asked.gpus, asked.free_memory, complete), read_risk(asked.risk)
    question = read_question(given(asked, printed), complete)
    return single_candidate(question), question.cluster, question.job.risk

"""`plan dry-run`: the installed trainer's step on fake tensors, beside the estimate."""

import sys
from typing import TYPE_CHECKING

from planner.commands.options import OutputOptions, SavedPlan, grouped
from planner.commands.printing import live_line, print_table
from planner.errors import EXIT_PLANNED, DryRunUnsupported
from planner.requests.options import CandidateOptions

if TYPE_CHECKING:
    from planner.candidate import Candidate
    from planner.gpus.cluster import Cluster
    from planner.quantities import Estimate


@grouped
def dry_run(saved: SavedPlan, options: CandidateOptions, output: OutputOptions) -> int:
    """Run one candidate's real trainer on fake tensors, without weights and GPU, beside the estimate."""
    from planner.allocator.simulation import with_reserved
    from planner.estimate import estimate
    from planner.report.dry_run import difference_lines, dry_run_report, dry_run_table
    from planner.report.json import json_text
    from planner.training_stack import dry_run as run_dry

    candidate, cluster = saved_or_single_candidate(saved, options, output)
    with live_line(output) as live:
        traced = run_dry(estimate(candidate, cluster), cluster.gpu, live.say)
    simulation = with_reserved(traced, cluster.gpu)
    if output.json:
        print(json_text(dry_run_report(simulation)))
    else:
        print_table(dry_run_table(simulation, cluster))
        for line in difference_lines(simulation) if not output.quiet else ():
            print(line, file=sys.stderr)
    return EXIT_PLANNED


def saved_or_single_candidate(
    saved: SavedPlan, options: CandidateOptions, output: OutputOptions
) -> "tuple[Candidate, Cluster]":
    """Return the candidate of a saved report, or of the options if none is given, with its cluster."""
    from pathlib import Path

    from planner.gpus.host_memory import with_given_host
    from planner.jobs.base_candidate import single_candidate
    from planner.report.read_json import read_plan
    from planner.requests.read_options import read_options
    from planner.training_stack import complete_models

    with live_line(output) as line:
        complete = complete_models(line.say)
        if saved.saved is not None:
            candidate, cluster = read_plan(Path(saved.saved), options.gpus, options.free_memory, complete)
            return candidate, cluster if options.host_memory is None else with_given_host(cluster, options.host_memory)
        request = read_options(options, complete)
    return single_candidate(request.job, request.cluster), request.cluster


def check_by_dry_run(answer: "Estimate", cluster: "Cluster", output: OutputOptions) -> tuple[str, float]:
    """Run a dry run of an estimate. Return a note about it, and the share by which it exceeds the estimate's interval.

    The share is 0 if the dry run is within the interval and fits the GPU, or if the packages or settings do not allow
    a dry run.
    """
    from planner.allocator.simulation import exceeded_by, with_reserved
    from planner.report.dry_run import dry_run_note
    from planner.training_stack import dry_run as run_dry

    try:
        with live_line(output) as line:
            traced = run_dry(answer, cluster.gpu, line.say)
    except DryRunUnsupported as error:
        return f"no dry run: {error}", 0.0
    simulation = with_reserved(traced, cluster.gpu)
    return dry_run_note(simulation), exceeded_by(simulation, answer)

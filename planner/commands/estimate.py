"""`plan estimate`: memory and speed of one candidate, without a search."""

from typing import TYPE_CHECKING

from planner.commands.options import CheckOptions, grouped
from planner.commands.printing import live_line, print_error, print_estimate
from planner.errors import EXIT_NOTHING_FITS, EXIT_PLANNED
from planner.requests.options import CandidateOptions

if TYPE_CHECKING:
    from planner.quantities import Estimate
    from planner.requests.read_options import JobRequest


@grouped
def estimate(options: CandidateOptions, output: CheckOptions) -> int:
    """One candidate, no search: what is not set is as TRL has it. Exit 3: it does not fit."""
    from planner.commands.dry_run import check_by_dry_run
    from planner.files.write import refuse_unwritable
    from planner.report.table import shortfall
    from planner.requests.read_options import read_options
    from planner.training_stack import complete_models

    refuse_unwritable(output.out, output.html)
    with live_line(output) as line:
        request = read_options(options, complete_models(line.say))
    expected = formula_estimate(request)
    checked = (check_by_dry_run(expected, request.cluster, output)[0],) if output.dry_run else ()
    answer, notes = corrected(request, expected)
    print_estimate(output, answer, request.cluster, (*request.warnings, *checked, *notes))
    if answer.fits:
        return EXIT_PLANNED
    print_error(shortfall(answer, request.cluster, request.job.risk))
    return EXIT_NOTHING_FITS


def formula_estimate(request: "JobRequest") -> "Estimate":
    """Return the estimate of a job's one candidate, by formulas alone."""
    from planner.estimate import estimate as estimate_candidate
    from planner.jobs.base_candidate import single_candidate

    return estimate_candidate(single_candidate(request.job, request.cluster), request.cluster, request.job.risk)


def corrected(request: "JobRequest", expected: "Estimate") -> "tuple[Estimate, tuple[str, ...]]":
    """Return an estimate corrected by this machine's own probes, and the notes about it."""
    from planner.measurements.own_results import correct_by_own_probes, own_result_notes, read_own_results
    from planner.search.explain import notes
    from planner.search.knobs import problem_of_estimate

    job, cluster, own = request.job, request.cluster, read_own_results()
    answer = correct_by_own_probes(expected, cluster.gpu, own, job.risk)
    about = notes(answer, problem_of_estimate(job, cluster, answer))
    return answer, (*own_result_notes(expected, cluster.gpu, own), *about)

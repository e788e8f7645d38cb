"""`plan estimate`: memory and speed of one candidate, without a search."""

from planner.commands.options import CandidateOptions, CheckOptions, grouped
from planner.commands.printing import print_error, print_estimate, progress
from planner.errors import EXIT_NOTHING_FITS, EXIT_PLANNED


@grouped
def estimate(options: CandidateOptions, output: CheckOptions) -> int:
    """One candidate, no search: what is not set is as TRL has it. Exit 3: it does not fit."""
    from planner.commands.dry_run import check_by_dry_run
    from planner.commands.read_options import read_options
    from planner.estimate import estimate as estimate_candidate
    from planner.files.write import refuse_unwritable
    from planner.jobs.base_candidate import single_candidate
    from planner.measurements.own_results import correct_by_own_probes, own_result_notes, read_own_results
    from planner.report.table import shortfall
    from planner.search.explain import notes
    from planner.search.knobs import problem_of_estimate
    from planner.training_stack import complete_models

    say = progress(output)
    request = read_options(options, complete_models(say))
    refuse_unwritable(output.out, output.html)
    job, cluster, own = request.job, request.cluster, read_own_results()
    expected = estimate_candidate(single_candidate(job, cluster), cluster, job.risk)
    answer = correct_by_own_probes(expected, cluster.gpu, own, job.risk)
    checked = (check_by_dry_run(expected, cluster, output)[0],) if output.dry_run else ()
    about = notes(answer, problem_of_estimate(job, cluster, answer))
    warnings = (*request.warnings, *checked, *own_result_notes(expected, cluster.gpu, own), *about)
    print_estimate(output, answer, cluster, warnings)
    if answer.fits:
        return EXIT_PLANNED
    print_error(shortfall(answer, cluster, job.risk))
    return EXIT_NOTHING_FITS

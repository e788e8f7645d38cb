"""`plan estimate`: memory and speed of one candidate, without a search."""

from planner.commands.exit_codes import EXIT_NOTHING_FITS, EXIT_PLANNED
from planner.commands.options import AnswerOptions, grouped
from planner.commands.printing import export_texts, live_line, print_error, print_estimate, refuse_contradicting_output
from planner.requests.options import CandidateOptions


@grouped
def estimate(options: CandidateOptions, output: AnswerOptions) -> int:
    """Estimate one configuration, without a search: what you do not set has TRL's default. Exit 3: it does not fit."""
    from planner.ask import estimated, open_check
    from planner.report.table import shortfall
    from planner.requests.command_line import command_line
    from planner.requests.read_config import config_text
    from planner.requests.read_options import read_options
    from planner.training_stack import complete_models

    refuse_contradicting_output(output)
    with live_line(output) as line:
        request = read_options(options, complete_models(line.say))
        check = open_check(request.cluster, line.say, line.phase) if output.dry_run else None
        answer, notes = estimated(request, check)
    config = config_text(options)
    files = export_texts(output, config, answer, request.cluster) if answer.fits else {}
    print_estimate(output, answer, request.cluster, notes, config, command_line(options, "estimate"), files)
    if answer.fits:
        return EXIT_PLANNED
    print_error(shortfall(answer, request.cluster, request.job.risk))
    return EXIT_NOTHING_FITS

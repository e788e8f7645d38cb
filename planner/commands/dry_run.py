"""`plan dry-run`: the installed trainer's step on fake tensors, beside the estimate."""

import sys

from planner.commands.exit_codes import EXIT_PLANNED
from planner.commands.options import OutputOptions, SavedPlan, grouped
from planner.commands.printing import live_line, print_table
from planner.requests.options import CandidateOptions


@grouped
def dry_run(saved: SavedPlan, options: CandidateOptions, output: OutputOptions) -> int:
    """Run one training step of the installed trainer on fake tensors, which need no weights and no GPU, beside the
    estimate."""
    from planner.ask import dry_run_of
    from planner.report.dry_run import difference_notes, dry_run_report, dry_run_table
    from planner.report.json import json_text
    from planner.report.sentences import sentences
    from planner.requests.saved_report import candidate_request
    from planner.training_stack import complete_models

    with live_line(output) as line:
        request = candidate_request(saved.saved, options, complete_models(line.say))
    with live_line(output) as line:
        simulation = dry_run_of(request, line.say)
    if output.json:
        print(json_text(dry_run_report(simulation)))
    else:
        print_table(dry_run_table(simulation, request.cluster))
        for text in sentences(difference_notes(simulation)) if not output.quiet else ():
            print(text, file=sys.stderr)
    return EXIT_PLANNED

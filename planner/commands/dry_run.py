"""`plan dry-run`: one run of a candidate on an emulated GPU, beside the estimate."""

from planner.commands.exit_codes import EXIT_NOTHING_FITS, EXIT_PLANNED
from planner.commands.options import OutputOptions, SavedPlan, grouped
from planner.commands.printing import live_line, print_table
from planner.requests.options import CandidateOptions


@grouped
def dry_run(saved: SavedPlan, options: CandidateOptions, output: OutputOptions) -> int:
    """Run one configuration's real trainer for a few steps on an emulated GPU, beside the estimate: PyTorch's CUDA
    build counts memory there and computes nothing. Needs no GPU. Exit 3: it runs out of memory."""
    from planner.ask import dry_run_of
    from planner.report.dry_run import dry_run_report, dry_run_table
    from planner.report.json import json_text
    from planner.requests.saved_report import candidate_request
    from planner.training_stack import complete_models

    with live_line(output) as line:
        request = candidate_request(saved.saved, options, complete_models(line.say))
    with live_line(output) as line:
        run = dry_run_of(request, line.say, line.phase)
    if output.json:
        print(json_text(dry_run_report(run)))
    else:
        print_table(dry_run_table(run, request.cluster))
    return EXIT_PLANNED if run.fits else EXIT_NOTHING_FITS

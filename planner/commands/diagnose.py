"""`plan diagnose`: explain a log that ends in out of memory, and plan what fits instead."""

import sys
from typing import TYPE_CHECKING

from planner.commands.exit_codes import EXIT_PLANNED
from planner.commands.options import LogFile, OutputOptions, grouped
from planner.commands.printing import print_table, progress, width
from planner.errors import InputError
from planner.requests.options import CandidateOptions, names_a_job

if TYPE_CHECKING:
    from planner.requests.read_options import JobRequest


@grouped
def diagnose(logged: LogFile, options: CandidateOptions, output: OutputOptions) -> int:
    """Explain a log that ends in out of memory: what happened, and where. Options that say which job it was add what
    fits instead."""
    from planner.ask import diagnosed
    from planner.diagnose.log import read_incidents
    from planner.report.diagnosis import diagnosis_report, diagnosis_table
    from planner.report.json import json_text
    from planner.requests.read_options import read_options
    from planner.training_stack import complete_models

    def request() -> "JobRequest":
        return read_options(options, complete_models(progress(output)))

    diagnosis = diagnosed(read_incidents(logged.log), request if names_a_job(options) else None)
    if output.json:
        print(json_text(diagnosis_report(diagnosis)))
    else:
        print_table(diagnosis_table(diagnosis, width(), verbose=logged.verbose))
    if diagnosis.misread:
        sys.stdout.flush()  # the error follows what happened, also in one pipe
        raise InputError(diagnosis.job_error)
    return EXIT_PLANNED

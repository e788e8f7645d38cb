"""`plan diagnose`: what a log tells, and what fits instead."""

from planner.commands.options import AskedOne, Logged, Printed, given, grouped
from planner.commands.printing import sayer, width
from planner.errors import EXIT_PLANNED


@grouped
def diagnose(logged: Logged, asked: AskedOne, printed: Printed) -> int:
    """Read a log that ends in out of memory: what happened, where, and, where the options say which job it was, what fits instead."""
    from rich.console import Console

    from planner.diagnose.job import Diagnosis, of_job
    from planner.diagnose.log import read_incidents
    from planner.jobs.from_options import read_question
    from planner.report.diagnosis import diagnosis_report, diagnosis_table
    from planner.report.json import json_text
    from planner.training_stack import with_layers

    found = read_incidents(logged.log)
    about_a_job = any(option is not None for option in (asked.model, asked.gpus, asked.method, asked.config))
    diagnosis = (
        of_job(found, read_question(given(asked, printed), with_layers(sayer(printed))))
        if about_a_job
        else Diagnosis(incidents=found)
    )
    if printed.json:
        print(json_text(diagnosis_report(diagnosis)))
    else:
        Console(width=width(), highlight=False).print(diagnosis_table(diagnosis, width()), soft_wrap=True)
    return EXIT_PLANNED

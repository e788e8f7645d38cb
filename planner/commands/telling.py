"""`plan diagnose`, `plan export`, `plan models`, `plan gpus`, `plan schema`: what is known already, written or listed."""

import sys
from importlib.resources import files
from pathlib import Path

from planner.commands.printing import sayer, width
from planner.errors import EXIT_PLANNED
from planner.options import AskedOne, Exported, Logged, Printed, given, grouped


@grouped
def diagnose(logged: Logged, asked: AskedOne, printed: Printed) -> int:
    """Read a log that ends in out of memory: what happened, where, and, where the options say which job it was, what fits instead."""
    from rich.console import Console

    from planner.diagnosis.job import Diagnosis, of_job
    from planner.diagnosis.log import read_incidents
    from planner.question import read_question
    from planner.report.diagnosis import diagnosis_report, diagnosis_table
    from planner.report.json import json_text
    from planner.rungs import with_layers

    found = read_incidents(logged.log)
    about_a_job = any(option is not None for option in (asked.model, asked.gpus, asked.method, asked.config))
    diagnosis = of_job(found, read_question(given(asked, printed), with_layers(sayer(printed)))) if about_a_job else Diagnosis(incidents=found)
    if printed.json:
        print(json_text(diagnosis_report(diagnosis)))
    else:
        Console(width=width(), highlight=False).print(diagnosis_table(diagnosis, width()), soft_wrap=True)
    return EXIT_PLANNED


@grouped
def export(written: Exported) -> int:
    """Write the files that run a plan's candidate: accelerate, DeepSpeed, TRL, vLLM, SLURM, requirements. Prints their paths."""
    from planner.launch.export import export as write_launch_files
    from planner.rungs import with_layers
    from planner.saved import read_candidate

    candidate = read_candidate(Path(written.saved), with_layers(lambda line: print(line, file=sys.stderr)))
    for path in write_launch_files(candidate, Path(written.folder), written.overwrite):
        print(path)
    return EXIT_PLANNED


def models() -> int:
    """List the models that are known by name."""
    from planner.catalogue import model_rows
    from planner.report.listing import models_listing

    print(models_listing(model_rows()))
    return EXIT_PLANNED


def gpus() -> int:
    """List the GPUs that are known by name."""
    from planner.gpus import gpu_rows
    from planner.report.listing import gpus_listing

    print(gpus_listing(gpu_rows()))
    return EXIT_PLANNED


def schema() -> int:
    """Print the JSON Schema of --json."""
    print(files("planner").joinpath("data/report.schema.json").read_text(encoding="utf-8"), end="")
    return EXIT_PLANNED

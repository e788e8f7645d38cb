"""`plan export`, `plan models`, `plan gpus`, `plan schema`: what is known already, written or listed."""

import sys
from importlib.resources import files
from pathlib import Path

from planner.commands.options import Exported, grouped
from planner.errors import EXIT_PLANNED


@grouped
def export(written: Exported) -> int:
    """Write the files that run a plan's candidate: accelerate, DeepSpeed, TRL, vLLM, SLURM, requirements. Prints their paths."""
    from planner.launch.export import export as write_launch_files
    from planner.report.read_json import read_candidate
    from planner.training_stack import with_layers

    candidate = read_candidate(Path(written.saved), with_layers(lambda line: print(line, file=sys.stderr)))
    for path in write_launch_files(candidate, Path(written.folder), written.overwrite):
        print(path)
    return EXIT_PLANNED


def models() -> int:
    """List the models that are known by name."""
    from planner.models.catalogue import model_rows
    from planner.report.listing import models_listing

    print(models_listing(model_rows()))
    return EXIT_PLANNED


def gpus() -> int:
    """List the GPUs that are known by name."""
    from planner.gpus.catalogue import gpu_rows
    from planner.report.listing import gpus_listing

    print(gpus_listing(gpu_rows()))
    return EXIT_PLANNED


def schema() -> int:
    """Print the JSON Schema of --json."""
    print(files("planner").joinpath("data/report.schema.json").read_text(encoding="utf-8"), end="")
    return EXIT_PLANNED

"""`plan export`: write the files that run a plan's candidate."""

import sys
from pathlib import Path

from planner.commands.exit_codes import EXIT_PLANNED
from planner.commands.options import ExportOptions, grouped


@grouped
def export(options: ExportOptions) -> int:
    """Write the files that run a plan's candidate: accelerate, DeepSpeed, TRL, vLLM, SLURM, requirements. Prints their
    paths."""
    from planner.launch.export import export as write_launch_files
    from planner.requests.saved_report import read_candidate
    from planner.training_stack import complete_models

    complete = complete_models(lambda line: print(line, file=sys.stderr))
    candidate = read_candidate(Path(options.saved), complete)
    for path in write_launch_files(candidate, Path(options.folder), options.overwrite, options.launcher):
        print(path)
    return EXIT_PLANNED

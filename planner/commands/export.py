"""`plan export`: write the files that run a plan's candidate."""

import sys
from pathlib import Path

from planner.commands.exit_codes import EXIT_PLANNED
from planner.commands.options import ExportOptions, grouped
from planner.errors import InputError


@grouped
def export(options: ExportOptions) -> int:
    """Write the files that start a plan's run: train.yaml, accelerate.yaml, launch.sh and what else it needs. Their
    paths are printed."""
    from planner.files.write import write_files
    from planner.files.yaml import read_yaml_text
    from planner.launch.files import launch_files
    from planner.requests.saved_report import read_run
    from planner.training_stack import complete_models

    run = read_run(Path(options.saved), complete_models(lambda line: print(line, file=sys.stderr)))
    if not run.fits and not options.anyway:
        raise InputError(
            f"The candidate of {options.saved} does not fit its GPUs. Use --anyway to write it nevertheless."
        )
    config = None if options.config is None else read_yaml_text(Path(options.config))
    files = launch_files(run.candidate, options.launcher, run.site, config)
    for path in write_files(files, Path(options.folder), options.overwrite):
        print(path)
    return EXIT_PLANNED

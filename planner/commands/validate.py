"""`plan validate`: predicted memory beside measured memory, for a file of cases."""

from pathlib import Path

from planner.commands.exit_codes import EXIT_OTHER, EXIT_PLANNED
from planner.commands.options import OutputOptions, ProbeOptions, ValidateOptions, grouped
from planner.commands.printing import live_line, print_table
from planner.errors import InputError


@grouped
def validate(options: ValidateOptions, output: OutputOptions, probing: ProbeOptions) -> int:
    """Compare predicted with measured memory, for a file of cases. With --measure, cases that nobody has measured are
    measured first.

    A case is a JSON object in a line of its own: a run to measure, such as

        {"model": "Qwen2.5-0.5B", "method": "sft", "max_length": 2048}

    or a run with what was measured, such as (in one line)

        {"model": "Qwen2.5-0.5B", "settings": {"method": "sft"}, "gpu": "L4",
         "quantity": "reserved", "measured_gib": 7.9}

    A quantity is allocated or reserved (PyTorch's maxima), process (nvidia-smi) or over (it ran out of memory). Lines
    of --record, of `plan measurements --export` and of results/published.jsonl in this project are cases too.
    """
    from planner.commands.probe import probe_settings
    from planner.files.write import write_all
    from planner.gpus.parse import parse_cluster
    from planner.measurements.cases import read_cases
    from planner.measurements.validate import validate as compare
    from planner.report.json import json_text
    from planner.report.validation import validation_csv, validation_report, validation_table
    from planner.training_stack import complete_models, dry_run, open_device, open_dry_run

    settings = probe_settings(probing)
    if options.measure and options.gpus is None:
        raise InputError("--measure needs --gpus: the cards that probes run on, such as --gpus local.")
    cluster = parse_cluster(options.gpus, options.free_memory) if options.gpus is not None else None
    with live_line(output) as line:
        cases = read_cases(Path(options.cases), complete_models(line.say))
        found = compare(
            cases,
            cluster,
            probe=open_device(cluster, settings, line.phase) if options.measure and cluster is not None else None,
            dry_run=(lambda answer, its: dry_run(answer, its.gpu, open_dry_run(its, line.phase), line.say).measurement)
            if options.dry_run
            else None,
            record=Path(options.record) if options.record is not None else None,
            say=line.say,
        )
    if options.csv is not None:
        write_all({Path(options.csv): validation_csv(found)})
    if output.json:
        print(json_text(validation_report(found)))
    else:
        print_table(validation_table(found))
    return EXIT_OTHER if found.interrupted else EXIT_PLANNED

"""Lists of what is known, and of a dataset's rows: `plan models`, `plan gpus`, `plan schema` and others."""

import json
from pathlib import Path

from planner.commands.exit_codes import EXIT_PLANNED
from planner.commands.options import LengthsOptions, ListOptions, MeasurementsOptions, OutputOptions, grouped
from planner.commands.printing import live_line
from planner.errors import InputError, shortened, visible


@grouped
def models(options: ListOptions) -> int:
    """List the models that are known by name."""
    from planner.report.json import json_text
    from planner.report.listing import models_listing, models_named, models_report

    rows = models_named(options.word)
    print(json_text(models_report(rows)) if options.json else models_listing(rows))
    return EXIT_PLANNED


@grouped
def gpus(options: ListOptions) -> int:
    """List the GPUs that are known by name."""
    from planner.report.json import json_text
    from planner.report.listing import gpus_listing, gpus_named, gpus_report

    rows = gpus_named(options.word)
    print(json_text(gpus_report(rows)) if options.json else gpus_listing(rows))
    return EXIT_PLANNED


def schema() -> int:
    """Print the JSON Schema of --json."""
    from planner.report.documents.schema import json_schema

    print(json.dumps(json_schema(), indent=2))
    return EXIT_PLANNED


@grouped
def measurements(options: MeasurementsOptions) -> int:
    """List, export or forget your own measurements, which correct later plans for the same cards."""
    from planner.measurements.own_results import catalogue_name, forget_results, listed_results
    from planner.report.listing import measurements_listing

    gpu = catalogue_name(options.gpu) if options.gpu is not None else ""
    found = {
        digest: (line, result)
        for digest, line, result in listed_results(options.storage or "")
        if not gpu or (result is not None and result.gpu == gpu)
    }
    if options.forget is not None:
        chosen = [digest for digest in found if options.forget == "all" or digest.startswith(options.forget)]
        if options.forget != "all" and len(chosen) != 1:
            raise InputError(
                f"{len(chosen)} measurements have the id {shortened(options.forget)!r}. "
                "plan measurements lists the ids; give the whole one."
            )
        count = forget_results([found[digest][0] for digest in chosen], options.storage or "")
        print(f"{count} measurement{'s' if count != 1 else ''} forgotten")
    elif options.export:
        print("\n".join(line for line, _ in found.values()))
    elif not found:
        print(f"no measurements{f' of {gpu}' if gpu else ''} are kept yet: plan probe and plan --probe add theirs")
    else:
        print(visible(measurements_listing((digest, result) for digest, (_, result) in found.items())))
    return EXIT_PLANNED


@grouped
def lengths(options: LengthsOptions) -> int:
    """Count the tokens of a dataset's rows as TRL tokenizes them, for --lengths. Needs the extra training."""
    from planner.files.write import write_all
    from planner.models.catalogue import load_model
    from planner.report.listing import lengths_listing
    from planner.rows.lengths import counted_lengths
    from planner.training_stack import count_tokens

    model = load_model(options.model)
    with live_line(OutputOptions(quiet=options.quiet), f"counting the tokens of {options.dataset}") as line:
        found = counted_lengths(
            count_tokens(options.dataset, options.split, options.text_field, model.path or model.id, line.say)
        )
    write_all({Path(options.out): "".join(f"{count}\n" for count in found.tokens)})
    print(lengths_listing(found, options.out))
    return EXIT_PLANNED

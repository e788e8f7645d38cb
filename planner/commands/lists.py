"""`plan models`, `plan gpus`, `plan schema`, `plan measurements`: lists of what is known."""

import json

from planner.commands.exit_codes import EXIT_PLANNED
from planner.commands.options import MeasurementsOptions, grouped
from planner.errors import InputError, shortened


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
    from planner.report.documents import json_schema

    print(json.dumps(json_schema(), indent=2))
    return EXIT_PLANNED


@grouped
def measurements(options: MeasurementsOptions) -> int:
    """List, export or forget your own measurements, which later plans for such cards use."""
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
    else:
        print(measurements_listing((digest, result) for digest, (_, result) in found.items()))
    return EXIT_PLANNED

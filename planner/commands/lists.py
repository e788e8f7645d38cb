"""`plan models`, `plan gpus`, `plan schema`: lists of what is known."""

import json

from planner.errors import EXIT_PLANNED


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

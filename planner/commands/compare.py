"""`plan --gpus 1xL4,2xA100-40G,8xH100`: the same job on several clusters, and which of them is cheapest."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from planner.commands.options import CheckOptions, SearchOptions, StudyOptions
from planner.errors import EXIT_NOTHING_FITS, EXIT_PLANNED, InputError, PlanError
from planner.gpus.parse import parse_cluster
from planner.gpus.prices import read_prices

if TYPE_CHECKING:
    from planner.report.listing import Compared


def compare(options: SearchOptions, output: CheckOptions, study: StudyOptions) -> int:
    """Plan the job on each cluster and print one table, or one document with --json.

    Raises:
        InputError: an option that asks for one plan, an unknown GPU, or prices that cannot be read.
    """
    from rich.console import Console

    from planner.commands.printing import width
    from planner.report.json import json_text
    from planner.report.listing import comparison_report, comparison_table

    one_plan = {"--dry-run": output.dry_run, "--probe": study.probe, "--out": output.out, "--html": output.html}
    for flag in (flag for flag, value in one_plan.items() if value):
        raise InputError(f"{flag} is for one plan, and --gpus names several clusters.")
    names = [name.strip() for name in (options.gpus or "").split(",")]
    if len(names) == 1:
        raise InputError("--prices compares clusters: give several, as in --gpus 1xL4,2xA100-40G.")
    for name in names:
        parse_cluster(name, options.free_memory, options.host_memory, options.network)
    prices = read_prices(Path(options.prices)) if options.prices is not None else {}
    rows = [_planned(replace(options, gpus=name), prices) for name in names]
    refusals = {row.why_none for row in rows}
    if len(refusals) == 1 and all(row.plan is None for row in rows):
        raise InputError(refusals.pop())  # the job is wrong, whatever the cluster
    if output.json:
        print(json_text(comparison_report(rows)))
    else:
        Console(width=width(), highlight=False).print(comparison_table(rows))
    return EXIT_PLANNED if any(row.fits for row in rows) else EXIT_NOTHING_FITS


def _planned(options: SearchOptions, prices: Mapping[str, float]) -> "Compared":
    from planner.commands.read_options import read_options
    from planner.plan import plan
    from planner.report.listing import Compared
    from planner.training_stack import complete_models

    assert options.gpus is not None
    cluster = parse_cluster(options.gpus, options.free_memory, options.host_memory, options.network)
    price = prices.get(cluster.gpu.name)
    price_per_hour = None if price is None else price * cluster.num_gpus
    try:
        request = read_options(options, complete_models(lambda line: None))
        return Compared(gpus=options.gpus, plan=plan(request.job, request.cluster), price_per_hour=price_per_hour)
    except PlanError as error:
        return Compared(gpus=options.gpus, why_none=str(error), price_per_hour=price_per_hour)

"""One job on several clusters: `plan --gpus 1xL4,8xH100`, and which of them is cheapest.

`--gpus hf-jobs` plans it on each machine of Hugging Face Jobs, whose host memory and prices are known.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from planner.commands.exit_codes import EXIT_NOTHING_FITS, EXIT_PLANNED
from planner.commands.options import AnswerOptions, PriceOptions, ProofOptions
from planner.errors import InputError
from planner.gpus.hf_jobs import FLAVORS_OF, HF_JOBS
from planner.gpus.prices import MILLION, is_price, parse_tokens, read_prices
from planner.requests.command_line import command_line
from planner.requests.machines import BY_COST, Pricing, cluster_names
from planner.requests.options import SearchOptions
from planner.units import format_seconds, parse_seconds

if TYPE_CHECKING:
    from planner.report.listing import Compared
    from planner.requests.read_options import JobRequest

HOUR = 3600

PRICED = f"dollars (prices: {FLAVORS_OF})"


def compare(options: SearchOptions, pricing: PriceOptions, output: AnswerOptions, study: ProofOptions) -> int:
    """Plan the job on each cluster and print one table, or one document with --json.

    Raises:
        InputError: an option that asks for one plan, an unknown GPU, or prices that cannot be read.
    """
    from rich.console import Console

    from planner.ask import compared
    from planner.commands.printing import live_line, print_error, width
    from planner.report.json import json_text
    from planner.report.listing import MANY, comparison_report, comparison_table, nearest_of

    one_plan = {
        "--dry-run": output.dry_run, "--probe": study.probe, "--out": output.out, "--html": output.html,
        "--export": output.export, "--format": output.format,
    }  # fmt: skip
    for flag in (flag for flag, value in one_plan.items() if value):
        raise InputError(f"{flag} is for a single plan: give one cluster, without --tokens and prices.")
    names = cluster_names(options)
    by_cost = options.optimize == BY_COST
    _refuse_contradicting_prices(pricing, by_cost, names)
    prices = read_prices(Path(pricing.prices)) if pricing.prices is not None else {}
    tokens = parse_tokens(pricing.tokens) if pricing.tokens is not None else MILLION
    priced = Pricing(prices=prices, per_hour=pricing.price_per_hour, tokens=tokens)
    with live_line(output, "searching") as line:
        rows = compared(options, priced, _read, line.phase)
    if output.json:
        print(json_text(comparison_report(rows)))
    else:
        Console(width=width(), highlight=False).print(comparison_table(rows, PRICED if HF_JOBS in names else ""))
    if not any(row.fits for row in rows):
        print_error(nearest_of(rows))
        return EXIT_NOTHING_FITS
    if not output.json and len(rows) < MANY:
        first = rows[0] if by_cost else min(rows, key=_hours)
        alone = replace(options, gpus=first.gpus, optimize=SearchOptions().optimize if by_cost else options.optimize)
        print(f"next: {command_line(alone)}")
    return _within(pricing, rows)


def compares(options: SearchOptions, pricing: PriceOptions) -> bool:
    """Return whether the options ask for a comparison: several clusters, or what one costs."""
    return (
        "," in (options.gpus or "")
        or options.gpus == HF_JOBS
        or options.optimize == BY_COST
        or pricing != PriceOptions()
    )


def _refuse_contradicting_prices(pricing: PriceOptions, by_cost: bool, names: Sequence[str]) -> None:
    """Refuse missing, contradicting or invalid prices, one price for several clusters, and an unusable deadline.

    `by_cost`: the goal is the cheapest cluster.

    Raises:
        InputError: a price or the deadline is one of these.
    """
    if pricing.price_per_hour is not None and (len(names) > 1 or HF_JOBS in names):
        raise InputError("--price-per-hour is the price of one cluster, and --gpus names several. Use --prices.")
    if pricing.price_per_hour is not None and pricing.prices is not None:
        raise InputError("--price-per-hour and --prices contradict each other. Drop one of them.")
    if pricing.deadline is not None and pricing.tokens is None:
        raise InputError("--deadline needs the tokens to train on: --tokens, such as 300M.")
    if pricing.deadline is not None:
        parse_seconds(pricing.deadline)  # what is no duration is refused before anything is planned
    unpriced = pricing.prices is None and pricing.price_per_hour is None and HF_JOBS not in names
    wanting = "--optimize cost" if by_cost else "--max-cost" if pricing.max_cost is not None else ""
    if unpriced and wanting:
        raise InputError(f"{wanting} needs prices: --prices FILE, or --price-per-hour PRICE for one cluster.")
    for flag, price in (("--price-per-hour", pricing.price_per_hour), ("--max-cost", pricing.max_cost)):
        if price is not None and not is_price(price):
            raise InputError(f"{flag} {price:g} is no price, such as 2.5.")


def _within(pricing: PriceOptions, rows: "Sequence[Compared]") -> int:
    """Return the exit code of --deadline and --max-cost; print an error if no cluster that fits keeps them."""
    from planner.ask import cost_of
    from planner.commands.printing import print_error

    fitting = [row for row in rows if row.hours is not None]
    if pricing.deadline is not None:
        limit = parse_seconds(pricing.deadline) / HOUR
        fastest = min(fitting, key=_hours)
        fitting = [row for row in fitting if _hours(row) <= limit]
        if not fitting:
            hours = _hours(fastest)
            needs = f"{fastest.gpus}, needs " + (f"{hours:,.1f} hours" if hours >= 1 else format_seconds(HOUR * hours))
            print_error(f"the fastest, {needs}, more than --deadline {pricing.deadline}")
            return EXIT_NOTHING_FITS
    if pricing.max_cost is None:
        return EXIT_PLANNED
    cheapest = min(fitting, key=cost_of)
    if cheapest.cost is None:
        print_error("no cluster on which the job fits has a price")
        return EXIT_NOTHING_FITS
    if cheapest.cost <= pricing.max_cost:
        return EXIT_PLANNED
    in_time = f" of those that keep --deadline {pricing.deadline}" if pricing.deadline is not None else ""
    costs = f"{cheapest.gpus}, costs {cheapest.cost:,.2f}"
    print_error(f"the cheapest{in_time}, {costs}, more than --max-cost {pricing.max_cost:,.2f}")
    return EXIT_NOTHING_FITS


def _hours(row: "Compared") -> float:
    """Return the hours of a row that fits."""
    return math.inf if row.hours is None else row.hours


def _read(options: SearchOptions) -> "JobRequest":
    from planner.requests.read_options import read_options
    from planner.training_stack import complete_models

    return read_options(options, complete_models(lambda line: None))

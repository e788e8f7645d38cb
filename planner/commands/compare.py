"""One job several times: `plan --gpus 1xL4,8xH100` plans it on several clusters, `plan diff` under two releases."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from planner.commands.exit_codes import EXIT_NOTHING_FITS, EXIT_PLANNED
from planner.commands.options import AnswerOptions, DiffOptions, OutputOptions, PriceOptions, ProofOptions, grouped
from planner.errors import InputError
from planner.gpus.parse import parse_cluster
from planner.gpus.prices import MILLION, is_price, parse_tokens, read_prices
from planner.requests.options import CandidateOptions, SearchOptions

if TYPE_CHECKING:
    from planner.report.listing import Compared

BY_COST = "cost"  # a goal of comparisons: the cheapest tokens first


def compare(options: SearchOptions, pricing: PriceOptions, output: AnswerOptions, study: ProofOptions) -> int:
    """Plan the job on each cluster and print one table, or one document with --json.

    Raises:
        InputError: an option that asks for one plan, an unknown GPU, or prices that cannot be read.
    """
    from rich.console import Console

    from planner.commands.printing import live_line, width
    from planner.report.json import json_text
    from planner.report.listing import comparison_report, comparison_table

    one_plan = {
        "--dry-run": output.dry_run, "--probe": study.probe, "--out": output.out, "--html": output.html,
        "--export": output.export, "--format": output.format,
    }  # fmt: skip
    for flag in (flag for flag, value in one_plan.items() if value):
        raise InputError(f"{flag} is for one plan, and --gpus names several clusters.")
    names = [name.strip() for name in (options.gpus or "").split(",")]
    _refuse_contradicting_prices(pricing, options.optimize == BY_COST, names)
    for name in names:
        parse_cluster(name, options.free_memory, options.host_memory, options.network)
    prices = read_prices(Path(pricing.prices)) if pricing.prices is not None else {}
    tokens = parse_tokens(pricing.tokens) if pricing.tokens is not None else MILLION
    by_cost = options.optimize == BY_COST
    searched = replace(options, optimize="throughput") if by_cost else options
    with live_line(output, "searching") as line:
        rows = []
        for number, name in enumerate(names, 1):
            line.phase(f"{name}, {number} of {len(names)}")
            priced = partial(_planned, price_per_hour=pricing.price_per_hour, prices=prices, tokens=tokens)
            row = priced(replace(searched, gpus=name))
            tunings = _faster_tunings(row) if by_cost else ()
            others = (priced(replace(searched, gpus=name, tuning=each)) for each in tunings)
            rows.append(min((row, *others), key=_cost))
    refusals = {row.why_none for row in rows}
    if len(refusals) == 1 and all(row.plan is None for row in rows):
        raise InputError(refusals.pop())  # the job is wrong, whatever the cluster
    if by_cost:
        rows.sort(key=lambda row: (not row.fits, _cost(row)))
    if output.json:
        print(json_text(comparison_report(rows)))
    else:
        Console(width=width(), highlight=False).print(comparison_table(rows))
    if not any(row.fits for row in rows):
        return EXIT_NOTHING_FITS
    return EXIT_PLANNED if pricing.max_cost is None else _within(pricing.max_cost, rows)


def compares(options: SearchOptions, pricing: PriceOptions) -> bool:
    """Return whether the options ask for a comparison: several clusters, or what one costs."""
    return "," in (options.gpus or "") or options.optimize == BY_COST or pricing != PriceOptions()


def _refuse_contradicting_prices(pricing: PriceOptions, by_cost: bool, names: Sequence[str]) -> None:
    """Refuse prices that are missing, of several clusters in one number, or no prices.

    `by_cost`: the goal is the cheapest cluster.

    Raises:
        InputError: they are.
    """
    if pricing.price_per_hour is not None and len(names) > 1:
        raise InputError("--price-per-hour is the price of one cluster, and --gpus names several. Use --prices.")
    if pricing.price_per_hour is not None and pricing.prices is not None:
        raise InputError("--price-per-hour and --prices contradict each other. Drop one of them.")
    unpriced = pricing.prices is None and pricing.price_per_hour is None
    wanting = "--optimize cost" if by_cost else "--max-cost" if pricing.max_cost is not None else ""
    if unpriced and wanting:
        raise InputError(f"{wanting} needs prices: --prices FILE, or --price-per-hour PRICE for one cluster.")
    for flag, price in (("--price-per-hour", pricing.price_per_hour), ("--max-cost", pricing.max_cost)):
        if price is not None and not is_price(price):
            raise InputError(f"{flag} {price:g} is no price, such as 2.5.")


def _within(max_cost: float, rows: "Sequence[Compared]") -> int:
    """Return the exit code of --max-cost; print an error if no cluster that fits is known to cost at most that."""
    from planner.commands.printing import print_error

    cheapest = min((row for row in rows if row.cost is not None), key=lambda row: row.cost or 0.0, default=None)
    if cheapest is None:
        print_error("no cluster on which the job fits has a price")
        return EXIT_NOTHING_FITS
    assert cheapest.cost is not None
    if cheapest.cost <= max_cost:
        return EXIT_PLANNED
    print_error(f"the cheapest, {cheapest.gpus}, costs {cheapest.cost:,.2f}, more than --max-cost {max_cost:,.2f}")
    return EXIT_NOTHING_FITS


def _cost(row: "Compared") -> float:
    """Return what a row costs, infinite if that is unknown."""
    return math.inf if row.cost is None else row.cost


def _faster_tunings(row: "Compared") -> list[str]:
    """Return the tuning classes that fit and train more tokens a second than the recommended one: they cost less.

    A job that names its tuning has no others.
    """
    if row.plan is None or not row.fits:
        return []
    fastest = row.plan.best.throughput.tokens_per_second
    return [
        str(other.change.values["tuning"])
        for other in row.plan.alternatives
        if other.change.code == "tuning_class"
        and other.estimate.fits
        and other.estimate.throughput.tokens_per_second > fastest
    ]


def _planned(
    options: SearchOptions, price_per_hour: float | None, prices: Mapping[str, float], tokens: int
) -> "Compared":
    from planner.ask import answer_of_cluster
    from planner.requests.read_options import read_options
    from planner.training_stack import complete_models

    assert options.gpus is not None
    cluster = parse_cluster(options.gpus, options.free_memory, options.host_memory, options.network)
    price = prices.get(cluster.gpu.name)
    per_hour = price_per_hour if price is None else price * cluster.num_gpus
    return answer_of_cluster(
        lambda: read_options(options, complete_models(lambda line: None)), options.gpus, per_hour, tokens
    )


@grouped
def diff(releases: DiffOptions, options: CandidateOptions, output: OutputOptions) -> int:
    """Estimate one configuration under two sets of releases: what changes in memory, speed and settings, by fact.

    A set is a release of TRL, such as 1.12, or a requirements file that pins trl, and torch if it matters. Exit 3: it
    does not fit under the second.
    """
    from planner.ask import estimated
    from planner.commands.printing import live_line, print_table
    from planner.jobs.releases import read_releases
    from planner.report.json import json_text
    from planner.report.listing import Diff, diff_report, diff_table
    from planner.requests.read_options import read_options
    from planner.training_stack import complete_models

    if options.trl_version is not None:
        raise InputError("--trl-version names one release of TRL, and plan diff takes two. Leave it out.")
    with live_line(output) as line:
        complete = complete_models(line.say)
        answers = []
        for each in map(read_releases, (releases.old, releases.new)):
            torch = {} if each.torch is None else {"torch_version": each.torch}
            asked = replace(options, trl_version=each.trl, set={**(options.set or {}), **torch})
            answers.append(estimated(read_options(asked, complete))[0])
    found = Diff(old=answers[0], new=answers[1])
    if output.json:
        print(json_text(diff_report(found)))
    else:
        print_table(diff_table(found))
    return EXIT_PLANNED if found.new.fits else EXIT_NOTHING_FITS

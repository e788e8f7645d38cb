"""The machines that a job is compared on: clusters that --gpus names, those of Hugging Face Jobs, and their prices."""

from collections.abc import Mapping

from msgspec import Struct, field
from msgspec.structs import replace

from planner.errors import InputError
from planner.gpus.hf_jobs import CLUSTERS, FLAVORS, HF_JOBS
from planner.gpus.parse import parse_cluster
from planner.gpus.prices import MILLION, checked_prices, parse_tokens
from planner.requests.options import SearchOptions
from planner.units import GIB

BY_COST = "cost"  # a goal of comparisons: the cheapest tokens first


class Pricing(Struct, frozen=True, kw_only=True):
    """Prices and tokens. `prices`: of a GPU and hour, by the catalogue's names; `per_hour`: of one whole cluster."""

    prices: Mapping[str, float] = field(default_factory=dict)
    per_hour: float | None = None
    tokens: int = MILLION  # to train on


class Machine(Struct, frozen=True, kw_only=True):
    """A machine to plan the job on. `label`: its name in a table; `price_per_hour`: of all its GPUs, if known."""

    label: str
    options: SearchOptions
    price_per_hour: float | None


def cluster_names(options: SearchOptions) -> list[str]:
    """Return the clusters that --gpus names."""
    return [name.strip() for name in (options.gpus or "").split(",")]


def pricing_of(prices: Mapping[str, object] | None, tokens: str | int | None) -> Pricing:
    """Return the prices and the tokens of a request.

    Raises:
        InputError: a price or the tokens are no number above 0, or a name is no GPU's.
    """
    return Pricing(
        prices=checked_prices(prices or {}, "prices"),
        tokens=MILLION if tokens is None else parse_tokens(str(tokens)),
    )


def machines(options: SearchOptions, pricing: Pricing) -> list[Machine]:
    """Return the clusters of the options, each with the job there; those of Hugging Face Jobs with memory and price.

    Raises:
        InputError: a name is no cluster, or the cheapest is wanted and no price is known.
    """
    searched = replace(options, optimize="throughput") if options.optimize == BY_COST else options
    found: list[Machine] = []
    for name in cluster_names(options):
        if name == HF_JOBS:
            found += _flavors(searched, pricing.prices)
            continue
        cluster = parse_cluster(name, options.free_memory, options.host_memory, options.network)
        price = pricing.prices.get(cluster.gpu.name)
        cost = pricing.per_hour if price is None else price * cluster.nodes * cluster.rented_per_node
        found.append(Machine(label=name, options=replace(searched, gpus=name), price_per_hour=cost))
    if options.optimize == BY_COST and all(machine.price_per_hour is None for machine in found):
        raise InputError("The goal cost needs the prices of these GPUs, such as L4 = 0.8.")
    return found


def _flavors(options: SearchOptions, prices: Mapping[str, float]) -> list[Machine]:
    """Return the machines of Hugging Face Jobs, at their own prices where the user gives none."""
    return [
        Machine(
            label=flavor.name,
            options=replace(
                options,
                gpus=CLUSTERS[flavor.name],
                host_memory=options.host_memory or f"{flavor.host_bytes / GIB:.2f}GiB",
            ),
            price_per_hour=prices[flavor.card] * flavor.gpus if flavor.card in prices else flavor.price,
        )
        for flavor in FLAVORS
    ]

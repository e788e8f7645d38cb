"""The page of one job on several clusters: which of them it fits, and how fast it runs there."""

from collections.abc import Callable, Sequence
from typing import Any

from planner.gpus.prices import MILLION
from planner.report.json import json_text
from planner.report.listing import Compared, comparison_report
from planner.report.page.downloads import json_address
from planner.report.page.template import page, template
from planner.report.screen import peak_line, speed_line, verdict_line
from planner.report.words import describe_candidate, tightest
from planner.units import format_count


def comparison_html(
    rows: Sequence[Compared], command: str, address_of: Callable[[str], str], above: Sequence[str]
) -> str:
    """Return a comparison as a page; at least one row has a plan.

    Args:
        command: what gives the same answer in a shell.
        address_of: returns the address of the page about one cluster.
        above: parts in HTML that stand above it.

    Raises:
        PlanError: Jinja2 is not installed.
    """
    plan = next(row.plan for row in rows if row.plan is not None)
    title = f"{plan.job.model.id} · {plan.job.method} on {len(rows)} clusters"
    text: str = template("planner.report.page", "comparison.html").render(
        title=title,
        rows=[_row(row, address_of(row.gpus)) for row in rows],
        address=address_of(",".join(row.gpus for row in rows)),
        command=command,
        json=json_address(json_text(comparison_report(rows))),
    )
    return page(title, [*above, text])


def _row(row: Compared, address: str) -> dict[str, Any]:
    """Return a cluster as a row of the table; `share`: the part of a card that is needed, and its interval."""
    if row.plan is None:
        return {"gpus": row.gpus, "address": address, "verdict": "over", "why_none": row.why_none}
    best = row.plan.best
    gpu = tightest(best)
    scale = max(gpu.capacity_bytes, gpu.interval_bytes[1], gpu.peak_bytes) / 100
    return {
        "gpus": row.gpus,
        "address": address,
        "verdict": "tight" if best.tight else "fits" if best.fits else "over",
        "why_none": "",
        "fit": verdict_line(best),
        "need": gpu.peak_bytes / scale,
        "interval": [bound / scale for bound in gpu.interval_bytes],
        "end": gpu.capacity_bytes / scale,
        "peak": peak_line(gpu),
        "speed": " · ".join(filter(None, (speed_line(best), _cost(row)))) if best.fits else "",
        "candidate": describe_candidate(best.candidate),
    }


def _cost(row: Compared) -> str:
    """Return the hours and the cost of training on the tokens; empty if neither was asked for."""
    cost = "" if row.cost is None else f"cost {row.cost:,.2f}"
    hours = f"{row.hours:,.1f} hours" if row.hours is not None and row.tokens != MILLION else ""
    parts = ", ".join(filter(None, (hours, cost)))
    return f"{format_count(row.tokens)} tokens: {parts}" if parts else ""

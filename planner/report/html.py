"""The report as one HTML file that loads nothing. Needs the [report] extra.

The charts are HTML and CSS, some 40 kB: plotly would put 4.5 MB of script into every file. Text keeps its size on a
phone, every figure can be reached by keyboard, and the page is read aloud as lists and tables. The one script copies.
"""

from collections.abc import Sequence
from functools import lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from msgspec import to_builtins

from planner.errors import InputError, PlanError
from planner.gpus.cluster import Cluster
from planner.launch.files import launch_files
from planner.planning import Plan
from planner.quantities import Estimate, Note
from planner.report.bars import COUNTS, SMALLEST_BYTES
from planner.report.json import estimate_report, plan_report
from planner.report.sentences import in_one_line, sentence, sentences
from planner.report.shown_settings import shown_settings
from planner.report.words import (
    bare_gib,
    describe_candidate,
    describe_cluster,
    describe_driver,
    describe_epoch,
    describe_evidence,
    describe_fit,
    describe_host,
    describe_saving,
    describe_speed,
    readable,
    tightest,
    tokens_per_second,
)
from planner.search.knobs import problem_of_estimate
from planner.search.what_if import WhatIf, what_if
from planner.units import format_count, format_gib

if TYPE_CHECKING:
    from jinja2 import Template

# The colour of each component; neighbours in a bar have different colours.
COLOURS: dict[str, str] = {
    "weights": "#3b6fb6",
    "autocast_copies": "#7aa5dd",
    "adapters": "#6d4fa3",
    "gradients": "#9b7fd1",
    "optimizer_states": "#c9b6ec",
    "activations": "#2f8f5b",
    "attention_scores": "#7cc49b",
    "transients": "#b9e2c9",
    "loss": "#d9a21b",
    "engine": "#1d93a8",
    "kv_cache": "#7fcbd8",
    "communication": "#a0563b",
    "fragmentation": "#d39b86",
    "runtime": "#8a8f98",
    "unexplained": "#c23b3b",
}


def plan_html(plan: Plan, form: str = "") -> str:
    """Return a plan as a page; `form`: the HTML that stands above it.

    Raises:
        PlanError: Jinja2 is not installed.
    """
    report = to_builtins(plan_report(plan))
    others = [
        (sentence(other.label), describe_candidate(other.estimate.candidate), other.estimate, in_one_line(other.notes))
        for other in plan.alternatives
    ]
    changes = [
        (
            sentence(remedy.change),
            describe_candidate(remedy.estimate.candidate),
            remedy.estimate,
            "; ".join(filter(None, (describe_saving(remedy, plan.best), *sentences(remedy.notes)))),
        )
        for remedy in plan.remedies
    ]
    faster = [
        (
            sentence(lever.change),
            describe_candidate(lever.estimate.candidate),
            lever.estimate,
            f"{lever.factor:.1f} times as fast; {sentence(lever.price)}",
        )
        for lever in plan.levers
    ]
    grid = what_if(plan.best, problem_of_estimate(plan.job, plan.cluster, plan.best))
    report |= {"estimate": report["best"], "grid": _grid(grid, plan.best)}
    return _page(plan.best, plan.cluster, report, others + faster + changes, form)


def estimate_html(estimate: Estimate, cluster: Cluster, warnings: Sequence[Note]) -> str:
    """Return an estimate as a page.

    Raises:
        PlanError: Jinja2 is not installed.
    """
    report = to_builtins(estimate_report(estimate, warnings))
    return _page(estimate, cluster, report | {"estimate": report}, [])


def _page(
    best: Estimate,
    cluster: Cluster,
    report: dict[str, Any],
    others: list[tuple[str, str, Estimate, str]],
    form: str = "",
) -> str:
    present = {
        name
        for gpu in best.gpus
        for phase in gpu.phases
        for name, size in phase.components.items()
        if size >= SMALLEST_BYTES
    }
    colours = {component: colour for component, colour in COLOURS.items() if component in present}
    title = f"{best.candidate.model.id} · {best.candidate.method}"
    texts = {
        "words": describe_candidate(best.candidate),
        "verdict": describe_fit(best),
        "driver": describe_driver(best) if best.fits else "",
        "speed": " · ".join([describe_speed(best), *describe_epoch(best.throughput)]),
        "lines": shown_settings(best.candidate),
        "evidence": describe_evidence(best),
        "host": " · ".join(describe_host(best, cluster.host)),
    }
    chosen = "recommended" if best.fits else "nearest"
    ways = [(chosen, describe_candidate(best.candidate), best, ""), *others]
    text: str = template("planner.report", "page.html").render(
        title=title,
        cluster=describe_cluster(cluster),
        texts=texts,
        report=report,
        ways=[_way(*way) for way in ways],
        fastest=max(way[2].throughput.tokens_per_second for way in ways),
        files=_files(best),
        colours=colours,
        form=form,
    )
    return text


def _way(label: str, candidate: str, estimate: Estimate, note: str) -> dict[str, Any]:
    """Return a candidate as a row of the table and a point of the chart."""
    gpu = tightest(estimate)
    return {
        "label": label,
        "candidate": candidate,
        "fits": estimate.fits,
        "over_bytes": max(estimate.over_bytes, estimate.host_over_bytes),
        "note": note,
        "rate": estimate.throughput.tokens_per_second,
        "need": gpu.peak_bytes / gpu.capacity_bytes,
        "interval": [bound / gpu.capacity_bytes for bound in gpu.interval_bytes],
        "need_text": f"{bare_gib(gpu.peak_bytes)} ({bare_gib(gpu.interval_bytes[0])} to "
        f"{format_gib(gpu.interval_bytes[1], 1)})",
    }


def _grid(found: WhatIf, best: Estimate) -> dict[str, Any]:
    """Return the what-if table: each cell has the need, its share of the card, and whether it fits and is the best."""
    chosen = best.candidate.per_device_train_batch_size, getattr(best.candidate, found.length_name)
    return {
        "name": found.length_name,
        "lengths": found.lengths,
        "rows": [
            (batch, [_cell(each, (batch, length) == chosen) for length, each in zip(found.lengths, row, strict=True)])
            for batch, row in found.rows
        ],
    }


def _cell(estimate: Estimate | None, is_best: bool) -> dict[str, Any]:
    if estimate is None:
        return {"text": "no engine", "fits": False, "best": is_best, "share": 1.0, "rate": ""}
    gpu = tightest(estimate)
    return {
        "text": bare_gib(gpu.peak_bytes),
        "fits": estimate.fits,
        "best": is_best,
        "share": min(1.0, gpu.peak_bytes / gpu.capacity_bytes),
        "rate": tokens_per_second(estimate.throughput.tokens_per_second),
    }


def _files(estimate: Estimate) -> dict[str, str]:
    """Return the launch files by name; empty where the candidate has none, as `plan export` says."""
    try:
        return launch_files(estimate.candidate)
    except InputError:
        return {}


def form_only_html(form: str) -> str:
    """Return the page with a form and without a report.

    Raises:
        PlanError: Jinja2 is not installed.
    """
    text: str = template("planner.report", "page.html").render(title="plan", report={}, form=form)
    return text


@lru_cache(maxsize=1)
def page_script() -> str:
    """Return the script of the page, which a server allows by its digest."""
    return files("planner.report").joinpath("page.js").read_text(encoding="utf-8").strip()


@lru_cache(maxsize=2)
def template(package: str, name: str) -> "Template":
    """Return a template of a package.

    Raises:
        PlanError: Jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError as error:
        raise PlanError(
            "--html needs Jinja2, which is in the report extra: pip install 'finetune-plan[report]'."
        ) from error
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.globals |= {"counts": COUNTS, "script": page_script()}
    environment.filters |= {
        "gib": lambda size: format_gib(size, 1),
        "count": format_count,
        "words": readable,
        "per_second": tokens_per_second,
    }
    return environment.from_string(files(package).joinpath(name).read_text(encoding="utf-8"))

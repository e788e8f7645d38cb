"""The report as one HTML file without scripts and links. Needs the [report] extra.

The bars are plain HTML: plotly would put 4.5 MB of script into every file, and a `title` shows the same numbers.
"""

from collections.abc import Sequence
from functools import lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from msgspec import to_builtins

from planner.errors import PlanError
from planner.gpus.cluster import Cluster
from planner.plan import Plan
from planner.quantities import Estimate
from planner.report.bars import COUNTS, SMALLEST_BYTES
from planner.report.json import estimate_report, plan_report
from planner.report.shown_settings import shown_settings
from planner.report.words import (
    describe_candidate,
    describe_cluster,
    describe_driver,
    describe_evidence,
    describe_fit,
    describe_host,
    describe_speed,
    readable,
    tokens_per_second,
)
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
        (other.label, describe_candidate(other.estimate.candidate), other.estimate, other.note)
        for other in plan.alternatives
    ]
    changes = [
        (remedy.change, describe_candidate(remedy.estimate.candidate), remedy.estimate, remedy.note)
        for remedy in plan.remedies
    ]
    return _page(plan.best, plan.cluster, report | {"estimate": report["best"]}, others + changes, form)


def estimate_html(estimate: Estimate, cluster: Cluster, warnings: Sequence[str]) -> str:
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
        "speed": describe_speed(best),
        "lines": shown_settings(best.candidate),
        "evidence": describe_evidence(best),
        "host": " · ".join(describe_host(best, cluster.host)),
    }
    text: str = template("planner.report", "page.html").render(
        title=title,
        cluster=describe_cluster(cluster),
        texts=texts,
        report=report,
        others=others,
        colours=colours,
        form=form,
    )
    return text


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

"""The page of a plan or an estimate: one HTML file that loads nothing. Needs the [report] extra.

The charts are HTML and CSS: plotly would put 4.5 MB of script into every file. Text keeps its size on a phone, every
figure can be reached by keyboard, and the page is read aloud as lists and tables. Its files and its JSON document are
in the page itself, which is some 150 kB.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct, to_builtins

from planner.gpus.cluster import Cluster
from planner.planning import Plan
from planner.quantities import Estimate, Note
from planner.report.bars import SMALLEST_BYTES, group_sizes
from planner.report.json import estimate_report, json_text, plan_report
from planner.report.page.downloads import json_address, zip_address
from planner.report.page.template import page, template
from planner.report.screen import peak_line, speed_line, urgent_notes, variation_line, verdict_line
from planner.report.sentences import in_one_line, sentence, sentences
from planner.report.shown_settings import flags, shown_settings
from planner.report.words import (
    bare_gib,
    describe_candidate,
    describe_cluster,
    describe_driver,
    describe_epoch,
    describe_evidence,
    describe_host,
    describe_saving,
    tightest,
    tokens_per_second,
)
from planner.search.knobs import problem_of_estimate
from planner.search.what_if import WhatIf, what_if
from planner.units import format_gib

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
# The colour of each group of components in the first picture (planner/report/bars.py, `GROUPS`).
GROUP_COLOURS: dict[str, str] = {
    "weights": "#3b6fb6",
    "states": "#9b7fd1",
    "activations": "#2f8f5b",
    "loss": "#d9a21b",
    "generation": "#1d93a8",
    "runtime": "#8a8f98",
}
HOST_COLOUR = "#a0563b"
AWAKE = ("load", "weight_sync", "rollout")  # phases in which an engine does not sleep
FOLDER = "run"  # of the launch files in the archive


class Origin(Struct, frozen=True, kw_only=True):
    """The addresses and the command that ask for a page's answer again; empty: not known.

    `command`: in a shell. `address`: of the page on its server. `config`: the text of the user's own train.yaml, which
    the launch files keep.
    """

    command: str = ""
    address: str = ""
    config: str | None = None


UNKNOWN_ORIGIN = Origin()


def plan_html(plan: Plan, origin: Origin = UNKNOWN_ORIGIN, above: Sequence[str] = ()) -> str:
    """Return a plan as a page; `above`: parts in HTML that stand above it.

    Raises:
        PlanError: Jinja2 is not installed.
    """
    document = plan_report(plan, origin.config)
    others = [
        (sentence(other.change), describe_candidate(other.estimate.candidate), other.estimate, in_one_line(other.takes))
        for other in plan.alternatives
    ]
    changes = [
        (
            sentence(remedy.change),
            describe_candidate(remedy.estimate.candidate),
            remedy.estimate,
            "; ".join(filter(None, (describe_saving(remedy, plan.best), *sentences(remedy.takes)))),
        )
        for remedy in plan.remedies
    ]
    faster = [
        (
            sentence(lever.change),
            describe_candidate(lever.estimate.candidate),
            lever.estimate,
            f"{lever.factor(plan.best):.1f} times as fast; {sentence(lever.takes[0])}",
        )
        for lever in plan.levers
    ]
    grid = what_if(plan.best, problem_of_estimate(plan.job, plan.cluster, plan.best))
    shown = PageContent(
        best=plan.best,
        cluster=plan.cluster,
        report={**to_builtins(document), "estimate": to_builtins(document.best), "grid": _grid(grid, plan.best)},
        json=json_text(document),
        notes=plan.warnings,
        remedies=tuple(map(variation_line, plan.remedies)),
        others=(*others, *faster, *changes),
    )
    return page(_title(plan.best), [*above, _answer(shown, origin)])


def estimate_html(
    estimate: Estimate,
    cluster: Cluster,
    warnings: Sequence[Note],
    origin: Origin = UNKNOWN_ORIGIN,
) -> str:
    """Return an estimate as a page.

    Raises:
        PlanError: Jinja2 is not installed.
    """
    document = estimate_report(estimate, warnings, cluster, origin.config)
    report = to_builtins(document)
    shown = PageContent(
        best=estimate,
        cluster=cluster,
        report=report | {"estimate": report},
        json=json_text(document),
        notes=tuple(warnings),
    )
    return page(_title(estimate), [_answer(shown, origin)])


class PageContent(Struct, frozen=True, kw_only=True):
    """The content of a page. `report`: the document as objects, `json`: as text; `others`: rows of other ways."""

    best: Estimate
    cluster: Cluster
    report: dict[str, Any]
    json: str
    notes: tuple[Note, ...]
    remedies: tuple[str, ...] = ()
    others: tuple[tuple[str, str, Estimate, str], ...] = ()


def _title(best: Estimate) -> str:
    return f"{best.candidate.model.id} · {best.candidate.method}"


def _answer(shown: PageContent, origin: Origin) -> str:
    """Return the answer as HTML."""
    best, candidate = shown.best, shown.best.candidate
    present = {
        name
        for gpu in best.gpus
        for phase in gpu.phases
        for name, size in phase.components.items()
        if size >= SMALLEST_BYTES
    }
    texts = {
        "words": describe_candidate(candidate),
        "verdict": verdict_line(best),
        "driver": describe_driver(best) if best.fits else "",
        "speed": " · ".join([speed_line(best), *describe_epoch(best.throughput)]) if best.fits else "",
        "lines": shown_settings(candidate),
        "evidence": describe_evidence(best),
        "host": " · ".join(describe_host(best, shown.cluster.host)),
    }
    ways = [("recommended" if best.fits else "nearest", describe_candidate(candidate), best, ""), *shown.others]
    launch = shown.report["estimate"]["launch"]
    text: str = template("planner.report.page", "answer.html").render(
        title=_title(best),
        name=f"{candidate.model.id.rpartition('/')[2]}-{candidate.method}",
        cluster=describe_cluster(shown.cluster),
        verdict="tight" if best.tight else "fits" if best.fits else "over",
        texts=texts,
        report=shown.report,
        bars=list(_bars(best)),
        remedies=shown.remedies,
        first_notes=[sentence(note) for note in urgent_notes(shown.notes)],
        pasted="" if launch is None else " ".join(flags(candidate)),
        origin=origin,
        json=json_address(shown.json),
        zip=zip_address(FOLDER, launch["files"]) if launch is not None else "",
        launch=launch,
        ways=[_way(*way) for way in ways],
        fastest=max(way[2].throughput.tokens_per_second for way in ways),
        colours={component: colour for component, colour in COLOURS.items() if component in present},
    )
    return text


def _bars(estimate: Estimate) -> Iterator[dict[str, Any]]:
    """Yield the bars of the first picture: the fullest card at its peak, and a node's host memory if that is short."""
    gpu = tightest(estimate)
    parts = [(name, size, GROUP_COLOURS[name]) for name, _, _, size in group_sizes(gpu.peak) if size >= SMALLEST_BYTES]
    role = "One card" if len(estimate.gpus) == 1 else f"One card for {gpu.role}"
    yield _bar(role, peak_line(gpu), parts, gpu.capacity_bytes, gpu.interval_bytes)
    need, capacity = estimate.host_peak_bytes, estimate.host_capacity_bytes
    if estimate.host_over_bytes > 0:
        text = f"{bare_gib(need)} of {format_gib(capacity, 1)}"
        yield _bar("Host memory of a node", text, [("needed", need, HOST_COLOUR)], capacity, None)


def _bar(
    name: str, text: str, parts: Sequence[tuple[str, int, str]], capacity_bytes: int, interval: tuple[int, int] | None
) -> dict[str, Any]:
    """Return a bar: the shares of its parts, and of its end, in percent of its width."""
    total = sum(size for _, size, _ in parts)
    scale = max(capacity_bytes, total, interval[1] if interval is not None else 0) / 100
    return {
        "name": name,
        "text": text,
        "parts": [
            {"name": part, "size": format_gib(size, 1), "share": size / scale, "colour": colour}
            for part, size, colour in parts
        ],
        "end": capacity_bytes / scale,
        "interval": [bound / scale for bound in interval] if interval is not None else None,
    }


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
    """Return the what-if table: each cell has the need, its share of the card, and whether it fits and is the best.

    Beside an engine that sleeps it is the need of the training: `sampling`, the engine's own, is the same in each cell.
    """
    candidate = best.candidate
    chosen = candidate.per_device_train_batch_size, getattr(candidate, found.length_name)
    apart = AWAKE if candidate.vllm == "colocate" and candidate.vllm_enable_sleep_mode else ()
    sampling = max((phase.total_bytes for phase in tightest(best).phases if phase.name in apart), default=0)
    return {
        "name": found.length_name,
        "lengths": found.lengths,
        "sampling": bare_gib(sampling) if sampling else "",
        "rows": [
            (batch, [_cell(each, (batch, at) == chosen, apart) for at, each in zip(found.lengths, row, strict=True)])
            for batch, row in found.rows
        ],
    }


def _cell(estimate: Estimate | None, is_best: bool, apart: Sequence[str]) -> dict[str, Any]:
    if estimate is None:
        return {"text": "no engine", "fits": False, "best": is_best, "share": 1.0, "rate": ""}
    gpu = tightest(estimate)
    need = max(phase.total_bytes for phase in gpu.phases if phase.name not in apart)
    return {
        "text": bare_gib(need),
        "fits": estimate.fits,
        "best": is_best,
        "share": min(1.0, need / gpu.capacity_bytes),
        "rate": tokens_per_second(estimate.throughput.tokens_per_second),
    }

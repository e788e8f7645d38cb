"""Plots of a plan and of a sweep, with plotly. Needs the [notebook] extra.

Backgrounds are transparent and text is grey, so that a plot is readable in light and dark notebooks.
"""

from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from planner.errors import InputError, PlanError, UnknownName, shortened
from planner.planning import Plan
from planner.quantities import Estimate, GpuMemory
from planner.report.bars import SMALLEST_BYTES
from planner.report.frame import examined_structures, is_frame
from planner.report.page.answer import COLOURS
from planner.report.sentences import sentence
from planner.report.words import (
    bare_gib,
    describe_candidate,
    describe_cluster,
    describe_fit,
    readable,
    tightest,
    tokens_per_second,
)
from planner.search.knobs import problem_of_estimate
from planner.search.what_if import what_if
from planner.units import GIB, format_gib

if TYPE_CHECKING:
    import pandas as pd
    from plotly.graph_objects import Figure

Trace = dict[str, Any]  # a series of a plot, as plotly's JSON has it

TEXT, GRID = "#7d838c", "rgba(125, 131, 140, 0.25)"  # at least 3.8 : 1 on white and on #1e1e1e
LIMIT, CHOSEN = "#c23b3b", "#d9820f"  # the end of the card; the recommended candidate
SERIES = ("#3b6fb6", "#2f8f5b", "#9b7fd1", "#1d93a8", "#a0563b", "#8a8f98")
# Colours of a need by its share of the card: blue up to 1, orange beyond it, the same from 2 on.
NEED_SCALE = [[0, "#e3eefa"], [0.5, "#2b6cb0"], [0.5, "#f6c89f"], [1, "#b4511a"]]
LARGEST_SHARE = 2.0
SPEED = "tokens_per_second"
AXIS_TITLES = {SPEED: "tokens/s", "max_length": "max_length (tokens)", "step_seconds": "seconds a step"}


def memory_figure(estimate: Estimate) -> "Figure":
    """Return the memory of one GPU of each role: a bar for each phase, the card's end, the interval of the peak.

    Raises:
        PlanError: plotly is not installed.
    """
    bars = [(gpu, phase, _phase_label(estimate, gpu, phase.name)) for gpu in estimate.gpus for phase in gpu.phases]
    labels = [label for _, _, label in bars]
    large = {name for _, phase, _ in bars for name, size in phase.components.items() if size >= SMALLEST_BYTES}
    traces: list[Trace] = [
        {
            "type": "bar",
            "name": readable(component),
            "x": labels,
            "y": [_gib(phase.components.get(component, 0)) for _, phase, _ in bars],
            "marker": {"color": COLOURS[component]},
            "hovertemplate": "%{fullData.name}: %{y:.2f} GiB",
        }
        for component in sorted(large, key=list(COLOURS).index)
    ]
    capacity = min(gpu.capacity_bytes for gpu in estimate.gpus)
    layout = {
        "barmode": "stack",
        "hovermode": "x unified",
        "xaxis": {"title": {"text": "phase of the step"}, "showgrid": False},
        "yaxis": {"title": {"text": "GiB"}},
        "shapes": [_line("y", _gib(capacity))],
        "annotations": [_note(f"the card: {format_gib(capacity, 1)}", x=1, y=_gib(capacity), xref="paper")],
        "legend": {"traceorder": "reversed"},
    }
    traces.append(_peaks(estimate))
    return _figure((f"{_job(estimate)}: memory of one GPU", describe_fit(estimate)), traces, layout)


def _peaks(estimate: Estimate) -> Trace:
    """Return the peaks of the GPUs as points with the interval that the job's risk asks for."""
    peaks = [(gpu, gpu.peak_bytes, gpu.interval_bytes) for gpu in estimate.gpus]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "peak, with its interval",
        "x": [_phase_label(estimate, gpu, gpu.peak_phase) for gpu, _, _ in peaks],
        "y": [_gib(peak) for _, peak, _ in peaks],
        "error_y": {
            "array": [_gib(high - peak) for _, peak, (_, high) in peaks],
            "arrayminus": [_gib(peak - low) for _, peak, (low, _) in peaks],
            "color": CHOSEN,
            "thickness": 2,
            "width": 8,
        },
        "marker": {"color": CHOSEN, "size": 7},
        "hovertemplate": "peak: %{y:.2f} GiB",
    }


def _phase_label(estimate: Estimate, gpu: GpuMemory, phase: str) -> str:
    return readable(phase) if len(estimate.gpus) == 1 else f"{readable(phase)} ({gpu.role})"


def candidates_figure(plan: Plan) -> "Figure":
    """Return speed against memory of every candidate that the search estimated, with the frontier.

    The frontier joins the candidates that fit and that no other one beats in both. Searches again, which takes as long
    as the plan did.

    Raises:
        PlanError: plotly is not installed.
    """
    examined = list(examined_structures(plan))
    found = [(label, each.answer) for label, each in examined if each.answer is not None]
    others = [(sentence(other.change), other.estimate) for other in plan.alternatives]
    labels = list(dict.fromkeys(label for label, _ in found))
    traces = []
    for label, colour in zip(labels, SERIES, strict=False):
        for fits in (True, False):
            name = label if fits else f"{label}, does not fit"
            points = [each for own, each in found if own == label and each.fits == fits]
            traces.append(_points(name, points, {"color": colour, "symbol": "circle" if fits else "x-thin-open"}))
    traces.append(_points("alternative", [each for _, each in others], {"color": TEXT, "symbol": "diamond-open"}))
    fitting = [each for _, each in [*found, *others, ("", plan.best)] if each.fits]
    line = {"color": TEXT, "dash": "dot", "shape": "hv"}
    traces.append(_points("frontier", frontier(fitting), {}) | {"mode": "lines", "line": line, "hoverinfo": "skip"})
    traces.append(_points(_chosen(plan), [plan.best], {"color": CHOSEN, "symbol": "star", "size": 16}))
    capacity = tightest(plan.best).capacity_bytes
    layout = {
        "xaxis": {"title": {"text": "need of the fullest GPU (GiB)"}} | _shown_needs(traces, _gib(capacity)),
        "yaxis": {"title": {"text": "tokens/s"}, "rangemode": "tozero", "tickformat": ","},
        "shapes": [_line("x", _gib(capacity))],
        "annotations": [_note(f"the card: {format_gib(capacity, 1)}", x=_gib(capacity), y=0, yref="paper")],
    }
    title = (
        f"{_job(plan.best)} on {describe_cluster(plan.cluster)}: speed against memory",
        f"{len(found)} of {len(examined)} structures were worth an estimate; a double click shows all of them",
    )
    return _figure(title, [trace for trace in traces if trace["x"]], layout)


def _shown_needs(traces: Sequence[Trace], capacity_gib: float) -> dict[str, Any]:
    """Return the range of needs to show first: what fits, and what is up to half a card beyond it."""
    needs = [need for trace in traces for need in trace["x"]]
    near = [need for need in needs if need <= 1.5 * capacity_gib]
    return {"range": [_shown(0.95 * min(near)), _shown(1.05 * max(*near, capacity_gib))]} if near else {}


def frontier(estimates: Iterable[Estimate]) -> list[Estimate]:
    """Return the estimates that no other one beats in both memory and speed, from the leanest to the fastest."""
    found: list[Estimate] = []
    for each in sorted(estimates, key=lambda each: (_need(each), -each.throughput.tokens_per_second)):
        if not found or each.throughput.tokens_per_second > found[-1].throughput.tokens_per_second:
            found.append(each)
    return found


def _points(name: str, estimates: Sequence[Estimate], marker: Mapping[str, Any]) -> Trace:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [_gib(_need(each)) for each in estimates],
        "y": [_shown(each.throughput.tokens_per_second) for each in estimates],
        "text": [
            f"{describe_candidate(each.candidate)}<br>micro-batch {each.candidate.per_device_train_batch_size}, "
            f"{describe_fit(each)}"
            for each in estimates
        ],
        "hovertemplate": "%{text}<br>%{y:,.0f} tokens/s",
        "marker": {"size": 9, "line": {"width": 2 if marker.get("symbol", "").endswith("open") else 0}} | dict(marker),
    }


def _need(estimate: Estimate) -> int:
    return tightest(estimate).peak_bytes


def what_if_figure(plan: Plan) -> "Figure":
    """Return a heat map of what the recommended candidate needs at other lengths and micro-batches.

    The colour is the upper end of the need as a share of the card, or of a node's host memory if that is fuller.

    Raises:
        PlanError: plotly is not installed.
    """
    grid = what_if(plan.best, problem_of_estimate(plan.job, plan.cluster, plan.best))
    lengths = [f"{length:,}" for length in grid.lengths]
    batches = [str(batch) for batch, _ in grid.rows]
    heat: Trace = {
        "type": "heatmap",
        "x": lengths,
        "y": batches,
        "z": [[_share(each) for each in row] for _, row in grid.rows],
        "text": [[_cell(each) for each in row] for _, row in grid.rows],
        "texttemplate": "%{text}",
        "hovertemplate": f"{grid.length_name} %{{x}}, micro-batch %{{y}}<br>%{{text}}<extra></extra>",
        "colorscale": NEED_SCALE,
        "zmin": 0,
        "zmax": LARGEST_SHARE,
        "xgap": 2,
        "ygap": 2,
        "colorbar": {
            "title": {"text": "of the card", "side": "right"},
            "tickvals": [0, 0.5, 1, 1.5, LARGEST_SHARE],
            "ticktext": ["0 %", "50 %", "100 %", "150 %", "200 % or more"],
        },
    }
    chosen = plan.best.candidate
    own = str(chosen.per_device_train_batch_size), f"{getattr(chosen, grid.length_name):,}"
    outline = _outline(lengths.index(own[1]), batches.index(own[0])) if own[0] in batches else {}
    layout = {
        "xaxis": {"title": {"text": f"{grid.length_name} (tokens)"}, "type": "category", "showgrid": False},
        "yaxis": {"title": {"text": "per_device_train_batch_size"}, "type": "category", "showgrid": False},
        "shapes": [outline] if outline else [],
    }
    title = f"{_job(plan.best)} on {describe_cluster(plan.cluster)}: other lengths and batches"
    return _figure((title, f"need in GiB; with the settings of the {_chosen(plan)} candidate"), [heat], layout)


def _share(estimate: Estimate | None) -> float:
    """Return the upper end of the need as a share of the memory; above 1 exactly where it does not fit."""
    if estimate is None:
        return LARGEST_SHARE
    gpus = max(gpu.interval_bytes[1] / gpu.capacity_bytes for gpu in estimate.gpus)
    return _shown(min(LARGEST_SHARE, max(gpus, estimate.host_peak_bytes / estimate.host_capacity_bytes)))


def _cell(estimate: Estimate | None) -> str:
    if estimate is None:
        return "no engine"
    second = tokens_per_second(estimate.throughput.tokens_per_second) if estimate.fits else "does not fit"
    return f"{bare_gib(_need(estimate))} GiB<br>{second}"


def _outline(column: int, row: int) -> dict[str, Any]:
    """Return a frame around the cell of the recommended candidate."""
    ends = {"x0": column - 0.5, "x1": column + 0.5, "y0": row - 0.5, "y1": row + 0.5}
    return {"type": "rect", "line": {"color": CHOSEN, "width": 4}, **ends}


def cards_figure(frame: "pd.DataFrame", value: str, by: str) -> "Figure":
    """Return a bar for each cluster of a sweep; parameters and errors as in `plot_cards`."""
    if not is_frame(frame):
        raise InputError(
            "plot_cards takes the frame of a sweep: plot_cards(sweep('Qwen2.5-7B', ['1xL4', '1xT4'], method='sft')), "
            f"not {shortened(repr(frame))}."
        )
    for column in ("gpus", value, *([by] if by else [])):
        if column not in frame:
            raise UnknownName("column", column, [str(name) for name in frame.columns])
    if frame.duplicated(["gpus", *([by] if by else [])]).any():
        raise InputError("The frame has several rows for a cluster: name the other axis, as plot_cards(frame, by=...).")
    groups = [(str(name), rows) for name, rows in frame.groupby(by, sort=False)] if by else [("", frame)]
    traces: list[Trace] = [
        {
            "type": "bar",
            "name": f"{by} {name}",
            "x": rows["gpus"].tolist(),
            "y": [_shown(number) for number in rows[value].where(rows["fits"], 0).tolist()],
            "text": [_bar_text(fits, number) for fits, number in zip(rows["fits"], rows[value], strict=True)],
            "textposition": "outside",
            "cliponaxis": False,
            "marker": {"color": colour},
            "hovertemplate": "%{x}: %{text}<extra>%{fullData.name}</extra>",
        }
        for (name, rows), colour in zip(groups, SERIES * len(groups), strict=False)
    ]
    title = AXIS_TITLES.get(value, readable(value))
    layout = {
        "barmode": "group",
        "showlegend": bool(by),
        "xaxis": {"title": {"text": "GPUs"}, "type": "category", "showgrid": False},
        "yaxis": {"title": {"text": title}, "rangemode": "tozero", "tickformat": "," if value == SPEED else ""},
    }
    return _figure((f"{title} by GPUs", ""), traces, layout)


def _bar_text(fits: bool, number: float) -> str:
    if not fits:
        return "does<br>not fit"
    return f"{number:,.0f}" if number >= 100 else f"{number:,.3g}"


def _chosen(plan: Plan) -> str:
    return "recommended" if plan.best.fits else "nearest"


def _gib(size_bytes: float) -> float:
    return _shown(size_bytes / GIB)


def _shown(number: float) -> float:
    """Return a figure with the digits that a plot can show, so that a stored plot is the same in every process."""
    return float(f"{number:.6g}")


def _job(estimate: Estimate) -> str:
    return f"{estimate.candidate.model.id.rsplit('/', 1)[-1]} · {estimate.candidate.method}"


def _line(axis: str, at: float) -> dict[str, Any]:
    """Return a dashed line across the plot, where the card ends."""
    across, ends = ("x", "y") if axis == "y" else ("y", "x")
    where = {f"{across}ref": "paper", f"{across}0": 0, f"{across}1": 1, f"{ends}0": at, f"{ends}1": at}
    return {"type": "line", "line": {"color": LIMIT, "dash": "dash", "width": 2}, **where}


def _note(text: str, **where: Any) -> dict[str, Any]:
    return {"text": text, "showarrow": False, "font": {"color": LIMIT}, "xanchor": "right", "yanchor": "bottom"} | where


def _figure(title: tuple[str, str], traces: list[Trace], layout: Mapping[str, Any]) -> "Figure":
    """Return a figure without colours behind it, from plotly's JSON. `title`: with the line below it.

    Raises:
        PlanError: plotly is not installed.
    """
    try:
        graph_objects: Any = import_module("plotly.graph_objects")
    except ImportError as error:
        raise PlanError(
            "Plots need plotly, which is in the notebook extra: pip install 'finetune-plan[notebook]'."
        ) from error
    axes = {"gridcolor": GRID, "zeroline": False, "automargin": True}
    style = {
        "template": "none",
        "title": {"text": title[0], "subtitle": {"text": title[1]}, "font": {"size": 16}, "x": 0, "pad": {"l": 12}},
        "font": {"color": TEXT},
        "paper_bgcolor": "rgba(0, 0, 0, 0)",
        "plot_bgcolor": "rgba(0, 0, 0, 0)",
        "height": 440,
        "margin": {"t": 75, "r": 30, "b": 60},
    }
    named = {name: axes | layout[name] for name in ("xaxis", "yaxis")}
    figure: Figure = graph_objects.Figure({"data": traces, "layout": style | dict(layout) | named})
    return figure

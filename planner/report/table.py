"""The answer as text: the candidate, the memory of each GPU and phase, alternatives and notes."""

from collections.abc import Iterator, Sequence

from rich.text import Text

from planner.gpus.cluster import Cluster
from planner.gpus.host_memory import size_with_room
from planner.measurements.corrected_plan import phase_notes
from planner.planning import Plan
from planner.quantities import Estimate, GpuMemory, Note
from planner.report.bars import bars
from planner.report.lines import joined, listed, wrapped
from planner.report.sentences import proof_lines, sentence, sentences
from planner.report.shown_settings import launch_environment, shown_settings
from planner.report.words import (
    bare_gib,
    describe_candidate,
    describe_cluster,
    describe_driver,
    describe_epoch,
    describe_evidence,
    describe_excess,
    describe_fit,
    describe_host_shortage,
    describe_runs,
    describe_saving,
    describe_speed,
    describe_step,
    readable,
    tightest,
    tokens_per_second,
    verdict_style,
)
from planner.search.alternatives import faster_alternative
from planner.search.variations import Variation
from planner.units import format_gib

# Columns: the longest setting beside its label, PYTORCH_CUDA_ALLOC_CONF, takes 61; wider lines are hard to follow back.
MIN_WIDTH, MAX_WIDTH = 62, 120


def plan_table(plan: Plan, width: int) -> Text:
    """Return a plan as text."""
    width = min(max(width, MIN_WIDTH), MAX_WIDTH)
    faster = faster_alternative(plan.best, plan.alternatives)
    warnings = [note for note in plan.warnings if note not in faster]
    lines = [
        *_answer("recommended" if plan.best.fits else "nearest", plan.best, plan.cluster, width, sentences(faster)),
        *_proof(plan, width),
        *listed("to fit", [_variation(other, plan.best, saving=True) for other in plan.remedies], width),
        *listed("also", [_variation(other, plan.best) for other in plan.alternatives], width),
        *listed("faster if", [_lever(lever, plan.best) for lever in plan.levers], width),
        *listed("more", sentences(plan.more), width),
        *_notes(plan.best, warnings, width),
    ]
    return joined(lines)


def estimate_table(estimate: Estimate, cluster: Cluster, warnings: Sequence[Note], width: int) -> Text:
    """Return an estimate as text."""
    width = min(max(width, MIN_WIDTH), MAX_WIDTH)
    return joined([*_answer("candidate", estimate, cluster, width), *_notes(estimate, warnings, width)])


def nearest_refusal(plan: Plan) -> str:
    """Return one line: by how much the nearest candidate does not fit, in which phase, and the first remedy."""
    gpu, host = tightest(plan.best), describe_host_shortage(plan.best, plan.cluster.host)
    remedy = f" To fit: {sentence(plan.remedies[0].change)}." if plan.remedies else ""
    peak = (
        f"peaks at {_with_bound(gpu)} in the {readable(gpu.peak.name)}, "
        f"{format_gib(plan.best.over_bytes, 1)} too much at a risk of {plan.job.risk:g}"
    )
    over = [text for text in (peak if plan.best.over_bytes > 0 or not host else "", host) if text]
    return f"No candidate fits {describe_cluster(plan.cluster)}. The nearest {', and '.join(over)}.{remedy}"


def shortfall(estimate: Estimate, cluster: Cluster, risk: float) -> str:
    """Return one line: by how much a candidate does not fit, in which phase or on a node, and what fits."""
    gpu, host = tightest(estimate), describe_host_shortage(estimate, cluster.host)
    if host and estimate.over_bytes <= 0:
        size = size_with_room(estimate.host_peak_bytes)
        return (
            f"The candidate does not fit: it {host}. It fits with --host-memory {size}, if your nodes have that; "
            "ask plan without estimate for what fits in less."
        )
    return (
        f"The candidate does not fit: it peaks at {_with_bound(gpu)} of {format_gib(gpu.capacity_bytes, 1)} "
        f"in the {readable(gpu.peak.name)}, "
        f"{format_gib(estimate.over_bytes, 1)} too much at a risk of {risk:g}{f', and {host}' if host else ''}. "
        "Ask plan without estimate for what fits."
    )


def _with_bound(gpu: GpuMemory) -> str:
    """Return a peak, and its upper bound if only the bound is too much."""
    bound = f" (up to {bare_gib(gpu.interval_bytes[1])})" if gpu.peak_bytes <= gpu.capacity_bytes else ""
    return f"{format_gib(gpu.peak_bytes, 1)}{bound}"


def _answer(label: str, estimate: Estimate, cluster: Cluster, width: int, faster: Sequence[str] = ()) -> Iterator[Text]:
    """Yield a candidate, its GPUs, its settings and their memory."""
    yield from header(estimate, cluster, width)
    yield Text()
    yield from _candidate_block(label, estimate, width, faster)
    yield Text()
    yield from bars(estimate, cluster.host, width)
    if parts := describe_step(estimate):
        yield from wrapped("step", [parts], width)
    yield Text()


def header(estimate: Estimate, cluster: Cluster, width: int) -> Iterator[Text]:
    """Yield the job and the hardware, and the evidence at the right edge."""
    candidate, tool = estimate.candidate, estimate.candidate.tool_row
    software = f"trl {candidate.trl_version}" if candidate.tool == "trl" else f"{tool.name} {tool.release}"
    job, hardware = f"{candidate.model.id} · {candidate.method}", f"{describe_cluster(cluster)} · {software}"
    evidence = describe_evidence(estimate)
    room = width - len(evidence) - 2
    first = f"{job} · {hardware}" if len(f"{job} · {hardware}") <= room else job
    yield Text.assemble((first, "bold"), " " * max(room + 2 - len(first), 2), (evidence, "italic"))
    if first == job:
        yield Text(hardware, style="bold")


def _candidate_block(label: str, estimate: Estimate, width: int, faster: Sequence[str]) -> Iterator[Text]:
    """Yield the candidate in words, whether it fits, its speed, then its settings."""
    style = verdict_style(estimate)
    yield from wrapped(label, [describe_candidate(estimate.candidate)], width, style="bold")
    yield from wrapped("", [describe_fit(estimate)], width, style=style)
    if estimate.fits:
        counts = [] if estimate.device == "cuda" else [describe_runs(estimate)]
        yield from wrapped("", [describe_driver(estimate), *counts], width, style=style)
    yield from wrapped("", [describe_speed(estimate)], width, style=style)
    for line in faster:
        yield from wrapped("", [line], width)
    yield from wrapped("rows", describe_epoch(estimate.throughput), width)
    yield Text()
    for line, settings in shown_settings(estimate.candidate).items():
        yield from wrapped(line, settings, width)
    for name, value in launch_environment(estimate.candidate):
        yield from wrapped("launch with", [f"{name}={value}"], width)


def _proof(plan: Plan, width: int) -> Iterator[Text]:
    """Yield the certificate of the probes, then each phase as measured and as expected."""
    if plan.proof is None:
        return
    yield from listed("proof", proof_lines(plan.proof), width)
    notes = phase_notes(plan.proof.differences, plan.proof.evidence, plan.proof.expected)
    yield from listed("seen", sentences(notes), width)
    yield Text()


def _notes(estimate: Estimate, warnings: Sequence[Note], width: int) -> Iterator[Text]:
    yield from listed("why", sentences(estimate.reasons), width)
    yield from listed("note", sentences(warnings), width)


def _variation(other: Variation, best: Estimate, saving: bool = False) -> str:
    saves = f", {saved}" if saving and (saved := describe_saving(other, best)) else ""
    return "; ".join([f"{sentence(other.change)}: {_outcome(other.estimate, best)}{saves}", *sentences(other.takes)])


def _lever(lever: Variation, best: Estimate) -> str:
    """Return a change that is faster, by how much, and its price."""
    rate = tokens_per_second(lever.estimate.throughput.tokens_per_second)
    change, price = sentence(lever.change), sentence(lever.takes[0])
    return f"you accept {change}: {lever.factor(best):.1f} times as fast, about {rate}; {price}"


def _outcome(estimate: Estimate, best: Estimate) -> str:
    """Return whether another candidate fits and its speed; its evidence, if it differs from that of the best."""
    gpu = tightest(estimate)
    evidence = "" if estimate.evidence == best.evidence else f" ({estimate.evidence})"
    if estimate.tight:
        return f"tight: {bare_gib(gpu.peak_bytes)} of {format_gib(gpu.capacity_bytes, 1)}{evidence}"
    if not estimate.fits:
        phase = f" in the {readable(gpu.peak.name)}" if estimate.host_over_bytes <= 0 else ""
        return f"does not fit, {describe_excess(estimate)}{phase}{evidence}"
    rate = tokens_per_second(estimate.throughput.tokens_per_second)
    return f"fits in {bare_gib(gpu.peak_bytes)} of {format_gib(gpu.capacity_bytes, 1)}, about {rate}{evidence}"

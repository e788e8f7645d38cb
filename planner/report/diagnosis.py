"""A diagnosis as text and as JSON: a log's incidents, the job's expected memory, and a candidate that fits."""

from collections.abc import Iterator

from rich.text import Text

from planner.diagnose.advice import advice, describe_incident
from planner.diagnose.incident import Incident
from planner.diagnose.job import Diagnosis
from planner.jobs.settings import settings_text
from planner.measurements.corrected_plan import changed_settings
from planner.planning import Plan
from planner.quantities import OUTSIDE_THE_ALLOCATOR
from planner.report.documents import SCHEMA, DiagnosisReport, IncidentReport
from planner.report.json import best_candidate
from planner.report.lines import joined, listed, wrapped
from planner.report.sentences import sentence
from planner.report.table import MAX_WIDTH, MIN_WIDTH
from planner.report.words import (
    bare_gib,
    describe_candidate,
    describe_cluster,
    describe_evidence,
    describe_fit,
    describe_speed,
    readable,
    tightest,
    verdict_style,
)
from planner.units import format_gib, format_size

# Sizes in PyTorch's message and their labels, in the order in which they fill a card.
FIGURES = (
    ("allocated", "tensors"),
    ("graphs", "of them in CUDA graphs"),
    ("unallocated", "held by the allocator, unused"),
    ("outside", "outside PyTorch"),
    ("others", "other processes"),
    ("unnamed", "in no process that is named"),
    ("free", "free"),
)


# Libraries that a traceback shows (`SchemeRow.traced`) -> the name and the setting for a user.
SHOWN_SHARDING = {
    "zero3": ("DeepSpeed's ZeRO-3", "zero_stage=3"),
    "zero2": ("DeepSpeed's ZeRO-2", "zero_stage=2"),
    "fsdp": ("FSDP", "distributed_type=FSDP --set fsdp_version=2"),
}


def diagnosis_table(diagnosis: Diagnosis, width: int) -> Text:
    """Return the incidents with advice; if the job is known, also its expected memory and a candidate that fits."""
    width = min(max(width, MIN_WIDTH), MAX_WIDTH)
    lines: list[Text] = []
    for number, incident in enumerate(diagnosis.incidents):
        lines += _incident("happened" if number == 0 else "then", incident, width)
    lines += [*_expected(diagnosis, width), *_instead(diagnosis, width)]
    return joined(lines)


def _incident(label: str, incident: Incident, width: int) -> Iterator[Text]:
    yield from wrapped(label, [describe_incident(incident)], width, style="bold", hanging=2)
    yield from wrapped("", [f"{label} {format_size(size)}" for label, size in labelled_sizes(incident)], width)
    where = [incident.where] if incident.where else []
    yield from wrapped("at", [*where, f"line {incident.line} of the log"], width)
    yield from listed("turn", advice(incident), width)


def labelled_sizes(incident: Incident) -> list[tuple[str, int]]:
    """Return the sizes in PyTorch's message that are not 0, with labels; empty if the message has no sizes."""
    sizes = {**incident.sizes, "outside": incident.outside_bytes}
    return [(label, sizes[name]) for name, label in FIGURES if sizes.get(name)] if "allocated" in sizes else []


def _expected(diagnosis: Diagnosis, width: int) -> Iterator[Text]:
    expected, phase = diagnosis.expected, diagnosis.expected_phase
    if expected is None or diagnosis.cluster is None:
        return
    yield Text()
    candidate = expected.candidate
    yield from wrapped(
        "job",
        [
            f"{candidate.model.id} · {candidate.method} on {describe_cluster(diagnosis.cluster)}",
            describe_candidate(candidate),
        ],
        width,
    )
    yield from wrapped(describe_evidence(expected), [describe_fit(expected)], width)
    yield from _beside_the_log(diagnosis, width)
    if phase is not None and phase.name != tightest(expected).peak.name:
        yield from wrapped(
            "", [f"{format_gib(phase.total_bytes, 1)} in the {readable(phase.name)}, where it stopped"], width
        )
    if expected.fits:
        yield from wrapped(
            "",
            ["so these settings are not all of it: the run had others, or its GPUs were not its own"],
            width,
            hanging=2,
        )


def _beside_the_log(diagnosis: Diagnosis, width: int) -> Iterator[Text]:
    """Compare the tensors that the log reports with the estimate of them where the run stopped, and name sharding."""
    expected, first = diagnosis.expected, diagnosis.incidents[0]
    assert expected is not None
    tried, allocated = (first.sizes.get(name, 0) for name in ("tried", "allocated"))
    phase = diagnosis.expected_phase or tightest(expected).peak
    if allocated:
        estimated = sum(size for component, size in phase.components.items() if component not in OUTSIDE_THE_ALLOCATOR)
        yield from wrapped(
            "",
            [
                f"the log has {format_gib(allocated + tried, 1)} in tensors with the request that failed, the estimate "
                f"of the whole {readable(phase.name)} {format_gib(estimated, 1)}"
            ],
            width,
            hanging=2,
        )
    sharding = next((incident.sharding for incident in diagnosis.incidents if incident.sharding), "")
    if sharding and expected.candidate.scheme_row.traced != sharding:
        library, setting = SHOWN_SHARDING[sharding]
        yield from wrapped("", [f"the log shows {library}, the job has none: add --set {setting}"], width, hanging=2)


def _instead(diagnosis: Diagnosis, width: int) -> Iterator[Text]:
    if diagnosis.no_plan_reason:
        yield from wrapped("instead", [diagnosis.no_plan_reason], width)
    if diagnosis.fitting_plan is None or diagnosis.expected is None:
        return
    best = diagnosis.fitting_plan.best
    if best.candidate == diagnosis.expected.candidate:
        return
    yield Text()
    yield from wrapped("instead", [describe_candidate(best.candidate)], width, style="bold")
    yield from wrapped("", [describe_fit(best)], width, style=verdict_style(best))
    yield from wrapped("", [describe_speed(best)], width)
    changes = changed_settings(diagnosis.expected.candidate, best.candidate)
    yield from wrapped("change", [settings_text(changes)], width)
    yield from listed(
        "to fit",
        [_remedy(diagnosis.fitting_plan, number) for number in range(len(diagnosis.fitting_plan.remedies))],
        width,
    )


def _remedy(plan: Plan, number: int) -> str:
    remedy = plan.remedies[number]
    gpu = tightest(remedy.estimate)
    return f"{sentence(remedy.change)}: fits in {bare_gib(gpu.peak_bytes)} of {format_gib(gpu.capacity_bytes, 1)}"


def diagnosis_report(diagnosis: Diagnosis) -> DiagnosisReport:
    """Return the document of `plan diagnose --json`."""
    return DiagnosisReport(
        schema=SCHEMA,
        incidents=tuple(_incident_report(incident) for incident in diagnosis.incidents),
        expected=best_candidate(diagnosis.expected) if diagnosis.expected is not None else None,
        instead=best_candidate(diagnosis.fitting_plan.best) if diagnosis.fitting_plan is not None else None,
        why_none=diagnosis.no_plan_reason,
    )


def _incident_report(incident: Incident) -> IncidentReport:
    return IncidentReport(
        kind=incident.kind,
        line=incident.line,
        rank=incident.rank,
        gpu=incident.gpu,
        phase=incident.phase,
        where=incident.where,
        bytes=dict(incident.sizes),
        numbers=dict(incident.numbers),
        happened=describe_incident(incident),
        turn=tuple(advice(incident)),
    )

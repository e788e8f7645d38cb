"""A diagnosis as text and as JSON: a log's incidents, the job's expected memory, and a candidate that fits."""

from collections.abc import Iterator

from rich.text import Text

from planner.diagnose.advice import INCIDENT_KINDS, advice, describe_incident
from planner.diagnose.advice_by_phase import step_of
from planner.diagnose.incident import Incident
from planner.diagnose.job import Diagnosis
from planner.gpus.catalogue import gpu_rows
from planner.jobs.settings import settings_text
from planner.measurements.corrected_plan import changed_settings
from planner.methods import release
from planner.planning import Plan
from planner.quantities import OUTSIDE_THE_ALLOCATOR, Estimate, PhaseMemory
from planner.report.documents.commands import DiagnosisReport, IncidentReport
from planner.report.documents.fields import SCHEMA
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
SAME_CARD = 0.03  # of a GPU's memory: the driver takes more or less of it, by release and ECC
NOT_IN_EFFECT = 1.5  # log over estimate as a model loads, from which it was loaded in another way. Judged
# Libraries that a traceback shows (`SchemeRow.traced`) -> the name and the setting for a user.
SHOWN_SHARDING = {
    "zero3": ("DeepSpeed's ZeRO-3", "zero_stage=3"),
    "zero2": ("DeepSpeed's ZeRO-2", "zero_stage=2"),
    "fsdp": ("FSDP", "distributed_type=FSDP --set fsdp_version=2"),
}


def diagnosis_table(diagnosis: Diagnosis, width: int, *, verbose: bool = False) -> Text:
    """Return the incidents with advice; if the job is known, also its expected memory and a candidate that fits.

    `verbose` adds what of the log the answer was read from.
    """
    width = min(max(width, MIN_WIDTH), MAX_WIDTH)
    lines: list[Text] = []
    before: tuple[str, ...] = ()
    for number, incident in enumerate(diagnosis.incidents):
        said = advised(diagnosis, incident)
        lines += _incident("happened" if number == 0 else "then", incident, width)
        lines += listed("read from", _read_from(incident), width) if verbose else ()
        lines += listed("try", ["as above"] if said and said == before else said, width)
        before = said
    lines += [*_expected(diagnosis, width), *_instead(diagnosis, width), *_next(diagnosis, width)]
    return joined(lines)


def advised(diagnosis: Diagnosis, incident: Incident) -> tuple[str, ...]:
    """Return the advice for an incident, in TRL's names if the job is known."""
    return advice(incident, of_job=diagnosis.expected is not None)


def _incident(label: str, incident: Incident, width: int) -> Iterator[Text]:
    yield from wrapped(label, [describe_incident(incident)], width, style="bold", hanging=2)
    yield from wrapped("", [f"{label} {format_size(size)}" for label, size in labelled_sizes(incident)], width)
    where = [text for text in (incident.where, step_of(incident)) if text]
    yield from wrapped("at", [*where, f"line {incident.line} of the log"], width)


def _read_from(incident: Incident) -> list[str]:
    """Return what of the log tells the phase, and what is in effect."""
    beside = incident.beside
    found = ["the traceback: " + " > ".join(incident.frames)] if incident.frames else []
    found += [f"line {beside.said_line}, which says what ran"] if beside.said_line else []
    found += [f"a command or program that {' and '.join(sorted(beside.commands))}"] if beside.commands else []
    settings = ["a batch of " + str(beside.batch)] * bool(beside.batch) + sorted(beside.in_effect)
    found += [f"settings in effect: {', '.join(settings)}"] if settings else []
    return found or [f"line {incident.line} alone"]


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
    for remark in compared(diagnosis):
        yield from wrapped("", [remark], width, hanging=2)
    if phase is not None and phase.name != tightest(expected).peak.name:
        yield from wrapped(
            "", [f"{format_gib(phase.total_bytes, 1)} in the {readable(phase.name)}, where it stopped"], width
        )
    if expected.fits:
        yield from wrapped("", [_although_it_fits(expected, diagnosis.incidents[0])], width, hanging=2)


def _although_it_fits(expected: Estimate, first: Incident) -> str:
    """Return what a run may have had beside the settings of its job."""
    if not INCIDENT_KINDS[first.kind].of_host:
        return "by the estimate these settings fit: the run had other settings, or other processes used its GPUs"
    counted, has = (format_gib(size, 1) for size in (expected.host_peak_bytes, expected.host_capacity_bytes))
    return (
        f"by the estimate {counted} of a node's {has} of host memory are used, without datasets, data loader workers "
        "and other processes; a node or container may have less memory (--host-memory)"
    )


def _next(diagnosis: Diagnosis, width: int) -> Iterator[Text]:
    """Say what an answer with settings that fit still needs: the job, or another one if it does not plan."""
    if diagnosis.job_error and not diagnosis.misread:
        yield from wrapped("job", [f"it cannot be planned as given: {diagnosis.job_error}"], width)
    elif (
        diagnosis.expected is None
        and not diagnosis.misread
        and any(INCIDENT_KINDS[incident.kind].of_job for incident in diagnosis.incidents)
    ):
        last = _last_trl(diagnosis)
        release_flag = f", and --trl-version, which is {last} or older" if last else ""
        yield from wrapped(
            "to fit", [f"add the run's --model, --gpus and --method, or its --config{release_flag}"], width
        )


def compared(diagnosis: Diagnosis) -> list[str]:
    """Compare the log with the job: tensors where the run stopped, the card, sharding. Empty if the job is unknown."""
    if diagnosis.expected is None:
        return []
    return [
        *_tensors(diagnosis.expected, diagnosis),
        *_other_card(diagnosis),
        *_other_sharding(diagnosis),
        *_other_parts(diagnosis),
        *_other_trl(diagnosis),
    ]


def _tensors(expected: Estimate, diagnosis: Diagnosis) -> Iterator[str]:
    first = diagnosis.incidents[0]
    tried, allocated = (first.sizes.get(name, 0) for name in ("tried", "allocated"))
    phase = diagnosis.expected_phase or tightest(expected).peak
    if allocated:
        yield (
            f"the log has {format_gib(allocated + tried, 1)} in tensors with the request that failed, the estimate "
            f"of the whole {readable(phase.name)} {format_gib(estimated_of(phase), 1)}"
        )
    if first.phase == phase.name == "load" and allocated > NOT_IN_EFFECT * estimated_of(phase):
        yield (
            "so what makes the job's model smaller on a GPU (quantization, sharding, offloading) was not in effect as "
            "it loaded: see that the run reads that file or flag"
        )


def estimated_of(phase: PhaseMemory) -> int:
    """The bytes of a phase that PyTorch's allocator holds."""
    return sum(size for component, size in phase.components.items() if component not in OUTSIDE_THE_ALLOCATOR)


def _other_card(diagnosis: Diagnosis) -> list[str]:
    """Say that the log's GPU is not the job's; empty if it may be, or if the log has no size of it."""
    assert diagnosis.cluster is not None
    gpu = diagnosis.cluster.gpu
    total = next((each.sizes["total"] for each in diagnosis.incidents if "total" in each.sizes), gpu.total_bytes)
    if abs(total - gpu.total_bytes) <= SAME_CARD * gpu.total_bytes:
        return []
    like = [row.gpu.name for row in gpu_rows() if abs(row.gpu.total_bytes - total) <= SAME_CARD * total]
    names = f", as {', '.join(like[:3])}" if like else ""
    return [f"the log's GPU has {format_gib(total)}{names}, the job's {gpu.name} {format_gib(gpu.total_bytes)}"]


def _other_sharding(diagnosis: Diagnosis) -> list[str]:
    """Say that the log shows sharding that the job has not."""
    assert diagnosis.expected is not None
    sharding = next((incident.sharding for incident in diagnosis.incidents if incident.sharding), "")
    if not sharding or diagnosis.expected.candidate.scheme_row.traced == sharding:
        return []
    library, setting = SHOWN_SHARDING[sharding]
    return [f"the log shows {library}, the job has none: add --set {setting}"]


def _other_parts(diagnosis: Diagnosis) -> Iterator[str]:
    """Say that the log shows an evaluation, or vLLM, which the job has not."""
    assert diagnosis.expected is not None
    candidate = diagnosis.expected.candidate
    if any(each.phase == "evaluation" for each in diagnosis.incidents) and candidate.eval_strategy == "no":
        yield "the log shows an evaluation, the job has none: add --set eval_strategy=steps"
    if any(each.of_engine for each in diagnosis.incidents) and candidate.vllm == "off":
        yield "the log shows vLLM, the job has none: add --set use_vllm=true --set vllm_mode=colocate, or server"


def _other_trl(diagnosis: Diagnosis) -> list[str]:
    """Say that the log is of an older TRL than the one that is planned for."""
    assert diagnosis.expected is not None
    last = _last_trl(diagnosis)
    planned = diagnosis.expected.candidate.trl_version
    if not last or release(planned) <= release(last):
        return []
    return [f"the log is of TRL {last} or older, the job is planned for {planned}: add the run's --trl-version"]


def _last_trl(diagnosis: Diagnosis) -> str:
    return min((each.last_trl for each in diagnosis.incidents if each.last_trl), key=release, default="")


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
        incidents=tuple(_incident_report(incident, advised(diagnosis, incident)) for incident in diagnosis.incidents),
        expected=best_candidate(diagnosis.expected) if diagnosis.expected is not None else None,
        instead=best_candidate(diagnosis.fitting_plan.best) if diagnosis.fitting_plan is not None else None,
        compared=tuple(compared(diagnosis)),
        why_none=diagnosis.job_error or diagnosis.no_plan_reason,
    )


def _incident_report(incident: Incident, said: tuple[str, ...]) -> IncidentReport:
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
        turn=said,
    )

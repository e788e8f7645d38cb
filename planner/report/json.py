"""The JSON documents of plans, estimates, dry runs, diagnoses and validations (their types: documents.py)."""

import json
from collections.abc import Iterable
from dataclasses import replace

from msgspec import UNSET, Struct, convert, structs, to_builtins

from planner.allocator.reserved import Reserved
from planner.allocator.simulation import Simulation
from planner.candidate import Candidate
from planner.diagnose.advice import advice, describe_incident
from planner.diagnose.incident import Incident
from planner.diagnose.job import Diagnosis
from planner.jobs.job import Job
from planner.jobs.settings import settings_of, settings_of_fields
from planner.measurements.validate import UNDER, ComparedFigure, Validation, summaries
from planner.plan import Plan, Proof
from planner.quantities import Estimate, GpuMemory, PhaseMemory, Throughput
from planner.report.documents import (
    SCHEMA,
    AlternativeReport,
    BestCandidate,
    ComparedFigureReport,
    DiagnosisReport,
    DryRunPhase,
    DryRunReport,
    EstimatedPhases,
    EstimateReport,
    Gpus,
    Host,
    IncidentReport,
    JobReport,
    LeftOutReport,
    OutOfMemory,
    OutOfMemoryCaseReport,
    PhaseDifferenceReport,
    PhaseReport,
    PinnedSettings,
    PlanReport,
    Prediction,
    ProofReport,
    RemedyReport,
    Settings,
    SummaryReport,
    ValidationReport,
)
from planner.report.dry_run import HOLDINGS
from planner.report.proof import proof_lines

# Decimals of seconds, tokens per second, probabilities and errors: more than is known of any of them.
DECIMALS = 6


def json_text(report: Struct) -> str:
    """Return a document as text: keys sorted, indented by two spaces; the same document gives the same text.

    Python's `json` writes the text: msgspec formats floats otherwise, such as 312e12.
    """
    return json.dumps(to_builtins(report), indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)


def plan_report(plan: Plan) -> PlanReport:
    """Return the document of `plan --json`."""
    return PlanReport(
        schema=SCHEMA,
        job=_job(plan.job),
        cluster=plan.cluster,
        verdict=plan.verdict,
        best=best_candidate(plan.best),
        alternatives=tuple(
            AlternativeReport(label=other.label, note=other.note, **structs.asdict(best_candidate(other.estimate)))
            for other in plan.alternatives
        ),
        remedies=tuple(
            RemedyReport(change=remedy.change, note=remedy.note, **structs.asdict(best_candidate(remedy.estimate)))
            for remedy in plan.remedies
        ),
        more=plan.more,
        warnings=plan.warnings,
        versions=plan.versions,
        proof=UNSET if plan.proof is None else _proof(plan.proof),
    )


def estimate_report(estimate: Estimate, warnings: Iterable[str] = ()) -> EstimateReport:
    """Return the document of `plan estimate --json`: the keys of `best` in a plan, `schema` and `warnings`."""
    return EstimateReport(schema=SCHEMA, warnings=tuple(warnings), **structs.asdict(best_candidate(estimate)))


def dry_run_report(simulation: Simulation) -> DryRunReport:
    """Return the document of `plan dry-run --json`."""
    reserved = simulation.reserved
    return DryRunReport(
        schema=SCHEMA,
        evidence="simulated",
        settings=settings_report(simulation.candidate),
        peak_bytes=simulation.peak.total_bytes,
        peak_phase=simulation.peak.name,
        phases=tuple(_dry_run_phase(phase, reserved) for phase in simulation.simulated),
        reserved_peak_bytes=reserved.peak_bytes if reserved is not None else None,
        out_of_memory=_out_of_memory(reserved),
        estimated=EstimatedPhases(
            peak_bytes=simulation.estimated_peak.total_bytes,
            phases=tuple(_dry_run_phase(phase, None) for phase in simulation.estimated),
        ),
        difference=round(simulation.difference, DECIMALS),
        composed=simulation.composed,
        alive_at_peak=simulation.trace.holdings_at_peak(HOLDINGS),
        substitutions=simulation.trace.substitutions,
        versions=dict(simulation.trace.versions),
    )


def diagnosis_report(diagnosis: Diagnosis) -> DiagnosisReport:
    """Return the document of `plan diagnose --json`."""
    return DiagnosisReport(
        schema=SCHEMA,
        incidents=tuple(_incident(incident) for incident in diagnosis.incidents),
        expected=best_candidate(diagnosis.expected) if diagnosis.expected is not None else None,
        instead=best_candidate(diagnosis.fitting_plan.best) if diagnosis.fitting_plan is not None else None,
        why_none=diagnosis.no_plan_reason,
    )


def validation_report(validation: Validation) -> ValidationReport:
    """Return the document of `plan validate --json`."""
    return ValidationReport(
        schema=SCHEMA,
        interrupted=validation.interrupted,
        under_share=UNDER,
        summaries=tuple(
            SummaryReport(
                group=each.group,
                quantity=each.quantity,
                evidence=each.evidence,
                count=each.count,
                mean=round(each.mean, DECIMALS),
                mean_absolute=round(each.mean_absolute, DECIMALS),
                worst=round(each.worst, DECIMALS),
                under=each.under,
            )
            for each in summaries(validation)
        ),
        rows=tuple(_compared_figure(figure) for figure in validation.figures),
        out_of_memory=tuple(
            OutOfMemoryCaseReport(
                line=each.case.line,
                label=each.case.label,
                settings=settings_report(each.case.candidate),
                foreseen=dict(each.foreseen),
            )
            for each in validation.out_of_memory
        ),
        left_out=tuple(LeftOutReport(line=each.line, why=each.why) for each in validation.left_out),
    )


def best_candidate(estimate: Estimate) -> BestCandidate:
    """Return an estimate as the object `best` of a plan."""
    return BestCandidate(
        settings=settings_report(estimate.candidate),
        fits=estimate.fits,
        fit_probability=round(estimate.fit_probability, DECIMALS),
        evidence=estimate.evidence,
        gpus=tuple(_gpus(gpu) for gpu in estimate.gpus),
        host=Host(peak_bytes=estimate.host_peak_bytes),
        throughput=_rounded(estimate.throughput),
        reasons=estimate.reasons,
        device=UNSET if estimate.device == "none" else estimate.device,
    )


def settings_report(candidate: Candidate) -> Settings:
    """Return a candidate's settings under the names of its libraries."""
    return convert(settings_of(candidate), Settings)


def phase_report(phase: PhaseMemory) -> PhaseReport:
    """Return the memory of one phase, every component included."""
    return PhaseReport(name=phase.name, total_bytes=phase.total_bytes, components=phase.components)


def _gpus(gpu: GpuMemory) -> Gpus:
    return Gpus(
        role=gpu.role,
        count=gpu.count,
        capacity_bytes=gpu.capacity_bytes,
        peak_bytes=gpu.peak_bytes,
        peak_phase=gpu.peak_phase,
        interval_bytes=gpu.interval_bytes,
        phases=tuple(phase_report(phase) for phase in gpu.phases),
        details=gpu.details,
    )


def _rounded(throughput: Throughput) -> Throughput:
    return replace(
        throughput,
        tokens_per_second=round(throughput.tokens_per_second, DECIMALS),
        step_seconds=round(throughput.step_seconds, DECIMALS),
        seconds={cause: round(seconds, DECIMALS) for cause, seconds in throughput.seconds.items()},
    )


def _job(job: Job) -> JobReport:
    return JobReport(
        model=job.model.id,
        method=job.method,
        tuning=job.tuning,
        pinned=convert(settings_of_fields(job.pinned), PinnedSettings),
        optimize=job.optimize,
        risk=job.risk,
        effective_batch_size=job.effective_batch_size,
        trl_version=job.trl_version,
    )


def _proof(proof: Proof) -> ProofReport:
    return ProofReport(
        evidence=proof.evidence,
        device=proof.device,
        expected=proof.expected,
        lines=proof_lines(proof),
        differences=tuple(
            PhaseDifferenceReport(
                name=each.name,
                expected_bytes=each.expected_bytes,
                measured_bytes=each.measured_bytes,
                needed_bytes=each.needed_bytes,
                error=round(each.error, DECIMALS),
            )
            for each in proof.differences
        ),
        report=dict(proof.report),
    )


def _dry_run_phase(phase: PhaseMemory, reserved: Reserved | None) -> DryRunPhase:
    """Return one phase without components of 0 bytes, with what the allocator reserves in it, if it is known."""
    return DryRunPhase(
        name=phase.name,
        total_bytes=phase.total_bytes,
        components={name: size for name, size in phase.components.items() if size},
        reserved_bytes=UNSET if reserved is None or phase.name not in reserved.most else reserved.most[phase.name],
    )


def _out_of_memory(reserved: Reserved | None) -> OutOfMemory | None:
    """Return the figures of the message that PyTorch would raise; None if the step fits or nothing is reserved."""
    if reserved is None or reserved.shortfall is None:
        return None
    figures = reserved.shortfall.figures
    return OutOfMemory(
        phase=reserved.shortfall.phase,
        tried_bytes=figures.tried_bytes,
        total_bytes=figures.total_bytes,
        free_bytes=figures.free_bytes,
        allocated_bytes=figures.allocated_bytes,
        unallocated_bytes=figures.unallocated_bytes,
        message=figures.message,
    )


def _incident(incident: Incident) -> IncidentReport:
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


def _compared_figure(figure: ComparedFigure) -> ComparedFigureReport:
    return ComparedFigureReport(
        line=figure.case.line,
        label=figure.case.label,
        settings=settings_report(figure.case.candidate),
        gpu=figure.case.gpu.name if figure.case.gpu is not None else None,
        quantity=figure.quantity,
        measured_bytes=figure.measured_bytes,
        predicted={
            evidence: Prediction(bytes=size, error=round(figure.error(evidence), DECIMALS))
            for evidence, size in figure.predicted.items()
        },
    )

"""The JSON documents of plans and estimates (their types: planner/report/documents/), and documents as text."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import UNSET, Struct, UnsetType, convert, to_builtins
from msgspec.structs import asdict, replace

from planner.candidate import Candidate
from planner.confidence import kind_of, shown_probability, worst_miss
from planner.errors import InputError, PlanError
from planner.gpus.cluster import Cluster
from planner.jobs.job import Job
from planner.jobs.settings import settings_of, settings_of_fields
from planner.launch.consumers import launch, settings_by_consumer
from planner.planning import Plan, Proof
from planner.quantities import DEFAULT_RISK, Estimate, Note, PhaseMemory, Reason, Throughput
from planner.report.documents.commands import ErrorDetails, ErrorDocument, ExportReport
from planner.report.documents.fields import SCHEMA, NoteReport, PinnedSettings, Settings
from planner.report.documents.plans import (
    AlternativeReport,
    BestCandidate,
    EstimateReport,
    Gpus,
    Host,
    JobReport,
    LaunchedCandidate,
    LaunchReport,
    LeverReport,
    PhaseDifferenceReport,
    PhaseReport,
    PlanReport,
    ProofReport,
    RemedyReport,
    SettingsByLibrary,
)
from planner.report.resources import resources_report, site_of
from planner.report.sentences import as_note, in_one_line, proof_lines, sentence, sentences
from planner.report.spelling import Door, spelled
from planner.report.words import describe_cluster, describe_fit, published_like, tokens_per_second

# Fields whose texts are no sentences: files and commands of a launch, settings, and the data of a sentence.
VERBATIM = frozenset({"launch", "settings", "files", "values"})
# Decimals of seconds, tokens per second and errors: more than is known of any of them.
DECIMALS = 6


def json_text(report: Struct, indent: int | None = 2, door: Door | None = None) -> str:
    """Return a document as text, indented; keys in the order of its type. None: on one line, and the command's words.

    Python's `json` writes the text: msgspec formats floats otherwise, such as 312e12.
    """
    document = to_builtins(report) if door is None else in_words(to_builtins(report), door)
    return json.dumps(document, indent=indent, ensure_ascii=False, allow_nan=False)


def in_words(value: Any, door: Door) -> Any:
    """Return a document, or a part of one, whose sentences have a door's words."""
    if isinstance(value, str):
        return spelled(value, door) if "--" in value else value
    if isinstance(value, dict):
        return {key: each if key in VERBATIM else in_words(each, door) for key, each in value.items()}
    return [in_words(each, door) for each in value] if isinstance(value, list | tuple) else value


def plan_report(plan: Plan, config: str | None = None) -> PlanReport:
    """Return the document of `plan --json`. `config`: the text of the user's own train.yaml, which its files keep."""
    return PlanReport(
        schema=SCHEMA,
        summary=summary(plan.best, plan.cluster),
        job=_job(plan.job),
        cluster=plan.cluster,
        verdict=plan.verdict,
        best=LaunchedCandidate(**_launched(plan.best, plan.cluster, config, plan.job.risk)),
        alternatives=tuple(
            AlternativeReport(
                label=sentence(other.change),
                label_data=note_report(other.change),
                note=in_one_line(other.takes),
                note_data=note_reports(other.takes),
                **asdict(best_candidate(other.estimate)),
            )
            for other in plan.alternatives
        ),
        remedies=tuple(
            RemedyReport(
                change=sentence(remedy.change),
                change_data=note_report(remedy.change),
                note=in_one_line(remedy.takes),
                note_data=note_reports(remedy.takes),
                saves_bytes=remedy.saved_bytes(plan.best),
                **asdict(best_candidate(remedy.estimate)),
            )
            for remedy in plan.remedies
        ),
        levers=tuple(
            LeverReport(
                change=sentence(lever.change),
                change_data=note_report(lever.change),
                factor=round(lever.factor(plan.best), DECIMALS),
                price=sentence(lever.takes[0]),
                price_data=note_report(lever.takes[0]),
                **asdict(best_candidate(lever.estimate)),
            )
            for lever in plan.levers
        ),
        more=sentences(plan.more),
        more_data=note_reports(plan.more),
        warnings=sentences(plan.warnings),
        warnings_data=note_reports(plan.warnings),
        versions=plan.versions,
        proof=UNSET if plan.proof is None else _proof(plan.proof),
    )


def estimate_report(
    estimate: Estimate,
    warnings: Sequence[Note] = (),
    cluster: Cluster | UnsetType = UNSET,
    config: str | None = None,
) -> EstimateReport:
    """Return the document of `plan estimate --json`: the keys of `best` in a plan, `schema`, cluster and warnings.

    `config`: the text of the user's own train.yaml, which its files keep.
    """
    return EstimateReport(
        schema=SCHEMA,
        cluster=cluster,
        warnings=sentences(warnings),
        warnings_data=note_reports(warnings),
        summary="" if isinstance(cluster, UnsetType) else summary(estimate, cluster),
        **_launched(estimate, cluster, config),
    )


def export_report(candidate: Candidate, files: Iterable[str]) -> ExportReport:
    """Return the document of an export: the settings, and the files that were written."""
    return ExportReport(schema=SCHEMA, settings=settings_report(candidate), files=tuple(files))


def error_document(error: PlanError) -> ErrorDocument:
    """Return the document of a command with `--json` that has no answer."""
    return ErrorDocument(error=ErrorDetails(code=error.code, message=str(error), nearest=error.nearest))


def best_candidate(estimate: Estimate) -> BestCandidate:
    """Return an estimate as the object `best` of a plan."""
    like = published_like(estimate)
    return BestCandidate(
        settings=settings_report(estimate.candidate),
        fits=estimate.fits,
        tight=estimate.tight,
        fit_probability=shown_probability(estimate.fit_probability),
        comparable_runs=like.runs,
        comparable_ran=like.ran,
        worst_miss=round(worst_miss(kind_of(estimate.candidate)), DECIMALS),
        evidence=estimate.evidence,
        gpus=convert(estimate.gpus, tuple[Gpus, ...], from_attributes=True),
        host=Host(peak_bytes=estimate.host_peak_bytes, capacity_bytes=estimate.host_capacity_bytes),
        throughput=_rounded(estimate.throughput),
        reasons=sentences(estimate.reasons),
        reasons_data=note_reports(estimate.reasons),
        device=UNSET if estimate.device == "none" else estimate.device,
    )


def summary(estimate: Estimate, cluster: Cluster) -> str:
    """Return the answer in one line.

    Example: `Qwen2.5-7B, grpo on 2 x A100-40G (39.5 GiB each): fits, 4.0 GiB (10 %) to spare: ...`
    """
    candidate = estimate.candidate
    job = f"{candidate.model.id}, {candidate.method} on {describe_cluster(cluster)}"
    speed = f" · {tokens_per_second(estimate.throughput.tokens_per_second)}" if estimate.fits else ""
    return f"{job}: {describe_fit(estimate)}{speed}"


def _launched(
    estimate: Estimate, cluster: Cluster | UnsetType, config: str | None, risk: float = DEFAULT_RISK
) -> dict[str, Any]:
    """Return the keys and values of a candidate with what starts it, if it fits."""
    document = asdict(best_candidate(estimate))
    site = None if isinstance(cluster, UnsetType) else site_of(estimate, cluster, risk)
    try:
        if site is not None:
            document["resources"] = resources_report(estimate.candidate, site)
        document["settings_by_library"] = convert(settings_by_consumer(estimate.candidate), SettingsByLibrary)
        if not estimate.fits:
            return document | {"why_no_launch": "It does not fit."}
        started = launch(estimate.candidate, site, config)
    except InputError as error:
        return document | {"why_no_launch": str(error)}
    return document | {"launch": LaunchReport(argv=started.argv, env=started.env, files=started.files)}


def note_reports(remarks: Iterable[Note | Reason]) -> tuple[NoteReport, ...]:
    """Return reasons or notes with their sentences."""
    return tuple(map(note_report, remarks))


def note_report(remark: Note | Reason) -> NoteReport:
    """Return a reason or a note with its sentence; notes among its values have theirs."""
    note = as_note(remark)
    return NoteReport(
        code=note.code, values={name: _note_value(value) for name, value in note.values.items()}, text=sentence(note)
    )


def _note_value(value: object) -> object:
    if isinstance(value, Note):
        return note_report(value)
    return round(value, DECIMALS) if isinstance(value, float) else value


def settings_report(candidate: Candidate) -> Settings:
    """Return a candidate's settings under the names of its libraries."""
    return convert(settings_of(candidate), Settings)


def phase_report(phase: PhaseMemory) -> PhaseReport:
    """Return the memory of one phase, every component included."""
    return convert(phase, PhaseReport, from_attributes=True)


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
            replace(convert(each, PhaseDifferenceReport, from_attributes=True), error=round(each.error, DECIMALS))
            for each in proof.differences
        ),
        report=dict(proof.report),
    )

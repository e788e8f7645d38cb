"""JobRequest -> answer: a plan, an estimate, a dry run, a probe, a proof. The command, HTTP and notebooks ask here."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from planner import training_stack
from planner.errors import InputError, PlanError, ProbeFailed
from planner.estimation import accepted
from planner.estimation import estimate as estimate_candidate
from planner.gpus.cluster import Cluster
from planner.gpus.prices import MILLION
from planner.jobs.base_candidate import single_candidate
from planner.jobs.config_changes import config_changes
from planner.jobs.job import Job
from planner.measurements.corrected_estimate import correct_estimate
from planner.measurements.corrected_plan import contradiction, probe_notes
from planner.measurements.dry_run import DryRun
from planner.measurements.own_results import (
    apply_own_results,
    correct_by_own_probes,
    own_result_notes,
    read_own_results,
)
from planner.planning import Plan
from planner.planning import plan as plan_job
from planner.quantities import Estimate, Note
from planner.report.sentences import sentence
from planner.requests.machines import BY_COST, Machine, Pricing, machines
from planner.requests.options import SearchOptions
from planner.requests.read_options import JobRequest
from planner.search.knobs import problem_of_estimate, tuning_class_of
from planner.search.notes import notes
from planner.training_stack import ProbeSettings, ProvenPlan

if TYPE_CHECKING:
    from planner.diagnose.incident import Incident
    from planner.diagnose.job import Diagnosis
    from planner.report.listing import Compared
    from planner.requests.saved_report import CandidateRequest

Say = Callable[[str], None]  # prints one line of progress


def silent(line: str) -> None:
    """Drop a line of progress."""


# -- plans -------------------------------------------------------------------------------------------------------------


def planned_job(job: Job, cluster: Cluster) -> Plan:
    """Return the plan of a job, corrected by this machine's own probes."""
    return apply_own_results(plan_job(job, cluster), read_own_results())


def planned(request: JobRequest) -> Plan:
    """Return the plan of a request, with the warnings about its options and the changes to its config files."""
    return _with_notes(request, planned_job(request.job, request.cluster))


Check = Callable[[Estimate], tuple[Note, float]]


def open_check(cluster: Cluster, say: Say, report_phase: Say) -> Check:
    """Return a function that checks an estimate by a dry run: one run of its candidate on an emulated GPU.

    It returns a note, and the share by which the run exceeds the estimate's interval or the GPU: 0 if it does not, or
    if the run failed. `report_phase`: called with each phase that the worker enters.

    Raises:
        InputError: an emulated GPU needs another machine, or a package that is missing.
    """
    from planner.report.dry_run import dry_run_note

    run = training_stack.open_dry_run(cluster, report_phase)

    def check(expected: Estimate) -> tuple[Note, float]:
        try:
            found = training_stack.dry_run(expected, cluster.gpu, run, say)
        except ProbeFailed as error:
            return Note("no_dry_run", {"reason": str(error)}), 0.0
        return dry_run_note(found), found.exceeded_by

    return check


def checked_plan(request: JobRequest, say: Say, report_phase: Say) -> Plan:
    """Return the plan of a request with a note about a dry run of its best candidate.

    If the run needs more than the estimate's interval allows, the search runs again with estimates raised by that.

    Raises:
        InputError: an emulated GPU needs another machine, or a package that is missing.
    """
    check = open_check(request.cluster, say, report_phase)
    report_phase("search")
    job, changes = training_stack.runnable_here(request.job, request.cluster, "emulated")
    answer = planned_job(job, request.cluster)
    note, residual = check(answer.best)
    checks = [note]
    if residual:
        say(f"{sentence(note)}; searching again")
        residuals = {tuning_class_of(answer.best.candidate, answer.job): residual}
        answer = apply_own_results(plan_job(answer.job, answer.cluster, residuals), read_own_results())
        checks.append(Note("searched_again", {"residual": residual}))
    return _with_notes(request, replace(answer, warnings=(*checks, *changes, *answer.warnings)))


class StudySettings(Struct, frozen=True, kw_only=True):
    """Settings of a study of probes. `storage`: a database's URL; empty: files in the user's cache."""

    probes: ProbeSettings
    storage: str
    budget_seconds: float


def proven_plan(request: JobRequest, study: StudySettings, say: Say, report_phase: Say) -> ProvenPlan:
    """Return the plan of a job after a study of probes; call `report_phase` with each phase that a worker enters.

    The budget counts from here: a probe that still runs at its end is ended.

    Raises:
        InputError: this machine has not the GPUs, a package is missing, or the storage cannot be used.
    """
    cluster, device = request.cluster, study.probes.device
    began = monotonic()
    probes = replace(study.probes, ends_at=began + study.budget_seconds)
    run = training_stack.open_device(cluster, probes, report_phase)
    report_phase("search")
    job, changes = training_stack.runnable_here(request.job, cluster, device)
    answer = apply_own_results(plan_job(job, cluster), read_own_results(study.storage))
    proof = training_stack.prove(
        replace(answer, warnings=(*changes, *answer.warnings)),
        run,
        device=device,
        storage=study.storage,
        budget_seconds=study.budget_seconds,
        began=began,
        say=say,
        room=training_stack.probe_room(cluster, study.probes),
    )
    return replace(proof, plan=_with_notes(request, proof.plan))


def _with_notes(request: JobRequest, answer: Plan) -> Plan:
    """Return the plan with the warnings about the options and the changes to the config files."""
    return replace(answer, warnings=(*request.warnings, *_changes(request, answer), *answer.warnings))


def _changes(request: JobRequest, answer: Plan) -> tuple[Note, ...]:
    """Return a note for each change that turns the given config files into the plan's settings."""
    if not request.in_files:
        return ()
    return tuple(config_changes(request.in_files, answer.best.candidate)) or (Note("config_unchanged"),)


def answer_of_cluster(
    read: Callable[[], JobRequest], gpus: str, price_per_hour: float | None = None, tokens: int = MILLION
) -> "Compared":
    """Return the plan of a job on one of several clusters, or why there is none.

    `read`: returns the job with that cluster; `price_per_hour`: of all its GPUs; `tokens`: to train on.
    """
    from planner.report.listing import Compared

    try:
        request = read()
        answer = planned_job(request.job, request.cluster)
    except PlanError as error:
        return Compared(gpus=gpus, why_none=str(error), price_per_hour=price_per_hour, tokens=tokens)
    return Compared(gpus=gpus, plan=answer, price_per_hour=price_per_hour, tokens=tokens)


Read = Callable[[SearchOptions], JobRequest]


def compared(options: SearchOptions, pricing: Pricing, read: Read, say: Say = silent) -> "list[Compared]":
    """Return the plan of a job on each cluster; with the goal cost the cheapest first, whatever the tuning.

    `read`: returns the job of options on one cluster; `say`: called with the name of each.

    Raises:
        InputError: a name is no cluster, the goal has no price, or no cluster has a plan, and all for one reason.
    """
    asked, by_cost = machines(options, pricing), options.optimize == BY_COST
    rows = []
    for number, machine in enumerate(asked, 1):
        say(f"{machine.label}, {number} of {len(asked)}")
        row = _on_machine(machine, pricing.tokens, read)
        others = faster_tunings(row) if by_cost else []
        tuned = [replace(machine, options=replace(machine.options, tuning=each)) for each in others]
        rows.append(min((row, *(_on_machine(each, pricing.tokens, read) for each in tuned)), key=cost_of))
    refuse_what_all_refuse(rows)
    return sorted(rows, key=lambda row: (not row.fits, cost_of(row))) if by_cost else rows


def _on_machine(machine: Machine, tokens: int, read: Read) -> "Compared":
    return answer_of_cluster(partial(read, machine.options), machine.label, machine.price_per_hour, tokens)


def refuse_what_all_refuse(rows: "Sequence[Compared]") -> None:
    """Refuse a job that is wrong whatever the cluster, or options that are wrong whatever the job.

    Raises:
        InputError: no row has a plan, and all for one reason.
    """
    refusals = {row.why_none for row in rows}
    if len(refusals) == 1 and all(row.plan is None for row in rows):
        raise InputError(refusals.pop())


def cost_of(row: "Compared") -> float:
    """Return the cost of a row, infinite if it is unknown."""
    return math.inf if row.cost is None else row.cost


def faster_tunings(row: "Compared") -> list[str]:
    """Return the tuning classes that fit and train more tokens a second than the recommended one: they cost less.

    A job that names its tuning has no others.
    """
    if row.plan is None or not row.fits:
        return []
    fastest = row.plan.best.throughput.tokens_per_second
    return [
        str(other.change.values["tuning"])
        for other in row.plan.alternatives
        if other.change.code == "tuning_class"
        and other.estimate.fits
        and other.estimate.throughput.tokens_per_second > fastest
    ]


# -- one candidate -----------------------------------------------------------------------------------------------------


def estimated(request: JobRequest, check: Check | None = None) -> tuple[Estimate, tuple[Note, ...]]:
    """Return the estimate of a job's one candidate, corrected by this machine's own probes, and the notes about it.

    `check`: of `open_check`.
    """
    job, cluster = request.job, request.cluster
    expected = accepted(estimate_candidate(single_candidate(job, cluster), cluster, job.risk))
    checked = (check(expected)[0],) if check is not None else ()
    own = read_own_results()
    answer = accepted(correct_by_own_probes(expected, cluster.gpu, own, job.risk))
    about = notes(answer, problem_of_estimate(job, cluster, answer))
    return answer, (*request.warnings, *checked, *own_result_notes(expected, cluster.gpu, own), *about)


def dry_run_of(request: "CandidateRequest", say: Say, report_phase: Say) -> DryRun:
    """Run a candidate once on an emulated GPU; call `report_phase` with each phase that the worker enters.

    Raises:
        InputError: an emulated GPU needs another machine, or a package that is missing.
        ProbeFailed: the run ended without a result.
    """
    cluster = request.cluster
    expected = accepted(estimate_candidate(request.candidate, cluster, request.risk))
    return training_stack.dry_run(expected, cluster.gpu, training_stack.open_dry_run(cluster, report_phase), say)


class ProbedCandidate(Struct, frozen=True, kw_only=True):
    """A candidate after its probe.

    `estimate`: corrected by the measurement; `fits`: the verdict, which a probe on the CPU leaves as it was expected;
    `notes`: the probe beside what was expected; `contradiction`: None if they agree.
    """

    estimate: Estimate
    fits: bool
    notes: tuple[Note, ...]
    contradiction: Note | None


def probed(request: "CandidateRequest", settings: ProbeSettings, say: Say, report_phase: Say) -> ProbedCandidate:
    """Run one candidate's real trainer for a few steps; call `report_phase` with each phase that the worker enters.

    Raises:
        InputError: this machine has not the GPUs, or a package is missing.
        ProbeFailed: the probe measured no memory.
    """
    candidate, cluster, risk = request.candidate, request.cluster, request.risk
    expected = accepted(estimate_candidate(candidate, cluster, risk))
    run = training_stack.open_device(cluster, settings, report_phase)
    measurement = training_stack.probe(candidate, run, cluster.gpu.name, say)
    answer = accepted(correct_estimate(expected, measurement, risk))
    return ProbedCandidate(
        estimate=answer,
        fits=(expected if measurement.device == "cpu" else answer).fits,
        notes=probe_notes(expected, measurement),
        contradiction=contradiction(expected, measurement),
    )


# -- logs --------------------------------------------------------------------------------------------------------------


def diagnosed(incidents: "tuple[Incident, ...]", read: Callable[[], JobRequest] | None) -> "Diagnosis":
    """Return the incidents of a log and, if it is known which job wrote it, what fits instead.

    `read` returns the job, or raises PlanError: what happened is then said all the same, and why the job is not.
    """
    from planner.diagnose.job import Diagnosis, diagnose_job

    if read is None:
        return Diagnosis(incidents=incidents)
    try:
        request = read()
    except PlanError as error:
        return Diagnosis(incidents=incidents, job_error=str(error), misread=True)
    try:
        return diagnose_job(incidents, request.job, request.cluster)
    except PlanError as error:
        return Diagnosis(incidents=incidents, job_error=str(error))

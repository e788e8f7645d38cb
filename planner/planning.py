"""The plan for a job on a cluster: the best candidate, its alternatives, remedies, reasons and warnings."""

from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from planner.estimation import accepted
from planner.gpus.cluster import Cluster
from planner.jobs.job import Job
from planner.jobs.rules import refuse_contradictions
from planner.quantities import Estimate, Evidence, Note, PhaseDifference, ProbedOn, Verdict
from planner.search.alternatives import alternative_without_pins, alternatives, faster_alternative, larger_sizes
from planner.search.choice import BestByProblem, Choice, choose, measuring_refusal, on_fewer_gpus, on_the_whole_host
from planner.search.explain import limits, reasons
from planner.search.fit import impractical
from planner.search.knobs import TuningClass
from planner.search.notes import notes
from planner.search.remedies import remedies
from planner.search.row_lengths import costs_of_lengths
from planner.search.shared_rows import shared_rows_notes
from planner.search.variations import Variation, levers
from planner.settings.vllm_releases import NEWEST_TAKEN


class Proof(Struct, frozen=True, kw_only=True):
    """The evidence of the probes for a plan. `lines`: as text; `report`: the study's certificate as a JSON object."""

    evidence: Evidence  # that of the probes' device, such as "measured"
    device: ProbedOn  # of the best candidate's probe
    lines: tuple[str, ...]
    report: Mapping[str, object]
    expected: Evidence  # of the estimate that the probe is compared with (`PhaseDifference.expected_bytes`)
    differences: tuple[PhaseDifference, ...]  # of the best candidate, by phase; empty if it was not probed


class Plan(Struct, frozen=True, kw_only=True):
    """The answer to a job.

    `more`: what limits the batch and the length; `versions`: the library versions that are modelled.
    """

    job: Job
    cluster: Cluster
    best: Estimate
    alternatives: tuple[Variation, ...]  # other tuning classes, larger sizes, the job without its pins
    remedies: tuple[Variation, ...]  # with which the job fits
    more: tuple[Note, ...]
    warnings: tuple[Note, ...]
    versions: dict[str, str]
    levers: tuple[Variation, ...] = ()  # what would be faster, at a price
    proof: Proof | None = None  # None: no probe ran

    @property
    def verdict(self) -> Verdict:
        """Return that of the best candidate."""
        return self.best.verdict


# The library versions whose defaults and code paths are modelled; planner/memory cites their files and lines.
VERSIONS = {
    "transformers": "5.23",
    "peft": "0.21.2",
    "accelerate": "1.15",
    "deepspeed": "0.19.8",
    "bitsandbytes": "0.50.2",
    "vllm": NEWEST_TAKEN,
    "torch": "2.13",
}


def plan(job: Job, cluster: Cluster, residuals: Mapping[TuningClass, float] | None = None) -> Plan:
    """Search every tuning class that the job allows and return the plan.

    It uses all GPUs, unless fewer of them are faster or alone fit (see `on_fewer_gpus`). `residuals`: for a tuning
    class, the share by which a dry run exceeded its estimate; its estimates are raised by it.

    Raises:
        InputError: the job contradicts itself or the cluster.
        NothingFits: there is no candidate, such as for an effective batch that no number of processes divides.
    """
    refuse_contradictions(job, cluster)
    choice, reasons_for_fewer = on_fewer_gpus(choose(job, cluster, residuals or {}), residuals or {})
    choice, tight_host = on_the_whole_host(choice, residuals or {})
    answer = described(choice, job)
    return replace(answer, warnings=(*tight_host, *reasons_for_fewer, *answer.warnings))


def described(choice: Choice, job: Job) -> Plan:
    """Return the plan of a choice: with alternatives, remedies, limits, reasons and warnings.

    `job`: as the user gave it; the problem that was chosen may pin more, such as GPUs that share rows.
    """
    found, problem, cluster = choice.found, choice.problem, choice.problem.cluster
    best = accepted(replace(choice.best, reasons=reasons(choice.best, problem)))
    others = alternatives(found, problem) + larger_sizes(best, problem) + alternative_without_pins(best, problem)
    full = [(each, answer) for each, answer in found.items() if each.tuning_class == "full" and answer is not None]
    return Plan(
        job=job,
        cluster=cluster,
        best=best,
        alternatives=others,
        remedies=() if best.fits else remedies(job, cluster, problem, best),
        more=(*limits(best, problem), *costs_of_lengths(best, problem)) if best.fits else (),
        levers=levers(best, problem, next(iter(full), None)),
        warnings=(
            *safer_candidate(best, found),
            *faster_alternative(best, others),
            *shared_rows_notes(best, job),
            *notes(best, problem),
            *unplanned_classes(found),
        ),
        versions={"trl": best.candidate.trl_version, **VERSIONS, **dict(best.versions)},
    )


def safer_candidate(best: Estimate, found: BestByProblem) -> tuple[Note, ...]:
    """Note that a tight candidate is recommended because the one that fits is impractical, and why."""
    fitting = (answer for answer in found.values() if best.tight and answer is not None and answer.fits)
    reason = next((reasons[0] for answer in fitting if (reasons := impractical(answer))), None)
    return () if reason is None else (Note("safer_is_impractical", {"because": reason}),)


def unplanned_classes(found: BestByProblem) -> tuple[Note, ...]:
    """Return one warning for each tuning class that is not planned because its layers could not be measured."""
    missing = {problem: measuring_refusal(problem) for problem, answer in found.items() if answer is None}
    return tuple(
        Note("class_not_planned", {"tuning": problem.tuning_class, "reason": reason})
        for problem, reason in missing.items()
        if reason
    )

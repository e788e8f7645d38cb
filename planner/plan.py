"""The answer to a job: the best candidate, its runners-up, the reasons."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from planner.errors import NothingFits, NotMeasured
from planner.estimate import estimate
from planner.gpus.cluster import Cluster
from planner.jobs.job import DEQUANTIZED, Job
from planner.jobs.rules import refuse_contradictions
from planner.jobs.settings import settings_of_fields, settings_text
from planner.memory.engine.budget import EngineRefusal, engine_or_refusal
from planner.memory.engine.settings import engine_settings
from planner.methods import METHODS
from planner.quantities import Estimate, Evidence, PhaseDifference
from planner.search.explain import limits, notes, reasons
from planner.search.knobs import CLASSES, SearchProblem, TuningClass, structures
from planner.search.remedies import Remedy, remedies
from planner.search.search import search
from planner.units import format_gib


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """A runner-up: the best of another tuning class, or of another way to run."""

    label: str
    estimate: Estimate
    note: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """Why a plan is believed. `lines` are for people, `report` is the study's own JSON object; `expected` names the rung of `expected_bytes`."""

    evidence: Evidence  # "simulated" where the probes were
    device: Literal[
        "none", "cuda", "cpu", "simulated"
    ]  # what the best candidate's probe ran on; "none": it was not probed
    lines: tuple[str, ...]
    report: Mapping[str, object]
    expected: Evidence
    differences: tuple[PhaseDifference, ...]  # of the best candidate; none where it was not probed


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What `plan` answers. `more`: what limits more, one line each; `versions`: of the libraries the estimate stands for; `proof`: what probes said."""

    job: Job
    cluster: Cluster
    verdict: Literal["fits", "does_not_fit"]
    best: Estimate
    alternatives: tuple[Alternative, ...]
    remedies: tuple[Remedy, ...]
    more: tuple[str, ...]
    warnings: tuple[str, ...]
    versions: dict[str, str]
    proof: Proof | None = None  # None: nothing was probed


CLASS_LABELS: dict[TuningClass, str] = {"full": "full fine-tuning", "lora": "LoRA", "qlora": "QLoRA"}
# The stack whose defaults and code paths are counted (internals of planner/memory name its files and lines).
VERSIONS = {
    "transformers": "5.23",
    "peft": "0.21.2",
    "accelerate": "1.15",
    "deepspeed": "0.19.8",
    "bitsandbytes": "0.50.2",
    "vllm": "0.31",
    "torch": "2.13",
}


def plan(job: Job, cluster: Cluster, residuals: Mapping[TuningClass, float] | None = None) -> Plan:
    """Search every tuning class that the job allows and recommend the first that fits without offloading.

    `residuals`: for a tuning class, the share by which a dry run exceeded its estimate; the class is planned with so much more.

    Raises:
        InputError: the job contradicts itself or the cluster.
        NothingFits: no candidate could even be built, such as an effective batch that no number of processes divides.
    """
    refuse_contradictions(job, cluster)
    above = residuals or {}
    problems = [
        SearchProblem(job=job, cluster=cluster, tuning_class=name, residual=above.get(name, 0.0)) for name in classes(job)
    ]
    found = {problem: search(problem) for problem in problems}
    chosen = recommended(found) or least_of_the_host(offloaded(found))
    nearest = min(
        (answer for answer in found.values() if answer is not None), key=lambda answer: answer.over_bytes, default=None
    )
    if chosen is None and nearest is None:
        unmeasured = (reason for problem in problems if (reason := not_measured(problem)))
        raise NothingFits(next(unmeasured, "") or no_candidate(problems[-1]))
    problem, best = chosen or next(
        (each, answer) for each, answer in found.items() if answer is nearest and answer is not None
    )
    best = replace(best, reasons=reasons(best, problem))
    return Plan(
        job=job,
        cluster=cluster,
        verdict="fits" if best.fits else "does_not_fit",
        best=best,
        alternatives=alternatives(found, problem) + unpinned(best, problem),
        remedies=() if best.fits else remedies(job, cluster, problem, best),
        more=limits(best, problem) if best.fits else (),
        warnings=(*notes(best, problem), *refused(found)),
        versions={"trl": best.candidate.trl_version, **VERSIONS, **dict(best.versions)},
    )


Found = dict[SearchProblem, Estimate | None]


def classes(job: Job) -> tuple[TuningClass, ...]:
    """The tuning classes that the job allows, in the order in which they are recommended."""
    published = job.model.quantization
    if job.tuning != "auto":
        return (job.tuning,)
    tuning, quantization = job.pinned.get("tuning"), job.pinned.get("quantization")
    if tuning == "full":
        return ("full",)
    if quantization not in (None, "none"):
        return ("qlora",)
    if published not in ("none", *DEQUANTIZED):
        return ("lora",)
    without_full = CLASSES if tuning is None else CLASSES[1:]
    return tuple(name for name in without_full if name != "qlora" or quantization is None)


def recommended(found: Found) -> tuple[SearchProblem, Estimate] | None:
    return next(((problem, answer) for problem, answer in found.items() if answer is not None and answer.fits), None)


def least_of_the_host(found: Found) -> tuple[SearchProblem, Estimate] | None:
    """Of the candidates that need the host, the one that needs least of it: nobody has said how much there is."""
    fitting = [(problem, answer) for problem, answer in found.items() if answer is not None and answer.fits]
    return min(fitting, key=lambda each: each[1].host_peak_bytes, default=None)


def offloaded(found: Found) -> Found:
    """The same classes with activations, optimizer or parameters on the host."""
    return {
        problem: answer
        for problem in (replace(each, offload=True) for each in found)
        if (answer := search(problem)) is not None
    }


def alternatives(found: Found, chosen: SearchProblem) -> tuple[Alternative, ...]:
    """The other classes beside the one that is recommended; full fine-tuning that does not fit is tried again with the host's help."""
    rest: list[Alternative] = []
    for problem, answer in found.items():
        if answer is None or problem.tuning_class == chosen.tuning_class:
            continue
        rest.append(Alternative(label=CLASS_LABELS[problem.tuning_class], estimate=answer, note=""))
        if not answer.fits and problem.tuning_class == "full" and not chosen.offload:
            helped = search(replace(problem, offload=True))
            if helped is not None and helped.fits:
                rest.append(
                    Alternative(
                        label="full fine-tuning with offloading",
                        estimate=helped,
                        note=f"{format_gib(helped.host_peak_bytes, 0)} of host memory a node",
                    )
                )
    return tuple(rest)


# Pins about the data or the wish itself: a plan without them would answer another problem.
ABOUT_THE_JOB = frozenset(
    {"max_length", "prompt_length", "max_completion_length", "padded", "num_generations", "tuning", "quantization", "lora_r", "lora_target_modules",
     "lora_dropout", "beta", "reward_model", "teacher_model", "optim", "dtype", "packing", "padding_free"}
)  # fmt: skip
WORTH_SHOWING = 1.05  # times the speed


def unpinned(best: Estimate, problem: SearchProblem) -> tuple[Alternative, ...]:
    """What the search finds when the pins about how to run are dropped, where that is better."""
    kept = {name: value for name, value in problem.job.pinned.items() if name in ABOUT_THE_JOB}
    dropped = sorted(problem.job.pinned.keys() - kept.keys())
    if not dropped:
        return ()
    free = search(replace(problem, job=replace(problem.job, pinned=kept)))
    if free is None or not free.fits:
        return ()
    if best.fits and free.throughput.tokens_per_second < WORTH_SHOWING * best.throughput.tokens_per_second:
        return ()
    changed = [name for name in dropped if getattr(free.candidate, name) != getattr(best.candidate, name)]
    if not changed:
        return ()
    found = settings_text(settings_of_fields({name: getattr(free.candidate, name) for name in changed}))
    return (Alternative(label="without those pins", estimate=free, note=f"with {found}"),)


def refused(found: Found) -> tuple[str, ...]:
    """The classes of which no candidate could be measured, where the layers have no formulas."""
    missing = {problem: not_measured(problem) for problem, answer in found.items() if answer is None}
    return tuple(
        f"{CLASS_LABELS[problem.tuning_class]} is not planned: {reason}"
        for problem, reason in missing.items()
        if reason
    )


def not_measured(problem: SearchProblem) -> str:
    """Why the first candidate of a class could not be measured, empty where it could."""
    for candidate in structures(problem):
        try:
            estimate(replace(candidate, vllm="off"), problem.cluster)
        except NotMeasured as error:
            return str(error)
        return ""
    return ""


def no_candidate(problem: SearchProblem) -> str:
    """Why not a single candidate could be built or started."""
    job, cluster = problem.job, problem.cluster
    for candidate in structures(problem):
        answer = (
            engine_or_refusal(candidate.model, cluster.gpu, engine_settings(candidate, cluster.gpu))
            if candidate.vllm != "off"
            else None
        )
        if isinstance(answer, EngineRefusal):
            return answer.reason
    if job.effective_batch_size is not None:
        return (
            f"No candidate keeps an effective batch of {job.effective_batch_size} on {cluster.num_gpus} GPUs"
            + (
                f" with groups of {job.pinned.get('num_generations', 8)} completions"
                if METHODS[job.method].grouped_completions
                else ""
            )
            + ". Give an --effective-batch-size that both divide."
        )
    return f"No candidate of {job.method} with these pins can start on {cluster.num_gpus} x {cluster.gpu.name}. Drop a --set."

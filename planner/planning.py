"""The plan for a job on a cluster: the best candidate, its alternatives, remedies, reasons and warnings."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from planner.errors import InputError, NothingFits, NotMeasured
from planner.estimation import accepted, estimate
from planner.gpus.cluster import Cluster
from planner.jobs.base_candidate import base_candidate
from planner.jobs.job import LARGEST_RISK, Job
from planner.jobs.rules import refuse_contradictions
from planner.jobs.settings import settings_of_fields
from planner.memory.engine.budget import EngineRefusal, engine_or_refusal
from planner.memory.engine.settings import engine_settings
from planner.methods import METHODS
from planner.quantities import Estimate, Evidence, Note, PhaseDifference, ProbedOn
from planner.search.explain import limits, notes, reasons
from planner.search.fit import estimate_or_none
from planner.search.knobs import (
    SearchProblem,
    TuningClass,
    problem_of_estimate,
    shared_stop,
    structures,
    tuning_classes,
)
from planner.search.levers import Lever, levers
from planner.search.practical import impractical
from planner.search.remedies import Remedy, offloading_notes, remedies
from planner.search.row_lengths import costs_of_lengths
from planner.search.search import NEAR_BEST, merit, search
from planner.search.shared_rows import longest_shared_rows, search_with_shared_rows, shared_rows_notes
from planner.search.sizes import length_field
from planner.settings.table import with_role


class Alternative(Struct, frozen=True, kw_only=True):
    """The best candidate of another tuning class, with offloading, or without the pinned settings.

    `label`: which of them it is; `notes`: what it takes.
    """

    label: Note
    estimate: Estimate
    notes: tuple[Note, ...]


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
    verdict: Literal["fits", "does_not_fit"]
    best: Estimate
    alternatives: tuple[Alternative, ...]
    remedies: tuple[Remedy, ...]
    more: tuple[Note, ...]
    warnings: tuple[Note, ...]
    versions: dict[str, str]
    levers: tuple[Lever, ...] = ()  # what would be faster, at a price
    proof: Proof | None = None  # None: no probe ran


# The library versions whose defaults and code paths are modelled; planner/memory cites their files and lines.
VERSIONS = {
    "transformers": "5.23",
    "peft": "0.21.2",
    "accelerate": "1.15",
    "deepspeed": "0.19.8",
    "bitsandbytes": "0.50.2",
    "vllm": "0.31",
    "torch": "2.13",
}


class Choice(Struct, frozen=True, kw_only=True):
    """The recommended candidate on a cluster, and the best one of each tuning class."""

    found: "BestByProblem"
    problem: SearchProblem
    best: Estimate

    @property
    def fits(self) -> bool:
        """Return whether the candidate fits, or is tight, where nothing safer was found."""
        return accepted(self.best).fits


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
    answer = described(choice)
    return replace(answer, warnings=(*tight_host, *reasons_for_fewer, *answer.warnings))


def on_the_whole_host(choice: Choice, residuals: Mapping[TuningClass, float]) -> tuple[Choice, tuple[Note, ...]]:
    """Return a choice that uses all of a main memory that is assumed, if nothing fits with a tenth of it left."""
    problem, host = choice.problem, choice.problem.cluster.host
    if choice.fits or choice.best.host_over_bytes <= 0 or host.origin != "assumed":
        return choice, ()
    whole = choose(problem.job, replace(problem.cluster, host=replace(host, whole=True)), residuals)
    if not whole.fits:
        return choice, ()
    used = {"share": whole.best.host_peak_bytes / host.total_bytes, "host_bytes": host.total_bytes}
    return whole, (Note("host_memory_tight", used),)


def on_fewer_gpus(choice: Choice, residuals: Mapping[TuningClass, float]) -> tuple[Choice, tuple[Note, ...]]:
    """Return the choice on one node if a slow network makes several slower, or on one GPU if the job fits only there.

    The first process of several costs memory: NCCL's buffers, the reducer's buckets and, on the host, one more copy of
    what is offloaded. Pinned processes or nodes stay.
    """
    job, cluster, best = choice.problem.job, choice.problem.cluster, choice.best
    if job.pinned.keys() & {"num_processes", "num_nodes"} or job.optimize != "throughput":
        return choice, ()
    if cluster.nodes > 1:
        smaller, used = replace(cluster, nodes=1), {"count": cluster.nodes, "unit": "nodes"}
    elif cluster.num_gpus > 1 and not choice.fits:
        smaller, used = replace(cluster, gpus_per_node=1), {"count": cluster.num_gpus, "unit": "GPUs"}
    else:
        return choice, ()
    if not allowed_on(job, smaller):
        return choice, ()
    floor = best.throughput.tokens_per_second / NEAR_BEST if choice.fits else 0.0
    problem = problem_of_estimate(job, smaller, best)
    tiers = (search(replace(problem, offload=offload, faster_than=floor)) for offload in (False, True))
    if not any(each and each.fits and each.throughput.tokens_per_second >= floor for each in tiers):
        return choice, ()
    return choose(job, smaller, residuals), (Note("fewer_gpus_faster" if choice.fits else "fewer_gpus_fit", used),)


def allowed_on(job: Job, cluster: Cluster) -> bool:
    """Return whether what a job pins can be had on a cluster, such as a vLLM server beside a trainer."""
    try:
        refuse_contradictions(job, cluster)
        base_candidate(job, cluster)
    except InputError:
        return False
    return True


def choose(job: Job, cluster: Cluster, above: Mapping[TuningClass, float]) -> Choice:
    """Search every tuning class on every GPU of the cluster and choose one; parameters and errors as in `plan`."""
    problems = [
        SearchProblem(job=job, cluster=cluster, tuning_class=name, residual=above.get(name, 0.0))
        for name in tuning_classes(job)
    ]
    found = {problem: search(problem) for problem in problems}
    recommended = recommend(found)
    if recommended is None:
        if stop := shared_stop(
            [replace(problem, offload=offload) for problem in problems for offload in (False, True)]
        ):
            raise InputError(stop)
        unmeasured = (reason for problem in problems if (reason := measuring_refusal(problem)))
        raise NothingFits(next(unmeasured, "") or no_candidate_reason(problems[-1]))
    return Choice(found=found, problem=recommended[0], best=recommended[1])


def described(choice: Choice) -> Plan:
    """Return the plan of a choice: with alternatives, remedies, limits, reasons and warnings."""
    found, problem = choice.found, choice.problem
    job, cluster = problem.job, problem.cluster
    best = accepted(replace(choice.best, reasons=reasons(choice.best, problem)))
    others = alternatives(found, problem) + larger_sizes(best, problem) + alternative_without_pins(best, problem)
    return Plan(
        job=job,
        cluster=cluster,
        verdict="fits" if best.fits else "does_not_fit",
        best=best,
        alternatives=others,
        remedies=() if best.fits else remedies(job, cluster, problem, best),
        more=(*limits(best, problem), *costs_of_lengths(best, problem)) if best.fits else (),
        levers=levers(best, problem, full_without_offloading(found)),
        warnings=(
            *safer_candidate(best, found),
            *faster_alternative(best, others),
            *shared_rows_notes(best, job),
            *notes(best, problem),
            *unplanned_classes(found),
        ),
        versions={"trl": best.candidate.trl_version, **VERSIONS, **dict(best.versions)},
    )


def safer_candidate(best: Estimate, found: "BestByProblem") -> tuple[Note, ...]:
    """Note that a tight candidate is recommended because the one that fits is impractical, and why."""
    fitting = (answer for answer in found.values() if best.tight and answer is not None and answer.fits)
    reason = next((reasons[0] for answer in fitting if (reasons := impractical(answer))), None)
    return () if reason is None else (Note("safer_is_impractical", {"because": reason}),)


def full_without_offloading(found: "BestByProblem") -> tuple[SearchProblem, Estimate] | None:
    """Return full fine-tuning as it was found without offloading; None if the job allows no other or no such class."""
    return next(
        ((each, answer) for each, answer in found.items() if each.tuning_class == "full" and answer is not None), None
    )


# The best estimate of each search problem, in the order of recommendation; None: no candidate could start.
BestByProblem = dict[SearchProblem, Estimate | None]


def recommend(found: BestByProblem) -> tuple[SearchProblem, Estimate] | None:
    """Return the recommended candidate with its problem; None if there is no candidate.

    It is the tuning class to prefer among those that fit without offloading (offloaded if the job allows no other class
    and that is 1.5 times as fast, such as by room for an engine), else the faster of the candidate that fits with the
    least host memory and of one whose rows several GPUs share, else the one of the least `distance` from fitting:
    offloaded ones too, where the GPUs hold what is left on them, or hold it tightly.

    A candidate that fits and is no way to train gives way to all that are, the tight ones of `nearest_way_to_train`
    last.
    """
    fitting = preferred_class(found)
    if fitting is not None and len(found) == 1:
        fitting = faster_with_offloading(*fitting) or fitting
    if fitting is not None and is_way_to_train(fitting):
        return fitting
    offloaded = search_with_offloading(found)
    least = least_host_memory(with_ways_to_train(offloaded)) or least_host_memory(offloaded)
    ways = [way for way in (search_with_shared_rows(found), least) if way is not None]
    practical = [way for way in ways if is_way_to_train(way)]
    if practical:
        return fastest(practical)
    if fitting is not None or ways:
        return nearest_way_to_train(found) or fitting or fastest(ways)
    answers = [(problem, answer) for problem, answer in found.items() if answer is not None]
    answers += [
        (problem, answer)
        for problem, answer in offloaded.items()
        if answer and (answer.over_bytes <= 0 or answer.tight)
    ]
    return min(answers, key=lambda each: each[1].distance, default=None)


def fastest(ways: Sequence[tuple[SearchProblem, Estimate]]) -> tuple[SearchProblem, Estimate]:
    """Return the candidate of the most tokens per second."""
    return max(ways, key=lambda way: way[1].throughput.tokens_per_second)


def is_way_to_train(way: tuple[SearchProblem, Estimate]) -> bool:
    """Return whether a candidate is practical (see `impractical`), or the job does not ask for speed."""
    problem, answer = way
    return problem.job.optimize != "throughput" or not impractical(answer)


def with_ways_to_train(found: BestByProblem) -> BestByProblem:
    """Replace each class's best candidate, if it is impractical, by its best practical one; None if it has none."""
    return {
        problem: answer
        if answer is None or is_way_to_train((problem, answer))
        else search(replace(problem, practical=True))
        for problem, answer in found.items()
    }


# Accepted risks of running out of memory for what may not fit, in order; the last is a candidate that rather runs than
# not (planner/confidence.py, `EDGE_RISK`).
TIGHT_RISKS = (0.1, 0.2, 0.3, 0.4, LARGEST_RISK)


def nearest_way_to_train(found: BestByProblem) -> tuple[SearchProblem, Estimate] | None:
    """Return the practical tight candidate without offloading at the lowest of `TIGHT_RISKS`; None if there is none.

    Among several at that risk it is the fastest one of the first tuning class. A class whose nearest candidate is not
    tight has none that is (`Estimate.distance`).
    """
    near = [problem for problem, answer in found.items() if answer is not None and (answer.fits or answer.tight)]
    for risk in TIGHT_RISKS:
        for problem in near:
            bold = replace(problem, practical=True, job=replace(problem.job, risk=max(risk, problem.job.risk)))
            answer = search(bold)
            accurate = estimate_or_none(answer.candidate, problem) if answer is not None and answer.fits else None
            if accurate is not None and accurate.tight:
                return problem, accurate
    return None


def preferred_class(found: BestByProblem) -> tuple[SearchProblem, Estimate] | None:
    """Return the first tuning class whose best candidate fits and is a way to train, on GPUs of its own or shared rows.

    Full fine-tuning learns most and QLoRA computes with rounded weights: hence the order. Full fine-tuning that is much
    faster with offloading has no room on the GPUs, and gives way to a class that has; so does a LoRA to a much faster
    QLoRA.
    """
    fitting = []
    for problem, answer in found.items():
        way = (problem, answer) if answer is not None and answer.fits else with_shared_rows(problem, answer)
        if way is not None:
            fitting.append(way)
    if not fitting or fitting[0][0].job.optimize != "throughput":
        return fitting[0] if fitting else None
    practical = [way for way in fitting if not impractical(way[1])]
    fitting = practical or fitting
    first = fitting[0]
    if first[0].tuning_class == "full" and len(fitting) > 1 and faster_with_offloading(*first):
        fitting = fitting[1:]
        first = fitting[0]
    if first[0].tuning_class != "lora":
        return first
    worth = MUCH_FASTER * first[1].throughput.tokens_per_second
    return next((each for each in fitting[1:] if each[1].throughput.tokens_per_second >= worth), first)


def with_shared_rows(problem: SearchProblem, nearest: Estimate | None) -> tuple[SearchProblem, Estimate] | None:
    """Return the best candidate whose rows several GPUs share, for a class that does not fit else; None if none fits.

    It is searched only if rows of one GPU's share would fit: sharing divides activations, and leaves the states.
    """
    candidate, gpus = nearest.candidate if nearest else None, problem.cluster.gpus_per_node
    if candidate is None or not candidate.method_row.shares_rows or gpus == 1 or problem.job.optimize != "throughput":
        return None
    piece = replace(candidate, max_length=-(-candidate.max_length // gpus))
    alone = estimate_or_none(piece, problem)
    return search_with_shared_rows([problem]) if alone is not None and alone.fits else None


def faster_with_offloading(problem: SearchProblem, answer: Estimate) -> tuple[SearchProblem, Estimate] | None:
    """Return the best candidate with offloading if it fits and is 1.5 times as fast, else None.

    Offloading takes main memory and needs DeepSpeed: it is not worth a few percent.
    """
    if problem.job.optimize != "throughput":
        return None
    floor = MUCH_FASTER * answer.throughput.tokens_per_second
    offloading = replace(problem, offload=True, faster_than=floor)
    found = search(offloading)
    return (offloading, found) if found and found.fits and found.throughput.tokens_per_second >= floor else None


def least_host_memory(found: BestByProblem) -> tuple[SearchProblem, Estimate] | None:
    """Return the candidate that fits with the least host memory."""
    fitting = [(problem, answer) for problem, answer in found.items() if answer is not None and answer.fits]
    return min(fitting, key=lambda each: each[1].host_peak_bytes, default=None)


def search_with_offloading(found: BestByProblem) -> BestByProblem:
    """Search the same tuning classes with optimizer or parameters offloaded to the host."""
    return {
        problem: answer
        for problem in (replace(each, offload=True) for each in found)
        if (answer := search(problem)) is not None
    }


def alternatives(found: BestByProblem, chosen: SearchProblem) -> tuple[Alternative, ...]:
    """Return the best candidates of the tuning classes that were not chosen.

    One that does not fit is followed by the same class with offloading, if that fits.
    """
    rest: list[Alternative] = []
    for problem, answer in found.items():
        if answer is None or problem.tuning_class == chosen.tuning_class:
            continue
        tuning = {"tuning": problem.tuning_class}
        longest = (length_note(answer),) if problem.job.optimize == "max-length" and answer.fits else ()
        rest.append(Alternative(label=Note("tuning_class", tuning), estimate=answer, notes=longest))
        if answer.fits or chosen.offload:
            continue
        offloaded = search(replace(problem, offload=True))
        if offloaded is not None and offloaded.fits:
            takes = offloading_notes(offloaded)
            label = Note("tuning_class_offloading" if takes else "tuning_class_sharded", tuning)
            rest.append(Alternative(label=label, estimate=offloaded, notes=takes))
    return tuple(rest)


def larger_sizes(best: Estimate, problem: SearchProblem) -> tuple[Alternative, ...]:
    """Return what has longer rows or a larger batch than the recommended candidate, where the job asks for that.

    They are of the recommended tuning class: with offloading, with rows that several GPUs share, on one GPU, whose
    process needs no buffers of NCCL, or with 16-bit weights; the last two also with offloading, where that has more
    than every other way that offloads.
    """
    job = problem.job
    if job.optimize == "throughput" or not best.fits or best.candidate.row_gpus > 1:
        return ()
    found: list[Alternative] = []
    for label, answer in ways_to_more(problem):
        if answer is None or not answer.fits or merit(answer, job)[0] <= merit(best, job)[0]:
            continue
        takes = notes_of_larger(answer, job)
        offloaded = [each for each in found if offloading_notes(each.estimate)] if offloading_notes(answer) else []
        if all(merit(answer, job)[0] > merit(each.estimate, job)[0] for each in offloaded):
            found.append(Alternative(label=label, estimate=answer, notes=takes))
    return tuple(found)


def ways_to_more(problem: SearchProblem) -> Iterator[tuple[Note, Estimate | None]]:
    """Yield the best candidate of each other way to have longer rows or a larger batch (see `larger_sizes`)."""
    job = problem.job
    tiers = (problem,) if problem.offload else (problem, replace(problem, offload=True))
    if len(tiers) > 1:
        yield Note("with_offloading"), search(tiers[1])
    if job.optimize == "max-length" and not problem.offload:
        yield Note("with_shared_rows"), longest_shared_rows(problem)
    if problem.cluster.num_gpus > 1 and allowed_on(job, alone := replace(problem.cluster, nodes=1, gpus_per_node=1)):
        for tier in tiers:
            yield Note("on_one_gpu"), search(replace(tier, cluster=alone))
    if problem.tuning_class == "full" and "dtype" not in job.pinned and problem.cluster.gpu.supports_bf16:
        half = replace(job, pinned={**job.pinned, "dtype": "bfloat16"})
        for tier in tiers:
            yield Note("with_16_bit_weights"), search(replace(tier, job=half))


def notes_of_larger(answer: Estimate, job: Job) -> tuple[Note, ...]:
    """Return the length or the batch of an alternative that has more of it, and what it takes."""
    candidate = answer.candidate
    shares = (Note("gpus_share_rows", {"gpus": candidate.row_gpus}),) if candidate.row_gpus > 1 else ()
    batch = Note("micro_batch", {"per_device_train_batch_size": candidate.per_device_train_batch_size})
    size = length_note(answer) if job.optimize == "max-length" else batch
    return (size, *(offloading_notes(answer) or shares))


def length_note(answer: Estimate) -> Note:
    """Return the setting for the length of a candidate's rows and its value."""
    field = length_field(answer.candidate)
    return Note("row_length", {"setting": field, "length": getattr(answer.candidate, field)})


def faster_alternative(best: Estimate, others: tuple[Alternative, ...]) -> tuple[Note, ...]:
    """Note the fastest alternative if it fits and is 1.3 times as fast as the recommendation."""
    fitting = [each for each in others if each.estimate.fits]
    if not best.fits or not fitting:
        return ()
    fastest = max(fitting, key=lambda each: each.estimate.throughput.tokens_per_second)
    factor = fastest.estimate.throughput.tokens_per_second / best.throughput.tokens_per_second
    note = Note("alternative_faster", {"alternative": fastest.label, "factor": factor})
    return (note,) if factor >= NOTABLY_FASTER else ()


NOTABLY_FASTER = 1.3  # an alternative that the plan points at
MUCH_FASTER = 1.5  # QLoRA over LoRA, or offloading over none, to be recommended instead
MIN_SPEEDUP = 1.05  # of an alternative without pinned settings, to be shown


def alternative_without_pins(best: Estimate, problem: SearchProblem) -> tuple[Alternative, ...]:
    """Return the best candidate without the pinned settings about how to run, if it is 5 % faster or alone fits."""
    job_settings = with_role("data", "learning")  # without them the answer would be about another training
    kept = {name: value for name, value in problem.job.pinned.items() if name in job_settings}
    dropped = sorted(problem.job.pinned.keys() - kept.keys())
    if not dropped:
        return ()
    free = search(replace(problem, job=replace(problem.job, pinned=kept)))
    if free is None or not free.fits:
        return ()
    if best.fits and free.throughput.tokens_per_second < MIN_SPEEDUP * best.throughput.tokens_per_second:
        return ()
    changed = [name for name in dropped if getattr(free.candidate, name) != getattr(best.candidate, name)]
    if not changed:
        return ()
    settings = settings_of_fields({name: getattr(free.candidate, name) for name in changed})
    instead = Note("pins_instead", {"settings": settings})
    return (Alternative(label=Note("without_pins"), estimate=free, notes=(instead,)),)


def unplanned_classes(found: BestByProblem) -> tuple[Note, ...]:
    """Return one warning for each tuning class that is not planned because its layers could not be measured."""
    missing = {problem: measuring_refusal(problem) for problem, answer in found.items() if answer is None}
    return tuple(
        Note("class_not_planned", {"tuning": problem.tuning_class, "reason": reason})
        for problem, reason in missing.items()
        if reason
    )


def measuring_refusal(problem: SearchProblem) -> str:
    """Return why the layers of a class's candidates cannot be measured; empty if they can or have formulas."""
    for candidate in structures(problem):
        try:
            estimate(replace(candidate, vllm="off"), problem.cluster)
        except NotMeasured as error:
            return str(error)
    return ""


def no_candidate_reason(problem: SearchProblem) -> str:
    """Return the error message for a search without any candidate: the engine's refusal, or what to change."""
    job, cluster = problem.job, problem.cluster
    for candidate in structures(problem):
        if candidate.vllm == "off":
            continue
        answer = engine_or_refusal(candidate.model, cluster.gpu, engine_settings(candidate, cluster.gpu))
        if isinstance(answer, EngineRefusal):
            return answer.reason
    if job.effective_batch_size is not None:
        grouped = METHODS[job.method].grouped_completions
        groups = f" with groups of {job.pinned.get('num_generations', 8)} completions" if grouped else ""
        return (
            f"No candidate keeps an effective batch of {job.effective_batch_size} on {cluster.num_gpus} GPUs{groups}. "
            "Give an --effective-batch-size that both divide."
        )
    return (
        f"No candidate of {job.method} with these pins can start on {cluster.num_gpus} x {cluster.gpu.name}. "
        "Drop a --set."
    )

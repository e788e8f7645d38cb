"""The choice of one candidate: among tuning classes, offloading, shared rows, accepted risks and fewer GPUs."""

from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from planner.errors import InputError, NothingFits, NotMeasured
from planner.estimation import accepted, estimate
from planner.gpus.cluster import Cluster
from planner.jobs.base_candidate import base_candidate
from planner.jobs.job import LARGEST_RISK, Job
from planner.jobs.rules import refuse_contradictions
from planner.memory.engine.budget import EngineRefusal, engine_or_refusal
from planner.memory.engine.settings import engine_settings
from planner.methods import METHODS
from planner.quantities import Estimate, Note
from planner.search.fit import estimate_or_none, impractical
from planner.search.knobs import SearchProblem, TuningClass, problem_of_estimate, tuning_classes
from planner.search.search import NEAR_BEST, search
from planner.search.shared_rows import search_with_shared_rows
from planner.search.structures import shared_stop, structures

MUCH_FASTER = 1.5  # QLoRA over LoRA, or offloading over none, to be recommended instead
# Risks of running out of memory that are accepted, in this order, where nothing fits at the job's risk. With the last
# one a candidate is more likely to run than not (planner/confidence.py, `EDGE_RISK`).
TIGHT_RISKS = (0.1, 0.2, 0.3, 0.4, LARGEST_RISK)

# The best estimate of each search problem, in the order of recommendation; None: no candidate could start.
BestByProblem = dict[SearchProblem, Estimate | None]
Option = tuple[SearchProblem, Estimate]  # a problem and the best candidate that was found for it


class Choice(Struct, frozen=True, kw_only=True):
    """The recommended candidate on a cluster, and the best one of each tuning class."""

    found: BestByProblem
    problem: SearchProblem
    best: Estimate

    @property
    def fits(self) -> bool:
        """Return whether the candidate fits, or is tight, where nothing safer was found."""
        return accepted(self.best).fits


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


def recommend(found: BestByProblem) -> Option | None:
    """Return the recommended candidate with its problem; None if there is no candidate.

    The first of these that is practical (see `impractical`):

    - the tuning class to prefer among those that fit without offloading; offloaded if the job allows no other class and
      that is 1.5 times as fast, such as by room for an engine
    - the faster of the candidate that fits with the least host memory and of one whose rows several GPUs share
    - a tight candidate

    Else one that fits, else the one of the least `distance` from fitting: offloaded ones too, where the GPUs hold what
    is left on them, or hold it tightly.
    """
    fitting = preferred_class(found)
    if fitting is not None and len(found) == 1:
        fitting = faster_with_offloading(*fitting) or fitting
    if fitting is not None and is_practical(fitting):
        return fitting
    with_offloading = ((problem, search(problem)) for problem in (replace(each, offload=True) for each in found))
    offloaded: BestByProblem = {problem: answer for problem, answer in with_offloading if answer is not None}
    least = least_host_memory(with_practical(offloaded)) or least_host_memory(offloaded)
    others = [option for option in (search_with_shared_rows(found), least) if option is not None]
    practical = [option for option in others if is_practical(option)]
    if practical:
        return fastest(practical)
    if fitting is not None or others:
        return tight_candidate(found) or fitting or fastest(others)
    return nearest(found, offloaded)


def nearest(found: BestByProblem, offloaded: BestByProblem) -> Option | None:
    """Return the candidate of the least `distance` from fitting, of offloaded ones those that the GPUs may hold."""
    options = [(problem, answer) for problem, answer in found.items() if answer is not None]
    options += [
        (problem, answer)
        for problem, answer in offloaded.items()
        if answer and (answer.over_bytes <= 0 or answer.tight)
    ]
    return min(options, key=lambda option: option[1].distance, default=None)


def fastest(options: Sequence[Option]) -> Option:
    """Return the candidate of the most tokens per second."""
    return max(options, key=lambda option: option[1].throughput.tokens_per_second)


def is_practical(option: Option) -> bool:
    """Return whether a candidate is a practical way to train, or the job does not ask for speed."""
    problem, answer = option
    return problem.job.optimize != "throughput" or not impractical(answer)


def with_practical(found: BestByProblem) -> BestByProblem:
    """Replace each class's best candidate, if it is impractical, by its best practical one; None if it has none."""
    return {
        problem: answer
        if answer is None or is_practical((problem, answer))
        else search(replace(problem, practical=True))
        for problem, answer in found.items()
    }


def preferred_class(found: BestByProblem) -> Option | None:
    """Return the first tuning class whose best candidate fits and is practical, on GPUs of its own or shared rows.

    Full fine-tuning learns most and QLoRA computes with rounded weights: hence the order. Full fine-tuning that is much
    faster with offloading has no room on the GPUs, and gives way to a class that has; so does a LoRA to a much faster
    QLoRA.
    """
    fitting = []
    for problem, answer in found.items():
        option = (problem, answer) if answer is not None and answer.fits else with_shared_rows(problem, answer)
        if option is not None:
            fitting.append(option)
    if not fitting or fitting[0][0].job.optimize != "throughput":
        return fitting[0] if fitting else None
    practical = [option for option in fitting if not impractical(option[1])]
    fitting = practical or fitting
    first = fitting[0]
    if first[0].tuning_class == "full" and len(fitting) > 1 and faster_with_offloading(*first):
        fitting = fitting[1:]
        first = fitting[0]
    if first[0].tuning_class != "lora":
        return first
    worth = MUCH_FASTER * first[1].throughput.tokens_per_second
    return next((each for each in fitting[1:] if each[1].throughput.tokens_per_second >= worth), first)


def with_shared_rows(problem: SearchProblem, nearest: Estimate | None) -> Option | None:
    """Return the best candidate whose rows several GPUs share, for a class that does not fit else; None if none fits.

    It is searched only if rows of one GPU's share would fit: sharing divides activations, and leaves the states.
    """
    candidate, gpus = nearest.candidate if nearest else None, problem.cluster.gpus_per_node
    if candidate is None or not candidate.method_row.shares_rows or gpus == 1 or problem.job.optimize != "throughput":
        return None
    piece = replace(candidate, max_length=-(-candidate.max_length // gpus))
    alone = estimate_or_none(piece, problem)
    return search_with_shared_rows([problem]) if alone is not None and alone.fits else None


def faster_with_offloading(problem: SearchProblem, answer: Estimate) -> Option | None:
    """Return the best candidate with offloading if it fits and is 1.5 times as fast, else None.

    Offloading takes host memory and needs DeepSpeed: it is not worth a few percent.
    """
    if problem.job.optimize != "throughput":
        return None
    floor = MUCH_FASTER * answer.throughput.tokens_per_second
    offloading = replace(problem, offload=True, faster_than=floor)
    found = search(offloading)
    return (offloading, found) if found and found.fits and found.throughput.tokens_per_second >= floor else None


def least_host_memory(found: BestByProblem) -> Option | None:
    """Return the candidate that fits with the least host memory."""
    fitting = [(problem, answer) for problem, answer in found.items() if answer is not None and answer.fits]
    return min(fitting, key=lambda each: each[1].host_peak_bytes, default=None)


def tight_candidate(found: BestByProblem) -> Option | None:
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
        base_candidate(job, cluster, searched=True)
    except InputError:
        return False
    return True


def on_the_whole_host(choice: Choice, residuals: Mapping[TuningClass, float]) -> tuple[Choice, tuple[Note, ...]]:
    """Return a choice that uses all of a node's host memory, tight, if nothing fits with a tenth of it left."""
    problem, host = choice.problem, choice.problem.cluster.host
    if choice.best.fits or choice.best.host_peak_bytes <= host.safe_bytes:
        return choice, ()
    whole = choose(problem.job, replace(problem.cluster, host=replace(host, whole=True)), residuals)
    if not whole.fits:
        return choice, ()
    used = {"share": whole.best.host_peak_bytes / host.total_bytes, "host_bytes": host.total_bytes}
    note = Note("host_memory_tight" if host.origin == "assumed" else "host_memory_full", used)
    return replace(whole, best=replace(whole.best, tight=True, host_tight=True)), (note,)


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
        f"No candidate of {job.method} with these settings can start on {cluster.num_gpus} x {cluster.gpu.name}. "
        "Remove a --set."
    )

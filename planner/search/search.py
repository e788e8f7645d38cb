"""The search of one tuning class: find the best estimate among all candidates.

Each structure (structures.py) is a candidate without its sizes. By binary search it gets the largest batch or length
that fits, and a colocated vLLM engine the largest `vllm_gpu_memory_utilization`.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial

from msgspec import Struct
from msgspec.structs import replace

from planner.candidate import FIELDS, Candidate, usual_values
from planner.jobs.base_candidate import base_candidate
from planner.jobs.job import Job
from planner.memory.engine.settings import engine_settings
from planner.models.division import tensor_parallel_sizes
from planner.quantities import Estimate
from planner.search.bounds import leanest, smallest_may_fit, speed_bound
from planner.search.fit import (
    LARGEST_UTILIZATION,
    candidate_fits,
    estimate_or_none,
    estimate_with_engine,
    impractical,
    share_that_keeps,
    utilization_range,
    with_smallest_utilization,
    with_utilization,
)
from planner.search.knobs import SearchProblem
from planner.search.sizes import batch_sizes, largest, sizes_of
from planner.search.structures import structures

SMALLER_BATCHES = 2  # next smaller batches that are estimated beside the largest that fits
ENGINE_LEAVES = 0.1  # share of the card that stays free beyond the upper end of the estimate
NO_SLOWER = 0.999  # share of a speed that counts as the same
# How much faster an engine on more GPUs has to be: the processes of one engine run in step, and predicted speeds of
# engines on several GPUs are a tenth off in the median (0.90, results/throughput.md, "vllm, tensor parallel"). Judged.
WORTH_SHARING = 1.1
NEAR_BEST = 0.98  # share of the best speed from which on less memory is worth more: predicted speeds are not exact


def best_of_structure(candidate: Candidate, problem: SearchProblem) -> Estimate | None:
    """Return the estimate of one structure with its best batch or length, or None if nothing of it could start.

    Estimated are the largest size that fits (the smallest size if none fits) and, where they may be faster:

    - with a colocated engine, the next smaller sizes, which leave the engine a larger share of the GPU;
    - the smallest size if it needs no padding and the others do: one row alone has no attention mask, and may need more
      or less than several rows;
    - the largest size if it takes a whole optimizer step and the others do not: without accumulation no gradient waits
      beside the next forward pass;
    - with the lengths of rows, every smaller batch, which holds less padding, if speed comes first.
    """
    sizes = sizes_of(candidate, problem)
    if not sizes:
        return None
    first = 1 if len(sizes) > 1 and sizes[0].pads != sizes[1].pads else 0
    top = largest(
        first, len(sizes) - 1, lambda index: candidate_fits(with_smallest_utilization(sizes[index], problem), problem)
    )
    top = max(top, first)
    indices = set(range(max(first, top - SMALLER_BATCHES), top + 1)) if candidate.vllm == "colocate" else {top}
    fewer_pads = candidate.rows_differ and problem.job.optimize == "throughput"
    indices |= set(range(top)) if fewer_pads else set()
    indices |= {0} if first else set()
    indices |= {len(sizes) - 1} if sizes[len(sizes) - 1].accumulates != sizes[top].accumulates else set()
    estimates = (estimate_with_engine(sizes[index], problem) for index in sorted(indices))
    answers = [answer for answer in estimates if answer is not None]
    that_fit = [answer for answer in answers if answer.fits]
    if not that_fit:
        return min(answers, key=lambda answer: answer.distance, default=None)
    return max(that_fit, key=lambda answer: merit(answer, problem.job))


def merit(answer: Estimate, job: Job) -> tuple[float, ...]:
    """Return the sort key of an estimate, larger is better: what the job optimizes, then tokens per second."""
    candidate, speed = answer.candidate, answer.throughput.tokens_per_second
    if job.optimize == "max-length":
        return (float(longest_row(candidate)), speed)
    if job.optimize == "batch-size":
        return (float(candidate.per_device_train_batch_size), speed)
    return (speed,)


def longest_row(candidate: Candidate) -> int:
    """Return the tokens of the longest row that is trained whole; no row of a dataset is longer than its longest."""
    return candidate.row_tokens if candidate.lengths is None else min(candidate.row_tokens, candidate.lengths.longest)


def search(problem: SearchProblem) -> Estimate | None:
    """Return the estimate of the best candidate of a tuning class; None if no candidate could start.

    If the job lists several LoRA ranks, the answer has the largest rank that fits. If nothing fits, the answer is the
    candidate of the least `distance` from fitting (`fits` is False).
    """
    job = problem.job
    if not job.lora_ranks or problem.tuning_class == "full":
        return best_of_class(problem)
    ranks = sorted(set(job.lora_ranks))

    @cache
    def of_rank(place: int) -> Estimate | None:
        pinned = {**job.pinned, "lora_r": ranks[place]}
        return best_of_class(replace(problem, job=replace(job, pinned=pinned, lora_ranks=())))

    def fits(place: int) -> bool:
        answer = of_rank(place)
        return answer is not None and answer.fits

    last = len(ranks) - 1
    found = last if fits(0) and fits(last) else largest(0, last - 1, fits)
    return of_rank(max(found, 0))


def next_split(best: Estimate, problem: SearchProblem) -> Estimate | None:
    """Return the fastest estimate that fits with another number of GPUs for a vLLM server; None: there is none."""
    own, found = best.candidate, None
    others = [
        (speed_bound(each, problem), each)
        for each in structures(problem)
        if each.vllm == "server" and each.server_gpus != own.server_gpus and each.dtype == own.dtype
    ]
    for bound, structure in sorted(others, key=lambda each: -each[0]):
        if found is not None and bound <= found.throughput.tokens_per_second:
            break
        answer = best_of_structure(structure, problem)
        faster = found is None or (answer and answer.throughput.tokens_per_second > found.throughput.tokens_per_second)
        if answer is not None and answer.fits and faster:
            found = answer
    return found


class Considered(Struct, frozen=True, kw_only=True):
    """A structure that a search looked at. `answer`: at its best size; None: not estimated, as `reason` says."""

    structure: Candidate
    answer: Estimate | None
    reason: str = ""


def best_of_class(problem: SearchProblem) -> Estimate | None:
    """Return the best estimate over all structures, or the one of the least `distance` from fitting if none fits.

    Full fine-tuning gets 16-bit weights only if no candidate with float32 weights fits, because 16-bit weights round
    small updates away.
    """
    answers = [each.answer for each in examined(problem) if each.answer is not None]
    that_fit = [answer for answer in answers if answer.fits]
    if not that_fit:
        return min(
            answers,
            key=lambda answer: (*answer.distance, sum(phase.total_bytes for phase in answer.gpus[0].phases)),
            default=None,
        )
    best = leanest_of([each for each in that_fit if is_precise(each.candidate)] or that_fit, problem)
    return with_fewer_gpus_an_engine(best, problem) or best


def with_fewer_gpus_an_engine(best: Estimate, problem: SearchProblem) -> Estimate | None:
    """Return the estimate with the smallest tensor parallel size that is at most a tenth slower; None if none is."""
    own, job = best.candidate, problem.job
    if own.vllm == "off" or job.optimize != "throughput" or "vllm_tensor_parallel_size" in job.pinned:
        return None
    gpus = own.server_gpus or own.num_processes // own.num_nodes
    floor = best.throughput.tokens_per_second / WORTH_SHARING
    for size in (each for each in tensor_parallel_sizes(job.model, gpus) if each < own.vllm_tensor_parallel_size):
        engine = {"vllm": own.vllm, "vllm_tensor_parallel_size": size, "num_processes": own.num_processes}
        pinned = {**job.pinned, **engine}
        smaller = replace(problem, job=replace(job, pinned=pinned), faster_than=max(floor, problem.faster_than))
        found = best_of_class(smaller)
        same = found and found.fits and is_precise(found.candidate) == is_precise(own)
        if found and same and found.throughput.tokens_per_second >= floor:
            return found
    return None


def examined(problem: SearchProblem) -> Iterator[Considered]:
    """Yield every structure, estimated at its best size where it may be the best one.

    Branch and bound: structures are examined fastest first, by an upper bound of their speed, and left out once the
    bound is more than 2 % below the best that fits (see `leanest_of`), or if the same structure does not fit with every
    layer checkpointed.
    """
    may_fit = cache(partial(smallest_may_fit, problem=problem))
    best_speed = {True: 0.0, False: 0.0}  # best merit of candidates that fit, by `is_precise`
    bounds = ((speed_bound(structure, problem), structure) for structure in structures(problem))
    for bound, structure in sorted(bounds, key=lambda each: -each[0]):
        precise, answer, reason = is_precise(structure), None, ""
        if bound < max(NEAR_BEST * best_speed[precise], problem.faster_than):
            reason = f"at most {bound:,.0f} tokens/s"
        elif not precise and best_speed[True]:
            reason = "16-bit weights, and float32 ones fit"
        elif (least := leanest(structure, problem)) != structure and not may_fit(least):
            reason = "does not fit with every layer checkpointed either"
        else:
            answer = best_of_structure(structure, problem)
        if problem.practical and answer is not None and impractical(answer):
            answer, reason = None, "impractical"
        if answer is not None and answer.fits:
            best_speed[precise] = max(best_speed[precise], answer.throughput.tokens_per_second)
        yield Considered(structure=structure, answer=answer, reason=reason)


def is_precise(candidate: Candidate) -> bool:
    """Return whether the trained weights have float32 copies: adapters, and full fine-tuning of float32 weights."""
    return candidate.tuning == "lora" or candidate.dtype == "float32"


def leanest_of(answers: Sequence[Estimate], problem: SearchProblem) -> Estimate:
    """Return the estimate that needs least memory among those within 2 % of the best one's speed.

    One that leaves checkpoints on the GPU comes before any that offloads them, and one process without DeepSpeed before
    one with it. Of two plans that need the same, it is the one that changes fewer of TRL's defaults. What the job
    optimizes before speed (length, batch) stays that of the best.
    """
    job = problem.job
    best = max(answers, key=lambda answer: merit(answer, job))

    def near_best(answer: Estimate) -> bool:
        *aims, speed = merit(answer, job)
        *best_aims, best_speed = merit(best, job)
        return answer.fits and aims == best_aims and speed >= NEAR_BEST * best_speed

    near = (with_smaller_batch(each, near_best, problem) for each in answers if near_best(each))
    base = base_candidate(job, problem.cluster)
    leanest_answer = min(
        (with_leanest_engine(each, near_best, problem) for each in near),
        key=lambda answer: (
            answer.candidate.offloads_checkpoints,
            answer.candidate.num_processes == 1 and answer.candidate.scheme_row.launched,
            trainer_peak_bytes(answer),
            sum(getattr(answer.candidate, field) != getattr(base, field) for field in FIELDS),  # settings to change
        ),
    )
    return with_ample_engine(leanest_answer, problem)


def trainer_peak_bytes(answer: Estimate) -> int:
    """Return the largest peak of the GPUs that train; the budget of a vLLM server is a setting, not a need."""
    return max(gpu.peak_bytes for gpu in answer.gpus if not gpu.serves)


def with_smaller_batch(answer: Estimate, near_best: Callable[[Estimate], bool], problem: SearchProblem) -> Estimate:
    """Return the estimate with the smallest micro-batch that is still near the best; more samples are never slower."""
    sizes = batch_sizes(answer.candidate, problem.job)
    own = answer.candidate.per_device_train_batch_size
    smaller = [index for index, (batch, _) in enumerate(sizes.values) if batch < own]
    found: dict[int, Estimate] = {}

    def still_near(steps: int) -> bool:
        other = estimate_or_none(sizes[smaller[-steps]], problem)
        if other is None or not near_best(other):
            return False
        found[steps] = other
        return True

    return found.get(largest(1, len(smaller), still_near), answer)


def with_leanest_engine(answer: Estimate, near_best: Callable[[Estimate], bool], problem: SearchProblem) -> Estimate:
    """Return the answer with the smallest share of the GPU for a colocated engine that costs no speed.

    A larger KV cache than the rows of a rollout take is of no use.
    """
    candidate = answer.candidate
    if candidate.vllm != "colocate":
        return answer
    low, high = utilization_range(candidate, problem)[0], round(100 * candidate.vllm_gpu_memory_utilization)
    answers: dict[int, Estimate] = {}

    def as_fast(less: int) -> bool:
        other = estimate_or_none(with_utilization(candidate, high - less, problem), problem)
        if other is None or not near_best(other):
            return False
        answers[less] = other
        return other.throughput.tokens_per_second >= NO_SLOWER * answer.throughput.tokens_per_second

    return answers.get(largest(0, high - low, as_fast), answer) if high > low else answer


def with_ample_engine(answer: Estimate, problem: SearchProblem) -> Estimate:
    """Return the answer with the share of free memory that its colocated engine can use.

    It is what keeps twice the rows of a rollout, and at least TRL's default, as far as the training GPUs still fit with
    `ENGINE_LEAVES` of the card left. A pinned share stays as it is (`with_utilization`).
    """
    candidate, gpu = answer.candidate, problem.cluster.gpu
    if candidate.vllm != "colocate":
        return answer
    low = round(100 * candidate.vllm_gpu_memory_utilization)
    rows = engine_settings(candidate, gpu).max_num_seqs
    usual = usual_values(candidate.method_row, candidate.trl_version)["vllm_gpu_memory_utilization"]
    high = max(round(100 * usual), share_that_keeps(rows, candidate, problem))
    room = answer.gpus[0].capacity_bytes - ENGINE_LEAVES * gpu.total_bytes
    answers: dict[int, Estimate] = {}

    def leaves_room(more: int) -> bool:
        other = estimate_or_none(with_utilization(candidate, low + more, problem), problem)
        if other is None or not other.fits or other.gpus[0].peak_bytes > room:
            return False
        answers[more] = other
        return other.throughput.tokens_per_second >= NO_SLOWER * answer.throughput.tokens_per_second

    most = min(high, LARGEST_UTILIZATION) - low
    return answers.get(largest(1, most, leaves_room), answer) if most > 0 else answer

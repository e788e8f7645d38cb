"""The search of one tuning class: find the best estimate among all candidates.

Each structure of `knobs.py` is a candidate without its sizes. By binary search it gets the largest batch or length
that fits, and a colocated vLLM engine the largest `vllm_gpu_memory_utilization`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import inf, isqrt
from typing import Any

from planner.binary_search import largest
from planner.candidate import Candidate
from planner.errors import NotMeasured
from planner.estimate import estimate, with_residual
from planner.jobs.base_candidate import base_candidate
from planner.jobs.job import DEFAULT_BATCH_SIZE, Job
from planner.memory.engine.budget import EngineDoesNotFit, EngineRefusal, engine_or_refusal
from planner.memory.engine.settings import engine_settings
from planner.quantities import Estimate
from planner.search.knobs import SearchProblem, structures, with_derived_settings
from planner.throughput.step import throughput

LARGEST_UTILIZATION = 95  # hundredths of the GPU; vLLM's default is 0.92, and a colocated trainer needs the rest
LENGTH_STEP = 256  # tokens
LARGEST_BATCH = 1024  # samples per process
SMALLER_BATCHES = 2  # next smaller batches that are estimated beside the largest that fits
NO_SLOWER = 0.999  # share of a speed that counts as the same
ALL_SEQUENCES = 1e9  # concurrency of an engine without a limit
LEANEST_MARGIN = 1.01  # tests/test_laws.py, `test_checkpointing_fewer_layers_never_needs_less`
CHECKPOINTING = {"gradient_checkpointing", "checkpoint_every_n_layers", "checkpoint_offload"}
NEAR_BEST = 0.98  # share of the best speed from which on less memory is worth more: predicted speeds are not exact

# -- the batch ---------------------------------------------------------------------------------------------------------


def with_batch(candidate: Candidate, batch: int, accumulation: int, pinned: Mapping[str, object]) -> Candidate:
    """Return the candidate with a micro-batch size and gradient accumulation steps.

    Unless pinned, `steps_per_generation` is the accumulation (TRL's default, trl 1.16, grpo_config.py:1098): one
    generation batch serves one optimizer step.
    """
    steps = candidate.steps_per_generation if "steps_per_generation" in pinned else accumulation
    return replace(
        candidate,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=steps,
    )


@dataclass(frozen=True, slots=True)
class CandidateSizes:
    """A lazy sequence of candidates that differ in one size (batch or length), smallest first.

    A candidate is built by `build(value)` when it is indexed.
    """

    values: Sequence[Any]  # (micro-batch, accumulation) or lengths in tokens
    build: Callable[[Any], Candidate]

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Candidate:
        return self.build(self.values[index])


def batch_sizes(candidate: Candidate, job: Job) -> CandidateSizes:
    """Return the candidate with every micro-batch size that the job allows, smallest first.

    Each keeps the effective batch size (unless the job maximizes the batch), holds whole groups of `num_generations`
    completions, and is not below the method's smallest batch.
    """
    if (
        job.optimize == "batch-size"
        and job.effective_batch_size is None
        and "per_device_train_batch_size" not in job.pinned
    ):
        sizes = [(batch, candidate.gradient_accumulation_steps) for batch in range(1, LARGEST_BATCH + 1)]
    else:
        sizes = micro_batches(candidate, job)

    def whole_groups(batch: int, accumulation: int) -> bool:
        steps = candidate.steps_per_generation if "steps_per_generation" in job.pinned else accumulation
        return (
            not candidate.method_row.grouped_completions
            or batch * candidate.num_processes * steps % candidate.num_generations == 0
        )

    kept = [size for size in sizes if whole_groups(*size) and size[0] >= candidate.method_row.smallest_batch]
    return CandidateSizes(kept, lambda size: with_batch(candidate, size[0], size[1], job.pinned))


def micro_batches(candidate: Candidate, job: Job) -> list[tuple[int, int]]:
    """Return every (micro-batch, accumulation) whose product is one process's part of the effective batch.

    A pinned micro-batch or accumulation stays as it is. Without an effective batch size, the part of a process is
    TRL's default of 8 samples. Example: 8 samples give (1, 8), (2, 4), (4, 2), (8, 1).
    """
    batch, accumulation = job.pinned.get("per_device_train_batch_size"), job.pinned.get("gradient_accumulation_steps")
    if isinstance(batch, int) and isinstance(accumulation, int):
        return [(batch, accumulation)]
    share = (batch if isinstance(batch, int) else DEFAULT_BATCH_SIZE) * (
        accumulation if isinstance(accumulation, int) else 1
    )
    if job.effective_batch_size is not None:
        share, rest = divmod(job.effective_batch_size * candidate.row_gpus, candidate.num_processes)
        if rest:
            return []
    if isinstance(batch, int):
        return [(batch, share // batch)] if share % batch == 0 else []
    if isinstance(accumulation, int):
        return [(share // accumulation, accumulation)] if share % accumulation == 0 else []
    small = [size for size in range(1, isqrt(share) + 1) if share % size == 0]
    return [(size, share // size) for size in sorted({*small, *(share // size for size in small)})]


# -- sizes that fit ----------------------------------------------------------------------------------------------------


def estimate_or_none(candidate: Candidate, problem: SearchProblem) -> Estimate | None:
    """Estimate a candidate; return None if its vLLM engine would not start or its layers cannot be measured."""
    risk = problem.job.risk
    try:
        answer = estimate(candidate, problem.cluster, risk)
    except (EngineDoesNotFit, NotMeasured):
        return None
    return with_residual(answer, problem.residual, risk) if problem.residual else answer


def utilization_range(candidate: Candidate, problem: SearchProblem) -> tuple[int, int]:
    """Return the smallest and largest `vllm_gpu_memory_utilization` of a colocated engine, in hundredths.

    The smallest is the one with which the engine starts; it is above the largest if the engine never starts. Both are
    the pinned value if there is one.
    """
    if "vllm_gpu_memory_utilization" in problem.job.pinned:
        pinned = round(100 * candidate.vllm_gpu_memory_utilization)
        return pinned, pinned
    smallest = replace(engine_settings(candidate, problem.cluster.gpu), gpu_memory_utilization=0.01)
    answer = engine_or_refusal(candidate.model, problem.cluster.gpu, smallest)
    if isinstance(answer, EngineRefusal):
        return (round(100 * answer.utilization_that_fits) or LARGEST_UTILIZATION + 1), LARGEST_UTILIZATION
    return 1, LARGEST_UTILIZATION


def with_utilization(candidate: Candidate, hundredths: int, problem: SearchProblem) -> Candidate:
    """Return the candidate with `vllm_gpu_memory_utilization` in hundredths, or unchanged if the job pins it."""
    if "vllm_gpu_memory_utilization" in problem.job.pinned:
        return candidate
    return replace(candidate, vllm_gpu_memory_utilization=hundredths / 100)


def estimate_with_engine(candidate: Candidate, problem: SearchProblem) -> Estimate | None:
    """Estimate a candidate whose colocated engine, if it has one, gets the largest share of the GPU that fits.

    If no share fits, the engine gets the smallest one. Return None if the engine does not start.
    """
    if candidate.vllm != "colocate":
        return estimate_or_none(candidate, problem)
    low, high = utilization_range(candidate, problem)
    if low > high:
        return None
    answers: dict[int, Estimate | None] = {}

    def fits(share: int) -> bool:
        answer = answers[share] = estimate_or_none(with_utilization(candidate, share, problem), problem)
        return answer is not None and answer.fits

    return answers[max(largest(low, high, fits), low)]


def with_smallest_utilization(candidate: Candidate, problem: SearchProblem) -> Candidate:
    """Return the candidate with the smallest share of the GPU with which its colocated engine starts.

    If this candidate does not fit, it fits with no share.
    """
    if candidate.vllm != "colocate":
        return candidate
    return with_utilization(candidate, min(utilization_range(candidate, problem)[0], LARGEST_UTILIZATION), problem)


def candidate_fits(candidate: Candidate, problem: SearchProblem) -> bool:
    """Return whether the engine of a candidate starts and its estimate fits."""
    answer = estimate_or_none(candidate, problem)
    return answer is not None and answer.fits


def best_of_structure(candidate: Candidate, problem: SearchProblem) -> Estimate | None:
    """Return the estimate of one structure with its best batch or length, or None if nothing of it could start.

    Estimated are the largest size that fits (the smallest size if none fits) and, where they may be faster:

    - with a colocated engine, the next smaller sizes, which leave the engine a larger share of the GPU;
    - the smallest size if it needs no padding and the largest one does: one row alone has no attention mask.
    """
    sizes = sizes_of(candidate, problem)
    if not sizes:
        return None
    top = largest(
        0, len(sizes) - 1, lambda index: candidate_fits(with_smallest_utilization(sizes[index], problem), problem)
    )
    top = max(top, 0)
    indices = set(range(max(0, top - SMALLER_BATCHES), top + 1)) if candidate.vllm == "colocate" else {top}
    if sizes[0].pads != sizes[top].pads:
        indices.add(0)
    estimates = (estimate_with_engine(sizes[index], problem) for index in sorted(indices))
    answers = [answer for answer in estimates if answer is not None]
    return max(answers, key=lambda answer: (answer.fits, merit(answer, problem.job)), default=None)


def sizes_of(candidate: Candidate, problem: SearchProblem) -> CandidateSizes:
    """Return the candidate in every length or batch of the job, smallest first."""
    if problem.job.optimize == "max-length":
        return length_sizes(candidate, problem)
    return batch_sizes(candidate, problem.job)


def length_sizes(candidate: Candidate, problem: SearchProblem) -> CandidateSizes:
    """Return the candidate at its smallest micro-batch with every length up to the model's, in steps of 256 tokens."""
    smallest = batch_sizes(candidate, problem.job)
    if not smallest or length_field(candidate) in problem.job.pinned:
        return CandidateSizes(smallest.values[:1], smallest.build)
    lengths = range(LENGTH_STEP, max(length_limit(candidate), LENGTH_STEP) + 1, LENGTH_STEP)
    return CandidateSizes(lengths, lambda length: with_length(smallest[0], length, problem))


def length_field(candidate: Candidate) -> str:
    """Return the Candidate field that makes rows longer: `max_completion_length` or `max_length`, by the method."""
    return (
        "max_completion_length"
        if candidate.method_row.generates and not candidate.method_row.bounded_rows
        else "max_length"
    )


def length_limit(candidate: Candidate) -> int:
    """Return the largest value of `length_field` in tokens: the model's positions, less the prompt if it is extra."""
    return candidate.model.max_position_embeddings - (
        candidate.prompt_length if length_field(candidate) == "max_completion_length" else 0
    )


def with_length(candidate: Candidate, length: int, problem: SearchProblem) -> Candidate:
    """Return the candidate with `length_field` set to `length` tokens.

    If `max_length` bounds prompt and completion together, the prompt gets what the completion leaves.
    """
    changes: dict[str, Any] = {length_field(candidate): length}
    if candidate.method_row.bounded_rows:
        changes["prompt_length"] = max(1, length - candidate.max_completion_length)
    return with_derived_settings(replace(candidate, **changes), problem)


# -- the best candidate ------------------------------------------------------------------------------------------------


def merit(answer: Estimate, job: Job) -> tuple[float, ...]:
    """Return the sort key of an estimate, larger is better: what the job optimizes, then tokens per second."""
    candidate, speed = answer.candidate, answer.throughput.tokens_per_second
    if job.optimize == "max-length":
        return (float(candidate.row_tokens), speed)
    if job.optimize == "batch-size":
        return (float(candidate.per_device_train_batch_size), speed)
    return (speed,)


def search(problem: SearchProblem) -> Estimate | None:
    """Return the estimate of the best candidate of a tuning class; None if no candidate could start.

    If the job lists several LoRA ranks, the answer has the largest rank that fits. If nothing fits, the answer is the
    candidate of the least `distance` from fitting (`fits` is False).
    """
    job, answer = problem.job, None
    if not job.lora_ranks or problem.tuning_class == "full":
        return best_of_class(problem)
    for rank in sorted(job.lora_ranks, reverse=True):
        answer = best_of_class(replace(problem, job=replace(job, pinned={**job.pinned, "lora_r": rank}, lora_ranks=())))
        if answer is not None and answer.fits:
            break
    return answer


@dataclass(frozen=True, kw_only=True, slots=True)
class Considered:
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
    return leanest_of([each for each in that_fit if is_precise(each.candidate)] or that_fit, problem)


def examined(problem: SearchProblem) -> Iterator[Considered]:
    """Yield every structure, estimated at its best size where it may be the best one.

    Branch and bound: structures are examined fastest first, by an upper bound of their speed, and left out once the
    bound is more than 2 % below the best that fits (see `leanest_of`), or if the same structure does not fit with every
    layer checkpointed (`LeanestFits`).
    """
    leanest_fits = LeanestFits(problem)
    best_speed = {True: 0.0, False: 0.0}  # of what fits, by `is_precise`
    bounds = ((speed_bound(structure, problem), structure) for structure in structures(problem))
    for bound, structure in sorted(bounds, key=lambda each: -each[0]):
        precise, answer, reason = is_precise(structure), None, ""
        if bound < max(NEAR_BEST * best_speed[precise], problem.faster_than):
            reason = f"at most {bound:,.0f} tokens/s"
        elif not precise and best_speed[True]:
            reason = "16-bit weights, and float32 ones fit"
        elif not leanest_fits(structure):
            reason = "does not fit with every layer checkpointed either"
        else:
            answer = best_of_structure(structure, problem)
        if answer is not None and answer.fits:
            best_speed[precise] = max(best_speed[precise], answer.throughput.tokens_per_second)
        yield Considered(structure=structure, answer=answer, reason=reason)


class LeanestFits:
    """Whether a structure can fit: with every layer checkpointed, at its smallest size and with the leanest engine.

    Checkpointing fewer layers never allocates less, but for 1 % (tests/test_laws.py); the allocator's slack can be
    less. A structure with every layer checkpointed passes, and one that offloads its activations or that would generate
    without a KV cache under checkpointing.
    """

    def __init__(self, problem: SearchProblem) -> None:
        self._problem = problem
        self._answers: dict[Candidate, bool] = {}

    def __call__(self, structure: Candidate) -> bool:
        leanest = replace(structure, gradient_checkpointing=True, checkpoint_every_n_layers=1)
        pinned = self._problem.job.pinned.keys() & CHECKPOINTING
        if leanest == structure or pinned or structure.activation_offloading or leanest.generates_without_cache:
            return True
        if leanest not in self._answers:
            sizes = sizes_of(leanest, self._problem)
            smallest = with_smallest_utilization(sizes[0], self._problem) if sizes else leanest
            answer = estimate_or_none(smallest, self._problem)
            capacity = self._problem.cluster.gpu.free_bytes
            self._answers[leanest] = not sizes or (
                answer is not None and allocated_bytes(answer) <= LEANEST_MARGIN * capacity
            )
        return self._answers[leanest]


def allocated_bytes(answer: Estimate) -> int:
    """Return the peak of a training GPU without the slack of PyTorch's allocator."""
    return max(phase.total_bytes - phase.components.get("fragmentation", 0) for phase in answer.gpus[0].phases)


def is_precise(candidate: Candidate) -> bool:
    """Return whether the trained weights have float32 copies: adapters, and full fine-tuning of float32 weights."""
    return candidate.tuning == "lora" or candidate.dtype == "float32"


def speed_bound(structure: Candidate, problem: SearchProblem) -> float:
    """Return an upper bound of the tokens per second of a structure; infinity if speed is not what the job optimizes.

    It is the speed at the largest batch, with an engine that decodes all sequences at once: more rows and more
    sequences at a time are never slower. Rows without padding, in batches of one, may be faster than padded ones, so
    that the smallest batch counts too.
    """
    if problem.job.optimize != "throughput":
        return inf
    sizes = batch_sizes(structure, problem.job)
    if not sizes:
        return 0.0
    ends = (sizes[0], sizes[len(sizes) - 1])
    return max(throughput(each, problem.cluster, ALL_SEQUENCES).tokens_per_second for each in ends)


def leanest_of(answers: Sequence[Estimate], problem: SearchProblem) -> Estimate:
    """Return the estimate that needs least memory among those within 2 % of the best one's speed.

    Of two that need the same, it is the one that changes fewer of TRL's defaults. What the job optimizes before speed
    (length, batch) stays that of the best.
    """
    job = problem.job
    best = max(answers, key=lambda answer: merit(answer, job))

    def near_best(answer: Estimate) -> bool:
        *aims, speed = merit(answer, job)
        *best_aims, best_speed = merit(best, job)
        return answer.fits and aims == best_aims and speed >= NEAR_BEST * best_speed

    near = (with_smaller_batch(each, near_best, problem) for each in answers if near_best(each))
    base = base_candidate(job, problem.cluster)
    return min(
        (with_leanest_engine(each, near_best, problem) for each in near),
        key=lambda answer: (trainer_peak_bytes(answer), changed_settings(answer.candidate, base)),
    )


def trainer_peak_bytes(answer: Estimate) -> int:
    """Return the largest peak of the GPUs that train; the budget of a vLLM server is a setting, not a need."""
    return max(gpu.peak_bytes for gpu in answer.gpus if gpu.role != "vllm")


def changed_settings(candidate: Candidate, base: Candidate) -> int:
    """Return how many settings of a candidate differ from those of `base`."""
    return sum(getattr(candidate, field.name) != getattr(base, field.name) for field in fields(Candidate))


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

"""Job -> candidates: every structure of the knobs' table, its batch, length and engine's share found by halving."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isqrt
from typing import Any

from planner.binary_search import largest
from planner.candidate import Candidate
from planner.errors import NotMeasured
from planner.estimate import estimate, with_residual
from planner.jobs.job import DEFAULT_BATCH_SIZE, Job
from planner.memory.engine.budget import EngineDoesNotFit, EngineRefusal, engine_or_refusal
from planner.memory.engine.settings import engine_settings
from planner.quantities import Estimate
from planner.search.knobs import SearchProblem, completed, structures

LARGEST_UTILIZATION = 95  # hundredths; vLLM's own default is 0.92, and a colocated trainer needs room besides
LENGTH_STEP = 256  # tokens
LARGEST_BATCH = 1024  # samples a process
SMALLER_BATCHES = 2  # tried besides the largest that fits

# -- the batch ---------------------------------------------------------------------------------------------------------


def with_batch(candidate: Candidate, batch: int, accumulation: int, pinned: Mapping[str, object]) -> Candidate:
    """A generation batch is one optimizer step's (steps_per_generation defaults to the accumulation, trl 1.16, grpo_config.py:1098)."""
    steps = candidate.steps_per_generation if "steps_per_generation" in pinned else accumulation
    return replace(
        candidate,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=steps,
    )


@dataclass(frozen=True, slots=True)
class Choices:
    """What a monotone knob can be, smallest first: built only when asked for."""

    values: Sequence[Any]
    at: Callable[[Any], Candidate]

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Candidate:
        return self.at(self.values[index])


def batches(candidate: Candidate, job: Job) -> Choices:
    """The candidate with every micro-batch that keeps the effective batch and RL's groups."""
    if (
        job.optimize == "batch-size"
        and job.effective_batch_size is None
        and "per_device_train_batch_size" not in job.pinned
    ):
        sizes = [(batch, candidate.gradient_accumulation_steps) for batch in range(1, LARGEST_BATCH + 1)]
    else:
        sizes = splits(candidate, job)

    def whole_groups(batch: int, accumulation: int) -> bool:
        steps = candidate.steps_per_generation if "steps_per_generation" in job.pinned else accumulation
        return (
            not candidate.method_row.grouped_completions
            or batch * candidate.num_processes * steps % candidate.num_generations == 0
        )

    kept = [size for size in sizes if whole_groups(*size) and size[0] >= candidate.method_row.smallest_batch]
    return Choices(kept, lambda size: with_batch(candidate, size[0], size[1], job.pinned))


def splits(candidate: Candidate, job: Job) -> list[tuple[int, int]]:
    """(micro-batch, accumulation) whose product is one process's part of the effective batch; pins decide where there are any.

    Not given, the effective batch is what TRL's default of 8 a process amounts to on the processes there are.
    """
    batch, accumulation = job.pinned.get("per_device_train_batch_size"), job.pinned.get("gradient_accumulation_steps")
    if isinstance(batch, int) and isinstance(accumulation, int):
        return [(batch, accumulation)]
    share = (batch if isinstance(batch, int) else DEFAULT_BATCH_SIZE) * (
        accumulation if isinstance(accumulation, int) else 1
    )
    if job.effective_batch_size is not None:
        share, rest = divmod(job.effective_batch_size, candidate.num_processes)
        if rest:
            return []
    if isinstance(batch, int):
        return [(batch, share // batch)] if share % batch == 0 else []
    if isinstance(accumulation, int):
        return [(share // accumulation, accumulation)] if share % accumulation == 0 else []
    small = [size for size in range(1, isqrt(share) + 1) if share % size == 0]
    return [(size, share // size) for size in sorted({*small, *(share // size for size in small)})]


# -- what fits ---------------------------------------------------------------------------------------------------------


def attempt(candidate: Candidate, problem: SearchProblem) -> Estimate | None:
    """The candidate's estimate; None if its vLLM engine would refuse to start, or its layers cannot be measured."""
    risk = problem.job.risk
    try:
        answer = estimate(candidate, problem.cluster, risk)
    except (EngineDoesNotFit, NotMeasured):
        return None
    return with_residual(answer, problem.residual, risk) if problem.residual else answer


def utilizations(candidate: Candidate, problem: SearchProblem) -> tuple[int, int]:
    """The hundredths of the card that a colocated engine can be given: from what it needs to start, to what there is."""
    if "vllm_gpu_memory_utilization" in problem.job.pinned:
        pinned = round(100 * candidate.vllm_gpu_memory_utilization)
        return pinned, pinned
    smallest = replace(engine_settings(candidate, problem.cluster.gpu), gpu_memory_utilization=0.01)
    answer = engine_or_refusal(candidate.model, problem.cluster.gpu, smallest)
    if isinstance(answer, EngineRefusal):
        return (round(100 * answer.utilization_that_fits) or LARGEST_UTILIZATION + 1), LARGEST_UTILIZATION
    return 1, LARGEST_UTILIZATION


def with_utilization(candidate: Candidate, hundredths: int, problem: SearchProblem) -> Candidate:
    if "vllm_gpu_memory_utilization" in problem.job.pinned:
        return candidate
    return replace(candidate, vllm_gpu_memory_utilization=hundredths / 100)


def placed(candidate: Candidate, problem: SearchProblem) -> Estimate | None:
    """A candidate with its batch: with a colocated engine at the largest share that fits; None where none starts."""
    if candidate.vllm != "colocate":
        return attempt(candidate, problem)
    low, high = utilizations(candidate, problem)
    if low > high:
        return None
    answers: dict[int, Estimate | None] = {}

    def fits(share: int) -> bool:
        answer = answers[share] = attempt(with_utilization(candidate, share, problem), problem)
        return answer is not None and answer.fits

    return answers[max(largest(low, high, fits), low)]


def leanest(candidate: Candidate, problem: SearchProblem) -> Candidate:
    """The candidate with the smallest share that its colocated engine starts with: if that does not fit, none does."""
    if candidate.vllm != "colocate":
        return candidate
    return with_utilization(candidate, min(utilizations(candidate, problem)[0], LARGEST_UTILIZATION), problem)


def fitting(candidate: Candidate, problem: SearchProblem) -> bool:
    answer = attempt(candidate, problem)
    return answer is not None and answer.fits


def fitted(candidate: Candidate, problem: SearchProblem) -> Estimate | None:
    """The best batch of one structure: the largest that fits or, where only that holds padding, a row alone; the smallest there is when none fits.

    A colocated engine takes from the batch what it is given: the next smaller batches, with more of the card for it, are tried too.
    """
    choices = (
        longest(candidate, problem) if problem.job.optimize == "max-length" else batches(candidate, problem.job)
    )
    if not choices:
        return None
    top = max(largest(0, len(choices) - 1, lambda index: fitting(leanest(choices[index], problem), problem)), 0)
    tried = set(range(max(0, top - SMALLER_BATCHES), top + 1)) if candidate.vllm == "colocate" else {top}
    if choices[0].pads != choices[top].pads:
        tried.add(0)  # a row alone has no mask, and may be the faster
    answers = [answer for answer in (placed(choices[index], problem) for index in sorted(tried)) if answer is not None]
    return max(answers, key=lambda answer: (answer.fits, merit(answer, problem.job)), default=None)


def longest(candidate: Candidate, problem: SearchProblem) -> Choices:
    """The candidate at its smallest micro-batch with every length up to the model's."""
    smallest = batches(candidate, problem.job)
    if not smallest or length_field(candidate) in problem.job.pinned:
        return Choices(smallest.values[:1], smallest.at)
    lengths = range(LENGTH_STEP, max(longest_length(candidate), LENGTH_STEP) + 1, LENGTH_STEP)
    return Choices(lengths, lambda length: with_length(smallest[0], length, problem))


def length_field(candidate: Candidate) -> str:
    """The length that is asked for when rows are to be longer."""
    return (
        "max_completion_length"
        if candidate.method_row.generates and not candidate.method_row.bounded_rows
        else "max_length"
    )


def longest_length(candidate: Candidate) -> int:
    """How far the model's positions let that length go."""
    return candidate.model.max_position_embeddings - (
        candidate.prompt_length if length_field(candidate) == "max_completion_length" else 0
    )


def with_length(candidate: Candidate, length: int, problem: SearchProblem) -> Candidate:
    """Longer rows; where max_length bounds prompt and completion together, the prompt takes what it gains."""
    changes: dict[str, Any] = {length_field(candidate): length}
    if candidate.method_row.bounded_rows:
        changes["prompt_length"] = max(1, length - candidate.max_completion_length)
    return completed(replace(candidate, **changes), problem)


# -- the best ----------------------------------------------------------------------------------------------------------


def merit(answer: Estimate, job: Job) -> tuple[float, ...]:
    """What the job asks for, then speed; larger is better."""
    candidate, speed = answer.candidate, answer.throughput.tokens_per_second
    if job.optimize == "max-length":
        return (float(candidate.row_tokens), speed)
    if job.optimize == "batch-size":
        return (float(candidate.per_device_train_batch_size), speed)
    return (speed,)


def search(problem: SearchProblem) -> Estimate | None:
    """The best candidate of one class; where the job lets the rank be chosen, at the largest rank that fits.

    None: no candidate of the class could even start.
    """
    job, answer = problem.job, None
    if not job.lora_ranks or problem.tuning_class == "full":
        return best_of(problem)
    for rank in sorted(job.lora_ranks, reverse=True):
        answer = best_of(replace(problem, job=replace(job, pinned={**job.pinned, "lora_r": rank}, lora_ranks=())))
        if answer is not None and answer.fits:
            break
    return answer


def best_of(problem: SearchProblem) -> Estimate | None:
    """The best candidate that fits; where none does, the one that misses by least.

    Full fine-tuning takes 16-bit weights only where float32 ones fit in no way: they round what is learned.
    """
    answers = [
        answer for answer in (fitted(structure, problem) for structure in structures(problem)) if answer is not None
    ]
    fitting = [answer for answer in answers if answer.fits]
    if not fitting:
        return min(
            answers,
            key=lambda answer: (answer.over_bytes, sum(phase.total_bytes for phase in answer.gpus[0].phases)),
            default=None,
        )
    precise = [answer for answer in fitting if answer.candidate.tuning == "lora" or answer.candidate.dtype == "float32"]
    return max(precise or fitting, key=lambda answer: merit(answer, problem.job))

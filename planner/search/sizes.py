"""The sizes of a structure: every batch and length that the job allows, smallest first; the largest that fits."""

from collections.abc import Callable, Mapping, Sequence
from math import isqrt
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from planner.candidate import Candidate
from planner.jobs.base_candidate import evaluation_rows, syncs_each_batch
from planner.jobs.job import DEFAULT_BATCH_SIZE, Job
from planner.search.knobs import SearchProblem
from planner.search.structures import with_derived_settings

LENGTH_STEP = 256  # tokens
LARGEST_BATCH = 1024  # samples per process


def with_batch(candidate: Candidate, batch: int, accumulation: int, pinned: Mapping[str, object]) -> Candidate:
    """Return the candidate with a micro-batch size and gradient accumulation steps.

    Unless pinned, a packed row (`token_budget`) has room for the micro-batch, and `steps_per_generation` equals the
    accumulation (TRL's default, trl 1.16, grpo_config.py, `GRPOConfig.__post_init__`): one generation batch serves one
    optimizer step. `sync_each_batch` follows from accumulation and sharding, the evaluation batch from the micro-batch.
    """
    steps = candidate.steps_per_generation if "steps_per_generation" in pinned else accumulation
    evaluated = {}
    if "token_budget" not in pinned:
        candidate = replace(candidate, token_budget=0)
    if candidate.eval_strategy != "no" and "per_device_eval_batch_size" not in pinned:
        evaluated["per_device_eval_batch_size"] = evaluation_rows(batch, candidate)
    sized = replace(
        candidate,
        **evaluated,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=steps,
    )
    if sized.method_row.asynchronous:
        sized = replace(sized, token_budget=sized.tokens)
    syncs = syncs_each_batch(sized)
    if "sync_each_batch" in pinned or syncs == sized.sync_each_batch:
        return sized
    return replace(sized, sync_each_batch=syncs)


class CandidateSizes(Struct, frozen=True):
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

    kept = [size for size in sizes if whole_groups(*size) and size[0] >= candidate.smallest_batch]
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
        share, rest = divmod(job.effective_batch_size, candidate.batches)
        if rest:
            return []
    if isinstance(batch, int):
        return [(batch, share // batch)] if share % batch == 0 else []
    if isinstance(accumulation, int):
        return [(share // accumulation, accumulation)] if share % accumulation == 0 else []
    small = [size for size in range(1, isqrt(share) + 1) if share % size == 0]
    return [(size, share // size) for size in sorted({*small, *(share // size for size in small)})]


def sizes_of(candidate: Candidate, problem: SearchProblem) -> CandidateSizes:
    """Return the candidate in every length or batch of the job, smallest first."""
    if problem.job.optimize == "max-length":
        return length_sizes(candidate, problem)
    return batch_sizes(candidate, problem.job)


def length_sizes(candidate: Candidate, problem: SearchProblem) -> CandidateSizes:
    """Return the candidate at its smallest micro-batch with every length up to the model's, in steps of 256 tokens.

    With the lengths of rows it is up to that of the longest row, beyond which none is cut.
    """
    smallest = batch_sizes(candidate, problem.job)
    if not smallest or length_field(candidate) in problem.job.pinned:
        return CandidateSizes(smallest.values[:1], smallest.build)
    most = length_limit(candidate)
    if candidate.lengths is not None:
        most = min(most, -(-candidate.lengths.longest // LENGTH_STEP) * LENGTH_STEP)
    lengths = range(LENGTH_STEP, max(most, LENGTH_STEP) + 1, LENGTH_STEP)
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


def largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest number of low..high that fits, low - 1 if none does.

    `fits` is monotonic: a number above one that does not fit does not fit either. It is called for `low` first, and for
    the answer unless none fits.
    """
    if low > high or not fits(low):
        return low - 1
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low

"""Bounds of a structure that need no search of its sizes: its largest speed, and the least memory it can need."""

from math import inf

from msgspec.structs import replace

from planner.candidate import Candidate
from planner.quantities import Estimate
from planner.search.fit import estimate_or_none, with_smallest_utilization
from planner.search.knobs import CHECKPOINTING, SearchProblem
from planner.search.sizes import batch_sizes, sizes_of
from planner.throughput.step import throughput

ALL_SEQUENCES = 1e9  # concurrency of an engine without a limit
LEANEST_MARGIN = 1.01  # tests/test_laws.py, `test_checkpointing_fewer_layers_never_needs_less`


def speed_bound(structure: Candidate, problem: SearchProblem) -> float:
    """Return an upper bound of the tokens per second of a structure; infinity if speed is not what the job optimizes.

    It is the speed at the largest batch, with an engine that decodes all sequences at once: more rows and more
    sequences at a time are never slower. Rows without padding, in batches of one, may be faster than padded ones, so
    that the smallest batch counts there. Where the lengths of rows are given, larger batches hold more padding and any
    size may be the fastest.
    """
    if problem.job.optimize != "throughput":
        return inf
    sizes = batch_sizes(structure, problem.job)
    if not sizes:
        return 0.0
    smallest, largest = sizes[0], sizes[len(sizes) - 1]
    fastest = [largest] if smallest.pads == largest.pads else [smallest, largest]
    if structure.rows_differ:
        fastest = [sizes[index] for index in range(len(sizes))]
    return max(throughput(size, problem.cluster, ALL_SEQUENCES).tokens_per_second for size in fastest)


def leanest(structure: Candidate, problem: SearchProblem) -> Candidate:
    """Return the structure with every layer checkpointed, which never allocates more than with fewer.

    A structure stays as it is if the job pins its checkpoints, if it offloads its activations, or if it would then
    generate without a KV cache.
    """
    checkpointed = replace(structure, gradient_checkpointing=True, checkpoint_every_n_layers=1)
    kept = problem.job.pinned.keys() & CHECKPOINTING
    stays = kept or structure.activation_offloading or checkpointed.generates_without_cache
    return structure if stays else checkpointed


def smallest_may_fit(structure: Candidate, problem: SearchProblem) -> bool:
    """Return whether the tensors of a structure may fit at its leanest sizes, with the leanest engine.

    The leanest size is the smallest one, except in two cases: one row alone has no padding, and the largest size may
    take a whole optimizer step, so that no gradient waits beside a forward pass. An excess of 1 % counts as fitting,
    because fewer checkpoints never allocate less than all, but for 1 % (tests/test_laws.py). The allocator's slack is
    left out, which can be smaller with fewer checkpoints.
    """
    sizes = sizes_of(structure, problem)
    if not sizes:
        return True
    smallest, second, largest = sizes[0], sizes[min(1, len(sizes) - 1)], sizes[len(sizes) - 1]
    least = [smallest]
    least += [second] if second.pads != smallest.pads else []
    least += [largest] if largest.accumulates != smallest.accumulates else []
    answers = (estimate_or_none(with_smallest_utilization(size, problem), problem) for size in least)
    most = LEANEST_MARGIN * problem.cluster.gpu.free_bytes
    return any(answer is not None and allocated_bytes(answer) <= most for answer in answers)


def allocated_bytes(answer: Estimate) -> int:
    """Return the peak of a training GPU without the slack of PyTorch's allocator."""
    return max(phase.total_bytes - phase.components.get("fragmentation", 0) for phase in answer.gpus[0].phases)

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
    that the smallest batch counts too.
    """
    if problem.job.optimize != "throughput":
        return inf
    sizes = batch_sizes(structure, problem.job)
    if not sizes:
        return 0.0
    ends = (sizes[0], sizes[len(sizes) - 1])
    return max(throughput(each, problem.cluster, ALL_SEQUENCES).tokens_per_second for each in ends)


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
    """Return whether the tensors of a structure fit at its smallest size and with the leanest engine.

    1 % more than the GPU has counts as fitting: fewer checkpoints never allocate less than all, but for 1 %
    (tests/test_laws.py). The slack of the allocator is left out, which can be less with fewer checkpoints.
    """
    sizes = sizes_of(structure, problem)
    if not sizes:
        return True
    answer = estimate_or_none(with_smallest_utilization(sizes[0], problem), problem)
    return answer is not None and allocated_bytes(answer) <= LEANEST_MARGIN * problem.cluster.gpu.free_bytes


def allocated_bytes(answer: Estimate) -> int:
    """Return the peak of a training GPU without the slack of PyTorch's allocator."""
    return max(phase.total_bytes - phase.components.get("fragmentation", 0) for phase in answer.gpus[0].phases)

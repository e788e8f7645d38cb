"""One candidate: its estimate, the share of its colocated vLLM engine, the cards that it fits, and its practicality."""

from collections.abc import Iterable, Iterator
from math import ceil

from msgspec.structs import replace

from planner.candidate import Candidate
from planner.errors import NotMeasured, PlanError
from planner.estimation import estimate, with_residual
from planner.gpus.cluster import Cluster, Gpu
from planner.gpus.host_memory import with_usual_host
from planner.memory.engine.budget import EngineDoesNotFit, EngineRefusal, engine_or_refusal
from planner.memory.engine.settings import engine_settings
from planner.quantities import Estimate, Note
from planner.search.knobs import SearchProblem
from planner.search.sizes import largest
from planner.search.structures import meets_a_stop

# Rows for which a colocated engine gets KV cache, as a multiple of the rows of a micro-batch (of a whole rollout where
# memory is free): even if the estimate is off by the size of the cache, they still fit. vLLM stops at start if its
# budget leaves no block (v1/core/kv_cache_utils.py, "No available memory for the cache blocks").
ROWS_KEPT = 2
LARGEST_UTILIZATION = 95  # hundredths of the GPU; vLLM's default is 0.92, and a colocated trainer needs the rest


def estimate_or_none(candidate: Candidate, problem: SearchProblem) -> Estimate | None:
    """Estimate a candidate; return None if its vLLM engine would not start or its layers cannot be measured."""
    risk = problem.job.risk
    try:
        answer = estimate(candidate, problem.cluster, risk)
    except (EngineDoesNotFit, NotMeasured):
        return None
    return with_residual(answer, problem.residual, risk) if problem.residual else answer


def candidate_fits(candidate: Candidate, problem: SearchProblem) -> bool:
    """Return whether the engine of a candidate starts and its estimate fits."""
    answer = estimate_or_none(candidate, problem)
    return answer is not None and answer.fits


def utilization_range(candidate: Candidate, problem: SearchProblem) -> tuple[int, int]:
    """Return the smallest and largest `vllm_gpu_memory_utilization` of a colocated engine, in hundredths.

    The smallest is the one with which the engine starts and its KV cache keeps `ROWS_KEPT` times the rows of a
    micro-batch; it is above the largest if there is none. Both are the pinned value if there is one.
    """
    if "vllm_gpu_memory_utilization" in problem.job.pinned:
        pinned = round(100 * candidate.vllm_gpu_memory_utilization)
        return pinned, pinned
    rows = candidate.per_device_train_batch_size * candidate.vllm_tensor_parallel_size
    return share_that_keeps(rows, candidate, problem), LARGEST_UTILIZATION


def share_that_keeps(rows: int, candidate: Candidate, problem: SearchProblem) -> int:
    """Return the smallest `vllm_gpu_memory_utilization`, in hundredths, that keeps `ROWS_KEPT` times that many rows.

    It is above `LARGEST_UTILIZATION` if the engine would not start with any share.
    """
    gpu, settings = problem.cluster.gpu, engine_settings(candidate, problem.cluster.gpu)
    share = 1
    answer = engine_or_refusal(candidate.model, gpu, replace(settings, gpu_memory_utilization=share / 100))
    if isinstance(answer, EngineRefusal):
        share = round(100 * answer.utilization_that_fits)
        if not share:
            return LARGEST_UTILIZATION + 1
        answer = engine_or_refusal(candidate.model, gpu, replace(settings, gpu_memory_utilization=share / 100))
    if isinstance(answer, EngineRefusal):
        return LARGEST_UTILIZATION + 1
    more_tokens = ROWS_KEPT * rows * candidate.row_tokens - answer.kv_tokens
    more_bytes = max(0.0, more_tokens) * answer.kv_cache_bytes / answer.kv_tokens
    return share + ceil(100 * more_bytes / gpu.total_bytes)


def with_utilization(candidate: Candidate, hundredths: int, problem: SearchProblem) -> Candidate:
    """Return the candidate with `vllm_gpu_memory_utilization` in hundredths, or unchanged if the job pins it."""
    if "vllm_gpu_memory_utilization" in problem.job.pinned:
        return candidate
    return replace(candidate, vllm_gpu_memory_utilization=hundredths / 100)


def with_smallest_utilization(candidate: Candidate, problem: SearchProblem) -> Candidate:
    """Return the candidate with the smallest share of the GPU with which its colocated engine starts.

    If it does not fit with this share, it fits with none.
    """
    if candidate.vllm != "colocate":
        return candidate
    return with_utilization(candidate, min(utilization_range(candidate, problem)[0], LARGEST_UTILIZATION), problem)


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


def fitting_cards(candidate: Candidate, cluster: Cluster, cards: Iterable[Gpu], risk: float) -> Iterator[str]:
    """Yield the cards on which the candidate fits unchanged, in nodes of their usual host memory.

    Smallest memory first, then the slower card: usually the cheaper one. Prices are not compared here.
    """
    for gpu in sorted(cards, key=lambda gpu: (gpu.total_bytes, gpu.bf16_flops)):
        rented = with_usual_host(Cluster(gpu=gpu, nodes=cluster.nodes, gpus_per_node=cluster.gpus_per_node))
        try:
            fits = not meets_a_stop(candidate, rented) and estimate(candidate, rented, risk).fits
        except PlanError:
            continue  # a vLLM engine that would not start there
        if fits:
            yield gpu.name


# A run of a few hundred optimizer steps takes days from here on.
LONGEST_STEP_SECONDS = 600.0
# From this size on every expert uses an inference engine: `generate` reads all weights for each token, without paged
# attention or CUDA graphs (TRL, docs/source/speeding_up_training.md).
LARGEST_GENERATED_PARAMS = 30 * 10**9


def impractical(answer: Estimate) -> tuple[Note, ...]:
    """Return a note that says why nobody would train like this; empty for a practical plan."""
    candidate, seconds = answer.candidate, answer.throughput.step_seconds
    if seconds > LONGEST_STEP_SECONDS:
        return (Note("step_too_long", {"samples": candidate.effective_batch_size, "step_seconds": seconds}),)
    generates = candidate.method_row.generates and candidate.vllm == "off"
    if generates and candidate.model.params > LARGEST_GENERATED_PARAMS:
        share = answer.throughput.seconds["generation"] / seconds
        return (Note("generates_large_model", {"model": candidate.model.id, "share": share}),)
    return ()

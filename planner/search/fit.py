"""The estimate of one candidate, with the share of the GPU that its colocated vLLM engine gets."""

from dataclasses import replace

from msgspec import structs

from planner.candidate import Candidate
from planner.errors import NotMeasured
from planner.estimate import estimate, with_residual
from planner.memory.engine.budget import EngineDoesNotFit, EngineRefusal, engine_or_refusal
from planner.memory.engine.settings import engine_settings
from planner.quantities import Estimate
from planner.search.binary_search import largest
from planner.search.knobs import SearchProblem

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
    return structs.replace(candidate, vllm_gpu_memory_utilization=hundredths / 100)


def with_smallest_utilization(candidate: Candidate, problem: SearchProblem) -> Candidate:
    """Return the candidate with the smallest share of the GPU with which its colocated engine starts.

    If this candidate does not fit, it fits with no share.
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

"""Rows that several GPUs share (context and sequence parallel), planned where no candidate without them fits."""

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from planner.errors import InputError
from planner.jobs.job import Job
from planner.jobs.rules import refuse_contradictions
from planner.quantities import Estimate, Note
from planner.schemes import SHARDING_OF_SHARED_ROWS
from planner.search.knobs import SearchProblem
from planner.search.search import search


def search_with_shared_rows(problems: Iterable[SearchProblem]) -> tuple[SearchProblem, Estimate] | None:
    """Return the fastest candidate whose rows the fewest GPUs of a node share; None if none fits.

    The tuning classes are tried in the order of `problems`.
    """
    for problem in problems:
        for size in range(2, problem.cluster.gpus_per_node + 1):
            ways = shared_by(size, problem)
            if ways:
                return max(ways, key=lambda each: each[1].throughput.tokens_per_second)
    return None


def longest_shared_rows(problem: SearchProblem) -> Estimate | None:
    """Return the candidate with the longest rows that several GPUs of a node share; None if none fits."""
    sizes = range(2, problem.cluster.gpus_per_node + 1)
    answers = [answer for size in sizes for _, answer in shared_by(size, problem)]
    return max(answers, key=lambda each: (each.candidate.row_tokens, each.throughput.tokens_per_second), default=None)


def shared_by(size: int, problem: SearchProblem) -> list[tuple[SearchProblem, Estimate]]:
    """Return the best candidates whose rows `size` GPUs share, one for each way that the job allows and that fits."""
    return [
        (way, answer)
        for setting, sharding in SHARDING_OF_SHARED_ROWS.items()
        if (way := with_allowed_pins(problem, {setting: size, "sharding": sharding}))
        and (answer := search(way))
        and answer.fits
    ]


def with_allowed_pins(problem: SearchProblem, pins: Mapping[str, object]) -> SearchProblem | None:
    """Return the problem with more pinned settings; None if the job pins one of them or they contradict it."""
    if pins.keys() & problem.job.pinned.keys():
        return None
    try:
        job = replace(problem.job, pinned={**problem.job.pinned, **pins})
        refuse_contradictions(job, problem.cluster)
    except InputError:
        return None
    return replace(problem, job=job)


def shared_rows_notes(best: Estimate, job: Job) -> tuple[Note, ...]:
    """Note rows that several GPUs share though the job does not pin it."""
    candidate = best.candidate
    if candidate.row_gpus == 1 or job.pinned.keys() & {"cp_size", "sp_size"}:
        return ()
    return (Note("rows_shared", {"gpus": candidate.row_gpus, "samples": candidate.effective_batch_size}),)

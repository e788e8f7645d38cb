"""Is the recommendation the best candidate? Compares the search with brute force over every candidate of random jobs.

    python -m benchmarks.optimality [--jobs 200] [--seed 1]

Brute force estimates every structure at every batch or length and, with a colocated vLLM engine, every hundredth of the
GPU. It shares the list of structures and the formulas with the search, not its bounds and binary searches. A job with
more than 300,000 candidates is drawn again. Writes results/optimality.md.
"""

import argparse
import platform
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from benchmarks.random_jobs import UP_TO_64, random_questions
from planner.candidate import Candidate
from planner.errors import InputError
from planner.estimation import estimate
from planner.gpus.cluster import Cluster
from planner.quantities import Estimate
from planner.search import fit
from planner.search.fit import estimate_or_none, utilization_range, with_utilization
from planner.search.knobs import SearchProblem, structures
from planner.search.search import NEAR_BEST, is_precise, merit, search, trainer_peak_bytes
from planner.search.sizes import batch_sizes, length_sizes
from planner.units import GIB
from probes.substitution import substituted

LARGEST_PRODUCT = 300_000  # candidates of a job
RESULTS = Path(__file__).parent.parent / "results" / "optimality.md"
EMPTY_SHARE = (0, 0)


class Comparison(NamedTuple):
    """One job: the search's answer against the best of all candidates."""

    number: int
    words: str
    candidates: int
    estimated: int  # by the search
    aims_equal: bool  # the same length or batch where the job asks for the largest, and both fit or neither
    speed: float  # of the search's answer, as a share of the best candidate's
    more_bytes: int  # that the answer needs beyond the leanest candidate within 2 % of the best

    @property
    def optimal(self) -> bool:
        return self.aims_equal and self.speed >= NEAR_BEST


def sized(problem: SearchProblem) -> list[tuple[Candidate, tuple[int, int]]]:
    """Every candidate without its share of the GPU, and the shares that it can have, in hundredths."""
    found = []
    for structure in structures(problem):
        at_lengths = problem.job.optimize == "max-length"
        sizes = length_sizes(structure, problem) if at_lengths else batch_sizes(structure, problem.job)
        for index in range(len(sizes)):
            candidate = sizes[index]
            shares = utilization_range(candidate, problem) if candidate.vllm == "colocate" else EMPTY_SHARE
            found.append((candidate, shares))
    return found


def every_estimate(sizes: list[tuple[Candidate, tuple[int, int]]], problem: SearchProblem) -> Iterator[Estimate]:
    """Estimate all candidates that could start."""
    for candidate, (low, high) in sizes:
        for share in range(low, high + 1):
            chosen = candidate if (low, high) == EMPTY_SHARE else with_utilization(candidate, share, problem)
            answer = estimate_or_none(chosen, problem)
            if answer is not None:
                yield answer


def compare(number: int, problem: SearchProblem) -> Comparison | None:
    """Compare the search with brute force; None if there are too many candidates or none."""
    sizes = sized(problem)
    product = sum(high - low + 1 for _, (low, high) in sizes)
    if not 1 <= product <= LARGEST_PRODUCT:
        return None
    fitting = [answer for answer in every_estimate(sizes, problem) if answer.fits]
    fitting = [answer for answer in fitting if is_precise(answer.candidate)] or fitting
    estimated = [0]

    def counting(candidate: Candidate, cluster: Cluster, risk: float) -> Estimate:
        estimated[0] += 1
        return estimate(candidate, cluster, risk)

    with substituted(fit, "estimate", counting):
        found = search(problem)
    job, gpu = problem.job, problem.cluster.gpu
    words = f"{job.model.id} · {job.method} {problem.tuning_class} · {problem.cluster.num_gpus} x {gpu.name}"
    fits = found is not None and found.fits
    if not fitting or found is None or not fits:
        return Comparison(number, words, product, estimated[0], fits == bool(fitting), 1.0, 0)
    *aims, best_speed = max(merit(answer, job) for answer in fitting)
    near = [each for each in fitting if merit(each, job) >= (*aims, NEAR_BEST * best_speed)]
    *own_aims, speed = merit(found, job)
    least = min(trainer_peak_bytes(each) for each in near)
    return Comparison(
        number, words, product, estimated[0], own_aims == aims, speed / best_speed, trainer_peak_bytes(found) - least
    )


def report(rows: list[Comparison], seed: int, seconds: float) -> str:
    """The text of results/optimality.md."""
    optimal = sum(row.optimal for row in rows)
    products, estimated = sum(row.candidates for row in rows), sum(row.estimated for row in rows)
    lean = sorted(row.more_bytes for row in rows if row.optimal)
    lines = [
        "# The search against brute force",
        "",
        f"Written by `python -m benchmarks.optimality --jobs {len(rows)} --seed {seed}` on "
        f"{datetime.now(UTC):%Y-%m-%d}, Python {platform.python_version()}, in {seconds / 60:.0f} min.",
        "",
        f"{len(rows)} random jobs (models x clusters of 1 to 64 GPUs x methods x pins x goals), every candidate of",
        "each estimated: all structures, batches or lengths, and every hundredth of the GPU for a colocated engine.",
        "",
        f"- {optimal} of {len(rows)} recommendations reach the best length or batch and at least 98 % of the best",
        "  speed, after which less memory is worth more.",
        f"- The searches estimated {estimated:,} of {products:,} candidates ({estimated / products:.1%}).",
        "- Beyond the leanest candidate within 2 % of the best the recommendations need "
        f"{lean[len(lean) // 2] / GIB:.2f} GiB in the median,",
        f"  {lean[-1] / GIB:.2f} GiB at most: an engine's share is lowered only where it costs no speed.",
        "",
    ]
    missed = [row for row in rows if not row.optimal]
    if missed:
        lines += ["| job | candidates | speed of the best |", "|---|---|---|"]
        lines += [f"| {row.number}: {row.words} | {row.candidates:,} | {row.speed:.1%} |" for row in missed]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    started, rows = time.monotonic(), []
    for number, problem in random_questions(options.seed, UP_TO_64):
        try:
            row = compare(number, problem)
        except InputError:  # a drawn length leaves no room for a prompt
            continue
        if row is None:
            continue
        rows.append(row)
        print(
            f"{len(rows):4} {'ok ' if row.optimal else 'MISS'} {row.speed:.3f} {row.candidates:7} {row.words}",
            flush=True,
        )
        if len(rows) == options.jobs:
            break
    RESULTS.write_text(report(rows, options.seed, time.monotonic() - started), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Count the probes that a search needs; write search_efficiency.md and .jsonl.

    python benchmarks/search.py --jobs 240 --out results

Random jobs on simulated cards with hidden offsets (hidden_cards.py). Our study runs until it certifies the best
candidate. The other samplers get the list of structures that start, which ours does not, and have found the best
candidate as soon as they run it.
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the GP sampler's fits, before they are imported

import optuna
from hidden_cards import HiddenCard, HiddenProbe, best_of_line, exhaustive_best, formulas_alone, hidden_card, truly_fits
from random_jobs import random_questions

from planner.errors import PlanError
from planner.search.binary_search import largest
from planner.search.knobs import SearchProblem
from probes.study.certificate import certificate
from probes.study.sampler import PlanSampler
from probes.study.space import GridPoint, Space, space_of
from probes.study.study import Session, StudyOptions, over_bytes

PEER_PROBES = 30  # at most, for each of the others
CHECKPOINTS = (5, 10, 30)
MOST_ASKS = 4 * PEER_PROBES  # trials, including repeated candidates and those that could not start
CLOSE = 0.01  # of the best candidate's merit
GP_EVERY = 6  # run GP on every sixth job: its fits take seconds
CARDS_A_SEED = 100_000  # so that no two runs share a card
FEW_CANDIDATES = 400  # up to here all are run one by one, to check the exhaustive search
CAUSE_SPREAD = 0.20  # error of each cause of a step's time, where each is wrong by itself

Ask = Callable[[Space, "Counted", int], None]


class Found(Exception):
    """The best candidate was run, or the probes are spent."""


class Counted:
    """A hidden card whose distinct probes are counted until the best is run."""

    def __init__(self, card: HiddenCard, space: Space, best: GridPoint) -> None:
        self.card, self.space, self.best = card, space, best
        self.probe = HiddenProbe(card=card, space=space)
        self.seen: dict[GridPoint, bool] = {}
        self.found_at = 0
        self.close_at = 0

    def fits(self, point: GridPoint) -> bool:
        if point not in self.seen:
            self.seen[point] = truly_fits(self.card, self.space, point)
            if self.seen[point]:
                self._compare(point)
            if self.found_at or len(self.seen) >= PEER_PROBES:
                raise Found
        return self.seen[point]

    def _compare(self, point: GridPoint) -> None:
        merit, most = self.space.merit(point), self.space.merit(self.best)
        if merit >= most:
            self.found_at = len(self.seen)
        if not self.close_at and merit[0] >= most[0] and merit[1] >= (1 - CLOSE) * most[1]:
            self.close_at = len(self.seen)


# -- the others --------------------------------------------------------------------------------------------------------


def by_sampler(make: Callable[[int], optuna.samplers.BaseSampler]) -> Ask:
    """One of Optuna's samplers over structure x size x share; a constraint on each trial carries the memory."""

    def run(space: Space, counted: Counted, seed: int) -> None:
        study = optuna.create_study(sampler=make(seed), direction="maximize")
        for _ in range(MOST_ASKS):
            trial = study.ask()
            point = asked_place(space, trial)
            if point is None:
                study.tell(trial, state=optuna.trial.TrialState.PRUNED)
                continue
            fits = counted.fits(point)
            trial.set_constraint("bytes_over_budget", over_bytes(counted.probe.at(point), space))
            study.tell(trial, scalar(space, point) if fits else 0.0)
            if study._stop_flag:
                return

    return run


def asked_place(space: Space, trial: optuna.Trial) -> GridPoint | None:
    line = trial.suggest_categorical("structure", list(range(len(space.lines))))
    count = len(space.lines[line].sizes)
    size = trial.suggest_int(f"size_of_{count}", 0, count - 1)
    low, high = space.shares(line, size)
    if low > high:
        return None
    share = low if low == high else min(max(trial.suggest_int("share", 1, 95), low), high)
    point = GridPoint(line, size, share)
    return point if space.starts(point) else None


def scalar(space: Space, point: GridPoint) -> float:
    """Merit as one number: the job's goal first, then speed."""
    precise, first, *rest = space.merit(point)
    return (1e6 if precise else 0.0) + first + sum(rest) * 1e-7


def bisection(space: Space, counted: Counted, seed: int) -> None:
    """Find in each structure the largest size that runs, then the largest share of the card for its engine."""
    for line in range(len(space.lines)):
        count = len(space.lines[line].sizes)
        size = largest(
            0,
            count - 1,
            lambda size, line=line: (
                space.starts(point := space.with_smallest_share(line, size)) and counted.fits(point)
            ),
        )
        if size >= 0:
            low, high = space.shares(line, size)
            largest(low, high, lambda share: counted.fits(GridPoint(line, size, share)))  # noqa: B023


PEERS: dict[str, Ask] = {
    "TPE": by_sampler(lambda seed: optuna.samplers.TPESampler(seed=seed)),
    "GP": by_sampler(lambda seed: optuna.samplers.GPSampler(seed=seed)),
    "BruteForce": by_sampler(lambda seed: optuna.samplers.BruteForceSampler(seed=seed)),
    "Random": by_sampler(lambda seed: optuna.samplers.RandomSampler(seed=seed)),
    "bisection": bisection,
}


def peer(name: str, space: Space, card: HiddenCard, best: GridPoint, seed: int) -> dict[str, int]:
    counted = Counted(card, space, best)
    with suppress(Found):
        PEERS[name](space, counted, seed)
    return {"found_at": counted.found_at, "close_at": counted.close_at, "probes": len(counted.seen)}


# -- ours --------------------------------------------------------------------------------------------------------------


def ours(space: Space, card: HiddenCard, best: GridPoint | None) -> dict[str, Any]:
    """Run our study until it certifies; return its counts."""
    sampler = PlanSampler(space)
    study = optuna.create_study(sampler=sampler, direction="maximize")
    began = time.process_time()
    session = Session(
        study=study,
        sampler=sampler,
        probe=HiddenProbe(card=card, space=space),
        options=StudyOptions(estimator=formulas_alone),
        began=0.0,
    )
    ending, _ = session.run()
    knowledge = sampler.knowledge(study)
    found = certificate(knowledge)
    certified = knowledge.ran[0] if knowledge.ran else None
    same = certified is None and best is None
    if certified is not None and best is not None:
        same = space.merit(certified) == space.merit(best)
    return {
        "probes": session.count,
        "correct": same,
        "holds": found.holds,
        "ending": ending,
        "out_of_memory": sum(each.outcome == "out_of_memory" for each in knowledge.measured.values()),
        "excluded_by_probe": found.excluded_by_probe,
        "excluded_by_belief": found.excluded_by_belief,
        "seconds": round(time.process_time() - began, 2),
        "point": certified,
    }


# -- one job -----------------------------------------------------------------------------------------------------------


def planned(space: Space) -> GridPoint | None:
    """The candidate that the plan recommends without a probe."""
    return exhaustive_best(space, lambda point: space.starts(point) and fits_by_estimate(space, point))


def fits_by_estimate(space: Space, point: GridPoint) -> bool:
    answer = space.estimate(point)
    return answer is not None and answer.fits


def one_by_one(space: Space, card: HiddenCard) -> GridPoint | None:
    """The best candidate of a small space, every one tried."""
    shares = [
        (line, size, space.shares(line, size))
        for line in range(len(space.lines))
        for size in range(len(space.lines[line].sizes))
    ]
    points = [GridPoint(line, size, share) for line, size, (low, high) in shares for share in range(low, high + 1)]
    if len(points) > FEW_CANDIDATES:
        raise ValueError("too many")
    return max((point for point in points if truly_fits(card, space, point)), key=space.merit, default=None)


def regret(space: Space, card: HiddenCard, certified: GridPoint) -> float:
    """Share of the best speed lost where each cause of a step's time is wrong by itself; no study corrects it."""
    draw = random.Random(f"{card.seed} causes")
    factors: dict[str, float] = {}

    def speed(point: GridPoint) -> float:
        answer = space.estimate(point)
        assert answer is not None
        for cause in sorted(answer.throughput.seconds):
            factors.setdefault(cause, draw.uniform(1 - CAUSE_SPREAD, 1 + CAUSE_SPREAD))
        step = sum(seconds * factors[cause] for cause, seconds in answer.throughput.seconds.items())
        return answer.throughput.tokens_per_second * answer.throughput.step_seconds / step

    mine = speed(certified)
    precise = space.merit(certified)[0]
    fitting = [
        point
        for line in range(len(space.lines))
        for point in best_of_line(space, line, lambda point: truly_fits(card, space, point))
    ]
    return 1 - mine / max(speed(point) for point in fitting if space.merit(point)[0] == precise)


def job_row(number: int, problem: SearchProblem, seed: int, peers: Sequence[str]) -> dict[str, Any] | None:
    """The row of one job; None where nothing starts or nothing fits by estimate, so that nobody would probe."""
    try:
        space = space_of(problem, "cuda", formulas_alone)
    except PlanError:
        return None
    expected = planned(space) if space.lines else None
    if expected is None:
        return None
    card = hidden_card(CARDS_A_SEED * seed + number)
    best = exhaustive_best(space, lambda point: truly_fits(card, space, point))
    try:
        verified = (one_by_one(space, card) is None) == (best is None) and (
            best is None or space.merit(best) == space.merit(one_by_one(space, card) or best)
        )
    except ValueError:
        verified = None
    mine = ours(space, card, best)
    point = mine.pop("point")
    row = {
        "number": number,
        "model": problem.job.model.id,
        "method": problem.job.method,
        "class": problem.tuning_class,
        "goal": problem.job.optimize,
        "gpus": f"{problem.cluster.num_gpus}x{problem.cluster.gpu.name}",
        "pins": {name: value for name, value in problem.job.pinned.items() if isinstance(value, (int, str, bool))},
        "structures": len(space.lines),
        "estimates": len(space.estimates),
        "plan_was_best": best is not None
        and space.merit(expected) == space.merit(best)
        and truly_fits(card, space, expected),
        "plan_fits": truly_fits(card, space, expected),
        "verified": verified,
        "ours": mine,
        "peers": {name: peer(name, space, card, best, number) for name in peers} if best is not None else {},
    }
    if problem.job.optimize == "throughput" and point is not None:
        row["regret_by_cause"] = round(regret(space, card, point), 4)
    return row


# -- the report --------------------------------------------------------------------------------------------------------


def percentile(values: Sequence[int], share: float) -> int:
    """The smallest value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(len(ordered) * share * 1000) // 1000) - 1)]


def report(rows: Sequence[dict[str, Any]], seed: int, command: str, seconds: float) -> str:
    lines = [HEADER.format(count=len(rows), command=command, seed=seed, minutes=seconds / 60), ""]
    lines += [
        "## Ours, until it certifies",
        "",
        "| jobs | count | certified is the best | median probes | 95th percentile | most | ended by out of memory |",
    ]
    lines += ["|---|---|---|---|---|---|---|"]
    goals = sorted({row["goal"] for row in rows})
    hard = [row for row in rows if not row["plan_was_best"]]
    for name, chosen in [
        ("all", rows),
        *((goal, [row for row in rows if row["goal"] == goal]) for goal in goals),
        ("plan alone was not the best", hard),
    ]:
        lines.append(our_line(name, chosen))
    lines += ["", *facts(rows), "", "## The others, over the same candidates", "", *peer_table(rows)]
    return "\n".join(lines) + "\n"


def our_line(name: str, rows: Sequence[dict[str, Any]]) -> str:
    probes = [row["ours"]["probes"] for row in rows]
    right = sum(row["ours"]["correct"] for row in rows)
    short = sum(row["ours"]["out_of_memory"] for row in rows) / max(sum(probes), 1)
    middle, most = statistics.median(probes), percentile(probes, 0.95)
    certified = f"{right} ({right / len(rows):.1%})"
    return f"| {name} | {len(rows)} | {certified} | {middle:g} | {most} | {max(probes)} | {short:.0%} |"


def facts(rows: Sequence[dict[str, Any]]) -> list[str]:
    alone = sum(row["plan_was_best"] for row in rows) / len(rows)
    ran = sum(row["plan_fits"] for row in rows) / len(rows)
    checked = [row["verified"] for row in rows if row["verified"] is not None]
    lost = sorted(row["regret_by_cause"] for row in rows if "regret_by_cause" in row)
    wrong = [str(row["number"]) for row in rows if not row["ours"]["correct"]]
    return [
        f"- Without a probe: what the plan recommends is the best there is in {alone:.0%} of the jobs, "
        f"and fits in {ran:.0%} (it keeps to a risk of 1 %).",
        "- The exhaustive search was checked candidate by candidate in the "
        f"{len(checked)} jobs with at most {FEW_CANDIDATES} of them: {sum(checked)} agree.",
        f"- Jobs whose certified candidate is not the best: {', '.join(wrong) or 'none'}.",
        "- Speeds are one factor off here, which keeps their order. Where instead every cause of a step "
        f"(compute, communication, generation ..) is off by ±{CAUSE_SPREAD:.0%} on its own, "
        f"the certified candidate's speed is {statistics.mean(lost):.2%} below the best there is "
        f"in the mean, {lost[-1]:.1%} at most, over the {len(lost)} jobs that ask for throughput: "
        "what the certificate is about is memory.",
        "- Of a study the sampler itself takes "
        f"{statistics.median(row['ours']['seconds'] for row in rows):.2f} s in the median, "
        f"{max(row['ours']['seconds'] for row in rows):.0f} s at most.",
    ]


def peer_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    within = " | ".join(f"best run within {count}" for count in CHECKPOINTS)
    lines = [f"| sampler | jobs | {within} | within 1 % of it after {PEER_PROBES} |"]
    lines += ["|---" * (len(CHECKPOINTS) + 3) + "|"]
    feasible = [row for row in rows if row["peers"]]
    if not feasible:
        return ["Not run: `--ours-only`."]
    counts = [row["ours"]["probes"] if row["ours"]["correct"] else 10**6 for row in feasible]
    cells = [f"{sum(count <= most for count in counts) / len(counts):.0%}" for most in CHECKPOINTS]
    found = sum(count < 10**6 for count in counts) / len(counts)
    lines.append(f"| ours, proof included | {len(feasible)} | {' | '.join(cells)} | {found:.0%} |")
    for name in PEERS:
        answers = [row["peers"][name] for row in feasible if name in row["peers"]]
        if not answers:
            continue
        cells = [
            f"{sum(0 < answer['found_at'] <= most for answer in answers) / len(answers):.0%}" for most in CHECKPOINTS
        ]
        close = sum(answer["close_at"] > 0 for answer in answers) / len(answers)
        lines.append(f"| {name} | {len(answers)} | {' | '.join(cells)} | {close:.0%} |")
    return lines


HEADER = """# How many probes a search needs

{count} random jobs on **simulated** cards. The truth is the planner's estimate with offsets that no sampler knows:
context -300..+300 MB, slack 0..6 % of the allocated bytes, activations -6..+6 %, each attention kernel 0..+5 %, each
structure of the training pass -0.5..+0.5 %, speed -20..+20 %; uniform, drawn once for each card
(`benchmarks/hidden_cards.py`). Nothing here ran on a GPU. Seed {seed}; made by `{command}` in {minutes:.1f} minutes of
one core.

A job is a model of the catalogue (0.3B to 80B), 1 to 8 cards of one kind, a method, a tuning class, a goal and some
pinned settings, drawn at random (`benchmarks/random_jobs.py`). Jobs for which the plan says that nothing fits are left
out. The best candidate is found exhaustively over every structure, every micro-batch or length, and every share of the
card for a colocated engine. *Certified is the best* means equal merit, or that both say that nothing fits. For our
study all probes up to the certificate count. The other samplers prove nothing, so only their probes until they first
run a candidate of the best merit count; they choose a structure, a size and a share. Repeated candidates and engines
that would not start cost them nothing, and out of memory is a constraint on a completed trial. Optuna's samplers have
their defaults and the job's number as seed; GP runs on every {gp}th job."""
HEADER = HEADER.replace("{gp}", str(GP_EVERY))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--jobs", type=int, default=240)
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--out", type=Path, help="folder for search_efficiency.md and .jsonl")
    parser.add_argument("--ours-only", action="store_true", help="skip Optuna's samplers and bisection")
    asked = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    rows: list[dict[str, Any]] = []
    began = time.process_time()
    for number, problem in random_questions(asked.seed):
        peers = [] if asked.ours_only else [name for name in PEERS if name != "GP" or len(rows) % GP_EVERY == 0]
        row = job_row(number, problem, asked.seed, peers)
        if row is not None:
            rows.append(row)
            print(
                f"{len(rows)}/{asked.jobs} {row['goal']} {row['method']}: {row['ours']['probes']} probes",
                file=sys.stderr,
            )
        if len(rows) == asked.jobs:
            break
    command = f"python benchmarks/search.py --jobs {asked.jobs} --seed {asked.seed} --out results"
    text = report(rows, asked.seed, command, time.process_time() - began)
    print(text)
    if asked.out:
        (asked.out / "search_efficiency.md").write_text(text, encoding="utf-8")
        (asked.out / "search_efficiency.jsonl").write_text(
            "".join(json.dumps(row, sort_keys=True) + "\n" for row in rows), encoding="utf-8"
        )


if __name__ == "__main__":
    main()

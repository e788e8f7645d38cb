"""Count the rounds that a study needs with several probes at a time; write parallel_probes.md.

    python benchmarks/parallel_probes.py --jobs 60 --out results

The jobs and the simulated cards are those of search.py. All probes take equally long, so that a study's wall time is
its number of rounds: one probe a round, or as many as there is room for.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hidden_cards import HiddenCard, HiddenProbe, exhaustive_best, formulas_alone, hidden_card, truly_fits
from random_jobs import random_questions
from search import CARDS_A_SEED, planned

from planner.errors import PlanError
from planner.measurements.measurement import Measurement
from planner.search.knobs import SearchProblem
from probes.study.certificate import certificate
from probes.study.space import GridPoint, Space, space_of
from probes.study.state import Knowledge, knowledge_of, next_point


class Study(NamedTuple):
    """A study that has ended. `right`: it is certified, and its best candidate has the merit of the truly best."""

    rounds: int
    probes: int
    right: bool


def batch_of(knowledge: Knowledge, room: int) -> list[GridPoint]:
    """The probes that a study starts before any of them has ended."""
    batch: list[GridPoint] = []
    while len(batch) < room and (point := next_point(knowledge, batch)) is not None:
        batch.append(point)
    return batch


def study(space: Space, card: HiddenCard, best: GridPoint | None, room: int) -> Study:
    """Probe in rounds until no candidate is open."""
    probe, measured, rounds = HiddenProbe(card=card, space=space), dict[GridPoint, Measurement](), 0
    while batch := batch_of(knowledge := knowledge_of(space, measured, {}), room):
        measured |= {point: probe.at(point) for point in batch}
        rounds += 1
    ran = knowledge.ran[0] if knowledge.ran else None
    if ran is None or best is None:
        return Study(rounds, len(measured), right=ran is best)
    return Study(rounds, len(measured), right=certificate(knowledge).holds and space.merit(ran) == space.merit(best))


def jobs(seed: int) -> Iterator[tuple[Space, HiddenCard]]:
    """The jobs of search.py: those of which anything fits by estimate."""
    for number, problem in random_questions(seed):
        space = _space(problem)
        if space is not None and planned(space) is not None:
            yield space, hidden_card(CARDS_A_SEED * seed + number)


def _space(problem: SearchProblem) -> Space | None:
    try:
        space = space_of(problem, "cuda", formulas_alone)
    except PlanError:
        return None
    return space if space.lines else None


def report(pairs: list[tuple[Study, Study]], room: int, command: str) -> str:
    lines = [HEADER.format(jobs=len(pairs), room=room, command=command), ""]
    lines += [f"| probes one at a time | jobs | rounds of 1 | rounds of {room} | share | least possible | probes |"]
    lines += ["|---|---|---|---|---|---|---|", _line("any", pairs)]
    for count in sorted({alone.rounds for alone, _ in pairs}):
        lines.append(_line(str(count), [pair for pair in pairs if pair[0].rounds == count]))
    for least in (2, 4):
        lines.append(_line(f"{least} or more", [pair for pair in pairs if pair[0].rounds >= least]))
    wrong = [sum(not studies[which].right for studies in pairs) for which in (0, 1)]
    lines += [
        "",
        f"Certified candidates that are not the best: {wrong[0]} one at a time, {wrong[1]} beside each other.",
    ]
    return "\n".join(lines) + "\n"


def _line(name: str, pairs: list[tuple[Study, Study]]) -> str:
    if not pairs:
        return f"| {name} | 0 | | | | | |"
    one, many = sum(alone.rounds for alone, _ in pairs), sum(beside.rounds for _, beside in pairs)
    probes = sum(beside.probes for _, beside in pairs)
    return f"| {name} | {len(pairs)} | {one} | {many} | {many / one:.0%} | {len(pairs) / one:.0%} | {probes} |"


HEADER = """# Several probes at a time

{jobs} random jobs on **simulated** cards with hidden offsets, those of [search_efficiency.md](search_efficiency.md). A
study runs until it certifies, once with one probe at a time and once with {room}. All probes take equally long, so the
wall time is the number of rounds. Nothing here ran on a GPU. Made by `{command}`.

A study takes one round at least: *least possible* is one round for each job, whatever the room. *Probes* are those of
all rounds of {room}: probes beside each other know less of each other, so they are more."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--jobs", type=int, default=60)
    parser.add_argument("--room", type=int, default=8, help="probes at a time")
    parser.add_argument("--least", type=int, default=1, help="only jobs that take this many probes one at a time")
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--out", type=Path, help="folder for parallel_probes.md")
    asked = parser.parse_args()
    pairs: list[tuple[Study, Study]] = []
    for space, card in jobs(asked.seed):
        best = exhaustive_best(space, lambda point: truly_fits(card, space, point))  # noqa: B023
        alone = study(space, card, best, 1)
        if alone.rounds >= asked.least:
            pairs.append((alone, study(space, card, best, asked.room)))
            print(f"{len(pairs)}/{asked.jobs}: {alone.rounds} -> {pairs[-1][1].rounds} rounds", file=sys.stderr)
        if len(pairs) == asked.jobs:
            break
    options = f" --least {asked.least}" if asked.least > 1 else ""
    command = f"python benchmarks/parallel_probes.py --jobs {asked.jobs} --room {asked.room}{options}"
    text = report(pairs, asked.room, command)
    print(text)
    if asked.out:
        (asked.out / "parallel_probes.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

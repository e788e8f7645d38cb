"""What a study knows: which candidates ran, which cannot run, and which could still be better than the best that ran."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from planner.binary_search import largest
from planner.measurements.measurement import Measurement
from probes.study.observations import gpus_of_rank, observations
from probes.study.posterior import Belief, Draws, Vector, believed, draws
from probes.study.space import FEW_SIZES, Place, Space

# A candidate is excluded when the belief gives it less than this chance of fitting, and taken to fit when it leaves no more than this.
LEAST_CHANCE = 0.005
WORLDS = 400  # samples of the belief in which the best candidate is sought
SEED = 0
FAILED_CANDIDATES = 2  # of one structure, after which its others are not asked
MOST_SIZES = 12  # looked at in one line
MOST_SHARES = 8  # looked at for one size
# Of the merit that the best candidate may have, the share of worlds that offer at least as much as the one asked for: with one half a
# probe halves what is open, as bisection does; a little more, since a probe that fits teaches more than one that runs out.
AIMED = 0.6
# Where fewer worlds than this share have anything open that fits, the problem is whether there is anything: the likeliest candidate is asked,
# the leanest of equals, whose failure excludes all that need more. With a half in place of a quarter 240 random jobs (benchmarks/search.py) take as many.
DOUBTFUL = 0.25


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Knowledge:
    """Of one study. `set_aside`: candidates that failed twice for another reason than memory, and why; `unavailable`: lines that cannot run here."""

    space: Space
    belief: Belief
    measured: Mapping[Place, Measurement]
    set_aside: Mapping[Place, str]
    unavailable: Mapping[int, str] = field(default_factory=dict)

    @property
    def ran(self) -> list[Place]:
        """Candidates that fit, the best by what the job asks for first."""
        fitting = [place for place, measurement in self.measured.items() if measurement.outcome == "fits"]
        return sorted(fitting, key=self.space.merit, reverse=True)

    @property
    def floor(self) -> tuple[float, ...]:
        """What a candidate must exceed to be worth a probe."""
        return self.space.merit(self.ran[0]) if self.ran else ()

    def decided(self, place: Place) -> bool:
        if place in self.measured or place in self.set_aside or place.line in self.unavailable:
            return True
        return sum(each.line == place.line for each in self.set_aside) >= FAILED_CANDIDATES

    def refuted(self, place: Place) -> bool:
        """Whether a probe ran out of memory with it, or with one of its structure that needs no more."""
        return any(
            measurement.outcome == "out_of_memory" and self.space.within(ran, place)
            for ran, measurement in self.measured.items()
        ) or any(self._runs_out_as(ran, place) for ran in self.measured)

    def chance(self, place: Place) -> float:
        """That a candidate fits: at most so much."""
        if any(
            measurement.outcome == "fits" and self.space.within(place, ran)
            for ran, measurement in self.measured.items()
        ):
            return 1.0
        if not self.space.starts(place) or self.refuted(place):
            return 0.0
        return self.belief.fit_probability(self.space.heavy_rows(place))

    def _runs_out_as(self, ran: Place, place: Place) -> bool:
        """Whether the phase in which a candidate of the same structure ran out of memory needs at least as much here."""
        shortage = self.measured[ran].shortage
        if shortage is None or ran.line != place.line:
            return False
        gpus = gpus_of_rank(self.measured[ran], shortage.rank)
        there, here = (
            next((row for row in self.space.rows_at(each) if (row.phase, row.gpus) == (shortage.phase, gpus)), None)
            for each in (ran, place)
        )
        return there is not None and here is not None and here.covers(there)

    def may_fit(self, place: Place) -> bool:
        return self.chance(place) > LEAST_CHANCE

    def surely_fits(self, place: Place) -> bool:
        return self.chance(place) >= 1 - LEAST_CHANCE


def known(
    space: Space,
    measured: Mapping[Place, Measurement],
    set_aside: Mapping[Place, str],
    unavailable: Mapping[int, str] | None = None,
) -> Knowledge:
    """Everything that the measurements of a study say, in the order in which they came."""
    lessons = [
        observations(measurement, space.rows_at(place), str(number))
        for number, (place, measurement) in enumerate(measured.items())
        if measurement.decided and space.starts(place)
    ]
    return Knowledge(
        space=space,
        belief=believed([each for lesson in lessons for each in lesson]),
        measured=measured,
        set_aside=set_aside,
        unavailable=unavailable or {},
    )


# -- what is open ------------------------------------------------------------------------------------------------------


def open_places(knowledge: Knowledge) -> list[Place]:
    """Candidates that are better than the best that ran, that may fit and of which no probe has said, best first.

    Where one is sure to fit, those of less merit are left out: it will be asked first. Of many sizes or shares in a row some stand for all,
    the largest that may fit always among them; so nothing is left out of an answer that there are none.
    """
    space, floor = knowledge.space, knowledge.floor
    found: list[Place] = []
    for line in (line for line in range(len(space.lines)) if line not in knowledge.unavailable):
        for place in _of_line(knowledge, line, floor):
            found.append(place)
            if knowledge.surely_fits(place):
                floor = max(floor, space.merit(place))
    ordered = sorted(found, key=lambda place: (space.merit(place), -knowledge.chance(place)), reverse=True)
    sure = next((index for index, place in enumerate(ordered) if knowledge.surely_fits(place)), len(ordered))
    return ordered[: sure + 1]


def _of_line(knowledge: Knowledge, line: int, floor: tuple[float, ...]) -> Iterator[Place]:
    for size in sizes_that_may_fit(knowledge, line):
        yield from (
            place for place in shares_that_may_fit(knowledge, line, size, floor) if not knowledge.decided(place)
        )


def sizes_that_may_fit(knowledge: Knowledge, line: int) -> Sequence[int]:
    """Largest first. Where sizes are many, none below one that is sure to fit: it has less of what is asked for."""
    space, count = knowledge.space, len(knowledge.space.lines[line].sizes)
    if count <= FEW_SIZES:
        return [size for size in range(count - 1, -1, -1) if knowledge.may_fit(space.leanest(line, size))]
    top = largest(0, count - 1, lambda size: knowledge.may_fit(space.leanest(line, size)))
    sure = largest(0, top, lambda size: knowledge.surely_fits(space.leanest(line, size)))
    return thinned(range(top, max(sure, 0) - 1, -1), MOST_SIZES)


def shares_that_may_fit(knowledge: Knowledge, line: int, size: int, floor: tuple[float, ...]) -> list[Place]:
    """Places of more merit than the floor, the largest share that gains something first, down to one that is sure to fit."""
    space, (low, high) = knowledge.space, knowledge.space.shares(line, size)
    top = largest(low, high, lambda share: knowledge.may_fit(Place(line, size, share)))
    if top < low or space.merit(Place(line, size, top)) <= floor:
        return []
    most = space.merit(Place(line, size, top))
    top = 1 + largest(low, top, lambda share: space.merit(Place(line, size, share)) < most)
    sure = largest(low, top, lambda share: knowledge.surely_fits(Place(line, size, share)))
    places = [Place(line, size, share) for share in thinned(range(top, max(sure, low) - 1, -1), MOST_SHARES)]
    return [place for place in places if space.merit(place) > floor]


def thinned(values: Sequence[int], most: int) -> Sequence[int]:
    """At most so many of them, evenly, the first and the last always."""
    if len(values) <= most:
        return values
    return [values[round(index * (len(values) - 1) / (most - 1))] for index in range(most)]


# -- what to ask next --------------------------------------------------------------------------------------------------


def next_place(knowledge: Knowledge, worlds: int = WORLDS, seed: int = SEED) -> Place | None:
    """The candidate whose probe decides most; None when nothing open is left.

    In each world that the belief allows one open candidate is the best that fits. The one asked for has as much merit as is reached in
    `AIMED` of the worlds in which any of them fits.
    """
    places = open_places(knowledge)
    if not places:
        return None
    best = best_in_worlds(knowledge, places, draws(knowledge.belief, worlds, seed))
    total = sum(best)
    if total < DOUBTFUL * worlds:
        return max(reversed(places), key=knowledge.chance)
    reached = np.cumsum(best) >= AIMED * total
    return places[int(np.argmax(reached))]


def best_in_worlds(knowledge: Knowledge, places: Sequence[Place], worlds: Draws) -> list[int]:
    """In how many worlds each place, ordered by merit, is the first that fits."""
    left: Vector = np.ones(worlds.count, dtype=bool)
    counts = []
    for place in places:
        fitting = left & worlds.fit(knowledge.space.heavy_rows(place))
        counts.append(int(fitting.sum()))
        left &= ~fitting
    return counts

"""The state of a study: which candidates ran, which cannot run, and which could be better than the best that ran."""

from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
from msgspec import Struct, field

from planner.measurements.measurement import Measurement
from planner.search.sizes import largest
from probes.study.observations import gpus_of_rank, observations
from probes.study.posterior import Belief, Samples, Vector, belief_from, draw_samples
from probes.study.space import FEW_SIZES, GridPoint, Space

# A candidate with a probability of fitting of at most this is excluded; with 1 minus this or more it surely fits.
LEAST_CHANCE = 0.005
SAMPLES = 400  # samples of the belief among which the next candidate is chosen
SEED = 0
FAILED_CANDIDATES = 2  # candidates of one line that are set aside, after which no other of the line is probed
MOST_SIZES = 12  # sizes of one line that are examined
MOST_SHARES = 8  # engine shares of one size that are examined
# The probed candidate has the merit that the best fitting one reaches or exceeds in this share of the samples. With 0.5
# a probe would halve the open candidates, as bisection does; it is a little more, since a probe that fits gives more
# information than one that runs out of memory.
TARGET_SHARE = 0.6
# If an open candidate fits in fewer than this share of the samples, the likeliest one is probed, of equals the one with
# the least share: its failure excludes all that need more. With 0.5 instead, the 240 random jobs of
# results/search_efficiency.md take as many probes.
DOUBTFUL_SHARE = 0.25


class Knowledge(Struct, frozen=True, kw_only=True, eq=False):
    """The results of the trials of one study.

    `set_aside`: points that failed twice for another reason than memory, with the reason.
    `unavailable`: lines that cannot run on this machine, with the reason.
    """

    space: Space
    belief: Belief
    measured: Mapping[GridPoint, Measurement]
    set_aside: Mapping[GridPoint, str]
    unavailable: Mapping[int, str] = field(default_factory=dict)

    @property
    def ran(self) -> list[GridPoint]:
        """Points whose probe fitted, the best by the job's goal first."""
        fitting = [point for point, measurement in self.measured.items() if measurement.outcome == "fits"]
        return sorted(fitting, key=self.space.merit, reverse=True)

    @property
    def floor(self) -> tuple[float, ...]:
        """The merit of the best point that ran: only points above it are worth a probe."""
        return self.space.merit(self.ran[0]) if self.ran else ()

    def decided(self, point: GridPoint) -> bool:
        """Return whether a point needs no probe any more: it was measured or set aside, or its line was given up."""
        if point in self.measured or point in self.set_aside or point.line in self.unavailable:
            return True
        return sum(each.line == point.line for each in self.set_aside) >= FAILED_CANDIDATES

    def refuted(self, point: GridPoint) -> bool:
        """Return whether a probe ran out of memory at this point, or at one of its line that needs no more."""
        return any(
            measurement.outcome == "out_of_memory" and self.space.needs_no_more(ran, point)
            for ran, measurement in self.measured.items()
        ) or any(self._runs_out_as(ran, point) for ran in self.measured)

    def chance(self, point: GridPoint) -> float:
        """Return an upper bound of the probability that a point fits; 1 or 0 where the probes decide it."""
        if any(
            measurement.outcome == "fits" and self.space.needs_no_more(point, ran)
            for ran, measurement in self.measured.items()
        ):
            return 1.0
        if not self.space.starts(point) or self.refuted(point):
            return 0.0
        return self.belief.fit_probability(self.space.heavy_phases(point))

    def _runs_out_as(self, ran: GridPoint, point: GridPoint) -> bool:
        """Return whether `point` needs at least as much as `ran` in the phase in which `ran` ran out of memory."""
        shortage = self.measured[ran].shortage
        if shortage is None or ran.line != point.line:
            return False
        gpus = gpus_of_rank(self.measured[ran], shortage.rank)
        measured_phase, phase = (
            next(
                (
                    phase
                    for phase in self.space.phase_models(each)
                    if (phase.phase, phase.gpus) == (shortage.phase, gpus)
                ),
                None,
            )
            for each in (ran, point)
        )
        return measured_phase is not None and phase is not None and phase.covers(measured_phase)

    def may_fit(self, point: GridPoint) -> bool:
        """Return whether a point is not excluded."""
        return self.chance(point) > LEAST_CHANCE

    def surely_fits(self, point: GridPoint) -> bool:
        """Return whether a point fits with a probability of at least 1 - `LEAST_CHANCE`."""
        return self.chance(point) >= 1 - LEAST_CHANCE


def knowledge_of(
    space: Space,
    measured: Mapping[GridPoint, Measurement],
    set_aside: Mapping[GridPoint, str],
    unavailable: Mapping[int, str] | None = None,
) -> Knowledge:
    """Build the knowledge of a study from its measurements, in the order of the probes."""
    observed = [
        observations(measurement, space.phase_models(point), str(number))
        for number, (point, measurement) in enumerate(measured.items())
        if measurement.decided and space.starts(point)
    ]
    return Knowledge(
        space=space,
        belief=belief_from([each for of_probe in observed for each in of_probe]),
        measured=measured,
        set_aside=set_aside,
        unavailable=unavailable or {},
    )


# -- open points -------------------------------------------------------------------------------------------------------


def open_points(knowledge: Knowledge) -> list[GridPoint]:
    """Return the points that are better than the best that ran, may fit, and are not decided; the best first.

    Points below one that surely fits are left out, since that one is probed first. Of many sizes or shares in a row
    only some are returned, the largest that may fit always among them: the list is empty only if no open point exists.
    """
    space, floor = knowledge.space, knowledge.floor
    found: list[GridPoint] = []
    for line in (line for line in range(len(space.lines)) if line not in knowledge.unavailable):
        for point in _open_points_of_line(knowledge, line, floor):
            found.append(point)
            if knowledge.surely_fits(point):
                floor = max(floor, space.merit(point))
    ordered = sorted(found, key=lambda point: (space.merit(point), -knowledge.chance(point)), reverse=True)
    sure = next((index for index, point in enumerate(ordered) if knowledge.surely_fits(point)), len(ordered))
    return ordered[: sure + 1]


def _open_points_of_line(knowledge: Knowledge, line: int, floor: tuple[float, ...]) -> Iterator[GridPoint]:
    """Yield the points of one line with more merit than the floor that may fit and are not decided."""
    for size in sizes_that_may_fit(knowledge, line):
        yield from (
            point for point in shares_that_may_fit(knowledge, line, size, floor) if not knowledge.decided(point)
        )


def sizes_that_may_fit(knowledge: Knowledge, line: int) -> Sequence[int]:
    """Return the indices of a line's sizes that may fit, largest first.

    If a line has many sizes, none below one that surely fits is returned.
    """
    space, count = knowledge.space, len(knowledge.space.lines[line].sizes)
    if count <= FEW_SIZES:
        return [size for size in range(count - 1, -1, -1) if knowledge.may_fit(space.with_smallest_share(line, size))]
    top = largest(0, count - 1, lambda size: knowledge.may_fit(space.with_smallest_share(line, size)))
    sure = largest(0, top, lambda size: knowledge.surely_fits(space.with_smallest_share(line, size)))
    return thinned(range(top, max(sure, 0) - 1, -1), MOST_SIZES)


def shares_that_may_fit(knowledge: Knowledge, line: int, size: int, floor: tuple[float, ...]) -> list[GridPoint]:
    """Return a size's points above the merit floor, from the largest useful share to one that surely fits.

    A share is useful if it is the smallest with its merit.
    """
    space, (low, high) = knowledge.space, knowledge.space.shares(line, size)
    top = largest(low, high, lambda share: knowledge.may_fit(GridPoint(line, size, share)))
    if top < low or space.merit(GridPoint(line, size, top)) <= floor:
        return []
    most = space.merit(GridPoint(line, size, top))
    top = 1 + largest(low, top, lambda share: space.merit(GridPoint(line, size, share)) < most)
    sure = largest(low, top, lambda share: knowledge.surely_fits(GridPoint(line, size, share)))
    points = [GridPoint(line, size, share) for share in thinned(range(top, max(sure, low) - 1, -1), MOST_SHARES)]
    return [point for point in points if space.merit(point) > floor]


def thinned(values: Sequence[int], most: int) -> Sequence[int]:
    """Return at most this many of the values, evenly spaced, always with the first and the last."""
    if len(values) <= most:
        return values
    return [values[round(index * (len(values) - 1) / (most - 1))] for index in range(most)]


# -- what to probe next ------------------------------------------------------------------------------------------------


def next_point(
    knowledge: Knowledge, running: Collection[GridPoint] = (), samples: int = SAMPLES, seed: int = SEED
) -> GridPoint | None:
    """Return the open point whose probe decides most; None if none is open that is not `running` already.

    In each sample of the belief one open point is the best that fits. Returned is the point whose merit the best one
    reaches in `TARGET_SHARE` of the samples in which any fits; beside running probes the one of `next_beside`.
    """
    points = open_points(knowledge)
    if set(points) <= set(running):
        return None
    if running:
        return next_beside(knowledge, points, running, draw_samples(knowledge.belief, samples, seed))
    best = count_best(knowledge, points, draw_samples(knowledge.belief, samples, seed))
    total = sum(best)
    if total < DOUBTFUL_SHARE * samples:
        return max(reversed(points), key=knowledge.chance)
    reached = np.cumsum(best) >= TARGET_SHARE * total
    return points[int(np.argmax(reached))]


def count_best(knowledge: Knowledge, points: Sequence[GridPoint], samples: Samples) -> list[int]:
    """Return in how many samples each point, ordered by merit, is the first that fits."""
    left: Vector = np.ones(samples.count, dtype=bool)
    counts = []
    for point in points:
        fitting = left & samples.fit(knowledge.space.heavy_phases(point))
        counts.append(int(fitting.sum()))
        left &= ~fitting
    return counts


def next_beside(
    knowledge: Knowledge, points: Sequence[GridPoint], running: Collection[GridPoint], samples: Samples
) -> GridPoint:
    """Return the open point to probe beside running probes: the one that leaves least to probe after all of them.

    The outcomes of the running probes and of one more divide the samples into groups. A group in which one and the same
    point is the best that fits, and which has run by then, needs no further probe; any other needs more of them, the
    more bits it takes to tell its best points apart. If no point leaves less than the running ones, the likeliest is
    probed of which no running one needs as much or less, as all open points must be excluded in the end.
    """
    fitting = np.array([samples.fit(knowledge.space.heavy_phases(point)) for point in points])
    best = np.where(fitting.any(axis=0), fitting.argmax(axis=0), len(points))
    ran = np.array([*(point in running for point in points), True])  # the last: nothing fits
    groups: Vector = np.zeros(samples.count, dtype=int)
    for outcome in fitting[ran[:-1]]:
        groups = np.unique(2 * groups + outcome, return_inverse=True)[1]
    left = [index for index, point in enumerate(points) if point not in running]
    costs = {
        index: _left_to_probe(2 * groups + fitting[index], best, ran | (np.arange(len(ran)) == index)) for index in left
    }
    least = min(left, key=lambda index: costs[index])
    if costs[least] < _left_to_probe(groups, best, ran):
        return points[least]
    likely = sorted((points[index] for index in reversed(left)), key=knowledge.chance, reverse=True)
    return next(
        (point for point in likely if not any(knowledge.space.needs_no_more(each, point) for each in running)),
        likely[0],
    )


def _left_to_probe(groups: Vector, best: Vector, ran: Vector) -> float:
    """Return, in the mean of all samples, 0 for a sample that is decided, else 1 and the bits that its group lacks.

    Args:
        groups: the number of each sample's group.
        best: the index of each sample's best point.
        ran: whether the point of an index will have run.
    """
    cells, counts = np.unique(groups * len(ran) + best, return_counts=True)
    totals = np.bincount(cells // len(ran), counts)[cells // len(ran)]
    decided = (counts == totals) & ran[cells % len(ran)]
    return float((counts * np.where(decided, 0.0, 1.0 + np.log2(totals / counts))).sum() / counts.sum())

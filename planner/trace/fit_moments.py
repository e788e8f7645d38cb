"""What is alive after each birth of a step, as straight lines: in the number of layers, of micro-steps and of generated rows.

A trace of more layers is laid beside the first one, and one of more micro-steps and more generated rows.
"""

from collections.abc import Callable
from operator import ge

from planner.quantities import Component, Phase
from planner.trace.fit_keys import Key, Keys
from planner.trace.in_step import beside
from planner.trace.profile import Moment
from planner.trace.samples import Sample, Samples
from planner.trace.timeline import Trace

_Birth = tuple[Phase, Component, int]
_Counts = dict[Key, int]
_Repeated = tuple[_Counts, _Counts]  # of a further micro-step, of a further generated row
_Entry = tuple[_Counts, _Counts, _Counts, _Counts]  # counts, those of a further period, of a further micro-step, of a further generated row


class _Keyed:
    """A trace by the keys of its births: which there are, and what is alive after each."""

    def __init__(self, trace: Trace, keys: list[Key]) -> None:
        self.births: list[_Birth] = []
        self.alive: list[_Counts] = []
        counts: _Counts = {}
        for index, size_bytes in trace.events:
            key = keys[index]
            count = counts.get(key, 0) + (1 if size_bytes > 0 else -1)
            if count:
                counts[key] = count
            else:
                del counts[key]
            if size_bytes > 0:
                self.births.append((trace.allocations[index].phase, *key))
                self.alive.append(counts.copy())


def moments_of(samples: Samples, keys: Keys) -> list[Moment]:
    """Every birth beside the same birth with more layers, micro-steps and rows, the dominated left out. Only a birth can be a peak.

    What is no whole number of a micro-step or a row is another moment each time, and is left to those that are.
    """
    low, deeper = _Keyed(samples.first.trace, keys.first), _Keyed(samples.deeper.trace, keys.deeper)
    repeated = _repeated(low, samples, keys.longer)
    by_phase: dict[Phase, list[_Entry]] = {}
    for birth, place in enumerate(beside(low.births, deeper.births)):
        more = repeated(birth)
        if more is not None:
            further = _difference(deeper.alive[place], low.alive[birth])
            by_phase.setdefault(low.births[birth][0], []).append((low.alive[birth], further, *more))
    return [_moment(phase, entry) for phase, entries in by_phase.items() for entry in _frontier(entries)]


def _repeated(low: _Keyed, samples: Samples, longer_keys: list[Key]) -> Callable[[int], _Repeated | None]:
    """For a birth what a further micro-step and a further generated row have alive; None where that is no whole number."""
    if samples.longer is None:
        return lambda _: ({}, {})
    longer, parts = _Keyed(samples.longer.trace, longer_keys), _parts(samples.first, samples.longer)
    places = beside(low.births, longer.births)
    return lambda birth: _split(_difference(longer.alive[places[birth]], low.alive[birth]), parts)


def _parts(first: Sample, longer: Sample) -> Callable[[int], tuple[int, int] | None]:
    """How many of a difference in counts are of one further micro-step, how many of one further row; None where they are no whole numbers.

    What is generated for every micro-step anew, or with as many rows in each, is all the micro-steps'. Else there are so many more rows than a
    micro-step has alive of anything that a difference is the nearest multiple of them, and the rest is the micro-steps'.
    """
    steps, rows = longer.accumulation - first.accumulation, longer.generated - first.generated
    of_a_step = [sample.sizes["rows"] for sample in (first, longer)]
    anew = first.generated * of_a_step[1] == longer.generated * of_a_step[0]
    if steps and (anew or of_a_step[0] == of_a_step[1]):
        return lambda count: None if count % steps else (count // steps, 0)

    def split(count: int) -> tuple[int, int] | None:
        of_rows = (count + rows // 2) // rows
        rest = count - of_rows * rows
        return (rest // max(steps, 1), of_rows) if rest % max(steps, 1) == 0 and (steps or not rest) else None

    return split


def _split(difference: _Counts, parts: Callable[[int], tuple[int, int] | None]) -> _Repeated | None:
    """A difference's parts of a micro-step and of a row; None where one count has none."""
    steps, rows = _Counts(), _Counts()
    for key, count in difference.items():
        found = parts(count)
        if found is None:
            return None
        steps[key], rows[key] = found
    return {key: count for key, count in steps.items() if count}, {key: count for key, count in rows.items() if count}


def _difference(one: _Counts, other: _Counts) -> _Counts:
    found = {key: difference for key, count in one.items() if (difference := count - other.get(key, 0))}
    for key in other.keys() - one.keys():
        found[key] = -other[key]
    return found


def _frontier(entries: list[_Entry]) -> list[_Entry]:
    """The entries that no other dominates, in counts of every expression and in what a period, a micro-step and a row add."""
    expressions = 1 + max((expression for entry in entries for side in entry for _, expression in side), default=0)
    unique: dict[tuple[int, ...], _Entry] = {}
    for entry in entries:
        unique.setdefault(_summed(entry, expressions), entry)
    frontier: list[tuple[int, ...]] = []
    for counts in sorted(unique, key=lambda each: (-sum(map(abs, each)), each)):
        if not any(_dominates(other, counts) for other in frontier):
            frontier = [other for other in frontier if not _dominates(counts, other)] + [counts]
    return [unique[counts] for counts in frontier]


def _summed(entry: _Entry, expressions: int) -> tuple[int, ...]:
    """An entry's counts of every expression, the components taken together."""
    totals = [0] * (len(entry) * expressions)
    for index, side in enumerate(entry):
        for (_, expression), count in side.items():
            totals[index * expressions + expression] += count
    return tuple(totals)


def _dominates(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return all(map(ge, one, other))


def _moment(phase: Phase, entry: _Entry) -> Moment:
    keys = sorted({key for side in entry for key, count in side.items() if count})
    counts, layers, steps, rows = entry
    return Moment(phase=phase, alive=tuple((*key, counts.get(key, 0), layers.get(key, 0), steps.get(key, 0), rows.get(key, 0)) for key in keys))

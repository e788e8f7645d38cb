"""What is alive after each birth of a step, as straight lines: in the number of layers, of micro-steps and of generated rows.

A trace of more layers is laid beside the first one, and one of more micro-steps and more generated rows.
"""

from operator import ge
from typing import TypeAlias

import numpy as np

from planner.quantities import Phase
from planner.trace.fit_keys import Key, Keys
from planner.trace.in_step import beside
from planner.trace.profile import Moment
from planner.trace.samples import Sample, Samples
from planner.trace.timeline import Trace

_Counts: TypeAlias = "np.ndarray"  # int32, births x keys
_Truths: TypeAlias = "np.ndarray"  # for each birth


class _Keyed:
    """A trace by the numbers of its births' keys: which births there are, and how many of each key are alive after each."""

    def __init__(self, trace: Trace, keys: list[int], different: int) -> None:
        keyed = np.array([(keys[index], size_bytes > 0) for index, size_bytes in trace.events], dtype=np.int32).reshape(-1, 2)
        changes: _Counts = np.zeros((len(keyed), different), dtype=np.int32)
        changes[np.arange(len(keyed)), keyed[:, 0]] = 2 * keyed[:, 1] - 1
        self.alive: _Counts = changes.cumsum(axis=0, dtype=np.int32)[keyed[:, 1] == 1]
        self.births: list[tuple[Phase, int]] = [(trace.allocations[index].phase, keys[index]) for index, size_bytes in trace.events if size_bytes > 0]


def moments_of(samples: Samples, keys: Keys) -> list[Moment]:
    """Every birth beside the same birth with more layers, micro-steps and rows, the dominated left out. Only a birth can be a peak.

    What is no whole number of a micro-step or a row is another moment each time, and is left to those that are.
    """
    numbers = {key: number for number, key in enumerate(dict.fromkeys((*keys.first, *keys.deeper, *keys.longer)))}
    first, more, longer = ([numbers[key] for key in each] for each in (keys.first, keys.deeper, keys.longer))
    low, deeper = _Keyed(samples.first.trace, first, len(numbers)), _Keyed(samples.deeper.trace, more, len(numbers))
    further = deeper.alive[beside(low.births, deeper.births)] - low.alive
    steps, rows, whole = _repeated(low, samples, longer)
    by_phase: dict[Phase, list[int]] = {}
    for birth in np.flatnonzero(whole).tolist():
        by_phase.setdefault(low.births[birth][0], []).append(birth)
    # A column each for what is alive, what a further period has of it, a further micro-step, a further row.
    counts = np.stack((low.alive, further, steps, rows), axis=-1)
    of_expressions = _summed(counts, [expression for _, expression in numbers])
    frontiers = {phase: _frontier(births, of_expressions[births]) for phase, births in by_phase.items()}
    return [_moment(phase, counts[birth], list(numbers)) for phase, births in frontiers.items() for birth in births]


def _repeated(low: _Keyed, samples: Samples, longer_keys: list[int]) -> tuple[_Counts, _Counts, _Truths]:
    """For each birth what a further micro-step and a further generated row have alive, and whether these are whole numbers."""
    nothing = np.zeros_like(low.alive)
    if samples.longer is None:
        return nothing, nothing, np.ones(len(nothing), dtype=np.bool_)
    longer = _Keyed(samples.longer.trace, longer_keys, nothing.shape[1])
    return _parts(longer.alive[beside(low.births, longer.births)] - low.alive, samples.first, samples.longer)


def _parts(difference: _Counts, first: Sample, longer: Sample) -> tuple[_Counts, _Counts, _Truths]:
    """How many of a difference in counts are of one further micro-step, how many of one further row, and whether these are whole numbers.

    What is generated for every micro-step anew, or with as many rows in each, is all the micro-steps'. Else there are so many more rows than a
    micro-step has alive of anything that a difference is the nearest multiple of them, and the rest is the micro-steps'.
    """
    steps, rows = longer.accumulation - first.accumulation, longer.generated - first.generated
    of_a_step = [sample.sizes["rows"] for sample in (first, longer)]
    anew = first.generated * of_a_step[1] == longer.generated * of_a_step[0]
    if steps and (anew or of_a_step[0] == of_a_step[1]):
        return difference // steps, np.zeros_like(difference), (difference % steps == 0).all(axis=1)
    of_rows: _Counts = (difference + rows // 2) // rows
    rest = difference - of_rows * rows
    return rest // max(steps, 1), of_rows, (rest % steps == 0 if steps else rest == 0).all(axis=1)


def _summed(counts: _Counts, expressions: list[int]) -> _Counts:
    """The counts of every expression, the components taken together: births x (columns x expressions)."""
    of_expressions: _Counts = np.zeros((len(counts), counts.shape[2], 1 + max(expressions)), dtype=np.int32)
    for key, expression in enumerate(expressions):
        of_expressions[:, :, expression] += counts[:, key]
    found: _Counts = of_expressions.reshape(len(counts), -1)
    return found


def _frontier(births: list[int], of_expressions: _Counts) -> list[int]:
    """The births that no other dominates, in counts of every expression and in what a period, a micro-step and a row add."""
    unique: dict[tuple[int, ...], int] = {}
    for birth, counts in zip(births, of_expressions.tolist(), strict=True):
        unique.setdefault(tuple(counts), birth)
    frontier: list[tuple[int, ...]] = []
    for counts in sorted(unique, key=lambda each: (-sum(map(abs, each)), each)):
        if not any(_dominates(other, counts) for other in frontier):
            frontier = [other for other in frontier if not _dominates(counts, other)] + [counts]
    return [unique[counts] for counts in frontier]


def _dominates(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return all(map(ge, one, other))


def _moment(phase: Phase, counts: _Counts, found: list[Key]) -> Moment:
    """Of one birth: keys x columns."""
    keys = sorted(np.flatnonzero(counts.any(axis=1)).tolist(), key=found.__getitem__)
    return Moment(phase=phase, alive=tuple((*found[key], *counts[key].tolist()) for key in keys))

"""A trace of many layers from traces of a few: whatever layers repeat is put in as often as there are layers.

Two traces, the second with two periods of layers more, tell what a period adds: runs of births, each twice in the second trace, and when what is born in
one copy dies: at a birth that is no layer's, or in the same copy of a run, in the next one, or mirrored, as a backward pass goes through the layers.
A third trace tells whether that holds.
"""

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from planner.trace.in_step import Births, beside
from planner.trace.profile import NoProfile
from planner.trace.samples import named
from planner.trace.timeline import STAYS, Allocation, Trace

COPIES = 2  # of every run, in the second trace
REPEATED = "repeated layers"  # among the substitutions of a trace


@dataclass(frozen=True, slots=True)
class _Place:
    """A birth of the second trace: one of the first trace, or one of a copy of a run (`copy` from 0, `index` within the copy)."""

    birth: int  # of the first trace: itself, or the one that the run comes after (-1: before all)
    run: int = -1  # of those that come after it
    copy: int = 0
    index: int = 0

    @property
    def repeats(self) -> bool:
        return self.run >= 0


@dataclass(frozen=True, slots=True)
class _When:
    """Between which births something happens to the copies of a birth, where there are n: right after a place, and never where there is none.

    Copy j's is in copy `start + step j + ends n` of the place's run, or, beyond its copies, at `otherwise`.
    """

    place: _Place | None
    start: int = 0
    step: int = 0
    ends: int = 0
    otherwise: _Place | None = None


@dataclass(frozen=True, slots=True)
class _Resolved:
    """A `_When` where the number of copies is known: for copy j the birth `birth + length (first + step j)`, beyond the copies `otherwise`."""

    birth: int | None
    length: int = 0
    first: int = 0
    step: int = 0
    copies: int = 0
    otherwise: int | None = None


class Repeating:
    """A step of any number of layers, from two traces in bytes as asked for, not rounded to blocks.

    Raises:
        NoProfile: the second trace is not the first one with everything that was put in put in twice.
    """

    def __init__(self, first: Trace, second: Trace) -> None:
        self._first = first
        self._second = second
        at = beside(*_sized(first, second))
        shapes = [_shape(made) for made in second.allocations]
        self._runs: dict[int, list[int]] = {}  # the lengths of the runs' copies, by the birth of the first trace that they come after
        self._places: list[_Place] = []
        for birth, (place, following) in enumerate(pairwise((-1, *at, len(shapes))), start=-1):
            if birth >= 0:
                self._places.append(_Place(birth))
            self._runs[birth] = _twice(shapes[place + 1 : following])
            for run, length in enumerate(self._runs[birth]):
                self._places += [_Place(birth, run, copy, index) for copy in range(COPIES) for index in range(length)]
        self._numbers = {place: number for number, place in enumerate(self._places)}

    def _made(self, place: _Place) -> Allocation:
        return self._second.allocations[self._numbers[place]]

    @cached_property
    def _deaths(self) -> dict[_Place, _When]:
        return self._moments([made.died for made in self._second.allocations])

    @cached_property
    def _whole(self) -> dict[_Place, _When]:
        return self._moments([made.accumulated for made in self._second.allocations])

    def _moments(self, times: list[int]) -> dict[_Place, _When]:
        """When something happens to each birth of the first trace and to each birth of a run's copy, the first standing for all."""
        after = [None if birth is None else self._places[birth] for birth in _after(self._second, times)]
        found: dict[_Place, _When] = {}
        for place, when in zip(self._places, after, strict=True):
            if not place.repeats:
                found[place] = _of_one(when)
            elif place.copy == 0:
                found[place] = _of_copies(when, after[self._numbers[replace(place, copy=1)]])
        return found

    def trace(self, copies: int, block_bytes: int = 1) -> Trace:
        """The trace with so many copies of every run, its sizes rounded up to `block_bytes`."""
        starts = self._starts(copies)
        made: list[Allocation] = []
        died: list[int | None] = []
        whole: list[int | None] = []
        for birth in range(-1, len(self._first.allocations)):
            groups: list[tuple[tuple[_Place, ...], int]] = [((_Place(birth),), 1)] if birth >= 0 else []
            groups += [(tuple(_Place(birth, run, 0, index) for index in range(length)), copies) for run, length in enumerate(self._runs[birth])]
            for places, count in groups:
                alike = [self._sized(place, copies, block_bytes) for place in places]
                deaths, moments = ([self._resolved(when[place], copies, starts) for place in places] for when in (self._deaths, self._whole))
                for copy in range(count):
                    made += alike
                    died += [_birth(death, copy) for death in deaths]
                    whole += [_birth(moment, copy) for moment in moments]
        allocations = _timed(made, died, whole)
        return Trace(allocations=allocations, phase_starts=(), substitutions=(*self._second.substitutions, REPEATED), versions=self._second.versions)

    def _starts(self, copies: int) -> dict[tuple[int, int], int]:
        """The number of the first birth of each run, and of each birth of the first trace (its run is -1)."""
        found: dict[tuple[int, int], int] = {}
        number = 0
        for birth in range(-1, len(self._first.allocations)):
            if birth >= 0:
                found[birth, -1], number = number, number + 1
            for run, length in enumerate(self._runs[birth]):
                found[birth, run], number = number, number + length * copies
        return found

    def _resolved(self, when: _When, copies: int, starts: dict[tuple[int, int], int]) -> _Resolved:
        if when.place is None:
            return _Resolved(None)
        start = starts[when.place.birth, when.place.run]
        if not when.place.repeats:
            return _Resolved(start)
        otherwise = None if when.otherwise is None else starts[when.otherwise.birth, -1]
        length = self._runs[when.place.birth][when.place.run]
        return _Resolved(start + when.place.index, length, when.start + when.ends * copies, when.step, copies, otherwise)

    def _sized(self, place: _Place, copies: int, block_bytes: int) -> Allocation:
        """What is no layer's own may grow with their number: a list of all gradients' norms."""
        made = self._second.allocations[self._numbers[place]]
        size_bytes = made.size_bytes
        if not place.repeats:
            few = self._first.allocations[place.birth].size_bytes
            more, odd = divmod(size_bytes - few, COPIES)
            if odd:
                raise NoProfile("A size does not grow by a whole number of bytes a layer.")
            size_bytes = few + more * copies
        return replace(made, size_bytes=-(-size_bytes // block_bytes) * block_bytes)


def same_step(one: Trace, other: Trace) -> bool:
    """Whether two traces have the same births, of the same sizes, with deaths after the same births: the numbers of layers are not looked at."""
    return _compared(one) == _compared(other)


def _compared(trace: Trace) -> list[tuple[object, ...]]:
    dead = _after(trace, [made.died for made in trace.allocations])
    whole = _after(trace, [made.accumulated for made in trace.allocations])
    sizes = [made.size_bytes for made in trace.allocations]
    return list(zip(named(trace), sizes, dead, whole, strict=True))


def _sized(first: Trace, second: Trace) -> tuple[Births, Births]:
    """Births by all but the number of their layer. A size that is in one trace only is one that grows with the layers, and is not looked at."""
    births = [list(zip(named(trace), (made.size_bytes for made in trace.allocations), strict=True)) for trace in (first, second)]
    in_both = set(births[0]) & set(births[1])
    mine, its = ([(name, size if (name, size) in in_both else None) for name, size in trace] for trace in births)
    return mine, its


def _twice(shapes: list[tuple[object, ...]]) -> list[int]:
    """The lengths of runs of which each is there twice, one run after the other: as few as there can be.

    Raises:
        NoProfile: there are none such.
    """
    if not shapes:
        return []
    for length in range(len(shapes) // COPIES, 0, -1):
        if shapes[:length] == shapes[length : COPIES * length]:
            return [length, *_twice(shapes[COPIES * length :])]
    raise NoProfile("What the second trace has more of is not twice the same.")


def _timed(made: list[Allocation], died: list[int | None], whole: list[int | None]) -> tuple[Allocation, ...]:
    """Births in their order, each followed by the deaths that come after it."""
    dying: list[list[int]] = [[] for _ in made]
    for number, after in enumerate(died):
        if after is not None:
            dying[after].append(number)
    born, ends, dies, clock = [0] * len(made), [0] * len(made), [STAYS] * len(made), 0
    for number, dead in enumerate(dying):
        born[number], clock = clock, clock + 1
        for each in dead:
            dies[each], clock = clock, clock + 1
        ends[number] = clock
    return tuple(
        replace(each, born=born[number], died=dies[number], accumulated=STAYS if after is None else ends[after])
        for number, (each, after) in enumerate(zip(made, whole, strict=True))
    )


def _shape(made: Allocation) -> tuple[object, ...]:
    return made.size_bytes, made.phase, made.component, made.operator


def _after(trace: Trace, times: list[int]) -> list[int | None]:
    """The last birth before each time; None for what is not in the trace."""
    births = [made.born for made in trace.allocations]
    return [None if time >= STAYS else bisect_left(births, time) - 1 for time in times]


def _of_one(when: _Place | None) -> _When:
    """Of what is no layer's, of which there is one copy: at what is none either, or in the first copy of a run, or the last."""
    if when is None or not when.repeats:
        return _When(when)
    return _When(when, step=1) if when.copy == 0 else _When(when, start=-1, step=1, ends=1)


def _of_copies(first: _Place | None, second: _Place | None) -> _When:
    """Of the two copies of a birth, from when it happens to either.

    Raises:
        NoProfile: no rule is known by which the one becomes the other.
    """
    if first == second and (first is None or not first.repeats):
        return _When(first)
    within = first if first is not None and first.repeats else second
    for start, step, ends in ((0, 1, 0), (-1, -1, 1), (1, 1, 0), (-1, 1, 0), (-2, -1, 1), (0, -1, 1)):
        if within is None or not within.repeats:
            break
        told = [replace(within, copy=copy) if 0 <= copy < COPIES else None for copy in (start + step * j + ends * COPIES for j in range(COPIES))]
        beyond = [actual for actual, copied in zip((first, second), told, strict=True) if copied is None]
        inside = all(copied is None or actual == copied for actual, copied in zip((first, second), told, strict=True))
        if inside and not any(each is None or each.repeats for each in beyond):
            return _When(within, start, step, ends, beyond[0] if beyond else None)
    raise NoProfile("What a layer makes does not die as what another layer makes.")


def _birth(when: _Resolved, copy: int) -> int | None:
    """After which birth it happens to a copy."""
    if when.step == 0:
        return when.birth
    other = when.first + when.step * copy
    if 0 <= other < when.copies:
        return None if when.birth is None else when.birth + other * when.length
    if when.otherwise is None:
        raise NoProfile("What outlives its layers dies nowhere.")
    return when.otherwise

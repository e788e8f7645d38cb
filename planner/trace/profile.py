"""Profiles: one small set of traces answers for every size and depth of its recipe.

The allocations of a recipe (model shape, method, tuning, precision, library versions) come in the same order whatever the rows and
tokens are; each size is one or two terms in them, such as 7168 x rows x tokens. And they repeat over layers. So a few traces of few
layers give, for each moment of the step, how many allocations of which size are alive, as `count + per_layer x layers`; a moment that
never has more of anything than another of its phase is dropped. What is left is evaluated in a millisecond, to the byte.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from planner.quantities import Component, Phase, PhaseMemory
from planner.trace.terms import FURTHER_LAYERS, TERMS, Values, term_values
from planner.trace.timeline import Allocation, Trace

# Two sequences that agree on so many births are in step again after an inserted layer; more than a layer has of equal ones in a row.
AGREEING_BIRTHS = 256
PROFILE_SCHEMA = 1


class NoProfile(Exception):
    """The traces do not make a profile: their sequences differ, a size is no sum of terms, or a held-back trace is not reproduced."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A trace of `layers` layers at given sizes (`rows`, `tokens`, ..), in bytes as asked for, not rounded to blocks."""

    values: tuple[tuple[str, int], ...]
    layers: int
    trace: Trace

    @property
    def sizes(self) -> Values:
        return dict(self.values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Expression:
    """A size in bytes: a sum of coefficients times terms of `terms.py`, by name."""

    parts: tuple[tuple[str, int, int], ...]  # term, numerator, denominator

    def size_bytes(self, terms: Mapping[str, int]) -> int:
        return sum(terms[name] * numerator // denominator for name, numerator, denominator in self.parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """What is alive at a moment of the step: for each (component, expression) a count at `Profile.layers` layers and one a layer more."""

    phase: Phase
    alive: tuple[tuple[Component, int, int, int], ...]  # component, expression, count, count per further layer


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A recipe's allocations with sizes as expressions. `block_bytes`: what the device rounds sizes up to."""

    layers: int
    block_bytes: int
    expressions: tuple[Expression, ...]
    moments: tuple[Moment, ...]
    versions: tuple[tuple[str, str], ...] = ()

    @cached_property
    def _counts(self) -> tuple[tuple[tuple[int, int, int], ...], ...]:
        """For each moment (expression, count, per layer), components taken together."""
        found = []
        for moment in self.moments:
            together: dict[int, list[int]] = {}
            for _, expression, count, per_layer in moment.alive:
                entry = together.setdefault(expression, [0, 0])
                entry[0] += count
                entry[1] += per_layer
            found.append(tuple((expression, count, per_layer) for expression, (count, per_layer) in together.items()))
        return tuple(found)

    def _sizes(self, values: Values, layers: int) -> list[int]:
        terms, block = {**term_values(values), FURTHER_LAYERS: layers - self.layers}, self.block_bytes
        return [-(-expression.size_bytes(terms) // block) * block for expression in self.expressions]

    def _totals(self, sizes: list[int], layers: int) -> list[int]:
        further = layers - self.layers
        return [sum((count + per_layer * further) * sizes[expression] for expression, count, per_layer in counts) for counts in self._counts]

    def peak_bytes(self, values: Values, layers: int) -> int:
        """The peak of a step of these sizes in a model of so many layers."""
        return max(self._totals(self._sizes(values, layers), layers))

    def phases(self, values: Values, layers: int) -> tuple[PhaseMemory, ...]:
        """As `Trace.phases`: for each phase the components at its heaviest moment."""
        sizes = self._sizes(values, layers)
        totals, heaviest = self._totals(sizes, layers), dict[Phase, int]()
        for index, moment in enumerate(self.moments):
            if moment.phase not in heaviest or totals[index] > totals[heaviest[moment.phase]]:
                heaviest[moment.phase] = index
        return tuple(PhaseMemory(name=phase, components=self._components(self.moments[index], sizes, layers)) for phase, index in heaviest.items())

    def _components(self, moment: Moment, sizes: list[int], layers: int) -> dict[Component, int]:
        components: dict[Component, int] = {}
        for component, expression, count, per_layer in moment.alive:
            size_bytes = (count + per_layer * (layers - self.layers)) * sizes[expression]
            components[component] = components.get(component, 0) + size_bytes
        return {component: size_bytes for component, size_bytes in components.items() if size_bytes}


def profile_to_json(profile: Profile) -> str:
    """A profile as one line of JSON, the same for the same profile."""
    return json.dumps(
        {
            "schema": PROFILE_SCHEMA, "layers": profile.layers, "block_bytes": profile.block_bytes, "versions": profile.versions,
            "expressions": [expression.parts for expression in profile.expressions],
            "moments": [[moment.phase, moment.alive] for moment in profile.moments],
        },
        separators=(",", ":"),
    )  # fmt: skip


def profile_from_json(text: str) -> Profile:
    """What `profile_to_json` wrote.

    Raises:
        NoProfile: it is of another version of this program.
    """
    held = json.loads(text)
    if held["schema"] != PROFILE_SCHEMA:
        raise NoProfile(f"The profile is of schema {held['schema']}, this program reads {PROFILE_SCHEMA}.")
    return Profile(
        layers=held["layers"], block_bytes=held["block_bytes"], versions=tuple((name, version) for name, version in held["versions"]),
        expressions=tuple(Expression(parts=tuple((name, top, bottom) for name, top, bottom in parts)) for parts in held["expressions"]),
        moments=tuple(Moment(phase=phase, alive=tuple((part, number, count, more) for part, number, count, more in alive)) for phase, alive in held["moments"]),
    )  # fmt: skip


def fit_profile(samples: tuple[Sample, ...], deeper: tuple[Sample, Sample], held_back: tuple[Sample, ...], block_bytes: int) -> Profile:
    """A profile from traces of one depth at several sizes, and of one and two layers more at the first sample's sizes.

    Raises:
        NoProfile: a sequence differs between the samples, a size is no sum of terms, or a held-back trace peaks elsewhere.
    """
    first = samples[0]
    if any(_shape_of(sample.trace) != _shape_of(first.trace) for sample in samples[1:]):
        raise NoProfile("The order of allocations differs between sizes.")
    if [(sample.values, sample.layers - first.layers) for sample in deeper] != [(first.values, 1), (first.values, 2)]:
        raise NoProfile("The deeper traces must be of one and two layers more, at the sizes of the first sample.")
    expressions = _Expressions(samples)
    traces = (first.trace, deeper[0].trace, deeper[1].trace)
    moments = _moments(traces, _keys(traces, expressions))
    profile = Profile(layers=first.layers, block_bytes=block_bytes, expressions=tuple(expressions.found), moments=tuple(moments), versions=first.trace.versions)
    for sample in (*samples, *deeper, *held_back):
        _check(profile, sample)
    return profile


def _check(profile: Profile, sample: Sample) -> None:
    """That the profile gives a trace's peak in every phase."""
    expected = rounded_phase_peaks(sample.trace, profile.block_bytes)
    for phase in profile.phases(sample.sizes, sample.layers):
        if phase.total_bytes != expected[phase.name]:
            raise NoProfile(
                f"At {sample.sizes} and {sample.layers} layers the profile's {phase.name} peaks at {phase.total_bytes:,} bytes, "
                f"the trace's at {expected[phase.name]:,}."
            )


def rounded_phase_peaks(trace: Trace, block_bytes: int) -> dict[Phase, int]:
    """For each phase the most that is alive after a birth in it, when every size is rounded up to whole blocks."""
    peaks: dict[Phase, int] = {}
    total = 0
    for index, size_bytes in trace.events:
        blocks = -(-abs(size_bytes) // block_bytes) * block_bytes
        total += blocks if size_bytes > 0 else -blocks
        phase = trace.allocations[index].phase
        if size_bytes > 0 and total > peaks.get(phase, 0):
            peaks[phase] = total
    return peaks


def _shape_of(trace: Trace) -> tuple[tuple[int, ...], ...]:
    """The births and deaths of a trace without their sizes. The order of deaths between two births says nothing: it is sorted away."""
    shape: list[tuple[int, ...]] = []
    dead: list[int] = []
    for index, size_bytes in trace.events:
        if size_bytes > 0:
            shape.append(tuple(sorted(dead)))
            dead = []
        else:
            dead.append(index)
    return tuple(shape)


class _Expressions:
    """The distinct sizes of the samples, fitted once each."""

    def __init__(self, samples: tuple[Sample, ...]) -> None:
        self._terms = [term_values(sample.sizes) for sample in samples]
        self._traces = [sample.trace for sample in samples]
        self._by_sizes: dict[tuple[int, ...], int] = {}
        self.found: list[Expression] = []

    def of(self, allocation: int) -> int:
        """The number of the expression of an allocation, by its sizes in all the samples."""
        sizes = tuple(trace.allocations[allocation].size_bytes for trace in self._traces)
        if sizes not in self._by_sizes:
            self._by_sizes[sizes] = len(self.found)
            self.found.append(_fitted(sizes, self._terms))
        return self._by_sizes[sizes]

    def growing(self, expression: int, bytes_per_layer: int) -> int:
        """The number of an expression that grows with every further layer, such as a stack of one norm a parameter."""
        grown = Expression(parts=(*self.found[expression].parts, (FURTHER_LAYERS, bytes_per_layer, 1)))
        if grown not in self.found:
            self.found.append(grown)
        return self.found.index(grown)


def _fitted(sizes: tuple[int, ...], terms: list[dict[str, int]]) -> Expression:
    """The first single term, then the first pair of terms, that gives all the sizes."""
    if len(set(sizes)) == 1:
        return Expression(parts=(("1", sizes[0], 1),))
    for name in TERMS:
        ratio = Fraction(sizes[0], terms[0][name]) if terms[0][name] else Fraction(0)
        if ratio > 0 and all(ratio * values[name] == size for size, values in zip(sizes, terms, strict=True)):
            return Expression(parts=((name, ratio.numerator, ratio.denominator),))
    for first in TERMS:
        for second in TERMS:
            pair = _pair(first, second, sizes, terms)
            if pair is not None:
                return pair
    raise NoProfile(f"Sizes {sizes} are no sum of two terms.")


def _pair(first: str, second: str, sizes: tuple[int, ...], terms: list[dict[str, int]]) -> Expression | None:
    (a, b), (c, d) = (terms[0][first], terms[0][second]), (terms[1][first], terms[1][second])
    determinant = a * d - b * c
    if first >= second or determinant == 0:
        return None
    x, y = Fraction(sizes[0] * d - b * sizes[1], determinant), Fraction(a * sizes[1] - c * sizes[0], determinant)
    if not all(x * values[first] + y * values[second] == size for size, values in zip(sizes, terms, strict=True)):
        return None
    if x.denominator > 1 or y.denominator > 1:
        return None
    return Expression(parts=((first, x.numerator, 1), (second, y.numerator, 1)))


_Key = tuple[Component, int]  # component, expression
_Birth = tuple[Phase, Component, int]


_Traces = tuple[Trace, Trace, Trace]  # of a depth, of a layer more, of two more


def _keys(traces: _Traces, expressions: _Expressions) -> list[list[_Key]]:
    """For each allocation of the traces its component and expression; equal operators of equal size are taken for the same."""
    first, *deeper = traces
    known: dict[tuple[str, Component, int], int] = {}
    for index, allocation in enumerate(first.allocations):
        expression = expressions.of(index)
        if known.setdefault(_signature(allocation), expression) != expression:
            raise NoProfile(f"Two sizes cannot be told apart: {allocation.operator} of {allocation.size_bytes} bytes.")
    tables = [dict(known) for _ in traces]
    grown = [_missing(first, deep) for deep in deeper]
    longer = [_missing(deep, first) for deep in deeper]
    if len({len(found) for found in (*grown, *longer)}) != 1:
        raise NoProfile("The deeper traces have sizes that the shallower has not.")
    for short, long, longest in zip(grown[0], *longer, strict=True):
        step = long.size_bytes - short.size_bytes
        if not short.operator == long.operator == longest.operator or longest.size_bytes - long.size_bytes != step:
            raise NoProfile(f"A size appears only in the deeper traces: {long.operator} of {long.size_bytes} bytes.")
        expression = expressions.growing(known[_signature(short)], step)
        for table, allocation in zip(tables, (short, long, longest), strict=True):
            table[_signature(allocation)] = expression
    return [[(allocation.component, table[_signature(allocation)]) for allocation in trace.allocations] for trace, table in zip(traces, tables, strict=True)]


def _missing(one: Trace, other: Trace) -> list[Allocation]:
    """The allocations of one trace whose like the other has not."""
    present = {_signature(allocation) for allocation in other.allocations}
    return [allocation for allocation in one.allocations if _signature(allocation) not in present]


def _signature(allocation: Allocation) -> tuple[str, Component, int]:
    return allocation.operator, allocation.component, allocation.size_bytes


def _moments(traces: _Traces, keys: list[list[_Key]]) -> list[Moment]:
    """Every birth beside the same birth with more layers, the dominated left out. Only a birth can be a peak.

    What is no straight line over the three depths is another moment each time, and is left to those that are.
    """
    births = [_birth_keys(trace, of_trace) for trace, of_trace in zip(traces, keys, strict=True)]
    counts = [_after_births(trace, of_trace) for trace, of_trace in zip(traces, keys, strict=True)]
    by_phase: dict[Phase, list[_Entry]] = {}
    for i, j, k in sorted(_from_left(births) | _from_right(births)):
        further, furthest = _difference(counts[1][j], counts[0][i]), _difference(counts[2][k], counts[1][j])
        if further == furthest:
            by_phase.setdefault(births[0][i][0], []).append((counts[0][i], further))
    return [_moment(phase, *entry) for phase, entries in by_phase.items() for entry in _frontier(entries)]


def _from_left(births: list[list[_Birth]]) -> set[tuple[int, int, int]]:
    """Births in step, first layers with first layers."""
    deeper, deepest = dict(_in_step(births[0], births[1])), dict(_in_step(births[1], births[2]))
    return {(i, j, deepest[j]) for i, j in deeper.items()}


def _from_right(births: list[list[_Birth]]) -> set[tuple[int, int, int]]:
    """Births in step, last layers with last layers."""
    last = [len(found) - 1 for found in births]
    return {(last[0] - i, last[1] - j, last[2] - k) for i, j, k in _from_left([found[::-1] for found in births])}


def _difference(one: dict[_Key, int], other: dict[_Key, int]) -> dict[_Key, int]:
    return {key: count for key in {*one, *other} if (count := one.get(key, 0) - other.get(key, 0))}


def _birth_keys(trace: Trace, keys: list[_Key]) -> list[_Birth]:
    return [(trace.allocations[index].phase, *keys[index]) for index, size_bytes in trace.events if size_bytes > 0]


def _after_births(trace: Trace, keys: list[_Key]) -> list[dict[_Key, int]]:
    """What is alive after each birth, in counts."""
    counts: dict[_Key, int] = {}
    found: list[dict[_Key, int]] = []
    for index, size_bytes in trace.events:
        key = keys[index]
        counts[key] = counts.get(key, 0) + (1 if size_bytes > 0 else -1)
        if size_bytes > 0:
            found.append({key: count for key, count in counts.items() if count})
    return found


def _in_step(low: list[_Birth], high: list[_Birth]) -> list[tuple[int, int]]:
    """Pairs of equal births, where `high` is `low` with runs (a layer's) put in. From the left: first layers meet first layers."""
    pairs: list[tuple[int, int]] = []
    j = 0
    for i in range(len(low)):
        while j < len(high) and low[i] != high[j]:
            j = _resumption(low, high, i, j)
        if j == len(high):
            raise NoProfile("The deeper trace is not the shallower one with a layer put in.")
        pairs.append((i, j))
        j += 1
    return pairs


def _resumption(low: list[_Birth], high: list[_Birth], i: int, j: int) -> int:
    """The place in `high` after `j` from which it goes on for longest as `low` does from `i`."""
    best, longest = len(high), 0
    for start in range(j + 1, len(high)):
        if high[start] != low[i]:
            continue
        length = _common_length(low, high, i, start)
        if length > longest:
            best, longest = start, length
        if longest >= AGREEING_BIRTHS:
            break
    return best


def _common_length(low: list[_Birth], high: list[_Birth], i: int, j: int) -> int:
    length = 0
    while length < AGREEING_BIRTHS and i + length < len(low) and j + length < len(high) and low[i + length] == high[j + length]:
        length += 1
    return length


_Entry = tuple[dict[_Key, int], dict[_Key, int]]


def _frontier(entries: Iterable[_Entry]) -> list[_Entry]:
    """The entries that no other dominates, in counts of every expression and in what a layer adds."""
    unique: dict[tuple[tuple[int, int, int], ...], _Entry] = {}
    for entry in entries:
        unique.setdefault(_summed(entry), entry)
    frontier: list[tuple[dict[int, tuple[int, int]], _Entry]] = []
    for summed, entry in sorted(unique.items(), key=lambda item: -sum(abs(count) + abs(further) for _, count, further in item[0])):
        counts = {expression: (count, further) for expression, count, further in summed}
        if not any(_dominates(other, counts) for other, _ in frontier):
            frontier = [(other, kept) for other, kept in frontier if not _dominates(counts, other)] + [(counts, entry)]
    return [entry for _, entry in frontier]


def _summed(entry: _Entry) -> tuple[tuple[int, int, int], ...]:
    """(expression, count, per layer) with the components taken together."""
    totals: dict[int, list[int]] = {}
    for index, side in enumerate(entry):
        for (_, expression), count in side.items():
            totals.setdefault(expression, [0, 0])[index] += count
    return tuple(sorted((expression, count, further) for expression, (count, further) in totals.items() if count or further))


def _dominates(one: Mapping[int, tuple[int, int]], other: Mapping[int, tuple[int, int]]) -> bool:
    for expression, (count, further) in other.items():
        mine = one.get(expression, (0, 0))
        if mine[0] < count or mine[1] < further:
            return False
    return all(expression in other or (mine[0] >= 0 and mine[1] >= 0) for expression, mine in one.items())


def _moment(phase: Phase, counts: dict[_Key, int], further: dict[_Key, int]) -> Moment:
    keys = {key for side in (counts, further) for key, count in side.items() if count}
    return Moment(
        phase=phase,
        alive=tuple(
            (component, expression, counts.get((component, expression), 0), further.get((component, expression), 0)) for component, expression in sorted(keys)
        ),
    )

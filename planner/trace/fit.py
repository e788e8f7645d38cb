"""Traces -> profile: sizes fitted as products of terms, moments as straight lines in the number of layers, both checked on every trace."""

import re
from dataclasses import dataclass
from fractions import Fraction
from operator import ge

from planner.quantities import Component, Phase
from planner.trace.profile import Expression, Moment, NoProfile, Profile, constant
from planner.trace.terms import FURTHER_LAYERS, ONE, Values, term_values
from planner.trace.timeline import Allocation, Trace

# Two sequences that agree on so many births are in step again after an inserted layer; more than a layer has of equal ones in a row.
AGREEING_BIRTHS = 256
NUMBER_BYTES = (4, 8)  # of a float32 and an int64
BATCH = "batch"  # probes/tracker.py, `add_batch`
_LAYER = re.compile(r"\.\d+")


class Ambiguous(NoProfile):
    """At the sizes that were drawn two expressions have one value, so that another trace tells otherwise: other sizes may tell them apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A trace of `layers` layers at given sizes (`rows`, `tokens`, ..), in bytes as asked for, not rounded to blocks."""

    values: tuple[tuple[str, int], ...]
    layers: int
    trace: Trace

    @property
    def sizes(self) -> Values:
        return dict(self.values)

    @property
    def accumulation(self) -> int:
        return self.sizes.get("accumulation", 1)


def fit_profile(samples: tuple[Sample, ...], deeper: tuple[Sample, Sample], held_back: tuple[Sample, ...], block_bytes: int) -> Profile:
    """A profile from traces of one depth at several sizes, and of one and two periods of layers more at the first sample's sizes.

    Raises:
        NoProfile: a sequence differs between the samples, a size is no product of terms, or a held-back trace peaks elsewhere.
    """
    first, period = samples[0], deeper[0].layers - samples[0].layers
    for sample in samples[1:]:
        _check_order(first.trace, sample.trace)
    if [(sample.values, sample.layers - first.layers) for sample in deeper] != [(first.values, period), (first.values, 2 * period)]:
        raise NoProfile("The deeper traces must be of one and two periods more, at the sizes of the first sample.")
    expressions = _Expressions(samples)
    traces = (first.trace, deeper[0].trace, deeper[1].trace)
    moments = _moments(traces, _keys(traces, expressions), first.accumulation)
    profile = Profile(
        layers=first.layers, period=period, accumulation=first.accumulation, block_bytes=block_bytes, expressions=tuple(expressions.found),
        moments=tuple(moments), versions=first.trace.versions,
    )  # fmt: skip
    for sample in (*samples, *deeper, *held_back):
        check(profile, sample)
    return profile


def told_apart(samples: tuple[Sample, ...]) -> int:
    """The place of the first sample in which equal operators of equal size are of one expression: the one to trace with more layers.

    Raises:
        Ambiguous: there is none.
        NoProfile: a sequence differs between the samples, or a size is no product of terms.
    """
    for sample in samples[1:]:
        _check_order(samples[0].trace, sample.trace)
    expressions = _Expressions(samples)
    for place, sample in enumerate(samples):
        known: dict[_Signature, int] = {}
        if all(known.setdefault(_signature(made), expressions.of(index)) == expressions.of(index) for index, made in enumerate(sample.trace.allocations)):
            return place
    raise Ambiguous("In each of the traces two sizes cannot be told apart.")


def check(profile: Profile, sample: Sample) -> None:
    """That the profile gives a trace's peak in every phase.

    Raises:
        Ambiguous: it does not.
    """
    expected = rounded_phase_peaks(sample.trace, profile.block_bytes)
    for phase in profile.phases(sample.sizes, sample.layers):
        if phase.total_bytes != expected.get(phase.name, 0):
            raise Ambiguous(
                f"At {sample.sizes} and {sample.layers} layers the profile's {phase.name} peaks at {phase.total_bytes:,} bytes, "
                f"the trace's at {expected.get(phase.name, 0):,}."
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


def _check_order(one: Trace, other: Trace) -> None:
    """That two traces are the same but for sizes.

    Raises:
        NoProfile: they are not.
    """
    shapes = _shape_of(one), _shape_of(other)
    if shapes[0] == shapes[1]:
        return
    birth = next((index for index, (mine, its) in enumerate(zip(*shapes, strict=False)) if mine != its), min(map(len, shapes)) - 1)
    made = one.allocations[birth]
    raise NoProfile(f"The order of allocations differs between sizes, first before {made.operator} in {made.module or 'no module'}, {made.phase}.")


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
        self._terms = _Terms([term_values(sample.sizes) for sample in samples])
        self._traces = [sample.trace for sample in samples]
        self._rows = [sample.sizes["rows"] for sample in samples]
        self._by_sizes: dict[tuple[int, ...], int] = {}
        self.found: list[Expression] = []

    def of(self, allocation: int) -> int:
        """The number of the expression of an allocation, by its sizes in all the samples."""
        sizes = tuple(trace.allocations[allocation].size_bytes for trace in self._traces)
        if sizes not in self._by_sizes:
            self._by_sizes[sizes] = len(self.found)
            self.found.append(self._fitted(sizes, allocation))
        return self._by_sizes[sizes]

    def _fitted(self, sizes: tuple[int, ...], allocation: int) -> Expression:
        try:
            return self._terms.fitted(sizes)
        except NoProfile as error:
            expression = self._of_some_rows(sizes)
            if expression is not None:
                return expression
            made = self._traces[0].allocations[allocation]
            raise NoProfile(f"{error} They are of {made.operator} in {made.module or 'no module'}, {made.phase}.") from None

    def _of_some_rows(self, sizes: tuple[int, ...]) -> Expression | None:
        """A number for each row of one kind, such as those that KTO wants: at most for all of them, which is the same block up to 64 rows."""
        for width in NUMBER_BYTES:
            if all(size % width == 0 and 0 < size < width * rows for size, rows in zip(sizes, self._rows, strict=True)):
                return Expression(parts=(("rows", ONE, width, 1),))
        return None

    def growing(self, expression: int, bytes_per_period: int) -> int:
        """The number of an expression that grows with every further layer, such as a stack of one norm a parameter."""
        grown = Expression(parts=(*self.found[expression].parts, (FURTHER_LAYERS, ONE, bytes_per_period, 1)))
        if grown not in self.found:
            self.found.append(grown)
        return self.found.index(grown)


class _Terms:
    """The terms' values at the samples, found by their proportions."""

    def __init__(self, values: list[dict[tuple[str, str], int]]) -> None:
        self._first = values[0]
        self._by_proportions: dict[tuple[Fraction, ...], tuple[str, str]] = {}
        for term, number in values[0].items():
            if number > 0:
                self._by_proportions.setdefault(tuple(Fraction(each[term], number) for each in values[1:]), term)
        # One of each proportion stands for all that cannot be told apart, in integers for the search of pairs.
        self._vectors = [(term, [each[term] for each in values]) for term in self._by_proportions.values()]

    def fitted(self, sizes: tuple[int, ...]) -> Expression:
        """The term that is proportional to the sizes; else a constant and a term; else the first pair of terms with whole coefficients."""
        if len(set(sizes)) == 1:
            return constant(sizes[0])
        term = self._by_proportions.get(tuple(Fraction(size, sizes[0]) for size in sizes[1:]))
        if term is not None:
            ratio = Fraction(sizes[0], self._first[term])
            return Expression(parts=((*term, ratio.numerator, ratio.denominator),))
        for index, (first, vector) in enumerate(self._vectors):
            for second, other in self._vectors[:index]:
                pair = _pair(vector, other, sizes)
                if pair is not None:
                    return Expression(parts=((*second, pair[1], 1), (*first, pair[0], 1)))
        raise NoProfile(f"Sizes {sizes} are no product of terms nor the sum of two.")


def _pair(first: list[int], second: list[int], sizes: tuple[int, ...]) -> tuple[int, int] | None:
    """Whole positive coefficients with which two terms sum up to the sizes."""
    determinant = first[0] * second[1] - second[0] * first[1]
    if determinant == 0:
        return None
    (x, x_rest), (y, y_rest) = divmod(sizes[0] * second[1] - second[0] * sizes[1], determinant), divmod(first[0] * sizes[1] - sizes[0] * first[1], determinant)
    if x_rest or y_rest or x <= 0 or y <= 0:
        return None
    return (x, y) if all(x * a + y * b == size for a, b, size in zip(first, second, sizes, strict=True)) else None


_Key = tuple[Component, int]  # component, expression
_Birth = tuple[Phase, Component, int]


_Traces = tuple[Trace, Trace, Trace]  # of a depth, of a layer more, of two more


def _keys(traces: _Traces, expressions: _Expressions) -> list[list[_Key]]:
    """For each allocation of the traces its component and expression; equal operators of equal size are taken for the same."""
    first, *deeper = traces
    known: dict[_Signature, int] = {}
    for index, allocation in enumerate(first.allocations):
        expression = expressions.of(index)
        if known.setdefault(_signature(allocation), expression) != expression:
            raise Ambiguous(f"Two sizes cannot be told apart: {allocation.operator} of {allocation.size_bytes} bytes.")
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


_Signature = tuple[str, str, Phase, Component, int]


def _signature(allocation: Allocation) -> _Signature:
    """By what equal allocations of equal layers are known."""
    return allocation.operator, _LAYER.sub(".*", allocation.module), allocation.phase, allocation.component, allocation.size_bytes


def _moments(traces: _Traces, keys: list[list[_Key]], accumulation: int) -> list[Moment]:
    """Every birth beside the same birth with more layers, the dominated left out. Only a birth can be a peak.

    What is no straight line over the three depths is another moment each time, and is left to those that are.
    """
    births = [_birth_keys(trace, of_trace) for trace, of_trace in zip(traces, keys, strict=True)]
    counts = [_after_births(trace, of_trace) for trace, of_trace in zip(traces, keys, strict=True)]
    batches = _batches(traces[0], keys[0], accumulation)
    by_phase: dict[Phase, list[_Entry]] = {}
    for i, j, k in sorted(_from_left(births) | _from_right(births)):
        further, furthest = _difference(counts[1][j], counts[0][i]), _difference(counts[2][k], counts[1][j])
        if further == furthest:
            by_phase.setdefault(births[0][i][0], []).append((counts[0][i], further, batches[i]))
    return [_moment(phase, entry) for phase, entries in by_phase.items() for entry in _frontier(entries)]


def _batches(trace: Trace, keys: list[_Key], accumulation: int) -> list[dict[_Key, int]]:
    """What a further micro-step has alive after each birth of the first depth: its batch.

    All batches of an optimizer step are on the device from its start, and the next step's first (transformers 5.23, trainer.py `get_batch_samples`;
    accelerate 1.15, data_loader.py, `DataLoaderShard.__iter__`). One that accumulates not at all has no further one.
    """
    held: dict[_Key, int] = {}
    found: list[dict[_Key, int]] = []
    for index, size_bytes in trace.events:
        if accumulation > 1 and trace.allocations[index].operator == BATCH:
            held[keys[index]] = held.get(keys[index], 0) + (1 if size_bytes > 0 else -1)
        if size_bytes > 0:
            found.append({key: count // (accumulation + 1) for key, count in held.items() if count > accumulation})
    return found


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


_Entry = tuple[dict[_Key, int], dict[_Key, int], dict[_Key, int]]  # counts, those of a further period, those of a further micro-step


def _frontier(entries: list[_Entry]) -> list[_Entry]:
    """The entries that no other dominates, in counts of every expression and in what a period and a micro-step add."""
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
    keys = {key for side in entry for key, count in side.items() if count}
    counts, further, batches = entry
    return Moment(phase=phase, alive=tuple((*key, counts.get(key, 0), further.get(key, 0), batches.get(key, 0)) for key in sorted(keys)))

"""The sizes of the samples' allocations as expressions: products of terms, sums of two, or constants."""

import re
from fractions import Fraction

from planner.quantities import Component, Phase
from planner.trace.profile import Expression, NoProfile, constant
from planner.trace.samples import Ambiguous, Sample, check_order
from planner.trace.terms import FURTHER_LAYERS, ONE, term_values
from planner.trace.timeline import Allocation, Trace

NUMBER_BYTES = (4, 8)  # of a float32 and an int64
_LAYER = re.compile(r"\.\d+")

Key = tuple[Component, int]  # component, expression
_Signature = tuple[str, str, Phase, Component, int]
Traces = tuple[Trace, Trace, Trace]  # of a depth, of a layer more, of two more


class Expressions:
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


def told_apart(samples: tuple[Sample, ...]) -> int:
    """The place of the first sample in which equal operators of equal size are of one expression: the one to trace with more layers.

    Raises:
        Ambiguous: there is none.
        NoProfile: a sequence differs between the samples, or a size is no product of terms.
    """
    for sample in samples[1:]:
        check_order(samples[0].trace, sample.trace)
    expressions = Expressions(samples)
    for place, sample in enumerate(samples):
        known: dict[_Signature, int] = {}
        if all(known.setdefault(_signature(made), expressions.of(index)) == expressions.of(index) for index, made in enumerate(sample.trace.allocations)):
            return place
    raise Ambiguous("In each of the traces two sizes cannot be told apart.")


def keys_of(traces: Traces, expressions: Expressions) -> list[list[Key]]:
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


def _signature(allocation: Allocation) -> _Signature:
    """By what equal allocations of equal layers are known."""
    return allocation.operator, _LAYER.sub(".*", allocation.module), allocation.phase, allocation.component, allocation.size_bytes

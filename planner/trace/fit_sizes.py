"""The sizes of the samples' allocations as expressions: products of terms, sums of two, or constants."""

from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations
from math import gcd

from planner.trace.profile import Expression, NoProfile, constant
from planner.trace.samples import Samples
from planner.trace.terms import FURTHER_LAYERS, ONE, term_values

NUMBER_BYTES = (4, 8)  # of a float32 and an int64


class Expressions:
    """The distinct sizes of the samples, fitted once each."""

    def __init__(self, samples: Samples) -> None:
        self._terms = _Terms([term_values(sample.sizes) for sample in samples.sized])
        self._traces = [sample.trace for sample in samples.sized]
        self._places = samples.places
        self._rows = [sample.sizes["rows"] for sample in samples.sized]
        self._by_sizes: dict[tuple[int, ...], int] = {}
        self.found: list[Expression] = []

    def of(self, allocation: int) -> int:
        """The number of the expression of an allocation, by its sizes in all the samples."""
        sizes = tuple(trace.allocations[places[allocation]].size_bytes for trace, places in zip(self._traces, self._places, strict=True))
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
        self._by_proportions: dict[tuple[int, ...], tuple[str, str]] = {}
        for term, number in values[0].items():
            if number > 0:
                self._by_proportions.setdefault(_proportions([each[term] for each in values]), term)
        # One of each proportion stands for all that cannot be told apart, in integers for the search of pairs.
        self._vectors = [(term, [each[term] for each in values]) for term in self._by_proportions.values()]

    def fitted(self, sizes: tuple[int, ...]) -> Expression:
        """The term that is proportional to the sizes; else a constant and a term; else the first pair of terms with whole coefficients."""
        if len(set(sizes)) == 1:
            return constant(sizes[0])
        term = self._by_proportions.get(_proportions(sizes))
        if term is not None:
            ratio = Fraction(sizes[0], self._first[term])
            return Expression(parts=((*term, ratio.numerator, ratio.denominator),))
        for index, (first, vector) in enumerate(self._vectors):
            for second, other in self._vectors[:index]:
                pair = _pair(vector, other, sizes)
                if pair is not None:
                    return Expression(parts=((*second, pair[1], 1), (*first, pair[0], 1)))
        raise NoProfile(f"Sizes {sizes} are no product of terms nor the sum of two.")


def _proportions(numbers: Sequence[int]) -> tuple[int, ...]:
    """The same for all that are proportional."""
    common = gcd(*numbers)
    return tuple([number // common for number in numbers])


def _pair(first: list[int], second: list[int], sizes: tuple[int, ...]) -> tuple[int, int] | None:
    """Whole positive coefficients with which two terms sum up to the sizes."""
    for i, j in combinations(range(len(sizes)), 2):  # two samples may have the same rows
        determinant = first[i] * second[j] - second[i] * first[j]
        if determinant:
            break
    else:
        return None
    x, x_rest = divmod(sizes[i] * second[j] - second[i] * sizes[j], determinant)
    y, y_rest = divmod(first[i] * sizes[j] - sizes[i] * first[j], determinant)
    if x_rest or y_rest or x <= 0 or y <= 0:
        return None
    return (x, y) if all(x * a + y * b == size for a, b, size in zip(first, second, sizes, strict=True)) else None

"""Token counts of a dataset's rows (`RowLengths`), counted from a file or drawn from quantiles in words."""

from collections.abc import Mapping
from functools import cached_property
from itertools import pairwise
from math import exp, log

from msgspec import Struct

from planner.errors import InputError, shortened

LENGTHS = "--lengths"  # the option, unless another gives them
EXAMPLE = "p50=380,p95=1900,max=8192"
# Rows that quantiles in words stand for where they do not say how many there are, and the most that are drawn.
DRAWN_ROWS = 10_000
MOST_TOKENS = 10**9  # of a row
MOST_ROWS = 10**12
# Quantiles that a file's counts are summarized by, in percent.
SUMMARY = (1, 5, 10, 25, 50, 75, 90, 95, 99)


class RowLengths(Struct, frozen=True, kw_only=True, eq=False, dict=True):
    """Token counts of the rows of a dataset, in its order and before `max_length` cuts them; rows of 0 are left out.

    `rows`: how many rows the dataset has; 0: the words do not say. `counted`: every row is in `tokens`, in the order of
    the dataset; False: they are drawn from quantiles, in random order. `words`: the quantiles in words.

    Compared by a digest of the counts, since a search compares candidates thousands of times.
    """

    tokens: tuple[int, ...]
    rows: int
    counted: bool
    words: str

    @cached_property
    def digest(self) -> int:
        return hash((self.tokens, self.rows, self.words))

    @cached_property
    def longest(self) -> int:
        return max(self.tokens)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, RowLengths) and self.digest == other.digest)

    def __hash__(self) -> int:
        return self.digest

    def __repr__(self) -> str:
        return f"RowLengths({self.words})"

    def __str__(self) -> str:
        """Return the quantiles in words, from which `lengths_in_words` draws such rows again."""
        return self.words


def counted_lengths(tokens: tuple[int, ...]) -> RowLengths:
    """Return the lengths of counted rows; those of 0 tokens are left out, as TRL does.

    Source: trl 1.16, data_utils.py, `_pack_bfd` ("Filter out empty sequences"); trainer/sft_trainer.py,
    `_prepare_dataset` (drops rows without labels).

    Raises:
        InputError: no row has a token.
    """
    kept = tuple(count for count in tokens if count > 0)
    if not kept:
        raise InputError("Lengths of rows need a row with a token.")
    return RowLengths(tokens=kept, rows=len(kept), counted=True, words=quantile_words(kept))


def quantile_words(tokens: tuple[int, ...]) -> str:
    """Return counts as quantiles in words: `rows=52002,min=12,p1=20,...,p99=900,max=2047`.

    The quantile p of n sorted counts is the one at index ceil(p n) - 1.
    """
    ordered = sorted(tokens)
    count = len(ordered)
    quantiles = [f"p{percent}={ordered[-(-percent * count // 100) - 1]}" for percent in SUMMARY]
    return ",".join((f"rows={count}", f"min={ordered[0]}", *quantiles, f"max={ordered[-1]}"))


def is_words(text: str) -> bool:
    """Return whether a text is quantiles in words, and not the path of a file."""
    return "=" in text and all("=" in part for part in text.replace(" ", "").split(",") if part)


def lengths_in_words(text: str, option: str = LENGTHS) -> RowLengths:
    """Return lengths drawn from quantiles in words, such as `p50=380,p95=1900,max=8192` or `rows=52002,min=10,...`.

    The logarithm of the length is linear in the normal score of its rank between two given quantiles, and goes on with
    the slope of the first two below them: rows between two quantiles are log-normal, as token counts of texts nearly
    are. The longest row is the last of n rows, at the rank (n - 1/2) / n; without `rows` n is 10,000.

    Example: p50=380,p95=1900: the median is 380, and the logarithm's standard deviation log(5) / 1.645 = 0.98.

    Raises:
        InputError: a part is no quantile, there is no `max` or nothing beside it, or a quantile falls.
    """
    from random import Random  # lazy imports: they take 10 ms, and most plans have no lengths
    from statistics import NormalDist

    score_of = NormalDist().inv_cdf
    given = _parts(text, option)
    rows = given.pop("rows", 0)
    drawn = min(rows, DRAWN_ROWS) or DRAWN_ROWS
    if "max" not in given or len(given) < 2:
        missing = "a quantile beside it, such as p50" if "max" in given else "max, the longest row"
        raise InputError(f"{option} {shortened(text)} lacks {missing}. For example: {option} {EXAMPLE}")
    points = sorted((_rank(name, f"{option} {shortened(text)}", drawn), count, name) for name, count in given.items())
    for (_, low, first), (_, high, second) in pairwise(points):
        if low > high:
            raise InputError(f"{option} {shortened(text)}: {second}={high} is below {first}={low}.")
    if points[0][0] == points[-1][0] and points[0][1] < points[-1][1]:
        raise InputError(f"{option} {shortened(text)}: of {drawn} rows all these are one. Give min, or more rows.")
    scores = [(score_of(rank), log(count)) for rank, count, _ in points]
    shortest, longest = given.get("min", 1), given["max"]
    drawn_tokens = [
        min(longest, max(shortest, round(exp(_interpolated(score_of((index + 0.5) / drawn), scores)))))
        for index in range(drawn)
    ]
    Random(0).shuffle(drawn_tokens)  # the order matters where rows are packed 1,000 at a time
    return RowLengths(tokens=tuple(drawn_tokens), rows=rows, counted=False, words=_written(given, rows))


def _parts(text: str, option: str) -> dict[str, int]:
    """Return the quantiles and the number of rows of a text, by name.

    Raises:
        InputError: a part is no `name=number`, or a name is given twice.
    """
    given: dict[str, int] = {}
    for part in text.replace(" ", "").split(","):
        name, _, value = part.partition("=")
        number = value.replace("_", "")
        most = MOST_ROWS if name == "rows" else MOST_TOKENS
        if not number.isascii() or not number.isdecimal() or len(number) > 20 or not 0 < int(number) <= most:
            raise InputError(
                f"{option} {shortened(part)} is no quantile: a name and a number from 1 on, such as p95=1900."
            )
        if name in given:
            raise InputError(f"{option} has {shortened(name)} twice.")
        given[name] = int(number)
    return given


def _rank(name: str, said: str, drawn: int) -> float:
    """Return the rank of a quantile between 0 and 1: p95 is 0.95; min and max are those of the first and last row.

    Raises:
        InputError: it is no name of a quantile.
    """
    edges = {"min": 0.5 / drawn, "max": 1 - 0.5 / drawn, "median": 0.5}
    percent = name[1:]
    plain = name.startswith("p") and percent.replace(".", "", 1).isdecimal() and percent.isascii() and len(percent) < 12
    if name in edges:
        return edges[name]
    if not plain or not 0 < float(percent) < 100:
        raise InputError(f"{said}: {shortened(name)} is no quantile. There are p1 to p99.9, min, max and rows.")
    return min(max(float(percent) / 100, edges["min"]), edges["max"])


def _interpolated(score: float, points: list[tuple[float, float]]) -> float:
    """Return the value at a score on the line through points, which goes on before the first and ends at the last."""
    pairs = [pair for pair in pairwise(points) if pair[1][0] > pair[0][0]]
    if not pairs:
        return points[-1][1]  # all are of one row
    (low, first), (high, second) = next((pair for pair in pairs if score <= pair[1][0]), pairs[-1])
    return first + (min(score, high) - low) * (second - first) / (high - low)


def _written(given: Mapping[str, int], rows: int) -> str:
    """Return quantiles in words with the number of rows first."""
    known = {"rows": rows} if rows else {}
    return ",".join(f"{name}={value}" for name, value in {**known, **given}.items())

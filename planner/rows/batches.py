"""Padding of a batch and of an epoch: how many tokens a trainer computes for rows of different lengths.

In random order (transformers 5.23, trainer.py, `_get_train_sampler`: RandomSampler) a batch of n rows is a random
choice of n of all N, and its longest row has at most t tokens with the probability C(c, n) / C(N, n), where c rows have
at most t. The expected padding of an epoch is exact; a run with one seed differs by chance. In the order of the dataset
("sequential") it is that of a run.
"""

from bisect import bisect_left
from collections import Counter
from functools import lru_cache
from itertools import accumulate
from math import exp, inf, lgamma, sqrt
from typing import Literal, NamedTuple

from msgspec import Struct

from planner.rows.lengths import RowLengths
from planner.rows.packing import documents, packed_rows

# How rows become batches. padded: to the longest row of the batch. padding_free: concatenated to one row. The others
# are strategies of packing; rows of "wrapped" stay rows of a batch.
Layout = Literal["padded", "padding_free", "bfd", "bfd_split", "wrapped"]
# Values of `train_sampling_strategy`. Leaves out "batch_rebalance", which has batches of different numbers of rows.
Order = Literal["random", "sequential", "group_by_length"]
# Batches, of a whole step on one process, among which "group_by_length" sorts rows by their lengths. Source:
# transformers 5.23, trainer_pt_utils.py, `get_length_grouped_indices`.
SORTED_STEPS, LEAST_PARTS = 50, 4
MOST_BINS = 32  # in which attention's rows are counted


class Rows(NamedTuple):
    """The rows that a trainer gets, and their batches.

    `too_long`: what becomes of rows of more than `max_length` tokens; padding-free batches keep them whole (trl 1.16,
    trainer/sft_trainer.py, `SFTTrainer.__init__`: "`max_length` is not enforced").
    """

    lengths: RowLengths
    max_length: int
    too_long: Literal["cut", "drop"]
    layout: Layout
    order: Order
    batch_rows: int  # on one process
    processes: int  # that have batches of their own
    accumulation: int  # micro-batches of a process in a step


class Histogram(NamedTuple):
    """Numbers of tokens, ascending, and how many rows have each."""

    tokens: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def rows(self) -> int:
        return sum(self.counts)

    @property
    def total(self) -> int:
        """Return the tokens of all rows."""
        return sum(tokens * count for tokens, count in zip(self.tokens, self.counts, strict=True))

    @property
    def mean(self) -> float:
        return self.total / self.rows


def histogram(tokens: Counter[int]) -> Histogram:
    """Return counted numbers of tokens as a histogram."""
    ordered = sorted(tokens.items())
    return Histogram(tuple(number for number, _ in ordered), tuple(count for _, count in ordered))


@lru_cache(maxsize=256)
def trained_rows(lengths: RowLengths, max_length: int, too_long: Literal["cut", "drop"], layout: Layout) -> Histogram:
    """Return the rows of the trainer's dataset: packed ones, or those of the dataset without what `max_length` cuts."""
    if layout == "padding_free":
        return histogram(Counter(lengths.tokens))
    if layout != "padded":
        return histogram(Counter(packed_rows(lengths, max_length, layout)))
    counted = Counter(lengths.tokens)
    kept = Counter({tokens: count for tokens, count in counted.items() if tokens <= max_length})
    if too_long == "cut" or not kept:
        kept[max_length] += sum(count for tokens, count in counted.items() if tokens > max_length)
    return histogram(kept)


@lru_cache(maxsize=256)
def attended_rows(rows: Rows) -> Histogram:
    """Return the stretches of tokens that see one another where attention knows them: documents, not packed rows."""
    if rows.layout in ("padded", "padding_free"):
        return trained_rows(rows.lengths, rows.max_length, rows.too_long, rows.layout)
    return histogram(Counter(documents(rows.lengths, rows.max_length, rows.layout)))


def longest_of_equal(rows: Histogram, chosen: int) -> int:
    """Return the most tokens that at least `chosen` rows have; 0: no number of tokens is that of so many rows."""
    return max((tokens for tokens, count in zip(*rows, strict=True) if count >= chosen), default=0)


def shares_of_longest(rows: Histogram, chosen: int) -> tuple[float, ...]:
    """Return the probability of each number of tokens to be that of the longest of `chosen` random rows.

    P(longest <= t) = C(c, n) / C(N, n), c of N rows have at most t tokens
    """
    total = rows.rows
    chosen = min(chosen, total)
    whole = _log_choices(total, chosen)
    up_to = [exp(_log_choices(count, chosen) - whole) for count in accumulate(rows.counts)]
    return tuple(now - before for before, now in zip([0.0, *up_to], up_to, strict=False))


def expected_longest(rows: Histogram, chosen: int) -> float:
    """Return the expected tokens of the longest of `chosen` random rows."""
    if chosen == 1:
        return rows.mean
    return sum(t * share for t, share in zip(rows.tokens, shares_of_longest(rows, chosen), strict=True))


def _log_choices(total: int, chosen: int) -> float:
    """Return the logarithm of C(total, chosen), -infinity for 0."""
    if chosen > total:
        return -inf
    return lgamma(total + 1) - lgamma(chosen + 1) - lgamma(total - chosen + 1)


@lru_cache(maxsize=256)
def longest_of_batches(rows: Rows) -> tuple[float, ...]:
    """Return the probability of each number of tokens to be that of the longest row of a whole batch."""
    own = trained_rows(rows.lengths, rows.max_length, rows.too_long, rows.layout)
    if rows.order == "group_by_length":
        return _longest_of_sorted(own, rows)
    if rows.order == "random" or not rows.lengths.counted or own.rows < rows.batch_rows:
        return shares_of_longest(own, rows.batch_rows)
    ordered = _in_order(rows)
    whole = len(ordered) // rows.batch_rows * rows.batch_rows
    longest = Counter(max(ordered[start : start + rows.batch_rows]) for start in range(0, whole, rows.batch_rows))
    return tuple(longest[tokens] * rows.batch_rows / whole for tokens in own.tokens)


def _longest_of_sorted(own: Histogram, rows: Rows) -> tuple[float, ...]:
    """Return the shares of the longest rows of batches from rows that are sorted by length.

    Of M random rows that are sorted together, the longest of batch k is the one at rank k n + 1 from the top, about the
    quantile 1 - (k n + 1/2) / M. M is 50 steps of one process, or a quarter of the dataset where that is less.

    Leaves out that the longest row of all is moved to the first batch.
    """
    step = rows.batch_rows * rows.accumulation
    together = min(step * (min(own.rows // (step * LEAST_PARTS), SORTED_STEPS) or 1), own.rows)
    batches = max(together // rows.batch_rows, 1)
    up_to = tuple(accumulate(own.counts))
    places = [bisect_left(up_to, own.rows * (1 - (k * rows.batch_rows + 0.5) / together)) for k in range(batches)]
    found = Counter(places)
    return tuple(found[place] / batches for place in range(len(own.tokens)))


def _in_order(rows: Rows) -> tuple[int, ...]:
    """Return the tokens of the trainer's rows in the order of the dataset."""
    if rows.layout == "wrapped":
        return packed_rows(rows.lengths, rows.max_length, rows.layout)
    if rows.too_long == "drop":
        return tuple(tokens for tokens in rows.lengths.tokens if tokens <= rows.max_length)
    return tuple(min(tokens, rows.max_length) for tokens in rows.lengths.tokens)


# -- a micro-batch -----------------------------------------------------------------------------------------------------


class MicroBatch(Struct, frozen=True, kw_only=True):
    """One micro-batch of one process in the mean.

    `tokens`: without padding. `computed`: with padding. `slowest`: computed by the process with most of them, where all
    wait for each other after one micro-batch. `seen`: (tokens that see one another, how many such stretches).
    """

    tokens: float
    computed: float
    slowest: float
    seen: tuple[tuple[float, float], ...]


@lru_cache(maxsize=1024)
def micro_batch_of(rows: Rows, unpads: bool) -> MicroBatch:
    """Return the micro-batch of a random order in the mean.

    `unpads`: attention knows where each document begins and ends and skips padding, as FlashAttention's kernels for
    rows of different lengths do; other kernels see padded rows and, of concatenated ones, one long row.

        padded     n rows of E[longest of n]; slowest n x E[longest of n x processes]
        flattened  n x mean; slowest n x mean + sqrt(n) x (E[longest of the processes] - mean), by the central limit

    Leaves out the last batch of an epoch, which may be smaller, and that the two rows of a pair are alike.
    """
    own = trained_rows(rows.lengths, rows.max_length, rows.too_long, rows.layout)
    batch, mean = rows.batch_rows, own.mean
    if rows.layout in ("padded", "wrapped"):
        shares = longest_of_batches(rows)
        computed = batch * sum(tokens * share for tokens, share in zip(own.tokens, shares, strict=True))
        apart = rows.order == "group_by_length"  # neighbouring batches, which are alike, go to different processes
        slowest = computed if apart else max(computed, batch * expected_longest(own, batch * rows.processes))
    else:
        computed = batch * mean
        slowest = computed + sqrt(batch) * (expected_longest(own, rows.processes) - mean)
    return MicroBatch(tokens=batch * mean, computed=computed, slowest=slowest, seen=_seen(rows, own, unpads, computed))


def _seen(rows: Rows, own: Histogram, unpads: bool, computed: float) -> tuple[tuple[float, float], ...]:
    """Return the stretches of a micro-batch that attention computes."""
    batch = rows.batch_rows
    if unpads:
        attended, drawn = attended_rows(rows), own.rows
        return _bins(attended.tokens, [batch * count / drawn for count in attended.counts])
    if rows.layout in ("padded", "wrapped"):
        return _bins(own.tokens, [batch * share for share in longest_of_batches(rows)])
    return ((computed, 1.0),)


def _bins(tokens: tuple[int, ...], weights: list[float]) -> tuple[tuple[float, float], ...]:
    """Return at most `MOST_BINS` pairs of (tokens, weight) with the same sum of squares, which attention grows with."""
    room = sum(weights) / MOST_BINS
    found: list[tuple[float, float]] = []
    squares = weight = 0.0
    for number, share in zip(tokens, weights, strict=True):
        squares, weight = squares + share * number * number, weight + share
        if weight >= room:
            found.append((sqrt(squares / weight), weight))
            squares = weight = 0.0
    return (*found, (sqrt(squares / weight), weight)) if weight > 0 else tuple(found)


# -- an epoch ----------------------------------------------------------------------------------------------------------


class Epoch(Struct, frozen=True, kw_only=True):
    """One pass over the dataset, without a validation split.

    `rows`: of the dataset; 0: not known, and all counts are those of the rows that were drawn from quantiles.
    `trained_rows`: of the trainer's dataset, packed ones or those of the dataset. `padding`: expected tokens of it.
    `cut_rows`, `cut_tokens`: rows that are longer than `max_length`, and their tokens that are lost. `steps`: optimizer
    steps.
    """

    rows: int
    drawn_rows: int  # rows that all other counts are about
    trained_rows: int
    tokens: int
    padding: int
    cut_rows: int
    cut_tokens: int
    steps: int
    layout: Layout
    max_length: int

    @property
    def padding_share(self) -> float:
        """Return the share of padding in all computed tokens."""
        return self.padding / (self.tokens + self.padding)

    @property
    def fill(self) -> float:
        """Return the share of packed rows that tokens fill."""
        return self.tokens / (self.trained_rows * self.max_length)

    @property
    def cut_row_share(self) -> float:
        """Return the share of the rows that are longer than `max_length`."""
        return self.cut_rows / self.drawn_rows

    @property
    def cut_token_share(self) -> float:
        """Return the share of the tokens that are lost."""
        return self.cut_tokens / (self.tokens + self.cut_tokens)

    @property
    def mean_tokens(self) -> float:
        """Return the trained tokens of a row of the dataset."""
        return self.tokens / self.drawn_rows


@lru_cache(maxsize=1024)
def epoch_of(rows: Rows, rows_per_sample: int) -> Epoch:
    """Return an epoch: exact but for the padding in random order, which is its expectation over all orders.

    A batch is the last one of a process with what is left over; `rows_per_sample` rows form one sample. Steps: the
    batches are dealt to the processes in turn, and every `accumulation` of a process end with an optimizer step,
    the last one with fewer.

    Leaves out the samples that accelerate repeats so that all processes have as many batches (accelerate 1.15,
    data_loader.py, `BatchSamplerShard`, even_batches): fewer than one batch for each process.
    """
    own = trained_rows(rows.lengths, rows.max_length, rows.too_long, rows.layout)
    size = rows.batch_rows // rows_per_sample
    scale = rows.lengths.rows / len(rows.lengths.tokens) if rows.lengths.rows else 1.0  # rows for each drawn one
    batches, rest = divmod(own.rows // rows_per_sample, size)
    samples = round(scale * own.rows) // rows_per_sample
    micro_steps = -(-samples // (size * rows.processes))
    cut_rows, cut_tokens = _lost(rows)
    return Epoch(
        rows=rows.lengths.rows,
        drawn_rows=round(scale * len(rows.lengths.tokens)),
        trained_rows=round(scale * own.rows),
        tokens=round(scale * own.total),
        padding=round(scale * (_computed(rows, own, batches, rest * rows_per_sample) - own.total)),
        cut_rows=round(scale * cut_rows),
        cut_tokens=round(scale * cut_tokens),
        steps=-(-micro_steps // rows.accumulation),
        layout=rows.layout,
        max_length=rows.max_length,
    )


def _computed(rows: Rows, own: Histogram, batches: int, last: int) -> float:
    """Return the tokens of an epoch with padding; `last`: rows of its last batch, where that is not a whole one."""
    if rows.layout not in ("padded", "wrapped"):
        return own.total
    longest = sum(tokens * share for tokens, share in zip(own.tokens, longest_of_batches(rows), strict=True))
    end = 0.0
    if last and rows.order == "sequential" and rows.lengths.counted:
        end = last * max(_in_order(rows)[-last:])
    elif last and rows.order == "group_by_length":
        end = last * expected_longest(own, 1)
    elif last:
        end = last * expected_longest(own, last)
    return batches * rows.batch_rows * longest + end


@lru_cache(maxsize=256)
def lost_to(lengths: RowLengths, max_length: int) -> tuple[int, int]:
    """Return how many rows are longer than `max_length`, and how many tokens lie beyond it."""
    longer = [tokens for tokens in lengths.tokens if tokens > max_length]
    return len(longer), sum(longer) - max_length * len(longer)


def _lost(rows: Rows) -> tuple[int, int]:
    """Return the rows and tokens of the dataset that are lost to `max_length`."""
    if rows.layout in ("padding_free", "bfd_split", "wrapped"):
        return 0, 0
    longer, beyond = lost_to(rows.lengths, rows.max_length)
    dropped = rows.layout == "padded" and rows.too_long == "drop"
    return longer, beyond + rows.max_length * longer if dropped else beyond

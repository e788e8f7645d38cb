"""Rows that TRL packs: how many there are, and how full, computed as `trl.pack_dataset` does (trl 1.16, data_utils.py).

`Dataset.map` hands rows to the packing function in batches of 1,000 (datasets 5.2, arrow_dataset.py, `map`,
`batch_size`), so that 1,000 rows in the order of the dataset are packed by themselves.

Leaves out `dataset_num_proc`, with which each process packs a part of the dataset by itself.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

from planner.rows.lengths import RowLengths

PACKED_AT_ONCE = 1000


@lru_cache(maxsize=64)
def packed_rows(lengths: RowLengths, max_length: int, strategy: str) -> tuple[int, ...]:
    """Return the tokens of each packed row, by one of TRL's strategies: bfd, bfd_split or wrapped."""
    pack = STRATEGIES[strategy]
    tokens = lengths.tokens
    parts = (tokens[start : start + PACKED_AT_ONCE] for start in range(0, len(tokens), PACKED_AT_ONCE))
    return tuple(row for part in parts for row in pack(part, max_length))


def documents(lengths: RowLengths, max_length: int, strategy: str) -> Iterator[int]:
    """Yield the tokens of each stretch of a packed row in which tokens see one another."""
    if strategy == "wrapped":
        yield from packed_rows(lengths, max_length, strategy)
    elif strategy == "bfd_split":
        yield from _split(lengths.tokens, max_length)
    else:
        yield from (min(count, max_length) for count in lengths.tokens)


def _bfd(tokens: Sequence[int], max_length: int) -> list[int]:
    """Return the rows of best-fit decreasing: the longest first, each into the fullest row that has room.

    Of rows with equally much room it does not matter which one is taken. Source: `_pack_bfd`.
    """
    rooms: list[int] = []  # of rows that are not full, ascending
    full = 0
    for length in sorted((min(count, max_length) for count in tokens), reverse=True):
        place = bisect_left(rooms, length)
        room = rooms.pop(place) if place < len(rooms) else max_length
        if room > length:
            insort(rooms, room - length)
        else:
            full += 1
    return [max_length] * full + [max_length - room for room in rooms]


def _split(tokens: Sequence[int], max_length: int) -> list[int]:
    """Return rows cut into pieces of `max_length`, the last one shorter."""
    return [min(max_length, count - start) for count in tokens for start in range(0, count, max_length)]


STRATEGIES: dict[str, Callable[[Sequence[int], int], list[int]]] = {
    "bfd": _bfd,
    "bfd_split": lambda tokens, max_length: _bfd(_split(tokens, max_length), max_length),
    "wrapped": lambda tokens, max_length: _split((sum(tokens),), max_length),
}


# -- rows that are trees -----------------------------------------------------------------------------------------------
# Completions of one prompt in a packed row share its tokens but for the last one, after which they differ: a group of n
# takes prompt - 1 + n (completion + 1) tokens. Source: trl 1.16, experimental/async_grpo/packing.py, `TreeRow`.


def tree_tokens(samples: int, group: int, prompt: int, completion: float) -> int:
    """Return the tokens of a row with as many completions, in whole groups of one prompt but for the last."""
    groups, left = divmod(samples, group)
    tokens = (groups + (left > 0)) * (prompt - 1) + samples * (completion + 1)
    return round(tokens)


def tree_samples(budget: int, group: int, prompt: int, completion: float) -> int:
    """Return the completions, at least one, of a row of at most `budget` tokens, as `tree_tokens` counts them."""
    groups, rest = divmod(budget, prompt - 1 + group * (completion + 1))
    return max(1, round(groups) * group + max(0, int((rest - prompt + 1) // (completion + 1))))


def tree_paths(samples: int, group: int, prompt: int, completion: int) -> int:
    """Return the tokens of all paths of a tree: each stretch is gathered with everything before it.

    A group of one is a stretch of its own; one of n has the prompt's stretch and n whole rows.
    """
    groups, left = divmod(samples, group)
    shared = groups * (group > 1) + (left > 1)
    return shared * (prompt - 1) + samples * (prompt + completion)

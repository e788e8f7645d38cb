"""Two sequences of births laid beside each other, of which the longer is the shorter with repetitions put in: layers, micro-steps, a tensor a row."""

from collections.abc import Hashable, Sequence
from itertools import groupby, pairwise

from planner.trace.profile import NoProfile

# Two sequences that agree on so many births are in step again after an inserted run; more than a layer has of equal ones in a row.
AGREEING_BIRTHS = 256

Births = Sequence[Hashable]


def beside(short: Births, long: Births) -> list[int]:
    """For each birth of the shorter sequence its place in the longer: of what is repeated the first half stays first, the second half last.

    A first micro-step finds nothing left over from one before, and none comes after a last one: only those between them are all alike.

    Raises:
        NoProfile: the longer sequence is not the shorter with repetitions put in.
    """
    left = _from_left(short, long)
    right = [len(long) - 1 - place for place in reversed(_from_left(short[::-1], long[::-1]))]
    found: list[int] = []
    for _, repeated in groupby(range(len(short)), lambda index: (left[index] - index, right[index] - index)):
        run = list(repeated)
        found += [left[index] for index in run[: len(run) // 2]] + [right[index] for index in run[len(run) // 2 :]]
    if any(place >= following for place, following in pairwise(found)):
        raise NoProfile("What the longer trace has more of is not what it repeats.")
    return found


def _from_left(short: Births, long: Births) -> list[int]:
    """The place of each birth of the shorter sequence where first layers meet first layers."""
    places: list[int] = []
    place = 0
    for index in range(len(short)):
        while place < len(long) and short[index] != long[place]:
            place = _resumption(short, long, index, place)
        if place == len(long):
            raise NoProfile("The longer trace is not the shorter one with something put in.")
        places.append(place)
        place += 1
    return places


def _resumption(short: Births, long: Births, index: int, place: int) -> int:
    """The place in `long` after `place` from which it goes on for longest as `short` does from `index`."""
    best, longest = len(long), 0
    for start in range(place + 1, len(long)):
        if long[start] != short[index]:
            continue
        length = _common_length(short, long, index, start)
        if length > longest:
            best, longest = start, length
        if longest >= AGREEING_BIRTHS:
            break
    return best


def _common_length(short: Births, long: Births, index: int, place: int) -> int:
    length, most = 0, min(AGREEING_BIRTHS, len(short) - index, len(long) - place)
    while length < most and short[index + length] == long[place + length]:
        length += 1
    return length

"""The largest number that fits, found by halving."""

from collections.abc import Callable


def largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest of low..high that fits; low - 1 when none does. Memory grows with each number that is asked about."""
    if low > high or not fits(low):
        return low - 1
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low

"""Binary search for the largest number that fits."""

from collections.abc import Callable


def largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest number of low..high that fits, low - 1 if none does.

    `fits` is monotonic: a number above one that does not fit does not fit either. It is called for `low` first, and for
    the answer unless none fits.
    """
    if low > high or not fits(low):
        return low - 1
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low

"""Python's cyclic garbage collector, which frees tensors at times of its own."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_off() -> Iterator[None]:
    """Turn Python's cyclic garbage collector off inside the block: it runs at times of its own, which would reorder the
    deaths.

    `gc.collect()`, which a trainer calls, still works.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()

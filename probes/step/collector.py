"""Python's cyclic garbage collector, switched off while memory is recorded."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_off() -> Iterator[None]:
    """Turn off Python's cyclic garbage collector inside the block, since it would free tensors at arbitrary times.

    `gc.collect()`, which a trainer calls, still works.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()

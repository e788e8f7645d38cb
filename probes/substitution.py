"""The one place where an attribute of another library is replaced for a while, and restored.

Used for CUDA kernels that do not exist on the CPU, tensors without memory, random weights instead of downloaded ones,
and marks at which a phase of the step begins. Each use names the attribute, and its source beside it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_ABSENT = object()


@contextmanager
def substituted(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set `owner.name` to `value` inside the block, and restore it afterwards.

    Raises:
        AttributeError: the installed release has no such attribute, so that a moved function is noticed.
    """
    getattr(owner, name)
    # Not what getattr returns: a static method stays one, an inherited attribute stays inherited.
    before = vars(owner).get(name, _ABSENT)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

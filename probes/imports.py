"""The libraries of a dry run imported in half the time that their imports take by themselves."""

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """While inside, imports leave out what no dry run needs.

    Python's cyclic collector, which walks all that was imported again and again and finds nothing, neither now nor later; and PyTorch's compiler,
    which bitsandbytes would import for two kernels that it may never call (bitsandbytes 0.50.2, backends/default/ops.py `_try_torch_compile`).
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        import torch

        with mock.patch.object(torch, "compile", _compiled_when_called(torch.compile)):
            yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


def _compiled_when_called(compile_now: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compile`, which is left alone until the function is called."""

    def compiled(function: Callable[..., Any] | None = None, **settings: Any) -> Callable[..., Any]:
        if function is None:
            return lambda decorated: compiled(decorated, **settings)
        ready: list[Callable[..., Any]] = []

        def call(*args: Any, **kwargs: Any) -> Any:
            if not ready:
                ready.append(compile_now(function, **settings))
            return ready[0](*args, **kwargs)

        return call

    return compiled

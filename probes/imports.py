"""The libraries of a dry run imported in half the time that their imports take by themselves."""

import contextlib
import functools
import gc
import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from probes.compiler import compiler_when_asked


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """While inside, imports leave out what no dry run needs, and torch and transformers are imported.

    Python's cyclic collector, which walks all that was imported again and again and finds nothing, neither now nor later; PyTorch's compiler,
    which bitsandbytes would import for two kernels that it may never call (bitsandbytes 0.50.2, backends/default/ops.py `_try_torch_compile`);
    where a fake kernel was registered is read off the frame, not searched for in all modules (torch 2.13, _library/utils.py `get_source`); and the
    files of Transformers' models are read once, not for the folder and for its __init__.py (transformers 5.23, utils/import_utils.py).
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        import torch

        compiler_when_asked()
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(importlib.metadata, "packages_distributions", _distributions))
            stack.enter_context(mock.patch.object(torch, "compile", _compiled_when_called(torch.compile)))
            if hasattr(torch._library.utils, "get_source"):
                stack.enter_context(mock.patch.object(torch._library.utils, "get_source", _frame_of_source))
            from transformers.utils import import_utils

            of_folder = getattr(import_utils, "create_import_structure_from_path", None)
            if of_folder is not None:  # other releases may have neither
                stack.enter_context(mock.patch.object(import_utils, "create_import_structure_from_path", lambda path: of_folder(_folder(path))))
            yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


_distributions = functools.lru_cache(maxsize=1)(importlib.metadata.packages_distributions)


def _frame_of_source(stacklevel: int) -> str:
    """`file:line` of a caller."""
    frame = sys._getframe(stacklevel)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _folder(path: str | Path) -> Path:
    """A folder as it is, a file's folder."""
    return Path(os.path.dirname(path) if os.path.isfile(path) else path)


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

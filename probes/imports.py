"""The libraries of a dry run imported in half the time that their imports take by themselves."""

import contextlib
import gc
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from planner.ahead import only_plans
from probes.process.beside import Beside

LAZY_IMPORTS = "transformers.utils.import_utils"
_Read = tuple[Any, dict[str, Any]]


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """While inside, imports leave out what no dry run needs, and torch and transformers are imported.

    Python's cyclic collector, which walks all that was imported again and again and finds nothing, neither now nor later; parts of PyTorch, until
    somebody asks for them (when_asked/), and with its compiler what bitsandbytes compiles for two kernels that it may never call (bitsandbytes 0.50.2,
    backends/default/ops.py `_try_torch_compile`); where a fake kernel was registered is read off the frame, not searched for in all modules (torch 2.13,
    _library/utils.py `get_source`). What Transformers and TRL read from all installed files another process reads meanwhile (`_read_from_files`).
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        with contextlib.ExitStack() as stack:
            if "transformers" not in sys.modules:
                stack.enter_context(_read_beside())
            import torch

            _modules_when_asked()
            stack.enter_context(mock.patch.object(torch, "compile", _compiled_when_called(torch.compile)))
            if hasattr(torch._library.utils, "get_source"):  # other releases may not have it
                stack.enter_context(mock.patch.object(torch._library.utils, "get_source", _frame_of_source))
            import transformers  # noqa: F401

            yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


def _modules_when_asked() -> None:
    from probes.when_asked.compiler import compiler_when_asked
    from probes.when_asked.distributed import distributed_when_asked
    from probes.when_asked.symbols import symbols_when_asked

    compiler_when_asked()
    if only_plans():
        symbols_when_asked()
        distributed_when_asked()


@contextlib.contextmanager
def _read_beside() -> Iterator[None]:
    """What libraries read from files when they are imported, read in another process while this one imports the first of them."""
    distributions = importlib.metadata.packages_distributions
    nothing: _Read = (None, {})
    read: list[_Read] = []
    here = os.getpid()

    with Beside(lambda: _read_from_files(elsewhere=os.getpid() != here)) as other:

        def what_was_read() -> _Read:
            if not read:
                read.append(nothing)  # while it is read here, where it could not be read elsewhere
                read[0] = other.result()
            return read[0]

        def patched(module: ModuleType) -> None:
            by_path = getattr(module, "create_import_structure_from_path", None)
            if only_plans():  # a PyTorch without it is one that Transformers knows (transformers 5.23, distributed/)
                vars(module).update(is_torch_distributed_available=lambda: False)
            if by_path is not None:  # other releases may not have it
                vars(module).update(create_import_structure_from_path=lambda path: what_was_read()[1].get(str(_folder(path))) or by_path(path))

        finder = _AfterImport(LAZY_IMPORTS, patched)
        sys.meta_path.insert(0, finder)
        try:
            with mock.patch.object(importlib.metadata, "packages_distributions", lambda: what_was_read()[0] or distributions()):
                yield
        finally:
            sys.meta_path.remove(finder)


def _read_from_files(elsewhere: bool) -> _Read:
    """Which package each module is of, which TRL asks for (trl 1.16, import_utils.py:24), and what the folders of Transformers' models offer, by folder.

    Transformers reads all their files to know it, once for the folder and once for its __init__.py (transformers 5.23, utils/import_utils.py
    `create_import_structure_from_path`).
    """
    structures: dict[str, Any] = {}
    import_utils = (_alone if elsewhere else importlib.import_module)(LAZY_IMPORTS)
    by_path = getattr(import_utils, "create_import_structure_from_path", None)
    if by_path is not None:
        models = Path(import_utils.__file__ or "").parents[1] / "models"
        structures[str(models)] = by_path(models)
    return importlib.metadata.packages_distributions(), structures


def _alone(name: str) -> ModuleType:
    """A module without what its packages import besides: for a process that does nothing else."""
    packages = name.split(".")[:-1]
    spec = importlib.util.find_spec(packages[0])
    folders = spec.submodule_search_locations if spec is not None else None
    for depth in range(1, len(packages) + 1):
        package = ModuleType(".".join(packages[:depth]))
        package.__path__ = [os.path.join(folder, *packages[1:depth]) for folder in folders or ()]
        sys.modules[package.__name__] = package
    return importlib.import_module(name)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Does something to a module right after it was executed."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target) if fullname == self._name else None
        if spec is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            return None
        execute = spec.loader.exec_module

        def execute_then(module: ModuleType) -> None:
            execute(module)
            self._then(module)

        vars(spec.loader).update(exec_module=execute_then)
        return spec


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

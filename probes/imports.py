"""The libraries of a dry run imported in half the time that their imports take by themselves."""

import contextlib
import gc
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import inspect
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
    somebody asks for them (when_asked/); what is made that may never be called (`_quicker`). What Transformers and TRL read from all installed files
    another process reads meanwhile (`_read_from_files`).
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_quicker())
            if "transformers" not in sys.modules:
                stack.enter_context(_read_beside())
            import torch  # noqa: F401

            _modules_when_asked()
            import transformers  # noqa: F401

            yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


@contextlib.contextmanager
def _quicker() -> Iterator[None]:
    """While inside, what libraries make of functions when they are imported is made when it is called.

    How a dataclass is shown and compared (Python 3.11, dataclasses.py); what bitsandbytes compiles for two kernels (bitsandbytes 0.50.2,
    backends/default/ops.py `_try_torch_compile`), and PyTorch's compiler with it; an operator's backward, a class of its own each (torch 2.13,
    _library/autograd.py). Where an operator is registered is read off the frame, not searched for in the files of all modules (_library/utils.py
    `get_source`, library.py `_register_fake`).
    """
    with contextlib.ExitStack() as stack:
        for module, function, quicker in (
            ("dataclasses", "_repr_fn", _made_when_called),
            ("dataclasses", "_cmp_fn", _made_when_called),
            ("inspect", "getmodule", _module_of),
            ("torch", "compile", _compiled_when_called),
            ("torch._library.utils", "get_source", lambda _: _frame_of_source),
            ("torch._library.autograd", "make_autograd_impl", _made_when_called),
        ):
            stack.enter_context(_replaced(module, function, quicker))
        yield


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

        with (
            _after_import(LAZY_IMPORTS, patched),
            mock.patch.object(importlib.metadata, "packages_distributions", lambda: what_was_read()[0] or distributions()),
        ):
            yield


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


@contextlib.contextmanager
def _after_import(name: str, then: Callable[[ModuleType], None]) -> Iterator[None]:
    """While inside, something is done to a module right after it was executed."""
    finder = _AfterImport(name, then)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


@contextlib.contextmanager
def _replaced(name: str, function: str, replacement: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """While inside, a module that is or will be imported has another function, made of its own one; other releases may not have it."""
    own: list[tuple[ModuleType, Callable[..., Any]]] = []

    def replace(module: ModuleType) -> None:
        if hasattr(module, function):
            own.append((module, getattr(module, function)))
            setattr(module, function, replacement(getattr(module, function)))

    with _after_import(name, replace):
        if name in sys.modules:
            replace(sys.modules[name])
        try:
            yield
        finally:
            for module, before in own:
                setattr(module, function, before)


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


def _module_of(getmodule: Callable[..., Any]) -> Callable[..., Any]:
    """`inspect.getmodule`, which looks for a frame's module in all files."""
    return lambda of, *file: sys.modules.get(of.f_globals.get("__name__", "")) if inspect.isframe(of) else getmodule(of, *file)


def _made_when_called(make: Callable[..., Callable[..., Any]]) -> Callable[..., Callable[..., Any]]:
    """A function that makes functions, each of which is made when it is called."""

    def made(*of: Any, **settings: Any) -> Callable[..., Any]:
        ready: list[Callable[..., Any]] = []

        def call(*args: Any, **kwargs: Any) -> Any:
            if not ready:
                ready.append(make(*of, **settings))
            return ready[0](*args, **kwargs)

        return call

    return made


def _folder(path: str | Path) -> Path:
    """A folder as it is, a file's folder."""
    return Path(os.path.dirname(path) if os.path.isfile(path) else path)


def _compiled_when_called(compile_now: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compile`, which is left alone until the function is called."""

    def compiled(function: Callable[..., Any] | None = None, **settings: Any) -> Callable[..., Any]:
        return (lambda decorated: compiled(decorated, **settings)) if function is None else _made_when_called(compile_now)(function, **settings)

    return compiled

"""PyTorch's compiler (`torch._dynamo`), imported when somebody asks something of it: its marks on functions are put where it would put them."""

import contextlib
import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

NAME = "torch._dynamo"
ALONE = (f"{NAME}.config", f"{NAME}._trace_wrapped_higher_order_op")  # its modules that need none of the others


class CompilerWhenAsked(types.ModuleType):
    """Stands in `sys.modules` for the package, and becomes it when an attribute or a module is asked for that is not here.

    What is here is what libraries say to the compiler when they are imported and at every step, and what has no effect while nothing is compiled
    (torch 2.13, torch/_dynamo/decorators.py).
    """

    def __init__(self, spec: Any) -> None:
        super().__init__(NAME)
        # A package without `__path__` is asked for it when a module of it is imported.
        self.__spec__, self.__loader__, self.__file__, self.__package__ = spec, spec.loader, spec.origin, NAME
        self._allowed: list[Any] = []

    def graph_break(self, msg: str = "") -> None:
        """Nothing to break."""

    def assume_constant_result(self, fn: Any) -> Any:
        fn._dynamo_marked_constant = True
        return fn

    def allow_in_graph(self, fn: Any) -> Any:
        """Said again to the package when it is there."""
        self._allowed.append(fn)
        return fn

    def disable(self, fn: Callable[..., Any] | None = None, recursive: bool = True, **settings: Any) -> Callable[..., Any]:
        """A function that is run as it is, and from when the package is there on as the package runs what is disabled."""
        if fn is None:
            return lambda decorated: self.disable(decorated, recursive, **settings)
        disabled = functools.lru_cache(maxsize=1)(lambda: sys.modules[NAME].disable(fn, recursive, **settings))

        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            return fn(*args, **kwargs) if isinstance(self, CompilerWhenAsked) else disabled()(*args, **kwargs)

        return call

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__path__", "__all__"):
            raise AttributeError(name)
        self._become()
        return getattr(self, name)

    def _become(self) -> None:
        """Imports the package into this module, as a dispatch mode that is on must not see."""
        from torch.utils._python_dispatch import _disable_current_modes

        allowed = self.__dict__.pop("_allowed")
        self.__class__ = types.ModuleType  # type: ignore[assignment]  # the class of modules in mypy's eyes has no instances
        self.__path__ = list(self.__spec__.submodule_search_locations or ())  # type: ignore[union-attr]
        try:
            with _disable_current_modes():
                self.__spec__.loader.exec_module(self)  # type: ignore[union-attr]
        except BaseException:
            self.__class__ = CompilerWhenAsked
            self._allowed = allowed
            del self.__path__
            raise
        for fn in allowed:
            self.allow_in_graph(fn)


def compiler_when_asked() -> None:
    """From now on in this process, unless it has been imported already. It takes a tenth of all imports of a dry run, which compiles nothing."""
    import torch

    if NAME in sys.modules:
        return
    spec = importlib.util.find_spec(NAME)
    if spec is None or spec.loader is None:
        return
    package = CompilerWhenAsked(spec)
    sys.modules[NAME] = package
    torch._dynamo = package
    package.__path__ = list(spec.submodule_search_locations or ())
    with contextlib.suppress(ImportError):  # another release
        for module in ALONE:
            importlib.import_module(module)
    if isinstance(package, CompilerWhenAsked):
        del package.__path__

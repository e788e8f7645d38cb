"""PyTorch's compiler (`torch._dynamo`), imported when somebody asks something of it: its marks on functions are put where it would put them."""

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any

from probes.when_asked.module import ModuleWhenAsked, stand_in

NAME = "torch._dynamo"
ALONE = (f"{NAME}.config", f"{NAME}._trace_wrapped_higher_order_op")  # its modules that need none of the others


class CompilerWhenAsked(ModuleWhenAsked):
    """What is here is what libraries say to the compiler when they are imported and at every step, and what has no effect while nothing is compiled.

    Source: torch 2.13, torch/_dynamo/decorators.py.
    """

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(spec)
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

    def leaving(self) -> Callable[[], None]:
        allowed = vars(self).pop("_allowed")

        def allow() -> None:
            for fn in allowed:
                self.allow_in_graph(fn)

        return allow


def compiler_when_asked() -> None:
    """From now on in this process, unless it has been imported already. It takes a tenth of all imports of a dry run, which compiles nothing."""
    package = stand_in(NAME, CompilerWhenAsked)
    if package is None:
        return
    looked_through, package.__path__ = package.__path__, list(package.__spec__.submodule_search_locations or ())  # type: ignore[union-attr]
    with contextlib.suppress(ImportError):  # another release
        for module in ALONE:
            importlib.import_module(module)
    if isinstance(package, CompilerWhenAsked):
        package.__path__ = looked_through

"""PyTorch's symbolic shapes, and SymPy with them, imported when a size is one: those of dry runs are numbers."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from probes.when_asked.module import ModuleWhenAsked, call, stand_in

SYMBOLS, FUNCTIONS = "torch.fx.experimental.symbolic_shapes", "torch.utils._sympy.functions"


def _same(value: bool | int) -> bool | int:
    return value


# What PyTorch's meta kernels ask, and the answer to plain numbers and truths, or tuples of them (torch 2.13, fx/experimental/symbolic_shapes.py).
ANSWERS: dict[str, Callable[..., Any]] = {
    "expect_true": _same,
    "guard_int": _same,
    "guard_or_false": _same,
    "guard_or_true": _same,
    "statically_known_true": _same,
    "guarding_hint_or_throw": _same,
    "has_guarding_hint": lambda value: True,
    "has_free_symbols": lambda value: False,
    "is_nested_int": lambda value: False,
    "sym_and": lambda *truths: all(truths),
    "sym_or": lambda *truths: any(truths),
    "sym_eq": lambda one, other: tuple(one) == tuple(other) if isinstance(one, tuple) else one == other,
}
# Imported beside those by who then calls them for symbols only.
OTHERS = ("compute_unbacked_bindings", "guard_size_oblivious")


def symbols_when_asked() -> None:
    """From now on in this process, unless they have been imported already. They take a tenth of all imports of a dry run.

    Who got SymPy's class of numbers before SymPy was imported keeps one that has none: for processes that only plan (`planner.ahead.only_plans`).
    """
    symbols = stand_in(SYMBOLS, ModuleWhenAsked)
    if symbols is not None:
        symbols.add_names({name: partial(_answered, symbols, name, answer) for name, answer in ANSWERS.items()})
        symbols.add_names({name: partial(call, symbols, name) for name in OTHERS})
        symbols.add_names({"free_unbacked_symbols": partial(_free_unbacked_symbols, symbols)})
    functions = stand_in(FUNCTIONS, ModuleWhenAsked)
    if functions is not None:  # _prims_common/__init__.py:508
        functions.add_names({"Max": partial(call, functions, "Max")})
    sympy = stand_in("sympy", ModuleWhenAsked)
    if sympy is not None:  # whether something is one of its numbers: _prims_common/__init__.py:1688
        sympy.add_names({"Basic": type("Basic", (), {})})


def _answered(symbols: ModuleWhenAsked, name: str, answer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The answer about plain numbers; about everything else the module's own."""
    plain = not kwargs and all(_numbers(arg) if type(arg) is tuple else type(arg) in (int, bool) for arg in args)
    return answer(*args) if plain else call(symbols, name, *args, **kwargs)


def _free_unbacked_symbols(symbols: ModuleWhenAsked, x: Any) -> Any:
    """Those in a tensor's sizes: none, where they are numbers."""
    if isinstance(x, torch.Tensor) and x.layout is torch.strided and _numbers((*x.size(), *x.stride(), x.storage_offset())):
        return set()
    return call(symbols, "free_unbacked_symbols", x)


def _numbers(items: Iterable[Any]) -> bool:
    return all(type(item) is int for item in items)

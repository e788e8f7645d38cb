"""Whoever is told of a step while it runs: its phase, the module of the model, and what tensors are."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from planner.quantities import Component, Phase


class Told(Protocol):
    """Whoever is told of a step's phases and tensors: a tracker, or what reads a device's own counters."""

    phase: Phase
    module: str

    def enter_phase(self, phase: Phase) -> None: ...
    def mark(self, tensors: Iterable[torch.Tensor], component: Component) -> None: ...
    def mark_saved(self) -> None: ...
    def mark_accumulated(self, gradient: torch.Tensor) -> None: ...


@contextmanager
def modules_named(
    tracker: Told,
    model: torch.nn.Module,
    on_enter: Callable[[torch.nn.Module], None],
    on_exit: Callable[[torch.nn.Module], None],
) -> Iterator[None]:
    """While inside, the tracker knows which module of `model` runs, and is told of every entry and exit."""
    names = {module: name for name, module in model.named_modules()}
    stack: list[str] = []

    def enter(module: torch.nn.Module, _: Any) -> None:
        stack.append(tracker.module)
        tracker.module = names.get(module, tracker.module)
        on_enter(module)

    def leave(module: torch.nn.Module, _: Any, __: Any) -> None:
        tracker.module = stack.pop() if stack else ""
        on_exit(module)

    handles = (
        torch.nn.modules.module.register_module_forward_pre_hook(enter),
        torch.nn.modules.module.register_module_forward_hook(leave, always_call=True),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()

"""The interface of whatever observes a training step: its phases, the running module, and what tensors are."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from planner.quantities import Component, Phase


class PhaseListener(Protocol):
    """Observes a training step: the tracker, which records every tensor, or a reader of a GPU's memory counters."""

    phase: Phase  # the running phase
    module: str  # name of the running module

    def enter_phase(self, phase: Phase) -> None:
        """Count what is allocated from now on in `phase`."""

    def mark(self, tensors: Iterable[torch.Tensor], component: Component) -> None:
        """Set the component of tensors that were allocated during the step."""

    def mark_saved(self) -> None:
        """Set the component of what the forward pass has left for the backward pass, which begins now."""

    def mark_accumulated(self, gradient: torch.Tensor) -> None:
        """Note that a parameter's gradient is complete."""


@contextmanager
def mark_modules(
    listener: PhaseListener,
    model: torch.nn.Module,
    on_enter: Callable[[torch.nn.Module], None],
    on_exit: Callable[[torch.nn.Module], None],
) -> Iterator[None]:
    """Keep `listener.module` at the running module of `model` inside the block.

    `on_enter` and `on_exit` are called with each module.
    """
    names = {module: name for name, module in model.named_modules()}
    stack: list[str] = []

    def enter(module: torch.nn.Module, _: Any) -> None:
        stack.append(listener.module)
        listener.module = names.get(module, listener.module)
        on_enter(module)

    def leave(module: torch.nn.Module, _: Any, __: Any) -> None:
        listener.module = stack.pop() if stack else ""
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

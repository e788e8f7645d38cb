"""Create the optimizer's states before the first step: one step then shows the memory of every later step."""

from typing import Any

import torch
from transformers import TrainerCallback

from probes.step.tracker import Tracker


class OptimizerStatesFirst(TrainerCallback):
    """Callback that runs an optimizer step on gradients without data when training begins.

    A trained parameter that gets no gradient in the real step would have no states there. `complete` is False then, and
    the trace is not valid.
    """

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._parameters: list[torch.Tensor] = []
        self.complete = True

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        self._tracker.enter_phase("optimizer_step")
        self._parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for parameter in self._parameters:
            parameter.grad = torch.empty_like(parameter)
        self._tracker.mark(
            (parameter.grad for parameter in self._parameters if parameter.grad is not None), "gradients"
        )
        optimizer.step()
        optimizer.zero_grad()
        self._tracker.enter_phase("forward")  # the load phase ends before any optimizer state exists

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.complete = all(parameter.grad is not None for parameter in self._parameters)

"""Optimizer states before the first step: one training step then shows what otherwise takes two."""

from typing import Any

import torch
from transformers import TrainerCallback

from probes.step.tracker import Tracker


class StatesFirst(TrainerCallback):
    """An optimizer step on gradients of unknown numbers, when training begins.

    What is trained but gets no gradient would have no states in a real run: `complete` says whether there was no such parameter.
    """

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._primed: list[torch.Tensor] = []
        self.complete = True

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        self._tracker.enter_phase("optimizer_step")
        self._primed = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for parameter in self._primed:
            parameter.grad = torch.empty_like(parameter)
        self._tracker.mark((parameter.grad for parameter in self._primed if parameter.grad is not None), "gradients")
        optimizer.step()
        optimizer.zero_grad()
        self._tracker.enter_phase("forward")  # what is loaded has no states

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.complete = all(parameter.grad is not None for parameter in self._primed)

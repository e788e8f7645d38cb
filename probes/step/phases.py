"""Hooks on a trainer that mark the phases of its step."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import trl.models.utils
from peft import PeftModel
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from transformers import GenerationMixin

from planner.quantities import Phase
from probes.step.built_trainer import BuiltTrainer
from probes.substitution import substituted

# Runs a rollout, from `generate`, the model and the arguments of `generate`.
Rollout = Callable[[Callable[..., Any], Any, dict[str, Any]], Any]


class PhaseListener(Protocol):
    """Watches a training step: a reader of a GPU's memory counters, or of the CPU allocator's reports."""

    phase: Phase  # the running phase

    def enter_phase(self, phase: Phase) -> None:
        """Count what is allocated from now on in `phase`."""


class Phases:
    """Callbacks for one trainer: each marks the beginning of a phase."""

    def __init__(self, listener: PhaseListener, built: BuiltTrainer, rollout: Rollout) -> None:
        self._listener = listener
        self._rollout = rollout
        self._models = set(built.models)
        self._backbones = {_plain(model).base_model for model in built.models}
        self._backward = built.trainer.accelerator.backward
        self._generate = GenerationMixin.generate
        self._unwrap = trl.models.utils._unwrap_model_for_generation
        self._unwrapped = False  # inside that block
        self._evaluation_loop = built.trainer.evaluation_loop
        self._evaluating = self._sampling = False

    def _enter(self, phase: Phase) -> None:
        """Begin a phase of the training; an evaluation is one phase, with its rollouts and passes."""
        self._sampling = phase == "rollout"
        if not self._evaluating:
            self._listener.enter_phase(phase)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Run an evaluation as the phase "evaluation"."""
        self._listener.enter_phase("evaluation")
        self._evaluating = True
        try:
            return self._evaluation_loop(*args, **kwargs)
        finally:
            self._evaluating = False

    def on_enter(self, module: torch.nn.Module) -> None:
        """Begin the phase "forward" where a model is called with gradients, else "score"."""
        if module in self._models and not self._sampling and self._listener.phase != "backward":
            self._enter("forward" if torch.is_grad_enabled() else "score")

    def on_exit(self, module: torch.nn.Module) -> None:
        """Begin the phase "loss" after the backbone: what follows until the backward pass is the head and the loss."""
        if module in self._backbones and self._listener.phase == "forward":
            self._listener.enter_phase("loss")

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Run accelerate's `backward` as the phase "backward"; the optimizer's step comes after it."""
        self._listener.enter_phase("backward")
        self._backward(*args, **kwargs)
        self._listener.enter_phase("optimizer_step")

    def generate(self, model: Any, **arguments: Any) -> Any:
        """Run a rollout as the phase "rollout"."""
        self._enter("rollout")
        result = self._rollout(self._generate, model, arguments)
        if not self._unwrapped:
            self._enter("score")
        return result

    @contextlib.contextmanager
    def unwrapped(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Run the block in which TRL generates as the phase "rollout": ZeRO-3 gathers the model at its beginning.

        Source: trl 1.16, models/utils.py, `unwrap_model_for_generation`.
        """
        self._enter("rollout")
        self._unwrapped = True
        with self._unwrap(*args, **kwargs) as model:
            yield model
        self._unwrapped = False
        self._enter("score")


@contextlib.contextmanager
def mark_phases(listener: PhaseListener, built: BuiltTrainer, rollout: Rollout) -> Iterator[None]:
    """Report the phases of the trainer to the listener inside the block."""
    phases = Phases(listener, built, rollout)
    handles = (
        register_module_forward_pre_hook(lambda module, _: phases.on_enter(module)),
        register_module_forward_hook(lambda module, _, __: phases.on_exit(module), always_call=True),
    )
    try:
        with (
            substituted(built.trainer.accelerator, "backward", phases.backward),
            substituted(built.trainer, "evaluation_loop", phases.evaluation_loop),
            substituted(trl.models.utils, "_unwrap_model_for_generation", phases.unwrapped),
            substituted(GenerationMixin, "generate", lambda model, **arguments: phases.generate(model, **arguments)),
        ):
            yield
    finally:
        for handle in handles:
            handle.remove()


def _plain(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside its PEFT wrapper, or the model itself."""
    return model.get_base_model() if isinstance(model, PeftModel) else model

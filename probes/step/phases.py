"""Hooks on a trainer that mark the phases of its step and what its tensors are."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import trl.models.utils
from peft import PeftModel
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import GenerationMixin
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from planner.quantities import Phase
from probes.step.built_trainer import WORD, BuiltTrainer
from probes.step.listener import PhaseListener, mark_modules
from probes.step.shortened_rollout import generate_shortened
from probes.substitution import substituted

# Runs a rollout. Parameters: `generate`, the model, a function to call with the tensors of the KV cache, and the
# arguments of `generate`.
Rollout = Callable[[Callable[..., Any], Any, Callable[[list[torch.Tensor]], None], dict[str, Any]], Any]


def one_word_shortened(
    generate: Callable[..., Any], model: Any, on_cached: Callable[[list[torch.Tensor]], None], arguments: dict[str, Any]
) -> Any:
    """Run `generate`, skipping the tokens between the first few and the last; every sampled token is `WORD`.

    `WORD` ends no row.
    """
    multinomial = torch.multinomial
    with substituted(
        torch, "multinomial", lambda probabilities, num_samples: multinomial(probabilities, num_samples).fill_(WORD)
    ):
        return generate_shortened(generate, model, on_cached, arguments)


class Phases:
    """Callbacks for one trainer: each marks the beginning of a phase, or what tensors are."""

    def __init__(self, listener: PhaseListener, built: BuiltTrainer, rollout: Rollout = one_word_shortened) -> None:
        self._listener = listener
        self._rollout = rollout
        self._policy = built.trainer.accelerator.unwrap_model(built.trainer.model)
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

    def with_padding(self, _: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Mark one token of the batch as padding; a rollout has its padding in a prompt (probes/step/rollouts.py)."""
        mask = kwargs.get("attention_mask")
        if mask is not None and mask.dim() == 2 and not self._sampling:
            mask[-1, -1] = 0

    def on_exit(self, module: torch.nn.Module) -> None:
        """Begin the phase "loss" after the backbone: what follows until the backward pass is the head and the loss."""
        if module in self._backbones and self._listener.phase == "forward":
            self._listener.enter_phase("loss")

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Run accelerate's `backward` as the phase "backward"; the optimizer's step comes after it."""
        self._listener.mark_saved()
        self._listener.enter_phase("backward")
        self._backward(*args, **kwargs)
        self._listener.mark(
            (parameter.grad for parameter in self._policy.parameters() if parameter.grad is not None), "gradients"
        )
        self._listener.enter_phase("optimizer_step")

    def generate(self, model: Any, **arguments: Any) -> Any:
        """Run a rollout as the phase "rollout"."""
        self._enter("rollout")
        result = self._rollout(self._generate, model, lambda cached: self._listener.mark(cached, "kv_cache"), arguments)
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

    def after_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self._listener.mark_accumulated(parameter.grad)

    def after_optimizer_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        states = (item for state in optimizer.state.values() for item in state.values())
        self._listener.mark((item for item in states if isinstance(item, torch.Tensor)), "optimizer_states")

    def cache_update(self, update: Callable[..., Any]) -> Callable[..., Any]:
        """Return a cache layer's `update` that marks its keys and values."""

        def marked(layer: DynamicLayer, *args: Any, **kwargs: Any) -> Any:
            result = update(layer, *args, **kwargs)
            if self._sampling:
                self._listener.mark((layer.keys, layer.values), "kv_cache")
            return result

        return marked


@contextlib.contextmanager
def mark_phases(
    listener: PhaseListener, built: BuiltTrainer, padded: bool, rollout: Rollout = one_word_shortened
) -> Iterator[None]:
    """Report phases and tensors of the trainer to the listener inside the block.

    `padded`: mark one token of every batch as padding, although its rows are all of full length.
    """
    phases = Phases(listener, built, rollout)
    # Some trainers call the backbone instead of the model (trl 1.16, distillation_trainer.py,
    # `_get_last_hidden_state`).
    padded_modules = {
        module for model in built.models for module in (_plain(model), _plain(model).base_model) if padded
    }
    handles = [module.register_forward_pre_hook(phases.with_padding, with_kwargs=True) for module in padded_modules]
    handles.append(register_optimizer_step_post_hook(phases.after_optimizer_step))
    handles += [
        parameter.register_post_accumulate_grad_hook(phases.after_gradient)
        for parameter in built.trainer.model.parameters()
        if parameter.requires_grad
    ]
    try:
        with (
            substituted(built.trainer.accelerator, "backward", phases.backward),
            substituted(built.trainer, "evaluation_loop", phases.evaluation_loop),
            substituted(trl.models.utils, "_unwrap_model_for_generation", phases.unwrapped),
            substituted(GenerationMixin, "generate", lambda model, **arguments: phases.generate(model, **arguments)),
            substituted(DynamicLayer, "update", phases.cache_update(DynamicLayer.update)),
            substituted(DynamicSlidingWindowLayer, "update", phases.cache_update(DynamicSlidingWindowLayer.update)),
            mark_modules(listener, built.trainer.model, phases.on_enter, phases.on_exit),
        ):
            yield
    finally:
        for handle in handles:
            handle.remove()


def _plain(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside its PEFT wrapper, or the model itself."""
    return model.get_base_model() if isinstance(model, PeftModel) else model

"""Which phase of the step runs, and what tensors are: told to the tracker while a trainer trains."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from peft import PeftModel
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import GenerationMixin
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from probes.step.listener import Told, modules_named
from probes.step.shortened_rollout import generate_shortened
from probes.step.stage import WORD, Stage
from probes.substitution import substituted

# A way to run `generate(model, **arguments)`; it says which tensors it puts into the cache.
Rollout = Callable[[Callable[..., Any], Any, Callable[[list[torch.Tensor]], None], dict[str, Any]], Any]


def one_word_shortened(
    generate: Callable[..., Any], model: Any, on_cached: Callable[[list[torch.Tensor]], None], arguments: dict[str, Any]
) -> Any:
    """Every sampled token is the same, none ends its row early, and what lies between the first tokens and the last is left out."""
    multinomial = torch.multinomial
    with substituted(
        torch, "multinomial", lambda probabilities, num_samples: multinomial(probabilities, num_samples).fill_(WORD)
    ):
        return generate_shortened(generate, model, on_cached, arguments)


class Phases:
    """The moments at which a phase begins, as callbacks of one trainer."""

    def __init__(self, tracker: Told, stage: Stage, rollout: Rollout = one_word_shortened) -> None:
        self._tracker = tracker
        self._rollout = rollout
        self._policy = stage.trainer.accelerator.unwrap_model(stage.trainer.model)
        self._tops = set(stage.models)
        self._backbones = {_plain(model).base_model for model in stage.models}
        self._backward = stage.trainer.accelerator.backward
        self._generate = GenerationMixin.generate

    def on_enter(self, module: torch.nn.Module) -> None:
        if module in self._tops and self._tracker.phase not in ("rollout", "backward"):
            self._tracker.enter_phase("forward" if torch.is_grad_enabled() else "score")

    def with_padding(self, _: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """One token of a batch is padding; a rollout's is one of its prompts' (probes/step/rollouts.py)."""
        mask = kwargs.get("attention_mask")
        if mask is not None and mask.dim() == 2 and self._tracker.phase != "rollout":
            mask[-1, -1] = 0

    def on_exit(self, module: torch.nn.Module) -> None:
        """The backbone is done: what follows until the backward pass is the head and the loss."""
        if module in self._backbones and self._tracker.phase == "forward":
            self._tracker.enter_phase("loss")

    def backward(self, *args: Any, **kwargs: Any) -> None:
        self._tracker.mark_saved()
        self._tracker.enter_phase("backward")
        self._backward(*args, **kwargs)
        self._tracker.mark(
            (parameter.grad for parameter in self._policy.parameters() if parameter.grad is not None), "gradients"
        )
        self._tracker.enter_phase("optimizer_step")

    def generate(self, model: Any, **arguments: Any) -> Any:
        self._tracker.enter_phase("rollout")
        result = self._rollout(self._generate, model, lambda cached: self._tracker.mark(cached, "kv_cache"), arguments)
        self._tracker.enter_phase("score")
        return result

    def after_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self._tracker.mark_accumulated(parameter.grad)

    def after_optimizer_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        states = (item for state in optimizer.state.values() for item in state.values())
        self._tracker.mark((item for item in states if isinstance(item, torch.Tensor)), "optimizer_states")

    def cache_update(self, update: Callable[..., Any]) -> Callable[..., Any]:
        """A cache layer's `update` that says what it has made."""

        def marked(layer: DynamicLayer, *args: Any, **kwargs: Any) -> Any:
            result = update(layer, *args, **kwargs)
            if self._tracker.phase == "rollout":
                self._tracker.mark((layer.keys, layer.values), "kv_cache")
            return result

        return marked


@contextlib.contextmanager
def phases_told(tracker: Told, stage: Stage, padded: bool, rollout: Rollout = one_word_shortened) -> Iterator[None]:
    """While inside, the tracker is told. `padded`: every batch holds one token of padding, though its rows are all of full length."""
    phases = Phases(tracker, stage, rollout)
    # some trainers call the backbone past the model (trl 1.16, distillation_trainer.py, `_get_last_hidden_state`)
    called = {module for model in stage.models for module in (_plain(model), _plain(model).base_model) if padded}
    handles = [module.register_forward_pre_hook(phases.with_padding, with_kwargs=True) for module in called]
    handles.append(register_optimizer_step_post_hook(phases.after_optimizer_step))
    handles += [
        parameter.register_post_accumulate_grad_hook(phases.after_gradient)
        for parameter in stage.trainer.model.parameters()
        if parameter.requires_grad
    ]
    try:
        with (
            substituted(stage.trainer.accelerator, "backward", phases.backward),
            substituted(GenerationMixin, "generate", lambda model, **arguments: phases.generate(model, **arguments)),
            substituted(DynamicLayer, "update", phases.cache_update(DynamicLayer.update)),
            substituted(DynamicSlidingWindowLayer, "update", phases.cache_update(DynamicSlidingWindowLayer.update)),
            modules_named(tracker, stage.trainer.model, phases.on_enter, phases.on_exit),
        ):
            yield
    finally:
        for handle in handles:
            handle.remove()


def _plain(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside its PEFT wrapper."""
    return model.get_base_model() if isinstance(model, PeftModel) else model

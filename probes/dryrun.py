"""The dry run: the installed TRL trainer's real training steps on fake tensors, every allocation recorded."""

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import datasets
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import GenerationMixin, PrinterCallback

from planner.candidate import Candidate
from planner.trace.timeline import Trace
from probes.fake_tensors import FakeArithmetic
from probes.fake_trainer import METHOD_STAGES, WORD, Device, Stage, models_stay_where_they_are
from probes.tracker import Tracker, collector_off, modules_named


def dry_run(candidate: Candidate, device: Device = "fake") -> Trace:
    """Two optimizer steps of the candidate's trainer as a trace. `device="real"` runs them on the CPU with weights, for tests."""
    tracker, arithmetic = Tracker(), FakeArithmetic()
    with _quiet(), collector_off(), models_stay_where_they_are():
        stage = METHOD_STAGES[candidate.method](candidate, device)
        stage.trainer.remove_callback(PrinterCallback)
        if device == "fake":
            for model in stage.models:
                _fake_weights(model, arithmetic)
        with contextlib.ExitStack() as stack:
            if device == "fake":
                stack.enter_context(arithmetic)
            stack.enter_context(tracker)
            _add_residents(tracker, stage)
            stack.enter_context(_phases(tracker, stage))
            stage.trainer.train()
        return tracker.trace()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The trainers' progress bars, advice and deprecations are meant for who trains, not for who plans."""
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    datasets.disable_progress_bars()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(level)
            datasets.enable_progress_bars()


def _fake_weights(model: torch.nn.Module, arithmetic: FakeArithmetic) -> None:
    """Swaps every parameter and buffer for a fake one; what is tied stays tied."""
    made: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = arithmetic.fake(tensor)
        return made[id(tensor)]

    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                swapped = fake(parameter)
                if not isinstance(swapped, torch.nn.Parameter):
                    swapped = torch.nn.Parameter(swapped, requires_grad=parameter.requires_grad)
                    made[id(parameter)] = swapped
                module._parameters[name] = swapped
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = fake(buffer)


def _add_residents(tracker: Tracker, stage: Stage) -> None:
    for model in stage.models:
        for name, parameter in model.named_parameters():
            tracker.add_resident(parameter, "adapters" if "lora_" in name else "weights", name)
        for name, buffer in model.named_buffers():
            tracker.add_resident(buffer, "weights", name)


@contextlib.contextmanager
def _phases(tracker: Tracker, stage: Stage) -> Iterator[None]:
    """Tells the tracker which phase runs, while inside."""
    trainer = stage.trainer
    policy = trainer.accelerator.unwrap_model(trainer.model)
    backward, generate, multinomial = trainer.accelerator.backward, GenerationMixin.generate, torch.multinomial
    tops = set(stage.models)
    backbones = {module for model in stage.models for module in [_backbone(model)]}

    def on_enter(module: torch.nn.Module) -> None:
        if module in tops and tracker.phase not in ("rollout", "backward"):
            tracker.enter_phase("forward" if torch.is_grad_enabled() else "score")

    def on_exit(module: torch.nn.Module) -> None:
        if module in backbones and tracker.phase == "forward":
            tracker.enter_phase("loss")

    def run_backward(*args: Any, **kwargs: Any) -> None:
        tracker.mark_saved()
        tracker.enter_phase("backward")
        backward(*args, **kwargs)
        tracker.mark((parameter.grad for parameter in policy.parameters() if parameter.grad is not None), "gradients")
        tracker.enter_phase("optimizer_step")

    def run_generate(*args: Any, **kwargs: Any) -> Any:
        tracker.enter_phase("rollout")
        with mock.patch.object(torch, "multinomial", lambda probabilities, num_samples: multinomial(probabilities, num_samples).fill_(WORD)):
            result = generate(*args, **kwargs)
        tracker.enter_phase("score")
        return result

    def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        tracker.mark((item for state in optimizer.state.values() for item in state.values() if isinstance(item, torch.Tensor)), "optimizer_states")

    handle = register_optimizer_step_post_hook(after_step)
    try:
        with (
            mock.patch.object(trainer.accelerator, "backward", run_backward),
            mock.patch.object(GenerationMixin, "generate", run_generate),
            modules_named(tracker, trainer.model, on_enter, on_exit),
        ):
            yield
    finally:
        handle.remove()


def _backbone(model: torch.nn.Module) -> torch.nn.Module:
    """The decoder without its head: what `add_fused_lm_head` calls."""
    plain = model.get_base_model() if hasattr(model, "get_base_model") else model
    return plain.base_model

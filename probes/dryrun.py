"""The dry run: the installed TRL trainer's real training steps on fake tensors, every allocation recorded."""

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal
from unittest import mock

import datasets
import torch
from peft import PeftModel
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import GenerationMixin, PrinterCallback
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from planner.candidate import Candidate
from planner.trace.timeline import Trace
from probes.fake_tensors import FakeArithmetic
from probes.fake_trainer import METHOD_STAGES, WORD, Device, Stage, models_stay_where_they_are, adapters_without_weights
from probes.rollout import generate_shortened
from probes.substitutions import CUDA_BLOCK_BYTES, WORKSPACES, cuda_ways
from probes.tracker import Tracker, collector_off, modules_named


def dry_run(candidate: Candidate, ways: Literal["cuda", "cpu"] = "cuda", device: Device = "fake", block_bytes: int = CUDA_BLOCK_BYTES) -> Trace:
    """Two optimizer steps of the candidate's trainer as a trace, on one GPU; sizes are rounded up to `block_bytes`.

    `ways="cpu"` leaves out what CUDA does otherwise; `device="real"` runs the steps with weights. Both are for tests.
    """
    cuda = ways == "cuda"
    tracker, arithmetic = Tracker(block_bytes, WORKSPACES) if cuda else Tracker(), FakeArithmetic()
    with _quiet(), collector_off(), models_stay_where_they_are(), cuda_ways() if cuda else contextlib.nullcontext(()) as substitutions:
        with adapters_without_weights() if device == "fake" else contextlib.nullcontext():
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
            stage.trainer.data_collator = _collated_on_host(stage.trainer.data_collator, tracker)
            stack.enter_context(_phases(tracker, stage, candidate.padded and not candidate.packing and not candidate.padding_free))
            stage.trainer.train()
        return tracker.trace(substitutions)


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


def _collated_on_host(collate: Callable[[Any], Any], tracker: Tracker) -> Callable[[Any], Any]:
    """The trainer's collator, of whose work only the batch is seen: the device gets no more."""

    def collated(examples: Any) -> Any:
        with tracker.looking_away():
            batch = collate(examples)
        if isinstance(batch, Mapping):
            tracker.add_batch(batch)
        return batch

    return collated


def _add_residents(tracker: Tracker, stage: Stage) -> None:
    for model in stage.models:
        for name, parameter in model.named_parameters():
            tracker.add_resident(parameter, "adapters" if "lora_" in name else "weights", name)
        for name, buffer in model.named_buffers():
            tracker.add_resident(buffer, "weights", name)


@contextlib.contextmanager
def _phases(tracker: Tracker, stage: Stage, padded: bool) -> Iterator[None]:
    """Tells the tracker which phase runs, while inside. `padded`: every batch holds one token of padding, though its rows are all of full length."""
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

    def run_generate(model: Any, **arguments: Any) -> Any:
        tracker.enter_phase("rollout")
        with mock.patch.object(torch, "multinomial", lambda probabilities, num_samples: multinomial(probabilities, num_samples).fill_(WORD)):
            result = generate_shortened(generate, model, lambda cached: tracker.mark(cached, "kv_cache"), arguments)
        tracker.enter_phase("score")
        return result

    def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        tracker.mark((item for state in optimizer.state.values() for item in state.values() if isinstance(item, torch.Tensor)), "optimizer_states")

    def with_padding(_: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("attention_mask")
        if mask is not None and mask.dim() == 2:
            mask[-1, -1] = 0

    handles = [plain.register_forward_pre_hook(with_padding, with_kwargs=True) for plain in map(_plain, stage.models) if padded]
    handle = register_optimizer_step_post_hook(after_step)
    try:
        with (
            mock.patch.object(trainer.accelerator, "backward", run_backward),
            mock.patch.object(GenerationMixin, "generate", run_generate),
            mock.patch.object(DynamicLayer, "update", _wrapped(DynamicLayer.update, tracker)),
            mock.patch.object(DynamicSlidingWindowLayer, "update", _wrapped(DynamicSlidingWindowLayer.update, tracker)),
            modules_named(tracker, trainer.model, on_enter, on_exit),
        ):
            yield
    finally:
        for registered in (handle, *handles):
            registered.remove()


def _wrapped(update: Callable[..., Any], tracker: Tracker) -> Callable[..., Any]:
    """A cache layer's `update` that says what it has made."""

    def marked(layer: DynamicLayer, *args: Any, **kwargs: Any) -> Any:
        result = update(layer, *args, **kwargs)
        if tracker.phase == "rollout":
            tracker.mark((layer.keys, layer.values), "kv_cache")
        return result

    return marked


def _plain(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside its PEFT wrapper."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def _backbone(model: torch.nn.Module) -> torch.nn.Module:
    """The decoder without its head: what `add_fused_lm_head` calls."""
    return _plain(model).base_model

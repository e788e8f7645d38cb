"""The dry run: the installed TRL trainer's real training steps on fake tensors, every allocation recorded."""

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import datasets
import torch
from transformers import PrinterCallback

from planner.candidate import Candidate
from planner.trace.timeline import Trace
from probes.fake_tensors import FakeArithmetic
from probes.fake_trainer import METHOD_STAGES, Device, Stage, adapters_without_weights, models_stay_where_they_are
from probes.phases import phases_told
from probes.substitutions import CUDA_BLOCK_BYTES, WORKSPACES, cuda_ways
from probes.tracker import Tracker, collector_off


def dry_run(candidate: Candidate, ways: Literal["cuda", "cpu"] = "cuda", device: Device = "fake", block_bytes: int = CUDA_BLOCK_BYTES) -> Trace:
    """Two optimizer steps of the candidate's trainer as a trace, on one GPU; sizes are rounded up to `block_bytes`.

    `ways="cpu"` leaves out what CUDA does otherwise; `device="real"` runs the steps with weights. Both are for tests.
    """
    cuda = ways == "cuda"
    tracker, arithmetic = Tracker(block_bytes, WORKSPACES) if cuda else Tracker(), FakeArithmetic()
    with quiet(), collector_off(), models_stay_where_they_are(), cuda_ways() if cuda else contextlib.nullcontext(()) as substitutions:
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
            stack.enter_context(phases_told(tracker, stage, candidate.padded and not candidate.packing and not candidate.padding_free))
            stage.trainer.train()
        return tracker.trace(substitutions)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
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
            held = arithmetic.fake(tensor)
            made[id(tensor)] = torch.nn.Parameter(held, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else held
        return made[id(tensor)]

    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            tensors.update({name: fake(tensor) for name, tensor in tensors.items() if tensor is not None})


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

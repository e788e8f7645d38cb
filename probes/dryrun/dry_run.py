"""The dry run: the installed TRL trainer's real training steps on fake tensors, every allocation recorded."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from transformers import PrinterCallback

from planner.allocator.trace import Trace
from planner.candidate import Candidate
from planner.errors import DryRunUnsupported
from planner.quantities import CUDA_BLOCK_BYTES
from probes.dryrun.cuda.substitutions import WORKSPACES, cuda_ways
from probes.dryrun.fake_engine import completions_from_elsewhere
from probes.dryrun.fake_models import Device, adapters_without_weights, models_stay_where_they_are
from probes.dryrun.fake_tensors import FakeArithmetic
from probes.dryrun.fake_trainer import METHOD_STAGES
from probes.dryrun.offloading import offloading, paged_states
from probes.dryrun.optimizer_states import StatesFirst
from probes.dryrun.quiet_libraries import no_inference_tensors, quiet
from probes.step.phases import phases_told
from probes.step.rollouts import dry_rollout
from probes.step.stage import DTYPES, Stage
from probes.step.tracker import Tracker, collector_off

Ways = Literal["cuda", "cuda before 8.0", "cpu"]  # whose kernels run


def dry_run(
    candidate: Candidate,
    ways: Ways = "cuda",
    device: Device = "fake",
    block_bytes: int = CUDA_BLOCK_BYTES,
    steps: Literal[1, 2] = 2,
) -> Trace:
    """Two optimizer steps of the candidate's trainer as a trace, on one GPU; sizes are rounded up to `block_bytes`.

    `steps=1` takes half the time: the optimizer makes its states on gradients that no pass has made, then one whole step runs beside them. Its peaks are
    those of two steps but for the other step's batch.
    `ways`: those of a card, or of one before compute capability 8.0, which has no FlashAttention; the CPU's leave out what CUDA does otherwise.
    `device="real"` runs the steps with weights, for tests.
    """
    refuse_unsupported(candidate, device)
    cuda = ways != "cpu"
    candidate = _in_bfloat16(candidate) if cuda else candidate
    arithmetic = FakeArithmetic()
    run = arithmetic.result if device == "fake" else None
    tracker = Tracker(block_bytes, kernel_workspaces(candidate), arithmetic=run) if cuda else Tracker(arithmetic=run)
    with contextlib.ExitStack() as stack:
        for surroundings in (quiet(), collector_off(), models_stay_where_they_are()):
            stack.enter_context(surroundings)
        substitutions = stack.enter_context(_cuda_ways(candidate, tracker, ways == "cuda")) if cuda else ()
        with adapters_without_weights() if device == "fake" else contextlib.nullcontext():
            stage = METHOD_STAGES[candidate.method](candidate, device)
        stage.trainer.remove_callback(PrinterCallback)
        states = StatesFirst(tracker)
        if steps == 1:
            stage.trainer.args.max_steps = 1
            stage.trainer.add_callback(states)
        if not candidate.autocast_adapter_dtype:
            _adapters_as_the_base(stage, DTYPES[candidate.dtype])
        statistics = _fake_stage(candidate, stage, arithmetic) if device == "fake" else []
        if device == "fake":
            stack.enter_context(no_inference_tensors())
        stack.enter_context(tracker)
        _add_residents(tracker, stage)
        for name, tensor in statistics:
            tracker.add_resident(tensor, "weights", name)
        stage.trainer.data_collator = _collated_on_host(stage.trainer.data_collator, tracker)
        stack.enter_context(phases_told(tracker, stage, candidate.pads, dry_rollout(candidate)))
        if candidate.vllm != "off":
            stack.enter_context(completions_from_elsewhere(tracker, stage, candidate.max_completion_length))
        stage.trainer.train()
    return tracker.trace(substitutions) if states.complete else dry_run(candidate, ways, device, block_bytes)


def _in_bfloat16(candidate: Candidate) -> Candidate:
    """float16 as the other type of 16 bits: on the CPU accelerate has no float16 autocast, and the sizes are the same."""
    return replace(
        candidate,
        dtype="bfloat16" if candidate.dtype == "float16" else candidate.dtype,
        precision="bf16" if candidate.precision == "fp16" else candidate.precision,
    )


def _adapters_as_the_base(stage: Stage, dtype: torch.dtype) -> None:
    """What `autocast_adapter_dtype=False` and DeepSpeed leave of PEFT's float32 adapters."""
    for name, parameter in stage.models[0].named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(dtype)


def _fake_stage(candidate: Candidate, stage: Stage, arithmetic: FakeArithmetic) -> list[tuple[str, torch.Tensor]]:
    """Makes the models' tensors fake; returns those that are stored with quantized weights."""
    for model in stage.models:
        fake_weights(model, arithmetic)
    if candidate.activation_offloading:
        stage.trainer.maybe_activation_offload_context.update_model_params(stage.trainer.model)
    return list(_fake_statistics(candidate, stage, arithmetic))


def refuse_unsupported(candidate: Candidate, device: Device = "fake") -> None:
    """What runs otherwise than one process of the installed trainer can show."""
    if candidate.sharding not in ("none", "ddp"):
        raise DryRunUnsupported(
            f"A dry run is one process; {candidate.sharding} is composed onto it (probes/dryrun/simulate.py)."
        )
    if candidate.use_liger_kernel:
        raise DryRunUnsupported("A dry run does not run Liger's Triton kernels (use_liger_kernel).")
    if candidate.method not in METHOD_STAGES:
        raise DryRunUnsupported(f"The installed TRL has no {candidate.method} trainer to run.")
    if candidate.quantization not in ("none", "nf4", "nf4-double", "int8"):
        raise DryRunUnsupported(f"A dry run knows bitsandbytes' kernels, not those of {candidate.quantization}.")
    if candidate.quantization != "none" and (candidate.tuning == "full" or device == "real"):
        raise DryRunUnsupported("A quantized base is frozen and has no weights here: set tuning to lora.")


def kernel_workspaces(candidate: Candidate) -> Mapping[Any, Callable[..., int]]:
    """What operators allocate inside themselves on CUDA."""
    if candidate.quantization == "none":
        return WORKSPACES
    from probes.dryrun.cuda.quantized import workspaces

    return {**WORKSPACES, **workspaces()}


@contextlib.contextmanager
def _cuda_ways(candidate: Candidate, tracker: Tracker, flash: bool) -> Iterator[tuple[str, ...]]:
    """CUDA's own ways, and those that only some candidates take."""
    with contextlib.ExitStack() as stack:
        names = stack.enter_context(cuda_ways(flash))
        if candidate.quantization != "none":
            from probes.dryrun.cuda.quantized import cuda_products

            stack.enter_context(cuda_products())
            names += ("bitsandbytes",)
        if candidate.activation_offloading or candidate.checkpoint_offload:
            stack.enter_context(offloading(tracker))
            names += ("offloading",)
        if candidate.optim.startswith("paged_"):
            stack.enter_context(paged_states(tracker))
            names += ("paged states",)
        yield names


def fake_weights(model: torch.nn.Module, arithmetic: FakeArithmetic) -> None:
    """Swaps every parameter and buffer for a fake one; what is tied stays tied."""
    made: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            held = arithmetic.fake(tensor)
            made[id(tensor)] = (
                _parameter(held, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else held
            )
        return made[id(tensor)]

    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            tensors.update({name: fake(tensor) for name, tensor in tensors.items() if tensor is not None})


def _parameter(held: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    """`torch.nn.Parameter(held, requires_grad)` of a tensor that nobody else has, so that it need not be detached first (torch 2.13, nn/parameter.py:51)."""
    held._is_param = True
    return held.requires_grad_(requires_grad)


def _fake_statistics(
    candidate: Candidate, stage: Stage, arithmetic: FakeArithmetic
) -> Iterator[tuple[str, torch.Tensor]]:
    """What is stored with quantized weights, by name."""
    if candidate.quantization != "none":
        from probes.dryrun.cuda.quantized import with_fake_statistics

        yield from with_fake_statistics(stage.models[0], arithmetic.fake)


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
    """Weights before adapters: a model is loaded, then PEFT adds to it."""
    for model in stage.models:
        held = [*model.named_parameters(), *model.named_buffers()]
        for adapters in (False, True):
            for name, tensor in held:
                if ("lora_" in name) is adapters:
                    tracker.add_resident(tensor, "adapters" if adapters else "weights", name)

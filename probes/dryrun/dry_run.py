"""Dry run: run the installed TRL trainer's real training steps on fake tensors, and record every allocation."""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from msgspec.structs import replace
from transformers import PrinterCallback

from planner.allocator.trace import Trace
from planner.candidate import Candidate
from planner.errors import DryRunUnsupported
from planner.methods import NEWEST_TRL
from planner.models.layers import NO_BLOCKS
from planner.quantities import CUDA_BLOCK_BYTES
from probes.dryrun.cuda.liger import decoder, liger_kernels
from probes.dryrun.cuda.substitutions import WORKSPACES, cuda_substitutions
from probes.dryrun.fake_engine import fake_engine
from probes.dryrun.fake_models import Device, adapters_without_weights, models_stay_where_they_are
from probes.dryrun.fake_tensors import FakeArithmetic, no_numbers
from probes.dryrun.fake_trainer import fake_trainer
from probes.dryrun.loss_scaling import GradientsCanBeUnscaled
from probes.dryrun.offloading import offloading, paged_states
from probes.dryrun.optimizer_states import OptimizerStatesFirst
from probes.dryrun.quiet_libraries import no_inference_tensors, quiet
from probes.step import hidden_allocations
from probes.step.built_trainer import BuiltTrainer
from probes.step.phases import mark_phases
from probes.step.rollouts import dry_rollout
from probes.step.tracker import Tracker, collector_off
from probes.trainers import TRAINERS, train_in_float32

# Whose kernels the dry run imitates; a GPU before compute capability 8.0 has no FlashAttention.
Kernels = Literal["cuda", "cuda before 8.0", "cpu"]


def dry_run(
    candidate: Candidate,
    kernels: Kernels = "cuda",
    device: Device = "fake",
    block_bytes: int = CUDA_BLOCK_BYTES,
    steps: Literal[1, 2] = 2,
) -> Trace:
    """Run the candidate's TRL trainer for some steps in one process and return every allocation as a trace.

    Args:
        candidate: the settings; `sharding` must be "none" or "ddp".
        kernels: whose kernels allocate; "cpu" runs without any substitution of CUDA's kernels.
        device: "fake" for tensors without data; "real" runs the steps with weights, for tests.
        block_bytes: sizes are rounded up to whole blocks of this size.
        steps: with 1 the optimizer first creates its states on gradients without data, then one whole step runs beside
            them. It takes half the time of 2, and its peaks differ from those only by the batch of the other step.

    Raises:
        DryRunUnsupported: a dry run cannot show one of the settings.
    """
    refuse_unsupported(candidate, device)
    cuda = kernels != "cpu"
    float32_adapters, scaled = candidate.script_casts_to_float32, candidate.precision == "fp16"
    candidate = _bfloat16_for_float16(candidate) if cuda else candidate
    arithmetic = FakeArithmetic()
    compute = arithmetic.result if device == "fake" else None
    tracker = Tracker(
        block_bytes if cuda else 1,
        kernel_workspaces(candidate) if cuda else hidden_allocations.ON_THE_CPU,
        arithmetic=compute,
    )
    with contextlib.ExitStack() as stack:
        for surroundings in (quiet(), collector_off(), models_stay_where_they_are()):
            stack.enter_context(surroundings)
        substitutions = stack.enter_context(_substitutions(candidate, tracker, kernels == "cuda")) if cuda else ()
        with adapters_without_weights() if device == "fake" else contextlib.nullcontext():
            built = fake_trainer(candidate, device)
        stack.enter_context(_liger_kernels_of(candidate, built.trainer.model))
        if float32_adapters:
            train_in_float32(built.trainer.model)
        states = OptimizerStatesFirst(tracker)
        _add_callbacks(built, scaled, states if steps == 1 else None)
        statistics = _fake_models(candidate, built, arithmetic) if device == "fake" else []
        if device == "fake":
            stack.enter_context(no_inference_tensors())
        stack.enter_context(tracker)
        _add_residents(tracker, built)
        for name, tensor in statistics:
            tracker.add_resident(tensor, "weights", name)
        built.trainer.data_collator = _collated_on_host(built.trainer.data_collator, tracker)
        stack.enter_context(mark_phases(tracker, built, candidate.pads, dry_rollout(candidate)))
        if candidate.vllm != "off":
            stack.enter_context(fake_engine(tracker, built, candidate))
        built.trainer.train()
        evaluate(candidate, built, device)
    return tracker.trace(substitutions) if states.complete else dry_run(candidate, kernels, device, block_bytes)


def _add_callbacks(built: BuiltTrainer, scaled: bool, states: OptimizerStatesFirst | None) -> None:
    """Let the trainer print nothing and scale fake gradients; with `states`, run one step beside these states."""
    built.trainer.remove_callback(PrinterCallback)
    if scaled:
        built.trainer.add_callback(GradientsCanBeUnscaled())
    if states is not None:
        built.trainer.args.max_steps = 1
        built.trainer.add_callback(states)


def evaluate(candidate: Candidate, built: BuiltTrainer, device: Device) -> None:
    """Run the trainer's evaluation of a candidate that evaluates."""
    if candidate.eval_strategy != "no" and candidate.method_row.evaluates:
        with no_numbers() if device == "fake" else contextlib.nullcontext():
            built.trainer.evaluate()


def _bfloat16_for_float16(candidate: Candidate) -> Candidate:
    """Return the candidate with bfloat16 in place of float16.

    accelerate refuses float16 autocast on the CPU, where a dry run's tensors lie. Both types have 16 bits.
    """
    return replace(
        candidate,
        dtype="bfloat16" if candidate.dtype == "float16" else candidate.dtype,
        precision="bf16" if candidate.precision == "fp16" else candidate.precision,
    )


def _fake_models(
    candidate: Candidate, built: BuiltTrainer, arithmetic: FakeArithmetic
) -> list[tuple[str, torch.Tensor]]:
    """Replace the models' tensors by fake ones; return the quantization statistics (absmax and others) by name."""
    for model in built.models:
        fake_weights(model, arithmetic)
    if candidate.activation_offloading:
        built.trainer.maybe_activation_offload_context.update_model_params(built.trainer.model)
    quantized = candidate.quantization != "none"
    return list(fake_quantization_statistics(built.models[0], arithmetic)) if quantized else []


def refuse_unsupported(candidate: Candidate, device: Device = "fake") -> None:
    """Refuse settings that one process of the installed trainer cannot show.

    Raises:
        DryRunUnsupported: shared rows, sharding, Liger's kernels on tensors with weights, a method that TRL lacks, or a
            quantization without substitutes.
    """
    if candidate.row_gpus > 1:
        raise DryRunUnsupported("A dry run is one process: it cannot share rows between GPUs (cp_size, sp_size).")
    if not candidate.scheme_row.whole:
        raise DryRunUnsupported(
            f"A dry run is one process; {candidate.sharding} is composed onto it (probes/dryrun/simulate.py)."
        )
    if candidate.use_liger_kernel and device == "real":
        raise DryRunUnsupported(
            "Liger's kernels run on a GPU only; on the CPU they need fake tensors (use_liger_kernel)."
        )
    if candidate.method not in TRAINERS:
        raise DryRunUnsupported(f"Dry runs do not run {candidate.method}: TRL {NEWEST_TRL} has no such trainer.")
    if candidate.quantization not in ("none", "nf4", "nf4-double", "int8"):
        raise DryRunUnsupported(f"A dry run knows bitsandbytes' kernels, not those of {candidate.quantization}.")
    if candidate.quantization != "none" and (candidate.tuning == "full" or device == "real"):
        raise DryRunUnsupported("A quantized base is frozen and has no weights here: set tuning to lora.")


def kernel_workspaces(candidate: Candidate) -> Mapping[Any, Callable[..., int]]:
    """Return the operators that allocate a workspace inside their CUDA kernel, with a function for its bytes."""
    if candidate.quantization == "none":
        return WORKSPACES
    from probes.dryrun.cuda.quantized import workspaces

    return {**WORKSPACES, **workspaces()}


@contextlib.contextmanager
def candidate_substitutions(candidate: Candidate, flash: bool) -> Iterator[tuple[str, ...]]:
    """Put CUDA's kernels in place of the CPU's, also those that only this candidate needs; yield their names.

    `flash`: the GPU has FlashAttention's kernels.
    """
    with contextlib.ExitStack() as stack:
        names = stack.enter_context(cuda_substitutions(flash))
        if candidate.quantization != "none":
            from probes.dryrun.cuda.quantized import cuda_int8_matmul, four_bit_weights_on_a_gpu

            stack.enter_context(cuda_int8_matmul())
            if candidate.method_row.kbit_preparation == "everything_unquantized":
                trainer_module = importlib.import_module(candidate.method_row.trainer_module)
                stack.enter_context(four_bit_weights_on_a_gpu(trainer_module))
            names += ("bitsandbytes",)
        yield names


@contextlib.contextmanager
def _substitutions(candidate: Candidate, tracker: Tracker, flash: bool) -> Iterator[tuple[str, ...]]:
    """Apply `candidate_substitutions`, and leave out of the trace what the candidate keeps on the host."""
    with contextlib.ExitStack() as stack:
        names = stack.enter_context(candidate_substitutions(candidate, flash))
        if candidate.activation_offloading or candidate.checkpoint_offload:
            stack.enter_context(offloading(tracker))
            names += ("offloading",)
        if candidate.optimizer_row.paged:
            stack.enter_context(paged_states(tracker))
            names += ("paged states",)
        if candidate.use_liger_kernel:
            names += ("liger",)
        yield names


@contextlib.contextmanager
def _liger_kernels_of(candidate: Candidate, model: Any) -> Iterator[None]:
    """Give the trained model Liger's kernels if it has any.

    Source: transformers 5.23, integrations/liger.py, `apply_liger_kernel`.
    """
    blocks = candidate.model.architecture.liger_blocks if candidate.use_liger_kernel else NO_BLOCKS
    if not blocks:  # a type without kernels stays as it is
        yield
        return
    stack = decoder(model.get_base_model() if hasattr(model, "get_base_model") else model)
    with liger_kernels(candidate.model.model_type, blocks, stack.layers, stack.norm):
        yield


def fake_weights(model: torch.nn.Module, arithmetic: FakeArithmetic) -> None:
    """Replace every parameter and buffer of a model by a fake one; tied weights stay tied."""
    fakes: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in fakes:
            new = arithmetic.fake(tensor)
            fakes[id(tensor)] = _parameter(new, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else new
        return fakes[id(tensor)]

    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            tensors.update({name: fake(tensor) for name, tensor in tensors.items() if tensor is not None})


def _parameter(tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    """Turn a tensor into a parameter in place, without the copy by `detach` in `torch.nn.Parameter(tensor)`.

    Source: torch 2.13, torch/nn/parameter.py, `Parameter.__new__`. Allowed because nobody else holds the tensor.
    """
    tensor._is_param = True
    return tensor.requires_grad_(requires_grad)


def fake_quantization_statistics(
    model: torch.nn.Module, arithmetic: FakeArithmetic
) -> Iterator[tuple[str, torch.Tensor]]:
    """Replace the tensors stored beside quantized weights (absmax, code, SCB) by fake ones; yield them by name."""
    from probes.dryrun.cuda.quantized import with_fake_statistics

    yield from with_fake_statistics(model, arithmetic.fake)


def _collated_on_host(collate: Callable[[Any], Any], tracker: Tracker) -> Callable[[Any], Any]:
    """Wrap the trainer's data collator so that only the finished batch is traced: its own tensors stay on the host."""

    def collate_untracked(examples: Any) -> Any:
        with tracker.tensors_on_host():
            batch = collate(examples)
        if isinstance(batch, Mapping):
            tracker.add_batch(batch)
        return batch

    return collate_untracked


def _add_residents(tracker: Tracker, built: BuiltTrainer) -> None:
    """Trace the tensors that exist before the first step: of each model the weights, then PEFT's adapters."""
    for model in built.models:
        tensors = [*model.named_parameters(), *model.named_buffers()]
        for adapters in (False, True):
            for name, tensor in tensors:
                if ("lora_" in name) is adapters:
                    tracker.add_resident(tensor, "adapters" if adapters else "weights", name)

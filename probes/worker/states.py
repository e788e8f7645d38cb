"""Bytes of the tensors that stay on a process's device between steps, by component; of sharded tensors its part.

Left out, as in the formulas: buffers that are no weights (rotary frequencies), and single numbers (an optimizer's step
count).
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from planner.quantities import Component
from probes.step.built_trainer import BuiltTrainer
from probes.substitution import substituted


class RankStates:
    """Bytes of weights, adapters, gradients and optimizer states of this process.

    Each storage counts once, for the first component that has it.
    """

    def __init__(self) -> None:
        self.bytes: dict[Component, int] = {}

    def count(self, built: BuiltTrainer) -> None:
        """Count after a step: weights, optimizer states, and the gradients that still exist."""
        sizes: dict[int, tuple[Component, int]] = {}
        for component, tensors in (
            *_weights(built),
            ("gradients", gradients(built)),
            ("optimizer_states", optimizer_tensors(built)),
        ):
            for storage in storages(tensors):
                sizes.setdefault(storage.data_ptr(), (component, storage.nbytes()))
        self._add(sizes.values())

    def count_gradients(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """Count ZeRO's gradients, which no longer exist after its step."""
        self._add(
            ("gradients", storage.nbytes())
            for storage in {storage.data_ptr(): storage for storage in storages(tensors)}.values()
        )

    def _add(self, sizes: Iterable[tuple[Component, int]]) -> None:
        sums: dict[Component, int] = {}
        for component, size_bytes in sizes:
            sums[component] = sums.get(component, 0) + size_bytes
        self.bytes |= sums


def storages(tensors: Iterable[torch.Tensor | None]) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of tensors on a device; of a DTensor, that of its local part."""
    for tensor in tensors:
        if tensor is None or tensor.dim() == 0:
            continue
        local = tensor.to_local() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor
        storage = local.untyped_storage()
        if storage.nbytes() and storage.device.type != "meta":
            yield storage


def _weights(built: BuiltTrainer) -> Iterator[tuple[Component, Iterable[torch.Tensor | None]]]:
    """Yield the component and the tensors of every parameter of every model."""
    for model in built.models:
        for name, parameter in model.named_parameters():
            yield "adapters" if "lora_" in name else "weights", (parameter.data, *attached_tensors(parameter))


def attached_tensors(parameter: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that a parameter holds besides its own data: ZeRO-3's part of it, bitsandbytes' statistics.

    Source: deepspeed 0.19.8, runtime/zero/partition_parameters.py (`ds_tensor`); bitsandbytes 0.50.2, nn/modules.py
    (`quant_state`, `SCB`).
    """
    attributes = vars(parameter)
    yield from (attributes[name] for name in ("ds_tensor", "SCB") if isinstance(attributes.get(name), torch.Tensor))
    state = attributes.get("quant_state")
    while state is not None:
        yield from (value for value in vars(state).values() if isinstance(value, torch.Tensor))
        state = state.state2


def gradients(built: BuiltTrainer) -> Iterator[torch.Tensor | None]:
    """Yield the gradients of the policy's parameters."""
    return (parameter.grad for parameter in built.models[0].parameters())


def optimizer_tensors(built: BuiltTrainer) -> Iterator[torch.Tensor]:
    """Yield the optimizer's states, and of ZeRO also the float32 copy of the weights.

    Source: deepspeed 0.19.8, runtime/zero/stage_1_and_2.py (`single_partition_of_fp32_groups`), stage3.py
    (`fp32_partitioned_groups_flat`).
    """
    optimizer = built.trainer.model_wrapped.optimizer if built.trainer.is_deepspeed_enabled else built.trainer.optimizer
    for copies in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"):
        yield from vars(optimizer).get(copies, ())
    inner = optimizer.optimizer if built.trainer.is_deepspeed_enabled else optimizer
    for state in inner.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


@contextlib.contextmanager
def report_zero_gradients(
    built: BuiltTrainer, on_step: Callable[[Iterable[torch.Tensor | None]], None]
) -> Iterator[None]:
    """Call `on_step` with the gradients of ZeRO's optimizers before each of their steps inside the block.

    They step within accelerate's `backward`. Without DeepSpeed nothing is called.
    """
    if not built.trainer.is_deepspeed_enabled:
        yield
        return
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    def reporting(
        step: Callable[..., Any], gradients_of: Callable[[Any], Iterable[torch.Tensor | None]]
    ) -> Callable[..., Any]:
        def report_and_step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            on_step(gradients_of(optimizer))
            return step(optimizer, *args, **kwargs)

        return report_and_step

    def stage_1_and_2(optimizer: Any) -> Iterable[torch.Tensor | None]:
        return [gradient for group in optimizer.averaged_gradients.values() for gradient in group or ()]

    def stage_3(optimizer: Any) -> Iterable[torch.Tensor | None]:
        return [optimizer.grad_partitions_flat_buffer]

    with (
        substituted(DeepSpeedZeroOptimizer, "step", reporting(DeepSpeedZeroOptimizer.step, stage_1_and_2)),
        substituted(DeepSpeedZeroOptimizer_Stage3, "step", reporting(DeepSpeedZeroOptimizer_Stage3.step, stage_3)),
    ):
        yield

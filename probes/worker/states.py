"""What stays on a device between steps, by component: the bytes of this process' tensors, and of what is sharded its own part.

As the formulas do, it leaves out buffers that are no weights (rotary frequencies) and single numbers (the step count of an optimizer).
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from planner.quantities import Component
from probes.step.stage import Stage
from probes.substitution import substituted


class States:
    """Counts each storage once, for the component that it is met in first."""

    def __init__(self) -> None:
        self.bytes: dict[Component, int] = {}

    def count(self, stage: Stage) -> None:
        """Weights and the optimizer's states, when a step is done; and gradients, where they are still there."""
        found: dict[int, tuple[Component, int]] = {}
        for component, tensors in (
            *_weights(stage),
            ("gradients", gradients(stage)),
            ("optimizer_states", optimizer_tensors(stage)),
        ):
            for storage in storages(tensors):
                found.setdefault(storage.data_ptr(), (component, storage.nbytes()))
        self._add(found.values())

    def count_gradients(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """Those of ZeRO, which are gone when its step is done."""
        self._add(
            ("gradients", storage.nbytes())
            for storage in {storage.data_ptr(): storage for storage in storages(tensors)}.values()
        )

    def _add(self, found: Iterable[tuple[Component, int]]) -> None:
        sums: dict[Component, int] = {}
        for component, size_bytes in found:
            sums[component] = sums.get(component, 0) + size_bytes
        self.bytes |= sums


def storages(tensors: Iterable[torch.Tensor | None]) -> Iterator[torch.UntypedStorage]:
    """The memory that tensors stand on, of a DTensor its local part."""
    for tensor in tensors:
        if tensor is None or tensor.dim() == 0:
            continue
        local = tensor.to_local() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor
        storage = local.untyped_storage()
        if storage.nbytes() and storage.device.type != "meta":
            yield storage


def _weights(stage: Stage) -> Iterator[tuple[Component, Iterable[torch.Tensor | None]]]:
    for model in stage.models:
        for name, parameter in model.named_parameters():
            yield "adapters" if "lora_" in name else "weights", (parameter.data, *belongings(parameter))


def belongings(parameter: torch.Tensor) -> Iterator[torch.Tensor]:
    """What a parameter stands for besides its own data: ZeRO-3's part of it, bitsandbytes' statistics.

    Source: deepspeed 0.19.8, runtime/zero/partition_parameters.py (`ds_tensor`); bitsandbytes 0.50.2, nn/modules.py (`quant_state`, `SCB`).
    """
    held = vars(parameter)
    yield from (held[name] for name in ("ds_tensor", "SCB") if isinstance(held.get(name), torch.Tensor))
    state = held.get("quant_state")
    while state is not None:
        yield from (value for value in vars(state).values() if isinstance(value, torch.Tensor))
        state = state.state2


def gradients(stage: Stage) -> Iterator[torch.Tensor | None]:
    return (parameter.grad for parameter in stage.models[0].parameters())


def optimizer_tensors(stage: Stage) -> Iterator[torch.Tensor]:
    """Of ZeRO the float32 copy of the weights as well.

    Source: deepspeed 0.19.8, runtime/zero/stage_1_and_2.py (`single_partition_of_fp32_groups`), stage3.py (`fp32_partitioned_groups_flat`).
    """
    optimizer = stage.trainer.model_wrapped.optimizer if stage.trainer.is_deepspeed_enabled else stage.trainer.optimizer
    for copies in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"):
        yield from vars(optimizer).get(copies, ())
    inner = optimizer.optimizer if stage.trainer.is_deepspeed_enabled else optimizer
    for state in inner.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


@contextlib.contextmanager
def zero_steps_told(stage: Stage, on_step: Callable[[Iterable[torch.Tensor | None]], None]) -> Iterator[None]:
    """While inside, ZeRO's optimizers tell their gradients before they step, which they do inside of accelerate's `backward`."""
    if not stage.trainer.is_deepspeed_enabled:
        yield
        return
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    def told(step: Callable[..., Any], held: Callable[[Any], Iterable[torch.Tensor | None]]) -> Callable[..., Any]:
        def tell_and_step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            on_step(held(optimizer))
            return step(optimizer, *args, **kwargs)

        return tell_and_step

    def of_two(optimizer: Any) -> Iterable[torch.Tensor | None]:
        return [gradient for group in optimizer.averaged_gradients.values() for gradient in group or ()]

    def of_three(optimizer: Any) -> Iterable[torch.Tensor | None]:
        return [optimizer.grad_partitions_flat_buffer]

    with (
        substituted(DeepSpeedZeroOptimizer, "step", told(DeepSpeedZeroOptimizer.step, of_two)),
        substituted(DeepSpeedZeroOptimizer_Stage3, "step", told(DeepSpeedZeroOptimizer_Stage3.step, of_three)),
    ):
        yield

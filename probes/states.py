"""What stays on a device between steps, by component: the bytes of this process' tensors, of what is sharded its shards."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from planner.quantities import Component
from probes.fake_trainer import Stage
from probes.watch import residents


def state_bytes(stage: Stage) -> dict[Component, int]:
    """Counted after the optimizer's step, before the gradients are gone."""
    found: dict[Component, int] = {}
    seen: set[int] = set()

    def count(component: Component, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = local(tensor).untyped_storage()
            if storage.nbytes() and storage._cdata not in seen:
                seen.add(storage._cdata)
                found[component] = found.get(component, 0) + storage.nbytes()

    for component, _, tensor in residents(stage):
        count(component, [tensor])
    policy = stage.models[0]
    count("gradients", (parameter.grad for parameter in policy.parameters() if parameter.grad is not None))
    count("optimizer_states", optimizer_tensors(stage.trainer.optimizer))
    return found


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process' part of a tensor that FSDP2 or ZeRO-3 has sharded."""
    if isinstance(tensor, torch.distributed.tensor.DTensor):
        return tensor.to_local()
    return tensor


def optimizer_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    for state in optimizer.state.values():
        yield from (item for item in state.values() if isinstance(item, torch.Tensor))

"""PyTorch's distributed tensors and FSDP, imported when somebody asks for more than whether something is of their classes."""

from collections.abc import Callable
from functools import partial
from importlib.machinery import ModuleSpec

import torch

from probes.when_asked.module import ModuleWhenAsked, stand_in

# What TRL imports when it is imported (trl 1.16, models/utils.py:28-39, trainer/utils.py:45, generation/vllm_generation.py:26).
CLASSES = {
    "torch.distributed.tensor": ("DTensor",),
    "torch.distributed.fsdp": ("FSDPModule", "FullyShardedDataParallel"),
    "torch.distributed.fsdp.fully_sharded_data_parallel": ("FullyShardedDataParallel",),
}


class DistributedWhenAsked(ModuleWhenAsked):
    """What is here are classes that nothing is an instance of, as nothing can be of those of a module that is not imported.

    Who got one of them before the module was imported keeps it: for processes that never make a distributed tensor (`planner.ahead.only_plans`).
    """

    def __init__(self, group: list["DistributedWhenAsked"], spec: ModuleSpec) -> None:
        super().__init__(spec)
        self.add_names({name: type(name, (), {}) for name in CLASSES[spec.name]})
        self._group = group
        group.append(self)

    def leaving(self) -> Callable[[], None]:
        """The modules import each other, and shall find their own classes."""
        for module in self._group:
            if isinstance(module, DistributedWhenAsked):
                module.drop_names()
        del self._group
        return super().leaving()


def distributed_when_asked() -> None:
    """From now on in this process, unless it has been imported already. With what it imports it takes an eighth of all imports of a dry run."""
    if not torch.distributed.is_available():
        return
    group: list[DistributedWhenAsked] = []
    for name in CLASSES:
        stand_in(name, partial(DistributedWhenAsked, group))

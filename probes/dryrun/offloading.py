"""What goes to the host and comes back: saved activations, the inputs of checkpointed layers, paged optimizer states.

On fake tensors host and device are one, so that moving is a name for forgetting and making anew.
Source: trl 1.16 trl/models/activation_offloading.py; transformers 5.23 modeling_utils.py `_activation_checkpointing_enable`; bitsandbytes 0.50.2
optim/optimizer.py `get_state_buffer`.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import transformers.modeling_utils
from trl.models.activation_offloading import OffloadActivations

from probes.step.tracker import Tracker
from probes.substitution import substituted

# Smaller states stay on the device: bitsandbytes/optim/optimizer.py, `get_state_buffer`.
PAGED_FROM_ELEMENTS = 100_000


class HostCopy:
    """A tensor that the device does not hold; `to` makes one there."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._held = tensor

    def to(self, *_: Any, **__: Any) -> torch.Tensor:
        return self._held.clone()


class _HostCopies(dict[int, Any]):
    """`OffloadActivations.tracker`: what was moved is moved when it is put in."""

    def __setitem__(self, key: int, value: tuple[Any, ...]) -> None:
        tensor, moved, *layout = value
        super().__setitem__(key, (HostCopy(tensor) if moved else tensor, moved, *layout))


class _Streams:
    """As much of `torch.cuda` as moving in the background needs: everything is done at once."""

    def __getattr__(self, _: str) -> Any:
        return lambda *_, **__: self

    def __enter__(self) -> "_Streams":
        return self

    def __exit__(self, *_: Any) -> None:
        """Nothing to wait for."""


@contextlib.contextmanager
def offloading(tracker: Tracker) -> Iterator[None]:
    """While a trainer is made and runs, the host's memory is not the device's."""
    prepare, pack = OffloadActivations.__init__, torch.empty_like

    def prepared(manager: Any, *args: Any, **kwargs: Any) -> None:
        with (
            substituted(torch.accelerator, "current_accelerator", lambda: torch.device("cpu")),
            substituted(torch, "get_device_module", lambda _: _Streams()),
        ):
            prepare(manager, *args, **{**kwargs, "use_pin_memory": False})
        manager.tracker = _HostCopies()

    def unpinned(tensor: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """The pinned host copy that a `HostCopy` replaces."""
        if "pin_memory" not in kwargs:
            return pack(tensor, **kwargs)
        with tracker.looking_away():
            return pack(tensor)

    with (
        substituted(OffloadActivations, "__init__", prepared),
        substituted(torch, "empty_like", unpinned),
        substituted(
            torch.UntypedStorage, "data_ptr", lambda storage: storage._cdata
        ),  # fake storages have no address, but an identity
        substituted(transformers.modeling_utils, "save_on_cpu", lambda **_: _saved_on_host(tracker)),
    ):
        yield


def _saved_on_host(tracker: Tracker) -> Any:
    """`torch.autograd.graph.save_on_cpu`."""

    def pack(tensor: torch.Tensor) -> HostCopy:
        with tracker.looking_away():
            return HostCopy(tensor.detach().clone(memory_format=torch.contiguous_format))

    return torch.autograd.graph.saved_tensors_hooks(pack, HostCopy.to)


@contextlib.contextmanager
def paged_states(tracker: Tracker) -> Iterator[None]:
    """bitsandbytes' paged optimizers keep large states in managed memory, which gives way to everything else on the device."""
    from bitsandbytes.optim.optimizer import Optimizer8bit

    make = Optimizer8bit.get_state_buffer

    def made(optimizer: Any, parameter: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        if not optimizer.is_paged or parameter.numel() < PAGED_FROM_ELEMENTS:
            return make(optimizer, parameter, dtype)
        with tracker.looking_away():
            return torch.zeros_like(parameter, dtype=dtype)

    with substituted(Optimizer8bit, "get_state_buffer", made):
        yield

"""Offloading to the host: saved activations, the inputs of checkpointed layers, and paged optimizer states.

All fake tensors lie on the CPU, so moving one is imitated: the device's tensor is dropped, and a new one is allocated
when it comes back.
Source: trl 1.16, trl/models/activation_offloading.py; transformers 5.23, modeling_utils.py
`_activation_checkpointing_enable`; bitsandbytes 0.50.2, optim/optimizer.py `get_state_buffer`.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import transformers.modeling_utils
from trl.models.activation_offloading import OffloadActivations

from probes.step.tracker import Tracker
from probes.substitution import substituted

# Optimizer states with fewer elements stay on the device. Source: bitsandbytes/optim/optimizer.py, `get_state_buffer`.
PAGED_FROM_ELEMENTS = 100_000


class HostCopy:
    """The host's copy of a tensor, which is not traced; `to` allocates the tensor on the device again."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._held = tensor

    def to(self, *_: Any, **__: Any) -> torch.Tensor:
        return self._held.clone()


class _HostCopies(dict[int, Any]):
    """Replaces the dict `OffloadActivations.tracker`: wraps each offloaded tensor in a `HostCopy` when it is stored."""

    def __setitem__(self, key: int, value: tuple[Any, ...]) -> None:
        tensor, moved, *layout = value
        super().__setitem__(key, (HostCopy(tensor) if moved else tensor, moved, *layout))


class _NoStreams:
    """Replaces the module `torch.cuda` for `OffloadActivations`: streams and events that do nothing."""

    def __getattr__(self, _: str) -> Any:
        return lambda *_, **__: self

    def __enter__(self) -> "_NoStreams":
        return self

    def __exit__(self, *_: Any) -> None:
        """Do nothing: there is no stream to leave."""


@contextlib.contextmanager
def offloading(tracker: Tracker) -> Iterator[None]:
    """Leave host copies of activations out of the trace, while a trainer is built and runs inside the block."""
    prepare, pack = OffloadActivations.__init__, torch.empty_like

    def prepared(manager: Any, *args: Any, **kwargs: Any) -> None:
        with (
            substituted(torch.accelerator, "current_accelerator", lambda: torch.device("cpu")),
            substituted(torch, "get_device_module", lambda _: _NoStreams()),
        ):
            prepare(manager, *args, **{**kwargs, "use_pin_memory": False})
        manager.tracker = _HostCopies()

    def unpinned(tensor: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Replace `torch.empty_like`: leave pinned buffers, which are on the host, out of the trace."""
        if "pin_memory" not in kwargs:
            return pack(tensor, **kwargs)
        with tracker.tensors_on_host():
            return pack(tensor)

    with (
        substituted(OffloadActivations, "__init__", prepared),
        substituted(torch, "empty_like", unpinned),
        substituted(
            torch.UntypedStorage, "data_ptr", lambda storage: storage._cdata
        ),  # a fake storage has no data pointer; the address of the storage object identifies it as well
        substituted(transformers.modeling_utils, "save_on_cpu", lambda **_: _saved_on_host(tracker)),
    ):
        yield


def _saved_on_host(tracker: Tracker) -> Any:
    """Return hooks that save tensors as `HostCopy`, in place of `torch.autograd.graph.save_on_cpu`."""

    def pack(tensor: torch.Tensor) -> HostCopy:
        with tracker.tensors_on_host():
            return HostCopy(tensor.detach().clone(memory_format=torch.contiguous_format))

    return torch.autograd.graph.saved_tensors_hooks(pack, HostCopy.to)


@contextlib.contextmanager
def paged_states(tracker: Tracker) -> Iterator[None]:
    """Leave the large states of bitsandbytes' paged optimizers out of the trace, inside the block.

    They lie in CUDA managed memory, which the driver moves to the host when other tensors need the space.
    """
    from bitsandbytes.optim.optimizer import Optimizer8bit

    get_state_buffer = Optimizer8bit.get_state_buffer

    def untracked_if_paged(optimizer: Any, parameter: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        if not optimizer.is_paged or parameter.numel() < PAGED_FROM_ELEMENTS:
            return get_state_buffer(optimizer, parameter, dtype)
        with tracker.tensors_on_host():
            return torch.zeros_like(parameter, dtype=dtype)

    with substituted(Optimizer8bit, "get_state_buffer", untracked_if_paged):
        yield

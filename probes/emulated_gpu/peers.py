"""The peers of a rank that runs alone, and what a rank's collectives leave behind.

The store where all ranks would meet is here; their part of collectives is in driver/nccl.cpp.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch.distributed

from probes.emulated_gpu.values import on_host
from probes.substitution import substituted


@lru_cache(maxsize=1)
def answer_for_peers() -> torch.distributed.TCPStore:
    """Start and return the rendezvous store of a training whose other ranks do not exist; it waits for nobody.

    The store lives as long as the returned object. torchrun's agent keeps such a store, which the ranks join as clients
    (torch 2.13, distributed/rendezvous.py, `_create_c10d_store`).
    """
    store = torch.distributed.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        int(os.environ["WORLD_SIZE"]),
        is_master=True,
        wait_for_workers=False,
    )
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    # one root for all ranks: none waits for another root's id (torch 2.13, ProcessGroupNCCL.cpp, `getRootIndex`)
    os.environ["TORCH_NCCL_RANKS_PER_ROOT"] = os.environ["WORLD_SIZE"]
    return store


@contextmanager
def peers_on_the_cpu() -> Iterator[None]:
    """Replace the missing peers in collectives over the CPU by copies of this rank's data inside the block.

    Under FSDP accelerate opens a Gloo group beside NCCL's, in which TRL gathers objects (accelerate 1.15, state.py; trl
    1.16, trainer/grpo_trainer.py, `gather_object`): Gloo would wait for the other ranks. PyTorch's `FakeProcessGroup`
    copies a rank's own tensors to where the others' belong (torch 2.13, distributed/c10d/FakeProcessGroup.hpp).
    """
    torch.distributed.Backend.register_backend("peers", _copying_group, extended_api=True, devices=["cpu"])
    init = torch.distributed.init_process_group

    def init_without_gloo(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        init(backend.replace("cpu:gloo", "cpu:peers") if backend else backend, *args, **kwargs)

    with substituted(torch.distributed, "init_process_group", init_without_gloo):
        yield


def _copying_group(group: Any, _: Any) -> Any:
    from torch._C._distributed_c10d import FakeProcessGroup

    return FakeProcessGroup._create_internal(group.group_rank, group.group_size)


@contextmanager
def even_experts() -> Iterator[None]:
    """Send equally many tokens to every expert inside the block, and receive as many from every rank as go there.

    No router computes on an emulated card, and no rank receives what others send to it in sizes of their own
    (driver/nccl.cpp, `ncclRecv`): the counts, by which tokens are received, are those of an even routing.
    Source: transformers 5.23, distributed/expert_parallel.py, `AllToAllEP._dispatch_tokens`.
    """
    from transformers.distributed import expert_parallel

    dispatch = expert_parallel.AllToAllEP._dispatch_tokens

    def evenly(self: Any, hidden_states: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> Any:
        experts = self.num_local_experts * self.ep_mesh.size()
        on_host(chosen.detach()).copy_(torch.arange(chosen.numel(), device="cpu").reshape(chosen.shape) % experts)
        return dispatch(self, hidden_states, chosen, weights)

    def received(counts: torch.Tensor, sent: torch.Tensor, group: Any) -> None:
        on_host(counts).copy_(on_host(sent))

    with (
        substituted(expert_parallel.AllToAllEP, "_dispatch_tokens", evenly),
        substituted(expert_parallel, "all_to_all_single", received),
    ):
        yield


def wait_for_watchdog() -> None:
    """Wait until NCCL's watchdog has seen the end of all collectives, for which it looks every 100 ms.

    DDP waits for a bucket's all-reduce by its future, so that PyTorch keeps the bucket until the watchdog has seen the
    end of it and the next collective starts. Before the second step DDP makes new buckets (torch 2.13,
    distributed/c10d/reducer.cpp, `rebuild_buckets`); if the watchdog comes later, the old one, as large as all
    gradients, is still there. On an emulated card, where a step takes the host's time, this would differ from run to
    run. Source: torch 2.13, distributed/c10d/ProcessGroupNCCL.cpp, `TensorShelf`, `waitForPendingWorks`.
    """
    if torch.distributed.is_initialized() and "nccl" in torch.distributed.get_backend_config():
        torch.distributed.group.WORLD._wait_for_pending_works()

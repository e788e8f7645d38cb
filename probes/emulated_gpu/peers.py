"""The peers of a rank that runs alone: the store where all would meet. Their part of collectives: driver/nccl.cpp."""

import os
from functools import lru_cache

import torch.distributed


@lru_cache(maxsize=1)
def answer_for_peers() -> torch.distributed.TCPStore:
    """Start the store of a training whose other ranks do not exist; it waits for nobody. Return it: it ends with it.

    torchrun's agent keeps such a store, which the ranks join as clients (torch 2.13, distributed/rendezvous.py,
    `_create_c10d_store`).
    """
    store = torch.distributed.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        int(os.environ["WORLD_SIZE"]),
        is_master=True,
        wait_for_workers=False,
    )
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    # one of so many ranks is a root, whose id the others wait for (torch 2.13, ProcessGroupNCCL.cpp, `getRootIndex`)
    os.environ["TORCH_NCCL_RANKS_PER_ROOT"] = os.environ["WORLD_SIZE"]
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"  # accelerate opens a group for the CPU that nobody uses
    return store

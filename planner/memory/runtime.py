"""Runtime: memory of a process on its GPU that holds no tensor: the CUDA context and cuBLAS workspaces."""

from planner.gpus.cluster import Gpu
from planner.units import GIB, MIB

# CUDA context with the kernels that training has loaded, by compute capability: process memory less the bytes that
# PyTorch reserved, from out-of-memory messages (results/allocator_slack.md, medians). Not measured by us. Rows marked
# "scaled" have no such message: the A100's bytes times the ratio of multiprocessors (data sheets: V100 80, A100 108,
# H100 132, B200 148, B300 148).
CONTEXT_BYTES: dict[tuple[int, int], int] = {
    (6, 0): 303 * MIB,  # one row, P100
    (7, 0): 371 * MIB,  # scaled
    (7, 5): 136 * MIB,  # two rows, T4
    (8, 0): 501 * MIB,  # one row, A100
    (8, 6): 484 * MIB,  # NVIDIA/nccl#2366, RTX 3090, with a communicator of one rank
    (8, 9): 509 * MIB,  # eight rows, RTX 4090, L40S, RTX 6000 Ada
    (9, 0): 612 * MIB,  # scaled
    (10, 0): 687 * MIB,  # scaled
    (10, 3): 687 * MIB,  # scaled
    (12, 0): 607 * MIB,  # two rows, RTX 5090
}
# GPUs of up to 8 GiB have a fifth of the multiprocessors and a context of a fifth: two rows, RTX 3050 and RTX 4050
# laptops.
SMALL_CARD_BYTES = 8 * GIB
SMALL_CARD_CONTEXT_BYTES = 104 * MIB

# cuBLAS workspace of one handle, allocated through PyTorch: 32 MiB from Hopper on, else 2 x 4 MiB + 8 x 16 KiB.
# Source: pytorch 2.13, aten/src/ATen/cuda/CublasHandlePool.cpp, `parseChosenWorkspaceSize`.
CUBLAS_WORKSPACE_BYTES = 4096 * 1024 * 2 + 16 * 1024 * 8
CUBLAS_WORKSPACE_HOPPER_BYTES = 4096 * 8 * 1024
HOPPER = (9, 0)
CUBLAS_HANDLES = 2  # one for the thread of the forward pass, one for the thread of autograd

# Bytes that the caching allocator has reserved and cannot use when it runs out of memory, in thousandths of the
# allocated bytes: the difference up to which two cards count as alike. Source: results/allocator_slack.md (median of
# runs without gathered layers).
SLACK_THOUSANDTHS = 11


def context_bytes(gpu: Gpu) -> int:
    """Bytes of the CUDA context of one process on one GPU; a vLLM engine in the same process shares it.

    A compute capability without a row gets the bytes of the next lower one. Example: 501 MiB on an A100.

    Leaves out other processes on the GPU.
    """
    if gpu.total_bytes <= SMALL_CARD_BYTES:
        return SMALL_CARD_CONTEXT_BYTES
    known = [capability for capability in CONTEXT_BYTES if capability <= gpu.compute_capability]
    return CONTEXT_BYTES[max(known, default=min(CONTEXT_BYTES))]


def cublas_bytes(gpu: Gpu) -> int:
    """Bytes of cuBLAS workspaces in one training process: two of 8,519,680, from Hopper on two of 32 MiB."""
    return CUBLAS_HANDLES * (
        CUBLAS_WORKSPACE_HOPPER_BYTES if gpu.compute_capability >= HOPPER else CUBLAS_WORKSPACE_BYTES
    )


def runtime_bytes(gpu: Gpu) -> int:
    """Bytes of CUDA context and cuBLAS workspaces of one training process on its GPU.

    Example: 517.2 MiB on an A100. Leaves out NCCL (communication.py) and vLLM's own memory (engine/budget.py).
    """
    return context_bytes(gpu) + cublas_bytes(gpu)

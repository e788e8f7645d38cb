"""Runtime: memory of a process on its GPU that holds no tensor: the CUDA context and cuBLAS workspaces."""

from planner.gpus.cluster import Gpu
from planner.units import MIB

# CUDA context with the kernels that training has loaded, in hundredths of a MiB for each multiprocessor, by compute
# capability: process memory less the bytes that PyTorch reserved, over the card's multiprocessors (planner/data/
# gpus.jsonl), medians of results/allocator_slack.md. Not measured by us. CUDA 12.8 and 13.0 show the same on a T4.
# Capabilities without a published context have the A100's share.
CONTEXT_OF_A_MULTIPROCESSOR: dict[tuple[int, int], int] = {
    (6, 0): 541,  # one row, P100
    (7, 0): 464,
    (7, 5): 350,  # three rows, T4
    (8, 0): 464,  # one row, A100
    (8, 6): 556,  # one row, RTX 3050 laptop; NVIDIA/nccl#2366, RTX 3090 with a communicator of one rank: 590
    (8, 9): 370,  # nine rows of 20 to 142 multiprocessors
    (9, 0): 464,
    (10, 0): 464,
    (10, 3): 464,
    (12, 0): 357,  # two rows, RTX 5090
}

# cuBLAS workspace of one handle, allocated through PyTorch: 32 MiB on Hopper and Blackwell, else 2 x 4 MiB + 8 x 16
# KiB. Source: pytorch 2.13, aten/src/ATen/cuda/CublasHandlePool.cpp, `parseChosenWorkspaceSize` (`use32mb`).
CUBLAS_WORKSPACE_BYTES = 4096 * 1024 * 2 + 16 * 1024 * 8
LARGE_CUBLAS_WORKSPACE_BYTES = 4096 * 8 * 1024
LARGE_WORKSPACE = (9, 10, 12)  # major compute capabilities
CUBLAS_HANDLES = 2  # one for the thread of the forward pass, one for the thread of autograd

# Bytes that the caching allocator has reserved and cannot use when it runs out of memory, in thousandths of the
# allocated bytes: the difference up to which two cards count as alike. Source: results/allocator_slack.md (median of
# runs without gathered layers).
SLACK_THOUSANDTHS = 11


def context_bytes(gpu: Gpu) -> int:
    """Bytes of the CUDA context of one process on one GPU; a vLLM engine in the same process shares it.

        context = multiprocessors x share of the compute capability

    A compute capability without a row has the share of the next lower one. Example: 108 x 4.64 = 501 MiB on an A100,
    58 x 3.70 = 215 MiB on an L4.

    Leaves out other processes on the GPU.
    """
    known = [capability for capability in CONTEXT_OF_A_MULTIPROCESSOR if capability <= gpu.compute_capability]
    share = CONTEXT_OF_A_MULTIPROCESSOR[max(known, default=min(CONTEXT_OF_A_MULTIPROCESSOR))]
    return gpu.multiprocessors * share * MIB // 100


def cublas_bytes(gpu: Gpu) -> int:
    """Bytes of cuBLAS workspaces in one training process: two of 8,519,680, or of 32 MiB."""
    return CUBLAS_HANDLES * (
        LARGE_CUBLAS_WORKSPACE_BYTES if gpu.compute_capability[0] in LARGE_WORKSPACE else CUBLAS_WORKSPACE_BYTES
    )


def runtime_bytes(gpu: Gpu) -> int:
    """Bytes of CUDA context and cuBLAS workspaces of one training process on its GPU.

    Example: 517.4 MiB on an A100. Leaves out NCCL (communication.py) and vLLM's own memory (engine/budget.py).
    """
    return context_bytes(gpu) + cublas_bytes(gpu)

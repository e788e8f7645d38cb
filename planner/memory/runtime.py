"""Runtime: what a process takes on a card beside tensors, and what the allocator reserves without giving it away."""

from planner.cache_keys import TrainingInput
from planner.gpus.cluster import Gpu
from planner.units import GIB, MIB

# The CUDA context with the kernels that training has loaded by the time it runs out of memory, by compute capability: process memory
# less what PyTorch reserved, from out-of-memory messages (results/allocator_slack.md, medians). Not measured by us. Rows marked "scaled" have no such
# message: the A100's figure times the ratio of multiprocessors (data sheets: V100 80, A100 108, H100 132, B200 148, B300 148).
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
# Cards of up to 8 GiB have a fifth of the multiprocessors, and their context is as much smaller: two rows, RTX 3050 and RTX 4050 laptops.
SMALL_CARD_BYTES = 8 * GIB
SMALL_CARD_CONTEXT_BYTES = 104 * MIB

# cuBLAS workspace of one handle, allocated through PyTorch: 32 MiB from Hopper on, else 2 x 4 MiB + 8 x 16 KiB.
# Source: pytorch, aten/src/ATen/cuda/CublasHandlePool.cpp `parseChosenWorkspaceSize`.
CUBLAS_WORKSPACE_BYTES = 4096 * 1024 * 2 + 16 * 1024 * 8
CUBLAS_WORKSPACE_HOPPER_BYTES = 4096 * 8 * 1024
HOPPER = (9, 0)
CUBLAS_HANDLES = 2  # one for the thread of the forward pass, one for autograd's

# What the allocator has reserved and cannot give away when it runs out, over what is allocated, in thousandths.
# Source: results/allocator_slack.md (medians: of runs whose layers stay, and of those that gather them, ZeRO-3 and FSDP).
SLACK_THOUSANDTHS = 11
SLACK_SHARDED_THOUSANDTHS = 72
# With expandable segments only the last pages of the small and the large pool are unused.
# Source: pytorch, c10/cuda/CUDACachingAllocator.cpp `kSmallBuffer`, `kLargeBuffer` (2 MiB and 20 MiB).
EXPANDABLE_SLACK_BYTES = 22 * MIB


def context_bytes(gpu: Gpu) -> int:
    """Bytes of the CUDA context in one process on one card; a vLLM engine in the same process shares it.

    Example: 501 MiB on an A100. Leaves out other processes on the card. A capability without a row has that of the next lower one.
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
    """Bytes that one training process takes on its card beside tensors: CUDA context and cuBLAS workspaces.

    Example: 517.2 MiB on an A100. Leaves out NCCL (communication.py) and what vLLM loads besides (engine.py).
    """
    return context_bytes(gpu) + cublas_bytes(gpu)


def fragmentation_bytes(allocated_bytes: int, candidate: TrainingInput) -> int:
    """Bytes reserved by the caching allocator that no tensor can use at the moment that decides, on one GPU.

        1.1 % of what is allocated; 7.2 % where layers are gathered and dropped (ZeRO-3, FSDP2); 22 MiB with expandable segments

    Before it gives up the allocator returns every wholly free segment, so what counts is the rest: the "reserved but unallocated" of
    out-of-memory messages, not the much larger cache of a run that has room. Source: results/allocator_slack.md.
    """
    if candidate.expandable_segments:
        return min(EXPANDABLE_SLACK_BYTES, allocated_bytes)
    gathers = candidate.sharding in ("zero3", "fsdp2") and (candidate.num_processes > 1 or candidate.offload_param)
    return allocated_bytes * (SLACK_SHARDED_THOUSANDTHS if gathers else SLACK_THOUSANDTHS) // 1000

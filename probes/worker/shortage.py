"""Recognize the errors that mean "out of GPU memory", and read the figures in their messages."""

import re

import torch

from planner.measurements.measurement import Shortage
from planner.quantities import Phase
from planner.units import GIB, MIB

# Source: pytorch 2.13, c10/cuda/CUDACachingAllocator.cpp, `malloc` ("CUDA out of memory. Tried to allocate ..") and
# `format_size`.
SIZE = r"([\d.]+) (bytes|KiB|MiB|GiB)"
UNITS: dict[str, int] = {"bytes": 1, "KiB": 1024, "MiB": MIB, "GiB": GIB}
TRIED = re.compile(rf"Tried to allocate {SIZE}")
FREE = re.compile(rf"of which {SIZE} is free")
ALLOWED = re.compile(rf"{SIZE} allowed;")
ALLOCATED = re.compile(rf"{SIZE} is allocated by PyTorch")
UNALLOCATED = re.compile(rf"{SIZE} is reserved by PyTorch but unallocated")
# Messages of other libraries than PyTorch's allocator when GPU memory runs out.
# Source: CUDA's cudaErrorMemoryAllocation as pytorch 2.13, c10/cuda/CUDAException.cpp says it; cuBLAS'
# CUBLAS_STATUS_ALLOC_FAILED; vllm 0.33, v1/worker/utils.py (free memory at start), v1/core/kv_cache_utils.py (no block,
# or too few for one sequence).
OTHERS = re.compile(
    r"CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|less than desired GPU memory utilization|"
    r"No available memory for the cache blocks|larger than the available KV cache memory"
)


def lacks_memory(error: Exception) -> bool:
    """Return True if an exception means that the device ran out of memory."""
    return isinstance(error, torch.OutOfMemoryError) or OTHERS.search(str(error)) is not None


def shortage_of_message(
    message: str, rank: int, phase: Phase, free_bytes: int, allocated_bytes: int, reserved_bytes: int
) -> Shortage:
    """Read a shortage from the allocator's message, whose figures are those of the moment.

    A figure that the message lacks is taken from `free_bytes`, `allocated_bytes` and `reserved_bytes`, which were read
    later.
    """
    allocated, unallocated = (
        _size(ALLOCATED, message, allocated_bytes),
        _size(UNALLOCATED, message, reserved_bytes - allocated_bytes),
    )
    free = _size(FREE, message, free_bytes)
    allowed = _size(ALLOWED, message, 0)
    return Shortage(
        rank=rank,
        phase=phase,
        tried_bytes=_size(TRIED, message, 0),
        free_bytes=min(free, max(allowed - allocated - unallocated, 0)) if allowed else free,
        allocated_bytes=allocated,
        reserved_bytes=allocated + unallocated,
    )


def _size(pattern: re.Pattern[str], message: str, otherwise: int) -> int:
    found = pattern.search(message)
    return round(float(found.group(1)) * UNITS[found.group(2)]) if found else otherwise

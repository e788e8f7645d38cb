"""Read the GPU memory of this process without changing PyTorch's statistics, which the user may read too."""

import os
from collections.abc import Callable
from types import ModuleType

from msgspec import Struct
from msgspec.structs import replace

from planner.errors import UnknownName
from planner.gpus.catalogue import bare_gpu, load_gpu
from planner.gpus.cluster import Gpu
from probes.runner.gpus_in_use import visible_handles


class RunMemoryReading(Struct, frozen=True, kw_only=True):
    """The peaks since the process began, and the process's memory outside PyTorch's allocator, by the driver.

    `outside_bytes` is 0 if the driver does not report it.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    outside_bytes: int
    allocator: dict[str, int]


class RunMemory(Struct, frozen=True, kw_only=True):
    """The GPU of a process, and a function that reads the process's memory on it."""

    gpu: Gpu
    read: Callable[[], RunMemoryReading]


# Statistics that are kept with the measurement. Source: pytorch 2.13, torch/cuda/memory.py, `memory_stats`.
KEPT_STATISTICS = (
    "num_alloc_retries",
    "num_ooms",
    "allocated_bytes.all.peak",
    "reserved_bytes.all.peak",
    "requested_bytes.all.peak",
    "inactive_split_bytes.all.peak",
)


def cuda_memory() -> RunMemory | None:
    """Return the memory of the process's current CUDA device; None without CUDA. Not yet run on a GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    device = torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(device)

    def read() -> RunMemoryReading:
        stats = torch.cuda.memory_stats(device)
        return reading_of(stats, process_bytes(device))

    return RunMemory(
        gpu=gpu_of(properties.name, properties.total_memory, (properties.major, properties.minor)), read=read
    )


def reading_of(stats: dict[str, int], process_bytes: int) -> RunMemoryReading:
    """Build a reading from `torch.cuda.memory_stats` and the process's bytes by the driver, 0 if unknown."""
    reserved = stats["reserved_bytes.all.current"]
    return RunMemoryReading(
        peak_allocated_bytes=stats["allocated_bytes.all.peak"],
        peak_reserved_bytes=stats["reserved_bytes.all.peak"],
        outside_bytes=max(process_bytes - reserved, 0) if process_bytes else 0,
        allocator={name: stats[name] for name in KEPT_STATISTICS if name in stats},
    )


def gpu_of(name: str, total_bytes: int, capability: tuple[int, int]) -> Gpu:
    """Return a GPU by the driver's name for it, with the speeds of the catalogue if the name is known."""
    try:
        known = load_gpu(name)
    except UnknownName:
        known = replace(bare_gpu(total_bytes), name=name)
    return replace(known, total_bytes=total_bytes, free_bytes=total_bytes, compute_capability=capability)


def process_bytes(device: int) -> int:
    """Return the driver's count of this process's bytes on one of its visible GPUs.

    It is 0 if the driver does not report it, as in a container with process ids of its own.
    """
    import pynvml

    nvml: ModuleType = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return 0  # there is no driver
    try:
        handles = list(visible_handles(nvml, os.environ.get("CUDA_VISIBLE_DEVICES")))
        running = nvml.nvmlDeviceGetComputeRunningProcesses(handles[device]) if device < len(handles) else []
        return next((int(each.usedGpuMemory or 0) for each in running if each.pid == os.getpid()), 0)
    finally:
        nvml.nvmlShutdown()

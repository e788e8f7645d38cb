"""What a running process takes of its card, read without changing anything in it: the user's own statistics are not reset."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType

from planner.errors import UnknownName
from planner.gpus.catalogue import bare_gpu, load_gpu
from planner.gpus.cluster import Gpu
from probes.runner.gpus_in_use import visible_handles


@dataclass(frozen=True, kw_only=True, slots=True)
class RunMemoryReading:
    """The peaks since the process began, and what the driver counts for it beside PyTorch; 0 where it does not say."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    outside_bytes: int
    allocator: dict[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunMemory:
    """One process' card, and how to read what the process takes of it."""

    gpu: Gpu
    read: Callable[[], RunMemoryReading]


# Of torch.cuda.memory_stats (pytorch 2.13, torch/cuda/memory.py:231): what is kept beside the peaks.
KEPT = (
    "num_alloc_retries",
    "num_ooms",
    "allocated_bytes.all.peak",
    "reserved_bytes.all.peak",
    "requested_bytes.all.peak",
    "inactive_split_bytes.all.peak",
)


def cuda_memory() -> RunMemory | None:
    """The process' current CUDA device; None where there is none. Not yet run on a GPU."""
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
    """`stats` of torch.cuda.memory_stats, `process_bytes` as the driver counts them at the same moment, 0 where it does not."""
    reserved = stats["reserved_bytes.all.current"]
    return RunMemoryReading(
        peak_allocated_bytes=stats["allocated_bytes.all.peak"],
        peak_reserved_bytes=stats["reserved_bytes.all.peak"],
        outside_bytes=max(process_bytes - reserved, 0) if process_bytes else 0,
        allocator={name: stats[name] for name in KEPT if name in stats},
    )


def gpu_of(name: str, total_bytes: int, capability: tuple[int, int]) -> Gpu:
    """A card by the name that its driver gives it: the catalogue's speeds where it is known."""
    try:
        known = load_gpu(name)
    except UnknownName:
        known = replace(bare_gpu(total_bytes), name=name)
    return replace(known, total_bytes=total_bytes, free_bytes=total_bytes, compute_capability=capability)


def process_bytes(device: int) -> int:
    """What the driver counts for this process on one of its visible cards; 0 where it does not say, as in a container with process numbers of its own."""
    import pynvml

    nvml: ModuleType = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return 0  # no driver to ask is an answer: none
    try:
        handles = list(visible_handles(nvml, os.environ.get("CUDA_VISIBLE_DEVICES")))
        running = nvml.nvmlDeviceGetComputeRunningProcesses(handles[device]) if device < len(handles) else []
        return next((int(each.usedGpuMemory or 0) for each in running if each.pid == os.getpid()), 0)
    finally:
        nvml.nvmlShutdown()

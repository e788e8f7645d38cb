"""The GPUs of this machine, as the NVIDIA driver reports them now (through nvidia-ml-py, imported only here)."""

import os
from dataclasses import dataclass, replace
from types import ModuleType

from planner.errors import InputError, UnknownName
from planner.gpus.catalogue import bare_gpu, load_gpu
from planner.gpus.cluster import Cluster, Gpu

NAME_A_CARD = "Name the card instead, such as --gpus 1xRTX-3090."


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverReading:
    """What the driver says of one card. `total_bytes` is without what the driver keeps for itself."""

    name: str
    total_bytes: int
    free_bytes: int
    compute_capability: tuple[int, int]


def local_cluster() -> Cluster:
    """One node with this machine's cards; the least free memory among them counts for all.

    Raises:
        InputError: no driver, no card, or cards of different kinds.
    """
    readings = _visible(_readings(_nvml()))
    if not readings:
        raise InputError(f"--gpus local finds no NVIDIA GPU here. {NAME_A_CARD}")
    names = sorted({reading.name for reading in readings})
    if len(names) > 1:
        raise InputError(
            f"--gpus local finds different cards ({', '.join(names)}); choose equal ones with CUDA_VISIBLE_DEVICES."
        )
    return Cluster(gpu=_gpu(readings), nodes=1, gpus_per_node=len(readings))


def _gpu(readings: list[DriverReading]) -> Gpu:
    """Speeds from the catalogue where it knows the name; memory and compute capability from the driver."""
    first, total_bytes = readings[0], min(reading.total_bytes for reading in readings)
    try:
        known = load_gpu(first.name)
        name = known.name
    except UnknownName:
        known, name = bare_gpu(total_bytes), first.name
    return replace(
        known,
        name=name,
        total_bytes=total_bytes,
        free_bytes=min(reading.free_bytes for reading in readings),
        compute_capability=first.compute_capability,
        source=f"memory as the driver reports it now; speeds: {known.source}",
    )


def _nvml() -> ModuleType:
    try:
        import pynvml
    except ImportError as error:
        raise InputError(
            f"--gpus local needs the package nvidia-ml-py (pip install nvidia-ml-py). {NAME_A_CARD}"
        ) from error
    module: ModuleType = pynvml
    try:
        module.nvmlInit()
    except module.NVMLError as error:
        raise InputError(f"--gpus local finds no NVIDIA driver here ({error}). {NAME_A_CARD}") from error
    return module


def _readings(nvml: ModuleType) -> list[DriverReading]:
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return [_reading(nvml, handle) for handle in handles]
    finally:
        nvml.nvmlShutdown()


def _reading(nvml: ModuleType, handle: object) -> DriverReading:
    """Version 2 of the memory record tells what the driver reserves, which torch's total does not contain."""
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    except nvml.NVMLError as error:
        raise InputError(f"--gpus local needs an NVIDIA driver of 510 or newer ({error}). {NAME_A_CARD}") from error
    name = nvml.nvmlDeviceGetName(handle)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return DriverReading(
        name=name.decode() if isinstance(name, bytes) else str(name),
        total_bytes=int(memory.total - memory.reserved),
        free_bytes=int(memory.free),
        compute_capability=(int(major), int(minor)),
    )


def _visible(readings: list[DriverReading]) -> list[DriverReading]:
    """Those that CUDA_VISIBLE_DEVICES leaves, where it lists indices."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return readings
    indices = [int(part) for part in listed.split(",") if part.strip().isdigit()]
    if listed.strip() and not indices:
        return readings
    return [readings[index] for index in indices if index < len(readings)]

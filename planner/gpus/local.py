"""The GPUs of this node, as the NVIDIA driver reports them now. Imports nvidia-ml-py (`pynvml`) when needed."""

import os
from types import ModuleType

from msgspec import Struct
from msgspec.structs import replace

from planner.errors import InputError, UnknownName
from planner.gpus.catalogue import bare_gpu, load_gpu
from planner.gpus.cluster import Cluster, Gpu
from planner.gpus.host_memory import with_local_host

NAME_A_CARD = "Name the card instead, such as --gpus 1xRTX-3090."


class DriverReading(Struct, frozen=True, kw_only=True):
    """The driver's figures for one GPU. `total_bytes` leaves out the memory that the driver reserves for itself."""

    name: str
    total_bytes: int
    free_bytes: int
    compute_capability: tuple[int, int]


def local_cluster() -> Cluster:
    """A cluster of one node with the local GPUs; total and free memory are the smallest of any of them.

    The host memory is this machine's, within the limits of its container.

    Raises:
        InputError: there is no driver or no GPU, or the GPUs have different names.
    """
    readings = _visible(_readings(_nvml()))
    if not readings:
        raise InputError(f"--gpus local finds no NVIDIA GPU here. {NAME_A_CARD}")
    names = sorted({reading.name for reading in readings})
    if len(names) > 1:
        raise InputError(
            f"--gpus local finds different cards ({', '.join(names)}); choose equal ones with CUDA_VISIBLE_DEVICES."
        )
    return with_local_host(Cluster(gpu=_gpu(readings), nodes=1, gpus_per_node=len(readings)))


def _gpu(readings: list[DriverReading]) -> Gpu:
    """The local GPU: memory and compute capability from the driver, speeds from the catalogue if the name is known."""
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
    """The module `pynvml`, initialised.

    Raises:
        InputError: nvidia-ml-py is not installed, or there is no driver.
    """
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
    """Read every GPU of the node, then shut NVML down; raise InputError if the driver is older than 510."""
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return [_reading(nvml, handle) for handle in handles]
    finally:
        nvml.nvmlShutdown()


def _reading(nvml: ModuleType, handle: object) -> DriverReading:
    """Read one GPU with version 2 of NVML's memory record, the first with the bytes that the driver reserves.

    torch's total memory leaves these bytes out as well.

    Raises:
        InputError: the driver is older than 510.
    """
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
    """The GPUs that CUDA_VISIBLE_DEVICES lists by index; all if it is not set or lists only UUIDs."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return readings
    indices = [int(part) for part in listed.split(",") if part.strip().isdigit()]
    if listed.strip() and not indices:
        return readings
    return [readings[index] for index in indices if index < len(readings)]

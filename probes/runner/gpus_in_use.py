"""Read from the NVIDIA driver, before a probe, each GPU's free memory and the processes that use the rest."""

import os
import time
from collections.abc import Callable, Iterator
from types import ModuleType

import psutil
from msgspec import Struct

from planner.errors import InputError
from planner.memory.runtime import SLACK_THOUSANDTHS
from planner.units import format_gib

LOOK_SECONDS = 0.2  # between two readings of the driver
OTHER_DEVICES = "Without a GPU: --device cpu for a small model, --device emulated for any."
# A GPU counts as free if others use less of it than the allocator's slack: the driver uses a few MiB of an idle GPU
# too.
TOLERATED_THOUSANDTHS = SLACK_THOUSANDTHS


class Holder(Struct, frozen=True, kw_only=True):
    """A process that uses memory of a GPU. `used_bytes` is 0 if the driver does not report it."""

    process: int
    name: str
    used_bytes: int


class Card(Struct, frozen=True, kw_only=True):
    """The driver's report on one GPU. `total_bytes` does not include the memory that the driver reserves for itself."""

    index: int
    total_bytes: int
    free_bytes: int
    holders: tuple[Holder, ...]

    @property
    def description(self) -> str:
        """Text such as `GPU 0 has 1.00 of 39.49 GiB free; python (process 12) holds 38.00 GiB`."""
        holders = [
            f"{each.name} (process {each.process}) holds "
            + (format_gib(each.used_bytes) if each.used_bytes else "some of it")
            for each in self.holders
        ]
        held = ", ".join(holders) or "no process that can be seen from here holds the rest"
        return f"GPU {self.index} has {format_gib(self.free_bytes)} of {format_gib(self.total_bytes)} free; {held}"


def in_use(cards: tuple[Card, ...], free_bytes: int) -> tuple[Card, ...]:
    """Return the GPUs that other processes use: less than `free_bytes`, or than the whole GPU, is free."""
    return tuple(card for card in cards if card.free_bytes < min(free_bytes, card.total_bytes) - tolerated_bytes(card))


def tolerated_bytes(card: Card) -> int:
    """Return the bytes that other processes may use of a GPU that counts as free."""
    return card.total_bytes * TOLERATED_THOUSANDTHS // 1000


def wait_until_free(read: Callable[[], tuple[Card, ...]], free_bytes: int, seconds: float) -> tuple[Card, ...]:
    """Read the GPUs until none is in use, at most for some seconds, and return the last reading.

    The driver takes a while to free the memory of a killed process.
    """
    deadline = time.monotonic() + seconds
    cards = read()
    while in_use(cards, free_bytes) and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
        cards = read()
    return cards


def visible_cards(count: int) -> tuple[Card, ...]:
    """Return the current state of the first `count` GPUs that a worker would see.

    MIG instances are read if CUDA_VISIBLE_DEVICES names them. Not yet run on a GPU.

    Raises:
        InputError: there is no NVIDIA driver, or it is older than 510.
    """
    import pynvml

    nvml: ModuleType = pynvml
    try:
        nvml.nvmlInit()
        try:
            handles = list(visible_handles(nvml, os.environ.get("CUDA_VISIBLE_DEVICES")))[:count]
            return tuple(card_of(nvml, index, handle) for index, handle in enumerate(handles))
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        raise InputError(
            f"--device cuda needs an NVIDIA driver of 510 or newer, which does not answer here ({error}). "
            f"{OTHER_DEVICES}"
        ) from error


def visible_handles(nvml: ModuleType, listed: str | None) -> Iterator[object]:
    """Yield NVML's handles of the devices that CUDA shows, in CUDA's order.

    `listed` is CUDA_VISIBLE_DEVICES: indices or UUIDs, up to the first entry that is neither; None for all devices.
    Source: CUDA C++ Programming Guide, "CUDA Environment Variables". Indices are those of CUDA_DEVICE_ORDER=PCI_BUS_ID.
    """
    count = nvml.nvmlDeviceGetCount()
    if listed is None:
        yield from map(nvml.nvmlDeviceGetHandleByIndex, range(count))
        return
    identifiers = [str(index) for index in range(count)]
    for name in (part.strip() for part in listed.split(",")):
        if name in identifiers:
            yield nvml.nvmlDeviceGetHandleByIndex(int(name))
        elif name.startswith(("GPU-", "MIG-")):
            yield nvml.nvmlDeviceGetHandleByUUID(name)
        else:
            return


def card_of(nvml: ModuleType, index: int, handle: object) -> Card:
    """Read one GPU."""
    memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    running = [*nvml.nvmlDeviceGetComputeRunningProcesses(handle), *nvml.nvmlDeviceGetGraphicsRunningProcesses(handle)]
    used = {each.pid: int(each.usedGpuMemory or 0) for each in running}  # a process may be in both lists
    holders = [Holder(process=process, name=_name(process), used_bytes=size) for process, size in used.items()]
    return Card(
        index=index,
        total_bytes=int(memory.total - memory.reserved),
        free_bytes=int(memory.free),
        holders=tuple(sorted(holders, key=lambda holder: (-holder.used_bytes, holder.process))),
    )


def _name(process: int) -> str:
    """Return a process's name, if it can be seen: NVML reports processes of other containers by number only."""
    try:
        return str(psutil.Process(process).name())
    except psutil.Error:
        return "a process not seen from here"

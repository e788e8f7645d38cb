"""The GPUs before a probe: which of them others use, how much is free, and who holds the rest, as the NVIDIA driver says."""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

import psutil

from planner.errors import InputError
from planner.memory.runtime import SLACK_THOUSANDTHS
from planner.units import format_gib

LOOK_SECONDS = 0.2
OTHER_DEVICES = "Without a GPU: --device cpu for a small model, --device simulated for any."
# A card of which others hold less than the allocator's own slack counts as free: the driver keeps a few MiB of an idle card, too.
UNNOTICED_THOUSANDTHS = SLACK_THOUSANDTHS


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """A process that holds memory of a card. `used_bytes` of 0: the driver does not say."""

    process: int
    name: str
    used_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """What the driver says of one card. `total_bytes` is without what the driver keeps for itself."""

    index: int
    total_bytes: int
    free_bytes: int
    holders: tuple[Holder, ...]

    @property
    def description(self) -> str:
        """`GPU 0 has 1.00 of 39.49 GiB free; python (process 12) holds 38.00 GiB`."""
        said = [
            f"{each.name} (process {each.process}) holds {format_gib(each.used_bytes) if each.used_bytes else 'some of it'}"
            for each in self.holders
        ]
        held = ", ".join(said) or "no process that can be seen from here holds the rest"
        return f"GPU {self.index} has {format_gib(self.free_bytes)} of {format_gib(self.total_bytes)} free; {held}"


def in_use(cards: tuple[Card, ...], free_bytes: int) -> tuple[Card, ...]:
    """The cards that others use: less is free than a probe was promised, which is never more than the card has."""
    return tuple(card for card in cards if card.free_bytes < min(free_bytes, card.total_bytes) - unnoticed_bytes(card))


def unnoticed_bytes(card: Card) -> int:
    return card.total_bytes * UNNOTICED_THOUSANDTHS // 1000


def wait_until_free(read: Callable[[], tuple[Card, ...]], free_bytes: int, seconds: float) -> tuple[Card, ...]:
    """The cards as soon as none is in use, at the latest after some seconds: the driver takes a while to clean up after a process that was killed."""
    deadline = time.monotonic() + seconds
    cards = read()
    while in_use(cards, free_bytes) and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
        cards = read()
    return cards


def visible_cards(count: int) -> tuple[Card, ...]:
    """The first cards that a worker would see, as they are now.

    Not yet run on a GPU. Parts of a card (MIG) are read where CUDA_VISIBLE_DEVICES names them.

    Raises:
        InputError: the driver does not answer.
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
            f"--device cuda needs an NVIDIA driver of 510 or newer, which does not answer here ({error}). {OTHER_DEVICES}"
        ) from error


def visible_handles(nvml: ModuleType, listed: str | None) -> Iterator[object]:
    """NVML's handles of the devices that CUDA would show, in its order: indices or identifiers, up to the first that is neither.

    Source: CUDA C++ Programming Guide, "CUDA Environment Variables" (CUDA_VISIBLE_DEVICES); indices count as CUDA_DEVICE_ORDER=PCI_BUS_ID does.
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
    memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    running = [*nvml.nvmlDeviceGetComputeRunningProcesses(handle), *nvml.nvmlDeviceGetGraphicsRunningProcesses(handle)]
    used = {each.pid: int(each.usedGpuMemory or 0) for each in running}  # a process that computes and draws is in both
    holders = [Holder(process=process, name=_name(process), used_bytes=size) for process, size in used.items()]
    return Card(
        index=index,
        total_bytes=int(memory.total - memory.reserved),
        free_bytes=int(memory.free),
        holders=tuple(sorted(holders, key=lambda holder: (-holder.used_bytes, holder.process))),
    )


def _name(process: int) -> str:
    """Of another container's process there is only the number, which may be another's here."""
    try:
        return str(psutil.Process(process).name())
    except psutil.Error:
        return "a process not seen from here"

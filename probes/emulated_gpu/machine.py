"""The machine file: the emulated cards, and what each process holds on them. Its layout is driver/machine.h."""

import ctypes
import platform
from pathlib import Path

from msgspec import Struct

from planner.errors import InputError
from planner.gpus.cluster import Gpu
from planner.memory.communication import NCCL_BYTES
from planner.memory.runtime import context_bytes
from planner.units import MIB

VERSION = 1
MAX_CARDS, MAX_PROCESSES = 16, 256
KIB = 1024
# By compute capability: KiB of shared memory and threads of a multiprocessor.
# Source: CUDA C++ Programming Guide, "Compute Capabilities", table "Technical Specifications per Compute Capability".
MULTIPROCESSOR: dict[tuple[int, int], tuple[int, int]] = {
    (6, 0): (64, 2048),
    (7, 0): (96, 2048),
    (7, 5): (64, 1024),
    (8, 0): (164, 2048),
    (8, 6): (100, 1536),
    (9, 0): (228, 2048),
    (12, 0): (100, 1536),
}
# The cache between the multiprocessors and the memory: an A100's. Heuristics of kernels read it, no allocation does.
L2_BYTES = 40 * MIB


class _Card(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char * 96),
        ("total_bytes", ctypes.c_int64),
        ("context_bytes", ctypes.c_int64),
        ("communicator_bytes", ctypes.c_int64),
        ("l2_bytes", ctypes.c_int64),
        ("shared_bytes", ctypes.c_int64),
        ("flops", ctypes.c_double),
        ("bytes_per_second", ctypes.c_double),
        ("link_bytes_per_second", ctypes.c_double),
        ("host_bytes_per_second", ctypes.c_double),
        ("major", ctypes.c_int32),
        ("minor", ctypes.c_int32),
        ("multiprocessors", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    ]


class _Process(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_int32),
        ("unused", ctypes.c_int32),
        ("held", ctypes.c_int64 * MAX_CARDS),
        ("peak", ctypes.c_int64 * MAX_CARDS),
        ("pinned", ctypes.c_int64),
        ("kernels", ctypes.c_int64),
    ]


class _Machine(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_int64),
        ("cards", ctypes.c_int32),
        ("mirrored", ctypes.c_int32),
        ("pace", ctypes.c_double),
        ("card", _Card),
        ("elsewhere", ctypes.c_int64 * MAX_CARDS),
        ("lock", ctypes.c_int32),
        ("unused", ctypes.c_int32),
        ("processes", _Process * MAX_PROCESSES),
    ]


class Machine(Struct, frozen=True, kw_only=True):
    """An emulated machine.

    cards            GPUs of the kind `gpu`
    pace             factor on durations; 0: everything finishes at once
    one_of_many      only one process runs; its peers do not exist and are counted as holding the same memory
    elsewhere_bytes  memory of each card that is in use by others: what the cluster's GPU has not free
    """

    gpu: Gpu
    cards: int
    pace: float = 0.0
    one_of_many: bool = False

    @property
    def elsewhere_bytes(self) -> int:
        return self.gpu.total_bytes - self.gpu.free_bytes


class ProcessMemory(Struct, frozen=True, kw_only=True):
    """Memory and launches of kernels that the driver counted for one process, which may have ended; bytes by card."""

    process: int
    peak_bytes: tuple[int, ...]
    pinned_bytes: int
    kernels: int


def refuse_elsewhere() -> None:
    """Raise InputError if this machine is not Linux on x86-64, the only one that emulated GPUs run on."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise InputError(
            "An emulated GPU (--dry-run, --device emulated) needs Linux on x86-64. Elsewhere there are estimates, "
            "--device cpu for small models, and --device cuda where there are GPUs."
        )


def write_machine(machine: Machine, path: Path) -> None:
    """Write the file of a machine on which no process runs."""
    gpu = machine.gpu
    shared_kib, threads = MULTIPROCESSOR[max(known for known in MULTIPROCESSOR if known <= gpu.compute_capability)]
    card = _Card(
        name=f"NVIDIA {gpu.name}".encode()[:95],
        total_bytes=gpu.total_bytes,
        context_bytes=context_bytes(gpu),
        communicator_bytes=NCCL_BYTES["one node"],
        l2_bytes=L2_BYTES,
        shared_bytes=shared_kib * KIB,
        flops=gpu.bf16_flops,
        bytes_per_second=gpu.memory_bytes_per_second,
        link_bytes_per_second=gpu.nvlink_bytes_per_second or gpu.pcie_bytes_per_second,
        host_bytes_per_second=gpu.pcie_bytes_per_second,
        major=gpu.compute_capability[0],
        minor=gpu.compute_capability[1],
        multiprocessors=gpu.multiprocessors,
        threads=threads,
    )
    written = _Machine(
        version=VERSION, cards=machine.cards, mirrored=int(machine.one_of_many), pace=machine.pace, card=card
    )
    for index in range(machine.cards):
        written.elsewhere[index] = machine.elsewhere_bytes
    path.write_bytes(bytes(written))


def read_processes(path: Path) -> tuple[ProcessMemory, ...]:
    """Return what each process of a machine held at most, in the order in which they came."""
    machine = _Machine.from_buffer_copy(path.read_bytes())
    return tuple(
        ProcessMemory(
            process=abs(each.pid),
            peak_bytes=tuple(each.peak[: machine.cards]),
            pinned_bytes=each.pinned,
            kernels=each.kernels,
        )
        for each in machine.processes
        if each.pid
    )

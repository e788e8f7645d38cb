"""Out-of-memory messages of PyTorch, vLLM, NCCL and the kernel, and the figures in each."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from planner.diagnose.incident import Kind
from planner.units import GIB, KIB, MIB

UNITS = {"bytes": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB}
SIZE = r"(\d+(?:\.\d+)?) ?(bytes|KiB|MiB|GiB)"
GIBS = r"(-?\d+(?:\.\d+)?)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One error message. `pattern` finds it; the other fields are patterns of figures that it may contain, by name.

    Patterns of `sizes` match a number and its unit, those of `gibs` and `numbers` a number. In `numbers`, "gpu" is the
    GPU's index and "bytes" the size of the request.
    """

    kind: Kind
    pattern: str
    sizes: Mapping[str, str] = field(default_factory=dict)
    gibs: Mapping[str, str] = field(default_factory=dict)  # sizes that vLLM prints in GiB, without a unit to match
    numbers: Mapping[str, str] = field(default_factory=dict)


# Source: pytorch 2.13, c10/cuda/CUDACachingAllocator.cpp, `malloc`. Releases before 2.1 put the figures in brackets;
# 2.1 wrote "capacty".
GPU = Message(
    kind="gpu",
    pattern=r"(?:CUDA|HIP) out of memory\. ?Tried to allocate",
    sizes={
        "tried": rf"Tried to allocate {SIZE}",
        "total": rf"total capaci?ty of {SIZE}|{SIZE} total capacity",
        "free": rf"of which {SIZE} is free|allocated; {SIZE} free",
        "process": rf"this process has {SIZE} memory in use",
        "allocated": rf"allocated memory {SIZE} is allocated by PyTorch|{SIZE} already allocated",
        "unallocated": rf"and {SIZE} is reserved by PyTorch but unallocated",
        "reserved": rf"{SIZE} reserved in total by PyTorch",
        "graphs": rf"with {SIZE} allocated in private pools",
        "allowed": rf"{SIZE} allowed",
    },
    numbers={"gpu": r"GPU (\d+)"},
)
ROUNDING_BYTES = GIB // 50  # of three figures with two decimals of a GiB
OTHER_PROCESS = re.compile(rf"Process \d+ has {SIZE} memory in use")

# The messages of vLLM and NCCL are those of published logs (neither was installed here); the files are those that print
# them.
MESSAGES: tuple[Message, ...] = (
    GPU,
    # vllm 0.33, v1/worker/utils.py
    Message(
        kind="engine_start",
        pattern=r"Free memory on device .{0,60}on startup is less than desired GPU memory utilization",
        gibs={
            "free": rf"\({GIBS}/[\d.]+ GiB\) on startup",
            "total": rf"\([\d.]+/{GIBS} GiB\) on startup",
            "wanted": rf"utilization \([\d.]+, {GIBS} GiB\)",
        },
        numbers={"utilization": r"utilization \(([\d.]+),", "gpu": r"on device \w+:(\d+)"},
    ),
    # vllm 0.33, v1/core/kv_cache_planning.py; older releases wrote "models's" and the size in brackets
    Message(
        kind="engine_length",
        pattern=r"To serve at least one request with the model'?s'?s? max seq len",
        gibs={"needed": rf"{GIBS} GiB KV cache is needed", "available": rf"available KV cache memory \({GIBS} GiB\)"},
        numbers={"length": r"max seq len \((\d+)\)", "longest": r"estimated maximum model length is (\d+)"},
    ),
    Message(
        kind="engine_length",
        pattern=r"max seq len \(\d+\) is larger than the maximum number of tokens that can be stored in KV cache",
        numbers={"length": r"max seq len \((\d+)\)", "longest": r"stored in KV cache \((\d+)\)"},
    ),
    Message(kind="engine_cache", pattern=r"No available memory for the cache blocks"),
    # vllm 0.33, v1/worker/gpu_worker.py and device_allocator/cumem.py
    Message(kind="engine_profile", pattern=r"Error in memory profiling\. Initial free memory"),
    Message(kind="engine_pool", pattern=r"Expandable segments are not compatible with memory pool"),
    Message(kind="engine_wake", pattern=r"CUDA Error: out of memory at \S*cumem_allocator"),
    # nccl 2.28, src/include/alloc.h and checks.h
    Message(
        kind="communication",
        pattern=r"Failed to CUDA calloc(?: async)? \d+ bytes|Cuda failure (?:2 )?'out of memory'",
        numbers={"bytes": r"calloc(?: async)? (\d+) bytes"},
    ),
    Message(
        kind="library",
        pattern=r"CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|CUDA error: out of memory|"
        r"cudaErrorMemoryAllocation",
    ),
    # pytorch 2.13, c10/core/impl/alloc_cpu.cpp; python's OSError; torch/utils/data/_utils/signal_handling.py;
    # torch/distributed/elastic/multiprocessing/api.py
    Message(
        kind="host",
        pattern=r"DefaultCPUAllocator: (?:can't|not enough memory)",
        numbers={"bytes": r"tried to allocate (\d+) bytes"},
    ),
    Message(
        kind="host",
        pattern=r"DataLoader worker .{0,40}is killed by signal: Killed|Cannot allocate memory|oom-kill|"
        r"Out of memory: Killed process",
    ),
    # also deepspeed 0.19.8, launcher/launch.py ("exits with return code = -9"); ray 2.5x; SLURM's slurmstepd; docker
    Message(
        kind="host",
        pattern=r"exitcode *: ?-9\b|Signal 9 \(SIGKILL\)|died with <Signals\.SIGKILL: 9>|"
        r"exits with return code = -9\b|exited with code 137\b|exit code:? 137\b|oom_kill event|OOMKilled|"
        r"were killed due to the node running low on memory",
    ),
)


def figures(message: Message, text: str) -> tuple[dict[str, int], dict[str, float]]:
    """The sizes in bytes and the other numbers that a message contains, by name.

    Adds two derived sizes: "unallocated" = reserved - allocated if the message has both, and "others", the memory of
    other processes on the GPU.
    """
    sizes = {name: found for name, pattern in message.sizes.items() if (found := _size(pattern, text)) is not None}
    sizes |= {
        name: round(float(match[1]) * GIB)
        for name, pattern in message.gibs.items()
        if (match := re.search(pattern, text))
    }
    numbers = {
        name: float(match[1]) for name, pattern in message.numbers.items() if (match := re.search(pattern, text))
    }
    if "reserved" in sizes and "allocated" in sizes:
        sizes.setdefault("unallocated", max(sizes["reserved"] - sizes["allocated"], 0))
    if message is GPU and (listed := [_bytes(*found) for found in OTHER_PROCESS.findall(text)]):
        if "process" not in sizes and (own := _own_process(listed, sizes)) is not None:
            listed.remove(own)
            sizes["process"] = own
        if listed:
            sizes["others"] = sum(listed)
            numbers["other_processes"] = len(listed)
    return sizes, numbers


def _own_process(listed: Sequence[int], sizes: Mapping[str, int]) -> int | None:
    """The memory of this process among the listed ones; None if it is none of them.

    In a container process numbers differ from the driver's, so that PyTorch lists its own process with the others
    (pytorch 2.13, c10/cuda/CUDACachingAllocator.cpp, `reportProcessMemoryInfo`). It holds what PyTorch reserved, and a
    CUDA context on top: the smallest that does.
    """
    if "allocated" not in sizes:
        return None
    reserved = sizes["allocated"] + sizes.get("unallocated", 0)
    return min((size for size in listed if size >= reserved - ROUNDING_BYTES), default=None)


def _size(pattern: str, text: str) -> int | None:
    """The bytes of the first size that matches; None if none does."""
    match = re.search(pattern, text)
    if match is None:
        return None
    number, unit = (group for group in match.groups() if group is not None)
    return _bytes(number, unit)


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * UNITS[unit])

"""The host while a worker runs: the worker's processes, the memory that they use, and the memory that is left."""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

from planner.gpus.host_memory import GROUP_LIMITS, control_groups

LINUX = sys.platform == "linux"
# By version of the control group: the file with its usage, and the line of `memory.stat` with the bytes that the kernel
# can reclaim (inactive pages of files). Source: linux, Documentation/admin-guide/cgroup-v2.rst and
# cgroup-v1/memory.rst. The kubelet computes a working set in the same way.
GROUP_USAGE = {
    2: ("memory.current", "inactive_file"),
    1: ("memory.usage_in_bytes", "total_inactive_file"),
}


def family(process: int) -> list[psutil.Process]:
    """Return a process and all its descendants that are alive."""
    try:
        parent = psutil.Process(process)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def with_environment(name: str, value: str) -> list[psutil.Process]:
    """Return this user's processes that have the environment variable with this value, whatever their parent is."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(name) == value:
                found.append(process)
        except (psutil.Error, OSError):  # another user's, or ended meanwhile
            continue
    return found


def held_bytes(processes: Iterable[psutil.Process]) -> int:
    """Return the bytes of host memory that only these processes use: resident memory without shared and file pages."""
    total = 0
    for process in processes:
        try:
            memory = process.memory_info()
        except psutil.Error:
            continue
        total += max(memory.rss - memory.shared, 0) if LINUX else memory.rss
    return total


def available_bytes(root: Path = Path("/")) -> int:
    """Return the bytes of host memory available without swapping, and within the limits of the control groups."""
    left = (size for folder, version in control_groups(root) for size in _available_to_group(folder, version))
    return min([int(psutil.virtual_memory().available), *left])


def kernel_kills(root: Path = Path("/")) -> int:
    """Return how many processes the kernel has killed for lack of memory since the host started; 0 if unknown.

    Source: linux, mm/oom_kill.c (`count_vm_event(OOM_KILL)`), for the host as well as for a control group.
    """
    return _number_after("oom_kill", root / "proc/vmstat")


def _available_to_group(folder: Path, version: int) -> Iterator[int]:
    """Yield the bytes left below one control group's limit; nothing if it has no limit."""
    limit, (held, reclaimable) = GROUP_LIMITS[version], GROUP_USAGE[version]
    try:
        limit_text, held_text = ((folder / name).read_text(encoding="ascii").strip() for name in (limit, held))
    except OSError:  # the group is not mounted here, or has no limit of its own
        return
    if limit_text != "max":
        yield max(int(limit_text) - int(held_text) + _number_after(reclaimable, folder / "memory.stat"), 0)


def _number_after(name: str, path: Path) -> int:
    """Return the number after a word at the beginning of a file's line; 0 if there is no such line or file."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(number) for word, _, number in (line.partition(" ") for line in lines) if word == name), 0)

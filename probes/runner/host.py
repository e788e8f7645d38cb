"""The host while a worker runs: which processes are the worker's, what memory they hold, and how much is left."""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

LINUX = sys.platform == "linux"
# What a control group may hold, what it holds, and the line of `memory.stat` that it can give back (pages of files, not used lately), by its version.
# Source: linux, Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst. The kubelet counts a working set in the same way.
GROUP_FILES = {
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
GROUP_FOLDERS = {2: "sys/fs/cgroup", 1: "sys/fs/cgroup/memory"}


def family(process: int) -> list[psutil.Process]:
    """A process and all its descendants, as far as they still live."""
    try:
        parent = psutil.Process(process)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def with_environment(name: str, value: str) -> list[psutil.Process]:
    """The processes of this user that were started with that in their environment, whoever their parent is now."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(name) == value:
                found.append(process)
        except (psutil.Error, OSError):  # another user's, or ended meanwhile
            continue
    return found


def held_bytes(processes: Iterable[psutil.Process]) -> int:
    """Bytes of main memory that would be free without these processes: what each holds alone, not what files and other processes back."""
    total = 0
    for process in processes:
        try:
            memory = process.memory_info()
        except psutil.Error:
            continue
        total += max(memory.rss - memory.shared, 0) if LINUX else memory.rss
    return total


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes that the host can still give without swapping; inside a container at most what is left to its control group."""
    return min([int(psutil.virtual_memory().available), *_left_to_groups(root)])


def kernel_kills(root: Path = Path("/")) -> int:
    """How often the kernel has ended a process for want of memory, on this host and since it started; 0 where it does not say.

    Source: linux, mm/oom_kill.c (`count_vm_event(OOM_KILL)`), for the host as well as for a control group.
    """
    return _number_after("oom_kill", root / "proc/vmstat")


def _left_to_groups(root: Path) -> Iterator[int]:
    """What is left to each control group that holds this process, the outermost first."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        version = 1 if controllers else 2
        folder = root / GROUP_FOLDERS[version]
        yield from _left_to_group(folder, version)
        for part in Path(path).parts[1:]:
            folder /= part
            yield from _left_to_group(folder, version)


def _left_to_group(folder: Path, version: int) -> Iterator[int]:
    limit, held, reclaimable = GROUP_FILES[version]
    try:
        limit_text, held_text = ((folder / name).read_text(encoding="ascii").strip() for name in (limit, held))
    except OSError:  # the group is not mounted here, or has no limit of its own
        return
    if limit_text != "max":
        yield max(int(limit_text) - int(held_text) + _number_after(reclaimable, folder / "memory.stat"), 0)


def _number_after(name: str, path: Path) -> int:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(number) for word, _, number in (line.partition(" ") for line in lines) if word == name), 0)

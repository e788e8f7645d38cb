"""Host memory of a node: what this machine has, or what nodes with a GPU usually have (`data/gpus.jsonl`)."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from planner.errors import InputError, UnknownName
from planner.gpus.catalogue import peers_of, row_of
from planner.gpus.cluster import SAFE_SHARE, Cluster, HostMemory
from planner.units import GIB, format_gib, parse_bytes

# Accepted sizes: Python and torch hardly start in less; the largest cloud nodes have 32 TiB (AWS u7inh-32tb.480xlarge).
SMALLEST_BYTES, LARGEST_BYTES = GIB, 64 * 1024 * GIB

# By version of the control group: the folder of its files, and the file with its limit. Source: linux,
# Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
GROUP_FOLDERS = {2: "sys/fs/cgroup", 1: "sys/fs/cgroup/memory"}
GROUP_LIMITS = {2: "memory.max", 1: "memory.limit_in_bytes"}


def with_usual_host(cluster: Cluster) -> Cluster:
    """Return the cluster with the host memory of a usual node; unchanged if its host memory was given or read.

    A GPU that the catalogue lacks gets the least of those that are at least as large.
    """
    if cluster.host.origin in ("given", "local"):
        return cluster
    try:
        rows = [row_of(cluster.gpu.name)]
    except UnknownName:
        rows = peers_of(cluster.gpu.total_bytes)
    usual = {row.host_bytes(cluster.gpus_per_node): row.host_source for row in reversed(rows)}
    least = min(usual)
    return replace(cluster, host=HostMemory(total_bytes=least, origin="assumed", source=usual[least]))


def with_given_host(cluster: Cluster, text: str) -> Cluster:
    """Return the cluster with the host memory of the option --host-memory.

    Raises:
        InputError: the text is no size, or it is not between 1 GiB and 64 TiB.
    """
    total_bytes = parse_bytes(text)
    if not SMALLEST_BYTES <= total_bytes <= LARGEST_BYTES:
        number = text.strip()
        unit = f" Did you mean {number}GiB?" if number.isdecimal() and 0 < total_bytes * GIB <= LARGEST_BYTES else ""
        raise InputError(
            f"--host-memory {text} is not between {format_gib(SMALLEST_BYTES, 0)} and "
            f"{format_gib(LARGEST_BYTES, 0)}.{unit}"
        )
    return replace(cluster, host=HostMemory(total_bytes=total_bytes, origin="given", source="--host-memory"))


def size_with_room(peak_bytes: int) -> str:
    """Return the host memory in whole GiB of which a peak leaves enough. Example: `"31GiB"` for 27.9 GiB."""
    return f"{math.ceil(peak_bytes / SAFE_SHARE / GIB)}GiB"


def with_local_host(cluster: Cluster) -> Cluster:
    """Return the cluster with this machine's host memory; unchanged where the system does not tell it (Windows)."""
    total_bytes = local_bytes()
    if not total_bytes:
        return cluster
    return replace(cluster, host=HostMemory(total_bytes=total_bytes, origin="local", source="this machine"))


def local_bytes(root: Path = Path("/")) -> int:
    """Return this machine's host memory in bytes, within the limits of the control groups; 0 if it is unknown."""
    try:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0
    return min([physical, *_group_limits(root)])


def control_groups(root: Path = Path("/")) -> Iterator[tuple[Path, int]]:
    """Yield the folder and version of each memory control group of this process, the outermost group first."""
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
        yield folder, version
        for part in Path(path).parts[1:]:
            folder /= part
            yield folder, version


def _group_limits(root: Path) -> Iterator[int]:
    for folder, version in control_groups(root):
        try:
            text = (folder / GROUP_LIMITS[version]).read_text(encoding="ascii").strip()
        except OSError:  # the group is not mounted here, or has no limit of its own
            continue
        if text != "max":
            yield int(text)

"""Parse the option --gpus into a `Cluster`: "2xA100-40G", "4x8xH100", "1x24GiB" or "local"."""

import re

from msgspec.structs import replace

from planner.errors import InputError, shortened
from planner.gpus.catalogue import SMALLEST_BYTES, bare_gpu, is_gpu_name, load_gpu, row_of
from planner.gpus.cluster import Cluster, Gpu
from planner.gpus.hf_jobs import HF_JOBS
from planner.gpus.host_memory import with_given_host, with_usual_host
from planner.units import format_gib, parse_bytes

# The NVIDIA DGX-2 has 16 GPUs, the most in one node. More GPUs need several nodes, whose links are slower.
MOST_GPUS_PER_NODE = 16
MOST_NODES = 4096  # Llama 3 was trained on 2,000 nodes of 8 (arXiv 2407.21783, section 3.3.1)
MOST_GIGABITS, GIGABIT_BYTES = 100_000, 125e6  # 10^9 bits of 8 to a byte
LOCAL = "local"
# A count behind the name: "H100:8" as in SkyPilot and Slurm, "RTX 4090 x2", "H100x8".
COUNTED_LAST = r"(?:gpu:)?(.*?[^\s:])(?:\s*:|\s+[xX*]|(?<=\d)[xX*])\s*(\d{1,20})"


def parse_cluster(
    text: str, free_memory: str | None = None, host_memory: str | None = None, network: str | None = None
) -> Cluster:
    """The cluster that `--gpus` names.

    Args:
        text: `"A100-40G"`, `"2xA100-40G"`, `"A100-40G:2"`, `"4x8xH100"` (nodes x GPUs), `"1x24GiB"` (a bare capacity)
            or `"local"`.
        free_memory: the memory that may be used on each GPU, such as `"30GiB"`; None: all of it (for `local`: all that
            is free now).
        host_memory: the host memory of a node, such as `"256GiB"`; None: what nodes with that GPU usually have (for
            `local`: what this machine has).
        network: the network of a node, all its interfaces together, such as `"400Gb"` (a second); None: 400 Gb.

    Raises:
        InputError: the text is no cluster, `free_memory` is not between 1 GiB and the GPU's memory, `host_memory` is
            not between 1 GiB and 64 TiB, or `network` is no speed.
        UnknownName: no GPU of the catalogue has that name.
    """
    given = {"gpus": text, "free_memory": free_memory, "host_memory": host_memory, "network": network}
    for name, value in given.items():
        if not isinstance(value, str) and (value is not None or name == "gpus"):
            example = {"gpus": "2xA100-40G", "network": "400Gb"}.get(name, "64GiB")
            raise InputError(f"{name} must be text, such as '{example}', not {shortened(value)}.")
    if text.strip().lower() == LOCAL:
        from planner.gpus.local import local_cluster  # lazy import: it queries the driver

        cluster = local_cluster()
    else:
        nodes, per_node, name = _counts_and_name(text)
        _refuse_several_slices(text, nodes * per_node, name)
        cluster = Cluster(gpu=_gpu_or_capacity(name), nodes=nodes, gpus_per_node=per_node)
    if host_memory is None:
        cluster = with_usual_host(cluster)
    else:
        cluster = _without_host_share(with_given_host(cluster, host_memory))
    if free_memory is not None:
        cluster = replace(cluster, gpu=_partly_used(cluster.gpu, free_memory))
    if network is not None:
        cluster = replace(cluster, network_bytes_per_second=_network_bytes_per_second(network))
    return cluster


def _counts_and_name(text: str) -> tuple[int, int, str]:
    """Nodes, GPUs per node, and the name or capacity of the GPU in the text of --gpus.

    Raises:
        InputError: there is no name, or a count is out of range.
    """
    match = re.fullmatch(r"\s*(?:(-?\d{1,20})\s*[xX*]\s*)?(?:(-?\d{1,20})\s*[xX*]\s*)?(\S.*?)\s*", text)
    if match is None or re.fullmatch(r"\d+\s*[xX*]", text.strip()):
        raise InputError(
            f"--gpus {shortened(text)!r} names no GPU. Write it as 2xA100-40G, 4x8xH100 (nodes x GPUs), "
            "1x24GiB or local."
        )
    if "+" in text or "," in text or text.strip().lower().startswith(HF_JOBS):
        raise InputError(
            f"--gpus {shortened(text)!r} is not one cluster of one kind of card. Write it as 2xA100-40G. `plan` "
            f"alone (compare, over HTTP and for agents) takes several, as in --gpus 4xH100,8xL40S or --gpus {HF_JOBS}."
        )
    first, second, name = match.groups()
    counted_last = re.fullmatch(COUNTED_LAST, name)
    if first is None and counted_last is not None:
        name, first = counted_last.groups()
    elif second is None and first is not None and name.isdecimal() and is_gpu_name(first):
        name, first = first, name  # 4090x2
    nodes, per_node = (1, int(first or 1)) if second is None else (int(first), int(second))
    if nodes < 1 or per_node < 1:
        raise InputError(f"--gpus {shortened(text)!r} has {nodes * per_node} GPUs; at least one is needed.")
    if per_node > MOST_GPUS_PER_NODE:
        example = f"{min(-(-per_node * nodes // 8), MOST_NODES)}x8x{shortened(name)}"
        raise InputError(
            f"--gpus {shortened(text)!r} puts {per_node} GPUs in one node. Write nodes x GPUs, such as {example}."
        )
    if nodes > MOST_NODES:
        raise InputError(
            f"--gpus {shortened(text)!r} has more than {MOST_NODES} nodes. Check the order: nodes x GPUs, "
            f"such as 4x8x{shortened(name)}."
        )
    return nodes, per_node, name


def _refuse_several_slices(text: str, count: int, name: str) -> None:
    """Raise InputError if the text names several MIG slices.

    NCCL refuses two ranks on one card ("Duplicate GPU detected"), and there is no peer access between slices. Source:
    nccl, src/init.cc, `initTransportsRank`; NVIDIA's MIG user guide, application considerations.
    """
    if count > 1 and is_gpu_name(name) and row_of(name).part == "slice":
        raise InputError(
            f"--gpus {shortened(text)!r} has {count} MIG slices, between which NCCL does not communicate. "
            f"Write 1x{shortened(name)}."
        )


def _without_host_share(cluster: Cluster) -> Cluster:
    """Return the cluster with the memory that --host-memory leaves to the GPU, if CPU and GPU share one memory.

    Raises:
        InputError: it leaves less than 1 GiB.
    """
    gpu = cluster.gpu
    if not is_gpu_name(gpu.name) or row_of(gpu.name).part != "unified":
        return cluster
    left_bytes = gpu.total_bytes - cluster.host.total_bytes
    if left_bytes < SMALLEST_BYTES:
        raise InputError(
            f"--host-memory {format_gib(cluster.host.total_bytes)} leaves no memory to the GPU of {gpu.name}, which "
            f"shares {format_gib(gpu.total_bytes)} with the CPU. Give at most "
            f"{format_gib(gpu.total_bytes - SMALLEST_BYTES, 0)}."
        )
    return replace(cluster, gpu=replace(gpu, free_bytes=left_bytes))


def _gpu_or_capacity(name: str) -> Gpu:
    """The GPU of that name in the catalogue, or a GPU of that capacity. GB are 10**9 bytes, as vendors sell them.

    Raises:
        InputError: a capacity without unit, or an impossible one.
        UnknownName: no GPU of the catalogue has that name.
    """
    gigabytes = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?)\s*[gG][bB]", name)
    if gigabytes:
        return bare_gpu(int(float(gigabytes[1]) * 10**9), f"{gigabytes[1]}GB")
    if re.fullmatch(r"\d+(\.\d+)?\s*[a-zA-Z]+", name) and name.lower().rstrip("b").endswith(("g", "gi", "m", "mi")):
        return bare_gpu(parse_bytes(name))
    if is_gpu_name(name):
        return load_gpu(name)
    if re.fullmatch(r"\d+(\.\d+)?", name):
        raise InputError(f"--gpus {shortened(name)!r} is no card. A capacity needs its unit: {shortened(name)}GiB.")
    return load_gpu(name)


def _network_bytes_per_second(text: str) -> float:
    """Bytes per second of a network's speed in Gb/s, as vendors print it: `400Gb`, or `8x400Gb` for eight interfaces.

    Raises:
        InputError: the text is no such speed, or it is not between 1 Gb/s and 100,000 Gb/s.
    """
    match = re.fullmatch(r"\s*(?:(\d{1,3})\s*[xX*]\s*)?(\d{1,6}(?:\.\d{1,3})?)\s*[gG](?:b|bit|bps|b/s|bit/s)\s*", text)
    gigabits = float(match[2]) * int(match[1] or 1) if match else 0.0
    if not 1 <= gigabits <= MOST_GIGABITS:
        raise InputError(
            f"--network {shortened(text)!r} is no speed of a node. Write it in gigabits a second: 400Gb, 8x400Gb."
        )
    return gigabits * GIGABIT_BYTES


def _partly_used(gpu: Gpu, free_memory: str) -> Gpu:
    """The GPU with `free_bytes` from the option --free-memory.

    Raises:
        InputError: it is not between 1 GiB and the GPU's memory.
    """
    free_bytes = parse_bytes(free_memory)
    if not SMALLEST_BYTES <= free_bytes <= gpu.total_bytes:
        unit = (
            f" Did you mean {free_memory.strip()}GiB?"
            if free_memory.strip().isdecimal() and 0 < free_bytes * SMALLEST_BYTES <= gpu.total_bytes
            else ""
        )
        raise InputError(
            f"--free-memory {free_memory} is not between 1 GiB and the {format_gib(gpu.total_bytes)} of "
            f"{gpu.name}.{unit}"
        )
    return replace(gpu, free_bytes=free_bytes)

"""The machines that launch files are written for: facts that a script needs beside the candidate."""

from msgspec import Struct

from planner.gpus.catalogue import bare_gpu, gpu_rows, is_gpu_name, load_gpu, row_of
from planner.gpus.cluster import USUAL_NETWORK_BYTES_PER_SECOND, Cluster
from planner.units import GIB, KIB, MIB, format_gib

# Card -> its name in SkyPilot. Source: skypilot, docs/source/compute/show-gpus-all.txt.
SKYPILOT: dict[str, str] = {
    "A10": "A10", "A100-40G": "A100", "A100-80G": "A100-80GB", "A10G": "A10G", "A40": "A40", "A800-80G": "A800",
    "B200": "B200", "GH200-96G": "GH200", "H100-NVL": "H100-NVL", "H100-PCIe": "H100", "H100-SXM": "H100",
    "H200": "H200",
    "L4": "L4", "L40": "L40", "L40S": "L40S", "P100": "P100", "P4": "P4", "RTX-3090": "RTX3090",
    "RTX-4000-Ada": "RTX4000-Ada", "RTX-4070": "RTX4070", "RTX-4090": "RTX4090", "RTX-5080": "RTX5080",
    "RTX-5090": "RTX5090", "RTX-6000-Ada": "RTX6000-Ada", "RTX-A4000": "RTXA4000", "RTX-A4500": "RTXA4500",
    "RTX-A5000": "RTXA5000", "RTX-A6000": "RTXA6000", "T4": "T4", "T4G": "T4g", "V100-16G": "V100",
    "V100-32G": "V100-32GB",
}  # fmt: skip

# What requirements.txt installs runs on no older card: the wheels of torch 2.13 on PyPI are of CUDA 13, which begins
# with Turing. Sources: pytorch/pytorch#172352 (the table of architectures) and #177975 (CUDA 13.0 on PyPI since 2.11).
LEAST_CAPABILITY = (7, 5)


class Site(Struct, frozen=True, kw_only=True):
    """The GPUs of a plan, and what it needs: of a card, of a node's host memory and of its disk (0: unknown).

    `cards`: those on which it fits as it is, the smallest first. `epoch_seconds`: of a pass over the data.
    """

    cluster: Cluster
    host_bytes: int = 0
    gpu_bytes: int = 0
    disk_bytes: int = 0
    epoch_seconds: float = 0.0
    cards: tuple[str, ...] = ()

    @property
    def flags(self) -> list[str]:
        """The options of `plan` that mean these machines."""
        cluster, gpu = self.cluster, self.cluster.gpu
        nodes = f"{cluster.nodes}x" if cluster.nodes > 1 else ""
        card = row_of(gpu.name).gpu if is_gpu_name(gpu.name) else bare_gpu(gpu.total_bytes, gpu.name)
        name = gpu.name if is_gpu_name(gpu.name) or gpu.name.endswith("GB") else _capacity(gpu.total_bytes)
        words = ["--gpus", f"{nodes}{cluster.rented_per_node}x{name}"]
        if gpu.free_bytes != card.free_bytes:
            words += ["--free-memory", _size(min(gpu.free_bytes, card.total_bytes))]
        if cluster.host.origin in ("given", "local"):
            words += ["--host-memory", _size(cluster.host.total_bytes)]
        if cluster.network_bytes_per_second != USUAL_NETWORK_BYTES_PER_SECOND:
            words += ["--network", f"{cluster.network_bytes_per_second / 125e6:g}Gb"]
        return words

    @property
    def skypilot_cards(self) -> tuple[str, ...]:
        """SkyPilot's names of the cards that fit, or of the plan's card; empty: it has none."""
        cards = self.cards or (self.cluster.gpu.name,)
        return tuple(dict.fromkeys(SKYPILOT[card] for card in cards if card in SKYPILOT))

    @property
    def card_gigabytes(self) -> int:
        """The size that the least card is sold as: every listed card of that size or more has the memory needed."""
        rows = [row for row in gpu_rows() if row.part == "card"]
        small = [row.marketing_gb for row in rows if row.gpu.total_bytes < self.gpu_bytes]
        return min(row.marketing_gb for row in rows if row.marketing_gb > max(small, default=0))

    @property
    def least_capability(self) -> tuple[int, int]:
        """The least compute capability of the cards that fit, or of the plan's card, on which torch runs."""
        cards = [load_gpu(card) for card in self.cards] or [self.cluster.gpu]
        return max(LEAST_CAPABILITY, min(card.compute_capability for card in cards))

    @property
    def host_need(self) -> str:
        """The host memory that a node needs, in words."""
        return format_gib(self.host_bytes, 0)


def _capacity(total_bytes: int) -> str:
    """The memory of a card that the catalogue lacks, as `planner.gpus.parse` reads it without loss."""
    return _size(total_bytes) if total_bytes % MIB == 0 else f"{total_bytes / MIB!r}MiB"


def _size(size_bytes: int) -> str:
    """A size as `planner.units.parse_bytes` reads it without loss."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size_bytes % unit == 0:
            return f"{size_bytes // unit}{name}"
    return str(size_bytes)

"""The catalogue of GPUs by name, from `data/gpus.jsonl`."""

import re
from functools import lru_cache
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from planner.errors import InputError, UnknownName
from planner.gpus.cluster import Gpu
from planner.units import GIB, format_gib

# A bare capacity takes its speeds from GPUs that report at least this share of it: a GPU sold as "24 GB" reports 22.2
# to 23.7 GiB.
SAME_CLASS_SHARE = 0.9

# Accepted memory of a GPU: with less than 1 GiB CUDA hardly starts; no GPU has more than 4 TiB.
SMALLEST_BYTES, LARGEST_BYTES = 2**30, 2**42

CATALOGUE = Path(__file__).resolve().parents[1] / "data" / "gpus.jsonl"

# Prefixes of names that people leave out: 4090, A5500, 1080-Ti.
FAMILIES = ("", "rtx", "gtx", "quadrortx")

# Accelerators that the formulas do not cover, by normalised name (`_key`). Source: the vendors' product names.
OTHER_VENDORS = {
    "AMD": re.compile(r"amd|(instinct)?mi\d{2,3}[ax]?|instinct|radeon|rx\d{3}|w[67]\d00"),
    "Intel": re.compile(r"intel|(habana)?gaudi|habana|arc(pro)?[ab]\d|(datacenter)?max1[15]\d0|pontevecchio"),
    "Google": re.compile(r"google|tpu"),
    "AWS": re.compile(r"aws|trainium|inferentia|trn\d|inf\d"),
    "Huawei": re.compile(r"huawei|ascend|910[abc]"),
    "Apple": re.compile(r"apple|mps|m[1-9](pro|max|ultra)?$"),
}

HINT = "`plan gpus` lists the cards; a bare capacity works too, such as 1x24GiB."


class GpuRow(Struct, frozen=True, kw_only=True):
    """One GPU of the catalogue, a line of its file.

    `reported`: a log shows the memory, of which the least seen counts, since a plan must fit the smallest card; else
    `derived` says how it was derived. `host_gib`: the host memory of a usual node as pairs (GPUs of the node, GiB for
    each of them), smallest first; a pair holds from that number of GPUs on. `host_source` names instances that have so
    much, or says what was assumed. `part`: a whole card, a MIG slice of one, or a GPU that shares one memory with the
    CPU, of which it can use what `host_gib` leaves.
    """

    gpu: Gpu
    aliases: tuple[str, ...]
    marketing_gb: int
    reported: bool
    derived: str = ""
    note: str = ""
    host_gib: tuple[tuple[int, int], ...]
    host_source: str
    part: Literal["card", "slice", "unified"] = "card"

    def host_bytes(self, gpus: int) -> int:
        """Host memory of a usual node with that many of these GPUs."""
        return gpus * GIB * max(gib for least, gib in self.host_gib if least <= gpus)


@lru_cache(maxsize=1)
def gpu_rows() -> tuple[GpuRow, ...]:
    """Every GPU of the catalogue, in the order of the file."""
    decoder = msgspec.json.Decoder(GpuRow)
    return tuple(decoder.decode_lines(CATALOGUE.read_bytes()))


def load_gpu(name: str) -> Gpu:
    """The GPU of that name in the catalogue; see `row_of`."""
    return row_of(name).gpu


def row_of(name: str) -> GpuRow:
    """The row of the GPU of that name in the catalogue.

    Ignores case, "NVIDIA", "GeForce", "Tesla", dashes, underscores and blanks; `-40G` equals `-40GB`; RTX, GTX and
    Quadro RTX may be left out. A GPU that exists in one size only is also found with its size: L40S-48G.

    Raises:
        UnknownName: no GPU has that name; the message lists the nearest names, or says that its vendor is not covered.
    """
    row = _row_or_none(name)
    if row is not None:
        return row
    for vendor, names in OTHER_VENDORS.items():
        if names.match(_key(name)):
            raise UnknownName("GPU", name, (), f"{vendor} is not covered: the formulas are CUDA's. {HINT}")
    raise UnknownName("GPU", name, _nearest_first(name), HINT)


def is_gpu_name(name: str) -> bool:
    """True if a GPU of the catalogue has that name."""
    return _row_or_none(name) is not None


def is_whole_card(name: str) -> bool:
    """False for a GPU that is never one of several in a node: a MIG slice, or a GPU that shares the CPU's memory."""
    row = _row_or_none(name)
    return row is None or row.part == "card"


def _row_or_none(name: str) -> GpuRow | None:
    """The row that `row_of` finds; None: no GPU has that name."""
    known = _by_key()
    for key in (family + _key(name) for family in FAMILIES):
        if key in known:
            return known[key]
        for row in known.values():
            if key.endswith(f"{row.marketing_gb}g") and known.get(key.removesuffix(f"{row.marketing_gb}g")) is row:
                return row
    return None


def _nearest_first(name: str) -> list[str]:
    """The names to propose for an unknown one: those that begin with it ("A100": 40G or 80G?), or else all names."""
    names = [row.gpu.name for row in gpu_rows()]
    key = _key(name)
    continued = [
        known
        for known in names
        if key and (_key(known).startswith(key) or _key(known).removeprefix("rtx").startswith(key))
    ]
    return [
        name + known[len(name) :] if known.lower().startswith(name.lower()) else known for known in continued
    ] or names


@lru_cache(maxsize=1)
def _by_key() -> dict[str, GpuRow]:
    """Rows by normalised name and alias; names have priority over aliases, earlier rows over later ones."""
    by_key = {_key(row.gpu.name): row for row in gpu_rows()}
    for row in gpu_rows():
        for alias in row.aliases:
            by_key.setdefault(_key(alias), row)
    return by_key


def _key(name: str) -> str:
    """The normalised name: "NVIDIA A100-SXM4-40GB" gives "a100sxm440g"."""
    words = re.sub(r"[-_\s]+", " ", name.lower())
    words = re.sub(r"\b(nvidia|geforce|tesla)\b", "", words)
    return re.sub(r"(\d)gb", r"\1g", words).replace(" ", "")


def bare_gpu(capacity_bytes: int, name: str = "") -> Gpu:
    """A GPU of which only the memory is known, with the slowest speeds of listed bf16 cards of that size or more.

    `name`: as it was given, such as "24GB"; empty: its size in GiB.

    Raises:
        InputError: the capacity is less than 1 GiB or more than 4 TiB.
    """
    if not SMALLEST_BYTES <= capacity_bytes <= LARGEST_BYTES:
        raise InputError(
            f"A card of {format_gib(capacity_bytes)} does not exist. Give from {format_gib(SMALLEST_BYTES, 0)} to "
            f"{format_gib(LARGEST_BYTES, 0)}."
        )
    peers = [row.gpu for row in peers_of(capacity_bytes)]
    slowest = min(peers, key=lambda gpu: gpu.bf16_flops)
    return Gpu(
        name=name or format_gib(capacity_bytes, 0 if capacity_bytes % 2**30 == 0 else 2).replace(" ", ""),
        total_bytes=capacity_bytes,
        free_bytes=capacity_bytes,
        bf16_flops=slowest.bf16_flops,
        memory_bytes_per_second=min(gpu.memory_bytes_per_second for gpu in peers),
        nvlink_bytes_per_second=0.0,
        pcie_bytes_per_second=min(gpu.pcie_bytes_per_second for gpu in peers),
        compute_capability=min(gpu.compute_capability for gpu in peers),
        multiprocessors=min(gpu.multiprocessors for gpu in peers),
        source=(
            "capacity as given; speeds assumed: the slowest of the catalogue's bf16 cards of that size or more "
            f"(flops of {slowest.name}), no NVLink"
        ),
    )


def peers_of(capacity_bytes: int) -> list[GpuRow]:
    """The listed whole bf16 cards of that size or more; all of them if none is so large."""
    bf16 = [row for row in gpu_rows() if row.gpu.supports_bf16 and row.part == "card"]
    return [row for row in bf16 if row.gpu.total_bytes >= SAME_CLASS_SHARE * capacity_bytes] or bf16

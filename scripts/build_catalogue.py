"""Make `planner/data/models.jsonl` and `planner/data/gpus.jsonl` from files of collected facts.

    python scripts/build_catalogue.py [FACTS_FOLDER]      (default: ../shared/data)

The facts are `models.jsonl` (one model a line), `gpus.jsonl` (one card a line) and, beside this script,
`data_sheets.jsonl`: further cards in the same form, from NVIDIA's data sheets; a source that ends with "recalled" was
not opened again. `more_models.jsonl` has further models, each with the one that it comes `after`, and names. The same
facts give the same bytes.
"""

import json
import re
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
DATA = REPOSITORY / "planner" / "data"
DATA_SHEETS = REPOSITORY / "scripts" / "data_sheets.jsonl"
MORE_MODELS = REPOSITORY / "scripts" / "more_models.jsonl"
DEFAULT_FACTS = REPOSITORY.parent / "shared" / "data"
GIB = 2**30
MIB = 2**20

MODEL_KEYS = (
    "id",
    "aliases",
    "auto_class",
    "dtype",
    "params",
    "params_detail",
    "verified",
    "check",
    "source",
    "why_unverified",
    "notes",
    "config",
)

# Names people use that the facts do not list.
EXTRA_ALIASES = {
    "RTX-3050-Laptop-4G": ["RTX-3050-4G", "RTX-3050-Ti-4G", "RTX 3050 Ti Laptop GPU"],
    "RTX-6000-Ada": ["6000-Ada", "A6000-Ada"],
    "RTX-PRO-6000": ["RTX-PRO-6000-Blackwell"],
    "A100-80G": ["A100-SXM-80G"],
    "A100-40G": ["A100-SXM-40G"],
    "H100-SXM": ["H100-SXM5"],
}

# Cards whose NVLink is an optional bridge between two cards; they are planned for as PCIe cards. Source: the facts'
# notes and NVIDIA's data sheets.
BRIDGED = {
    "H100-NVL",
    "A40",
    "A30",
    "RTX-A6000",
    "RTX-A5000",
    "RTX-3090",
    "RTX-3090-Ti",
    "RTX-2080-Ti",
    "Quadro-RTX-8000",
    "Titan-RTX",
}

# Bytes a second in one direction of one lane: transfers a second x coding / 8. Source: PCI Express base specifications
# 3.0 to 6.0 (128b/130b coding up to 5.0; 242 of 256 bytes of a flit are payload in 6.0).
PCIE_LANE_BYTES_PER_SECOND = {
    "gen3": 8e9 * 128 / 130 / 8,
    "gen4": 16e9 * 128 / 130 / 8,
    "gen5": 32e9 * 128 / 130 / 8,
    "gen6": 64e9 * 242 / 256 / 8,
}
NVLINK_C2C_BYTES_PER_SECOND = 450e9  # one direction of the 900 GB/s in the facts

# No tensor cores and no fast fp16: 3584 cores x 2 x 1.582 GHz in fp32. Source: NVIDIA GeForce GTX 1080 Ti data sheet.
FP32_ONLY_TFLOPS = {"GTX-1080-Ti": 11.3}

# Host memory of the nodes that a card is usually rented or bought in. Pairs (GPUs of a node, GiB for each of them): a
# pair holds from that number of GPUs on, so ((1, 16), (4, 48)) is 16 GiB for one GPU and 192 GiB for four. If vendors
# differ, one that gives less. Source: the vendors' documentation of these instance types (AWS EC2 accelerated computing
# instances, Google Cloud accelerator-optimized machines, Azure GPU sizes, Lambda on-demand instances, RunComfy machine
# types). "as ..." and "desktops" name no instance with that card: assumptions.
DESKTOP = "desktops: 47 % have 16 GB and 29 % have 32 GB in Steam's hardware survey of May 2024"
WORKSTATION = "RunComfy's machines with cards of that size: A5000 32 GB, A6000 48 GB"
P4DE = "AWS p4de.24xlarge"
A3 = "Google Cloud a3-highgpu"
# Multiprocessors. Source: NVIDIA's data sheets and architecture whitepapers, CUDA cores divided by those of a
# multiprocessor (64 on Pascal's and Ampere's data centre cards, Volta and Turing; 128 elsewhere).
MULTIPROCESSORS = {
    **dict.fromkeys(("A100-40G", "A100-80G", "A100-PCIe-80G", "A800-80G"), 108),
    **dict.fromkeys(("H100-SXM", "H100-NVL", "H800", "H200", "GH200-96G"), 132),
    **{"H100-PCIe": 114, "H20": 78, "B200": 148, "B300": 148, "GB200": 152, "GB300": 152},
    **{"L4": 58, "L40S": 142, "L40": 142, "L20": 92, "A40": 84, "A30": 56, "A10G": 80, "A10": 72, "T4": 40},
    **{"V100-16G": 80, "V100-32G": 80, "P100": 56, "RTX-A6000": 84, "RTX-6000-Ada": 142, "RTX-PRO-6000": 188},
    **{"RTX-A5000": 64, "RTX-A4000": 48, "Quadro-RTX-8000": 72, "Titan-RTX": 72, "RTX-5090": 170, "RTX-5080": 84},
    **{"RTX-5070-Ti": 70, "RTX-5070": 48, "RTX-5060-Ti-16G": 36, "RTX-4090": 128, "RTX-4080": 76, "RTX-4070-Ti": 60},
    **{"RTX-4070": 46, "RTX-4060-Ti-16G": 34, "RTX-4060-Ti-8G": 34, "RTX-4060-Laptop": 24, "RTX-4050-Laptop": 20},
    **{"RTX-3090": 82, "RTX-3090-Ti": 84, "RTX-3080-10G": 68, "RTX-3080-12G": 70, "RTX-3070": 46, "RTX-3060-12G": 28},
    **{"RTX-3050-Laptop-4G": 16, "RTX-2080-Ti": 68, "GTX-1080-Ti": 28},
}
HOST_MEMORY: dict[str, tuple[tuple[tuple[int, int], ...], str]] = {
    "A100-40G": (((1, 85),), "Google Cloud a2-highgpu"),
    "A100-80G": (((1, 144),), P4DE),
    "A100-PCIe-80G": (((1, 220),), "Azure NC_A100_v4"),
    "A800-80G": (((1, 144),), f"{P4DE} with A100-80G"),
    "H100-SXM": (((1, 234),), A3),
    "H100-PCIe": (((1, 200),), "Lambda 1x H100 PCIe"),
    "H100-NVL": (((1, 320),), "Azure NCads_H100_v5"),
    "H800": (((1, 234),), f"{A3} with H100-SXM"),
    "H200": (((1, 256),), "AWS p5en.48xlarge"),
    "H20": (((1, 234),), f"{A3} with H100-SXM"),
    "GH200-96G": (((1, 432),), "Lambda 1x GH200"),
    "B200": (((1, 256),), "AWS p6-b200.48xlarge"),
    "B300": (((1, 512),), "AWS p6-b300.48xlarge"),
    "GB200": (((1, 240),), "AWS p6e-gb200.36xlarge"),
    "GB300": (((1, 240),), "AWS p6e-gb200.36xlarge with GB200"),
    "L4": (((1, 16), (2, 48)), "Google Cloud g2-standard-4 and larger"),
    "L40S": (((1, 32), (2, 96), (8, 192)), "AWS g6e.xlarge and larger"),
    "L40": (((1, 64),), "RunComfy: L40 64 GB"),
    "L20": (((1, 48),), WORKSTATION),
    "A40": (((1, 48),), WORKSTATION),
    "A30": (((1, 32),), WORKSTATION),
    "A10G": (((1, 16), (2, 48), (8, 96)), "AWS g5.xlarge and larger"),  # two or three are part of four
    "A10": (((1, 200),), "Lambda 1x A10"),
    "T4": (((1, 16), (4, 48)), "AWS g4dn.xlarge and larger"),
    "V100-16G": (((1, 56),), "Lambda 8x V100"),
    "V100-32G": (((1, 96),), "AWS p3dn.24xlarge"),
    "P100": (((1, 112),), "Azure NC_v2"),
    "RTX-A6000": (((1, 100),), "Lambda 1x A6000"),
    "RTX-6000-Ada": (((1, 48),), WORKSTATION),
    "RTX-PRO-6000": (((1, 64), (2, 256)), "AWS g7e.2xlarge and larger"),
    "RTX-A5000": (((1, 32),), "RunComfy: A5000 32 GB"),
    "RTX-A4000": (((1, 16),), "RunComfy: A4000 16 GB"),
    "Quadro-RTX-8000": (((1, 48),), WORKSTATION),
    "Titan-RTX": (((1, 32),), WORKSTATION),
}
LARGE_DESKTOP_GB = 16  # desktops with a card of this size or more are taken to have 32 GiB, others 16 GiB


def main() -> None:
    facts = Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_FACTS
    DATA.mkdir(exist_ok=True)
    (DATA / "models.jsonl").write_text(models_text(facts / "models.jsonl"), encoding="utf-8")
    (DATA / "gpus.jsonl").write_text(gpus_text(facts / "gpus.jsonl"), encoding="utf-8")


def models_text(path: Path) -> str:
    """One row a model, in the order of the facts, the config untouched."""
    rows, more = (
        [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]
        for file in (path, MORE_MODELS)
    )
    for row in more:
        place = [each["id"] for each in rows].index(row.get("after", row["id"]))
        if "more_aliases" in row:
            rows[place]["aliases"] += row["more_aliases"]
        else:
            rows.insert(place + 1, row)
    kept = ({key: row[key] for key in MODEL_KEYS if key in row} for row in rows)
    return "".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n" for row in kept)


def gpus_text(path: Path) -> str:
    """One table a card, in the order of the facts."""
    facts, sheets = (
        [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]
        for file in (path, DATA_SHEETS)
    )
    own_names = {key(name) for row in sheets for name in (row["name"], *row["aliases"])}
    for row in facts:  # a card that had the name of a similar one until it got a row
        row["aliases"] = [alias for alias in row["aliases"] if key(alias) not in own_names]
    rows = [row for row in [*facts, *sheets] if is_nvidia(row)]
    absolute, share = largest_reserve([row for row in rows if row.get("part", "card") == "card"])
    return "".join(json.dumps(gpu_row(row, absolute, share), ensure_ascii=False) + "\n" for row in rows)


def key(name: str) -> str:
    """The name in lower case without blanks, dashes and the brand."""
    return re.sub(r"[-_\s]|nvidia|geforce|tesla", "", name.lower())


def is_nvidia(row: dict) -> bool:
    return row["compute_capability"].replace(".", "").isdigit()


def reported_bytes(row: dict) -> int:
    """The lowest total memory that torch reported for a card; 0 where no report is known."""
    if not row["reported"] or row["reported_field"] != "memory_gib":
        return 0
    return int(min([row["memory_gib"], *row.get("memory_gib_observed", [])]) * GIB)


def largest_reserve(rows: list[dict]) -> tuple[int, float]:
    """The largest difference between nvidia-smi and torch on cards where both are known: in MiB, and as a share."""
    seen = [(row["nvidia_smi_mib"], reported_bytes(row)) for row in rows if reported_bytes(row)]
    absolute = max(total - usable // MIB for total, usable in seen)
    share = max(1 - usable / (total * MIB) for total, usable in seen)
    return absolute, share


def gpu_row(row: dict, absolute: int, share: float) -> dict:
    """A row of the catalogue (planner/gpus/catalogue.py, `GpuRow`).

    `absolute` and `share`: what nvidia-smi shows and torch cannot use, at most; the lesser of the two is taken off a
    card without a report of torch's.
    """
    name, known_bytes = row["name"], reported_bytes(row)
    total_bytes = known_bytes
    if not known_bytes:
        reserve = min(absolute * MIB, int(share * row["nvidia_smi_mib"] * MIB))
        less = row["nvidia_smi_mib"] * MIB - reserve
        total_bytes = less if row["memory_gib"] is None else min(int(row["memory_gib"] * GIB), less)
    link = 0 if name in BRIDGED else (row["interconnect"]["nvlink_gbs"] or 0) * 1e9 / 2
    host_gib, host_source = host_memory(row)
    shared_bytes = host_gib[0][1] * GIB if row.get("part") == "unified" else 0  # the CPU's part of the memory
    gpu = {
        "name": name,
        "total_bytes": total_bytes,
        "free_bytes": total_bytes - shared_bytes,
        "bf16_flops": flops(row),
        "memory_bytes_per_second": int(row["memory_bandwidth_gbs"] * 1e9),
        "nvlink_bytes_per_second": int(link),
        "pcie_bytes_per_second": int(pcie_bytes_per_second(row["interconnect"]["pcie"])),
        "compute_capability": [int(part) for part in row["compute_capability"].split(".")],
        "multiprocessors": row.get("multiprocessors") or MULTIPROCESSORS[name],
        "source": row["source"],
    }
    values: dict[str, object] = {
        "gpu": gpu,
        "aliases": sorted({*row["aliases"], *EXTRA_ALIASES.get(name, [])}),
        "marketing_gb": row["marketing_gb"],
        "reported": bool(known_bytes),
        "host_gib": host_gib,
        "host_source": host_source,
    }
    if not known_bytes:
        derived = f"nvidia-smi's {row['nvidia_smi_mib']} MiB less {reserve // MIB} MiB"
        values["derived"] = (
            derived if row["memory_gib"] is None else f"the lower of {row['memory_gib']} GiB and {derived}"
        )
    return values | {key: row[key] for key in ("part", "note") if key in row}


def host_memory(row: dict) -> tuple[tuple[tuple[int, int], ...], str]:
    """The host memory of a usual node for each GPU, and its source."""
    if "host_gib" in row:
        return row["host_gib"], row["host_source"]
    desktop = 32 if row["marketing_gb"] >= LARGE_DESKTOP_GB else 16
    return HOST_MEMORY.get(row["name"], (((1, desktop),), DESKTOP))


def flops(row: dict) -> float:
    tflops = row["bf16_tflops_dense"] or row.get("fp16_tflops_dense") or FP32_ONLY_TFLOPS[row["name"]]
    return round(tflops * 1e12)


def pcie_bytes_per_second(text: str) -> float:
    """`"gen4 x16"` -> 31.5e9; `"NVLink-C2C 900"` -> 450e9."""
    if text.startswith("NVLink-C2C"):
        return NVLINK_C2C_BYTES_PER_SECOND
    generation, lanes = text.split(" x")
    return round(PCIE_LANE_BYTES_PER_SECOND[generation] * int(lanes))


if __name__ == "__main__":
    main()

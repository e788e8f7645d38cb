"""Medians of the figures in public out-of-memory messages.

python scripts/allocator_slack.py > results/allocator_slack.md
"""

import json
from pathlib import Path
from statistics import median

from planner.gpus.catalogue import load_gpu

ROWS = Path(__file__).resolve().parent.parent / "results" / "allocator_slack.jsonl"


def load_rows() -> list[dict[str, str | float | bool]]:
    return [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]


def slack_ratios(rows: list[dict[str, str | float | bool]], gathers: bool) -> list[float]:
    """Reserved but unallocated bytes over allocated bytes on full cards, smallest first."""
    return sorted(
        float(row["slack_gib"]) / float(row["allocated_gib"])
        for row in rows
        if row["gathers"] is gathers and float(row["allocated_gib"]) > 1 and row.get("full", True)
    )


def outside_mib(rows: list[dict[str, str | float | bool]], key: str) -> dict[str, list[int]]:
    """MiB of the process less PyTorch's reserved memory and less the context if known, by the value of `key`."""
    found: dict[str, list[int]] = {}
    for row in rows:
        if key in row:
            outside = (
                float(row["process_gib"])
                - float(row["allocated_gib"])
                - float(row["slack_gib"])
                - float(row.get("context_gib", 0.0))
            )
            found.setdefault(str(row[key]), []).append(round(outside * 1024))
    return {name: sorted(values) for name, values in sorted(found.items())}


def context_mib(rows: list[dict[str, str | float | bool]]) -> dict[str, list[tuple[str, int, float]]]:
    """Contexts by compute capability: the card, MiB, and MiB of a multiprocessor."""
    found: dict[str, list[tuple[str, int, float]]] = {}
    for row in rows:
        if "context" in row:
            mib, gpu = outside_mib([row], "context"), load_gpu(str(row["card"]))
            size = next(iter(mib.values()))[0]
            capability = ".".join(map(str, gpu.compute_capability))
            found.setdefault(capability, []).append((gpu.name, size, size / gpu.multiprocessors))
    return dict(sorted(found.items(), key=lambda each: float(each[0])))


def main() -> None:
    rows = load_rows()
    print("# What is on a card beside tensors, from public out-of-memory messages\n")
    print("Read from issue threads, not measured by us; printed there to 0.01 GiB. Rows: `allocator_slack.jsonl`.")
    print("The T4's 141 MiB are fitcheck-llm's, of 79 runs with CUDA 12.8 and 13.0 alike; 105 before the first kernel.")
    print("Regenerate: `python scripts/allocator_slack.py > results/allocator_slack.md`.\n")
    print("## Reserved but unallocated over allocated\n")
    print("| runs | rows | smallest | median | largest |\n|---|---|---|---|---|")
    for name, gathers in (("layers stay (one GPU, DDP)", False), ("layers are gathered (ZeRO-3, FSDP)", True)):
        ratios = slack_ratios(rows, gathers)
        cells = (min(ratios), median(ratios), max(ratios))
        print(f"| {name} | {len(ratios)} | " + " | ".join(f"{cell:.1%}" for cell in cells) + " |")
    print("\n## Memory of the process less what PyTorch reserved: the CUDA context\n")
    print("| compute capability | rows | MiB | MiB of a multiprocessor: median |\n|---|---|---|---|")
    for name, contexts in context_mib(rows).items():
        sizes = ", ".join(f"{card} {mib}" for card, mib, _ in sorted(contexts, key=lambda each: each[1]))
        print(f"| {name} | {len(contexts)} | {sizes} | {median(share for _, _, share in contexts):.2f} |")
    print("\n## The same less the context, with peers: NCCL\n\n| | rows | MiB | median |\n|---|---|---|---|")
    for name, values in outside_mib(rows, "nccl").items():
        print(f"| {name} | {len(values)} | {', '.join(map(str, values))} | {median(values):g} |")


if __name__ == "__main__":
    main()

"""Pairs of published speeds of one model on the same GPUs that differ in one way of running: is their order planned?

`scripts/throughput_report.py` writes the table of results/throughput.md from them.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from msgspec import Struct

# Speeds that differ by less are not in an order: Qwen's table, most of the rows, has seconds with one decimal.
DIFFERENT = 1.02
# Settings of the size of a step, which may differ beside each way: a way that saves memory is published with larger
# batches.
SIZES = frozenset(
    {"max-length", "batch-size", "max_length", "per_device_train_batch_size", "gradient_accumulation_steps"}
)
WAYS: Mapping[str, frozenset[str]] = {
    "rows and batches": SIZES,
    "adapters or 4-bit weights": frozenset({"tuning", "quantization", "lora_r"}),
    "offloading": frozenset({"offload_param", "offload_optimizer"}),
    "shards": frozenset({"sharding", "distributed_type", "zero_stage"}),
    "checkpoints": frozenset({"gradient_checkpointing"}),
}


class Run(Struct, frozen=True, kw_only=True):
    """A published run: what must be the same in a pair, its settings, and tokens per second published and planned."""

    id: str
    same: tuple[str, ...]
    settings: Mapping[str, Any]
    published: float
    planned: float


class Pair(Struct, frozen=True, kw_only=True):
    """Two runs that differ in one way of running."""

    one: Run
    other: Run
    way: str

    @property
    def in_order(self) -> bool:
        return (self.one.published > self.other.published) == (self.one.planned > self.other.planned)


def settings_of_flags(flags: Sequence[str]) -> dict[str, str]:
    """The settings of a command's flags: `--name value`, `--set name=value`, and switches."""
    found: dict[str, str] = {}
    words = iter(flags)
    for word in words:
        if word.startswith("--no-"):
            found[word.removeprefix("--no-")] = "false"
        elif word == "--set":
            name, value = next(words).split("=", 1)
            found[name] = value
        else:
            found[word.removeprefix("--")] = next(words)
    return found


def run_of_command(row: Mapping[str, Any], planned: float) -> Run:
    """The run of a row of speed.jsonl."""
    settings = settings_of_flags(row["flags"])
    same = (row["source"], settings.pop("gpus"), settings.pop("model"), settings.pop("method"))
    return Run(
        id=row["id"], same=same, settings=settings, published=row["tokens_per_second"], planned=planned
    )  # fmt: skip


def run_of_candidate(row: Mapping[str, Any], tokens: float, seconds: float) -> Run:
    """The run of a row of published_speeds.jsonl, whose step has so many tokens and planned seconds."""
    model = row.get("model") or json.dumps(row["config"], sort_keys=True)
    settings = dict(row["candidate"])
    same = (row["source"], row["gpus"], model, settings.pop("method"))
    return Run(
        id=row["id"], same=same, settings=settings, published=tokens / row["seconds"], planned=tokens / seconds
    )  # fmt: skip


def pairs(runs: Sequence[Run]) -> Iterator[Pair]:
    """Yield the pairs that differ in one way and by more than their figures are exact."""
    for one, other in combinations(runs, 2):
        names = one.settings.keys() | other.settings.keys()
        changed = {name for name in names if one.settings.get(name) != other.settings.get(name)}
        way = next((name for name, own in WAYS.items() if changed & own and changed - own <= SIZES), "")
        apart = max(one.published, other.published) >= DIFFERENT * min(one.published, other.published)
        if one.same == other.same and way and apart:
            yield Pair(one=one, other=other, way=way)


def pairs_report(found: Sequence[Pair]) -> str:
    """Markdown: a line for each way of running, and every pair whose order is wrong."""
    right = sum(pair.in_order for pair in found)
    lines = [
        "",
        "## The faster of two published ways",
        "",
        "Pairs of the rows above of the same source, model and GPUs that differ in one way of running, and by 2 % or",
        f"more: in {right} of {len(found)}, {right / len(found):.1%}, the faster one is the faster in the plan.",
        "",
        "| what differs | pairs | in the right order |",
        "|---|---|---|",
    ]
    for way in WAYS:
        part = [pair.in_order for pair in found if pair.way == way]
        lines += [f"| {way} | {len(part)} | {sum(part)} |"] if part else []
    lines += ["", "| in the wrong order | published, tokens/s | planned, tokens/s |", "|---|---|---|"]
    lines += [
        f"| {pair.one.id}, {pair.other.id} | {pair.one.published:,.0f}, {pair.other.published:,.0f} "
        f"| {pair.one.planned:,.0f}, {pair.other.planned:,.0f} |"
        for pair in found
        if not pair.in_order
    ]
    return "\n".join([*lines, *EXPLAINED]) + "\n"


EXPLAINED = (
    "",
    "Qwen's seconds have one decimal, and some of its longest rows are as fast a token as short ones, though attention",
    "grows with them. fsdp_qlora's QLoRA was 4 and 7 % faster with DDP than with FSDP2 and larger batches; the plan",
    "finds both as fast.",
)

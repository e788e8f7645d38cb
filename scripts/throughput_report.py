"""Compare predicted with published speeds (tests/data/published_speeds.jsonl and speed.jsonl).

python -m scripts.throughput_report            writes results/throughput.md
"""

import json
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from msgspec.structs import replace

from planner.candidate import Candidate
from planner.commands.main import run
from planner.gpus.parse import parse_cluster
from planner.models.catalogue import load_model
from planner.models.from_config import shape_of
from planner.models.shape import ModelShape
from planner.throughput.step import throughput
from scripts.throughput_pairs import Pair, pairs, pairs_report, run_of_candidate, run_of_command

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "data"
ROWS = DATA / "published_speeds.jsonl"
COMMANDS = DATA / "speed.jsonl"
REPORT = ROOT / "results" / "throughput.md"
SHAPES: dict[str, ModelShape] = {}
LOCAL_MODELS = "mpt/"  # folders of tests/data
FEWEST = 4  # rows of a kind whose spread says something
COMMANDS_HEAD = """
## `plan estimate` against published tokens per second

Tokens per second of `plan estimate` over those published (tests/data/speed.jsonl, whose `flags` are the command's),
so that above 1 is too fast: median, 10th and 90th percentile of each kind, and pairs of its rows whose order is right;
then the same of its rows that ran what their flags say (the others have a field `differs`).
Nothing was fitted to these rows; each constant has its source beside it. Made by `python -m scripts.throughput_report`.

Rows that ran something else than their flags say, or may have:

- MPT at 8,192 tokens and more: the benchmark's attention was Triton's kernel of FlashAttention 1 by default
  (mosaicml/llm-foundry, scripts/train/benchmarking/submit_benchmarks.py, `--attn_impl`); the flags say FlashAttention
  2. It also set `low_precision_layernorm`.
- NeMo's Qwen3-30B-A3B: experts stay where they are (expert parallel 8); FSDP2 gathers them.
- NeMo's 8B: fused kernels are likely, where the flags run eager ones. torchtune's rows with "compiled" have Liger's
  kernels in their flags: torch.compile fuses the same ones, and more.
- torchtune's 8B on an A6000: with recomputation its matrix products alone would need the data sheet's whole rate.
- torchtune's 70B with offload: torch's AdamW with bfloat16 states moves 14 bytes a parameter, DeepSpeed's 30.

Not explained: MPT-760M and 1B on H100 (narrow layers), MPT-13B on 64 H100.

Eleven rows of prime-rl, another program under torch.compile, are in no table. At commit 1485ad3 planned over published
is, full, 1.15 (Qwen3-4B, 8 H100 and H200), 1.19 (B200), 1.07 (0.6B, A6000) and 1.56 (H100); LoRA of 4B 1.30 to 1.66;
LoRA of Qwen3-30B-A3B 1.48 (H100), 1.18 (H200, 65,536 tokens) and 6.32 (B200). Its LoRA trains four adapters at once,
counted as one of rank 64, and is slower than its full fine-tuning, which has more products (4B: 48,719 and 49,717
tokens/s on H100, 46,084 and 68,356 on B200). Its experts on B200 take 3.6 times as long as on H100, which no data sheet
explains. The rest is not explained.


| kind | rows | planned / published | pairs in the right order |
|---|---|---|---|"""


def published_rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]


def published_candidate(row: dict[str, Any]) -> Candidate:
    """The candidate of a row of published_speeds.jsonl."""
    settings: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in row["candidate"].items()
    }
    return Candidate(model=_model(row), **settings)


def predicted_seconds(row: dict[str, Any]) -> float:
    """Predicted seconds of a row's optimizer step, or of its rollout where only that was measured."""
    candidate = published_candidate(row)
    cluster = parse_cluster(row["gpus"], None)
    if "memory_bytes_per_second" in row:
        cluster = replace(cluster, gpu=replace(cluster.gpu, memory_bytes_per_second=row["memory_bytes_per_second"]))
    speed = throughput(candidate, cluster, row.get("concurrency", 0.0))
    return speed.seconds["generation"] if row.get("part") == "generation" else speed.step_seconds


def command_rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in COMMANDS.read_text(encoding="utf-8").splitlines()]


def planned_tokens_per_second(row: dict[str, Any]) -> float:
    """Tokens per second that `plan estimate` says for the flags of a row, whether or not they fit."""
    flags = [str(DATA / flag) if flag.startswith(LOCAL_MODELS) else flag for flag in row["flags"]]
    printed = StringIO()
    with redirect_stdout(printed), redirect_stderr(StringIO()):
        run(["estimate", *flags, "--json"])
    speed: float = json.loads(printed.getvalue())["throughput"]["tokens_per_second"]
    return speed


def ratios_by_kind(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Planned over published tokens per second of the rows of each of `kinds_of`."""
    found: dict[str, list[float]] = {}
    for row in rows:
        for kind in kinds_of(row):
            found.setdefault(kind, []).append(planned_tokens_per_second(row) / row["tokens_per_second"])
    return found


def kinds_of(row: dict[str, Any]) -> tuple[str, ...]:
    """The kinds of a row of speed.jsonl: its own, and that of the rows which ran what their flags say."""
    return (row["kind"],) if "differs" in row else (row["kind"], f"{row['kind']}, as the flags say")


def commands_report(rows: list[dict[str, Any]]) -> str:
    """Markdown: a line for each kind, then every row."""
    points = [(row, planned_tokens_per_second(row), row["tokens_per_second"]) for row in rows]
    lines = [COMMANDS_HEAD]
    for kind in dict.fromkeys(kind for row in rows for kind in kinds_of(row)):
        part = [(planned, published) for row, planned, published in points if kind in kinds_of(row)]
        spread = _spread([planned / published for planned, published in part])
        lines.append(f"| {kind} | {len(part)} | {spread} | {rank_agreement(part):.0%} |")
    lines += ["", "| row | published tokens/s | planned tokens/s | ratio |", "|---|---|---|---|"]
    lines += [f"| {row['id']} | {b:,.0f} | {a:,.0f} | {a / b:.2f} |" for row, a, b in points]
    lines += ["", "Sources:", ""] + [f"- {source}" for source in dict.fromkeys(row["source"] for row in rows)]
    return "\n".join(lines) + "\n"


def rank_agreement(rows: list[tuple[float, float]]) -> float:
    """Share of pairs predicted in the right order, of the pairs whose measured times differ by at least a tenth."""
    pairs = [(a, b) for i, a in enumerate(rows) for b in rows[:i] if max(a[1], b[1]) > 1.1 * min(a[1], b[1])]
    return sum((a[0] > b[0]) == (a[1] > b[1]) for a, b in pairs) / len(pairs) if pairs else 1.0


def _model(row: dict[str, Any]) -> ModelShape:
    if "model" in row:
        return load_model(row["model"])
    key = json.dumps(row["config"])
    return SHAPES.setdefault(key, shape_of(row["config"], id=row["id"]))


def _spread(ratios: list[float]) -> str:
    if len(ratios) < 2:
        return f"{ratios[0]:.2f}"
    tenths = quantiles(ratios, n=10, method="inclusive")
    return f"{median(ratios):.2f} ({tenths[0]:.2f} to {tenths[-1]:.2f})"


def report(rows: list[dict[str, Any]]) -> str:
    """Markdown: one line for each group, one for the rows that no constant was read from, then every row."""
    points = [(row, predicted_seconds(row), row["seconds"]) for row in rows]
    lines = [
        "# Predicted against published speeds",
        "",
        "Seconds predicted by `planner/throughput` over seconds measured by others: median, and in brackets the 10th",
        "and 90th percentile. Constants of the formulas were read from the rows marked `used`. Nothing was fitted to",
        "the other rows, but they were known while the formulas were written. Made by",
        "`python -m scripts.throughput_report`.",
        "",
        "Of the groups with four rows or more these are outside of 0.95 to 1.05 in the median, or of 0.85 to 1.15 at a",
        "percentile. With a cause: Qwen's recipes on one node (its steps have one decimal, and rows of 256 tokens take",
        "as long as those of 512), two nodes of Qwen (the sharding was not published), RTX 3090 with shards (an older",
        "board with slow PCIe lanes, says the source: about 3e9 B/s). Not explained: RTX 4090 (a fifth of its step is",
        "element-wise traffic, which its cache of 72 MB may hold in part), LoRA of torchtune, one sequence of vLLM",
        "on an A100-40G. Of smaller groups: H100 in eager mode (0.70), RTX A5000 (0.82). Of tensor parallelism: QwQ on",
        "four and eight A100, whose interconnect was not published: taken without NVLink these rows are 0.92 to 1.10.",
        "",
        "| rows | count | predicted / measured | pairs in the right order |",
        "|---|---|---|---|",
    ]
    groups = {row["group"]: None for row in rows}
    chosen = [(name, [point for point in points if point[0]["group"] == name]) for name in groups]
    chosen += [
        ("**all, no constant read from them**", [point for point in points if not point[0]["used"]]),
        ("**all**", points),
    ]
    for name, part in chosen:
        agreement = rank_agreement([(predicted, measured) for _, predicted, measured in part])
        ratios = [predicted / measured for _, predicted, measured in part]
        lines.append(f"| {name} | {len(part)} | {_spread(ratios)} | {agreement:.0%} |")
    lines += ["", "| row | measured s | predicted s | ratio | |", "|---|---|---|---|---|"]
    lines += [
        f"| {row['id']} | {m:.2f} | {p:.2f} | {p / m:.2f} | {'used' if row['used'] else ''} |" for row, p, m in points
    ]
    lines += ["", "Sources:", ""] + [f"- {source}" for source in dict.fromkeys(row["source"] for row in rows)]
    return "\n".join(lines) + "\n"


def published_pairs() -> list[Pair]:
    """The pairs of published ways of running whose order the plan should have; rollouts have one way each."""
    runs = [run_of_command(row, planned_tokens_per_second(row)) for row in command_rows()]
    for row in published_rows():
        if row.get("part") != "generation":
            candidate = published_candidate(row)
            tokens = candidate.tokens * candidate.gradient_accumulation_steps * candidate.num_processes
            runs.append(run_of_candidate(row, tokens, predicted_seconds(row)))
    return list(pairs(runs))


def whole_report() -> str:
    return report(published_rows()) + commands_report(command_rows()) + pairs_report(published_pairs())


def main() -> None:
    REPORT.write_text(whole_report(), encoding="utf-8")


if __name__ == "__main__":
    main()

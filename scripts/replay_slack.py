"""Smallest budgets in which the steps of whole dry runs run, over what they allocate: the allocator's slack.

    python scripts/replay_slack.py [--limit N]      writes results/replay_slack.jsonl and .md

Needs the dryrun extra. A step's trace is replayed (planner/allocator) on ever smaller cards until it runs out of
memory; the slack is the smallest card less the peak of allocated bytes. Rows that are in the .jsonl are not measured
again.
"""

import argparse
import contextlib
import io
import json
import random
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from planner.allocator.caching_allocator import AllocatorSettings
from planner.allocator.loading import warm_up_bytes
from planner.allocator.replay import replay
from planner.allocator.trace import Trace
from planner.binary_search import largest
from planner.candidate import Candidate
from planner.errors import PlanError
from planner.gpus.catalogue import load_gpu
from planner.methods import METHODS
from planner.models.catalogue import load_model
from planner.units import MIB
from probes.dryrun.simulate import trace_step

RESULTS = Path(__file__).resolve().parents[1] / "results"
ROWS, TABLE = RESULTS / "replay_slack.jsonl", RESULTS / "replay_slack.md"
GPU = load_gpu("H200")
MODELS = ("Qwen2.5-0.5B", "Qwen2.5-1.5B", "Llama-3.2-1B", "gemma-3-1b-it", "Qwen3-1.7B", "Qwen2.5-7B")
METHODS_DRAWN = ("sft", "sft", "dpo", "reward", "grpo", "kto", "orpo", "distillation")
SEED, COUNT = 20261123, 60
STEP_MIB = 20  # a page of an expandable segment: budgets are not told apart more finely
Row = dict[str, object]


def candidates() -> Iterator[Candidate]:
    """A random draw, the same every time."""
    draw = random.Random(SEED)
    for _ in range(COUNT):
        method, tuning = draw.choice(METHODS_DRAWN), draw.choice(("full", "lora", "lora", "qlora"))
        settings: dict[str, object] = {
            "tuning": "full" if tuning == "full" else "lora",
            "quantization": "nf4" if tuning == "qlora" else "none",
            "dtype": draw.choice(("float32", "bfloat16")) if tuning == "full" else "bfloat16",
            "gradient_checkpointing": draw.random() < 0.5,
            "attn_implementation": draw.choice(("sdpa", "sdpa", "flash_attention_2")),
            "padded": draw.random() < 0.6,
            "per_device_train_batch_size": draw.choice((2, 4, 8)),
            "max_length": draw.choice((512, 1024, 2048)),
            "prompt_length": 512,
            "max_completion_length": draw.choice((256, 512)),
        }
        model = load_model(draw.choice(MODELS))
        defaults = dict(METHODS[method].defaults)
        teacher = {"teacher_model": model} if METHODS[method].teacher else {}
        yield Candidate(model=model, method=method, **(defaults | settings | teacher))  # type: ignore[arg-type]


def smallest_budget_bytes(trace: Trace, expandable: bool, warm_up: int) -> int:
    """The smallest multiple of `STEP_MIB` on which the trace runs to its end."""
    settings = AllocatorSettings(expandable_segments=expandable)
    top = 2 * trace.peak_bytes // (STEP_MIB * MIB) + 2

    def runs(below_top: int) -> bool:
        budget = (top - below_top) * STEP_MIB * MIB
        return replay(trace.events, budget, settings, free_before=warm_up).out_of_memory is None

    return (top - largest(0, top - trace.peak_bytes // (STEP_MIB * MIB), runs)) * STEP_MIB * MIB


def measured(candidate: Candidate) -> Row:
    """The row of one candidate."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        trace = trace_step(candidate)
    warm_up = warm_up_bytes(trace, candidate, GPU)
    return {
        "candidate": label(candidate),
        "tuning": candidate.tuning if candidate.quantization == "none" else "qlora",
        "allocated_bytes": trace.peak_bytes,
        "budget_bytes": smallest_budget_bytes(trace, False, warm_up),
        "expandable_budget_bytes": smallest_budget_bytes(trace, True, warm_up),
    }


def label(candidate: Candidate) -> str:
    return (
        f"{candidate.model.id.split('/')[-1]} {candidate.method} {candidate.tuning} {candidate.quantization} "
        f"{candidate.dtype} {candidate.attn_implementation} batch {candidate.per_device_train_batch_size} "
        f"length {candidate.row_tokens}{' checkpointing' if candidate.gradient_checkpointing else ''}"
        f"{' padded' if candidate.padded else ''}"
    )


def table(rows: list[Row]) -> Iterator[str]:
    """The page: slack over allocated bytes by tuning, then every row."""
    yield "# The allocator's slack in replays of whole dry runs\n"
    yield "Written by `python scripts/replay_slack.py`. One process, all layers, kernels of a GPU with FlashAttention."
    yield "Slack: the smallest card on which the step runs, in steps of 20 MiB, less the peak of allocated bytes.\n"
    yield "| tuning | rows | allocator | smallest | median | largest |\n|---|---|---|---|---|---|"
    for tuning in ("full", "lora", "qlora", "all"):
        of_kind = [row for row in rows if tuning in (row["tuning"], "all")]
        for name, key in (("default", "budget_bytes"), ("expandable segments", "expandable_budget_bytes")):
            shares = sorted(int(str(row[key])) / int(str(row["allocated_bytes"])) - 1 for row in of_kind)
            if shares:
                cells = " | ".join(f"{share:.1%}" for share in (shares[0], median(shares), shares[-1]))
                yield f"| {tuning} | {len(shares)} | {name} | {cells} |"
    yield "\n| candidate | allocated GiB | slack GiB | with expandable segments |\n|---|---|---|---|"
    for row in rows:
        allocated, plain, expandable = (
            int(str(row[key])) / 2**30 for key in ("allocated_bytes", "budget_bytes", "expandable_budget_bytes")
        )
        yield f"| {row['candidate']} | {allocated:.2f} | {plain - allocated:.2f} | {expandable - allocated:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--limit", type=int, default=COUNT)
    limit = parser.parse_args().limit
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []
    known = {row["candidate"] for row in rows}
    for number, candidate in enumerate(candidates(), 1):
        if number > limit or label(candidate) in known:
            continue
        try:
            rows.append(measured(candidate))
        except PlanError as error:
            print(f"{label(candidate)}: {error}")
            continue
        known.add(label(candidate))
        ROWS.write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(number, rows[-1], flush=True)
    TABLE.write_text("\n".join(table(rows)) + "\n")


if __name__ == "__main__":
    main()

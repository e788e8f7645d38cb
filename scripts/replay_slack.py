"""Slack of PyTorch's allocator beyond the tensors, in replays of whole dry runs: on the smallest card, and on any.

    python -m scripts.replay_slack [--limit N]      writes results/replay_slack.jsonl and .md

Needs the dryrun extra. A step's trace is replayed (planner/allocator) on ever smaller cards until it runs out of
memory: the slack is the smallest card less the peak of allocated bytes. Replayed on a card without a limit, it reserves
more: the cache is the peak of reserved bytes less the peak of allocated bytes. Both are given as shares of what comes
and goes: the peak of allocated bytes less weights, adapters and optimizer states. Rows that are in the .jsonl are not
measured again.
"""

import argparse
import contextlib
import io
import json
import random
from collections.abc import Iterator
from itertools import chain, islice, product
from pathlib import Path
from statistics import median, stdev

from msgspec.structs import replace

from planner.allocator.caching_allocator import NO_LIMIT
from planner.allocator.loading import warm_up_bytes
from planner.allocator.replay import replay
from planner.allocator.reserved import reserved_of
from planner.allocator.trace import STAYS, Trace
from planner.candidate import Candidate
from planner.errors import PlanError
from planner.estimation import estimate
from planner.gpus.catalogue import load_gpu
from planner.gpus.parse import parse_cluster
from planner.memory.slack import Checkpointing, checkpointing_of
from planner.methods import METHODS
from planner.models.catalogue import load_model
from planner.quantities import Component
from planner.search.binary_search import largest
from planner.units import MIB
from probes.dryrun.simulate import trace_step

RESULTS = Path(__file__).resolve().parents[1] / "results"
ROWS, TABLE = RESULTS / "replay_slack.jsonl", RESULTS / "replay_slack.md"
GPU = load_gpu("H200")
MODELS = ("Qwen2.5-0.5B", "Qwen2.5-1.5B", "Llama-3.2-1B", "gemma-3-1b-it", "Qwen3-1.7B", "Qwen2.5-7B")
METHODS_DRAWN = ("sft", "sft", "dpo", "reward", "grpo", "kto", "orpo", "distillation")
CLUSTER = parse_cluster("1xH200", None)
RESIDENT: tuple[Component, ...] = ("weights", "adapters", "optimizer_states")
SEED, COUNT = 20261123, 120
PARTLY_COUNT = 28  # of the draw, with only some layers checkpointed
LARGE = ("Qwen/Qwen2.5-7B",)
SHARES = (0.6, 0.85, 0.7, 1.0)  # of the longest batch, in the order of the run; the longest comes last
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


def partly_checkpointed() -> Iterator[Candidate]:
    """Of that draw the first checkpointed candidates of up to 2 B parameters, every second or fourth layer of them."""
    small = (each for each in candidates() if each.gradient_checkpointing and each.model.id not in LARGE)
    for number, candidate in enumerate(islice(small, PARTLY_COUNT)):
        yield replace(candidate, checkpoint_every_n_layers=(2, 4)[number % 2])


def smallest_budget_bytes(trace: Trace, expandable: bool, warm_up: int) -> int:
    """The smallest multiple of `STEP_MIB` on which the trace runs to its end."""
    top = 2 * trace.peak_bytes // (STEP_MIB * MIB) + 2

    def runs(below_top: int) -> bool:
        budget = (top - below_top) * STEP_MIB * MIB
        return replay(trace.events, budget, expandable, free_before=warm_up).out_of_memory is None

    return (top - largest(0, top - trace.peak_bytes // (STEP_MIB * MIB), runs)) * STEP_MIB * MIB


def quiet_trace(candidate: Candidate) -> Trace:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return trace_step(candidate)


def measured(candidate: Candidate) -> Row:
    """The row of one candidate, without `varied`."""
    trace = quiet_trace(candidate)
    warm_up = warm_up_bytes(trace, candidate, GPU)
    reserved = {
        expandable: reserved_of(trace, replace(candidate, expandable_segments=expandable), GPU, 0).peak_bytes
        for expandable in (False, True)
    }
    return {
        "candidate": label(candidate),
        "tuning": candidate.tuning if candidate.quantization == "none" else "qlora",
        "checkpointing": checkpointing_of(candidate),
        "allocated_bytes": trace.peak_bytes,
        "resident_bytes": resident_bytes(candidate),
        "budget_bytes": smallest_budget_bytes(trace, False, warm_up),
        "expandable_budget_bytes": smallest_budget_bytes(trace, True, warm_up),
        "reserved_bytes": reserved[False],
        "expandable_reserved_bytes": reserved[True],
    }


def resident_bytes(candidate: Candidate) -> int:
    """Bytes that are alive in every phase: weights, adapters and optimizer states."""
    step = next(phase for phase in estimate(candidate, CLUSTER).gpus[0].phases if phase.name == "optimizer_step")
    return sum(step.components.get(component, 0) for component in RESIDENT)


def varied(candidate: Candidate) -> Row:
    """Reserved bytes of a run whose batches differ in length, as shares `SHARES` of the longest."""
    traces = [quiet_trace(shortened(candidate, share)) for share in SHARES]
    events = list(traces[0].events)
    made = len(traces[0].allocations)
    for trace in traces[1:]:
        for index, size_bytes in trace.events:
            allocation = trace.allocations[index]
            if allocation.phase != "load" and allocation.died < STAYS:  # what stays is there from the first trace on
                events.append((made + index, size_bytes))
        made += len(trace.allocations)
    warm_up = warm_up_bytes(traces[-1], candidate, GPU)
    plain, expandable = (
        replay(events, NO_LIMIT, flag, free_before=warm_up).peak_reserved_bytes for flag in (False, True)
    )
    return {"varied_reserved_bytes": plain, "expandable_varied_reserved_bytes": expandable}


def shortened(candidate: Candidate, share: float) -> Candidate:
    lengths = ("max_length", "prompt_length", "max_completion_length")
    return replace(candidate, **{name: round(share * getattr(candidate, name)) for name in lengths})


def label(candidate: Candidate) -> str:
    return (
        f"{candidate.model.id.split('/')[-1]} {candidate.method} {candidate.tuning} {candidate.quantization} "
        f"{candidate.dtype} {candidate.attn_implementation} batch {candidate.per_device_train_batch_size} "
        f"length {candidate.row_tokens}{CHECKPOINTING[checkpointing_of(candidate)]}"
        f"{f' every {candidate.checkpoint_every_n_layers}' if candidate.checkpoint_every_n_layers > 1 else ''}"
        f"{' padded' if candidate.padded else ''}"
    )


# How a candidate's layers are checkpointed (planner/memory/slack.py), in labels.
CHECKPOINTING: dict[Checkpointing, str] = {"none": "", "some": " checkpointing", "all": " checkpointing"}

# Columns of the table: title, key of the row's bytes.
COLUMNS = (
    ("smallest card, default", "budget_bytes"),
    ("smallest card, expandable segments", "expandable_budget_bytes"),
    ("no limit, default", "reserved_bytes"),
    ("no limit, expandable segments", "expandable_reserved_bytes"),
    ("no limit, lengths differ, default", "varied_reserved_bytes"),
    ("no limit, lengths differ, expandable segments", "expandable_varied_reserved_bytes"),
)


def table(rows: list[Row]) -> Iterator[str]:
    """The page: reserved over allocated bytes by recipe, then every row."""
    yield "# What PyTorch's allocator reserves beyond the tensors, in replays of whole dry runs\n"
    yield "Written by `python -m scripts.replay_slack`. One process, all layers, kernels of a GPU with FlashAttention."
    yield "Shares: reserved less allocated bytes, over what comes and goes (allocated bytes less weights, adapters and"
    yield "optimizer states). *Smallest card*: the least on which the step runs, in steps of 20 MiB; what a step needs."
    yield "*No limit*: what `torch.cuda.max_memory_reserved` says on a card with room to"
    shares = ", ".join(f"{share:.0%}" for share in SHARES)
    yield f"spare, after steps of equal batches. *Lengths differ*: after batches of {shares} of the longest;"
    yield "only of candidates with padding.\n"
    yield "| recipe | rows | allocator | smallest | median | 90th percentile | largest | standard deviation |"
    yield "|---|---|---|---|---|---|---|---|"
    for full, checkpointing in product((True, False), CHECKPOINTING):
        of_kind = [row for row in rows if (row["tuning"] == "full", row["checkpointing"]) == (full, checkpointing)]
        recipe = f"{'full' if full else 'adapters'}, {checkpointing} layers checkpointed"
        for title, key in COLUMNS:
            found = sorted(share(row, key) for row in of_kind if key in row)
            if len(found) > 1:
                points = (found[0], median(found), found[9 * len(found) // 10], found[-1], stdev(found))
                yield f"| {recipe} | {len(found)} | {title} | {' | '.join(f'{point:.1%}' for point in points)} |"
    yield f"\n| candidate | allocated GiB | comes and goes | {' | '.join(title for title, _ in COLUMNS)} |"
    yield "|---|---|---|" + "---|" * len(COLUMNS)
    for row in rows:
        cells = " | ".join(f"{share(row, key):.1%}" if key in row else "" for _, key in COLUMNS)
        allocated, resident = (int(str(row[name])) / 2**30 for name in ("allocated_bytes", "resident_bytes"))
        yield f"| {row['candidate']} | {allocated:.2f} | {allocated - resident:.2f} | {cells} |"


def share(row: Row, key: str) -> float:
    """Return the slack of a row as a share of the memory that is allocated and freed within a step."""
    reserved, allocated, resident = (int(str(row[name])) for name in (key, "allocated_bytes", "resident_bytes"))
    return (reserved - allocated) / (allocated - resident)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--limit", type=int, default=COUNT + PARTLY_COUNT)
    limit = parser.parse_args().limit
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []
    known: dict[object, Row] = {row["candidate"]: row for row in rows}
    for number, candidate in enumerate(chain(candidates(), partly_checkpointed()), 1):
        name = label(candidate)
        if number > limit or (name in known and ("varied_reserved_bytes" in known[name] or not candidate.padded)):
            continue
        try:
            row = known.get(name) or measured(candidate)
            known[name] = row | (varied(candidate) if candidate.padded else {})
        except PlanError as error:
            print(f"{name}: {error}")
            continue
        ROWS.write_text("".join(json.dumps(row) + "\n" for row in known.values()))
        print(number, known[name], flush=True)
    TABLE.write_text("\n".join(table(list(known.values()))) + "\n")


if __name__ == "__main__":
    main()

"""Profiles against full traces: the same sizes through a profile and through a dry run of all layers, to the byte.

    python scripts/compare_profiles.py [--count 200] [--minutes N] [--fresh]     writes results/profiles.jsonl and results/profiles.md

Needs the dryrun extra. Sizes and models are a random draw, the same every time; most models are cut to a few layers more than the profile
was traced with, every tenth keeps all of its own. Only recipes with a profile are compared; the profile is not made for the occasion.
Traces that ran before are not run again unless --fresh says so, which it must when the dry run has changed.
"""

import argparse
import json
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from planner.ahead import this_process_only_plans
from planner.candidate import Candidate, Sharding
from planner.catalogue import load_model
from planner.memory.sharding import SHARDED
from planner.methods import MethodName
from planner.trace.architecture import base_layers, numbers, period
from planner.trace.compose import single_process, without_states
from planner.trace.profile import Profile
from planner.trace.sizes import sizes_of
from planner.trace.store import LIBRARIES, load_profile

Tuning = Literal["lora", "qlora", "full", "full in 16 bits"]

RESULTS = Path(__file__).resolve().parents[1] / "results"
ROWS, TABLE = RESULTS / "profiles.jsonl", RESULTS / "profiles.md"
MODELS = (
    "Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-7B", "Qwen2.5-32B", "Llama-3.1-8B", "Llama-3.1-70B", "Llama-3.2-1B", "Llama-3.2-3B", "Qwen3-8B", "Qwen3-14B",
)  # fmt: skip
METHODS: tuple[MethodName, ...] = ("sft", "dpo", "reward", "grpo", "rloo", "orpo")
TUNINGS: tuple[Tuning, ...] = ("lora", "qlora", "full", "full in 16 bits")
SETTINGS: dict[Tuning, dict[str, str]] = {
    "lora": {"tuning": "lora", "dtype": "bfloat16"},
    "qlora": {"tuning": "lora", "dtype": "bfloat16", "quantization": "nf4"},
    "full": {"tuning": "full", "dtype": "float32"},
    "full in 16 bits": {"tuning": "full", "dtype": "bfloat16"},
}
SHARDINGS: dict[Tuning, tuple[Sharding, ...]] = {
    "lora": ("ddp", "zero2", "zero3", "fsdp2"), "qlora": ("ddp",), "full": ("ddp", "zero2", "zero3", "fsdp2"), "full in 16 bits": ("ddp",)
}  # fmt: skip
ALIGNED = 0.7  # of the lengths are multiples of 16
SEED = 20261120
FULL_EVERY = 10  # so often a model keeps all its layers
FURTHER_PERIODS = 5  # of layers in a model that is cut
DRAWS = 100_000


def candidates() -> Iterator[tuple[Candidate, Profile]]:
    """Random sizes for which there is a profile."""
    draw = random.Random(SEED)
    for _ in range(DRAWS):
        candidate = drawn(draw)
        profile = load_profile(candidate)
        if profile is not None:
            yield candidate, profile


def drawn(draw: random.Random) -> Candidate:
    """A candidate of any recipe that searches meet; most have no profile and are passed over."""
    method, tuning, processes = draw.choice(METHODS), draw.choice(TUNINGS), draw.choice((1, 8))
    rows, accumulation, tokens = draw.randint(1, 12), draw.choice((1, 1, 2, 3, 4, 8)), draw.randint(16, 4096)
    if draw.random() < ALIGNED:
        tokens = -(-tokens // 16) * 16
    candidate = Candidate(
        model=load_model(draw.choice(MODELS)), method=method, per_device_train_batch_size=rows, gradient_accumulation_steps=accumulation, max_length=tokens,
        lora_r=draw.choice((4, 8, 16, 64)), gradient_checkpointing=draw.random() < 0.5, attn_implementation=draw.choice(("sdpa", "flash_attention_2")),
        sharding=draw.choice(SHARDINGS[tuning]) if processes > 1 else "none", num_processes=processes, beta=draw.choice((0.0, 0.1)), **SETTINGS[tuning],  # type: ignore[arg-type]
    )  # fmt: skip
    if not candidate.method_row.generates:
        return candidate
    prompt, completion = (16 * draw.randint(2, 64) for _ in range(2))
    return replace(
        candidate, prompt_length=prompt, max_completion_length=completion, steps_per_generation=accumulation, num_generations=draw.choice((2, 8)),
        vllm=draw.choice(("off", "colocate")),
    )  # fmt: skip


def compared(number: int, candidate: Candidate, profile: Profile, known: dict[tuple[object, object], object]) -> dict[str, object]:
    """One row. `known`: peaks of traces that ran before, by candidate and layers."""
    whole = numbers(candidate.model.config, "num_hidden_layers")[0]
    layers = whole if number % FULL_EVERY == FULL_EVERY - 1 else min(whole, base_layers(candidate.model) + FURTHER_PERIODS * period(candidate.model))
    profile.peak_bytes(sizes_of(candidate), layers)  # the depth is laid out once for all its sizes
    began = time.process_time()
    peak_bytes = profile.peak_bytes(sizes_of(candidate), layers)
    seconds = time.process_time() - began
    trace_bytes = known.get((key(candidate), layers)) or traced(candidate, layers)
    return {"key": key(candidate), "layers": layers, "profile_bytes": peak_bytes, "trace_bytes": trace_bytes, "profile_milliseconds": 1000 * seconds}


def traced(candidate: Candidate, layers: int) -> int:
    """The peak of the dry run of so many layers; without states where the candidate shards them."""
    from probes.simulate import dry_run
    from probes.small_sizes import with_layers

    trace = dry_run(single_process(with_layers(candidate, layers)), steps=1)
    return (without_states(trace) if candidate.sharding in SHARDED else trace).peak_bytes


def key(candidate: Candidate) -> str:
    shown = (
        "method", "tuning", "quantization", "dtype", "lora_r", "sharding", "attn_implementation", "vllm", "per_device_train_batch_size",
        "gradient_accumulation_steps", "row_tokens", "gradient_checkpointing",
    )  # fmt: skip
    of_prompt = [f"prompt {candidate.prompt_length}"] if candidate.method_row.generates else []
    return " ".join([candidate.model.id, *(str(getattr(candidate, field)) for field in shown), *of_prompt])


def table(rows: list[dict[str, object]]) -> str:
    equal = [row for row in rows if row["profile_bytes"] == row["trace_bytes"]]
    slowest = max(float(str(row["profile_milliseconds"])) for row in rows)
    lines = [
        "# Profiles against full traces",
        "",
        f"{len(equal)} of {len(rows)} random sizes have the same peak in the profile as in the dry run of all layers, to the byte; the slowest took",
        f"{slowest:.1f} ms. {', '.join(f'{name} {version(name)}' for name in LIBRARIES)}. Made by `python scripts/compare_profiles.py`,",
        "drawn among the sizes that had a profile then; where states are sharded both are without them.",
        "",
        "Each row: model, method, tuning, quantization, dtype, rank, sharding, attention, engine, rows, accumulation, tokens, checkpointing, prompt.",
        "",
        "| size | layers | profile bytes | trace bytes |",
        "|---|---|---|---|",
        *(f"| {row['key']} | {row['layers']} | {row['profile_bytes']:,} | {row['trace_bytes']:,} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    this_process_only_plans()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=600, help="stop after so many")
    parser.add_argument("--fresh", action="store_true", help="run every trace again")
    args = parser.parse_args()
    before = [] if args.fresh or not ROWS.exists() else [json.loads(line) for line in ROWS.read_text().splitlines()]
    known = {(row["key"], row["layers"]): row["trace_bytes"] for row in before}
    rows: list[dict[str, object]] = []
    end = time.monotonic() + 60 * args.minutes
    for number, (candidate, profile) in enumerate(candidates()):
        if number == args.count or time.monotonic() > end:
            break
        rows.append(compared(number, candidate, profile, known))
        print(f"{number + 1}/{args.count} {rows[-1]}", flush=True)
    ROWS.write_text("".join(json.dumps(row, sort_keys=True) + "\n" for row in rows))
    TABLE.write_text(table(rows))


if __name__ == "__main__":
    main()

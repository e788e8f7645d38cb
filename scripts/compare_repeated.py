"""Dry runs put together from a few layers against dry runs of all of them: every birth and death, at the models' own depths.

    python scripts/compare_repeated.py [--count 40] [--minutes N]     writes results/repeated_layers.jsonl and results/repeated_layers.md

Needs the dryrun extra. The models are a random draw of the catalogue's, the same every time, the methods and the ways to train go round.
"""

import argparse
import json
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from planner.candidate import Candidate
from planner.catalogue import load_model, model_rows
from planner.errors import PlanError
from planner.trace.deeper import COPIES, same_step
from planner.trace.profile import NoProfile
from planner.trace.store import LIBRARIES

RESULTS = Path(__file__).resolve().parents[1] / "results"
ROWS, TABLE = RESULTS / "repeated_layers.jsonl", RESULTS / "repeated_layers.md"
SEED = 20261122
ROLLOUT = {"prompt_length": 128, "max_completion_length": 256, "num_generations": 4, "per_device_train_batch_size": 4}
WAYS: tuple[dict[str, Any], ...] = (
    {"method": "sft", "max_length": 1024},
    {"method": "grpo", "beta": 0.04, **ROLLOUT},
    {"method": "dpo", "max_length": 512, "gradient_checkpointing": False},
    {"method": "sft", "max_length": 1024, "quantization": "nf4", "optim": "paged_adamw_8bit"},
    {"method": "reward", "max_length": 768},
    {"method": "sft", "max_length": 512, "tuning": "full", "attn_implementation": "eager"},
    {"method": "rloo", "vllm": "colocate", **ROLLOUT},
    {"method": "online-dpo", "beta": 0.1, **ROLLOUT},
)
BASE: dict[str, Any] = {"tuning": "lora", "dtype": "bfloat16", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}


def candidates() -> Iterator[Candidate]:
    names = sorted(row.id for row in model_rows())
    random.Random(SEED).shuffle(names)
    for name, way in zip(names, cycle(WAYS), strict=False):
        candidate = Candidate(**({"model": load_model(name)} | BASE | way))
        yield replace(candidate, steps_per_generation=2) if candidate.method_row.generates else candidate


def compared(candidate: Candidate) -> dict[str, object]:
    """One row. `refused` says why all layers are run."""
    from probes.deepened import CHECKED, deepened, pattern_of
    from probes.dryrun import dry_run
    from probes.layers.few_layers import depth_of

    row: dict[str, object] = {"model": candidate.model.id, "method": candidate.method, "layers": depth_of(dict(candidate.model.config))}
    row |= {name: getattr(candidate, name) for name in ("tuning", "quantization", "gradient_checkpointing", "attn_implementation", "vllm")}
    try:
        began = time.monotonic()
        told = deepened(candidate, "cuda")
        between = time.monotonic()
        run = dry_run(candidate, steps=1)
    except (NoProfile, PlanError) as error:
        return row | {"refused": str(error)}
    except Exception as error:  # the installed libraries stop at the model
        return row | {"refused": f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"}
    pattern = pattern_of(candidate)
    return row | {
        "run": [len(pattern.kept(copies)) for copies in (0, COPIES, CHECKED)],
        "births": len(run.allocations), "peak_bytes": run.peak_bytes, "told_bytes": told.peak_bytes,
        "same": same_step(told, run) and told.phases == run.phases, "seconds": [round(between - began, 2), round(time.monotonic() - between, 2)],
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    told = [row for row in rows if "refused" not in row]
    alike = [row for row in told if row["same"]]
    quicker = sorted(row["seconds"][1] / row["seconds"][0] for row in told)
    lines = [
        "# Dry runs from a few layers against dry runs of all",
        "",
        f"{len(alike)} of {len(told)} candidates have the same births, sizes and deaths in the same order, and the same phases to the byte, in a dry run put",
        f"together from a few layers as in one of all layers, which takes {quicker[len(quicker) // 2]:.1f} times as long in the median.",
        f"{', '.join(f'{name} {version(name)}' for name in LIBRARIES)}. Made by `python scripts/compare_repeated.py`.",
        "",
        "| model | method | trained | layers | run | births | the same | seconds, of all layers |",
        "|---|---|---|---|---|---|---|---|",
        *(
            f"| {row['model']} | {row['method']} | {row['tuning']}{'' if row['quantization'] == 'none' else ', ' + row['quantization']} | {row['layers']} "
            f"| {', '.join(map(str, row['run']))} | {row['births']:,} | {'yes' if row['same'] else 'no'} | {row['seconds'][0]}, {row['seconds'][1]} |"
            for row in told
        ),
        "",
        f"Not put together, and why, are the other {len(rows) - len(told)}:",
        "",
        *(f"- {row['model']}, {row['method']}: {row['refused']}" for row in rows if "refused" in row),
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--minutes", type=float, default=60.0)
    options = parser.parse_args()
    ends = time.monotonic() + 60 * options.minutes
    rows: list[dict[str, object]] = []
    for candidate in islice(candidates(), options.count):
        if time.monotonic() > ends:
            break
        rows.append(compared(candidate))
        print(json.dumps(rows[-1]), flush=True)
    ROWS.write_text("".join(json.dumps(row) + "\n" for row in rows))
    TABLE.write_text(table(rows))


if __name__ == "__main__":
    main()

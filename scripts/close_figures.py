"""Write tests/data/emulated_close.jsonl: figures of PyTorch's allocator that the estimates hit, and how nearly.

    python -m scripts.close_figures

Jobs of results/emulated.jsonl and emulated_branches.jsonl are added until no other one has a setting that was run with
a way to shard, hit in a phase and as nearly as anywhere. tests/test_emulated_rows.py holds the estimates to them.
"""

import json
from pathlib import Path
from typing import Any

from scripts.emulated_grid import HELD_OUT, compared, load_rows

FILE = Path(__file__).resolve().parents[1] / "tests" / "data" / "emulated_close.jsonl"
PHASES_WITHIN = (0.0005, 0.001, 0.005)  # a figure gets the first that it is well within
# What the allocator needs and reserves: the slack is a median share of such runs.
KEPT_WITHIN = 0.02
WELL_WITHIN = 0.6  # of it; the allocator leaves small rests of blocks unsplit, which it counts as allocated
SIZES = {
    "max_length", "prompt_length", "max_completion_length", "per_device_train_batch_size", "per_device_eval_batch_size",
    "image_size", "gradient_accumulation_steps", "num_generations", "steps_per_generation", "num_iterations", "lora_r",
}  # fmt: skip


def close(row: dict[str, Any]) -> dict[str, float]:
    """The figures of a row that the estimate hits, and within which share."""
    found = compared(row)
    figures: dict[str, tuple[tuple[int, int], tuple[float, ...]]] = {
        name: (found.phases[name], PHASES_WITHIN) for name in found.phases
    }
    figures |= {"need": ((found.need, found.needed), (KEPT_WITHIN,))}
    figures |= {"reserved": ((found.shown, found.reserved), (KEPT_WITHIN,))}
    near: dict[str, float] = {}
    for name, ((estimated, emulated), shares) in figures.items():
        error = abs(estimated / emulated - 1) if emulated else 1.0
        within = [share for share in shares if error < WELL_WITHIN * share]
        if within:
            near[name] = within[0]
    return near


def features(row: dict[str, Any], near: dict[str, float]) -> set[tuple[str, ...]]:
    """Each setting of a row but sizes, with the way to shard, each phase that is hit, and each share it is within."""
    settings = {"method": "sft", "tuning": "full", "sharding": "none"} | row["settings"]
    said = [f"{name} {value}" for name, value in settings.items() if name not in SIZES]
    within = [(name, str(each)) for name, share in near.items() for each in PHASES_WITHIN if share <= each]
    kept = [(name, "") for name in near]
    return {(settings["sharding"], word, *each) for word in said for each in within + kept}


def main() -> None:
    rows = [row for row in load_rows() + load_rows(HELD_OUT) if row["outcome"] == "fits"]
    found = [(row, near, features(row, near)) for row in rows if (near := close(row))]
    left = set[tuple[str, ...]]().union(*(has for _, _, has in found))
    lines = []
    while left:
        row, near, has = max(found, key=lambda each: len(each[2] & left))
        left -= has
        lines.append(json.dumps({"gpus": row["gpus"], "settings": row["settings"], "close": near}) + "\n")
    FILE.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()

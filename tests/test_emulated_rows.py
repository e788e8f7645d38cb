"""Estimates beside what PyTorch's own allocator counted for whole runs on emulated GPUs.

The runs are those of results/emulated.jsonl, and of results/emulated_branches.jsonl, to which no constant is fitted.

tests/data/emulated_close.jsonl names jobs that together have every setting that was run, each with each way to shard,
and of each job the figures that the estimate hits, with how nearly (scripts/close_figures.py).
results/emulated.md has the other figures and their causes.
"""

import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any

import pytest

from planner.methods import METHODS
from scripts.emulated_grid import FAR_CAUSES, HELD_OUT, compared, far_rows, load_rows, ran

CLOSE_JOBS = [
    json.loads(line)
    for line in (Path(__file__).parent / "data" / "emulated_close.jsonl").read_text(encoding="utf-8").splitlines()
]
# Of all runs by sharding: nine tenths of the errors in allocated bytes at the peak, three quarters of those in need.
PEAKS_WITHIN = {
    "none": 0.01,
    "ddp": 0.01,
    "zero1": 0.01,
    "zero2": 0.018,
    "zero3": 0.015,
    "fsdp2": 0.016,
    "distributed": 0.005,
    "tensor": 0.01,
}
NEEDS_WITHIN = {
    "none": 0.036,
    "ddp": 0.046,
    "zero1": 0.055,
    "zero2": 0.05,
    "zero3": 0.065,
    "fsdp2": 0.065,
    "distributed": 0.025,
    "tensor": 0.035,
}

# Mean absolute error in allocated bytes at the peak: of all runs, and of a method with one way to tune.
ALL_WITHIN, KIND_WITHIN = 0.005, 0.02


def key(row: dict[str, Any]) -> str:
    return json.dumps([row["gpus"], row["settings"]], sort_keys=True)


ROWS = {key(row): row for row in load_rows() + load_rows(HELD_OUT) if row["outcome"] == "fits"}


@pytest.mark.parametrize("job", CLOSE_JOBS, ids=lambda job: f"{job['settings'].get('method', 'sft')}-{job['gpus']}")
def test_a_run_takes_what_was_estimated(job: dict[str, Any]) -> None:
    found = compared(ROWS[key(job)])
    pairs = {**found.phases, "need": (found.need, found.needed), "reserved": (found.shown, found.reserved)}
    for name, within in job["close"].items():
        estimated, emulated = pairs[name]
        assert estimated == pytest.approx(emulated, rel=within), (name, job["settings"])


ONE_GPU = [
    row
    for row in ROWS.values()
    if row["gpus"].startswith("1x") and row["settings"].get("sharding") in ("zero3", "fsdp2")
]


@pytest.mark.parametrize("row", ONE_GPU, ids=lambda row: json.dumps(row["settings"]))
def test_one_gpu_that_shards_with_itself(row: dict[str, Any]) -> None:
    """A parameter is its own shard; what comes from the host is copied. 28 MiB of FSDP2's are a layer not yet there.

    Leaves out ZeRO-3's load with `offload_param`, which is far below the peak.
    """
    found = compared(row)
    assert len(ONE_GPU) == 4
    for phase, (estimated, emulated) in found.phases.items():
        if phase != "load" or found.candidate.sharding == "fsdp2" or not found.candidate.offload_param:
            assert estimated == pytest.approx(emulated, rel=0.015, abs=30 * 2**20), phase


DIVIDED = [row for row in load_rows(HELD_OUT) if row["kind"].startswith("held out, divided")]


@pytest.mark.parametrize("row", DIVIDED, ids=lambda row: f"{row['kind']}-{row['settings']['model']}-{row['gpus']}")
def test_divided_models_take_what_was_estimated(row: dict[str, Any]) -> None:
    """Mixtral on 16 GPUs took 5 % more until FSDP2's padding of one expert to two was counted.

    Without checkpoints needs are near, too: with adapters beside divided experts they were 11 to 18 % too many.
    """
    assert len(DIVIDED) == 19
    found = compared(row)
    assert abs(found.error) < 0.01
    if not found.candidate.gradient_checkpointing:
        assert abs(found.needed_error) < 0.035


ROLLOUTS = [
    row
    for row in ROWS.values()
    if row["settings"].get("gradient_checkpointing") is False
    and row["settings"].get("dtype", "float32") == "float32"
    and row["settings"].get("tuning", "full") == "full"
    and row["allocated"].get("rollout")
    and not row["settings"].get("vllm")
    and row["gpus"].startswith("1x")
    and row["settings"].get("prompt_length", 512) <= 512  # the last token needs more than the prompt
]


def test_generate_in_full_copies_weights_without_checkpointing_too() -> None:
    """accelerate's autocast wraps the forward pass of each token and keeps its 16-bit copies of float32 weights."""
    pairs = [compared(row).phases["rollout"] for row in ROLLOUTS]
    assert len(pairs) >= 5
    for estimated, emulated in pairs:
        assert estimated == pytest.approx(emulated, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", PEAKS_WITHIN)
def test_nine_of_ten_peaks_and_three_of_four_needs_are_near(sharding: str) -> None:
    runs = [each for each in ran() if each.candidate.sharding == sharding]
    assert quantiles((abs(each.error) for each in runs), n=10)[-1] < PEAKS_WITHIN[sharding]
    needs = [abs(each.needed_error) for each in runs if each.needed]
    assert quantiles(needs, n=4)[-1] < NEEDS_WITHIN[sharding]


@pytest.mark.slow
def test_every_method_and_way_to_tune_is_near_on_average() -> None:
    errors: dict[tuple[str, str, str], list[float]] = {}
    for each in (*ran(), *(compared(row) for row in load_rows(HELD_OUT) if row["outcome"] == "fits")):
        kind = (each.candidate.method, each.candidate.tuning, each.candidate.quantization)
        errors.setdefault(kind, []).append(abs(each.error))
    assert fmean(error for kind in errors.values() for error in kind) < ALL_WITHIN
    assert {kind: fmean(found) for kind, found in errors.items() if fmean(found) > KIND_WITHIN} == {}
    assert {method for method, _, _ in errors} == {name for name, row in METHODS.items() if row.last_trl == "current"}


@pytest.mark.slow
def test_a_row_far_off_has_a_cause() -> None:
    """Each row beyond 5 % in allocated bytes has a cause, and each cause a row."""
    assert {key for key, _ in far_rows()} == FAR_CAUSES.keys()


OF_RANK_0 = """
from planner.memory.schemes import zero
from scripts import emulated_grid
of_all = zero.partitions
zero.partitions = lambda candidate: of_all(candidate)[:1]
for row in emulated_grid.load_rows():
    settings = row["settings"]
    if row["outcome"] == "fits" and settings.get("sharding") == "zero2" and settings["num_processes"] > 2:
        if settings["model"] in ("Qwen2.5-1.5B", "openai-community/gpt2") and settings.get("tuning", "full") == "full":
            print(emulated_grid.compared(row).error)
"""


@pytest.mark.slow
def test_the_rank_that_ran_takes_what_its_own_partition_does() -> None:
    """ZeRO-2 on 4 and 8 emulated GPUs, of which rank 0 runs: +6.5 % for the rank that needs most, of its own +1.5 %."""
    printed = subprocess.run([sys.executable, "-c", OF_RANK_0], capture_output=True, text=True, check=True).stdout
    errors = [float(line) for line in printed.split()]
    assert len(errors) == 6
    assert max(map(abs, errors)) < 0.016


def test_what_is_beside_the_units_of_fsdp2_stays_gathered() -> None:
    """Positions and projections of OPT-350M: 14 MiB of the forward pass were missing without them."""
    (row,) = (
        row
        for row in ROWS.values()
        if (row["settings"]["model"], row["settings"].get("sharding")) == ("facebook/opt-350m", "fsdp2")
    )
    estimated, emulated = compared(row).phases["forward"]
    assert estimated == pytest.approx(emulated, rel=0.001)

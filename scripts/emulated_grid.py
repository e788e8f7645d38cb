"""Run a grid of jobs on emulated GPUs beside their estimates: results/emulated.jsonl, and results/emulated.md.

    DIR/bin/python -m scripts.emulated_grid run [COUNT]    in an environment of scripts/emulated_environment.sh
    python -m scripts.emulated_grid table                  the page, from the rows that there are

A job that has a row is not run again, so that a run can be broken off.
"""

import importlib.metadata
import json
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from statistics import mean, median
from textwrap import wrap
from typing import Any

from msgspec import Struct

from planner.candidate import Candidate
from planner.errors import PlanError
from planner.estimation import estimate
from planner.gpus.cluster import Cluster
from planner.gpus.parse import parse_cluster
from planner.memory.communication import nccl_bytes
from planner.memory.layers.measured_layers import MeasuringRefused, complete_shipped
from planner.memory.runtime import context_bytes
from planner.models.catalogue import load_model
from planner.models.shape import ModelShape
from planner.units import GIB

RESULTS = Path(__file__).resolve().parents[1] / "results"
ROWS, PAGE = RESULTS / "emulated.jsonl", RESULTS / "emulated.md"
EXPLAINED = 0.03  # rows further off in allocated bytes are listed
EXPLANATION = (
    "They ran on emulated GPUs (docs/emulated.md), everything on the card done at once. Errors are estimated over "
    "emulated, less one. Allocated: `max_memory_allocated` beside the estimate without CUDA context, NCCL and slack. "
    "Reserved: `max_memory_reserved` beside the estimate with slack; a run with room to spare keeps more than it needs."
)
LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "deepspeed", "bitsandbytes")


class Job(Struct, frozen=True, kw_only=True):
    """One row of the grid: a kind of job, its GPUs, and the settings other than SFT of one row of 2,048 tokens."""

    kind: str
    gpus: str
    settings: dict[str, Any]

    @property
    def key(self) -> str:
        return json.dumps([self.gpus, self.settings], sort_keys=True)

    @property
    def candidate(self) -> Candidate:
        usual = {"method": "sft", "max_length": 2048, "per_device_train_batch_size": 1, "padded": False}
        named = {name: value for name, value in (usual | self.settings).items() if name != "model"}
        return Candidate(model=complete(load_model(self.settings["model"])), **named)


def complete(model: ModelShape) -> ModelShape:
    """The model with its layers; those without formulas have the memory that ships with the package."""
    if model.known:
        return model
    shipped = complete_shipped(model, lambda recipe: MeasuringRefused(reason=f"{model.id} does not ship with {recipe}"))
    assert shipped is not None
    return shipped


SMALL, MIDDLE, LARGE = "Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-7B"
LORA, FULL = {"tuning": "lora", "dtype": "bfloat16"}, {"tuning": "full", "dtype": "bfloat16"}
TUNINGS = {
    "LoRA": LORA,
    "full 16 bit": FULL,
    "full float32": {"tuning": "full", "dtype": "float32"},
    "QLoRA": LORA | {"quantization": "nf4-double"},
}


def grid() -> Iterator[Job]:
    """Yield the jobs, one kind after another."""
    for model, (kind, tuning) in product((SMALL, MIDDLE), TUNINGS.items()):
        for more in ({}, {"gradient_checkpointing": False}, {"per_device_train_batch_size": 4, "max_length": 1024}):
            yield Job(kind=kind, gpus="1xA100-40G", settings={"model": model, **tuning, **more})
    for length, model in product((1024, 2048, 4096), (SMALL, MIDDLE)):
        eager = {"model": model, **LORA, "attn_implementation": "eager", "max_length": length}
        yield Job(kind="eager attention", gpus="1xA100-40G", settings=eager)
    yield from other_methods()
    for optim in ("adamw_torch", "adafactor", "sgd", "adamw_8bit", "lion_32bit"):
        yield Job(kind="optimizers", gpus="1xA100-40G", settings={"model": SMALL, **FULL, "optim": optim})
    yield from sharded()
    yield from measured_layers()
    for model, (kind, tuning) in product((SMALL, MIDDLE), TUNINGS.items()):
        changes = {"model": model, **tuning, "expandable_segments": True}
        yield Job(kind=f"{kind}, expandable", gpus="1xA100-40G", settings=changes)


def measured_layers() -> Iterator[Job]:
    """Yield jobs of models without formulas, on 4-bit bases and with Liger's kernels."""
    qlora = LORA | {"quantization": "nf4", "padded": True, "max_length": 512, "per_device_train_batch_size": 4}
    liger = {**qlora, "quantization": "none", "use_liger_kernel": True}
    for model in ("LiquidAI/LFM2-350M", "Qwen/Qwen3.5-0.8B"):
        for more in ({}, {"gradient_checkpointing": False}):
            yield Job(kind="QLoRA, measured layers", gpus="1xA100-40G", settings={"model": model, **qlora, **more})
    for model in ("Qwen/Qwen3.5-0.8B", "google/gemma-4-E2B"):
        for more in ({}, {"gradient_checkpointing": False}, {"quantization": "nf4"}):
            yield Job(kind="Liger, measured layers", gpus="1xA100-40G", settings={"model": model, **liger, **more})


def other_methods() -> Iterator[Job]:
    for method, (kind, tuning) in product(
        ("dpo", "kto", "reward", "grpo", "rloo"), {"LoRA": LORA, "full": FULL}.items()
    ):
        rows: dict[str, Any] = {"kto": {"per_device_train_batch_size": 2}}.get(method, {})  # TRL refuses one row
        if method in ("grpo", "rloo"):
            rows = {"per_device_train_batch_size": 4, "num_generations": 4}
        changes = {"model": SMALL, "method": method, **tuning, **rows, "max_length": 1024}
        yield Job(kind=f"{method} {kind}", gpus="1xA100-40G", settings=changes)


def sharded() -> Iterator[Job]:
    """Yield jobs of two real processes, with a small model for a small machine, and of one rank of eight."""
    for sharding, ranks in product(("ddp", "zero2", "zero3", "fsdp2"), (2, 8)):
        for kind, tuning, model in (("LoRA", LORA, LARGE), ("full", FULL, MIDDLE)):
            shards = {**tuning, "sharding": sharding, "num_processes": ranks, "max_length": 1024}
            settings = {"model": SMALL if ranks == 2 else model, **shards}
            yield Job(kind=f"{sharding} {kind}", gpus=f"{ranks}xA100-80G", settings=settings)


def torch_bytes(candidate: Candidate, cluster: Cluster, phase: Any) -> int:
    """Return what an estimated phase allocates through PyTorch: not the CUDA context, NCCL's buffers and the slack."""
    outside = context_bytes(cluster.gpu) + nccl_bytes(candidate)
    return int(phase.total_bytes - phase.components.get("fragmentation", 0) - outside)


def row(job: Job) -> dict[str, Any]:
    """Run one job on emulated GPUs and return its row."""
    from probes.runner.devices import DeviceOptions, device
    from probes.runner.runner import Limits

    with tempfile.TemporaryDirectory() as logs:
        options = DeviceOptions(logs=Path(logs), limits=Limits(host_reserve_share=0.0), save=False, resume=False)
        found = device("emulated", parse_cluster(job.gpus, None), options)(job.candidate)
    (rank,) = found.ranks[:1] or (None,)
    return {
        "kind": job.kind,
        "gpus": job.gpus,
        "settings": job.settings,
        "outcome": found.outcome,
        "message": found.message,
        "seconds": round(found.wall_seconds, 1),
        "allocated": {} if rank is None else {peak.name: peak.allocated_bytes for peak in rank.phases},
        "reserved": 0 if rank is None else rank.reserved_bytes,
    }


def run(count: int) -> None:
    """Run the jobs that have no row yet, at most `count`, and append each row as it is ready."""
    lines = ROWS.read_text(encoding="utf-8").splitlines() if ROWS.exists() else []
    done = {json.dumps([each["gpus"], each["settings"]], sort_keys=True) for each in map(json.loads, lines)}
    for job in [each for each in grid() if each.key not in done][:count]:
        try:
            text = json.dumps(row(job))
        except PlanError as error:
            text = json.dumps({"kind": job.kind, "gpus": job.gpus, "settings": job.settings, "outcome": str(error)})
        with ROWS.open("a", encoding="utf-8") as file:
            file.write(text + "\n")
        print(text[:200], flush=True)


# -- the page ----------------------------------------------------------------------------------------------------------


class Compared(Struct, frozen=True, kw_only=True):
    """A row beside today's estimate. Bytes that PyTorch allocates, by phase: (estimated, emulated)."""

    job: Job
    phases: dict[str, tuple[int, int]]
    peaks: tuple[int, int]
    need: int  # estimated, with the allocator's slack
    reserved: int

    @property
    def error(self) -> float:
        return self.peaks[0] / self.peaks[1] - 1


def compared(row: dict[str, Any]) -> Compared:
    job = Job(kind=row["kind"], gpus=row["gpus"], settings=row["settings"])
    candidate, cluster = job.candidate, parse_cluster(job.gpus, None)
    expected = estimate(candidate, cluster).gpus[0].phases
    estimated = {phase.name: torch_bytes(candidate, cluster, phase) for phase in expected}
    return Compared(
        job=job,
        phases={name: (size, row["allocated"][name]) for name, size in estimated.items() if row["allocated"].get(name)},
        peaks=(max(estimated.values()), max(row["allocated"].values())),
        need=max(estimated[phase.name] + phase.components.get("fragmentation", 0) for phase in expected),
        reserved=row["reserved"],
    )


def table() -> None:
    """Write the page from the rows and today's estimates."""
    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    ran = [compared(each) for each in rows if each["outcome"] == "fits"]
    kinds: dict[str, list[Compared]] = {}
    for each in ran:
        kinds.setdefault(each.job.kind, []).append(each)
    lines = [
        "# Estimates beside the emulated CUDA stack",
        "",
        *wrap(f"{len(ran)} jobs of `scripts/emulated_grid.py`. {EXPLANATION}", 118),
        "",
        "| kind | jobs | allocated: median | mean absolute | worst | need over reserved: median |",
        "|---|---|---|---|---|---|",
    ]
    for kind, members in {**kinds, "all": ran}.items():
        errors = [each.error for each in members]
        kept = median(each.need / each.reserved - 1 for each in members)
        figures = f"{median(errors):+.1%} | {mean(map(abs, errors)):.1%} | {max(errors, key=abs):+.1%} | {kept:+.1%}"
        lines.append(f"| {kind} | {len(members)} | {figures} |")
    lines += ["", f"## Rows beyond {EXPLAINED:.0%}", "", *BEYOND_HEAD]
    lines += [_beyond(each) for each in ran if abs(each.error) > EXPLAINED]
    failed = [each for each in rows if each["outcome"] != "fits"]
    lines += [
        "",
        *(f"Not run: {each['settings']}: {each['outcome']} {each.get('message', '')[:200]}" for each in failed),
    ]
    PAGE.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


BEYOND_HEAD = ("| job | GPUs | estimated GiB | emulated GiB | error | phases |", "|---|---|---|---|---|---|")


def _beyond(each: Compared) -> str:
    phases = ", ".join(f"{name.replace('_', ' ')} {one / other - 1:+.1%}" for name, (one, other) in each.phases.items())
    settings = ", ".join(f"{name} {value}" for name, value in each.job.settings.items())
    estimated, emulated = (f"{size / GIB:.2f}" for size in each.peaks)
    return f"| {settings} | {each.job.gpus} | {estimated} | {emulated} | {each.error:+.1%} | {phases} |"


if __name__ == "__main__":
    if sys.argv[1] == "run":
        print({name: importlib.metadata.version(name) for name in LIBRARIES})
        run(int(sys.argv[2]) if len(sys.argv) > 2 else sys.maxsize)
    else:
        table()

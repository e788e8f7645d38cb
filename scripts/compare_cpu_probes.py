"""Compare real trainers in worker processes on the CPU with their dry runs.

python scripts/compare_cpu_probes.py                          rewrites results/cpu_probes.md
python scripts/compare_cpu_probes.py sft,grpo tiny-qwen2      prints the rows of these, writes nothing
"""

import os
import sys
import tempfile
from pathlib import Path

import torch

from planner.allocator.trace import Trace
from planner.candidate import Candidate
from planner.measurements.measurement import Measurement
from planner.methods import MethodName
from planner.models.catalogue import load_model
from probes.dryrun.dry_run import dry_run
from probes.runner.runner import Limits, run_probe
from probes.task import Task

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "results" / "cpu_probes.md"
METHODS: tuple[MethodName, ...] = (
    "sft",
    "dpo",
    "kto",
    "reward",
    "grpo",
    "rloo",
    "distillation",
    "online-dpo",
    "cpo",
    "orpo",
    "gkd",
)
MODELS = ("tiny-qwen2", "tiny-llama", "tiny-gemma3", "tiny-mixtral")
LENGTHS = {
    "max_length": 128,
    "prompt_length": 32,
    "max_completion_length": 32,
    "num_generations": 2,
    "per_device_train_batch_size": 4,
}
# Phases in which a measurement and its dry run differ, and why.
NAMES: dict[str, str] = {
    "rollout": "the dry run generates the last tokens of a rollout at once, so its one mask and its positions have the "
    "largest length: it is above the measurement, by the bytes shown",
    "load": "a prompt that is a token shorter",
}
HEAD = f"""# Probes on the CPU against dry runs

Each row is one process, started by `probes/runner/runner.py`: TRL's real trainer trained two steps of a small model
with random weights (`tests/models/`), and the bytes of its tensors were counted. Beside it stands the peak of the dry
run of the same candidate. All figures are bytes. bfloat16, full fine-tuning, gradient checkpointing, padded batches of
{LENGTHS["per_device_train_batch_size"]} rows: {LENGTHS["max_length"]} tokens, or a prompt of {LENGTHS["prompt_length"]}
and a completion of {LENGTHS["max_completion_length"]}. Nothing here ran on a GPU.

Made by `python scripts/compare_cpu_probes.py`.
"""


def candidate(method: MethodName, model: str) -> Candidate:
    shape = load_model(str(ROOT / "tests" / "models" / model))
    teacher = shape if method in ("distillation", "gkd") else None
    return Candidate(method=method, model=shape, dtype="bfloat16", teacher_model=teacher, **LENGTHS)  # type: ignore[arg-type]


def compared(method: MethodName, model: str, logs: Path) -> tuple[Measurement, Trace]:
    case = candidate(method, model)
    task = Task(candidate=case, device="cpu", folder="", save=False, resume=False)
    return run_probe(task, Limits(), logs), dry_run(case, "cpu")


def row(method: str, model: str, measured: Measurement, dry: Trace) -> str:
    if measured.outcome != "fits":
        return f"| {method} | {model} | {measured.outcome}: {measured.message} | {dry.peak_bytes:,} | | |"
    phases = {phase.name: phase.allocated_bytes for phase in measured.ranks[0].phases}
    by_phase = [
        f"{phase.name} {phases[phase.name] - phase.total_bytes:+,}"
        for phase in dry.phases
        if phases[phase.name] != phase.total_bytes
    ]
    difference = measured.peak_bytes - dry.peak_bytes
    share = f"{difference:+,} ({difference / dry.peak_bytes:+.3%})" if difference else "0"
    return f"| {method} | {model} | {measured.peak_bytes:,} | {dry.peak_bytes:,} | {share} | {', '.join(by_phase)} |"


def main() -> None:
    methods = [method for method in METHODS if len(sys.argv) < 2 or method in sys.argv[1].split(",")]
    models = [model for model in MODELS if len(sys.argv) < 3 or model in sys.argv[2].split(",")]
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # such small operators only wait for other threads
    torch.set_num_threads(1)
    rows: list[str] = []
    versions: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as logs:
        for model in models:
            for method in methods:
                measured, dry = compared(method, model, Path(logs))
                versions |= measured.versions
                rows.append(row(method, model, measured, dry))
                print(rows[-1], file=sys.stderr, flush=True)
    if len(methods) == len(METHODS) and len(models) == len(MODELS):
        RESULT.write_text(report(rows, versions), encoding="utf-8")


def report(rows: list[str], versions: dict[str, str]) -> str:
    table = [
        "| method | model | measured peak | dry run | difference | by phase |",
        "|---|---|---:|---:|---:|---|",
        *rows,
    ]
    names = [f"- **{phase}**: {why}." for phase, why in NAMES.items()]
    libraries = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    return "\n".join([HEAD, f"Versions: {libraries}.", "", *table, "", "## What differs", "", *names, ""])


if __name__ == "__main__":
    main()

"""Workers without the libraries: a few lines of Python that the runner starts instead of the real worker."""

import sys
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from planner.candidate import Candidate
from planner.measurements.documents import measurement_line
from planner.measurements.measurement import Measurement, PhasePeak, RankMemory
from planner.models.catalogue import load_model
from probes.runner.runner import WorkerLimits, run_probe
from probes.task import ANSWER_PREFIX, Task

CANDIDATE = Candidate(model=load_model("Qwen2.5-0.5B"), method="sft")
TASK = Task(candidate=CANDIDATE, device="cpu", folder="", resume=False)
LIMITS = WorkerLimits(seconds=20.0, grace_seconds=0.3, host_reserve_share=0.0, disk_reserve_bytes=0)
RANK = RankMemory(
    rank=0, phases=(PhasePeak(name="backward", allocated_bytes=5, reserved_bytes=0, driver_bytes=0, seconds=0.5),),
    state_bytes={"weights": 4}, capacity_bytes=10, allocator={},
)  # fmt: skip
ANSWER = Measurement(
    candidate=CANDIDATE, device="cpu", outcome="fits", ranks=(RANK,), shortage=None, step_seconds=0.5,
    tokens_per_second=10.0, wall_seconds=0.1, message="", log="", versions={"trl": "1.16"},
)  # fmt: skip


def script(text: str) -> Callable[[Task, Path], list[str]]:
    """The command of a worker that runs a few lines of Python, which can use `task_file` and `answer`."""
    answer = ANSWER_PREFIX + measurement_line(ANSWER)
    head = f"import os, signal, subprocess, sys, time\ntask_file = sys.argv[1]\nanswer = {answer!r}\n"
    return lambda task, task_file: [sys.executable, "-I", "-S", "-c", head + text, str(task_file)]


def run(text: str, tmp_path: Path, limits: WorkerLimits = LIMITS) -> Measurement:
    return run_probe(replace(TASK, folder=str(tmp_path)), limits, tmp_path / "logs", script(text))

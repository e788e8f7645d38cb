"""The command of a worker: this Python alone, or `accelerate launch` with the candidate's own launch files where several processes share the work."""

import sys
from pathlib import Path

from planner.launch import accelerate, deepspeed
from planner.launch.command import launch_command
from planner.launch.files import launch_files
from probes.task import Task

WORKER = "probes.worker.worker"
READ_BY_LAUNCHER = frozenset({accelerate.FILE, deepspeed.FILE})
LAUNCHER = (
    sys.executable,
    "-m",
    "accelerate.commands.accelerate_cli",
    "launch",
    "--main_process_port",
    "0",
)  # 0: any port that is free


def worker_command(task: Task, task_file: Path) -> list[str]:
    """What runs a task on this machine. Where a launcher is needed, its files are written into the task's folder, where the command is run."""
    candidate = task.candidate
    if candidate.num_processes == 1 and candidate.sharding in ("none", "ddp"):
        return [sys.executable, "-m", WORKER, str(task_file)]
    for name, text in launch_files(candidate).items():
        if name in READ_BY_LAUNCHER:
            Path(task.folder, name).write_text(text, encoding="utf-8")
    *launched, module = launch_command(candidate, WORKER, LAUNCHER)
    return [*launched, "-m", module, str(task_file)]

"""The command line of a worker: this Python for one process, `accelerate launch` with its files for several."""

import sys
from pathlib import Path

from planner.launch import accelerate, deepspeed
from planner.launch.command import launch_command
from planner.launch.files import launch_files
from probes.task import Task

WORKER = "probes.worker.worker"
READ_BY_LAUNCHER = frozenset({accelerate.FILE, deepspeed.FILE})
# Port 0: any free port.
LAUNCHER = (sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--main_process_port", "0")


def worker_command(task: Task, task_file: Path) -> list[str]:
    """Return the command that runs a task on this machine, in the task's folder.

    If it needs a launcher, this writes the launcher's files into that folder.
    """
    candidate = task.candidate
    if candidate.num_processes == 1 and candidate.sharding in ("none", "ddp"):
        return [sys.executable, "-m", WORKER, str(task_file)]
    for name, text in launch_files(candidate).items():
        if name in READ_BY_LAUNCHER:
            Path(task.folder, name).write_text(text, encoding="utf-8")
    *command, module = launch_command(candidate, WORKER, LAUNCHER)
    return [*command, "-m", module, str(task_file)]

"""The command line of a worker: this Python for one process, `accelerate launch` with its files for several."""

import sys
from pathlib import Path

from msgspec.structs import asdict

from planner.candidate import Candidate
from planner.errors import ProbeFailed
from planner.launch import accelerate, deepspeed
from planner.launch.command import launch_command
from planner.launch.files import launch_files
from probes.task import Task

WORKER = "probes.worker.worker"
READ_BY_LAUNCHER = frozenset({accelerate.FILE, deepspeed.FILE})
LAUNCHER = (sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch")
ONE_RANK = (sys.executable, "-m", "probes.emulated_gpu.one_rank")  # accelerate's launcher, for rank 0 alone
ANY_PORT = ("--main_process_port", "0")


def needs_launcher(candidate: Candidate) -> bool:
    """Return whether a launcher starts the candidate's processes."""
    return candidate.num_processes > 1 or not candidate.scheme_row.whole


def worker_command(task: Task, task_file: Path) -> list[str]:
    """Return the command that runs a task's processes of this machine, in the task's folder.

    If it needs a launcher, this writes the launcher's files into that folder.

    Raises:
        ProbeFailed: the candidate is another tool's, whose trainer a worker does not build.
    """
    candidate = task.candidate
    if candidate.tool != "trl":
        raise ProbeFailed(f"it would run TRL's trainer, not {candidate.tool_row.name}'s")
    if not needs_launcher(candidate):
        return [sys.executable, "-m", WORKER, str(task_file)]
    for name, text in launch_files(candidate).items():
        if name in READ_BY_LAUNCHER:
            Path(task.folder, name).write_text(text, encoding="utf-8")
    meeting = (
        tuple(word for name, value in asdict(task.rendezvous).items() for word in (f"--{name}", str(value)))
        if task.rendezvous
        else ANY_PORT
    )
    launcher = ONE_RANK if task.one_of_many else LAUNCHER
    *command, module = launch_command(candidate, WORKER, (*launcher, *meeting))
    return [*command, "-m", module, str(task_file)]

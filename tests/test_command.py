"""The command of a worker: this Python, or accelerate with the candidate's launch files."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("psutil")

from msgspec.structs import replace
from script_workers import CANDIDATE, TASK

from probes.runner.command import worker_command
from probes.task import Task


def command(tmp_path: Path, **changes: object) -> list[str]:
    task: Task = replace(TASK, folder=str(tmp_path), candidate=replace(CANDIDATE, **changes))  # type: ignore[arg-type]
    return worker_command(task, Path("task.json"))


@pytest.mark.parametrize("sharding", ["none", "ddp"])
def test_one_process_needs_no_launcher(sharding: str, tmp_path: Path) -> None:
    assert command(tmp_path, sharding=sharding) == [sys.executable, "-m", "probes.worker.worker", "task.json"]
    assert list(tmp_path.iterdir()) == []


def test_several_processes_are_launched_from_the_candidates_own_files(tmp_path: Path) -> None:
    found = command(tmp_path, sharding="zero3", num_processes=4)
    assert found[: found.index("launch") + 1] == [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
    assert found[found.index("--num_processes") + 1] == "4"
    assert found[-3:] == ["-m", "probes.worker.worker", "task.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["accelerate.yaml", "deepspeed.json"]


def test_deepspeed_with_one_process_needs_its_launcher(tmp_path: Path) -> None:
    """DeepSpeed offloads to the host, and only its launcher switches it on."""
    assert "launch" in command(tmp_path, sharding="zero3", offload_param=True)


def test_two_probes_at_once_do_not_meet_on_one_port(tmp_path: Path) -> None:
    found = command(tmp_path, sharding="ddp", num_processes=2)
    assert found[found.index("--main_process_port") + 1] == "0"

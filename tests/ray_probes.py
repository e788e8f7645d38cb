"""Probes for the tests on Ray: a worker without the libraries, and as a script a study that somebody else kills.

python tests/ray_probes.py worker TASK_FILE RECORD SECONDS   prints a measurement after some seconds
python tests/ray_probes.py study ADDRESS STORAGE RECORD SECONDS   runs a study on a Ray cluster
"""

import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from planner.candidate import Candidate  # noqa: E402
from planner.estimation import estimate  # noqa: E402
from planner.gpus.parse import parse_cluster  # noqa: E402
from planner.measurements.documents import measurement_line  # noqa: E402
from planner.measurements.measurement import Measurement, PhasePeak, RankMemory, Shortage  # noqa: E402
from probes.runner.devices import DeviceOptions, device  # noqa: E402
from probes.runner.runner import WorkerLimits  # noqa: E402
from probes.task import ANSWER_PREFIX, Task, read_task  # noqa: E402

if TYPE_CHECKING:
    from probes.study.study import StudyResult

CLUSTER = parse_cluster("1xA100-40G", None)
NOT_TENSORS = ("runtime", "fragmentation")  # host memory has neither
MORE = 1.03  # what every candidate needs of its estimated activations: a constant that the belief can learn
VERSIONS = {"ray probes": "1"}


def worker(task: Task, task_file: Path, record: Path, seconds: float) -> list[str]:
    """The command of the worker of this file."""
    return [sys.executable, __file__, "worker", str(task_file), str(record), str(seconds)]


def device_options(record: Path, seconds: float) -> DeviceOptions:
    return DeviceOptions(
        logs=record.parent / "logs",
        resume=False,
        folder=str(record.parent),
        limits=WorkerLimits(seconds=60.0, grace_seconds=0.5, host_reserve_share=0.0, disk_reserve_bytes=0),
        command=partial(worker, record=record, seconds=seconds),
    )


def answer(candidate: Candidate, activations: float = MORE, others: float = 1.0) -> Measurement:
    """The measurement of a CPU on which every candidate needs these shares of its estimate."""
    gpu = estimate(candidate, CLUSTER).gpus[0]
    needed = {
        phase.name: sum(
            int(size * (activations if component == "activations" else others))
            for component, size in phase.components.items()
            if component not in NOT_TENSORS
        )
        for phase in gpu.phases
    }
    phase, most = max(needed.items(), key=lambda each: each[1])
    over = most - CLUSTER.gpu.free_bytes
    peaks = tuple(
        PhasePeak(name=name, allocated_bytes=size, reserved_bytes=0, driver_bytes=0, seconds=0.1)
        for name, size in needed.items()
    )
    rank = RankMemory(rank=0, phases=peaks, state_bytes={}, capacity_bytes=CLUSTER.gpu.free_bytes, allocator={})
    short = Shortage(
        rank=0, phase=phase, tried_bytes=over, free_bytes=0, allocated_bytes=most - over, reserved_bytes=0
    ) if over > 0 else None  # fmt: skip
    return Measurement(
        candidate=candidate, device="cpu", outcome="fits" if short is None else "out_of_memory",
        ranks=(rank,) if short is None else (), shortage=short, step_seconds=1.0 if short is None else 0.0,
        tokens_per_second=1.0 if short is None else 0.0, wall_seconds=0.1, message="", log="", versions={},
    )  # fmt: skip


def proven(address: str, storage: str, record: Path, at_a_time: int = 1, seconds: float = 0.3) -> "StudyResult":
    """A study on the Ray cluster at an address; without one on this machine."""
    # Lazy imports: a worker needs none of these, and a driver no test module with TRL and pytest.
    from planner.jobs.job import Job
    from planner.models.catalogue import load_model
    from planner.search.knobs import SearchProblem
    from probes.runner.ray_device import ray_device
    from probes.study.study import StudyOptions, prove

    pinned = {"lora_r": 16, "gradient_checkpointing": True}
    job = Job(model=load_model("Qwen2.5-7B"), method="sft", pinned=pinned, optimize="max-length")
    problem = SearchProblem(job=job, cluster=CLUSTER, tuning_class="lora")
    options = device_options(record, seconds)
    probe = ray_device("cpu", CLUSTER, options, address) if address else device("cpu", CLUSTER, options)
    return prove(problem, probe, StudyOptions(device="cpu", storage=storage, versions=VERSIONS, room=lambda: at_a_time))


def key(candidate: Candidate) -> str:
    return f"{candidate.max_length}-{candidate.per_device_train_batch_size}-{candidate.gradient_checkpointing}"


def entries(record: Path, event: str) -> list[tuple[str, int]]:
    """The candidates and processes of the workers that have started, or ended."""
    lines = record.read_text().splitlines() if record.exists() else []
    return [(name, int(process)) for kind, name, process in map(str.split, lines) if kind == event]


def run_worker(task_file: Path, record: Path, seconds: float) -> None:
    candidate = read_task(task_file).candidate
    with record.open("a") as file:
        file.write(f"start {key(candidate)} {os.getpid()}\n")
    time.sleep(seconds)
    with record.open("a") as file:
        file.write(f"end {key(candidate)} {os.getpid()}\n")
    print(ANSWER_PREFIX + measurement_line(answer(candidate)))


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        run_worker(Path(sys.argv[2]), Path(sys.argv[3]), float(sys.argv[4]))
    else:
        from ray_probes import proven as by_module  # Ray's workers import it; they cannot import a script

        by_module(sys.argv[2], sys.argv[3], Path(sys.argv[4]), seconds=float(sys.argv[5]))

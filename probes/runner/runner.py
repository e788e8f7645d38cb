"""Run one probe in a worker process: start it under a guard, watch its limits, end it if needed, read its measurement.

Whatever a worker does, a measurement is returned, and nothing of the worker is left: no process, no folder, no GPU
memory.
"""

import contextlib
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
from msgspec import Struct
from msgspec.structs import replace

from planner.candidate import Candidate
from planner.files.cache import require_folder, temporary_prefix
from planner.jobs.settings import settings_of
from planner.measurements.documents import candidate_report
from planner.measurements.measurement import Measurement
from planner.units import GIB, MIB, format_gib, format_seconds
from probes.runner import guard
from probes.runner.command import needs_launcher, worker_command
from probes.runner.gpus_in_use import Card, in_use, wait_until_free
from probes.runner.host import available_bytes, family, held_bytes, kernel_kills, with_environment
from probes.runner.verdict import WorkerExit, WorkerStop, nothing_measured, verdict, with_resumed
from probes.task import GIVEN_GPUS, PHASE_FILE, Task, resumed, write_task

MARK = "PLAN_PROBE"  # environment variable that marks every process of a probe
LOOK_SECONDS = 0.1  # between two checks of a worker's time and memory
LOOK_AT_DISK_SECONDS = 1.0  # between two checks of the disk
# How long the runner waits after SIGKILL: a process that does not end then is waiting for a device.
AFTER_GRACE_SECONDS = 5.0
KEPT_LOG_BYTES = 1 * MIB  # beginning that is kept of a log above its limit
# Variables that a launcher around `plan` sets; a worker must not see them, as it is not one of that launcher's
# processes.
OUTER_LAUNCHERS = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})
ALLOCATOR_VARIABLES = frozenset({"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"})  # set from the candidate instead
ALWAYS = {
    "PYTHONUNBUFFERED": "1",  # the log is complete up to the moment when the worker is killed
    "PYTHONFAULTHANDLER": "1",  # a crash in C code prints the Python stack
    # TRL reports each trainer that is built (trl 1.16, trainer/base_trainer.py, `_BaseTrainer._send_telemetry`); a
    # probe is no training.
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # NVML's order, so that the GPU that was checked is the one that is used
}


class WorkerLimits(Struct, frozen=True, kw_only=True):
    """The limits at which the runner ends a worker. 0 is no limit."""

    seconds: float = 1800.0
    ends_at: float = math.inf  # of `time.monotonic`: workers that run then are ended
    host_bytes: int = 0  # host memory of all its processes together
    # Share of host memory that must stay available; at this share earlyoom sends SIGKILL by default.
    host_reserve_share: float = 0.05
    disk_bytes: int = 0  # size of its folder
    disk_reserve_bytes: int = 1 * GIB  # free space that must remain on its disk, for logs and the study
    log_bytes: int = 256 * MIB
    grace_seconds: float = 5.0  # between SIGTERM and SIGKILL
    free_gpu_bytes: int = 0  # free memory that each GPU must have before a worker is started
    gpu_wait_seconds: float = 30.0  # how long to wait until the memory of the previous probe is free


Command = Callable[[Task, Path], list[str]]
Cards = Callable[[Task], tuple[Card, ...]]
Variables = Callable[[Task], dict[str, str]]


def no_cards(task: Task) -> tuple[Card, ...]:
    """Return no GPUs, for a worker that uses none."""
    return ()


def no_variables(task: Task) -> dict[str, str]:
    """Return no environment variables, for a device that needs none."""
    return {}


def run_probe(
    task: Task,
    limits: WorkerLimits,
    logs: Path,
    command: Command = worker_command,
    cards: Cards = no_cards,
    say: Callable[[str], None] = lambda _: None,
    variables: Variables = no_variables,
) -> Measurement:
    """Run one probe in a fresh process and return its measurement. Never raises for what a worker does.

    Args:
        task: the candidate and the device. In `task.folder` the worker's temporary folder is created; empty: the
        system's.
        limits: what the worker may use.
        logs: folder that keeps the task and the worker's output.
        command: returns the command line of the worker.
        cards: reads the GPUs that the worker would use.
        say: called with each phase that the worker enters.
        variables: the device's environment variables of a worker, whose folder exists.
    """
    started = time.monotonic()
    taken = in_use(
        wait_until_free(lambda: cards(task), limits.free_gpu_bytes, limits.gpu_wait_seconds), limits.free_gpu_bytes
    )
    if taken:
        stop = WorkerStop(outcome="gpu_in_use", message="; ".join(card.description for card in taken))
        return nothing_measured(task, stop, time.monotonic() - started, "")
    require_folder(logs)
    with tempfile.TemporaryDirectory(
        prefix=temporary_prefix("probe", task.folder), dir=task.folder or None, ignore_cleanup_errors=True
    ) as folder:

        def ran(task: Task) -> Measurement:
            worker = _Worker(
                folder=Path(folder),
                log=logs / _name(task),
                mark=uuid.uuid4().hex,
                limits=limits,
                started=started,
                say=say,
            )
            return verdict(task, _run(task, worker, command, variables(task)))

        placed = replace(task, folder=folder)
        found = ran(placed)
        if placed.resumes and found.outcome == "fits":
            found = with_resumed(found, ran(resumed(placed)))
        return replace(found, candidate=task.candidate)


class _Worker(Struct, frozen=True, kw_only=True):
    """A worker's files, limits and mark. `log` is the path of its logs without the suffix."""

    folder: Path
    log: Path
    mark: str
    limits: WorkerLimits
    started: float
    say: Callable[[str], None]

    @property
    def task_file(self) -> Path:
        return self.log.with_name(f"{self.log.name}.json")

    @property
    def stdout(self) -> Path:
        return self.log.with_name(f"{self.log.name}.out")

    @property
    def stderr(self) -> Path:
        return self.log.with_name(f"{self.log.name}.err")


def _run(task: Task, worker: _Worker, command: Command, variables: dict[str, str]) -> WorkerExit:
    """Start a worker under the guard, watch it, and end it; return how it ended."""
    write_task(task, worker.task_file)
    kills, grace = kernel_kills(), worker.limits.grace_seconds
    guarded = [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), str(grace), task.folder]
    with worker.stdout.open("wb") as stdout, worker.stderr.open("wb") as stderr:
        process = subprocess.Popen(
            [*guarded, *command(task, worker.task_file)],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            cwd=task.folder,
            env=worker_environment(task, worker.mark) | variables,
            start_new_session=True,
        )
        stopped = None
        try:
            stopped = _watch(process, worker)
        finally:  # on Ctrl-C too
            _end(process, worker, at_once=stopped is not None and stopped.outcome == "host_out_of_memory")
    return WorkerExit(
        exit_code=process.returncode,
        stopped=stopped,
        phase=_phase(worker.folder),
        stdout=worker.stdout,
        stderr=worker.stderr,
        kernel_kills=kernel_kills() - kills,
        wall_seconds=time.monotonic() - worker.started,
    )


def worker_environment(task: Task, mark: str) -> dict[str, str]:
    """Return a worker's environment: this process's without launcher variables, and the candidate's variables."""
    candidates = settings_of(task.candidate)["environment"]
    assert isinstance(candidates, dict)
    kept = {name: value for name, value in os.environ.items() if name not in OUTER_LAUNCHERS | ALLOCATOR_VARIABLES}
    paths = [str(Path(__file__).parents[2]), *filter(None, [kept.get("PYTHONPATH")])]
    own = {MARK: mark, "TMPDIR": task.folder, "PYTHONPATH": os.pathsep.join(paths)}
    if task.weights == "random":
        own["HF_HUB_OFFLINE"] = "1"
    if task.device == "cpu":
        own["CUDA_VISIBLE_DEVICES"] = ""
    else:
        own |= _gpus(task.candidate, kept.get("CUDA_VISIBLE_DEVICES", ""))
    return kept | ALWAYS | own | candidates


def _gpus(candidate: Candidate, visible: str) -> dict[str, str]:
    """Return the variables that say which GPUs a worker sees, and which its vLLM server may see.

    A process without a launcher sees one: with several, Transformers replicates the model in threads
    (training_args.py, `n_gpu`). Libraries look for GPUs while they are imported, so that the worker cannot choose.
    """
    own = {} if needs_launcher(candidate) else {"CUDA_VISIBLE_DEVICES": visible.split(",")[0] or "0"}
    return {GIVEN_GPUS: visible, **own}


def _watch(process: subprocess.Popen[bytes], worker: _Worker) -> WorkerStop | None:
    """Wait until the worker ends or exceeds a limit; return the limit that it exceeded, None if it ended by itself."""
    look_at_disk, phase = 0.0, ""
    while True:
        try:
            process.wait(LOOK_SECONDS)
            return None
        except subprocess.TimeoutExpired:
            pass
        entered = _phase(worker.folder)
        if entered not in ("", phase):
            phase = entered
            worker.say(phase)
        stop = _over_time(worker) or _over_memory(process, worker.limits)
        if stop is None and time.monotonic() >= look_at_disk:
            stop, look_at_disk = _over_disk(worker), time.monotonic() + LOOK_AT_DISK_SECONDS
        if stop is not None:
            return stop


def _over_time(worker: _Worker) -> WorkerStop | None:
    """Return the time limit if a worker has exceeded it, or the time of all probes is over."""
    if time.monotonic() >= worker.limits.ends_at:
        return WorkerStop(outcome="hung", message="the time for all probes was over")
    if not worker.limits.seconds or time.monotonic() - worker.started < worker.limits.seconds:
        return None
    return WorkerStop(outcome="hung", message=f"it had not ended after {format_seconds(worker.limits.seconds)}")


def _over_memory(process: subprocess.Popen[bytes], limits: WorkerLimits) -> WorkerStop | None:
    """Return the limit of host memory that a worker exceeds, its own or the host's reserve; None if it exceeds none."""
    if limits.host_bytes:
        held = held_bytes(family(process.pid))
        if held > limits.host_bytes:
            return WorkerStop(
                outcome="host_out_of_memory",
                message=f"it held {format_gib(held)} of host memory, {format_gib(limits.host_bytes)} were allowed",
            )
    reserve, available = int(psutil.virtual_memory().total * limits.host_reserve_share), available_bytes()
    if available < reserve:
        message = f"{format_gib(available)} of host memory were left to the host, {format_gib(reserve)} must be"
        return WorkerStop(outcome="host_out_of_memory", message=message)
    return None


def _over_disk(worker: _Worker) -> WorkerStop | None:
    """Return the limit of disk or log size that a worker exceeds; None if it exceeds none."""
    limits = worker.limits
    free, held = shutil.disk_usage(worker.folder).free, sum(_file_bytes(worker.folder))
    if free < limits.disk_reserve_bytes:
        return WorkerStop(
            outcome="disk_full",
            message=f"{format_gib(free)} of disk were left, {format_gib(limits.disk_reserve_bytes)} must be",
        )
    if limits.disk_bytes and held > limits.disk_bytes:
        return WorkerStop(
            outcome="disk_full",
            message=f"it held {format_gib(held)} of disk, {format_gib(limits.disk_bytes)} were allowed",
        )
    if limits.log_bytes and max(path.stat().st_size for path in (worker.stdout, worker.stderr)) > limits.log_bytes:
        return WorkerStop(outcome="garbage", message=f"it printed more than {format_gib(limits.log_bytes)}")
    return None


def _file_bytes(folder: Path) -> Iterator[int]:
    """Yield the bytes that each file of a folder uses on the disk."""
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                yield os.lstat(os.path.join(parent, name)).st_blocks * 512  # stat(2): units of 512 bytes
            except OSError:  # removed meanwhile
                continue


def _phase(folder: Path) -> str:
    """Return the last phase that the worker wrote to its folder; empty if none."""
    try:
        return (folder / PHASE_FILE).read_text(encoding="utf-8", errors="replace")[:32].strip()
    except OSError:
        return ""


def _end(process: subprocess.Popen[bytes], worker: _Worker, at_once: bool) -> None:
    """End all processes of a worker: ask the guard, then kill those left with the worker's mark."""
    if process.poll() is None:
        process.send_signal(guard.END_NOW if at_once else guard.END)
        try:
            process.wait(worker.limits.grace_seconds + AFTER_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            for left in family(process.pid):
                _kill(left)
            process.wait()
    for left in with_environment(MARK, worker.mark):
        _kill(left)
    for log in (worker.stdout, worker.stderr):
        if worker.limits.log_bytes and log.stat().st_size > worker.limits.log_bytes:
            os.truncate(log, KEPT_LOG_BYTES)


def _kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):  # ended meanwhile
        process.kill()


def _name(task: Task) -> str:
    """Return the file name of a probe's logs: the same for the same task, so that only the newest logs are kept."""
    values = [
        task.device,
        task.steps,
        task.weights,
        task.save,
        task.evaluate,
        task.resume,
        task.capacity_bytes,
        task.card_bytes,
        task.seed,
        task.rendezvous.machine_rank if task.rendezvous else 0,
        bool(task.from_checkpoint),
    ]
    text = json.dumps([values, candidate_report(task.candidate)], sort_keys=True)
    return f"{task.candidate.method}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"

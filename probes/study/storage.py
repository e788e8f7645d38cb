"""The Optuna storage of studies: by default a file in the user's cache; and study names, equal for equal problems."""

import hashlib
import json
import os
import re
import socket
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import monotonic, sleep
from typing import TypeVar

import optuna
from alembic.util import CommandError
from msgspec import to_builtins
from sqlalchemy import NullPool
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

from planner.errors import InputError, PlanError, shortened
from planner.files import database
from planner.files.cache import cache_root
from planner.files.database import (
    POSTGRESQL,
    SQLITE,
    connect_settings,
    error_line,
    hide_password,
    is_lost,
    make_folder_of,
    new_engine,
    not_answering,
    wait_for_turn,
)
from planner.measurements.measurement import DeviceName
from planner.models.shape import ModelShape
from planner.search.knobs import SearchProblem
from planner.units import format_seconds

T = TypeVar("T")
# Two missed heartbeats are a dead process (optuna 5.0, storages/_rdb/storage.py `_get_stale_trial_ids`).
HEARTBEAT_SECONDS = 30
# Errors of Optuna 5.0, SQLAlchemy 2.1 and Alembic 1.20 where a table holds what Optuna did not write, such as an
# unknown state.
ALTERED = (
    ArithmeticError, ValueError, TypeError, LookupError, AttributeError, AssertionError, RuntimeError, CommandError,
)  # fmt: skip
LOST_SECONDS = 600.0  # a study waits so long for a server that does not answer: a restart with recovery, a failover
RETRY_SECONDS = 1.0
READABLE = 60  # characters of a study's name before its digest
# Libraries whose releases change measurements.
LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "bitsandbytes", "deepspeed", "vllm")


def default_storage() -> str:
    """Return the URL of the SQLite file in the user's cache."""
    return f"{SQLITE}{cache_root() / 'probes.db'}"


def library_versions() -> dict[str, str]:
    """Return the releases of the installed libraries."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def study_name(problem: SearchProblem, device: DeviceName, versions: Mapping[str, str]) -> str:
    """Return a name, equal for equal jobs, clusters, devices and libraries.

    Example: `Qwen2.5-7B-grpo-2xA100-40G-lora-throughput-1f0c2a9b`.
    """
    job, cluster = problem.job, problem.cluster
    key = {
        "model": _model(job.model),
        "method": job.method,
        "trl": job.trl_version,
        "pinned": {
            name: _model(value) if isinstance(value, ModelShape) else value
            for name, value in sorted(job.pinned.items())
        },
        "optimize": job.optimize,
        "effective_batch_size": job.effective_batch_size,
        "cluster": to_builtins(cluster),
        "class": problem.tuning_class,
        "offload": problem.offload,
        "device": device,
        "versions": dict(versions),
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=list).encode()).hexdigest()[:8]
    parts = (
        job.model.id.rsplit("/", 1)[-1],
        job.method,
        f"{cluster.num_gpus}x{cluster.gpu.name}",
        problem.tuning_class,
        job.optimize,
        device,
    )
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', '-'.join(parts))[:READABLE]}-{digest}"


def _model(model: ModelShape) -> dict[str, object]:
    return {"id": model.id, "config": model.config, "dtype": model.dtype, "quantization": model.quantization}


def open_study(url: str, name: str, sampler: optuna.samplers.BaseSampler) -> optuna.Study:
    """Open the study of that name, or create it. On PostgreSQL one process at a time creates tables and studies.

    Raises:
        PlanError: the folder of the storage's file cannot be created, or Optuna cannot read a trial of the study.
    """
    make_folder_of(url)
    try:
        with turn(url, "optuna"):
            storage = optuna.storages.RDBStorage(url, engine_kwargs=database_settings(url))
            study = optuna.create_study(
                study_name=name, storage=storage, sampler=sampler, direction="maximize", load_if_exists=True
            )
        trials = study.get_trials(deepcopy=False)
        if [trial.number for trial in trials] != list(range(len(trials))):
            raise LookupError("trials are missing")
        if study.directions != [optuna.study.StudyDirection.MAXIMIZE]:
            raise ValueError("it has another goal")
    except ALTERED as error:
        raise PlanError(
            f"The study in {hide_password(url)} was altered, or written by another release of Optuna: "
            f"{shortened(error) or type(error).__name__}. Give another --storage."
        ) from error
    return study


def database_settings(url: str) -> dict[str, object]:
    """Return SQLAlchemy's settings for a study's storage. On a server no connection outlives a transaction."""
    settings: dict[str, object] = {"connect_args": connect_settings(url)}
    return settings | {"poolclass": NullPool} if is_shared(url) else settings


def is_shared(url: str) -> bool:
    """Return whether several processes may run one study of this storage at once."""
    return url.startswith(POSTGRESQL)


@contextmanager
def turn(url: str, name: str) -> Iterator[None]:
    """Let one process at a time into the block, of those that share the storage.

    The lock is that of a transaction: the server ends it with the connection of a process that dies.
    """
    if not is_shared(url):
        yield
        return
    with new_engine(url).begin() as connection:
        wait_for_turn(connection, name)
        yield


def outlast(operation: Callable[[], T], url: str, say: Callable[[str], None]) -> T:
    """Run an operation, again and again for `LOST_SECONDS` while the server of the storage does not answer.

    The operation must be one that may run twice: the server may have done what it did not confirm.
    """
    lost_at = 0.0
    while True:
        try:
            return operation()
        except (optuna.exceptions.StorageInternalError, SQLAlchemyError) as error:
            if not is_lost(error, url) or (lost_at and monotonic() - lost_at > LOST_SECONDS):
                raise
            if not lost_at:
                lost_at = monotonic()
                say(f"{hide_password(url)} does not answer; trying for {format_seconds(LOST_SECONDS)}")
        sleep(RETRY_SECONDS)


class Heartbeats:
    """Signs of life of the trials of a shared storage, by Optuna's table of heartbeats.

    Optuna records them in `Study.optimize` only, and warns in `Study.ask` of a storage with an interval: this is a
    second one on the same database.
    """

    def __init__(self, url: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            self._storage = optuna.storages.RDBStorage(
                url,
                engine_kwargs=database_settings(url),
                heartbeat_interval=HEARTBEAT_SECONDS,
                skip_table_creation=True,
            )
        self._stale_since: dict[int, float] = {}

    def beat(self, trial: optuna.Trial) -> None:
        """Record that a trial's process lives."""
        self._storage.record_heartbeat(trial._trial_id)

    @contextmanager
    def beating(self, trial: optuna.Trial) -> Iterator[None]:
        """Record every `HEARTBEAT_SECONDS` that a trial's process lives; go on when a lost server is back."""
        ended = threading.Event()

        def beat() -> None:
            pause: float = HEARTBEAT_SECONDS
            while not ended.wait(pause):
                pause = RETRY_SECONDS
                with suppress(optuna.exceptions.StorageInternalError, SQLAlchemyError):
                    self.beat(trial)
                    pause = HEARTBEAT_SECONDS

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def stopped(self, study: optuna.Study) -> set[int]:
        """Return the ids of the running trials whose process has stopped.

        They are stale by Optuna's rule (two intervals without a heartbeat), and still are one interval after they were
        first seen so: after a restart of the server, living processes have had that time.
        """
        now, stale = monotonic(), self._storage._get_stale_trial_ids(study._study_id)
        self._stale_since = {trial: self._stale_since.get(trial, now) for trial in stale}
        return {trial for trial, since in self._stale_since.items() if now - since >= HEARTBEAT_SECONDS}


@contextmanager
def storage_errors(url: str) -> Iterator[None]:
    """Turn the errors of a storage into one line.

    Raises:
        InputError: Optuna cannot open such a storage, or its server does not answer.
        PlanError: the storage is locked, or cannot be read or written.
    """
    shown = hide_password(url)
    try:
        yield
    except (ArgumentError, NoSuchModuleError, ImportError) as error:
        raise InputError(
            f"--storage {shown} is no storage that Optuna can open: {error_line(error, url)} Try {SQLITE}probes.db."
        ) from error
    except (optuna.exceptions.StorageInternalError, SQLAlchemyError) as error:
        if is_lost(error, url):
            raise not_answering(error, url) from error
        if "locked" in str(error.__cause__ or error):
            raise PlanError(
                f"The study in {shown} is locked by another process, for more than {database.LOCK_SECONDS:.0f} s. "
                "End that one, or give another --storage."
            ) from error
        raise PlanError(f"The study in {shown} cannot be read or written: {error_line(error, url)}") from error


# -- the process of a trial --------------------------------------------------------------------------------------------


def this_process() -> str:
    """Return host, process id and start time of this process: the kernel gives an id to another process later."""
    return f"{socket.gethostname()}:{os.getpid()}:{_start_time(os.getpid())}"


def alive(owner: str) -> bool:
    """Return whether the process that started a trial still runs; a process of another host counts as running."""
    host, pid, start_time = parts_of(owner)
    if host != socket.gethostname():
        return True
    return pid.isdecimal() and start_time != "" and _start_time(int(pid)) == start_time


def parts_of(owner: str) -> tuple[str, str, str]:
    """Return the host, the process id and the start time that `this_process` wrote; empty where text is missing."""
    process, _, start_time = owner.rpartition(":")
    host, _, pid = process.rpartition(":")
    return host, pid, start_time


def _start_time(pid: int) -> str:
    """Return the start time of a process in the kernel's ticks; empty: no such process.

    Systems without /proc do not tell: a running process has "there".
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except OSError:
        return _exists(pid) if not Path("/proc/self/stat").exists() else ""


def _exists(pid: int) -> str:
    try:
        os.kill(pid, 0)
    except OSError:
        return ""
    return "there"

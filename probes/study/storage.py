"""The Optuna storage of studies: by default a file in the user's cache; and study names, equal for equal problems."""

import hashlib
import json
import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from urllib.parse import quote_plus

import optuna
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

from planner.errors import InputError, PlanError
from planner.files.cache import cache_root
from planner.measurements.measurement import DeviceName
from planner.models.shape import ModelShape
from planner.search.knobs import SearchProblem

SQLITE = "sqlite:///"
LOCK_SECONDS = (
    30.0  # longest wait for another process to release the file; SQLite's default of 5 s is too short for slow disks
)
HIDDEN = "***"  # as SQLAlchemy shows a password
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
        "cluster": asdict(cluster),
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


def hide_password(url: str) -> str:
    """Return a storage's URL with `***` instead of its password and of the values in its query.

    Raises:
        InputError: SQLAlchemy cannot parse the URL, or takes a part of its password for the host. The message does not
            show the URL: it may hold a password.
    """
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise InputError(f"--storage is no URL that SQLAlchemy can parse. Try {SQLITE}probes.db.") from None
    if "@" in (parsed.host or ""):
        raise InputError("--storage has a password with an @. Write %40 in its place.")
    # A query may hold more secrets, such as libpq's password and sslpassword: only its names are shown.
    shown = parsed.set(query=dict.fromkeys(parsed.query, HIDDEN))
    return shown.render_as_string(hide_password=True).replace(quote_plus(HIDDEN), HIDDEN)


def open_study(url: str, name: str, sampler: optuna.samplers.BaseSampler) -> optuna.Study:
    """Open the study of that name, or create it.

    Raises:
        PlanError: the folder of the storage's file cannot be created.
    """
    settings = {}
    if url.startswith(SQLITE):
        settings = {"connect_args": {"timeout": LOCK_SECONDS}}
        try:
            Path(url.removeprefix(SQLITE)).expanduser().resolve().parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PlanError(
                f"The study in {hide_password(url)} cannot be read or written: {error.strerror}: {error.filename}."
            ) from error
    storage = optuna.storages.RDBStorage(url, engine_kwargs=settings)
    return optuna.create_study(
        study_name=name, storage=storage, sampler=sampler, direction="maximize", load_if_exists=True
    )


@contextmanager
def storage_errors(url: str) -> Iterator[None]:
    """Turn the errors of a storage into one line.

    Raises:
        InputError: Optuna cannot open such a storage.
        PlanError: the storage is locked, or cannot be read or written.
    """
    shown = hide_password(url)
    try:
        yield
    except (ArgumentError, NoSuchModuleError, ImportError) as error:
        raise InputError(
            f"--storage {shown} is no storage that Optuna can open: {_line(error, url)} Try {SQLITE}probes.db."
        ) from error
    except (optuna.exceptions.StorageInternalError, SQLAlchemyError) as error:
        if "locked" in str(error.__cause__ or error):
            raise PlanError(
                f"The study in {shown} is locked by another process, for more than {LOCK_SECONDS:.0f} s. "
                "End that one, or give another --storage."
            ) from error
        raise PlanError(f"The study in {shown} cannot be read or written: {_line(error, url)}") from error


def _line(error: BaseException, url: str) -> str:
    """Return the first line of an error's cause, without the secrets of the URL, which libraries repeat."""
    text = str(error.__cause__ or error).strip() or type(error).__name__
    line = text.splitlines()[0].rstrip(".") + "."
    parsed = make_url(url)
    for secret in (url, parsed.password, *map(str, parsed.query.values())):
        line = line.replace(str(secret), HIDDEN) if secret else line
    return line


# -- the process of a trial --------------------------------------------------------------------------------------------


def this_process() -> str:
    """Return host, process id and start time of this process: the kernel gives an id to another process later."""
    return f"{socket.gethostname()}:{os.getpid()}:{_start_time(os.getpid())}"


def alive(owner: str) -> bool:
    """Whether the process that started a trial still runs; a process of another host counts as running."""
    process, _, start_time = owner.rpartition(":")
    host, _, pid = process.rpartition(":")
    if host != socket.gethostname():
        return True
    return pid.isdecimal() and start_time != "" and _start_time(int(pid)) == start_time


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

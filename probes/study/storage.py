"""Where a study is kept: any storage of Optuna's, a file of the user's own by default; and its name, by which the same problem finds it again."""

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

import optuna
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

from planner.errors import InputError, PlanError
from planner.files.cache import cache_root
from planner.measurements.measurement import DeviceName
from planner.models.shape import ModelShape
from planner.search.knobs import SearchProblem

SQLITE = "sqlite:///"
LOCK_SECONDS = 30.0  # how long another process may hold the file before it is an error; sqlite's own 5 s are less than a slow disk needs
READABLE = 60  # characters of a study's name that are for people
# Whose releases decide what is measured.
LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "bitsandbytes", "deepspeed", "vllm")


def default_storage() -> str:
    """A file within all that is the user's own."""
    return f"{SQLITE}{cache_root() / 'probes.db'}"


def library_versions() -> dict[str, str]:
    """Of the libraries that are installed."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def study_name(problem: SearchProblem, device: DeviceName, versions: Mapping[str, str]) -> str:
    """The same for the same job, cluster, device and libraries: `Qwen2.5-7B-grpo-2xA100-40G-lora-throughput-1f0c2a9b`."""
    job, cluster = problem.job, problem.cluster
    asked = {
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
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True, default=list).encode()).hexdigest()[:8]
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


def shown(url: str) -> str:
    """A storage's URL without its password."""
    return re.sub(r"(://[^:/@]*):[^@/]*@", r"\1:***@", url)


def open_study(url: str, name: str, sampler: optuna.samplers.BaseSampler) -> optuna.Study:
    """The study of that name, made where there is none.

    Raises:
        PlanError: the storage cannot be opened, or another process does not let go of it.
    """
    settings = {}
    if url.startswith(SQLITE):
        settings = {"connect_args": {"timeout": LOCK_SECONDS}}
        try:
            Path(url.removeprefix(SQLITE)).expanduser().resolve().parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PlanError(
                f"The study in {shown(url)} cannot be read or written: {error.strerror}: {error.filename}."
            ) from error
    storage = optuna.storages.RDBStorage(url, engine_kwargs=settings)
    return optuna.create_study(
        study_name=name, storage=storage, sampler=sampler, direction="maximize", load_if_exists=True
    )


@contextmanager
def storage_errors(url: str) -> Iterator[None]:
    """What a storage raises, as one line for whoever chose it."""
    try:
        yield
    except (ArgumentError, NoSuchModuleError, ImportError) as error:
        raise InputError(
            f"--storage {shown(url)} is no storage that Optuna can open: {_line(error)} Try {SQLITE}probes.db."
        ) from error
    except (optuna.exceptions.StorageInternalError, SQLAlchemyError) as error:
        said = str(error.__cause__ or error)
        if "locked" in said:
            raise PlanError(
                f"The study in {shown(url)} is locked by another process, for more than {LOCK_SECONDS:.0f} s. End that one, or give another --storage."
            ) from error
        raise PlanError(f"The study in {shown(url)} cannot be read or written: {_line(error)}") from error


def _line(error: BaseException) -> str:
    said = str(error.__cause__ or error).strip() or type(error).__name__
    return said.splitlines()[0].rstrip(".") + "."


# -- who is at it ------------------------------------------------------------------------------------------------------


def this_process() -> str:
    """Host, process and when it began: a number alone is given to another process later."""
    return f"{socket.gethostname()}:{os.getpid()}:{_began(os.getpid())}"


def alive(owner: str) -> bool:
    """Whether the process that started a trial still runs, as far as can be seen from here: one on another host may."""
    host, _, rest = owner.rpartition(":")[0].rpartition(":")
    pid, began = rest, owner.rpartition(":")[2]
    if host != socket.gethostname():
        return True
    return pid.isdecimal() and began != "" and _began(int(pid)) == began


def _began(pid: int) -> str:
    """The start time of a process in the kernel's ticks, empty where there is none; without /proc only whether it is there."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except OSError:
        return _there(pid) if not Path("/proc/self/stat").exists() else ""


def _there(pid: int) -> str:
    try:
        os.kill(pid, 0)
    except OSError:
        return ""
    return "there"

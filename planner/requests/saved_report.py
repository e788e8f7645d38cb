"""A saved report (`plan --json`, `plan estimate --json`, --out) -> its candidate and its cluster."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import UNSET, Struct, UnsetType, to_builtins

from planner.candidate import Candidate
from planner.errors import InputError
from planner.files.decode import decode_json
from planner.files.read import read_bytes
from planner.files.write import REPORT_FILE
from planner.gpus.cluster import Cluster
from planner.gpus.host_memory import with_given_host
from planner.gpus.parse import parse_cluster
from planner.jobs.base_candidate import single_candidate
from planner.jobs.settings import candidate_fields
from planner.launch.site import Site
from planner.models.catalogue import load_model
from planner.report.documents.fields import Settings, Version
from planner.requests.options import CandidateOptions
from planner.requests.read_options import CompleteModel, read_options

# Settings that name a model -> the Candidate field.
MODELS = {
    "reward_model_name_or_path": "reward_model",
    "teacher_model_name_or_path": "teacher_model",
    "teacher_server_model": "teacher_server_model",
}
# Keys of `Settings` that `candidate_fields` does not read: `candidate_from_settings` reads them itself.
READ_HERE = (
    "model_name_or_path",
    "method",
    "trl_version",
    "environment",
    "gradient_checkpointing_kwargs",
    "fsdp_offload_params",
    *MODELS,
)


class SavedHost(Struct, frozen=True):
    """The part of `Host` that is read."""

    peak_bytes: int


class SavedResources(Struct, frozen=True):
    """The part of `ResourcesReport` that is read; reports of older releases have none."""

    gpu_bytes: int = 0
    disk_bytes: int = 0
    cards: tuple[str, ...] = ()
    epoch_seconds: float | None = None


NO_RESOURCES = SavedResources()


class SavedCandidate(Struct, frozen=True):
    """The part of `BestCandidate` that is read. Unknown keys are skipped: later releases may add some."""

    settings: Settings
    fits: bool = True
    host: SavedHost = SavedHost(peak_bytes=0)
    resources: SavedResources = NO_RESOURCES


class SavedReport(Struct, frozen=True):
    """The parts of a plan or of an estimate that are read."""

    schema: Version
    best: SavedCandidate | UnsetType = UNSET  # of a plan
    settings: Settings | UnsetType = UNSET  # of an estimate, as the rest
    fits: bool = True
    host: SavedHost = SavedHost(peak_bytes=0)
    resources: SavedResources = NO_RESOURCES
    cluster: Cluster | UnsetType = UNSET  # of a plan, and of an estimate since reports name it


class CandidateRequest(Struct, frozen=True, kw_only=True):
    """One candidate with its cluster, and the accepted probability of running out of memory."""

    candidate: Candidate
    cluster: Cluster
    risk: float


def candidate_request(saved: str | None, options: CandidateOptions, complete: CompleteModel) -> CandidateRequest:
    """Return the candidate of a saved report, or of the options if `saved` is None.

    Raises:
        InputError: the report cannot be read, or the options contradict each other.
    """
    if saved is None:
        request = read_options(options, complete)
        candidate = single_candidate(request.job, request.cluster)
        return CandidateRequest(candidate=candidate, cluster=request.cluster, risk=options.risk)
    candidate, cluster = read_plan(Path(saved), options.gpus, options.free_memory, complete)
    if options.host_memory is not None:
        cluster = with_given_host(cluster, options.host_memory)
    return CandidateRequest(candidate=candidate, cluster=cluster, risk=options.risk)


def read_plan(
    path: Path, gpus: str | None, free_memory: str | None, complete_model: CompleteModel
) -> tuple[Candidate, Cluster]:
    """Read the best candidate of a saved plan, or the candidate of a saved estimate, and its cluster.

    Args:
        gpus: the cluster in the words of `--gpus`; None: that of the plan. An estimate does not name its GPUs.
        complete_model: completes a model whose layers have no formulas.

    Raises:
        InputError: the file cannot be read, is no report, or is an estimate and `gpus` is None.
    """
    report = _read_report(path)
    candidate = candidate_from_settings(to_builtins(_settings(path, report)), complete_model)
    if gpus is not None:
        return candidate, parse_cluster(gpus, free_memory)
    if isinstance(report.cluster, UnsetType):
        raise InputError(f"{path} names no GPUs. Give --gpus: an estimate of an older release does not name them.")
    return candidate, report.cluster


class SavedRun(Struct, frozen=True, kw_only=True):
    """The candidate of a saved report, whether it fits, and the machines that it was planned for (None: unknown)."""

    candidate: Candidate
    fits: bool
    site: Site | None


def read_run(path: Path, complete_model: CompleteModel) -> SavedRun:
    """Read the candidate of a saved report and its machines.

    Raises:
        InputError: the file cannot be read, or is no report.
    """
    report = _read_report(path)
    settings = _settings(path, report)
    best = SavedCandidate(settings=settings, fits=report.fits, host=report.host, resources=report.resources)
    best = best if isinstance(report.best, UnsetType) else report.best
    cluster = report.cluster
    return SavedRun(
        candidate=candidate_from_settings(to_builtins(best.settings), complete_model),
        fits=best.fits,
        site=None if isinstance(cluster, UnsetType) else _site(cluster, best),
    )


def _site(cluster: Cluster, best: SavedCandidate) -> Site:
    """Return the machines that a saved candidate was planned for."""
    found = best.resources
    return Site(
        cluster=cluster,
        host_bytes=best.host.peak_bytes,
        gpu_bytes=found.gpu_bytes,
        disk_bytes=found.disk_bytes,
        cards=found.cards,
        epoch_seconds=found.epoch_seconds or 0.0,
    )


def candidate_from_settings(settings: Mapping[str, Any], complete_model: CompleteModel) -> Candidate:
    """Return the candidate of settings that `planner.jobs.settings.settings_of` wrote.

    Raises:
        InputError: a value is none that its setting can have, or a model is unknown.
    """
    plain = {name: value for name, value in settings.items() if name not in READ_HERE and value is not None}
    chosen: dict[str, Any] = dict(candidate_fields({name: _option(value) for name, value in plain.items()}, "bfloat16"))
    for name, field in MODELS.items():
        if settings.get(name):
            chosen[field] = complete_model(load_model(settings[name]))
    if "lora_target_modules" in settings and settings["lora_target_modules"] is None:
        chosen["lora_target_modules"] = ("default",)
    checkpointing = settings.get("gradient_checkpointing_kwargs", {})
    chosen["checkpoint_every_n_layers"] = checkpointing.get("every_n_layers", 1)
    chosen["checkpoint_offload"] = checkpointing.get("offload", False)
    if settings.get("fsdp_offload_params"):
        chosen["offload_param"] = True
    allocator = settings.get("environment", {}).get("PYTORCH_CUDA_ALLOC_CONF", "")
    chosen["expandable_segments"] = "expandable_segments:True" in allocator
    model = complete_model(load_model(settings["model_name_or_path"]))
    return Candidate(model=model, method=settings["method"], trl_version=settings["trl_version"], **chosen)


def _option(value: Any) -> Any:
    """Return a value as `--set` takes it: lists as text."""
    return ",".join(map(str, value)) if isinstance(value, list) else value


def _read_report(path: Path) -> SavedReport:
    file = path / REPORT_FILE if path.is_dir() else path  # the folder of --out
    return decode_json(read_bytes(file), SavedReport, f"{path} is no report of plan")


def _settings(path: Path, report: SavedReport) -> Settings:
    if not isinstance(report.best, UnsetType):
        return report.best.settings
    if isinstance(report.settings, UnsetType):
        raise InputError(f"{path} is no report of plan: it has neither `best` nor `settings`.")
    return report.settings

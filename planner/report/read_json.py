"""A saved report -> the candidate and the cluster it was about."""

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from planner.candidate import Candidate
from planner.errors import InputError, PlanError
from planner.gpus.cluster import Cluster, Gpu
from planner.gpus.parse import parse_cluster
from planner.jobs.settings import candidate_fields
from planner.models.catalogue import load_model
from planner.models.shape import ModelShape

MODELS = {"reward_model_name_or_path": "reward_model", "teacher_model_name_or_path": "teacher_model"}
# Keys of a candidate's settings that are not settings: what it is about, and what is spelled by others of them.
ABOUT = (
    "model_name_or_path",
    "method",
    "trl_version",
    "environment",
    "gradient_checkpointing_kwargs",
    "fsdp_offload_params",
)


def read_plan(
    path: Path, gpus: str | None, free_memory: str | None, with_layers: Callable[[ModelShape], ModelShape]
) -> tuple[Candidate, Cluster]:
    """The best candidate of a plan, or the candidate of an estimate, as `--json` and `--out` write them.

    An estimate does not say which GPUs it was about: `gpus` does, and wins over what a plan says. `with_layers` completes a model whose layers
    have no formulas.

    Raises:
        InputError: the file cannot be read, or is no report.
    """
    report = _report(path)
    best = report.get("best", report)
    try:
        candidate = candidate_of(best["settings"], with_layers)
        cluster = parse_cluster(gpus, free_memory) if gpus is not None else _cluster(report["cluster"])
    except PlanError:
        raise
    except (KeyError, TypeError, AttributeError) as error:
        missing = (
            " Give --gpus: an estimate does not name them." if error.args == ("cluster",) else f" It lacks {error}."
        )
        raise InputError(f"{path} is no report of plan.{missing}") from error
    return candidate, cluster


def read_candidate(path: Path, with_layers: Callable[[ModelShape], ModelShape]) -> Candidate:
    """The same candidate where no cluster is wanted.

    Raises:
        InputError: the file cannot be read, or is no report.
    """
    report = _report(path)
    try:
        return candidate_of(report.get("best", report)["settings"], with_layers)
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is no report of plan. It lacks {error}.") from error


def candidate_of(settings: Mapping[str, Any], with_layers: Callable[[ModelShape], ModelShape]) -> Candidate:
    """The candidate that `settings_of` has spelled."""
    plain = {
        name: value
        for name, value in settings.items()
        if name not in ABOUT and name not in MODELS and value is not None
    }
    chosen: dict[str, Any] = dict(candidate_fields({name: _text(value) for name, value in plain.items()}, "bfloat16"))
    for name, field in MODELS.items():
        if settings.get(name):
            chosen[field] = with_layers(load_model(settings[name]))
    checkpointing = settings.get("gradient_checkpointing_kwargs", {})
    chosen["checkpoint_every_n_layers"] = checkpointing.get("every_n_layers", 1)
    chosen["checkpoint_offload"] = checkpointing.get("offload", False)
    if settings.get("fsdp_offload_params"):
        chosen["offload_param"] = True
    chosen["expandable_segments"] = "expandable_segments:True" in settings.get("environment", {}).get(
        "PYTORCH_CUDA_ALLOC_CONF", ""
    )
    model = with_layers(load_model(settings["model_name_or_path"]))
    return Candidate(model=model, method=settings["method"], trl_version=settings["trl_version"], **chosen)


def _text(value: Any) -> Any:
    """A value as `--set` takes it."""
    return ",".join(map(str, value)) if isinstance(value, list) else value


def _report(path: Path) -> dict[str, Any]:
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}.") from error
    if not isinstance(report, dict):
        raise InputError(f"{path} is no report of plan.")
    return report


def _cluster(report: Mapping[str, Any]) -> Cluster:
    said = dict(report["gpu"])
    said["compute_capability"] = tuple(said["compute_capability"])
    gpu = Gpu(**{field.name: said[field.name] for field in fields(Gpu) if field.init})
    return Cluster(gpu=gpu, nodes=report["nodes"], gpus_per_node=report["gpus_per_node"])

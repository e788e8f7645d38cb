"""Plan the memory of a fine-tuning run: the largest, fastest configuration that fits the GPUs, and how sure that is.

from planner import plan

answer = plan("Qwen2.5-7B", "2xA100-40G", method="grpo", zero_stage=3)
answer.best.candidate.per_device_train_batch_size

Every function raises `PlanError` for input that it cannot take, and nothing else.
"""

from typing import TYPE_CHECKING

from planner.candidate import Candidate
from planner.errors import PlanError
from planner.gpus.cluster import Cluster, Gpu
from planner.gpus.parse import parse_cluster
from planner.jobs.job import Job
from planner.models.catalogue import load_model
from planner.models.shape import ModelShape
from planner.notebook.answer import plan
from planner.notebook.arguments import job_from_trainer
from planner.notebook.estimate import estimate
from planner.notebook.sweep import plot_cards, sweep
from planner.planning import Plan
from planner.quantities import Estimate
from planner.report.spelling import errors_spelled

load_model, parse_cluster = errors_spelled("python")(load_model), errors_spelled("python")(parse_cluster)

__all__ = [
    "Candidate",
    "Cluster",
    "Estimate",
    "Gpu",
    "Job",
    "ModelShape",
    "Plan",
    "PlanError",
    "__version__",
    "estimate",
    "job_from_trainer",
    "load_model",
    "parse_cluster",
    "plan",
    "plot_cards",
    "sweep",
]

__version__: str  # the installed release

if not TYPE_CHECKING:  # a type checker would take every misspelled name for text

    def __getattr__(name: str) -> str:
        """Return `__version__`; lazy, as the metadata of packages is slow to import."""
        if name != "__version__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from planner.files.installed import installed_version

        return installed_version()

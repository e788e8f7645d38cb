"""Plan the memory of a fine-tuning run: the largest, fastest configuration that fits the GPUs, and how sure that is.

from planner import plan

answer = plan("Qwen2.5-7B", "2xA100-40G", method="grpo", zero_stage=3)
answer.best.candidate.per_device_train_batch_size
"""

from planner.candidate import Candidate
from planner.gpus.cluster import Cluster, Gpu
from planner.gpus.parse import parse_cluster
from planner.jobs.job import Job
from planner.models.catalogue import load_model
from planner.models.shape import ModelShape
from planner.notebook.answer import plan
from planner.notebook.estimate import estimate
from planner.notebook.sweep import plot_cards, sweep
from planner.notebook.trainer import job_from_trainer
from planner.plan import Plan
from planner.quantities import Estimate

__all__ = [
    "Candidate",
    "Cluster",
    "Estimate",
    "Gpu",
    "Job",
    "ModelShape",
    "Plan",
    "estimate",
    "job_from_trainer",
    "load_model",
    "parse_cluster",
    "plan",
    "plot_cards",
    "sweep",
]

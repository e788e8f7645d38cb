"""Plan the memory of a fine-tuning run: the largest, fastest configuration that fits the GPUs, and how sure that is.

from planner import Job, load_model, parse_cluster, plan

answer = plan(Job(model=load_model("Qwen2.5-7B"), method="grpo"), parse_cluster("2xA100-40G"))
answer.best.candidate.per_device_train_batch_size
"""

from planner.candidate import Candidate
from planner.estimate import estimate
from planner.gpus.cluster import Cluster, Gpu
from planner.gpus.parse import parse_cluster
from planner.jobs.job import Job
from planner.models.catalogue import load_model
from planner.models.shape import ModelShape
from planner.plan import Plan, plan
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
    "load_model",
    "parse_cluster",
    "plan",
]

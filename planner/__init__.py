"""Plan the memory of a fine-tuning run: the largest, fastest configuration that fits the GPUs, and how sure that is.

from planner import Job, load_model, parse_cluster, plan

answer = plan(Job(model=load_model("Qwen2.5-7B"), method="grpo"), parse_cluster("2xA100-40G"))
answer.best.candidate.per_device_train_batch_size
"""

from planner.candidate import Candidate
from planner.catalogue import load_model
from planner.cluster import Cluster, Gpu
from planner.estimate import estimate
from planner.gpus import parse_cluster
from planner.job import Job
from planner.model import ModelShape
from planner.plan import Plan, plan
from planner.quantities import Estimate

__all__ = ["Candidate", "Cluster", "Estimate", "Gpu", "Job", "ModelShape", "Plan", "estimate", "load_model", "parse_cluster", "plan"]

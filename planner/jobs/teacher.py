"""The GPUs of a teacher's vLLM server: those of one node that are neither the trainer's nor the sampling server's."""

from msgspec.structs import replace

from planner.gpus.cluster import Cluster
from planner.jobs.job import Job
from planner.methods import METHODS
from planner.models.shape import ModelShape

# A teacher whose 16-bit weights take more than this share of a card gets more cards: the rest is for the KV cache and
# for the log-probabilities of prompts, which vLLM computes outside of its share (vllm 0.31, v1/worker/gpu/sample/
# prompt_logprob.py). Judged.
WEIGHT_SHARE = 0.6
SIXTEEN_BIT_BYTES = 2


def beside_teacher(job: Job, cluster: Cluster) -> tuple[Job, Cluster]:
    """Return a job with the GPUs of its teacher's server, and the cluster with the others.

    On one GPU and on several nodes the teacher is served elsewhere (0 GPUs), unless the job says otherwise.
    """
    if not METHODS[job.method].teacher_server or cluster.teacher_gpus or cluster.nodes > 1:
        return job, cluster
    teacher, gpus = job.pinned.get("teacher_server_model", job.model), job.pinned.get("teacher_server_gpus")
    assert isinstance(teacher, ModelShape)
    gpus = gpus if isinstance(gpus, int) else teacher_gpus(teacher, cluster)
    left = max(cluster.gpus_per_node - gpus, 1)
    pinned = {**job.pinned, "teacher_server_gpus": gpus}
    return replace(job, pinned=pinned), replace(cluster, gpus_per_node=left, teacher_gpus=cluster.gpus_per_node - left)


def teacher_gpus(teacher: ModelShape, cluster: Cluster) -> int:
    """Return the fewest GPUs that hold a teacher and divide its attention heads; 0 if none are left to the trainer."""
    heads = {layer.attention.num_attention_heads for layer, _ in teacher.layer_kinds}
    sizes = [size for size in range(1, cluster.gpus_per_node) if all(count % size == 0 for count in heads)]
    weights = SIXTEEN_BIT_BYTES * teacher.linear_params
    holding = (size for size in sizes if weights / size <= WEIGHT_SHARE * cluster.gpu.total_bytes)
    return next(holding, sizes[-1] if sizes else 0)

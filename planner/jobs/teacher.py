"""The GPUs of a teacher's vLLM server: those of one node that are neither the trainer's nor the sampling server's."""

from msgspec.structs import replace

from planner.errors import InputError
from planner.gpus.cluster import Cluster
from planner.jobs.job import Job
from planner.methods import METHODS
from planner.models.division import undivided
from planner.models.shape import ModelShape

# A teacher whose 16-bit weights take more than this share of a card gets more cards: the rest is for the KV cache and
# for the log-probabilities of prompts, which vLLM computes outside of its share (vllm 0.31, v1/worker/gpu/sample/
# prompt_logprob.py). Judged.
WEIGHT_SHARE = 0.6


def beside_teacher(job: Job, cluster: Cluster) -> tuple[Job, Cluster]:
    """Return a job with the GPUs of its teacher's server, and the cluster with the others.

    On several nodes, and where too few GPUs are left, the teacher is served elsewhere (0 GPUs), unless the job says
    otherwise.

    Raises:
        InputError: the job gives the teacher so many GPUs that none is left.
    """
    if not METHODS[job.method].teacher_server or cluster.teacher_gpus or cluster.nodes > 1:
        return job, cluster
    teacher, gpus = job.pinned.get("teacher_server_model", job.model), job.pinned.get("teacher_server_gpus")
    assert isinstance(teacher, ModelShape)
    others = 1 + METHODS[job.method].asynchronous  # a trainer, and a server of its own that samples
    most = cluster.gpus_per_node - others
    gpus = gpus if isinstance(gpus, int) else teacher_gpus(teacher, cluster, most)
    if gpus > max(most, 0):
        use = f"{most}, or 0 if it is served elsewhere" if most > 0 else "0: it is served elsewhere"
        raise InputError(
            f"teacher_server_gpus {gpus} of {cluster.gpus_per_node} GPUs leaves too few for {job.method}, which needs "
            f"{others}. Use --set teacher_server_gpus={use}."
        )
    left = cluster.gpus_per_node - gpus
    pinned = {**job.pinned, "teacher_server_gpus": gpus}
    return replace(job, pinned=pinned), replace(cluster, gpus_per_node=left, teacher_gpus=gpus)


def teacher_gpus(teacher: ModelShape, cluster: Cluster, most: int) -> int:
    """Return the fewest GPUs that hold a teacher and among which vLLM can divide it; 0 if `most` is below 1."""
    sizes = [size for size in range(1, most + 1) if not undivided(teacher, size)]
    weights = 2 * teacher.linear_params  # in 16 bits
    holding = (size for size in sizes if weights / size <= WEIGHT_SHARE * cluster.gpu.total_bytes)
    return next(holding, sizes[-1] if sizes else 0)

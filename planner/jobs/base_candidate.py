"""A job -> the candidate that TRL's defaults and the pinned settings amount to, before anything is searched."""

from planner.candidate import Candidate
from planner.gpus.cluster import Cluster
from planner.jobs.job import DEQUANTIZED, Job, server_gpus
from planner.jobs.rules import check
from planner.methods import METHODS, release

# What `trl vllm-serve` uses unless told otherwise (trl/scripts/vllm_serve.py:111).
SERVER_GPU_MEMORY_UTILIZATION = 0.9


def base_candidate(job: Job, cluster: Cluster) -> Candidate:
    """The candidate that TRL's defaults and the pins amount to, before anything is searched: one process on each GPU.

    Raises:
        InputError: pins that contradict each other, the method or the cluster.
    """
    settings: dict[str, object] = {**METHODS[job.method].defaults, **job.pinned}
    if METHODS[job.method].bounded_rows and "prompt_length" not in job.pinned:
        whole, completion = settings.get("max_length", 1024), settings.get("max_completion_length", 512)
        assert isinstance(whole, int) and isinstance(completion, int)
        settings["prompt_length"] = max(1, whole - completion)
    if settings.get("vllm") == "server":
        settings.setdefault("vllm_gpu_memory_utilization", SERVER_GPU_MEMORY_UTILIZATION)
        settings.setdefault("num_processes", max(1, cluster.num_gpus - server_gpus(settings)))
    settings.setdefault("num_processes", cluster.num_gpus)
    settings.setdefault("num_nodes", cluster.nodes)
    settings.setdefault("quantization", "none" if job.model.quantization in DEQUANTIZED else job.model.quantization)
    if "gradient_accumulation_steps" in settings:
        settings.setdefault("steps_per_generation", settings["gradient_accumulation_steps"])
    if job.method in ("gkd", "distillation"):
        settings.setdefault("teacher_model", job.model)
    settings.setdefault("precision", "bf16" if cluster.gpu.supports_bf16 else "fp16")
    candidate = Candidate(model=job.model, method=job.method, trl_version=trl_version(job), **settings)  # type: ignore[arg-type]
    check(candidate, job, cluster)
    return candidate


def trl_version(job: Job) -> str:
    """The release in force: a method that has left TRL is planned for the last one that has it."""
    last = METHODS[job.method].last_trl
    return last if last != "current" and release(job.trl_version) > release(last) else job.trl_version

"""The settings that a candidate has if the user gives none, where a model, a method or a GPU decides them."""

from planner.gpus.cluster import Cluster
from planner.jobs.job import loaded_quantization
from planner.methods import METHODS, MethodName
from planner.models.lora_targets import widest_targets
from planner.models.shape import ModelShape


def usual_settings(
    model: ModelShape, method: MethodName, trl_version: str, cluster: Cluster, searched: bool = False
) -> dict[str, object]:
    """Return Candidate fields and their values; a field that is left out has Candidate's default.

    `searched`: of a search (see `Method.defaults_in`).
    """
    return {
        "quantization": loaded_quantization(model),
        "lora_target_modules": widest_targets(model),
        "attn_implementation": model.default_attention,
        "precision": "bf16" if cluster.gpu.supports_bf16 else "fp16",
        **({"teacher_model": model} if METHODS[method].teacher else {}),
        **({"teacher_server_model": model} if METHODS[method].teacher_server else {}),
        **METHODS[method].defaults_in(trl_version, searched),
    }

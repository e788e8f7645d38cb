"""What of a candidate's memory does not depend on its batch or its lengths: computed once for a structure, and remembered.

A search tries many batches of one structure; this is what keeps the estimator at tens of microseconds a candidate.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter

from planner.candidate import Candidate
from planner.gpus.cluster import Gpu
from planner.memory.adapters import adapters_bytes
from planner.memory.communication import communication_bytes, gather_bytes, generation_gather_bytes, weight_sync_bytes
from planner.memory.gradients import accumulated_gradients_bytes, gradients_bytes, step_gradients_bytes
from planner.memory.layers.recipe import Recipe
from planner.memory.optimizer import master_weights_bytes, optimizer_states_bytes, step_temporaries_bytes
from planner.memory.runtime import runtime_bytes
from planner.memory.stack_recipe import policy_recipe
from planner.memory.weights import weights_by_role
from planner.quantities import Component

# The fields that the functions imported above read; the others are the batch, the lengths and the engine's share.
STRUCTURE = attrgetter(
    "model", "method", "trl_version", "tuning", "lora_r", "lora_target_modules", "autocast_adapter_dtype", "dtype", "precision", "quantization", "beta",
    "precompute_ref_log_probs", "gradient_checkpointing", "checkpoint_every_n_layers", "optim", "sharding", "num_processes", "num_nodes", "offload_optimizer",
    "offload_param", "ds3_gather_for_generation", "vllm", "reward_model", "teacher_model", "lora_dropout", "use_liger_kernel", "accumulates",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Structure:
    """A candidate seen without its batch: equal where `key` is."""

    key: tuple[object, ...]
    gpu: Gpu = field(compare=False)
    candidate: Candidate = field(compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class States:
    """Bytes on one training GPU. `resident`: from the second optimizer step to the last; the others at their time."""

    resident: dict[Component, int]
    weights_by_role: dict[str, int]
    recipe: Recipe  # of the policy's layers
    master_weights: int
    gradients: int
    accumulated_gradients: int
    step_gradients: int
    step_temporaries: int
    forward_gather: int
    backward_gather: int
    generation_gather: int
    weight_sync: int


def states_of(candidate: Candidate, gpu: Gpu) -> States:
    return _states(Structure((gpu.name, gpu.total_bytes, *STRUCTURE(candidate)), gpu, candidate))


@lru_cache(maxsize=8192)
def _states(structure: Structure) -> States:
    candidate, gpu = structure.candidate, structure.gpu
    roles = weights_by_role(candidate)
    return States(
        resident={
            "weights": sum(roles.values()),
            "adapters": adapters_bytes(candidate),
            "optimizer_states": optimizer_states_bytes(candidate),
            "communication": communication_bytes(candidate, gpu),
            "runtime": runtime_bytes(gpu, candidate),
        },
        weights_by_role=roles,
        recipe=policy_recipe(candidate),
        master_weights=master_weights_bytes(candidate),
        gradients=gradients_bytes(candidate),
        accumulated_gradients=accumulated_gradients_bytes(candidate),
        step_gradients=step_gradients_bytes(candidate),
        step_temporaries=step_temporaries_bytes(candidate),
        forward_gather=gather_bytes(candidate, "forward"),
        backward_gather=gather_bytes(candidate, "backward"),
        generation_gather=generation_gather_bytes(candidate),
        weight_sync=weight_sync_bytes(candidate),
    )

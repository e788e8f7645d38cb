"""Gradients: `.grad` of what is trained, from the backward pass to the end of the optimizer step."""

from planner.candidate import Candidate
from planner.memory.adapters import adapter_dtype_bytes, copied_dtype_bytes
from planner.memory.parameters import policy_parameters
from planner.memory.sharding import DEEPSPEED, flat_shard, fsdp2_shards
from planner.memory.tensors import TensorSet, rounded_bytes, tensor_bytes
from planner.memory.weights import base_dtype_bytes, value_parameters

# Optimizers that update each parameter inside the backward pass and drop its gradient: one gradient is being used and the next being
# made. Source: lomo-optim 0.1.1, lomo.py and adalomo.py `fuse_update`.
FUSED_BACKWARD = frozenset({"lomo", "adalomo"})
FUSED_GRADIENTS_ALIVE = 2


def trained_groups(candidate: Candidate) -> tuple[tuple[TensorSet, int], ...]:
    """What is trained on one model replica, with bytes per parameter: the model or its adapters, PEFT's copies, PPO's value model."""
    counted = policy_parameters(candidate)
    if candidate.tuning == "full":
        groups = [(counted.base_tensors, base_dtype_bytes(candidate))]
    else:
        groups = [(counted.adapter_tensors, adapter_dtype_bytes(candidate)), (counted.copied_tensors, copied_dtype_bytes(candidate))]
    if candidate.method_row.value_model:
        groups.append((value_parameters(candidate).base_tensors, base_dtype_bytes(candidate)))
    return tuple(group for group in groups if group[0].kinds)


def gradients_bytes(candidate: Candidate) -> int:
    """Bytes of gradients on one GPU when the backward pass ends.

        one GPU, DDP, ZeRO-1: trained x dtype | ZeRO-2, ZeRO-3: that / G | FSDP2: float32 shards | fused backward: two largest tensors

    A gradient has its parameter's dtype, bfloat16 under DeepSpeed (`grad_accum_dtype` unset). Offloaded optimizers take it to the host
    (ZeRO: only a bucket stays, see communication.py).

    Source: deepspeed 0.19.8, runtime/engine.py:1806, zero/stage_1_and_2.py:3070-3142, zero/stage3.py:791.

    Example: Qwen2.5-7B in full, float32: 30.46 GB = 28.37 GiB; LoRA r 16 on it: 161 MB.
    Leaves out DDP's second copy (communication.py).
    """
    if candidate.optim in FUSED_BACKWARD:
        return sum(FUSED_GRADIENTS_ALIVE * rounded_bytes(tensors.largest * size) for tensors, size in trained_groups(candidate))
    if candidate.sharding == "zero1" and not candidate.offload_optimizer:
        return sum(tensor_bytes(tensors, size) for tensors, size in trained_groups(candidate))
    return step_gradients_bytes(candidate)


def step_gradients_bytes(candidate: Candidate) -> int:
    """Bytes of gradients on one GPU while the optimizer steps: ZeRO-1 has dropped those of the other ranks' pieces by then.

    Source: deepspeed 0.19.8, zero/stage_1_and_2.py:3097 (`free_grad_in_param_list(self.params_not_in_partition[i])`).
    """
    if candidate.optim in FUSED_BACKWARD:
        return 0
    if candidate.sharding in DEEPSPEED:
        if candidate.offload_optimizer:
            return 0
        return sum(tensor_bytes(flat_shard(tensors, candidate.num_processes), size) for tensors, size in trained_groups(candidate))
    if candidate.sharding == "fsdp2":
        if candidate.offload_param:
            return 0
        return sum(tensor_bytes(fsdp2_shards(tensors, candidate.num_processes), size) for tensors, size in trained_groups(candidate))
    return sum(tensor_bytes(tensors, size) for tensors, size in trained_groups(candidate))

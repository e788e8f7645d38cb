"""Host: main memory of one node while its training processes load and train."""

from planner.cache_keys import StateInput, TrainingInput
from planner.candidate import BITSANDBYTES, DTYPE_BYTES
from planner.gpus.cluster import Cluster
from planner.memory.activations import stack_memory
from planner.memory.optimizer import host_states_bytes, paged_states_bytes
from planner.memory.parameters.policy import parameters, policy_parameters
from planner.memory.stack_recipe import stack_recipe
from planner.memory.weights import base_dtype_bytes
from planner.models.shape import ModelShape

# Resident memory of a Python process after PyTorch has started CUDA: 2,056,600 kB.
# Source: pytorch/pytorch#113326 (RTX 3090, CUDA 11.8). Not measured by us.
PROCESS_BYTES = 2_056_600 * 1024


def host_peak_bytes(candidate: TrainingInput, cluster: Cluster) -> int:
    """Bytes of main memory at the peak on one training node.

        peak = processes x PROCESS_BYTES + max(models being loaded, processes x offloaded bytes)

    Source: see `loading_bytes` and `training_bytes`.

    Leaves out data sets, data loader workers, the file cache, and vLLM's own processes (TRL uses sleep level 2, which
    keeps no copy of the weights: trl 1.16, generation/vllm_generation.py:365).
    """
    processes = min(-(-candidate.num_processes // candidate.num_nodes), cluster.gpus_per_node)
    kept = training_bytes(candidate) + offloaded_activation_bytes(candidate, cluster)
    return processes * PROCESS_BYTES + max(loading_bytes(candidate, processes), processes * kept)


def loading_bytes(candidate: StateInput, processes: int) -> int:
    """Bytes of models in main memory on one node while they are loaded.

        one process, bitsandbytes   0: weights stream to the GPU
        DDP, ZeRO-1, ZeRO-2         processes x all parameters of every model x loaded dtype
        ZeRO-3                      0: sharded while loading
        FSDP2                       all parameters of every model x loaded dtype, once

    Source: trl 1.16, trainer/sft_trainer.py:692 (`device_map=None` when distributed); transformers 5.23,
    integrations/deepspeed.py (`deepspeed.zero.Init`); accelerate 1.15, utils/fsdp_utils.py
    (`cpu_ram_efficient_loading`: rank 0 only).

    Example: Qwen2.5-7B in float32 with DDP on eight GPUs: 243.7 GB.
    """
    if processes == 1 or candidate.quantization in BITSANDBYTES or candidate.sharding in ("none", "zero3"):
        return 0
    whole = (
        sum(parameters(model, "full", 1, (), "none", "lm_head").base for model in loaded_models(candidate))
        * DTYPE_BYTES[candidate.dtype]
    )
    return whole if candidate.sharding == "fsdp2" else whole * processes


def training_bytes(candidate: StateInput) -> int:
    """Bytes that one process keeps in main memory during training, without activations.

        bytes = offloaded optimizer + paged states + offloaded parameters, ceil(params x dtype / G)

    Source: see `host_states_bytes` and `paged_states_bytes`.
    """
    found = host_states_bytes(candidate) + paged_states_bytes(candidate)
    if candidate.offload_param and candidate.sharding in ("zero3", "fsdp2"):
        found += -(-policy_parameters(candidate).total * base_dtype_bytes(candidate) // candidate.num_processes)
    return found


def offloaded_activation_bytes(candidate: TrainingInput, cluster: Cluster) -> int:
    """Bytes of saved activations in pinned memory of one process: all of them with offloading, else 0.

    Source: trl 1.16, models/activation_offloading.py; transformers 5.23, modeling_utils.py:3110 (`offload` of
    checkpoints). Counts the few tensors that are still on the GPU too (`max_fwd_stash_size` 5).
    """
    if not (candidate.activation_offloading or (candidate.checkpoint_offload and candidate.gradient_checkpointing)):
        return 0
    recipe = stack_recipe(candidate, cluster.gpu.supports_flash_attention_2)
    per_token, per_score, fixed = dict(stack_memory(candidate.model, recipe, True, 0).saved.kinds).get(
        "activations", (0, 0, 0)
    )
    return per_token * candidate.tokens + per_score * candidate.scores + fixed


def loaded_models(candidate: StateInput) -> list[ModelShape]:
    """Every model that the trainer loads from a checkpoint."""
    found = [candidate.model]
    if candidate.separate_reference:
        found.append(candidate.model)
    found += [model for model in (candidate.reward_model, candidate.teacher_model) if model is not None]
    return found

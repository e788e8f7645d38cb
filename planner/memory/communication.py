"""Communication: NCCL's buffers, and what weights sent to vLLM take."""

from functools import lru_cache
from itertools import pairwise
from typing import Literal

from planner.cache_keys import StateInput
from planner.memory.dtypes import DTYPE_BYTES
from planner.memory.parameters.lora import targets_experts
from planner.memory.parameters.policy import Parameters, policy_parameters
from planner.memory.parameters.quantized import whole_policy_bytes
from planner.memory.parameters.tensors import tensors_in_order
from planner.memory.parameters.widths import adapter_dtype_bytes, base_dtype_bytes
from planner.memory.schemes.contract import is_local
from planner.memory.schemes.table import scheme_of
from planner.models.shape import ModelShape
from planner.units import MIB

# Device memory of one NCCL communicator with its channels, within one node and across nodes, where every network
# interface has buffers of its own. It grows with channels and peers (NVIDIA/nccl#986, #818).
# Source: results/allocator_slack.md, medians of four rows and of one row. Not measured by us.
NCCL_BYTES = {"one node": 434 * MIB, "several nodes": 1598 * MIB}

# Copies of the largest merged weight: B @ A, and its product with the scaling; on a 4-bit base also the dequantized
# weight and the sum. Source: peft 0.21.2, tuners/lora/layer.py, `get_delta_weight`; tuners/lora/bnb.py,
# `Linear4bit.merge`.
MERGE_COPIES = 2
MERGE_COPIES_4BIT = 2
# Buffers in which weights are sent to a vLLM server, and their bytes. Source: vllm 0.31,
# distributed/weight_transfer/packed_tensor.py, DEFAULT_PACKED_NUM_BUFFERS and DEFAULT_PACKED_BUFFER_SIZE_BYTES.
PACKED_BUFFERS = 2
PACKED_BUFFER_BYTES = 1024 * MIB


def communication_bytes(candidate: StateInput) -> int:
    """Bytes that one GPU keeps for communication from the first step to the last: NCCL's buffers and the scheme's."""
    return nccl_bytes(candidate) + scheme_of(candidate).buffers(candidate).kept


def nccl_bytes(candidate: StateInput) -> int:
    """Bytes of NCCL's communicators on one GPU.

        training on several GPUs     1: the default group, in which trainers gather their metrics
        ZeRO                         1 more: see `SchemeRow.own_group`
        GPUs that share a row        1 more: of those GPUs; a ring of all GPUs is the default group
        GPUs that share each layer   1 more, with FSDP2 beside it 2: a mesh of several dimensions has its own groups
        copies of a sharded model    2 more: of the GPUs that hold one copy, and of those that hold the same shards
        rank 0, with a vLLM server   1 more: to the server, unless it loads adapters from a folder

    Source: counted on emulated GPUs (10 jobs of SFT, DPO and GRPO under DDP, ZeRO-2, ZeRO-3 and FSDP2, and SFT on 8 of
    them with `sp_size=2`, `cp_size=2`, `cp_size=8` and `dp_replicate_size=2`; fp16 was not run); deepspeed 0.19.8,
    runtime/sequence_parallel/parallel_state_sp.py, `initialize_sequence_parallel`; torch 2.13,
    distributed/device_mesh.py, `DeviceMesh._init_process_groups`; transformers 5.23, distributed/utils.py,
    `initialize_distributed_mesh`.
    """
    size = _communicator_bytes(candidate, candidate.num_processes)
    own = candidate.scheme_row.own_group
    broadcasts = candidate.quantization_row.quantized or candidate.precision == "fp16"
    own_group = own == "to reduce" or (own == "to broadcast" and broadcasts)
    of_all = size * ((candidate.num_processes > 1) * (1 + own_group) + sends_weights(candidate))
    ring_of_all = candidate.scheme_row.ring and candidate.row_gpus == candidate.num_processes
    if candidate.row_gpus > 1 and not ring_of_all:
        of_all += _communicator_bytes(candidate, candidate.row_gpus)
    if candidate.layer_gpus > 1:
        of_all += _communicator_bytes(candidate, candidate.layer_gpus) + size * (candidate.shard_gpus > 1)
    if candidate.shard_gpus * candidate.layer_gpus < candidate.num_processes:
        of_all += _communicator_bytes(candidate, candidate.shard_gpus) + size
    return of_all


def _communicator_bytes(candidate: StateInput, neighbours: int) -> int:
    """Return the bytes of a communicator of so many neighbouring GPUs, which fill one node before the next."""
    inside = neighbours <= candidate.num_processes // candidate.num_nodes
    return NCCL_BYTES["one node" if inside else "several nodes"]


def sends_weights(candidate: StateInput) -> bool:
    """Return whether weights are sent to a vLLM server."""
    return candidate.vllm == "server" and not candidate.sends_adapters


def weight_sync_bytes(candidate: StateInput, gathered: int) -> int:
    """Bytes that the weight sync with vLLM takes on one GPU, added to the models of trainer and engine.

        gathered   by the scheme, of sharded weights
        adapters   + 2 x B A of the largest merged weight; on a 4-bit base also 2 x that weight dequantized
        server     + `_packed_bytes`; 0 if it loads adapters from a folder, to which they go through the host

    Tensors that are gathered one by one to be packed are in `_packed_bytes`, not in `gathered`.

    Source: trl 1.16, generation/vllm_generation.py, `VLLMGeneration._iter_named_params` (PEFT gathers all parameters at
    once, then `merge_adapter`; under FSDP2 one by one), experimental/async_grpo/async_grpo_trainer.py,
    `_streaming_iter`.
    """
    if candidate.sends_adapters:
        return 0
    merged = _merge_bytes(candidate, policy_parameters(candidate))
    if not sends_weights(candidate):
        return merged + gathered
    row = candidate.scheme_row
    one_by_one = row.shards_weights and not is_local(candidate) and (candidate.tuning == "full" or row.units)
    width = base_dtype_bytes(candidate)
    copies = PACKED_BUFFERS + one_by_one
    packed = min(_packed_bytes(candidate.model, width, one_by_one), copies * whole_policy_bytes(candidate, width))
    return merged + packed + (0 if one_by_one else gathered)


@lru_cache(maxsize=256)
def _packed_bytes(model: ModelShape, width: int, gathered: bool) -> int:
    """Bytes of the buffers in which rank 0 sends its weights to a vLLM server, two in flight.

        bytes = max over buffers of (the buffer before + buffer); + buffer if its tensors are gathered one by one

    A buffer has the next tensors until they exceed 1 GiB. Gathered ones live until their buffer is complete.
    Source: vllm 0.31, distributed/weight_transfer/packed_tensor.py, `packed_nccl_broadcast_producer`, `pack_tensors`.

    Example: Qwen2.5-0.5B in float32 has buffers of 1.01 and 0.83 GiB: 1.84 GiB (emulated: 2.04 with the merge of
    adapters). Of two layers, 0.62 GiB, gathered: 1.24 (emulated under FSDP2: 1.26, results/emulated_situations.md).
    """
    buffers, size = [0], 0
    for tensor in tensors_in_order(model, "lm_head"):
        for _ in range(tensor.count):
            size += tensor.elements * width
            if size > PACKED_BUFFER_BYTES:
                buffers.append(size)
                size = 0
    return max(before + each * (1 + gathered) for before, each in pairwise([*buffers, size]))


def _merge_bytes(candidate: StateInput, counted: Parameters) -> int:
    if candidate.tuning == "full":
        return 0
    parts: tuple[Literal["linear", "vision_linear", "expert"], ...] = ("linear", "vision_linear")
    named = candidate.lora_target_parameters
    if named or targets_experts(candidate.model, candidate.lora_target_modules):
        parts = (*parts, "expert")
    largest = _largest_of(counted, parts)
    dequantized = MERGE_COPIES_4BIT * DTYPE_BYTES[candidate.dtype] if candidate.quantization_row.four_bit else 0
    return largest * (MERGE_COPIES * adapter_dtype_bytes(candidate) + dequantized)


@lru_cache(maxsize=1024)
def _largest_of(counted: Parameters, parts: tuple[Literal["linear", "vision_linear", "expert"], ...]) -> int:
    return counted.base_tensors.only(*parts).largest

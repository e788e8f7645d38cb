"""Gradients: `.grad` of the trained parameters, from the backward pass to the end of the optimizer step."""

from functools import lru_cache
from typing import NamedTuple

from planner.cache_keys import StateInput
from planner.memory.parameters.kbit_preparation import FLOAT32_BYTES, SIXTEEN_BIT_BYTES
from planner.memory.parameters.lora import AdaptersKey, adapters_key, lora_in_order
from planner.memory.parameters.sharding import (
    decay_groups,
    flat_elements,
    fsdp2_shards,
    reduce_bucket_elements,
    zero3_elements,
)
from planner.memory.parameters.tensors import TensorSet, rounded_bytes, tensor_bytes, tensors_in_order
from planner.memory.parameters.trained import learning_groups, trained_groups
from planner.memory.parameters.widths import adapter_dtype_bytes, base_dtype_bytes
from planner.methods import Head
from planner.models.shape import ModelShape

FLOAT64_BYTES = 8
NORM_ELEMENTS = 250_000_000  # deepspeed 0.19.8, zero/stage3.py, `_constant_buffered_norm2`


class Partition(NamedTuple):
    """Elements of the tensors with a part in one rank's partition (ZeRO-1, ZeRO-2), and of the largest such part."""

    touched: int
    largest_part: int


def gradients_bytes(candidate: StateInput) -> int:
    """Bytes of gradients on one of G GPUs at the end of the backward pass, on the rank with the most.

        one GPU, DDP     trained parameters x dtype
        ZeRO-1           the same
        ZeRO-2           the full size of every tensor of which a part lies in the rank's partition
        ZeRO-3           sum of ceil(n / G) over tensors
        FSDP2            shards, in the dtype of the parameter
        fused backward   the largest tensor (lomo, adalomo), which is updated last; see `update_in_backward_bytes`
        accumulating     ZeRO-2: also the new gradients of the rank's partition
                         FSDP2 without `sync_each_batch`: `whole_gradients_bytes`, at the end of all backward passes
                         but the last
        no mixed precision, 16-bit weights: under ZeRO-1 in float32, under ZeRO-2 also `float32_partition_bytes`

    A gradient has the dtype of its parameter, 16 bits under DeepSpeed with mixed precision. Offloaded optimizers
    keep gradients on the host, ZeRO-1 after the last reduction (ZeRO: a bucket stays on the GPU, see communication.py).

    Source: deepspeed 0.19.8, runtime/engine.py, `DeepSpeedEngine.get_data_types`, zero/stage_1_and_2.py,
    `DeepSpeedZeroOptimizer.copy_grads_in_partition` (`grads_in_partition`) and
    `independent_gradient_partition_epilogue` (`all_grad_tensors`), zero/stage3.py,
    `DeepSpeedZeroOptimizer_Stage3._setup_for_real_optimizer`.

    Example: Qwen2.5-7B in full, float32: 30.46 GB = 28.37 GiB; LoRA r 16 on it: 161 MB. ZeRO-2 in bfloat16 on 64 GPUs:
    a partition has 119 million parameters, but one that holds a part of the embedding has gradients for all of its 545
    million: 1.28 GB instead of 0.24, 2.57 when accumulating.

    Leaves out DDP's second copy (communication.py), and that ZeRO-1 has dropped other ranks' small gradients by then.
    """
    if candidate.optimizer_row.fused_backward:
        return sum(rounded_bytes(tensors.largest * size) for tensors, size in learning_groups(candidate))
    kept = accumulated_gradients_bytes(candidate)
    if candidate.keeps_whole_gradients:
        return max(kept, step_gradients_bytes(candidate))
    if candidate.sharding != "zero2":
        return kept
    if accumulates_in_float32(candidate):  # smaller gradients are in the bucket
        largest = max(tensors.largest for tensors, _ in trained_groups(candidate))
        return kept + (touched_gradients_bytes(candidate) if largest > reduce_bucket_elements(candidate) else 0)
    return kept + (touched_gradients_bytes(candidate) if candidate.accumulates else 0)


def accumulated_gradients_bytes(candidate: StateInput) -> int:
    """Bytes of gradients on one GPU between two backward passes of a step.

    ZeRO-1 keeps all, as it reduces after the last pass, and so does FSDP2 (see `Candidate.keeps_whole_gradients`).
    """
    if candidate.keeps_whole_gradients:
        return whole_gradients_bytes(candidate)
    if candidate.sharding == "zero1":
        float32 = accumulates_in_float32(candidate)
        return sum(
            tensor_bytes(tensors, FLOAT32_BYTES if float32 else size) for tensors, size in trained_groups(candidate)
        )
    return step_gradients_bytes(candidate)


def step_gradients_bytes(candidate: StateInput) -> int:
    """Bytes of gradients on one GPU during the optimizer's step; ZeRO-1 has dropped those of other partitions by then.

    Source: deepspeed 0.19.8, zero/stage_1_and_2.py, `DeepSpeedZeroOptimizer.step`
    (`free_grad_in_param_list(self.params_not_in_partition[i])`); torch 2.13,
    distributed/fsdp/_fully_shard/_fsdp_collectives.py, `foreach_reduce` (one buffer per layer).
    """
    if candidate.optimizer_row.fused_backward:
        return 0
    groups, processes = learning_groups(candidate), candidate.shard_gpus
    if accumulates_in_float32(candidate):
        return float32_partition_bytes(candidate)  # offloaded, too
    if candidate.sharding in ("zero1", "zero2"):
        return touched_gradients_bytes(candidate)
    if candidate.sharding == "zero3":
        return (
            0
            if candidate.offload_optimizer
            else sum(rounded_bytes(zero3_elements(tensors, processes) * size) for tensors, size in groups)
        )
    if candidate.sharding == "fsdp2":
        return (
            0
            if candidate.offload_param
            else sum(rounded_bytes(fsdp2_shards(tensors, processes).params * size) for tensors, size in groups)
        )
    return sum(tensor_bytes(tensors, size) for tensors, size in groups)


def whole_gradients_bytes(candidate: StateInput) -> int:
    """Bytes of the gradients of all trained tensors, unsharded under FSDP2, on every GPU, offloaded or not.

        bytes = trained parameters x (2 with mixed precision, else the parameter's dtype)

    FSDP2 computes and reduces in accelerate's mixed precision (`param_dtype`, `reduce_dtype`), so that the unsharded
    gradient has that dtype, and autograd adds the next one to it.
    Source: accelerate 1.15, utils/dataclasses.py, `FullyShardedDataParallelPlugin.set_mixed_precision`; torch 2.13,
    distributed/fsdp/_fully_shard/_fsdp_param.py, `to_accumulated_grad_if_needed`; results/fsdp2_memory.md.

    Example: Qwen2.5-14B in full: 29.5 GB on every GPU, where a shard of 8 has 7.4 GB.
    """
    return sum(
        tensor_bytes(tensors, SIXTEEN_BIT_BYTES if candidate.precision != "no" else size)
        for tensors, size in learning_groups(candidate)
    )


def accumulates_in_float32(candidate: StateInput) -> bool:
    """Return whether ZeRO-1 or ZeRO-2, without mixed precision, adds up 16-bit gradients in float32 on the GPU.

    Source: deepspeed 0.19.8, runtime/engine.py, `DeepSpeedEngine.get_data_types`; zero/stage_1_and_2.py,
    `_use_compact_grad_partition_buffer`.
    """
    partitioned = candidate.sharding in ("zero1", "zero2")
    return partitioned and candidate.precision == "no" and _trained_width(candidate) == SIXTEEN_BIT_BYTES


def float32_partition_bytes(candidate: StateInput) -> int:
    """Bytes of the float32 buffer in which ZeRO-1 and ZeRO-2 add up the 16-bit gradients of one partition.

    Source: see `accumulates_in_float32`. Example: Qwen2.5-0.5B in bfloat16 with `bf16: false` on two GPUs: 942 MiB.
    """
    groups, processes = trained_groups(candidate), candidate.num_processes
    flat = [flat_elements(group.params, processes) for tensors, _ in groups for group in decay_groups(tensors)]
    return sum(rounded_bytes(elements // processes * FLOAT32_BYTES) for elements in flat)


def touched_gradients_bytes(candidate: StateInput) -> int:
    """Bytes of the gradients of one partition under ZeRO-1 and ZeRO-2: the full size of every tensor with a part in it.

    Source: deepspeed 0.19.8, zero/stage_1_and_2.py, `DeepSpeedZeroOptimizer.copy_grads_in_partition` and
    `get_partition_info`. Example: see `gradients_bytes`.
    """
    if candidate.sharding not in ("zero1", "zero2") or candidate.offload_optimizer:
        return 0
    return max(touched_bytes(partition, candidate) for partition in partitions(candidate))


def norm_of_offloaded_bytes(candidate: StateInput) -> int:
    """Bytes that a gradient's norm takes under ZeRO, at most, before the gradient goes to the host.

    ZeRO-1 and ZeRO-2: a float64 copy of the gradient's part in one partition. ZeRO-3: one of a GPU's shard of the
    embedding's gradient, and a copy of the shard in its own dtype.

    Source: deepspeed 0.19.8, zero/stage_1_and_2.py, `set_norm_for_param_grad_in_gpu`; zero/utils.py, `get_norm_dtype`;
    zero/stage3.py, `partition_grads` (`grad_buffer.to`), `_constant_buffered_norm2`.

    Example: an embedding of 51.5 million parameters in 16 bits: 393 MiB in one partition, 246 MiB under ZeRO-3 on two
    GPUs.
    """
    if candidate.sharding not in ("zero1", "zero2", "zero3") or not candidate.offload_optimizer:
        return 0
    if candidate.sharding == "zero3":
        embeddings = [
            (max((kind.elements for kind in tensors.kinds if kind.part == "embedding"), default=0), width)
            for tensors, width in trained_groups(candidate)
        ]
        shards = [(elements // candidate.shard_gpus, width) for elements, width in embeddings]
        return max(FLOAT64_BYTES * min(elements, NORM_ELEMENTS) + width * elements for elements, width in shards)
    return FLOAT64_BYTES * max(partition.largest_part for partition in partitions(candidate))


def touched_bytes(partition: Partition, candidate: StateInput) -> int:
    """Bytes of the gradients of all tensors with a part in a partition."""
    return rounded_bytes(partition.touched * _trained_width(candidate))


def _trained_width(candidate: StateInput) -> int:
    return adapter_dtype_bytes(candidate) if candidate.tuning == "lora" else base_dtype_bytes(candidate)


def partitions(candidate: StateInput) -> tuple[Partition, ...]:
    """Return each rank's partition under ZeRO-1 and ZeRO-2."""
    others = tuple(tensors for tensors, _ in trained_groups(candidate)[1:])
    lora = adapters_key(candidate)
    return _partitions(candidate.model, candidate.method_row.head, lora, others, candidate.num_processes)


@lru_cache(maxsize=1024)
def _partitions(
    model: ModelShape,
    head: Head,
    lora: AdaptersKey | tuple[()],
    others: tuple[TensorSet, ...],
    num_processes: int,
) -> tuple[Partition, ...]:
    """Return each rank's partition. Each of the optimizer's parameter groups is cut into partitions of its own."""
    ordered = lora_in_order(model, *lora) if lora else tensors_in_order(model, head)
    touched, largest = [0] * num_processes, [0] * num_processes
    every = TensorSet(kinds=(*ordered, *(kind for tensors in others for kind in tensors.kinds)))
    for group in decay_groups(every):
        piece, start = flat_elements(group.params, num_processes) // num_processes, 0
        for kind in group.kinds:
            # parameters of which only the number is known count as many small tensors
            whole = len(kind.shape) > 1 or kind.part == "vector"
            for _ in range(kind.count):
                for rank in range(start // piece, (start + kind.elements - 1) // piece + 1):
                    part = min(start + kind.elements, (rank + 1) * piece) - max(start, rank * piece)
                    touched[rank] += kind.elements if whole else part
                    largest[rank] = max(largest[rank], part if whole else 0)
                start += kind.elements
    return tuple(map(Partition, touched, largest))

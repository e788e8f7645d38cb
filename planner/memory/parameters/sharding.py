"""Sharding: the part of each tensor on one of G GPUs. DDP copies tensors; ZeRO and FSDP2 split them."""

from functools import lru_cache

from planner.cache_keys import StateInput
from planner.memory.parameters.tensors import EqualTensors, TensorSet, rounded_bytes, tensor_bytes
from planner.schemes import Sharding

# Values that Transformers puts for "auto" into a DeepSpeed config, in elements: for hidden_size H buckets of H^2,
# prefetching of 0.9 H^2, a persistence threshold of 10 H. Source: transformers 5.23, integrations/deepspeed.py,
# `HfTrainerDeepSpeedConfig.trainer_config_finalize`.
PERSISTENCE_THRESHOLD_HIDDEN_SIZES = 10
PREFETCH_TENTHS = 9

# Elements. Source: deepspeed 0.19.8, zero/stage_1_and_2.py, `DeepSpeedZeroOptimizer.__init__`
# (`nccl_start_alignment_factor`).
START_ALIGNMENT = 2


def sharded_bytes(tensors: TensorSet, bytes_per_param: int, candidate: StateInput, trained: bool = False) -> int:
    """Bytes of model tensors on one of G = `num_processes` GPUs (FSDP2: `shard_gpus`) while no layer uses them.

        ZeRO-3    ceil(n / G) elements of each tensor, and a full copy of small ones (`persistence_threshold`)
        FSDP2     ceil(rows / G) rows of each tensor
        others    all elements
        offload_param: none (ZeRO-3: the full copies of the small tensors)

    Trained tensors share one buffer under ZeRO-3, and one buffer per optimizer group under ZeRO-1 and ZeRO-2; any other
    tensor has its own allocation.

    Source: deepspeed 0.19.8, runtime/zero/partition_parameters.py `_partition_param`, stage3.py,
    `DeepSpeedZeroOptimizer_Stage3._create_fp16_partitions_with_defragmentation` (`defragment`) and
    parameter_offload.py, `DeepSpeedZeRoOffload.mark_persistent_parameters` (`ds_persist`), stage_1_and_2.py,
    `DeepSpeedZeroOptimizer.__init__` (`flatten_dense_tensors_aligned`); torch 2.13,
    distributed/fsdp/_fully_shard/_fsdp_param.py (`Shard(0)`, padded to the largest chunk). tests/test_sharded_runs.py
    compares the bytes with two real processes; they are equal to the byte.

    Leaves out that the last ranks' shards can be smaller: this is rank 0.
    """
    if candidate.sharding == "zero3":
        persistent = _persistent_bytes(tensors, bytes_per_param, persistence_threshold(candidate))
        return (
            persistent
            if candidate.offload_param
            else persistent + _zero3_bytes(tensors, bytes_per_param, candidate.num_processes, trained)
        )
    if candidate.sharding == "fsdp2":
        return 0 if candidate.offload_param else _fsdp2_bytes(tensors, bytes_per_param, candidate.shard_gpus)
    if candidate.scheme_row.stage and trained:
        return sum(
            rounded_bytes(flat_elements(group.params, candidate.num_processes) * bytes_per_param)
            for group in decay_groups(tensors)
        )
    return tensor_bytes(tensors, bytes_per_param)


def reduce_bucket_elements(candidate: StateInput) -> int:
    """Elements of the bucket in which DeepSpeed collects gradients before it reduces them."""
    given = candidate.reduce_bucket_size
    return candidate.model.hidden_size**2 if given == "auto" else given


def prefetch_elements(candidate: StateInput) -> int:
    """Elements that ZeRO-3 gathers ahead of the layer that computes."""
    given = candidate.stage3_prefetch_bucket_size
    return PREFETCH_TENTHS * candidate.model.hidden_size**2 // 10 if given == "auto" else given


def persistence_threshold(candidate: StateInput) -> int:
    """Largest tensor, in elements, of which ZeRO-3 keeps a full copy on every GPU."""
    given = candidate.stage3_param_persistence_threshold
    return PERSISTENCE_THRESHOLD_HIDDEN_SIZES * candidate.model.hidden_size if given == "auto" else given


@lru_cache(maxsize=4096)
def _persistent_bytes(tensors: TensorSet, bytes_per_param: int, threshold: int) -> int:
    """Bytes of the tensors of at most `threshold` elements, of which ZeRO-3 keeps a full copy on every GPU."""
    return sum(
        rounded_bytes(kind.elements * bytes_per_param) * kind.count
        for kind in tensors.kinds
        if kind.elements <= threshold
    )


@lru_cache(maxsize=4096)
def _zero3_bytes(tensors: TensorSet, bytes_per_param: int, num_processes: int, trained: bool) -> int:
    """Bytes of the shards on one GPU under ZeRO-3: one buffer if `trained`, else one allocation per tensor."""
    if trained:
        return rounded_bytes(zero3_elements(tensors, num_processes) * bytes_per_param)
    return sum(
        rounded_bytes(-(-kind.elements // num_processes) * bytes_per_param) * kind.count for kind in tensors.kinds
    )


@lru_cache(maxsize=4096)
def offloaded_shards(tensors: TensorSet, sharding: Sharding, num_processes: int, threshold: int) -> TensorSet:
    """The shards of one rank that `offload_param` keeps on the host: under ZeRO-3 of tensors above `threshold`."""
    if sharding == "fsdp2":
        return fsdp2_shards(tensors, num_processes)
    return TensorSet(
        kinds=tuple(
            EqualTensors(part=kind.part, shape=(-(-kind.elements // num_processes),), count=kind.count)
            for kind in tensors.kinds
            if kind.elements > threshold
        )
    )


def zero3_elements(tensors: TensorSet, num_processes: int) -> int:
    """Elements on one of G = `num_processes` ranks under ZeRO-3: the sum over tensors of ceil(elements / G)."""
    return sum(-(-kind.elements // num_processes) * kind.count for kind in tensors.kinds)


def flat_elements(params: int, num_processes: int) -> int:
    """Elements of a flat buffer of ZeRO-1 or ZeRO-2 over all ranks, padded to a multiple of 2 G.

    Source: deepspeed 0.19.8, zero/stage_1_and_2.py, `DeepSpeedZeroOptimizer.__init__` (`nccl_start_alignment_factor *
    world_size`).
    """
    unit = START_ALIGNMENT * num_processes
    return -(-params // unit) * unit


@lru_cache(maxsize=4096)
def decay_groups(tensors: TensorSet) -> tuple[TensorSet, ...]:
    """The optimizer's parameter groups that are not empty: with weight decay (matrices), without (norms, biases).

    Source: transformers 5.23, trainer.py, `Trainer.create_optimizer` and `get_decay_parameter_names`.

    Leaves out that gpt_oss' attention sinks, which are vectors, belong to the first group.
    """
    groups = (
        tuple(kind for kind in tensors.kinds if (kind.part == "vector") == undecayed) for undecayed in (False, True)
    )
    return tuple(TensorSet(kinds=kinds) for kinds in groups if kinds)


@lru_cache(maxsize=4096)
def _fsdp2_bytes(tensors: TensorSet, bytes_per_param: int, num_processes: int) -> int:
    """Bytes of the shards on one GPU under FSDP2."""
    return tensor_bytes(fsdp2_shards(tensors, num_processes), bytes_per_param)


@lru_cache(maxsize=4096)
def fsdp2_shards(tensors: TensorSet, num_processes: int) -> TensorSet:
    """Rank 0's shard of each tensor under FSDP2: the first ceil(rows / G) rows."""
    return TensorSet(
        kinds=tuple(
            EqualTensors(part=kind.part, shape=(-(-kind.shape[0] // num_processes), *kind.shape[1:]), count=kind.count)
            for kind in tensors.kinds
        )
    )


@lru_cache(maxsize=4096)
def flat_shard(tensors: TensorSet, sharding: Sharding, num_processes: int) -> TensorSet:
    """The flat buffers that one rank optimizes under ZeRO, one per optimizer group: params / G elements, one dimension.

    Leaves out that ZeRO-3 splits a group into sub-groups (`sub_group_size`), which changes only the rounding.
    """
    pieces = (
        zero3_elements(group, num_processes)
        if sharding == "zero3"
        else flat_elements(group.params, num_processes) // num_processes
        for group in decay_groups(tensors)
    )
    return TensorSet(kinds=tuple(EqualTensors(part="other", shape=(piece,)) for piece in pieces))


def optimized_tensors(tensors: TensorSet, candidate: StateInput) -> TensorSet:
    """The tensors that the optimizer on one GPU gets: flat buffers (ZeRO), shards of rows (FSDP2), else all tensors.

    A flat buffer has one dimension, so that a factored optimizer keeps its full state for it.
    """
    if candidate.scheme_row.stage:
        return flat_shard(tensors, candidate.sharding, candidate.num_processes)
    if candidate.sharding == "fsdp2":
        return fsdp2_shards(tensors, candidate.shard_gpus)
    return tensors


def gathered_bytes(tensors: TensorSet, bytes_per_param: int, candidate: StateInput) -> int:
    """Bytes on each GPU of all parameters gathered at once under ZeRO-3, besides its own shards; 0 without ZeRO-3.

        bytes = sum over tensors above `persistence_threshold` of ceil(elements x bytes_per_param / 512) x 512

    TRL gathers all parameters for `generate` with `ds3_gather_for_generation`, and for the weight sync of a PEFT model.
    Every GPU has the smaller tensors already.

    Source: trl 1.16, models/utils.py, `unwrap_model_for_generation`
    (`deepspeed.zero.GatheredParameters(model.parameters())`); generation/vllm_generation.py,
    `VLLMGeneration._iter_named_params`.
    """
    if candidate.sharding != "zero3":
        return 0
    return _gathered_bytes(tensors, bytes_per_param, persistence_threshold(candidate))


@lru_cache(maxsize=4096)
def _gathered_bytes(tensors: TensorSet, bytes_per_param: int, threshold: int) -> int:
    """The sum in `gathered_bytes`, cached by its three inputs."""
    return sum(
        rounded_bytes(kind.elements * bytes_per_param) * kind.count
        for kind in tensors.kinds
        if kind.elements > threshold
    )

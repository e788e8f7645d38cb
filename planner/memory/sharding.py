"""Sharding: what one of G GPUs keeps of tensors that DDP repeats and ZeRO or FSDP2 cut into pieces."""

from functools import lru_cache

from planner.candidate import Candidate, Sharding
from planner.memory.tensors import Tensors, TensorSet, rounded_bytes, tensor_bytes

DEEPSPEED: tuple[Sharding, ...] = ("zero1", "zero2", "zero3")

# Hugging Face's values for "auto" in a DeepSpeed config, in elements.
# Source: transformers 5.23, integrations/deepspeed.py:229-242 (H^2, 0.9 H^2, 10 H for hidden_size H).
PERSISTENCE_THRESHOLD_HIDDEN_SIZES = 10
PREFETCH_TENTHS = 9

# deepspeed 0.19.8, runtime/zero/config.py: `stage3_max_reuse_distance` and `sub_group_size`, in elements.
MAX_REUSE_DISTANCE = 10**9
SUB_GROUP_SIZE = 10**9


def sharded_bytes(tensors: TensorSet, bytes_per_param: int, candidate: Candidate) -> int:
    """Bytes of model tensors on one of `num_processes` GPUs, between the layers that use them.

        ZeRO-3: ceil(n / G) of each tensor, and small ones (at most 10 hidden_size elements) whole besides |
        FSDP2: ceil(rows / G) rows of each tensor | else: whole; parameters offloaded to the host: none (ZeRO-3: the small ones)

    Source: deepspeed 0.19.8, runtime/zero/partition_parameters.py `_partition_param` and parameter_offload.py:317 (`ds_persist`);
    torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param.py (`Shard(0)`, padded to the largest chunk).

    Leaves out the smaller last shards: this is rank 0.
    """
    if candidate.sharding == "zero3":
        return _zero3_bytes(tensors, bytes_per_param, candidate.num_processes, candidate.model.hidden_size, candidate.offload_param)
    if candidate.sharding == "fsdp2":
        return 0 if candidate.offload_param else _fsdp2_bytes(tensors, bytes_per_param, candidate.num_processes)
    return tensor_bytes(tensors, bytes_per_param)


@lru_cache(maxsize=4096)
def _zero3_bytes(tensors: TensorSet, bytes_per_param: int, num_processes: int, hidden_size: int, offloaded: bool) -> int:
    threshold = PERSISTENCE_THRESHOLD_HIDDEN_SIZES * hidden_size
    persistent = sum(rounded_bytes(kind.elements * bytes_per_param) * kind.count for kind in tensors.kinds if kind.elements <= threshold)
    pieces = sum(rounded_bytes(-(-kind.elements // num_processes) * bytes_per_param) * kind.count for kind in tensors.kinds)
    return persistent if offloaded else persistent + pieces


@lru_cache(maxsize=4096)
def _fsdp2_bytes(tensors: TensorSet, bytes_per_param: int, num_processes: int) -> int:
    return tensor_bytes(fsdp2_shards(tensors, num_processes), bytes_per_param)


@lru_cache(maxsize=4096)
def fsdp2_shards(tensors: TensorSet, num_processes: int) -> TensorSet:
    """The piece of each tensor that rank 0 has under FSDP2: its first ceil(rows / G) rows."""
    return TensorSet(
        kinds=tuple(Tensors(part=kind.part, shape=(-(-kind.shape[0] // num_processes), *kind.shape[1:]), count=kind.count) for kind in tensors.kinds)
    )


@lru_cache(maxsize=4096)
def flat_shard(tensors: TensorSet, num_processes: int) -> TensorSet:
    """The one flat piece that a rank optimizes under ZeRO: ceil(params / G) elements without shape."""
    return TensorSet(kinds=(Tensors(part="other", shape=(-(-tensors.params // num_processes),)),))


def optimized_tensors(tensors: TensorSet, candidate: Candidate) -> TensorSet:
    """The tensors as the optimizer on one GPU sees them: flat under ZeRO, cut in rows under FSDP2, else as they are.

    Flat pieces have no rows and columns, so that a factored optimizer does not factor them.
    """
    if candidate.sharding in DEEPSPEED:
        return flat_shard(tensors, candidate.num_processes)
    if candidate.sharding == "fsdp2":
        return fsdp2_shards(tensors, candidate.num_processes)
    return tensors


def gathered_bytes(tensors: TensorSet, bytes_per_param: int, candidate: Candidate) -> int:
    """Bytes of every parameter gathered on one GPU at once, beside its own piece: what ZeRO-3 does for `generate` with
    `ds3_gather_for_generation`, and for the weight sync of a PEFT model.

    Source: trl 1.16, models/utils.py `unwrap_model_for_generation` (`deepspeed.zero.GatheredParameters(model.parameters())`);
    generation/vllm_generation.py:447. Small persistent parameters are there already.
    """
    if candidate.sharding != "zero3":
        return 0
    return _gathered_bytes(tensors, bytes_per_param, candidate.model.hidden_size)


@lru_cache(maxsize=4096)
def _gathered_bytes(tensors: TensorSet, bytes_per_param: int, hidden_size: int) -> int:
    threshold = PERSISTENCE_THRESHOLD_HIDDEN_SIZES * hidden_size
    return sum(rounded_bytes(kind.elements * bytes_per_param) * kind.count for kind in tensors.kinds if kind.elements > threshold)

"""Storage of tensors under ZeRO-3: shards, and full copies of small ones."""

from functools import lru_cache

from planner.cache_keys import StateInput
from planner.memory.dtypes import DTYPE_BYTES
from planner.memory.parameters.policy import policy_parameters
from planner.memory.parameters.tensors import EqualTensors, TensorSet, rounded_bytes
from planner.memory.parameters.widths import base_dtype_bytes

# Values that Transformers puts for "auto" into a DeepSpeed config, in elements: for hidden_size H buckets of H^2,
# prefetching of 0.9 H^2, a persistence threshold of 10 H. Source: transformers 5.23, integrations/deepspeed.py,
# `HfTrainerDeepSpeedConfig.trainer_config_finalize`.
PERSISTENCE_THRESHOLD_HIDDEN_SIZES = 10
PREFETCH_TENTHS = 9
# DeepSpeed's own for "auto", in an engine that TRL makes before that of training. Source: deepspeed 0.19.8,
# runtime/zero/config.py.
EARLIER_PREFETCH, EARLIER_PERSISTENCE = 50_000_000, 100_000


def prefetch_elements(candidate: StateInput) -> int:
    """Elements that ZeRO-3 gathers ahead of the layer that computes."""
    given = candidate.stage3_prefetch_bucket_size
    return PREFETCH_TENTHS * candidate.model.hidden_size**2 // 10 if given == "auto" else given


def persistence_threshold(candidate: StateInput) -> int:
    """Largest tensor, in elements, of which ZeRO-3 keeps a full copy on every GPU.

    If TRL made an engine before, to precompute the reference, the larger of both: each engine marks its own tensors
    (deepspeed 0.19.8, runtime/zero/parameter_offload.py, `mark_persistent_parameters`).
    """
    given = candidate.stage3_param_persistence_threshold
    if given != "auto":
        return given
    threshold = PERSISTENCE_THRESHOLD_HIDDEN_SIZES * candidate.model.hidden_size
    return max(threshold, EARLIER_PERSISTENCE) if candidate.precomputes else threshold


@lru_cache(maxsize=4096)
def persistent_bytes(tensors: TensorSet, bytes_per_param: int, threshold: int) -> int:
    """Bytes of the tensors of at most `threshold` elements, of which ZeRO-3 keeps a full copy on every GPU."""
    return sum(
        rounded_bytes(kind.elements * bytes_per_param) * kind.count
        for kind in tensors.kinds
        if kind.elements <= threshold
    )


@lru_cache(maxsize=4096)
def shards_bytes(tensors: TensorSet, bytes_per_param: int, num_processes: int, trained: bool) -> int:
    """Bytes of the shards on one GPU under ZeRO-3: one buffer if `trained`, else one allocation per tensor."""
    if trained:
        return rounded_bytes(shard_elements(tensors, num_processes) * bytes_per_param)
    return sum(
        rounded_bytes(-(-kind.elements // num_processes) * bytes_per_param) * kind.count for kind in tensors.kinds
    )


def shard_elements(tensors: TensorSet, num_processes: int) -> int:
    """Elements on one of G = `num_processes` ranks under ZeRO-3: the sum over tensors of ceil(elements / G)."""
    return sum(-(-kind.elements // num_processes) * kind.count for kind in tensors.kinds)


@lru_cache(maxsize=4096)
def shards_above(tensors: TensorSet, num_processes: int, threshold: int) -> TensorSet:
    """The shards of one rank that `offload_param` keeps on the host: of tensors above `threshold`."""
    return TensorSet(
        kinds=tuple(
            EqualTensors(part=kind.part, shape=(-(-kind.elements // num_processes),), count=kind.count)
            for kind in tensors.kinds
            if kind.elements > threshold
        )
    )


def whole_while_created_bytes(candidate: StateInput) -> int:
    """Bytes of the head while it is created, the last and often the largest tensor, beyond all weights.

        cast         elements x (loaded dtype + stored dtype, if they differ) - shard
        partitioned  elements x stored dtype, beside its shard

    `zero.Init` creates each tensor whole on the GPU in the dtype of the load, casts it, and then partitions it. A tied
    head is created, too, before it is tied to the embedding: its shard is no weight of the model.
    Source: deepspeed 0.19.8, zero/partition_parameters.py, `zero_wrapper_for_fp_tensor_constructor`,
    `_post_init_method`, `_partition_param`; results/zero3_streams.md.

    Example: Qwen2.5-7B's head, 544,997,376 parameters, in float32 and bfloat16 on 4 GPUs: 3.05 less 0.25 GiB.

    Takes the largest tensor for the head.
    """
    largest, stored = policy_parameters(candidate).unquantized_tensors.largest, base_dtype_bytes(candidate)
    loaded, tied = DTYPE_BYTES[candidate.dtype], candidate.model.tied and candidate.method_row.head == "lm_head"
    shard = 0 if candidate.offload_param else -(-largest // candidate.num_processes) * stored
    cast = largest * (stored + loaded) - shard if loaded != stored else 0
    return max(cast, largest * stored) + (shard if tied else 0)


@lru_cache(maxsize=4096)
def gathered_bytes(tensors: TensorSet, bytes_per_param: int, threshold: int) -> int:
    """Bytes on each GPU of all parameters gathered at once, besides its own shards.

        bytes = sum over tensors above `threshold` of ceil(elements x bytes_per_param / 512) x 512

    TRL gathers all parameters for `generate` with `ds3_gather_for_generation`, and for the weight sync of a PEFT model.
    Every GPU has the smaller tensors already (`persistence_threshold`).

    Source: trl 1.16, models/utils.py, `unwrap_model_for_generation`
    (`deepspeed.zero.GatheredParameters(model.parameters())`); generation/vllm_generation.py,
    `VLLMGeneration._iter_named_params`.
    """
    return sum(
        rounded_bytes(kind.elements * bytes_per_param) * kind.count
        for kind in tensors.kinds
        if kind.elements > threshold
    )

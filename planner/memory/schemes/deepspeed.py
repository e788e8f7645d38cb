"""DeepSpeed's sizes and groups that ZeRO-1, ZeRO-2 and ZeRO-3 share."""

from functools import lru_cache

from planner.cache_keys import StateInput, TrainingInput
from planner.memory.dtypes import FLOAT32_BYTES, SIXTEEN_BIT_BYTES
from planner.memory.parameters.tensors import TensorSet
from planner.memory.parameters.trained import Group
from planner.memory.parameters.widths import compute_weight_width
from planner.quantities import Phase


def reduce_bucket_elements(candidate: StateInput) -> int:
    """Elements of the bucket in which DeepSpeed collects gradients before it reduces them."""
    given = candidate.reduce_bucket_size
    return candidate.model.hidden_size**2 if given == "auto" else given


def reduced_copy_width(candidate: StateInput) -> int:
    """Bytes of an element of the copy of a gradient that is reduced; 0 where it is reduced as it is.

    With Ulysses sequence parallelism DeepSpeed reduces in float32, whatever the computation's dtype.
    Source: deepspeed 0.19.8, runtime/engine.py, `DeepSpeedEngine._configure_distributed_model`, runtime/constants.py
    (`SEQ_PARALLEL_COMMUNICATION_DATA_TYPE_DEFAULT`), zero/stage3.py, `__avg_scatter_grads`.
    """
    shared = candidate.row_gpus > 1 and candidate.scheme_row.ulysses
    return FLOAT32_BYTES if shared and compute_weight_width(candidate) != FLOAT32_BYTES else 0


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


def bucket_bytes(candidate: StateInput) -> int:
    """Bytes of the bucket of gradients, `reduce_bucket_size` elements in the dtype of the computation."""
    return reduce_bucket_elements(candidate) * compute_weight_width(candidate)


def split_in_step_bytes(groups: tuple[Group, ...], candidate: TrainingInput, phase: Phase) -> int:
    """Bytes of blocks split in the optimizer's step on the GPU: (4 - 2) x params / G; 0 in other phases.

    From the second step on, the partition's 16-bit gradients take a part of the block that their float32 copy had, so
    that the copy needs a new block.
    Source: deepspeed 0.19.8, zero/stage_1_and_2.py, `DeepSpeedZeroOptimizer.step`, zero/stage3.py,
    `_prepare_fp32_grad_for_sub_group`; c10/cuda/CUDACachingAllocator.cpp, `get_free_block` (the smallest free block of
    the stream); results/emulated.md.
    """
    if candidate.num_processes == 1 or candidate.precision == "no":
        return 0
    if phase != "optimizer_step" or candidate.offload_optimizer:
        return 0
    return sum(tensors.params for tensors, _ in groups) * (FLOAT32_BYTES - SIXTEEN_BIT_BYTES)

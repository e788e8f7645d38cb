"""Optimizer: states from the first optimizer step to the last, and temporaries of a step."""

from functools import lru_cache

from planner.cache_keys import StateInput
from planner.memory.gradients import (
    FLOAT64_BYTES,
    accumulates_in_float32,
    partitions,
    touched_bytes,
    touched_gradients_bytes,
)
from planner.memory.parameters.sharding import optimized_tensors
from planner.memory.parameters.tensors import EqualTensors, TensorSet, pinned_bytes, rounded_bytes, tensor_bytes
from planner.memory.parameters.trained import learning_groups
from planner.optimizers import OPTIMIZERS, Optimizer, OptimizerRow

FLOAT32_BYTES = 4
SIXTEEN_BIT_BYTES = 2
QUANTIZED_MAP_BYTES = 256 * FLOAT32_BYTES  # table of the values of 256 codes

# Tensors below `min_8bit_size` elements keep float32 states, larger ones 8-bit codes with one absmax per 256; buffers
# of 1e5 elements or more can be paged. Source: bitsandbytes 0.50.2, optim/optimizer.py, `Optimizer2State.__init__` and
# `Optimizer8bit.get_state_buffer`.
BNB_MIN_8BIT_ELEMENTS = 4096
BNB_BLOCK = 256
BNB_MIN_PAGED_ELEMENTS = 10**5
# Sizes of the states as multiples of the parameter, by the sum of them: the first state of ademamix has twice the size.
BNB_STATES: dict[int, tuple[int, ...]] = {1: (1,), 2: (1, 1), 3: (2, 1)}
# torchao quantizes states of at least 4096 elements that are whole blocks. Source: torchao 0.18, optim/adam.py;
# block_size 256 from transformers 5.23, trainer_optimizer.py.
TORCHAO_MIN_ELEMENTS = 4096
TORCHAO_BLOCK = 256
TORCHAO_CODES: dict[int, int] = {8: 256, 4: 16}
# GaLore and APOLLO: rank of the projected gradients of matrices (optim_target_modules "all-linear"); other tensors get
# plain AdamW. Source: transformers 5.23, trainer_optimizer.py, `_get_galore_optimizer`, `_get_apollo_optimizer` (rank
# 128 unless optim_args sets another).
LOW_RANK = 128
LOW_RANK_PARTS = frozenset({"linear", "vision_linear", "head", "score"})
EMBEDDING_PARTS = frozenset({"embedding", "position"})  # modules of class nn.Embedding


def optimizer_states_bytes(candidate: StateInput) -> int:
    """Bytes of optimizer states on one of G GPUs after the first step, with DeepSpeed's float32 master weights.

        states = sum over trained tensors of the buffers in their row of OPTIMIZERS, each in its dtype
        ZeRO   : of float32 partitions of ceil(params / G) elements, + 4 bytes per element for master weights
        FSDP2  : of shards of ceil(rows / G) rows

    Example: full fine-tuning of Qwen2.5-7B, float32, adamw_torch_fused: 2 x 7,615,616,512 x 4 = 60.9 GB = 56.74 GiB;
    adamw_8bit: 2.03 bytes a parameter, but 8 on the embedding, which transformers keeps in float32 (trainer.py,
    `Trainer.create_optimizer`).

    Leaves out paged states, which the driver moves to the host when the GPU is full (`paged_states_bytes`).
    """
    if candidate.offload_optimizer or (candidate.sharding == "fsdp2" and candidate.offload_param):
        return 0
    states = sum(state_bytes(tensors, size, candidate.optim, False) for tensors, size in optimized_groups(candidate))
    return states + master_weights_bytes(candidate)


def master_weights_bytes(candidate: StateInput) -> int:
    """Bytes of DeepSpeed's float32 master weights on one GPU, from the start of training: 4 x ceil(params / G).

    Source: deepspeed 0.19.8, zero/stage_1_and_2.py, `DeepSpeedZeroOptimizer.__init__` (`clone().float().detach()`, for
    float32 models too), stage3.py, `DeepSpeedZeroOptimizer_Stage3._create_fp32_partitions`.
    """
    if not candidate.scheme_row.stage or candidate.offload_optimizer:
        return 0
    return sum(tensor_bytes(tensors, FLOAT32_BYTES) for tensors, _ in optimized_groups(candidate))


def master_copy_bytes(candidate: StateInput) -> int:
    """Bytes of a second copy of DeepSpeed's master weights while they are made; ZeRO-3: of one sub-group.

    ZeRO-1 and ZeRO-2: gradients of every partition, zeros in float32, which are dropped again. ZeRO-3: the weights are
    cast and cloned; then the first gradients are zeros of the same size.
    Source: deepspeed 0.19.8, zero/stage_1_and_2.py, `initialize_optimizer_states`; zero/stage3.py,
    `_create_fp32_partitions`, `initialize_optimizer_states`; results/zero3_streams.md.

    Example: Qwen2.5-1.5B in full on 8 GPUs, ZeRO-2: 772 MB of masters and 772 MB of zeros.

    Leaves out the second copy of the model while ZeRO-1 and ZeRO-2 make it flat, which they do on the host if the GPU
    has no room (`flatten_on_accelerator`).
    """
    if not candidate.scheme_row.stage or candidate.offload_optimizer:
        return 0
    if candidate.sharding != "zero3":
        return master_weights_bytes(candidate)
    groups = (min(candidate.sub_group_size, tensors.params) for tensors, _ in optimized_groups(candidate))
    return max(groups, default=0) * FLOAT32_BYTES


def paged_states_bytes(candidate: StateInput) -> int:
    """Bytes of one GPU's optimizer states in CUDA managed memory: on the GPU while there is room, else on the host.

    They count as host memory, because the driver moves them out when the GPU is full.
    Source: bitsandbytes 0.50.2, optim/optimizer.py, `Optimizer8bit.get_state_buffer`.
    """
    return sum(state_bytes(tensors, size, candidate.optim, True) for tensors, size in optimized_groups(candidate))


def host_states_bytes(candidate: StateInput) -> int:
    """Bytes of states that one process keeps in host memory: those of an offloaded optimizer, and those of GrokAdamW.

    With offloading the states and, with n = params / G of each optimizer group (see `pinned_bytes`):

        ZeRO-1, ZeRO-2  master weights and gradients, 2 x pinned(4 n); 16-bit weights on their way back, pinned(2 n);
                        with several micro-steps 16-bit gradients, pinned(2 x elements) of each tensor / G
        ZeRO-3          master weights 4 n; gradients pinned(4 n), a sub-group at a time; 16-bit ones, pinned(2 n)
        FSDP2           gradients, pinned(shard) of each tensor

    Source: deepspeed 0.19.8, zero/stage_1_and_2.py, `DeepSpeedZeroOptimizer.__init__`,
    `initialize_optimizer_states` and `async_accumulate_grad_in_cpu_via_gpu`, stage3.py,
    `DeepSpeedZeroOptimizer_Stage3._setup_for_real_optimizer`, `_create_fp32_partitions` and
    `initialize_optimizer_states`; torch 2.13, distributed/fsdp/_fully_shard/_fsdp_collectives.py, `foreach_reduce`.
    """
    groups = optimized_groups(candidate)
    kept = sum(candidate.optimizer_row.host_buffers * tensors.params * size for tensors, size in groups)
    if not (candidate.offload_optimizer or (candidate.sharding == "fsdp2" and candidate.offload_param)):
        return kept
    states = sum(state_bytes(tensors, size, candidate.optim, False) for tensors, size in groups)
    if candidate.sharding == "fsdp2":
        return kept + states + sum(pinned_tensors_bytes(tensors, size) for tensors, size in groups)
    flat = [kind.elements for tensors, _ in groups for kind in tensors.kinds]
    half = SIXTEEN_BIT_BYTES if candidate.precision != "no" else FLOAT32_BYTES
    if candidate.sharding == "zero3":
        pieces = (_in_sub_groups(elements, candidate.sub_group_size) for elements in flat)
        gradients = sum(pieces) + pinned_bytes(half * sum(flat))
        return kept + states + FLOAT32_BYTES * sum(flat) + gradients
    buffers = sum(2 * pinned_bytes(FLOAT32_BYTES * pieces) + pinned_bytes(half * pieces) for pieces in flat)
    whole = sum(pinned_tensors_bytes(tensors, half) for tensors, _ in learning_groups(candidate))
    return kept + states + buffers + (whole // candidate.num_processes if candidate.accumulates else 0)


def _in_sub_groups(elements: int, sub_group_size: int) -> int:
    """Bytes of float32 gradients in page-locked buffers of ZeRO-3's sub-groups."""
    full, rest = divmod(elements, sub_group_size)
    return full * pinned_bytes(FLOAT32_BYTES * sub_group_size) + pinned_bytes(FLOAT32_BYTES * rest)


@lru_cache(maxsize=4096)
def pinned_tensors_bytes(tensors: TensorSet, bytes_per_param: int) -> int:
    """Bytes of main memory of tensors, each in a page-locked allocation of its own."""
    return sum(pinned_bytes(kind.elements * bytes_per_param) * kind.count for kind in tensors.kinds)


def step_temporaries_bytes(candidate: StateInput) -> int:
    """Bytes that exist only while the optimizer steps, on one GPU.

        foreach optimizers   copies of all trained parameters at once
        others               copies of the largest tensor
        ZeRO-1, ZeRO-2       + flattened gradients and their float32 copy, (2 + 4) x ceil(params / G); or, before
                             that, the partition's largest part of a tensor's gradient in float64, for the norm;
                             gradients that are added up in float32 are flat
        ZeRO-3               + float32 gradients of one sub-group, 4 x min(1e9, params / G); beside them the
                               flattened 16-bit gradients, 2 x the same, or later the copies, of one sub-group

    Source: the rows of OPTIMIZERS; deepspeed 0.19.8, zero/stage_1_and_2.py, `DeepSpeedZeroOptimizer.step` and
    `get_grad_norm_direct` (`get_norm_dtype`), stage3.py, `_prepare_sub_group` and `_optimizer_step` (one step for each
    sub-group).

    Under ZeRO-1 and ZeRO-2 the rank with the largest part may keep fewer gradients than the rank with the most: these
    are the bytes by which the heavier of all ranks exceeds the most gradients.

    Example: LoRA r 16 on Qwen2.5-7B with adamw_torch: 161 MB; with the fused default nothing.

    Leaves out cuSOLVER's workspace in GaLore's decomposition, and Adafactor's update of the tensor before the largest,
    which a variable still holds.
    """
    if candidate.offload_optimizer or (candidate.sharding == "fsdp2" and candidate.offload_param):
        return 0
    if candidate.optimizer_row.fused_backward:
        return 0  # `update_in_backward_bytes`
    groups = optimized_groups(candidate)
    most = candidate.sub_group_size if candidate.sharding == "zero3" else 0
    found = 0
    for tensors, size in groups:
        copies = step_bytes(_stepped_at_once(tensors, most), size, candidate.optim)
        if candidate.sharding == "zero3":
            elements = min(most, tensors.params)
            flat = SIXTEEN_BIT_BYTES * elements if candidate.precision != "no" else 0
            found += max(copies, flat) + elements * FLOAT32_BYTES
            continue
        found += copies
        if candidate.scheme_row.stage and not accumulates_in_float32(candidate):
            width = SIXTEEN_BIT_BYTES if candidate.precision != "no" else FLOAT32_BYTES
            found += tensors.params * (width + FLOAT32_BYTES)
    if candidate.sharding not in ("zero1", "zero2"):
        return found
    if accumulates_in_float32(candidate):
        return max(found, *(each.largest_part * FLOAT64_BYTES for each in partitions(candidate)))
    heaviest = max(
        touched_bytes(each, candidate) + max(found, each.largest_part * FLOAT64_BYTES) for each in partitions(candidate)
    )
    return heaviest - touched_gradients_bytes(candidate)


def update_in_backward_bytes(candidate: StateInput, outside_layers: bool) -> int:
    """Bytes that lomo and adalomo take to update the largest tensor within the backward pass, beside its gradient.

        bytes = (float32 copies of the tensor, see OPTIMIZERS) - a 16-bit gradient, dropped once there is a copy

    A hook on each parameter, called with its new gradient, updates those whose `.grad` is set: the one before it. In
    float32 the "copies" of lomo are the gradient and the parameter themselves. `outside_layers`: embedding and head,
    too.
    Source: lomo-optim 0.1.1, lomo.py and adalomo.py, `fuse_update`.

    Example: Qwen2.5-7B in bfloat16 with lomo: 2 x 4 - 2 bytes for each of the head's 544,997,376 parameters, 3.05 GiB.
    """
    if not candidate.optimizer_row.fused_backward:
        return 0
    found = 0
    for tensors, size in learning_groups(candidate):
        elements = tensors.largest if outside_layers else largest_in_layers(tensors)
        gradient = rounded_bytes(elements * size) if size == SIXTEEN_BIT_BYTES else 0
        of_layers = TensorSet(kinds=(EqualTensors(part="other", shape=(elements,)),))
        found += max(step_bytes(of_layers, size, candidate.optim) - gradient, 0)
    return found


def gradient_before_bytes(candidate: StateInput) -> int:
    """Bytes of the largest gradient in the layers, alive beside the next one with lomo and adalomo; else 0.

    Source: see `update_in_backward_bytes`. Example: Qwen2.5-7B in float32: 4 x 18,944 x 3,584 bytes = 259 MiB.
    """
    if not candidate.optimizer_row.fused_backward:
        return 0
    return sum(rounded_bytes(largest_in_layers(tensors) * size) for tensors, size in learning_groups(candidate))


@lru_cache(maxsize=1024)
def largest_in_layers(tensors: TensorSet) -> int:
    """Elements of the largest tensor that is neither an embedding nor a head."""
    outside = EMBEDDING_PARTS | {"head", "score"}
    return max((kind.elements for kind in tensors.kinds if kind.part not in outside), default=0)


@lru_cache(maxsize=4096)
def _stepped_at_once(tensors: TensorSet, sub_group_size: int) -> TensorSet:
    """The tensors in one call of the optimizer's `step`: one sub-group of the partition under ZeRO-3, else (0) all."""
    if not sub_group_size:
        return tensors
    return TensorSet(kinds=(EqualTensors(part="other", shape=(min(sub_group_size, tensors.params),)),))


def optimized_groups(candidate: StateInput) -> tuple[tuple[TensorSet, int], ...]:
    """The tensors that the optimizer on one GPU updates, with bytes per parameter: float32 under DeepSpeed."""
    float32 = candidate.scheme_row.stage > 0
    return tuple(
        (optimized_tensors(tensors, candidate), FLOAT32_BYTES if float32 else size)
        for tensors, size in learning_groups(candidate)
    )


@lru_cache(maxsize=4096)
def state_bytes(tensors: TensorSet, bytes_per_param: int, optim: Optimizer, paged: bool) -> int:
    """Bytes of an optimizer's states for `tensors`: those in managed memory if `paged`, else all others."""
    row = OPTIMIZERS[optim]
    if paged and not row.paged:
        return 0
    found = sum(_tensor_state_bytes(kind, bytes_per_param, row, paged) * kind.count for kind in tensors.kinds)
    if row.kind == "bitsandbytes" and row.codes and not paged:
        # one table for signed and one for unsigned states, shared by all tensors
        found += min(row.codes, 2) * QUANTIZED_MAP_BYTES
    return found


def _tensor_state_bytes(kind: EqualTensors, size: int, row: OptimizerRow, paged: bool) -> int:
    if row.kind == "bitsandbytes":
        return _bitsandbytes_bytes(kind, row, paged)
    if row.kind == "torchao":
        return _torchao_bytes(kind.elements, size, row)
    if row.kind == "factored":
        sums = (
            [kind.elements]
            if len(kind.shape) < 2
            else [kind.elements // kind.shape[-1], kind.elements // kind.shape[-2]]
        )
        return sum(rounded_bytes(n * FLOAT32_BYTES) for n in sums)
    if row.projects:
        return _low_rank_bytes(kind, size, row)
    n = kind.elements
    buffers = row.buffers + (row.buffers_16bit if size == SIXTEEN_BIT_BYTES else 0)
    step = rounded_bytes(FLOAT32_BYTES) if row.step_tensor else 0
    return buffers * rounded_bytes(n * size) + row.float32_buffers * rounded_bytes(n * FLOAT32_BYTES) + step


def _bitsandbytes_bytes(kind: EqualTensors, row: OptimizerRow, paged: bool) -> int:
    n, blocks = kind.elements, -(-kind.elements // BNB_BLOCK)
    in_codes = row.codes and n >= BNB_MIN_8BIT_ELEMENTS and kind.part not in EMBEDDING_PARTS
    multiples = BNB_STATES[row.codes + row.float32_buffers]
    buffers = sum(rounded_bytes(multiple * n * (1 if in_codes else FLOAT32_BYTES)) for multiple in multiples)
    scales = sum(rounded_bytes(multiple * blocks * FLOAT32_BYTES) for multiple in multiples) if in_codes else 0
    is_paged = row.paged and n >= BNB_MIN_PAGED_ELEMENTS
    if paged:
        return buffers if is_paged else 0
    return scales + (0 if is_paged else buffers)


def _torchao_bytes(n: int, size: int, row: OptimizerRow) -> int:
    if n < TORCHAO_MIN_ELEMENTS or n % TORCHAO_BLOCK:
        return row.codes * rounded_bytes(n * size)
    scales = rounded_bytes(n // TORCHAO_BLOCK * FLOAT32_BYTES)
    return row.codes * (
        rounded_bytes(n * row.bits // 8) + scales + rounded_bytes(TORCHAO_CODES[row.bits] * FLOAT32_BYTES)
    )


def _low_rank_bytes(kind: EqualTensors, size: int, row: OptimizerRow) -> int:
    """Bytes of GaLore's or APOLLO's states for one m x n matrix: moments 2 r max(m, n), projector r min(m, n).

    GaLore's projector in float32 is a view, which keeps a full factor of the decomposition alive: min(m, n)^2 elements.
    Source: galore-torch 1.0, galore_projector.py, `get_orthogonal_matrix`.
    """
    if kind.part not in LOW_RANK_PARTS | {"adapter"} or len(kind.shape) != 2:
        return 2 * rounded_bytes(kind.elements * size)
    small, large = sorted(kind.shape)
    rank = min(LOW_RANK, small) if row.kind == "galore" else LOW_RANK
    projector = small * small if row.kind == "galore" and size == FLOAT32_BYTES else rank * small
    return 2 * rounded_bytes(rank * large * size) + rounded_bytes(projector * size)


@lru_cache(maxsize=4096)
def step_bytes(tensors: TensorSet, size: int, optim: Optimizer) -> int:
    """Bytes of the copies that one call of an optimizer's `step` makes; `size`: bytes of a parameter."""
    row = OPTIMIZERS[optim]
    copies = row.step_copies * sum(rounded_bytes(kind.elements * size) * kind.count for kind in tensors.kinds)
    largest = tensors.largest
    if row.kind == "galore":
        shapes = [
            sorted(kind.shape)
            for kind in tensors.kinds
            if len(kind.shape) == 2 and kind.part in LOW_RANK_PARTS | {"adapter"}
        ]
        small, large = max(shapes, key=lambda shape: shape[0] * shape[1], default=[0, 0])
        # the decomposition's copy of the gradient, and a float32 copy of a 16-bit gradient
        work = small * large * (1 if size == FLOAT32_BYTES else 2)
        return (work + small * large + small * small) * FLOAT32_BYTES
    if row.kind == "apollo":  # the scaled gradient and its clipped copy, and two copies of rank r
        longest = max((max(kind.shape) for kind in tensors.kinds if len(kind.shape) == 2), default=0)
        return 2 * rounded_bytes(largest * size) + 2 * rounded_bytes(LOW_RANK * longest * size)
    extra = row.step_largest_16bit if size == SIXTEEN_BIT_BYTES else 0
    return copies + (row.step_largest + extra) * rounded_bytes(largest * FLOAT32_BYTES)

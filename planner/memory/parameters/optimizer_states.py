"""Optimizer states of given tensors, and the copies that one call of an optimizer's `step` makes."""

from functools import lru_cache

from planner.memory.dtypes import FLOAT32_BYTES, SIXTEEN_BIT_BYTES
from planner.memory.parameters.tensors import EqualTensors, TensorSet, pinned_bytes, rounded_bytes
from planner.optimizers import OPTIMIZERS, Optimizer, OptimizerRow

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
    step = rounded_bytes(FLOAT32_BYTES) if row.step_tensor else 0
    return sum(map(rounded_bytes, dense_state_sizes(kind.elements, size, row))) + step


def dense_state_sizes(elements: int, size: int, row: OptimizerRow) -> tuple[int, ...]:
    """Bytes of each buffer that a dense optimizer keeps for a tensor of `elements` elements of `size` bytes."""
    buffers = row.buffers + (row.buffers_16bit if size == SIXTEEN_BIT_BYTES else 0)
    return (elements * size,) * buffers + (elements * FLOAT32_BYTES,) * row.float32_buffers


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


@lru_cache(maxsize=4096)
def pinned_tensors_bytes(tensors: TensorSet, bytes_per_param: int) -> int:
    """Bytes of host memory of tensors, each in a page-locked allocation of its own."""
    return sum(pinned_bytes(kind.elements * bytes_per_param) * kind.count for kind in tensors.kinds)

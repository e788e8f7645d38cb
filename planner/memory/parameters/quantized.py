"""Quantized weights: the tensors that hold them, whole and with their scales."""

from functools import lru_cache

from planner.cache_keys import StateInput
from planner.memory.dtypes import DTYPE_BYTES
from planner.memory.parameters.policy import policy_parameters
from planner.memory.parameters.tensors import EqualTensors, TensorSet, rounded_bytes, tensor_bytes
from planner.quantizations import Quantization, tensor_sizes


@lru_cache(maxsize=1024)
def quantized_bytes(tensors: TensorSet, quantization: Quantization, group_size: int) -> int:
    """Bytes of quantized weights with their scales and tables, on one GPU: `tensor_sizes`, each rounded to 512 bytes.

    Leaves out copies that some GPTQ and AWQ kernels keep when they repack the weights.
    """
    return sum(
        sum(map(rounded_bytes, tensor_sizes(kind.shape, quantization, group_size))) * kind.count
        for kind in tensors.kinds
    )


def whole_policy_bytes(candidate: StateInput, bytes_per_param: int) -> int:
    """Bytes of the unsharded policy without adapters; `bytes_per_param`: of its unquantized parameters."""
    unquantized = policy_parameters(candidate).unquantized_tensors
    return tensor_bytes(unquantized, bytes_per_param) + whole_quantized_bytes(candidate)


def whole_quantized_bytes(candidate: StateInput) -> int:
    """Bytes of all quantized weights of the policy, with their scales."""
    quantized, group_size = policy_parameters(candidate).quantized_tensors, candidate.model.quantization_group_size
    return quantized_bytes(quantized, candidate.quantization, group_size)


def scale_bytes(candidate: StateInput) -> int:
    """Bytes of the scales of the policy's quantized weights. Scales are not sharded: every GPU keeps all of them."""
    counted, group_size = policy_parameters(candidate), candidate.model.quantization_group_size
    sizes = (
        (tensor_sizes(kind.shape, candidate.quantization, group_size), kind.count)
        for kind in counted.quantized_tensors.kinds
    )
    return sum(count * sum(map(rounded_bytes, scales)) for (_, *scales), count in sizes)


def packed_tensors(candidate: StateInput) -> TensorSet:
    """Shapes of the policy's packed 4-bit weights, in elements of `bnb_4bit_quant_storage`; scales are left out.

    Source: bitsandbytes 0.50.2, functional.py, `quantize_4bit` (shape [n / 2 / itemsize, 1]).
    """
    counted, group_size = policy_parameters(candidate), candidate.model.quantization_group_size
    width = DTYPE_BYTES[candidate.bnb_4bit_quant_storage]
    return TensorSet(
        kinds=tuple(
            EqualTensors(
                part=kind.part,
                shape=(-(-tensor_sizes(kind.shape, candidate.quantization, group_size)[0] // width),),
                count=kind.count,
            )
            for kind in counted.quantized_tensors.kinds
        )
    )


def shards_4bit_weights(candidate: StateInput) -> bool:
    """Return whether each GPU keeps a piece of the 4-bit weights; see `policy_weights_bytes`."""
    if not candidate.quantization_row.four_bit:
        return False
    shards = candidate.scheme_row.shards_4bit
    return shards == "always" or (shards == "as floats" and candidate.bnb_4bit_quant_storage != "uint8")

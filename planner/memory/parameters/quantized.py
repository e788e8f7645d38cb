"""Quantized weights: the tensors that hold them, whole and with their scales."""

from functools import lru_cache

from planner.cache_keys import StateInput
from planner.candidate import FOUR_BIT, Quantization
from planner.memory.dtypes import DTYPE_BYTES, FLOAT32_BYTES, INT32_BYTES, SIXTEEN_BIT_BYTES
from planner.memory.parameters.policy import policy_parameters
from planner.memory.parameters.tensors import EqualTensors, TensorSet, rounded_bytes, tensor_bytes

# nf4 has one absmax per 64 weights, and a table of 16 values per tensor. Nested (`compress_statistics`): absmax in 8
# bits, one float per 256 of them, an offset and a table of 256 values per tensor.
# Source: bitsandbytes 0.50.2, functional.py, `quantize_4bit`.
NF4_BLOCK = 64


NF4_CODES = 16


NESTED_BLOCK = 256


NESTED_CODES = 256


# One float32 scale per 128 x 128 weights in DeepSeek's block-scaled checkpoints.
# Source: transformers 5.23, integrations/finegrained_fp8.py, `FP8Linear.weight_scale_inv`.
FP8_BLOCK = 128


# One 8-bit scale per 32 weights. Source: transformers 5.23, integrations/mxfp4.py, `Mxfp4GptOssExperts`.
MXFP4_BLOCK = 32


@lru_cache(maxsize=1024)
def quantized_bytes(tensors: TensorSet, quantization: Quantization, group_size: int) -> int:
    """Bytes of quantized weights with their scales and tables, on one GPU.

        nf4         n/2 + 4 n/64 + 64 per tensor                                  0.5625 per weight
        nf4-double  n/2 + n/64 + 4 n/(64 x 256) + 64 + 4 + 1024 per tensor        0.5159 per weight
        int8        n + 4 x out
        gptq        n/2 + (out/2 + 2 out) x in/group + 4 in;  awq the same without the last
        fp8         n + 4 n/128^2;  mxfp4  n/2 + n/32

    Source: bitsandbytes 0.50.2, functional.py `quantize_4bit`, nn/modules.py `Int8Params`; the tensors of GPTQ and AWQ
    checkpoints (qweight, qzeros, scales, g_idx). Each tensor rounded up to 512 bytes.

    Leaves out copies that some GPTQ and AWQ kernels keep when they repack the weights.
    """
    return sum(_quantized_tensor_bytes(kind.shape, quantization, group_size) * kind.count for kind in tensors.kinds)


def _quantized_tensor_bytes(shape: tuple[int, ...], quantization: Quantization, group_size: int) -> int:
    return sum(rounded_bytes(size) for size in quantized_tensor_sizes(shape, quantization, group_size))


def quantized_tensor_sizes(shape: tuple[int, ...], quantization: Quantization, group_size: int) -> tuple[int, ...]:
    """Bytes of each tensor that holds one quantized tensor, the packed weights first."""
    out_features, in_features = (shape[-2], shape[-1]) if len(shape) > 1 else (1, shape[0])
    elements = out_features * in_features * (shape[0] if len(shape) > 2 else 1)
    blocks = -(-elements // NF4_BLOCK)
    groups = -(-in_features // group_size) if group_size > 0 else 1  # -1: one group for all inputs of an output
    grouped = (-(-elements // 2), groups * out_features // 2, groups * out_features * SIXTEEN_BIT_BYTES)
    sizes: dict[Quantization, tuple[int, ...]] = {
        "none": (),
        "nf4": (-(-elements // 2), blocks * FLOAT32_BYTES, NF4_CODES * FLOAT32_BYTES),
        "nf4-double": (
            -(-elements // 2),
            blocks,
            -(-blocks // NESTED_BLOCK) * FLOAT32_BYTES,
            NF4_CODES * FLOAT32_BYTES,
            FLOAT32_BYTES,
            NESTED_CODES * FLOAT32_BYTES,
        ),
        "int8": (elements, out_features * FLOAT32_BYTES),
        "gptq": (*grouped, in_features * INT32_BYTES),
        "awq": grouped,
        "fp8": (elements, -(-out_features // FP8_BLOCK) * -(-in_features // FP8_BLOCK) * FLOAT32_BYTES),
        "mxfp4": (-(-elements // 2), -(-elements // MXFP4_BLOCK)),
    }
    return sizes[quantization]


def whole_policy_bytes(candidate: StateInput, bytes_per_param: int) -> int:
    """Bytes of the trained model without adapters that is not sharded; `bytes_per_param` of what is not quantized."""
    return tensor_bytes(policy_parameters(candidate).unquantized_tensors, bytes_per_param) + whole_quantized_bytes(
        candidate
    )


def whole_quantized_bytes(candidate: StateInput) -> int:
    """Bytes of all quantized weights of the policy, with their scales."""
    quantized, group_size = policy_parameters(candidate).quantized_tensors, candidate.model.quantization_group_size
    return quantized_bytes(quantized, candidate.quantization, group_size)


def scale_bytes(candidate: StateInput) -> int:
    """Bytes of the scales of the policy's quantized weights. Scales are not sharded: every GPU keeps all of them."""
    counted, group_size = policy_parameters(candidate), candidate.model.quantization_group_size
    sizes = (
        (quantized_tensor_sizes(kind.shape, candidate.quantization, group_size), kind.count)
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
                shape=(-(-quantized_tensor_sizes(kind.shape, candidate.quantization, group_size)[0] // width),),
                count=kind.count,
            )
            for kind in counted.quantized_tensors.kinds
        )
    )


def shards_4bit_weights(candidate: StateInput) -> bool:
    """Return whether each GPU keeps a piece of the 4-bit weights; see `policy_weights_bytes`."""
    if candidate.quantization not in FOUR_BIT:
        return False
    shards = candidate.scheme_row.shards_4bit
    return shards == "always" or (shards == "as floats" and candidate.bnb_4bit_quant_storage != "uint8")

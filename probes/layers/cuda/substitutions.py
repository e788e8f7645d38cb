"""Substitutions that make CPU tensors allocate as CUDA's kernels do: small functions, each with its source.

PyTorch chooses other kernels on a GPU than on the CPU, which save and allocate other tensors. Fake tensors lie on the
CPU; inside `cuda_substitutions` they follow the paths of a GPU.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal

import torch

from planner.candidate import Candidate
from planner.models.layers import FLASH_HEAD_DIM
from probes.layers.cuda.autocast import cuda_autocast
from probes.layers.cuda.flash_attention import LENGTH_BLOCK, flash_attention, rounded_head
from probes.substitution import substituted

aten = torch.ops.aten

# The memory-efficient kernel needs its bias aligned to 16 elements.
# Source: `pad_bias<16>`, aten/src/ATen/native/transformers/attention.cpp.
EFFICIENT_BIAS_ALIGNMENT = 16

# Its heads must be multiples of 16 bytes. Source: `check_head_dim_size_mem_efficient`, `minimum_gemm_alignment`,
# aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.
EFFICIENT_HEAD_ALIGNMENT = {torch.float16: 8, torch.bfloat16: 8, torch.float32: 4}

_HALF = (torch.float16, torch.bfloat16)


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    flash: bool = True,
) -> torch.Tensor:
    """Replace `torch.nn.functional.scaled_dot_product_attention`: run the attention kernel that CUDA chooses.

    It is the flash kernel without a mask, the memory-efficient one with a mask, else the form composed of matrix
    products.

    Source: `sdp::select_sdp_backend`, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (order flash, efficient,
    math); its conditions `check_batch_size_and_num_heads_dense` and `check_attn_mask_shape` in sdp_utils_cpp.h: only
    flash takes fewer key heads than query heads, and only with `enable_gqa`; `scaled_dot_product_attention`,
    aten/src/ATen/native/transformers/attention.cpp. Leaves out cuDNN's kernel, which Hopper and Blackwell prefer with
    cuDNN newer than 9.15 (`check_prefer_cudnn_attention`).
    """
    query, key, value = _autocast(query), _autocast(key), _autocast(value)
    head = query.size(-1)
    kernel = _kernel(query, key, value, attn_mask, is_causal, enable_gqa, flash)
    if kernel == "flash":
        padded = (_padded(tensor, 8) for tensor in (query, key, value))
        result = aten._scaled_dot_product_flash_attention(
            *padded, dropout_p, is_causal, False, scale=scale or 1 / math.sqrt(head)
        )
        return result[0][..., :head]
    if kernel == "efficient":
        bias = _bias(attn_mask, query)
        saved = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, saved, dropout_p, is_causal, scale=scale
        )[0]
    with torch.autocast(
        "cpu", enabled=False
    ):  # the arguments are cast already; inside the operator autocast is off and the products are in float32
        return aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]


def _kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    is_causal: bool,
    enable_gqa: bool,
    flash: bool,
) -> Literal["flash", "efficient", "math"]:
    """Return the kernel that CUDA chooses; `flash`: the GPU has compute capability 8.0 or above (`check_sm_version`).

    Source: `use_flash_attention` and `use_mem_efficient_attention`, sdp_utils.cpp.
    """
    head, equal_heads = query.size(-1), query.size(1) == key.size(1)
    same_head = head == key.size(-1) == value.size(-1)
    square = not is_causal or query.size(2) == key.size(2)  # check_flash_causal_non_square_seqlens
    if (
        flash
        and attn_mask is None
        and query.dtype in _HALF
        and same_head
        and head <= FLASH_HEAD_DIM
        and square
        and (equal_heads or enable_gqa)
    ):
        return "flash"
    aligned = (
        head % EFFICIENT_HEAD_ALIGNMENT.get(query.dtype, 1)
        == 0
        == value.size(-1) % EFFICIENT_HEAD_ALIGNMENT.get(query.dtype, 1)
    )
    trained_mask = attn_mask is not None and attn_mask.requires_grad
    if (
        query.dtype in EFFICIENT_HEAD_ALIGNMENT
        and equal_heads
        and head == key.size(-1)
        and aligned
        and not trained_mask
    ):
        return "efficient"
    return "math"


def _autocast(tensor: torch.Tensor) -> torch.Tensor:
    """Cast a tensor as autocast casts the arguments of `scaled_dot_product_attention`, to 16 bits.

    Source: the list of 16-bit operators in aten/src/ATen/autocast_mode.h.
    """
    return (
        tensor.to(torch.get_autocast_dtype("cpu"))
        if torch.is_autocast_enabled("cpu") and tensor.is_floating_point()
        else tensor
    )


def _padded(tensor: torch.Tensor, multiple: int) -> torch.Tensor:
    """Return the tensor with zeros appended to its last dimension, up to a multiple."""
    missing = -tensor.size(-1) % multiple
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _bias(mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    """Return the mask in the query's dtype, aligned, and expanded without a copy, for the memory-efficient kernel."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, torch.scalar_tensor(float("-inf"), dtype=query.dtype))
    length = mask.size(-1)
    if length % EFFICIENT_BIAS_ALIGNMENT:
        mask = _padded(mask, EFFICIENT_BIAS_ALIGNMENT)[..., :length]
    return mask.expand(query.size(0), query.size(1), query.size(2), length)


def cuda_layer_norm(
    input: torch.Tensor, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> torch.Tensor:
    """Replace `torch.nn.functional.layer_norm`: autocast on CUDA runs it in float32, autocast on the CPU does not.

    Source: `AT_FORALL_FP32`, aten/src/ATen/autocast_mode.h.
    """
    if torch.is_autocast_enabled("cpu"):
        input, weight, bias = (
            tensor.float() if isinstance(tensor, torch.Tensor) else tensor for tensor in (input, weight, bias)
        )
    return torch.layer_norm(input, normalized_shape, weight, bias, eps)


def cuda_dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Replace `torch.nn.functional.dropout`: CUDA runs one kernel that saves a mask of one byte an element.

    Source: `is_fused_kernel_acceptable`, aten/src/ATen/native/Dropout.cpp.
    """
    return torch.native_dropout(input, p, True)[0] if training and 0 < p < 1 else input


@contextlib.contextmanager
def cuda_substitutions(candidate: Candidate, flash: bool) -> Iterator[None]:
    """Put CUDA's kernels in place of the CPU's inside the block, also those of a candidate's quantization.

    `flash`: the GPU has FlashAttention's kernels (compute capability 8.0 or above).
    """
    functional = torch.nn.functional
    with contextlib.ExitStack() as stack:
        if candidate.quantization_row.quantized:
            from bitsandbytes.nn import Linear8bitLt

            from probes.layers.cuda.quantized import cuda_int8_forward

            stack.enter_context(substituted(Linear8bitLt, "forward", cuda_int8_forward))
        stack.enter_context(flash_attention())
        stack.enter_context(cuda_autocast())
        for name, kernel in (
            ("scaled_dot_product_attention", partial(scaled_dot_product_attention, flash=flash)),
            ("layer_norm", cuda_layer_norm),
            ("dropout", cuda_dropout),
        ):
            stack.enter_context(substituted(functional, name, kernel))
        yield


def contiguous_copy_bytes(*tensors: torch.Tensor) -> int:
    """Return the bytes of contiguous copies of those tensors that are not contiguous."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if not tensor.is_contiguous())


def safe_softmax_workspace_bytes(scores: torch.Tensor) -> int:
    """Bytes that `_safe_softmax` allocates besides its output: one boolean an element.

    It marks the elements that are -inf, to find rows in which all are; those rows are then set to zero in place
    (`where_out`). Source: `_safe_softmax`, aten/src/ATen/native/transformers/attention.cpp.
    """
    return int(scores.numel())


# Operator -> bytes that its kernels allocate besides their outputs on every device, which no operator shows; from its
# arguments.
# Source: pytorch 2.13, ATen/native/SoftMax.cpp, `softmax_cpu_out` (`input.contiguous()`); ATen/native/cuda/SoftMax.cu,
# `host_softmax` and `host_softmax_backward`.
EVERYWHERE: dict[Any, Callable[..., int]] = {
    aten._softmax.default: lambda x, *_: contiguous_copy_bytes(x),
    aten._log_softmax.default: lambda x, *_: contiguous_copy_bytes(x),
    aten._softmax_backward_data.default: lambda gradient, output, *_: contiguous_copy_bytes(gradient, output),
    aten._log_softmax_backward_data.default: lambda gradient, output, *_: contiguous_copy_bytes(gradient, output),
    aten._safe_softmax.default: lambda scores, *_, **__: safe_softmax_workspace_bytes(scores),
}


def kernel_workspaces(candidate: Candidate) -> Mapping[Any, Callable[..., int]]:
    """Return the operators that allocate a workspace inside their CUDA kernel, with a function for its bytes."""
    if not candidate.quantization_row.quantized:
        return WORKSPACES
    from probes.layers.cuda.quantized import workspaces

    return {**WORKSPACES, **workspaces()}


def flash_backward_workspace_bytes(query: torch.Tensor, key: torch.Tensor) -> int:
    """Bytes that the flash kernel's backward pass allocates besides the gradients, on one GPU.

        4 B heads S' (softmax_d) + 4 B heads S' D' (dq_accum) + 2 x 2 B heads S_k D

    B: rows, heads: query heads, S', D': length and head rounded up to 128 and to 32 (64 above 128 features), S_k: keys,
    D: features of a head. The last term (dk and dv for every query head) is there only if there are fewer key heads.

    Source: mha_bwd, aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp.
    """
    batch, heads, length, head = query.shape
    rounded = -(-length // LENGTH_BLOCK) * LENGTH_BLOCK
    expanded = 0 if key.size(1) == heads else 2 * query.element_size() * batch * heads * key.size(2) * head
    return int(4 * batch * heads * rounded * (1 + rounded_head(head)) + expanded)


def efficient_backward_workspace_bytes(query: torch.Tensor, key: torch.Tensor) -> int:
    """Bytes that the memory-efficient kernel's backward pass allocates besides the gradients, on one GPU.

        4 B heads S D (16-bit inputs only: the query's gradient, summed in float32) + 4 B heads S (`delta`)

    B: rows, S: length, D: features of a head.
    Source: `_efficient_attention_backward`, aten/src/ATen/native/transformers/cuda/attention_backward.cu;
    kNeedsAccumGradQ in mem_eff_attention/kernel_backward.h. Leaves out the rounding to the kernel's blocks.
    """
    batch, heads, length, head = query.shape
    return int(4 * batch * heads * length * (1 + (head if query.dtype in _HALF else 0)))


def softmax_backward_workspace_bytes(gradient: torch.Tensor, output: torch.Tensor) -> int:
    """Bytes that softmax's backward pass allocates besides its result: the product of its arguments, and copies.

    Source: `softmax_backward_cuda_out` (`Tensor tmp = grad * output`), then `host_softmax_backward` (`contiguous()` of
    both), aten/src/ATen/native/cuda/SoftMax.cu; results/softmax_backward.md.
    """
    return int(output.nbytes) + contiguous_copy_bytes(gradient, output)


# Operators whose CUDA kernels allocate a workspace, which a dispatch mode does not see, with a function that returns
# its bytes from the operator's arguments.
WORKSPACES: dict[Any, Callable[..., int]] = {
    **EVERYWHERE,
    aten._softmax_backward_data.default: lambda gradient, output, *_: softmax_backward_workspace_bytes(
        gradient, output
    ),
    aten._scaled_dot_product_flash_attention_backward.default: lambda grad, query, key, *_, **__: (
        flash_backward_workspace_bytes(query, key)
    ),
    aten._scaled_dot_product_efficient_attention_backward.default: lambda grad, query, key, *_, **__: (
        efficient_backward_workspace_bytes(query, key)
    ),
}

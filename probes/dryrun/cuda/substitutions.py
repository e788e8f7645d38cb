"""Substitutions that make CPU tensors allocate as CUDA's kernels do: small functions, each with its source.

PyTorch and TRL choose other kernels on a GPU than on the CPU, which save and allocate other tensors. A dry run's
tensors lie on the CPU; inside `cuda_substitutions` they follow the paths of a GPU.
"""

import contextlib
import math
import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import torch
import trl.kernels.chunked_divergence
import trl.kernels.chunked_logprob
import trl.trainer.distillation_trainer
import trl.trainer.utils
from torch._subclasses.fake_tensor import FakeTensor

from planner.models.layers import FLASH_HEAD_DIM
from probes.dryrun.cuda.autocast import cuda_autocast
from probes.dryrun.cuda.flash_attention import LENGTH_BLOCK, flash_attention, rounded_head
from probes.step.hidden_allocations import EVERYWHERE, contiguous_copy_bytes
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


def layer_norm(
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


def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Replace `torch.nn.functional.dropout`: CUDA runs one kernel that saves a mask of one byte an element.

    Source: `is_fused_kernel_acceptable`, aten/src/ATen/native/Dropout.cpp.
    """
    return torch.native_dropout(input, p, True)[0] if training and 0 < p < 1 else input


class _Launcher:
    """Replaces a Triton kernel: `kernel[grid](...)` does nothing. A Triton kernel allocates nothing."""

    def __getitem__(self, _: Any) -> Callable[..., None]:
        return lambda *_, **__: None


def _accumulate_in_place(acc: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Replace `_addmm_fp32`: on CUDA `torch.addmm(acc, a, b, out_dtype=torch.float32, out=acc)` allocates nothing."""


def _project(
    tile: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    start: int,
    end: int,
    dtype: torch.dtype,
) -> None:
    """Replace `_project` of trl/kernels/chunked_divergence.py: on CUDA it is `torch.mm(..., out_dtype=torch.float32,
    out=tile)`.

    It allocates the slice of the weight in `dtype`, if that is another dtype, and the slice of the bias in float32.
    """
    weight[start:end].to(dtype)
    if bias is not None:
        tile.add_(bias[start:end].float())


@contextlib.contextmanager
def triton_kernels() -> Iterator[None]:
    """Make TRL's losses take their Triton path inside the block, with kernels that do nothing.

    On this path TRL computes logits of labelled tokens only, accumulates tile by tile in place, and reads each logit
    once.
    Source: `_use_triton` in trl/kernels/chunked_logprob.py and `_supports_trl_loss_kernel` in trl/trainer/utils.py.
    """
    logprob, divergence, utils, distillation = (
        trl.kernels.chunked_logprob,
        trl.kernels.chunked_divergence,
        trl.trainer.utils,
        trl.trainer.distillation_trainer,
    )
    with contextlib.ExitStack() as stack:

        def put(module: Any, name: str, value: Any) -> None:
            stack.enter_context(substituted(module, name, value, may_be_absent=True))

        triton = _triton()
        with _importable(triton):
            from trl.kernels import logprob_entropy

        for module in (logprob, divergence, utils, distillation):
            put(module, "_use_triton", lambda device: True)
        for module in (logprob, divergence):
            put(module, "triton", triton)
            put(module, "_addmm_fp32", _accumulate_in_place)
        put(divergence, "_project", _project)
        for module, kernel in _KERNELS:
            put(logprob_entropy if module is None else module, kernel, _Launcher())
        put(utils, "is_triton_available", lambda: True)
        put(utils, "_supports_trl_loss_kernel", lambda *_: True)
        put(utils, "_fused_logprob_entropy", logprob_entropy.selective_log_softmax_and_entropy)
        put(logprob_entropy, "triton", triton)
        yield


# The Triton kernels of TRL that are replaced, by module. None stands for trl.kernels.logprob_entropy, which imports
# Triton: `triton_kernels` imports it later.
_KERNELS: tuple[tuple[Any, str], ...] = (
    (trl.kernels.chunked_logprob, "_forward_kernel"),
    (trl.kernels.chunked_logprob, "_backward_kernel"),
    (trl.kernels.chunked_divergence, "_stats_kernel"),
    (trl.kernels.chunked_divergence, "_jsd_kernel"),
    (trl.kernels.chunked_divergence, "_backward_kernel"),
    (None, "_forward_kernel"),
    (None, "_backward_kernel"),
)


@contextlib.contextmanager
def _importable(triton: Any) -> Iterator[None]:
    """Make `import triton` find this module inside the block, unless the real Triton is imported already.

    Other modules that are imported inside the block stay imported.
    """
    added = {
        name: module
        for name, module in (("triton", triton), ("triton.language", triton.language))
        if name not in sys.modules
    }
    sys.modules.update(added)
    try:
        yield
    finally:
        for name in added:
            del sys.modules[name]


def _triton() -> Any:
    """Return a module with the names of Triton that TRL's kernels need to be defined and launched without it."""
    triton, language = types.ModuleType("triton"), types.ModuleType("triton.language")
    vars(triton).update(jit=lambda function: function, cdiv=lambda a, b: -(-a // b), language=language)
    vars(language).update(constexpr=object)
    return triton


@contextlib.contextmanager
def cuda_substitutions(flash: bool = True) -> Iterator[tuple[str, ...]]:
    """Apply all substitutions of this folder that every candidate needs, inside the block; yield their names.

    `flash`: the GPU has FlashAttention's kernels (compute capability 8.0 or above).
    """
    functional = torch.nn.functional
    with (
        triton_kernels(),
        flash_attention(),
        cuda_autocast(),
        substituted(functional, "scaled_dot_product_attention", partial(scaled_dot_product_attention, flash=flash)),
        substituted(functional, "layer_norm", layer_norm),
        substituted(functional, "dropout", dropout),
        substituted(
            sys.modules["torch.optim.optimizer"], "_get_foreach_kernels_supported_devices", lambda: ["cuda", "cpu"]
        ),
        substituted(
            sys.modules["torch.optim.optimizer"],
            "_foreach_supported_types",
            [torch.Tensor, torch.nn.Parameter, FakeTensor],
        ),
    ):
        yield SUBSTITUTIONS


SUBSTITUTIONS = (
    "scaled_dot_product_attention",
    "flash_attention",
    "layer_norm",
    "float32 under autocast",
    "dropout",
    "triton_kernels",
    "foreach optimizers",
    "512-byte blocks",
    "kernel workspaces",
)


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

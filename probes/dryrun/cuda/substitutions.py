"""CUDA's own ways: what runs otherwise on a GPU than on the CPU, each a small named substitution with its source.

A dry run on the device "cuda" stands on CPU tensors that take these paths instead of the CPU's.
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

from planner.models.shape import FLASH_HEAD_DIM
from probes.dryrun.cuda.autocast import cuda_autocast
from probes.dryrun.cuda.flash_attention import LENGTH_BLOCK, flash_attention, rounded_head
from probes.substitution import substituted

aten = torch.ops.aten

# The memory-efficient kernel wants its bias aligned to 16 elements: pad_bias<16>, aten/src/ATen/native/transformers/attention.cpp.
EFFICIENT_BIAS_ALIGNMENT = 16

# Its heads are multiples of 16 bytes: check_head_dim_size_mem_efficient and minimum_gemm_alignment, sdp_utils.cpp.
EFFICIENT_HEAD_ALIGNMENT = {torch.float16: 8, torch.bfloat16: 8, torch.float32: 4}

_HALF = (torch.float16, torch.bfloat16)


def scaled_dot_product_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False, flash: bool = True,
) -> torch.Tensor:  # fmt: skip
    """The kernel that CUDA picks and what it saves: flash without a mask, memory-efficient with one, else the composed form.

    Source: `sdp::select_sdp_backend`, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (order flash, efficient, math), whose conditions are those of
    `check_batch_size_and_num_heads_dense` and `check_attn_mask_shape` in sdp_utils_cpp.h: only flash takes fewer key heads, and only if told so.
    `scaled_dot_product_attention`, aten/src/ATen/native/transformers/attention.cpp. Leaves out cuDNN's kernel, which Hopper and Blackwell prefer where
    cuDNN is newer than 9.15 (`check_prefer_cudnn_attention`).
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
    ):  # autocast has cast what it casts: below its key it is off, and the products are in float32
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
    """`use_flash_attention` (compute capability 8.0, `check_sm_version`) and `use_mem_efficient_attention` (5.0) of sdp_utils.cpp."""
    head, heads_alike = query.size(-1), query.size(1) == key.size(1)
    same_head = head == key.size(-1) == value.size(-1)
    square = not is_causal or query.size(2) == key.size(2)  # check_flash_causal_non_square_seqlens
    if (
        flash
        and attn_mask is None
        and query.dtype in _HALF
        and same_head
        and head <= FLASH_HEAD_DIM
        and square
        and (heads_alike or enable_gqa)
    ):
        return "flash"
    aligned = (
        head % EFFICIENT_HEAD_ALIGNMENT.get(query.dtype, 1)
        == 0
        == value.size(-1) % EFFICIENT_HEAD_ALIGNMENT.get(query.dtype, 1)
    )
    learned = attn_mask is not None and attn_mask.requires_grad
    if query.dtype in EFFICIENT_HEAD_ALIGNMENT and heads_alike and head == key.size(-1) and aligned and not learned:
        return "efficient"
    return "math"


def _autocast(tensor: torch.Tensor) -> torch.Tensor:
    """`scaled_dot_product_attention` is on autocast's list of 16-bit operators (aten/src/ATen/autocast_mode.h)."""
    return (
        tensor.to(torch.get_autocast_dtype("cpu"))
        if torch.is_autocast_enabled("cpu") and tensor.is_floating_point()
        else tensor
    )


def _padded(tensor: torch.Tensor, multiple: int) -> torch.Tensor:
    missing = -tensor.size(-1) % multiple
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _bias(mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    """The mask as the memory-efficient kernel takes it: in the query's dtype, aligned, expanded over heads without a copy."""
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
    """Autocast on CUDA runs `layer_norm` in float32, on the CPU it does not (AT_FORALL_FP32, aten/src/ATen/autocast_mode.h)."""
    if torch.is_autocast_enabled("cpu"):
        input, weight, bias = (
            tensor.float() if isinstance(tensor, torch.Tensor) else tensor for tensor in (input, weight, bias)
        )
    return torch.layer_norm(input, normalized_shape, weight, bias, eps)


def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """CUDA drops with one kernel that saves a mask of one byte an element (`is_fused_kernel_acceptable`, aten/src/ATen/native/Dropout.cpp)."""
    return torch.native_dropout(input, p, True)[0] if training and 0 < p < 1 else input


class _Launcher:
    """In the place of a Triton kernel: launched on any grid it writes into what it is given and allocates nothing."""

    def __getitem__(self, _: Any) -> Callable[..., None]:
        return lambda *_, **__: None


def _accumulate_in_place(acc: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """`torch.addmm(acc, a, b, out_dtype=torch.float32, out=acc)` on CUDA: no copy of `a` and `b` in float32."""


def _project(
    tile: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    start: int,
    end: int,
    dtype: torch.dtype,
) -> None:
    """trl/kernels/chunked_divergence.py `_project` on CUDA: `torch.mm(..., out_dtype=torch.float32, out=tile)`."""
    weight[start:end].to(dtype)
    if bias is not None:
        tile.add_(bias[start:end].float())


@contextlib.contextmanager
def triton_kernels() -> Iterator[None]:
    """TRL's Triton path: only labelled rows are scored, tiles are folded in place, logits are read once.

    Source: `_use_triton` in trl/kernels/chunked_logprob.py and `_supports_trl_loss_kernel` in trl/trainer/utils.py.
    """
    logprob, divergence, utils, distillation = (
        trl.kernels.chunked_logprob, trl.kernels.chunked_divergence, trl.trainer.utils, trl.trainer.distillation_trainer,
    )  # fmt: skip
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


_KERNELS: tuple[tuple[Any, str], ...] = (
    (trl.kernels.chunked_logprob, "_forward_kernel"),
    (trl.kernels.chunked_logprob, "_backward_kernel"),
    (trl.kernels.chunked_divergence, "_stats_kernel"),
    (trl.kernels.chunked_divergence, "_jsd_kernel"),
    (trl.kernels.chunked_divergence, "_backward_kernel"),
    (None, "_forward_kernel"),  # trl.kernels.logprob_entropy, which can only be imported where Triton is
    (None, "_backward_kernel"),
)


@contextlib.contextmanager
def _importable(triton: Any) -> Iterator[None]:
    """`import triton` finds it, unless the real one is there. Other modules that are imported meanwhile stay imported."""
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
    """As much of Triton as TRL's kernels need to be defined and launched without it."""
    triton, language = types.ModuleType("triton"), types.ModuleType("triton.language")
    vars(triton).update(jit=lambda function: function, cdiv=lambda a, b: -(-a // b), language=language)
    vars(language).update(constexpr=object)
    return triton


@contextlib.contextmanager
def cuda_ways(flash: bool = True) -> Iterator[tuple[str, ...]]:
    """Everything of this file put in place; yields the names. `flash`: the card has the kernel."""
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
    "scaled_dot_product_attention", "flash_attention", "layer_norm", "float32 under autocast", "dropout", "triton_kernels", "foreach optimizers",
    "512-byte blocks", "kernel workspaces",
)  # fmt: skip


def flash_backward_workspace_bytes(query: torch.Tensor, key: torch.Tensor) -> int:
    """What the flash kernel's backward needs besides its results, on one GPU.

        4 B heads S' (softmax_d) + 4 B heads S' D' (dq_accum) + 2 x 2 B heads S_k D (dk and dv of all heads, where key heads are fewer)
        S', D': length and head rounded up to 128 and 32 (64 above 128 features)

    Source: mha_bwd, aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp.
    """
    batch, heads, length, head = query.shape
    rounded = -(-length // LENGTH_BLOCK) * LENGTH_BLOCK
    expanded = 0 if key.size(1) == heads else 2 * query.element_size() * batch * heads * key.size(2) * head
    return int(4 * batch * heads * rounded * (1 + rounded_head(head)) + expanded)


def efficient_backward_workspace_bytes(query: torch.Tensor, key: torch.Tensor) -> int:
    """The memory-efficient kernel's backward: float32 sums of the query's gradient and `delta`, on one GPU.

        4 B heads S D (16-bit inputs only) + 4 B heads S

    Source: `_efficient_attention_backward`, aten/src/ATen/native/transformers/cuda/attention_backward.cu; kNeedsAccumGradQ in
    mem_eff_attention/kernel_backward.h. Leaves out the rounding to the kernel's blocks.
    """
    batch, heads, length, head = query.shape
    return int(4 * batch * heads * length * (1 + (head if query.dtype in _HALF else 0)))


def safe_softmax_workspace_bytes(scores: torch.Tensor) -> int:
    """What `_safe_softmax` makes besides its result: a boolean an element, which rows of nothing but -inf are found by, on one GPU.

    Source: `_safe_softmax`, aten/src/ATen/native/transformers/attention.cpp; those rows become zero in place (`where_out`).
    """
    return int(scores.numel())


# Operators that allocate inside themselves on CUDA, where the mode does not see it: function of the operator's arguments.
WORKSPACES: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_backward.default: lambda grad, query, key, *_, **__: (
        flash_backward_workspace_bytes(query, key)
    ),
    aten._scaled_dot_product_efficient_attention_backward.default: lambda grad, query, key, *_, **__: (
        efficient_backward_workspace_bytes(query, key)
    ),
    aten._safe_softmax.default: lambda scores, *_, **__: safe_softmax_workspace_bytes(scores),
}

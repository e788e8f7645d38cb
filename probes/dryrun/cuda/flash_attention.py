"""The flash-attention package without the package: functions that allocate and save what its kernels do on CUDA.

Source: flash-attention 2.8 flash_attn/flash_attn_interface.py (`FlashAttnFunc`, `FlashAttnVarlenFunc`) and csrc/flash_attn/flash_api.cpp (`mha_fwd`,
`mha_varlen_fwd`, `mha_bwd`, `mha_varlen_bwd`), which is also what `kernels-community/flash-attn2` is built from; what is gathered around it is Transformers'
own code (`transformers/modeling_flash_attention_utils.py`), which runs as it is. Leaves out the split-key sums of short forwards (`num_splits`).
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers.modeling_flash_attention_utils as flash_utils
from transformers import PreTrainedModel

from probes.substitution import substituted

# What `mha_bwd` rounds lengths up to, and heads up to those of 128 features and above it.
LENGTH_BLOCK, HEAD_BLOCK, WIDE_HEAD_BLOCK, WIDE_HEAD = 128, 32, 64, 128
# `FlashAttnFunc.forward` pads heads to a multiple of this.
HEAD_ALIGNMENT = 8


def rounded_head(head: int) -> int:
    """Features of a head as the backward kernel's float32 sums have them."""
    block = HEAD_BLOCK if head <= WIDE_HEAD else WIDE_HEAD_BLOCK
    return -(-head // block) * block


class _FlashAttention(torch.autograd.Function):
    """Rows of equal length [rows, length, heads, head], or, with `rows`, real tokens end to end [tokens, heads, head]."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: int) -> torch.Tensor:
        query, key, value = (
            tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (query, key, value)
        )
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        heads = query.size(-2)
        logsumexp = torch.empty(
            (heads, query.size(0)) if rows else (query.size(0), heads, query.size(1)), dtype=torch.float32
        )
        if any(ctx.needs_input_grad[:3]):
            ctx.save_for_backward(query, key, value, out, logsumexp)
            ctx.rows = rows
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, _, _ = ctx.saved_tensors
        gradient = gradient.contiguous()
        gradients = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (query, key, value)]
        heads, head = query.shape[-2:]
        tokens = _padded_tokens(query, ctx.rows)
        held = [
            torch.empty((heads, tokens), dtype=torch.float32),
            torch.empty((tokens, heads, rounded_head(head)), dtype=torch.float32),
        ]
        if key.size(-2) != heads:
            held += [tensor.new_empty((*tensor.shape[:-2], heads, head)) for tensor in (key, value)]
        held.clear()
        return *gradients, None


def _padded_tokens(query: torch.Tensor, rows: int) -> int:
    """Tokens of the backward pass's float32 buffers: lengths rounded up; of rows end to end one block more for each."""
    if rows:
        return int(query.size(0)) + LENGTH_BLOCK * rows
    return int(query.size(0) * -(-query.size(1) // LENGTH_BLOCK) * LENGTH_BLOCK)


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: int) -> torch.Tensor:
    head = query.size(-1)
    missing = -head % HEAD_ALIGNMENT
    if missing:
        query, key, value = (torch.nn.functional.pad(tensor, (0, missing)) for tensor in (query, key, value))
    out: torch.Tensor = _FlashAttention.apply(query, key, value, rows)
    return out[..., :head] if missing else out


def flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, deterministic: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Rows of equal length. Transformers reads the names of the parameters to know what is supported."""
    return _attend(q, k, v, 0)


def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    deterministic: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Rows of different lengths, end to end; `cu_seqlens` are where they begin."""
    return _attend(q, k, v, cu_seqlens_q.numel() - 1)


@contextlib.contextmanager
def flash_attention() -> Iterator[None]:
    """Transformers finds the package, whether it is installed or not."""
    functions: tuple[Callable[..., Any] | None, ...] = (
        flash_attn_func,
        flash_attn_varlen_func,
        None,
        flash_utils._pad_input,
        flash_utils._unpad_input,
    )
    loaded = (
        "_loaded_implementation",
        "_flash_fn",
        "_flash_varlen_fn",
        "_flash_with_kvcache_fn",
        "_pad_fn",
        "_unpad_fn",
        "_process_flash_kwargs_fn",
    )
    with contextlib.ExitStack() as stack:
        for name in loaded:  # so that what was loaded before comes back afterwards
            stack.enter_context(substituted(flash_utils, name, None))
        stack.enter_context(substituted(flash_utils, "_lazy_imports", lambda *_, **__: functions))
        stack.enter_context(substituted(PreTrainedModel, "_flash_attn_can_dispatch", _can_dispatch))
        yield


def _can_dispatch(model: PreTrainedModel, flash_attn_version: int, is_init_check: bool = False) -> bool:
    """Only the model's own answer counts."""
    if not model._supports_flash_attn:
        raise ValueError(f"{type(model).__name__} does not support Flash Attention {flash_attn_version}.")
    return True

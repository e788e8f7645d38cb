"""Substitutes for the flash-attn package's functions: they allocate and save the tensors that its CUDA kernels do.

Source: flash-attention 2.8, flash_attn/flash_attn_interface.py (`FlashAttnFunc`, `FlashAttnVarlenFunc`) and
csrc/flash_attn/flash_api.cpp (`mha_fwd`, `mha_varlen_fwd`, `mha_bwd`, `mha_varlen_bwd`);
`kernels-community/flash-attn2` is built from the same files. The code around the kernels,
transformers/modeling_flash_attention_utils.py, runs unchanged. Leaves out the partial sums of short forward passes that
split the keys (`num_splits`). `s_aux`, attention sinks, is a parameter of FlashAttention 3 only, whose backward pass
allocates no more than that of release 2 (hopper/flash_api.cpp, `mha_bwd`).
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers.modeling_flash_attention_utils as flash_utils
from transformers import PreTrainedModel

from planner.methods import Method
from probes.substitution import substituted

# `mha_bwd` rounds lengths up to 128, and heads up to 32 features, above 128 features to 64.
LENGTH_BLOCK, HEAD_BLOCK, WIDE_HEAD_BLOCK, WIDE_HEAD = 128, 32, 64, 128
# `FlashAttnFunc.forward` pads heads to a multiple of this.
HEAD_ALIGNMENT = 8


def rounded_head(head: int) -> int:
    """Return a head's features as rounded up in the float32 buffers of the backward kernel."""
    block = HEAD_BLOCK if head <= WIDE_HEAD else WIDE_HEAD_BLOCK
    return -(-head // block) * block


class _FlashAttention(torch.autograd.Function):
    """Attention that allocates what the flash kernels do, and computes nothing.

    With `rows` of 0 the tensors are [rows, length, heads, head]; else they are that many rows without padding, end to
    end: [tokens, heads, head].
    """

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: int) -> torch.Tensor:
        query, key, value = (
            tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (query, key, value)
        )
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        heads = query.size(-2)
        logsumexp = torch.empty(
            (heads, query.size(0)) if rows else (query.size(0), heads, query.size(1)),
            dtype=torch.float32,
            device=query.device,
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
        buffers = [
            torch.empty((heads, tokens), dtype=torch.float32, device=query.device),
            torch.empty((tokens, heads, rounded_head(head)), dtype=torch.float32, device=query.device),
        ]
        if key.size(-2) != heads:
            buffers += [tensor.new_empty((*tensor.shape[:-2], heads, head)) for tensor in (key, value)]
        buffers.clear()
        return *gradients, None


def _padded_tokens(query: torch.Tensor, rows: int) -> int:
    """Return the tokens that the backward pass's float32 buffers have room for.

    Rows of equal length are each rounded up to a block; rows end to end get one more block each.
    """
    if rows:
        return int(query.size(0)) + LENGTH_BLOCK * rows
    return int(query.size(0) * -(-query.size(1) // LENGTH_BLOCK) * LENGTH_BLOCK)


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: int) -> torch.Tensor:
    """Run `_FlashAttention` on heads padded to a multiple of `HEAD_ALIGNMENT`, as flash-attn does.

    Raises:
        RuntimeError: the tensors have another dtype than its kernels.
    """
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    head = query.size(-1)
    missing = -head % HEAD_ALIGNMENT
    if missing:
        query, key, value = (torch.nn.functional.pad(tensor, (0, missing)) for tensor in (query, key, value))
    out: torch.Tensor = _FlashAttention.apply(query, key, value, rows)
    return out[..., :head] if missing else out


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """Replace `flash_attn.flash_attn_func`, for rows of equal length.

    Transformers inspects the parameters' names to find out what the installed release supports.
    """
    return _attend(q, k, v, 0)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """Replace `flash_attn.flash_attn_varlen_func`, for rows end to end; `cu_seqlens` holds where each row begins."""
    return _attend(q, k, v, cu_seqlens_q.numel() - 1)


@contextlib.contextmanager
def attention_of_packed_rows(method: Method) -> Iterator[None]:
    """Let an asynchronous trainer load these functions as the Hub's kernel, inside the block.

    Source: trl 1.16, experimental/async_grpo/packing.py, `_flash_attn` (kernels-community/flash-attn3);
    experimental/async_distillation/async_distillation_trainer.py, `AsyncDistillationTrainer.__init__`.
    """
    if not method.packs_trees:
        with flash_attention() if method.asynchronous else contextlib.nullcontext():
            yield
        return
    from trl.experimental.async_grpo import packing  # warns where it is imported

    with substituted(packing, "_flash_attn", lambda: sys.modules[__name__]):
        yield


@contextlib.contextmanager
def flash_attention() -> Iterator[None]:
    """Make Transformers load these functions as its flash-attn package, inside the block."""
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
        for name in loaded:  # restores functions that Transformers has loaded before
            stack.enter_context(substituted(flash_utils, name, None))
        stack.enter_context(substituted(flash_utils, "_lazy_imports", lambda *_, **__: functions))
        stack.enter_context(substituted(PreTrainedModel, "_flash_attn_can_dispatch", _can_dispatch))
        yield


def _can_dispatch(model: PreTrainedModel, flash_attn_version: int, is_init_check: bool = False) -> bool:
    """Replace `PreTrainedModel._flash_attn_can_dispatch`: check the model's class only, not the package or the GPU."""
    if not model._supports_flash_attn:
        raise ValueError(f"{type(model).__name__} does not support Flash Attention {flash_attn_version}.")
    return True

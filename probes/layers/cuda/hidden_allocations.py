"""Bytes that PyTorch's kernels allocate besides their outputs while they run: no operator shows them."""

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten


def contiguous_copy_bytes(*tensors: torch.Tensor) -> int:
    """Return the bytes of contiguous copies of those tensors that are not contiguous."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if not tensor.is_contiguous())


def safe_softmax_workspace_bytes(scores: torch.Tensor) -> int:
    """Bytes that `_safe_softmax` allocates besides its output: one boolean an element.

    It marks the elements that are -inf, to find rows in which all are; those rows are then set to zero in place
    (`where_out`). Source: `_safe_softmax`, aten/src/ATen/native/transformers/attention.cpp.
    """
    return int(scores.numel())


# Operator -> bytes that its kernels allocate on every device, from its arguments.
# Source: pytorch 2.13, ATen/native/SoftMax.cpp, `softmax_cpu_out` (`input.contiguous()`); ATen/native/cuda/SoftMax.cu,
# `host_softmax` and `host_softmax_backward`.
EVERYWHERE: dict[Any, Callable[..., int]] = {
    aten._softmax.default: lambda x, *_: contiguous_copy_bytes(x),
    aten._log_softmax.default: lambda x, *_: contiguous_copy_bytes(x),
    aten._softmax_backward_data.default: lambda gradient, output, *_: contiguous_copy_bytes(gradient, output),
    aten._log_softmax_backward_data.default: lambda gradient, output, *_: contiguous_copy_bytes(gradient, output),
    aten._safe_softmax.default: lambda scores, *_, **__: safe_softmax_workspace_bytes(scores),
}

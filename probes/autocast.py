"""CUDA's autocast computes more operators in float32 than the CPU's: what a dry run on the CPU has to add.

Source: pytorch v2.13, aten/src/ATen/autocast_mode.h, `AT_FORALL_FP32` and `AT_FORALL_FP32_SET_OPT_DTYPE` (those leave a dtype that the caller
names), of which here are the operators that Transformers' layers and TRL's losses call. `layer_norm` is in `substitutions.py`.
"""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_functional, _Tensor = torch.nn.functional, torch.Tensor
IN_FLOAT32 = frozenset({
    torch.pow, _Tensor.pow, _Tensor.__pow__, _Tensor.__rpow__, torch.exp, _Tensor.exp, torch.expm1, _Tensor.expm1, torch.log, _Tensor.log, torch.log1p,
    _Tensor.log1p, torch.reciprocal, _Tensor.reciprocal, torch.rsqrt, _Tensor.rsqrt, torch.logsumexp, _Tensor.logsumexp, _functional.softplus,
})  # fmt: skip
IN_FLOAT32_UNLESS_SAID = frozenset({
    torch.softmax, _Tensor.softmax, _functional.softmax, torch.log_softmax, _Tensor.log_softmax, _functional.log_softmax, torch.sum, _Tensor.sum, torch.cumsum,
    _Tensor.cumsum, torch.prod, _Tensor.prod,
})  # fmt: skip
_HALF = (torch.float16, torch.bfloat16)


class CudaAutocast(TorchFunctionMode):
    """While entered, these operators see their 16-bit arguments in float32 wherever autocast is on."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_autocast_enabled("cpu") and (func in IN_FLOAT32 or (func in IN_FLOAT32_UNLESS_SAID and kwargs.get("dtype") is None)):
            args = tuple(_wide(argument) for argument in args)
        return func(*args, **kwargs)


def _wide(argument: Any) -> Any:
    return argument.float() if isinstance(argument, torch.Tensor) and argument.dtype in _HALF else argument

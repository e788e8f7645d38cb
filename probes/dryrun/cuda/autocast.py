"""CUDA's autocast computes more operators in float32 than the CPU's: what a dry run on the CPU has to add.

Source: pytorch v2.13, aten/src/ATen/autocast_mode.h, `AT_FORALL_FP32` and `AT_FORALL_FP32_SET_OPT_DTYPE` (those leave a dtype that the caller
names), of which here are the operators that Transformers' layers and TRL's losses call. `layer_norm` is in `substitutions.py`.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from probes.substitution import substituted

IN_FLOAT32: tuple[tuple[Any, str], ...] = (
    *((torch, name) for name in ("pow", "exp", "expm1", "log", "log1p", "reciprocal", "rsqrt", "logsumexp")),
    *(
        (torch.Tensor, name)
        for name in ("pow", "__pow__", "exp", "expm1", "log", "log1p", "reciprocal", "rsqrt", "logsumexp")
    ),
    (torch.nn.functional, "softplus"),
)
IN_FLOAT32_UNLESS_SAID: tuple[tuple[Any, str], ...] = (
    *((place, name) for place in (torch, torch.Tensor) for name in ("softmax", "log_softmax", "sum", "cumsum", "prod")),
    *((torch.nn.functional, name) for name in ("softmax", "log_softmax")),
)
_HALF = (torch.float16, torch.bfloat16)


@contextlib.contextmanager
def cuda_autocast() -> Iterator[None]:
    """While inside, these operators compute in float32 from a 16-bit argument wherever autocast is on."""
    with contextlib.ExitStack() as stack:
        for place, name in IN_FLOAT32:
            stack.enter_context(substituted(place, name, _widened(getattr(place, name))))
        for place, name in IN_FLOAT32_UNLESS_SAID:
            stack.enter_context(substituted(place, name, _told_float32(getattr(place, name))))
        yield


def _widened(operator: Callable[..., Any]) -> Callable[..., Any]:
    """`CastPolicy::fp32`: the argument is copied."""

    def run(x: Any, *args: Any, **kwargs: Any) -> Any:
        return operator(x.float() if _narrow(x) else x, *args, **kwargs)

    return run


def _told_float32(operator: Callable[..., Any]) -> Callable[..., Any]:
    """`CastPolicy::fp32_set_opt_dtype`: the operator is told a dtype, and copies the argument or not: a sum does not."""

    def run(x: Any, *args: Any, **kwargs: Any) -> Any:
        if _narrow(x) and kwargs.get("dtype") is None and not any(isinstance(arg, torch.dtype) for arg in args):
            kwargs = {**kwargs, "dtype": torch.float32}
        return operator(x, *args, **kwargs)

    return run


def _narrow(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype in _HALF and torch.is_autocast_enabled("cpu")

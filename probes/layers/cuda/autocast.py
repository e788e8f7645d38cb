"""Operators that CUDA's autocast computes in float32 and the CPU's autocast does not.

Source: pytorch v2.13, aten/src/ATen/autocast_mode.h, `AT_FORALL_FP32` and `AT_FORALL_FP32_SET_OPT_DTYPE`. The second
list sets the argument `dtype` to float32 unless the caller gives one. Here are those of the operators that
Transformers' layers and TRL's losses call; `layer_norm` is in `substitutions.py`.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from probes.substitution import substituted

ALWAYS_FLOAT32: tuple[tuple[Any, str], ...] = (
    *((torch, name) for name in ("pow", "exp", "expm1", "log", "log1p", "reciprocal", "rsqrt", "logsumexp")),
    *(
        (torch.Tensor, name)
        for name in ("pow", "__pow__", "exp", "expm1", "log", "log1p", "reciprocal", "rsqrt", "logsumexp")
    ),
    (torch.nn.functional, "softplus"),
)
FLOAT32_BY_DEFAULT: tuple[tuple[Any, str], ...] = (
    *((owner, name) for owner in (torch, torch.Tensor) for name in ("softmax", "log_softmax", "sum", "cumsum", "prod")),
    *((torch.nn.functional, name) for name in ("softmax", "log_softmax")),
)
_HALF = (torch.float16, torch.bfloat16)


@contextlib.contextmanager
def cuda_autocast() -> Iterator[None]:
    """Make these operators compute in float32 from a 16-bit argument inside the block, where autocast is enabled.

    `torch.is_autocast_enabled()`, which asks about CUDA, answers for the CPU's autocast: PEFT asks it whether to cast
    (peft 0.21.2, tuners/lora/bnb.py, `requires_conversion`).
    """
    enabled = torch.is_autocast_enabled
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            substituted(torch, "is_autocast_enabled", lambda *device: enabled(*device) if device else enabled("cpu"))
        )
        for owner, name in ALWAYS_FLOAT32:
            stack.enter_context(substituted(owner, name, _cast_argument(getattr(owner, name))))
        for owner, name in FLOAT32_BY_DEFAULT:
            stack.enter_context(substituted(owner, name, _pass_float32(getattr(owner, name))))
        yield


def _cast_argument(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an operator of `CastPolicy::fp32`: a 16-bit argument is copied to float32."""

    def cast_and_run(x: Any, *args: Any, **kwargs: Any) -> Any:
        return operator(x.float() if _needs_float32(x) else x, *args, **kwargs)

    return cast_and_run


def _pass_float32(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an operator of `CastPolicy::fp32_set_opt_dtype`: pass `dtype=torch.float32` to it.

    The operator decides whether it copies its argument: `softmax` does, `sum` does not.
    """

    def run_in_float32(x: Any, *args: Any, **kwargs: Any) -> Any:
        if _needs_float32(x) and kwargs.get("dtype") is None and not any(isinstance(arg, torch.dtype) for arg in args):
            kwargs = {**kwargs, "dtype": torch.float32}
        return operator(x, *args, **kwargs)

    return run_in_float32


def _needs_float32(x: Any) -> bool:
    """Return whether x is a 16-bit tensor and autocast is enabled."""
    return isinstance(x, torch.Tensor) and x.dtype in _HALF and torch.is_autocast_enabled("cpu")

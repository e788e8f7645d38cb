"""The checks of fp16's GradScaler; a dry run has no GradScaler, as accelerate allows none on the CPU."""

from typing import Any

import torch
from transformers import TrainerCallback

from planner.errors import DryRunUnsupported


class GradientsCanBeUnscaled(TrainerCallback):
    """Callback that stops before the optimizer's step at gradients that GradScaler cannot unscale.

    Source: torch 2.13, torch/amp/grad_scaler.py, `_unscale_grads_` (ValueError for float16), and
    aten/src/ATen/native/cuda/AmpKernels.cu (no bfloat16 kernel).
    """

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        for name, parameter in model.named_parameters():
            if parameter.grad is not None and parameter.grad.dtype in (torch.float16, torch.bfloat16):
                raise DryRunUnsupported(
                    f"fp16's GradScaler cannot unscale 16-bit gradients, such as that of {name}. "
                    "Train in float32 (--set dtype=float32), or without fp16 (--set fp16=false)."
                )

"""Quantized base models: bitsandbytes' layers with weights of their real sizes, and the memory of its CUDA kernels.

4-bit: the layers and `MatMul4Bit` run unchanged; only the workspace inside `gemm_4bit` is added. 8-bit: on the CPU
bitsandbytes runs `MatMul8bitFp`, on CUDA `MatMul8bitLt`; the allocations of the second are written out here.
Source: bitsandbytes 0.50.2, functional.py (`quantize_4bit`), autograd/_functions.py, backends/cuda/ops.py;
transformers 5.23, integrations/bitsandbytes.py.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import bitsandbytes
import torch
from bitsandbytes.functional import QuantState
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.integrations.bitsandbytes import replace_with_bnb_linear
from transformers.quantizers.base import get_keys_to_not_convert

from planner.quantizations import Quantization

BLOCK, CODES = 64, 16  # weights that share an absmax; values of the code table: `quantize_4bit`, `get_4bit_type`
NESTED_BLOCK, NESTED_CODES = 256, 256  # the same for the quantized absmax (double quantization): `quantize_blockwise`
SINGLE_ROWS = 4  # matrix products of at most this many rows never dequantize the weight: `_GEMM_4BIT_CUSTOM_FLOOR_M`
# Stand-ins for int32 and int8 tensors: a floating-point type of the same size keeps the tensor fake
# (probes/layers/fake_tensors/arithmetic.py).
INT32_STAND_IN, INT8_STAND_IN = torch.float32, torch.float8_e4m3fn
OUTLIER = 6.0  # `llm_int8_threshold`; TRL keeps bitsandbytes' default

BITSANDBYTES_CONFIGS: dict[Quantization, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4-double": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "int8": {"load_in_8bit": True},
}


def quantize(model: PreTrainedModel, quantization: Quantization, dtype: torch.dtype) -> None:
    """Replace the model's linear layers by bitsandbytes' layers on the meta device, with weights as after loading.

    `dtype`: in which the model is loaded; TRL uses it as compute dtype too (trl/trainer/utils.py,
    `get_quantization_config`).
    """
    config = BitsAndBytesConfig(
        **BITSANDBYTES_CONFIGS[quantization], **({} if quantization == "int8" else {"bnb_4bit_compute_dtype": dtype})
    )
    replace_with_bnb_linear(model, get_keys_to_not_convert(model), config)
    for module in model.modules():
        if isinstance(module, (bitsandbytes.nn.Linear4bit, bitsandbytes.nn.Linear8bitLt)):
            if module.bias is not None:
                module.bias.data = module.bias.data.to(dtype)
            if isinstance(module, bitsandbytes.nn.Linear4bit):
                _store_4bit(module, quantization == "nf4-double", dtype)
            else:
                _store_8bit(module)
    model.config._is_quantized = True  # transformers 5.23, quantizers/base.py, `_assign_is_quantized`
    vars(model)["is_loaded_in_8bit" if quantization == "int8" else "is_loaded_in_4bit"] = True


def _store_4bit(module: Any, nested: bool, dtype: torch.dtype) -> None:
    """Give a `Linear4bit` a packed weight (two values a byte) and its `QuantState`; `nested`: double quantization."""
    elements = module.in_features * module.out_features
    blocks = -(-elements // BLOCK)
    module.support_avx512bf16_for_cpu = False
    with torch.device("meta"):
        state = QuantState(
            absmax=torch.empty(blocks, dtype=torch.uint8 if nested else torch.float32),
            shape=torch.Size((module.out_features, module.in_features)),
            code=torch.empty(CODES),
            blocksize=BLOCK,
            quant_type="nf4",
            dtype=dtype,
        )
        if nested:
            state.offset, state.nested = torch.empty(()), True
            state.state2 = QuantState(
                absmax=torch.empty(-(-blocks // NESTED_BLOCK)),
                code=torch.empty(NESTED_CODES),
                blocksize=NESTED_BLOCK,
                dtype=torch.float32,
            )
        packed = torch.empty(-(-elements // 2), 1, dtype=torch.uint8)
    module.weight = bitsandbytes.nn.Params4bit(
        packed, requires_grad=False, quant_type="nf4", compress_statistics=nested, bnb_quantized=True
    )
    module.quant_state = state


def _store_8bit(module: Any) -> None:
    """Give a `Linear8bitLt` an int8 weight and one float32 scale for each output row (`SCB`)."""
    with torch.device("meta"):
        module.weight = torch.nn.Parameter(
            torch.empty(module.out_features, module.in_features, dtype=torch.int8), requires_grad=False
        )
        module.state.SCB = torch.empty(module.out_features)


def fake_statistics(model: torch.nn.Module, fake: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace the statistics of quantized weights (absmax, code, SCB), which are no parameters, by fake tensors.

    Call it after the parameters have been replaced.
    """
    for module in model.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            for state in filter(None, (module.quant_state, module.quant_state.state2)):
                tensors = {name: tensor for name, tensor in vars(state).items() if isinstance(tensor, torch.Tensor)}
                vars(state).update({name: fake(tensor) for name, tensor in tensors.items()})
            module.weight.quant_state = module.quant_state
        elif isinstance(module, bitsandbytes.nn.Linear8bitLt):
            module.state.CB, module.state.SCB = module.weight.data, fake(module.state.SCB)
            module.weight.CB = module.weight.SCB = None  # as `init_8bit_state` leaves them, bitsandbytes/nn/modules.py


def dequantized_bytes(
    x: torch.Tensor, packed: torch.Tensor, shape: Any, absmax: torch.Tensor, *_: Any, absmax_8bit: Any = None, **__: Any
) -> int:
    """Bytes that `gemm_4bit` allocates besides its output, on one GPU.

        elements of the weight x bytes of x's dtype + 2 x 4 x number of absmax (double quantization only)

    Nothing for at most 4 rows. Source: bitsandbytes 0.50.2, backends/cuda/ops.py `_dequant_linear_fallback`.
    Leaves out the fused kernel that some GPUs run for 5 to 1,536 rows of some shapes, which dequantizes nothing.
    """
    if x.numel() // x.size(-1) <= SINGLE_ROWS:
        return 0
    statistics = 0 if absmax_8bit is None else 2 * 4 * int(absmax_8bit.numel())
    return int(math.prod(shape) * x.element_size()) + statistics


def workspaces() -> Mapping[Any, Callable[..., int]]:
    """Return bitsandbytes' operators that allocate a workspace, with a function for its bytes."""
    return {torch.ops.bitsandbytes.gemm_4bit.default: dequantized_bytes}


class _Product8bit(torch.autograd.Function):
    """Allocates what `MatMul8bitLt` does with a frozen weight on CUDA.

    Source: bitsandbytes 0.50.2, autograd/_functions.py, backends/cuda/ops.py and backends/default/ops.py.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        rows = x.reshape(-1, x.size(-1))
        _codes, _statistics = _quantized_rows(rows)
        products = rows.new_empty((rows.size(0), weight.size(0)), dtype=INT32_STAND_IN)
        scaled = torch.empty_like(products, dtype=torch.float16)  # `int8_mm_dequant`
        if bias is not None:
            scaled.add_(bias)
        result = scaled.to(x.dtype)
        if ctx.needs_input_grad[0]:
            ctx.kept = (rows, weight, scales)  # attributes, not saved tensors: checkpointing does not drop them
        ctx.shape = x.shape
        return result.view(*x.shape[:-1], weight.size(0))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight, scales = ctx.kept
        gradient = gradient.reshape(-1, gradient.size(-1)).contiguous()
        dequantized = weight.to(rows.dtype, copy=True).mul_(scales.unsqueeze(1).mul(1 / 127))
        return torch.matmul(gradient.to(rows.dtype), dequantized).view(ctx.shape), None, None, None


def _quantized_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate what `int8_vectorwise_quant` does: int8 rows, a float32 scale for each, and the mask of outliers.

    No outliers are found.
    """
    half = rows.to(torch.float16)
    statistics, codes = half.new_empty(half.size(0), dtype=torch.float32), torch.empty_like(half, dtype=INT8_STAND_IN)
    _ = half.abs() >= OUTLIER
    return codes, statistics


def cuda_int8_forward(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Replace `Linear8bitLt.forward`: allocate as on CUDA."""
    if module.bias is not None and module.bias.dtype != x.dtype:
        module.bias.data = module.bias.data.to(x.dtype)
    result: torch.Tensor = _Product8bit.apply(x, module.weight, module.state.SCB, module.bias)
    return result

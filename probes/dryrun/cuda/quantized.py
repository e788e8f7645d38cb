"""Quantized bases: bitsandbytes' layers with weights of their real sizes, and what its CUDA path allocates.

4-bit: the layers and `MatMul4Bit` run as they are; only what `gemm_4bit` allocates inside itself is added. 8-bit: on the CPU bitsandbytes takes another
path than on CUDA (`MatMul8bitFp`), so that CUDA's is written out here.
Source: bitsandbytes 0.50.2 functional.py (`quantize_4bit`), autograd/_functions.py, backends/cuda/ops.py; transformers 5.23 integrations/bitsandbytes.py.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import bitsandbytes
import torch
from bitsandbytes.functional import QuantState
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.integrations.bitsandbytes import replace_with_bnb_linear
from transformers.quantizers.base import get_keys_to_not_convert

from planner.candidate import Quantization
from probes.substitution import substituted

BLOCK, CODES = 64, 16  # weights that share an absmax, values of the table: `quantize_4bit`, `get_4bit_type`
NESTED_BLOCK, NESTED_CODES = 256, 256  # the same of the absmax themselves: `quantize_blockwise`
SINGLE_ROWS = 4  # products of up to so many rows never dequantize: `_GEMM_4BIT_CUSTOM_FLOOR_M`
# Integers that nobody reads, as floating types of their size: those stay fake.
WIDE_INTEGER, NARROW_INTEGER = torch.float32, torch.float8_e4m3fn
OUTLIER = 6.0  # llm_int8_threshold, which TRL leaves at its default

BITS: dict[Quantization, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4-double": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "int8": {"load_in_8bit": True},
}


def quantize(model: PreTrainedModel, quantization: Quantization, dtype: torch.dtype) -> None:
    """Puts bitsandbytes' layers in the place of linear ones, on the meta device, with weights as they lie after loading.

    `dtype` is what the model is loaded in, which TRL makes the compute dtype as well (trl/trainer/utils.py, `get_quantization_config`).
    """
    config = BitsAndBytesConfig(
        **BITS[quantization], **({} if quantization == "int8" else {"bnb_4bit_compute_dtype": dtype})
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
    vars(model)["is_loaded_in_8bit" if quantization == "int8" else "is_loaded_in_4bit"] = True


def _store_4bit(module: Any, nested: bool, dtype: torch.dtype) -> None:
    elements = module.in_features * module.out_features
    blocks = -(-elements // BLOCK)
    module.support_avx512bf16_for_cpu = False
    with torch.device("meta"):
        state = QuantState(
            absmax=torch.empty(blocks, dtype=torch.uint8 if nested else torch.float32), shape=torch.Size((module.out_features, module.in_features)),
            code=torch.empty(CODES), blocksize=BLOCK, quant_type="nf4", dtype=dtype,
        )  # fmt: skip
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
    with torch.device("meta"):
        module.weight = torch.nn.Parameter(
            torch.empty(module.out_features, module.in_features, dtype=torch.int8), requires_grad=False
        )
        module.state.SCB = torch.empty(module.out_features)


def with_fake_statistics(
    model: torch.nn.Module, fake: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Swaps what belongs to quantized weights and is no parameter; yields it by name. Call it when the parameters are swapped."""
    for name, module in model.named_modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            for state in filter(None, (module.quant_state, module.quant_state.state2)):
                held = {
                    field: fake(tensor) for field, tensor in vars(state).items() if isinstance(tensor, torch.Tensor)
                }
                vars(state).update(held)
                yield from ((f"{name}.{field}", tensor) for field, tensor in held.items())
            module.weight.quant_state = module.quant_state
        elif isinstance(module, bitsandbytes.nn.Linear8bitLt):
            module.state.CB, module.state.SCB = module.weight.data, fake(module.state.SCB)
            module.weight.CB = module.weight.SCB = None  # as `init_8bit_state` leaves them, bitsandbytes/nn/modules.py
            yield f"{name}.SCB", module.state.SCB


def dequantized_bytes(
    x: torch.Tensor, packed: torch.Tensor, shape: Any, absmax: torch.Tensor, *_: Any, absmax_8bit: Any = None, **__: Any
) -> int:
    """What `gemm_4bit` allocates besides its result, on one GPU: the weight in x's dtype, and its absmax in float32 twice if nested.

    Source: backends/cuda/ops.py `_dequant_linear_fallback`. Between 5 and 1,536 rows it depends on card and shape whether a fused kernel runs instead;
    here it never does.
    """
    if x.numel() // x.size(-1) <= SINGLE_ROWS:
        return 0
    statistics = 0 if absmax_8bit is None else 2 * 4 * int(absmax_8bit.numel())
    return int(math.prod(shape) * x.element_size()) + statistics


def workspaces() -> Mapping[Any, Callable[..., int]]:
    return {torch.ops.bitsandbytes.gemm_4bit.default: dequantized_bytes}


class _Product8bit(torch.autograd.Function):
    """`MatMul8bitLt` of a frozen weight, with the kernels of backends/cuda/ops.py and default/ops.py inside it."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        rows = x.reshape(-1, x.size(-1))
        _codes, _statistics = _quantized_rows(rows)
        products = rows.new_empty((rows.size(0), weight.size(0)), dtype=WIDE_INTEGER)
        scaled = torch.empty_like(products, dtype=torch.float16)  # `int8_mm_dequant`
        if bias is not None:
            scaled.add_(bias)
        result = scaled.to(x.dtype)
        if ctx.needs_input_grad[0]:
            ctx.held = (rows, weight, scales)  # attributes of the context, which checkpointing does not drop
        ctx.shape = x.shape
        return result.view(*x.shape[:-1], weight.size(0))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight, scales = ctx.held
        gradient = gradient.reshape(-1, gradient.size(-1)).contiguous()
        dequantized = weight.to(rows.dtype, copy=True).mul_(scales.unsqueeze(1).mul(1 / 127))
        return torch.matmul(gradient.to(rows.dtype), dequantized).view(ctx.shape), None, None, None


def _quantized_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`int8_vectorwise_quant`: rows in 8 bits and a float32 a row, after a look for outliers, of which none are found."""
    half = rows.to(torch.float16)
    statistics, codes = half.new_empty(half.size(0), dtype=torch.float32), torch.empty_like(half, dtype=NARROW_INTEGER)
    _ = half.abs() >= OUTLIER
    return codes, statistics


def _forward_8bit(module: Any, x: torch.Tensor) -> torch.Tensor:
    if module.bias is not None and module.bias.dtype != x.dtype:
        module.bias.data = module.bias.data.to(x.dtype)
    result: torch.Tensor = _Product8bit.apply(x, module.weight, module.state.SCB, module.bias)
    return result


@contextlib.contextmanager
def cuda_products() -> Iterator[None]:
    with substituted(bitsandbytes.nn.Linear8bitLt, "forward", _forward_8bit):
        yield

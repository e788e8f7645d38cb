"""`Recipe`: dtypes, adapters, quantization and attention kernel of a layer, without its shape and the batch size."""

from typing import Literal

from msgspec import Struct

from planner.memory.layers.autograd import Size
from planner.models.layers import NO_BLOCKS, ExpertPart, LigerBlocks
from planner.models.lora_targets import FUSED_BRANCHES, AdapterKernel
from planner.quantizations import QuantizedLinear

Kernel = Literal[
    "eager",
    "eager_masked",
    "flash",
    "flash_varlen",
    "efficient",
    "efficient_unmasked",
    "efficient_grouped",
    "math",
    "tree",
]

GPTQ: tuple[QuantizedLinear, ...] = ("gptq", "gptq_eager")  # dequantized by compiled or by eager operators
# Dequantized by PyTorch's operators, so that autograd keeps the weight.
KEEPS_WEIGHT: tuple[QuantizedLinear, ...] = (*GPTQ, "awq_eager")


class Recipe(Struct, frozen=True, kw_only=True):
    """The way a layer computes. With the layer's shape it determines the layer's memory for every batch.

    Widths are bytes of one element. `autocast_width` is 0 without autocast. `quantized` is the kind of quantized
    `nn.Linear`, "none" for plain ones. `device` selects the kernels where CPU and CUDA save different tensors: plans
    use "cuda", tests compare "cpu" with real autograd.
    """

    weight_width: int
    autocast_width: int
    trainable: bool
    half: bool = False  # 16-bit numbers are float16, not bfloat16
    # Weights have one 16-bit dtype and autocast the other: autocast copies each weight for each matrix product, and
    # elementwise sums and products of both dtypes are float32 (torch 2.13, c10/core/ScalarType.cpp, `promoteTypes`).
    mixes_halves: bool = False
    quantized: QuantizedLinear = "none"
    # In which 4-bit weights are multiplied (`bnb_4bit_compute_dtype`); 0: that of the other weights.
    quantized_width: int = 0
    # Bytes of a weight of quantized experts that a forward pass dequantizes; 0: they are stored as they compute.
    expert_width: int = 0
    expert_scratch: float = 0.0  # bytes of a weight beside the result, while that is made
    lora_r: int = 0
    lora_targets: frozenset[str] = frozenset()
    # Adapters on the fused experts and their router (peft 0.21, `ParamWrapper`), which all-linear includes for mixtral.
    lora_experts: bool = False
    expert_parts: frozenset[ExpertPart] = frozenset()  # the ones that `lora_target_parameters` names in this layer
    adapter_width: int = 4
    input_width: int = 0  # of the layer's input, the residual stream; 0: that of the weights
    input_learns: bool = True  # False: the input needs no gradient, as below the first adapters
    lora_dropout: bool = False  # with a probability above 0; at 0 a dropout module returns its input
    adapter_kernels: frozenset[AdapterKernel] = frozenset()  # of Axolotl, in the place of PEFT's layers
    # DoRA multiplies its input again where PEFT made a dropout module, of any probability (peft, `DoraLinearVariant`)
    dora_product: bool = False
    # DeepSpeed's F.linear saves its input for frozen weights, too (deepspeed 0.19.8, runtime/zero/linear.py,
    # `LinearFunctionForZeroStage3`), which it puts in F.linear's place (partition_parameters.py, `Init`)
    saves_frozen_inputs: bool = False
    # Bytes of a magnitude for each output, which DoRA's adapters also have (peft `DoraLinearLayer`); 0: no DoRA
    magnitude_width: int = 0
    ep_size: int = 1  # GPUs that divide the experts of a layer
    ring_gpus: int = 1  # that share a row: each has a part of its tokens (`cp_size`)
    ulysses_gpus: int = 1  # that share a row: each has a part of its heads in attention (`sp_size`)
    dropout: bool = True  # the model's own dropout, if its config has one; DPO, KTO and reward trainers disable it
    kernel: Kernel = "flash"
    key_copies: float = 0  # keys that the kernel "tree" gathers for each token of the row
    several_rows: bool = True  # with one row, some tensors stay views that are copied for several rows
    row_length: int = 0  # tokens of a row, of models whose layers pad rows to chunks (`Architecture.chunk`); 0: others
    reentrant: bool = False  # its checkpoints are
    liger_blocks: LigerBlocks = NO_BLOCKS  # the parts that Liger's kernels replace
    device: Literal["cuda", "cpu"] = "cuda"

    @property
    def compute_width(self) -> int:
        """Bytes of one element in a matrix product."""
        return self.autocast_width or self.weight_width

    @property
    def stream_width(self) -> int:
        """Bytes of one element of the residual stream by the weights' dtype: float32 with `mixes_halves`.

        Also that of operands whose bytes are counted elsewhere, such as a mask, cos and sin. See `input_width`.
        """
        return 4 if self.mixes_halves else self.weight_width

    def expert_rank(self, part: ExpertPart) -> int:
        """Rank of the adapter on a fused parameter; 0 without one."""
        if self.lora_experts:
            return self.lora_r * (FUSED_BRANCHES if part == "gate_up" else 1)
        return self.lora_r if part in self.expert_parts else 0

    @property
    def on_cuda(self) -> bool:
        """True if CUDA kernels run, False for CPU kernels."""
        return self.device == "cuda"


def tokens(features: int) -> Size:
    """Element count of a tensor of shape [rows, length, features]."""
    return (features, 0, 0)


def scores(heads: int) -> Size:
    """Element count of a tensor of shape [rows, heads, length, length]."""
    return (0, heads, 0)

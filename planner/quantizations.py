"""The table of quantizations (`QUANTIZATIONS`): parts and bytes, how a projection computes, packages, who takes it."""

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, get_args

from msgspec import Struct, field
from msgspec.structs import replace

from planner.memory.dtypes import FLOAT32_BYTES, INT32_BYTES, SIXTEEN_BIT_BYTES

Quantization = Literal[
    "none", "nf4", "nf4-double", "int8", "nf4-experts", "nf4-double-experts", "int8-experts", "gptq", "gptq-int8",
    "awq", "fp8", "mxfp4",
]  # fmt: skip
# Of the weights of a vLLM engine; some are of published checkpoints that are not trained.
EngineQuantization = Literal[
    "none", "bitsandbytes", "bitsandbytes-nested", "gptq", "gptq-int8", "awq", "fp8", "w8a8", "mxfp4"
]  # fmt: skip
# How a projection computes (planner/memory/layers/linear.py). GPTQ's layers are dequantized by compiled or by eager
# operators, AWQ's by a kernel or by eager operators.
QuantizedLinear = Literal["none", "4bit", "8bit", "dequantized", "gptq", "gptq_eager", "awq_eager"]


class Weights(NamedTuple):
    """A tensor of weights that is quantized. `groups`: pieces of its inputs, each with a scale for every output."""

    elements: int
    outputs: int
    inputs: int
    groups: int


class LoadingConfig(NamedTuple):
    """A quantization config of Transformers: its class, and its arguments."""

    name: str
    arguments: Mapping[str, str | int | bool]


class QuantizationRow(Struct, frozen=True, kw_only=True):
    """One row of the table `QUANTIZATIONS`."""

    words: str
    article: Literal["a", "an"] = "a"
    # TRL's settings, and `quantization_config` in the config.json of a published checkpoint, which has `quant_method`.
    # Source: trl 1.16, trainer/model_config.py and trainer/utils.py, `get_quantization_config`.
    spelling: Mapping[str, str | int | bool]
    bits: int = 16
    group_size: int = 128  # weights that share a scale, where the checkpoint does not say another number
    # A scale may be that of a block, `group_size` x `group_size` (`weight_block_size`), or of a whole row or tensor.
    scales_blocks: bool = False
    own_groups: bool = False  # a checkpoint of another group size is another model
    quant_methods: tuple[str, ...] = ()  # of `quantization_config`
    # Settings of `quantization_config` with which probes make up a checkpoint; empty: they make up none.
    made_up: Mapping[str, str | int | bool] = field(default_factory=dict)
    # How names of checkpoints on the Hub end, as Qwen, unsloth, neuralmagic and TheBloke write them, and what the name
    # leaves open.
    name_ending: str = ""
    name_note: str = "taken from the name"

    # Parts of the model that the quantizer converts: embeddings, head, norms, biases and most experts stay as they are.
    parts: tuple[str, ...] = ()
    sizes: Callable[[Weights], tuple[int, ...]] = lambda weights: ()  # bytes of each tensor, the packed weights first
    bytes_per_weight: float = 2.0  # with its scales, on average: read in each pass

    # How the layers compute
    linear: QuantizedLinear = "none"
    linear_on_cpu: QuantizedLinear | None = None  # without a device map, as for several processes; None: the same
    unpack_fraction: float = 1.0  # of the data-sheet bandwidth that unpacking weights to 16 bits reaches
    # Experts that stay quantized are dequantized all at once, each time a layer's forward pass reads them.
    expert_width: int = 0  # bytes of a dequantized weight; 0: those of the weights that are not quantized
    expert_scratch: float = 0.0  # bytes of a weight beside the result, until that is there

    # How a model is loaded
    packages: tuple[str, ...] = ()
    # The config with which train.py loads the published weights. It is merged into the checkpoint's: transformers 5.23,
    # quantizers/auto.py, `merge_quantization_configs`, which takes no dict, so that train.yaml cannot say it.
    loaded_with: LoadingConfig | None = None
    dequantized: bool = False  # a published checkpoint is trained as 16-bit or 32-bit weights, unless it is kept so
    takes_adapters: bool = True  # False: Trainer refuses it

    # Who takes it
    nn_linear: bool = True  # the layers are nn.Linear, which PEFT's all-linear finds
    merges: bool = True  # PEFT merges adapters into the layers, and has DoRA on them
    # PEFT's layer has its weights under two names, of which a state dict that torch loads into FSDP2 has one. Source:
    # peft 0.21.2, tuners/lora/gptq.py and awq.py (`quant_linear_module`).
    named_twice: bool = False
    shards: bool = True  # GPUs can divide the weights among them. Source: planner/jobs/stops.py
    # That of a vLLM engine beside it: TRL starts vLLM with bitsandbytes if the policy has `Linear4bit` modules, and a
    # quantized checkpoint keeps its own. None: vLLM has no such quantization.
    engine: EngineQuantization | None = "none"

    @property
    def quantized(self) -> bool:
        """True if any weights are quantized."""
        return bool(self.parts)

    @property
    def kept(self) -> bool:
        """True if a published checkpoint stays quantized while it is trained."""
        return self.quantized and not self.dequantized

    @property
    def keeps_experts(self) -> bool:
        """True if experts stay quantized while the model is trained."""
        return self.kept and "expert" in self.parts

    @property
    def of_experts(self) -> bool:
        """True if it is Axolotl's for experts, too: of a dense model it is that without them."""
        return "quantize_moe_experts" in self.spelling

    @property
    def published(self) -> bool:
        """True if weights are published so, and not made so at load."""
        return "quant_method" in self.spelling

    @property
    def four_bit(self) -> bool:
        """True if layers are bitsandbytes' `Linear4bit`, which multiply a 16-bit copy of the weights."""
        return self.linear == "4bit"

    @property
    def eight_bit(self) -> bool:
        """True if layers are bitsandbytes' `Linear8bitLt`, which keep their input until the backward pass."""
        return self.linear == "8bit"

    @property
    def bitsandbytes(self) -> bool:
        """True if bitsandbytes quantizes the linear layers, at load or before."""
        return self.four_bit or self.eight_bit


# -- bytes -------------------------------------------------------------------------------------------------------------

# nf4 has one absmax per 64 weights, and a table of 16 values per tensor. Nested (`compress_statistics`): absmax in 8
# bits, one float per 256 of them, an offset and a table of 256 values per tensor.
# Source: bitsandbytes 0.50.2, functional.py, `quantize_4bit`.
_NF4_BLOCK = 64
_NF4_CODES = 16
_NESTED_BLOCK = 256
_NESTED_CODES = 256

# One float32 scale per 128 x 128 weights in DeepSeek's block-scaled checkpoints.
# Source: transformers 5.23, integrations/finegrained_fp8.py, `FP8Linear.weight_scale_inv`.
_FP8_BLOCK = 128

# One 8-bit scale per 32 weights. Source: transformers 5.23, integrations/mxfp4.py, `Mxfp4GptOssExperts`; OCP MX v1.0,
# table 1.
_MXFP4_BLOCK = 32


def _nf4(weights: Weights) -> tuple[int, ...]:
    blocks = -(-weights.elements // _NF4_BLOCK)
    return (-(-weights.elements // 2), blocks * FLOAT32_BYTES, _NF4_CODES * FLOAT32_BYTES)


def _nested_nf4(weights: Weights) -> tuple[int, ...]:
    blocks = -(-weights.elements // _NF4_BLOCK)
    nested = (-(-blocks // _NESTED_BLOCK) * FLOAT32_BYTES, _NF4_CODES * FLOAT32_BYTES)
    return (-(-weights.elements // 2), blocks, *nested, FLOAT32_BYTES, _NESTED_CODES * FLOAT32_BYTES)


def _int8(weights: Weights) -> tuple[int, ...]:
    return (weights.elements, weights.elements // weights.inputs * FLOAT32_BYTES)


def _groups(weights: Weights, bits: int) -> tuple[int, ...]:
    scales = weights.groups * weights.outputs
    return (-(-weights.elements * bits // 8), scales * bits // 8, scales * SIXTEEN_BIT_BYTES)


def _awq(weights: Weights) -> tuple[int, ...]:
    return _groups(weights, 4)


def _gptq(weights: Weights) -> tuple[int, ...]:
    return (*_groups(weights, 4), weights.inputs * INT32_BYTES)


def _gptq_int8(weights: Weights) -> tuple[int, ...]:
    return (*_groups(weights, 8), weights.inputs * INT32_BYTES)


def _fp8(weights: Weights) -> tuple[int, ...]:
    blocks = -(-weights.outputs // _FP8_BLOCK) * -(-weights.inputs // _FP8_BLOCK)
    return (weights.elements, blocks * FLOAT32_BYTES)


def _mxfp4(weights: Weights) -> tuple[int, ...]:
    return (-(-weights.elements // 2), -(-weights.elements // _MXFP4_BLOCK))


# -- packages and engines ----------------------------------------------------------------------------------------------

# Source: transformers 5.23, quantizers/quantizer_gptq.py, `GptqHfQuantizer`, quantizer_awq.py,
# `AwqQuantizer.validate_environment`.
GPTQMODEL = "gptqmodel==7.6.*"  # the newest for torch 2.13: 7.7 needs 2.14.1

# -- the table ---------------------------------------------------------------------------------------------------------

# Source of the parts: transformers 5.23, integrations/bitsandbytes.py, `replace_with_bnb_linear` (`type(module) is
# nn.Linear` or Conv1D) and quantizers/base.py, `get_keys_to_not_convert` (never the head, tied weights, the last
# module); GPTQ and AWQ checkpoints hold the decoder layers' projections; integrations/mxfp4.py replaces the experts
# only.
# Source of `unpack_fraction`, bytes read and written:
# - nf4: Lightning-AI/litgpt, tutorials/resource-tables.md: 1000 iterations of LoRA on Llama 2 7B take 2.36 min, with
#   bnb.nf4 3.68 min (A100-40G): 79 ms for two passes over 6.5e9 weights x 2.56 bytes, 0.27 of 1.56e12; 13B gives 0.22.
# - gptq, awq: QwenLM/Qwen, README.md, "Profiling of Memory and Speed": 7B at 256 tokens takes 1.2 s with LoRA, 3.0 s
#   with Q-LoRA (int4), for 8 micro-steps of forward, recomputation and backward: 0.11 of 2.04e12; 14B gives 0.10.
# - int8, fp8, mxfp4: no figure was found; assumed to be that of nf4.
_NF4 = QuantizationRow(
    words="4-bit nf4",
    spelling={
        "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4", "use_bnb_nested_quant": False,
    },
    bits=4,
    group_size=_NF4_BLOCK,
    quant_methods=("bitsandbytes",),
    name_ending=r"(-unsloth)?-bnb-4bit",
    name_note="taken from the name: nf4 without double quantization, the larger of the two",
    parts=("linear", "vision_linear"),
    sizes=_nf4,
    bytes_per_weight=0.5625,
    linear="4bit",
    unpack_fraction=0.25,
    packages=("bitsandbytes",),
    engine="bitsandbytes",
)  # fmt: skip
# Layers of gptqmodel, which are no nn.Linear: all-linear does not find them, and PEFT stops with
# NoMatchingPeftModuleError (peft 0.21.2, tuners/tuners_utils.py, `_maybe_include_all_linear_layers`; gptqmodel 7.6,
# nn_modules/qlinear/__init__.py, `BaseQuantLinear`; it stopped so on an emulated card). PEFT has no DoRA on them (peft
# 0.21.2, tuners/lora/gptq.py, awq.py, `__init__`). A model without a device map gets kernels of the CPU, and keeps them
# on the GPU: `TorchAtenLinear`, `TorchAtenAwqLinear` (gptqmodel 7.6; transformers 5.23, quantizers/quantizer_gptq.py,
# `update_device_map`). The default backend takes kernels that have no backward pass, such
# as Marlin on an A100 (gptqmodel 7.6, utils/importer.py, `select_quant_linear`, nn_modules/qlinear/marlin.py,
# `SUPPORTS_TRAINING`).
_GPTQ = QuantizationRow(
    words="GPTQ",
    spelling={"load_in_4bit": False, "load_in_8bit": False, "quant_method": "gptq"},
    bits=4,
    own_groups=True,
    quant_methods=("gptq",),
    made_up={"quant_method": "gptq", "bits": 4, "desc_act": False, "sym": True},  # as Qwen's
    name_ending=r"-gptq(-int4|-4bit)?(-128g)?",
    name_note="taken from the name: 4 bits, 128 weights a scale, as its publishers make them",
    parts=("linear",),
    sizes=_gptq,
    bytes_per_weight=0.52,
    linear="gptq",
    linear_on_cpu="gptq_eager",
    unpack_fraction=0.105,
    packages=("optimum", GPTQMODEL),
    loaded_with=LoadingConfig("GPTQConfig", {"bits": 4, "backend": "auto_trainable"}),
    nn_linear=False,
    merges=False,
    named_twice=True,
    engine="gptq",
)

_NESTED_NF4 = replace(
    _NF4,
    words="double-quantized nf4",
    spelling={**_NF4.spelling, "use_bnb_nested_quant": True},
    name_ending="",
    sizes=_nested_nf4,
    bytes_per_weight=0.516,
)
_INT8 = QuantizationRow(
    words="int8",
    article="an",
    spelling={"load_in_4bit": False, "load_in_8bit": True},
    bits=8,
    quant_methods=("bitsandbytes",),
    name_ending=r"-bnb-8bit",
    parts=("linear", "vision_linear"),
    sizes=_int8,
    bytes_per_weight=1.0,
    linear="8bit",
    unpack_fraction=0.25,
    packages=("bitsandbytes",),
    shards=False,
    engine=None,
)


def _with_experts(row: QuantizationRow, width: int = 0, scratch: float = 0.0) -> QuantizationRow:
    """Return a row of bitsandbytes with Axolotl's quantize_moe_experts, for experts that are parameters.

    A layer's forward pass dequantizes each parameter of the experts once, in the dtype of the model (4 bits, with
    nested scales in float32 beside it) or in float32 (8 bits, by way of a product of that size), and keeps it to its
    end; autograd keeps it for the backward pass.

    Source: axolotl 0.21, monkeypatch/moe_quant.py; bitsandbytes 0.50.2, nn/parametrize.py, functional.py,
    `dequantize_4bit`, `int8_vectorwise_dequant`.
    """
    return replace(
        row,
        spelling={**row.spelling, "quantize_moe_experts": True},
        quant_methods=(),
        name_ending="",
        parts=(*row.parts, "expert"),
        expert_width=width,
        expert_scratch=scratch,
    )


QUANTIZATIONS: dict[Quantization, QuantizationRow] = {
    "none": QuantizationRow(words="not quantized", spelling={"load_in_4bit": False, "load_in_8bit": False}),
    "nf4": _NF4,
    "nf4-double": _NESTED_NF4,
    "int8": _INT8,
    "nf4-experts": _with_experts(_NF4),
    "nf4-double-experts": _with_experts(_NESTED_NF4, scratch=FLOAT32_BYTES / _NF4_BLOCK),
    "int8-experts": _with_experts(_INT8, width=FLOAT32_BYTES, scratch=FLOAT32_BYTES),
    "gptq": _GPTQ,
    # gptqmodel's kernels of the CPU have 4 bits only, so that a model without a device map gets `TorchLinear`, as with
    # one. Source: gptqmodel 7.6, nn_modules/qlinear/torch.py, torch_aten_kernel.py, torch_fused.py, `SUPPORTS_BITS`,
    # torch_int8.py, `SUPPORTS_TRAINING`. No figure of its speed was found: that of 4 bits.
    "gptq-int8": replace(
        _GPTQ,
        words="8-bit GPTQ",
        article="an",
        spelling={**_GPTQ.spelling, "bits": 8},
        bits=8,
        made_up={**_GPTQ.made_up, "bits": 8},
        name_ending=r"-gptq-(int8|8bit)(-128g)?",
        name_note="taken from the name: 8 bits, 128 weights a scale, as its publishers make them",
        sizes=_gptq_int8,
        bytes_per_weight=1.023,
        linear_on_cpu=None,
        loaded_with=LoadingConfig("GPTQConfig", {"bits": 8, "backend": "auto_trainable"}),
        engine="gptq-int8",
    ),
    "awq": replace(
        _GPTQ,
        words="AWQ",
        article="an",
        spelling={**_GPTQ.spelling, "quant_method": "awq"},
        quant_methods=("awq",),
        made_up={"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True},
        name_ending=r"-awq(-int4|-4bit)?",
        sizes=_awq,
        linear="dequantized",
        linear_on_cpu="awq_eager",
        packages=(GPTQMODEL,),
        loaded_with=LoadingConfig("AwqConfig", {"backend": "auto_trainable"}),
        engine="awq",
    ),
    # Source: transformers 5.23, quantizers/quantizer_finegrained_fp8.py.
    "fp8": QuantizationRow(
        words="fp8",
        spelling={"load_in_4bit": False, "load_in_8bit": False, "quant_method": "fp8"},
        bits=8,
        scales_blocks=True,
        quant_methods=("fp8", "fbgemm_fp8"),
        name_ending=r"-fp8(-dynamic|-static)?",
        parts=("linear",),
        sizes=_fp8,
        bytes_per_weight=1.0,
        linear="dequantized",
        unpack_fraction=0.25,
        loaded_with=LoadingConfig("FineGrainedFP8Config", {"dequantize": True}),
        dequantized=True,
        engine="fp8",
    ),
    # Experts only, which are no nn.Linear. They stay packed without `dequantize` where `kernels` is installed, and
    # Trainer refuses them. Source: transformers 5.23, quantizers/quantizer_mxfp4.py, `is_trainable`.
    "mxfp4": QuantizationRow(
        words="mxfp4",
        spelling={"load_in_4bit": False, "load_in_8bit": False, "quant_method": "mxfp4"},
        bits=4,
        group_size=_MXFP4_BLOCK,
        quant_methods=("mxfp4",),
        parts=("expert",),
        sizes=_mxfp4,
        bytes_per_weight=0.53125,
        unpack_fraction=0.25,
        loaded_with=LoadingConfig("Mxfp4Config", {"dequantize": True}),
        dequantized=True,
        takes_adapters=False,
        engine="mxfp4",
    ),
}
QLORA: Quantization = "nf4"  # the default for a base that is not published quantized
assert set(QUANTIZATIONS) == set(get_args(Quantization)), "every quantization has one row"


def tensor_sizes(shape: tuple[int, ...], quantization: Quantization, group_size: int) -> tuple[int, ...]:
    """Return the bytes of each tensor that holds one quantized tensor, the packed weights first.

        nf4         n/2 + 4 n/64 + 64 per tensor                                  0.5625 per weight
        nf4-double  n/2 + n/64 + 4 n/(64 x 256) + 64 + 4 + 1024 per tensor        0.5159 per weight
        int8        n + 4 x out
        gptq        n/2 + (out/2 + 2 out) x in/group + 4 in;  awq the same without the last
        gptq-int8   n + (out + 2 out) x in/group + 4 in
        fp8         n + 4 n/128^2;  mxfp4  n/2 + n/32

    Source: bitsandbytes 0.50.2, functional.py `quantize_4bit`, nn/modules.py `Int8Params`; the tensors of GPTQ and AWQ
    checkpoints (qweight, qzeros, scales, g_idx).
    """
    outputs, inputs = (shape[-2], shape[-1]) if len(shape) > 1 else (1, shape[0])
    groups = -(-inputs // group_size) if group_size > 0 else 1  # -1: one group for all inputs of an output
    elements = outputs * inputs * (shape[0] if len(shape) > 2 else 1)
    return QUANTIZATIONS[quantization].sizes(Weights(elements, outputs, inputs, groups))


# -- vLLM's copy of the model ------------------------------------------------------------------------------------------


class EngineRow(Struct, frozen=True, kw_only=True):
    """One row of the table `ENGINE_QUANTIZATIONS`: bytes of a projection in a vLLM engine."""

    bytes_per_weight: float  # without groups
    bytes_per_group: float = 0  # of `quantization_group_size` weights
    experts_only: bool = False  # dense projections stay in 16 bits
    dequantizes: bool = False  # a copy of the weights in 16 bits, for each product
    bitsandbytes: bool = False  # loaded by bitsandbytes

    @property
    def quantized(self) -> bool:
        """True if weights have fewer than 16 bits."""
        return self.bytes_per_weight < SIXTEEN_BIT_BYTES


# One fp16 scale and one 4-bit zero point for each group. Source: vllm/model_executor/layers/quantization/auto_gptq.py,
# create_weights.
_GROUPS_OF_4_BIT = EngineRow(bytes_per_weight=1 / 2, bytes_per_group=2 + 1 / 2)
ENGINE_QUANTIZATIONS: dict[EngineQuantization, EngineRow] = {
    "none": EngineRow(bytes_per_weight=SIXTEEN_BIT_BYTES),
    # One float32 absmax per block of 64 weights: vLLM reverts double quantization.
    # Source: vllm 0.22, model_executor/model_loader/bitsandbytes_loader.py, `_dequantize_dq`.
    "bitsandbytes": EngineRow(bytes_per_weight=1 / 2 + 4 / 64, dequantizes=True, bitsandbytes=True),
    # Unsloth's patched vLLM keeps double quantization.
    "bitsandbytes-nested": EngineRow(
        bytes_per_weight=1 / 2 + 1 / 64 + 4 / (64 * 256), dequantizes=True, bitsandbytes=True
    ),
    "gptq": _GROUPS_OF_4_BIT,
    "gptq-int8": EngineRow(bytes_per_weight=1, bytes_per_group=2 + 1),
    "awq": _GROUPS_OF_4_BIT,
    "fp8": EngineRow(bytes_per_weight=1 + 4 / (128 * 128)),  # one float32 scale per block of 128 x 128
    "w8a8": EngineRow(bytes_per_weight=1),  # leaves out the scales, one per row
    # One 8-bit exponent per block of 32 (openai/gpt-oss).
    "mxfp4": EngineRow(bytes_per_weight=1 / 2 + 1 / 32, experts_only=True),
}

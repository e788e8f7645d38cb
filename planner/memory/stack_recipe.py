"""How a stack of layers computes, as a candidate decides it: dtypes, adapters, masks, checkpointing, and each layer's attention kernel."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from planner.cache_keys import StateInput, TrainingInput
from planner.candidate import DTYPE_BYTES, SHARDED, AttentionImplementation, Quantization
from planner.memory.adapters import adapter_dtype_bytes
from planner.memory.layers.recipe import Kernel, Recipe
from planner.memory.parameters.lora import target_names, targets_experts
from planner.models.shape import FLASH_HEAD_DIM, Attention, ModelShape

# How a quantized checkpoint's projections compute. Source: `quantized_linear` of the layer programs.
QUANTIZED_LINEAR: dict[Quantization, Literal["none", "4bit", "8bit", "dequantized"]] = {
    "none": "none",
    "nf4": "4bit",
    "nf4-double": "4bit",
    "int8": "8bit",
    "gptq": "dequantized",
    "awq": "dequantized",
    "fp8": "dequantized",
    "mxfp4": "none",  # experts only, which are no nn.Linear
}

# Methods whose trainers switch the model's own dropout off (trl 1.16, trainer/dpo_config.py, kto_config.py, reward_config.py: disable_dropout).
WITHOUT_DROPOUT = ("dpo", "kto", "reward")
# Methods whose backbones run outside the forward that accelerate wraps in autocast, whatever `bf16` says: in the dtype of the weights.
# Source: trl 1.16, trainer/distillation_trainer.py:1838-1862 (`_forward_redirection` takes the wrapped forward's place).
WITHOUT_AUTOCAST = ("distillation",)

# Alignment of a head in the memory-efficient attention kernel. Source: pytorch 2.13,
# aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, `check_head_dim_size_mem_efficient` and `minimum_gemm_alignment`.
EFFICIENT_ALIGNMENT_BYTES = 16
# Falcon's own forward gives sdpa a mask always (modeling_falcon.py), with one key for all heads or with keys copied to every head.
FALCON_KERNELS: dict[str, Kernel] = {
    "multi_query": "math",
    "grouped_repeated": "efficient",
    "heads_selected": "efficient",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class StackRecipe:
    """How a stack computes, without the size of its batch: the key under which its passes are remembered."""

    recipe: Recipe
    attn_implementation: AttentionImplementation
    masked: bool  # padding, or packed positions that sdpa can only express as a mask
    unpads: bool  # FlashAttention takes padded rows apart and puts them together again, with copies
    windows_active: bool  # the row is at least as long as the sliding window: those layers need a mask of their own
    gradient_checkpointing: bool
    every_n_layers: int
    flash: bool  # the card has FlashAttention's kernels (compute capability 8.0)
    mask_widths: int  # bytes a score of the masks that all layers share


def stack_recipe(candidate: TrainingInput, flash: bool) -> StackRecipe:
    """What `candidate` decides about the policy's passes."""
    return with_data(policy_recipe(candidate), candidate, flash)


def policy_recipe(candidate: StateInput) -> Recipe:
    """How the policy's layers compute, whatever the data."""
    lora = candidate.tuning == "lora"
    return Recipe(
        weight_width=compute_weight_width(candidate),
        autocast_width=autocast_width(candidate),
        trainable=not lora,
        quantized=QUANTIZED_LINEAR[candidate.quantization],
        lora_r=candidate.lora_r if lora else 0,
        lora_targets=target_names(candidate.model, candidate.lora_target_modules) if lora else frozenset(),
        adapter_width=adapter_dtype_bytes(candidate) if lora else 4,
        lora_experts=lora and targets_experts(candidate.model, candidate.lora_target_modules),
        lora_dropout=lora and candidate.lora_dropout > 0,
        dropout=candidate.method not in WITHOUT_DROPOUT,
        liger=candidate.use_liger_kernel,
    )


def frozen_recipe(candidate: TrainingInput, flash: bool) -> StackRecipe:
    """The passes of a model that is only read: reference, reward, teacher. TRL leaves its weights learnable, so autocast keeps copies."""
    width = compute_weight_width(candidate)
    recipe = Recipe(
        weight_width=width,
        autocast_width=autocast_width(candidate),
        trainable=True,
        dropout=False,
        liger=candidate.use_liger_kernel,
    )
    return with_data(recipe, candidate, flash)


def without_adapters(stack: StackRecipe) -> StackRecipe:
    """The same passes with the adapters switched off: what PEFT models are compared with."""
    recipe = replace(stack.recipe, lora_r=0, lora_targets=frozenset(), lora_experts=False, lora_dropout=False)
    return replace(stack, recipe=recipe)


def with_data(recipe: Recipe, candidate: TrainingInput, flash: bool) -> StackRecipe:
    shortest = shortest_window(candidate.model)
    masked = candidate.pads or candidate.flattened
    windows_active = shortest is not None and candidate.row_tokens >= shortest
    return StackRecipe(
        recipe=recipe,
        attn_implementation=candidate.attn_implementation,
        masked=masked,
        unpads=candidate.pads,
        windows_active=windows_active,
        mask_widths=mask_widths(
            candidate.model, candidate.attn_implementation, masked, windows_active, recipe.weight_width
        ),
        gradient_checkpointing=candidate.gradient_checkpointing,
        every_n_layers=candidate.checkpoint_every_n_layers,
        flash=flash,
    )


def autocast_width(candidate: StateInput) -> int:
    """Bytes of autocast's dtype around the passes, 0 without autocast."""
    return 0 if candidate.precision == "no" or candidate.method in WITHOUT_AUTOCAST else 2


def compute_weight_width(candidate: StateInput) -> int:
    """Bytes of a weight as the forward pass sees it: DeepSpeed and FSDP2 gather 16-bit weights whatever was loaded."""
    if candidate.sharding in SHARDED and candidate.precision != "no":
        return 2
    return DTYPE_BYTES[candidate.dtype]


@lru_cache(maxsize=1024)
def mask_widths(
    model: ModelShape, attn_implementation: AttentionImplementation, masked: bool, windows_active: bool, width: int
) -> int:
    """Bytes a score of the masks that all layers share: a bool for sdpa, a number of the hidden dtype for eager; one for each window.

    Source: transformers 5.23, masking_utils.py `sdpa_mask` and `eager_mask`.
    """
    windows = {layer.attention.sliding_window for layer, _ in model.layer_kinds}
    if attn_implementation == "eager":
        return len(windows) * width
    if attn_implementation != "sdpa":
        return 0
    return len(windows) if masked else len(windows - {None}) * windows_active


@lru_cache(maxsize=1024)
def shortest_window(model: ModelShape) -> int | None:
    windows = [layer.attention.sliding_window for layer, _ in model.layer_kinds]
    return min((window for window in windows if window is not None), default=None)


def kernel(stack: StackRecipe, attention: Attention) -> Kernel:
    """Which attention kernel one layer runs.

    Source: transformers 5.23 masking_utils.py (sdpa needs no mask without padding, while the row is shorter than the window; eager
    always has one); integrations/sdpa_attention.py `use_gqa_in_sdpa`; pytorch sdp_utils.cpp (FlashAttention: 16-bit, no mask, equal head
    dims up to 256, compute capability 8.0; the memory-efficient kernel knows no grouped queries and no heads that are not multiples of 16 bytes, the
    fallback is plain math).
    """
    if stack.attn_implementation == "eager" or attention.softcap or attention.sink_params:
        return "eager_masked"
    if stack.attn_implementation != "sdpa":
        return "flash_varlen" if stack.unpads else "flash"
    if attention.qkv_layout in FALCON_KERNELS:
        return FALCON_KERNELS[attention.qkv_layout]
    aligned = all(
        head * stack.recipe.compute_width % EFFICIENT_ALIGNMENT_BYTES == 0
        for head in (attention.head_dim, attention.v_head_dim)
    )
    if stack.masked or (stack.windows_active and attention.sliding_window is not None):
        return "efficient" if aligned else "math"
    small = attention.head_dim == attention.v_head_dim <= FLASH_HEAD_DIM
    if stack.flash and stack.recipe.compute_width == 2 and small:
        return "flash"
    grouped = attention.num_key_value_heads < attention.num_attention_heads
    return "math" if (grouped and small) or not aligned else "efficient_unmasked"

"""The whole stack of decoder layers in one forward and backward pass: which layer, when, is the peak.

One run for everything but the batch: the answer is a handful of moments with sizes per token, per score and constant.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from planner.candidate import DTYPE_BYTES, AttentionImplementation, Candidate, Quantization
from planner.memory.activations import LayerMemory, Peaks, envelope, layer_memory
from planner.memory.adapters import adapter_dtype_bytes
from planner.memory.autograd import NOTHING, Kind, Moment, Size
from planner.memory.lora import FUSED_BRANCHES, target_names, targets_experts
from planner.memory.modules import Kernel, Recipe
from planner.model import Attention, Experts, Layer, ModelShape


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


@dataclass(frozen=True, slots=True)
class StackMemory:
    """The stack's passes. Every moment counts the embedding's output and what the layers before it left.

    `saved`: alive when the last layer is done. `copies`: autocast's copies among it, which go when the forward pass ends unless
    the backward pass keeps them. `backward` counts the gradients that the pass itself has made so far. `inference`: without gradients.
    """

    saved: Moment
    copies: Size
    forward: Peaks
    backward: Peaks
    inference: Peaks
    one_layer: Moment  # the most that a single layer saves: what offloading keeps on the GPU


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
FLOAT32_BYTES = 4
SHARDED = ("zero1", "zero2", "zero3", "fsdp2")
FLASH_HEAD_DIM = 256  # pytorch aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, check_head_dim_size_flash


def stack_recipe(candidate: Candidate, flash: bool) -> StackRecipe:
    """What `candidate` decides about the policy's passes."""
    return with_data(policy_recipe(candidate), candidate, flash)


def policy_recipe(candidate: Candidate) -> Recipe:
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


def frozen_recipe(candidate: Candidate, flash: bool) -> StackRecipe:
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


def with_data(recipe: Recipe, candidate: Candidate, flash: bool) -> StackRecipe:
    shortest = shortest_window(candidate.model)
    masked = candidate.pads or candidate.flattened
    windows_active = shortest is not None and candidate.row_tokens >= shortest
    return StackRecipe(
        recipe=recipe,
        attn_implementation=candidate.attn_implementation,
        masked=masked,
        unpads=candidate.pads,
        windows_active=windows_active,
        mask_widths=mask_widths(candidate.model, candidate.attn_implementation, masked, windows_active, recipe.weight_width),
        gradient_checkpointing=candidate.gradient_checkpointing,
        every_n_layers=candidate.checkpoint_every_n_layers,
        flash=flash,
    )


def autocast_width(candidate: Candidate) -> int:
    """Bytes of autocast's dtype around the passes, 0 without autocast."""
    return 0 if candidate.precision == "no" or candidate.method in WITHOUT_AUTOCAST else 2


def compute_weight_width(candidate: Candidate) -> int:
    """Bytes of a weight as the forward pass sees it: DeepSpeed and FSDP2 gather 16-bit weights whatever was loaded."""
    if candidate.sharding in SHARDED and candidate.precision != "no":
        return 2
    return DTYPE_BYTES[candidate.dtype]


@lru_cache(maxsize=1024)
def mask_widths(model: ModelShape, attn_implementation: AttentionImplementation, masked: bool, windows_active: bool, width: int) -> int:
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
    dims up to 256, compute capability 8.0; the memory-efficient kernel knows no grouped queries, the fallback is plain math).
    """
    if stack.attn_implementation == "eager" or attention.softcap or attention.sink_params:
        return "eager_masked"
    if stack.attn_implementation != "sdpa":
        return "flash_varlen" if stack.unpads else "flash"
    if attention.qkv_layout in FALCON_KERNELS:
        return FALCON_KERNELS[attention.qkv_layout]
    if stack.masked or (stack.windows_active and attention.sliding_window is not None):
        return "efficient"
    small = attention.head_dim == attention.v_head_dim <= FLASH_HEAD_DIM
    if stack.flash and stack.recipe.compute_width == 2 and small:
        return "flash"
    grouped = attention.num_key_value_heads < attention.num_attention_heads
    return "math" if grouped and small else "efficient_unmasked"


# Falcon's own forward gives sdpa a mask always (modeling_falcon.py), with one key for all heads or with keys copied to every head.
FALCON_KERNELS: dict[str, Kernel] = {"multi_query": "math", "grouped_repeated": "efficient", "heads_selected": "efficient"}


@lru_cache(maxsize=4096)
def stack_memory(model: ModelShape, stack: StackRecipe, gradients_exist: bool, head_gradient_elements: int) -> StackMemory:
    """Play every distinct layer once and lay the results along the depth.

        forward  at layer i: embedding + what layers 0..i-1 left + the layer's own moments
        backward at layer i: embedding + what layers 0..i-1 left + the layer's own moments + gradients of layers i+1.. and of the head

    Memory is linear between the first and the last layer of a kind, so only those two can hold the peak.
    """
    width = stack.recipe.weight_width
    parts = [layer_part(layer, stack, gradients_exist, i) for i, layer in enumerate(model.layers)]
    embedding = embedded(model, stack)
    left = [embedding]
    for part in parts:
        left.append(plus(left[-1], part.left))
    learned = [0] * (len(parts) + 1)
    learned[-1] = 0 if gradients_exist or not stack.recipe.trainable else head_gradient_elements * width
    for i in range(len(parts) - 1, -1, -1):
        learned[i] = learned[i + 1] + parts[i].gradient_bytes
    ends = first_and_last(parts)
    copies = sum(part.copies for part in parts)
    forward = [plus(left[i], moment) for i in ends for moment in parts[i].forward.moments]
    backward = [plus(without_copies(left[i], parts[:i]), moment, gradients(learned[i + 1])) for i in ends for moment in parts[i].backward.moments]
    inference = [plus(embedding, moment, autocast(i * parts[i].inference_copies)) for i in ends for moment in parts[i].memory.inference.moments]
    heaviest = max((part.left for part in parts), key=lambda moment: moment.total)
    return StackMemory(left[-1], (0, 0, copies), envelope(forward), envelope(backward), envelope(inference), heaviest)


NORM_STATISTICS = 2  # mean and 1 / deviation of each token, float32: pytorch, aten/src/ATen/native/layer_norm.cpp


def embedded(model: ModelShape, stack: StackRecipe) -> Moment:
    """The first layer's input: the embedding's output, or behind it a norm's (bloom).

    The norm's output is float32 under autocast. It keeps its own input where that needs a gradient: PEFT asks for one when it checkpoints.
    Source: transformers 5.23, modeling_bloom.py `word_embeddings_layernorm`; pytorch, aten/src/ATen/autocast_mode.h (`layer_norm` in float32).
    """
    per_token = model.hidden_size * stack.recipe.weight_width
    if model.embed_norm is not None:
        learns = stack.recipe.trainable or stack.gradient_checkpointing
        kept = per_token + NORM_STATISTICS * FLOAT32_BYTES if learns else 0
        per_token = kept + (model.hidden_size * FLOAT32_BYTES if stack.recipe.autocast_width else per_token)
    return Moment((per_token, 0, 0), (("activations", (per_token, 0, 0)),))


@dataclass(frozen=True, slots=True)
class LayerPart:
    """One layer in its place. `left`: what it leaves after its forward pass; `copies`: autocast's copies in that which do not outlive it."""

    memory: LayerMemory
    left: Moment
    copies: int
    forward: Peaks
    backward: Peaks
    gradient_bytes: int
    inference_copies: int


def layer_part(layer: Layer, stack: StackRecipe, gradients_exist: bool, index: int) -> LayerPart:
    """Checkpointed or not, by its place (transformers 5.23, modeling_layers.py: layers 0, n, 2n, .. are checkpointed)."""
    recipe = replace(stack.recipe, kernel=kernel(stack, layer.attention))
    memory = layer_memory(layer, recipe, gradients_exist)
    checkpointed = stack.gradient_checkpointing and index % stack.every_n_layers == 0
    left = memory.checkpoint if checkpointed else memory.saved
    copied = dict(left.kinds).get("autocast_copies", NOTHING)[2]
    cached = dict(memory.checkpoint.kinds).get("autocast_copies", NOTHING)[2]
    return LayerPart(
        memory=memory,
        left=left,
        copies=copied if checkpointed else 0,
        forward=memory.checkpointed_forward if checkpointed else memory.forward,
        backward=memory.checkpointed_backward if checkpointed else memory.backward,
        gradient_bytes=0 if gradients_exist else trained_bytes(layer, recipe),
        inference_copies=cached if recipe.trainable else 0,
    )


def trained_bytes(layer: Layer, recipe: Recipe) -> int:
    """Bytes of the gradients that one layer's backward pass leaves."""
    if not layer.passed:
        return 0
    if recipe.trainable:
        return layer.params * recipe.weight_width
    adapted = [linear for linear in layer.linears if linear.name in recipe.lora_targets]
    elements = sum(recipe.lora_r * (linear.in_features + linear.out_features) for linear in adapted)
    return (elements + (expert_adapter_elements(layer, recipe.lora_r) if recipe.lora_experts else 0)) * recipe.adapter_width


def expert_adapter_elements(layer: Layer, lora_r: int) -> int:
    """Elements of the matrices on a layer's fused experts and their router, as `planner.memory.lora` counts them."""
    block = layer.feed_forward
    if not isinstance(block, Experts):
        return 0
    rank, inner, hidden = block.num_experts * lora_r, block.moe_intermediate_size, layer.hidden_size
    return FUSED_BRANCHES * rank * (hidden + 2 * inner) + rank * (inner + hidden) + lora_r * (hidden + block.num_experts)


def first_and_last(parts: list[LayerPart]) -> list[int]:
    """The places of the first and the last layer of each kind."""
    places: dict[tuple[int, bool], list[int]] = {}
    for i, part in enumerate(parts):
        places.setdefault((id(part.memory), part.backward is part.memory.backward), []).append(i)
    return sorted({end for found in places.values() for end in (found[0], found[-1])})


def plus(*moments: Moment) -> Moment:
    """What is alive together."""
    kinds: dict[Kind, Size] = {}
    for moment in moments:
        for kind, size in moment.kinds:
            kinds[kind] = add(kinds.get(kind, NOTHING), size)
    total = NOTHING
    for moment in moments:
        total = add(total, moment.total)
    return Moment(total, tuple(kinds.items()))


def add(a: Size, b: Size) -> Size:
    return (a[0] + b[0], a[1] + b[1], a[2] + b[2])


def gradients(size_bytes: int) -> Moment:
    return Moment((0, 0, size_bytes), (("gradients", (0, 0, size_bytes)),))


def autocast(size_bytes: int) -> Moment:
    return Moment((0, 0, size_bytes), (("autocast_copies", (0, 0, size_bytes)),))


def without_copies(left: Moment, before: list[LayerPart]) -> Moment:
    """The same once the forward pass has ended and autocast has dropped the copies that nothing else holds."""
    return plus(left, autocast(-sum(part.copies for part in before)))

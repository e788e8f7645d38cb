"""Recipes of a candidate's decoder layers: dtypes, adapters, masks, checkpointing, attention kernels."""

from functools import lru_cache
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from planner.cache_keys import StateInput, TrainingInput
from planner.candidate import AttentionImplementation, in_float16
from planner.errors import InputError
from planner.memory.layers.recipe import Kernel, Recipe
from planner.memory.parameters.kbit_preparation import prepared_in_passes
from planner.memory.parameters.lora import target_names, targets_experts
from planner.memory.parameters.policy import converted_parts
from planner.memory.parameters.widths import (
    compute_adapter_width,
    compute_weight_width,
    copied_dtype_bytes,
    magnitude_dtype_bytes,
)
from planner.models.image_tower import image_tower
from planner.models.layers import FLASH_HEAD_DIM, NO_BLOCKS, Attention, ExpertPart, LigerBlocks
from planner.models.liger import hub_blocks
from planner.models.lora_targets import named_parts
from planner.models.shape import ModelShape
from planner.quantizations import QuantizedLinear

# Alignment of a head in the memory-efficient attention kernel. Source: pytorch 2.13,
# aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, `check_head_dim_size_mem_efficient` and
# `minimum_gemm_alignment`.
EFFICIENT_ALIGNMENT_BYTES = 16
# Kernels of Falcon, whose forward pass always gives sdpa a mask (transformers 5.23, models/falcon/modeling_falcon.py):
# with one key head for all query heads, or with keys copied to every head.
FALCON_KERNELS: dict[str, Kernel] = {
    "multi_query": "math",
    "grouped_repeated": "efficient",
    "heads_selected": "efficient",
}
# Tensors that the forward pass copies to the host: the inputs of checkpointed layers (`checkpoint_offload` of
# transformers), or those of TRL's `activation_offloading`, which are the same ones under checkpointing.
Offloads = Literal["nothing", "checkpoints", "activations"]


class StackRecipe(Struct, frozen=True, kw_only=True):
    """Recipe of how a stack of layers computes, without the size of the batch: the key of the cache of its passes."""

    recipe: Recipe
    # the fused experts of each layer that `lora_target_parameters` names; (): none of any
    expert_parts: tuple[frozenset[ExpertPart], ...] = ()
    attn_implementation: AttentionImplementation
    masked: bool  # batches hold padding or packed rows, for which sdpa needs a mask
    unpads: bool  # FlashAttention copies padded rows to remove the padding and to put it back
    windows_active: bool  # the row is at least as long as the sliding window: such layers need a mask of their own
    gradient_checkpointing: bool
    every_n_layers: int
    flash: bool  # the GPU has FlashAttention's kernels (compute capability 8.0)
    groups_efficiently: bool  # the memory-efficient kernel takes grouped queries (`Candidate.groups_efficiently`)
    mask_widths: int  # bytes per score of the masks that all layers share
    embedding_width: int  # bytes of one element of the embedding's output
    # the features of images are put in place of embeddings of their tokens, or patches in the order of windows
    merged: bool = False
    offloads: Offloads = "nothing"
    copies_embedding: bool = False  # PEFT's copy of the embedding is trained beside the adapters

    @property
    def embedding_learns(self) -> bool:
        """True if the embedding that runs is trained: in full, or PEFT's copy of it."""
        return self.recipe.trainable or self.copies_embedding


def stack_recipe(candidate: TrainingInput, flash: bool) -> StackRecipe:
    """Return how the policy's layers compute on a GPU with (`flash`) or without FlashAttention."""
    return policy_stack(policy_recipe(candidate), candidate, flash)


def policy_stack(recipe: Recipe, candidate: TrainingInput, flash: bool) -> StackRecipe:
    """The policy's stack; after k-bit preparation, or as PEFT's copy, its embedding has a dtype of its own.

    Raises:
        InputError: Liger gives PEFT's wrapper of the experts its own forward pass, which stops: "'ParamWrapper' object
            has no attribute 'hidden_dim'". Source: liger-kernel 0.8.5, transformers/monkey_patch.py (`LigerExperts`).
    """
    stack, prepared = with_data(recipe, candidate, flash), prepared_in_passes(candidate)
    if candidate.tuning == "lora" and candidate.lora_target_parameters:
        stack = replace(stack, expert_parts=named_parts(candidate.model, candidate.lora_target_parameters))
    if "experts" in recipe.liger_blocks and (recipe.lora_experts or any(stack.expert_parts)):
        raise InputError(
            f"Liger's kernel for the experts of {candidate.model.id} stops at adapters on them. Change "
            "use_liger_kernel to false, or name lora_target_modules of the attention."
        )
    if learns_embedding_copy(candidate):
        return replace(stack, copies_embedding=True, embedding_width=copied_dtype_bytes(candidate))
    return stack if prepared is None else replace(stack, embedding_width=prepared.embedding)


def learns_embedding_copy(candidate: StateInput) -> bool:
    """Return whether PEFT's copy of the embedding is trained beside the adapters."""
    return candidate.tuning == "lora" and (
        candidate.model.architecture.embedding_name in candidate.lora_modules_to_save
    )


def policy_recipe(candidate: StateInput) -> Recipe:
    """Return how the policy's layers compute, apart from masks and checkpointing."""
    lora, prepared = candidate.tuning == "lora", prepared_in_passes(candidate)
    width, drops = compute_weight_width(candidate), lora and candidate.lora_dropout > 0
    row = candidate.quantization_row
    dequantizes = row.keeps_experts and "expert" in converted_parts(candidate.model, candidate.quantization)
    return Recipe(
        weight_width=width if prepared is None else prepared.rest,
        autocast_width=autocast_width(candidate),
        half=computes_in_half(candidate),
        mixes_halves=mixes_halves(candidate, candidate.dtype) and prepared is None,
        trainable=not lora,
        quantized=projection_quantization(candidate),
        quantized_width=width if prepared is not None else 0,
        expert_width=(row.expert_width or width) if dequantizes else 0,
        expert_scratch=row.expert_scratch if dequantizes else 0.0,
        lora_r=candidate.lora_r if lora else 0,
        lora_targets=target_names(candidate.model, candidate.lora_target_modules) if lora else frozenset(),
        adapter_width=compute_adapter_width(candidate) if lora else 4,
        lora_experts=lora and targets_experts(candidate.model, candidate.lora_target_modules),
        saves_frozen_inputs=lora and candidate.scheme_row.reentrant_with_adapters,
        lora_dropout=drops and not candidate.method_row.disables_dropout,  # PEFT's dropout is a module of the model
        adapter_kernels=candidate.counted_lora_kernels if lora else frozenset(),
        magnitude_width=magnitude_dtype_bytes(candidate) if lora and candidate.use_dora else 0,
        dora_product=drops and candidate.use_dora,
        ep_size=candidate.ep_size if candidate.scheme_row.divides_experts else 1,
        dropout=not candidate.method_row.disables_dropout or candidate.model.architecture.functional_dropout,
        reentrant=candidate.reentrant,
        liger_blocks=replaced_blocks(candidate),
    )


def replaced_blocks(candidate: StateInput) -> LigerBlocks:
    """Return the parts of the policy's layers that Liger replaces, of its package or the Hub.

    The package replaces none of a trainer's model that is a wrapper.
    """
    packaged = candidate.use_liger_kernel and candidate.method_row.takes_liger_kernels
    replaced = candidate.model.architecture.liger_blocks if packaged else NO_BLOCKS
    return replaced | (hub_blocks(candidate.model) if candidate.use_kernels else NO_BLOCKS)


def generation_stack(stack: StackRecipe, candidate: TrainingInput) -> StackRecipe:
    """Return how the policy's layers compute in `generate`, over prompts.

    With LoRA there is no autocast, because PEFT calls the base model's forward, which accelerate does not wrap. In full
    fine-tuning there is, even if the trainer's own forward pass has none. sdpa needs a mask only if the prompts of a
    process differ in length.
    Source: peft 0.21, peft_model.py, `PeftModelForCausalLM.generate`; accelerate 1.15, accelerator.py, `prepare_model`
    (wraps the forward of the outermost module); transformers 5.23, generation/utils.py (drops a mask without zeros).
    """
    model, recipe = candidate.model, stack.recipe
    if candidate.tuning == "lora":
        recipe = replace(recipe, autocast_width=0, mixes_halves=False)
    if autocasts_generation(candidate):
        recipe = replace(recipe, autocast_width=2)
    if recipe.row_length:
        recipe = replace(recipe, row_length=candidate.prompt_length)
    shortest = shortest_window(model)
    active = shortest is not None and candidate.prompt_length >= shortest
    widths = mask_widths(model, stack.attn_implementation, candidate.prompts_differ, active, recipe.weight_width)
    return replace(
        stack,
        recipe=recipe,
        masked=candidate.prompts_differ,
        unpads=candidate.prompts_differ,
        windows_active=active,
        mask_widths=widths,
    )


def autocasts_generation(candidate: TrainingInput) -> bool:
    """Return whether `generate` runs under autocast while the trainer's forward pass does not (`Method.autocast`)."""
    return candidate.autocasts and candidate.tuning == "full" and not candidate.method_row.autocast


def _loads_on_cpu(candidate: StateInput) -> bool:
    """Return whether a model is loaded without a device map: of several processes, by DeepSpeed, by `policy_loader`.

    Source: trl 1.16, trainer/grpo_trainer.py, `GRPOTrainer.__init__` (`distributed_type`); planner/launch/script.py.
    """
    mapped = candidate.method_row.policy_loader == "trainer"
    return candidate.num_processes > 1 or candidate.scheme_row.stage > 0 or not mapped


def projection_quantization(candidate: StateInput) -> QuantizedLinear:
    """Return how the layers' projections are quantized; bitsandbytes leaves subclasses of nn.Linear as they are."""
    row = candidate.quantization_row
    if row.bitsandbytes and candidate.model.architecture.subclassed_linears:
        return "none"
    return row.linear_on_cpu if row.linear_on_cpu and _loads_on_cpu(candidate) else row.linear


def frozen_recipe(candidate: TrainingInput, flash: bool, weight_width: int = 0) -> StackRecipe:
    """Return how the layers of a frozen model compute: reference, reward or teacher.

    `weight_width`: bytes of one of its weights; 0: as the policy's. TRL leaves `requires_grad` of its weights on, so
    that autocast keeps 16-bit copies of them, except for a copied policy. The frozen model is built before training
    starts, when Liger patches the trained model and, for all models of the type, the module's rotary function.
    """
    width = weight_width or compute_weight_width(candidate)
    recipe = Recipe(
        weight_width=width,
        autocast_width=autocast_width(candidate),
        half=computes_in_half(candidate),
        mixes_halves=mixes_halves(candidate, candidate.teacher_load_dtype if weight_width else candidate.dtype),
        trainable=not candidate.method_row.experimental_reference,
        dropout=False,
        liger_blocks=replaced_blocks(candidate) & {"rotary"},
    )
    return with_data(recipe, candidate, flash)


def without_adapters(stack: StackRecipe) -> StackRecipe:
    """The same recipe with the adapters switched off: the reference model of a PEFT model."""
    recipe = replace(
        stack.recipe, lora_r=0, lora_targets=frozenset(), lora_experts=False, lora_dropout=False, magnitude_width=0,
        dora_product=False,
    )  # fmt: skip
    return replace(stack, recipe=recipe, copies_embedding=False)


def with_data(recipe: Recipe, candidate: TrainingInput, flash: bool) -> StackRecipe:
    """Add masks and checkpointing to a recipe, as the candidate's rows need them."""
    if any(model is not None and needs_row_length(model) for model in _models(candidate)):
        several = candidate.rows > 1 and not candidate.flattened
        recipe = replace(recipe, row_length=candidate.attention_length, several_rows=several)
    if candidate.path_tokens:
        recipe = replace(recipe, key_copies=candidate.path_tokens / candidate.tokens)
    if candidate.row_gpus > 1:
        ring = candidate.scheme_row.ring
        gpus = candidate.row_gpus
        recipe = replace(recipe, ring_gpus=gpus if ring else 1, ulysses_gpus=1 if ring else gpus)
    shortest = shortest_window(candidate.model)
    tower = image_tower(candidate.model, candidate.image_size) if candidate.images_per_row else None
    masked = candidate.pads or candidate.flattened or (tower is not None and tower.masks_text)
    windows_active = shortest is not None and candidate.row_tokens >= shortest
    wanted = candidate.attn_implementation  # Transformers loads eager in place of an sdpa that the model lacks
    implementation = candidate.model.default_attention if wanted == "sdpa" else wanted
    return StackRecipe(
        recipe=recipe,
        attn_implementation=implementation,
        masked=masked,
        unpads=candidate.pads,
        windows_active=windows_active,
        mask_widths=mask_widths(candidate.model, implementation, masked, windows_active, recipe.weight_width),
        embedding_width=recipe.weight_width,
        gradient_checkpointing=candidate.gradient_checkpointing,
        every_n_layers=candidate.checkpoint_every_n_layers,
        flash=flash,
        groups_efficiently=candidate.groups_efficiently,
        merged=candidate.images_per_row > 0,
        offloads=offloads(candidate),
    )


def needs_row_length(model: ModelShape) -> bool:
    """Return whether layers need other memory for each token of rows of another length: chunks, or chosen tokens."""
    return bool(model.architecture.chunk) or any(layer.attention.index_topk for layer, _ in model.layer_kinds)


def _models(candidate: TrainingInput) -> tuple[ModelShape | None, ...]:
    return (candidate.model, candidate.reward_model, candidate.teacher_model)


def offloads(candidate: TrainingInput) -> Offloads:
    """Return which tensors the forward pass copies to the host."""
    if candidate.activation_offloading:
        return "activations"
    return "checkpoints" if candidate.checkpoint_offload and candidate.gradient_checkpointing else "nothing"


def autocast_width(candidate: StateInput) -> int:
    """Bytes of the autocast dtype, 0 without autocast.

    DeepSpeed and FSDP2 cast the parameters instead, of models that they shard.
    Source: accelerate 1.15, accelerator.py, `prepare_model` (wraps the forward), `_prepare_deepspeed`, `_prepare_fsdp2`
    (do not; a frozen model that `prepare_model` gets on its own is autocast under FSDP2, too); transformers 5.23,
    trainer.py, `Trainer.autocast_smart_context_manager` (a null context but on the CPU).
    """
    return 2 if candidate.autocasts and candidate.method_row.autocast else 0


def computes_in_half(candidate: StateInput) -> bool:
    """True if the layers' 16-bit numbers are float16."""
    return in_float16(candidate.precision, candidate.dtype)


def mixes_halves(candidate: StateInput, dtype: str) -> bool:
    """True if weights are loaded in one 16-bit `dtype` and autocast computes in the other one."""
    fitting = {"bf16": "bfloat16", "fp16": "float16", "no": dtype}[candidate.precision]
    cast = candidate.scheme_row.casts != "autocast" or not candidate.method_row.autocast
    return not cast and dtype not in ("float32", fitting)


@lru_cache(maxsize=1024)
def mask_widths(
    model: ModelShape, attn_implementation: AttentionImplementation, masked: bool, windows_active: bool, width: int
) -> int:
    """Bytes per score of the masks that all layers share, one mask for each window size.

        eager: bytes of the hidden dtype | sdpa: 1, for windows or if `masked` | FlashAttention: 0

    Source: transformers 5.23, masking_utils.py `sdpa_mask` and `eager_mask`.
    """
    windows = {layer.attention.sliding_window for layer, _ in model.layer_kinds}
    blocks = [layer.attention for layer, _ in model.layer_kinds]
    if any(block.qkv_layout in FALCON_KERNELS or block.index_topk for block in blocks):
        masked = True
    if attn_implementation == "eager":
        return len(windows) * width
    if attn_implementation != "sdpa":
        return 0
    return len(windows) if masked else len(windows - {None}) * windows_active


@lru_cache(maxsize=1024)
def shortest_window(model: ModelShape) -> int | None:
    """The smallest sliding window of the model in tokens, None if it has none."""
    windows = [layer.attention.sliding_window for layer, _ in model.layer_kinds]
    return min((window for window in windows if window is not None), default=None)


@lru_cache(maxsize=1024)
def shares_keys(model: ModelShape) -> bool:
    """Return whether any layer has fewer key heads than query heads."""
    return any(
        layer.attention.num_key_value_heads < layer.attention.num_attention_heads for layer, _ in model.layer_kinds
    )


def kernel(stack: StackRecipe, attention: Attention) -> Kernel:
    """The attention kernel that one layer runs.

        eager                                      "eager_masked"
        FlashAttention                             "tree" of a packed row, "flash_varlen" with padding, else "flash"
        sdpa with a mask                           "efficient", or "math" if a head is not a multiple of 16 bytes
        sdpa, 16-bit, equal head dims up to 256    "flash" on GPUs that have it
        sdpa otherwise                             "efficient_unmasked"; "math" for unaligned heads; for grouped
                                                   queries "math" up to torch 2.13, then "efficient_grouped"

    Source: transformers 5.23, masking_utils.py (sdpa needs no mask without padding while the row is shorter than the
    window; eager always has one), integrations/sdpa_attention.py, `use_gqa_in_sdpa`; pytorch 2.13,
    aten/src/ATen/native/transformers/cuda/sdp_utils.cpp; results/torch_releases.md (grouped queries). With attention
    sinks Transformers takes kernels-community/vllm-flash-attn3 for either release of FlashAttention
    (models/gpt_oss/modeling_gpt_oss.py, `_compatible_flash_implementations`).
    """
    if stack.attn_implementation == "eager":
        return "eager_masked"
    if stack.attn_implementation != "sdpa":
        return "tree" if stack.recipe.key_copies else "flash_varlen" if stack.unpads else "flash"
    if attention.qkv_layout in FALCON_KERNELS:
        return FALCON_KERNELS[attention.qkv_layout]
    masked = stack.masked or attention.index_topk > 0  # sparse attention masks the tokens that it did not choose
    aligned = all(
        head * stack.recipe.compute_width % EFFICIENT_ALIGNMENT_BYTES == 0
        for head in (attention.head_dim, attention.v_head_dim)
    )
    if masked or (stack.windows_active and attention.sliding_window is not None):
        return "efficient" if aligned else "math"
    small = attention.head_dim == attention.v_head_dim <= FLASH_HEAD_DIM
    if stack.flash and stack.recipe.compute_width == 2 and small:
        return "flash"
    grouped = small and attention.num_key_value_heads < attention.num_attention_heads
    if not aligned or (grouped and not stack.groups_efficiently):
        return "math"
    return "efficient_grouped" if grouped else "efficient_unmasked"

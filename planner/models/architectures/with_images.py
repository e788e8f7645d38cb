"""Rows of models with images, whose language model is another row's or is measured, and of vision towers."""

from msgspec.structs import replace

from planner.models.architectures.architecture import LIGER_ALL, LIGER_NO_ROTARY, LIGER_USUAL, QUERY_VALUE, Architecture
from planner.models.architectures.states import qwen3_5_delta_net

_GEMMA4 = Architecture(
    shared_layers_decode=True,
    causal_with_images=True,
    classifier=False,
    flash_attention=False,
    saved_buffers=True,
    overflows_float16=True,
    local_rotary=True,
    whole_vision=True,
)
_QWEN3_VL = Architecture(
    tower="qwen3_vit", largest_image="4096x4096", classifier=False, liger_stops_at="Qwen3VLCausalLMOutputWithPast"
)
_QWEN3_5_TEXT = Architecture(state=qwen3_5_delta_net, mixer_kernels=("flash-linear-attention", "causal-conv1d"))
_QWEN3_5_MOE = replace(
    _QWEN3_5_TEXT,
    rotary_share=0.25,
    tower="qwen3_vit",
    largest_image="4096x4096",
    causal_with_images=True,
    classifier=False,
    overflows_float16=True,
    liger_stops_at="Qwen3_5MoeCausalLMOutputWithPast",
)

WITH_IMAGES: dict[str, Architecture] = {
    "gemma3": Architecture(
        text_type="gemma3_text",
        tower="siglip",
        causal_with_images=True,
        overflows_float16=True,
        liger_blocks=LIGER_ALL,
        liger_refuses_classifier=True,
        local_rotary=True,
    ),
    "gemma3n": Architecture(per_layer_embedding=True, causal_with_images=True, overflows_float16=True),
    "gemma4": replace(
        _GEMMA4,
        per_layer_embedding=True,
        eager_part="audio_config",
        expert_block="",
        liger_blocks=LIGER_NO_ROTARY,
        wrapped_without_audio=("Gemma4TextDecoderLayer", "Gemma4VisionEncoderLayer", "Gemma4VisionPatchEmbedder"),
    ),
    "gemma4_unified": _GEMMA4,
    "llama4": Architecture(
        expert_block="feed_forward",
        router_name="router.weight",
        stops_at_router_loss=True,
        causal_with_images=True,
        classifier=False,
        flash_attention=False,
        lora_targets=QUERY_VALUE,
        stops_all_linear="router",
        refuses_lora_kernels=True,
        liger_blocks=LIGER_USUAL,
    ),
    "llava": Architecture(classifier=False),
    "mistral3": Architecture(tower="pixtral", largest_image="1540x1540", stacks_texts=True, classifier=False),
    "mllama": Architecture(
        causal_with_images=True,
        classifier=False,
        flash_attention=False,
        liger_blocks=LIGER_USUAL,
        refuses_lora_kernels=True,
    ),
    "paligemma": Architecture(
        classifier=False, liger_blocks=LIGER_USUAL, wrapped_projector=("PaliGemmaMultiModalProjector",)
    ),
    "qwen2_vl": Architecture(
        tower="qwen2_vit",
        largest_image="3584x3584",
        classifier=False,
        refuses_lora_kernels=True,
        liger_stops_at="Qwen2VLCausalLMOutputWithPast",
    ),
    "qwen2_5_vl": Architecture(
        tower="qwen2_5_vit",
        largest_image="3584x3584",
        classifier=False,
        refuses_lora_kernels=True,
        liger_stops_at="Qwen2_5_VLCausalLMOutputWithPast",
    ),
    "qwen3_vl": _QWEN3_VL,
    "qwen3_vl_moe": replace(_QWEN3_VL, liger_stops_at="Qwen3VLMoeCausalLMOutputWithPast"),
    "qwen3_5": replace(
        _QWEN3_5_MOE, classifier=True, liger_blocks=LIGER_NO_ROTARY, liger_stops_at="", liger_refuses_classifier=True
    ),
    "qwen3_5_text": _QWEN3_5_TEXT,
    "qwen3_5_moe": _QWEN3_5_MOE,
    "qwen3_5_moe_text": _QWEN3_5_TEXT,
    # -- towers --------------------------------------------------------------------------------------------------------
    "siglip_vision_model": Architecture(wrapped_as_tower=("SiglipEncoderLayer", "SiglipVisionEmbeddings")),
    "clip_vision_model": Architecture(wrapped_as_tower=("CLIPEncoderLayer", "CLIPVisionEmbeddings")),
}

"""PEFT's default `lora_target_modules` by model type."""

from planner.errors import InputError

# Source: peft 0.21.2, utils/constants.py, `TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING`,
# the decoder-only rows. For model types that are missing there
# (gemma3, phi3, qwen2_moe, qwen3_moe, olmo2, ...) PEFT raises.
DEFAULT_TARGETS: dict[str, tuple[str, ...]] = {
    "gpt2": ("c_attn",),
    "bloom": ("query_key_value",),
    "opt": ("q_proj", "v_proj"),
    "gptj": ("q_proj", "v_proj"),
    "gpt_neox": ("query_key_value",),
    "gpt_neo": ("q_proj", "v_proj"),
    "llama": ("q_proj", "v_proj"),
    "llama4": ("q_proj", "v_proj"),
    "chatglm": ("query_key_value",),
    "gpt_bigcode": ("c_attn",),
    "mpt": ("Wqkv",),
    "falcon": ("query_key_value",),
    "codegen": ("qkv_proj",),
    "mistral": ("q_proj", "v_proj"),
    "stablelm": ("q_proj", "v_proj"),
    "phi": ("q_proj", "v_proj", "fc1", "fc2"),
    "gemma": ("q_proj", "v_proj"),
    "gemma2": ("q_proj", "v_proj"),
    "gemma3_text": ("q_proj", "v_proj"),
    "qwen2": ("q_proj", "v_proj"),
    "qwen3": ("q_proj", "v_proj"),
    "nemotron_h": ("q_proj", "k_proj", "v_proj", "o_proj"),
}


def default_targets(model_type: str) -> tuple[str, ...]:
    """Return PEFT's default `lora_target_modules` for a model type.

    Raises:
        InputError: PEFT has no default for this model type and would raise.
    """
    if model_type not in DEFAULT_TARGETS:
        raise InputError(
            f"PEFT has no default lora_target_modules for {model_type}. "
            "Name them in the config, such as lora_target_modules: all-linear."
        )
    return DEFAULT_TARGETS[model_type]

"""The parts of a model's layers that Liger's kernels replace, by model type (liger-kernel 0.8.5).

Source: liger-kernel 0.8.5, transformers/monkey_patch.py, `MODEL_TYPE_TO_APPLY_LIGER_FN` and the function of each type
with its defaults. Transformers applies them to the trained model when training starts (transformers 5.23,
integrations/liger.py, `apply_liger_kernel`) and leaves a model of another type as it is.
"""

from collections.abc import Mapping
from typing import Literal

from planner.models.layers import Experts
from planner.models.shape import ModelShape

# norm: the layers' own norms; query_norm: those of queries and keys; rotary: rotary positions, for every model of the
# type that the process holds, as the module's function is replaced; mlp: activation and product of a gated MLP, shared
# experts included; experts: `LigerExperts`, one fused function, where the layers have experts.
LigerBlock = Literal["norm", "query_norm", "rotary", "mlp", "experts"]
LigerBlocks = frozenset[LigerBlock]

NO_BLOCKS: LigerBlocks = frozenset()
_LLAMA: LigerBlocks = frozenset({"norm", "rotary", "mlp"})
_ALL: LigerBlocks = frozenset({"norm", "query_norm", "rotary", "mlp"})
_NO_ROTARY: LigerBlocks = frozenset({"norm", "query_norm", "mlp"})
LIGER_BLOCKS: Mapping[str, LigerBlocks] = {
    **dict.fromkeys(("llama", "qwen2", "mistral", "granite", "smollm3", "phi3", "llama4", "mllama"), _LLAMA),
    **dict.fromkeys(("gemma", "gemma2", "paligemma"), _LLAMA),
    **dict.fromkeys(("olmo2", "olmo3"), _LLAMA),  # norms of queries and keys stay
    **dict.fromkeys(("qwen3", "gemma3", "gemma3_text", "exaone4"), _ALL),
    "glm4": frozenset({"norm", "mlp"}),
    "qwen3_moe": frozenset({"norm", "query_norm", "rotary", "experts"}),
    **dict.fromkeys(("gemma4", "qwen3_5"), _NO_ROTARY),
    "qwen3_next": frozenset({*_NO_ROTARY, "experts"}),
    "gpt_oss": frozenset({"norm", "rotary"}),
    "mixtral": frozenset({"norm", "rotary", "experts"}),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), frozenset[LigerBlock]({"norm", "mlp", "experts"})),
    "deepseek_v4": frozenset({"norm"}),
}

# Types of Liger's table at which it stops when training starts: it needs a class of the model's module that
# transformers 5.23 has no more. Source: liger-kernel 0.8.5, transformers/model/output_classes.py; the ImportError of
# `_apply_liger_kernel_to_instance` on a model of each type.
LIGER_STOPS: Mapping[str, str] = {
    "qwen2_vl": "Qwen2VLCausalLMOutputWithPast",
    "qwen2_5_vl": "Qwen2_5_VLCausalLMOutputWithPast",
    "qwen3_vl": "Qwen3VLCausalLMOutputWithPast",
    "qwen3_vl_moe": "Qwen3VLMoeCausalLMOutputWithPast",
    "qwen3_5_moe": "Qwen3_5MoeCausalLMOutputWithPast",
}

# Types whose sequence classifier, a reward model, Liger refuses ("The model must be Gemma3ForCausalLM.").
# Source: liger-kernel 0.8.5, transformers/monkey_patch.py, `apply_liger_kernel_to_gemma3_text` and the others that end
# in a TypeError, of types that transformers 5.23 has a sequence classifier of.
REFUSED_CLASSIFIERS: frozenset[str] = frozenset({"gemma3", "gemma3_text", "qwen3_5", "qwen3_next"})


def liger_blocks(model: ModelShape) -> LigerBlocks:
    """Return the parts of the layers that Liger replaces; none for a model of another type."""
    return LIGER_BLOCKS.get(model.model_type, NO_BLOCKS)


def has_liger_formulas(model: ModelShape) -> bool:
    """Return whether Liger has kernels for the model, and all layers have formulas with them.

    `LigerExperts` has none: layers with it are measured, where they are not, as all layers without formulas.
    """
    layers, blocks = [layer for layer, _ in model.layer_kinds], liger_blocks(model)
    fused = "experts" in blocks and any(isinstance(layer.feed_forward, Experts) for layer in layers)
    return bool(blocks) and not fused and all(layer.measure is None for layer in layers)

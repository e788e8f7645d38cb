"""The parts of a model's layers that Liger's kernels replace, by model type (liger-kernel 0.8.5).

Source: liger-kernel 0.8.5, transformers/monkey_patch.py, `MODEL_TYPE_TO_APPLY_LIGER_FN` and the function of each type
with its defaults. Transformers applies them to the trained model when training starts (transformers 5.23,
integrations/liger.py, `apply_liger_kernel`) and leaves a model of another type as it is.
"""

from collections.abc import Mapping
from typing import Literal

from planner.models.shape import Experts, ModelShape

# norm: the layers' own norms; query_norm: those of queries and keys; rotary: rotary positions, for every model of the
# type that the process holds, as the module's function is replaced; mlp: activation and product of a gated MLP.
LigerBlock = Literal["norm", "query_norm", "rotary", "mlp"]
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
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), frozenset[LigerBlock]({"norm", "mlp"})),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), frozenset[LigerBlock]({"norm", "query_norm", "rotary"})),
    **dict.fromkeys(("gemma4", "qwen3_next", "qwen3_5", "qwen3_5_moe"), _NO_ROTARY),
    "gpt_oss": frozenset({"norm", "rotary"}),
    "qwen3_moe": frozenset({"norm", "query_norm", "rotary"}),
    "mixtral": frozenset({"norm", "rotary"}),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), frozenset[LigerBlock]({"norm", "mlp"})),
    "deepseek_v4": frozenset({"norm"}),
}
# Types whose experts Liger leaves as they are (`swiglu` false by default). The others get `LigerExperts`, one fused
# Triton function that has no formulas here.
KEEPS_EXPERTS = frozenset({"gpt_oss", "deepseek_v4"})


def liger_blocks(model: ModelShape) -> LigerBlocks:
    """Return the parts of the layers that Liger replaces; none for a model of another type."""
    return LIGER_BLOCKS.get(model.model_type, NO_BLOCKS)


def has_liger_formulas(model: ModelShape) -> bool:
    """Return whether Liger has kernels for the model, and all layers have formulas with them."""
    layers = [layer for layer, _ in model.layer_kinds]
    kept = model.model_type in KEEPS_EXPERTS or not any(isinstance(layer.feed_forward, Experts) for layer in layers)
    return bool(liger_blocks(model)) and kept and all(layer.measure is None for layer in layers)

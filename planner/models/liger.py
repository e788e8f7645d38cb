"""The parts of a model's layers that Liger's kernels replace, from its package or from the Hub.

Transformers applies liger-kernel 0.8.5 to the trained model when training starts (transformers 5.23,
integrations/liger.py, `apply_liger_kernel`) and leaves a model of a type without them as it is.
"""

from planner.models.layers import NO_BLOCKS, Experts, LigerBlocks
from planner.models.shape import ModelShape

# Norms whose classes are marked for the Hub's kernels: neither Gemma's, nor Cohere's, nor nn.LayerNorm. Source:
# transformers 5.23, `use_kernel_forward_from_hub` in models/*/modeling_*.py (tests/test_levers.py).
HUB_NORMS = ("rms", "rms_fp32_weight")


def has_liger_formulas(model: ModelShape) -> bool:
    """Return whether Liger has kernels for the model, and all layers have formulas with them.

    `LigerExperts` has none: layers with it are measured, where they are not, as all layers without formulas.
    """
    layers, blocks = [layer for layer, _ in model.layer_kinds], model.architecture.liger_blocks
    fused = "experts" in blocks and any(isinstance(layer.feed_forward, Experts) for layer in layers)
    return bool(blocks) and not fused and not model.has_measured_layers


def hub_blocks(model: ModelShape) -> LigerBlocks:
    """Return the parts that `use_kernels` replaces while a model trains: RMSNorms, by Liger's function for them.

    Kernels for rotary positions and activations have no backward pass and are for sampling and evaluation; those of
    Liger's MLPs and losses have no layer marked for them. A pass without gradients, of a reference or to sample,
    is counted without them: its layers hold no more with them.
    Source: transformers 5.23, integrations/hub_kernels.py, `_build_kernel_mapping`; kernels-community/liger-kernels,
    layers.py, `LigerRMSNorm`.
    """
    marked = any(norm.kind in HUB_NORMS for layer, _ in model.layer_kinds for norm in layer.norms)
    return frozenset({"norm", "query_norm"}) if marked else NO_BLOCKS


def has_hub_formulas(model: ModelShape) -> bool:
    """Return whether all that `use_kernels` replaces is counted.

    Layers that are measured may have other marked parts; clamped experts, those of gpt-oss, have MegaBlocks' kernel.
    """
    layers = [layer for layer, _ in model.layer_kinds]
    clamped = any(isinstance(layer.feed_forward, Experts) and layer.feed_forward.clamped for layer in layers)
    return bool(layers) and not clamped and not model.has_measured_layers

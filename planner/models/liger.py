"""The parts of a model's layers that Liger's kernels replace (liger-kernel 0.8.5).

Transformers applies them to the trained model when training starts (transformers 5.23, integrations/liger.py,
`apply_liger_kernel`) and leaves a model of a type without them as it is.
"""

from planner.models.layers import Experts
from planner.models.shape import ModelShape


def has_liger_formulas(model: ModelShape) -> bool:
    """Return whether Liger has kernels for the model, and all layers have formulas with them.

    `LigerExperts` has none: layers with it are measured, where they are not, as all layers without formulas.
    """
    layers, blocks = [layer for layer, _ in model.layer_kinds], model.architecture.liger_blocks
    fused = "experts" in blocks and any(isinstance(layer.feed_forward, Experts) for layer in layers)
    return bool(blocks) and not fused and all(layer.measure is None for layer in layers)

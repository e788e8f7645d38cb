"""Parameter counts of Gemma 3's SigLIP vision tower and projector; text batches do not run them.

Source: transformers 5.23, models/siglip/modeling_siglip.py; models/gemma3/modeling_gemma3.py
`Gemma3MultiModalProjector`.
"""

from msgspec import Struct

from planner.models.architectures.fields import Fields

# models/siglip/configuration_siglip.py, SiglipVisionConfig
SIGLIP_DEFAULTS: dict[str, object] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 16,
    "vision_use_head": True,
}


class VisionTower(Struct, frozen=True, kw_only=True):
    """Counts of a vision tower. `linear_params`: elements of `nn.Linear` weights, for all-linear and bitsandbytes."""

    params: int
    linear_params: int
    hidden_size: int


def siglip(fields: Fields) -> VisionTower:
    """Count `SiglipVisionTransformer`: patch and position embeddings, layers with biases, a last norm, a pooling head.

        layer = 4 (H^2 + H) attention + (H F + F) + (F H + H) MLP + 4 H two norms

    Example: H 1152, F 4304, 27 layers, 14 x 14 patches of 896 x 896, no head: 416,866,032.
    """
    hidden_size, intermediate_size = fields.positive("hidden_size"), fields.positive("intermediate_size")
    patch, side = fields.positive("patch_size"), fields.positive("image_size")
    channels, layers = fields.positive("num_channels"), fields.positive("num_hidden_layers")
    linear_weights = 4 * hidden_size**2 + 2 * hidden_size * intermediate_size
    layer = linear_weights + 4 * hidden_size + intermediate_size + hidden_size + 4 * hidden_size
    embeddings = channels * patch**2 * hidden_size + hidden_size + (side // patch) ** 2 * hidden_size
    return VisionTower(
        params=embeddings + layers * layer + 2 * hidden_size + _pooling_head_params(fields),
        linear_params=layers * linear_weights,
        hidden_size=hidden_size,
    )


def _pooling_head_params(fields: Fields) -> int:
    """Parameters of `SiglipMultiheadAttentionPoolingHead`: a probe vector, `nn.MultiheadAttention`, a norm, an MLP."""
    if not fields.flag("vision_use_head"):
        return 0
    hidden_size, intermediate_size = fields.positive("hidden_size"), fields.positive("intermediate_size")
    attention = 4 * (hidden_size**2 + hidden_size)
    mlp = 2 * hidden_size * intermediate_size + intermediate_size + hidden_size
    return hidden_size + attention + 2 * hidden_size + mlp


def gemma3_projector_params(tower: VisionTower, text_hidden_size: int) -> int:
    """Parameters of the projector: one matrix (a parameter, no `nn.Linear`) and a norm over the tower's features."""
    return tower.hidden_size * text_hidden_size + tower.hidden_size

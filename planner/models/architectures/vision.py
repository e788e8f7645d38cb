"""Gemma 3's SigLIP vision tower and projector: parameter counts, layers and tokens; text batches do not run them.

Source: transformers 5.23, models/siglip/modeling_siglip.py; models/gemma3/modeling_gemma3.py
`Gemma3MultiModalProjector`.
"""

from dataclasses import dataclass
from functools import lru_cache

from planner.models.architectures.defaults import DEFAULTS
from planner.models.architectures.fields import Fields
from planner.models.architectures.parts import norm, plain_mlp
from planner.models.shape import Attention, Layer, Linear, ModelShape

GEMMA3_IMAGE_TOKENS = 256  # `mm_tokens_per_image` of Gemma3Config


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionTower:
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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ImageTower:
    """A vision tower as a stack of layers. Compared by identity, as `ModelShape`.

    `stack`: its layers; "tokens" of this stack are patches. The processor makes an image [channels, side, side].
    `text_tokens`: tokens that one image takes in a row.
    """

    stack: ModelShape
    channels: int
    side: int
    patches: int
    text_tokens: int
    text_hidden_size: int

    @property
    def pixels(self) -> int:
        """Return how many numbers an image has."""
        return self.channels * self.side**2


@lru_cache(maxsize=64)
def image_tower(model: ModelShape) -> ImageTower | None:
    """Return the vision tower of a model; None: it has none, or none with formulas (all but gemma 3).

    `SiglipEncoderLayer` is a llama-like layer of LayerNorms, biases and a plain MLP without rotary positions.
    Every image is resized to `image_size` squared (processing_gemma3.py; "pan and scan" is off by default).
    """
    inner = model.config.get("vision_config")
    if model.model_type != "gemma3" or not isinstance(inner, dict):
        return None
    values = {**DEFAULTS["siglip_vision_model"], **inner}
    fields = Fields(id=model.id, model_type="siglip_vision_model", values=values)
    hidden_size, heads = fields.positive("hidden_size"), fields.positive("num_attention_heads")
    side, patch = fields.positive("image_size"), fields.positive("patch_size")
    layer = Layer(
        program="llama",
        hidden_size=hidden_size,
        attention=Attention(
            num_attention_heads=heads,
            num_key_value_heads=heads,
            head_dim=hidden_size // heads,
            v_head_dim=hidden_size // heads,
            linears=tuple(
                Linear(name=name, in_features=hidden_size, out_features=hidden_size, bias=True)
                for name in ("q_proj", "k_proj", "v_proj", "out_proj")
            ),
            rotary=False,
        ),
        feed_forward=plain_mlp(
            hidden_size, fields.positive("intermediate_size"), "gelu_tanh", names=("fc1", "fc2"), bias=True
        ),
        norms=(norm("layer", hidden_size),) * 2,
    )
    patches = (side // patch) ** 2
    stack = ModelShape(
        id=f"{model.id} (vision tower)",
        model_type="siglip_vision_model",
        dtype=model.dtype,
        hidden_size=hidden_size,
        vocab_size=1,
        max_position_embeddings=patches,
        layers=(layer,) * fields.positive("num_hidden_layers"),
        embed_params=hidden_size,
        position_params=patches * hidden_size,
        lm_head_params=0,
        final_norm=norm("layer", hidden_size),
        tied=True,
        params=model.vision_params,
        config={},
    )
    tokens = model.config.get("mm_tokens_per_image", GEMMA3_IMAGE_TOKENS)
    assert isinstance(tokens, int)
    return ImageTower(
        stack=stack,
        channels=fields.positive("num_channels"),
        side=side,
        patches=patches,
        text_tokens=tokens,
        text_hidden_size=model.hidden_size,
    )

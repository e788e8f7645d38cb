"""Rotary positions of each family: how they are computed, and to how many features of a head they apply."""

from planner.errors import InputError, shortened
from planner.models.architectures.fields import Fields
from planner.models.layers import RotaryStyle

# Default share of a head's features that are rotated. Source: transformers 5.23, the default of
# `partial_rotary_factor` (gpt_neox: `rotary_pct`) in models/<folder>/configuration_<folder>.py.
DEFAULT_SHARE: dict[str, float] = {"phi": 0.5, "glm": 0.5, "glm4": 0.5, "stablelm": 0.25, "gpt_neox": 0.25}

# Source: transformers 5.23, `apply_rotary_pos_emb` of models/<folder>/modeling_<folder>.py; all others as llama.
STYLES: dict[str, RotaryStyle] = {
    "olmo": "half_cast_back",
    "olmo2": "half_cast_back",
    "olmo3": "half_cast_back",
    "cohere": "float32",
    "cohere2": "float32",
    "ernie4_5": "float32_interleaved",
    "gpt_neox": "partial",
    "glm": "partial_interleaved",
    "glm4": "partial_interleaved",
    "phi": "partial_kept",
    "stablelm": "partial_kept",
    "phi3": "partial_summed",
    "gpt_oss": "halves",
}


def rotary_style(fields: Fields) -> RotaryStyle:
    return STYLES.get(fields.model_type, "half")


def rotary_dim(fields: Fields, head_dim: int) -> int:
    """Features of a head that are rotated. Transformers 5 writes the share into `rope_parameters`.

    Raises:
        InputError: the share is not between 0 and 1.
    """
    parameters = fields.values.get("rope_parameters")
    stated = parameters.get("partial_rotary_factor") if isinstance(parameters, dict) else None
    for share in (stated, fields.values.get("partial_rotary_factor"), fields.values.get("rotary_pct")):
        if isinstance(share, (int, float)):
            if not 0 <= share <= 1:
                raise InputError(
                    f"The config.json of {fields.id} rotates {shortened(share)} of each head. Give a share from 0 to 1."
                )
            return int(head_dim * share)
    return int(head_dim * DEFAULT_SHARE.get(fields.model_type, 1.0))

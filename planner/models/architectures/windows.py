"""Rules of each family for the layers that attend to a window of tokens, and for those without rotary positions.

Source: transformers 5.23, `layer_types` in models/<folder>/configuration_<folder>.py `__post_init__`; the mask that a
model without `layer_types` builds in its forward (`create_sliding_window_causal_mask`).
"""

from collections.abc import Callable

from planner.models.architectures.fields import Fields

WindowRule = Callable[[Fields, int], bool]
RotaryRule = Callable[[Fields, int], bool]


def no_window(fields: Fields, index: int) -> bool:
    return False


def every_layer(fields: Fields, index: int) -> bool:
    """mistral, mixtral, phi3, starcoder2: all layers, if the config has a window."""
    return True


def if_used(fields: Fields, index: int) -> bool:
    """qwen3_moe (configuration_qwen3_moe.py `__post_init__`): all layers, if `use_sliding_window`."""
    return fields.flag("use_sliding_window")


def upper_layers(fields: Fields, index: int) -> bool:
    """qwen2, qwen3: the layers from `max_window_layers` on, if `use_sliding_window`.

    Source: configuration_qwen2.py, `Qwen2Config.__post_init__`.
    """
    return fields.flag("use_sliding_window") and _from_layer_types(
        fields, index, index >= fields.integer("max_window_layers")
    )


def alternating(fields: Fields, index: int) -> bool:
    """gemma2, gpt_oss (configuration_gemma2.py, `Gemma2Config.__post_init__`): the first layer of every two."""
    return _from_layer_types(fields, index, (index + 1) % 2 != 0)


def by_pattern(fields: Fields, index: int) -> bool:
    """gemma3, cohere2, exaone4: not every `sliding_window_pattern`-th; for a text ("LLLG") the layers "L"."""
    pattern = fields.values.get("sliding_window_pattern")
    if isinstance(pattern, str):
        return _from_layer_types(fields, index, pattern[index % len(pattern)] == "L")
    return _from_layer_types(fields, index, (index + 1) % fields.positive("sliding_window_pattern") != 0)


def three_of_four(fields: Fields, index: int) -> bool:
    """olmo3 (configuration_olmo3.py, `Olmo3Config.__post_init__`): the first three layers of every four."""
    return _from_layer_types(fields, index, (index + 1) % 4 != 0)


def without_rotary(fields: Fields, index: int) -> bool:
    """smollm3: the layers without rotary positions, if `use_sliding_window`.

    Source: configuration_smollm3.py, `SmolLM3Config.__post_init__`.
    """
    return fields.flag("use_sliding_window") and _from_layer_types(fields, index, not listed_rotary(fields, index))


def _from_layer_types(fields: Fields, index: int, otherwise: bool) -> bool:
    """Return whether the config's `layer_types` gives the layer a window; `otherwise` without such a list."""
    layer_types = fields.sequence("layer_types")
    return layer_types[index] == "sliding_attention" if index < len(layer_types) else otherwise


def window(fields: Fields, rule: WindowRule, index: int) -> int | None:
    """The window of a layer in tokens; None if the layer attends to all previous tokens."""
    return fields.positive("sliding_window") if fields.has("sliding_window") and rule(fields, index) else None


def all_rotary(fields: Fields, index: int) -> bool:
    return True


def listed_rotary(fields: Fields, index: int) -> bool:
    """smollm3: `no_rope_layers` holds 1 for layers *with* rope.

    Source: configuration_smollm3.py, `SmolLM3Config.__post_init__`.
    """
    listed = fields.sequence("no_rope_layers")
    return bool(listed[index]) if index < len(listed) else (index + 1) % fields.positive("no_rope_layer_interval") != 0


def rotary_in_windows(fields: Fields, index: int) -> bool:
    """cohere2 (modeling_cohere2.py, `Cohere2Attention.forward`): only layers with a window have rotary positions."""
    return by_pattern(fields, index)


def rotary_unless_hybrid(fields: Fields, index: int) -> bool:
    """exaone4: all layers of a model without windows, else only layers with a window.

    Source: modeling_exaone4.py, `Exaone4Attention.forward`.
    """
    return not fields.has("sliding_window") or by_pattern(fields, index)

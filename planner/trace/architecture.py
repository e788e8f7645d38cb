"""A model without its widths and depth, which are sizes: what of its config a profile depends on, and after how many layers it begins anew."""

from planner.model import ModelShape
from planner.trace.profile import NoProfile
from planner.trace.terms import VOCAB_CHUNK

FEWEST_LAYERS = 2  # a first and a last; those between are put in by the deeper trace
MANY_TILES = 3  # of the vocabulary: a first, a last, and some between, from here on all alike
HEAD_ALIGNMENT = 8  # heads of other sizes are padded for the flash kernel: probes/fake/substitutions.py

# Widths by the name of config.json. `head_dim` is not in every config.
WIDTH_FIELDS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
DEPTH_FIELDS = ("num_hidden_layers", "max_window_layers")
# No tensor of a training step has another size for these.
NO_EFFECT = frozenset(
    {"architectures", "attention_dropout", "attn_implementation", "auto_map", "bos_token_id", "cache_implementation", "dtype", "eos_token_id", "head_dim",
     "initializer_range", "layer_norm_eps", "max_position_embeddings", "original_max_position_embeddings", "pad_token_id", "pretraining_tp", "rms_norm_eps",
     "rope_theta", "tie_word_embeddings", "torch_dtype", "transformers_version", "unsloth_fixed", "use_cache", "_name_or_path", "name_or_path"}
)  # fmt: skip
# What a config says when it says nothing: written out or left out, it is the same model.
DEFAULTS: dict[str, object] = {"attention_bias": False, "mlp_bias": False, "use_sliding_window": False, "hidden_act": "silu", "rope_scaling": None}
KEPT_ALWAYS = object()
# Position scalings whose frequencies are computed once, before the first step (transformers 5.23, modeling_rope_utils.py).
STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn"})
# Layers after which the pattern begins anew: transformers 5.23, configuration_gemma3.py (sliding_window_pattern), configuration_smollm3.py
# (no_rope_layer_interval), configuration_gemma2.py (layer_types), configuration_cohere2.py.
PERIODS: dict[str, int] = {"gemma3_text": 6, "smollm3": 4, "gemma2": 2, "cohere2": 4}


def architecture(model: ModelShape) -> dict[str, object]:
    """A config without widths and depth, which are sizes; with how they relate where that decides what runs.

    Raises:
        NoProfile: the config lacks a width, or its layers do not repeat.
    """
    config = model.config
    if any(not isinstance(config.get(name), int) for name in (*WIDTH_FIELDS, "num_hidden_layers")):
        raise NoProfile(f"The config of {model.id} does not name its widths as a profile's terms do.")
    heads, key_heads = numbers(config, "num_attention_heads", "num_key_value_heads")
    if head_of(config) % HEAD_ALIGNMENT:
        raise NoProfile(f"The heads of {model.id} have {head_of(config)} features, which kernels pad.")
    kept = {
        name: value
        for name, value in config.items()
        if name not in (*WIDTH_FIELDS, *DEPTH_FIELDS, *NO_EFFECT, "sliding_window", "layer_types") and DEFAULTS.get(name, KEPT_ALWAYS) != value
    }
    scaling = kept.get("rope_scaling")
    if isinstance(scaling, dict) and scaling.get("rope_type", scaling.get("type")) in STATIC_ROPE:
        del kept["rope_scaling"]
    return kept | {
        "tied": model.tied,
        "key heads": "one" if key_heads == 1 else "all" if key_heads == heads else "some",
        "vocabulary tiles": min(-(-numbers(config, "vocab_size")[0] // VOCAB_CHUNK), MANY_TILES),
        "layers": (numbers(config, "num_hidden_layers")[0] - FEWEST_LAYERS) % period(model),
    }


def period(model: ModelShape) -> int:
    """After how many layers their pattern begins anew.

    Raises:
        NoProfile: the config lists kinds of layers, and not one kind only.
    """
    kinds = model.config.get("layer_types")
    if model.config.get("use_sliding_window"):
        raise NoProfile(f"Some layers of {model.id} have a window, and no profile knows which.")
    if model.model_type in PERIODS:
        return PERIODS[model.model_type]
    if isinstance(kinds, list) and len(set(kinds)) > 1:
        raise NoProfile(f"The layers of {model.id} are of several kinds, whose pattern no profile knows.")
    return 1


def base_layers(model: ModelShape) -> int:
    """The depth of the traces: the least that has a first layer, a last one, every kind, and the pattern's rest that the model has."""
    repeat = period(model)
    least = FEWEST_LAYERS + (numbers(model.config, "num_hidden_layers")[0] - FEWEST_LAYERS) % repeat
    return least if least >= repeat else least + repeat


def numbers(config: dict[str, object], *names: str) -> list[int]:
    """Fields of a config that are numbers."""
    found = [config[name] for name in names]
    assert all(isinstance(number, int) for number in found)
    return found  # type: ignore[return-value]


def head_of(config: dict[str, object]) -> int:
    """Features of an attention head."""
    hidden, heads = numbers(config, "hidden_size", "num_attention_heads")
    head = config.get("head_dim") or hidden // heads
    assert isinstance(head, int)
    return head


def features(model: ModelShape) -> tuple[int, ...]:
    """Inputs and outputs of the linear layers."""
    hidden, intermediate, heads, key_heads = numbers(model.config, *WIDTH_FIELDS[:4])
    return hidden, intermediate, heads * head_of(model.config), key_heads * head_of(model.config)

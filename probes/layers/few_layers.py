"""A model cut to a few layers, with at least one layer of every kind that the model has, at its real size."""

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from planner.models.from_config import shape_of
from planner.models.shape import ModelShape
from probes.trainers import transformers_config

Config = dict[str, Any]
LAYERS_OF_A_KIND = 2  # the second layer of a kind shows the bytes that each further one adds

OVERRIDES = "per_layer_config"  # by a layer's index, in configs that Transformers saved
DEPTH_KEYS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
# Config keys that tell layers of different kinds apart, besides lists with one item for each layer.
# Source: transformers 5.23, models/<folder>/configuration_<folder>.py.
# Lists of the indices of the layers of one kind.
MEMBERS = ("moe_layers", "cross_attention_layers", "full_attn_idxs", "mlp_only_layers", "attn_layer_indices")
WINDOW = "max_window_layers"  # that many first layers have no window, if `use_sliding_window`
SLIDING = "sliding_window"  # tokens
BEYOND_ROWS = 1 << 17  # tokens
FIRST = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", WINDOW)  # counts of the first layers
LAST = ("num_kv_shared_layers",)  # counts of the last layers


def few_layers(model: ModelShape, of_a_kind: int = LAYERS_OF_A_KIND) -> ModelShape:
    """The model with its first `of_a_kind` layers of each kind, in their order.

    For a model without formulas only the config changes; its parameter counts stay those of the whole model.
    """
    config = dict(model.config)
    kept = [index for places in layer_kinds(config) for index in places[:of_a_kind]]
    cut = keep_layers(config, sorted(kept))
    return (
        shape_of(cut, id=model.id, auto_class=model.auto_class) if _has_formulas(model) else replace(model, config=cut)
    )


def _has_formulas(model: ModelShape) -> bool:
    return model.known and all(layer.measure is None for layer, _ in model.layer_kinds)


def layer_kinds(config: Config) -> tuple[tuple[int, ...], ...]:
    """The indices of the layers of each kind, kinds in order of first appearance."""
    full = with_default_keys(config)
    kinds: dict[tuple[object, ...], list[int]] = {}
    for index in range(depth_of(full)):
        kinds.setdefault(_kind(full, index), []).append(index)
    return tuple(map(tuple, kinds.values()))


def keep_layers(config: Config, kept: list[int]) -> Config:
    """The config of the model with the layers of these indices only."""
    full, inner = with_default_keys(config), config.get("text_config")
    text = dict(inner if isinstance(inner, dict) else config)
    depth_key = next((key for key in DEPTH_KEYS if key in text), "num_hidden_layers")
    text |= {depth_key: len(kept), **dict(_keys_for_kept(full, kept))}
    if isinstance(text.get("hybrid_override_pattern"), str):  # nemotron_h: one letter for each layer
        text["hybrid_override_pattern"] = "".join(text["hybrid_override_pattern"][index] for index in kept)
    if OVERRIDES in text:
        own = {int(index): settings for index, settings in text[OVERRIDES].items()}
        text[OVERRIDES] = {str(place): own[index] for place, index in enumerate(kept) if index in own}
    return {**config, "text_config": text} if isinstance(inner, dict) else text


def without_window(config: Config) -> Config:
    """The config with sliding windows that no measured row reaches."""
    inner = config.get("text_config")
    text = dict(inner if isinstance(inner, dict) else config)
    if isinstance(text.get(SLIDING), int):
        text[SLIDING] = max(text[SLIDING], BEYOND_ROWS)
    return {**config, "text_config": text} if isinstance(inner, dict) else text


def with_default_keys(config: Config) -> Config:
    """The language model's config with the defaults of its transformers config class, under the usual names."""
    text = transformers_config(config).get_text_config()
    mapped = {usual: text.__dict__[name] for usual, name in text.attribute_map.items() if name in text.__dict__}
    return {
        **text.__dict__, **mapped, "model_type": text.model_type, "num_hidden_layers": text.num_hidden_layers,
    }  # fmt: skip


def depth_of(config: Config) -> int:
    inner = config.get("text_config")
    text = inner if isinstance(inner, dict) else config
    return int(next(text[key] for key in DEPTH_KEYS if key in text))


def _lists(full: Config) -> Iterator[tuple[str, list[object]]]:
    """The config's keys with one item for each layer, and their values."""
    depth = depth_of(full)
    for key, value in full.items():
        if (
            key not in MEMBERS
            and isinstance(value, (list, tuple))
            and len(value) == depth
            and all(isinstance(item, (str, int)) for item in value)
        ):
            yield key, list(value)


def _kind(full: Config, index: int) -> tuple[object, ...]:
    """The values of all keys that tell layers apart, for one layer; equal for layers of one kind."""
    kind: list[object] = [value[index] for _, value in _lists(full)]
    kind += [index in full[key] for key in _present(full, MEMBERS, list)]
    kind += [index < full[key] for key in _present(full, FIRST, int) if key != WINDOW or full.get("use_sliding_window")]
    kind += [index >= depth_of(full) - full[key] for key in _present(full, LAST, int)]
    return (*kind, (index + 1) % (full.get("decoder_sparse_step") or 1))


def _present(full: Config, keys: tuple[str, ...], kind: type) -> list[str]:
    return [key for key in keys if isinstance(full.get(key), kind)]


def _keys_for_kept(full: Config, kept: list[int]) -> Iterator[tuple[str, object]]:
    """The keys that tell layers apart, with their values for the kept layers."""
    for key, value in _lists(full):
        yield key, [value[index] for index in kept]
    for key in _present(full, MEMBERS, list):
        yield key, [place for place, index in enumerate(kept) if index in full[key]]
    for key in _present(full, FIRST, int):
        yield key, sum(index < full[key] for index in kept)
    for key in _present(full, LAST, int):
        yield key, sum(index >= depth_of(full) - full[key] for index in kept)
    if "attention_types" in full:  # gpt_neo: pairs of kinds and how often they repeat
        yield "attention_types", [[[full["attention_layers"][index]], 1] for index in kept]
    if "moe_layer_end_index" in full:  # ernie4_5_moe: the last layer with experts
        yield "moe_layer_end_index", len(kept) - 1

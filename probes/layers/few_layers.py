"""A model cut to a few of its layers: every kind of layer that it has stays, at its real size."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from transformers import AutoConfig

from planner.models.from_config import shape_of
from planner.models.shape import ModelShape

Config = dict[str, Any]
LAYERS_OF_A_KIND = 2  # the second of a kind shows what each further one adds

DEPTH_KEYS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
# How configs say of which kind a layer is, besides by a list with one item a layer.
# Source: transformers 5.23, models/<folder>/configuration_<folder>.py.
MEMBERS = (
    "moe_layers",
    "cross_attention_layers",
    "full_attn_idxs",
    "mlp_only_layers",
    "attn_layer_indices",
)  # the places of the layers that are so
WINDOW = "max_window_layers"  # without a window before the others, if `use_sliding_window`
FIRST = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", WINDOW)  # so many from the start
LAST = ("num_kv_shared_layers",)  # so many at the end


def few_layers(model: ModelShape, of_a_kind: int = LAYERS_OF_A_KIND) -> ModelShape:
    """The model with its first layers of each kind, in their order.

    Of a model without formulas only the config is another: what was counted of it is counted of the whole.
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
    """The places of the layers of each kind, kinds in order of first appearance."""
    full = described(config)
    kinds: dict[tuple[object, ...], list[int]] = {}
    for index in range(depth_of(full)):
        kinds.setdefault(_kind(full, index), []).append(index)
    return tuple(map(tuple, kinds.values()))


def keep_layers(config: Config, kept: list[int]) -> Config:
    """The config of the model that has these layers only."""
    full, inner = described(config), config.get("text_config")
    text = dict(inner if isinstance(inner, dict) else config)
    depth_key = next((key for key in DEPTH_KEYS if key in text), "num_hidden_layers")
    text |= {depth_key: len(kept), **dict(_of_the_kept(full, kept))}
    if isinstance(text.get("hybrid_override_pattern"), str):  # nemotron_h: one letter a layer
        text["hybrid_override_pattern"] = "".join(text["hybrid_override_pattern"][index] for index in kept)
    return {**config, "text_config": text} if isinstance(inner, dict) else text


def described(config: Config) -> Config:
    """All that transformers knows of the language model once its config class has filled in what the file leaves out."""
    fields = {key: value for key, value in config.items() if key != "model_type"}
    text = AutoConfig.for_model(config["model_type"], **fields).get_text_config()
    mapped = {usual: text.__dict__[own] for usual, own in text.attribute_map.items() if own in text.__dict__}
    return {**text.__dict__, **mapped, "num_hidden_layers": text.num_hidden_layers}


def depth_of(config: Config) -> int:
    inner = config.get("text_config")
    text = inner if isinstance(inner, dict) else config
    return int(next(text[key] for key in DEPTH_KEYS if key in text))


def _lists(full: Config) -> Iterator[tuple[str, list[object]]]:
    """The keys with one item a layer."""
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
    kind: list[object] = [value[index] for _, value in _lists(full)]
    kind += [index in full[key] for key in _present(full, MEMBERS, list)]
    kind += [index < full[key] for key in _present(full, FIRST, int) if key != WINDOW or full.get("use_sliding_window")]
    kind += [index >= depth_of(full) - full[key] for key in _present(full, LAST, int)]
    return (*kind, (index + 1) % (full.get("decoder_sparse_step") or 1))


def _present(full: Config, keys: tuple[str, ...], kind: type) -> list[str]:
    return [key for key in keys if isinstance(full.get(key), kind)]


def _of_the_kept(full: Config, kept: list[int]) -> Iterator[tuple[str, object]]:
    """The keys that say something of each layer, for the kept layers."""
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

"""A rollout of any length in the time of a short one.

The first tokens and the last one are generated; those between only fill the KV cache. Memory grows with every token, so
that its peak is in the pass of the prompt or in that of the last token.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from planner.errors import UnknownArchitecture
from probes.step.built_trainer import WORD
from probes.substitution import substituted

# Layers of a cache that do not grow with the row: states of Mamba and linear attention, and (transformers 5.23, which
# 5.17 does not have) layers that keep nothing.
CONSTANT_LAYERS = ("LinearAttentionLayer", "DummyLayer")
WHOLE_ROLLOUT_TOKENS = 8  # completions up to this are generated token by token
GENERATED_TOKENS = 3  # of longer ones: from the prompt, from the first step with the cache, from the last step


def generate_shortened(
    generate: Callable[..., Any], model: Any, on_cached: Callable[[list[torch.Tensor]], None], arguments: dict[str, Any]
) -> Any:
    """Run `model.generate(**arguments)`, skipping the tokens in the middle; the result has all tokens.

    `on_cached` is called with the tensors that stand in the KV cache for the skipped tokens.

    Raises:
        UnknownArchitecture: the model has a cache of a kind that cannot be lengthened.
    """
    config: GenerationConfig = arguments["generation_config"]
    new_tokens = config.max_new_tokens
    if new_tokens is None or new_tokens <= WHOLE_ROLLOUT_TOKENS:
        return generate(model, **arguments)
    short = copy.deepcopy(config)
    short.max_new_tokens = GENERATED_TOKENS
    prepare, calls = model.prepare_inputs_for_generation, [0]

    @functools.wraps(prepare)
    def prepare_last(input_ids: torch.Tensor, **kwargs: Any) -> dict[str, Any]:
        calls[0] += 1
        inputs: dict[str, Any] = prepare(input_ids, **kwargs)
        return (
            _as_last_step(inputs, new_tokens - GENERATED_TOKENS, on_cached) if calls[0] == GENERATED_TOKENS else inputs
        )

    with substituted(model, "prepare_inputs_for_generation", prepare_last):
        result = generate(model, **{**arguments, "generation_config": short})
    sequences = result if isinstance(result, torch.Tensor) else result.sequences
    rest = sequences.new_full((sequences.size(0), new_tokens - GENERATED_TOKENS), WORD)
    whole = torch.cat([sequences, rest], dim=1)
    if isinstance(result, torch.Tensor):
        return whole
    result.sequences = whole
    return result


def _as_last_step(
    inputs: dict[str, Any], skipped: int, on_cached: Callable[[list[torch.Tensor]], None]
) -> dict[str, Any]:
    """Return the inputs of a generation step as they are `skipped` tokens later."""
    cache, mask = inputs.get("past_key_values"), inputs.get("attention_mask")
    changed = dict(inputs)
    if mask is not None:
        changed["attention_mask"] = torch.cat([mask, mask.new_ones((mask.size(0), skipped))], dim=1)
    if isinstance(cache, Cache):
        _lengthen(cache, skipped)
        on_cached([tensor for layer in cache.layers for tensor in _cached_tensors(layer)])
        if inputs.get("position_ids") is not None:
            changed["position_ids"] = inputs["position_ids"] + skipped
        return changed
    ids = inputs["input_ids"]
    changed["input_ids"] = torch.cat([ids, ids.new_full((ids.size(0), skipped), WORD)], dim=1)
    if inputs.get("position_ids") is not None:
        positions = inputs["position_ids"]
        changed["position_ids"] = torch.cat([positions, positions[:, -1:] + torch.arange(1, skipped + 1)], dim=1)
    return changed


def _cached_tensors(layer: Any) -> list[torch.Tensor]:
    """Return the tensors of one layer of a cache."""
    if isinstance(layer, LinearAttentionLayer):
        states = (*layer.conv_states.values(), *layer.recurrent_states.values())
        return [state for state in states if state is not None]
    return [] if type(layer).__name__ in CONSTANT_LAYERS else [layer.keys, layer.values]


def _lengthen(cache: Cache, tokens: int) -> None:
    """Lengthen every layer of the cache by `tokens`, in place; states of constant size stay as they are."""
    for layer in cache.layers:
        if type(layer).__name__ in CONSTANT_LAYERS:
            continue
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise UnknownArchitecture(
                f"A rollout with a cache of {type(layer).__name__} cannot be shortened; set vllm to colocate or server."
            )
        length = layer.keys.size(-2) + tokens
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length += tokens
            length = min(length, layer.sliding_window - 1)
        layer.keys, layer.values = (
            tensor.new_empty((*tensor.shape[:-2], length, tensor.size(-1))) for tensor in (layer.keys, layer.values)
        )

"""Layers that keep a state of constant size in place of keys and values, and the states of a model."""

from functools import lru_cache

from planner.models.architectures.states import NOTHING_KEPT, RecurrentState
from planner.models.layers import Layer, layer_elements
from planner.models.shape import ModelShape

MIXER = "in_proj"  # the projections into a mixer with a state begin with it; other layers without keys keep nothing


def recurrent_state(model: ModelShape, layer: Layer) -> RecurrentState | None:
    """Return the state of a layer without keys and values; None if it is not known here.

    Layers of nemotron_h that are an MLP or experts alone keep nothing.
    """
    if layer_elements(layer.attention) > 0:
        return NOTHING_KEPT
    state = model.architecture.state
    if state is None:
        return None
    if not any(linear.name.startswith(MIXER) for linear in layer.linears):
        return NOTHING_KEPT
    text = model.config.get("text_config")
    try:
        return state(text if isinstance(text, dict) else model.config)
    except KeyError:  # a config that relies on defaults of its class
        return None


@lru_cache(maxsize=1024)
def cache_is_known(model: ModelShape) -> bool:
    """Return whether it is known what each layer caches: keys and values, a latent, a state of constant size."""
    return all(recurrent_state(model, layer) is not None for layer, _ in model.layer_kinds)


@lru_cache(maxsize=1024)
def states_of(model: ModelShape) -> tuple[tuple[RecurrentState, int], ...]:
    """Return the distinct states of a model's layers with their counts."""
    found: dict[RecurrentState, int] = {}
    for layer, count in model.layer_kinds:
        state = recurrent_state(model, layer)
        if state is not None and state.channels:
            found[state] = found.get(state, 0) + count
    return tuple(found.items())


def fast_kernels(model: ModelShape) -> tuple[str, ...]:
    """Return the packages with which a model's mixers are fast (`Architecture.mixer_kernels`); none without mixers."""
    return model.architecture.mixer_kernels if states_of(model) else ()

"""Memory of one training GPU that does not depend on the batch or the lengths.

It is computed once for its settings and remembered: a search tries many batches with the same states.
"""

from functools import lru_cache

from msgspec import Struct

from planner.cache_keys import StateSettings
from planner.gpus.cluster import Gpu
from planner.memory.communication import communication_bytes, weight_sync_bytes
from planner.memory.layers.recipe import Recipe
from planner.memory.optimizer import (
    gradient_before_bytes,
    held_gradients,
    optimizer_states_bytes,
    step_temporaries_bytes,
    update_in_backward_bytes,
)
from planner.memory.runtime import runtime_bytes
from planner.memory.schemes.contract import Gathers, Gradients, Masters
from planner.memory.schemes.table import scheme_of
from planner.memory.stack_recipe import policy_recipe
from planner.memory.weights import adapters_bytes, unsharded_while_loading_bytes, weights_by_role
from planner.quantities import Component


class StateMemory(Struct, frozen=True, kw_only=True):
    """Bytes on one training GPU. `resident`: alive from the second optimizer step on; the others in single phases."""

    resident: dict[Component, int]
    weights_by_role: dict[str, int]
    recipe: Recipe  # of the policy's layers
    masters: Masters
    gradients: Gradients
    unsharded_while_loading: int
    parameter_broadcast: int
    step_temporaries: int
    update_in_layers: int  # within the backward pass, by lomo and adalomo
    update_of_largest: int
    gradient_before: int
    gathers: Gathers
    weight_sync: int


@lru_cache(maxsize=8192)
def state_memory(settings: StateSettings, gpu: Gpu) -> StateMemory:
    """The states of `settings` on one GPU: each entry is the formula of the same name in this folder."""
    roles, scheme = weights_by_role(settings), scheme_of(settings)
    gathers = scheme.gathered(settings)
    return StateMemory(
        resident={
            "weights": sum(roles.values()),
            "adapters": adapters_bytes(settings),
            "optimizer_states": optimizer_states_bytes(settings),
            "communication": communication_bytes(settings),
            "runtime": runtime_bytes(gpu),
        },
        weights_by_role=roles,
        recipe=policy_recipe(settings),
        masters=scheme.masters(settings),
        gradients=held_gradients(settings),
        unsharded_while_loading=unsharded_while_loading_bytes(settings),
        parameter_broadcast=scheme.buffers(settings).broadcast,
        step_temporaries=step_temporaries_bytes(settings),
        update_in_layers=update_in_backward_bytes(settings, outside_layers=False),
        update_of_largest=update_in_backward_bytes(settings, outside_layers=True),
        gradient_before=gradient_before_bytes(settings),
        gathers=gathers,
        weight_sync=weight_sync_bytes(settings, gathers.weight_sync),
    )

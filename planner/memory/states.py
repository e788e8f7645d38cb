"""Memory of one training GPU that does not depend on the batch or the lengths.

It is computed once for its settings and remembered: a search tries many batches with the same states.
"""

from functools import lru_cache
from typing import get_args

from msgspec import Struct

from planner.cache_keys import StateSettings
from planner.gpus.cluster import Gpu
from planner.memory.communication import (
    FrozenGather,
    GenerationGather,
    communication_bytes,
    copied_gradients_bytes,
    gather_bytes,
    gathered_in_backward,
    generation_gather_bytes,
    kept_head_bytes,
    parameter_broadcast_bytes,
    reference_gather_bytes,
    teacher_head_bytes,
    weight_sync_bytes,
)
from planner.memory.gathering.passes import GatherMoment
from planner.memory.gradients import gradient_before_bytes, held_gradients, update_in_backward_bytes
from planner.memory.layers.recipe import Recipe
from planner.memory.optimizer import optimizer_states_bytes, step_temporaries_bytes
from planner.memory.runtime import runtime_bytes
from planner.memory.schemes.contract import Gradients, Masters
from planner.memory.schemes.table import scheme_of
from planner.memory.stack_recipe import policy_recipe
from planner.memory.weights import adapters_bytes, unsharded_while_loading_bytes, weights_by_role
from planner.quantities import Component

GATHER_MOMENTS: tuple[GatherMoment, ...] = get_args(GatherMoment)


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
    gathered: dict[GatherMoment, int]
    gathered_in_backward: tuple[int, ...]  # of each layer, the last one first; empty: all alike
    gathered_beside: FrozenGather  # while a reference model runs after the policy, whose graph is alive
    gathered_of_reference: FrozenGather
    copied_gradients: int  # by hybrid sharding, until a backward pass ends
    teacher_head: int  # gathered by the loss
    kept_head: int  # of the policy, beside a reference of the same modules
    generation_gather: GenerationGather
    weight_sync: int


@lru_cache(maxsize=8192)
def state_memory(settings: StateSettings, gpu: Gpu) -> StateMemory:
    """The states of `settings` on one GPU: each entry is the formula of the same name in this folder."""
    roles = weights_by_role(settings)
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
        masters=scheme_of(settings).masters(settings),
        gradients=held_gradients(settings),
        unsharded_while_loading=unsharded_while_loading_bytes(settings),
        parameter_broadcast=parameter_broadcast_bytes(settings),
        step_temporaries=step_temporaries_bytes(settings),
        update_in_layers=update_in_backward_bytes(settings, outside_layers=False),
        update_of_largest=update_in_backward_bytes(settings, outside_layers=True),
        gradient_before=gradient_before_bytes(settings),
        gathered={moment: gather_bytes(settings, moment) for moment in GATHER_MOMENTS},
        gathered_in_backward=gathered_in_backward(settings),
        gathered_beside=reference_gather_bytes(settings, beside_policy=True),
        gathered_of_reference=reference_gather_bytes(settings, beside_policy=False),
        copied_gradients=copied_gradients_bytes(settings),
        teacher_head=teacher_head_bytes(settings),
        kept_head=kept_head_bytes(settings),
        generation_gather=generation_gather_bytes(settings),
        weight_sync=weight_sync_bytes(settings),
    )

"""Gradients: `.grad` of the trained parameters, from the backward pass to the end of the optimizer step."""

from functools import lru_cache

from planner.cache_keys import StateInput
from planner.memory.dtypes import SIXTEEN_BIT_BYTES
from planner.memory.parameters.optimizer_states import EMBEDDING_PARTS, step_bytes
from planner.memory.parameters.tensors import EqualTensors, TensorSet, rounded_bytes
from planner.memory.parameters.trained import learning_groups
from planner.memory.schemes.contract import Gradients
from planner.memory.schemes.table import scheme_of


def held_gradients(candidate: StateInput) -> Gradients:
    """Bytes of gradients on one of G GPUs, on the rank with the most: those of the scheme, in the parameter's dtype.

    An optimizer that steps within the backward pass (lomo, adalomo) keeps one gradient, of the largest tensor, which is
    updated last; see `update_in_backward_bytes`.
    """
    found = scheme_of(candidate).gradients(candidate)
    if not candidate.optimizer_row.fused_backward:
        return found
    largest = sum(rounded_bytes(tensors.largest * size) for tensors, size in learning_groups(candidate))
    return found._replace(after_backward=largest, accumulated=0, at_step=0)


def update_in_backward_bytes(candidate: StateInput, outside_layers: bool) -> int:
    """Bytes that lomo and adalomo take to update the largest tensor within the backward pass, beside its gradient.

        bytes = (float32 copies of the tensor, see OPTIMIZERS) - a 16-bit gradient, dropped once there is a copy

    A hook on each parameter, called with its new gradient, updates those whose `.grad` is set: the one before it. In
    float32 the "copies" of lomo are the gradient and the parameter themselves. `outside_layers`: embedding and head,
    too.
    Source: lomo-optim 0.1.1, lomo.py and adalomo.py, `fuse_update`.

    Example: Qwen2.5-7B in bfloat16 with lomo: 2 x 4 - 2 bytes for each of the head's 544,997,376 parameters, 3.05 GiB.
    """
    if not candidate.optimizer_row.fused_backward:
        return 0
    found = 0
    for tensors, size in learning_groups(candidate):
        elements = tensors.largest if outside_layers else largest_in_layers(tensors)
        gradient = rounded_bytes(elements * size) if size == SIXTEEN_BIT_BYTES else 0
        of_layers = TensorSet(kinds=(EqualTensors(part="other", shape=(elements,)),))
        found += max(step_bytes(of_layers, size, candidate.optim) - gradient, 0)
    return found


def gradient_before_bytes(candidate: StateInput) -> int:
    """Bytes of the largest gradient in the layers, alive beside the next one with lomo and adalomo; else 0.

    Source: see `update_in_backward_bytes`. Example: Qwen2.5-7B in float32: 4 x 18,944 x 3,584 bytes = 259 MiB.
    """
    if not candidate.optimizer_row.fused_backward:
        return 0
    return sum(rounded_bytes(largest_in_layers(tensors) * size) for tensors, size in learning_groups(candidate))


@lru_cache(maxsize=1024)
def largest_in_layers(tensors: TensorSet) -> int:
    """Elements of the largest tensor that is neither an embedding nor a head."""
    outside = EMBEDDING_PARTS | {"head", "score"}
    return max((kind.elements for kind in tensors.kinds if kind.part not in outside), default=0)

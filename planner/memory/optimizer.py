"""Gradients, and the optimizer's states and temporaries, on one GPU and in host memory."""

from functools import lru_cache

from planner.cache_keys import StateInput, TrainingInput
from planner.memory.dtypes import SIXTEEN_BIT_BYTES
from planner.memory.parameters.lora import AdaptersKey, adapters_key, lora_in_order
from planner.memory.parameters.optimizer_states import EMBEDDING_PARTS, dense_state_sizes, state_bytes, step_bytes
from planner.memory.parameters.segments import held_by_states_bytes, unsplit_bytes
from planner.memory.parameters.tensors import EqualTensors, TensorSet, rounded_bytes, tensors_in_order
from planner.memory.parameters.trained import learning_groups
from planner.memory.parameters.widths import adapter_dtype_bytes, base_dtype_bytes
from planner.memory.schemes.contract import Gradients
from planner.memory.schemes.table import scheme_of
from planner.methods import Head
from planner.models.shape import ModelShape
from planner.optimizers import OPTIMIZERS, Optimizer


def optimizer_states_bytes(candidate: StateInput) -> int:
    """Bytes of optimizer states on one of G GPUs after the first step, with DeepSpeed's float32 master weights.

        states = sum over the tensors that the optimizer updates of the buffers in their row of OPTIMIZERS, each in its
                 dtype, + master weights

    Example: full fine-tuning of Qwen2.5-7B, float32, adamw_torch_fused: 2 x 7,615,616,512 x 4 = 60.9 GB = 56.74 GiB;
    adamw_8bit: 2.03 bytes a parameter, but 8 on the embedding, which transformers keeps in float32 (trainer.py,
    `Trainer.create_optimizer`).

    Leaves out paged states, which the driver moves to the host when the GPU is full (`paged_states_bytes`).
    """
    scheme = scheme_of(candidate)
    if scheme.steps_on_host(candidate):
        return 0
    states = sum(state_bytes(tensors, size, candidate.optim, False) for tensors, size in scheme.optimized(candidate))
    return states + scheme.masters(candidate).kept


def unsplit_states_bytes(candidate: TrainingInput) -> int:
    """Bytes that the states of a dense optimizer take beyond their own on one GPU, tensor by tensor (`unsplit_bytes`).

    0 with expandable segments. Example: Qwen2.5-0.5B in full, bfloat16: 14.5 MiB.

    Leaves out shards, optimizers in 8 bits, and vectors' own parameter group: they are in the small pool.
    """
    return unsplit_bytes(_state_sizes(candidate)[1])


def held_segments_bytes(candidate: TrainingInput) -> int:
    """Unused bytes of one GPU's segments in which the states of a dense optimizer lie (`held_by_states_bytes`).

    Leaves out what `unsplit_states_bytes` does.
    """
    return held_by_states_bytes(*_state_sizes(candidate))


def _state_sizes(candidate: TrainingInput) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the sizes of gradients and of states in the order of allocation; none if `unsplit_states_bytes` is 0."""
    row = candidate.optimizer_row
    if candidate.expandable_segments or row.kind != "dense" or not candidate.scheme_row.whole:
        return (), ()
    if scheme_of(candidate).steps_on_host(candidate):
        return (), ()
    width = base_dtype_bytes(candidate) if candidate.tuning == "full" else adapter_dtype_bytes(candidate)
    passed = not candidate.images_per_row
    return _sizes(candidate.model, candidate.method_row.head, adapters_key(candidate), candidate.optim, width, passed)


@lru_cache(maxsize=256)
def _sizes(
    model: ModelShape, head: Head, lora: AdaptersKey | tuple[()], optim: Optimizer, width: int, passed: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes of gradients and states of all trained tensors, or of those that text passes (`passed`)."""
    ordered = lora_in_order(model, *lora) if lora else tensors_in_order(model, head)
    trained = [tensor for tensor in ordered if tensor.passed or not passed]
    gradients = (size for tensor in reversed(trained) for size in (tensor.elements * width,) * tensor.count)
    states = (
        size
        for tensor in trained
        for size in dense_state_sizes(tensor.elements, width, OPTIMIZERS[optim]) * tensor.count
    )
    return tuple(gradients), tuple(states)


def paged_states_bytes(candidate: StateInput) -> int:
    """Bytes of one GPU's optimizer states in CUDA managed memory: on the GPU while there is room, else on the host.

    They count as host memory, because the driver moves them out when the GPU is full.
    Source: bitsandbytes 0.50.2, optim/optimizer.py, `Optimizer8bit.get_state_buffer`.
    """
    groups = scheme_of(candidate).optimized(candidate)
    return sum(state_bytes(tensors, size, candidate.optim, True) for tensors, size in groups)


def host_states_bytes(candidate: StateInput) -> int:
    """Bytes of states that one process keeps in host memory: those of an optimizer there, and those of GrokAdamW."""
    scheme = scheme_of(candidate)
    groups = scheme.optimized(candidate)
    kept = sum(candidate.optimizer_row.host_buffers * tensors.params * size for tensors, size in groups)
    if not scheme.steps_on_host(candidate):
        return kept
    states = sum(state_bytes(tensors, size, candidate.optim, False) for tensors, size in groups)
    return kept + states + scheme.offloaded_states(candidate)


def step_temporaries_bytes(candidate: StateInput) -> int:
    """Bytes that exist only while the optimizer steps, on one GPU; for lomo and adalomo see `update_in_backward_bytes`.

    Leaves out cuSOLVER's workspace in GaLore's decomposition, and Adafactor's update of the tensor before the largest,
    which a variable still holds.
    """
    scheme = scheme_of(candidate)
    if scheme.steps_on_host(candidate) or candidate.optimizer_row.fused_backward:
        return 0
    return scheme.step_temporaries(candidate)


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

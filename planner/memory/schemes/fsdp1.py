"""FSDP 1: units of one flat parameter each, and a root that stays gathered from the forward to the backward pass."""

from msgspec.structs import replace

from planner.cache_keys import StateInput, TrainingInput
from planner.memory.dtypes import DTYPE_BYTES, FLOAT32_BYTES
from planner.memory.parameters.quantized import shards_4bit_weights, whole_policy_bytes
from planner.memory.parameters.tensors import TensorSet, tensor_bytes
from planner.memory.parameters.trained import Group, learning_groups
from planner.memory.parameters.widths import base_dtype_bytes, compute_weight_width
from planner.memory.schemes.contract import (
    NOTHING_GATHERED,
    PASSES,
    Gathers,
    is_local,
    late_embedding_bytes,
)
from planner.memory.schemes.fsdp2 import Fsdp2
from planner.memory.schemes.fsdp2_units import GATHERED_LAYERS, layer_unit_bytes, root_params
from planner.quantities import Phase


class Fsdp1(Fsdp2):
    """`FullyShardedDataParallel`, as accelerate calls it: units of one flat parameter.

    Speed, the host and 4-bit weights are FSDP2's. `offload_param`, and methods that generate or have
    a reference of their own, are stops.
    """

    def stored(self, tensors: TensorSet, bytes_per_param: int, candidate: StateInput, *, trained: bool) -> int:
        """A part of the units of all tensors.

            bytes = ceil(parameters / G) x width

        Source: torch 2.13, distributed/fsdp/_flat_param.py, `FlatParamHandle._get_shard`.

        Leaves out that each unit is divided by itself: a few elements of padding.
        """
        return tensor_bytes(_flat_shard(tensors, candidate), bytes_per_param)

    def unsharded_while_loading(self, candidate: StateInput, policy_bytes: int) -> int:
        """The largest of what is there beside all shards before the first step.

            the root      its tensors and the flat copy of them, in the loaded dtype, when it is sharded, which is last
            16 bits       the loaded shards of trained weights and the empty float32 root of the first forward pass;
                          accelerate's float32 shards are there already
            4-bit bases   the whole quantized policy, less its shards: each process loads it to its GPU

        Source: torch 2.13, distributed/fsdp/_init_utils.py, `_init_param_handle_from_module`; _flat_param.py,
        `flatten_tensors`, `init_flat_param_attributes` (`_full_prec_full_param_padded`); accelerate 1.15,
        accelerator.py, `prepare_model` ("upcasting"); results/emulated_branches.jsonl, kinds of fsdp1 (within 4 %).

        Example: TinyLlama-1.1B in full, loaded in bfloat16, on two GPUs: 1.0 + 0.5 GiB beside float32 shards of 2.0.
        """
        width, root = DTYPE_BYTES[candidate.dtype], root_params(candidate.model, candidate.method_row.head)
        found = 2 * root * width
        if candidate.casts_weights and candidate.tuning == "full" and width < FLOAT32_BYTES:
            loaded = sum(_flat_shard(tensors, candidate).params for tensors, _ in learning_groups(candidate)) * width
            found = max(found, loaded + root * FLOAT32_BYTES)
        if shards_4bit_weights(candidate):
            found = max(found, whole_policy_bytes(candidate, width) - policy_bytes)
        return found

    def optimized(self, candidate: StateInput) -> tuple[Group, ...]:
        """The shards, in the dtype of the parameter."""
        return tuple((_flat_shard(tensors, candidate), size) for tensors, size in learning_groups(candidate))

    def gathered(self, candidate: StateInput) -> Gathers:
        """The root (embedding, head, final norm: P), layers (L), gradients of one unit (G), as wide as the computation.

            embedding            P + L
            forward              P + L; in full 2 L: the next layer is gathered ahead (`fsdp_forward_prefetch`)
            loss                 P
            head's backward      P + L
            backward             P + L; in full P + 2 L + G of a layer, and the gradient of an untied head
            embedding's backward P; in full, of an untied head, its gradient and G of the root

        A unit is received in its own storage. With adapters the next unit is one of their matrices. A gradient is one
        tensor for each unit, made of those of its weights when all are there; so that of an untied head waits for the
        embedding's, and its shard, which is counted with the others', is not there. The root is not resharded after the
        forward pass.
        Source: torch 2.13, distributed/fsdp/_runtime_utils.py, `_post_forward_reshard`, `_post_backward_hook`,
        `_prefetch_handle`; _flat_param.py, `_get_unflat_views_unaligned` (`torch.split`); trl 1.16,
        accelerate_configs/fsdp1.yaml (`BACKWARD_PRE`); results/emulated_branches.jsonl, kinds of fsdp1.
        """
        if is_local(candidate):
            return NOTHING_GATHERED
        model, size, full = candidate.model, compute_weight_width(candidate), candidate.tuning == "full"
        head = candidate.method_row.head
        root, layer = root_params(model, head) * size, layer_unit_bytes(candidate)
        waiting = in_one = 0
        if full and not model.tied and head == "lm_head":
            shard = model.lm_head_params * base_dtype_bytes(candidate) // candidate.shard_gpus
            waiting, in_one = model.lm_head_params * size - shard, root
        ahead, reduced = (GATHERED_LAYERS * layer, layer) if full else (layer, 0)
        forward = root + ahead
        return Gathers(
            at={
                "embedding": root + layer,
                "forward": forward,
                "loss": root,
                "head_backward": root + layer,
                "backward": forward + reduced + waiting,
                "first_layer_backward": 0,
                "embedding_backward": root + waiting + in_one,
            },
        )

    def split_blocks(self, candidate: TrainingInput, phase: Phase) -> int:
        """In full `late_embedding_bytes`; with adapters a layer, as the stream on which units are gathered holds two.

        Between two backward passes of layers the next one is gathered before the last one is resharded: hooks on the
        tensor between them run in the order of the forward pass. Source: torch 2.13,
        distributed/fsdp/_runtime_utils.py, `_register_pre_backward_hooks`, `_register_post_backward_reshard_only_hook`.
        """
        if candidate.tuning == "full" or candidate.num_processes == 1 or phase not in PASSES:
            return late_embedding_bytes(candidate, phase)
        return layer_unit_bytes(candidate)


def _flat_shard(tensors: TensorSet, candidate: StateInput) -> TensorSet:
    """Rank 0's part of the tensors: ceil(elements / G) of each, as if each were divided by itself."""
    gpus = candidate.shard_gpus
    return TensorSet(kinds=tuple(replace(kind, shape=(-(-kind.elements // gpus),)) for kind in tensors.kinds))

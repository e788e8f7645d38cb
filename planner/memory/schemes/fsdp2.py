"""FSDP2: shards of rows, gathered in units; hybrid sharding keeps copies of the sharded model."""

from functools import lru_cache

from planner.cache_keys import StateInput
from planner.candidate import DTYPE_BYTES
from planner.memory.parameters.kbit_preparation import SIXTEEN_BIT_BYTES
from planner.memory.parameters.optimizer_states import pinned_tensors_bytes, step_bytes
from planner.memory.parameters.policy import frozen_tensors
from planner.memory.parameters.quantized import packed_tensors, scale_bytes, shards_4bit_weights, whole_quantized_bytes
from planner.memory.parameters.tensors import EqualTensors, TensorSet, rounded_bytes, tensor_bytes
from planner.memory.parameters.trained import Group, learning_groups, policy_groups
from planner.memory.parameters.widths import base_dtype_bytes
from planner.memory.schemes.contract import Gradients, Masters, Scheme


@lru_cache(maxsize=4096)
def shards_bytes(tensors: TensorSet, bytes_per_param: int, num_processes: int) -> int:
    """Bytes of the shards on one GPU under FSDP2."""
    return tensor_bytes(fsdp2_shards(tensors, num_processes), bytes_per_param)


@lru_cache(maxsize=4096)
def fsdp2_shards(tensors: TensorSet, num_processes: int) -> TensorSet:
    """Rank 0's shard of each tensor under FSDP2: the first ceil(rows / G) rows."""
    return TensorSet(
        kinds=tuple(
            EqualTensors(part=kind.part, shape=(-(-kind.shape[0] // num_processes), *kind.shape[1:]), count=kind.count)
            for kind in tensors.kinds
        )
    )


def whole_gradients_bytes(candidate: StateInput) -> int:
    """Bytes of the gradients of all trained tensors, unsharded under FSDP2, on every GPU, offloaded or not.

        bytes = trained parameters x (2 with mixed precision, else the parameter's dtype)

    FSDP2 computes and reduces in accelerate's mixed precision (`param_dtype`, `reduce_dtype`), so that the unsharded
    gradient has that dtype, and autograd adds the next one to it.
    Source: accelerate 1.15, utils/dataclasses.py, `FullyShardedDataParallelPlugin.set_mixed_precision`; torch 2.13,
    distributed/fsdp/_fully_shard/_fsdp_param.py, `to_accumulated_grad_if_needed`; results/fsdp2_memory.md.

    Example: Qwen2.5-14B in full: 29.5 GB on every GPU, where a shard of 8 has 7.4 GB.
    """
    return sum(
        tensor_bytes(tensors, SIXTEEN_BIT_BYTES if candidate.precision != "no" else size)
        for tensors, size in learning_groups(candidate)
    )


class Fsdp2(Scheme):
    """PyTorch's `fully_shard`, as accelerate calls it: shards of rows, gathered in units."""

    def stored(self, tensors: TensorSet, bytes_per_param: int, candidate: StateInput, *, trained: bool) -> int:
        """ceil(rows / G) rows of each tensor on one of G = `shard_gpus` GPUs; none with `offload_param`.

        Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param.py (`Shard(0)`, padded to the largest chunk).
        tests/test_sharded_runs.py compares the bytes with two real processes; they are equal to the byte.

        Leaves out that the last ranks' shards can be smaller: this is rank 0.
        """
        return 0 if candidate.offload_param else shards_bytes(tensors, bytes_per_param, candidate.shard_gpus)

    def stored_quantized(self, candidate: StateInput) -> int:
        """4-bit weights that are stored as floating-point numbers: ceil(rows / G) rows of one, and all scales.

        In TRL's default, uint8, every GPU has them all, as those of other quantizations.

        Source: accelerate 1.15, utils/fsdp_utils.py, `fsdp2_prepare_model`.
        """
        if not shards_4bit_weights(candidate):
            return whole_quantized_bytes(candidate)
        width, found = DTYPE_BYTES[candidate.bnb_4bit_quant_storage], scale_bytes(candidate)
        for kind in packed_tensors(candidate).kinds:
            found += rounded_bytes(-(-kind.elements // candidate.shard_gpus) * width) * kind.count
        return found

    def optimized(self, candidate: StateInput) -> tuple[Group, ...]:
        """The shards, in the dtype of the parameter."""
        gpus = candidate.shard_gpus
        return tuple((fsdp2_shards(tensors, gpus), size) for tensors, size in learning_groups(candidate))

    def gradients(self, candidate: StateInput) -> Gradients:
        """Shards in the dtype of the parameter, which `offload_param` keeps on the host.

        Without `sync_each_batch`: `whole_gradients_bytes`, at the end of all backward passes but the last.

        Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_collectives.py, `foreach_reduce` (one buffer per layer).
        """
        shards = 0
        if not candidate.offload_param:
            shards = sum(rounded_bytes(tensors.params * size) for tensors, size in self.optimized(candidate))
        kept = whole_gradients_bytes(candidate) if candidate.keeps_whole_gradients else shards
        return Gradients(after_backward=max(kept, shards), accumulated=kept, at_step=shards, norm_of_offloaded=0)

    def masters(self, candidate: StateInput) -> Masters:
        """None: shards of trained parameters are float32 themselves."""
        return Masters(0, 0)

    def steps_on_host(self, candidate: StateInput) -> bool:
        """With `offload_param`: FSDP offloads parameters, gradients and optimizer together."""
        return candidate.offload_param

    def step_temporaries(self, candidate: StateInput) -> int:
        """Copies of all shards at once with foreach optimizers, of the largest with others."""
        return sum(step_bytes(tensors, size, candidate.optim) for tensors, size in self.optimized(candidate))

    def offloaded_parameters(self, candidate: StateInput) -> int:
        """Pinned(shard) of each tensor of the policy, a separate reference and PPO's value model.

        accelerate does not shard a teacher or a reward model (see `teacher_weights_bytes`).

        Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param.py, `FSDPParam._init_sharded_param`.
        `pinned_bytes` rounds up to powers of two.
        """
        if not candidate.offload_param:
            return 0
        others = [candidate.model] * candidate.separate_reference
        if candidate.method_row.value_model:
            others.append(candidate.reward_model or candidate.model)
        size = base_dtype_bytes(candidate)
        offloaded = [*policy_groups(candidate), *((frozen_tensors(model), size) for model in others)]
        return sum(
            pinned_tensors_bytes(fsdp2_shards(tensors, candidate.shard_gpus), width) for tensors, width in offloaded
        )

    def offloaded_states(self, candidate: StateInput) -> int:
        """Gradients on the host, pinned(shard) of each tensor.

        Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_collectives.py, `foreach_reduce`.
        """
        return sum(pinned_tensors_bytes(tensors, size) for tensors, size in self.optimized(candidate))

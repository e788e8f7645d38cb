"""FSDP2: shards of rows, gathered in units; hybrid sharding keeps copies of the sharded model."""

from functools import lru_cache

from planner.cache_keys import StateInput, TrainingInput
from planner.memory.dtypes import DTYPE_BYTES, SIXTEEN_BIT_BYTES
from planner.memory.parameters.kbit_preparation import bytes_while_prepared, prepared_bytes
from planner.memory.parameters.optimizer_states import pinned_tensors_bytes, step_bytes
from planner.memory.parameters.policy import frozen_tensors, policy_parameters
from planner.memory.parameters.quantized import (
    packed_tensors,
    scale_bytes,
    shards_4bit_weights,
    whole_policy_bytes,
    whole_quantized_bytes,
)
from planner.memory.parameters.tensors import EqualTensors, TensorSet, rounded_bytes, tensor_bytes
from planner.memory.parameters.trained import Group, learning_groups, policy_groups
from planner.memory.parameters.widths import adapter_dtype_bytes, base_dtype_bytes, compute_weight_width
from planner.memory.schemes.contract import (
    NOTHING_GATHERED,
    PASSES,
    Buffers,
    FrozenGather,
    Gathers,
    GenerationGather,
    Gradients,
    Masters,
    Scheme,
    Traffic,
    is_local,
)
from planner.memory.schemes.fsdp2_units import (
    after_generation,
    copied_gradients_bytes,
    gathered_units,
    generates_here,
    kept_head_bytes,
    kept_tail_bytes,
    left_head_bytes,
    loss_gathers_head,
    moved_units_bytes,
    outside_units,
    reference_gathered,
    whole_root_bytes,
)
from planner.memory.schemes.overlap import exposed_seconds
from planner.quantities import Phase

# Passes over the gathered parameters, and over the gradients in 16 bits, that FSDP2 makes on the computation's stream:
# it copies each gathered layer into its parameters, and the gradients of a layer into the reduce-scatter's input.
# Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_collectives.py, `foreach_all_gather_copy_out` and
# `foreach_reduce_scatter_copy_in`; a read and a write each.
COPY_PASSES = 2


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
        """4-bit weights that are stored as floating-point numbers: ceil(rows / G) rows of each, and all scales.

        With TRL's default storage, uint8, every GPU has all of them, as with other quantizations.
        Source: accelerate 1.15, utils/fsdp_utils.py, `fsdp2_prepare_model`.
        """
        if not shards_4bit_weights(candidate):
            return whole_quantized_bytes(candidate)
        width, found = DTYPE_BYTES[candidate.bnb_4bit_quant_storage], scale_bytes(candidate)
        for kind in packed_tensors(candidate).kinds:
            found += rounded_bytes(-(-kind.elements // candidate.shard_gpus) * width) * kind.count
        return found

    def unsharded_while_loading(self, candidate: StateInput, policy_bytes: int) -> int:
        """Bytes from which the shards are filled; at least the whole reference model - the policy's shard.

            sharded 4-bit weights    the whole quantized policy - its scales
            others                   see `whole_while_filled_bytes`

        Every process loads the whole quantized model to its GPU (trl 1.16, trainer/sft_trainer.py,
        `SFTTrainer.__init__`; transformers 5.23, quantizers/quantizer_bnb_4bit.py, `update_device_map`), and accelerate
        does not move it to the meta device before it shards (accelerate 1.15, utils/fsdp_utils.py,
        `fsdp2_prepare_model`). The shards are filled from a state dict that holds the whole 4-bit model, so that both
        are there at the end; scales are shared (`fsdp2_load_full_state_dict`). A reference model is moved to the GPU
        whole by `fully_shard`, before the policy is there (trl 1.16, models/utils.py, `prepare_fsdp`;
        results/fsdp2_memory.md).
        """
        if shards_4bit_weights(candidate):
            return whole_policy_bytes(candidate, DTYPE_BYTES[candidate.dtype]) - scale_bytes(candidate)
        filled = whole_while_filled_bytes(candidate)
        if not candidate.separate_reference or candidate.offload_param:
            return filled
        tensors, width = frozen_tensors(candidate.model), DTYPE_BYTES[candidate.dtype]
        dropped = 0 if candidate.keeps_reference else shards_bytes(tensors, width, candidate.shard_gpus)
        return max(filled, tensor_bytes(tensors, width) + dropped - policy_bytes)

    def optimized(self, candidate: StateInput) -> tuple[Group, ...]:
        """The shards, in the dtype of the parameter."""
        gpus = candidate.shard_gpus
        return tuple((fsdp2_shards(tensors, gpus), size) for tensors, size in learning_groups(candidate))

    def masters(self, candidate: StateInput) -> Masters:
        return Masters(0, 0)  # shards of trained parameters are float32 themselves

    def gathered(self, candidate: StateInput) -> Gathers:
        if is_local(candidate):
            return NOTHING_GATHERED
        at = gathered_units(candidate)
        most = max(at["forward"], at["loss"])
        left = left_head_bytes(candidate)
        before, beside = FrozenGather(0, at["forward"], at["forward"]), FrozenGather(0, most, most)
        if candidate.separate_reference:
            before = reference_gathered(candidate)
            beside = FrozenGather(before.embedding, *(max(at["forward"], each) for each in before[1:]))
        kept = kept_tail_bytes(candidate)
        after = max(at["forward"], at["loss"], at["embedding"] + kept if kept else 0)
        head_in_loss = loss_gathers_head(candidate)
        return Gathers(
            at=after_generation(at, candidate) if generates_here(candidate) else at,
            beside=beside,
            of_reference=before,
            generation=GenerationGather(at["embedding"], at["forward"], after, at["forward"]),
            weight_sync=policy_parameters(candidate).unquantized_tensors.largest * base_dtype_bytes(candidate),
            copied_gradients=copied_gradients_bytes(candidate),
            last_unit=whole_root_bytes(candidate),
            head_in_loss=head_in_loss,
            kept_head=kept_head_bytes(candidate) if head_in_loss else 0,
            left_head=left,
            scored=(at["embedding"] + left if left else at["forward"]) if generates_here(candidate) else 0,
            outside=left or outside_units(candidate),
        )

    def kept_by_graph(self, candidate: TrainingInput) -> int:
        """None: FSDP2 frees the storage of gathered weights even if the graph refers to them.

        Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param.py, `free_storage`.
        """
        return 0

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

    def step_temporaries(self, candidate: StateInput) -> int:
        """Copies of all shards at once with foreach optimizers, of the largest with others."""
        return sum(step_bytes(tensors, size, candidate.optim) for tensors, size in self.optimized(candidate))

    def split_blocks(self, candidate: TrainingInput, phase: Phase) -> int:
        """Bytes of the block that received the embedding, in `PASSES`: smaller buffers of later units split it.

        0 where `generate` runs in this process, which splits these blocks anyway.
        Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param_group.py (`all_gather_copy_in_stream`);
        c10/cuda/CUDACachingAllocator.cpp, `get_free_block` (the smallest free block of the stream);
        results/emulated.md.

        Example: Qwen2.5-7B with LoRA: 1.02 GiB (emulated, all slack together: 1.24 GiB).
        """
        if candidate.num_processes == 1 or phase not in PASSES or generates_here(candidate):
            return 0
        return candidate.model.embed_params * compute_weight_width(candidate)

    def buffers(self, candidate: StateInput) -> Buffers:
        return Buffers(kept=0, broadcast=0)

    def steps_on_host(self, candidate: StateInput) -> bool:
        """With `offload_param`: FSDP offloads parameters, gradients and optimizer together."""
        return candidate.offload_param

    def offloaded_states(self, candidate: StateInput) -> int:
        """Gradients on the host, pinned(shard) of each tensor.

        Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_collectives.py, `foreach_reduce`.
        """
        return sum(pinned_tensors_bytes(tensors, size) for tensors, size in self.optimized(candidate))

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

    def saving(self, candidate: StateInput, processes: int, policy_bytes: int, adapters_bytes: int) -> int:
        """The weights with their adapters, once.

        Source: accelerate 1.15, accelerator.py, `Accelerator.get_state_dict` (`cpu_offload=True`, which gives to rank
        0).
        """
        adapters = policy_parameters(candidate).adapter_params * adapter_dtype_bytes(candidate)
        return whole_policy_bytes(candidate, base_dtype_bytes(candidate)) + adapters

    def seconds(self, candidate: TrainingInput, traffic: Traffic) -> float:
        """Seconds that FSDP2 adds to the computation, from its schedule.

            forward    embedding and first layer gathered before; layer i + 1 beside layer i; no gather of the tail
            backward   layer i - 1 gathered, then layer i + 1 reduced, beside layer i; the embedding's gradient after
            copies     2 passes over gathered parameters and 16-bit gradients, on the computation's stream
            HSDP       the reduction adds 2 (r - 1) / r x gradients / network, of r copies of the model

        Gathers and reductions share one communicator and run in turn (pytorch/pytorch#186335). Without
        `sync_each_batch` gradients are reduced in the last micro-step only.

        Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param_group.py, `pre_forward`, `pre_backward`,
        `post_backward`; accelerate 1.15, utils/fsdp_utils.py, `fsdp2_prepare_model`: a unit for the embedding, one for
        each layer, one for norm and head.

        Example: 8B with LoRA, 2 x RTX-3090: 16.1e9 / 2 / 19.8e9 = 0.40 s per gather. A row of 256 tokens computes for
        0.10 s forward and 0.13 s backward; FSDP2 adds 0.69 s, DDP 2 ms.
        """
        shards, layers = candidate.shard_gpus, traffic.layers
        copies = candidate.num_processes // (shards * candidate.layer_gpus)
        link, copy = (shards - 1) / shards / traffic.shard_link, COPY_PASSES / traffic.memory
        stored_bytes, embedding_bytes = traffic.stored_bytes, traffic.embedding_bytes
        gradient_bytes, forwards = traffic.gradient_bytes, traffic.gathers - 1
        layer_bytes = max(0.0, stored_bytes - embedding_bytes)
        reduce = gradient_bytes * link + 2 * (copies - 1) / copies * gradient_bytes / traffic.link
        last = 0.0 if traffic.adapter_only else min(1.0, embedding_bytes / gradient_bytes) * reduce
        alone, beside = forwards * embedding_bytes * link, forwards * layer_bytes * link
        forward = exposed_seconds(alone, beside, traffic.forward, layers)
        both = forward + (forwards * stored_bytes + layer_bytes) * copy
        reducing = both + exposed_seconds(last, layer_bytes * link + reduce - last, traffic.backward, layers)
        reducing += gradient_bytes * copy
        if not candidate.keeps_whole_gradients:
            return candidate.gradient_accumulation_steps * reducing
        keeping = both + exposed_seconds(0.0, layer_bytes * link, traffic.backward, layers)
        return reducing + (candidate.gradient_accumulation_steps - 1) * keeping


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


def whole_while_filled_bytes(candidate: StateInput) -> int:
    """Bytes of whole weights on one GPU while the shards are filled from them.

        tied head    the head, and a shard of its own
        untied head  the larger of the head and a layer's largest tensor
        score head   a layer's largest tensor
        saved buffers, GPTQ, AWQ: see `moved_units_bytes`
        uint8 4-bit: all that is not quantized, since the model was loaded to the GPU, as k-bit preparation left it; or,
                     before that, without shards, as it was loaded or cast to float32, and the 16 bits of one tensor

    Source: accelerate 1.15, utils/fsdp_utils.py, `fsdp2_load_full_state_dict` (one tensor after another, in the order
    of the state dict, which names a tied head as well), `fsdp2_prepare_model` (`model_has_params4bit`).

    Leaves out experts.

    Example: Qwen2.5-7B with LoRA on 4 GPUs, a head of 544,997,376 parameters: 1.02 GiB.
    """
    counted, width = policy_parameters(candidate), base_dtype_bytes(candidate)
    if candidate.quantization_row.four_bit:
        kept = counted.unquantized_tensors
        prepared = prepared_bytes(candidate)
        if prepared is None:
            return tensor_bytes(kept, width)
        parts = [(TensorSet(kinds=(kind,)), prepared.of(kind.part)) for kind in kept.kinds]
        shards = sum(shards_bytes(tensors, size, candidate.shard_gpus) for tensors, size in parts)
        wide = bytes_while_prepared(candidate)
        before = tensor_bytes(kept, wide) + kept.largest * SIXTEEN_BIT_BYTES if wide else tensor_bytes(kept, width)
        return max(sum(tensor_bytes(*part) for part in parts), before - shards)
    if candidate.model.has_saved_buffers:
        return moved_units_bytes(candidate)
    model, layers = candidate.model, counted.base_tensors.only("linear").largest
    if candidate.method_row.head != "lm_head":
        return layers * width
    if model.tied:
        return (model.embed_params + -(-model.embed_params // candidate.shard_gpus)) * width
    return max(layers, model.lm_head_params) * width

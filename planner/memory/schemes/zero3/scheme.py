"""ZeRO-3: weights, gradients and optimizer states are divided, and a module's parameters gathered when it runs."""

from functools import lru_cache

from planner.cache_keys import StateInput, TrainingInput
from planner.memory.dtypes import DTYPE_BYTES, FLOAT32_BYTES, FLOAT64_BYTES, SIXTEEN_BIT_BYTES
from planner.memory.parameters.optimizer_states import pinned_tensors_bytes, step_bytes
from planner.memory.parameters.policy import frozen_tensors, loaded_models, policy_parameters
from planner.memory.parameters.quantized import (
    packed_tensors,
    scale_bytes,
    shards_4bit_weights,
    whole_policy_bytes,
    whole_quantized_bytes,
)
from planner.memory.parameters.tensors import EqualTensors, TensorSet, pinned_bytes, rounded_bytes, tensor_bytes
from planner.memory.parameters.trained import Group, learning_groups, policy_groups, trained_groups
from planner.memory.parameters.widths import (
    adapter_dtype_bytes,
    base_dtype_bytes,
    compute_weight_width,
    copied_dtype_bytes,
)
from planner.memory.schemes.contract import (
    NOTHING_GATHERED,
    PASSES,
    Buffers,
    FrozenGather,
    Gathers,
    Gradients,
    Masters,
    Scheme,
    Traffic,
    is_local,
)
from planner.memory.schemes.deepspeed import bucket_bytes, decay_groups, split_in_step_bytes
from planner.memory.schemes.zero3.gather import (
    checkpointing_of,
    concatenated_bytes,
    gathered_from_itself,
    generation_gathered,
    holds_all_parameters,
    in_graph_bytes,
    policy_gathered,
    reference_gathered,
    runs_within_policy,
    synced_bytes,
    teacher_head_bytes,
)
from planner.memory.schemes.zero3.storage import (
    persistence_threshold,
    persistent_bytes,
    shard_elements,
    shards_above,
    shards_bytes,
    whole_while_created_bytes,
)
from planner.quantities import Phase

NORM_ELEMENTS = 250_000_000  # deepspeed 0.19.8, zero/stage3.py, `_constant_buffered_norm2`


class Zero3(Scheme):
    """DeepSpeed's stage 3."""

    def stored(self, tensors: TensorSet, bytes_per_param: int, candidate: StateInput, *, trained: bool) -> int:
        """ceil(n / G) elements of each tensor, and a full copy of small ones (`persistence_threshold`).

        With `offload_param` the full copies alone. Trained tensors share one buffer; any other tensor has its own
        allocation.

        Source: deepspeed 0.19.8, runtime/zero/partition_parameters.py `_partition_param`, stage3.py,
        `DeepSpeedZeroOptimizer_Stage3._create_fp16_partitions_with_defragmentation` (`defragment`) and
        parameter_offload.py, `DeepSpeedZeRoOffload.mark_persistent_parameters` (`ds_persist`).
        tests/test_sharded_runs.py compares the bytes with two real processes; they are equal to the byte.

        Leaves out that the last ranks' shards can be smaller: this is rank 0.
        """
        persistent = persistent_bytes(tensors, bytes_per_param, persistence_threshold(candidate))
        if candidate.offload_param:
            return persistent
        return persistent + shards_bytes(tensors, bytes_per_param, candidate.num_processes, trained)

    def stored_quantized(self, candidate: StateInput) -> int:
        """4-bit weights: ceil(n / G) numbers of the storage dtype, whole copies of small ones, and all scales.

        With `offload_param` no pieces. Other quantized weights are whole on every GPU.

        Source: deepspeed 0.19.8, zero/partition_parameters.py, `Init._convert_to_zero_parameters` (4-bit weights are
        sharded as every parameter, without their scales).
        """
        if not shards_4bit_weights(candidate):
            return whole_quantized_bytes(candidate)
        width, found = DTYPE_BYTES[candidate.bnb_4bit_quant_storage], scale_bytes(candidate)
        for kind in packed_tensors(candidate).kinds:
            piece = 0
            if not candidate.offload_param:
                piece = rounded_bytes(-(-kind.elements // candidate.shard_gpus) * width)
            if kind.elements <= persistence_threshold(candidate):
                piece += rounded_bytes(kind.elements * width)
            found += piece * kind.count
        return found

    def unsharded_while_loading(self, candidate: StateInput, policy_bytes: int) -> int:
        """The head while it is created; with 4-bit weights the whole model.

            4-bit  whole quantized policy - its shard + all adapters and copied modules
                   + the embedding's shard, unless it is offloaded

        With 4-bit weights every process loads the whole quantized model to its GPU (trl 1.16, trainer/sft_trainer.py,
        `SFTTrainer.__init__`; transformers 5.23, quantizers/quantizer_bnb_4bit.py, `update_device_map`). DeepSpeed
        partitions the model after it has its adapters, and makes each parameter's shard before it frees the parameter,
        beginning with the embedding (deepspeed 0.19.8, zero/partition_parameters.py, `_convert_to_zero_parameters`,
        `_partition_param`).
        """
        if not shards_4bit_weights(candidate):
            return whole_while_created_bytes(candidate)
        if candidate.num_processes == 1:
            return 0
        counted, width = policy_parameters(candidate), DTYPE_BYTES[candidate.dtype]
        adapters = tensor_bytes(counted.adapter_tensors, adapter_dtype_bytes(candidate))
        copies = tensor_bytes(counted.copied_tensors, copied_dtype_bytes(candidate))
        first = 0 if candidate.offload_param else -(-candidate.model.embed_params // candidate.shard_gpus) * width
        return whole_policy_bytes(candidate, width) - policy_bytes + adapters + copies + first

    def optimized(self, candidate: StateInput) -> tuple[Group, ...]:
        """Flat float32 pieces of the shards, one for each optimizer group.

        A flat buffer has one dimension, so that a factored optimizer keeps its full state for it.

        Leaves out that a group is split into sub-groups (`sub_group_size`), which changes only the rounding.
        """
        processes = candidate.num_processes
        return tuple((flat_shards(tensors, processes), FLOAT32_BYTES) for tensors, _ in learning_groups(candidate))

    def masters(self, candidate: StateInput) -> Masters:
        """4 x ceil(params / G) from the start of training; of one sub-group once more.

        The weights are cast and cloned; then the first gradients are zeros of the same size.

        Source: deepspeed 0.19.8, zero/stage3.py, `_create_fp32_partitions`, `initialize_optimizer_states`;
        results/zero3_streams.md.
        """
        if candidate.offload_optimizer:
            return Masters(0, 0)
        groups = self.optimized(candidate)
        kept = sum(tensor_bytes(tensors, FLOAT32_BYTES) for tensors, _ in groups)
        largest = max((min(candidate.sub_group_size, tensors.params) for tensors, _ in groups), default=0)
        return Masters(kept, largest * FLOAT32_BYTES)

    def gathered(self, candidate: StateInput) -> Gathers:
        """Bytes that DeepSpeed's coordinator gathers, and in the backward pass also the gradients of one bucket.

        While a reference or teacher runs: the parameters that the policy keeps after its forward pass, and those of the
        frozen model's own modules. The policy's tail stays gathered until it is needed again. Distillation's teacher
        runs inside the policy's outermost module, which holds the head that the teacher's pass reads.
        Source: trl 1.16, trainer/distillation_trainer.py, `compute_loss` (`_forward_redirection`).
        """
        if holds_all_parameters(candidate):
            return gathered_from_itself(candidate)
        policy, reduced = policy_gathered(candidate), concatenated_bytes(candidate)
        at = {moment: policy.at.get(moment, 0) for moment in NOTHING_GATHERED.at}
        at["head_backward"] += reduced
        at["backward"] += reduced
        alone = reference_gathered(candidate)
        kept = policy.inside if runs_within_policy(candidate) else policy.kept
        return Gathers(
            at=at,
            in_backward=tuple(size + reduced for size in policy.in_backward),
            computing=tuple(size + reduced for size in policy.computing),
            beside=FrozenGather(*(kept + each for each in alone)),
            of_reference=alone,
            generation=generation_gathered(candidate, at["forward"]),
            weight_sync=synced_bytes(candidate),
            teacher_head=teacher_head_bytes(candidate),
        )

    def kept_by_graph(self, candidate: TrainingInput) -> int:
        """Bytes of gathered weights that a micro-step's graph keeps after DeepSpeed has released them.

            4 bits   bitsandbytes' product keeps the weight as an attribute of its `ctx` until the loss is dropped: in
                     every layer but those with a reentrant checkpoint, whose forward pass builds no graph
            Falcon   `FalconLinear` multiplies by `weight.T`: autograd saves that view in layers without a checkpoint.
                     DeepSpeed replaces only `F.linear`, by a function that saves the sharded parameter instead
            experts  multiply by `weight.transpose`, as Falcon does

        Weights that DeepSpeed itself keeps for the backward pass are not counted here.
        Source: bitsandbytes 0.50.2, autograd/_functions.py, `MatMul4Bit.forward` (`ctx.tensors`); transformers 5.23,
        models/falcon/modeling_falcon.py, integrations/moe.py (`_grouped_linear`); deepspeed 0.19.8, zero/linear.py,
        `LinearFunctionForZeroStage3`.

        Example: Qwen2.5-7B without checkpoints: 3.04 GiB packed, of which DeepSpeed keeps 0.42 itself: 2.62 count here.
        falcon-7b with LoRA without checkpoints on two GPUs: 11.0 of 12.3 GiB. OLMoE-1B-7B, in full or with LoRA on
        attention alone: 10.5 GiB of experts, since DeepSpeed keeps two of 16 layers itself.

        Leaves out that the first layer's input may need no gradient. Treats all layers alike, even if only some of them
        have checkpoints or experts.
        """
        viewed, attributes = in_graph_bytes(candidate)
        every = viewed + attributes
        if holds_all_parameters(candidate) or not every:
            return 0
        layers = candidate.model.num_layers
        apart = candidate.checkpoint_every_n_layers if candidate.gradient_checkpointing else 0
        plain = sum(1 for number in range(layers) if not apart or number % apart)
        of_attributes = layers if checkpointing_of(candidate) == "other" else plain
        held = viewed * plain + attributes * of_attributes
        return held * (every - policy_gathered(candidate).in_graph) // (every * max(layers, 1))

    def gradients(self, candidate: StateInput) -> Gradients:
        """Sum of ceil(n / G) over tensors, in one buffer on the GPU; none with an offloaded optimizer.

        An offloaded optimizer has its gradients on the host. Before a gradient is copied there, DeepSpeed computes its
        norm from a float64 copy. The largest is that of the GPU's shard of the embedding's gradient, with a copy of the
        shard in its own dtype; in a layer that of its largest tensor, beside gradients that wait.
        Source: deepspeed 0.19.8, zero/stage3.py, `DeepSpeedZeroOptimizer_Stage3._setup_for_real_optimizer`,
        `partition_grads` (`grad_buffer.to`), `_constant_buffered_norm2`; zero/utils.py, `get_norm_dtype`.

        Example: an embedding of 51.5 million parameters in 16 bits on two GPUs: 246 MiB for the norm. Qwen1.5-MoE-A2.7B
        on four, 60 experts of 2 x 1,408 x 2,048: 660 MiB for the norm, and 165 for the shard
        (results/emulated_starts.md, seed 9, number 65).
        """
        if not candidate.offload_optimizer:
            shards = sum(
                rounded_bytes(shard_elements(tensors, candidate.shard_gpus) * size)
                for tensors, size in learning_groups(candidate)
            )
            return Gradients(after_backward=shards, accumulated=shards, at_step=shards, norm_of_offloaded=0)
        norms = {True: 0, False: 0}
        for tensors, width in trained_groups(candidate):
            for kind in tensors.kinds:
                elements, embedding = kind.elements // candidate.shard_gpus, kind.part == "embedding"
                norm = FLOAT64_BYTES * min(elements, NORM_ELEMENTS) + width * elements
                norms[embedding] = max(norms[embedding], norm)
        return Gradients(
            after_backward=0, accumulated=0, at_step=0, norm_of_offloaded=norms[True], norm_in_layers=norms[False]
        )

    def step_temporaries(self, candidate: StateInput) -> int:
        """Float32 gradients of one sub-group, 4 x min(1e9, params / G), and the larger of two others beside them.

        These are the flattened 16-bit gradients, 2 x the same, and later the copies that the optimizer makes.

        Source: the rows of OPTIMIZERS; deepspeed 0.19.8, zero/stage3.py, `_prepare_sub_group` and `_optimizer_step`
        (one step for each sub-group).
        """
        found = 0
        for tensors, size in self.optimized(candidate):
            elements = min(candidate.sub_group_size, tensors.params)
            flat = SIXTEEN_BIT_BYTES * elements if candidate.precision != "no" else 0
            found += max(step_bytes(_flat(elements), size, candidate.optim), flat) + elements * FLOAT32_BYTES
        return found

    def split_blocks(self, candidate: TrainingInput, phase: Phase) -> int:
        """Bytes of the gathered embeddings of policy and reference in `PASSES`; elsewhere `split_in_step_bytes`.

        The embedding is received in a large block. When it is freed, the next modules' buffers, allocated on the same
        stream, split it. Not counted if `generate` gathers the whole model, nor in the backward pass in full, at whose
        end the embedding is gathered again for its gradient (results/zero3_streams.md).
        """
        if candidate.num_processes == 1:
            return 0
        whole = phase == "rollout" and (candidate.ds3_gather_for_generation or candidate.vllm != "off")
        again = phase == "backward" and candidate.tuning == "full"
        if phase in PASSES and not whole:
            width = compute_weight_width(candidate)
            return 0 if again else candidate.model.embed_params * width * (1 + candidate.separate_reference)
        return split_in_step_bytes(self.optimized(candidate), candidate, phase)

    def buffers(self, candidate: StateInput) -> Buffers:
        """One bucket of `reduce_bucket_size` elements (auto: hidden_size^2).

        Source: deepspeed 0.19.8, zero/stage3.py, `DeepSpeedZeroOptimizer_Stage3._setup_for_real_optimizer`.
        """
        return Buffers(kept=0 if is_local(candidate) else bucket_bytes(candidate), broadcast=0)

    def steps_on_host(self, candidate: StateInput) -> bool:
        return candidate.offload_optimizer

    def offloaded_states(self, candidate: StateInput) -> int:
        """With n = params / G of each optimizer group (see `pinned_bytes`), on the host:

            master weights 4 n; gradients pinned(4 n), a sub-group at a time; 16-bit ones, pinned(2 n)

        Source: deepspeed 0.19.8, zero/stage3.py, `DeepSpeedZeroOptimizer_Stage3._setup_for_real_optimizer`,
        `_create_fp32_partitions` and `initialize_optimizer_states`.
        """
        flat = [kind.elements for tensors, _ in self.optimized(candidate) for kind in tensors.kinds]
        half = SIXTEEN_BIT_BYTES if candidate.precision != "no" else FLOAT32_BYTES
        pieces = (_in_sub_groups(elements, candidate.sub_group_size) for elements in flat)
        return FLOAT32_BYTES * sum(flat) + sum(pieces) + pinned_bytes(half * sum(flat))

    def offloaded_parameters(self, candidate: StateInput) -> int:
        """Pinned(ceil(n / G) x dtype) of each tensor of every model, and once more a pinned buffer of the trained ones.

        The second copy is a flat buffer for each optimizer group; the freed first copies stay in torch's cache of
        page-locked memory.
        Source: deepspeed 0.19.8, zero/partition_parameters.py, `Init._partition_param`, stage3.py,
        `DeepSpeedZeroOptimizer_Stage3._create_param_groups_fp16_flat_cpu_memory` and
        `_create_fp16_partitions_with_defragmentation`. `pinned_bytes` rounds up to powers of two.

        Example: Llama-3.1-70B in 16 bits with LoRA on one GPU: 149 GiB, of 131 GiB of weights.
        """
        if not candidate.offload_param:
            return 0
        threshold, size = persistence_threshold(candidate), base_dtype_bytes(candidate)
        others = [frozen_tensors(model) for model in loaded_models(candidate)[1:]]
        offloaded = [*policy_groups(candidate), *((tensors, size) for tensors in others)]
        if shards_4bit_weights(candidate):
            offloaded.append((packed_tensors(candidate), DTYPE_BYTES[candidate.bnb_4bit_quant_storage]))
        found = sum(
            pinned_tensors_bytes(shards_above(tensors, candidate.shard_gpus, threshold), width)
            for tensors, width in offloaded
        )
        return found + sum(pinned_tensors_bytes(flat, size) for flat, _ in self.optimized(candidate))

    def saving(self, candidate: StateInput, processes: int, policy_bytes: int, adapters_bytes: int) -> int:
        """The trained weights in 16 bits.

        Source: transformers 5.23, trainer.py, `Trainer.save_model` (no adapters' base); deepspeed 0.19.8,
        runtime/engine.py, `DeepSpeedEngine._zero3_consolidated_16bit_state_dict` (rank 0).
        """
        counted = policy_parameters(candidate)
        if candidate.tuning == "lora":
            return counted.trainable * SIXTEEN_BIT_BYTES
        return counted.base * base_dtype_bytes(candidate)

    def seconds(self, candidate: TrainingInput, traffic: Traffic) -> float:
        """Accumulation x (n - 1) / n x (gathers x stored + gradients) / link.

        Counted without overlap: LoRA on Qwen-72B with 4 x A100-80G takes 2.20 s for 256 tokens, which is the sum of its
        gathers (1.6 s) and its matrix products, not the larger of the two (QwenLM/Qwen, README.md).

        Example: that: 3 x 144e9 x 3/4 / 207e9 = 1.57 s per micro-step.
        """
        shards = candidate.shard_gpus
        moved = traffic.gathers * traffic.stored_bytes + traffic.gradient_bytes
        return candidate.gradient_accumulation_steps * ((shards - 1) / shards * moved / traffic.shard_link)


def _in_sub_groups(elements: int, sub_group_size: int) -> int:
    """Bytes of float32 gradients in page-locked buffers of ZeRO-3's sub-groups."""
    full, rest = divmod(elements, sub_group_size)
    return full * pinned_bytes(FLOAT32_BYTES * sub_group_size) + pinned_bytes(FLOAT32_BYTES * rest)


@lru_cache(maxsize=4096)
def _flat(elements: int) -> TensorSet:
    """One flat tensor: a sub-group of the partition, in one call of the optimizer's `step`."""
    return TensorSet(kinds=(EqualTensors(part="other", shape=(elements,)),))


@lru_cache(maxsize=4096)
def flat_shards(tensors: TensorSet, num_processes: int) -> TensorSet:
    """Return one flat tensor per optimizer group: one rank's shards of the group's tensors."""
    pieces = (shard_elements(group, num_processes) for group in decay_groups(tensors))
    return TensorSet(kinds=tuple(EqualTensors(part="other", shape=(piece,)) for piece in pieces))

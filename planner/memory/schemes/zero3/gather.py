"""Bytes that ZeRO-3 gathers in the passes of a candidate's policy, and of its reference model or teacher."""

from msgspec.structs import replace

from planner.cache_keys import StateInput
from planner.memory.dtypes import DTYPE_BYTES
from planner.memory.parameters.policy import converted_parts, policy_parameters
from planner.memory.parameters.quantized import shards_4bit_weights
from planner.memory.parameters.trained import trained_groups, value_parameters
from planner.memory.parameters.widths import (
    adapter_dtype_bytes,
    base_dtype_bytes,
    compute_weight_width,
    other_dtype_bytes,
    teacher_dtype_bytes,
)
from planner.memory.schemes.contract import NOTHING_GATHERED, FrozenGather, Gathers, GenerationGather
from planner.memory.schemes.deepspeed import reduce_bucket_elements, reduced_copy_width
from planner.memory.schemes.zero3.coordinator import Limits
from planner.memory.schemes.zero3.modules import Adapters, HeadUse, Stored, Tree, module_tree
from planner.memory.schemes.zero3.passes import (
    Backward,
    Checkpointing,
    Gathered,
    forward_alone,
    gathered_by_moment,
    without_adapters,
)
from planner.memory.schemes.zero3.storage import (
    EARLIER_PERSISTENCE,
    EARLIER_PREFETCH,
    gathered_bytes,
    persistence_threshold,
    prefetch_elements,
)
from planner.methods import LINEAR_HEAD


def policy_gathered(candidate: StateInput) -> Gathered:
    """Most bytes of the policy's gathered parameters on one GPU at each moment of a training step.

    TRL's losses read the head's weight outside its module, so that it stays gathered from the start of the forward pass
    to the end of the backward pass. Modules are prefetched, and kept for their next use, if every step makes the same
    calls (`Candidate.repeated_calls`).

    Example: Qwen2.5-7B with LoRA, in bfloat16: 1.91 GiB at the loss, 3.48 GiB at the first layer's backward pass (head,
    one layer, and the embedding twice). Qwen2.5-14B: 1.94 and 2.10 GiB, since its head alone takes most of
    `stage3_max_live_parameters`.

    Leaves out DeepSpeed's padding, small whole tensors in the reuse distance, and releases of TRL before 1.15, whose
    losses ran the head as a module.
    """
    backward = Backward(
        checkpointing=checkpointing_of(candidate),
        reaches_embedding=candidate.tuning == "full" or candidate.gradient_checkpointing,
        counted=not (candidate.refers_without_adapters and candidate.method_row.reference_in_loss),
    )
    earlier = earlier_limits(candidate) if candidate.precomputes else None
    row, full = candidate.method_row, candidate.tuning == "full"
    sampled = full and row.generates and candidate.vllm == "off" and not candidate.ds3_gather_for_generation
    return gathered_by_moment(
        policy_tree(candidate), limits_of(candidate), backward, candidate.repeated_calls, earlier, sampled
    )


def decoding_gathered(candidate: StateInput) -> tuple[int, int]:
    """Most bytes of gathered parameters while `generate` runs without `ds3_gather_for_generation`: (prompt, later).

    `prompt`: at the embedding and in the layers of the prompt, without a trace; the caller adds the prefetching of a
    traced step. `later`: at the head of the prompt and with later tokens. In full fine-tuning each token is a call of
    the outermost module, where a trace begins, so that DeepSpeed prefetches by the trace of one token. With adapters
    `generate` calls the base model inside that module, and nothing is traced.
    """
    tree, limits = policy_tree(candidate, head="module"), limits_of(candidate)
    prompt = forward_alone(tree, limits, traced=False)
    later = forward_alone(tree, limits, traced=candidate.tuning == "full")
    return max(prompt["embedding"], prompt["forward"]), max(prompt["loss"], *later.values())


def reference_gathered(candidate: StateInput) -> FrozenGather:
    """Most bytes of parameters gathered for a reference or teacher: the policy without its adapters, or another model.

    Another model has its own DeepSpeed engine, and so its own trace (`earlier_limits`).

    Example: a teacher of 1.1 billion parameters gathers 10^9 of them, 1.86 GiB in 16 bits.
    """
    if candidate.refers_without_adapters:
        return without_adapters(policy_tree(candidate), limits_of(candidate), traced=follows_policy(candidate))
    model, param_bytes = candidate.teacher_model, teacher_dtype_bytes(candidate)
    if candidate.separate_reference:
        model, param_bytes = candidate.model, base_dtype_bytes(candidate)
    if model is None:
        return FrozenGather(0, 0, 0)
    given = candidate.stage3_param_persistence_threshold
    whole = Stored(param_bytes=param_bytes, persistence_threshold=EARLIER_PERSISTENCE if given == "auto" else given)
    # a teacher that runs inside the policy calls only its decoder
    head: HeadUse = "score" if runs_within_policy(candidate) else head_use(candidate)
    alone = forward_alone(module_tree(model, head, whole, None), earlier_limits(candidate))
    return FrozenGather(alone["embedding"], alone["forward"], alone["loss"])


def follows_policy(candidate: StateInput) -> bool:
    """Return whether DeepSpeed has a trace when the reference runs: of the policy's previous pass, or of the last step.

    With a trace it prefetches parameters. Without a previous pass there is no trace if `ds3_gather_for_generation`
    dropped that of the last step (`Candidate.repeated_calls`).
    """
    row = candidate.method_row
    scored = row.reference_in_loss or row.sampling_forwards > 0 or candidate.rescores_samples
    return scored or candidate.vllm != "off" or not candidate.ds3_gather_for_generation


def runs_within_policy(candidate: StateInput) -> bool:
    """Return whether the loss runs a teacher's decoder inside the policy's outermost module and applies both heads.

    Source: trl 1.16, trainer/distillation_trainer.py, `compute_loss` (`_forward_redirection`).
    """
    return candidate.method_row.loss == "divergence"


def in_graph_bytes(candidate: StateInput) -> tuple[int, int]:
    """Bytes of the policy's gathered weights that a graph without checkpoints keeps: (as views, as attributes)."""
    modules = policy_tree(candidate).modules
    found = [sum(modules.size_bytes[param] for param in each) for each in (modules.viewed, modules.attributes)]
    return found[0], found[1]


def policy_tree(candidate: StateInput, head: HeadUse | None = None) -> Tree:
    """Return the module tree of the policy; `head`: how the head is used, None: as in training."""
    adapters = None
    if candidate.tuning == "lora":
        adapters = Adapters(
            rank=candidate.lora_r,
            targets=candidate.lora_target_modules,
            named=candidate.lora_target_parameters,
            param_bytes=adapter_dtype_bytes(candidate),
        )
    return module_tree(candidate.model, head or head_use(candidate), stored(candidate), adapters)


def head_use(candidate: StateInput) -> HeadUse:
    """Return how the method's loss uses the head: as a module, by its weight, or as a score head."""
    row = candidate.method_row
    if row.head == "score":
        return "score"
    return "module" if row.loss in LINEAR_HEAD else "weight"


def stored(candidate: StateInput) -> Stored:
    """Return the storage of the policy's base parameters under ZeRO-3."""
    return Stored(
        param_bytes=base_dtype_bytes(candidate),
        persistence_threshold=persistence_threshold(candidate),
        quantized=converted_parts(candidate.model, candidate.quantization),
        packed_bytes=DTYPE_BYTES[candidate.bnb_4bit_quant_storage] if shards_4bit_weights(candidate) else 0,
        viewed=candidate.model.architecture.subclassed_linears,
        gathered_block=candidate.model.architecture.gathered_block,
    )


def limits_of(candidate: StateInput) -> Limits:
    """Return DeepSpeed's limits on prefetch and reuse (`stage3_*`) for the candidate."""
    return Limits(
        prefetch_bucket_size=prefetch_elements(candidate),
        max_reuse_distance=candidate.stage3_max_reuse_distance,
        max_live_parameters=candidate.stage3_max_live_parameters,
    )


def earlier_limits(candidate: StateInput) -> Limits:
    """Return the limits of an engine that TRL builds before Transformers fills in what is "auto".

    DeepSpeed's defaults hold, which prefetch far ahead. Source: trl 1.16, models/utils.py, `prepare_deepspeed` (its own
    sizes are keys that nobody reads); deepspeed 0.19.8, runtime/config_utils.py, `DeepSpeedConfigModel.__init__`;
    transformers 5.23, integrations/deepspeed.py, `trainer_config_finalize`.
    """
    given = candidate.stage3_prefetch_bucket_size
    return replace(limits_of(candidate), prefetch_bucket_size=EARLIER_PREFETCH if given == "auto" else given)


def checkpointing_of(candidate: StateInput) -> Checkpointing:
    """Return the kind of gradient checkpointing."""
    if not candidate.gradient_checkpointing:
        return "none"
    return "reentrant" if candidate.reentrant else "other"


def concatenated_bytes(candidate: StateInput) -> int:
    """Bytes of the copy of one bucket's gradients, which `reduce_scatter_coalesced` concatenates.

    A gradient larger than the bucket is reduced alone and not copied. Those that are reduced in float32 are cast first.
    Example: Ulysses with DeepSpeed's own bucket of 5e8 elements: 3.7 GiB.
    """
    trained = sum(tensors.params for tensors, _ in trained_groups(candidate))
    width = 2 * reduced_copy_width(candidate) or compute_weight_width(candidate)
    return min(reduce_bucket_elements(candidate), trained) * width


def teacher_head_bytes(candidate: StateInput) -> int:
    """Bytes of a teacher's head that a chunked loss gathers in each pass; 0 for other losses.

    Source: trl 1.16, kernels/chunked_divergence.py, `ChunkedDivergenceFunction` (`maybe_gather_lm_head_ctx`).
    """
    teacher = candidate.teacher_model
    if teacher is None or not runs_within_policy(candidate):
        return 0
    return (teacher.lm_head_params or teacher.embed_params) * teacher_dtype_bytes(candidate)


def holds_all_parameters(candidate: StateInput) -> bool:
    """Return whether one process holds all parameters on its GPU: there is only one shard."""
    return candidate.num_processes == 1 and not candidate.offload_param


def gathered_from_itself(candidate: StateInput) -> Gathers:
    """Bytes gathered by a single process that holds all parameters on its GPU: its modules use them without a copy.

    `GatheredParameters` still copies the whole model for `generate` (`ds3_gather_for_generation`). A loss that reads
    the head's weight copies it in the first step, when DeepSpeed has not yet assigned the weight to a module.
    Source: deepspeed 0.19.8, zero/partition_parameters.py, `NoGatherHandle`, `_allgather_params_sequential`.

    Example: Qwen2.5-0.5B, offload_optimizer, 1,024 tokens: 1.01 GiB in the forward pass, of which 0.92 are weights.
    """
    reduced = concatenated_bytes(candidate) if candidate.offload_optimizer else 0
    whole = whole_model_bytes(candidate) if candidate.ds3_gather_for_generation else 0
    model, read = candidate.model, head_use(candidate) == "weight"
    return replace(
        NOTHING_GATHERED,
        at={**NOTHING_GATHERED.at, "head_backward": reduced, "backward": reduced},
        generation=GenerationGather(whole, whole, whole, whole),
        weight_sync=synced_bytes(candidate),
        teacher_head=teacher_head_bytes(candidate),
        first_loss=(model.lm_head_params or model.embed_params) * base_dtype_bytes(candidate) if read else 0,
    )


def generation_gathered(candidate: StateInput, forward: int) -> GenerationGather:
    """Bytes gathered while `generate` runs; `forward`: those of a forward pass of a training step.

        with ds3_gather_for_generation: the whole model, and PPO's value model, a part of the same module
        without: modules one by one; in full ahead, by the trace of the last step or token (`decoding_gathered`)

    Source: trl 1.16, models/utils.py, `unwrap_model_for_generation`; trl 1.12, experimental/ppo/ppo_trainer.py,
    `PPOTrainer.train` (unwraps the `PolicyAndValueWrapper`).
    Example: Qwen2.5-32B in bfloat16 with ds3_gather_for_generation: 65.5 GB on every GPU, however many there are.
    """
    if candidate.ds3_gather_for_generation:
        whole = whole_model_bytes(candidate)
        if candidate.method_row.value_model:
            value = value_parameters(candidate).base_tensors
            whole += gathered_bytes(value, other_dtype_bytes(candidate), persistence_threshold(candidate))
        return GenerationGather(whole, whole, whole, whole)
    one_by_one, ahead = decoding_gathered(candidate)
    traced = candidate.tuning == "full" and candidate.repeated_calls == "step"
    return GenerationGather(0, max(one_by_one, forward) if traced else one_by_one, ahead, ahead)


def synced_bytes(candidate: StateInput) -> int:
    """Bytes gathered to send the weights to vLLM: the largest tensor; with adapters the whole model.

    Source: trl 1.16, generation/vllm_generation.py, `VLLMGeneration._iter_named_params` (PEFT gathers all parameters at
    once, then `merge_adapter`).
    """
    if candidate.tuning == "lora":
        return whole_model_bytes(candidate)
    return policy_parameters(candidate).largest_params * base_dtype_bytes(candidate)


def whole_model_bytes(candidate: StateInput) -> int:
    """Bytes of all parameters of the policy, gathered at once."""
    counted, threshold = policy_parameters(candidate), persistence_threshold(candidate)
    whole = gathered_bytes(counted.unquantized_tensors, base_dtype_bytes(candidate), threshold)
    if shards_4bit_weights(candidate):
        whole += counted.quantized_params // 2
    if candidate.tuning == "full":
        return whole
    return whole + gathered_bytes(counted.adapter_tensors, adapter_dtype_bytes(candidate), threshold)

"""Communication: buckets for reducing gradients, parameters gathered for a layer or the whole model, NCCL's buffers."""

from functools import lru_cache
from typing import Literal, NamedTuple

from planner.cache_keys import StateInput, TrainingInput
from planner.candidate import BITSANDBYTES, DTYPE_BYTES, Quantization
from planner.memory.gathering.passes import GatherMoment
from planner.memory.gathering.zero3 import (
    Widths,
    checkpointing_of,
    decoding_gathered,
    packed_bytes,
    policy_gathered,
    reference_gathered,
    runs_within_policy,
)
from planner.memory.parameters.broadcast import SentTensor, largest_buckets_bytes
from planner.memory.parameters.copied_modules import copied_tensors, copies_head
from planner.memory.parameters.lora import AdaptersKey, adapters_key, lora_in_order, targets_experts
from planner.memory.parameters.policy import QUANTIZED_PARTS, Parameters, frozen_tensors, policy_parameters
from planner.memory.parameters.quantized import quantized_tensor_sizes, shards_4bit_weights, whole_policy_bytes
from planner.memory.parameters.tensors import EqualTensors, tensors_in_order
from planner.memory.parameters.trained import trained_groups, value_parameters
from planner.memory.parameters.widths import (
    adapter_dtype_bytes,
    base_dtype_bytes,
    compute_weight_width,
    copied_dtype_bytes,
    other_dtype_bytes,
    teacher_dtype_bytes,
)
from planner.memory.schemes.deepspeed import reduce_bucket_elements
from planner.memory.schemes.zero import accumulates_in_float32
from planner.memory.schemes.zero3.storage import gathered_bytes
from planner.methods import Head
from planner.models.shape import ModelShape
from planner.units import MIB

SIXTEEN_BIT_BYTES = 2
FLOAT32_BYTES = 4

# Float32 copies of a layer's attention output while context parallel merges two blocks: the sum so far, the new block,
# their difference and its product with the weight.
# Source: torch 2.13, distributed/tensor/experimental/_context_parallel/_attention.py, `_SDPAMerger._merge_one`.
MERGED_OUTPUTS = 4
# Float32 copies of the gradients of keys and values: the sum, the sum side by side to be sent, and the received one.
# Source: the same file, `_templated_ring_attention_backward`.
RING_GRADIENTS = 3

# Device memory of one NCCL communicator with its channels, within one node and across nodes, where every network
# interface has buffers of its own. It grows with channels and peers (NVIDIA/nccl#986, #818).
# Source: results/allocator_slack.md, medians of four rows and of one row. Not measured by us.
NCCL_BYTES = {"one node": 434 * MIB, "several nodes": 1598 * MIB}

# FSDP2 holds the layer that computes and the next, already received one.
# Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param_group.py.
GATHERED_LAYERS = 2
# Copies of the largest merged weight: B @ A, and its product with the scaling; on a 4-bit base also the dequantized
# weight and the sum. Source: peft 0.21.2, tuners/lora/layer.py, `get_delta_weight`; tuners/lora/bnb.py,
# `Linear4bit.merge`.
MERGE_COPIES = 2
MERGE_COPIES_4BIT = 2
# Buffers in which weights are sent to a vLLM server, and their bytes. Source: vllm 0.31,
# distributed/weight_transfer/packed_tensor.py, DEFAULT_PACKED_NUM_BUFFERS and DEFAULT_PACKED_BUFFER_SIZE_BYTES.
PACKED_BUFFERS = 2
PACKED_BUFFER_BYTES = 1024 * MIB


def is_local(candidate: StateInput) -> bool:
    """Return whether one process holds all parameters and states on its own GPU: no peers, no offloading."""
    return candidate.num_processes == 1 and not (candidate.offload_optimizer or candidate.offload_param)


def communication_bytes(candidate: StateInput) -> int:
    """Bytes that one GPU keeps for communication from the first step to the last: NCCL's buffers with peers, and

        DDP                                         a second copy of all gradients (its buckets)
        ZeRO-3                                      one bucket of `reduce_bucket_size` elements (auto: hidden_size^2)
        ZeRO-1, ZeRO-2 with an offloaded optimizer  the largest trained tensor

    Source: torch 2.13, nn/parallel/distributed.py (gradient_as_bucket_view False, which neither accelerate nor Trainer
    change); deepspeed 0.19.8, zero/stage3.py, `DeepSpeedZeroOptimizer_Stage3._setup_for_real_optimizer`,
    stage_1_and_2.py, `DeepSpeedZeroOptimizer.__init__`.

    Example: Qwen2.5-7B in full on two GPUs, DDP: 30.46 GB for the buckets.
    """
    found = nccl_bytes(candidate)
    if is_local(candidate):
        return found
    trained = trained_groups(candidate)
    if candidate.sharding == "ddp":
        found += sum(tensors.params * size for tensors, size in trained)
    elif candidate.sharding == "zero3":
        found += _bucket_bytes(candidate)
    elif candidate.scheme_row.stage and candidate.offload_optimizer:
        found += max(tensors.largest * size for tensors, size in trained)
    return found


def nccl_bytes(candidate: StateInput) -> int:
    """Bytes of NCCL's communicators on one GPU.

        training on several GPUs         1: the default group, in which trainers gather their metrics
        ZeRO-1, ZeRO-2                   1 more: DeepSpeed's own group, for reductions
        ZeRO-3, quantized base or fp16   1 more: the same group; the base is loaded whole and broadcast in it, and
                                         overflows of fp16 are looked for in it
        rank 0, with a vLLM server       1 more: to the server

    Source: deepspeed 0.19.8, utils/groups.py, `_clone_world_group`, runtime/engine.py, `_broadcast_model`,
    zero/stage3.py, `has_overflow`; deepspeedai/DeepSpeed#7680 ("wastes probably 0.5GB per gpu"); counted on
    emulated GPUs (10 jobs of SFT, DPO and GRPO under DDP, ZeRO-2, ZeRO-3 and FSDP2; fp16 was not run).

    Leaves out the groups of Ulysses and of hybrid sharding.
    """
    size = NCCL_BYTES["one node" if candidate.num_nodes == 1 else "several nodes"]
    with_peers = candidate.num_processes > 1
    reads_group = candidate.quantization != "none" or candidate.precision == "fp16"
    own_group = candidate.sharding in ("zero1", "zero2") or (candidate.sharding == "zero3" and reads_group)
    return size * (with_peers * (1 + own_group) + (candidate.vllm == "server"))


def parameter_broadcast_bytes(candidate: StateInput) -> int:
    """Bytes on one GPU while DDP broadcasts the model, more than its buckets for gradients, which come afterwards.

        bytes = `largest_buckets_bytes` of all tensors, frozen ones included - trained parameters x dtype, at least 0

    Example: Qwen2.5-0.5B with LoRA in bfloat16 on two GPUs: 0.42 GiB of buckets, 0.03 of gradients.

    Leaves out buffers, the scales of quantized weights, and PPO's value model.
    """
    if candidate.sharding != "ddp" or candidate.num_processes == 1:
        return 0
    head = candidate.method_row.head
    lora = adapters_key(candidate)
    width, adapter_width = base_dtype_bytes(candidate), adapter_dtype_bytes(candidate)
    copies = (candidate.lora_modules_to_save, copied_dtype_bytes(candidate)) if lora else ((), width)
    sent = _broadcast_bytes(candidate.model, head, candidate.quantization, width, lora, adapter_width, copies)
    return max(0, sent - sum(tensors.params * size for tensors, size in trained_groups(candidate)))


@lru_cache(maxsize=1024)
def _broadcast_bytes(
    model: ModelShape,
    head: Head,
    quantization: Quantization,
    width: int,
    lora: AdaptersKey | tuple[()],
    adapter_width: int,
    copies: tuple[tuple[str, ...], int],
) -> int:
    """Bytes of two buckets of the model's tensors. Adapters are taken to lie evenly among the weights of layers.

    `copies`: the modules that PEFT copies, each of which follows its original, and bytes of one of their parameters.
    """

    def sent(place: float, tensor: EqualTensors) -> SentTensor:
        if tensor.part in QUANTIZED_PARTS[quantization]:
            packed = quantized_tensor_sizes(tensor.shape, quantization, model.quantization_group_size)[0]
            return SentTensor(place=place, kind=quantization, size_bytes=packed)
        size = adapter_width if tensor.part == "adapter" else width
        return SentTensor(place=place, kind=f"{size} bytes", size_bytes=tensor.elements * size)

    base = _each(tensors_in_order(model, head))
    adapters = _each(lora_in_order(model, *lora)) if lora else []
    step = (len(base) - 1) / max(len(adapters), 1)  # the first tensor is the embedding
    places = [*enumerate(base), *((1 + (number + 0.5) * step, each) for number, each in enumerate(adapters))]
    copied = [
        SentTensor(
            place=0.5 if kind.part == "embedding" else len(base),
            kind=f"{copies[1]} bytes",
            size_bytes=kind.elements * copies[1],
        )
        for kind in copied_tensors(model, head, copies[0])
        if kind.part != "score"
    ]
    return largest_buckets_bytes([*(sent(place, tensor) for place, tensor in places), *copied])


def _each(kinds: tuple[EqualTensors, ...]) -> list[EqualTensors]:
    return [kind for kind in kinds for _ in range(kind.count)]


def gather_bytes(candidate: StateInput, moment: GatherMoment) -> int:
    """Most bytes of gathered parameters and of gradients being reduced at a moment of a pass, per GPU.

        ZeRO-1, ZeRO-2   backward: one bucket of `reduce_bucket_size` elements (auto: hidden_size^2), from the first
                         gradient on, with one process too
        ZeRO-3           see `policy_gathered`; backward: + the gradients of one bucket, concatenated
        FSDP2            see `_fsdp2_gather_bytes`

    Source: deepspeed 0.19.8, zero/stage_1_and_2.py, `setup_buckets`; accelerate 1.15, utils/fsdp_utils.py,
    `fsdp2_prepare_model`. Example: Qwen2.5-0.5B with LoRA and ZeRO-2 on one GPU, 2e8 elements: 0.37 GiB.
    """
    if candidate.sharding in ("zero1", "zero2"):
        copied = copies_head(candidate.lora_modules_to_save, candidate.method_row.head)
        first = moment == "head_backward" and (candidate.tuning == "full" or copied)
        return _bucket_bytes(candidate) if first or moment == "backward" else 0
    if is_local(candidate) or candidate.sharding in ("none", "ddp"):
        return 0
    if candidate.sharding == "fsdp2":
        return _fsdp2_gather_bytes(candidate, policy_parameters(candidate), moment)
    reduced = _concatenated_bytes(candidate) if moment in ("head_backward", "backward") else 0
    return policy_gathered(candidate, _widths(candidate)).at.get(moment, 0) + reduced


def _widths(candidate: StateInput) -> Widths:
    packed = DTYPE_BYTES[candidate.bnb_4bit_quant_storage] if shards_4bit_weights(candidate) else 0
    return Widths(base_dtype_bytes(candidate), adapter_dtype_bytes(candidate), packed)


def gathered_in_backward(candidate: StateInput) -> tuple[int, ...]:
    """Most bytes as in `gather_bytes`, for the backward pass of each layer under ZeRO-3, the last layer first.

    Empty without ZeRO-3, or on one GPU without offloading.
    """
    if candidate.sharding != "zero3" or is_local(candidate):
        return ()
    reduced = _concatenated_bytes(candidate)
    return tuple(size + reduced for size in policy_gathered(candidate, _widths(candidate)).in_backward)


def _fsdp2_gather_bytes(candidate: StateInput, counted: Parameters, moment: GatherMoment) -> int:
    """Bytes of gathered units and of gradients being reduced under FSDP2, in the dtype of the computation.

    Units are the layers, the tail (final norm and head), and an untied embedding. A gathered unit is received in a
    buffer (B) and copied to its parameters (P). In the forward pass a buffer stays until the next unit is copied; in
    the backward pass the next unit is received while one computes. A unit's gradients are copied to the input (R) of
    a reduce-scatter, which stays until the next unit's. The tail stays gathered from the forward to the backward pass.
    PEFT hides the final norm, so that no forward pass gathers an untied head; the loss does (`DTensor.full_tensor`).
    An embedding for each layer is in the root, which is gathered first and stays so to the end of the backward pass.

                             tied embedding, in the tail       untied
        embedding            B + P of the tail and of a layer  B + P of the embedding; B of it, B + P of a layer
        forward              B + P of a layer, P of the tail   B + P of a layer
        loss                 P of the tail, B of a layer       B + P of the tail, B of a layer; adapters: as tied
        head's backward      P of the tail, B of a layer       the same
        backward             P + B + R of layers, P of tail    P + B + R of layers
        first layer's                                          P + R of a layer, B of the embedding
        embedding's backward P of the tail, R of a layer       P of the embedding, R of a layer; with adapters B + P,
                                                               if the embedding's output requires a gradient

    Layers count with their 4-bit weights where those are sharded; R has trained parameters only. Copies of the sharded
    model keep each layer's shard of gradients in 16 bits until the pass ends, beside that in float32.

    Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param_group.py (`wait_for_unshard`, `pre_backward`,
    `post_backward`, `AllReduceState`), _fsdp_collectives.py (`foreach_reduce`), _fsdp_state.py (`_post_forward`);
    accelerate 1.15, utils/fsdp_utils.py, `fsdp2_prepare_model`; results/fsdp2_memory.md.
    """
    model, full = candidate.model, candidate.tuning == "full"
    size = compute_weight_width(candidate)
    layer, tail, trained = (
        units * size
        for units in _fsdp2_units(model, counted, candidate.quantization in BITSANDBYTES, candidate.method_row.head)
    )
    tied = model.tied and candidate.method_row.head == "lm_head"  # a sequence classifier has no head to tie
    layer += _gathered_4bit_bytes(candidate)
    embedding, kept = model.embed_params * size, tail if tied else 0
    reduced = copied_gradients_bytes(candidate)
    if loss_gathers_head(candidate) and moment in ("loss", "head_backward"):
        tail = kept_head_bytes(candidate)
    bytes_of: dict[GatherMoment, int] = {
        "embedding": 2 * (tail + layer) if tied else embedding + max(embedding, 2 * layer),
        "forward": GATHERED_LAYERS * layer + kept,
        "loss": tail + layer if tied or not full else 2 * tail + layer,
        "head_backward": tail + layer,
        "backward": GATHERED_LAYERS * layer + trained + kept,
        "first_layer_backward": 0 if tied else layer + trained + embedding + reduced,
        "embedding_backward": kept + trained + reduced,
    }
    root = model.per_layer_embed_params * size
    if moment == "embedding":
        root *= 2
    if moment == "embedding_backward" and not tied:
        if full:
            return embedding + trained + reduced + root
        return (2 * embedding if candidate.gradient_checkpointing else 0) + root
    return bytes_of[moment] + root


def copied_gradients_bytes(candidate: StateInput) -> int:
    """Bytes of 16-bit shards of gradients that hybrid sharding (copies of the sharded model) keeps in a backward pass.

    Each unit keeps the input of its all-reduce to the end of the pass, beside the gradient in float32; the embedding's
    is reduced last.
    Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param_group.py, `AllReduceState`.

    Example: Falcon3-1B in full on four GPUs, two copies: 1.4 billion parameters without the embedding,
    2 bytes each, among two: 1.3 GiB.
    """
    copies = candidate.sharding == "fsdp2" and candidate.num_processes > candidate.shard_gpus
    if not copies or candidate.precision == "no":
        return 0
    trained = sum(tensors.params for tensors, _ in trained_groups(candidate))
    trained -= candidate.model.embed_params if candidate.tuning == "full" else 0
    return max(trained, 0) // candidate.shard_gpus * compute_weight_width(candidate)


class FrozenGather(NamedTuple):
    """Bytes gathered on one GPU while a reference model or teacher is at its embedding, in its layers, at its head."""

    embedding: int
    layers: int
    head: int


def reference_gather_bytes(candidate: StateInput, *, beside_policy: bool) -> FrozenGather:
    """Most bytes that are gathered while a reference model or a teacher runs, of both models, per GPU.

        FSDP2: the policy's head, and buffer and parameters of the whole reference model
        ZeRO-3: what the policy keeps after its forward pass, and the reference's own modules
        else: as the policy gathers in its forward pass, or at its loss

    `beside_policy`: it runs after the policy, whose graph is alive; else before. The policy's tail stays gathered after
    its forward pass, and after one without gradients, until it is needed again. Distillation's teacher runs inside of
    the policy's outermost module, which holds the head that it reads.
    TRL shards the reference model as one unit, which is gathered whole: `fully_shard` is called for the model only.

    Source: trl 1.16, models/utils.py, `prepare_fsdp`, trainer/distillation_trainer.py, `compute_loss`
    (`_forward_redirection`); results/fsdp2_memory.md.

    Example: Qwen2.5-7B DPO in full: 2 x 15.2 GB on every GPU, however many there are.
    """
    if candidate.sharding == "zero3" and not is_local(candidate):
        other = candidate.model if candidate.separate_reference else candidate.teacher_model
        if other is not None:
            size = base_dtype_bytes(candidate) if candidate.separate_reference else teacher_dtype_bytes(candidate)
            at = reference_gathered(candidate, other, size)
            kept = kept_beside_frozen(candidate) if beside_policy else 0
            return FrozenGather(at["embedding"] + kept, at["forward"] + kept, at["loss"] + kept)
    if candidate.sharding != "fsdp2" or is_local(candidate) or not candidate.separate_reference:
        gathered = gather_bytes(candidate, "loss" if beside_policy else "forward")
        return FrozenGather(0, gathered, gathered)
    size = compute_weight_width(candidate)
    whole = frozen_tensors(candidate.model).params * size
    gathered = candidate.model.embed_params * size + 2 * whole
    return FrozenGather(0, gathered, gathered)


def kept_beside_frozen(candidate: StateInput) -> int:
    """Bytes of the policy's parameters that ZeRO-3 keeps gathered while a reference or a teacher runs after it does."""
    gathered = policy_gathered(candidate, _widths(candidate))
    return gathered.inside if runs_within_policy(candidate) else gathered.kept


def teacher_head_bytes(candidate: StateInput) -> int:
    """Bytes of a teacher's head that a chunked loss gathers in each pass under ZeRO-3; 0 for other losses.

    Source: trl 1.16, kernels/chunked_divergence.py, `ChunkedDivergenceFunction` (`maybe_gather_lm_head_ctx`).
    """
    teacher = candidate.teacher_model
    if candidate.sharding != "zero3" or is_local(candidate) or teacher is None or not runs_within_policy(candidate):
        return 0
    return (teacher.lm_head_params or teacher.embed_params) * teacher_dtype_bytes(candidate)


def kept_head_bytes(candidate: StateInput) -> int:
    """Bytes of the policy's untied head, whole, that its graph keeps while its adapters are off for a reference.

    Under FSDP2 the loss gathers the head of a model with adapters itself, and saves what it gathered. The reference
    gathers it, and the embedding, once more.
    Source: trl 1.16, trainer/utils.py, `_fused_forward` (`DTensor.full_tensor`), trainer/dpo_trainer.py and
    kto_trainer.py, `_compute_loss`.

    Example: Llama-3.1-8B in 16 bits: 1.05 GB.
    """
    return candidate.model.lm_head_params * base_dtype_bytes(candidate) if loss_gathers_head(candidate) else 0


def loss_gathers_head(candidate: StateInput) -> bool:
    """Return whether the loss gathers an untied head itself, in the dtype of its shards.

    It does with adapters under FSDP2, if it is a fused one (`kept_head_bytes`).
    """
    shares = candidate.tuning == "lora" and candidate.sharding == "fsdp2" and not is_local(candidate)
    fused = candidate.method_row.loss_with(candidate.trl_version, candidate.use_liger_kernel) == "fused"
    return shares and fused and not candidate.model.tied


def graph_4bit_bytes(candidate: TrainingInput) -> int:
    """Bytes of gathered 4-bit weights that only the graph of a micro-step keeps under ZeRO-3, not DeepSpeed itself.

    bitsandbytes' product keeps the gathered weight as an attribute of its `ctx` until the loss is dropped, in every
    layer but those with a reentrant checkpoint, whose forward pass makes no graph. DeepSpeed keeps some of these
    weights itself for the backward pass. FSDP2 frees what it gathered even if something refers to it.

    Source: bitsandbytes 0.50.2, autograd/_functions.py, `MatMul4Bit.forward` (`ctx.tensors`); torch 2.13,
    distributed/fsdp/_fully_shard/_fsdp_param.py, `free_storage`.

    Example: Qwen2.5-7B without checkpoints: 3.04 GiB packed, of which DeepSpeed keeps 0.42 itself: 2.62 count here.

    If only some layers have checkpoints, takes all layers to be alike.
    """
    if candidate.sharding != "zero3" or is_local(candidate) or not shards_4bit_weights(candidate):
        return 0
    widths, layers = _widths(candidate), range(candidate.model.num_layers)
    every = candidate.checkpoint_every_n_layers if checkpointing_of(candidate) == "reentrant" else 0
    held = sum(1 for number in layers if not every or number % every)
    beside = packed_bytes(candidate, widths) - policy_gathered(candidate, widths).packed
    return beside * held // max(len(layers), 1)


def _gathered_4bit_bytes(candidate: StateInput) -> int:
    """Bytes of the 4-bit weights of a gathered layer, two in a byte, under FSDP2."""
    if not shards_4bit_weights(candidate):
        return 0
    return max((kind.linear_params // 2 for kind, _ in candidate.model.layer_kinds), default=0)


def row_exchange_bytes(candidate: TrainingInput, pass_name: str) -> int:
    """Bytes on one of n GPUs that share a row, to exchange it in one attention layer; 0 without `cp_size`, `sp_size`.

    With q, kv the elements of one GPU's queries, and of its keys and values together, in 16 bits unless noted:

        cp_size   forward: kv side by side + n kv gathered + 4 q in float32, merged outputs
                  backward: kv side by side + n kv gathered + (q + 3 kv) in float32, sums of gradients
        sp_size   q + kv before the exchange, and one contiguous copy of q

    Source: torch 2.13, distributed/tensor/experimental/_context_parallel/_attention.py, `_templated_ring_attention`
    (accelerate 1.15 sets its "allgather", utils/dataclasses.py, `TorchContextParallelConfig.__post_init__`);
    deepspeed 0.19.8, runtime/sequence_parallel/ulysses_sp.py, `_combine_local_sequences`.

    Example: Qwen3-4B, 32,768 tokens on 8 GPUs, cp_size 8: 419 MB forward, 319 MB backward.

    Leaves out keys and values that `sp_size` repeats where it exceeds their heads.
    """
    n = candidate.row_gpus
    if n == 1:
        return 0
    width = compute_weight_width(candidate)
    layers = [kind.attention for kind, _ in candidate.model.layer_kinds]
    q = candidate.tokens * max((layer.q_dim for layer in layers), default=0)
    kv = candidate.tokens * max((layer.k_dim + layer.v_dim for layer in layers), default=0)
    if candidate.sharding != "fsdp2":
        return (2 * q + kv) * width
    gathered = (n + 1) * kv * width
    if pass_name == "forward":
        return gathered + MERGED_OUTPUTS * q * FLOAT32_BYTES
    return gathered + (q + RING_GRADIENTS * kv) * FLOAT32_BYTES


class GenerationGather(NamedTuple):
    """Bytes gathered on one GPU while `generate` runs: at the embedding of the prompt, in its layers, and afterwards.

    `after`: at the head of the prompt, and while the next tokens pass through the model one by one. Of ZeRO-3 without
    `ds3_gather_for_generation` `embedding` is 0, and `prompt` includes it.
    """

    embedding: int
    prompt: int
    after: int


def generation_gather_bytes(candidate: StateInput) -> GenerationGather:
    """Bytes gathered on one GPU while `generate` runs.

        ZeRO-3 with ds3_gather_for_generation: the whole model, and PPO's value model, a part of the same module
        ZeRO-3 without: modules one by one; in full ahead, by the trace of the last step or token (`decoding_gathered`)
        else: as in a forward pass; FSDP2 keeps the tail of the token before (`_kept_tail_bytes`)

    Source: trl 1.16, models/utils.py, `unwrap_model_for_generation`; trl 1.12, experimental/ppo/ppo_trainer.py,
    `PPOTrainer.train` (unwraps the `PolicyAndValueWrapper`).
    Example: Qwen2.5-32B in bfloat16 with ds3_gather_for_generation: 65.5 GB on every GPU, however many there are.
    """
    if candidate.sharding == "zero3" and candidate.ds3_gather_for_generation and not is_local(candidate):
        whole = _whole_model_bytes(candidate)
        if candidate.method_row.value_model:
            value = value_parameters(candidate).base_tensors
            whole += gathered_bytes(value, other_dtype_bytes(candidate), candidate)
        return GenerationGather(whole, whole, whole)
    forward = gather_bytes(candidate, "forward")
    if candidate.sharding == "zero3" and not is_local(candidate):
        one_by_one, ahead = decoding_gathered(candidate, _widths(candidate))
        traced = candidate.tuning == "full" and candidate.repeated_calls == "step"
        prompt = max(one_by_one, forward) if traced else one_by_one
        return GenerationGather(0, prompt, ahead)
    embedding, loss = gather_bytes(candidate, "embedding"), gather_bytes(candidate, "loss")
    kept = _kept_tail_bytes(candidate)
    return GenerationGather(embedding, forward, max(forward, loss, embedding + kept if kept else 0))


def _kept_tail_bytes(candidate: StateInput) -> int:
    """Bytes of an untied head that FSDP2 holds when the next token reaches the embedding; 0 for others.

    Its parameters stay gathered. With adapters `generate` calls the base model, so that no root unit ends the pass, and
    the buffer in which the head was received stays until the embedding is copied.
    Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_state.py, `_post_forward`; _fsdp_param_group.py,
    `wait_for_unshard`. Seen on emulated GPUs: Pythia-410M, 98 MiB once in full, twice with adapters.
    """
    if candidate.sharding != "fsdp2" or candidate.model.tied or is_local(candidate):
        return 0
    copies = 1 if candidate.tuning == "full" else 2
    return copies * candidate.model.lm_head_params * compute_weight_width(candidate)


def weight_sync_bytes(candidate: StateInput) -> int:
    """Bytes that the weight sync with vLLM takes on one GPU, added to the models of trainer and engine.

        ZeRO-3     the largest tensor; with adapters the whole model
        FSDP2      the largest tensor, unsharded
        adapters   + 2 x B A of the largest merged weight; on a 4-bit base also 2 x that weight dequantized
        server     + `_packed_bytes`

    Source: trl 1.16, generation/vllm_generation.py, `VLLMGeneration._iter_named_params` (PEFT gathers all parameters at
    once, then `merge_adapter`).
    """
    counted = policy_parameters(candidate)
    merged = _merge_bytes(candidate, counted) + _packed_bytes(candidate, counted)
    if candidate.sharding == "zero3" and not is_local(candidate):
        return merged + (
            _whole_model_bytes(candidate)
            if candidate.tuning == "lora"
            else counted.largest_params * base_dtype_bytes(candidate)
        )
    if candidate.sharding == "fsdp2" and not is_local(candidate):
        return merged + counted.unquantized_tensors.largest * base_dtype_bytes(candidate)
    return merged


def _packed_bytes(candidate: StateInput, counted: Parameters) -> int:
    """Bytes of the buffers in which rank 0 sends its weights to a vLLM server, two in flight.

        bytes = min(the model, 2 x (1 GiB + largest tensor)); 3 x if tensors are gathered one by one

    Tensors are concatenated until they exceed 1 GiB. Gathered ones live until their buffer is complete.
    Source: vllm 0.31, distributed/weight_transfer/packed_tensor.py, `packed_nccl_broadcast_producer`, `pack_tensors`;
    trl 1.16, generation/vllm_client.py, `update_named_params`; results/emulated_situations.md.

    Example: Qwen2.5-0.5B in float32: the whole model, 1.84 GiB (emulated: 2.04 with the merge of adapters).
    """
    if candidate.vllm != "server":
        return 0
    width = base_dtype_bytes(candidate)
    shards = candidate.sharding in ("zero3", "fsdp2") and not is_local(candidate)
    buffers = PACKED_BUFFERS + (shards and candidate.tuning == "full")
    return min(whole_policy_bytes(candidate, width), buffers * (PACKED_BUFFER_BYTES + counted.largest_params * width))


def _whole_model_bytes(candidate: StateInput) -> int:
    counted = policy_parameters(candidate)
    whole = gathered_bytes(counted.unquantized_tensors, base_dtype_bytes(candidate), candidate)
    if candidate.sharding == "zero3" and shards_4bit_weights(candidate):
        whole += counted.quantized_params // 2
    if candidate.tuning == "full":
        return whole
    return whole + gathered_bytes(counted.adapter_tensors, adapter_dtype_bytes(candidate), candidate)


def _merge_bytes(candidate: StateInput, counted: Parameters) -> int:
    if candidate.tuning == "full":
        return 0
    parts: tuple[Literal["linear", "vision_linear", "expert"], ...] = ("linear", "vision_linear")
    named = candidate.lora_target_parameters
    if named or targets_experts(candidate.model, candidate.lora_target_modules):
        parts = (*parts, "expert")
    largest = _largest_of(counted, parts)
    dequantized = (
        MERGE_COPIES_4BIT * DTYPE_BYTES[candidate.dtype] if candidate.quantization in ("nf4", "nf4-double") else 0
    )
    return largest * (MERGE_COPIES * adapter_dtype_bytes(candidate) + dequantized)


@lru_cache(maxsize=1024)
def _largest_of(counted: Parameters, parts: tuple[Literal["linear", "vision_linear", "expert"], ...]) -> int:
    return counted.base_tensors.only(*parts).largest


def _bucket_bytes(candidate: StateInput) -> int:
    """Bytes of DeepSpeed's reduce bucket, which it allocates whole even if fewer parameters are trained.

    Where 16-bit gradients are added up in float32, ZeRO-1's bucket is in float32, too, and ZeRO-2 makes two copies of a
    full bucket: one of 16 bits, flattened, and one of that in float32.
    Source: deepspeed 0.19.8, zero/stage_1_and_2.py, `_gradient_reduction_buffer_dtype`, `allreduce_bucket`.
    """
    elements, size = reduce_bucket_elements(candidate), compute_weight_width(candidate)
    if not accumulates_in_float32(candidate):
        return elements * size
    if candidate.sharding == "zero1":
        return elements * FLOAT32_BYTES
    trained = sum(tensors.params for tensors, _ in trained_groups(candidate))
    return elements * size + min(elements, trained) * (size + FLOAT32_BYTES)


def _concatenated_bytes(candidate: StateInput) -> int:
    """Bytes of the gradients in one bucket of ZeRO-3, which `reduce_scatter_coalesced` copies side by side.

    A gradient larger than the bucket is reduced alone and not copied.
    """
    trained = sum(tensors.params for tensors, _ in trained_groups(candidate))
    size = compute_weight_width(candidate)
    return min(reduce_bucket_elements(candidate), trained) * size


@lru_cache(maxsize=1024)
def _fsdp2_units(model: ModelShape, counted: Parameters, bitsandbytes: bool, head: Head) -> tuple[int, int, int]:
    """(Parameters of the largest layer, of the tail, trained parameters of that layer) as FSDP2 groups them."""
    layers = max(model.num_layers, 1)
    adapters = -(-counted.adapter_params // layers)
    layer = max((kind.params - (kind.linear_params if bitsandbytes else 0) for kind, _ in model.layer_kinds), default=0)
    scored = 0 if head == "score" else model.embed_params if model.tied else model.lm_head_params
    trained = adapters if counted.adapter_params else layer
    return layer + adapters, model.final_norm.params + scored, trained

"""Bytes that FSDP2 gathers in units (layers, tail, embedding) at the moments of a step, and what it keeps of them."""

from functools import lru_cache

from planner.cache_keys import StateInput
from planner.memory.parameters.policy import Parameters, frozen_tensors, policy_parameters
from planner.memory.parameters.quantized import shards_4bit_weights
from planner.memory.parameters.tensors import outer_linears
from planner.memory.parameters.trained import trained_groups
from planner.memory.parameters.widths import base_dtype_bytes, compute_weight_width
from planner.memory.schemes.contract import FrozenGather, GatherMoment
from planner.methods import Head
from planner.models.shape import ModelShape

# Layers that FSDP2 holds: the one that computes and the next one, which is received already.
# Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param_group.py.
GATHERED_LAYERS = 2


@lru_cache(maxsize=1024)
def _unit_params(model: ModelShape, counted: Parameters, quantized: bool, head: Head) -> tuple[int, int, int]:
    """Return FSDP2's units as (parameters of the largest layer, of the tail, trained parameters of that layer).

    `quantized`: weights stay quantized while they are trained, and are in no unit: 4-bit ones of bitsandbytes are left
    out (accelerate 1.15, utils/fsdp_utils.py, `fsdp2_prepare_model`), those of GPTQ and AWQ are buffers
    (gptqmodel 7.6, nn_modules/qlinear/__init__.py, `BaseQuantLinear`).
    """
    layers = max(model.num_layers, 1)
    adapters = -(-counted.adapter_params // layers)
    layer = max((kind.params - (kind.linear_params if quantized else 0) for kind, _ in model.layer_kinds), default=0)
    scored = 0 if head == "score" else model.embed_params if model.tied else model.lm_head_params
    trained = adapters if counted.adapter_params else layer
    return layer + adapters, model.final_norm.params + scored, trained


def _root_params(model: ModelShape) -> int:
    """Parameters of the root unit: learned positions, an embedding for each layer, and projections beside the layers.

    Source: accelerate 1.15, utils/fsdp_utils.py, `fsdp2_prepare_model` (`fully_shard` of what no other unit holds).
    """
    projections = sum(count * linear.params for linear, count in outer_linears(model))
    return model.position_params + model.per_layer_embed_params + projections


def moved_units_bytes(candidate: StateInput) -> int:
    """Bytes of whole units beside the shards that are made of them, where each process keeps what it loaded.

        the larger of the largest layer, less the shards that are not there yet, and embedding + tail + root

    `fully_shard` moves a unit to the GPU and frees it when its shards are there: layers, then an untied embedding, the
    tail and the root. accelerate holds embedding and head to the end (`input_weight`, `output_weight`).
    Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_init.py, `_move_states_to_device`, _fsdp_param.py,
    `_init_sharded_param`; accelerate 1.15, utils/fsdp_utils.py, `fsdp2_prepare_model`.

    Example: Qwen2.5-7B-Instruct-GPTQ-Int4 in float32: 2 x 544,997,376 x 4 = 4.06 GiB.
    """
    model, head = candidate.model, candidate.method_row.head
    layer, tail, _ = _unit_params(model, policy_parameters(candidate), candidate.quantization_row.kept, head)
    tied = model.tied and head == "lm_head"
    last = (_root_params(model), tail, 0 if tied else model.embed_params)
    shards = sum(-(-unit // candidate.shard_gpus) for unit in last)
    return max(layer - shards, sum(last)) * base_dtype_bytes(candidate)


def layer_unit_bytes(candidate: StateInput) -> int:
    """Bytes of the largest layer as it is gathered, with its adapters and its 4-bit weights where those are sharded."""
    counted, head = policy_parameters(candidate), candidate.method_row.head
    layer, _, _ = _unit_params(candidate.model, counted, candidate.quantization_row.bitsandbytes, head)
    return layer * compute_weight_width(candidate) + _gathered_4bit_bytes(candidate)


def root_params(model: ModelShape, head: Head) -> int:
    """Parameters of FSDP 1's root unit, and Axolotl's, of all that no layer holds.

    Embedding, head, final norm, `_root_params`.
    """
    scored = 0 if head == "score" or model.tied else model.lm_head_params
    return model.embed_params + model.final_norm.params + scored + _root_params(model)


def copied_gradients_bytes(candidate: StateInput) -> int:
    """Bytes of 16-bit shards of gradients that hybrid sharding (copies of the sharded model) keeps in a backward pass.

    Each unit keeps the input of its all-reduce to the end of the pass, beside the float32 gradient. The embedding's is
    not among them, since it is reduced last.
    Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param_group.py, `AllReduceState`.

    Example: Falcon3-1B in full on four GPUs, two copies: 1.4 billion parameters without the embedding, 2 bytes each,
    among two: 1.3 GiB.
    """
    if candidate.num_processes == candidate.shard_gpus or candidate.precision == "no":
        return 0
    trained = sum(tensors.params for tensors, _ in trained_groups(candidate))
    trained -= candidate.model.embed_params if candidate.tuning == "full" else 0
    return max(trained, 0) // candidate.shard_gpus * compute_weight_width(candidate)


def gathered_units(candidate: StateInput) -> dict[GatherMoment, int]:
    """Bytes of gathered units and of gradients being reduced, in the dtype of the computation.

    Units are the layers, the tail (final norm and head), and an untied embedding. A gathered unit is received in a
    buffer (B) and copied to its parameters (P). In the forward pass a buffer stays until the next unit is copied; in
    the backward pass the next unit is received while one computes. A unit's gradients are copied to the input (R) of
    a reduce-scatter, which stays until the next unit's. The tail stays gathered from the forward to the backward pass.
    PEFT hides the final norm, so that no forward pass gathers an untied head; the loss does (`DTensor.full_tensor`).
    The root (`_root_params`) is gathered first and stays so to the end of the backward pass.

                             tied embedding, in the tail       untied
        embedding            B + P of the tail and of a layer  B + P of the embedding; B of it, B + P of a layer
        forward              B + P of a layer, P of the tail   B + P of a layer
        loss                 P of the tail, B of a layer       B + P of the tail, B of a layer; adapters: as tied
        head's backward      P of the tail, B of a layer       the same
        backward             P + B + R of layers, P of tail    P + B + R of layers
        first layer's                                          P + R of a layer, B of the embedding
        embedding's backward P of the tail, R of a layer       P of the embedding, R of a layer; with adapters B + P,
                                                               if the embedding's output requires a gradient

    A tool's own preparation (`ToolRow.own_fsdp2`) leaves embedding, norm and head in the root: a tail as above, whose
    head has a gradient that waits for the embedding's (`StackGradients.head_waits`, `waiting_head_bytes`).
    With `offload_param` a shard comes to the GPU in its own dtype and is cast there, before B: more than B + P with one
    process. Layers count with quantized weights only where 4-bit ones are sharded; R has trained parameters only.
    Copies of the sharded model keep each layer's shard of gradients in 16 bits until the pass ends, beside that in
    float32.

    Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param_group.py (`wait_for_unshard`, `pre_backward`,
    `post_backward`, `AllReduceState`), _fsdp_collectives.py (`foreach_reduce`), _fsdp_state.py (`_post_forward`);
    accelerate 1.15, utils/fsdp_utils.py, `fsdp2_prepare_model`; results/fsdp2_memory.md.
    """
    model, full = candidate.model, candidate.tuning == "full"
    size = compute_weight_width(candidate)
    counted, head = policy_parameters(candidate), candidate.method_row.head
    units = _unit_params(model, counted, candidate.quantization_row.kept, head)
    layer, tail, trained = (unit * size for unit in units)
    tied = model.tied and candidate.method_row.head == "lm_head"  # a sequence classifier has no head to tie
    layer += _gathered_4bit_bytes(candidate)
    root, waiting = _root_params(model) * size, 0
    if candidate.tool_row.own_fsdp2:
        tail, root, waiting, tied = whole_root_bytes(candidate), 0, waiting_head_bytes(candidate), True
    embedding, kept = model.embed_params * size, tail if tied else 0
    reduced = copied_gradients_bytes(candidate)
    if tied:
        embedding_backward = kept + trained + waiting + reduced
    elif full:
        embedding_backward = embedding + trained + reduced
    else:
        embedding_backward = 2 * embedding if candidate.gradient_checkpointing else 0
    received = 2 * (tail + layer) if tied else embedding + max(embedding, 2 * layer)
    if candidate.offload_param:
        first = (tail if tied else embedding) // size
        received = max(received, first * (base_dtype_bytes(candidate) + size) // candidate.shard_gpus)
    at_head = kept_head_bytes(candidate) if loss_gathers_head(candidate) else tail
    return {
        "embedding": received + 2 * root,
        "forward": GATHERED_LAYERS * layer + kept + root,
        "loss": (at_head + layer if tied or not full else 2 * at_head + layer) + root,
        "head_backward": at_head + layer + root,
        "backward": GATHERED_LAYERS * layer + trained + kept + root,
        "first_layer_backward": (0 if tied else layer + trained + embedding + reduced) + root,
        "embedding_backward": embedding_backward + root,
    }


def whole_root_bytes(candidate: StateInput) -> int:
    """Bytes of the root unit of a tool's own FSDP2, of all that no layer holds; 0 with accelerate's.

    Source: axolotl 0.21, monkeypatch/accelerate/fsdp2.py, `fsdp2_prepare_model` (layers, then the model).
    """
    if not candidate.tool_row.own_fsdp2:
        return 0
    return root_params(candidate.model, candidate.method_row.head) * compute_weight_width(candidate)


def waiting_head_bytes(candidate: StateInput) -> int:
    """Bytes of an untied head's gradient that waits for the rest of its unit, less its shard, counted with the others.

    Source: FSDP2 reduces a unit at the end of its backward pass; the allocator's trace of a TinyLlama of 6 layers that
    Axolotl 0.21 trains in full (results/tool_trainers.md).
    """
    model = candidate.model
    if candidate.tuning != "full" or model.tied or candidate.method_row.head != "lm_head":
        return 0
    shard = model.lm_head_params * base_dtype_bytes(candidate) // candidate.shard_gpus
    return model.lm_head_params * compute_weight_width(candidate) - shard


def outside_units(candidate: StateInput) -> int | None:
    """Bytes of gathered parameters from the end of the model's forward pass to the gradient of its logits.

    With Axolotl's own FSDP2 a loss in the model's forward pass is in the root, too (None), and others are in no unit.

    The tail, and the root. The end of the forward pass frees the last buffer, and the backward pass gathers the last
    layer when the gradient of the tail's output is there.
    Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_state.py, `_post_forward` (`all_gather_state`),
    `_pre_backward`.

    Example: ORPO of TinyLlama with LoRA on 4 GPUs has no layer (84 MiB) gathered there (results/emulated.jsonl).
    """
    if candidate.tool_row.own_fsdp2:
        return None if candidate.method in candidate.tool_row.losses else 0
    size, head = compute_weight_width(candidate), candidate.method_row.head
    _, tail, _ = _unit_params(candidate.model, policy_parameters(candidate), candidate.quantization_row.kept, head)
    return (tail + _root_params(candidate.model)) * size


def reference_gathered(candidate: StateInput) -> FrozenGather:
    """Bytes gathered for a separate reference: the policy's head, and buffer and parameters of the whole reference.

    TRL calls `fully_shard` only on the reference model as a whole, so that it is one unit, gathered at once. If the
    reference computes its log-probabilities before the training, the policy is not on the GPU.
    Source: trl 1.16, models/utils.py, `prepare_fsdp`; results/fsdp2_memory.md.

    Example: Qwen2.5-7B DPO in full: 2 x 15.2 GB on every GPU, however many there are.
    """
    size, head = compute_weight_width(candidate), candidate.model.embed_params if candidate.keeps_reference else 0
    gathered = head * size + 2 * frozen_tensors(candidate.model).params * size
    return FrozenGather(0, gathered, gathered)


def loss_gathers_head(candidate: StateInput) -> bool:
    """Return whether the loss gathers an untied head itself, in the dtype of its shards: a fused loss with adapters.

    See `kept_head_bytes`.
    """
    return candidate.tuning == "lora" and candidate.loss == "fused" and not candidate.model.tied


def kept_head_bytes(candidate: StateInput) -> int:
    """Bytes of the policy's whole untied head, kept by its graph while the policy without adapters runs as reference.

    With adapters the loss gathers the head itself and autograd saves the gathered tensor. The reference gathers the
    head and the embedding once more.
    Source: trl 1.16, trainer/utils.py, `_fused_forward` (`DTensor.full_tensor`), trainer/dpo_trainer.py and
    kto_trainer.py, `_compute_loss`.

    Example: Llama-3.1-8B in 16 bits: 1.05 GB.
    """
    return candidate.model.lm_head_params * base_dtype_bytes(candidate)


def kept_tail_bytes(candidate: StateInput) -> int:
    """Bytes of an untied head that FSDP2 still holds when the next token reaches the embedding; 0 for a tied one.

    The head's parameters stay gathered. With adapters `generate` calls the base model, so that no root unit ends the
    pass, and the buffer in which the head was received also stays until the embedding is copied.
    Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_state.py, `_post_forward`; _fsdp_param_group.py,
    `wait_for_unshard`. Seen on emulated GPUs: Pythia-410M, 98 MiB once in full, twice with adapters.
    """
    if candidate.model.tied or candidate.tool_row.own_fsdp2:
        return 0
    copies = 1 if candidate.tuning == "full" else 2
    return copies * candidate.model.lm_head_params * compute_weight_width(candidate)


def generates_here(candidate: StateInput) -> bool:
    """Return whether `generate` runs on the training GPUs, between the passes of the model that FSDP2 shards."""
    return candidate.method_row.generates and candidate.vllm == "off"


def left_head_bytes(candidate: StateInput) -> int:
    """Bytes of an untied head that `generate` leaves gathered until the next backward pass ends; 0 for a tied one.

    Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_state.py, `_root_post_backward_final_callback`.

    Example: Qwen2-VL-7B in 16 bits: 1.02 GiB (emulated: in the next batch of an evaluation).
    """
    if candidate.model.tied or candidate.tool_row.own_fsdp2 or not generates_here(candidate):
        return 0
    return candidate.model.lm_head_params * compute_weight_width(candidate)


def after_generation(at: dict[GatherMoment, int], candidate: StateInput) -> dict[GatherMoment, int]:
    """`gathered_units` of the step after a rollout, which left the tail gathered: the loss takes the head as it is.

    A tied tail holds the embedding, which is not received again unless a backward pass came between. An untied head
    is freed before the backward passes of the layers, and received again for the embedding's. Seen on emulated GPUs:
    Pythia-410M, OLMo-2-1B, Qwen2.5-1.5B, results/emulated.jsonl.
    """
    if candidate.tool_row.own_fsdp2:
        return at  # its root is resharded after each forward pass
    if candidate.model.tied:
        return at if candidate.learns_again else {**at, "embedding": at["forward"]}
    left = left_head_bytes(candidate)
    layer = at["forward"] // GATHERED_LAYERS
    last = at["embedding_backward"]
    return {
        **at,
        "embedding": at["embedding"] + left,
        "forward": at["forward"] + left,
        "loss": left + layer,
        "head_backward": left + layer,
        "embedding_backward": last + left if last else 0,
    }


def _gathered_4bit_bytes(candidate: StateInput) -> int:
    """Bytes of the 4-bit weights of a gathered layer, two in a byte."""
    if not shards_4bit_weights(candidate):
        return 0
    return max((kind.linear_params // 2 for kind, _ in candidate.model.layer_kinds), default=0)

"""Weights: bytes of every model on one GPU, by role, in the dtype in which they are stored."""

from planner.cache_keys import StateInput
from planner.candidate import DTYPE_BYTES, FOUR_BIT
from planner.memory.parameters.kbit_preparation import PreparedBytes, prepared_bytes
from planner.memory.parameters.policy import frozen_tensors, parameters, policy_parameters
from planner.memory.parameters.quantized import (
    scale_bytes,
    shards_4bit_weights,
    whole_policy_bytes,
)
from planner.memory.parameters.tensors import TensorSet, tensor_bytes
from planner.memory.parameters.trained import value_parameters
from planner.memory.parameters.widths import (
    adapter_dtype_bytes,
    base_dtype_bytes,
    copied_dtype_bytes,
    other_dtype_bytes,
    teacher_dtype_bytes,
)
from planner.memory.schemes.table import scheme_of
from planner.models.shape import ModelShape

FLOAT32_BYTES = 4
SIXTEEN_BIT_BYTES = 2


def policy_weights_bytes(candidate: StateInput) -> int:
    """Bytes of the trained model on one GPU, without adapters.

        weights = shard of the unquantized parameters x dtype + quantized parameters with their scales

    ZeRO-3 shards 4-bit weights as every parameter, without their scales (deepspeed 0.19.8,
    zero/partition_parameters.py, `Init._convert_to_zero_parameters`), FSDP2 those that are stored as floating-point
    numbers (`bnb_4bit_quant_storage`): in TRL's default, uint8, every GPU has them all (accelerate 1.15,
    utils/fsdp_utils.py, `fsdp2_prepare_model`).

    Example: Qwen2.5-7B in float32 on one GPU: 30,462,466,048 bytes = 28.37 GiB; in nf4 with a bfloat16 load 5.85 GB.

    Leaves out further memory during loading (host.py).
    """
    counted = policy_parameters(candidate)
    scheme, trained = scheme_of(candidate), candidate.tuning == "full"
    kept = scheme.stored(counted.unquantized_tensors, base_dtype_bytes(candidate), candidate, trained=trained)
    prepared = prepared_bytes(candidate)
    if prepared is not None:
        kept = _prepared_bytes(candidate, prepared)
    return kept + scheme.stored_quantized(candidate)


def unsharded_while_loading_bytes(candidate: StateInput) -> int:
    """Bytes on one GPU while models load, before they are sharded, in excess of `weights_by_role`.

        4-bit weights, ZeRO-3    the whole quantized policy - its shard, + all adapters and copied modules, + the
                                 embedding's shard, unless it goes to the host
        sharded, FSDP2           the whole quantized policy - its scales
        other ZeRO-3             see `_whole_while_created_bytes`
        FSDP2, uint8 4-bit       all unquantized weights, whole
        other FSDP2              see `_whole_while_filled_bytes`
        FSDP2, reference model   at least the whole reference model - the policy's shard, which is loaded later

    Every process loads the whole quantized model to its GPU (trl 1.16, trainer/sft_trainer.py, `SFTTrainer.__init__`;
    transformers 5.23, quantizers/quantizer_bnb_4bit.py, `update_device_map`), and accelerate does not move it to the
    meta device before it shards (accelerate 1.15, utils/fsdp_utils.py, `fsdp2_prepare_model`). A reference model is
    moved to the GPU whole by `fully_shard`, before the policy is there (trl 1.16, models/utils.py, `prepare_fsdp`;
    results/fsdp2_memory.md). Under FSDP2 the shards are filled from a state dict that holds the whole 4-bit model, so
    that both are there at the end; scales are shared (accelerate 1.15, `fsdp2_load_full_state_dict`). DeepSpeed divides
    the whole model when it has adapters, and makes each parameter's shard before it frees the parameter: first the
    embedding's (deepspeed 0.19.8, zero/partition_parameters.py, `_convert_to_zero_parameters`, `_partition_param`).
    """
    if candidate.sharding == "zero3" and not shards_4bit_weights(candidate):
        return _whole_while_created_bytes(candidate)
    if candidate.num_processes == 1 or not (candidate.sharding == "fsdp2" or shards_4bit_weights(candidate)):
        return 0
    if not shards_4bit_weights(candidate):
        return max(_whole_while_filled_bytes(candidate), _whole_reference_bytes(candidate))
    width = DTYPE_BYTES[candidate.dtype]
    whole = whole_policy_bytes(candidate, width)
    if candidate.sharding == "fsdp2":
        return whole - scale_bytes(candidate)
    counted = policy_parameters(candidate)
    adapters = tensor_bytes(counted.adapter_tensors, adapter_dtype_bytes(candidate))
    copies = tensor_bytes(counted.copied_tensors, copied_dtype_bytes(candidate))
    first = 0 if candidate.offload_param else -(-candidate.model.embed_params // candidate.shard_gpus) * width
    return whole - policy_weights_bytes(candidate) + adapters + copies + first


def _whole_while_filled_bytes(candidate: StateInput) -> int:
    """Bytes of whole weights on one GPU while FSDP2 fills its shards from them.

        tied head    the head, and a shard of its own
        untied head  the larger of the head and a layer's largest tensor
        score head   a layer's largest tensor
        uint8 4-bit: all that is not quantized, since the model was loaded to the GPU

    Source: accelerate 1.15, utils/fsdp_utils.py, `fsdp2_load_full_state_dict` (one tensor after another, in the order
    of the state dict, which names a tied head as well), `fsdp2_prepare_model` (`model_has_params4bit`).

    Leaves out experts, and the packing of quantized checkpoints.

    Example: Qwen2.5-7B with LoRA on 4 GPUs, a head of 544,997,376 parameters: 1.02 GiB.
    """
    counted, width = policy_parameters(candidate), base_dtype_bytes(candidate)
    if candidate.quantization in FOUR_BIT:
        return tensor_bytes(counted.unquantized_tensors, width)
    model, layers = candidate.model, counted.base_tensors.only("linear").largest
    if candidate.method_row.head != "lm_head":
        return layers * width
    if model.tied:
        return (model.embed_params + -(-model.embed_params // candidate.shard_gpus)) * width
    return max(layers, model.lm_head_params) * width


def _whole_reference_bytes(candidate: StateInput) -> int:
    """Bytes of a reference model that `fully_shard` moves to the GPU whole, less the policy's shard; 0 without one."""
    if not candidate.separate_reference or candidate.offload_param:
        return 0
    whole = frozen_tensors(candidate.model)
    return tensor_bytes(whole, DTYPE_BYTES[candidate.dtype]) - policy_weights_bytes(candidate)


def _whole_while_created_bytes(candidate: StateInput) -> int:
    """Bytes of ZeRO-3's largest tensor while it is created, more than its shard.

        bytes = elements x (loaded dtype + stored dtype, if they differ) - shard

    `zero.Init` creates each tensor whole on the GPU in the dtype of the load, casts it, and then partitions it. The
    largest tensor is often the head, which comes last.
    Source: deepspeed 0.19.8, zero/partition_parameters.py, `zero_wrapper_for_fp_tensor_constructor`,
    `_post_init_method`; results/zero3_streams.md.

    Example: Qwen2.5-7B's head, 544,997,376 parameters, in float32 and bfloat16 on 4 GPUs: 3.05 less 0.25 GiB.
    """
    largest, stored = policy_parameters(candidate).unquantized_tensors.largest, base_dtype_bytes(candidate)
    loaded = DTYPE_BYTES[candidate.dtype]
    shard = 0 if candidate.offload_param else -(-largest // candidate.num_processes) * stored
    return max(0, largest * (stored + (loaded if loaded != stored else 0)) - shard)


def reference_weights_bytes(candidate: StateInput) -> int:
    """Bytes of the frozen reference model on one GPU; 0 with LoRA, whose adapters are switched off instead.

    Source: trl 1.16, trainer/dpo_trainer.py, `DPOTrainer.__init__` (none with PEFT, or precomputed and not FSDP; dtype
    of the policy), trainer/kto_trainer.py, `KTOTrainer.__init__`, trainer/grpo_trainer.py and rloo_trainer.py (none if
    beta is 0), models/utils.py, `prepare_deepspeed` (sharded under ZeRO-3 and FSDP only).

    Leaves out the "ref" copy of an adapter that a PEFT model brings with it.
    """
    return _frozen_bytes(candidate.model, "lm_head", candidate) if candidate.separate_reference else 0


def reward_weights_bytes(candidate: StateInput) -> int:
    """Bytes of the reward model on one GPU: a sequence classifier, loaded like the policy (`model_init_kwargs`).

    PPO always has one, with the policy's shape if the job names none. It is sharded under ZeRO-3 only.

    Source: trl 1.16, trainer/grpo_trainer.py, `GRPOTrainer.__init__`; accelerate 1.15, accelerator.py,
    `Accelerator.prepare_model` (`evaluation_mode=True` does not shard under FSDP2).

    Example: a reward model of 7B parameters in bfloat16 beside a policy under FSDP2: 13 GiB on every GPU.
    """
    model = candidate.reward_model or (candidate.model if candidate.method_row.reward_model == "always" else None)
    if model is None:
        return 0
    if candidate.sharding == "fsdp2":
        whole = frozen_tensors(model, "score")
        return tensor_bytes(whole, other_dtype_bytes(candidate))
    return _frozen_bytes(model, "score", candidate)


def value_weights_bytes(candidate: StateInput) -> int:
    """Bytes of PPO's value model on one GPU: a sequence classifier like the reward model, always trained in full.

    Source: trl 1.12, experimental/ppo/ppo_trainer.py, `PolicyAndValueWrapper`.
    """
    if not candidate.method_row.value_model:
        return 0
    tensors = value_parameters(candidate).base_tensors
    return scheme_of(candidate).stored(tensors, other_dtype_bytes(candidate), candidate, trained=True)


def teacher_weights_bytes(candidate: StateInput) -> int:
    """Bytes of the frozen teacher on one GPU, in `teacher_dtype`; sharded under ZeRO-3 only.

    Source: trl 1.16, scripts/distillation.py, `main`, trainer/distillation_trainer.py, `DistillationTrainer.__init__`,
    experimental/gkd/gkd_trainer.py, `GKDTrainer.__init__`; accelerate 1.15, accelerator.py, `Accelerator.prepare_model`
    (`evaluation_mode=True` does not shard under FSDP2).
    """
    if not candidate.method_row.teacher or candidate.teacher_model is None:
        return 0
    if candidate.sharding == "fsdp2":
        return tensor_bytes(
            frozen_tensors(candidate.teacher_model),
            DTYPE_BYTES[candidate.teacher_load_dtype],
        )
    whole = frozen_tensors(candidate.teacher_model)
    return scheme_of(candidate).stored(whole, teacher_dtype_bytes(candidate), candidate, trained=False)


def weights_by_role(candidate: StateInput) -> dict[str, int]:
    """Bytes of every model on one training GPU by role, without roles of 0 bytes."""
    found = {
        "policy": policy_weights_bytes(candidate),
        "reference": reference_weights_bytes(candidate),
        "reward": reward_weights_bytes(candidate),
        "value": value_weights_bytes(candidate),
        "teacher": teacher_weights_bytes(candidate),
    }
    return {role: size for role, size in found.items() if size}


def _frozen_bytes(model: ModelShape, head: str, candidate: StateInput) -> int:
    tensors = parameters(model, "full", 1, (), "none", "score" if head == "score" else "lm_head").base_tensors
    return scheme_of(candidate).stored(tensors, other_dtype_bytes(candidate), candidate, trained=False)


def _prepared_bytes(candidate: StateInput, prepared: PreparedBytes) -> int:
    return sum(
        scheme_of(candidate).stored(TensorSet(kinds=(kind,)), prepared.of(kind.part), candidate, trained=False)
        for kind in policy_parameters(candidate).unquantized_tensors.kinds
    )


def adapters_bytes(candidate: StateInput) -> int:
    """Bytes of the adapters on one GPU, with PEFT's trained copies of whole modules.

        adapters = shard of the LoRA parameters x `adapter_dtype_bytes` + shard of the copies x `copied_dtype_bytes`

    Example: Qwen2.5-7B, r 16 on all linear layers, bfloat16 base: 40,370,176 x 4 = 161,480,704 bytes = 154 MiB.
    """
    if candidate.tuning == "full":
        return 0
    counted = policy_parameters(candidate)
    size = adapter_dtype_bytes(candidate)
    scheme = scheme_of(candidate)
    copied = scheme.stored(counted.copied_tensors, copied_dtype_bytes(candidate), candidate, trained=True)
    return scheme.stored(counted.adapter_tensors, size, candidate, trained=True) + copied

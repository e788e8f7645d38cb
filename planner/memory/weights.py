"""Weights: bytes of every model on one GPU, by role, in the dtype in which they are stored."""

from planner.cache_keys import StateInput
from planner.memory.dtypes import FLOAT32_BYTES
from planner.memory.parameters.kbit_preparation import prepared_bytes
from planner.memory.parameters.policy import frozen_tensors, policy_parameters
from planner.memory.parameters.tensors import TensorSet, tensor_bytes
from planner.memory.parameters.trained import value_parameters
from planner.memory.parameters.widths import (
    adapter_dtype_bytes,
    base_dtype_bytes,
    copied_dtype_bytes,
    other_dtype_bytes,
    reference_dtype_bytes,
    teacher_dtype_bytes,
)
from planner.memory.schemes.table import scheme_of


def policy_weights_bytes(candidate: StateInput) -> int:
    """Bytes of the trained model on one GPU, without adapters.

        weights = shard of the unquantized parameters x dtype + quantized parameters with their scales

    Example: Qwen2.5-7B in float32 on one GPU: 30,462,466,048 bytes = 28.37 GiB; in nf4 with a bfloat16 load 5.85 GB.

    Leaves out further memory during loading (`unsharded_while_loading_bytes`).
    """
    counted = policy_parameters(candidate)
    scheme, trained = scheme_of(candidate), candidate.tuning == "full"
    kept = scheme.stored(counted.unquantized_tensors, base_dtype_bytes(candidate), candidate, trained=trained)
    prepared = prepared_bytes(candidate)
    if prepared is not None:
        kept = sum(
            scheme.stored(TensorSet(kinds=(kind,)), prepared.of(kind.part), candidate, trained=False)
            for kind in counted.unquantized_tensors.kinds
        )
    return kept + scheme.stored_quantized(candidate)


def unsharded_while_loading_bytes(candidate: StateInput) -> int:
    """Bytes on one GPU while models load, before they are sharded, in excess of `weights_by_role`."""
    return scheme_of(candidate).unsharded_while_loading(candidate, policy_weights_bytes(candidate))


def reference_weights_bytes(candidate: StateInput) -> int:
    """Bytes of the frozen reference model on one GPU; 0 with LoRA, whose adapters are switched off instead.

    Source: trl 1.16, trainer/dpo_trainer.py, `DPOTrainer.__init__` (none with PEFT, or precomputed; dtype of the
    policy), trainer/kto_trainer.py, `KTOTrainer.__init__`, trainer/grpo_trainer.py and rloo_trainer.py (none if
    beta is 0), models/utils.py, `prepare_deepspeed` (sharded under ZeRO-3 and FSDP only).

    Leaves out the "ref" copy of an adapter that a PEFT model brings with it.
    """
    return separate_reference_bytes(candidate) if candidate.keeps_reference else 0


def separate_reference_bytes(candidate: StateInput) -> int:
    """Bytes of a second copy of the policy on one GPU, in `Candidate.reference_load_dtype`."""
    tensors = frozen_tensors(candidate.model)
    return scheme_of(candidate).stored(tensors, reference_dtype_bytes(candidate), candidate, trained=False)


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
    return _evaluated_bytes(frozen_tensors(model, "score"), other_dtype_bytes(candidate), candidate)


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
    return _evaluated_bytes(frozen_tensors(candidate.teacher_model), teacher_dtype_bytes(candidate), candidate)


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
    trained = scheme.stored(counted.adapter_tensors, size, candidate, trained=True)
    return trained + copied + averaged_adapters_bytes(candidate)


def averaged_adapters_bytes(candidate: StateInput) -> int:
    """Bytes of a second adapter that is not trained, in float32, and of the average that it gets, as the first one.

    Source: trl 1.16, experimental/sdpo/teacher_sync.py, `PEFTAdapterEMACallback` (`add_adapter`, `shadow_weights`);
    peft 0.21.2, peft_model.py, `PeftModel.add_adapter` (`autocast_adapter_dtype`).
    """
    if not candidate.averages_adapters:
        return 0
    return tensor_bytes(policy_parameters(candidate).adapter_tensors, FLOAT32_BYTES + adapter_dtype_bytes(candidate))


def averaging_bytes(candidate: StateInput) -> int:
    """Bytes that ZeRO-3 gathers after a step, where a reference becomes an average of policies: both models whole.

    Source: trl 1.16, trainer/callbacks.py, `SyncRefModelCallback.sync_target_model` (`GatheredParameters`).
    """
    averages = candidate.method_row.averaged_reference and candidate.separate_reference
    if not averages or not candidate.scheme_row.creates_sharded:
        return 0
    return tensor_bytes(frozen_tensors(candidate.model), base_dtype_bytes(candidate) + reference_dtype_bytes(candidate))


def _evaluated_bytes(tensors: TensorSet, bytes_per_param: int, candidate: StateInput) -> int:
    """Bytes of a model that accelerate prepares for evaluation, which some schemes leave whole."""
    if not candidate.scheme_row.shards_evaluated:
        return tensor_bytes(tensors, bytes_per_param)
    return scheme_of(candidate).stored(tensors, bytes_per_param, candidate, trained=False)

"""Widths: bytes of one parameter of each model, as it is stored and as a forward pass reads it."""

from planner.cache_keys import StateInput
from planner.memory.dtypes import DTYPE_BYTES, FLOAT32_BYTES, SIXTEEN_BIT_BYTES
from planner.memory.parameters.kbit_preparation import prepared_bytes


def base_dtype_bytes(candidate: StateInput) -> int:
    """Bytes of one unquantized parameter of the policy while it is stored on the GPU.

        DeepSpeed with bf16 or fp16                                                     2
        FSDP2 with mixed precision, trained parameters, unless `Candidate.narrow_shards`   4
        else                                                                            as loaded

    Source: deepspeed 0.19.8, runtime/engine.py, `_configure_distributed_model` (`_cast_module_mixed_precision`);
    accelerate 1.15, utils/fsdp_utils.py, `fsdp2_prepare_model` (trained parameters to float32), `ToolRow.own_fsdp2`;
    trl 1.16, trainer/utils.py, `create_model_from_path` (float32 unless dtype is set).
    """
    if candidate.casts == "module":
        return SIXTEEN_BIT_BYTES
    if candidate.casts == "gathered" and candidate.tuning == "full" and not candidate.narrow_shards:
        return FLOAT32_BYTES
    return DTYPE_BYTES[candidate.dtype]


def other_dtype_bytes(candidate: StateInput) -> int:
    """Bytes of one parameter of a model beside the policy: 2 under DeepSpeed with bf16 or fp16, else as loaded."""
    if candidate.casts == "module":
        return SIXTEEN_BIT_BYTES
    return DTYPE_BYTES[candidate.dtype]


def reference_dtype_bytes(candidate: StateInput) -> int:
    """Bytes of one parameter of a separate reference: see `other_dtype_bytes` and `Candidate.reference_load_dtype`.

    DeepSpeed casts those that it gets: see `Method.samples_values`.
    """
    if candidate.casts == "module" and not candidate.method_row.samples_values:
        return SIXTEEN_BIT_BYTES
    return DTYPE_BYTES[candidate.reference_load_dtype]


def teacher_dtype_bytes(candidate: StateInput) -> int:
    """Bytes of one parameter of the teacher: 2 under DeepSpeed with bf16 or fp16, 4 under ZeRO-3 without either.

    Else those of the dtype in which it is loaded.

    Source: transformers 5.23, modeling_utils.py, `from_pretrained`; deepspeed 0.19.8, zero/partition_parameters.py,
    `Init._set_dtype` (float32, if neither bf16 nor fp16 is enabled).
    """
    if candidate.casts == "module":
        return SIXTEEN_BIT_BYTES
    if candidate.scheme_row.creates_sharded:
        return DTYPE_BYTES["float32"]
    return DTYPE_BYTES[candidate.teacher_load_dtype]


def adapter_dtype_bytes(candidate: StateInput) -> int:
    """Bytes of one adapter parameter during training; the first row that applies counts.

        loaded from a checkpoint                                 4 (`Candidate.casts_loaded_adapters`)
        ZeRO-3, a 16-bit base, some trainers                     4 (`Method.float32_adapters_under_zero3`)
        DeepSpeed with bf16 or fp16                              2
        FSDP2 with mixed precision, unless the base is 4-bit     4, but `Candidate.narrow_shards`
        FSDP 1 with mixed precision                              4
        cast by the script, on whatever base                     4 (`Candidate.script_casts_to_float32`)
        bitsandbytes base                                        2, or 4 (`Method.bfloat16_adapters`)
        GPTQ, AWQ, fp8, mxfp4, or autocast_adapter_dtype         4
        else                                                     as the base

    Source: deepspeed 0.19.8, runtime/engine.py, `_configure_distributed_model`; accelerate 1.15,
    utils/fsdp_utils.py, `fsdp2_prepare_model`, accelerator.py, `prepare_model` ("upcasting", of FSDP 1's trained flat
    parameters); trl 1.16, trainer/sft_trainer.py, `SFTTrainer.__init__` (QLoRA adapters
    to bfloat16, as in every stable trainer, and ZeRO-3 keeps the base's dtype); peft 0.21.2,
    tuners/tuners_utils.py (`cast_adapter_dtype`: float32 on a 16-bit base).
    """
    if candidate.casts_loaded_adapters or keeps_wide_adapters(candidate):
        return FLOAT32_BYTES
    if candidate.casts == "module":
        return SIXTEEN_BIT_BYTES
    upcast = candidate.scheme_row.flat_units or not (candidate.quantization_row.four_bit or candidate.narrow_shards)
    if candidate.casts == "gathered" and upcast:
        return FLOAT32_BYTES
    if candidate.script_casts_to_float32:
        return FLOAT32_BYTES
    if candidate.quantization_row.bitsandbytes:
        return SIXTEEN_BIT_BYTES if candidate.trainer_casts_to_bfloat16 else FLOAT32_BYTES
    if candidate.quantization_row.quantized or candidate.autocast_adapter_dtype:
        return FLOAT32_BYTES
    return DTYPE_BYTES[candidate.dtype]


def keeps_wide_adapters(candidate: StateInput) -> bool:
    """Return whether adapters stay float32 while ZeRO-3 computes the base in 16 bits.

    Source: see `Method.float32_adapters_under_zero3`.
    """
    wide = candidate.method_row.float32_adapters_under_zero3 and candidate.autocast_adapter_dtype
    return candidate.scheme_row.creates_sharded and not candidate.quantization_row.quantized and wide


def magnitude_dtype_bytes(candidate: StateInput) -> int:
    """Bytes of one of DoRA's magnitudes: as in an adapter's matrix, or 4 where a stable trainer leaves them in float32.

    Source: `TableRows.spares_magnitudes`; trl 1.15, experimental/utils.py, `prepare_peft_model`.

    Leaves out that their gradients and optimizer states are float32, too: they are counted in the matrices' dtype,
    about 10 MB less for Qwen2.5-7B.
    """
    return FLOAT32_BYTES if candidate.spares_magnitudes else adapter_dtype_bytes(candidate)


def copied_dtype_bytes(candidate: StateInput) -> int:
    """Bytes of one parameter in a module that PEFT copied: as loaded, unless the trainer or the script casts it.

    PEFT's `cast_adapter_dtype` changes adapters only; the casts to bfloat16 or float32 reach all that is trained.
    Source: peft 0.21.2, tuners/tuners_utils.py; trl 1.16, trainer/sft_trainer.py, `SFTTrainer.__init__`.

    Leaves out that k-bit preparation keeps the embedding of gpt_neox in float32 where it casts the head.
    """
    as_adapters = not (candidate.scheme_row.whole or candidate.narrow_shards)
    if as_adapters or candidate.script_casts_to_float32:
        return adapter_dtype_bytes(candidate)
    if candidate.trainer_casts_to_bfloat16:
        return SIXTEEN_BIT_BYTES
    prepared = prepared_bytes(candidate)
    return DTYPE_BYTES[candidate.dtype] if prepared is None else prepared.head


def compute_weight_width(candidate: StateInput) -> int:
    """Bytes of a weight in the forward pass: 2 under DeepSpeed and FSDP2 with bf16 or fp16, else those of `dtype`."""
    if candidate.casts_weights:
        return 2
    return DTYPE_BYTES[candidate.dtype]


def compute_adapter_width(candidate: StateInput) -> int:
    """Bytes of an adapter's parameter in the forward pass: under FSDP2 those of the gathered copy (`param_dtype`).

    Under FSDP 1 an adapter's matrix is a unit of its own, and PEFT casts the input to the dtype of its shard.
    Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param.py, `init_dtype_attrs`; peft 0.21.2, utils/other.py,
    `fsdp_auto_wrap_policy`; tuners/lora/layer.py, `Linear.forward` (`_cast_input_dtype`).
    """
    if candidate.casts == "gathered" and not candidate.scheme_row.flat_units:
        return compute_weight_width(candidate)
    return adapter_dtype_bytes(candidate)

"""LLaMA-Factory's keys (0.9.5), as its source reads them.

Source: llamafactory 0.9.5, hparams/*.py (names, defaults), model/adapter.py (`init_adapter`: what is trained is cast to
float32), model/loader.py (weights are loaded in the checkpoint's dtype), model/patcher.py, model/model_utils/*.py,
train/sft/*.py, train/dpo/*.py, train/kto/*.py, data/collator.py.
"""

from planner.candidate import Candidate
from planner.jobs.dialects.dialect import (
    CPU,
    DEEPSPEED_FILE,
    OFF,
    Dialect,
    Keys,
    Pairs,
    Refused,
    deepspeed_config,
    listed,
    refusal,
    zero_stage,
)
from planner.methods import MethodName
from planner.models.lora_targets import listed_targets, read_targets, text_targets, widest_targets
from planner.models.shape import ModelShape

METHOD_OF_STAGE: dict[str, MethodName] = {"sft": "sft", "pt": "sft", "dpo": "dpo", "kto": "kto"}
# Its `PairwiseTrainer` runs TRL's `AutoModelForCausalLMWithValueHead`. Source: train/rm/trainer.py, `compute_loss`.
REWARD = "it makes the logits of all words beside a value head, which is not counted. Use a TRL config of RewardConfig."
KERNELS = {"sdpa": "sdpa", "fa2": "flash_attention_2", "disabled": "eager"}
WITHOUT_REFERENCE = ("orpo", "simpo")  # `use_ref_model`
# The DeepSpeed configs of its repository, by name: examples/deepspeed/*.json.
STAGE_2: dict[str, object] = {"stage": 2, "overlap_comm": False, "reduce_bucket_size": 500_000_000}
STAGE_3: dict[str, object] = {
    "stage": 3, "overlap_comm": False, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
}  # fmt: skip
SHIPPED: dict[str, dict[str, object]] = {
    "ds_z0_config": {"stage": 0},
    "ds_z2_config": STAGE_2,
    "ds_z2_offload_config": {**STAGE_2, "offload_optimizer": CPU},
    "ds_z3_config": STAGE_3,
    "ds_z3_offload_config": {**STAGE_3, "offload_optimizer": CPU, "offload_param": CPU},
}


def method(keys: Keys) -> MethodName:
    """Return the method of a file."""
    stage = str(keys.get("stage") or "sft")
    if stage not in METHOD_OF_STAGE:
        because = REWARD if stage == "rm" else "its trainer is not counted. It can be sft, pt, dpo or kto."
        raise refusal("llamafactory", f"stage: {stage}", because)
    if stage == "dpo" and keys.get("pref_loss") in WITHOUT_REFERENCE:
        because = "its loss without a reference is not counted. Use sigmoid."
        raise refusal("llamafactory", f"pref_loss: {keys['pref_loss']}", because)
    return METHOD_OF_STAGE[stage]


def settings(keys: Keys) -> Pairs:
    """Yield the settings that follow from several keys, or have other values."""
    yield from _rows(keys)
    yield from _tuning(keys)
    yield from _precision(keys)
    yield from _layers(keys)
    yield from _evaluation(keys)
    if keys.get("deepspeed"):
        yield "deepspeed", deepspeed_config(keys["deepspeed"], SHIPPED)
    if method(keys) in ("dpo", "kto"):
        yield "beta", keys.get("pref_beta", 0.1)


def _rows(keys: Keys) -> Pairs:
    """Lengths and packing, which cuts rows anywhere and keeps them rows; neat packing keeps documents apart.

    Source: data/processor/supervised.py, `PackedSupervisedDatasetProcessor`; data/collator.py,
    `SFTDataCollatorWith4DAttentionMask`.
    """
    cutoff = keys.get("cutoff_len")
    yield "max_length", 2048 if cutoff is None else cutoff
    packs = keys.get("packing")
    if not (keys.get("neat_packing") or (str(keys.get("stage")) == "pt" if packs is None else packs)):
        return
    yield "packing", True
    if not keys.get("neat_packing"):
        yield "packing_strategy", "wrapped"
    elif keys.get("flash_attn") != "fa2" and keys.get("per_device_train_batch_size", 8) != 1:
        because = "each packed row has a mask, which is not counted. Use flash_attn: fa2."
        raise refusal("llamafactory", "neat_packing", because)


def _tuning(keys: Keys) -> Pairs:
    """LoRA by default, its targets, and the quantization of its base."""
    named = keys.get("finetuning_type")
    kind = "lora" if named is None else str(named)
    if kind not in ("lora", "full"):
        raise refusal("llamafactory", f"finetuning_type: {kind}", "it is not counted. Use lora or full.")
    yield "use_peft", kind == "lora"
    if kind == "full":
        return
    rank = keys.get("lora_rank")
    yield "lora_r", 8 if rank is None else rank
    yield "lora_dropout", keys.get("lora_dropout") or 0.0
    targets = keys.get("lora_target") or "all"
    yield "lora_target_modules", "all-linear" if targets == "all" else listed(targets)
    if keys.get("additional_target"):
        yield "lora_modules_to_save", listed(keys["additional_target"])
    yield from _quantization(keys)


def adapter_targets(model: ModelShape, targets: tuple[str, ...]) -> tuple[str, ...]:
    """Return the modules that get adapters: none of a vision tower, and quantized layers as others.

    It finds layers by the name of their class, where PEFT's all-linear finds no quantized ones, and freezes towers.
    Source: llamafactory 0.9.5, model/model_utils/misc.py, `find_all_linear_modules`; visual.py, `patch_target_modules`.
    """
    targets = read_targets(model, targets)
    if model.vision_params:
        targets = text_targets(model, targets) or targets
    return targets if model.quantization_row.nn_linear or targets != ("all-linear",) else widest_targets(model)


def _quantization(keys: Keys) -> Pairs:
    """The base that bitsandbytes quantizes at load.

    Source: model/model_utils/quantization.py, `configure_quantization`.
    """
    bits = keys.get("quantization_bit")
    if bits not in (*OFF, 4, 8):
        raise refusal("llamafactory", f"quantization_bit: {bits}", "it is not counted. Use 4 or 8.")
    stage_3 = zero_stage(keys.get("deepspeed"), SHIPPED) == 3
    if bits == 8 and stage_3:
        raise refusal("llamafactory", "quantization_bit: 8 under ZeRO-3", "LLaMA-Factory stops at it. Use 4.")
    if bits == 8:
        yield "load_in_8bit", True
    if bits == 4 and stage_3:  # the dtype of its storage matters where the weights are sharded
        yield "bnb_4bit_quant_storage", "float16" if keys.get("fp16") and not keys.get("bf16") else "bfloat16"
    if bits == 4:
        yield "load_in_4bit", True
        yield "bnb_4bit_quant_type", keys.get("quantization_type", "nf4")
        yield "use_bnb_nested_quant", keys.get("double_quantization", True)


def _precision(keys: Keys) -> Pairs:
    """The checkpoint's dtype, and float32 for what is trained unless `pure_bf16` or ZeRO-3 keeps it."""
    full, pure = keys.get("finetuning_type") == "full", bool(keys.get("pure_bf16"))
    yield "bf16", bool(keys.get("bf16")) and not pure
    yield "fp16", bool(keys.get("fp16")) and not keys.get("bf16")
    stage_3 = zero_stage(keys.get("deepspeed"), SHIPPED) == 3
    yield "dtype", "float32" if full and not pure and not stage_3 else "auto"


def _layers(keys: Keys) -> Pairs:
    """Attention, checkpoints (on by default) and Liger's kernels.

    Source: model/model_utils/checkpointing.py (`use_unsloth_gc` moves the inputs of layers to the host).
    """
    kernel = str(keys.get("flash_attn") or "auto")
    if kernel not in (*KERNELS, "auto"):
        raise refusal("llamafactory", f"flash_attn: {kernel}", "LLaMA-Factory stops at it. Use fa2 or sdpa.")
    if kernel != "auto":
        yield "attn_implementation", KERNELS[kernel]
    if "disable_gradient_checkpointing" in keys:
        yield "gradient_checkpointing", not keys["disable_gradient_checkpointing"]
    yield "offload", bool(keys.get("use_unsloth_gc"))
    yield from (("every_n_layers", 1), ("activation_offloading", False), ("expandable_segments", False))
    if "enable_liger_kernel" in keys:
        yield "use_liger_kernel", bool(keys["enable_liger_kernel"])


def _evaluation(keys: Keys) -> Pairs:
    rows, when = keys.get("val_size") or keys.get("eval_dataset"), keys.get("eval_strategy") or "no"
    yield "eval_strategy", when if rows else "no"
    if rows and when != "no":
        yield "per_device_eval_batch_size", keys.get("per_device_eval_batch_size") or 8


def _write_tuning(candidate: Candidate) -> dict[str, object]:
    if candidate.tuning == "full":
        return {"finetuning_type": "full", "quantization_bit": None}
    row = candidate.quantization_row
    if not row.bitsandbytes:
        return {"finetuning_type": "lora", "quantization_bit": None}
    nested = {"double_quantization": bool(row.spelling["use_bnb_nested_quant"])} if row.four_bit else {}
    return {"finetuning_type": "lora", "quantization_bit": 4 if row.four_bit else 8, **nested}


def _write_targets(candidate: Candidate) -> dict[str, object]:
    model, targets = candidate.model, candidate.lora_target_modules
    every = targets in (("all-linear",), text_targets(model) if model.vision_params else ())
    return {"lora_target": "all" if every else ",".join(listed_targets(model, targets))}


def _write_kernel(candidate: Candidate) -> dict[str, object]:
    names = {kernel: name for name, kernel in KERNELS.items()}
    if candidate.attn_implementation not in names:
        raise refusal(
            "llamafactory", f"flash_attn: {candidate.attn_implementation}", "it has none such. Use fa2 or sdpa."
        )
    return {"flash_attn": names[candidate.attn_implementation]}


def _write_sharding(candidate: Candidate) -> dict[str, object]:
    """The DeepSpeed config beside the file: FSDP is of accelerate's launch file."""
    if candidate.scheme_row.section == "fsdp_config":
        because = "it is said in the file for accelerate launch. Use --set zero_stage=3."
        raise refusal("llamafactory", "distributed_type: FSDP", because)
    if candidate.scheme_row.creates_sharded and candidate.tuning == "full" and candidate.dtype == "float32":
        because = (
            "it trains in the checkpoint's dtype then. Name a config of ZeRO-3 in the file (deepspeed) and plan again."
        )
        raise refusal("llamafactory", "ZeRO-3 with finetuning_type: full", because)
    return {"deepspeed": DEEPSPEED_FILE if candidate.scheme_row.stage else None}


NOT_COUNTED = "what it changes is not counted. Leave it out."
MEGATRON = "only Megatron's trainer takes it, which is not counted. Use a file of transformers' Trainer."
VISION = "what is trained then is not counted. Leave it out."
REFUSED = {
    **{
        name: Refused(because=NOT_COUNTED)
        for name in (
            "use_unsloth", "use_llama_pro", "shift_attn", "mixture_of_depths", "use_galore", "use_apollo", "use_badam",
            "use_adam_mini", "use_muon", "use_dft_loss", "use_asft_loss", "use_eaft_loss", "fp8", "use_kt", "use_mca",
            "use_hyper_parallel", "upcast_lmhead_output", "use_v1_kernels", "ref_model", "pref_bco_weight",
        )
    },
    **{
        name: Refused(because=MEGATRON)
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
    },
    **{
        name: Refused(because=VISION, harmless=(None, default))
        for name, default in (
            ("freeze_vision_tower", True), ("freeze_multi_modal_projector", True), ("freeze_language_model", False),
        )
    },
    **{
        name: Refused(because="the file exports or runs a model, and trains none.")
        for name in ("export_dir", "infer_backend", "do_predict")
    },
    "quantization_method": Refused(because="it is not counted. Use bnb.", harmless=(*OFF, "bnb", "bitsandbytes")),
    "fsdp": Refused(because="its list is not read. Give the file for accelerate launch with --accelerate-config."),
}  # fmt: skip

LLAMA_FACTORY = Dialect(
    tool="llamafactory",
    marks=(
        "finetuning_type", "cutoff_len", "lora_target", "pref_beta", "pref_loss", "quantization_bit", "export_dir",
        "infer_backend",
    ),
    names={
        "model_name_or_path": "model_name_or_path",
        "per_device_train_batch_size": "per_device_train_batch_size",
        "gradient_accumulation_steps": "gradient_accumulation_steps",
        "optim": "optim",
        "use_dora": "use_dora",
        "tf32": "tf32",
    },
    defaults={"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "gradient_checkpointing": True},
    settings=settings,
    read=frozenset(
        (
            "stage", "finetuning_type", "pref_loss", "pref_beta", "deepspeed", "cutoff_len", "packing", "neat_packing",
            "lora_rank", "lora_dropout", "lora_target", "additional_target", "quantization_bit", "quantization_type",
            "double_quantization", "pure_bf16", "bf16", "fp16", "flash_attn", "disable_gradient_checkpointing",
            "use_unsloth_gc", "enable_liger_kernel", "val_size", "eval_dataset", "eval_strategy",
            "per_device_eval_batch_size",
        )
    ),
    method=method,
    targets=adapter_targets,
    refused=REFUSED,
    unmodelled=frozenset(
        (
            "use_reentrant_gc", "upcast_layernorm", "resize_vocab", "neftune_noise_alpha", "torch_compile",
            "predict_with_generate",
            "compute_accuracy", "pissa_init", "pref_ftx", "auto_find_batch_size", "label_smoothing_factor",
            "ddp_find_unused_parameters", "torch_empty_cache_steps", "moe_aux_loss_coef",
        )
    ),
    writes={
        "per_device_train_batch_size": lambda candidate: {
            "per_device_train_batch_size": candidate.per_device_train_batch_size,
        },
        "gradient_accumulation_steps": lambda candidate: {
            "gradient_accumulation_steps": candidate.gradient_accumulation_steps,
        },
        "per_device_eval_batch_size": lambda candidate: {
            "per_device_eval_batch_size": candidate.per_device_eval_batch_size,
        },
        "max_length": lambda candidate: {"cutoff_len": candidate.max_length},
        "optim": lambda candidate: {"optim": candidate.optim},
        "gradient_checkpointing": lambda candidate: {
            "disable_gradient_checkpointing": not candidate.gradient_checkpointing,
        },
        "attn_implementation": _write_kernel,
        "use_liger_kernel": lambda candidate: {"enable_liger_kernel": candidate.use_liger_kernel},
        "lora_r": lambda candidate: {"lora_rank": candidate.lora_r},
        "lora_target_modules": _write_targets,
        "tuning": _write_tuning,
        "quantization": _write_tuning,
        "sharding": _write_sharding,
    },
)  # fmt: skip

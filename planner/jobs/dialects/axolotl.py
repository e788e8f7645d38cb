"""Axolotl's keys (0.21), as its source reads them.

Source: axolotl 0.21, utils/schemas/*.py (names, defaults, what is refused), utils/config/__init__.py
(`normalize_config`, `resolve_dtype`), loaders/model.py, loaders/adapter.py, core/builders/*.py, integrations/*/args.py.
"""

from collections.abc import Iterator, Mapping
from typing import Any

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
    refusal,
    zero_stage,
)
from planner.methods import MethodName
from planner.models.lora_targets import is_expression

# rl -> method. GDPO differs from GRPO in how rewards are added up; IPO and SimPO are losses of DPO's and CPO's trainer.
METHOD_OF_RL: dict[str, MethodName] = {
    "dpo": "dpo", "ipo": "dpo", "kto": "kto", "orpo": "orpo", "simpo": "cpo", "grpo": "grpo", "gdpo": "grpo",
}  # fmt: skip
# Older keys of attention -> attn_implementation: utils/schemas/enums.py, `LEGACY_ATTN_FLAG_TO_IMPL`.
ATTENTION_FLAGS = {
    "xformers_attention": "xformers", "sage_attention": "sage", "flex_attention": "flex_attention",
    "flash_attention": "flash_attention_2", "sdp_attention": "sdpa", "eager_attention": "eager",
}  # fmt: skip
# What is planned of attn_implementation; the Hub's kernels are `value_aliases` of the settings table.
ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3")
WIDE_NORMS = (None, "eager", "sdpa")  # enums.py, `ATTN_IMPLS_WITHOUT_DTYPE_CAST`
KERNELS = {"lora_mlp_kernel": "mlp", "lora_qkv_kernel": "qkv", "lora_o_kernel": "o"}
KERNEL_FLAGS = (*KERNELS, "lora_embedding_kernel")
LIGER_LAYERS = ("liger_rms_norm", "liger_glu_activation", "liger_swiglu", "liger_rope")
# Plugins by a part of their name. Others change the model, the trainer or the loss.
PLUGINS = ("liger", "cut_cross_entropy", "swanlab", "lm_eval")
# The DeepSpeed configs that `axolotl fetch deepspeed_configs` writes, by name: axolotl, deepspeed_configs/*.json.
STAGE_3: dict[str, object] = {
    "stage": 3, "overlap_comm": True, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto", "sub_group_size": 0, "max_live_parameters": 0,
    "max_reuse_distance": 0,
}  # fmt: skip
FETCHED: dict[str, dict[str, object]] = {
    "zero1": {"stage": 1, "overlap_comm": True},
    "zero2": {"stage": 2, "overlap_comm": True, "offload_optimizer": CPU},
    "zero3": STAGE_3,
    "zero3_bf16": STAGE_3,
    "zero3_bf16_cpuoffload_params": {**STAGE_3, "offload_param": CPU},
    "zero3_bf16_cpuoffload_all": {**STAGE_3, "offload_param": CPU, "offload_optimizer": CPU},
}


# Optimizers that are Axolotl's own or another package's: utils/schemas/enums.py, `CustomSupportedOptimizers`.
OWN_OPTIMIZERS = (
    "optimi_adamw", "ao_adamw_4bit", "ao_adamw_8bit", "ao_adamw_fp8", "adopt_adamw", "adamc", "came_pytorch", "muon",
    "muon_8bit", "dion", "sinkgd", "polora", "flash_adamw", "flash_adam", "flash_sgd", "flash_sgdw", "flash_lion",
    "scao", "q_galore_adamw8bit",
)  # fmt: skip


def method(keys: Keys) -> MethodName:
    """Return the method of a file."""
    if keys.get("reward_model"):
        return "reward"
    rl = str(keys.get("rl") or "")
    if rl and rl not in METHOD_OF_RL:
        known = ", ".join(METHOD_OF_RL)
        raise refusal("axolotl", f"rl: {rl}", f"its trainer is not counted. It can be {known}.")
    return METHOD_OF_RL.get(rl, "sft")


def settings(keys: Keys) -> Pairs:
    """Yield the settings that follow from several keys, or have other values."""
    yield from _rows(keys)
    yield from _adapters(keys)
    yield from _precision(keys)
    yield from _attention(keys)
    yield from _checkpointing(keys)
    yield from _evaluation(keys)
    yield from _kernels(keys)
    yield from _sharding(keys)
    yield from _reinforcement(keys)
    if (optimizer := str(keys.get("optimizer"))) in OWN_OPTIMIZERS:
        because = "its states are not counted. Use adamw_torch_fused or adamw_bnb_8bit."
        raise refusal("axolotl", f"optimizer: {optimizer}", because)
    yield "expandable_segments", True  # Axolotl sets PYTORCH_CUDA_ALLOC_CONF itself
    if keys.get("group_by_length"):
        yield "train_sampling_strategy", "group_by_length"


def _rows(keys: Keys) -> Pairs:
    """Lengths and packing: with FlashAttention a micro-batch of packed rows is one row, else rows stay rows.

    Source: utils/samplers/multipack.py; core/builders/causal.py (`multipack_real_batches`); for other kernels
    transformers builds a mask of the packed documents in each row. utils/schemas/training.py,
    `HyperparametersConfig` (defaults), before utils/config/__init__.py, `normalize_config` (`batch_size`).
    """
    yield "max_length", keys.get("sequence_len") or 512
    if keys.get("sample_packing"):
        flash = "flash" in str(_attention_of(keys))
        if not flash and (_number(keys.get("micro_batch_size")) or 1) > 1:
            because = "each packed row has a mask, which is not counted. Use attn_implementation: flash_attention_2."
            raise refusal("axolotl", f"sample_packing with {_attention_of(keys) or 'sdpa'}", because)
    elif keys.get("pad_to_sequence_len"):
        yield "padded", True
    batch, whole = _number(keys.get("micro_batch_size")) or 1, _number(keys.get("batch_size"))
    if "gradient_accumulation_steps" in keys and not keys["gradient_accumulation_steps"] and whole:
        yield "gradient_accumulation_steps", max(1, whole // batch)  # left out it is 1, whatever batch_size says


def _adapters(keys: Keys) -> Pairs:
    """LoRA, its targets, and the quantization of its base, which is read with one adapter each."""
    adapter = None if keys.get("adapter") == "" else keys.get("adapter")
    _towers(keys)
    for problem, because in _adapter_problems(keys, adapter):
        raise refusal("axolotl", problem, because)
    yield "use_peft", adapter is not None
    if adapter is None:
        return
    targets = keys.get("lora_target_modules")
    if keys.get("lora_target_linear"):
        yield "lora_target_modules", "all-linear"
    elif targets:
        yield "lora_target_modules", [targets] if isinstance(targets, str) else targets
    yield "lora_dropout", keys.get("lora_dropout") or 0.0
    if kernels := _lora_kernels(keys):
        yield "lora_kernels", kernels
    yield from _quantization(keys)


def _towers(keys: Keys) -> None:
    """Refuse towers that are frozen, unless adapters are on the language model alone (utils/freeze.py)."""
    beside = keys.get("adapter") and "language_model" in str(keys.get("lora_target_modules"))
    if keys.get("freeze_mm_modules") and not beside:
        raise refusal("axolotl", "freeze_mm_modules: true", "what is trained then is not counted. Use adapter: lora.")


def _adapter_problems(keys: Keys, adapter: object) -> Iterator[tuple[str, str]]:
    """Yield what Axolotl stops at, and adapters that are not counted."""
    if adapter not in (None, "lora", "qlora"):
        yield f"adapter: {adapter}", "it is not counted. Use lora or qlora."
    if adapter is None and (keys.get("load_in_4bit") or keys.get("load_in_8bit")):
        yield "load_in_4bit or load_in_8bit", "Axolotl stops without an adapter. Add adapter: qlora."
    if adapter == "qlora" and not keys.get("load_in_4bit"):
        yield "adapter: qlora", "Axolotl stops without load_in_4bit: true. Add it."
    if keys.get("quantize_moe_experts"):
        if not (keys.get("load_in_4bit") or keys.get("load_in_8bit")):
            yield "quantize_moe_experts: true", "Axolotl stops without load_in_4bit or load_in_8bit. Add one."
        if keys.get("lora_target_linear"):
            because = "Axolotl stops at lora_target_linear beside it. Name lora_target_modules."
            yield "quantize_moe_experts: true", because
    named = any(keys.get(name) for name in ("lora_target_linear", "lora_target_modules", "lora_target_parameters"))
    if adapter and not named:
        yield f"adapter: {adapter}", "it has no target. Add lora_target_linear: true."


def _lora_kernels(keys: Keys) -> list[str]:
    """Return the fused kernels of LoRA that the file sets; all of them if it sets none and Axolotl turns them on.

    Source: utils/schemas/validation.py, `lora_kernels_auto_enable`, `check_lora_kernels_8bit`.
    """
    eight = keys.get("adapter") == "lora" and keys.get("load_in_8bit")
    if all(keys.get(flag) is None for flag in KERNEL_FLAGS):
        return [] if keys.get("rl") or keys.get("trust_remote_code") or eight else [*KERNELS.values()]
    named = [kernel for flag, kernel in KERNELS.items() if keys.get(flag)]
    if named and eight:
        because = "Axolotl stops at fused kernels of LoRA on 8 bits. Leave them out."
        raise refusal("axolotl", f"{next(flag for flag in KERNELS if keys.get(flag))}: true", because)
    return named


def _quantization(keys: Keys) -> Pairs:
    """The quantization of the base, and of its experts (monkeypatch/moe_quant.py)."""
    if keys.get("adapter") == "lora" and keys.get("load_in_8bit"):
        yield "load_in_8bit", True
    if keys.get("adapter") == "qlora":
        yield from _four_bits(keys)
    if keys.get("quantize_moe_experts"):
        yield "quantize_moe_experts", True


def _four_bits(keys: Keys) -> Pairs:
    """The quantization of QLoRA. The dtype of its storage matters where the weights are sharded."""
    own = keys.get("bnb_config_kwargs")
    more: Mapping[str, Any] = own if isinstance(own, Mapping) else {}
    yield "load_in_4bit", True
    yield "bnb_4bit_quant_type", more.get("bnb_4bit_quant_type", "nf4")
    yield "use_bnb_nested_quant", more.get("bnb_4bit_use_double_quant", True)
    if keys.get("fsdp_config") or zero_stage(keys.get("deepspeed"), FETCHED) == 3:
        yield "bnb_4bit_quant_storage", str(more.get("bnb_4bit_quant_storage", "bfloat16")).removeprefix("torch.")


def _precision(keys: Keys) -> Pairs:
    """The dtype of the weights follows that of autocast: bfloat16 unless `bf16` is off ("auto" by default)."""
    if keys.get("bf16", "auto") or keys.get("bfloat16"):
        yield from (("bf16", True), ("dtype", "bfloat16"))
    else:
        half = keys.get("load_in_8bit") or keys.get("fp16") or keys.get("float16")
        yield from (("bf16", False), ("fp16", bool(keys.get("fp16"))), ("dtype", "float16" if half else "float32"))
    if keys.get("tf32", "auto") == "auto" or isinstance(keys.get("tf32"), bool):
        yield "tf32", keys.get("tf32", "auto") in ("auto", True)


def _attention_of(keys: Keys) -> object:
    flags = (name for flag, name in ATTENTION_FLAGS.items() if keys.get(flag))
    return keys.get("attn_implementation") or next(flags, None)


def _attention(keys: Keys) -> Pairs:
    """The kernel. Trained in full without FlashAttention, norms, embeddings and head are float32, which is not counted.

    Source: loaders/model.py, `should_convert_embedding_dtypes`, `_convert_embedding_modules_dtype`.
    """
    kernel = _attention_of(keys)
    if kernel == "xformers":  # without packing the Llama of transformers 5 lacks what its forward pass reads
        because = "Axolotl 0.21 stops at it for Llama, and its memory is not counted. Use flash_attention_2 or sdpa."
        raise refusal("axolotl", "attn_implementation: xformers", because)
    if kernel is not None and kernel not in ATTENTION and "flash-attn" not in str(kernel):
        because = "its memory is not counted. Use flash_attention_2 or sdpa."
        raise refusal("axolotl", f"attn_implementation: {kernel}", because)
    whole = not (keys.get("adapter") or keys.get("deepspeed") or keys.get("fsdp_config"))
    narrow = keys.get("bf16", "auto") or keys.get("bfloat16") or keys.get("fp16") or keys.get("float16")
    if whole and narrow and kernel in WIDE_NORMS and not _cuts(keys):
        because = (
            "it trains norms, embeddings and head in float32 beside 16-bit layers, which is not counted. "
            "Use attn_implementation: flash_attention_2."
        )
        raise refusal("axolotl", f"full fine-tuning with {kernel or 'sdpa'}", because)
    if kernel is not None:
        yield "attn_implementation", kernel


def _checkpointing(keys: Keys) -> Pairs:
    """Checkpoints, and their offloading: with adapters Axolotl's replaces checkpoints, and offloads all that is saved.

    Source: core/builders/base.py, `_configure_gradient_checkpointing`; utils/schemas/validation.py,
    `check_gradient_checkpointing_w_offload`; loaders/patch_manager.py, `_apply_gradient_checkpointing_patches`.
    """
    checkpoints, offload = keys.get("gradient_checkpointing"), keys.get("activation_offloading")
    named = f"activation_offloading: {str(offload).lower()}"
    if checkpoints == "offload":
        offload, named = True, "gradient_checkpointing: offload"
    if checkpoints == "offload_disk" or offload == "disk":
        raise refusal("axolotl", "activation_offloading: disk", "it is not counted. Use gradient_checkpointing: true.")
    if offload is True and keys.get("adapter"):
        because = "with an adapter it offloads all activations, which is not counted. Use gradient_checkpointing: true."
        raise refusal("axolotl", named, because)
    fsdp = keys.get("fsdp_config")
    of_fsdp = isinstance(fsdp, Mapping) and (
        fsdp.get("activation_checkpointing") or fsdp.get("fsdp_activation_checkpointing")
    )
    if checkpoints is not None or of_fsdp:
        yield "gradient_checkpointing", bool(checkpoints or of_fsdp)
    yield "activation_offloading", offload is True
    yield "every_n_layers", 1
    yield "offload", offload in ("legacy", "hidden_states")


def _evaluation(keys: Keys) -> Pairs:
    """An evaluation needs rows and a time: `evals_per_epoch`, `eval_steps` or `eval_strategy`.

    Source: core/builders/base.py, `_configure_save_and_eval_strategy`; utils/config/__init__.py, `normalize_config`.
    """
    rows, when = keys.get("val_set_size") or keys.get("test_datasets"), keys.get("eval_strategy")
    often, epochs = _number(keys.get("evals_per_epoch")), keys.get("num_epochs") or 1
    shares = bool(often) and isinstance(epochs, (int, float)) and often * epochs > 1
    if not rows or when == "no" or not (shares or keys.get("eval_steps") or when):
        yield "eval_strategy", "no"
        return
    yield "eval_strategy", when if when and not (shares or keys.get("eval_steps")) else "steps"
    yield "per_device_eval_batch_size", keys.get("eval_batch_size") or keys.get("micro_batch_size") or 1


def _plugins(keys: Keys) -> list[str]:
    named = keys.get("plugins")
    return [str(each) for each in named] if isinstance(named, list) else []


def _cuts(keys: Keys) -> bool:
    """Return whether the loss is cut cross entropy, which its plugin turns on unless the file turns it off."""
    return any("cut_cross_entropy" in each for each in _plugins(keys)) and bool(keys.get("cut_cross_entropy", True))


def _kernels(keys: Keys) -> Pairs:
    """Liger's kernels and cut cross entropy, which are read with their plugins, and what other plugins do."""
    plugins = _plugins(keys)
    for plugin in plugins:
        if not any(part in plugin for part in PLUGINS):
            raise refusal("axolotl", f"plugin {plugin}", "what it changes is not counted. Leave it out.")
    cut = _cuts(keys) and method(keys) == "sft"  # other trainers give the model no labels
    if cut:
        yield "cut_cross_entropy", True
    liger = any("liger" in each for each in plugins)
    layers = liger and any(keys.get(name) for name in LIGER_LAYERS)
    fused = liger and keys.get("liger_fused_linear_cross_entropy")
    if bool(layers) != bool(fused) and not (cut and not fused):
        because = "its loss and layers are planned together. Set liger_fused_linear_cross_entropy and liger_rms_norm."
        raise refusal("axolotl", "plugin LigerPlugin", because)
    yield "use_liger_kernel", bool(layers)


FSDP_1_KEYS = frozenset(("sharding_strategy", "forward_prefetch"))  # validation.py, `FSDP1_ONLY_REJECTED_KEYS`


def _sharding(keys: Keys) -> Pairs:
    """FSDP2, the only one, and a DeepSpeed config: a file, a mapping, or one that `axolotl fetch` writes."""
    fsdp = keys.get("fsdp_config")
    if isinstance(fsdp, Mapping) and fsdp:
        own = {str(name).removeprefix("fsdp_"): value for name, value in fsdp.items()}
        if "1" in (str(own.get("version")), str(keys.get("fsdp_version"))):
            raise refusal("axolotl", "fsdp_config of FSDP 1", "Axolotl 0.21 stops at it. Use fsdp_version: 2.")
        for name in FSDP_1_KEYS.intersection(own):
            because = "Axolotl 0.21 stops at it, of FSDP 1. Leave it out: reshard_after_forward is true by default."
            raise refusal("axolotl", f"fsdp_config.{name}", because)
        yield "distributed_type", "FSDP"
        yield "fsdp_offload_params", bool(own.get("offload_params"))
        yield "sync_each_batch", _syncs(keys)
        if own.get("reshard_after_forward") is False:
            raise refusal("axolotl", "fsdp_config.reshard_after_forward: false", "it is not counted. Use true.")
    if keys.get("deepspeed"):
        yield "deepspeed", deepspeed_config(keys["deepspeed"], FETCHED)


def _syncs(keys: Keys) -> bool:
    config = keys.get("accelerator_config")
    kwargs = config.get("gradient_accumulation_kwargs") if isinstance(config, Mapping) else None
    return isinstance(kwargs, Mapping) and bool(kwargs.get("sync_each_batch"))


# Keys of the mapping `trl` -> arguments of GRPOConfig: utils/schemas/trl.py; core/trainers/grpo/__init__.py.
OF_TRL = (
    "beta", "max_completion_length", "num_generations", "num_iterations", "use_vllm", "vllm_mode",
    "vllm_enable_sleep_mode", "steps_per_generation",
)  # fmt: skip
# Keys of the mapping `vllm` -> settings of TRL's engine.
OF_VLLM = {
    "gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "tensor_parallel_size": "vllm_tensor_parallel_size",
    "data_parallel_size": "vllm_data_parallel_size",
    "max_model_len": "vllm_max_model_length",
}


# Candidate fields that they spell and a search decides.
ENGINE_FIELDS = (
    "vllm", "vllm_enable_sleep_mode", "vllm_gpu_memory_utilization", "vllm_tensor_parallel_size",
    "vllm_max_model_length",
)  # fmt: skip


def _reinforcement(keys: Keys) -> Pairs:
    """The settings of GRPO in the mappings `trl` and `vllm`, and the weight of the loss's other term."""
    trl, vllm = keys.get("trl"), keys.get("vllm")
    own: Mapping[str, object] = trl if isinstance(trl, Mapping) else {}
    if method(keys) == "grpo":
        yield from ((name, own[name]) for name in OF_TRL if own.get(name) is not None)
        if isinstance(vllm, Mapping) and own.get("use_vllm"):
            yield from ((OF_VLLM[name], vllm[name]) for name in OF_VLLM if vllm.get(name) is not None)
    betas = [each for each in (own.get("beta"), keys.get("rl_beta"), keys.get("orpo_alpha")) if each is not None]
    if betas and keys.get("rl"):
        yield "beta", betas[0]


NOT_COUNTED = "what it changes is not counted. Leave it out."
ELSEWHERE = "it shares rows, heads or experts between GPUs in a way that is not counted. Use FSDP2 or DeepSpeed alone."
REFUSED = {
    **{
        name: Refused(because=NOT_COUNTED)
        for name in (
            "unfrozen_parameters", "layer_offloading",
            "selective_checkpointing", "tiled_mlp", "chunked_cross_entropy", "use_eaft", "use_dft", "flash_optimum",
            "flash_attn_cross_entropy", "gemma4_hybrid_attn_impl", "ple_cpu_offload",
            "qat", "fp8", "relora", "lisa_n_layers", "ebft", "diffusion", "diffusion_lm", "process_reward_model",
            "trainer_cls", "fp32_norms", "use_onebitllms", "deepcompile", "peft_layer_replication", "lora_rank_pattern",
            "peft_layers_to_transform", "peft_trainable_token_indices", "scaling_softmax", "use_scattermoe",
            "use_sonicmoe", "large_head_attention",
        )
    },
    **{
        name: Refused(because=ELSEWHERE, harmless=(*OFF, 1))
        for name in (
            "context_parallel_size", "tensor_parallel_size", "expert_parallel_size", "sequence_parallel_degree",
        )
    },
    "llama4_linearized_experts": Refused(
        because="a checkpoint whose experts are linear layers is not counted. Use base_model: "
        "meta-llama/Llama-4-Scout-17B-16E-Instruct with quantize_moe_experts: true."
    ),
    "fsdp": Refused(because="Axolotl 0.21 stops at it, FSDP 1 was removed. Use fsdp_config with fsdp_version: 2."),
    "nf4_backend": Refused(because="it is not counted. Use bitsandbytes.", harmless=(*OFF, "bitsandbytes")),
}  # fmt: skip


def _write_adapter(candidate: Candidate) -> dict[str, object]:
    if candidate.tuning == "full":
        return {"adapter": None, "load_in_4bit": None, "load_in_8bit": None}
    four, eight = candidate.quantization_row.four_bit, candidate.quantization_row.eight_bit
    at_load = candidate.quantization_row.bitsandbytes
    return {
        "adapter": "qlora" if four and at_load else "lora",
        "load_in_4bit": four and at_load,
        "load_in_8bit": eight and at_load,
        "quantize_moe_experts": candidate.quantization_row.keeps_experts or None,
        "lora_r": candidate.lora_r,
        **_write_targets(candidate),
        **_write_nested(candidate),
    }


def _write_engine(candidate: Candidate) -> dict[str, object]:
    """The engine in the mappings `trl` and `vllm`, of which other keys stay (core/trainers/grpo/__init__.py)."""
    if candidate.vllm == "off":
        return {"trl": {"use_vllm": False}}
    slept = {"vllm_enable_sleep_mode": candidate.vllm_enable_sleep_mode} if candidate.vllm == "colocate" else {}
    engine = {key: getattr(candidate, setting) for key, setting in OF_VLLM.items()}
    return {
        "trl": {"use_vllm": True, "vllm_mode": candidate.vllm, **slept},
        "vllm": {key: value for key, value in engine.items() if value and key != "data_parallel_size"},
    }


def _write_targets(candidate: Candidate) -> dict[str, object]:
    targets = candidate.lora_target_modules
    if targets == ("all-linear",):
        return {"lora_target_linear": True, "lora_target_modules": None}
    # PEFT reads a string as an expression, and each entry of a list as a name
    return {"lora_target_linear": False, "lora_target_modules": targets[0] if is_expression(targets) else [*targets]}


def _write_nested(candidate: Candidate) -> dict[str, object]:
    """Double quantization, which Axolotl's 4-bit bases have unless the mapping says otherwise."""
    row = candidate.quantization_row
    if not (row.four_bit and row.bitsandbytes):
        return {}
    return {"bnb_config_kwargs": {"bnb_4bit_use_double_quant": bool(row.spelling["use_bnb_nested_quant"])}}


def _write_sharding(candidate: Candidate) -> dict[str, object]:
    """FSDP2 in its mapping, or the DeepSpeed config beside the file."""
    if candidate.scheme_row.section == "fsdp_config":
        wrap = {"offload_params": candidate.offload_param, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
        return {"fsdp_version": 2, "fsdp_config": wrap, "deepspeed": None}
    return {"deepspeed": DEEPSPEED_FILE if candidate.scheme_row.stage else None, "fsdp_config": None}


AXOLOTL = Dialect(
    tool="axolotl",
    marks=("base_model",),
    names={
        "base_model": "model_name_or_path",
        "micro_batch_size": "per_device_train_batch_size",
        "gradient_accumulation_steps": "gradient_accumulation_steps",
        "lora_r": "lora_r",
        "lora_modules_to_save": "lora_modules_to_save",
        "lora_target_parameters": "lora_target_parameters",
        "peft_use_dora": "use_dora",
        "peft_autocast_adapter_dtype": "autocast_adapter_dtype",
        "optimizer": "optim",
        "sample_packing": "packing",
        "batch_flattening": "padding_free",
        "dp_replicate_size": "dp_replicate_size",
        "precompute_ref_log_probs": "precompute_ref_log_probs",
    },
    defaults={
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "gradient_checkpointing": False,
    },
    settings=settings,
    read=frozenset(
        (
            "rl", "reward_model", "freeze_mm_modules", "sequence_len", "pad_to_sequence_len", "batch_size", "adapter",
            "lora_target_modules",
            "lora_target_linear", "lora_dropout", "load_in_4bit", "load_in_8bit", "quantize_moe_experts",
            "bnb_config_kwargs", "bf16", "fp16",
            "bfloat16", "float16", "tf32", "attn_implementation", *ATTENTION_FLAGS, "gradient_checkpointing",
            "activation_offloading", "val_set_size", "test_datasets", "eval_strategy",
            "evals_per_epoch", "eval_steps", "eval_batch_size", "eval_sample_packing", "num_epochs", "plugins",
            "cut_cross_entropy", *LIGER_LAYERS, "liger_fused_linear_cross_entropy", "fsdp_config",
            "fsdp_version", "deepspeed", "accelerator_config", "trl", "vllm", "rl_beta", "orpo_alpha",
            "group_by_length", *KERNEL_FLAGS,
        )
    ),
    method=method,
    writes={
        "per_device_train_batch_size": lambda candidate: {"micro_batch_size": candidate.per_device_train_batch_size},
        "gradient_accumulation_steps": lambda candidate: {
            "gradient_accumulation_steps": candidate.gradient_accumulation_steps, "batch_size": None,
        },
        "per_device_eval_batch_size": lambda candidate: {"eval_batch_size": candidate.per_device_eval_batch_size},
        "max_length": lambda candidate: {"sequence_len": candidate.max_length},
        "packing": lambda candidate: {"sample_packing": candidate.packing},
        "optim": lambda candidate: {"optimizer": candidate.optim},
        "gradient_checkpointing": lambda candidate: {"gradient_checkpointing": candidate.gradient_checkpointing},
        "attn_implementation": lambda candidate: {
            "attn_implementation": candidate.attn_implementation, **dict.fromkeys(ATTENTION_FLAGS),
        },
        "tf32": lambda candidate: {"tf32": candidate.tf32},
        "lora_r": lambda candidate: {"lora_r": candidate.lora_r},
        "lora_kernels": lambda candidate: {
            flag: kernel in candidate.lora_kernels for flag, kernel in KERNELS.items()
        },
        "lora_target_modules": _write_targets,
        **dict.fromkeys(ENGINE_FIELDS, _write_engine),
        "offload_param": _write_sharding,
        "tuning": _write_adapter,
        "quantization": _write_adapter,
        "sharding": _write_sharding,
    },
    refused=REFUSED,
    unmodelled=frozenset(
        (
            "gradient_checkpointing_kwargs", "liger_layer_norm", "dp_shard_size",
            "torch_compile", "neftune_noise_alpha", "use_kernels", "experts_implementation", "ddp_bucket_cap_mb",
            "cut_cross_entropy_accum_c_fp32", "cut_cross_entropy_c_grad_chunk_size",
            "ddp_find_unused_parameters", "auto_find_batch_size", "torch_empty_cache_steps", "max_memory",
            "gpu_memory_limit", "peft_init_lora_weights", "sdpa_varlen", "fused_attn_kernel", "flash_attn_fuse_mlp",
            "flash_attn_rms_norm", "do_bench_eval", "do_causal_lm_eval", "eval_table_size", "generate_samples",
            "liger_cross_entropy", "liger_rms_norm_gated", "shrink_embeddings", "lora_on_cpu",
        )
    ),
)  # fmt: skip


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0

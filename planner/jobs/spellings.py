"""Names and values of settings in TRL, PEFT, Transformers, accelerate, DeepSpeed and vLLM that differ from Candidate's.

A Candidate field that has the same name and values in these libraries needs no entry.
"""

Value = str | int | float | bool | tuple[str, ...] | None

# Candidate fields that are several settings of a library: field -> value -> {setting: its value}. A setting that a row
# does not name is off or unset. If several rows agree with the settings of a user, the first one counts.
SPELLINGS: dict[str, dict[str | bool, dict[str, Value]]] = {
    # Source: trl/trainer/model_config.py.
    "tuning": {"full": {"use_peft": False}, "lora": {"use_peft": True}},
    # Source: trl/trainer/model_config.py, get_quantization_config. quant_method: a key of `quantization_config` in the
    # config.json of a published checkpoint.
    "quantization": {
        "none": {"load_in_4bit": False, "load_in_8bit": False},
        "nf4": {
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": "nf4",
            "use_bnb_nested_quant": False,
        },
        "nf4-double": {
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": "nf4",
            "use_bnb_nested_quant": True,
        },
        "int8": {"load_in_4bit": False, "load_in_8bit": True},
        "gptq": {"load_in_4bit": False, "load_in_8bit": False, "quant_method": "gptq"},
        "awq": {"load_in_4bit": False, "load_in_8bit": False, "quant_method": "awq"},
        "fp8": {"load_in_4bit": False, "load_in_8bit": False, "quant_method": "fp8"},
        "mxfp4": {"load_in_4bit": False, "load_in_8bit": False, "quant_method": "mxfp4"},
    },
    # Source: transformers/training_args.py. `bf16: false` alone trains without autocast.
    "precision": {
        "bf16": {"bf16": True, "fp16": False},
        "no": {"bf16": False, "fp16": False},
        "fp16": {"bf16": False, "fp16": True},
    },
    # Source: accelerate's launch file, trl/accelerate_configs/*.yaml.
    "sharding": {
        "none": {"distributed_type": "NO"},
        "ddp": {"distributed_type": "MULTI_GPU"},
        "zero1": {"distributed_type": "DEEPSPEED", "zero_stage": 1},
        "zero2": {"distributed_type": "DEEPSPEED", "zero_stage": 2},
        "zero3": {"distributed_type": "DEEPSPEED", "zero_stage": 3},
        "fsdp2": {"distributed_type": "FSDP", "fsdp_version": 2},
    },
    "offload_optimizer": {False: {"offload_optimizer_device": "none"}, True: {"offload_optimizer_device": "cpu"}},
    "offload_param": {False: {"offload_param_device": "none"}, True: {"offload_param_device": "cpu"}},
    # Source: trl/trainer/grpo_config.py, use_vllm and vllm_mode.
    "vllm": {
        "off": {"use_vllm": False},
        "colocate": {"use_vllm": True, "vllm_mode": "colocate"},
        "server": {"use_vllm": True, "vllm_mode": "server"},
    },
    # Source: torch/cuda/memory.py; read from the environment before the first allocation.
    "expandable_segments": {
        False: {"PYTORCH_CUDA_ALLOC_CONF": ""},
        True: {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    },
}
# A setting of a library -> the Candidate field that it decides.
FIELD_OF_SETTING: dict[str, str] = {
    name: field for field, rows in SPELLINGS.items() for row in rows.values() for name in row
}

FSDP_OFFLOAD = "fsdp_offload_params"  # of accelerate; FSDP offloads parameters, gradients and optimizer together

# Other names of a Candidate field, accepted wherever settings are read.
ALIASES: dict[str, str] = {
    "model_name_or_path": "model",
    "reward_model_name_or_path": "reward_model",  # trl/scripts/grpo.py
    "reward_model_path": "reward_model",  # PPO
    "teacher_model_name_or_path": "teacher_model",  # trl/trainer/distillation_config.py
    "torch_dtype": "dtype",  # transformers 4
    "max_seq_length": "max_length",  # trl before 0.20
    "max_new_tokens": "max_completion_length",  # online DPO, GKD
    "response_length": "max_completion_length",  # PPO
    "max_prompt_length": "prompt_length",  # trl before 1.0
    "kl_coef": "beta",  # PPO
    "activation_checkpointing": "gradient_checkpointing",  # transformers 5.23, training_args.py:908
    "every_n_layers": "checkpoint_every_n_layers",  # a key of gradient_checkpointing_kwargs
    "offload": "checkpoint_offload",  # a key of gradient_checkpointing_kwargs
    "num_machines": "num_nodes",  # accelerate
    "mixed_precision": "precision",  # accelerate
    "parallelism_config_dp_replicate_size": "dp_replicate_size",
    "parallelism_config_cp_size": "cp_size",  # accelerate, commands/launch.py
    "parallelism_config_sp_size": "sp_size",
    FSDP_OFFLOAD: "offload_param",
    "offload_params": "offload_param",  # the same in an fsdp_config
}
# Candidate field -> its name in files and reports that we write, if it differs; single methods have `argument_names`.
WRITTEN_NAMES: dict[str, str] = {
    "model": "model_name_or_path",
    "reward_model": "reward_model_name_or_path",
    "teacher_model": "teacher_model_name_or_path",
    "num_nodes": "num_machines",
    "checkpoint_every_n_layers": "every_n_layers",  # of gradient_checkpointing_kwargs
}

# Candidate field -> other spellings of its values.
VALUE_ALIASES: dict[str, dict[str, str]] = {
    "dtype": {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"},
    "attn_implementation": {  # FlashAttention kernels on the Hub, trl/docs kernels_hub
        "kernels-community/flash-attn2": "flash_attention_2",
        "kernels-community/flash-attn3": "flash_attention_3",
        "kernels-community/vllm-flash-attn3": "flash_attention_3",
    },
}

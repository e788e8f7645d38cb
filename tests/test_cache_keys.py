"""The caches of an estimate: what is remembered for one candidate is never the answer for another."""

import sys
from functools import _lru_cache_wrapper
from typing import Any

import pytest
from msgspec.structs import replace

from planner.cache_keys import StateSettings, TrainingSettings, state_settings, training_settings
from planner.candidate import FIELDS, Candidate
from planner.errors import PlanError
from planner.estimation import estimate
from planner.gpus.parse import parse_cluster
from planner.models.catalogue import load_model
from planner.quantities import Estimate
from planner.rows.lengths import lengths_in_words

CLUSTER = parse_cluster("4xA100-80G", None)
MODEL = load_model("Qwen2.5-0.5B")
TEACHER = load_model("Qwen2.5-1.5B")
LENGTHS = lengths_in_words("rows=100,p50=300,max=5000")
MIXTURE = load_model("allenai/OLMoE-1B-7B-0924")
SEEING = load_model("google/gemma-3-4b-it")
COLOCATED = {"vllm": "colocate", "vllm_max_model_length": 2048, "num_processes": 2}

BASES: dict[str, dict[str, Any]] = {
    "sft in full": {"method": "sft"},
    "sft of QLoRA": {"method": "sft", "tuning": "lora", "quantization": "nf4", "dtype": "bfloat16"},
    "sft of QLoRA under FSDP2": {
        "method": "sft", "tuning": "lora", "quantization": "nf4", "dtype": "bfloat16", "sharding": "fsdp2",
        "num_processes": 2,
    },
    "sft with an offloaded optimizer": {
        "method": "sft", "sharding": "zero2", "num_processes": 4, "offload_optimizer": True,
    },
    "sft under FSDP2, accumulating": {
        "method": "sft", "sharding": "fsdp2", "num_processes": 4, "gradient_accumulation_steps": 4,
    },
    "dpo under ZeRO-3": {"method": "dpo", "beta": 0.1, "sharding": "zero3", "num_processes": 4},
    "dpo of LoRA under DDP": {
        "method": "dpo", "tuning": "lora", "sharding": "ddp", "num_processes": 4, "dtype": "bfloat16",
    },
    "grpo by generate under ZeRO-3": {"method": "grpo", "beta": 0.04, "sharding": "zero3", "num_processes": 4},
    "grpo of LoRA beside vLLM": {
        "method": "grpo", "tuning": "lora", "dtype": "bfloat16", "sharding": "ddp", **COLOCATED,
    },
    "rloo beside vLLM under FSDP2": {"method": "rloo", "sharding": "fsdp2", **COLOCATED},
    "online-dpo with a vLLM server": {
        "method": "online-dpo", "vllm": "server", "num_processes": 2, "sharding": "zero1",
    },
    "async-grpo": {
        "method": "async-grpo", "vllm": "server", "attn_implementation": "flash_attention_3", "token_budget": 4096,
    },
    "a2po": {"method": "a2po", "num_value_samples": 64, "max_completion_length": 1024},
    "distillation": {"method": "distillation", "teacher_model": TEACHER},
    "async-distillation": {
        "method": "async-distillation", "vllm": "server", "attn_implementation": "flash_attention_3",
        "token_budget": 4096, "teacher_server_model": TEACHER, "teacher_server_gpus": 1,
    },
    "ppo": {"method": "ppo", "tuning": "lora"},
    "gkd": {"method": "gkd", "teacher_model": TEACHER},
    "sft of packed rows": {"method": "sft", "packing": True, "attn_implementation": "flash_attention_2"},
    "sft of rows of known lengths": {"method": "sft", "lengths": LENGTHS},
    "sft with an evaluation": {
        "method": "sft", "eval_strategy": "steps", "compute_metrics": True, "eval_rows": 100,
    },
    "sft of experts": {
        "method": "sft", "model": MIXTURE, "tuning": "lora", "lora_target_modules": ("q_proj",),
        "lora_target_parameters": ("mlp.experts.gate_up_proj",),
    },
    "sft of images": {"method": "sft", "model": SEEING, "images_per_row": 1},
}  # fmt: skip

# Two valid values of every field: the second is tried where a base candidate has the first.
OTHER_VALUES: dict[str, tuple[object, object]] = {
    "model": (TEACHER, MODEL),
    "method": ("kto", "sft"),
    "trl_version": ("1.12", "1.16"),
    "tool": ("axolotl", "trl"),
    "torch_version": ("2.14", "2.13"),
    "vllm_version": ("0.27", "0.19"),
    "tuning": ("lora", "full"),
    "lora_r": (64, 16),
    "lora_target_modules": (("q_proj", "v_proj"), ("all-linear",)),
    "lora_target_parameters": (("mlp.experts.down_proj",), ("mlp.experts.gate_up_proj",)),
    "lora_dropout": (0.05, 0.0),
    "lora_modules_to_save": (("lm_head",), ()),
    "lora_kernels": (("mlp",), ()),
    "use_dora": (True, False),
    "autocast_adapter_dtype": (False, True),
    "resume_from_checkpoint": ("", "true"),
    "dtype": ("bfloat16", "float32"),
    "precision": ("no", "bf16"),
    "tf32": (True, False),
    "quantization": ("int8", "none"),
    "bnb_4bit_quant_storage": ("bfloat16", "uint8"),
    "prepare_model_for_kbit_training": (True, False),
    "float32_adapters": (True, False),
    "per_device_train_batch_size": (4, 8),
    "gradient_accumulation_steps": (4, 1),
    "max_length": (2048, 1024),
    "prompt_length": (1024, 512),
    "max_completion_length": (256, 512),
    "num_generations": (4, 8),
    "steps_per_generation": (4, 1),
    "num_iterations": (2, 1),
    "num_value_samples": (16, 8),
    "teacher_server_model": (TEACHER, MODEL),
    "teacher_server_gpus": (2, 1),
    "teacher_server_gpu_memory_utilization": (0.5, 0.9),
    "token_budget": (8192, 4096),
    "max_staleness": (1, 4),
    "padded": (False, True),
    "lengths": (LENGTHS, None),
    "completion_lengths": (LENGTHS, None),
    "train_sampling_strategy": ("group_by_length", "random"),
    "images_per_row": (2, 1),
    "image_size": ("1024x768", ""),
    "packing": (True, False),
    "packing_strategy": ("wrapped", "bfd"),
    "padding_free": (True, False),
    "beta": (0.2, 0.0),
    "lmbda": (0.0, 0.5),
    "use_uld_loss": (True, False),
    "precompute_ref_log_probs": (True, False),
    "eval_strategy": ("steps", "no"),
    "per_device_eval_batch_size": (4, 8),
    "num_generations_eval": (2, 0),
    "compute_metrics": (True, False),
    "prediction_loss_only": (True, False),
    "eval_accumulation_steps": (2, 0),
    "eval_rows": (64, 100),
    "gradient_checkpointing": (False, True),
    "checkpoint_every_n_layers": (2, 1),
    "checkpoint_offload": (True, False),
    "activation_offloading": (True, False),
    "attn_implementation": ("flash_attention_2", "sdpa"),
    "use_liger_kernel": (True, False),
    "use_kernels": (True, False),
    "cut_cross_entropy": (True, False),
    "optim": ("adamw_8bit", "adamw_torch_fused"),
    "sharding": ("zero2", "ddp"),
    "num_processes": (3, 2),
    "num_nodes": (2, 1),
    "dp_replicate_size": (2, 1),
    "cp_size": (2, 1),
    "sp_size": (2, 1),
    "ep_size": (2, 1),
    "tp_size": (2, 1),
    "sync_each_batch": (True, False),
    "offload_optimizer": (True, False),
    "offload_param": (True, False),
    "ds3_gather_for_generation": (False, True),
    "reduce_bucket_size": (10**6, "auto"),
    "stage3_prefetch_bucket_size": (10**6, "auto"),
    "stage3_param_persistence_threshold": (10**4, "auto"),
    "stage3_max_live_parameters": (10**6, 10**9),
    "stage3_max_reuse_distance": (10**6, 10**9),
    "sub_group_size": (10**6, 10**9),
    "vllm": ("off", "colocate"),
    "vllm_gpu_memory_utilization": (0.5, 0.3),
    "vllm_tensor_parallel_size": (2, 1),
    "vllm_data_parallel_size": (2, 1),
    "vllm_max_model_length": (4096, 0),
    "vllm_enable_sleep_mode": (True, False),
    "reward_model": (TEACHER, None),
    "teacher_model": (MODEL, None),
    "teacher_dtype": ("bfloat16", "student"),
    "expandable_segments": (True, False),
}
FIELDS = list(FIELDS)


def base(name: str) -> Candidate:
    return Candidate(**({"model": MODEL} | BASES[name]))


def changed(candidate: Candidate, field: str) -> Candidate:
    first, second = OTHER_VALUES[field]
    settings: dict[str, Any] = {field: second if getattr(candidate, field) == first else first}
    return replace(candidate, **settings)


def outcome(candidate: Candidate) -> Estimate | str:
    """The estimate, or the message of a refusal: some fields alone make a candidate that the libraries refuse."""
    try:
        return estimate(candidate, CLUSTER)
    except PlanError as error:
        return str(error)


def clear_caches() -> None:
    """Empty every cache of planner/ but those of the model catalogue, whose shapes are compared by identity."""
    for name, module in list(sys.modules.items()):
        for value in vars(module).values() if name.startswith("planner.") else ():
            if isinstance(value, _lru_cache_wrapper) and value.__module__ != "planner.models.catalogue":
                value.cache_clear()


@pytest.fixture(scope="module")
def with_warm_caches() -> dict[tuple[str, str], Estimate | str]:
    """Every base candidate with every field changed, estimated one after the other behind all base candidates."""
    for name in BASES:
        outcome(base(name))
    return {(name, field): outcome(changed(base(name), field)) for name in BASES for field in FIELDS}


def test_every_field_of_a_candidate_has_two_values() -> None:
    assert set(OTHER_VALUES) == set(FIELDS)
    assert all(first != second for first, second in OTHER_VALUES.values())


@pytest.mark.parametrize("name", BASES)
def test_every_base_candidate_can_be_estimated(name: str) -> None:
    assert isinstance(outcome(base(name)), Estimate)


@pytest.mark.parametrize("field", FIELDS)
def test_an_estimate_with_warm_caches_is_the_one_with_empty_caches(
    field: str, with_warm_caches: dict[tuple[str, str], Estimate | str]
) -> None:
    """Caches empty of every candidate without the change."""
    clear_caches()
    for name in BASES:
        assert outcome(changed(base(name), field)) == with_warm_caches[name, field], name


@pytest.mark.parametrize("name", BASES)
def test_a_key_holds_the_settings_of_its_candidate(name: str) -> None:
    candidate = base(name)
    training, states = training_settings(candidate), state_settings(candidate)
    assert all(getattr(training, field) == getattr(candidate, field) for field in TrainingSettings.__struct_fields__)
    assert all(getattr(states, field) == getattr(candidate, field) for field in StateSettings.__struct_fields__)
    assert state_settings(training) == states

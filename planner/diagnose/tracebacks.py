"""Find the phase of the training step in which a traceback ends, from the library functions in its frames."""

import re
from collections.abc import Sequence

from msgspec import Struct

from planner.diagnose.frames import Frame
from planner.diagnose.incident import Activity
from planner.quantities import Phase


class CodeLocation(Struct, frozen=True, kw_only=True):
    """Library functions that run only in one phase, or a regular expression of a call that a frame's line makes.

    `path` is a regular expression that the frame's file must match.
    """

    phase: Phase
    functions: frozenset[str] = frozenset()
    path: str = ""
    calls: str = ""

    def contains(self, frame: Frame) -> bool:
        """True if the frame is one of these functions, or makes the call."""
        is_one = frame.function in self.functions or (self.calls and re.search(self.calls, frame.source))
        return bool(is_one) and re.search(self.path, frame.path) is not None


# Functions of vLLM that run while an engine starts.
STARTS_ENGINE = frozenset(
    {
        "from_engine_args",
        "_initialize_kv_caches",
        "initialize_from_config",
        "determine_available_memory",
        "profile_run",
        "init_device",
        "_allocate_kv_cache",
        "determine_num_available_blocks",
        "initialize_cache",
        "_dummy_sampler_run",
        "compile_or_warm_up_model",
    }
)
LOADS_ENGINE = frozenset({"load_model", "make_layers"})
CAPTURES_ENGINE = frozenset({"capture_model", "_capture_cudagraphs"})
# Functions of vLLM that run while an engine that has started generates.
RUNS_ENGINE = frozenset(
    {"run_busy_loop", "_process_engine_step", "execute_model", "apply_top_k_top_p", "sample_tokens"}
)
# Functions of SGLang that run while it starts, and while it generates. Source: sglang, srt/model_executor/ and
# srt/managers/scheduler.py.
STARTS_SGLANG = frozenset({"initialize", "init_cuda_graphs", "init_memory_pool", "load_model"})
RUNS_SGLANG = frozenset({"event_loop_normal", "event_loop_overlap", "run_batch", "forward_batch_generation"})
# Functions of transformers' Trainer, and of TRL's, that run in an evaluation only.
EVALUATES = frozenset({"evaluation_loop", "prediction_loop", "prediction_step", "_evaluate"})
# Functions that merge adapters for a checkpoint: of Unsloth's save.py and unsloth_zoo's saving_utils.py, of torchtune's
# modules/peft/_utils.py.
MERGES = frozenset({"_merge_lora", "merge_and_overwrite_lora", "_merge_and_overwrite_lora", "get_merged_lora_ckpt"})
JOINS_LOGITS = frozenset({"nested_concat", "torch_pad_and_concatenate"})
# Functions of DeepSpeed's runtime/zero/parameter_offload.py and, in older releases, stage3.py, which gather parameters.
ZERO3_BEFORE_FORWARD = frozenset({"_pre_forward_module_hook", "pre_sub_module_forward_function"})
ZERO3_BEFORE_BACKWARD = frozenset({"_pre_backward_module_hook", "pre_sub_module_backward_function"})
# Functions of torch/distributed/fsdp/_init_utils.py and fully_sharded_data_parallel.py that wrap a model.
STARTS_FSDP = frozenset(
    {"_auto_wrap", "_init_param_handle_from_module", "_init_param_handle_from_params", "_move_module_to_device"}
)
# Functions of verl's workers: those that sample, that compute log-probabilities, and that train.
SAMPLES_VERL = frozenset({"generate_sequences"})
CALLS_SCORES_VERL = (
    r"_wg\.compute_(?:(?:ref_)?log_prob|values)\("  # of its driver: a worker that is killed leaves no frames
)
SCORES_VERL = frozenset({"compute_log_prob", "compute_ref_log_prob", "compute_values"})
TRAINS_VERL = frozenset({"update_policy", "update_actor", "update_critic"})

# The first location with a frame in the traceback decides. Order matters: an evaluation has a forward pass and a loss,
# a rollout runs inside the function that scores it, and a recomputed forward pass inside a backward pass.
# Source: trl 1.16, trainer/grpo_trainer.py, generation/vllm_generation.py, experimental/; transformers 5.23,
# trainer.py, generation/utils.py; accelerate 1.15, accelerator.py; torch 2.13, autograd/; deepspeed 0.19.8,
# runtime/engine.py.
CODE_LOCATIONS: tuple[CodeLocation, ...] = (
    CodeLocation(phase="load", functions=STARTS_ENGINE | LOADS_ENGINE | CAPTURES_ENGINE, path=r"vllm"),
    CodeLocation(phase="rollout", functions=RUNS_ENGINE, path=r"vllm"),
    CodeLocation(phase="rollout", functions=RUNS_SGLANG, path=r"sglang/"),
    CodeLocation(phase="load", functions=STARTS_SGLANG, path=r"sglang/"),
    CodeLocation(phase="load", calls=r"torch\.cuda\.graph\(", path=r"vllm/"),
    CodeLocation(phase="evaluation", functions=EVALUATES | JOINS_LOGITS),
    CodeLocation(phase="evaluation", functions=frozenset({"predict", "evaluate"}), path=r"transformers/trainer"),
    CodeLocation(
        phase="weight_sync",
        functions=frozenset(
            {
                "sync_weights",
                "_move_model_to_vllm",
                "_sync_fsdp1_params_to_vllm",
                "_sync_fsdp2_params_to_vllm",
                "merge_adapter",
                "update_flattened_params",
                "update_named_param",
                "update_weights",
            }
        ),
    ),
    CodeLocation(
        phase="rollout",
        functions=frozenset(
            {
                "generate",
                "_generate",
                "_generate_single_turn",
                "_generate_vllm",
                "_generate_vllm_server",
                "_generate_vllm_colocate",
                "wake_up",
                "unwrap_model_for_generation",
            }
        ),
    ),
    CodeLocation(phase="score", functions=frozenset({"_generate_and_score_completions", "compute_ref_log_probs"})),
    CodeLocation(phase="rollout", functions=SAMPLES_VERL, path=r"verl/"),
    # accelerate's `backward` of DeepSpeed steps too
    CodeLocation(phase="optimizer_step", functions=frozenset({"_take_model_step"}), path=r"deepspeed/"),
    CodeLocation(
        phase="backward",
        functions=frozenset({"backward", "run_backward", "_engine_run_backward"}),
        path=r"torch/|accelerate|deepspeed",
    ),
    CodeLocation(
        phase="optimizer_step",
        functions=frozenset(
            {
                "step",
                "step_with_ready_grads",
                "_init_group",
                "_multi_tensor_adam",
                "_multi_tensor_adamw",
                "_single_tensor_adam",
                "_single_tensor_adamw",
                "initialize_optimizer_states",
                "_setup_for_real_optimizer",
                "_create_fp32_partitions",
            }
        ),
        path=r"optim|deepspeed|bitsandbytes",
    ),
    CodeLocation(
        phase="optimizer_step",
        functions=frozenset({"_load_optimizer_and_scheduler", "load_fsdp_optimizer", "set_optimizer_state_dict"}),
    ),
    CodeLocation(
        phase="optimizer_step",
        functions=frozenset({"_load_zero_checkpoint", "_rigid_load_state_dict", "load_state_dict"}),
        path=r"deepspeed/|torch/optim",
    ),
    CodeLocation(phase="optimizer_step", functions=frozenset({"wrapper"}), path=r"torch/optim/optimizer\.py"),
    CodeLocation(
        phase="save",
        functions=frozenset(
            {
                "_save_checkpoint",
                "save_model",
                "_save_optimizer_and_scheduler",
                "save_pretrained",
                "_load_best_model",  # after the last checkpoint, beside the model and its states
                "save_16bit_model",
                "save_fsdp_model",
                "save_fsdp_optimizer",
                "get_state_dict",
                "get_model_state_dict",
                "_full_post_state_dict_hook",
                "_full_pre_state_dict_hook",
                "summon_full_params",
                "_zero3_consolidated_16bit_state_dict",
                "save_state_dict",
                "merge_and_unload",
                "_unload_and_optionally_merge",
                *MERGES,
                # of scripts that many copy: llama-recipes, FastChat
                "save_checkpoint",
                "save_model_checkpoint",
                "save_model_and_optimizer_sharded",
                "safe_save_model_for_hf_trainer",
            }
        ),
    ),
    CodeLocation(
        phase="loss",
        functions=frozenset(
            {
                "cross_entropy",
                "fixed_cross_entropy",
                "ForCausalLMLoss",
                "log_softmax",
                "selective_log_softmax",
                "entropy_from_logits",
                "compute_log_probs",
                "calculate_log_probs_and_entropy",
                "vocab_parallel_softmax",
                "vocab_parallel_entropy",
                "logprobs_from_logits",
                "log_probs_from_logits",
                "get_batch_logps",
                "fused_vocab_parallel_cross_entropy",
            }
        ),
    ),
    CodeLocation(
        phase="loss", functions=frozenset({"forward", "backward"}), path=r"trl/kernels|liger_kernel|cross_entropy"
    ),
    # of the logits, as what a model returns under mixed precision; accelerate 1.15, utils/operations.py
    CodeLocation(phase="loss", functions=frozenset({"convert_to_fp32", "_convert_to_fp32"}), path=r"accelerate/"),
    CodeLocation(phase="loss", calls=r"\blog_softmax\(|\blogsumexp\(|\bcross_entropy\("),
    CodeLocation(phase="forward", functions=frozenset({"compute_loss", "_compute_loss", "training_step"})),
    CodeLocation(phase="score", functions=SCORES_VERL, path=r"verl/"),
    CodeLocation(phase="score", calls=CALLS_SCORES_VERL),
    CodeLocation(phase="forward", functions=TRAINS_VERL, path=r"verl/"),
    CodeLocation(phase="forward", functions=frozenset({"pre_forward", "_pre_forward"}), path=r"torch/distributed/"),
    CodeLocation(phase="backward", functions=frozenset({"pre_backward", "post_backward"}), path=r"torch/distributed/"),
    CodeLocation(phase="forward", functions=ZERO3_BEFORE_FORWARD, path=r"deepspeed/"),
    CodeLocation(phase="backward", functions=ZERO3_BEFORE_BACKWARD, path=r"deepspeed/"),
    CodeLocation(phase="load", functions=STARTS_FSDP, path=r"torch/distributed/fsdp/"),
    CodeLocation(
        phase="load",
        functions=frozenset(
            {
                "from_pretrained",
                "create_model_from_path",
                "_load_pretrained_model",
                "_prepare_deepspeed",
                "prepare_model",
                "_move_model_to_device",
                "get_peft_model",
                "prepare_model_for_kbit_training",
                "resize_token_embeddings",
                "_load_state_dict_into_meta_model",
                "set_module_tensor_to_device",
                "caching_allocator_warmup",
                "_sync_params_and_buffers",
                "_sync_module_params_and_buffers",
                "fsdp2_load_full_state_dict",
                "load_fsdp_model",
                "set_model_state_dict",
                "_configure_distributed_model",
                "_configure_optimizer",
                "_configure_zero_optimizer",
                "to",
            }
        ),
    ),
    CodeLocation(phase="load", functions=frozenset({"_apply", "convert", "cuda"}), path=r"torch/nn/modules/module\.py"),
    CodeLocation(phase="load", functions=frozenset({"load_tensor", "restore_location"}), path=r"torch/serialization"),
    CodeLocation(phase="load", functions=frozenset({"load_file", "load_model"}), path=r"safetensors/"),
    CodeLocation(phase="load", calls=r"\bsafe_open\("),
    CodeLocation(phase="load", functions=frozenset({"load_model", "init_adapter"}), path=r"llamafactory/"),
    CodeLocation(
        phase="forward",
        functions=frozenset({"forward"}),
        path=r"modeling_|torch/nn/modules/|peft/|bitsandbytes/autograd/|flash_attn/|unsloth/(?:kernels|models)/|"
        r"unsloth_compiled_",
    ),
)
# Source: bitsandbytes 0.50, nn/modules.py and functional.py; transformers 5.23, quantizers/ (older releases too).
QUANTIZES = frozenset({"_quantize", "quantize_4bit", "create_quantized_param", "int8_vectorwise_quant"})
# Functions of torch/cuda/__init__.py that make a process's CUDA context.
FIRST_CALLS = frozenset({"_lazy_init", "_cuda_init", "set_device", "mem_get_info"})
# Functions that take page-locked host memory, from which CUDA copies to a GPU.
PINS = frozenset({"pin_memory", "_create_param_groups_fp16_flat_cpu_memory"})
# Functions of torch/nn/parallel/ that run several GPUs from one process.
REPLICAS = frozenset({"_worker", "parallel_apply", "replicate", "scatter", "gather"})
# Functions of TRL's SyncRefModelCallback, which under ZeRO-3 gathers the policy and the reference.
SYNCS_REFERENCE = frozenset({"sync_target_model", "_sync_target_model"})
# Files whose functions only forward a call.
FORWARDING_FILES = (
    r"torch/autograd|torch/_tensor\.py|torch/nn/modules/module\.py|torch/_ops\.py|torch/utils/_contextlib\.py|"
    r"torch/_dynamo|functools\.py|contextlib\.py|peft/tuners/tuners_utils\.py"
)


def phase_of(frames: Sequence[Frame]) -> Phase | None:
    """The phase of a traceback; None if no frame is a known location."""
    return next(
        (location.phase for location in CODE_LOCATIONS if any(location.contains(frame) for frame in frames)), None
    )


def sharding_of(frames: Sequence[Frame]) -> str:
    """The library that shards the model, by files that only run with it: "zero3", "zero2", "fsdp"; empty if unknown.

    Source: deepspeed 0.19.8, runtime/zero/stage3.py, partition_parameters.py, partitioned_param_coordinator.py,
    stage_1_and_2.py; torch 2.13, distributed/fsdp/.
    """
    paths = " ".join(frame.path for frame in frames)
    if re.search(r"deepspeed/runtime/zero/(?:stage3|partition|parameter_offload)", paths):
        return "zero3"
    if re.search(r"deepspeed/runtime/zero/stage_1_and_2", paths):
        return "zero2"
    return "fsdp" if "torch/distributed/fsdp/" in paths else ""


def activity_of(frames: Sequence[Frame]) -> Activity:
    """Return what ran, if the advice depends on it more than on the phase; empty otherwise.

    Source: deepspeed 0.19.8, runtime/zero/partition_parameters.py, stage3.py, accelerator/; transformers 5.23,
    trainer_pt_utils.py; trl 1.16, trainer/callbacks.py; vllm 0.33, device_allocator/cumem.py; torch 2.13,
    cuda/__init__.py.
    """
    if not frames:
        return ""
    functions = {frame.function for frame in frames}
    vllm = {frame.function for frame in frames if "vllm" in frame.path}
    signs: tuple[tuple[Activity, bool], ...] = (
        ("pins", _pins(frames[-1])),
        ("forks", frames[-1].function == "_launch" and "popen_fork" in frames[-1].path),
        ("spawns", frames[-1].function == "_main" and "multiprocessing/spawn" in frames[-1].path),
        ("fills_bucket", "reduce_bucket_size" in frames[-1].source),
        ("syncs_reference", bool(functions & SYNCS_REFERENCE)),
        ("gathers", any("partition_parameters" in frame.path for frame in frames)),
        ("joins_logits", bool(functions & JOINS_LOGITS)),
        ("engine_captures", bool(vllm & CAPTURES_ENGINE) or any(_captures(frame) for frame in frames)),
        ("engine_loads", bool(vllm & LOADS_ENGINE)),
        ("engine_starts", bool(vllm & STARTS_ENGINE)),
        ("engine_wakes", bool(functions & {"wake_up", "create_and_map"})),
        ("engine_runs", bool(vllm & RUNS_ENGINE)),
        ("loads_best", "_load_best_model" in functions),
        ("merges", bool(functions & {"merge_and_unload", *MERGES})),
        ("sglang", any("sglang/" in frame.path for frame in frames)),
        ("data_parallel", any("torch/nn/parallel/" in frame.path and frame.function in REPLICAS for frame in frames)),
        ("quantizes", bool(functions & QUANTIZES) or any("bitsandbytes/nn/" in frame.path for frame in frames)),
        ("first_call", frames[-1].function in FIRST_CALLS),
        ("engine", phase_of(frames) is None and any("/vllm/" in frame.path for frame in frames)),
    )
    return next((activity for activity, seen in signs if seen), "")


def _captures(frame: Frame) -> bool:
    """True if this frame of vLLM captures a CUDA graph."""
    return "vllm/" in frame.path and re.search(r"torch\.cuda\.graph\(|\.capture_model\(", frame.source) is not None


def checkpoints(frames: Sequence[Frame]) -> bool:
    """True if the frames show gradient checkpointing.

    Source: torch 2.13, utils/checkpoint.py; transformers 5.23, modeling_layers.py, `_gradient_checkpointing_func`.
    """
    return any(
        frame.path.endswith("torch/utils/checkpoint.py") or "_gradient_checkpointing_func(" in frame.source
        for frame in frames
    )


def _pins(frame: Frame) -> bool:
    """True if this innermost frame takes page-locked memory, itself or in a comprehension of DataLoader's thread."""
    in_thread = "torch/utils/data/_utils/pin_memory" in frame.path
    return in_thread or frame.function in PINS or "pin_memory=True" in frame.source.replace(" ", "")


def innermost(frames: Sequence[Frame]) -> str:
    """The innermost frame outside FORWARDING_FILES, as printed; empty if there is none."""
    return next((frame.shown for frame in reversed(frames) if not re.search(FORWARDING_FILES, frame.path)), "")

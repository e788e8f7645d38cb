"""The phase that code runs in: library functions that run in one phase of the training step only."""

import re
from collections.abc import Sequence

from msgspec import Struct

from planner.diagnose.frames import RAY_PATH, Frame
from planner.diagnose.phase_words import purpose_of
from planner.quantities import Phase


class CodeLocation(Struct, frozen=True, kw_only=True):
    """Functions that run only in one phase, or a regular expression of a call that a frame's line makes.

    `path` is a regular expression that the frame's file must match.
    """

    phase: Phase
    functions: frozenset[str] = frozenset()
    named: str = ""  # a regular expression of whole names
    path: str = ""
    calls: str = ""

    def contains(self, frame: Frame) -> bool:
        """True if the frame is one of these functions, or makes the call."""
        is_one = (
            frame.function in self.functions
            or (self.named and re.fullmatch(self.named, frame.function))
            or (self.calls and re.search(self.calls, frame.source))
        )
        return bool(is_one) and re.search(self.path, frame.path) is not None


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


VLLM = r"(?:^|/)vllm/"
ENGINES = r"(?:^|/)(?:vllm|sglang)/"
VERL = rf"verl/|^{RAY_PATH}"  # a worker's method, as Ray names it, is one too
# Functions of vLLM that run while an engine starts. Source: vllm 0.31, v1/engine/core.py, v1/worker/gpu_worker.py and
# gpu_model_runner.py, v1/worker/utils.py; releases before 0.8 too, worker/worker.py.
STARTS_ENGINE = _names(
    "from_engine_args _initialize_kv_caches initialize_from_config determine_available_memory profile_run init_device "
    "_allocate_kv_cache allocate_kv_cache _allocate_kv_cache_tensors initialize_kv_cache initialize_kv_cache_tensors "
    "determine_num_available_blocks initialize_cache _dummy_sampler_run _dummy_pooler_run compile_or_warm_up_model "
    "_warm_up_model kernel_warmup _dummy_run request_memory profile_cudagraph_memory _init_cache_engine"
)
PROFILES_ENGINE = _names("profile_run determine_available_memory determine_num_available_blocks")
LOADS_ENGINE = _names(
    "load_model make_layers load_weights initialize_model process_weights_after_loading create_weights "
    "create_lora_weights"
)
# Code of vLLM's layers that make the weights of several matrices at once. Source: vllm 0.31, model_executor/layers/.
VLLM_WEIGHTS = r"\boutput_partition_sizes\b"
CAPTURES_ENGINE = _names("capture_model _capture_cudagraphs _warmup_and_capture")
# Functions of vLLM that run while an engine that has started generates.
RUNS_ENGINE = _names(
    "run_busy_loop _process_engine_step execute_model sample_tokens _run_engine step_async "
    "propose_draft_token_ids engine_step run_engine_loop start_worker_execution_loop output_handler"
)
# Functions of vLLM that sample, also in the warm-up of its start.
SAMPLES_ENGINE = _names("apply_top_k_top_p")
# Functions of vLLM that run an encoder of images, and files of such encoders.
ENCODES_ENGINE = _names("_execute_mm_encoder embed_multimodal get_multimodal_embeddings")
ENCODER_FILES = r"vllm/.*(?:vit_|vision|siglip|/clip)"
# Lines that say which function of vLLM ran, where its frames were cut -> the function; empty: the line names it.
# Source: vllm 0.8, executor/multiproc_worker_utils.py, worker/model_runner.py; 0.31, v1/engine/core.py and
# async_llm.py, v1/worker/gpu_model_runner.py.
SAID_FUNCTIONS = {
    "while processing method ": "",
    "'s function ": "",
    " method failed": "",
    "AsyncLLM output_handler failed": "output_handler",
    "EngineCore encountered a fatal error": "run_busy_loop",
    "Failed to load model": "load_model",
    "EngineCore failed to start": "from_engine_args",
    "Capturing the model for CUDA graphs": "capture_model",
    "Capturing CUDA graph": "capture_model",
}
NAMED_METHOD = re.compile(r"(?:while processing method|'s function) '?(\w{1,99})|\b(\w{1,99}) method failed")
# Functions of SGLang that run while it starts, and while it generates. Source: sglang, srt/model_executor/ and
# srt/managers/scheduler.py.
STARTS_SGLANG = _names(
    "initialize init_cuda_graphs init_memory_pool load_model init_device_graphs init_torch_distributed "
    "create_weights load_weights init_attention_backend _create_buffers "
    "capture capture_one_batch_size profile_max_num_token"
)
RUNS_SGLANG = _names(
    "event_loop_normal event_loop_overlap run_batch forward_batch_generation forward_thread_func forward_thread_func_"
)
# Functions of transformers' Trainer, and of TRL's, that run in an evaluation only.
EVALUATES = _names("evaluation_loop prediction_loop prediction_step _evaluate validation_step compute_metrics")
# Functions that merge adapters for a checkpoint: of Unsloth's save.py and unsloth_zoo's saving_utils.py, of torchtune's
# modules/peft/_utils.py, of axolotl's cli/merge_lora.py.
MERGES = _names(
    "_merge_lora merge_and_overwrite_lora _merge_and_overwrite_lora get_merged_lora_ckpt merge_and_dequantize_lora "
    "do_merge_lora"
)
JOINS_LOGITS = _names("nested_concat torch_pad_and_concatenate")
FLOAT_LOGITS = _names("float_conversion float16_to_fp32")
# Functions of AutoGPTQ, GPTQModel, AutoAWQ, optimum and llm-compressor that quantize a whole model.
CALIBRATES = _names("quantize quantize_model oneshot fasterquant add_batch _search_best_scale")
CALIBRATING_FILES = r"auto_gptq|gptqmodel|(?:^|/)awq/|optimum/gptq|llmcompressor"
# verl's driver calls these methods of its workers; one that is killed leaves no frames.
CALLS_SCORES_VERL = r"_wg\.compute_(?:(?:ref_)?log_prob|values|rm_score)\("
# Trainers of TRL whose `_prepare_inputs` samples and scores. Source: trl 1.16, trainer/, experimental/.
SAMPLING_TRAINERS = r"(?:grpo|rloo|gspo|gmpo|sdft|sdpo|distillation|iw_opd|a2po|gold|GRPO|RLOO)\w*\.py"
MODELS = (
    r"modeling_|torch/nn/modules/|peft/|bitsandbytes/autograd/|flash_attn/|unsloth/(?:kernels|models)/|"
    r"unsloth_compiled_|liger_kernel/|xformers/|(?:^|/)fla/|mamba_ssm/|causal_conv1d/|torchtune/m|openrlhf/models|"
    r"verl/models|transformer_engine/|transformers/integrations/|axolotl/|megatron/|lit_?gpt/|torchtitan/|unsloth_zoo/|"
    r"diffusers/|sentence_transformers/|torch/_functorch/|"
    r"gptqmodel/|auto_gptq/|awq/|(?:^|/)swift/|llama_recipes/|torch/nn/(?:functional|attention)|transformers/models/"
)

# The first location with a frame in the traceback decides. Order matters: an evaluation has a forward pass and a loss,
# a rollout runs inside the function that scores it, and a recomputed forward pass inside a backward pass.
# Source: trl 1.16, trainer/, generation/vllm_generation.py, experimental/; transformers 5.23, trainer.py,
# modeling_utils.py, core_model_loading.py, generation/utils.py; accelerate 1.15, accelerator.py, utils/; torch 2.13,
# autograd/, distributed/fsdp/, nn/parallel/distributed.py; deepspeed 0.19.8, runtime/. Of other trainers, in their
# repositories: verl workers/ and trainer/ppo/, OpenRLHF trainer/ and models/, Unsloth models/ and save.py with
# unsloth_zoo, LLaMA-Factory train/ and model/, ms-swift rlhf_trainers/, torchtune recipes/, axolotl loaders/,
# Lightning loops/.
CODE_LOCATIONS: tuple[CodeLocation, ...] = (
    CodeLocation(phase="load", functions=STARTS_ENGINE | LOADS_ENGINE | CAPTURES_ENGINE, path=VLLM),
    CodeLocation(phase="rollout", functions=RUNS_ENGINE, path=VLLM),
    CodeLocation(phase="rollout", functions=RUNS_SGLANG, path=r"sglang/"),
    CodeLocation(phase="load", functions=STARTS_SGLANG, path=r"sglang/"),
    CodeLocation(phase="load", calls=r"torch\.cuda\.graph\(", path=VLLM),
    CodeLocation(phase="load", calls=VLLM_WEIGHTS),
    CodeLocation(phase="evaluation", functions=EVALUATES | JOINS_LOGITS),
    CodeLocation(phase="evaluation", functions=_names("predict evaluate"), path=r"transformers/trainer|openrlhf/|trl/"),
    CodeLocation(
        phase="evaluation",
        functions=_names(
            "_evaluation_step _run_validation _validate validate evaluate evaluation valid_step validate_on_subset "
            "generate_example evaluate_and_print_results _eval_loop eval_loop"
        ),
        path=r"lightning|verl/|torchtune|recipes/|lit_?gpt|llama_recipes|megatron|nemo|sentence_transformers|"
        r"fairseq|metaseq|trlx/|composer/|torchtitan/|skyrl|areal/|slime/|(?:^|/)roll/",
    ),
    CodeLocation(
        phase="evaluation",
        functions=_names("simple_evaluate evaluate loglikelihood _loglikelihood_tokens generate_until _model_call"),
        path=r"lm_eval/",
    ),
    CodeLocation(phase="evaluation", functions=_names("__call__"), path=r"sentence_transformers/.*evaluation/"),
    CodeLocation(
        phase="weight_sync",
        functions=_names(
            "sync_weights _move_model_to_vllm _move_model_to_vllm_inner _sync_fsdp1_params_to_vllm "
            "_sync_fsdp2_params_to_vllm merge_adapter update_flattened_params update_named_param update_weights "
            "update_weight _sync_weight _sync_weight_merged _sync_weight_lora send_weights broadcast_to_vllm "
            "_broadcast_to_vllm _move_full_model_to_vllm _move_adapter_to_vllm rollout_mode get_per_tensor_param "
            "load_vllm_and_sync_weights _sync_weight_to_vllm update_weights_from_tensor refit_policy_generation "
            "broadcast_to_inference_engines update_weights_from_distributed"
        ),
    ),
    CodeLocation(phase="weight_sync", functions=_names("__enter__ update_params"), path=r"verl/.*sharding_manager"),
    CodeLocation(
        phase="rollout",
        functions=_names(
            "generate _generate _generate_single_turn _generate_vllm _generate_vllm_server _generate_vllm_colocate "
            "_generate_transformers wake_up unwrap_model_for_generation sample_rollouts generate_on_policy_outputs "
            "generate_from_model _generate_student_completions _generate_with_model _generate_on_policy_for_slices "
            "batch_generation batch_generate generate_completions _generate_completions generate_samples "
            "unsloth_fast_generate _fast_generate _colocate_rollout _fast_infer _infer_single_or_multi_turn "
            "_generate_sequence generate_rollout rollout_batch "
            "resume_memory_occupation _sample _beam_search greedy_search beam_search generate_rollouts"
        ),
    ),
    CodeLocation(
        phase="rollout",
        functions=_names("stream_generate stream_chat chat chat_stream batch_chat"),
        path=r"modeling_|(?:^|/)model\w*/|web_demo|cli_demo",
    ),
    CodeLocation(phase="rollout", functions=_names("get_inputs"), path=r"llamafactory/train/ppo"),
    CodeLocation(
        phase="score",
        functions=_names(
            "_generate_and_score_completions compute_ref_log_probs compute_reference_log_probs _precompute_ref_logps "
            "_calculate_rewards _calculate_rewards_from_functions _compute_rewards get_reward get_rewards "
            "_compute_kl_logps _compute_rollout_logps _estimate_optimal_values make_experience make_experience_list "
            "make_experience_batch compute_rm_score batched_forward_pass generate_experience get_logprobs "
            "get_reference_policy_logprobs compute_logp compute_logprobs _compute_logprobs"
        ),
    ),
    CodeLocation(phase="score", functions=_names("_prepare_inputs"), path=SAMPLING_TRAINERS),
    CodeLocation(phase="score", calls=r"\bself\.ref_model\(", path=r"trl/"),
    CodeLocation(phase="score", functions=_names("forward"), path=r"^ray/(?:Reference|Reward|Critic)ModelActor"),
    CodeLocation(phase="rollout", functions=_names("generate_sequences generate_sequences_sperate"), path=VERL),
    # accelerate's `backward` of DeepSpeed steps too
    CodeLocation(phase="optimizer_step", functions=_names("_take_model_step"), path=r"deepspeed/"),
    CodeLocation(
        phase="backward",
        functions=_names("backward run_backward _engine_run_backward manual_backward backward_step custom_backward"),
        path=r"torch/|accelerate|deepspeed|lightning|unsloth_zoo/|openrlhf/|apex/|megatron/|fairseq|metaseq|fairscale|"
        r"colossalai|lit_?gpt|flash_attn/|xformers/",
    ),
    CodeLocation(
        phase="optimizer_step",
        functions=_names(
            "step step_with_ready_grads _init_group initialize_optimizer_states _setup_for_real_optimizer "
            "_create_fp32_partitions _prepare_sub_group _prepare_fp32_grad_for_sub_group "
            "_optimizer_step init_state get_state_buffer update_step"
        ),
        path=r"optim|deepspeed|bitsandbytes|verl/|adam|galore|apollo|schedule_?free|lion|muon|lomo|apex|torchao",
    ),
    CodeLocation(phase="optimizer_step", named=r"_(?:multi|single)_tensor_\w+|_fused_adamw?", path=r"optim|torch"),
    CodeLocation(
        phase="optimizer_step",
        functions=_names(
            "_load_optimizer_and_scheduler load_fsdp_optimizer set_optimizer_state_dict clip_grad_norm_ "
            "_clip_grad_norm unscale_gradients unscale_ _unscale_grads_ unscale_and_clip_grads optimizer_step"
        ),
    ),
    CodeLocation(
        phase="optimizer_step",
        functions=_names("_load_zero_checkpoint _rigid_load_state_dict load_state_dict"),
        path=r"deepspeed/|torch/optim",
    ),
    CodeLocation(
        phase="optimizer_step", functions=_names("wrapper"), path=r"torch/optim/(?:optimizer|lr_scheduler)\.py"
    ),
    CodeLocation(
        phase="save",
        functions=_names(
            "_save_checkpoint save_model _save_optimizer_and_scheduler save_pretrained save_16bit_model "
            "_load_best_model "  # after the last checkpoint, beside the model and its states
            "save_fsdp_model save_fsdp_optimizer get_state_dict get_model_state_dict _get_model_state_dict "
            "_full_post_state_dict_hook _full_pre_state_dict_hook summon_full_params save_state async_save "
            "_zero3_consolidated_16bit_state_dict _consolidated_16bit_state_dict save_state_dict _save_zero_checkpoint "
            "_optim_state_dict optim_state_dict full_optim_state_dict _optim_state_dict_impl merge_fsdp_weights "
            "merge_and_unload _unload_and_optionally_merge save_hf_model save_trained_model export_model "
            "gather_cpu_state_dict unsloth_save_model unsloth_save_pretrained_merged unsloth_save_pretrained_gguf "
            "unsloth_generic_save save_to_gguf get_fp32_state_dict_from_zero_checkpoint save_merged_model "
            # of scripts that many copy: llama-recipes, FastChat
            "save_checkpoint save_model_checkpoint save_model_and_optimizer_sharded safe_save_model_for_hf_trainer "
            "save_ckpt save_checkpoint_and_time save_logs_and_checkpoints unsloth_push_to_hub_merged save_hf_format "
            "save_zero_three_model consolidate_state_dict"
        )
        | MERGES,
    ),
    CodeLocation(
        phase="save", functions=_names("state_dict _save_to_state_dict"), path=r"torch/nn/modules/|bitsandbytes/nn/"
    ),
    CodeLocation(phase="save", functions=_names("save _save _legacy_save"), path=r"torch/serialization|accelerate/"),
    CodeLocation(phase="save", functions=_names("save_file serialize_file"), path=r"safetensors/"),
    CodeLocation(
        phase="loss",
        functions=_names(
            "cross_entropy fixed_cross_entropy ForCausalLMLoss log_softmax selective_log_softmax entropy_from_logits "
            "compute_log_probs calculate_log_probs_and_entropy vocab_parallel_softmax vocab_parallel_entropy "
            "logprobs_from_logits log_probs_from_logits get_batch_logps fused_vocab_parallel_cross_entropy "
            "vocab_parallel_cross_entropy compute_language_model_loss fast_cross_entropy_loss unsloth_fused_ce_loss "
            "fused_linear_cross_entropy linear_cross_entropy generalized_jsd_loss _chunked_divergence_loss "
            "_chunked_jsd_loss _chunked_cross_entropy_loss grpo_compute_loss grpo_compute_loss_slow "
            "grpo_accumulated_loss chunked_hidden_states_selective_log_softmax entropy_from_logits_with_chunking "
            "compute_liger_loss _compute_loss_liger get_high_entropy_mask compute_entropy compute_policy_loss "
            "logprobs_from_logits_v2 logprobs_of_labels kl_div nll_loss compute_cross_entropy"
        ),
    ),
    CodeLocation(
        phase="loss", functions=_names("forward backward"), path=r"trl/kernels|liger_kernel.*loss|cross_entropy|/loss/"
    ),
    # torch 2.13, jit: code that TorchScript has fused
    CodeLocation(phase="forward", functions=frozenset({"<forward op>"})),
    CodeLocation(phase="backward", functions=frozenset({"<backward op>"})),
    CodeLocation(phase="loss", named=r"\w*(?:cross_entropy|_ce_loss|logsumexp)_\w+|\w+_cross_entropy\w*"),
    # of the logits, as what a model returns under mixed precision; accelerate 1.15, utils/operations.py
    CodeLocation(phase="loss", functions=_names("convert_to_fp32 _convert_to_fp32"), path=r"accelerate/"),
    CodeLocation(
        phase="loss",
        calls=r"\blog_softmax\(|\blogsumexp\(|\bcross_entropy(?:_loss)?\(|logits\.(?:float|contiguous)\(|"
        r"logits\[[^\]]{0,40}\]\.contiguous\(|self\.loss_function\(|\blogits = logits\b",
    ),
    CodeLocation(phase="score", functions=_names("compute_log_prob compute_ref_log_prob compute_values"), path=VERL),
    CodeLocation(phase="score", calls=CALLS_SCORES_VERL),
    CodeLocation(phase="rollout", calls=r"_(?:wg|manager)\.generate_sequences\w*\("),
    CodeLocation(phase="load", calls=r"_wg\.init_model\("),
    CodeLocation(phase="save", calls=r"_wg\.save_checkpoint\("),
    CodeLocation(phase="forward", calls=r"_wg\.update_(?:actor|critic)\("),
    CodeLocation(phase="forward", functions=_names("compute_loss _compute_loss training_step _unsloth_training_step")),
    CodeLocation(
        phase="forward",
        named=r"forward_step|forward_only",
        path=r"megatron|nemo|verl/|skyrl|slime/|torchtitan/|areal/",
    ),
    CodeLocation(
        phase="forward",
        functions=_names(
            "train_step _train_batch _train_microbatch _train_microbatches train_batch train_mini_batch train_one_step "
            "train_actor train_critic train_rlhf train_unsupervised ppo_train ppo_update training_step_actor "
            "training_step_critic _loss_step grpo_step _ppo_step"
        ),
        path=r"fairseq|metaseq|composer/|megatron|verl/|slime/|areal/|(?:^|/)roll/|trlx/|openrlhf/|torchtune|"
        r"recipes/|ppo_trainer|rlhf_|skyrl|nemo|colossalai|deepspeed/runtime/pipe",
    ),
    CodeLocation(phase="forward", functions=_names("train"), path=r"nemo_rl/models/"),
    # of the logits, which Megatron's Float16Module returns in float32
    CodeLocation(phase="forward", functions=FLOAT_LOGITS, path=r"megatron/core/transformer/module"),
    # weights that are offloaded come back for a layer's forward pass
    CodeLocation(phase="forward", functions=_names("pre_forward new_forward"), path=r"accelerate/hooks"),
    CodeLocation(phase="forward", functions=_names("update_policy update_actor update_critic"), path=VERL),
    CodeLocation(
        phase="forward",
        functions=_names("pre_forward _pre_forward _pre_forward_unshard _post_forward post_forward _root_pre_forward"),
        path=r"torch/(?:distributed|nn/parallel)/",
    ),
    CodeLocation(
        phase="backward",
        functions=_names(
            "pre_backward post_backward _pre_backward _pre_backward_hook _post_backward_hook _reduce_grad "
            "foreach_reduce finalize_backward _root_post_backward_final_callback _post_backward_final_callback "
            "_post_reduction_hook start_grad_sync finish_grad_sync finalize_model_grads _finalize_model_grads"
        ),
        path=r"torch/distributed/|fairscale/|megatron/",
    ),
    # DeepSpeed gathers parameters (runtime/zero/parameter_offload.py and, in older releases, stage3.py), and reduces
    # gradients.
    CodeLocation(
        phase="forward",
        functions=_names("_pre_forward_module_hook pre_sub_module_forward_function"),
        path=r"deepspeed/",
    ),
    CodeLocation(
        phase="backward",
        functions=_names(
            "_pre_backward_module_hook pre_sub_module_backward_function reduce_partition_and_remove_grads "
            "reduce_independent_p_g_buckets_and_remove_grads reduce_ready_partitions_and_remove_grads reduce_ipg_grads "
            "__reduce_and_partition_ipg_grads partition_grads independent_gradient_partition_epilogue "
            "overlapping_partition_gradients_reduce_epilogue allreduce_gradients buffered_allreduce_fallback "
            "_backward_epilogue backward_epilogue grad_handling_hook"
        ),
        path=r"deepspeed/",
    ),
    CodeLocation(
        phase="load",
        functions=_names(
            "_auto_wrap _init_param_handle_from_module _init_param_handle_from_params _move_module_to_device "
            "fully_shard _materialize_with_param_init_fn _materialize_meta_module"
        ),
        path=r"torch/distributed/",
    ),
    CodeLocation(
        phase="load",
        functions=_names(
            "from_pretrained create_model_from_path _load_pretrained_model _prepare_deepspeed prepare_model "
            "_move_model_to_device get_peft_model prepare_model_for_kbit_training resize_token_embeddings "
            "_load_state_dict_into_meta_model set_module_tensor_to_device caching_allocator_warmup "
            "_sync_params_and_buffers _sync_module_params_and_buffers fsdp2_load_full_state_dict load_fsdp_model "
            "set_model_state_dict _configure_distributed_model _configure_optimizer _configure_zero_optimizer "
            "convert_and_load_state_dict_in_model _materialize_copy spawn_materialize set_param_for_module "
            "materialize_tensors dispatch_model load_checkpoint_and_dispatch load_checkpoint_in_model "
            "_load_from_checkpoint fsdp2_prepare_model _prepare_fsdp2 _prepare_tp _ddp_init_helper "
            "_sync_module_states init_empty_weights inject_adapter _create_and_replace load_adapter "
            "cast_adapter_dtype _cast_adapter_dtype update_layer reset_lora_parameters loftq_init pissa_init "
            "initialize_lora_eva_weights post_init initialize_weights _init_weights tie_weights call_model_init "
            "convert_moe_packed_tensors _initialize_missing_keys _move_missing_keys_from_meta_to_device "
            "init_model _build_model_optimizer _build_rollout init_model_from_pretrained apply_fsdp2 "
            "get_llm_for_sequence_regression _ds_init_train_model _ds_init_eval_model load_from_full_model_state_dict "
            "_setup_model get_model_tokenizer setup_model_and_tokenizer patch_peft_model load_vllm "
            "prepare_model_for_training quantize_ quantize_model convert_model to_empty create_reference_model "
            "prepare_deepspeed prepare_fsdp prepare_peft_model _prepare_peft_model _create_model_from_path "
            "_initialize_affine_weight load_hf_weights load_weights_hf_to_megatron import_ckpt "
            "setup_model_and_optimizer build_model_and_optimizer "
            "_init_actor _init_ref _init_critic _init_reward"
        ),
    ),
    CodeLocation(
        phase="load",
        functions=_names("to"),
        path=r"^(?!.*(?:tokenization_|feature_extraction|image_processing|batch_feature))",
    ),
    CodeLocation(
        phase="load", functions=_names("_apply convert cuda half"), path=r"torch/nn/modules/module\.py|modeling_"
    ),
    CodeLocation(
        phase="load", functions=_names("load_tensor restore_location load _load"), path=r"torch/serialization"
    ),
    CodeLocation(phase="load", functions=_names("load_file load_model"), path=r"safetensors/"),
    CodeLocation(phase="load", calls=r"\bsafe_open\("),
    CodeLocation(phase="load", functions=_names("load_model init_adapter"), path=r"llamafactory/|axolotl/"),
    CodeLocation(phase="load", functions=_names("initialize"), path=r"deepspeed/__init__|areal/|(?:^|/)roll/"),
    CodeLocation(phase="load", functions=CALIBRATES, path=CALIBRATING_FILES),
    CodeLocation(phase="load", functions=_names("setup"), path=r"nemo_rl/|skyrl|areal/"),
    CodeLocation(phase="load", functions=_names("deepcopy __deepcopy__"), path=r"(?:^|/)copy\.py|torch/"),
    # models, gradient buffers and optimizers that are made, of trainers that build them themselves
    CodeLocation(
        phase="load",
        functions=_names(
            "build_model get_model model_provider load_checkpoint load_ckpt load_base_checkpoint _load_base_checkpoint "
            "get_megatron_optimizer build_model_and_main_param_groups allocate_params_and_grads init_workers "
            "create_ref_model create_reward_model create_hf_model create_critic_model build boost prepare_fsdp_module "
            "build_module _build_module _build_model _build_optimizer _shard_parameters_ _flatten_parameters "
            "build_models"
        ),
        path=r"fairseq|metaseq|fairscale|megatron|composer/|colossalai|verl/|(?:^|/)llama/|llamafactory/|openrlhf/|slime/|"
        r"skyrl|areal/|(?:^|/)roll/|torchtitan/|nemo|model_utils|lit_?gpt",
    ),
    CodeLocation(
        phase="load",
        functions=_names("__init__"),
        path=r"fairscale/nn/model_parallel|(?:^|/)llama/model\.py|megatron/(?:core/|legacy/)?(?:tensor_parallel|transformer|models?|"
        r"extensions|distributed|optimizer)/|transformer_engine/pytorch/module/|torchtitan/train|composer/trainer/trainer",
    ),
    CodeLocation(
        phase="forward",
        functions=_names("_rebuild_full_params _cast_fp32_param_shards_to_fp16 _lazy_init _use_full_params"),
        path=r"fairscale/",
    ),
    CodeLocation(
        phase="load",
        functions=_names("__init__"),
        path=r"torch/nn/parallel/distributed|fully_sharded_data_parallel|deepspeed/runtime/(?:engine|zero/stage)|"
        r"mmengine/model/wrappers/",
    ),
    CodeLocation(
        phase="load",
        functions=_names(
            "_post_init_method _convert_to_deepspeed_param _zero_init_param wrapper wrapped_fn new_tensor "
            "_convert_to_zero_parameters _broadcast_model _create_fp16_partitions_with_defragmentation "
            "load_checkpoint _load_checkpoint load_module_state_dict"
        ),
        path=r"deepspeed/runtime/",
    ),
    CodeLocation(phase="forward", functions=_names("forward"), path=MODELS),
    CodeLocation(phase="forward", named=r"\w+_forward", path=r"modeling_|unsloth|transformers/|peft/|axolotl/"),
    # a batch that is moved to the card
    CodeLocation(phase="forward", functions=_names("send_to_device move_data_to_device batch_to_device")),
    CodeLocation(phase="load", functions=_names("__init__"), path=r"[Tt]rainer\w*\.py|transformers/trainer"),
    # Inner functions, of a traceback whose outer frames were cut.
    CodeLocation(phase="evaluation", functions=_names("pad_across_processes"), path=r"accelerate/"),
    CodeLocation(phase="optimizer_step", named=r"\w+", path=r"galore_torch/|lomo_optim/|apollo_torch/"),
    CodeLocation(
        phase="load",
        functions=_names(
            "_convert_to_dtype replace_module replace_transformer_layer _replace_module replace_fn replace_with_policy "
            "_apply_injection_policy load_model_with_checkpoint load_module_recursive __init__"
        ),
        path=r"deepspeed/(?:module_inject|inference/|runtime/swap_tensor/)",
    ),
    CodeLocation(
        phase="save", functions=_names("undo_layout _unshard_params _unshard_fsdp_state_params get_delta_weight")
    ),
    CodeLocation(
        phase="load", functions=_names("_quantize quantize_4bit quantize_nf4 quantize_blockwise"), path=r"bitsandbytes/"
    ),
    CodeLocation(
        phase="load",
        functions=_names("_load_model_state_dict load_state_dict _load_from_state_dict"),
        path=r"torch/(?:distributed/checkpoint|nn/modules)",
    ),
    CodeLocation(phase="load", functions=_names("__init__"), path=r"modeling_|cuda_graph_runner"),
    CodeLocation(phase="load", functions=_names("capture_begin capture_end"), path=r"torch/cuda/graphs"),
    CodeLocation(
        phase="forward",
        functions=_names("fetch_sub_module __all_gather_params wait_for_unshard unshard foreach_all_gather_copy_out"),
        path=r"deepspeed/|torch/distributed/",
    ),
    CodeLocation(
        phase="forward", functions=_names("matmul_4bit dequantize_4bit dequantize_blockwise"), path=r"bitsandbytes/"
    ),
    CodeLocation(
        phase="forward", named=r"\w+", path=r"modeling_(?!utils)|flash_attn/|xformers/|unsloth/kernels/|monkeypatch/"
    ),
    CodeLocation(
        phase="forward",
        functions=_names(
            "_wrapped_call_impl _call_impl unsloth_checkpoint linear softmax dropout gelu silu layer_norm"
        ),
        path=r"torch/nn/|unsloth_zoo/",
    ),
    CodeLocation(phase="rollout", named=r"\w+", path=r"transformers/generation/"),
    CodeLocation(phase="forward", named=r"\w+", path=r"transformers/activations\.py"),
    CodeLocation(phase="forward", functions=_names("call __call__ run"), path=r"torchinductor_|torch/_inductor/"),
    CodeLocation(phase="forward", functions=_names("forward _run_ddp_forward"), path=r"torch/nn/parallel/"),
    # a module and an autograd function of one's own
    CodeLocation(phase="backward", functions=_names("backward"), path=r"\.py|<ipython|Cell|Input"),
    CodeLocation(phase="forward", functions=_names("forward"), path=r"^(?!.*(?:sglang/|vllm/|^ray/))"),
    # By the line of code alone, of a traceback whose library frames were cut.
    CodeLocation(phase="rollout", calls=r"\.generate\("),
    CodeLocation(phase="backward", calls=r"\.backward\(|\b_?(?:engine_)?run_backward\(|\bto run the backward pass"),
    CodeLocation(phase="optimizer_step", calls=r"\boptim(?:izer)?\w*\.step\(|torch\._foreach_|\bexp_avg"),
    CodeLocation(phase="evaluation", calls=r"\btrainer\.(?:evaluate|predict)\("),
    CodeLocation(phase="save", calls=r"\.save_(?:pretrained|model|checkpoint)\w*\(|\btorch\.save\(|merge_and_unload\("),
    CodeLocation(
        phase="forward",
        calls=r"\battn_(?:weights|output)\b|\b(?:query|key)_states\b|\bhidden_states\b|\binputs_embeds\b|\blm_head\(|"
        r"\bself\.(?:mlp|self_attn|down_proj|gate_proj|act_fn)\(|\b(?:F|functional)\.(?:linear|gelu|silu|scaled_dot_product_attention)\(|"
        r"\b(?:outputs?|out|loss|logits|preds?|results?) = (?:self\.)?model(?:_engine)?\(|\bmodel\(\*\*\w+\)",
    ),
    CodeLocation(
        phase="load",
        calls=r"\.from_pretrained\(|\bget_peft_model\(|deepspeed\.initialize\(|\bmodel\.(?:to|cuda)\(|\btorch\.load\(|"
        r"DistributedDataParallel\(|\b_apply\((?:lambda|fn)\b|\bt\.to\(device, dtype if |\bnew_value = value\.to\(",
    ),
)
# Functions in which a training's forward pass runs.
TRAINING = _names("train _inner_training_loop training_step train_step train_one_step _train_batch train_batch fit")
TRAINING_CALLS: dict[Phase, str] = {"backward": r"\.backward\(", "optimizer_step": r"\boptim\w*\.step\("}
TRAINS = ("forward", "loss")  # phases of a training, which an engine of vLLM does not have
# What a table's forward pass or loss is not taken for, by names alone.
INNER = ("forward", "loss", "backward", "optimizer_step", "load")
# Functions of Lightning's loops/optimization/ that an optimizer's step calls: frames outside of them tell no phase.
CLOSURES = _names("closure _wrap_closure __call__")
CLOSURE_FILES = r"lightning/pytorch/loops|pytorch_lightning/loops"


def _called_by(last: Frame) -> Phase | None:
    """The phase of the call that a training's innermost frame makes, if the frames inside of it were cut."""
    if last.function not in TRAINING:
        return None
    return next((phase for phase, call in TRAINING_CALLS.items() if re.search(call, last.source)), None)


def said_frame(text: str, word: str) -> Frame | None:
    """The frame of which a line with this word of SAID_FUNCTIONS tells: of vLLM, unless its function has a purpose."""
    if function := SAID_FUNCTIONS[word]:
        return Frame("vllm/", "", function)
    named = NAMED_METHOD.search(text)
    function = next(filter(None, named.groups()), "") if named else ""
    in_vllm = Frame("vllm/", "", function)
    return (in_vllm if phase_of([in_vllm]) else Frame("", "", function)) if function else None


def phase_of(frames: Sequence[Frame]) -> Phase | None:
    """The phase of a traceback: of a known location, else as the names in it tell; None if neither does.

    A forward pass or a loss that runs inside of a function with a purpose of its own, such as to evaluate, is of that.
    """
    closures = [
        number
        for number, frame in enumerate(frames, 1)
        if frame.function in CLOSURES and re.search(CLOSURE_FILES, frame.path)
    ]
    inside = frames[closures[-1] :] if closures else frames
    if frames and (phase := _called_by(frames[-1])):
        return phase
    in_engine = any(re.search(ENGINES, frame.path) for frame in inside)
    phase = next(
        (
            location.phase
            for location in CODE_LOCATIONS
            if not (in_engine and location.phase in TRAINS) and any(location.contains(frame) for frame in inside)
        ),
        None,
    )
    if phase is not None and (in_engine or phase not in TRAINS):
        return phase
    purpose = purpose_of(inside)
    if in_engine:
        return purpose if purpose == "load" or purpose == "rollout" else None
    is_inner = purpose in INNER and (phase, purpose) != ("forward", "loss")
    if purpose is None or purpose == "trains" or purpose == "program" or (phase is not None and is_inner):
        return phase
    return purpose

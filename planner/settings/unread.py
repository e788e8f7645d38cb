"""Arguments of TRL that no field of `Candidate` has: those without effect, and those whose effect is not counted.

Source: trl 1.16, trainer/*_config.py and scripts/utils.py, `ScriptArguments`; transformers 5.23, training_args.py.
"""

# They change memory or speed and are not modelled: a plan warns about them in a file, `--set` refuses them.
UNMODELLED = (
    "auto_find_batch_size", "batch_eval_metrics", "cache_implementation", "cast_lm_head_to_fp32", "ddp_bucket_cap_mb",
    "ddp_find_unused_parameters", "ddp_static_graph", "eval_packing", "generate_during_eval", "generation_batch_size",
    "generation_kwargs", "include_num_input_tokens_seen", "label_smoothing_factor", "liger_kernel_config",
    "neftune_noise_alpha", "optim_args", "router_aux_loss_coef",
    "loss_top_k", "max_inflight_tasks", "seq_kd", "sync_ref_model", "torch_compile", "torch_empty_cache_steps",
    "use_transformers_continuous_batching", "use_transformers_paged", "vllm_model_impl", "weight_sync_steps",
    # of methods that are planned at their defaults (trl 1.16, experimental/cpo, gold, iw_opd, sdft, sdpo and tpo)
    "cpo_alpha", "distillation_mode", "distillation_objective", "distillation_topk", "distillation_weight",
    "generate_from_teacher", "include_environment_feedback", "max_reprompt_len", "teacher_model_kind",
    "tpo_alpha", "uld_crossentropy_weight", "uld_use_hybrid_loss",
    "use_extended_uld", "use_teacher_server", "vllm_sync_frequency",
)  # fmt: skip

# They decide what is learned, logged, saved and named, and change no tensor and no pass of a training step. `--set`
# accepts them, and the answer names them.
WITHOUT_EFFECT: frozenset[str] = frozenset(
    (
        # the schedule and the optimizer's numbers
        "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "weight_decay",
        "adam_beta1", "adam_beta2", "adam_epsilon", "num_train_epochs", "max_steps",
        # numbers of the losses and of sampling
        "lora_alpha", "use_rslora", "epsilon", "epsilon_high", "delta", "scale_rewards", "reward_weights",
        "label_smoothing", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "desirable_weight",
        "undesirable_weight", "simpo_gamma", "missing_eos_penalty", "reward_clip_range", "importance_sampling_level",
        "mask_truncated_completions", "sapo_temperature_neg", "sapo_temperature_pos", "vespo_k_neg", "vespo_k_pos",
        "vespo_lambda_neg", "vespo_lambda_pos", "distillation_alpha", "distillation_is_clip", "distillation_add_tail",
        "dont_reprompt_on_self_success", "environment_feedback_only_without_solution", "feedback_template",
        "iw_opd_epsilon", "iw_opd_gamma", "loss_add_tail", "reverse_kl_top_1_mode",
        "remove_thinking_from_demonstration", "reprompt_template",
        "solution_template", "success_reward_threshold", "uld_distillation_weight", "uld_hybrid_matched_weight",
        "uld_hybrid_unmatched_weight", "uld_skip_student_eos", "uld_skip_teacher_eos", "uld_student_temperature",
        "uld_teacher_temperature", "uld_token_merge_strategy", "use_successful_as_teacher",
        "num_loss_tokens_to_skip", "teacher_prompt_template", "teacher_sync_steps", "teacher_update_rate",
        # chance
        "seed", "data_seed", "shuffle_dataset",
        # the data's names; how it is prepared before the training
        "dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split", "dataset_num_proc",
        "dataset_text_field", "chat_template_path", "eos_token", "pad_token", "truncation_mode", "label_names",
        "remove_unused_columns",
        # the model's names
        "model_revision", "teacher_model_revision", "teacher_tokenizer_name_or_path", "trust_remote_code",
        # where a vLLM server listens
        "teacher_model_server_url",
        "vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_group_port",
        "request_timeout", "weight_sync_timeout", "heartbeat_stale_after_s", "queue_maxsize",
        # when an evaluation runs, and what it counts or logs
        "do_train", "do_eval", "do_predict", "eval_steps", "eval_delay", "eval_on_start", "load_best_model_at_end",
        "include_for_metrics", "bf16_full_eval", "fp16_full_eval", "eval_use_gather_object", "eval_do_concat_batches",
        # logs, checkpoints and the Hub
        "output_dir", "run_name", "project", "report_to", "log_level", "log_level_replica", "log_on_each_node",
        "logging_dir", "logging_strategy", "logging_steps", "logging_first_step", "logging_nan_inf_filter",
        "diagnostics_flat_tolerance", "diagnostics_warning_interval", "log_completions_steps",
        "wandb_log_unique_prompts", "log_completions", "num_completions_to_print", "disable_tqdm", "save_strategy",
        "save_steps", "save_total_limit", "metric_for_best_model", "greater_is_better", "push_to_hub", "hub_model_id",
        "hub_strategy", "hub_token", "hub_private_repo", "hub_revision", "trackio_space_id", "ddp_timeout",
    )
)  # fmt: skip

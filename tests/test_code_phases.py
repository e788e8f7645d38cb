"""Functions of libraries and trainers, and the phase that each runs in, as their repositories have them."""

import pytest

from planner.diagnose.code_phases import CODE_LOCATIONS, phase_of
from planner.diagnose.frames import Frame

# A file of a library -> its functions -> the phase. One of each row of the table, and the commonest.
FUNCTIONS = {
    ("transformers/modeling_utils.py", "load"): "from_pretrained _load_pretrained_model caching_allocator_warmup to",
    ("transformers/core_model_loading.py", "load"): "convert_and_load_state_dict_in_model _materialize_copy",
    ("transformers/trainer.py", "evaluation"): "evaluation_loop prediction_step evaluate predict _evaluate",
    ("transformers/trainer.py", "save"): "_save_checkpoint save_model _save_optimizer_and_scheduler _load_best_model",
    ("transformers/trainer.py", "optimizer_step"): "_clip_grad_norm _load_optimizer_and_scheduler",
    ("transformers/trainer.py", "forward"): "training_step compute_loss",
    ("transformers/trainer.py", "load"): "_move_model_to_device _load_from_checkpoint call_model_init",
    ("transformers/generation/utils.py", "rollout"): "generate _sample",
    ("transformers/models/llama/modeling_llama.py", "forward"): "forward eager_attention_forward",
    ("transformers/integrations/sdpa_attention.py", "forward"): "sdpa_attention_forward",
    ("transformers/loss/loss_utils.py", "loss"): "ForCausalLMLoss fixed_cross_entropy",
    ("trl/trainer/grpo_trainer.py", "score"): "_generate_and_score_completions _calculate_rewards _prepare_inputs",
    ("trl/trainer/grpo_trainer.py", "rollout"): "_generate _generate_single_turn",
    ("trl/generation/vllm_generation.py", "weight_sync"): "sync_weights",
    ("trl/trainer/dpo_trainer.py", "score"): "compute_ref_log_probs _precompute_ref_logps",
    ("trl/experimental/gkd/gkd_trainer.py", "loss"): "generalized_jsd_loss",
    ("trl/experimental/gkd/gkd_trainer.py", "rollout"): "generate_on_policy_outputs",
    ("accelerate/accelerator.py", "load"): "_prepare_deepspeed prepare_model _prepare_fsdp2",
    ("accelerate/accelerator.py", "save"): "save_state save_model get_state_dict",
    ("accelerate/accelerator.py", "backward"): "backward",
    ("accelerate/utils/fsdp_utils.py", "load"): "fsdp2_load_full_state_dict fsdp2_prepare_model load_fsdp_model",
    ("accelerate/utils/fsdp_utils.py", "save"): "save_fsdp_model save_fsdp_optimizer merge_fsdp_weights",
    ("deepspeed/__init__.py", "load"): "initialize",
    ("deepspeed/runtime/engine.py", "load"): "_configure_distributed_model load_checkpoint",
    ("deepspeed/runtime/engine.py", "backward"): "backward allreduce_gradients _backward_epilogue",
    ("deepspeed/runtime/engine.py", "optimizer_step"): "_take_model_step step",
    ("deepspeed/runtime/zero/stage3.py", "backward"): "reduce_partition_and_remove_grads partition_grads",
    ("deepspeed/runtime/zero/stage3.py", "optimizer_step"): "_optimizer_step unscale_and_clip_grads",
    ("deepspeed/runtime/zero/parameter_offload.py", "forward"): "_pre_forward_module_hook",
    ("deepspeed/runtime/zero/parameter_offload.py", "backward"): "_pre_backward_module_hook",
    ("deepspeed/runtime/zero/partition_parameters.py", "load"): "_post_init_method _convert_to_deepspeed_param",
    ("torch/optim/adamw.py", "optimizer_step"): "step _init_group _multi_tensor_adamw _single_tensor_adamw",
    ("torch/nn/utils/clip_grad.py", "optimizer_step"): "clip_grad_norm_",
    ("torch/autograd/graph.py", "backward"): "_engine_run_backward",
    ("torch/distributed/fsdp/_runtime_utils.py", "forward"): "_pre_forward _root_pre_forward",
    ("torch/distributed/fsdp/_runtime_utils.py", "backward"): "_pre_backward_hook _post_backward_hook _reduce_grad",
    ("torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py", "forward"): "pre_forward",
    ("torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py", "backward"): "post_backward finalize_backward",
    ("torch/distributed/fsdp/_init_utils.py", "load"): "_auto_wrap _init_param_handle_from_module",
    ("torch/nn/parallel/distributed.py", "load"): "_ddp_init_helper",
    ("torch/nn/functional.py", "loss"): "cross_entropy log_softmax",
    ("torch/serialization.py", "save"): "save",
    ("torch/serialization.py", "load"): "load restore_location",
    ("peft/tuners/lora/layer.py", "load"): "update_layer reset_lora_parameters",
    ("peft/peft_model.py", "load"): "load_adapter from_pretrained",
    ("bitsandbytes/optim/optimizer.py", "optimizer_step"): "step init_state update_step",
    ("vllm/v1/worker/gpu_worker.py", "load"): "load_model determine_available_memory init_device",
    ("vllm/v1/worker/gpu_model_runner.py", "load"): "capture_model profile_run initialize_kv_cache_tensors",
    ("vllm/v1/engine/core.py", "rollout"): "run_busy_loop _process_engine_step",
    ("verl/workers/fsdp_workers.py", "load"): "init_model _build_model_optimizer",
    ("verl/workers/fsdp_workers.py", "score"): "compute_log_prob compute_ref_log_prob compute_rm_score",
    ("verl/workers/fsdp_workers.py", "forward"): "update_actor",
    ("verl/workers/fsdp_workers.py", "rollout"): "generate_sequences",
    ("verl/workers/fsdp_workers.py", "weight_sync"): "rollout_mode",
    ("verl/workers/sharding_manager/fsdp_vllm.py", "weight_sync"): "__enter__",
    ("verl/workers/actor/dp_actor.py", "optimizer_step"): "_optimizer_step",
    ("verl/trainer/ppo/ray_trainer.py", "evaluation"): "_validate",
    ("openrlhf/trainer/ray/ppo_actor.py", "weight_sync"): "broadcast_to_vllm _broadcast_to_vllm",
    ("openrlhf/trainer/ppo_utils/experience_maker.py", "score"): "make_experience make_experience_list",
    ("openrlhf/trainer/sft_trainer.py", "evaluation"): "evaluate",
    ("openrlhf/models/actor.py", "forward"): "forward",
    ("openrlhf/utils/deepspeed/deepspeed.py", "save"): "save_model",
    ("unsloth/models/llama.py", "forward"): "CausalLM_fast_forward LlamaAttention_fast_forward",
    ("unsloth/models/llama.py", "rollout"): "unsloth_fast_generate",
    ("unsloth/save.py", "save"): "unsloth_save_model unsloth_save_pretrained_gguf",
    ("unsloth_zoo/loss_utils.py", "loss"): "unsloth_fused_ce_loss",
    ("llamafactory/train/ppo/trainer.py", "rollout"): "get_inputs",
    ("llamafactory/train/ppo/trainer.py", "score"): "get_rewards batched_forward_pass",
    ("llamafactory/model/loader.py", "load"): "load_model",
    ("swift/trainers/rlhf_trainer/grpo_trainer.py", "rollout"): "_colocate_rollout",
    ("swift/llm/model/register.py", "load"): "get_model_tokenizer",
    ("torchtune/modules/transformer.py", "forward"): "forward",
    ("torchtune/modules/loss/ce_chunked_output_loss.py", "loss"): "forward",
    ("torchtune/training/_distributed.py", "save"): "gather_cpu_state_dict",
    ("recipes/full_finetune_distributed.py", "load"): "_setup_model",
    ("axolotl/train.py", "load"): "setup_model_and_tokenizer",
    ("axolotl/train.py", "save"): "save_trained_model",
    ("lightning/pytorch/loops/evaluation_loop.py", "evaluation"): "_evaluation_step",
    ("lm_eval/evaluator.py", "evaluation"): "simple_evaluate",
    ("sentence_transformers/evaluation/InformationRetrievalEvaluator.py", "evaluation"): "__call__",
    ("galore_torch/adamw8bit.py", "optimizer_step"): "step",
    ("liger_kernel/ops/fused_linear_cross_entropy.py", "loss"): "fused_linear_cross_entropy_forward forward",
    ("megatron/core/pipeline_parallel/schedules.py", "forward"): "forward_step",
    ("megatron/core/pipeline_parallel/schedules.py", "backward"): "backward_step",
    ("megatron/training/training.py", "load"): "setup_model_and_optimizer",
    ("accelerate/hooks.py", "forward"): "pre_forward",
    ("accelerate/utils/operations.py", "forward"): "send_to_device",
    ("trl/models/utils.py", "load"): "create_reference_model prepare_deepspeed",
    ("trl/trainer/sft_trainer.py", "load"): "__init__",
    ("torch/distributed/fsdp/fully_sharded_data_parallel.py", "load"): "__init__",
    ("copy.py", "load"): "deepcopy",
    ("auto_gptq/modeling/_base.py", "load"): "quantize",
    ("nemo_rl/algorithms/grpo.py", "load"): "setup",
    ("fairscale/nn/model_parallel/layers.py", "load"): "__init__ _initialize_affine_weight",
    ("fairscale/nn/data_parallel/fully_sharded_data_parallel.py", "forward"): "_rebuild_full_params _lazy_init",
    ("fairscale/nn/data_parallel/fully_sharded_data_parallel.py", "load"): "_shard_parameters_",
    ("metaseq/trainer.py", "forward"): "train_step",
    ("metaseq/trainer.py", "evaluation"): "valid_step",
    ("fairseq/optim/fp16_optimizer.py", "backward"): "backward",
    ("llama/generation.py", "load"): "build",
    ("megatron/training/checkpointing.py", "load"): "load_checkpoint _load_base_checkpoint",
    ("megatron/training/checkpointing.py", "save"): "save_checkpoint",
    ("megatron/core/distributed/param_and_grad_buffer.py", "load"): "__init__",
    ("megatron/core/distributed/param_and_grad_buffer.py", "backward"): "start_grad_sync",
    ("composer/trainer/trainer.py", "evaluation"): "_eval_loop",
    ("composer/trainer/trainer.py", "forward"): "_train_microbatch _train_batch",
    ("dschat/utils/model/model_utils.py", "load"): "create_hf_model create_critic_model",
    ("applications/DeepSpeed-Chat/dschat/rlhf/ppo_trainer.py", "forward"): "train_rlhf train_unsupervised",
    ("openrlhf/trainer/ray/ppo_actor.py", "forward"): "ppo_train training_step",
    ("sglang/srt/mem_cache/memory_pool.py", "load"): "_create_buffers",
    ("sglang/srt/model_executor/cuda_graph_runner.py", "load"): "capture capture_one_batch_size",
    ("nemo_rl/models/policy/workers/dtensor_policy_worker.py", "forward"): "train",
    ("ray/WorkerDict", "forward"): "update_actor update_critic",
    ("ray/WorkerDict", "rollout"): "generate_sequences",
    ("ray/ReferenceModelActor", "score"): "forward",
}


@pytest.mark.parametrize(("file", "phase"), FUNCTIONS)
def test_a_function_of_a_library_tells_its_phase(file, phase):
    path = file if file.startswith("ray/") else f"/venv/{file}"
    functions = FUNCTIONS[file, phase].split()
    assert {function: phase_of([Frame(path, "7", function)]) for function in functions} == dict.fromkeys(
        functions, phase
    )


# Functions of files, outermost first -> the phase: that of the inner one, but for what runs for a purpose of its own.
NESTED = {
    "transformers/trainer.py training_step > accelerate/accelerator.py backward": "backward",
    "transformers/trainer.py training_step > accelerate/accelerator.py backward > torch/utils/checkpoint.py "
    "recompute_fn > transformers/models/llama/modeling_llama.py forward": "backward",
    "transformers/trainer.py training_step > transformers/trainer.py compute_loss > transformers/loss/loss_utils.py "
    "ForCausalLMLoss": "loss",
    "transformers/trainer.py evaluation_loop > transformers/trainer_seq2seq.py prediction_step > "
    "transformers/generation/utils.py generate": "evaluation",
    "transformers/trainer.py evaluation_loop > transformers/loss/loss_utils.py ForCausalLMLoss": "evaluation",
    "transformers/trainer.py _inner_training_loop > transformers/trainer.py _load_from_checkpoint > "
    "torch/nn/modules/module.py _load_from_state_dict": "load",
    "transformers/trainer.py _inner_training_loop > transformers/trainer.py _load_best_model > "
    "torch/nn/modules/module.py load_state_dict": "save",
    "transformers/trainer.py _save_checkpoint > accelerate/accelerator.py get_state_dict": "save",
    "llamafactory/train/tuner.py export_model > peft/tuners/tuners_utils.py merge_and_unload": "save",
    "trl/trainer/grpo_trainer.py training_step > trl/trainer/grpo_trainer.py _prepare_inputs > "
    "trl/trainer/grpo_trainer.py _generate_and_score_completions > transformers/generation/utils.py generate > "
    "transformers/models/llama/modeling_llama.py forward": "rollout",
    "trl/trainer/grpo_trainer.py _generate > trl/generation/vllm_generation.py sync_weights > "
    "peft/tuners/tuners_utils.py merge_adapter > peft/tuners/lora/layer.py get_delta_weight": "weight_sync",
    "trl/trainer/grpo_trainer.py _generate_and_score_completions > transformers/models/llama/modeling_llama.py "
    "forward": "score",
    "accelerate/utils/deepspeed.py backward > deepspeed/runtime/engine.py _take_model_step > "
    "deepspeed/runtime/zero/stage_1_and_2.py step": "optimizer_step",
    "accelerate/accelerator.py _prepare_deepspeed > deepspeed/runtime/zero/stage3.py initialize_optimizer_states > "
    "torch/optim/adamw.py step": "optimizer_step",
    "verl/workers/fsdp_workers.py update_actor > verl/workers/actor/dp_actor.py update_policy > torch/_tensor.py "
    "backward": "backward",
    "verl/workers/fsdp_workers.py generate_sequences > verl/workers/sharding_manager/fsdp_vllm.py __enter__ > "
    "torch/distributed/fsdp/_state_dict_utils.py _full_pre_state_dict_hook": "weight_sync",
    "verl/workers/fsdp_workers.py init_model > vllm/worker/worker.py determine_num_available_blocks > "
    "vllm/model_executor/models/qwen2.py forward": "load",
    "megatron/training/training.py train_step > megatron/core/tensor_parallel/cross_entropy.py forward": "loss",
    "metaseq/trainer.py train_step > fairseq/optim/fp16_optimizer.py backward": "backward",
}


@pytest.mark.parametrize("stack", NESTED, ids=[stack.replace(" > ", "-")[-60:] for stack in NESTED])
def test_of_nested_functions_the_one_with_a_purpose_tells_the_phase(stack):
    frames = [Frame(f"/venv/{path}", "7", function) for path, function in map(str.split, stack.split(" > "))]
    assert phase_of(frames) == NESTED[stack]


def test_user_code_and_a_batch_that_is_moved_tell_no_phase():
    assert phase_of([Frame("/home/user/train.py", "3", "main", "main()")]) is None
    assert phase_of([Frame("/x/transformers/tokenization_utils_base.py", "3", "to", "v.to(device)")]) is None


@pytest.mark.parametrize(
    ("code", "phase"),
    [
        ("loss.backward()", "backward"),
        ("optimizer.step()", "optimizer_step"),
        ("out = model.generate(**inputs, max_new_tokens=512)", "rollout"),
        ("model = AutoModelForCausalLM.from_pretrained(", "load"),
        ("model.save_pretrained_merged(out, tokenizer)", "save"),
        ("metrics = trainer.evaluate()", "evaluation"),
        ("logits = logits.float()", "loss"),
    ],
)
def test_a_line_of_code_tells_the_phase_where_library_frames_were_cut(code, phase):
    assert phase_of([Frame("/home/user/train.py", "3", "main", code)]) == phase


def test_a_closure_of_lightning_is_no_optimizer_step():
    frames = [
        Frame("/x/lightning/pytorch/core/module.py", "1", "optimizer_step"),
        Frame("/x/torch/optim/optimizer.py", "2", "wrapper"),
        Frame("/x/lightning/pytorch/loops/optimization/automatic.py", "3", "closure"),
        Frame("/x/train.py", "4", "training_step"),
    ]
    assert phase_of(frames) == "forward" and phase_of(frames[:2]) == "optimizer_step"


def test_a_forward_pass_of_an_engine_is_not_one_of_a_training():
    frames = [
        Frame("/x/vllm/model_executor/models/qwen3.py", "1", "forward"),
        Frame("/x/torch/nn/modules/module.py", "2", "_call_impl"),
    ]
    assert phase_of(frames) is None and phase_of(frames[1:]) == "forward"


@pytest.mark.parametrize(
    ("file", "function", "phase"),
    [
        ("bitsandbytes/functional.py", "quantize_4bit", "load"),
        ("bitsandbytes/functional.py", "dequantize_4bit", "forward"),
        ("torch/distributed/checkpoint/state_dict.py", "_load_model_state_dict", "load"),
        ("deepspeed/runtime/zero/partitioned_param_coordinator.py", "fetch_sub_module", "forward"),
        ("transformers/models/llama/modeling_llama.py", "repeat_kv", "forward"),
        ("transformers/models/llama/modeling_llama.py", "__init__", "load"),
        ("torch/nn/modules/module.py", "_call_impl", "forward"),
        ("torch/cuda/graphs.py", "capture_end", "load"),
        ("accelerate/accelerator.py", "pad_across_processes", "evaluation"),
    ],
)
def test_an_inner_function_alone_tells_the_phase_too(file, function, phase):
    assert phase_of([Frame(f"/venv/{file}", "7", function)]) == phase


def test_no_function_is_in_two_rows_of_one_path():
    rows = [(function, row.path) for row in CODE_LOCATIONS for function in row.functions]
    assert sorted(set(rows)) == sorted(rows)

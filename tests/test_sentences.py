"""Every code of a note has a sentence, and every note that the planner builds has the values of its sentence."""

import ast
import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from string import Formatter
from typing import get_args

import pytest

from planner.quantities import Note, NoteCode, Reason
from planner.report.json import note_report
from planner.report.sentences import SENTENCES, in_one_line, sentence, templates
from planner.units import GIB, MIB

CODES = get_args(NoteCode)
PEAK = Note("phase_peaks", {"phase": "optimizer_step", "peak_bytes": 40 * GIB})

# One sentence for each code. A code is in the JSON of users: it is added here, and never renamed or removed.
EXAMPLES: dict[NoteCode, tuple[dict[str, object], str]] = {
    "setting_chosen": (
        {
            "setting": "gradient_checkpointing", "value": True, "other": False, "saved_bytes": 12 * GIB, "speed": 0.78,
            "fits_alone": True, "gathered_bytes": 0,
        },
        "gradient_checkpointing true instead of false: saves 12.0 GiB, 0.78 times the speed, and does not fit without",
    ),
    "length_is_longest": (
        {"setting": "max_length", "length": 2048, "beyond": PEAK},
        "max_length 2,048 is as long as this batch allows; beyond that the optimizer step peaks at 40.0 GiB",
    ),
    "length_up_to": (
        {"setting": "max_length", "length": 2048, "beyond": PEAK, "evidence": "estimated"},
        "max_length up to 2,048 at this batch (estimated); beyond that the optimizer step peaks at 40.0 GiB",
    ),
    "length_up_to_model": (
        {"setting": "max_length", "length": 4096},
        "max_length up to 4,096 at this batch, which is as far as the model goes",
    ),
    "batch_fits_no_faster": ({"batch": 8}, "per_device_train_batch_size 8 fits too and is no faster"),
    "batch_not_estimated": (
        {"batch": 8, "because": Note("layers_not_measured")},
        "per_device_train_batch_size 8 is not estimated: this model's layers have no formulas, and are not measured "
        "with these settings",
    ),
    "batch_does_not_fit": (
        {"batch": 8, "because": Note("engine_does_not_start")},
        "per_device_train_batch_size 8 does not fit: the vLLM engine would not start",
    ),
    "layers_not_measured": ({}, "this model's layers have no formulas, and are not measured with these settings"),
    "engine_does_not_start": ({}, "the vLLM engine would not start"),
    "host_memory_short": ({"needed_bytes": 300 * GIB}, "a node needs 300.0 GiB of host memory"),
    "phase_peaks": (
        {"phase": "backward", "peak_bytes": 39 * GIB, "most_bytes": 41 * GIB},
        "the backward peaks at 39.0 GiB, up to 41.0 GiB",
    ),
    "float32_by_default": (
        {"more_bytes": 14 * GIB, "dtype": "bfloat16"},
        "TRL loads in float32 unless dtype is set: that would need 14.0 GiB more; the plan sets bfloat16",
    ),
    "rounds_small_updates": (
        {}, "16-bit weights without a float32 copy round small updates away: float32 ones would not fit here",
    ),
    "no_bfloat16": ({"gpu": "T4"}, "T4 has no bfloat16: the plan trains in fp16 (bf16 false, fp16 true)"),
    "float16_overflows": (
        {"model": "google/gemma-3-1b-it", "bfloat16": False, "float32": True},
        "google/gemma-3-1b-it overflows float16, so that losses or gradients become nan: take a card with bfloat16, "
        "or, slower, --set bf16=false --set fp16=false --set dtype=float32",
    ),
    "display_takes_memory": (
        {"total_bytes": 12 * GIB},
        "if this card also drives a display, that takes a part of the 12.0 GiB: give what nvidia-smi shows as free "
        "with --free-memory",
    ),
    "image_mask_dropped": (
        {"attn_implementation": "flash_attention_2"},
        "with flash_attention_2 the tokens of an image see only those before them; sdpa keeps their mask",
    ),
    "images_not_counted": (
        {"can_count": True, "needs_size": True, "in_prompts": False},
        "rows of text are planned: images and the passes of the vision tower are not counted: --images-per-row 1 "
        "--image-size 1024x768",
    ),
    "engine_spoils_images": (
        {"because": "vLLM expands image tokens again"},
        "no colocated vLLM: vLLM expands image tokens again; with a 16-bit base on several GPUs a server is right: "
        "--set vllm_mode=server",
    ),
    "base_takes_no_adapters": (
        {"because": "PEFT merges none into GPTQ layers"},
        "no vLLM: PEFT merges none into GPTQ layers; --tuning lora of the model that was not quantized generates with "
        "vLLM",
    ),
    "engine_would_keep_base": (
        {"bits": 4},
        "no vLLM: beside a 4-bit base it would sample from the base without the adapters (huggingface/trl#4973, open): "
        "--tuning lora samples with vLLM, --set use_vllm=true plans it all the same",
    ),
    "sends_adapters_alone": (
        {"method": "async-grpo", "tokens_per_second": 3600.0, "factor": 5.14},
        "--method async-grpo sends only adapters to a vLLM server, without merging them: about 3,600 tokens/s, "
        "5.1 times as fast",
    ),
    "weight_sync_hangs": (
        {"processes": 4},
        "TRL may hang when 4 FSDP2 processes send the whole model to vLLM (huggingface/trl#7103, open): apply "
        "huggingface/trl#7131, or train in one process, or train adapters, which are sent as files",
    ),
    "server_not_quantized": (
        {"quantization": "nf4"},
        "the server samples from the published weights, the trainer trains on 4-bit nf4 ones: their log-probabilities "
        "differ from the first step on, which the loss clips",
    ),
    "kernels_for_inference": (
        {"quantization": "awq"},
        "Transformers loads AWQ layers with kernels that have no backward pass: plan export writes a train.py that "
        'loads them with backend "auto_trainable"',
    ),
    "checkpoint_not_resumed": (
        {
            "second_adapter": False, "only_model": False, "scaled": False, "idle_tower": False, "named_twice": "",
            "text_targets": "",
        },
        "a run of 4-bit weights under FSDP2 does not resume from its checkpoints: PyTorch does not find their scales "
        "(KeyError, absmax); adapters are saved, and 4-bit weights that are sharded resume: "
        "--set bnb_4bit_quant_storage=bfloat16, or --set sharding=ddp",
    ),
    "batches_not_skipped": (
        {},
        "a run resumes from its checkpoints with the epoch's first rows alone, by ignore_data_skip: true: the loader "
        "of rows that GPUs share cannot skip batches (AttributeError, dataset)",
    ),
    "resume_does_not_fit": (
        {"peak_bytes": 4 << 30},
        "a run that resumes from a checkpoint needs 4.0 GiB and may run out of memory, because PEFT loads adapters in "
        "float32: --set resume_from_checkpoint=true plans for it",
    ),
    "experts_taken_even": (
        {"ep_size": 8},
        "tokens are assumed to spread evenly over the 8 GPUs that divide the experts: a GPU whose experts are chosen "
        "more often needs more memory, and the others wait for it",
    ),
    "experts_in_16_bits": (
        {"weights_bytes": 54 << 30},
        "bitsandbytes leaves the experts as they are, 54.0 GiB in all: it quantizes linear modules, and "
        "Transformers 5 has experts as parameters; in 4 bits: axolotl's quantize_moe_experts, or a checkpoint in "
        "MXFP4 such as gpt-oss",
    ),
    "adapters_saved_alone": (
        {"whole_bytes": 8 << 30},
        "to save adapters PEFT gathers the whole model on every process, 8.0 GiB of host memory each: plan export "
        "writes a train.py that avoids this",
    ),
    "deepspeed_alone": (
        {},
        "DeepSpeed on one GPU shards nothing, but avoids float32 copies of logits; without it: --set sharding=none",
    ),
    "network_assumed": (
        {"bytes_per_second": 50e9}, "the network of each node is taken as 400 Gb/s: give yours with --network",
    ),
    "generates_without_cache": (
        {"method": "grpo"},
        "grpo generates without a KV cache, since TRL turns it off under gradient checkpointing: every token takes a "
        "forward pass over the whole row",
    ),
    "step_too_long": (
        {"samples": 512, "step_seconds": 3900.0},
        "impractical: an optimizer step of 512 samples takes 65 minutes",
    ),
    "generates_large_model": (
        {"model": "Qwen2.5-72B", "share": 0.9},
        "impractical: Qwen2.5-72B generates with Transformers, without an engine, 90% of each step",
    ),
    "reference_kernels": (
        {"model": "Qwen/Qwen3.5-4B", "packages": ("flash-linear-attention", "causal-conv1d"), "packed": False},
        "install flash-linear-attention and causal-conv1d too: without them Transformers runs layers of "
        "Qwen/Qwen3.5-4B in reference PyTorch, much slower, which is what memory is planned for, and stops at packed "
        "rows",
    ),
    "segments_left_out": ({"because": "vLLM stops"}, "launch without expandable_segments: vLLM stops"),
    "gathers_nothing_ahead": ({"because": "it would stop"}, "stage3_prefetch_bucket_size 0: it would stop"),
    "flash_attention_from_hub": (
        {"attn_implementation": "flash_attention_2"},
        "attn_implementation flash_attention_2 needs no build: without the flash-attn package, transformers takes "
        "kernels-community/flash-attn2 through the kernels package",
    ),
    "sinks_without_gradient": ({}, (
        "the backward pass of that kernel had no gradient of attention sinks in 2025 (nvidia-cosmos/cosmos-rl#219; "
        "huggingface/gpt-oss-recipes trains with it): compare your first steps with attn_implementation eager"
    )),
    "sdpa_builds_mask": (
        {},
        "batches with padding make sdpa build a mask of rows x length squared in every layer; --no-padded if yours "
        "have none",
    ),
    "math_attention": (
        {
            "gpu": "T4", "float32": False, "peak_bytes": 10 * GIB, "padded_bytes": 5 * GIB, "torch_version": "2.14",
            "newer_bytes": 4 * GIB,
        },
        "batches without padding, such as rows that are all cut at max_length, have no mask, and sdpa has no fused "
        "kernel for them on T4, because several heads share keys: it keeps the scores of every head, 10.0 GiB at the "
        "peak, 5.0 GiB if all batches hold padding (--padded); with torch 2.14, which has a kernel, 4.0 GiB (--set "
        "torch_version=2.14)",
    ),
    "liger_needs_config": ({}, (
        "use_liger_kernel needs liger_kernel_config {fused_linear_cross_entropy: false} here: without it Liger "
        "replaces the forward pass of the reward model, which stops for want of an lm_head"
    )),
    "liger_kernel_set": ({}, (
        "use_liger_kernel gives the same results with other rounding and needs the package liger-kernel; TRL 1.16 "
        "warns that TRL 2.0 will drop it. Its successor, use_kernels, replaces the norms only, and needs more memory"
    )),
    "hub_kernels": ({}, (
        "use_kernels needs the package kernels and downloads Liger's RMSNorm from the Hub when the model is loaded; "
        "without a connection Transformers keeps its own, which needs more memory"
    )),
    "reference_precomputed": ({"share": 0.354, "processes": 2}, (
        "precompute_ref_log_probs: the reference reads the dataset once before the first step, which takes 35% of the "
        "time of an epoch and is not in the seconds of a step; TRL refuses it for a streamed dataset, and of several "
        "processes all but the first stop with FileNotFoundError for one in memory (Dataset.from_dict): save_to_disk "
        "and load_from_disk give it a file"
    )),
    "model_prepared": (
        {
            "quantization": "nf4", "kbit_preparation": "embeddings_and_head", "float32_adapters": True,
            "gradient_checkpointing": True, "use_reentrant": False,
        },
        "TRL prepares the model itself, in this order: load the model (nf4), prepare_model_for_kbit_training, "
        "get_peft_model, embeddings and head cast to bfloat16, train.py casts them to float32, "
        "enable_input_require_grads, checkpointing at train(), non-reentrant",
    ),
    "adapters_cast_back": (
        {},
        "fp16's GradScaler stops at 16-bit gradients, such as those of adapters that TRL casts to bfloat16 or of a "
        "copied score head: plan export writes a train.py that casts them to float32; in a script of your own, set "
        "parameter.data = parameter.data.float() for each trained parameter before train()",
    ),
    "not_sharded": (
        {"setting": "lora_modules_to_save"},
        "the model is whole on each GPU: lora_modules_to_save is not planned with ZeRO or FSDP, which would divide it",
    ),
    "targets_left_out": (
        {"module": "router"},
        "adapters are on all linear layers but router, which lora_target_modules all-linear includes and at which PEFT "
        "stops",
    ),
    "model_untouched": (
        {},
        "so pass peft_config and an untouched model; one wrapped by hand needs enable_input_require_grads before "
        "checkpointing, or no gradient arrives",
    ),
    "engine_keeps_base": (
        {},
        "vLLM samples from the base: TRL merges the adapters into 4-bit weights, which rounds small updates away, "
        "sends them without their scales, and moves the base with each merge (huggingface/trl#4973, open): prefer "
        "--tuning lora, or --set use_vllm=false",
    ),
    "vllm_without_bitsandbytes": (
        {"first": "0.28", "last": "0.27"},
        "vLLM 0.28 dropped bitsandbytes, which TRL asks it for with QLoRA: install vllm==0.27.*",
    ),
    "vllm_not_taken": (
        {"vllm": "0.33", "trl": "1.16", "oldest": "0.22", "newest": "0.31"},
        "trl 1.16 takes vLLM 0.22 to 0.31 and warns of 0.33: pip installs it beside trl alone, not with trl[vllm]",
    ),
    "largest_rank": ({"lora_r": 32, "ranks": (16, 32, 64)}, "lora_r 32 is the largest of 16, 32, 64 that fits"),
    "method_came_later": (
        {"method": "gkd", "trl": "0.11"}, "gkd came to TRL with 0.11: the plan is for trl 0.11",
    ),
    "method_left": (
        {"method": "ppo", "trl": "0.24"},
        "ppo left TRL after 0.24: the plan is for trl 0.24; install trl==0.24.*",
    ),
    "method_experimental": (
        {"trainer": "CPOTrainer"}, "CPOTrainer is in trl.experimental: it may change without notice",
    ),
    "teacher_on_server": (
        {"teacher": "TEACHER"},
        "the teacher is on a vLLM server with GPUs of its own, which are not counted: trl vllm-serve --model TEACHER",
    ),
    "samples_values_first": (
        {"num_value_samples": 8, "minutes": 12.4},
        "before the training the reference samples 8 completions of each prompt: about 12 minutes for 1,000 prompts",
    ),
    "rows_beyond_context": (
        {"row_tokens": 65536, "positions": 32768, "model": "org/model"},
        "rows of 65,536 tokens are longer than the 32,768 positions of org/model (max_position_embeddings), which it "
        "was trained with",
    ),
    "prompt_length_assumed": (
        {"prompt_length": 512},
        "prompts are taken to be up to 512 tokens; TRL does not cut them: give --prompt-length for yours",
    ),
    "engine_takes_context": (
        {"positions": 32768},
        "vLLM takes the model's whole context of 32,768 tokens: vllm_max_model_length is not set",
    ),
    "engine_length_set": (
        {"vllm_max_model_length": 1536, "positions": 32768},
        "vllm_max_model_length 1,536 is prompt and completion; TRL's default is the model's whole context, 32,768",
    ),
    "engine_share_small": (
        {
            "vllm_gpu_memory_utilization": 0.08, "weights": 2 * GIB, "kv_cache": 4 * GIB, "sequences": 220,
            "sampled": 64,
        },
        "vllm_gpu_memory_utilization 0.08 is enough for the engine's 2.00 GiB of weights and 4.00 GiB of KV cache, "
        "room for 220 sequences at once; 64 are sampled",
    ),
    "server_takes_turns": (
        {
            "trainer": 4, "server": 4, "share": 0.68, "idle": 0.32,
            "other": Note("other_split", {"trainer": 3, "server": 5, "share": 0.6, "idle": 0.4, "speed": 0.94}),
        },
        "trainer and server take turns: the trainer (4 GPUs) waits for completions in 68 % of a step, the server (4 "
        "GPUs) is idle in the rest; on 3 + 5 GPUs the trainer waits 60 %, 0.94 times as fast",
    ),
    "server_samples_meanwhile": (
        {"trainer": 3, "server": 5, "share": 0.08, "idle": 0.0},
        "trainer and server run at the same time: on 3 + 5 GPUs the trainer waits 8.0 %",
    ),
    "other_split": (
        {"trainer": 5, "server": 3, "share": 0.0, "idle": 0.31, "speed": 0.82},
        "on 5 + 3 GPUs the server waits 31 %, 0.82 times as fast",
    ),
    "effective_batch_changed": (
        {"samples": 8, "samples_per_process": 8, "num_processes": 1, "gpus": 2, "samples_on_all": 16},
        "an optimizer step sees 8 samples, 8 for each of 1 processes; on all 2 GPUs it would be 16: say "
        "--effective-batch-size to keep one",
    ),
    "gpus_idle": (
        {"idle": 1, "gpus": 3, "vllm_tensor_parallel_size": 2},
        "1 of 3 GPUs are idle: engines of 2 on the others are faster",
    ),
    "model_source": ({"model": "org/model", "remark": "its size is approximate"}, "org/model: its size is approximate"),
    "liger_not_installed": (
        {"device": "cpu"}, "use_liger_kernel false: liger-kernel runs on GPUs only",
    ),
    "fewer_gpus_faster": (
        {"count": 2, "unit": "nodes"}, "one of 2 nodes is planned: all of them are slower",
    ),
    "fewer_gpus_fit": ({"count": 2, "unit": "GPUs"}, "one of 2 GPUs is planned: only there it fits"),
    "safer_is_impractical": (
        {"because": Note("step_too_long", {"samples": 64, "step_seconds": 3780.0})},
        "tight, and chosen because a candidate with more room is impractical: an optimizer step of 64 samples takes 63 "
        "minutes",
    ),
    "alternative_faster": (
        {"alternative": Note("tuning_class", {"tuning": "qlora"}), "factor": 1.52},
        "QLoRA is 1.5 times as fast (--tuning qlora)",
    ),
    "rows_shared": (
        {"gpus": 4, "samples": 16}, "4 GPUs share each row, which none can hold alone: 16 samples a step",
    ),
    "class_not_planned": (
        {"tuning": "full", "reason": "needs the extra training"},
        "full fine-tuning is not planned: needs the extra training",
    ),
    "tuning_class": ({"tuning": "lora"}, "LoRA"),
    "tuning_class_offloading": ({"tuning": "full"}, "full fine-tuning with offloading"),
    "tuning_class_sharded": ({"tuning": "lora"}, "LoRA sharded"),
    "with_offloading": ({}, "with offloading"),
    "on_one_gpu": ({}, "on one GPU"),
    "with_16_bit_weights": ({}, "with 16-bit weights, which round small updates away"),
    "with_eager_attention": ({}, "with eager attention, which needs less memory here"),
    "micro_batch": ({"per_device_train_batch_size": 4}, "per_device_train_batch_size 4"),
    "lengths_in_steps": ({"step": 256}, "lengths are tried in steps of 256 tokens"),
    "with_shared_rows": ({}, "with shared rows"),
    "without_pins": ({}, "without the settings you gave"),
    "host_memory_needed": ({"needed_bytes": 60 * GIB}, "60 GiB of host memory a node"),
    "host_memory_tight": (
        {"share": 0.92, "host_bytes": 128 * GIB},
        "92% of an assumed host memory of 128 GiB would be used: give what a node has with --host-memory",
    ),
    "host_memory_full": (
        {"share": 0.985, "host_bytes": 252 * GIB},
        "98% of the 252 GiB of host memory would be used, and the system and the file cache need a part of it: a run "
        "with 1 % free was killed (hiyouga/LLaMA-Factory#4629)",
    ),
    "row_length": ({"setting": "max_length", "length": 8192}, "max_length 8,192"),
    "gpus_share_rows": ({"gpus": 2}, "2 GPUs share each row"),
    "pins_instead": (
        {"settings": {"use_vllm": True, "vllm_mode": "server"}},
        "leave out use_vllm, vllm_mode, or --free them where a config sets them",
    ),
    "setting_not_pinned": ({"settings": {"zero_stage": 3}}, "without zero_stage=3"),
    "with_option": ({"option": "--tuning", "value": "lora"}, "--tuning lora"),
    "with_settings": ({"settings": {"optim": "paged_adamw_8bit"}}, "--set optim=paged_adamw_8bit"),
    "more_gpus": ({"gpus": 4}, "4 GPUs"),
    "larger_cards": ({"gpus": 2, "card": "H100"}, "2 x H100"),
    "whole_nodes": (
        {"nodes": 2, "gpus_per_node": 8, "card": "H100", "tuning": "lora"}, "--tuning lora on 2 nodes of 8 x H100",
    ),
    "states_in_8_bit": ({}, "8-bit states, paged to the host under pressure"),
    "length_asked": ({"length": 8192}, "8,192 tokens asked for"),
    "full_with_settings": ({"settings": {"optim": "adamw_8bit"}}, "--tuning full --set optim=adamw_8bit"),
    "price_of_8_bit_states": ({}, (
        "8-bit optimizer states instead of 32-bit ones; the authors' runs learn as well (arXiv 2110.02861); package "
        "bitsandbytes"
    )),
    "price_of_precomputing": ({"epochs": 3}, (
        "the same results; the nodes must share the folder of the dataset, and one pass over it before the training is "
        "counted here for 3 epochs"
    )),
    "price_of_16_bit_adapters": ({}, (
        "adapters learn in bfloat16, which rounds small updates away; an argument of PEFT's get_peft_model, which "
        "TRL's own scripts do not pass"
    )),
    "price_of_attention_adapters": ({}, "the experts have no adapters and learn nothing"),
    "price_of_longer_rollouts": ({}, "the second step learns from completions of the policy before the first one"),
    "price_of_grouped_lengths": ({}, "a batch has rows of similar lengths, which is another order of learning"),
    "price_of_divided_experts": (
        {},
        "a run does not resume from its checkpoints, experts have no adapters, and the GPUs wait for the one whose "
        "experts are chosen most",
    ),
    "price_of_16_bit_copy": (
        {},
        "it needs a copy of the checkpoint in 16 bits, since distributed_config cannot load a quantized one; a run "
        "does not resume from its checkpoints, and experts have no adapters",
    ),
    "no_dry_run": ({"reason": "trl not installed"}, "no dry run: trl not installed"),
    "dry_run": (
        {"trl": "1.16.0", "needed_bytes": 20 * GIB, "phase": "backward", "expected_bytes": 18 * GIB},
        "a dry run with the installed trl 1.16.0 on an emulated GPU needed 20.0 GiB, most in the backward; estimated: "
        "18.0 GiB (-10.0%)",
    ),
    "dry_run_ran_out": (
        {"trl": "1.16.0", "needed_bytes": 20 * GIB, "phase": "backward", "expected_bytes": 18 * GIB},
        "a dry run with the installed trl 1.16.0 ran out of memory on an emulated GPU in the backward: it needs 20.0 "
        "GiB at least; estimated: 18.0 GiB",
    ),
    "searched_again": (
        {"residual": 0.031},
        "searched again with 3.1% more memory for this tuning class, which the dry run needed above the estimate",
    ),
    "cpu_counts_tensors": (
        {"unmeasured_bytes": GIB, "evidence": "estimated"},
        "the probe ran on the CPU, where tensors' bytes are counted: what CUDA takes besides (1.0 GiB) and the speed "
        "are still estimated",
    ),
    "ran_out_of_memory": (
        {"device": "cuda", "phase": "backward", "over_bytes": GIB},
        "it ran out of memory on the GPU in the backward, 1.00 GiB short at least; phases that it did not reach are "
        "not listed",
    ),
    "server_not_measured": ({"evidence": "estimated"}, "the vLLM server's cards are still estimated"),
    "larger_card_probed": ({}, "the probe had a larger card: what its allocator cached there is left out"),
    "probe_ran_out_of_memory": (
        {"device": "emulated", "phase": "loss", "evidence": "estimated", "expected_bytes": 20 * GIB},
        "the candidate ran out of memory on an emulated card in the loss (estimated: it fits in 20.00 GiB)",
    ),
    "probe_fits": ({"device": "cuda"}, "the candidate fits on the GPU, which the plan had denied"),
    "probe_needs_more": (
        {"device": "emulated", "needed_bytes": 22 * GIB, "most_bytes": 21 * GIB, "evidence": "estimated"},
        "the candidate needs 22.00 GiB on an emulated card, more than the 21.00 GiB that were estimated at most",
    ),
    "proven_instead": (
        {"settings": {"per_device_train_batch_size": 2}},
        "proven instead of what was recommended: per_device_train_batch_size=2",
    ),
    "probe_peak": (
        {
            "device": "cpu", "phase": "optimizer_step", "needed_bytes": 20 * GIB, "evidence": "estimated",
            "expected_bytes": 21 * GIB,
        },
        "the probe on the CPU needed 20.00 GiB of tensors, its peak in the optimizer step; estimated: 21.00 GiB "
        "(+5.0%)",
    ),
    "memory_over_steps": (
        {
            "steps": [2, 100, 200], "reserved_bytes": [4 * GIB, 8 * GIB, 9 * GIB], "grown_bytes": MIB,
            "host_grown_bytes": 20 * MIB,
        },
        "PyTorch had reserved 4.00 GiB after step 2, 8.00 GiB after step 100, 9.00 GiB after step 200; from step 2 to "
        "step 200 tensors kept between steps grew by +1 MiB, host memory of the process by +20 MiB",
    ),
    "probe_has_no_phase": ({"device": "cuda"}, "the probe on the GPU has no phase that was expected"),
    "phase_measured": (
        {
            "phase": "backward", "needed_bytes": 20 * GIB, "evidence": "measured", "spare_bytes": GIB,
            "expected_bytes": 21 * GIB, "expected": "measured",
        },
        "backward 20.00 GiB measured and 1.00 GiB cached; 21.00 GiB measured before (+5.0%)",
    ),
    "attention_not_installed": (
        {"device": "cpu", "attn_implementation": "sdpa", "missing": "flash_attention_2"},
        "attn_implementation sdpa: flash_attention_2 has no CPU kernels",
    ),
    "own_probe_ran_out_of_memory": (
        {"gpu": "L4", "phase": "optimizer_step", "evidence": "estimated", "expected_bytes": 20 * GIB},
        "your own probe of this candidate on L4 ran out of memory in the optimizer step (estimated: 20.0 GiB): take a "
        "smaller batch or length, or let plan --probe find the largest that fits",
    ),
    "own_probes": (
        {"probes": 1, "gpu": "L4", "needed_bytes": 19 * GIB, "evidence": "estimated", "expected_bytes": 20 * GIB},
        "measured by 1 probe of your own on L4: 19.0 GiB needed at most (estimated: 20.0 GiB)",
    ),
    "own_runs": (
        {"runs": 2, "gpu": "L4", "needed_bytes": 19 * GIB, "evidence": "estimated", "expected_bytes": 20 * GIB},
        "2 runs of your own on L4 needed 19.0 GiB in the first steps, with your data (estimated: 20.0 GiB)",
    ),
    "own_context": (
        {"gpu": "L4", "measured_bytes": 640 * MIB, "measurements": 3, "estimated_bytes": 512 * MIB},
        "CUDA took 0.62 GiB beside PyTorch on your L4 (median of 3 measurements); 0.50 GiB are estimated",
    ),
    "own_lines_unread": (
        {"lines": 4, "path": "own.jsonl"}, "4 lines of own.jsonl cannot be read; `plan measurements` lists them",
    ),
    "own_storage_not_read": (
        {}, "$PLAN_STORAGE is not read: it needs the extra storage (pip install 'finetune-plan[storage]')",
    ),
    "keys_not_counted": (
        {"keys": ("neftune_noise_alpha", "use_dora")},
        "the config sets what the plan does not count: neftune_noise_alpha, use_dora",
    ),
    "keys_not_used": ({"keys": ("learning_rate",)}, "not used by the plan: learning_rate"),
    "settings_not_read": (
        {"settings": {
            "lora_r": ("tuning", ("lora",)), "offload_optimizer_device": ("sharding", ("zero1", "zero2", "zero3")),
            "vllm_gpu_memory_utilization": ("vllm", ("colocate", "server")), "sync_each_batch": ("accumulates", ()),
            "vllm_data_parallel_size": ("vllm", ("server",)), "use_dora": ("tuning", ("lora",)),
        }},
        "not used: lora_r, use_dora (without adapters); offload_optimizer_device (without ZeRO-1, ZeRO-2 or ZeRO-3); "
        "vllm_gpu_memory_utilization (without a vLLM engine); sync_each_batch (without gradient accumulation); "
        "vllm_data_parallel_size (without a vLLM server)",
    ),
    "method_lacks_settings": (
        {"method": "sft", "settings": ("beta",)}, "sft has no beta: TRL stops at a config that sets it",
    ),
    "checkpointing_details_dropped": (
        {"method": "dpo", "settings": ("every_n_layers", "offload")},
        "every_n_layers, offload: after the first pass without gradients TRL checkpoints every layer of dpo and "
        "offloads nothing; the plan counts this",
    ),
    "length_not_used": (
        {"setting": "max_length", "method": "grpo", "limits": ("prompt_length", "max_completion_length")},
        "max_length is not used: the rows of grpo are prompt_length and max_completion_length",
    ),
    "machines_of_file_overridden": ({"machines": 1, "nodes": 16, "gpus": 128}, (
        "num_machines 1 of the accelerate file gives way to --gpus: launch with --num_machines 16 --num_processes 128"
    )),
    "oldest_trl_taken": (
        {"trl": "0.1", "oldest": "0.12"},
        "trl 0.1 is planned with the code of 0.12, the oldest that is modelled: its own code may need more memory",
    ),
    "keys_of_older_releases": (
        {"keys": ("vllm_device", "use_liger_loss"), "trl": "0.17"},
        "planned as trl 0.17 ran it: newer releases do not have vllm_device, use_liger_loss",
    ),
    "config_change": (
        {"setting": "gradient_checkpointing", "before": False, "after": True},
        "config gradient_checkpointing: false -> true",
    ),
    "config_unchanged": ({}, "the config needs no change"),
    "rows_not_cut": (
        {"taken": 1024},
        "max_length is null, so TRL cuts no row and the longest is not known: 1,024 tokens are planned. "
        "Give your longest row with --max-length",
    ),
    "keys_without_effect": ({"keys": ("learning_rate",)}, "no effect on memory or speed: learning_rate"),
    "read_as_tool": (
        {"tool": "Axolotl", "release": "0.21"}, "the config is read as Axolotl's: planned as Axolotl 0.21 runs it",
    ),
    "lora_kernels_as_peft": (
        {}, "Axolotl's fused kernels of LoRA are counted as PEFT's own layers, which need more memory"
    ),
    "rows_taken_full": (
        {"max_length": 1024},
        "rows are taken as 1,024 tokens long: give yours with --lengths",
    ),
    "rows_cut": (
        {"max_length": 2048, "rows": 0.013, "tokens": 0.04, "dropped": False},
        "max_length 2,048 cuts 1.3 % of the rows (4.0 % of the tokens)",
    ),
    "completions_taken_full": ({}, "completions are taken as full-length: give yours with --completion-lengths"),
    "completions_cut": (
        {"max_completion_length": 8192, "completions": 0.06, "tokens": 0.12},
        "max_completion_length 8,192 cuts 6.0 % of the completions (12 % of the tokens)",
    ),
    "rows_packed": (
        {"packed_rows": 16, "rows": 112},
        "a step of 16 packed rows trains on about 112 rows of the dataset, so another learning rate may be better; "
        "packed rows do not attend to each other",
    ),
    "length_costs": (
        {"max_length": 2048, "rows": 0.013, "tokens": 0.04, "speed": 1.9},
        "max_length 2,048 cuts 1.3 % of the rows (4.0 % of the tokens): an epoch is 1.9 times as fast",
    ),
}  # fmt: skip


def test_every_code_has_one_sentence() -> None:
    assert sorted([*SENTENCES, *templates()]) == sorted(CODES)
    assert list(EXAMPLES) == list(CODES)


@pytest.mark.parametrize("code", CODES)
def test_a_note_is_one_sentence(code: NoteCode) -> None:
    values, text = EXAMPLES[code]
    assert sentence(Note(code, values)) == text


def test_kernels_are_required_by_packed_rows_and_only_faster_for_others() -> None:
    """The other sentence is the example of `reference_kernels`."""
    packed = Note("reference_kernels", {"model": "LFM2-1.2B", "packages": ("causal-conv1d",), "packed": True})
    assert sentence(packed) == (
        "install causal-conv1d too: without them Transformers stops at packed rows of LFM2-1.2B; memory is planned for "
        "its layers in reference PyTorch, not for those kernels. Their builds need the torch that is installed: pip "
        "install --no-build-isolation causal-conv1d"
    )


def test_a_reason_is_a_note_in_reports() -> None:
    values, text = EXAMPLES["setting_chosen"]
    report = note_report(Reason(**values))  # type: ignore[arg-type]
    assert (report.code, report.values, report.text) == ("setting_chosen", values, text)


def test_a_note_in_a_note_has_its_own_sentence_in_reports() -> None:
    report = note_report(Note("length_is_longest", EXAMPLES["length_is_longest"][0]))
    assert report.values["beyond"] == note_report(PEAK)


def test_several_notes_stand_in_one_line() -> None:
    notes = [Note("row_length", {"setting": "max_length", "length": 8192}), Note("gpus_share_rows", {"gpus": 2})]
    assert in_one_line(notes) == "max_length 8,192; 2 GPUs share each row" and in_one_line([]) == ""


# -- the notes that the planner builds ---------------------------------------------------------------------------------

PLANNER = Path(__file__).parent.parent / "planner"


@cache
def built_notes() -> list[tuple[Path, ast.Call]]:
    """Calls of `Note` in the planner, each with its file."""
    return [
        (path, node)
        for path in sorted(PLANNER.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Note"
    ]


def codes_of(node: ast.expr) -> Iterator[str]:
    """Yield the codes that an expression can be: a constant, or one of two."""
    if isinstance(node, ast.Constant):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from codes_of(node.body)
        yield from codes_of(node.orelse)


def test_every_code_is_said_somewhere() -> None:
    said = {code for _, call in built_notes() for code in codes_of(call.args[0])}
    assert said == set(CODES)


@pytest.mark.parametrize("code", CODES)
def test_a_note_has_no_value_that_its_sentence_does_not_take(code: NoteCode) -> None:
    """Values that are spread (`**expected`) or in a variable are not seen; those that are seen must be known."""
    if code in SENTENCES:
        parameters = inspect.signature(SENTENCES[code]).parameters
        known = set(parameters)
        required = {name for name, each in parameters.items() if each.default is inspect.Parameter.empty}
    else:
        known = required = {name for _, name, _, _ in Formatter().parse(templates()[code]) if name}
    for path, call in built_notes():
        if code not in codes_of(call.args[0]):
            continue
        values = call.args[1] if len(call.args) > 1 else ast.Dict(keys=[], values=[])
        if isinstance(values, ast.Dict):
            keys = {key.value for key in values.keys if isinstance(key, ast.Constant)}
            assert keys <= known, (path, code)
            assert required <= keys or None in values.keys, (path, code)

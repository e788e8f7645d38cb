"""The stops: combinations that a library refuses or dies of, or that are not counted; one row each (`STOPS`).

A single candidate is refused for the first stop that it meets (candidate_rules.py). A search leaves out the structures
that meet a stop (planner/search/structures.py); if one stop meets them all, the job is refused with it. docs/limits.md
lists the rows.
"""

from planner.candidate import FLASH
from planner.jobs.stop import (
    CAST_TO,
    Change,
    Stop,
    adapts_divided_experts,
    adapts_divided_inputs,
    another_sharding,
    can_have_server,
    casts_announced_weights,
    default_attention,
    divides_layers_otherwise,
    fitting_storage,
    gpus_of_whole_groups,
    has_undivided_experts,
    has_undivided_layers,
    in_full,
    is_not_distributed,
    kernel_of_shared_rows,
    loads_float32,
    named_targets,
    nearest_classifier,
    one_dtype,
    parts_blocks,
    parts_groups,
    plain_experts,
    precomputes_in_other_trainer,
    precomputes_on_cpu,
    prefetches_read_head,
    reads_convolution,
    scales_16_bit_gradients,
    scans_or_sinks,
    shards_4bit,
    shares_rows_without_kernel,
    stored_as_floats,
    targets_beside_experts,
    targets_beside_inputs,
    teacher,
    teacher_in_bfloat16,
    trains_in_bfloat16,
    unclassified,
    waits_for_tower,
    whole_model_setting,
    without_flash_attention,
)
from planner.methods import SHARDS_QLORA, release
from planner.models.layers import FLASH_HEAD_DIM
from planner.models.liger import has_hub_formulas
from planner.settings.vllm_releases import last_before, vllm_has

ADAMW: Change = {"optim": "adamw_torch_fused"}
ZERO_2: Change = {"sharding": "zero2"}
DDP: Change = {"sharding": "ddp"}
FSDP2: Change = {"sharding": "fsdp2"}
LORA: Change = {"tuning": "lora"}
NF4: Change = {"quantization": "nf4"}
NO_ENGINE: Change = {"vllm": "off"}
SERVER: Change = {"vllm": "server"}
ONE_REPLICA: Change = {"vllm_data_parallel_size": 1}
FLOAT32: Change = {"dtype": "float32"}
UNQUANTIZED = "the model that was not quantized"
ALL_LINEAR = ("all-linear",)
# Rows that notes refer to, as the reason why a plan sets or leaves out something (planner/search/notes.py).
HEAD_IN_FLIGHT = Stop(
    what="GRPO, RLOO and others in full under ZeRO-3 with `ds3_gather_for_generation: false`, if it prefetches",
    when=prefetches_read_head,
    cause="{candidate.method} in full with ds3_gather_for_generation=false stops where ZeRO-3 prefetches: it is still "
    "gathering the head when TRL's loss gathers it",
    remedies=({"stage3_prefetch_bucket_size": 0},),
    source='"Cannot partition a param in flight": trl 1.16, trainer/utils.py, `maybe_gather_lm_head_ctx`; deepspeed '
    "0.19.8, zero/partition_parameters.py, `_partition_param`, partitioned_param_coordinator.py, "
    "`__params_to_release`; results/emulated.jsonl, emulated_situations.md",
)
LOADED_IN_FLOAT32 = Stop(
    what="16-bit weights under ZeRO-3 without mixed precision",
    when=loads_float32,
    cause="ZeRO-3 without mixed precision loads every weight in float32, whatever dtype={candidate.dtype} says",
    remedies=(FLOAT32, {"precision": "bf16"}),
    source="deepspeed 0.19.8, runtime/zero/partition_parameters.py, `Init` (float32 unless fp16 or bf16 is on)",
)
IMAGES_EXPANDED_TWICE = Stop(
    what="Rows with images beside a colocated vLLM engine",
    when=lambda candidate, cluster: (
        candidate.vllm == "colocate" and candidate.images_per_row > 0 and candidate.method_row.supports_vllm
    ),
    cause="TRL gives a colocated vLLM prompts whose image tokens are expanded already, and vLLM expands them again "
    "(huggingface/trl#6294): completions are garbage",
    remedies=lambda candidate: (NO_ENGINE, *((SERVER,) if can_have_server(candidate) else ())),
    source="trl 1.16, generation/vllm_generation.py, `VLLMGeneration.generate` (`prompt_token_ids` beside "
    "`multi_modal_data`), huggingface/trl#6294; on an emulated card vLLM 0.31 got prompts of 767 tokens for 512. A "
    "server gets features of images (`VLLMGeneration._place_features`)",
)

UNMERGED = Stop(
    what="vLLM beside a GPTQ or AWQ base",
    when=lambda candidate, cluster: (
        candidate.vllm != "off" and not candidate.quantization_row.merges and not candidate.sends_adapters
    ),
    cause="TRL merges adapters into the base before it sends weights to vLLM, and PEFT merges none into {base} layers",
    remedies=lambda candidate: (ONE_REPLICA if candidate.method_row.asynchronous else NO_ENGINE,),
    otherwise=f"--tuning lora with {UNQUANTIZED}",
    source="trl 1.16, generation/vllm_generation.py, `VLLMGeneration._iter_named_params`; peft 0.21.2, "
    "tuners/lora/model.py, `LoraModel._check_merge_allowed`; tuners/lora/awq.py, `AwqLoraLinear` (has no `merge`); "
    "on an emulated card a GPTQ base stopped in the first sync (results/emulated_situations.md)",
)

CAPTURED_SEGMENTS = Stop(
    what="`expandable_segments` beside a colocated vLLM engine of several GPUs that does not sleep",
    when=lambda candidate, cluster: (
        candidate.expandable_segments
        and candidate.vllm == "colocate"
        and candidate.vllm_tensor_parallel_size > 1
        and not candidate.vllm_enable_sleep_mode
    ),
    cause="vLLM's custom all-reduce stops with expandable_segments:True when it captures CUDA graphs "
    "(vllm-project/vllm#42609)",
    remedies=({"expandable_segments": False}, {"vllm_tensor_parallel_size": 1}),
    source='vllm-project/vllm#42609 and #56193, open in 0.31: "custom_all_reduce.cuh: invalid argument" on 3090, '
    "5090, H100 and H200, as cudaIpcGetMemHandle refuses mapped memory",
)

NO_DENSE_REPLICAS = (1, 7)  # the first TRL that takes no vLLM before 0.14
VLLM_SERVES = (1, 11)  # the first TRL whose server is vLLM's own
OWN_SERVER = Stop(
    what="Several replicas of a dense model behind the server of TRL 1.7 to 1.10",
    when=lambda candidate, cluster: (
        candidate.server_gpus > candidate.vllm_tensor_parallel_size
        and not candidate.model.expert_params
        and NO_DENSE_REPLICAS <= release(candidate.trl_version) < VLLM_SERVES
    ),
    cause="vllm_data_parallel_size above 1 stops a dense model in the server of TRL 1.7 to 1.10",
    remedies=(ONE_REPLICA, {"vllm": "colocate"}),
    otherwise="--trl-version 1.11, whose server is vLLM's own",
    source='"Offline data parallel mode is not supported/useful for dense models": vllm 0.31, config/parallel.py, '
    "`ParallelConfig.__post_init__`, since 0.14 (vllm-project/vllm#30739); trl 1.0 and 1.10, scripts/vllm_serve.py, "
    "`llm_worker` (VLLM_DP_SIZE); the extra `vllm` of trl 1.6 takes 0.12 to 0.19, of 1.7 0.14 to 0.23; trl 1.11 runs "
    "`vllm serve`",
)

SENDS_EITHER_WAY = (1, 13)  # the first TRL that sends weights to both
OLD_TRANSFER = Stop(
    what="A server of vLLM 0.28 and newer beside TRL 1.11 and 1.12",
    when=lambda candidate, cluster: (
        candidate.vllm == "server"
        and VLLM_SERVES <= release(candidate.trl_version) < SENDS_EITHER_WAY
        and vllm_has(candidate.vllm_release, "stateful_transfer")
    ),
    cause="TRL {candidate.trl_version} sends weights by functions that vLLM {candidate.vllm_release} lacks",
    remedies=({"vllm_version": last_before("stateful_transfer")}, {"vllm": "colocate"}),
    source="trl 1.12, generation/vllm_client.py (`NCCLWeightTransferEngine.trainer_init`, `trainer_send_weights`); "
    "vllm 0.28, distributed/weight_transfer/nccl_engine.py has neither; trl 1.13, generation/vllm_client.py, "
    "`_HAS_STATEFUL_TRAINER_ENGINE`",
)

UNLOADED = Stop(
    what="A vLLM without bitsandbytes (0.28 and newer) for a 4-bit base",
    when=lambda candidate, cluster: candidate.vllm != "off" and not candidate.engine_loads,
    cause="vLLM {candidate.vllm_release} has no bitsandbytes, with which TRL has it load {base} weights",
    remedies=({"vllm_version": last_before("no_bitsandbytes")}, {"vllm": "off"}),
    source="vllm 0.27.1 and 0.28.0, model_executor/layers/quantization/__init__.py; trl 1.16, "
    "generation/vllm_generation.py, `VLLMGeneration._init_vllm`",
)

OTHER_TORCH = Stop(
    what="A torch newer than the one that a colocated vLLM requires",
    when=lambda candidate, cluster: (
        candidate.vllm == "colocate" and release(candidate.torch_version) > release(candidate.torch_release)
    ),
    cause="the wheel of vLLM {candidate.vllm_release} requires an older torch than {candidate.torch_version}",
    remedies=({"torch_version": "2.13"}, {"vllm": "server"}),
    source="the wheels of vllm 0.11 to 0.33, METADATA (torch==2.13.0 in 0.31), at which pip stops, or puts that torch "
    "in the place of a newer one (vllm-project/vllm#34224)",
)

STOPS: tuple[Stop, ...] = (
    # -- the GPU -------------------------------------------------------------------------------------------------------
    Stop(
        what="TF32 on GPUs before Ampere",
        when=lambda candidate, cluster: candidate.tf32 and cluster.gpu.compute_capability < (8, 0),
        cause="{gpu.name} has no TF32 (compute capability {gpu.compute_capability[0]}.{gpu.compute_capability[1]}; it "
        "needs 8.0)",
        remedies=({"tf32": False},),
        source="transformers 5.23, utils/import_utils.py, `is_torch_tf32_available`",
    ),
    Stop(
        what="Weights in bfloat16 on GPUs before Ampere",
        when=lambda candidate, cluster: candidate.dtype == "bfloat16" and not cluster.gpu.supports_bf16,
        cause="{gpu.name} has no bfloat16, so dtype=bfloat16 cannot be had there",
        remedies=({"dtype": "float16"},),
        source="transformers 5.23, utils/import_utils.py, `is_torch_bf16_gpu_available`",
    ),
    Stop(
        what="bf16 on GPUs before Ampere",
        when=lambda candidate, cluster: candidate.precision == "bf16" and not cluster.gpu.supports_bf16,
        cause="{gpu.name} has no bfloat16 (compute capability {gpu.compute_capability[0]}.{gpu.compute_capability[1]}; "
        "it needs 8.0)",
        remedies=({"precision": "fp16"},),
        source="transformers 5.23, training_args.py, `TrainingArguments._validate_args`",
    ),
    Stop(
        what="A teacher in bfloat16 on GPUs before Ampere",
        when=teacher_in_bfloat16,
        cause="{gpu.name} has no bfloat16, in which the teacher is loaded",
        remedies=({"teacher_dtype": "float16"},),
        source="trl 1.16, trainer/distillation_trainer.py, `DistillationTrainer.__init__`",
    ),
    Stop(
        what="FlashAttention on GPUs before Ampere",
        when=lambda candidate, cluster: (
            candidate.attn_implementation in FLASH
            and "attn_implementation" not in candidate.method_row.fixed
            and not cluster.gpu.supports_flash_attention_2
        ),
        cause="{candidate.attn_implementation} does not run on {gpu.name}",
        remedies=default_attention,
        source='flash-attention 2.8, csrc/flash_attn/flash_api.cpp ("only supports Ampere GPUs or newer")',
    ),
    # -- other models --------------------------------------------------------------------------------------------------
    Stop(
        what="A reward model of a type without a sequence classifier in Transformers",
        when=lambda candidate, cluster: unclassified(candidate) is not None,
        cause="{classifier.id} cannot be a reward model: Transformers has no sequence classifier of type "
        "{classifier.model_type}",
        otherwise=lambda candidate: f"another model, such as {nearest_classifier(candidate)}",
        source="transformers 5.23, models/auto/modeling_auto.py, `MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES`",
    ),
    Stop(
        what="A teacher of GKD of a type with images alone",
        when=lambda candidate, cluster: candidate.method == "gkd" and not teacher(candidate).loads_as_causal_model,
        cause="GKDTrainer loads its teacher with AutoModelForCausalLM, which has no {teacher.model_type}",
        otherwise="--method distillation, or a teacher without images",
        source="trl 1.16, experimental/gkd/gkd_trainer.py, `GKDTrainer.__init__`",
    ),
    Stop(
        what="A teacher with another vocabulary (`vocab_size`) in GKD and distillation",
        when=lambda candidate, cluster: (
            candidate.method_row.shares_vocabulary and teacher(candidate).vocab_size != candidate.model.vocab_size
        ),
        cause="{candidate.method_row.trainer} stops at a teacher with another vocab_size: {teacher.id} has "
        "{teacher.vocab_size}, {candidate.model.id} {candidate.model.vocab_size}",
        otherwise="a teacher with the same, or --method gold where the tokenizers are the same",
        source="trl 1.16, experimental/gkd/gkd_trainer.py, `GKDTrainer.__init__`; trainer/distillation_trainer.py, "
        "`DistillationTrainer.__init__`",
    ),
    # -- kernels -------------------------------------------------------------------------------------------------------
    Stop(
        what="Liger's kernels for Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5's mixtures of experts",
        when=lambda candidate, cluster: (
            candidate.use_liger_kernel and candidate.model.architecture.liger_stops_at != ""
        ),
        cause="use_liger_kernel=true: liger-kernel 0.8.5 stops at {candidate.model.id}, as transformers 5.23 has no "
        "{candidate.model.architecture.liger_stops_at}",
        remedies=({"use_liger_kernel": False},),
        source="liger-kernel 0.8.5, transformers/model/output_classes.py; the ImportError of "
        "`_apply_liger_kernel_to_instance` on a model of each type",
    ),
    Stop(
        what="Liger's kernels for reward models of Gemma 3, Qwen3.5 and Qwen3-Next",
        when=lambda candidate, cluster: (
            candidate.use_liger_kernel
            and candidate.method_row.head == "score"
            and candidate.model.architecture.liger_refuses_classifier
        ),
        cause="use_liger_kernel=true: liger-kernel 0.8.5 refuses {candidate.model.id} as a sequence classifier",
        remedies=({"use_liger_kernel": False},),
        source="liger-kernel 0.8.5, transformers/monkey_patch.py, `apply_liger_kernel_to_gemma3_text` and others that "
        "end in a TypeError",
    ),
    Stop(
        what="The Hub's kernels (`use_kernels`) for layers without formulas and for the experts of gpt-oss",
        when=lambda candidate, cluster: candidate.use_kernels and not has_hub_formulas(candidate.model),
        cause="use_kernels=true: the memory of the Hub's kernels for {candidate.model.id} is not counted",
        remedies=({"use_kernels": False},),
        source="transformers 5.23, integrations/hub_kernels.py, `_build_kernel_mapping`: kernels-community/fla, "
        "mamba-ssm and megablocks, whose memory was not measured",
    ),
    Stop(
        what="LLaMA-Factory's full fine-tuning in float32 under ZeRO-3",
        when=lambda candidate, cluster: (
            candidate.tool == "llamafactory"
            and candidate.tuning == "full"
            and candidate.scheme_row.creates_sharded
            and candidate.dtype == "float32"
        ),
        cause="LLaMA-Factory trains in the checkpoint's dtype under ZeRO-3, not in float32",
        remedies=({"dtype": "bfloat16"}, ZERO_2),
        source="llamafactory 0.9.5, model/adapter.py, `init_adapter` (`is_deepspeed_zero3_enabled`)",
    ),
    Stop(
        what="LLaMA-Factory's full fine-tuning of a model with a vision tower",
        when=lambda candidate, cluster: (
            candidate.tool == "llamafactory" and candidate.tuning == "full" and candidate.model.vision_params > 0
        ),
        cause="LLaMA-Factory freezes the vision tower and projector of {candidate.model.id} in full fine-tuning, which "
        "is not counted",
        remedies=({"tuning": "lora"},),
        source="llamafactory 0.9.5, model/adapter.py, `_setup_full_tuning` (`get_forbidden_modules`)",
    ),
    Stop(
        what="`precompute_ref_log_probs` in LLaMA-Factory's trainers, which have none",
        when=lambda candidate, cluster: precomputes_in_other_trainer(candidate),
        cause="precompute_ref_log_probs=true: {candidate.tool_row.name}'s trainer of {candidate.method} computes the "
        "reference's in each step",
        remedies=({"precompute_ref_log_probs": False},),
        source="llamafactory 0.9.5, train/dpo/trainer.py, `CustomDPOTrainer.__init__`, train/kto/trainer.py, "
        "`CustomKTOTrainer.__init__` (`self.precompute_ref_log_probs = False`)",
    ),
    Stop(
        what="Cut cross entropy (`cut_cross_entropy`) in a trainer that is not Axolotl's own",
        when=lambda candidate, cluster: candidate.cut_cross_entropy and candidate.loss != "cut",
        cause="cut_cross_entropy=true: it is a plugin of Axolotl, for SFT",
        remedies=({"cut_cross_entropy": False},),
        source="axolotl 0.21, integrations/cut_cross_entropy: the loss of a model that gets labels; TRL's trainers "
        "compute theirs: trl 1.16, trainer/sft_trainer.py, `SFTTrainer.compute_loss`",
    ),
    Stop(
        what="Axolotl's fused kernels of LoRA (`lora_kernels`) in another tool's trainer",
        when=lambda candidate, cluster: bool(candidate.lora_kernels) and candidate.tool != "axolotl",
        cause="lora_kernels are Axolotl's",
        remedies=({"lora_kernels": ()},),
        source="axolotl 0.21, monkeypatch/lora_kernels.py, `apply_lora_kernel_patches`",
    ),
    Stop(
        what="Axolotl's fused kernels of LoRA for attention whose source code they do not recognize",
        when=lambda candidate, cluster: (
            candidate.model.architecture.refuses_lora_kernels and not {"qkv", "o"}.isdisjoint(candidate.lora_kernels)
        ),
        cause="Axolotl's kernels for q, k, v and o do not support the attention of {candidate.model.model_type}: set "
        "lora_qkv_kernel and lora_o_kernel to false",
        remedies=({"lora_kernels": ("mlp",)}, {"lora_kernels": ()}),
        source='axolotl 0.21, monkeypatch/lora_kernels.py, `patch_self_attn_lora`: ValueError "does not use a '
        'supported q/k/v/o projection layout"',
    ),
    Stop(
        what="Experts that are quantized at load (`quantize_moe_experts`) in another tool's trainer",
        when=lambda candidate, cluster: candidate.quantization_row.keeps_experts and candidate.tool != "axolotl",
        cause="quantize_moe_experts is Axolotl's: bitsandbytes leaves experts as they are",
        remedies=plain_experts,
        source="axolotl 0.21, monkeypatch/moe_quant.py; transformers 5.23, integrations/bitsandbytes.py, "
        "`replace_with_bnb_linear`",
    ),
    Stop(
        what="Axolotl's `quantize_moe_experts` beside adapters on all linear layers",
        when=lambda candidate, cluster: (
            candidate.quantization_row.keeps_experts and candidate.lora_target_modules == ("all-linear",)
        ),
        cause="Axolotl stops at quantize_moe_experts with lora_target_linear",
        remedies=({"lora_target_modules": ("q_proj", "k_proj", "v_proj", "o_proj")},),
        source="axolotl 0.21, utils/schemas/config.py, `check_quantize_moe_experts`",
    ),
    # -- attention -----------------------------------------------------------------------------------------------------
    Stop(
        what="sdpa for models that have none in Transformers (gpt-oss, Gemma 2, Bloom, GPT-Neo, GPT-J, DeepSeek V4)",
        when=lambda candidate, cluster: candidate.attn_implementation == "sdpa" and not candidate.model.supports_sdpa,
        cause="Transformers has no sdpa for {candidate.model.id} ({candidate.model.model_type})",
        remedies=default_attention,
        source="transformers 5.23, modeling_utils.py, `_sdpa_can_dispatch`; `_supports_sdpa` of each class "
        "(tests/test_architectures.py)",
    ),
    Stop(
        what=f"FlashAttention for models that have none in Transformers, or heads above {FLASH_HEAD_DIM}",
        when=lambda candidate, cluster: without_flash_attention(candidate) is not None,
        cause="{candidate.attn_implementation} does not run {flashless.id}: {flashless.model_type} has none in "
        f"Transformers, or heads above {FLASH_HEAD_DIM}",
        remedies=default_attention,
        source="transformers 5.23, modeling_utils.py, `_flash_attn_can_dispatch`; flash-attention 2.8, "
        "csrc/flash_attn/flash_api.cpp",
    ),
    Stop(
        what="FlashAttention of float32, such as in `generate` of adapters on float32 weights",
        when=lambda candidate, cluster: candidate.attn_implementation in FLASH and candidate.float32_attention,
        cause="{candidate.attn_implementation} has kernels for 16 bits only, and {candidate.method} computes attention "
        "in float32 here",
        remedies=lambda candidate: ({"dtype": "bfloat16"}, *default_attention(candidate)),
        source='flash-attention 2.8, csrc/flash_attn/flash_api.cpp ("only support fp16 and bf16 data type"); peft '
        "0.21, peft_model.py, `PeftModelForCausalLM.generate`",
    ),
    Stop(
        what="Rows that GPUs share, with eager attention, and context parallel without sdpa",
        when=shares_rows_without_kernel,
        cause="{candidate.model.id} runs with {candidate.attn_implementation} attention here, which cannot share a row "
        "between GPUs",
        remedies=kernel_of_shared_rows,
        source="transformers 5.23, trainer.py, `_prepare_context_parallel_inputs` (sdpa); deepspeed 0.19.8, "
        "runtime/sequence_parallel/ulysses_sp.py, `UlyssesSPAttentionHF`",
    ),
    # -- precision -----------------------------------------------------------------------------------------------------
    Stop(
        what="fp16 without DeepSpeed or FSDP of weights or adapters in 16 bits",
        when=scales_16_bit_gradients,
        cause="fp16 cannot train {candidate.dtype} parameters here: their gradients cannot be unscaled",
        remedies=lambda candidate: (
            (FLOAT32, ZERO_2, LORA) if in_full(candidate) else ({"autocast_adapter_dtype": True},)
        ),
        source="torch 2.13, torch/amp/grad_scaler.py, `_unscale_grads_`; cuda/AmpKernels.cu has no bfloat16 kernel",
    ),
    LOADED_IN_FLOAT32,
    # -- optimizers ----------------------------------------------------------------------------------------------------
    Stop(
        what="`rmsprop_bnb` of bfloat16 gradients",
        when=lambda candidate, cluster: candidate.optim.startswith("rmsprop_bnb") and trains_in_bfloat16(candidate),
        cause="optim={candidate.optim} has no kernel for bfloat16 gradients",
        remedies=(ADAMW,),
        source="bitsandbytes 0.50.2, backends/cuda/ops.py, `str2optimizer32bit`, which 8-bit RMSprop needs for small "
        "tensors, too; results/emulated.jsonl",
    ),
    Stop(
        what="bitsandbytes' optimizers under FSDP2 (not FSDP 1, whose parameters are plain tensors)",
        when=lambda candidate, cluster: (
            candidate.scheme_row.dtensors and candidate.optimizer_row.kind == "bitsandbytes"
        ),
        cause="optim={candidate.optim} stops under FSDP2, whose parameters (DTensors) bitsandbytes does not update",
        remedies=(ADAMW,),
        source="bitsandbytes 0.50.2, backends/cuda/ops.py, `_optimizer_update_32bit_impl` (no sharding strategy for "
        "DTensors): four jobs of results/emulated.jsonl",
    ),
    Stop(
        what="Adagrad in full under DeepSpeed",
        when=lambda candidate, cluster: (
            candidate.optim == "adagrad" and in_full(candidate) and candidate.scheme_row.stage > 0
        ),
        cause="optim=adagrad stops under DeepSpeed, which puts parameters with and without weight decay in one group",
        remedies=(ADAMW,),
        source="deepspeed 0.19.8, runtime/zero/stage3.py and stage_1_and_2.py, `initialize_optimizer_states`; two jobs "
        "of results/emulated.jsonl under ZeRO-3, others under ZeRO-1 and ZeRO-2",
    ),
    # -- activations ---------------------------------------------------------------------------------------------------
    Stop(
        what="`activation_offloading` in full under ZeRO-3",
        when=lambda candidate, cluster: (
            candidate.activation_offloading and in_full(candidate) and candidate.scheme_row.traces_modules
        ),
        cause="activation_offloading stops under ZeRO-3 in full: TRL moves weights away that DeepSpeed then looks for",
        remedies=(ZERO_2, LORA),
        source="deepspeed 0.19.8, runtime/zero/linear.py, `LinearFunctionForZeroStage3` (reads `ds_status` of the "
        "saved weight); results/emulated.jsonl",
    ),
    Stop(
        what="`activation_offloading` and `offload` together on 8-bit weights (not counted)",
        when=lambda candidate, cluster: (
            candidate.quantization_row.eight_bit and candidate.activation_offloading and candidate.checkpoint_offload
        ),
        cause="activation_offloading and offload together keep the last step's inputs of 8-bit products on the GPU, "
        "and copy the same tensors",
        remedies=({"checkpoint_offload": False},),
        source="on an emulated A100-80G reward modeling of TinyLlama, 4 rows of 4,096 tokens, allocated 34.9 GiB, "
        "where 21 are estimated: trl 1.16, models/activation_offloading.py, `OffloadActivations`",
    ),
    Stop(
        what="`activation_offloading` where not every layer is checkpointed (not counted)",
        when=lambda candidate, cluster: (
            candidate.activation_offloading
            and not (candidate.gradient_checkpointing and candidate.checkpoint_every_n_layers == 1)
        ),
        cause="activation_offloading is planned where every layer is checkpointed: TRL keeps on the GPU what several "
        "operators save",
        remedies=({"gradient_checkpointing": True, "checkpoint_every_n_layers": 1},),
        source='trl 1.16, models/activation_offloading.py, `OffloadActivations` ("Storage already offloaded"), which '
        "is most of what layers without checkpoints save",
    ),
    HEAD_IN_FLIGHT,
    Stop(
        what="Rollouts of Qwen3.5, Qwen3-Next, LFM2, Granite 4 H and Nemotron H under ZeRO-3 with "
        "`ds3_gather_for_generation: false`",
        when=reads_convolution,
        cause="{candidate.model.id} stops in generate under ZeRO-3 with ds3_gather_for_generation=false: its layers "
        "read the weight of a convolution that is not gathered",
        remedies=({"ds3_gather_for_generation": True},),
        source="deepspeed 0.19.8, runtime/zero/parameter_offload.py, `ZeROOrderedDict.__getitem__` (`_in_forward`); "
        "transformers 5.23, models/qwen3_5/modeling_qwen3_5.py, `Qwen3_5GatedDeltaNet.forward` "
        "(`self.conv1d.weight.squeeze`): an IndexError on an emulated card",
    ),
    # -- sharding ------------------------------------------------------------------------------------------------------
    Stop(
        what="Vision-language models in full under DDP without images, unless gradient checkpointing is off",
        when=waits_for_tower,
        cause="DDP stops at {candidate.model.id} in full, whose vision tower gets no gradients from text",
        remedies=(ZERO_2, {"gradient_checkpointing": False}),
        source="transformers 5.23, trainer.py, `Trainer._build_accelerator_args` (`find_unused_parameters`); torch "
        '2.13, csrc/distributed/c10d/reducer.cpp ("Expected to have finished reduction")',
    ),
    Stop(
        what="bitsandbytes' weights of a checkpoint that is published in FP8 or MXFP4",
        when=lambda candidate, cluster: (
            candidate.quantization_row.bitsandbytes and candidate.model.quantization_row.dequantized
        ),
        cause="Transformers refuses a quantization of bitsandbytes for {candidate.model.id}, which is published "
        "quantized ({candidate.model.quantization})",
        remedies=({"tuning": "lora", "quantization": "none"},),
        otherwise="a copy of the model in 16 bits",
        source="transformers 5.23, quantizers/auto.py, `AutoHfQuantizer.merge_quantization_configs` (a ValueError for "
        "another class of config)",
    ),
    Stop(
        what="Quantized bases under FSDP 1, but for 4-bit weights whose storage has the dtype of the other weights",
        when=lambda candidate, cluster: (
            candidate.scheme_row.flat_units
            and candidate.quantization_row.quantized
            and not (stored_as_floats(candidate) and candidate.bnb_4bit_quant_storage == candidate.dtype)
        ),
        cause="FSDP 1 flattens the weights of a layer into one tensor of one floating-point dtype, at which the "
        "quantized base stops ({candidate.quantization}, other weights in {candidate.dtype})",
        remedies=one_dtype,
        source="torch 2.13, distributed/fsdp/_flat_param.py, `FlatParamHandle._validate_tensors_to_flatten`: an "
        "emulated run ended there with each of its two messages",
    ),
    Stop(
        what="Methods that generate under FSDP 1",
        when=lambda candidate, cluster: candidate.scheme_row.flat_units and candidate.method_row.generates,
        cause="{candidate.method} stops under FSDP 1, where it generates or sends its weights to vLLM",
        remedies=another_sharding,
        source="trl 1.16, generation/vllm_generation.py, `VLLMGeneration._iter_fsdp1_params`: an emulated run of GRPO "
        "in full beside vLLM ended in the score (children were gathered, as roots, before the model); models/utils.py, "
        "`unwrap_model_for_generation`: one with adapters and without vLLM ended in the rollout (mat1 and mat2 have "
        "other dtypes), and one in full gathered 1.1 GiB more there than is counted",
    ),
    Stop(
        what="Parameters offloaded by FSDP 1 (not counted)",
        when=lambda candidate, cluster: candidate.scheme_row.flat_units and candidate.offload_param,
        cause="fsdp_offload_params is not planned under FSDP 1",
        remedies=(FSDP2, {"offload_param": False}),
        source="torch 2.13, distributed/fsdp/_flat_param.py, `FlatParamHandle.init_flat_param_attributes`: an emulated "
        "run of Qwen2.5-0.5B in full took 0.3 GiB more than was counted",
    ),
    Stop(
        what="A reference of its own under FSDP 1",
        when=lambda candidate, cluster: candidate.scheme_row.flat_units and candidate.separate_reference,
        cause="{candidate.method} in full stops under FSDP 1: every process loads the reference to the first GPU",
        remedies=(FSDP2,),
        source="trl 1.16, trainer/kto_trainer.py, `KTOTrainer.__init__` (device_map: None for MULTI_GPU, DEEPSPEED "
        "alone), models/utils.py, `prepare_fsdp` (`device_id`): an exported start of KTO ended there",
    ),
    Stop(
        what="Adapters under FSDP 1 where the policy without them is the reference",
        when=lambda candidate, cluster: candidate.scheme_row.flat_units and candidate.refers_without_adapters,
        cause="{candidate.method} stops under FSDP 1 after it ran the policy without its adapters as reference",
        remedies=(FSDP2, DDP),
        source="torch 2.13, distributed/fsdp/_runtime_utils.py, `_finalize_params` (the reference's pass leaves the "
        "flat parameters of the adapters without `requires_grad`): emulated runs of DPO and KTO ended there",
    ),
    Stop(
        what="PPO's adapters under DDP",
        when=lambda candidate, cluster: (
            candidate.method_row.value_model and candidate.tuning == "lora" and candidate.scheme_row.reducer
        ),
        cause="{candidate.method} stops under DDP with adapters: it looks for the policy in DDP's wrapper, for the "
        "log-probabilities of its base",
        remedies=(ZERO_2,),
        source="trl 1.12, experimental/ppo/ppo_trainer.py, `PPOTrainer.null_ref_context`, `train` "
        "(`self.model.policy`, `model.policy`, where `model` is a DistributedDataParallel)",
    ),
    Stop(
        what="GKD, GOLD, IW-OPD, distillation and A2PO under FSDP2",
        when=lambda candidate, cluster: candidate.scheme_row.dtensors and not candidate.method_row.runs_under_fsdp2,
        cause="{candidate.method} stops under FSDP, where accelerate does not place the teacher or the reference",
        remedies=another_sharding,
        source="trl 1.16, experimental/gkd/gkd_trainer.py, `GKDTrainer.__init__`; trainer/distillation_trainer.py, "
        "`DistillationTrainer.__init__`",
    ),
    Stop(
        what="A2PO under ZeRO-3",
        when=lambda candidate, cluster: candidate.method_row.samples_values and candidate.scheme_row.creates_sharded,
        cause="{candidate.method} copies the policy as its reference, which TRL refuses under ZeRO-3",
        remedies=(ZERO_2, DDP),
        source="trl 1.16, experimental/a2po/a2po_trainer.py, `A2POTrainer.__init__`; experimental/utils.py, "
        '`create_reference_model` ("not compatible with `create_reference_model()`")',
    ),
    Stop(
        what="`precompute_ref_log_probs` of adapters under FSDP2",
        when=precomputes_on_cpu,
        cause="precompute_ref_log_probs stops under FSDP2 with adapters: their model is still on the CPU when TRL 1.16 "
        "computes them",
        remedies=({"precompute_ref_log_probs": False}, {"sharding": "zero3"}),
        source="trl 1.16, trainer/dpo_trainer.py, `_precompute_ref_logps`; a probe on two emulated GPUs stopped "
        '("Expected all tensors to be on the same device")',
    ),
    Stop(
        what="SDPO with adapters under ZeRO-3 and FSDP2",
        when=lambda candidate, cluster: candidate.averages_adapters and candidate.scheme_row.shards_weights,
        cause="{candidate.method} averages adapters in a second adapter, which has none of their shards: PEFT stops "
        "when it loads the average",
        remedies=(ZERO_2, DDP),
        source="trl 1.16, experimental/sdpo/teacher_sync.py, `PEFTAdapterEMACallback._initialize_teacher_adapter` "
        "(`set_peft_model_state_dict`); two emulated cards stopped under either "
        '("Error(s) in loading state_dict for PeftModelForCausalLM")',
    ),
    Stop(
        what="Axolotl's `quantize_moe_experts` where GPUs divide the weights (not counted)",
        when=lambda candidate, cluster: (
            candidate.scheme_row.shards_weights and candidate.quantization_row.keeps_experts
        ),
        cause="quantize_moe_experts is planned for whole models, not with {candidate.scheme_row.words}",
        remedies=(DDP,),
        source="axolotl 0.21, monkeypatch/fsdp2_qlora.py, `apply_init_dtype_attrs_patch`",
    ),
    Stop(
        what="8-bit weights under FSDP2",
        when=lambda candidate, cluster: candidate.scheme_row.dtensors and not candidate.quantization_row.shards,
        cause="FSDP does not shard int8 weights: PyTorch makes no parameters of a bitsandbytes Int8Params",
        remedies=(NF4, DDP),
        source='torch 2.13, nn/parameter.py, `Parameter.__new__` ("requires that detach() returns an instance of the '
        'same type"); bitsandbytes 0.50.2, nn/modules.py, `Int8Params`',
    ),
    Stop(
        what="8-bit weights under ZeRO-3 (not counted)",
        when=lambda candidate, cluster: candidate.scheme_row.creates_sharded and not candidate.quantization_row.shards,
        cause="load_in_8bit is planned for whole models, not with {candidate.scheme_row.words}",
        remedies=(DDP,),
        source="deepspeed 0.19.8, runtime/zero/partition_parameters.py, `Init`: what it gathers of them is not counted",
    ),
    Stop(
        what="4-bit weights under FSDP2 in another storage than the dtype of mixed precision",
        when=lambda candidate, cluster: (
            stored_as_floats(candidate)
            and candidate.precision != "no"
            and CAST_TO[candidate.precision] != candidate.bnb_4bit_quant_storage
        ),
        cause="bnb_4bit_quant_storage={candidate.bnb_4bit_quant_storage} does not survive FSDP's cast to "
        "{candidate.precision}",
        remedies=fitting_storage,
        source="torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param.py, `_to_dtype_if_needed`",
    ),
    Stop(
        what=f"4-bit weights that FSDP2 shards but for {', '.join(SHARDS_QLORA)} (not counted)",
        when=lambda candidate, cluster: stored_as_floats(candidate) and not candidate.method_row.shards_qlora,
        cause="FSDP with bnb_4bit_quant_storage={candidate.bnb_4bit_quant_storage} is planned for "
        f"{', '.join(SHARDS_QLORA)}, not for {{candidate.method}}",
        remedies=(DDP,),
        source="trl 1.16, experimental/utils.py, `prepare_peft_model`: what it casts of a shard is not counted",
    ),
    Stop(
        what=f"4-bit weights under ZeRO-3 but for {', '.join(SHARDS_QLORA)} (in searches)",
        when=lambda candidate, cluster: shards_4bit(candidate) and not candidate.method_row.shards_qlora,
        cause=f"ZeRO-3 shards 4-bit weights, which is planned for {', '.join(SHARDS_QLORA)}, not for "
        "{candidate.method}",
        remedies=(ZERO_2, DDP),
        source="trl 1.16, experimental/utils.py, `prepare_peft_model`: what it casts of a shard is not counted",
        estimated=True,
    ),
    Stop(
        what="4-bit weights that FSDP2 shards and offloads (not counted)",
        when=lambda candidate, cluster: stored_as_floats(candidate) and candidate.offload_param,
        cause="FSDP with bnb_4bit_quant_storage={candidate.bnb_4bit_quant_storage} is planned without offloading",
        remedies=({"offload_param": False},),
        source="accelerate 1.15, utils/fsdp_utils.py, `fsdp2_load_full_state_dict`",
    ),
    Stop(
        what="DoRA, `lora_modules_to_save` and prepared 4-bit bases under ZeRO and FSDP2 (not counted)",
        when=lambda candidate, cluster: not candidate.scheme_row.whole and whole_model_setting(candidate) != "",
        cause="{whole} is planned for whole models, not with {candidate.scheme_row.words}",
        remedies=(DDP,),
        source="peft 0.21.2, tuners/lora/dora.py, `DoraLinearLayer.forward` (reads a weight that may not be gathered)",
    ),
    Stop(
        what="A vLLM engine or server beside a trainer under `distributed_config`",
        when=lambda candidate, cluster: candidate.scheme_row.loads_divided and candidate.vllm != "off",
        cause="TRL sends vLLM the shards of a model under distributed_config as they are: it gathers weights only "
        "with accelerate's FSDP or with DeepSpeed",
        remedies=(FSDP2,),
        source="trl 1.16, distributed.py, `DistributedBackend.is_fsdp`, `gather_params` (yields at once); "
        "generation/vllm_generation.py, `_iter_named_params` (all or most are DTensors), which an engine's copies "
        'refuse ("aten.copy_.default got mixed torch.Tensor and DTensor"), as peft 0.21.2, tuners/lora/layer.py, '
        "`Linear.merge` does; two processes over gloo, with `fsdp_size` and with `tp_size`",
    ),
    Stop(
        what="Transformers' own FSDP2 (`distributed_config`) but for SFT of text on several GPUs (not counted)",
        when=is_not_distributed,
        cause="distributed_config is planned for SFT of text with TRL's newest release on two or more GPUs, without "
        "offloading or copies of the model",
        remedies=(FSDP2,),
        source="transformers 5.23, distributed/mixin.py, `DistributedMixin.maybe_distribute_model`: others were not "
        "started",
    ),
    Stop(
        what="Quantized weights and checkpoints under `distributed_config` (not counted)",
        when=lambda candidate, cluster: (
            candidate.scheme_row.loads_divided
            and (candidate.quantization_row.quantized or candidate.model.quantization_row.quantized)
        ),
        cause="distributed_config is planned for checkpoints of 16 or 32 bits, loaded as they are",
        remedies=(FSDP2,),
        otherwise="a checkpoint of the model in 16 bits",
        source="transformers 5.23, distributed/sharding_utils.py, `DtensorShardOperation.shard_tensor`: of an FP8 "
        "weight with blocks of 128 rows it cuts the rows of the scales as it cuts those of the weight, so that shards "
        "of other than whole blocks get other blocks' scales or none (integrations/finegrained_fp8.py, "
        "`Fp8Dequantize._dequantize_one`); not started",
    ),
    Stop(
        what="`distributed_config` with `fsdp_size` and without one of: an `ep_size` above 1 that divides the GPUs and "
        "each layer's experts (of models whose experts have formulas); a `tp_size` above 1 and below the GPUs",
        when=lambda candidate, cluster: has_undivided_experts(candidate),
        cause="distributed_config is planned with either an ep_size above 1 that divides the GPUs and the experts of "
        "each layer, if these have formulas, or a tp_size above 1 and below the GPUs, not with both: ep_size "
        "{candidate.ep_size}, tp_size {candidate.tp_size}, {candidate.num_processes} GPUs, {candidate.model.id}",
        remedies=(FSDP2,),
        source="transformers 5.23, distributed/configuration_utils.py, `DistributedConfig._validate_mesh_config`, "
        'expert_parallel.py, `MoEParamShard.shard_param` ("Cannot evenly shard")',
    ),
    Stop(
        what="Adapters on experts under `distributed_config`",
        when=lambda candidate, cluster: adapts_divided_experts(candidate),
        cause="Adapters on experts stop under distributed_config, which makes them DTensors and the adapters not",
        remedies=targets_beside_experts,
        source="peft 0.21.2, tuners/lora/layer.py, `ParamWrapper.get_delta_weight`; a start of two processes stopped "
        '("aten.baddbmm.default got mixed torch.Tensor and DTensor")',
    ),
    Stop(
        what="Tensor parallelism (`distributed_config` with `tp_size`) of models without a `tp_plan` in Transformers, "
        "with one that gathers a projection's outputs, or with heads or MLP features that the GPUs do not divide",
        when=lambda candidate, cluster: has_undivided_layers(candidate),
        cause="tensor parallelism is planned for models whose heads and features Transformers divides evenly: "
        "{candidate.layer_gpus} GPUs, {candidate.model.id}",
        remedies=(FSDP2,),
        source='transformers 5.23, distributed/mixin.py, `_resolve_parallel_plans` ("has no `tp_plan`"); '
        "distributed/tensor_parallel.py, `ColwiseParallel` (a model views its outputs as heads); Qwen3-30B-A3B stopped "
        "on 8 emulated cards, which do not divide its 4 key heads",
    ),
    Stop(
        what="Tensor parallelism across nodes, or with the kernels of Liger or the Hub (not counted)",
        when=divides_layers_otherwise,
        cause="tensor parallelism is planned among GPUs of one node, without the kernels of Liger or the Hub",
        remedies=(FSDP2,),
        source="transformers 5.23, distributed/tensor_parallel.py, `apply_tensor_parallelism`: not started",
    ),
    Stop(
        what="Adapters under `distributed_config` with both `fsdp_size` and `tp_size`",
        when=lambda candidate, cluster: (
            candidate.layer_gpus > 1 and candidate.scheme_row.units and candidate.tuning == "lora"
        ),
        cause="The copies of an adapter drift apart under distributed_config with both fsdp_size and tp_size: PEFT "
        "makes lora_B a DTensor of the tensor parallel GPUs alone, so that no gradient is averaged across their groups",
        remedies=({"sharding": "tensor", "tp_size": 1}, FSDP2),
        source="peft 0.21.2, tuners/lora/model.py, `add_lora_tp_hooks_dtensor`; transformers 5.23, trainer.py, "
        "`_sync_replicated_trainable_parameters` (passes over DTensors)",
    ),
    Stop(
        what="Adapters on `o_proj` and `down_proj` under tensor parallelism",
        when=lambda candidate, cluster: adapts_divided_inputs(candidate),
        cause="LoRA on a block's last projection (o_proj, down_proj) fails under tensor parallelism: PEFT makes lora_A "
        "for one GPU's part of the inputs, and Transformers takes that width for the whole one",
        remedies=targets_beside_inputs,
        source="peft 0.21.2, tuners/tuners_utils.py, `_get_in_out_features`; transformers 5.23, "
        "distributed/tensor_parallel.py, `RowwiseParallel.transform_inputs_pre_forward` (`module.in_features`); "
        "Llama-3.2-1B on two emulated cards (\"shape '[2048, 512]' is invalid for input of size 2097152\")",
    ),
    # -- adapters ------------------------------------------------------------------------------------------------------
    Stop(
        what="Adapters in A2PO",
        when=lambda candidate, cluster: candidate.tuning == "lora" and not candidate.method_row.takes_adapters,
        cause="{candidate.method_row.trainer} takes no adapters: it has no argument peft_config",
        remedies=({"tuning": "full", "quantization": "none"},),
        source="trl 1.16, experimental/a2po/a2po_trainer.py, `A2POTrainer.__init__`",
    ),
    Stop(
        what="Adapters on all-linear layers of GPTQ and AWQ checkpoints",
        when=lambda candidate, cluster: (
            candidate.tuning == "lora"
            and not candidate.model.quantization_row.nn_linear
            and candidate.lora_target_modules == ALL_LINEAR
        ),
        cause="all-linear finds no layer of {candidate.model.id}: {base} layers are not nn.Linear",
        remedies=named_targets,
        source="peft 0.21.2, tuners/tuners_utils.py, `_maybe_include_all_linear_layers`; gptqmodel 7.6, "
        "nn_modules/qlinear/__init__.py, `BaseQuantLinear`; an emulated card (NoMatchingPeftModuleError)",
    ),
    Stop(
        what="Adapters on all-linear layers of Llama 4, Phi-3.5-MoE, Nemotron H and Falcon H1",
        when=lambda candidate, cluster: (
            candidate.tuning == "lora"
            and candidate.model.architecture.stops_all_linear != ""
            and candidate.lora_target_modules == ALL_LINEAR
        ),
        cause="all-linear includes {candidate.model.architecture.stops_all_linear} of {candidate.model.id}, at which "
        "PEFT stops",
        remedies=named_targets,
        source="transformers 5.23, models/llama4/modeling_llama4.py, `Llama4Router`; peft 0.21.2, "
        "tuners/tuners_utils.py, `_check_lora_target_modules_mamba`",
    ),
    Stop(
        what="DoRA on GPTQ and AWQ checkpoints",
        when=lambda candidate, cluster: candidate.use_dora and not candidate.quantization_row.merges,
        cause="PEFT trains no DoRA on {base} layers",
        remedies=({"use_dora": False},),
        otherwise=UNQUANTIZED,
        source="peft 0.21.2, tuners/lora/gptq.py, `GPTQLoraLinear`, awq.py, `AwqLoraLinear`",
    ),
    Stop(
        what="DoRA on 8-bit bases (not counted)",
        when=lambda candidate, cluster: candidate.use_dora and candidate.quantization_row.eight_bit,
        cause="use_dora is planned on 4-bit and 16-bit weights, not on int8 ones",
        remedies=(NF4,),
        source="peft 0.21.2, tuners/lora/dora.py, `DoraLinearLayer.forward` (dequantizes the weight)",
    ),
    # -- other tools ---------------------------------------------------------------------------------------------------
    Stop(
        what="LLaMA-Factory under FSDP, of which its config says nothing",
        when=lambda candidate, cluster: (
            candidate.tool == "llamafactory" and candidate.scheme_row.section == "fsdp_config"
        ),
        cause="LLaMA-Factory's config cannot say FSDP, which is in the file for accelerate launch",
        remedies=(ZERO_2, DDP),
        source="llamafactory 0.9.5, model/model_utils/checkpointing.py, `prepare_model_for_training` (FSDP is known by "
        "accelerate's variable ACCELERATE_USE_FSDP)",
        estimated=True,
    ),
    # -- beside a server ----------------------------------------------------------------------------------------------
    Stop(
        what="ZeRO-3 in an asynchronous trainer",
        when=lambda candidate, cluster: candidate.method_row.asynchronous and candidate.scheme_row.stage == 3,
        cause="{candidate.method} gathers FSDP2's weights for the server, and not those of ZeRO-3, which are empty",
        remedies=(FSDP2, DDP),
        source="trl 1.16, docs/source/async_grpo_trainer.md; experimental/async_grpo/async_grpo_trainer.py, "
        "`_streaming_iter`, `save_lora_adapter` (gather DTensors only)",
    ),
    Stop(
        what="ZeRO-1 and ZeRO-2 in an asynchronous trainer, of weights that DeepSpeed casts before they are sent",
        when=lambda candidate, cluster: casts_announced_weights(candidate),
        cause="{candidate.method} announces {candidate.dtype} weights to the server, and DeepSpeed sends 16-bit ones",
        remedies=(FSDP2, DDP, {"dtype": "bfloat16", "precision": "bf16"}),
        source="trl 1.16, experimental/async_grpo/async_grpo_trainer.py, `AsyncGRPOTrainer.__init__` "
        "(`weight_dtype_names`, before DeepSpeed casts); vllm 0.31, distributed/weight_transfer/packed_tensor.py: both "
        "sides count the bytes of a buffer; an emulated card, which compares no sizes, does not stop",
    ),
    Stop(
        what="An asynchronous trainer on cards before Ampere or after Hopper",
        when=lambda candidate, cluster: (
            candidate.method_row.asynchronous and not cluster.gpu.runs_hub_flash_attention_3
        ),
        cause="{candidate.method} needs FlashAttention 3, built for Ampere, Ada and Hopper and not for {gpu.name}",
        otherwise="grpo, or another GPU",
        source="trl 1.16, experimental/async_grpo/packing.py, `tree_attention` (kernels-community/flash-attn3); "
        "planner/gpus/cluster.py, `Gpu.runs_hub_flash_attention_3`",
    ),
    Stop(
        what="Packed trees of models with recurrent layers or attention sinks",
        when=lambda candidate, cluster: candidate.method_row.asynchronous and scans_or_sinks(candidate.model),
        cause="{candidate.method} stops at {candidate.model.id}: its packed rows are for plain attention layers",
        otherwise="grpo",
        source="trl 1.16, experimental/async_grpo/async_grpo_trainer.py, `AsyncGRPOTrainer.__init__` (`layer_types`, "
        "`sinks`)",
    ),
    # -- vLLM ----------------------------------------------------------------------------------------------------------
    IMAGES_EXPANDED_TWICE,
    CAPTURED_SEGMENTS,
    UNLOADED,
    OLD_TRANSFER,
    OTHER_TORCH,
    OWN_SERVER,
    Stop(
        what="vLLM beside an 8-bit base",
        when=lambda candidate, cluster: (
            candidate.vllm != "off"
            and not (candidate.engine_quantization and (candidate.sends_adapters or candidate.quantization_row.engine))
        ),
        cause='vLLM "does not support in-flight 8-bit quantization", which TRL says of an int8 base',
        remedies=(NF4, NO_ENGINE),
        source="trl 1.16, generation/vllm_generation.py, `VLLMGeneration._init_vllm`",
    ),
    Stop(
        what="GPTQ and AWQ checkpoints in a vLLM engine whose GPUs do not get whole groups of a projection's inputs",
        when=lambda candidate, cluster: parts_groups(candidate),
        cause="vLLM cannot divide {candidate.model.id} among {candidate.vllm_tensor_parallel_size} GPUs: the "
        "{parted.in_features} inputs of {parted.name} do not divide among them into whole groups of "
        "{candidate.model.quantization_group_size}",
        remedies=gpus_of_whole_groups,
        source="vllm 0.31, model_executor/kernels/linear/mixed_precision/marlin.py, "
        '`MarlinLinearKernel.can_implement` ("in_features per partition 448 is not divisible by group_size = 128": a '
        "start of Qwen2.5-0.5B-Instruct-GPTQ-Int4 beside a server of two GPUs, results/served_starts.md); "
        "model_executor/layers/quantization/auto_awq.py, `BaseAWQLinearMethod.create_weights` "
        '("The input size is not aligned"); Machete on Hopper (chosen on an emulated H100) and Exllama in float16 '
        "compare nothing, and get scales of other groups: auto_gptq.py, `AutoGPTQLinearMethod.create_weights`",
    ),
    Stop(
        what="FP8 checkpoints with scales of 128 x 128 weights in a vLLM engine whose GPUs do not get whole blocks",
        when=lambda candidate, cluster: parts_blocks(candidate),
        cause="vLLM cannot divide {candidate.model.id} among {candidate.vllm_tensor_parallel_size} GPUs: {features} "
        "features of a projection on each are not whole blocks of {candidate.model.quantization_group_size}, which "
        "have one scale",
        remedies=gpus_of_whole_groups,
        source="vllm 0.31, model_executor/layers/quantization/utils/fp8_utils.py, `validate_fp8_block_shape` "
        '("Weight input_size_per_partition = 320 is not divisible by weight quantization block_k = 128": a tiny Qwen3 '
        "on two emulated H100s); `validate_fp8_block_shape_moe` in releases before `refines_blocks`",
    ),
    UNMERGED,
    Stop(
        what="A vLLM server beside a 4-bit base",
        when=lambda candidate, cluster: (
            candidate.vllm == "server" and candidate.quantization_row.four_bit and not candidate.sends_adapters
        ),
        cause="A vLLM server has 16-bit weights, and TRL would send it packed 4-bit ones, at which it stops",
        remedies=(NO_ENGINE,),
        otherwise="a base that is not quantized",
        source="trl 1.16, generation/vllm_generation.py, `VLLMGeneration._iter_named_params` (yields `param.data`); on "
        "an emulated card a server of vllm 0.27 stopped in `load_qkv_weight`",
    ),
)

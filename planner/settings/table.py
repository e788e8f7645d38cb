"""The settings table: one row for each field of `Candidate`. Every other list of settings is derived from it.

The rows stand in the order in which a report shows them. `docs/settings.md` is generated from them.
"""

from collections.abc import Callable

from planner.methods import METHODS, Method, MethodName
from planner.quantizations import QUANTIZATIONS
from planner.schemes import SCHEMES
from planner.settings.setting import (
    BATCH,
    COUNT,
    FROM_ZERO,
    MAX_ELEMENTS,
    MAX_NUMBER,
    Bounds,
    File,
    Name,
    Role,
    Search,
    Setting,
    Shown,
)
from planner.settings.vllm_releases import MOST_PATCHES, VLLM_VERSIONS

STAGES = tuple(name for name, row in SCHEMES.items() if row.stage)  # DeepSpeed's values of `sharding`
STAGE_3 = tuple(name for name, row in SCHEMES.items() if row.traces_modules)
ENGINE = ("colocate", "server")  # values of `vllm`
FSDP_VERSION = "fsdp_version"  # of accelerate: 2 is a value of `sharding`, 1 is `flat_parameters`


def _groups(method: Method) -> bool:
    return method.grouped_completions


def _asynchronous(method: Method) -> bool:
    return method.asynchronous


def _has_vllm(method: Method) -> bool:
    return method.supports_vllm


def _evaluation_logits(method: Method) -> bool:
    return method.evaluation_logits


# Details of `eval_strategy`: name, sentence, role, search, file, bounds, methods, value that is not shown, when shown.
# Source: transformers 5.23, training_args.py, trainer.py; trl 1.16, trainer/grpo_config.py.
EVALUATION: tuple[
    tuple[str, str, Role, Search, File, Bounds | None, Callable[[Method], bool] | None, object, Shown], ...
] = (
    ("per_device_eval_batch_size", "Samples of an evaluation batch on one process.", "run", "derived", "trl", BATCH,
     None, ..., "always"),
    ("num_generations_eval", "Completions per prompt in an evaluation; 0: num_generations.", "run", "never", "trl",
     FROM_ZERO, _groups, 0, "if it differs"),
    ("compute_metrics", "The script gives the trainer a function of metrics, which gets the logits of all rows.", "run",
     "never", "code", None, _evaluation_logits, False, "if it differs"),
    ("prediction_loss_only", "An evaluation keeps no logits, although there is a function of metrics.", "run", "never",
     "trl", None, _evaluation_logits, False, "if it differs"),
    ("eval_accumulation_steps", "Evaluation batches whose logits stay on the GPU; 0: those of all rows.", "run",
     "never", "trl", FROM_ZERO, _evaluation_logits, 0, "if it differs"),
    ("eval_rows", "Rows of the evaluation dataset: a fact of the data, not a TRL setting.", "data", "never", "data",
     FROM_ZERO, _evaluation_logits, 0, "if it differs"),
)  # fmt: skip
AT_LOAD = tuple(name for name, row in QUANTIZATIONS.items() if row.bitsandbytes)

SETTINGS: tuple[Setting, ...] = (
    # -- the question --------------------------------------------------------------------------------------------------
    Setting(
        field="model",
        written="model_name_or_path",
        aliases=("model_name_or_path",),
        sentence="The policy: a name of the catalogue, a folder or a config.json.",
        role="question",
        shown="never",
    ),
    Setting(
        field="method",
        sentence="The trainer of TRL.",
        role="question",
        file="command",
        shown="never",
    ),
    Setting(
        field="trl_version",
        sentence="The TRL release whose defaults and code paths are counted.",
        role="question",
        file="command",
        shown="never",
    ),
    Setting(
        field="tool",
        sentence="The tool whose config is planned, and whose trainer computes the loss.",
        role="question",
        file="command",
        unset="trl",
    ),
    Setting(
        field="torch_version",
        # Source: planner/candidate.py, `TorchVersion`.
        value_aliases={str(minor): "2.13" for minor in ("2.6", "2.7", "2.8", "2.9", "2.10", "2.11", "2.12")},
        sentence="The release of torch that chooses the attention kernels; 2.13 stands for older ones, too.",
        role="run",
        file="requirements",
        unset="2.13",
    ),
    Setting(
        field="vllm_version",
        value_aliases={f"{minor}.{patch}": minor for minor in VLLM_VERSIONS for patch in range(MOST_PATCHES)},
        sentence="The release of vLLM; newest: of those that the TRL takes and that load the engine's weights.",
        role="run",
        file="requirements",
        owner="vllm",
        owner_values=ENGINE,
        unset="newest",
    ),
    # -- the batch -----------------------------------------------------------------------------------------------------
    Setting(
        field="per_device_train_batch_size",
        sentence="Samples per process and micro-step.",
        role="run",
        search="size",
        bounds=BATCH,
        line="batch",
        shown="always",
    ),
    Setting(
        field="gradient_accumulation_steps",
        sentence="Micro-steps per optimizer step.",
        role="run",
        search="size",
        bounds=BATCH,
        line="batch",
        shown="always",
    ),
    Setting(
        field="num_generations",
        sentence="Completions per prompt.",
        role="data",
        bounds=(2, MAX_NUMBER),  # trl 1.16, trainer/grpo_config.py, `__post_init__`
        methods=lambda method: method.grouped_completions or method.asynchronous,
        line="batch",
        shown="always",
    ),
    Setting(
        field="steps_per_generation",
        sentence="Micro-steps per generation.",
        role="run",
        search="derived",
        bounds=COUNT,
        methods=_groups,
        line="batch",
    ),
    Setting(
        field="num_iterations",
        sentence="Optimization passes over one generation.",
        role="learning",
        bounds=COUNT,
        methods=_groups,
        line="batch",
    ),
    Setting(
        field="token_budget",
        sentence="Tokens of a process's packed row, in which the completions of a prompt share its tokens.",
        role="run",
        search="derived",
        bounds=FROM_ZERO,
        methods=_asynchronous,
        line="batch",
        shown="always",
    ),
    Setting(
        field="max_staleness",
        sentence="Steps by which a completion may lag behind the policy.",
        role="learning",
        bounds=FROM_ZERO,
        methods=_asynchronous,
        line="batch",
    ),
    # -- rows ----------------------------------------------------------------------------------------------------------
    Setting(
        field="max_length",
        aliases=("max_seq_length",),  # trl before 0.20
        sentence="Tokens of a whole row.",
        role="data",
        search="length",
        bounds=COUNT,
        methods=lambda method: not method.generates or method.bounded_rows,
        line="lengths",
        shown="always",
    ),
    Setting(
        field="prompt_length",
        aliases=("max_prompt_length",),  # trl before 1.0
        sentence="Tokens of the longest prompt: a fact of the data, not a TRL setting.",
        role="data",
        search="length",
        file="data",
        bounds=COUNT,
        methods=lambda method: method.generates,
        line="lengths",
        shown="always",
    ),
    Setting(
        field="max_completion_length",
        aliases=("max_new_tokens", "response_length"),  # online DPO and GKD; PPO
        sentence="Tokens of the longest completion.",
        role="data",
        search="length",
        bounds=COUNT,
        methods=lambda method: method.generates,
        line="lengths",
        shown="always",
    ),
    Setting(
        field="images_per_row",
        sentence="Images in each row: a fact of the data, not a TRL setting.",
        role="data",
        file="data",
        bounds=FROM_ZERO,
        unset=0,
        line="lengths",
    ),
    Setting(
        field="image_size",
        sentence="WIDTHxHEIGHT of an image: a fact of the data, too.",
        role="data",
        file="data",
        unset="",
        line="lengths",
    ),
    Setting(
        field="packing",
        sentence="Rows are concatenated up to max_length; searched where the lengths of rows are given.",
        role="learning",
        search="choice",
        methods=lambda method: method.packs,
        line="lengths",
    ),
    Setting(
        field="packing_strategy",
        value_aliases={"bfd-requeue": "bfd_split", "ffd": "bfd"},  # trl before 2.0; trl 0.17 and 0.18, first-fit
        sentence="How rows are packed; wrapped ones are cut anywhere and stay rows of a batch.",
        role="learning",
        owner="packing",
        methods=lambda method: method.packs,
        needs="packing",
        unset="bfd",
        line="lengths",
    ),
    Setting(
        field="padding_free",
        sentence="The rows of a micro-batch are concatenated without padding.",
        role="learning",
        methods=lambda method: method.padding_free,
        line="lengths",
    ),
    Setting(
        field="train_sampling_strategy",
        sentence="The order of rows; group_by_length makes batches of rows of similar lengths.",
        role="learning",
        methods=lambda method: method.packs,  # rows of other trainers have no input_ids, whose length is taken
        unset="random",
        line="lengths",
    ),
    Setting(
        field="padded",
        sentence="Batches hold padding: all, none, or either kind occurs. A fact of the data, not a TRL setting.",
        role="data",
        file="data",
        line="lengths",
    ),
    Setting(
        field="lengths",
        sentence="Tokens of the dataset's rows: a file of counts, or quantiles such as p50=380,p95=1900,max=8192.",
        role="data",
        file="data",
        methods=lambda method: not method.generates,
        unset=None,
        line="lengths",
        shown="never",
    ),
    Setting(
        field="completion_lengths",
        sentence="Tokens of the completions that are sampled: a file of counts, or quantiles such as "
        "p50=1800,p95=9000,max=16384. The time of a step follows them, its memory max_completion_length.",
        role="data",
        file="data",
        methods=lambda method: method.generates,
        unset=None,
        line="lengths",
        shown="never",
    ),
    # -- evaluation ----------------------------------------------------------------------------------------------------
    Setting(
        field="eval_strategy",
        sentence="When the evaluation dataset is evaluated.",
        role="run",
        unset="no",
        line="evaluation",
    ),
    *(
        Setting(
            field=name,
            sentence=sentence,
            role=role,
            search=search,
            file=file,
            bounds=bounds,
            owner="eval_strategy",
            owner_values=("steps", "epoch"),
            methods=methods,
            unset=unset,
            line="evaluation",
            shown=shown,
        )
        for name, sentence, role, search, file, bounds, methods, unset, shown in EVALUATION
    ),
    # -- the model -----------------------------------------------------------------------------------------------------
    Setting(
        field="dtype",
        aliases=("torch_dtype",),  # transformers 4
        value_aliases={"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"},
        sentence="The dtype that weights are loaded in (TRL ModelConfig).",
        role="learning",
        search="choice",
        shown="always",
    ),
    Setting(
        field="gradient_checkpointing",
        aliases=("activation_checkpointing",),  # transformers 5.23, training_args.py
        sentence="Activations of layers are recomputed in the backward pass.",
        role="run",
        search="choice",
        shown="always",
    ),
    Setting(
        field="attn_implementation",
        value_aliases={  # FlashAttention kernels on the Hub: trl 1.16, docs/source/kernels_hub.md and others
            "kernels-community/flash-attn": "flash_attention_2",
            "kernels-community/flash-attn2": "flash_attention_2",
            "kernels-community/flash-attn3": "flash_attention_3",
            "kernels-community/vllm-flash-attn3": "flash_attention_3",
        },
        sentence="The attention kernel.",
        role="run",
        search="choice",
        shown="always",
    ),
    Setting(
        field="precision",
        aliases=("mixed_precision",),  # accelerate
        # Source: transformers 5.23, training_args.py. `bf16: false` alone trains without autocast.
        values={
            "bf16": {"bf16": True, "fp16": False},
            "no": {"bf16": False, "fp16": False},
            "fp16": {"bf16": False, "fp16": True},
        },
        sentence="Mixed precision: the dtype of autocast.",
        role="learning",
    ),
    Setting(
        field="tf32",
        # Source: transformers 5.23, training_args.py, `tf32`.
        sentence="Matrix products of float32 tensors run in TF32, with 10 bits of mantissa (Ampere and newer).",
        role="learning",
        unset=False,
    ),
    Setting(
        field="quantization",
        values={name: row.spelling for name, row in QUANTIZATIONS.items()},
        names={
            "quant_method": Name(
                file="checkpoint", sentence="Quantization of the published checkpoint (quantization_config)."
            ),
            "bits": Name(file="checkpoint", sentence="Bits of a weight of a GPTQ checkpoint that has not 4."),
        },
        sentence="Quantization of the base model's weights.",
        role="learning",
        search="choice",
    ),
    Setting(
        field="bnb_4bit_quant_storage",
        sentence="The dtype of the tensors that hold 4-bit weights; FSDP shards those of the compute dtype.",
        role="run",
        search="choice",
        owner="quantization",
        unset="uint8",
    ),
    Setting(
        field="prepare_model_for_kbit_training",
        # Source: peft 0.21, utils/other.py. CPO and ORPO call it themselves; other trainers of TRL 1.x do not.
        sentence="The script calls PEFT's function of this name: what is not quantized is cast to float32.",
        role="learning",
        file="code",
        owner="quantization",
        owner_values=AT_LOAD,
        methods=lambda method: method.kbit_preparation == "none",
        unset=False,
    ),
    Setting(
        field="float32_adapters",
        sentence="The script casts adapters on a bitsandbytes base back to float32 (TRL makes them bfloat16).",
        role="learning",
        file="code",
        owner="quantization",
        owner_values=AT_LOAD,
        methods=lambda method: method.bfloat16_adapters != "never",
        unset=False,
        line="adapters",
    ),
    Setting(
        field="beta",
        aliases=("kl_coef",),  # PPO
        sentence="Weight of the reference model; GRPO and RLOO with 0 have no reference model.",
        role="learning",
        bounds=FROM_ZERO,
        methods=lambda method: method.has_beta,
    ),
    Setting(
        field="lmbda",
        sentence="Share of the micro-batches that the policy generates; 0: all rows are the dataset's.",
        role="learning",
        bounds=(0.0, 1.0),
        methods=lambda method: method.mixes_rows,
    ),
    Setting(
        field="precompute_ref_log_probs",
        sentence="The reference's log-probabilities are computed before the training.",
        role="run",
        search="derived",
        methods=lambda method: method.precomputes_reference,
    ),
    Setting(
        field="checkpoint_every_n_layers",
        written="every_n_layers",
        aliases=("every_n_layers",),
        sentence="Only every n-th layer is recomputed.",
        role="run",
        search="choice",
        file="checkpointing",
        bounds=COUNT,
        owner="gradient_checkpointing",
        owner_values=(True,),
        methods=lambda method: method.keeps_checkpointing_details,
    ),
    Setting(
        field="checkpoint_offload",
        aliases=("offload",),
        sentence="Inputs of layers wait in pinned host memory.",
        role="run",
        search="choice",
        file="checkpointing",
        owner="gradient_checkpointing",
        owner_values=(True,),
        methods=lambda method: method.keeps_checkpointing_details,
    ),
    Setting(
        field="activation_offloading",
        sentence="Saved activations wait in pinned host memory.",
        role="run",
        search="choice",
        owner="gradient_checkpointing",
        methods=lambda method: method.offloads_activations,
    ),
    Setting(
        field="use_liger_kernel",
        sentence="Liger's fused kernels replace those of the layers, and before TRL 1.15 the loss.",
        role="run",
        search="derived",
    ),
    Setting(
        field="use_kernels",
        sentence="Kernels of the Hub replace the layers' RMSNorms (model_init_kwargs).",
        role="run",
        file="loading",
        unset=False,
    ),
    Setting(
        field="cut_cross_entropy",
        sentence="Axolotl's plugin computes the loss without logits in memory.",
        role="run",
        file="code",
        unset=False,
    ),
    Setting(
        field="optim",
        sentence="The optimizer, by its name in Transformers.",
        role="learning",
    ),
    Setting(
        field="reward_model",
        written="reward_model_name_or_path",
        aliases=("reward_model_name_or_path", "reward_model_path"),  # trl 1.16, scripts/grpo.py; PPO
        sentence="A model that rewards completions.",
        role="learning",
        methods=lambda method: method.reward_model != "none",
        unset=None,
    ),
    Setting(
        field="teacher_model",
        written="teacher_model_name_or_path",
        aliases=("teacher_model_name_or_path",),  # trl 1.16, trainer/distillation_config.py
        sentence="The model that is distilled.",
        role="learning",
        methods=lambda method: method.teacher,
        unset=None,
    ),
    Setting(
        field="teacher_dtype",
        sentence="The dtype that the teacher is loaded in (teacher_model_init_kwargs).",
        role="learning",
        file="code",
        methods=lambda method: method.teacher,
        unset="student",
    ),
    # -- adapters ------------------------------------------------------------------------------------------------------
    Setting(
        field="tuning",
        # Source: trl 1.16, trainer/model_config.py.
        values={"full": {"use_peft": False}, "lora": {"use_peft": True}},
        sentence="LoRA adapters are trained, not the model.",
        role="learning",
        search="choice",
        line="adapters",
    ),
    Setting(
        field="lora_r",
        sentence="The rank of the adapters.",
        role="learning",
        bounds=COUNT,
        owner="tuning",
        owner_values=("lora",),
        line="adapters",
        shown="always",
    ),
    Setting(
        field="lora_target_modules",
        sentence="Modules with adapters: PEFT's shorthand, or names; null: PEFT's own choice.",
        role="learning",
        owner="tuning",
        owner_values=("lora",),
        line="adapters",
        shown="always",
    ),
    Setting(
        field="lora_target_parameters",
        sentence="Fused experts with adapters, by names of parameters such as mlp.experts.gate_up_proj.",
        role="learning",
        owner="tuning",
        owner_values=("lora",),
        unset=(),
        line="adapters",
    ),
    Setting(
        field="lora_dropout",
        sentence="Dropout of the adapters' inputs.",
        role="learning",
        bounds=(0.0, 1.0),
        owner="tuning",
        owner_values=("lora",),
        line="adapters",
        shown="always",
    ),
    Setting(
        field="lora_modules_to_save",
        sentence="Modules that PEFT copies whole and trains beside the adapters: the head, the embedding.",
        role="learning",
        owner="tuning",
        owner_values=("lora",),
        unset=(),
        line="adapters",
    ),
    Setting(
        field="lora_kernels",
        sentence="Axolotl's fused kernels compute layers with adapters: mlp, qkv, o.",
        role="run",
        file="code",
        owner="tuning",
        owner_values=("lora",),
        unset=(),
        line="adapters",
    ),
    Setting(
        field="use_dora",
        sentence="DoRA: adapters with a trained magnitude for each output.",
        role="learning",
        owner="tuning",
        owner_values=("lora",),
        unset=False,
        line="adapters",
    ),
    Setting(
        field="autocast_adapter_dtype",
        sentence="PEFT keeps adapters in float32 on a 16-bit base (get_peft_model).",
        role="learning",
        file="code",
        owner="tuning",
        owner_values=("lora",),
        line="adapters",
    ),
    Setting(
        field="resume_from_checkpoint",
        file="command",  # train.yaml does not have it: the first start would find no checkpoint
        value_aliases={"false": ""},
        sentence="The checkpoint from which training goes on, or true: adapters are loaded in float32.",
        role="question",
        unset="",
        line="adapters",
    ),
    # -- many GPUs -----------------------------------------------------------------------------------------------------
    Setting(
        field="num_processes",
        sentence="Training processes on all machines, one for each GPU.",
        role="run",
        search="choice",
        file="accelerate",
        bounds=COUNT,
        line="GPUs",
        shown="always",
    ),
    Setting(
        field="num_nodes",
        written="num_machines",
        aliases=("num_machines",),
        sentence="Machines that train.",
        role="run",
        file="accelerate",
        bounds=COUNT,
        line="GPUs",
    ),
    Setting(
        field="dp_replicate_size",
        aliases=("parallelism_config_dp_replicate_size",),  # accelerate, commands/launch.py
        sentence="Copies of the sharded model under FSDP2 (hybrid sharding).",
        role="run",
        search="choice",
        file="accelerate",
        bounds=COUNT,
        owner="sharding",
        unset=1,
        line="GPUs",
    ),
    Setting(
        field="cp_size",
        aliases=("parallelism_config_cp_size",),
        sentence="GPUs that share each row by context parallelism, under FSDP2.",
        role="run",
        file="accelerate",
        bounds=COUNT,
        owner="sharding",
        unset=1,
        line="GPUs",
    ),
    Setting(
        field="sp_size",
        aliases=("parallelism_config_sp_size",),
        sentence="GPUs that share each row by Ulysses sequence parallelism, under DeepSpeed.",
        role="run",
        file="accelerate",
        bounds=COUNT,
        owner="sharding",
        unset=1,
        line="GPUs",
    ),
    Setting(
        field="ep_size",
        sentence="GPUs that divide the experts of a layer among them (distributed_config of Transformers).",
        role="run",
        search="choice",
        file="loading",
        bounds=COUNT,
        owner="sharding",
        owner_values=tuple(name for name, row in SCHEMES.items() if row.divides_experts),
        unset=1,
        line="GPUs",
    ),
    Setting(
        field="tp_size",
        sentence="GPUs that share each layer (tensor parallelism) beside FSDP2 (distributed_config of Transformers).",
        role="run",
        file="loading",
        bounds=COUNT,
        owner="sharding",
        owner_values=tuple(name for name, row in SCHEMES.items() if row.divides_experts),
        unset=1,
        line="GPUs",
    ),
    Setting(
        field="sync_each_batch",
        sentence="Reduce gradients in every micro-step (accelerator_config's gradient_accumulation_kwargs).",
        role="run",
        search="derived",
        file="accelerate",
        owner="sharding",
        owner_values=tuple(name for name, row in SCHEMES.items() if row.defers_reduction),
        needs="accumulates",
        line="GPUs",
    ),
    Setting(
        field="flat_parameters",
        values={False: {FSDP_VERSION: 2}, True: {FSDP_VERSION: 1}},
        sentence="FSDP 1 (fsdp_version: 1 in accelerate's file), which is counted as FSDP 2.",
        role="run",
        file="accelerate",
        owner="sharding",
        owner_values=("fsdp2",),
        unset=False,
        line="GPUs",
    ),
    Setting(
        field="sharding",
        values={name: row.spelling for name, row in SCHEMES.items()},
        sentence="How the processes divide the model's states.",
        role="run",
        search="choice",
        file="accelerate",
        line="GPUs",
        hidden=("distributed_type",),
    ),
    Setting(
        field="ds3_gather_for_generation",
        sentence="ZeRO-3 gathers the whole model on each GPU to generate.",
        role="run",
        search="choice",
        owner="sharding",
        owner_values=STAGE_3,
        methods=lambda method: method.generates and not method.always_gathers,
        line="GPUs",
    ),
    Setting(
        field="offload_optimizer",
        values={False: {"offload_optimizer_device": "none"}, True: {"offload_optimizer_device": "cpu"}},
        sentence="Where the optimizer's states are and its step runs.",
        role="run",
        search="choice",
        file="deepspeed",
        owner="sharding",
        owner_values=STAGES,
        line="GPUs",
    ),
    Setting(
        field="offload_param",
        aliases=("fsdp_offload_params", "offload_params"),  # of accelerate's file; the same in an fsdp_config
        values={False: {"offload_param_device": "none"}, True: {"offload_param_device": "cpu"}},
        names={
            "fsdp_offload_params": Name(
                file="accelerate", sentence="Parameters, gradients and optimizer states are on the host (accelerate)."
            )
        },
        sentence="Where the parameters are between their uses.",
        role="run",
        search="choice",
        file="deepspeed",
        owner="sharding",
        owner_values=STAGE_3,
        line="GPUs",
    ),
    *(
        Setting(
            field=name,
            sentence=sentence,
            role="run",
            search="derived" if name == "stage3_prefetch_bucket_size" else "never",
            file="deepspeed",
            bounds=(least, MAX_ELEMENTS),
            owner="sharding",
            owner_values=readers,
            line="GPUs",
        )
        for name, sentence, least, readers in (
            ("reduce_bucket_size", "Gradients that are reduced together.", 1, STAGES),
            ("stage3_prefetch_bucket_size", "Parameters that are gathered ahead.", 0, STAGE_3),
            ("stage3_param_persistence_threshold", "Smaller parameters are not sharded.", 0, STAGE_3),
            ("stage3_max_live_parameters", "Gathered parameters at a time.", 0, STAGE_3),
            ("stage3_max_reuse_distance", "Parameters that are used again so soon stay gathered.", 0, STAGE_3),
            ("sub_group_size", "Parameters that the optimizer steps at a time.", 1, STAGE_3),
        )
    ),
    # -- vLLM ----------------------------------------------------------------------------------------------------------
    Setting(
        field="vllm",
        # Source: trl 1.16, trainer/grpo_config.py, `use_vllm` and `vllm_mode`.
        values={
            "off": {"use_vllm": False},
            "colocate": {"use_vllm": True, "vllm_mode": "colocate"},
            "server": {"use_vllm": True, "vllm_mode": "server"},
        },
        sentence="A vLLM engine generates: in the training processes, or as a server on GPUs of its own.",
        role="run",
        search="choice",
        needs="method_row.supports_vllm",
        line="vLLM",
        shown="always",
        hidden=("use_vllm",),
    ),
    Setting(
        field="vllm_gpu_memory_utilization",
        sentence="Share of a GPU that the engine takes.",
        role="run",
        search="size",
        bounds=(0.01, 1.0),
        owner="vllm",
        owner_values=ENGINE,
        methods=_has_vllm,
        line="vLLM",
        shown="always",
    ),
    Setting(
        field="vllm_tensor_parallel_size",
        sentence="GPUs of one engine.",
        role="run",
        search="choice",
        bounds=COUNT,
        owner="vllm",
        owner_values=ENGINE,
        methods=_has_vllm,
        line="vLLM",
    ),
    Setting(
        field="vllm_data_parallel_size",
        sentence="Engines of the server.",
        role="run",
        search="choice",
        file="server",
        bounds=COUNT,
        owner="vllm",
        owner_values=("server",),
        methods=_has_vllm,
        line="vLLM",
    ),
    Setting(
        field="vllm_max_model_length",
        sentence="Tokens of the engine's longest sequence; null: the model's whole context.",
        role="run",
        search="derived",
        bounds=FROM_ZERO,
        owner="vllm",
        owner_values=ENGINE,
        methods=_has_vllm,
        needs="sets_engine_length",
        line="vLLM",
    ),
    Setting(
        field="vllm_enable_sleep_mode",
        sentence="The engine frees its memory while the trainer trains.",
        role="run",
        search="choice",
        owner="vllm",
        owner_values=("colocate",),
        methods=_has_vllm,
        line="vLLM",
    ),
    # -- the allocator -------------------------------------------------------------------------------------------------
    Setting(
        field="expandable_segments",
        # Source: torch 2.13, torch/cuda/memory.py; read from the environment before the first allocation.
        values={
            False: {"PYTORCH_CUDA_ALLOC_CONF": ""},
            True: {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        },
        sentence="PyTorch's allocator maps pages into segments that grow.",
        role="run",
        search="choice",
        file="environment",
        shown="never",
    ),
)
SETTING_OF = {row.field: row for row in SETTINGS}  # row by Candidate field
SPELLINGS = {row.field: row.values for row in SETTINGS if row.values}
# DeepSpeed's sizes, and those of them that only stage 3 reads.
ZERO_SIZES = tuple(row.field for row in SETTINGS if row.file == "deepspeed" and row.bounds is not None)
STAGE_3_SIZES = tuple(name for name in ZERO_SIZES if SETTING_OF[name].owner_values == STAGE_3)
# A setting of a library that spells a field together with others -> that field.
FIELD_OF_SETTING = {name: row.field for row in SETTINGS if row.values for name in row.library_names}
# Other names of a field, accepted wherever settings are read.
ALIASES = {alias: row.field for row in SETTINGS for alias in row.aliases}
ROW_LENGTHS = ("lengths", "completion_lengths")  # fields whose value is `RowLengths`
LENGTH_SETTINGS = tuple(row.field for row in SETTINGS if row.search == "length")  # a method without one ignores it
# Options of a job that stand for one setting: field of `JobOptions` -> setting.
SHORTHANDS = {
    "vllm_version": "vllm_version",
    "max_length": "max_length",
    "prompt_length": "prompt_length",
    "max_completion_length": "max_completion_length",
    "batch_size": "per_device_train_batch_size",
    "lengths": "lengths",
    "completion_lengths": "completion_lengths",
    "padded": "padded",
    "images_per_row": "images_per_row",
    "image_size": "image_size",
}
FSDP_OFFLOAD = "fsdp_offload_params"  # of accelerate; FSDP offloads parameters, gradients and optimizer together


def with_role(*roles: Role) -> frozenset[str]:
    """Return the fields of these roles."""
    return frozenset(row.field for row in SETTINGS if row.role in roles)


def searched_as(*ways: Search) -> frozenset[str]:
    """Return the fields that a search decides in these ways."""
    return frozenset(row.field for row in SETTINGS if row.search in ways)


def details_of(field: str, *roles: Role) -> tuple[str, ...]:
    """Return the fields that are details of another one, of these roles or of all."""
    return tuple(row.field for row in SETTINGS if row.owner == field and (not roles or row.role in roles))


def has_setting(method: MethodName, field: str) -> bool:
    """Return whether a method has a setting."""
    has: Callable[[Method], bool] | None = SETTING_OF[field].methods
    return has is None or has(METHODS[method])

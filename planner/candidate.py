"""A candidate: one complete configuration of a job, in the names of TRL, Transformers, accelerate and vLLM."""

from bisect import bisect_right
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from planner.errors import InputError
from planner.methods import METHODS, NEWEST_TRL, Loss, Method, MethodName, Release, release, row_of
from planner.models.lora_targets import AdapterKernel, adapts_tower
from planner.models.shape import ModelShape
from planner.optimizers import OPTIMIZERS, Optimizer, OptimizerRow
from planner.quantizations import (
    ENGINE_QUANTIZATIONS,
    QUANTIZATIONS,
    EngineQuantization,
    EngineRow,
    Quantization,
    QuantizationRow,
)
from planner.rows.batches import Layout, Order, longest_of_equal, trained_rows
from planner.rows.lengths import RowLengths
from planner.rows.packing import tree_paths, tree_samples, tree_tokens
from planner.schemes import SCHEMES, Casts, SchemeRow, Sharding, batches_of, layer_gpus_of
from planner.settings.table import SETTINGS
from planner.settings.tools import TOOLS, Tool, ToolRow
from planner.settings.vllm_releases import (
    TORCH_OF_VLLM,
    RunnerName,
    VllmChoice,
    VllmVersion,
    is_since,
    last_before,
    required,
    runner_of,
    taken_by_trl,
    vllm_has,
)

Dtype = Literal["float32", "bfloat16", "float16"]
Precision = Literal["bf16", "fp16", "no"]
QuantStorage = Literal["uint8", "bfloat16", "float16", "float32"]  # dtype of the tensors that hold 4-bit weights
TeacherDtype = Literal["student", "auto", "float32", "bfloat16", "float16"]  # auto: that of the published weights
# Releases of torch between which facts changed: the first one with a fact (see `SINCE_TORCH`).
TorchVersion = Literal["2.13", "2.14"]
PackingStrategy = Literal["bfd", "bfd_split", "wrapped"]
AttentionImplementation = Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3"]
FLASH: tuple[AttentionImplementation, ...] = ("flash_attention_2", "flash_attention_3")
Vllm = Literal["off", "colocate", "server"]
RepeatedCalls = Literal["step", "forward", "nothing"]
EvalStrategy = Literal["no", "steps", "epoch"]
# Do batches hold padding? "either": some do and others do not, and the heavier kind decides (`Candidate.full_batch`).
Padding = bool | Literal["either"]
Elements = int | Literal["auto"]  # of a DeepSpeed size; auto: what Transformers derives from hidden_size

DEFAULT_PROMPT_LENGTH = 512  # of prompts without a given length
# Fields of Candidate that are a ModelShape, the policy's first.
MODEL_FIELDS = ("model", "reward_model", "teacher_model", "teacher_server_model")
PREPARATIONS = ("prepare_model_for_kbit_training", "float32_adapters")  # of a bitsandbytes base, by the script
# The release of torch since which a fact holds.
# Memory-efficient attention with fewer heads of keys than of queries: aten/src/ATen/native/transformers/cuda/
# sdp_utils.cpp, `can_use_mem_efficient_attention` (`supports_gqa`); results/torch_releases.md.
SINCE_TORCH: dict[Literal["efficient_grouped"], TorchVersion] = {"efficient_grouped": "2.14"}
TORCH_VERSIONS: tuple[TorchVersion, ...] = ("2.13", "2.14")  # oldest first
# Ranks that a vLLM server has room for. Source: trl 1.16, experimental/async_grpo/async_grpo_trainer.py,
# `VLLM_LORA_RANKS`.
SERVED_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
SPARES_MAGNITUDES: Release = (1, 15)  # the first TRL whose casts leave out DoRA's magnitudes


def in_float16(precision: Precision, dtype: str) -> bool:
    """True if autocast or DeepSpeed computes in float16, or without either the weights are loaded in it."""
    return precision == "fp16" or (precision == "no" and dtype == "float16")


class EvaluationBatch(NamedTuple):
    """Sizes of another batch on one GPU, under the names of the same sizes of a training batch."""

    rows: int
    tokens: int
    scores: int
    labelled_tokens: int
    generation_rows: int
    pads: bool
    prompts_differ: bool
    samples_within_step: bool


class TableRows:
    """The rows of the tables that a candidate or a key of a cache names."""

    __slots__ = ()
    method: MethodName
    optim: Optimizer
    precision: Precision
    quantization: Quantization
    sharding: Sharding
    tool: Tool
    trl_version: str
    tuning: Literal["full", "lora"]
    num_generations: int
    use_liger_kernel: bool
    cut_cross_entropy: bool
    use_uld_loss: bool

    @property
    def method_row(self) -> Method:
        """The row of the method in `METHODS`, as the release of TRL has it."""
        return METHODS[self.method] if self.trl_version == NEWEST_TRL else row_of(self.method, self.trl_version)

    @property
    def packed_group(self) -> int:
        """Completions that share a prompt's tokens in a packed row."""
        return self.num_generations if self.method_row.packs_trees else 1

    @property
    def optimizer_row(self) -> OptimizerRow:
        """The row of the optimizer in `OPTIMIZERS`."""
        return OPTIMIZERS[self.optim]

    @property
    def quantization_row(self) -> QuantizationRow:
        """The row of the quantization of the policy's weights in `QUANTIZATIONS`."""
        return QUANTIZATIONS[self.quantization]

    @property
    def scheme_row(self) -> SchemeRow:
        """The row of the sharding in `SCHEMES`."""
        return SCHEMES[self.sharding]

    @property
    def casts(self) -> Casts:
        """What runs in 16 bits under mixed precision, as `SchemeRow.casts`; "nothing" without mixed precision."""
        return "nothing" if self.precision == "no" else self.scheme_row.casts

    @property
    def autocasts(self) -> bool:
        """True if the forward pass runs under autocast, as `SchemeRow.autocasts`."""
        return self.precision != "no" and self.scheme_row.autocasts

    @property
    def casts_weights(self) -> bool:
        """True if the scheme casts weights, once (DeepSpeed) or where they are gathered (FSDP2), to 16 bits."""
        return self.casts in ("module", "gathered")

    @property
    def narrow_shards(self) -> bool:
        """True if what FSDP2 trains stays in the dtype of the load: the tool does not cast it to float32."""
        return self.casts == "gathered" and self.tool_row.own_fsdp2

    @property
    def tool_row(self) -> ToolRow:
        """The row of the tool in `TOOLS`."""
        return TOOLS[self.tool]

    @property
    def reentrant(self) -> bool:
        """True if checkpoints are reentrant: in TRL for adapters under ZeRO-3, but where a trainer enables them itself.

        Source: trl 1.16, trainer/sft_trainer.py, `SFTTrainer.__init__`; experimental/online_dpo/online_dpo_trainer.py,
        `_enable_gradient_checkpointing`; tests/test_zero3_coordinator.py runs both.
        """
        if self.method in self.tool_row.losses:
            return self.tool_row.reentrant(self.scheme_row)
        adapters = self.tuning == "lora" and self.scheme_row.reentrant_with_adapters
        return adapters and not self.method_row.experimental_reference

    @property
    def smallest_batch(self) -> int:
        """Samples a process at least: TRL's trainers check it, those of other tools do not."""
        return 1 if self.method in self.tool_row.losses else self.method_row.smallest_batch

    @property
    def spares_magnitudes(self) -> bool:
        """True if a stable trainer leaves DoRA's magnitudes in float32 where it casts adapters to bfloat16.

        Source: trl 1.15, trainer/sft_trainer.py, `SFTTrainer.__init__` (the cast leaves out `lora_magnitude_vector`, as
        in every stable trainer since then).
        """
        stable = self.method_row.bfloat16_adapters == "4bit_and_8bit"
        return self.quantization_row.bitsandbytes and stable and release(self.trl_version) >= SPARES_MAGNITUDES

    @property
    def loss(self) -> Loss:
        """The loss of the tool's own trainer, or of the method in the release of TRL.

        Liger replaces the forward pass of a model that computes its own loss (transformers 5.23, integrations/liger.py;
        liger-kernel 0.8.4, transformers/monkey_patch.py, `fused_linear_cross_entropy`).
        """
        if self.method in self.tool_row.losses:
            own = self.tool_row.losses[self.method]
            if self.cut_cross_entropy and self.tool_row.cuts_cross_entropy and own == "causal_lm":
                return "cut"
            return "liger" if self.use_liger_kernel and own == "causal_lm" else own
        if self.use_uld_loss:
            return "universal"
        return self.method_row.loss_with(self.trl_version, self.use_liger_kernel)


class Candidate(TableRows, msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """All settings that memory or speed depends on. Lengths are in tokens, batch sizes in samples per process.

    Defaults are those of TRL 1.16 (`trl/trainer/base_config.py`, `*_config.py`, `model_config.py`). Defaults of single
    methods are in `METHODS` (planner/methods.py); planner/jobs/base_candidate.py applies them.

    Raises:
        InputError: a count is below 1.
    """

    model: ModelShape
    method: MethodName
    trl_version: str = NEWEST_TRL
    tool: Tool = "trl"  # whose config and trainer it is
    torch_version: TorchVersion = "2.13"  # the release that our requirements.txt names
    vllm_version: VllmChoice = "newest"  # see `vllm_release`

    # what is trained
    tuning: Literal["full", "lora"] = "full"
    lora_r: int = 16
    lora_target_modules: tuple[str, ...] = ("all-linear",)
    lora_target_parameters: tuple[str, ...] = ()  # fused experts with adapters, by the names of their parameters
    lora_dropout: float = 0.0
    lora_modules_to_save: tuple[str, ...] = ()  # modules that PEFT copies whole and trains beside the adapters
    lora_kernels: tuple[AdapterKernel, ...] = ()  # fused ones, of Axolotl
    use_dora: bool = False  # adapters with a trained magnitude for each output (peft, tuners/lora/dora.py)
    autocast_adapter_dtype: bool = True  # PEFT keeps adapters in float32 on a 16-bit base
    resume_from_checkpoint: str = ""  # "true": the newest; else a folder

    # precision
    dtype: Dtype = "float32"
    precision: Precision = "bf16"
    tf32: bool = False  # float32 matrix products in TF32
    quantization: Quantization = "none"
    bnb_4bit_quant_storage: QuantStorage = "uint8"
    prepare_model_for_kbit_training: bool = False  # the script calls PEFT's function before the trainer gets the model
    float32_adapters: bool = False  # the script casts adapters on a bitsandbytes base after the trainer is built

    # the batch
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    max_length: int = 1024  # tokens of a whole row: prompt and completion
    prompt_length: int = DEFAULT_PROMPT_LENGTH  # tokens of the longest prompt, for methods that generate
    max_completion_length: int = 512
    num_generations: int = 8
    num_value_samples: int = 8
    steps_per_generation: int = 1
    num_iterations: int = 1
    token_budget: int = 0  # tokens of a process's packed row; 0: those of per_device_train_batch_size completions
    max_staleness: int = 4  # steps by which a sampled completion may lag behind the policy
    padded: Padding = "either"  # see `pads` and `full_batch`
    lengths: RowLengths | None = None  # None: every row is assumed to be full
    completion_lengths: RowLengths | None = None  # None: every completion is assumed to be full
    images_per_row: int = 0  # images in each row, for vision-language models
    image_size: str = ""  # WIDTHxHEIGHT in pixels, for models whose tokens of an image depend on it
    packing: bool = False
    packing_strategy: PackingStrategy = "bfd"
    padding_free: bool = False
    train_sampling_strategy: Order = "random"
    beta: float = 0.0
    lmbda: float = 0.5  # share of GKD's micro-batches that the policy generates
    use_uld_loss: bool = False
    precompute_ref_log_probs: bool = False

    # evaluation
    eval_strategy: EvalStrategy = "no"
    per_device_eval_batch_size: int = 8
    num_generations_eval: int = 0  # 0: as many as num_generations, TRL's None
    compute_metrics: bool = False  # the script gives the trainer a function of metrics, which gets all logits
    prediction_loss_only: bool = False  # that function gets none
    eval_accumulation_steps: int = 0  # evaluation batches whose logits stay on the GPU; 0: all, Transformers' None
    eval_rows: int = 0  # rows of the evaluation dataset; 0: unknown

    # activations
    gradient_checkpointing: bool = True
    checkpoint_every_n_layers: int = 1
    checkpoint_offload: bool = False
    activation_offloading: bool = False
    attn_implementation: AttentionImplementation = "sdpa"
    use_liger_kernel: bool = False
    use_kernels: bool = False
    cut_cross_entropy: bool = False  # of Axolotl's own trainer

    # optimizer
    optim: Optimizer = "adamw_torch_fused"

    # many GPUs
    sharding: Sharding = "none"
    num_processes: int = 1
    num_nodes: int = 1
    dp_replicate_size: int = 1  # copies of the sharded model under FSDP2 (hybrid sharding, HSDP)
    cp_size: int = 1  # GPUs that share a row: torch's context parallel, under FSDP2
    sp_size: int = 1  # GPUs that share a row: Ulysses sequence parallel, under DeepSpeed
    ep_size: int = 1  # GPUs that divide the experts of a layer, under Transformers' own FSDP2
    tp_size: int = 1  # GPUs that share each layer, beside Transformers' own FSDP2
    sync_each_batch: bool = False  # reduce gradients in every micro-step (accelerate's GradientAccumulationPlugin)
    offload_optimizer: bool = False
    offload_param: bool = False
    ds3_gather_for_generation: bool = True

    # DeepSpeed's sizes, in elements: the values that our launch files set
    reduce_bucket_size: Elements = "auto"
    stage3_prefetch_bucket_size: Elements = "auto"
    stage3_param_persistence_threshold: Elements = "auto"
    stage3_max_live_parameters: int = 10**9
    stage3_max_reuse_distance: int = 10**9
    sub_group_size: int = 10**9

    # generation
    vllm: Vllm = "off"
    vllm_gpu_memory_utilization: float = 0.3
    vllm_tensor_parallel_size: int = 1
    vllm_data_parallel_size: int = 1  # server mode
    vllm_max_model_length: int = 0  # 0: the model's whole context, as TRL's None
    vllm_enable_sleep_mode: bool = False

    # other models; without another name they have the policy's shape
    reward_model: ModelShape | None = None  # None: rewards come from a function
    teacher_model: ModelShape | None = None  # None: the method has no teacher
    teacher_server_model: ModelShape | None = None  # None: the method has no teacher on a vLLM server
    teacher_server_gpus: int = 0  # of that server, tensor parallel; 0: it is elsewhere
    teacher_server_gpu_memory_utilization: float = 0.9
    teacher_dtype: TeacherDtype = "student"  # the dtype that its weights are loaded in

    # the allocator
    expandable_segments: bool = False

    def __post_init__(self) -> None:
        if min(_counts(self)) < 1:
            name = next(name for name in COUNTS if getattr(self, name) < 1)
            raise InputError(f"{name} must be at least 1, not {getattr(self, name)}.")

    @property
    def offloads_checkpoints(self) -> bool:
        """True if the host keeps the inputs of checkpointed layers."""
        return self.checkpoint_offload or self.activation_offloading

    @property
    def rows_differ(self) -> bool:
        """True if the lengths of rows or of completions are known, so that a micro-batch is not taken as full."""
        return self.lengths is not None or self.completion_lengths is not None

    @property
    def row_tokens(self) -> int:
        """Tokens of one padded row in the training pass: with lengths, of the longest row of the dataset.

        Padding-free batches without packing keep rows whole (trl 1.16, trainer/sft_trainer.py, `SFTTrainer.__init__`:
        "`max_length` is not enforced").
        """
        if not self.method_row.generates:
            if self.lengths is None or self.packing:
                return self.max_length
            return self.lengths.longest if self.padding_free else min(self.max_length, self.lengths.longest)
        whole = self.prompt_length + self.max_completion_length
        return min(self.max_length, whole) if self.method_row.bounded_rows else whole

    @property
    def frozen_row_tokens(self) -> int:
        """Tokens of one row that a frozen model reads beside the policy: see `Method.longest_reprompt`.

        Leaves out the words of SDPO's templates, about 20 tokens.
        """
        longest = self.method_row.longest_reprompt
        if not longest:
            return self.row_tokens
        return min(longest, self.prompt_length + self.max_completion_length) + self.max_completion_length

    @property
    def teacher_row_tokens(self) -> int:
        """Tokens of the longest sequence of a teacher's server: a row, and one token that it samples.

        Source: trl 1.16, experimental/async_distillation/async_rollout_worker.py, `_score_with_teacher` (`max_tokens`).
        """
        return self.row_tokens + 1

    @property
    def averages_adapters(self) -> bool:
        """True if the reference is an average of the policy's adapters (`Method.averaged_reference`)."""
        return self.method_row.averaged_reference and self.tuning == "lora"

    @property
    def rows(self) -> int:
        """Rows of the policy's training forward on one GPU: completions of a packed row that shares their prompts."""
        if self.token_budget and self.method_row.asynchronous:
            sizes = (self.packed_group, self.prompt_length, self.max_completion_length)
            return tree_samples(self.token_budget, *sizes)
        return self.per_device_train_batch_size * self.method_row.rows_per_sample

    @property
    def shard_gpus(self) -> int:
        """GPUs among which ZeRO-3 and FSDP2 divide one copy of the model; fewer than all with `dp_replicate_size`."""
        return self.num_processes // (self.dp_replicate_size * self.layer_gpus)

    @property
    def row_gpus(self) -> int:
        """GPUs that share each row (context or sequence parallel).

        Source: accelerate 1.15, parallelism_config.py, `non_data_parallel_size`.
        """
        return self.cp_size * self.sp_size

    @property
    def layer_gpus(self) -> int:
        """GPUs that share each layer (tensor parallelism)."""
        return layer_gpus_of(self.sharding, self.num_processes, self.tp_size)

    @property
    def batches(self) -> int:
        """Data-parallel ranks: the batches of one micro-step."""
        return batches_of(self.sharding, self.num_processes, self.row_gpus, self.tp_size)

    @property
    def tokens(self) -> int:
        """Tokens of the policy's training forward on one GPU: its piece of each row, or the packed one."""
        if self.method_row.asynchronous:
            sizes = (self.packed_group, self.prompt_length, self.max_completion_length)
            return self.token_budget or tree_tokens(self.rows, *sizes)
        return self.rows * -(-self.row_tokens // self.row_gpus)

    @property
    def path_tokens(self) -> int:
        """Tokens of the keys that attention gathers for a packed row: those before each completion, and its own.

        0: attention reads the keys of a row where they are.
        Source: trl 1.16, experimental/async_grpo/packing.py, `tree_attention` (`index_select`).
        """
        if not self.method_row.packs_trees:
            return 0
        return tree_paths(self.rows, self.num_generations, self.prompt_length, self.max_completion_length)

    @property
    def flattened(self) -> bool:
        """True if all rows of a batch are concatenated to one row: with packing or padding-free training.

        Strategy "wrapped" cuts the documents into rows of `max_length`, which stay rows of a batch.
        Source: trl 1.16, sft_trainer.py, `SFTTrainer.__init__` (`self.padding_free`).
        """
        return (
            self.method_row.asynchronous or self.padding_free or (self.packing and self.packing_strategy != "wrapped")
        )

    @property
    def layout(self) -> Layout:
        """Return the way that rows of the dataset are joined to batches."""
        if self.packing:
            return self.packing_strategy
        return "padding_free" if self.padding_free else "padded"

    @property
    def pads(self) -> bool:
        """True if batches of the training pass hold padding: rows are padded to the longest row of their group.

        The group of rows in trl 1.16 is one of:

        - a micro-batch: sft_trainer.py, `DataCollatorForLanguageModeling.torch_call`, kto_trainer.py,
          `DataCollatorForUnpairedPreference.torch_call`; with both rows of a pair: dpo_trainer.py and
          reward_trainer.py, `DataCollatorForPreference.torch_call`, experimental/cpo/cpo_trainer.py,
          `CPOTrainer.concatenated_inputs`, orpo_trainer.py, `ORPOTrainer.concatenated_inputs`; GKD:
          experimental/utils.py, `DataCollatorForChatML.__call__`;
        - all completions that one process generates at once: grpo_trainer.py, rloo_trainer.py and
          distillation_trainer.py, `_generate_and_score_completions`, experimental/online_dpo/online_dpo_trainer.py,
          `OnlineDPOTrainer._generate_vllm`. Micro-batches of one row keep this padding.

        A group of one row has no padding. Its mask is all ones, so sdpa and FlashAttention build none (transformers
        5.23, masking_utils.py, `_ignore_causal_mask_sdpa` and `flash_attention_mask`); eager attention always
        builds one. Context and Ulysses sequence parallel drop the mask: attention is causal over the whole row
        (accelerate 1.15, big_modeling.py, `_attach_context_parallel_hooks`; deepspeed 0.19.8,
        runtime/sequence_parallel/ulysses_sp.py, `uattn_wrapper`).
        Leaves out `pad_to_multiple_of`, which TRL does not set by default.
        """
        joined = self.packing or self.flattened
        return bool(self.padded) and not joined and self.generation_rows > 1 and self.row_gpus == 1

    @property
    def full_batch(self) -> "Candidate | None":
        """The candidate whose batches hold no padding: rows of one length, the longest possible.

        None: no batch is like that, or all are counted so already.

        The rows are all cut at `max_length` or `max_completion_length`, or happen to have one length: `lengths` say how
        long such rows are in a micro-batch. Whether this batch is the heavier one depends on the GPU (`worst_batch`,
        planner/estimation.py).
        """
        if self.padded != "either":
            return None
        if not self.pads:
            evaluated = self.evaluation is not None and self.evaluation.pads
            return replace(self, padded=False) if evaluated else None
        if self.lengths is None:
            return replace(self, padded=False)
        too_long: Literal["cut", "drop"] = "drop" if self.method_row.drops_long_rows else "cut"
        rows = trained_rows(self.lengths, self.max_length, too_long, self.layout)
        length = longest_of_equal(rows, self.per_device_train_batch_size)
        return replace(self, padded=False, max_length=length) if length else None

    @property
    def attention_length(self) -> int:
        """Tokens of one row in the attention layers: all tokens of the batch if rows are concatenated (`flattened`)."""
        return self.rows * self.row_tokens if self.flattened else self.row_tokens

    @property
    def scores(self) -> int:
        """Attention scores of one head in one forward pass on one GPU: rows x length squared, divided by `row_gpus`.

        Context parallel: the queries of the GPU's tokens with all keys. Ulysses: whole rows for a share of the heads.
        """
        return self.tokens * self.attention_length

    @property
    def labelled_tokens(self) -> int:
        """Upper bound of the tokens with a label: completion tokens if the method generates, else all tokens."""
        if self.method_row.generates:
            return self.rows * min(self.max_completion_length, self.row_tokens)
        return self.tokens

    @property
    def accumulates(self) -> bool:
        """True if an optimizer step has several backward passes (gradient accumulation)."""
        return self.gradient_accumulation_steps > 1

    @property
    def learns_again(self) -> bool:
        """True if several backward passes follow a rollout."""
        return self.accumulates or self.steps_per_generation * self.num_iterations > 1

    @property
    def keeps_whole_gradients(self) -> bool:
        """True if FSDP2 keeps the gradients of the whole model on every GPU between the micro-steps of a step.

        Trainer runs all micro-steps but the last under `no_sync`, unless `sync_each_batch`: FSDP2 does not reduce
        gradients there, and an unsharded gradient stays unsharded.
        Source: transformers 5.23, trainer.py, `_inner_training_loop`; accelerate 1.15, accelerator.py, `no_sync`; torch
        2.13, distributed/fsdp/_fully_shard/_fsdp_param_group.py, `post_backward` (`reduce_grads`).
        """
        return self.scheme_row.defers_reduction and self.accumulates and not self.sync_each_batch

    @property
    def effective_batch_size(self) -> int:
        """Samples of one optimizer step over all processes."""
        return self.rows // self.method_row.rows_per_sample * self.gradient_accumulation_steps * self.batches

    @property
    def generation_rows(self) -> int:
        """Completions that one process samples at once (a generation batch).

        Source: trl 1.16, grpo_trainer.py, `GRPOTrainer.get_train_dataloader`, distillation_trainer.py,
        `DistillationTrainer.get_train_dataloader`.
        """
        if self.method_row.rows_at_once:
            return min(self.rows * self.gradient_accumulation_steps, self.method_row.rows_at_once)
        if self.method_row.grouped_completions:
            return self.per_device_train_batch_size * self.steps_per_generation
        by_batch = self.method_row.generates_by_batch and self.vllm == "off"
        if self.method_row.generates_ahead and not by_batch:
            return self.rows * self.gradient_accumulation_steps
        return self.rows

    @property
    def samples_within_step(self) -> bool:
        """True if completions are sampled between the micro-steps of an optimizer step, beside their gradients.

        Source: trl 1.16, trainer/grpo_trainer.py, `GRPOTrainer._prepare_inputs` (`generate_every`).
        """
        row = self.method_row
        if not self.accumulates or not row.generates or row.generates_ahead or row.epochs_per_rollout:
            return False
        served = self.steps_per_generation * self.num_iterations if row.grouped_completions else 1
        return served % self.gradient_accumulation_steps != 0

    @property
    def evaluation(self) -> EvaluationBatch | None:
        """The evaluation batch of one GPU; None without evaluation."""
        if self.eval_strategy == "no":
            return None
        batch = replace(
            self, per_device_train_batch_size=self.per_device_eval_batch_size, gradient_accumulation_steps=1,
            steps_per_generation=1,
        )  # fmt: skip
        return EvaluationBatch._make(getattr(batch, name) for name in EvaluationBatch._fields)

    @property
    def kept_eval_batches(self) -> int:
        """Evaluation batches whose logits are on the GPU at a time, for a function of metrics; 0 without one.

        Source: transformers 5.23, trainer.py, `Trainer.evaluate` (`prediction_loss_only` where there is no
        `compute_metrics`) and `evaluation_loop` (`eval_accumulation_steps`).
        """
        wanted = self.compute_metrics and not self.prediction_loss_only and self.method_row.evaluation_logits
        if self.eval_strategy == "no" or not wanted:
            return 0
        batches = -(-self.eval_rows // (self.per_device_eval_batch_size * self.num_processes))
        return min(self.eval_accumulation_steps or batches, batches or self.eval_accumulation_steps)

    @property
    def kept_eval_rows(self) -> int:
        """Rows whose logits a function of metrics gets at the end, on the host of every process; 0: none or unknown."""
        return self.eval_rows if self.kept_eval_batches else 0

    @property
    def scored_batch(self) -> EvaluationBatch | None:
        """The batch that a method scores in one pass; None: it is a micro-batch."""
        rows = self.generation_rows
        if not self.method_row.scores_at_once or rows == self.rows:
            return None
        batch = replace(self, per_device_train_batch_size=rows, gradient_accumulation_steps=1)
        return EvaluationBatch._make(getattr(batch, name) for name in EvaluationBatch._fields)

    @property
    def generated_share(self) -> float:
        """Share of the micro-batches that the policy generates; the others are rows of the dataset (GKD).

        Source: trl 1.16, experimental/gkd/gkd_trainer.py, `GKDTrainer.training_step`.
        """
        return self.lmbda if self.method_row.mixes_rows else 1.0

    @property
    def prompts_differ(self) -> bool:
        """True if a process samples from several prompts at once and batches are padded: their lengths differ."""
        if self.method_row.grouped_completions:
            return self.pads and self.generation_rows > self.num_generations
        return self.pads and self.per_device_train_batch_size > 1

    @property
    def generates_without_cache(self) -> bool:
        """True if `generate` runs the whole row again for every token, without a KV cache.

        A trainer that prepares a bitsandbytes model does so before it looks at gradient_checkpointing, which is then
        off (trl 1.16, experimental/utils.py, `prepare_peft_model`).
        """
        prepared = self.method_row.kbit_preparation != "none" and self.quantization_row.bitsandbytes
        drops = self.method_row.checkpointing_drops_cache and not prepared
        return drops and self.gradient_checkpointing and self.vllm == "off" and self.generated_share > 0

    @property
    def sets_engine_length(self) -> bool:
        """True if `vllm_max_model_length` reaches vLLM's engine; the trainer computes that of one that it builds."""
        return self.vllm == "server" or not self.method_row.builds_engine

    @property
    def server_gpus(self) -> int:
        """GPUs of a vLLM server: tensor parallel x data parallel; 0 without a server."""
        return self.vllm_tensor_parallel_size * self.vllm_data_parallel_size if self.vllm == "server" else 0

    @property
    def imports_vllm(self) -> bool:
        """True if the trainer needs the package vllm: for an engine, or for a client of a server.

        Source: trl 1.16, generation/vllm_client.py, `VLLMClient.__init__`.
        """
        return self.vllm != "off" or self.method_row.teacher_server

    @property
    def sends_adapters(self) -> bool:
        """True if the server loads adapters from a folder, so that no weights are sent.

        Source: trl 1.16, experimental/async_grpo/async_grpo_trainer.py, `select_adapter_sync`,
        `validate_lora_for_vllm_sync`.
        """
        plain = not (self.use_dora or self.lora_modules_to_save or self.lora_target_parameters)
        one = self.vllm_data_parallel_size == 1
        return self.method_row.asynchronous and self.tuning == "lora" and plain and one

    @property
    def adapter_slots(self) -> tuple[int, int]:
        """The largest rank and the number of adapters that the server has room for; 0 unless adapters are sent.

        Source: trl 1.16, experimental/async_grpo/async_grpo_trainer.py, `select_adapter_sync`.
        """
        if not self.sends_adapters:
            return 0, 0
        return next((rank for rank in SERVED_RANKS if rank >= self.lora_r), self.lora_r), self.max_staleness + 2

    @property
    def engine_quantization(self) -> EngineQuantization | None:
        """The quantization of a vLLM engine's weights; None: vLLM has none like it.

        A server loads the checkpoint by its name, as it is published; a colocated engine follows the trained model.
        """
        own = self.quantization_row.quantized and self.vllm != "server"
        return (self.quantization_row if own else self.model.quantization_row).engine

    @property
    def script_adds_adapters(self) -> bool:
        """True if train.py gives PPO a policy with adapters in the dtype of the base.

        ZeRO-3 puts all that is trained into one buffer, adapters and the value model, and stops at two dtypes.
        Source: deepspeed 0.19.8, runtime/zero/stage3.py, `_create_fp16_partitions_with_defragmentation` (`defragment`);
        trl 1.12, experimental/ppo/ppo_trainer.py, `PPOTrainer.__init__` (`get_peft_model`: float32 adapters).
        """
        return self.method_row.value_model and self.tuning == "lora" and self.scheme_row.creates_sharded

    @property
    def counted_lora_kernels(self) -> frozenset[AdapterKernel]:
        """Fused kernels that have formulas: on unquantized and bitsandbytes' 4-bit bases; others count as PEFT's."""
        row = self.quantization_row
        counted = not row.quantized or (row.bitsandbytes and row.four_bit)
        return frozenset(self.lora_kernels if counted and not self.use_dora else ())

    @property
    def has_copies(self) -> bool:
        """True if PEFT trains a copy of a module beside the adapters, in the dtype of the base: a score head's too."""
        return self.tuning == "lora" and (self.method_row.head == "score" or bool(self.lora_modules_to_save))

    @property
    def trainer_casts_to_bfloat16(self) -> bool:
        """True if the trainer casts what is trained on a bitsandbytes base to bfloat16 (`Method.bfloat16_adapters`)."""
        cast = "never" if self.method in self.tool_row.losses else self.method_row.bfloat16_adapters
        if self.tuning == "full" or not self.quantization_row.bitsandbytes or cast == "never":
            return False
        return cast == "4bit_and_8bit" or (self.quantization_row.four_bit and self.precision == "bf16")

    @property
    def script_casts_to_float32(self) -> bool:
        """True if the training script casts what is trained to float32 after the trainer is built.

        That is: adapters that the trainer casts to bfloat16, if `float32_adapters` is set or under fp16; and, unsharded
        under fp16, adapters beside PEFT's copied modules, such as a score head, of a base that is not float32. fp16's
        GradScaler cannot unscale gradients of 16 bits. ZeRO-1 and ZeRO-2 have none, and cast adapters to float16.
        Source: trl 1.16, trainer/sft_trainer.py, `SFTTrainer.__init__`; torch 2.13,
        aten/src/ATen/native/cuda/AmpKernels.cu, `_amp_foreach_non_finite_check_and_unscale_cuda_`;
        torch/amp/grad_scaler.py, `_unscale_grads_`; accelerate 1.15, accelerator.py, `Accelerator.__init__` (`scaler`);
        deepspeed 0.19.8, runtime/engine.py, `_cast_module_mixed_precision`.
        """
        cast_whole = self.casts == "module" and not self.scheme_row.creates_sharded
        scaled = self.precision == "fp16" and not cast_whole
        if self.trainer_casts_to_bfloat16:
            return self.float32_adapters or scaled
        return scaled and self.has_copies and self.dtype != "float32" and self.scheme_row.whole

    @property
    def script_saves_adapters_alone(self) -> bool:
        """True if the training script keeps PEFT from gathering the whole model on every process to save adapters.

        PEFT takes a model with a `_tp_size`, which is 1 beside `ep_size`, for one with tensor parallelism.
        Source: peft 0.21.2, utils/save_and_load.py, `get_peft_model_state_dict`; transformers 5.23, distributed/
        mixin.py, `maybe_distribute_model`; OLMoE-1B-7B on two emulated cards: 13.8 GB of host memory each.
        """
        return self.tuning == "lora" and self.scheme_row.divides_experts

    @property
    def float32_attention(self) -> bool:
        """True if some pass computes attention in float32, which FlashAttention's kernels do not.

        Weights are float32 and autocast does not reach the pass: `generate` of a PEFT model calls the forward of the
        base model, which accelerate does not wrap (peft 0.21, peft_model.py, `PeftModelForCausalLM.generate`).
        Source: flash-attention 2.8, csrc/flash_attn/flash_api.cpp ("only support fp16 and bf16 data type").
        """
        if self.dtype != "float32" or self.casts_weights:
            return False
        inner = self.tuning == "lora" and self.method_row.generates and self.vllm == "off"
        return self.precision == "no" or not self.method_row.autocast or inner

    @property
    def groups_efficiently(self) -> bool:
        """True if sdpa's memory-efficient kernel takes fewer heads of keys than of queries in this release of torch."""
        return TORCH_VERSIONS.index(self.torch_release) >= TORCH_VERSIONS.index(SINCE_TORCH["efficient_grouped"])

    @property
    def torch_release(self) -> TorchVersion:
        """The release of torch: the one that the wheel of a colocated vLLM requires, else `torch_version`.

        Example: vLLM 0.33 beside the trainer brings torch 2.14.
        """
        if self.vllm != "colocate":
            return self.torch_version
        return known_torch(required(self.vllm_release, TORCH_OF_VLLM))

    @property
    def models(self) -> tuple[ModelShape, ...]:
        """The models of the run, the policy first: all are loaded with the same `attn_implementation`.

        Source: trl 1.16, scripts/distillation.py, `main`; trainer/grpo_trainer.py, `GRPOTrainer.__init__`.
        """
        others = (self.teacher_model, self.reward_model)
        return (self.model, *(model for model in others if model is not None))

    @property
    def teacher_load_dtype(self) -> str:
        """The dtype of `teacher_model_init_kwargs`; without one the student's, as in TRL's scripts.

        Source: trl 1.16, scripts/distillation.py, `main`; trainer/distillation_trainer.py,
        `DistillationTrainer.__init__`; experimental/gkd/gkd_trainer.py, `GKDTrainer.__init__`.
        """
        if self.teacher_dtype == "auto":
            return (self.teacher_model or self.model).dtype
        return self.dtype if self.teacher_dtype == "student" else self.teacher_dtype

    @property
    def reference_load_dtype(self) -> str:
        """The dtype that a separate reference is loaded in: the policy's, or see `Method.float32_reference_until`.

        `ToolRow.casts_frozen` also says otherwise.
        """
        if self.tool_row.casts_frozen and self.dtype == "float32" and self.precision != "no":
            return "float16" if self.precision == "fp16" else "bfloat16"
        earlier = release(self.trl_version) <= self.method_row.float32_reference_until
        return "float32" if earlier else self.dtype

    @property
    def rescores_samples(self) -> bool:
        """True if the policy's log-probabilities of its samples are computed again before it trains on them.

        Source: trl 1.16, trainer/grpo_trainer.py, `GRPOTrainer._generate_and_score_completions` (`generate_every`: with
        vLLM, or if an optimizer step trains on several generations).
        """
        aligned = self.gradient_accumulation_steps % (self.steps_per_generation * self.num_iterations) == 0
        outdated = not aligned or (self.vllm != "off" and self.method_row.forward_if_outdated == "unaligned_or_vllm")
        return self.method_row.forward_if_outdated != "never" and outdated

    @property
    def scores_samples(self) -> bool:
        """True if a forward pass without gradients runs between sampling and training, of the policy or a reference.

        It runs if `rescores_samples`, if the method always has one (RLOO, PPO), or for reference log-probabilities if
        beta is not 0. Source: as `rescores_samples`; trl 1.16, trainer/rloo_trainer.py; trl 1.12,
        experimental/ppo/ppo_trainer.py.
        """
        row = self.method_row
        refers = row.reference == "always" or (row.reference == "beta" and self.beta != 0)
        own = self.rescores_samples or row.sampling_forwards > 0
        return row.generates and (own or (refers and not row.reference_in_loss))

    @property
    def repeated_calls(self) -> RepeatedCalls:
        """Part of a training step whose module calls DeepSpeed can prefetch from its trace under ZeRO-3.

            step      the forward and the backward pass, in at least one micro-step of the run
            forward   the forward pass only: a pass without gradients, with the same calls, runs before it (for KTO, on
                      the KL batch, which LLaMA-Factory takes after it; for each sampled token in full without
                      `ds3_gather_for_generation`)
            nothing   another sequence of calls runs before every micro-step (the policy without its adapters, as the
                      reference), or `ds3_gather_for_generation` has removed and added the hooks

        Distillation samples for a whole optimizer step, so that of its micro-steps only the first follows new hooks.

        DeepSpeed records the calls from one start of the outermost module to the next, and drops the trace at the first
        call that differs. With sampled completions, the first micro-step after new hooks only records a trace. After a
        pass without gradients neither of the first two micro-steps repeats, because the first breaks the trace.
        Source: deepspeed 0.19.8, zero/partitioned_param_coordinator.py, `trace_prologue`, `reset_step`;
        zero/parameter_offload.py, `_register_deepspeed_module`; trl 1.16, models/utils.py, `add_hooks`.
        """
        row, traces = self.method_row, self.scheme_row.traces_modules
        if traces and row.generates_ahead and self.vllm == "off" and self.ds3_gather_for_generation:
            return "step" if self.accumulates else "nothing"
        if not traces or not (row.grouped_completions or row.reference_in_loss):
            return "step"
        by_policy = self.refers_without_adapters
        rehooked = self.vllm == "off" and self.ds3_gather_for_generation
        if row.reference_in_loss and row.generates and self.vllm == "off" and not by_policy:
            return "nothing" if rehooked else "forward"
        if row.reference_in_loss:
            if row.extra_forward_rows:
                return "nothing" if self.method in self.tool_row.losses else "forward"
            return "nothing" if by_policy else "step"
        sampled = self.vllm == "off" and not rehooked and self.tuning == "full"
        scored = self.rescores_samples or row.sampling_forwards > 0  # a separate reference has a trace of its own
        unlike_others = 2 if scored or by_policy else 1 if rehooked or sampled else 0
        if self.steps_per_generation * self.num_iterations > unlike_others:
            return "step"
        return "forward" if sampled or (scored and not by_policy) else "nothing"

    @property
    def vllm_release(self) -> VllmVersion:
        """The release of vLLM: `vllm_version`, or the newest that TRL takes and that loads the engine's weights."""
        if self.vllm_version != "newest":
            return self.vllm_version
        newest = taken_by_trl(release(self.trl_version))[1]
        return last_before("no_bitsandbytes") if self.engine_needs_bitsandbytes else newest

    @property
    def vllm_taken(self) -> bool:
        """True if TRL takes the release of vLLM: it warns of others, and pip installs none of them with trl[vllm]."""
        oldest, newest = taken_by_trl(release(self.trl_version))
        return is_since(self.vllm_release, oldest) and is_since(newest, self.vllm_release)

    @property
    def engine_runner(self) -> RunnerName:
        """The model runner of the vLLM engine."""
        engine = self.engine_quantization
        quantized = engine is None or ENGINE_QUANTIZATIONS[engine].quantized
        return runner_of(self.model, quantized, self.vllm_release)

    @property
    def engine_loads(self) -> bool:
        """True if the release of vLLM has the layers of the engine's quantized weights."""
        return not (self._engine_row.bitsandbytes and vllm_has(self.vllm_release, "no_bitsandbytes"))

    @property
    def _engine_row(self) -> EngineRow:
        return ENGINE_QUANTIZATIONS[(self.engine_quantization if self.vllm != "off" else None) or "none"]

    @property
    def engine_needs_bitsandbytes(self) -> bool:
        """True if vLLM loads weights with bitsandbytes, which the newest vLLM that TRL takes lacks."""
        newest = taken_by_trl(release(self.trl_version))[1]
        return self._engine_row.bitsandbytes and vllm_has(newest, "no_bitsandbytes")

    @property
    def engine_keeps_base(self) -> bool:
        """True if a colocated engine gets packed weights without their scales, and so samples from the base.

        TRL merges the adapters for it, and each merge quantizes the base anew: huggingface/trl#4973, open.
        Source: trl 1.16, generation/vllm_generation.py, `_iter_named_params` (`param.data` of merged weights); peft
        0.21.2, tuners/lora/bnb.py, `Linear4bit.merge`, `unmerge`; vllm 0.27, model_executor/model_loader/
        bitsandbytes_loader.py (`bnb_quant_state`, set in the first load alone).
        """
        return self.vllm == "colocate" and self.quantization_row.bitsandbytes

    @property
    def script_loads_reference(self) -> bool:
        """True if the training script loads the reference itself, as TRL refuses to copy the policy under ZeRO-3.

        Source: trl 1.16, experimental/utils.py, `create_reference_model`.
        """
        return self.scheme_row.creates_sharded and self.separate_reference and self.method_row.copies_reference

    @property
    def loads_checkpoints(self) -> bool:
        """True if a run can go on from its checkpoints.

        FSDP2 does not load 4-bit weights that it does not shard: emulated runs stopped there (KeyError of a weight's
        absmax, or of its second name: results/served_starts.md). Nor does it go on without the states of a trained
        parameter ("Missing optimizer state"). Where GPUs divide experts, checkpoints have no optimizer states
        (`save_only_model`). SDPO adds its second adapter to a model that has loaded it ("Adapter with name 'teacher'
        already exists": trl 1.16, experimental/sdpo/teacher_sync.py, `PEFTAdapterEMACallback.on_train_begin`). In
        float16 under FSDP2 PyTorch makes the optimizer's states by a step, at which the gradient scaler stops before
        a loss was scaled (results/emulated_starts.md, "float16 under FSDP2").
        Source: torch 2.13, distributed/_state_dict_utils.py, `_broadcast_state_dict`, distributed/checkpoint/
        state_dict.py, `_split_optim_state_dict` (`strict`); transformers 5.23, trainer.py, `Trainer.__init__`
        ("optimizer state cannot be checkpointed").
        """
        stops = self.scheme_row.dtensors and (
            self.whole_4bit_weights or self.names_weights_twice or self.trains_idle_tower or self.precision == "fp16"
        )
        return not (stops or self.scheme_row.loads_divided or self.averages_adapters)

    @property
    def skips_no_batches(self) -> bool:
        """True if a run goes on from its checkpoints with the first rows of the epoch alone (`ignore_data_skip`).

        Transformers asks the data loader for its data set, of which DeepSpeed's for shared rows has none
        (AttributeError): an emulated run stopped, and went on with that argument.
        Source: accelerate 1.15, data_loader.py, `skip_first_batches`; deepspeed 0.19.8,
        runtime/sequence_parallel/ulysses_sp.py, `UlyssesSPDataLoaderAdapter`.
        """
        return self.sp_size > 1

    @property
    def whole_4bit_weights(self) -> bool:
        """True if 4-bit weights are stored in a dtype that FSDP2 does not shard."""
        return self.bnb_4bit_quant_storage == "uint8" and self.quantization_row.four_bit

    @property
    def names_weights_twice(self) -> bool:
        """True if PEFT's layers have the quantized weights under two names."""
        return self.tuning == "lora" and self.quantization_row.named_twice

    @property
    def trains_idle_tower(self) -> bool:
        """True if rows of text leave parameters of a vision tower that are trained without a gradient."""
        if self.images_per_row or not self.model.vision_params:
            return False
        return self.tuning == "full" or adapts_tower(self.model, self.lora_target_modules)

    @property
    def casts_loaded_adapters(self) -> bool:
        """True if the run goes on from a checkpoint whose adapters PEFT loads into float32, over the trainer's cast.

        DeepSpeed and FSDP load their own checkpoints into the parameters that there are.
        Source: transformers 5.23, trainer.py, `Trainer.train`, `_load_from_checkpoint`; peft 0.21.2, peft_model.py,
        `PeftModel.load_adapter`; tuners/tuners_utils.py, `cast_adapter_dtype`.
        """
        return bool(self.resume_from_checkpoint) and self.tuning == "lora" and self.scheme_row.whole

    @property
    def separate_reference(self) -> bool:
        """True if a second copy of the policy is loaded as the reference model.

        With LoRA there is none: the reference is the policy with its adapters disabled.
        """
        row = self.method_row
        if self.tuning == "lora" or row.reference == "never" or (row.reference == "beta" and not self.beta):
            return False
        return not self.precomputes or self.scheme_row.prepares_late

    @property
    def refers_without_adapters(self) -> bool:
        """True if the policy without its adapters is the reference, in every step."""
        row = self.method_row
        refers = row.reference == "always" or (row.reference == "beta" and self.beta != 0)
        return refers and not row.averaged_reference and self.tuning == "lora" and not self.precomputes

    @property
    def precomputes(self) -> bool:
        """True if the reference's log-probabilities are computed before training."""
        return self.precompute_ref_log_probs and self.method_row.precomputes_reference

    @property
    def keeps_reference(self) -> bool:
        """True if a `separate_reference` stays while the policy trains: one that precomputes is dropped before.

        Source: trl 1.16, trainer/dpo_trainer.py and kto_trainer.py, `__init__` (`self.ref_model = None` under FSDP).
        """
        return self.separate_reference and not self.precomputes


FIELDS: tuple[str, ...] = Candidate.__struct_fields__  # the names of all settings
DEFAULTS = dict(
    zip(reversed(FIELDS), reversed(Candidate.__struct_defaults__), strict=False)
)  # all but model and method


def known_torch(version: str) -> TorchVersion:
    """Return the planned release whose facts hold for a torch: the newest that is no newer, else the oldest."""
    return TORCH_VERSIONS[max(0, bisect_right(TORCH_VERSIONS, release(version), key=release) - 1)]


def usual_values(method: Method, trl_version: str) -> dict[str, Any]:
    """Return what a config that sets nothing has in a release of TRL: Candidate fields, but for model and method."""
    return {**DEFAULTS, **method.defaults_in(trl_version)}


# Settings that are at least 1.
COUNTS = tuple(
    row.field for row in SETTINGS if row.bounds and row.bounds[0] >= 1 and Candidate.__annotations__[row.field] is int
)
_counts = attrgetter(*COUNTS)

"""The table of TRL methods (`METHODS`), with the differences between TRL releases."""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, get_args

from msgspec import Struct, field
from msgspec.structs import replace

from planner.errors import InputError, shortened

MethodName = Literal[
    "sft",
    "dpo",
    "kto",
    "orpo",
    "cpo",
    "tpo",
    "reward",
    "grpo",
    "rloo",
    "gmpo",
    "async-grpo",
    "a2po",
    "online-dpo",
    "gkd",
    "gold",
    "iw-opd",
    "distillation",
    "server-distillation",
    "async-distillation",
    "sdft",
    "sdpo",
    "ppo",
]
Loss = Literal[
    "fused",  # TRL >= 1.15, `ChunkedLogProbFunction` (trl/kernels/chunked_logprob.py): builds no logits
    "chunked_nll",  # TRL 1.13 and 1.14 SFT: 256 labelled tokens' logits at a time
    "chunked_float32",  # TRL 1.7-1.12 SFT: the same, with a float32 copy of the head for each chunk
    "logits",  # the whole [rows, tokens, vocabulary], then selective_log_softmax
    "completion_logits",  # A2PO: those of the completions, then selective_log_softmax
    "triple",  # TPO: the whole logits, with a cross entropy of one completion of three
    "preference",  # LLaMA-Factory's DPO: a log_softmax of all logits, both kept while the reference runs
    "unpaired",  # LLaMA-Factory's KTO: the same, of rows and of the KL batch
    "causal_lm",  # transformers' Trainer: the model's own loss, of the whole logits in fp32
    "logits_cross_entropy",  # TRL 1.0-1.6 SFT: the same, and the accuracy of a copy of the logits
    "log_softmax",  # online DPO: a log_softmax over the completion's logits besides the logits
    "scored",  # server-distillation: the whole logits, and a log_softmax over the completion's
    "divergence",  # distillation: fused student and teacher tiles
    "most_likely",  # SDFT: both models' whole logits, of which the student's 100 most likely words are compared
    "sampled",  # SDPO: both models' whole logits, of which the log-probabilities of the sampled words are compared
    "jsd",  # GKD and GOLD: generalized Jensen-Shannon over both models' whole logits
    "universal",  # GOLD across tokenizers: both models' whole logits, and one row's sorted probabilities after another
    "weighted",  # IW-OPD: both models' whole logits, and a log_softmax of either over the completion's
    "candidates",  # async-distillation: 256 completion tokens' logits at a time, in float32
    "cut",  # cut cross entropy: logits stay in the kernels of both passes
    "liger",  # fused linear cross entropy: logits one chunk at a time, gradients in the forward pass
    "score",  # reward: one number a row
]
# Losses whose head runs as a plain nn.Linear.
LINEAR_HEAD: frozenset[Loss] = frozenset(
    {
        "logits",
        "completion_logits",
        "triple",
        "preference",
        "unpaired",
        "causal_lm",
        "logits_cross_entropy",
        "log_softmax",
        "scored",
        "most_likely",
        "sampled",
        "jsd",
        "universal",
        "weighted",
    }
)
Head = Literal["lm_head", "score"]  # the policy's last layer: scores of the vocabulary, or one number a row
# Weights of a 4-bit model that a trainer casts to bfloat16 after PEFT's `prepare_model_for_kbit_training`, which casts
# all unquantized ones to float32; "none": the trainer does not call it.
KbitPreparation = Literal["none", "embeddings_and_head", "everything_unquantized"]
Release = tuple[int, int]
EarlierDefaults = tuple[tuple[Release, dict[str, object]], ...]  # (last release with them, Candidate fields)

NEWEST_TRL = "1.16"  # the newest release whose defaults and code paths are counted
OLDEST_TRL = "1.0"  # the oldest one; earlier releases have defaults of their own (`BEFORE_1_0`) and its code paths
# From this release on `use_liger_kernel` changes the kernels of the layers, not the loss (trl 1.16,
# sft_trainer.py, `SFTTrainer.__init__`).
LIGER_LEAVES_THE_LOSS: Release = (1, 15)
LAYERS_ONLY = {"fused_linear_cross_entropy": False}  # a `liger_kernel_config`: the model's own forward pass


# Defaults of every config until the last release with them, oldest first, that a search replaces by its own choice.
# Source: trl 0.18 and 0.19, trainer/*_config.py, `__post_init__` (`bf16`); trl 0.21 and 0.22,
# `gradient_checkpointing`; transformers 4.53 and 4.54, training_args.py, `default_optim` (fused with torch 2.8, which
# came after trl 0.20).
BEFORE_1_0: EarlierDefaults = (
    ((0, 18), {"precision": "no"}),
    ((0, 20), {"optim": "adamw_torch"}),
    ((0, 21), {"gradient_checkpointing": False}),
)


def defaults_of_all(trl_version: str) -> dict[str, object]:
    """Return the Candidate fields whose default in a release of TRL is another one in every config, with the values."""
    return _until(BEFORE_1_0, trl_version)


def _until(earlier: Sequence[tuple[Release, Mapping[str, object]]], trl_version: str) -> dict[str, Any]:
    """Return the values of a release: of those that still hold in it, the one that ended first counts."""
    found = dict[str, Any]()
    for last, values in reversed(earlier):
        if release(trl_version) <= last:
            found |= values
    return found


class Method(Struct, frozen=True, kw_only=True):
    """One row of the table `METHODS`: all that differs between methods, but for the dataset's rows (`TRAINERS`).

    A column without a default differs so often that every row has to state it; `METHODS` fails at import without it.
    """

    name: MethodName
    trainer: str  # class name in TRL
    config: str  # class name in TRL
    loss: Loss  # of the newest release
    earlier_losses: tuple[tuple[Release, Loss], ...] = ()  # (last release that builds it, loss), oldest first
    # What keeps Liger from replacing the model's forward pass, which a classifier does not have ("'Qwen2ForSequence
    # Classification' object has no attribute 'lm_head'"): "trainer": it passes `fused_linear_cross_entropy` false to
    # Liger from `LIGER_LEAVES_THE_LOSS` on; "config": `liger_kernel_config` does; "never": the trainer's model is a
    # wrapper that gets no kernels. Source: trl 1.16, trainer/*_trainer.py, `__init__`; trl 1.12,
    # experimental/ppo/ppo_trainer.py; transformers 5.23, integrations/liger.py, `apply_liger_kernel`.
    liger_layers: Literal["trainer", "config", "never"] = "config"
    liger_loss: bool = False  # before `LIGER_LEAVES_THE_LOSS`, use_liger_kernel replaces the loss
    rows_per_sample: int  # rows of the policy's forward for each of per_device_train_batch_size
    smallest_batch: int = 1  # samples a process at least

    # the config class
    # Candidate field -> default, where it is not that of `Candidate`.
    defaults: Mapping[str, object] = field(default_factory=dict)
    earlier_defaults: EarlierDefaults = ()  # those of older releases that differ, oldest first, beside `BEFORE_1_0`
    fixed: frozenset[str] = frozenset()  # fields of `defaults` that its trainer or its server cannot have otherwise
    # Candidate field -> name of its argument, where it is not the one in planner/data/settings.json.
    argument_names: Mapping[str, str] = field(default_factory=dict)
    missing_arguments: frozenset[str] = frozenset()  # settings for which other methods' configs have a field
    reward_model_argument: str = ""  # the field with the path of the reward model; empty: an argument of the script
    learning_rate: str  # its default; empty: unknown
    # Columns of its dataset. Source: trl 1.16, docs/source/dataset_formats.md, and the experimental trainers' pages.
    columns: str = "prompt"

    # other models
    reference: Literal["never", "always", "beta"]  # a frozen copy of the policy; "beta": only if beta is not 0
    precomputes_reference: bool = False  # precompute_ref_log_probs exists
    reference_in_loss: bool = False  # the reference's forward runs while the policy's graph is alive
    # The reference's weights need no gradient, so that autocast keeps no copies of them. Source: trl 1.16,
    # experimental/utils.py, `create_reference_model`; experimental/sdft/sdft_trainer.py, `_setup_teacher_model`.
    experimental_reference: bool = False
    # The last release that loads it in float32, its loader's default, whatever the policy's dtype. Source: trl 1.15,
    # experimental/sdft/sdft_trainer.py, `_setup_teacher_model` (no `dtype`), trainer/utils.py,
    # `create_model_from_path`.
    float32_reference_until: Release = (0, 0)
    # It is a deep copy of the policy, whose forward pass returns a KV cache. Source: trl 1.16, experimental/utils.py,
    # `create_reference_model`; experimental/online_dpo/online_dpo_trainer.py, `_forward` (does not set `use_cache`).
    copies_reference: bool = False
    # DeepSpeed does not get it, so that it stays as loaded and whole; and it samples `num_value_samples` completions of
    # every prompt before the policy trains. Source: trl 1.16, experimental/a2po/a2po_trainer.py, `A2POTrainer.__init__`
    # (`prepare_model`), `_estimate_optimal_values`.
    samples_values: bool = False
    # It is an average of the policies so far: with LoRA a second adapter of the policy, and the average beside it.
    # Source: trl 1.16, experimental/sdpo/sdpo_trainer.py, `_setup_teacher_model` (`teacher_model_kind="ema"`),
    # teacher_sync.py, `PEFTAdapterEMACallback`, `SyncTeacherModelCallback`.
    averaged_reference: bool = False
    # Its prompt is the policy's with one of its completions, cut at this many tokens; 0: the policy's. Source: trl
    # 1.16, experimental/sdpo/sdpo_config.py, `max_reprompt_len`.
    longest_reprompt: int = 0
    # "functions": functions compute rewards, and no model does. Source: trl 1.16, experimental/a2po/a2po_trainer.py
    # (`RewardFunc`), async_grpo/async_grpo_trainer.py, `AsyncGRPOTrainer` (CUDA_VISIBLE_DEVICES="": a process without
    # GPUs computes them).
    reward_model: Literal["none", "functions", "optional", "always"] = "none"
    value_model: bool = False
    teacher: bool = False
    # It compares whole distributions, and stops at a teacher of another `vocab_size`; others resize its embeddings.
    # Source: trl 1.16, trainer/distillation_trainer.py and experimental/gkd/gkd_trainer.py, `__init__`.
    shares_vocabulary: bool = False
    # The KV cache that the teacher returns is alive until the loss is there. Source: trl 1.16,
    # experimental/gkd/gkd_trainer.py (`teacher_outputs`), gold/gold_trainer.py (`outputs_teacher`), `compute_loss`.
    keeps_teacher_cache: bool = False
    # Its loss can compare sorted probabilities, of a teacher with another tokenizer (`use_uld_loss`), whose embeddings
    # it does not resize then. Source: trl 1.16, experimental/gold/gold_trainer.py, `GOLDTrainer.__init__`.
    aligns_tokenizers: bool = False
    # A vLLM server scores the completions, on GPUs that are not among the trainer's. Source: trl 1.16,
    # experimental/server_distillation/server_distillation_trainer.py, `_get_teacher_token_logprobs_from_server`.
    teacher_server: bool = False
    teacher_port: int = 8000  # where its trainer looks for that server by default
    has_beta: bool = True
    needs_beta: bool = False  # a beta of 0 has no loss, so 0 means "not set"
    extra_forward_rows: int = 0  # rows of a second, gradient-free forward beside the policy's (KTO's KL batch)

    # how the policy is prepared
    # False: the backbone runs in the dtype of the weights even with `bf16`, outside the forward that accelerate wraps
    # in autocast. Source: trl 1.16, trainer/distillation_trainer.py, `_forward_redirection` (replaces that forward).
    autocast: bool = True
    # The trainer sets the model's dropout to 0. Source: trl 1.16, trainer/dpo_config.py, kto_config.py,
    # reward_config.py and experimental configs, `disable_dropout`.
    disables_dropout: bool
    # Source: trl 1.16, experimental/cpo/cpo_trainer.py and experimental/orpo/orpo_trainer.py, `__init__`, with
    # experimental/utils.py, `peft_module_casting_to_bf16`; experimental/online_dpo/online_dpo_trainer.py, `__init__`,
    # with experimental/utils.py, `prepare_peft_model`.
    kbit_preparation: KbitPreparation = "none"
    # The bases of bitsandbytes on which the trainer casts adapters to bfloat16; PEFT makes float32 ones. Source: trl
    # 1.16, trainer/sft_trainer.py, `__init__` (all, as in every stable trainer); experimental/utils.py,
    # `peft_module_casting_to_bf16` (changes norms, embeddings and the head only), `prepare_peft_model` (with bf16, on 4
    # bits).
    bfloat16_adapters: Literal["never", "4bit_under_bf16", "4bit_and_8bit"] = "4bit_and_8bit"
    takes_adapters: bool = True  # its trainer has an argument `peft_config`
    # Adapters on a 16-bit base stay float32 under ZeRO-3: the trainer does not tell PEFT otherwise, and DeepSpeed casts
    # no model that it sharded while loading. Source: trl 1.16, experimental/utils.py, `prepare_peft_model`; trl 1.12,
    # experimental/ppo/ppo_trainer.py, `__init__`; deepspeed 0.19.8, runtime/engine.py, `_cast_module_mixed_precision`.
    float32_adapters_under_zero3: bool = False

    # generation
    generates: bool  # the policy samples completions in the training loop
    grouped_completions: bool = False  # num_generations, steps_per_generation and num_iterations exist
    generates_ahead: bool = False  # samples the completions of a whole optimizer step at once
    # It samples them before that step, but without vLLM those of one micro-batch after another. Source: trl 1.16,
    # experimental/gold/gold_trainer.py, `_generate_non_vllm_for_slices`; iw_opd/iw_opd_trainer.py,
    # `_generate_with_model`.
    generates_by_batch: bool = False
    # Samples and scores the rows of a step at once, at most this many; 0: a batch of training, or as the columns above
    # say. Source: trl 1.12, experimental/ppo/ppo_config.py, `local_rollout_forward_batch_size`, ppo_trainer.py,
    # `batch_generation`.
    rows_at_once: int = 0
    # Scores all sampled rows in one pass, not a micro-batch at a time: trl 1.16, experimental/sdft/sdft_trainer.py,
    # `_compute_rollout_logps`; PPO as above.
    scores_at_once: bool = False
    # Transformers samples among the 50 most likely words, a filter of its logits, as the config says None. Source: trl
    # 1.16, experimental/a2po/a2po_config.py (`top_k`); transformers 5.23, generation/configuration_utils.py,
    # `_get_default_generation_params`.
    filters_words: bool = False
    # The scores of all sampled tokens are stacked, and stay until those of the next rollout are there; so does the
    # output of the last pass (`kept_output`), of a model that nothing wraps. Source: trl 1.12,
    # experimental/ppo/ppo_trainer.py, `generate` (`output_scores`), `batch_generation`, `train` (`logitss`, `output`).
    keeps_scores: bool = False
    bounded_rows: bool = False  # max_length bounds prompt and completion together
    completion_logits_only: bool = False  # a loss that builds logits builds those of completions (logits_to_keep)
    supports_vllm: bool = False
    # The trainer builds vLLM's engine itself, with a context of max_length + max_completion_length, not through
    # trl/generation/vllm_generation.py. Source: trl 1.16, experimental/online_dpo/online_dpo_trainer.py, `__init__`.
    builds_engine: bool = False
    # An engine without `vllm_max_model_length` has a context of `max_length`. Source: trl 1.16,
    # experimental/gold/gold_trainer.py, `GOLDTrainer.__init__`.
    row_long_engine: bool = False
    server_port: int = 8000  # where its trainer looks for a vLLM server that samples: `vllm_server_port`
    # A `vllm serve` beside the training samples all the time, of a policy that is up to `max_staleness` steps old. A
    # process trains one row of at most `token_budget` tokens. Source: trl 1.16, experimental/async_grpo/
    # async_grpo_trainer.py and async_distillation/async_distillation_trainer.py, `TokenBudgetBatcher`.
    asynchronous: bool = False
    # The completions of a prompt share its tokens in that row. Source: trl 1.16, experimental/async_grpo/packing.py,
    # `TreeRow`.
    packs_trees: bool = False
    asynchronous_form: MethodName | None = None  # the method that computes the same loss so
    mixes_rows: bool = False  # the policy generates a share of the micro-batches (lmbda); the others are the dataset's
    # A step of the trainer is a rollout of all its micro-batches, and this many epochs over it, each of which ends with
    # an optimizer step; 0: a step is one optimizer step. Source: trl 1.12, experimental/ppo/ppo_trainer.py, `train`;
    # ppo_config.py, `num_ppo_epochs`.
    epochs_per_rollout: int = 0
    # Gradient-free forward passes of the policy's size per rollout that make the log-probabilities of the sampled
    # tokens (and PPO's values). Source: trl 1.16, trainer/rloo_trainer.py, `_generate_and_score_completions`; trl
    # 1.12, experimental/ppo/ppo_trainer.py.
    sampling_forwards: int = 0
    # One such pass where the policy has moved on from the one that sampled: if rollouts do not end with an optimizer
    # step ("unaligned"), or with vLLM, too. Source: trl 1.16, trainer/grpo_trainer.py,
    # `_generate_and_score_completions`; experimental/sdft/sdft_trainer.py, `_compute_rollout_logps`.
    forward_if_outdated: Literal["never", "unaligned", "unaligned_or_vllm"] = "never"
    # Source: trl 1.16, experimental/gkd/gkd_trainer.py, trainer/distillation_trainer.py, `__init__` (`prepare_model` of
    # the teacher); accelerate 1.15, accelerator.py, `prepare_model`, which under FSDP leaves a model where it is: GKD's
    # on the CPU, distillation's over the GPUs (`device_map="auto"`), at which it raises.
    runs_under_fsdp2: bool = True
    distributes: bool = False  # is planned with Transformers' own FSDP2, which was started with it
    always_gathers: bool = False  # ds3_gather_for_generation does not exist, and ZeRO-3 gathers as if it were true
    # `generate` keeps no KV cache under gradient checkpointing: trl 1.16, experimental/gkd/gkd_trainer.py,
    # `GKDTrainer.__init__` and experimental/online_dpo/online_dpo_trainer.py, `OnlineDPOTrainer.__init__`
    # (`use_cache`).
    checkpointing_drops_cache: bool = False

    # batches and activations
    packs: bool = False  # packing exists
    # Pairs with a row of more than max_length tokens are left out. Source: trl 1.16, trainer/reward_trainer.py,
    # `RewardTrainer._prepare_dataset`.
    drops_long_rows: bool = False
    padding_free: bool = False  # padding_free exists
    offloads_activations: bool = False  # activation_offloading exists
    # Images in its rows: "refused": by the trainer. Source: trl 1.16, trainer/*_trainer.py, experimental/*/*_trainer.py
    # (`pixel_values`).
    images: Literal["counted", "not yet", "refused"] = "refused"
    shares_rows: bool = False  # GPUs can share a row (cp_size, sp_size): position_ids, and a loss of pieces
    # Its trainer can evaluate rows of text. Source: trl 1.16, experimental/online_dpo/online_dpo_trainer.py (has no
    # `prediction_step` of its own).
    evaluates: bool = True
    # Its `train` takes `resume_from_checkpoint`. Source: trl 1.12, experimental/ppo/ppo_trainer.py, `PPOTrainer.train`.
    resumes: bool = True
    # An evaluation returns the logits of whole rows, which a function of metrics gets. Source: trl 1.16,
    # trainer/sft_trainer.py, dpo_trainer.py, kto_trainer.py, `prediction_step`; others return a number a row, or none.
    evaluation_logits: bool = False

    experimental: bool = False  # in trl.experimental, without a `trl` command
    # Who says how the policy is loaded. "trainer": it loads a path, with its argument `quantization_config`; "config":
    # it does so, without a device map, and its config has the `dtype` and the rest in `model_init_kwargs`; "script":
    # scripts load it, without a device map. Most experimental trainers lack the argument; those that inherit from a
    # stable one have it. Source: trl 1.16, experimental/async_grpo/async_grpo_trainer.py, `AsyncGRPOTrainer.__init__`.
    policy_loader: Literal["trainer", "config", "script"] = "trainer"
    script_arguments: str = "trl.ScriptArguments"  # class with the script's own arguments, such as `dataset_name`
    # Columns that are others in older releases: the last one with them, oldest first.
    earlier_columns: tuple[tuple[Release, Mapping[str, object]], ...] = ()
    first_trl: str = "oldest"  # the first TRL release that has it
    last_trl: str = "current"  # the last one

    def __hash__(self) -> int:
        return hash(self.name)

    def in_release(self, trl_version: str) -> "Method":
        """Return the row with the columns that it has in a release of TRL (`earlier_columns`)."""
        return replace(self, **_until(self.earlier_columns, trl_version)) if self.earlier_columns else self

    def keeps_loss_with_liger(self, trl_version: str) -> bool:
        """Return whether `use_liger_kernel` changes the layers' kernels only, with a release of TRL."""
        if self.liger_layers == "trainer":
            return release(trl_version) >= LIGER_LEAVES_THE_LOSS
        return self.liger_layers == "config"

    def loss_with(self, trl_version: str, use_liger_kernel: bool) -> Loss:
        """Return the loss that a release of TRL computes."""
        if use_liger_kernel and self.liger_loss and release(trl_version) < LIGER_LEAVES_THE_LOSS:
            return "liger"
        for last, loss in self.earlier_losses:
            if release(trl_version) <= last:
                return loss
        return self.loss

    def defaults_in(self, trl_version: str, searched: bool = False) -> dict[str, object]:
        """Return the Candidate fields whose default in a release of TRL is not Candidate's, with their values.

        `searched`: of a search, which chooses the settings of `BEFORE_1_0`.
        """
        of_all = {} if searched else defaults_of_all(trl_version)
        return {**of_all, **self.defaults, **_until(self.earlier_defaults, trl_version)}

    @property
    def keeps_checkpointing_details(self) -> bool:
        """True if `every_n_layers` and `offload` hold for the whole run.

        After each pass of a reference or for samples TRL enables checkpointing again, and hands both to torch's
        checkpoint function: every layer is checkpointed then and none offloaded, or, with reentrant checkpoints, the
        run ends.
        Source: trl 1.16, models/utils.py, `disable_gradient_checkpointing`, `_unwrap_model_for_generation`;
        transformers 5.23, trainer.py, `_inner_training_loop` (`gc_kwargs.pop`).
        """
        return not self.generates and self.reference == "never"

    @property
    def cuts_prompts(self) -> bool:
        """True if the trainer cuts prompts, so that no row is longer than planned."""
        return self.bounded_rows or "prompt_length" in self.argument_names

    @property
    def takes_liger_kernels(self) -> bool:
        """Return whether `use_liger_kernel` replaces anything of the trained model, with some release of TRL."""
        return self.liger_layers != "never"

    @property
    def takes_reward_functions(self) -> bool:
        """True if functions can compute rewards."""
        return self.reward_model in ("functions", "optional")

    @property
    def head(self) -> Head:
        """The policy's last layer."""
        return "score" if self.loss == "score" else "lm_head"

    @property
    def module(self) -> str:
        """The module of the trainer and its config class. Source: trl 1.16, `trl/experimental/`."""
        return f"trl.experimental.{self.name.replace('-', '_')}" if self.experimental else "trl"

    @property
    def trainer_module(self) -> str:
        """The file of the trainer."""
        file = f"{self.name.replace('-', '_')}_trainer"
        return f"{self.module}.{file}" if self.experimental else f"trl.trainer.{file}"

    @property
    def shards_qlora(self) -> bool:
        """True if sharded 4-bit weights are planned: its trainer neither prepares a 4-bit model nor samples.

        With releases before 1.0, too: SFT's did not prepare weights that are sharded (trl 0.25, models/utils.py,
        `is_sharded_qlora`).
        """
        return not self.generates and METHODS[self.name].kbit_preparation == "none"


# Source of the rows: trl 1.16, trainer/*_trainer.py, trainer/*_config.py and experimental/*/; PPO: trl 1.12,
# experimental/ppo. `earlier_losses`: trl's CHANGELOG and trainer/utils.py `selective_log_softmax` of each release;
# `chunked_nll` became SFT's default in 1.7 (trainer/sft_config.py, `SFTConfig.__post_init__`; 1.6 only warns of it),
# the fused head came to every stable trainer with 1.15.
# `learning_rate`: the configs; PPO's is not known.
# Argument names: experimental/online_dpo/online_dpo_config.py, experimental/gkd/gkd_config.py, ppo/ppo_config.py.
# `smallest_batch` of KTO: trainer/kto_trainer.py, "Actual (not effective) batch size must be > 1".
# Prompts have no limit in TRL 1.16, so `prompt_length` describes the data: 512 tokens unless --prompt-length is given;
# with `bounded_rows` the rest of max_length.
# `earlier_defaults`: trl 1.9 and 1.10, trainer/grpo_config.py and rloo_config.py (`max_completion_length`); 0.18 and
# 0.19, grpo_config.py (`beta`); 0.16 and 0.17, grpo_trainer.py, `_prepare_inputs` (a rollout each micro-step); 0.14,
# whose GRPO has one prompt a process, with all its completions, 8 times a step; 0.13 and 0.14, trainer/*_trainer.py
# (`max_length` None is 512; SFT's and GKD's was 1024 then, too); 0.18 and 0.19, sft_config.py, data_utils.py
# (`packing_strategy`). `first_trl` before 1.0: the first release with the trainer; RLOO and PPO had others before.
SHORTER_COMPLETIONS: EarlierDefaults = (((1, 9), {"max_completion_length": 256}),)
SHORTER_ROWS: EarlierDefaults = (((0, 13), {"max_length": 512}),)
# Trainers of before prepare a bitsandbytes base, and cast no adapters. Source: trl 0.25 and 0.26, sft_trainer.py,
# reward_trainer.py and grpo_trainer.py, 0.26 and 0.27, rloo_trainer.py, 0.28 and 0.29, dpo_trainer.py, 1.3 and 1.4,
# experimental/kto/kto_trainer.py, `__init__` (`prepare_peft_model`, or PEFT's function); 0.13, trainer/utils.py,
# `peft_module_casting_to_bf16` (leaves out that reward did not call it until 0.21). GRPO until 0.21 does neither.
PREPARED: Mapping[str, object] = {"kbit_preparation": "embeddings_and_head", "bfloat16_adapters": "never"}
GRPO = Method(  # the row that GRPO's variants start from
    name="grpo", trainer="GRPOTrainer", config="GRPOConfig",
    loss="fused", earlier_losses=(((1, 14), "logits"),), liger_loss=True, liger_layers="trainer",
    rows_per_sample=1, reference="beta", reward_model="optional",
    generates=True, grouped_completions=True, completion_logits_only=True, supports_vllm=True,
    asynchronous_form="async-grpo", learning_rate="1e-06", disables_dropout=False, first_trl="0.14",
    earlier_defaults=(
        ((0, 14), {"gradient_accumulation_steps": 8}), ((0, 16), {"steps_per_generation": 1}),
        ((0, 18), {"beta": 0.04}), *SHORTER_COMPLETIONS,
    ),
    earlier_columns=(
        ((0, 21), {"kbit_preparation": "none", "bfloat16_adapters": "never"}), ((0, 25), PREPARED),
    ),
    forward_if_outdated="unaligned_or_vllm", images="counted", script_arguments="trl.scripts.grpo.GRPOScriptArguments",
)  # fmt: skip
METHODS: dict[MethodName, Method] = {
    method.name: method
    for method in (
        Method(
            name="sft", trainer="SFTTrainer", config="SFTConfig",
            columns="messages (or prompt and completion, or text)", distributes=True,
            loss="fused", liger_loss=True, liger_layers="trainer",
            earlier_losses=(
                ((0, 14), "causal_lm"), ((1, 6), "logits_cross_entropy"), ((1, 12), "chunked_float32"),
                ((1, 14), "chunked_nll"),
            ),
            earlier_defaults=(((0, 18), {"packing_strategy": "wrapped"}),), earlier_columns=(((0, 25), PREPARED),),
            rows_per_sample=1, reference="never", has_beta=False, generates=False,
            packs=True, padding_free=True, offloads_activations=True, images="counted",
            learning_rate="2e-05", disables_dropout=False, shares_rows=True, evaluation_logits=True,
        ),
        Method(
            name="dpo", trainer="DPOTrainer", config="DPOConfig", columns="prompt, chosen and rejected",
            loss="fused", liger_loss=True, liger_layers="trainer", earlier_defaults=SHORTER_ROWS,
            earlier_columns=(((0, 28), PREPARED),),
            earlier_losses=(((0, 11), "preference"), ((0, 14), "log_softmax"), ((1, 14), "logits")),
            rows_per_sample=2, reference="always", precomputes_reference=True, reference_in_loss=True, needs_beta=True,
            generates=False, padding_free=True, offloads_activations=True, images="counted", defaults={"beta": 0.1},
            learning_rate="1e-06", disables_dropout=True, evaluation_logits=True,
        ),
        Method(
            name="kto", trainer="KTOTrainer", config="KTOConfig", columns="prompt, completion and label",
            loss="fused", earlier_losses=(((1, 14), "logits"),), liger_loss=True, liger_layers="trainer",
            rows_per_sample=1, smallest_batch=2, extra_forward_rows=1,
            reference="always", precomputes_reference=True, reference_in_loss=True, needs_beta=True,
            generates=False, offloads_activations=True, images="counted", defaults={"beta": 0.1},
            earlier_defaults=SHORTER_ROWS, first_trl="0.8", earlier_columns=(((1, 3), PREPARED),),
            learning_rate="1e-06", disables_dropout=True, evaluation_logits=True,
        ),
        Method(
            name="orpo", trainer="ORPOTrainer", config="ORPOConfig",
            columns="prompt, chosen and rejected", loss="logits",
            rows_per_sample=2, reference="never", needs_beta=True, generates=False, defaults={"beta": 0.1},
            experimental=True, policy_loader="script", earlier_defaults=SHORTER_ROWS, first_trl="0.8",
            learning_rate="1e-06", disables_dropout=True,
            kbit_preparation="embeddings_and_head", bfloat16_adapters="never",
        ),
        Method(
            name="cpo", trainer="CPOTrainer", config="CPOConfig", columns="prompt, chosen and rejected", loss="logits",
            rows_per_sample=2, reference="never", needs_beta=True, generates=False, defaults={"beta": 0.1},
            experimental=True, policy_loader="script", earlier_defaults=SHORTER_ROWS, first_trl="0.8",
            learning_rate="1e-06", disables_dropout=True,
            kbit_preparation="embeddings_and_head", bfloat16_adapters="never",
        ),
        Method(
            name="tpo", trainer="TPOTrainer", config="TPOConfig",
            columns="prompt, chosen, rejected and reference", loss="triple",
            rows_per_sample=3, reference="never", needs_beta=True, generates=False, defaults={"beta": 0.01},
            experimental=True, first_trl="1.3", policy_loader="script",
            learning_rate="5e-07", disables_dropout=True, bfloat16_adapters="never", evaluation_logits=True,
        ),
        Method(
            name="reward", trainer="RewardTrainer", config="RewardConfig", columns="chosen and rejected", loss="score",
            rows_per_sample=2, reference="never", has_beta=False, generates=False, offloads_activations=True,
            drops_long_rows=True, earlier_defaults=SHORTER_ROWS, earlier_columns=(((0, 25), PREPARED),),
            learning_rate="0.0001", disables_dropout=True,
        ),
        GRPO,
        Method(
            name="rloo", trainer="RLOOTrainer", config="RLOOConfig",
            loss="fused", earlier_losses=(((1, 14), "logits"),), liger_layers="trainer",
            rows_per_sample=1, reference="beta", reward_model="optional",
            generates=True, grouped_completions=True, completion_logits_only=True, supports_vllm=True,
            defaults={"num_generations": 2, "beta": 0.05}, earlier_defaults=SHORTER_COMPLETIONS, first_trl="0.22",
            earlier_columns=(((0, 26), PREPARED),),
            learning_rate="1e-06", disables_dropout=False,
            sampling_forwards=1, images="counted", script_arguments="trl.scripts.rloo.RLOOScriptArguments",
        ),
        # trl 1.16, experimental/gmpo/gmpo_trainer.py: only `_compute_loss` differs, with the same tensors of the
        # vocabulary; its other tensors have one number a token.
        replace(
            GRPO, name="gmpo", trainer="GMPOTrainer", config="GMPOConfig", experimental=True, first_trl="1.7",
            asynchronous_form=None,
        ),
        # trl 1.16, experimental/async_grpo/: FlashAttention 3 from the Hub along the paths of the tree (packing.py), no
        # reference, no argument for a quantization or an evaluation dataset, `use_liger_kernel` raises. PEFT's adapters
        # keep their dtype, on a bitsandbytes base too (async_grpo_trainer.py, `__init__`).
        replace(
            GRPO, name="async-grpo", trainer="AsyncGRPOTrainer", config="AsyncGRPOConfig", experimental=True,
            earlier_losses=(), liger_loss=False, liger_layers="never", reference="never", has_beta=False,
            grouped_completions=False, generates_ahead=True, forward_if_outdated="never", images="refused",
            earlier_defaults=(), asynchronous_form=None, bfloat16_adapters="never",
            asynchronous=True, packs_trees=True, evaluates=False, first_trl="1.16", policy_loader="config",
            reward_model="functions",
            defaults={
                "vllm": "server", "attn_implementation": "flash_attention_3", "max_completion_length": 2048,
            },
            fixed=frozenset({"vllm", "attn_implementation"}),
            missing_arguments=frozenset({
                "use_vllm", "vllm_mode", "vllm_gpu_memory_utilization", "vllm_tensor_parallel_size",
                "vllm_max_model_length", "attn_implementation", "ds3_gather_for_generation",
            }),
        ),
        # Its reference is a copy of the policy, which has a forward pass of its own before the policy's.
        Method(
            name="a2po", trainer="A2POTrainer", config="A2POConfig", loss="completion_logits",
            rows_per_sample=1, reference="always", experimental_reference=True, copies_reference=True,
            samples_values=True, reward_model="functions", has_beta=False, takes_adapters=False,
            generates=True, always_gathers=True, filters_words=True, completion_logits_only=True,
            defaults={"max_completion_length": 256},
            experimental=True, first_trl="1.6", policy_loader="script", learning_rate="5e-05", disables_dropout=False,
            runs_under_fsdp2=False, argument_names={"prompt_length": "max_prompt_length"},
            script_arguments="trl.scripts.grpo.GRPOScriptArguments",
        ),
        Method(
            name="online-dpo", trainer="OnlineDPOTrainer", config="OnlineDPOConfig", loss="log_softmax",
            rows_per_sample=2, reference="always", reference_in_loss=True, needs_beta=True, reward_model="optional",
            experimental_reference=True, copies_reference=True, generates=True, checkpointing_drops_cache=True,
            bounded_rows=True, supports_vllm=True, experimental=True, policy_loader="script",
            first_trl="0.10", earlier_defaults=(((0, 10), {"max_completion_length": 53}),),
            defaults={"max_length": 512, "max_completion_length": 64, "beta": 0.1, "vllm_gpu_memory_utilization": 0.55},
            learning_rate="5e-07", disables_dropout=True,
            kbit_preparation="everything_unquantized", bfloat16_adapters="4bit_under_bf16",
            float32_adapters_under_zero3=True, builds_engine=True, evaluates=False, images="not yet",
            script_arguments="trl.scripts.grpo.GRPOScriptArguments",
            argument_names={"max_completion_length": "max_new_tokens"},
            missing_arguments=frozenset({"vllm_max_model_length"}),
        ),
        Method(
            name="gkd", trainer="GKDTrainer", config="GKDConfig", columns="messages", loss="jsd",
            rows_per_sample=1, reference="never", teacher=True, shares_vocabulary=True, needs_beta=True,
            generates=True, always_gathers=True, checkpointing_drops_cache=True, bounded_rows=True,
            runs_under_fsdp2=False, first_trl="0.11",
            defaults={"max_completion_length": 128, "beta": 0.5}, experimental=True, policy_loader="script",
            learning_rate="2e-05", disables_dropout=True, mixes_rows=True, evaluation_logits=True,
            keeps_teacher_cache=True, argument_names={"max_completion_length": "max_new_tokens"},
        ),
        # Its trainer is SFT's. Until TRL 1.12 `use_liger_kernel` replaced its loss.
        Method(
            name="gold", trainer="GOLDTrainer", config="GOLDConfig",
            columns="messages", loss="jsd", liger_layers="trainer",
            rows_per_sample=1, reference="never", teacher=True, keeps_teacher_cache=True, needs_beta=True,
            aligns_tokenizers=True, generates=True, generates_ahead=True, generates_by_batch=True, mixes_rows=True,
            always_gathers=True,
            bounded_rows=True, supports_vllm=True, row_long_engine=True, server_port=8001, runs_under_fsdp2=False,
            defaults={"max_completion_length": 128, "beta": 0.5, "vllm_gpu_memory_utilization": 0.9},
            experimental=True, first_trl="1.14", policy_loader="script", offloads_activations=True,
            images="not yet", learning_rate="1e-07", disables_dropout=True,
        ),
        # Its objective trains on samples alone: `lmbda` below 1 is refused (trl 1.16, experimental/iw_opd/
        # iw_opd_config.py). Until TRL 1.12 `use_liger_kernel` replaced its loss.
        Method(
            name="iw-opd", trainer="IWOPDTrainer", config="IWOPDConfig", columns="messages", loss="weighted",
            rows_per_sample=1, reference="never", teacher=True, needs_beta=True,
            generates=True, generates_ahead=True, generates_by_batch=True, always_gathers=True,
            bounded_rows=True, supports_vllm=True, server_port=8001, runs_under_fsdp2=False, defaults={"beta": 1.0},
            experimental=True, first_trl="1.14", policy_loader="script", learning_rate="1e-06", disables_dropout=True,
            bfloat16_adapters="never",
        ),
        Method(
            name="distillation", trainer="DistillationTrainer", config="DistillationConfig",
            loss="divergence", earlier_losses=(((1, 14), "jsd"),),
            rows_per_sample=1, reference="never", teacher=True, shares_vocabulary=True, needs_beta=True,
            generates=True, generates_ahead=True, supports_vllm=True, defaults={"beta": 1.0}, images="not yet",
            learning_rate="1e-06", disables_dropout=False, autocast=False, runs_under_fsdp2=False,
        ),
        # Its trainer is distillation's, with a forward pass of the whole model and a loss of its own.
        Method(
            name="server-distillation", trainer="ServerDistillationTrainer", config="ServerDistillationConfig",
            loss="scored", rows_per_sample=1, reference="never", teacher_server=True, needs_beta=True,
            generates=True, generates_ahead=True, supports_vllm=True, server_port=8001, defaults={"beta": 1.0},
            images="not yet", experimental=True, first_trl="1.10", learning_rate="1e-06", disables_dropout=False,
        ),
        # Samples of the student's server are scored by the teacher's. Rows are packed end to end; `use_liger_kernel`
        # raises; adapters and the attention are as AsyncGRPO's.
        Method(
            name="async-distillation", trainer="AsyncDistillationTrainer", config="AsyncDistillationConfig",
            loss="candidates", liger_layers="never", rows_per_sample=1, reference="never", teacher_server=True,
            teacher_port=8001,
            generates=True, generates_ahead=True, supports_vllm=True, completion_logits_only=True,
            asynchronous=True, evaluates=False, experimental=True, first_trl="1.16", policy_loader="config",
            bfloat16_adapters="never", learning_rate="1e-06", disables_dropout=False,
            defaults={
                "vllm": "server", "attn_implementation": "flash_attention_3", "max_completion_length": 2048,
            },
            fixed=frozenset({"vllm", "attn_implementation"}),
            missing_arguments=frozenset({
                "use_vllm", "vllm_mode", "vllm_gpu_memory_utilization", "vllm_tensor_parallel_size",
                "vllm_max_model_length", "attn_implementation", "ds3_gather_for_generation",
            }),
        ),
        # The teacher is the first policy, whose prompt has more in it: both prompts are cut at `max_prompt_length`.
        # TRL 1.0 to 1.5 have another trainer of this name, whose teacher is the policy and which takes no vLLM.
        Method(
            name="sdft", trainer="SDFTTrainer", config="SDFTConfig",
            columns="prompt and privileged_context", loss="most_likely",
            rows_per_sample=1, reference="always", reference_in_loss=True, experimental_reference=True, has_beta=False,
            generates=True, grouped_completions=True, completion_logits_only=True, supports_vllm=True,
            forward_if_outdated="unaligned", scores_at_once=True, defaults={"max_completion_length": 256},
            float32_reference_until=(1, 15),
            experimental=True, first_trl="1.6", policy_loader="script", learning_rate="5e-05", disables_dropout=True,
            kbit_preparation="everything_unquantized", bfloat16_adapters="4bit_under_bf16",
            float32_adapters_under_zero3=True, argument_names={"prompt_length": "max_prompt_length"},
        ),
        # At its defaults: samples alone are compared (`distillation_mode="sampled_token"`), with an average of the
        # policy. Until TRL 1.15 the teacher's dtype is its loader's.
        Method(
            name="sdpo", trainer="SDPOTrainer", config="SDPOConfig", loss="sampled",
            rows_per_sample=1, reference="always", reference_in_loss=True, experimental_reference=True,
            averaged_reference=True, longest_reprompt=10240, reward_model="optional", has_beta=False,
            generates=True, grouped_completions=True, completion_logits_only=True, supports_vllm=True,
            forward_if_outdated="unaligned", scores_at_once=True, defaults={"max_completion_length": 256},
            experimental=True, first_trl="1.16", policy_loader="script", learning_rate="5e-05", disables_dropout=True,
            kbit_preparation="everything_unquantized", bfloat16_adapters="4bit_under_bf16",
            float32_adapters_under_zero3=True, argument_names={"prompt_length": "max_prompt_length"},
            script_arguments="trl.scripts.grpo.GRPOScriptArguments",
        ),
        Method(
            name="ppo", trainer="PPOTrainer", config="PPOConfig", loss="log_softmax",
            rows_per_sample=1, reference="always", reward_model="always", value_model=True,
            generates=True, rows_at_once=64, scores_at_once=True, keeps_scores=True, liger_layers="never",
            # its own `train` switches no checkpointing on (trl 1.12, experimental/ppo/ppo_trainer.py)
            defaults={"max_completion_length": 53, "beta": 0.05, "gradient_checkpointing": False},
            fixed=frozenset({"gradient_checkpointing"}),
            experimental=True, policy_loader="script", first_trl="0.12", last_trl="1.12", evaluates=False,
            resumes=False, learning_rate="", disables_dropout=False, bfloat16_adapters="never", epochs_per_rollout=4,
            sampling_forwards=2, argument_names={"max_completion_length": "response_length", "beta": "kl_coef"},
            missing_arguments=frozenset({"reward_model_name_or_path"}), reward_model_argument="reward_model_path",
        ),
    )
}  # fmt: skip
# Methods for which sharded 4-bit weights are planned.
SHARDS_QLORA: tuple[MethodName, ...] = tuple(name for name, row in METHODS.items() if row.shards_qlora)
assert tuple(METHODS) == get_args(MethodName), "every method has one row, in the order of MethodName"


# The method of each TRL config class, by the class's name.
METHOD_OF = {row.config: name for name, row in METHODS.items()}


def method_of_config(config: type, advice: str) -> MethodName:
    """Return the method of a class of configs: TRL's own, or a user's one that inherits from it.

    The first class of TRL among its ancestors decides: a GOLDConfig is an SFTConfig, but no config of SFT.

    Raises:
        InputError: it is no config of a TRL method that is planned. The message ends with the advice.
    """
    for ancestor in config.__mro__:
        if ancestor.__name__ in METHOD_OF:
            return METHOD_OF[ancestor.__name__]
        if ancestor.__module__.partition(".")[0] == "trl":
            break
    raise InputError(
        f"{config.__name__} is no config of a TRL method that is planned, so the loss and the passes are not known. "
        f"{advice}"
    )


# A release as PyPI writes it: it is a line of requirements.txt and of scripts, where it must not begin another one.
RELEASE = re.compile(
    r"([0-9]{1,4})\.([0-9]{1,4})(?:\.[0-9A-Za-z]{1,16}){0,3}(?:\+[0-9A-Za-z.]{1,40})?"
)  # a local part too


@lru_cache(maxsize=64)
def release(version: str) -> Release:
    """Major and minor number of a TRL release: `"1.16.0"` -> `(1, 16)`.

    Raises:
        InputError: the text is not a release.
    """
    match = RELEASE.fullmatch(version)
    if match is None:
        raise InputError(f"{shortened(version)!r} is no TRL release. Give one such as {NEWEST_TRL}.")
    return int(match[1]), int(match[2])


@lru_cache(maxsize=256)
def row_of(method: MethodName, trl_version: str) -> Method:
    """Return the row of a method in a release of TRL."""
    return METHODS[method].in_release(trl_version)

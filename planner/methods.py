"""The table of TRL methods (`METHODS`), with the differences between TRL releases."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from planner.errors import InputError, shortened

MethodName = Literal[
    "sft", "dpo", "kto", "orpo", "cpo", "reward", "grpo", "rloo", "online-dpo", "gkd", "distillation", "ppo"
]
Loss = Literal[
    "fused",  # TRL >= 1.15, `ChunkedLogProbFunction` (trl/kernels/chunked_logprob.py): builds no logits
    "chunked_nll",  # TRL 1.5-1.14 SFT: 256 labelled tokens' logits at a time
    "logits",  # the whole [rows, tokens, vocabulary], then selective_log_softmax
    "logits_cross_entropy",  # the whole logits in fp32 through ForCausalLMLoss
    "log_softmax",  # online DPO: a log_softmax over the completion's logits besides the logits
    "divergence",  # distillation: fused student and teacher tiles
    "jsd",  # GKD: generalized Jensen-Shannon over both models' whole logits
    "liger",  # fused linear cross entropy: logits one chunk at a time, gradients in the forward pass
    "score",  # reward: one number a row
]
Release = tuple[int, int]

# Methods whose backbones run in the dtype of the weights even with `bf16`, outside the forward that accelerate wraps in
# autocast. Source: trl 1.16, trainer/distillation_trainer.py:1838-1862 (`_forward_redirection` replaces that forward).
WITHOUT_AUTOCAST: tuple[MethodName, ...] = ("distillation",)

NEWEST_TRL = "1.16"  # the newest release whose defaults and code paths are counted
OLDEST_TRL = "1.0"  # the oldest one; earlier releases are planned as if they were this one
# From this release on `use_liger_kernel` changes the kernels of the layers, not the loss (trl 1.16,
# sft_trainer.py:1134).
LIGER_LEAVES_THE_LOSS: Release = (1, 15)


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """One row of the table `METHODS`: which models are loaded, which passes run, how batches are made.

    `defaults`: Candidate fields whose default in the method's config class differs from that of `Candidate`.
    """

    name: MethodName
    trainer: str  # class name in TRL
    config: str  # class name in TRL
    loss: Loss  # of the newest release
    earlier_losses: tuple[tuple[Release, Loss], ...] = ()  # (last release that builds it, loss), oldest first
    liger_loss: bool = False  # before `LIGER_LEAVES_THE_LOSS`, use_liger_kernel replaces the loss
    rows_per_sample: int  # rows of the policy's forward for each of per_device_train_batch_size
    smallest_batch: int = 1  # samples a process at least
    defaults: Mapping[str, object] = field(default_factory=dict, hash=False)  # Candidate fields

    # other models
    reference: Literal["never", "always", "beta"]  # a frozen copy of the policy; "beta": only if beta is not 0
    precomputes_reference: bool = False  # precompute_ref_log_probs exists
    reference_in_loss: bool = False  # the reference's forward runs while the policy's graph is alive
    # The reference's weights need no gradient, so that autocast keeps no copies of them, and its forward pass returns a
    # KV cache. Source: trl 1.16, experimental/utils.py, `create_reference_model`;
    # experimental/online_dpo/online_dpo_trainer.py, `_forward` (does not set `use_cache`).
    experimental_reference: bool = False
    reward_model: Literal["none", "optional", "always"] = "none"
    value_model: bool = False
    teacher: bool = False
    has_beta: bool = True
    needs_beta: bool = False  # a beta of 0 has no loss, so 0 means "not set"
    extra_forward_rows: int = 0  # rows of a second, gradient-free forward beside the policy's (KTO's KL batch)

    # generation
    generates: bool  # the policy samples completions in the training loop
    grouped_completions: bool = False  # num_generations, steps_per_generation and num_iterations exist
    generates_ahead: bool = False  # samples the completions of a whole optimizer step at once
    bounded_rows: bool = False  # max_length bounds prompt and completion together
    completion_logits_only: bool = False  # a loss that builds logits builds those of completions (logits_to_keep)
    supports_vllm: bool = False
    always_gathers: bool = False  # ds3_gather_for_generation does not exist, and ZeRO-3 gathers as if it were true
    # `generate` keeps no KV cache under gradient checkpointing: trl 1.16, experimental/gkd/gkd_trainer.py:221 and
    # experimental/online_dpo/online_dpo_trainer.py:562 (`use_cache`).
    checkpointing_drops_cache: bool = False

    # batches and activations
    packs: bool = False  # packing exists
    padding_free: bool = False  # padding_free exists
    offloads_activations: bool = False  # activation_offloading exists
    counts_images: bool = False  # images in its rows are counted (TRL's GRPO and RLOO take images, too)

    experimental: bool = False  # in trl.experimental: no `trl` command, no quantization_config argument
    last_trl: str = "current"  # the last TRL release that has it


# Source of the rows: trl 1.16, trainer/*_trainer.py, trainer/*_config.py and experimental/*/; PPO: trl 1.12,
# experimental/ppo. `earlier_losses`: trl's CHANGELOG and trainer/utils.py `selective_log_softmax` of each release;
# `chunked_nll` became SFT's default in 1.5, the fused head came to every stable trainer with 1.15.
# `smallest_batch` of KTO: trainer/kto_trainer.py, "Actual (not effective) batch size must be > 1".
# Prompts have no limit in TRL 1.16, so `prompt_length` describes the data: 512 tokens unless --prompt-length is given;
# with `bounded_rows` the rest of max_length.
METHODS: dict[MethodName, Method] = {
    method.name: method
    for method in (
        Method(
            name="sft", trainer="SFTTrainer", config="SFTConfig",
            loss="fused", earlier_losses=(((1, 4), "logits_cross_entropy"), ((1, 14), "chunked_nll")), liger_loss=True,
            rows_per_sample=1, reference="never", has_beta=False, generates=False,
            packs=True, padding_free=True, offloads_activations=True, counts_images=True,
        ),
        Method(
            name="dpo", trainer="DPOTrainer", config="DPOConfig",
            loss="fused", earlier_losses=(((1, 14), "logits"),), liger_loss=True,
            rows_per_sample=2, reference="always", precomputes_reference=True, reference_in_loss=True, needs_beta=True,
            generates=False, padding_free=True, offloads_activations=True, counts_images=True, defaults={"beta": 0.1},
        ),
        Method(
            name="kto", trainer="KTOTrainer", config="KTOConfig",
            loss="fused", earlier_losses=(((1, 14), "logits"),), liger_loss=True,
            rows_per_sample=1, smallest_batch=2, extra_forward_rows=1,
            reference="always", precomputes_reference=True, reference_in_loss=True, needs_beta=True,
            generates=False, offloads_activations=True, defaults={"beta": 0.1},
        ),
        Method(
            name="orpo", trainer="ORPOTrainer", config="ORPOConfig", loss="logits",
            rows_per_sample=2, reference="never", needs_beta=True, generates=False, defaults={"beta": 0.1},
            experimental=True,
        ),
        Method(
            name="cpo", trainer="CPOTrainer", config="CPOConfig", loss="logits",
            rows_per_sample=2, reference="never", needs_beta=True, generates=False, defaults={"beta": 0.1},
            experimental=True,
        ),
        Method(
            name="reward", trainer="RewardTrainer", config="RewardConfig", loss="score",
            rows_per_sample=2, reference="never", has_beta=False, generates=False, offloads_activations=True,
        ),
        Method(
            name="grpo", trainer="GRPOTrainer", config="GRPOConfig",
            loss="fused", earlier_losses=(((1, 14), "logits"),), liger_loss=True,
            rows_per_sample=1, reference="beta", reward_model="optional",
            generates=True, grouped_completions=True, completion_logits_only=True, supports_vllm=True,
        ),
        Method(
            name="rloo", trainer="RLOOTrainer", config="RLOOConfig",
            loss="fused", earlier_losses=(((1, 14), "logits"),),
            rows_per_sample=1, reference="beta", reward_model="optional",
            generates=True, grouped_completions=True, completion_logits_only=True, supports_vllm=True,
            defaults={"num_generations": 2, "beta": 0.05},
        ),
        Method(
            name="online-dpo", trainer="OnlineDPOTrainer", config="OnlineDPOConfig", loss="log_softmax",
            rows_per_sample=2, reference="always", reference_in_loss=True, needs_beta=True, reward_model="optional",
            experimental_reference=True, generates=True, checkpointing_drops_cache=True, bounded_rows=True,
            supports_vllm=True, experimental=True,
            defaults={"max_length": 512, "max_completion_length": 64, "beta": 0.1},
        ),
        Method(
            name="gkd", trainer="GKDTrainer", config="GKDConfig", loss="jsd",
            rows_per_sample=1, reference="never", teacher=True, needs_beta=True,
            generates=True, always_gathers=True, checkpointing_drops_cache=True, bounded_rows=True,
            defaults={"max_completion_length": 128, "beta": 0.5}, experimental=True,
        ),
        Method(
            name="distillation", trainer="DistillationTrainer", config="DistillationConfig",
            loss="divergence", earlier_losses=(((1, 14), "jsd"),),
            rows_per_sample=1, reference="never", teacher=True, needs_beta=True,
            generates=True, generates_ahead=True, supports_vllm=True, defaults={"beta": 1.0},
        ),
        Method(
            name="ppo", trainer="PPOTrainer", config="PPOConfig", loss="logits",
            rows_per_sample=1, reference="always", reward_model="always", value_model=True,
            generates=True, defaults={"max_completion_length": 53, "beta": 0.05}, experimental=True, last_trl="1.12",
        ),
    )
}  # fmt: skip


# The method of each TRL config class, by the class's name.
METHOD_OF = {row.config: name for name, row in METHODS.items()}


def method_of_config(config: type, advice: str) -> MethodName:
    """Return the method of a class of configs: TRL's own, or one that inherits from it.

    Raises:
        InputError: it is no config of a TRL method. The message ends with the advice.
    """
    for ancestor in config.__mro__:
        if ancestor.__name__ in METHOD_OF:
            return METHOD_OF[ancestor.__name__]
    raise InputError(
        f"{config.__name__} is no config of a TRL method, so the loss and the passes are not known. {advice}"
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


# Settings that only some methods have, as Candidate fields.
# Source: trl 1.16, trainer/*_config.py and experimental/*/*_config.py.
METHOD_SETTINGS: dict[str, Callable[[Method], bool]] = {
    "packing": lambda method: method.packs,
    "padding_free": lambda method: method.padding_free,
    "activation_offloading": lambda method: method.offloads_activations,
    "precompute_ref_log_probs": lambda method: method.precomputes_reference,
    "beta": lambda method: method.has_beta,
    "num_generations": lambda method: method.grouped_completions,
    "steps_per_generation": lambda method: method.grouped_completions,
    "num_iterations": lambda method: method.grouped_completions,
    "reward_model": lambda method: method.reward_model != "none",
    "teacher_model": lambda method: method.teacher,
    "ds3_gather_for_generation": lambda method: method.generates and not method.always_gathers,
    "vllm_gpu_memory_utilization": lambda method: method.supports_vllm,
    "vllm_tensor_parallel_size": lambda method: method.supports_vllm,
    "vllm_data_parallel_size": lambda method: method.supports_vllm,
    "vllm_max_model_length": lambda method: method.supports_vllm,
    "vllm_enable_sleep_mode": lambda method: method.supports_vllm,
    "max_length": lambda method: not method.generates or method.bounded_rows,
    "prompt_length": lambda method: method.generates,
    "max_completion_length": lambda method: method.generates,
}
# The settings of `METHOD_SETTINGS` that describe the data. A method without such a limit ignores them.
LENGTH_SETTINGS = ("max_length", "prompt_length", "max_completion_length")


def has_setting(method: MethodName, field: str) -> bool:
    """Return whether a method has a setting; every method has the fields that are not in `METHOD_SETTINGS`."""
    return field not in METHOD_SETTINGS or METHOD_SETTINGS[field](METHODS[method])

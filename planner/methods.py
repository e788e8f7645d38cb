"""The methods: one row each. What models are resident, which passes run, how many rows a forward sees, which loss is built."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from planner.errors import InputError

MethodName = Literal[
    "sft", "dpo", "kto", "orpo", "cpo", "reward", "grpo", "rloo", "online-dpo", "gkd", "distillation", "ppo"
]
Loss = Literal[
    "fused",  # TRL >= 1.15 ChunkedLogProbFunction: only labelled tokens, tiles of 4096 x 32768, no logits (internals.md 1.3)
    "chunked_nll",  # TRL 1.5-1.14 SFT: 256 labelled tokens' logits at a time
    "logits",  # the whole [rows, tokens, vocabulary], then selective_log_softmax
    "logits_cross_entropy",  # the whole logits in fp32 through ForCausalLMLoss
    "log_softmax",  # online DPO: a log_softmax over the completion's logits besides the logits
    "divergence",  # distillation: fused student and teacher tiles
    "jsd",  # GKD: generalized Jensen-Shannon over both models' whole logits
    "liger",  # fused linear cross entropy: logits one chunk at a time, gradients in the forward pass
    "score",  # reward: one number a row
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """One row of the table below.

    `rows_per_sample` rows of the policy's forward for each of `per_device_train_batch_size`; `reference`: whether a frozen
    copy of the policy is needed ("beta": when beta is not 0); `generates`: the policy samples completions in the loop.
    """

    name: MethodName
    trainer: str  # class name in TRL
    config: str
    loss: Loss
    rows_per_sample: int
    reference: Literal["never", "always", "beta"]
    generates: bool
    reward_model: Literal["none", "optional", "always"] = "none"
    value_model: bool = False
    teacher: bool = False
    experimental: bool = False
    last_trl: str = "current"  # the last TRL release that has it
    extra_forward_rows: int = 0  # rows of a second, gradient-free forward beside the policy's (KTO's KL batch)
    supports_vllm: bool = False


METHODS: dict[MethodName, Method] = {
    method.name: method
    for method in (
        # Source: trl 1.16 trainer/*_trainer.py and experimental/*/; tabled in docs of each trainer. PPO: trl 1.12 experimental/ppo.
        Method(
            name="sft",
            trainer="SFTTrainer",
            config="SFTConfig",
            loss="fused",
            rows_per_sample=1,
            reference="never",
            generates=False,
        ),
        Method(
            name="dpo",
            trainer="DPOTrainer",
            config="DPOConfig",
            loss="fused",
            rows_per_sample=2,
            reference="always",
            generates=False,
        ),
        Method(
            name="kto",
            trainer="KTOTrainer",
            config="KTOConfig",
            loss="fused",
            rows_per_sample=1,
            reference="always",
            generates=False,
            extra_forward_rows=1,
        ),
        Method(
            name="orpo",
            trainer="ORPOTrainer",
            config="ORPOConfig",
            loss="logits",
            rows_per_sample=2,
            reference="never",
            generates=False,
            experimental=True,
        ),
        Method(
            name="cpo",
            trainer="CPOTrainer",
            config="CPOConfig",
            loss="logits",
            rows_per_sample=2,
            reference="never",
            generates=False,
            experimental=True,
        ),
        Method(
            name="reward",
            trainer="RewardTrainer",
            config="RewardConfig",
            loss="score",
            rows_per_sample=2,
            reference="never",
            generates=False,
        ),
        Method(
            name="grpo",
            trainer="GRPOTrainer",
            config="GRPOConfig",
            loss="fused",
            rows_per_sample=1,
            reference="beta",
            generates=True,
            reward_model="optional",
            supports_vllm=True,
        ),
        Method(
            name="rloo",
            trainer="RLOOTrainer",
            config="RLOOConfig",
            loss="fused",
            rows_per_sample=1,
            reference="beta",
            generates=True,
            reward_model="optional",
            supports_vllm=True,
        ),
        Method(
            name="online-dpo",
            trainer="OnlineDPOTrainer",
            config="OnlineDPOConfig",
            loss="log_softmax",
            rows_per_sample=2,
            reference="always",
            generates=True,
            reward_model="optional",
            experimental=True,
            supports_vllm=True,
        ),
        Method(
            name="gkd",
            trainer="GKDTrainer",
            config="GKDConfig",
            loss="jsd",
            rows_per_sample=1,
            reference="never",
            generates=True,
            teacher=True,
            experimental=True,
        ),
        Method(
            name="distillation",
            trainer="DistillationTrainer",
            config="DistillationConfig",
            loss="divergence",
            rows_per_sample=1,
            reference="never",
            generates=True,
            teacher=True,
            supports_vllm=True,
        ),
        Method(
            name="ppo",
            trainer="PPOTrainer",
            config="PPOConfig",
            loss="logits",
            rows_per_sample=1,
            reference="always",
            generates=True,
            reward_model="always",
            value_model=True,
            experimental=True,
            last_trl="1.12",
        ),
    )
}


# Which loss a release builds where it is not the newest's. The first row whose release is not older than the one in force counts.
# Source: trl's CHANGELOG and trainer/sft_trainer.py of each release: `chunked_nll` became the default of SFT in 1.5, the fused head of
# every stable trainer came with 1.15; before, the preference and RL trainers built logits (trainer/utils.py, selective_log_softmax).
BUILT_LOGITS: dict[MethodName, Loss] = {
    "dpo": "logits",
    "kto": "logits",
    "grpo": "logits",
    "rloo": "logits",
    "distillation": "jsd",
}


ERAS: tuple[tuple[tuple[int, int], dict[MethodName, Loss]], ...] = (
    ((1, 4), {**BUILT_LOGITS, "sft": "logits_cross_entropy"}),
    ((1, 14), {**BUILT_LOGITS, "sft": "chunked_nll"}),
)


FUSED_SINCE = (
    1,
    15,
)  # from here on use_liger_kernel changes the layers' kernels only (trl 1.16, sft_trainer.py:1134-1140)


@lru_cache(maxsize=64)
def release(version: str) -> tuple[int, int]:
    """`"1.16"` or `"1.16.0"` as numbers that compare.

    Raises:
        InputError: the text is no release.
    """
    parts = version.split(".")
    if len(parts) < 2 or not all(part.isdecimal() for part in parts[:2]):
        raise InputError(f"{version!r} is no TRL release. Give one such as 1.16.")
    return int(parts[0]), int(parts[1])


# Samples a process that a trainer asks for at least (trl 1.16, trainer/kto_trainer.py: "Actual (not effective) batch size must be > 1").
SMALLEST_BATCH: dict[MethodName, int] = {"kto": 2}


# What a method's own config sets apart from Candidate's defaults.
# Source: trl 1.16, trainer/grpo_config.py, rloo_config.py, distillation_config.py, experimental/online_dpo/online_dpo_config.py,
# experimental/gkd/gkd_config.py; trl 1.12, experimental/ppo/ppo_config.py (response_length 53). Prompts have no limit in TRL 1.16, so
# their length is a statement about the data: 512 tokens unless --prompt-length says otherwise; where max_length bounds both, the rest of it.
METHOD_DEFAULTS: dict[MethodName, dict[str, object]] = {
    "dpo": {"beta": 0.1},
    "kto": {"beta": 0.1},
    "orpo": {"beta": 0.1},
    "cpo": {"beta": 0.1},
    "rloo": {"num_generations": 2, "beta": 0.05},
    "online-dpo": {"max_length": 512, "max_completion_length": 64, "beta": 0.1},
    "gkd": {"max_completion_length": 128, "beta": 0.5},
    "distillation": {"beta": 1.0},
    "ppo": {"max_completion_length": 53, "beta": 0.05},
}

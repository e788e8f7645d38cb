"""Tools whose configs are recognized by their keys and refused by name, with the flags that say the same."""

import shlex
from collections.abc import Iterator, Mapping

from msgspec import Struct

from planner.errors import InputError, shortened
from planner.methods import METHODS, MethodName


class UnreadTool(Struct, frozen=True, kw_only=True):
    """A tool whose configs are not read.

    `marks`: keys of which no other tool's config has one. `flags`: options of the command and the keys that say them.
    `method`: keys whose value is a method's name; `usual_method`: that of a config without. A dot in a key leads into a
    mapping: `training.batch_size`.
    """

    name: str
    marks: tuple[str, ...]
    flags: Mapping[str, tuple[str, ...]]
    method: tuple[str, ...] = ()
    usual_method: MethodName = "sft"


# Source: torchtune recipes/configs/llama3_1/8B_lora.yaml; verl verl/trainer/config/sft_trainer.yaml, ppo_trainer.yaml;
# unsloth studio/backend/assets/configs/model_defaults, skills/unsloth/assets; ms-swift examples/yaml; LLaMA-Factory
# examples/v1.
UNREAD: tuple[UnreadTool, ...] = (
    UnreadTool(
        name="torchtune",
        marks=("model._component_", "tokenizer._component_", "optimizer._component_", "checkpointer._component_"),
        flags={
            "--model": ("checkpointer.checkpoint_dir",),
            "--max-length": ("tokenizer.max_seq_len",),
            "--batch-size": ("batch_size",),
            "--lora-r": ("model.lora_rank",),
            "--set gradient_accumulation_steps": ("gradient_accumulation_steps",),
        },
    ),
    UnreadTool(
        name="verl",
        marks=("actor_rollout_ref",),
        flags={
            "--model": ("actor_rollout_ref.model.path",),
            "--prompt-length": ("data.max_prompt_length",),
            "--max-completion-length": ("data.max_response_length",),
            "--set num_generations": ("actor_rollout_ref.rollout.n",),
        },
        method=("algorithm.adv_estimator",),
        usual_method="grpo",
    ),
    UnreadTool(
        name="verl",
        marks=("model.partial_pretrain", "data.train_files"),
        flags={
            "--model": ("model.partial_pretrain", "model.path"),
            "--max-length": ("data.max_length",),
            "--batch-size": ("data.micro_batch_size_per_gpu",),
            "--effective-batch-size": ("data.train_batch_size",),
        },
    ),
    UnreadTool(
        name="Unsloth",
        marks=("training.max_seq_length", "training.training_type", "lora.use_loftq", "use_gradient_checkpointing"),
        flags={
            "--model": ("model", "model_name"),
            "--max-length": ("training.max_seq_length", "max_seq_length"),
            "--batch-size": ("training.batch_size", "per_device_train_batch_size"),
            "--lora-r": ("lora.lora_r", "r"),
            "--set gradient_accumulation_steps": (
                "training.gradient_accumulation_steps", "gradient_accumulation_steps",
            ),
        },
    ),
    UnreadTool(
        name="LLaMA-Factory v1",
        marks=("model_class", "dist_config", "kernel_config", "sample_backend"),
        flags={
            "--model": ("model",),
            "--max-length": ("cutoff_len",),
            "--batch-size": ("micro_batch_size",),
            "--lora-r": ("peft_config.r",),
            "--effective-batch-size": ("global_batch_size",),
        },
    ),
    UnreadTool(
        name="ms-swift",
        marks=("tuner_type", "train_type", "rlhf_type", "split_dataset_ratio", "attn_impl", "model_author"),
        flags={
            "--model": ("model",),
            "--max-length": ("max_length",),
            "--batch-size": ("per_device_train_batch_size", "micro_batch_size"),
            "--lora-r": ("lora_rank",),
            "--set gradient_accumulation_steps": ("gradient_accumulation_steps",),
            "--effective-batch-size": ("global_batch_size",),
        },
        method=("rlhf_type",),
    ),
)  # fmt: skip
GPUS = "--gpus 1xA100-80G"  # an example: no such file says which


def refuse_unread(keys: Mapping[str, object], file: str) -> None:
    """Refuse a config of a tool that is not read.

    Raises:
        InputError: names the tool, and the flags that say what the file says.
    """
    for tool in UNREAD:
        if any(value_at(keys, mark) is not None for mark in tool.marks):
            flags = " ".join(_flags(tool, keys))
            raise InputError(
                f"{file} is a config of {tool.name}, which plan does not read. Say it in flags, with your GPUs: plan "
                f"{flags} {GPUS}, or in a config of TRL."
            )


def value_at(keys: Mapping[str, object], name: str) -> object:
    """Return the value of a key, where a dot leads into a mapping; None if there is none."""
    value: object = keys
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _flags(tool: UnreadTool, keys: Mapping[str, object]) -> Iterator[str]:
    for flag, names in tool.flags.items():
        value = next((each for each in (value_at(keys, name) for name in names) if each), None)
        if isinstance(value, (str, int)):
            yield f"{flag}{'=' if flag.startswith('--set') else ' '}{shlex.quote(shortened(value))}"
    named = (str(value_at(keys, name)).lower() for name in tool.method)
    yield f"--method {next((name for name in named if name in METHODS), tool.usual_method)}"

"""A real TRL trainer for a candidate, whose models have shapes but no weights, and data of the candidate's longest rows."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

import datasets
import torch
import transformers
import trl
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerFast

from planner.candidate import Candidate
from planner.model import ModelShape

STEPS = 2  # the first step makes the optimizer's states, the second runs beside them
Device = Literal["fake", "real"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WORD, PAD, EOS = 1, 0, 2  # token ids of the dry run's tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A trainer ready to train, and every model that is resident while it does."""

    trainer: Any
    models: tuple[torch.nn.Module, ...]


@contextmanager
def models_stay_where_they_are() -> Iterator[None]:
    """Weightless models cannot be moved to a device: `Module.to` changes their dtype only."""
    move = torch.nn.Module.to

    def cast(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        _, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        return module if dtype is None else move(module, dtype)

    with mock.patch.object(torch.nn.Module, "to", cast):
        yield


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer in which every word is one token; it needs no file and no network."""
    words = Tokenizer(WordLevel({"<pad>": PAD, "word": WORD, "<eos>": EOS}, unk_token="word"))
    words.pre_tokenizer = Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="word")
    made.padding_side = "left"
    return made


def build_model(shape: ModelShape, candidate: Candidate, device: Device, auto_class: str = "AutoModelForCausalLM", **settings: Any) -> PreTrainedModel:
    """The model of a shape's config in the candidate's dtype, on the meta device unless it shall be real."""
    fields = dict(shape.config)
    config = AutoConfig.for_model(str(fields.pop("model_type")), **fields)
    for name, value in settings.items():
        setattr(config, name, value)
    config.pad_token_id = PAD
    auto = getattr(transformers, auto_class)
    with torch.device("meta" if device == "fake" else "cpu"):
        model = auto.from_config(config, dtype=DTYPES[candidate.dtype], attn_implementation=candidate.attn_implementation)
    model.name_or_path = shape.id
    return model


def common_settings(candidate: Candidate) -> dict[str, Any]:
    """The training arguments that every method has, named as the candidate names them."""
    checkpointing: dict[str, Any] = {}
    if candidate.checkpoint_every_n_layers > 1:
        checkpointing["every_n_layers"] = candidate.checkpoint_every_n_layers
    if candidate.checkpoint_offload:
        checkpointing["offload"] = True
    return {
        "output_dir": tempfile.gettempdir(),
        "per_device_train_batch_size": candidate.per_device_train_batch_size,
        "gradient_accumulation_steps": candidate.gradient_accumulation_steps,
        "max_steps": STEPS,
        "gradient_checkpointing": candidate.gradient_checkpointing,
        "gradient_checkpointing_kwargs": checkpointing or None,
        "bf16": candidate.precision == "bf16",
        "fp16": candidate.precision == "fp16",
        "optim": candidate.optim,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


def lora(candidate: Candidate) -> LoraConfig | None:
    if candidate.tuning != "lora":
        return None
    targets = candidate.lora_target_modules
    return LoraConfig(
        r=candidate.lora_r,
        target_modules="all-linear" if targets == ("all-linear",) else list(targets),
        lora_dropout=candidate.lora_dropout,
        task_type="SEQ_CLS" if candidate.method == "reward" else "CAUSAL_LM",
    )


def rows(candidate: Candidate, columns: dict[str, Any]) -> datasets.Dataset:
    """A dataset of equal rows, enough for all steps."""
    count = STEPS * candidate.per_device_train_batch_size * candidate.gradient_accumulation_steps
    return datasets.Dataset.from_dict({name: [value] * count for name, value in columns.items()})


def sft(candidate: Candidate, device: Device) -> Stage:
    ids = [WORD] * candidate.max_length
    args = trl.SFTConfig(
        **common_settings(candidate), max_length=candidate.max_length, packing=candidate.packing, padding_free=candidate.padding_free,
        activation_offloading=candidate.activation_offloading, dataset_kwargs={"skip_prepare_dataset": True},
    )  # fmt: skip
    model = build_model(candidate.model, candidate, device, use_cache=False)
    trainer = trl.SFTTrainer(
        model=model, args=args, train_dataset=rows(candidate, {"input_ids": ids, "labels": ids}), processing_class=tokenizer(), peft_config=lora(candidate)
    )
    return Stage(trainer=trainer, models=(trainer.model,))


METHOD_STAGES = {"sft": sft}

"""The models of a dry run and their tokenizer: of their real shapes, without weights."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import transformers
from peft.tuners.tuners_utils import BaseTuner
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerFast

from planner.candidate import Candidate
from planner.models.shape import ModelShape
from probes.step.stage import DTYPES, EOS, PAD, WORD
from probes.substitution import substituted

Device = Literal["fake", "real"]


@contextmanager
def adapters_without_weights() -> Iterator[None]:
    """PEFT makes its matrices on the CPU and fills them before it moves them to where the model is: here they start there, unfilled."""
    inject = BaseTuner.inject_adapter

    def inject_on_meta(*args: Any, **kwargs: Any) -> None:
        with torch.device("meta"):
            inject(*args, **kwargs)

    def unfilled(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return tensor

    with (
        substituted(BaseTuner, "inject_adapter", inject_on_meta),
        substituted(torch.nn.init, "kaiming_uniform_", unfilled),
        substituted(torch.nn.init, "zeros_", unfilled),
    ):
        yield


@contextmanager
def models_stay_where_they_are() -> Iterator[None]:
    """Weightless models cannot be moved to a device: `Module.to` changes their dtype only."""
    move = torch.nn.Module.to

    def cast(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        _, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        return module if dtype is None else move(module, dtype)

    with substituted(torch.nn.Module, "to", cast):
        yield


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer in which every word is one token; it needs no file and no network."""
    words = Tokenizer(WordLevel({"<pad>": PAD, "<unused>": 1, "<eos>": EOS, "word": WORD}, unk_token="word"))
    words.pre_tokenizer = Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="word")
    made.padding_side = "left"
    return made


def build_model(
    shape: ModelShape, candidate: Candidate, device: Device, auto_class: str, **settings: Any
) -> PreTrainedModel:
    """The model of a shape's config in the candidate's dtype, on the meta device unless it shall be real."""
    fields = dict(shape.config)
    config = AutoConfig.for_model(str(fields.pop("model_type")), **fields)
    for name, value in settings.items():
        setattr(config, name, value)
    config.pad_token_id = PAD
    auto = getattr(transformers, auto_class)
    attention = (
        None if candidate.attn_implementation == "sdpa" else candidate.attn_implementation
    )  # None: sdpa where the model has it, else eager
    with torch.device("meta" if device == "fake" else "cpu"):
        model = auto.from_config(config, dtype=DTYPES[candidate.dtype], attn_implementation=attention)
    model.name_or_path = shape.id
    return model


def policy(candidate: Candidate, device: Device) -> PreTrainedModel:
    """The model that is trained; it alone is quantized."""
    if candidate.method == "reward":
        model = _with_score(candidate.model, candidate, device)
    else:
        model = build_model(candidate.model, candidate, device, candidate.model.auto_class)
    if candidate.quantization != "none":
        from probes.dryrun.cuda.quantized import quantize

        quantize(model, candidate.quantization, DTYPES[candidate.dtype])
    return model


def _with_score(shape: ModelShape, candidate: Candidate, device: Device) -> PreTrainedModel:
    """A model that says one number a row."""
    return build_model(shape, candidate, device, "AutoModelForSequenceClassification", num_labels=1)


def teacher(candidate: Candidate, device: Device) -> PreTrainedModel:
    shape = candidate.teacher_model or candidate.model
    return build_model(shape, candidate, device, shape.auto_class)


def rewards(candidate: Candidate, device: Device) -> list[Any]:
    """The reward model, or a function where there is none: no two completions are worth the same."""
    if candidate.reward_model is not None:
        return [_with_score(candidate.reward_model, candidate, device)]

    def spread(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        return [float(index) for index in range(len(completions))]

    return [spread]


def reward_tokenizer(candidate: Candidate) -> list[PreTrainedTokenizerFast] | None:
    return None if candidate.reward_model is None else [tokenizer()]


@contextmanager
def references(candidate: Candidate, device: Device, module: str) -> Iterator[None]:
    """The reference model that the trainer would load from the policy's path is built without weights instead."""

    def load(_: str, **__: Any) -> PreTrainedModel:
        return build_model(candidate.model, candidate, device, candidate.model.auto_class)

    with substituted(importlib.import_module(f"trl.trainer.{module}"), "create_model_from_path", load):
        yield

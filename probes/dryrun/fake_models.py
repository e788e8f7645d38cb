"""The models of a dry run and their tokenizer: of their real shapes, without weights."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import transformers
from peft import prepare_model_for_kbit_training
from peft.tuners.tuners_utils import BaseTuner
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from planner.candidate import Candidate
from planner.models.shape import ModelShape
from probes.step.built_trainer import DTYPES, EOS, PAD, WORD
from probes.substitution import substituted
from probes.trainers import transformers_config

Device = Literal["fake", "real"]  # "real": models have weights on the CPU, for tests


@contextmanager
def adapters_without_weights() -> Iterator[None]:
    """Create PEFT's matrices on the meta device inside the block, and leave them without numbers.

    PEFT itself creates and fills them on the CPU before it moves them to the model's device.
    """
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
    """Let `Module.to` change only the dtype inside the block: models without weights cannot be moved to a device."""
    move = torch.nn.Module.to

    def cast(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        _, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        return module if dtype is None else move(module, dtype)

    with substituted(torch.nn.Module, "to", cast):
        yield


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one word, which needs no file and no network; every text is that word repeated."""
    word = f"w{WORD}"  # named as in probes/trainers.py, `text`
    words = Tokenizer(WordLevel({"<pad>": PAD, "<unused>": 1, "<eos>": EOS, word: WORD}, unk_token=word))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token=word, padding_side="left"
    )


def build_model(
    shape: ModelShape, candidate: Candidate, device: Device, auto_class: str, *, dtype: str = "", **settings: Any
) -> PreTrainedModel:
    """Build a model from its shape's config: on the meta device, or with weights on the CPU.

    `dtype`: of its weights; empty: the candidate's. `settings`: attributes of the config that are set before, such as
    `num_labels`.
    """
    config = transformers_config(shape.config)
    for name, value in settings.items():
        setattr(config, name, value)
    config.pad_token_id = PAD
    auto = getattr(transformers, auto_class)
    # None: sdpa if the model supports it, else eager
    attention = None if candidate.attn_implementation == "sdpa" else candidate.attn_implementation
    with torch.device("meta" if device == "fake" else "cpu"):
        model = auto.from_config(config, dtype=DTYPES[dtype or candidate.dtype], attn_implementation=attention)
    model.name_or_path = shape.id
    return model


def policy(candidate: Candidate, device: Device) -> PreTrainedModel:
    """Build the model that is trained. Only this one is quantized."""
    if candidate.method_row.head == "score":
        model = reward_model(candidate.model, candidate, device)
    else:
        model = build_model(candidate.model, candidate, device, candidate.model.auto_class)
    if candidate.quantization != "none":
        from probes.dryrun.cuda.quantized import quantize

        quantize(model, candidate.quantization, DTYPES[candidate.dtype])
        if candidate.prepare_model_for_kbit_training:
            model = prepare_model_for_kbit_training(model, candidate.gradient_checkpointing)
    return model


def reward_model(shape: ModelShape, candidate: Candidate, device: Device) -> PreTrainedModel:
    """Build a model that returns one number for each row."""
    return build_model(shape, candidate, device, "AutoModelForSequenceClassification", num_labels=1)


def teacher(candidate: Candidate, device: Device) -> PreTrainedModel:
    """Build the teacher model; a job that names none is taught by the policy's own shape."""
    shape = candidate.teacher_model or candidate.model
    return build_model(shape, candidate, device, shape.auto_class, dtype=candidate.teacher_load_dtype)


@contextmanager
def reference_without_weights(candidate: Candidate, device: Device) -> Iterator[None]:
    """Build the reference model without weights inside the block, instead of loading it from the policy's path.

    Source: trl 1.16, trainer/dpo_trainer.py, `DPOTrainer.__init__`, kto_trainer.py, `KTOTrainer.__init__`,
    grpo_trainer.py, `GRPOTrainer.__init__`; rloo_trainer.py alike.
    """

    def load(_: str, **__: Any) -> PreTrainedModel:
        return build_model(candidate.model, candidate, device, candidate.model.auto_class)

    module = importlib.import_module(f"trl.trainer.{candidate.method}_trainer")
    with substituted(module, "create_model_from_path", load):
        yield

"""Models of their real shapes, without weights."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from peft.tuners.tuners_utils import BaseTuner
from transformers import PreTrainedModel

from planner.candidate import Candidate
from planner.models.shape import ModelShape
from probes.layers.fake_tensors.arithmetic import FakeArithmetic
from probes.step.built_trainer import DTYPES, PAD
from probes.substitution import substituted
from probes.trainers import transformers_config


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the logs and warnings of the libraries inside the block: they are addressed to people who train."""
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(level)


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


def build_model(shape: ModelShape, candidate: Candidate) -> PreTrainedModel:
    """Build a model from its shape's config on the meta device."""
    config = transformers_config(shape.config)
    config.pad_token_id = PAD
    # None: sdpa if the model supports it, else eager
    attention = None if candidate.attn_implementation == "sdpa" else candidate.attn_implementation
    with torch.device("meta"):
        model: PreTrainedModel = getattr(transformers, shape.auto_class).from_config(
            config, dtype=DTYPES[candidate.dtype], attn_implementation=attention
        )
    return model


def policy(candidate: Candidate) -> PreTrainedModel:
    """Build the model that is trained, quantized as the candidate says."""
    model = build_model(candidate.model, candidate)
    if candidate.quantization_row.quantized:
        from probes.layers.cuda.quantized import quantize

        quantize(model, candidate.quantization, DTYPES[candidate.dtype])
    return model


def fake_weights(model: torch.nn.Module, arithmetic: FakeArithmetic) -> None:
    """Replace every parameter and buffer of a model by a fake one; tied weights stay tied."""
    fakes: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in fakes:
            new = arithmetic.fake(tensor)
            fakes[id(tensor)] = _parameter(new, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else new
        return fakes[id(tensor)]

    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            tensors.update({name: fake(tensor) for name, tensor in tensors.items() if tensor is not None})


def _parameter(tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    """Turn a tensor into a parameter in place, without the copy by `detach` in `torch.nn.Parameter(tensor)`.

    Source: torch 2.13, torch/nn/parameter.py, `Parameter.__new__`. Allowed because nobody else holds the tensor.
    """
    tensor._is_param = True
    return tensor.requires_grad_(requires_grad)

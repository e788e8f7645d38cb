"""What is around a dry run: no talk, no telemetry, and nothing that libraries do for who trains and loads models."""

import contextlib
import importlib.metadata
import logging
import re
import sys
import warnings
from collections.abc import Iterator
from functools import lru_cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

import accelerate
import datasets
import huggingface_hub
import torch

_METADATA = lru_cache(maxsize=64)(importlib.metadata.metadata)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """The trainers' progress bars, advice, deprecations and telemetry (trl 1.16, trainer/base_trainer.py:82) are about who trains, not about who plans."""
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    datasets.disable_progress_bars()
    with warnings.catch_warnings(), mock.patch.object(huggingface_hub.constants, "HF_HUB_DISABLE_TELEMETRY", True):
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(level)
            datasets.enable_progress_bars()


@contextlib.contextmanager
def plain_models() -> Iterator[None]:
    """accelerate asks time and again, module by module, whether a model was compiled, and imports DeepSpeed to ask whether it is its own. Here: neither.

    It also reads the installed packages' metadata whenever it asks whether one is there (accelerate 1.15, utils/imports.py `_is_package_available`).
    """
    with contextlib.ExitStack() as stack:
        for name in ("is_compiled_module", "has_compiled_regions"):
            stack.enter_context(mock.patch.object(accelerate.utils.other, name, lambda _: False))
        stack.enter_context(mock.patch.object(accelerate.utils.other, "is_deepspeed_available", lambda: False))
        stack.enter_context(mock.patch.object(importlib.metadata, "metadata", _METADATA))
        yield


@contextlib.contextmanager
def patterns_when_used() -> Iterator[None]:
    """Transformers compiles how checkpoints of all models are renamed, a thousand patterns, when PEFT asks for one model's.

    Source: transformers 5.23, conversion_mapping.py:156, core_model_loading.py:905; peft 0.21, tuners/tuners_utils.py:841.
    """
    loading = sys.modules.get("transformers.core_model_loading")
    if loading is None or not hasattr(loading, "re"):  # other releases
        yield
        return
    with mock.patch.object(loading, "re", SimpleNamespace(**{**vars(re), "compile": PatternWhenUsed})):
        yield


class PatternWhenUsed:
    """A regular expression that is compiled when something is asked of it."""

    def __init__(self, pattern: str, flags: int = 0) -> None:
        self._pattern = pattern, flags

    def __getattr__(self, name: str) -> Any:
        return getattr(re.compile(*self._pattern), name)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies are the expression itself."""
        return re.compile, self._pattern


@contextlib.contextmanager
def no_inference_tensors() -> Iterator[None]:
    """Reward models run under `inference_mode` (trl 1.16, grpo_trainer.py:1619), whose results fake tensors cannot be: without gradients they hold as much."""
    with mock.patch.object(torch, "inference_mode", lambda mode=True: torch.no_grad() if mode else contextlib.nullcontext()):
        yield

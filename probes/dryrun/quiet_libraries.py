"""What is around a dry run: no talk, no telemetry, and nothing that libraries do for who trains and loads models."""

import contextlib
import logging
import warnings
from collections.abc import Iterator

import datasets
import huggingface_hub
import torch

from probes.substitution import substituted


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """The trainers' progress bars, advice, deprecations and telemetry (trl 1.16, trainer/base_trainer.py:82) are about who trains, not about who plans."""
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    datasets.disable_progress_bars()
    with warnings.catch_warnings(), substituted(huggingface_hub.constants, "HF_HUB_DISABLE_TELEMETRY", True):
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(level)
            datasets.enable_progress_bars()


@contextlib.contextmanager
def no_inference_tensors() -> Iterator[None]:
    """Reward models run under `inference_mode` (trl 1.16, grpo_trainer.py:1619), whose results fake tensors cannot be: without gradients they hold as much."""
    with substituted(torch, "inference_mode", lambda mode=True: torch.no_grad() if mode else contextlib.nullcontext()):
        yield

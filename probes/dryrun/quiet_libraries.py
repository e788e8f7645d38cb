"""Keep the libraries quiet around a dry run: no progress bars, logs, warnings and telemetry, no inference tensors."""

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
    """Switch off the trainers' logs, warnings, progress bars and telemetry inside the block.

    They speak to people who train; a dry run trains nothing. Source of the telemetry: trl 1.16,
    trainer/base_trainer.py, `_BaseTrainer._send_telemetry`.
    """
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
    """Replace `torch.inference_mode` by `torch.no_grad` inside the block: both hold the same memory.

    TRL runs reward models under `inference_mode` (trl 1.16, grpo_trainer.py, `GRPOTrainer._calculate_rewards`); a fake
    tensor cannot be an inference tensor.
    """
    with substituted(torch, "inference_mode", lambda mode=True: torch.no_grad() if mode else contextlib.nullcontext()):
        yield

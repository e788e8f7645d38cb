"""A trainer that is ready to train, and the tokens of its data: the same of a dry run and of a worker."""

from dataclasses import dataclass
from typing import Any

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WORD, PAD, EOS = (
    3,
    0,
    2,
)  # token ids of our tokenizers; 1 ends a completion of gemma and deepseek, so nothing is called that


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A trainer ready to train, and every model that is resident while it does."""

    trainer: Any
    models: tuple[torch.nn.Module, ...]

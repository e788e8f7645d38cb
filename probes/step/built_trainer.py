"""A trainer that is ready to train, and the token ids of its data."""

from typing import Any

import torch
from msgspec import Struct

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Token ids of our tokenizers. Id 1 ends a completion of gemma and deepseek, so no word has it.
PAD, EOS, WORD = 0, 2, 3  # WORD is the first id that is a word


class BuiltTrainer(Struct, frozen=True, kw_only=True):
    """A trainer ready to train, and every model that is resident while it does."""

    trainer: Any
    models: tuple[torch.nn.Module, ...]  # the policy first

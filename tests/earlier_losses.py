"""The losses of TRL releases before 1.15, which the installed release no longer has, as their source computes them."""

from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

CHUNK_TOKENS = 256


def _chunk(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> Any:
    """trl 1.14, trainer/sft_trainer.py, `_chunk`, without bias, scale and soft cap."""
    return _scored((hidden @ weight.to(hidden.dtype).t()).float(), labels)


def _scored(logits: torch.Tensor, labels: torch.Tensor) -> Any:
    log_p = F.log_softmax(logits, dim=-1)
    chunk_loss = F.nll_loss(log_p, labels, ignore_index=-100, reduction="sum")
    valid = labels != -100
    chunk_correct = ((logits.argmax(dim=-1) == labels) & valid).sum().float()
    chunk_entropy = (-(log_p.exp() * log_p).sum(dim=-1) * valid).sum()
    return chunk_loss, chunk_correct, chunk_entropy


def _float32_chunk(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> Any:
    """trl 1.12, the same function."""
    return _scored(hidden.float() @ weight.float().t(), labels)


def chunked_cross_entropy(
    hidden_states: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, float32: bool = False
) -> torch.Tensor:
    """trl 1.14, trainer/sft_trainer.py, `_chunked_cross_entropy_loss` of labels; `float32`: trl 1.12."""
    hidden = hidden_states[..., :-1, :].reshape(-1, hidden_states.size(-1))
    labels = labels[..., 1:].reshape(-1)
    valid = labels != -100
    n_valid = valid.sum()
    entropy_sum = correct = loss = hidden.new_zeros((), dtype=torch.float32)
    order = valid.to(torch.int8).argsort(descending=True, stable=True)
    hidden, labels = hidden[order], labels[order]
    n_padded = int((n_valid / CHUNK_TOKENS).ceil().clamp(min=1)) * CHUNK_TOKENS
    for start in range(0, n_padded, CHUNK_TOKENS):
        chunk_loss, chunk_correct, chunk_entropy = checkpoint(
            _float32_chunk if float32 else _chunk,
            hidden[start : start + CHUNK_TOKENS],
            weight,
            labels[start : start + CHUNK_TOKENS],
            use_reentrant=False,
        )
        loss, correct, entropy_sum = loss + chunk_loss, correct + chunk_correct, entropy_sum + chunk_entropy
    return loss / n_valid.clamp(min=1)

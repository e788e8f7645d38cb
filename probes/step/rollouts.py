"""Rollouts of full length: no completion ends early by chance.

If nothing else pads a batch, some completions end one token early.
"""

from collections.abc import Callable
from typing import Any

import torch

from planner.candidate import Candidate
from probes.step.built_trainer import EOS, WORD
from probes.step.phases import Rollout


def whole_rollout(candidate: Candidate) -> Rollout:
    """Return a rollout that runs `generate`, whose end and padding tokens are replaced by words afterwards."""

    def run(generate: Callable[..., Any], model: Any, arguments: dict[str, Any]) -> Any:
        result = generate(model, **arguments)
        sequences = result if isinstance(result, torch.Tensor) else result.sequences
        fill_to_full_length(
            sequences[:, arguments["input_ids"].size(1) :], model.generation_config.eos_token_id, short_row(candidate)
        )
        return result

    return run


def short_row(candidate: Candidate) -> int:
    """Return n if every n-th completion is one token short, which pads the batch; 0 if none is.

    None is short if the prompts pad the batch already. n is at least 2: a single row has nothing to be padded to.
    """
    return max(2, candidate.per_device_train_batch_size) if candidate.pads and not candidate.prompts_differ else 0


def fill_to_full_length(completions: torch.Tensor, ends: int | list[int] | None, short: int) -> None:
    """Replace end and padding tokens by words, in place; every `short`-th row gets its end one token early.

    `ends`: the token ids that end a completion of the model; the trainer's tokenizer has another one.
    """
    completions[completions < WORD] = WORD
    for end in [ends] if isinstance(ends, int) else ends or ():
        completions[completions == end] = WORD
    if short and completions.size(1) > 1:
        completions[short - 1 :: short, -2] = EOS

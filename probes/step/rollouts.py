"""Rollouts of full length: no completion ends by itself, and one of a batch ends a token early where nothing else pads it."""

from collections.abc import Callable
from typing import Any

import torch

from planner.candidate import Candidate
from probes.step.phases import Rollout, one_word_shortened
from probes.step.stage import EOS, WORD


def whole_rollout(candidate: Candidate) -> Rollout:
    """`generate` as it is, whose completions are then made whole: an end or padding that was sampled by chance becomes a word."""

    def run(
        generate: Callable[..., Any], model: Any, _: Callable[[list[torch.Tensor]], None], arguments: dict[str, Any]
    ) -> Any:
        result = generate(model, **arguments)
        sequences = result if isinstance(result, torch.Tensor) else result.sequences
        make_whole(
            sequences[:, arguments["input_ids"].size(1) :], model.generation_config.eos_token_id, short_row(candidate)
        )
        return result

    return run


def dry_rollout(candidate: Candidate) -> Rollout:
    """The dry run's `generate`, whose prompts are all of one length: where they differ in a real batch, the first is padded on its left: attention masks.

    `generate` itself drops a mask without zeros (transformers 5.23, generation/utils.py).
    """

    def run(
        generate: Callable[..., Any],
        model: Any,
        on_cached: Callable[[list[torch.Tensor]], None],
        arguments: dict[str, Any],
    ) -> Any:
        arguments["attention_mask"][0, 0] = 0
        return one_word_shortened(generate, model, on_cached, arguments)

    return run if prompts_differ(candidate) else one_word_shortened


def prompts_differ(candidate: Candidate) -> bool:
    """Whether a process completes several prompts at once: every second one is then a token short where batches are padded."""
    prompts = (
        candidate.generation_rows // candidate.num_generations
        if candidate.method_row.grouped_completions
        else candidate.per_device_train_batch_size
    )
    return candidate.pads and prompts > 1


def short_row(candidate: Candidate) -> int:
    """Of so many completions the last one is short; 0: none is. A row alone cannot be padded."""
    return max(2, candidate.per_device_train_batch_size) if candidate.pads and not prompts_differ(candidate) else 0


def make_whole(completions: torch.Tensor, ends: int | list[int] | None, short: int) -> None:
    """Changes completions in place. `ends`: the token ids that the model may end with; the trainer's tokenizer has another one."""
    completions[completions < WORD] = WORD
    for end in [ends] if isinstance(ends, int) else ends or ():
        completions[completions == end] = WORD
    if short and completions.size(1) > 1:
        completions[short - 1 :: short, -2] = EOS

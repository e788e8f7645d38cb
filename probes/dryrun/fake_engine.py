"""Completions as a vLLM engine would return them, without the engine: what it holds is composed onto the trace by `planner/allocator/simulation.py`."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import GenerationMixin

from probes.step.stage import WORD, Stage
from probes.step.tracker import Tracker
from probes.substitution import substituted


class EngineElsewhere:
    """In the place of TRL's `VLLMGeneration` (trl/generation/vllm_generation.py)."""

    def __init__(self, completion_tokens: int, on_generate: Callable[[], None]) -> None:
        self._completion_tokens = completion_tokens
        self._on_generate = on_generate

    def sync_weights(self) -> None:
        """The new weights go to the engine."""

    def generate(
        self, prompts: list[Any], **_: Any
    ) -> tuple[list[Any], list[list[int]], list[list[list[float]]], None]:
        """For every prompt (repeated already) a completion of full length, and the log-probabilities of its tokens."""
        self._on_generate()
        return (
            prompts,
            [[WORD] * self._completion_tokens for _ in prompts],
            [[[-1.0]] * self._completion_tokens for _ in prompts],
            None,
        )


@contextlib.contextmanager
def completions_from_elsewhere(tracker: Tracker, stage: Stage, completion_tokens: int) -> Iterator[None]:
    """While inside, the trainer believes that it has an engine; trainers that cannot be told so get finished sequences from `generate`."""
    trainer = stage.trainer
    if hasattr(trainer, "use_vllm") and hasattr(trainer, "_generate_single_turn"):
        trainer.vllm_generation = EngineElsewhere(completion_tokens, lambda: tracker.enter_phase("score"))
        trainer.use_vllm, trainer.vllm_mode, trainer._last_loaded_step = True, "server", -1
        yield
        return

    def generate(_: Any, **arguments: Any) -> torch.Tensor:
        tracker.enter_phase("score")
        prompts: torch.Tensor = arguments["input_ids"]
        with tracker.looking_away():
            return torch.cat([prompts, prompts.new_full((prompts.size(0), completion_tokens), WORD)], dim=1)

    with substituted(GenerationMixin, "generate", generate):
        yield

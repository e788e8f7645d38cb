"""A stand-in for the vLLM engine of a dry run, which returns completions.

The engine's memory is added by planner/allocator/simulation.py.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import GenerationMixin

from planner.candidate import Candidate
from probes.step.built_trainer import WORD, BuiltTrainer
from probes.step.tracker import Tracker
from probes.substitution import substituted


class FakeEngine:
    """Stands in for TRL's `VLLMGeneration` (trl 1.16, generation/vllm_generation.py)."""

    def __init__(self, completion_tokens: int, on_generate: Callable[[], None]) -> None:
        self._completion_tokens = completion_tokens
        self._on_generate = on_generate

    def sync_weights(self) -> None:
        """Do nothing: the engine's weights are not part of the trace."""

    def generate(
        self, prompts: list[Any], **_: Any
    ) -> tuple[list[Any], list[list[int]], list[list[list[float]]], None]:
        """Return the prompts, which TRL has repeated already, a completion of full length for each, and the
        log-probabilities of its tokens.
        """
        self._on_generate()
        return (
            prompts,
            [[WORD] * self._completion_tokens for _ in prompts],
            [[[-1.0]] * self._completion_tokens for _ in prompts],
            None,
        )


@contextlib.contextmanager
def fake_engine(tracker: Tracker, built: BuiltTrainer, candidate: Candidate) -> Iterator[None]:
    """Give the trainer completions from a fake engine inside the block.

    GRPO, RLOO and distillation get a `FakeEngine` in place of TRL's. Online DPO calls vLLM without such an object:
    there `generate` returns finished sequences.
    """
    trainer, completion_tokens = built.trainer, candidate.max_completion_length
    if not candidate.method_row.builds_engine:
        trainer.vllm_generation = FakeEngine(completion_tokens, lambda: tracker.enter_phase("score"))
        trainer.use_vllm, trainer.vllm_mode, trainer._last_loaded_step = True, "server", -1
        yield
        return

    def generate(_: Any, **arguments: Any) -> torch.Tensor:
        tracker.enter_phase("score")
        prompts: torch.Tensor = arguments["input_ids"]
        with tracker.tensors_on_host():
            return torch.cat([prompts, prompts.new_full((prompts.size(0), completion_tokens), WORD)], dim=1)

    with substituted(GenerationMixin, "generate", generate):
        yield

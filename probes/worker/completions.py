"""Lengths of the completions of a probe: full, or in a probe of many steps drawn from the user's, but for the last."""

import random
from collections.abc import Sequence
from typing import Any

from probes.step.rollouts import short_row
from probes.task import SHORTEST, Task


class ProbedCompletions:
    """Tokens of each completion of a rollout: as many as there can be, or drawn ones (`Task.draws_completions`).

    Where rows of a batch differ in length, some have one token less. The last rollout is not drawn.
    """

    def __init__(self, task: Task, trainer: Any) -> None:
        self._task, self._trainer, self._random = task, trainer, random.Random(task.seed)

    def __call__(self, rows: int, most: int) -> Sequence[int]:
        candidate, lengths = self._task.candidate, self._task.candidate.completion_lengths
        if lengths is not None and self._task.draws_completions and not self._is_last:
            return [min(max(each, SHORTEST), most) for each in self._random.choices(lengths.tokens, k=rows)]
        short = short_row(candidate) if most > 1 else 0
        return [most - (short > 0 and index % short == short - 1) for index in range(rows)]

    @property
    def _is_last(self) -> bool:
        """Return whether the rollout serves the last step (trl 1.16, grpo_trainer.py, `generate_every`)."""
        candidate = self._task.candidate
        served = candidate.steps_per_generation * candidate.num_iterations // candidate.gradient_accumulation_steps
        steps = max(1, served) if candidate.method_row.grouped_completions else 1
        return bool(self._trainer.state.global_step + steps >= self._task.steps)

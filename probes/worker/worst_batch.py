"""Data whose every batch is the longest that the settings allow, padded by one token where batches are padded."""

import random
from collections.abc import Callable
from typing import Any

import datasets

from planner.candidate import Candidate
from probes.step.rollouts import prompts_differ
from probes.step.stage import WORD
from probes.task import Task


class Text:
    """Words that differ, the same ones for the same seed. Each is one token."""

    def __init__(self, task: Task) -> None:
        self._random, self._vocab_size = random.Random(task.seed), task.candidate.model.vocab_size

    def ids(self, count: int) -> list[int]:
        return [self._random.randrange(WORD, self._vocab_size) for _ in range(max(count, 1))]

    def __call__(self, count: int) -> str:
        return " ".join(f"w{token}" for token in self.ids(count))


# A row, of the text that it may take, its index, and by how many tokens it is short.
Row = Callable[[Text, int, int], dict[str, Any]]


def evaluation_rows(candidate: Candidate) -> int:
    """Rows of an evaluation batch: those of training, but whole groups where a prompt has several completions (trl 1.16, grpo_config.py, `num_generations`)."""
    rows = candidate.per_device_train_batch_size
    if not candidate.method_row.grouped_completions:
        return rows
    return -(-rows // candidate.num_generations) * candidate.num_generations


def data(task: Task, row: Row) -> dict[str, datasets.Dataset]:
    """`row(text, index, short)` for all steps of all processes; the last row of each process' batch is one token short where batches are padded."""
    candidate, text = task.candidate, Text(task)
    batch = candidate.per_device_train_batch_size
    count = (
        (task.steps + (task.save and task.resume))
        * batch
        * candidate.gradient_accumulation_steps
        * candidate.num_processes
    )
    found = [row(text, index, int(candidate.pads and index % batch == batch - 1)) for index in range(count)]
    rows = {"train_dataset": datasets.Dataset.from_list(found)}
    if task.evaluate:
        one_batch = evaluation_rows(candidate) * candidate.num_processes
        rows["eval_dataset"] = datasets.Dataset.from_list([found[index % len(found)] for index in range(one_batch)])
    return rows


def pair(candidate: Candidate) -> Row:
    """A prompt of one token, so that all the rest of the row is scored; TRL adds the end to both completions."""

    def row(text: Text, _: int, short: int) -> dict[str, Any]:
        return {
            "prompt": text(1),
            "chosen": " " + text(candidate.max_length - 2),
            "rejected": " " + text(candidate.max_length - 2 - short),
        }

    return row


def prompt(candidate: Candidate) -> Row:
    """Prompts of one length, every second of them one token short where that pads a batch."""
    differ = prompts_differ(candidate)

    def row(text: Text, index: int, _: int) -> dict[str, Any]:
        return {"prompt": text(candidate.prompt_length - int(differ and index % 2))}

    return row

"""Datasets whose every batch is the longest that the settings allow, padded by one token if batches are padded."""

import random
from pathlib import Path
from typing import Any

import datasets
from accelerate import PartialState
from msgspec.structs import replace

from planner.candidate import Candidate
from planner.jobs.base_candidate import evaluation_rows as planned_rows
from probes.processors import image_tokens
from probes.step.built_trainer import WORD
from probes.task import SHORTEST, Task
from probes.trainers import Row


def worst_evaluation_rows(candidate: Candidate) -> int:
    """Return the rows of an evaluation batch on one process.

    Without an `eval_strategy` they are those of a training batch, rounded up to whole groups of completions.
    """
    if candidate.eval_strategy != "no":
        return candidate.per_device_eval_batch_size
    return planned_rows(candidate.per_device_train_batch_size, candidate)


def worst_case_datasets(task: Task, row: Row) -> dict[str, datasets.Dataset]:
    """Return `train_dataset` with rows for all steps of all processes and, if the task evaluates, `eval_dataset`.

    `eval_dataset` has one batch, or all the rows whose logits `compute_metrics` gets. With `Task.draws_rows` all steps
    but the last have rows of the lengths of the user's dataset, in random order. The tokens are random, and the same
    for the same seed; every process gets the same rows.
    """
    candidate, generator = task.candidate, random.Random(task.seed)

    def tokens(count: int) -> list[int]:
        return generator.choices(range(WORD, candidate.model.vocab_size), k=max(count, 1))

    steps = task.steps + (task.save and task.resume)
    in_step = candidate.per_device_train_batch_size * candidate.gradient_accumulation_steps
    count = steps * in_step
    rows = [row(each, tokens, index, 0) for index, each in enumerate(_drawn(task, generator, in_step))]
    rows += [row(candidate, tokens, index, _short_tokens(candidate, index)) for index in range(len(rows), count)]
    by_name = {"train_dataset": dataset_of(_in_turn(rows, candidate), "train", task)}
    if task.evaluates:
        wanted = max(worst_evaluation_rows(candidate) * candidate.num_processes, candidate.kept_eval_rows)
        longest = rows[-in_step:]
        by_name["eval_dataset"] = dataset_of([longest[index % in_step] for index in range(wanted)], "eval", task)
    return by_name


def _in_turn(rows: list[dict[str, Any]], candidate: Candidate) -> list[dict[str, Any]]:
    """Return the rows of one process in an order in which every process gets all of them, as they take batches in turn.

    Prompts stay as they are: their trainer's own sampler distributes them.
    Source: accelerate 1.15, data_loader.py, `BatchSamplerShard`; trl 1.16, trainer/utils.py, `RepeatSampler`.
    """
    batch, processes = candidate.per_device_train_batch_size, candidate.num_processes
    if candidate.method_row.generates:
        return rows * processes
    return [each for at in range(0, len(rows), batch) for each in rows[at : at + batch] * processes]


def _drawn(task: Task, generator: random.Random, in_step: int) -> list[Candidate]:
    """Return the candidate with the length of each row before the last step; nothing for a probe of usual length.

    `in_step`: rows of a step of one process.
    """
    candidate = task.candidate
    if not task.draws_rows or candidate.lengths is None:
        return []
    shortest = SHORTEST + (image_tokens(candidate) if candidate.images_per_row else 0)
    drawn = generator.choices(candidate.lengths.tokens, k=(task.steps - 1) * in_step)
    return [replace(candidate, max_length=min(max(each, shortest), candidate.max_length)) for each in drawn]


def dataset_of(rows: list[dict[str, Any]], name: str, task: Task) -> datasets.Dataset:
    """Return rows as a dataset: in memory, or on disk if a reference's log-probabilities are computed before.

    The first process writes those beside the dataset's file and the others read them there, which a dataset in memory
    has in a folder of each process (trl 1.16, trainer/dpo_trainer.py, `_precompute_ref_logps`).
    """
    found = datasets.Dataset.from_list(rows)
    if not task.candidate.precompute_ref_log_probs:
        return found
    state, folder = PartialState(), Path(task.folder) / name
    if state.is_main_process:
        found.save_to_disk(folder)
    state.wait_for_everyone()
    return datasets.load_from_disk(folder)


def _short_tokens(candidate: Candidate, index: int) -> int:
    """Return 1 if the row is one token short, which pads its batch, else 0.

    Short are every second prompt, or the last row of each process' batch.
    """
    if candidate.method_row.generates:
        return int(candidate.prompts_differ and index % 2 == 1)
    batch = candidate.per_device_train_batch_size
    return int(candidate.pads and index % batch == batch - 1)

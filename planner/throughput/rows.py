"""The rows of a candidate's dataset in its batches: what padding and packing make of them (planner/rows/)."""

from functools import lru_cache
from math import sqrt
from typing import NamedTuple

from planner.cache_keys import TrainingInput
from planner.candidate import FLASH
from planner.rows.batches import Epoch, MicroBatch, Rows, epoch_of, expected_longest, micro_batch_of, trained_rows
from planner.rows.lengths import RowLengths
from planner.rows.packing import tree_samples


def rows_of(candidate: TrainingInput) -> Rows | None:
    """Return the rows of a candidate's dataset and their batches; None: lengths are not given."""
    if candidate.lengths is None:
        return None
    return Rows(
        lengths=candidate.lengths,
        max_length=candidate.max_length,
        too_long="drop" if candidate.method_row.drops_long_rows else "cut",
        layout=candidate.layout,
        order=candidate.train_sampling_strategy,
        batch_rows=candidate.rows,
        processes=candidate.batches,
        accumulation=candidate.gradient_accumulation_steps,
    )


def mean_micro_batch(candidate: TrainingInput) -> MicroBatch | None:
    """Return the mean micro-batch of a candidate; `slowest`: of the GPU for which the others wait.

    GPUs that wait once in a step of m micro-steps differ by 1 / sqrt(m) of their difference in one micro-step.
    FlashAttention removes the padding of a batch (transformers 5.23, modeling_flash_attention_utils.py, `_upad_input`),
    and gets the beginnings of packed rows from TRL (trl 1.16, trainer/sft_trainer.py,
    `DataCollatorForLanguageModeling.torch_call`, cu_seq_lens).
    """
    if candidate.method_row.asynchronous:
        return _packed_micro_batch(candidate)
    if candidate.completion_lengths is not None:
        return _sampled_micro_batch(candidate)
    rows = rows_of(candidate)
    if rows is None:
        return None
    alone = candidate.rows == 1 and rows.layout in ("padded", "padding_free")
    return micro_batch_of(rows, alone or (candidate.attn_implementation in FLASH and candidate.row_gpus == 1))


class Completions(NamedTuple):
    """Lengths of completions in tokens, cut at `max_completion_length`: their mean, and the mean of their squares."""

    mean: float
    mean_of_squares: float

    @property
    def before(self) -> float:
        """Mean tokens of a completion before a sampled token: half the length if all completions are equally long."""
        return self.mean_of_squares / self.mean / 2


def completions(candidate: TrainingInput) -> Completions:
    """Return the lengths of a candidate's completions; without given lengths all are as long as possible."""
    most = candidate.max_completion_length
    return _cut(candidate.completion_lengths, most) if candidate.completion_lengths else Completions(most, most * most)


def longest_completion(candidate: TrainingInput, rows: float) -> float:
    """Return the expected tokens of the longest of `rows` completions."""
    most, lengths = candidate.max_completion_length, candidate.completion_lengths
    return _longest(lengths, most, max(round(rows), 1)) if lengths else most


@lru_cache(maxsize=256)
def _cut(lengths: RowLengths, most: int) -> Completions:
    """Return the lengths of completions that are cut at `most` tokens."""
    cut = trained_rows(lengths, most, "cut", "padded")
    squares = sum(count * tokens * tokens for tokens, count in zip(cut.tokens, cut.counts, strict=True))
    return Completions(cut.mean, squares / cut.rows)


@lru_cache(maxsize=4096)
def _longest(lengths: RowLengths, most: int, rows: int) -> float:
    """Return the expected tokens of the longest of `rows` completions of at most `most` tokens."""
    return expected_longest(trained_rows(lengths, most, "cut", "padded"), rows)


def mean_samples(candidate: TrainingInput) -> float:
    """Return the completions of a packed row (`Candidate.token_budget`) of a mean length."""
    group, prompt = candidate.packed_group, candidate.prompt_length
    return float(tree_samples(candidate.tokens, group, prompt, completions(candidate).mean))


def _packed_micro_batch(candidate: TrainingInput) -> MicroBatch:
    """Return the mean micro-batch of packed rows, which completions fill; each has the tokens of its prompt, too."""
    samples, row = mean_samples(candidate), candidate.prompt_length + completions(candidate).mean
    computed = float(candidate.tokens)
    return MicroBatch(tokens=samples * row, computed=computed, slowest=computed, seen=((row, samples),))


def _sampled_micro_batch(candidate: TrainingInput) -> MicroBatch:
    """Return the mean micro-batch of sampled rows, which are padded to the longest completion of their rollout.

    Every prompt has `prompt_length` tokens. FlashAttention takes the padding out (see `mean_micro_batch`).
    Source: trl 1.16, trainer/grpo_trainer.py, `GRPOTrainer._generate_and_score_completions` (`pad`), as in `pads`.
    """
    rows, prompt = candidate.rows, candidate.prompt_length
    longest = longest_completion(candidate, candidate.generation_rows)
    slowest = longest_completion(candidate, candidate.generation_rows * candidate.num_processes)
    mean, squares = completions(candidate)
    attended = sqrt(prompt * prompt + 2 * prompt * mean + squares)  # attention grows with the squares
    unpads = candidate.attn_implementation in FLASH
    return MicroBatch(
        tokens=rows * (prompt + mean),
        computed=rows * (prompt + longest),
        slowest=rows * (prompt + slowest),
        seen=((attended if unpads else prompt + longest, float(rows)),),
    )


def slowest_tokens(candidate: TrainingInput, batch: MicroBatch) -> float:
    """Return the computed tokens of a micro-batch on the GPU for which the others wait.

    The difference between GPUs averages out over the micro-batches of a step, except where gradients are sharded, since
    the GPUs wait in each micro-batch, and in a rollout, whose micro-batches share one padding.
    """
    waits = (
        1
        if candidate.scheme_row.shards_gradients or candidate.method_row.generates
        else candidate.gradient_accumulation_steps
    )
    return batch.computed + (batch.slowest - batch.computed) / sqrt(waits)


def epoch(candidate: TrainingInput) -> Epoch | None:
    """Return one pass of a candidate over its dataset; None: lengths are not given."""
    rows = rows_of(candidate)
    if rows is None:
        return None
    return epoch_of(rows, candidate.method_row.rows_per_sample)

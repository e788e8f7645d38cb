"""The rows of a candidate's dataset in its batches: what padding and packing make of them (planner/rows/)."""

from math import sqrt

from planner.cache_keys import TrainingInput
from planner.candidate import FLASH
from planner.rows.batches import Epoch, MicroBatch, Rows, epoch_of, micro_batch_of


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
        processes=max(candidate.num_processes // candidate.row_gpus, 1),
        accumulation=candidate.gradient_accumulation_steps,
    )


def mean_micro_batch(candidate: TrainingInput) -> MicroBatch | None:
    """Return the micro-batch of a candidate in the mean, `slowest` that of the GPU which the others wait for.

    GPUs that wait once in a step of m micro-steps differ by 1 / sqrt(m) of what they differ in one micro-step.

    FlashAttention takes the padding of a batch out (transformers 5.23, modeling_flash_attention_utils.py,
    `_upad_input`), and gets the beginnings of packed rows from TRL (trl 1.16, trainer/sft_trainer.py,
    `DataCollatorForLanguageModeling.torch_call`, cu_seq_lens).
    """
    rows = rows_of(candidate)
    if rows is None:
        return None
    alone = candidate.rows == 1 and rows.layout in ("padded", "padding_free")
    return micro_batch_of(rows, alone or (candidate.attn_implementation in FLASH and candidate.row_gpus == 1))


def slowest_tokens(candidate: TrainingInput, batch: MicroBatch) -> float:
    """Return the computed tokens of a micro-batch on the GPU that the others wait for."""
    waits = 1 if candidate.scheme_row.shards_gradients else candidate.gradient_accumulation_steps
    return batch.computed + (batch.slowest - batch.computed) / sqrt(waits)


def epoch(candidate: TrainingInput) -> Epoch | None:
    """Return one pass of a candidate over its dataset; None: lengths are not given."""
    rows = rows_of(candidate)
    if rows is None:
        return None
    return epoch_of(rows, candidate.method_row.rows_per_sample)

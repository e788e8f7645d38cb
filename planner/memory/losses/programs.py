"""Losses over all logits, line by line as TRL's source writes them, on the tape of the layers.

A size counts the words of all tokens first (`EVERY`), then those of the tokens of a slice (`SLICED`).
"""

from collections.abc import Callable
from functools import lru_cache

from msgspec import Struct

from planner.memory.dtypes import FLOAT32_BYTES
from planner.memory.layers import operators as op
from planner.memory.layers.autograd import NOTHING, Node, Size, Tape, Tensor
from planner.memory.layers.one_layer import PassPeak, take_peak

EVERY: Size = (1, 0, 0)
SLICED: Size = (0, 1, 0)
# Rows from which CUDA sorts them apart. Source: torch 2.13, aten/src/ATen/native/cuda/SortStable.cu,
# `launch_stable_sort_kernel`.
SORTED_APART = 128


class LogitWidths(Struct, frozen=True, kw_only=True):
    """Bytes of one logit of the head, of one that the trainer gets, and of a log-probability that nll_loss takes.

    `cloned`: DDP clones the model's output, because it looks for unused parameters. `by_liger`: Liger computes the
    trainer's cross entropy.
    """

    computed: int
    given: int
    summed: int
    cloned: bool = False
    by_liger: bool = False


Program = Callable[[Tape, LogitWidths], Tensor]


class LogitsMemory(Struct, frozen=True):
    """Memory of logits and loss: peaks of the passes, of one without gradients, and what its backward pass needs."""

    forward: PassPeak
    saved: Size
    backward: PassPeak
    inference: PassPeak


@lru_cache(maxsize=64)
def logits_memory(program: Program, widths: LogitWidths) -> LogitsMemory:
    """Run both passes of a loss, and one without gradients."""
    tape, alone = Tape(), Tape(saving=False, grad_enabled=False)
    before = tape.snapshot()
    last = program(tape, widths).node
    assert isinstance(last, Node)
    forward, saved = take_peak(tape, before), tape.snapshot().total
    tape.run_backward({last: [tape.empty(NOTHING, FLOAT32_BYTES)]})
    program(alone, widths)
    return LogitsMemory(forward, saved, take_peak(tape, before), take_peak(alone, before))


def model_logits(tape: Tape, widths: LogitWidths) -> Tensor:
    """The logits as the trainer gets them.

    accelerate returns float32 copies of 16-bit ones under autocast, but wraps no model of DeepSpeed's or FSDP2's.
    Source: accelerate 1.15, accelerator.py, `Accelerator.prepare_model`; torch 2.13, nn/parallel/distributed.py,
    `_DDPSink`; results/emulated.md, gkd under ZeRO-2, orpo and cpo under FSDP2.
    """
    given = op.cast(tape, tape.leaf(EVERY, widths.computed), widths.given)
    return op.clone(tape, given) if widths.cloned else given


def cross_entropy(tape: Tape, x: Tensor, width: int) -> Tensor:
    """F.cross_entropy: log_softmax in x's dtype; nll_loss, which autocast gives float32, keeps what it takes.

    Source: torch 2.13, aten/src/ATen/native/LossNLL.cpp, `cross_entropy_loss`, aten/src/ATen/autocast_mode.h; on an
    emulated A100 16-bit logits keep 6.00 bytes each and take 10.00 in the backward pass, beside the logits.
    """
    taken = op.cast(tape, op.log_softmax(tape, x), width)
    return op.index(tape, taken, taken, NOTHING)


def trainer_cross_entropy(tape: Tape, x: Tensor, widths: LogitWidths) -> Tensor:
    """`cross_entropy` of a trainer, or Liger's kernel in its place, which writes the gradient over x.

    Source: liger-kernel 0.8.5, transformers/monkey_patch.py, `apply_liger_kernel_to_granite`
    (`nn.functional.cross_entropy`); ops/cross_entropy.py, `LigerCrossEntropyFunction`.
    """
    return op.overwritten(tape, x, NOTHING) if widths.by_liger else cross_entropy(tape, x, widths.summed)


def chosen_and_all(tape: Tape, widths: LogitWidths) -> Tensor:
    """CPO and ORPO: cross entropy of the chosen half, and log-probabilities of all tokens, whose kernel saves logits.

    Source: trl 1.16, experimental/cpo/cpo_trainer.py, `CPOTrainer.concatenated_forward`, trainer/utils.py,
    `selective_log_softmax` (kernels/logprob_entropy.py).
    """
    logits = model_logits(tape, widths)
    chosen = trainer_cross_entropy(tape, op.clone(tape, op.slice_view(tape, logits, SLICED)), widths)
    return op.add(tape, chosen, op.index(tape, logits, logits, NOTHING))


def completion_logits(tape: Tape, widths: LogitWidths) -> Tensor:
    """A2PO: log-probabilities of the completions, whose kernel saves their logits.

    Source: trl 1.16, experimental/a2po/a2po_trainer.py, `A2POTrainer._get_sequence_logps`, trainer/utils.py,
    `selective_log_softmax` (kernels/logprob_entropy.py).
    """
    logits = op.slice_view(tape, op.slice_view(tape, model_logits(tape, widths), EVERY), EVERY)
    return op.index(tape, logits, logits, NOTHING)


def triple(tape: Tape, widths: LogitWidths) -> Tensor:
    """TPO: log-probabilities of all tokens, whose kernel saves logits, and cross entropy of the last third's tokens.

    Source: trl 1.16, experimental/tpo/tpo_trainer.py, `TPOTrainer._compute_loss` (`shift_logits.chunk`, `ref_logits`),
    trainer/utils.py, `selective_log_softmax_and_entropy` (kernels/logprob_entropy.py); torch 2.13,
    torch/csrc/autograd/FunctionsManual.cpp, `split_with_sizes_backward`.
    """
    logits = model_logits(tape, widths)
    shifted = op.slice_view(tape, logits, EVERY)
    scored = op.index(tape, shifted, shifted, NOTHING)
    answer = op.slice_view(tape, shifted, SLICED)
    return op.add(tape, trainer_cross_entropy(tape, op.index(tape, answer, None, SLICED), widths), scored)


def causal_lm(tape: Tape, widths: LogitWidths) -> Tensor:
    """`ForCausalLMLoss` in the model, in float32; the trainer gets the logits, too, and drops them.

    Source: transformers 5.23, loss/loss_utils.py, `ForCausalLMLoss` (in 4.45 and before in modeling_llama.py,
    `logits.float()`, `shift_logits`); trainer.py, `Trainer.compute_loss`.
    """
    return _loss_and_logits(tape, widths)[0]


def causal_lm_and_accuracy(tape: Tape, widths: LogitWidths) -> Tensor:
    """`causal_lm`, then SFT's accuracy, from a shifted copy of what the trainer gets.

    Source: trl 1.0, trainer/sft_trainer.py, `SFTTrainer.compute_loss`.
    """
    loss, logits = _loss_and_logits(tape, widths)
    op.clone(tape, logits)
    return loss


def _loss_and_logits(tape: Tape, widths: LogitWidths) -> tuple[Tensor, Tensor]:
    logits = tape.leaf(EVERY, widths.computed)
    loss = cross_entropy(tape, op.cast(tape, logits, FLOAT32_BYTES), FLOAT32_BYTES)
    return loss, op.cast(tape, logits, widths.given)


def completions(tape: Tape, widths: LogitWidths) -> Tensor:
    """Online DPO: log_softmax of the completions, which copies its input, a slice of rows.

    Source: trl 1.16, experimental/online_dpo/online_dpo_trainer.py, `OnlineDPOTrainer._forward`; torch 2.13,
    aten/src/ATen/native/cuda/SoftMax.cu, `host_softmax` (`input_.contiguous()`).
    """
    logits = model_logits(tape, widths)
    copy = op.clone(tape, op.slice_view(tape, logits, SLICED))
    return op.index(tape, op.log_softmax(tape, copy), None, NOTHING)


def most_likely(tape: Tape, widths: LogitWidths) -> Tensor:
    """SDFT's default: logsumexp and the 100 largest of the student's logits, and the teacher's of the same words.

    Tensors of 100 words a token are left out.
    Source: trl 1.16, experimental/sdft/sdft_trainer.py, `SDFTTrainer._forward_logits`, loss_utils.py,
    `compute_topk_self_distillation_loss`; torch 2.13, aten/src/ATen/native/ReduceOps.cpp, `logsumexp_out_impl`.
    """
    student, teacher = scaled_logits(tape, widths), tape.empty(EVERY, widths.given)
    tape.empty(EVERY, widths.given)  # (x - maxes).exp_()
    total = op.logsumexp(tape, student, NOTHING)
    largest = op.index(tape, student, None, NOTHING)
    tape.empty(EVERY, teacher.width)
    return op.subtract(tape, largest, total)


def sampled(tape: Tape, widths: LogitWidths) -> Tensor:
    """SDPO's default: log-probabilities of the sampled words, by a kernel that saves the student's logits.

    Source: trl 1.16, experimental/sdpo/sdpo_trainer.py, `SDPOTrainer._forward_logits`, loss_utils.py,
    `compute_sampled_token_self_distillation_loss`, trainer/utils.py, `selective_log_softmax`
    (kernels/logprob_entropy.py).
    """
    student, teacher = scaled_logits(tape, widths), tape.empty(EVERY, widths.given)
    known = op.index(tape, teacher, None, NOTHING)
    return op.subtract(tape, op.index(tape, student, student, NOTHING), known)


def scaled_logits(tape: Tape, widths: LogitWidths) -> Tensor:
    """The model's logits without the last token's, over the temperature."""
    tokens = op.slice_view(tape, model_logits(tape, widths), EVERY)
    return op.scale(tape, op.slice_view(tape, tokens, EVERY))


def scored(tape: Tape, widths: LogitWidths) -> Tensor:
    """Distillation from a server: log_softmax of the student's logits of the completion, over the temperature.

    Source: trl 1.16, experimental/server_distillation/server_distillation_trainer.py,
    `ServerDistillationTrainer.compute_loss`.
    """
    return sampled_words(tape, model_logits(tape, widths))


def sampled_words(tape: Tape, student: Tensor) -> Tensor:
    """The log-probabilities of the sampled words, by log_softmax of the completion's logits over the temperature."""
    completion = op.scale(tape, op.slice_view(tape, student, SLICED))
    return op.index(tape, op.log_softmax(tape, completion), None, NOTHING)


def weighted(tape: Tape, widths: LogitWidths) -> Tensor:
    """IW-OPD: log_softmax of both models' logits of the completion, over the temperature.

    Source: trl 1.16, experimental/iw_opd/iw_opd_trainer.py, `IWOPDTrainer.compute_loss`, `_compute_iw_opd_loss`.
    """
    student, teacher = model_logits(tape, widths), teacher_logits(tape, widths)
    known = op.log_softmax(tape, op.scale(tape, op.slice_view(tape, teacher, SLICED)))
    return op.subtract(tape, sampled_words(tape, student), op.index(tape, known, None, NOTHING))


class UniversalLogits(Struct, frozen=True):
    """GOLD with `use_uld_loss`: one row's sorted probabilities after another, and how the teacher's differ.

    Counts words: tokens x vocabulary. Each row keeps for its backward pass its probabilities, their order and the
    differences; what Python names of a row is there until the next row's takes its place. The teacher's text is taken
    to have as many tokens as the student's, each beside one of the student's (`use_extended_uld`).
    Source: trl 1.16, experimental/gold/gold_trainer.py, `ULDLoss._compute_distillation_loss`,
    `_merge_probabilities_with_alignment_groups`; torch 2.13, aten/src/ATen/native/Loss.cpp, `l1_loss`.
    """

    rows: int
    row: int  # words of a row's tokens
    answer: int  # of those of its completion, without the last one
    answer_tokens: int
    teacher: int  # words of all rows' tokens
    teacher_answer: int

    def __call__(self, tape: Tape, widths: LogitWidths) -> Tensor:
        student, teacher = model_logits(tape, widths), teacher_logits(tape, widths, constant(self.teacher))
        total, named = None, list[Tensor]()
        for _ in range(self.rows):
            loss = self._row(tape, student, named)
            total = loss if total is None else op.add(tape, total, loss)
        assert total is not None and teacher.storage is not None
        return total

    def _row(self, tape: Tape, student: Tensor, named: list[Tensor]) -> Tensor:
        """The loss of a row. `named`: tensors that Python names, of the row before at first, of this one in the end."""
        theirs = constant(self.teacher_answer)
        completion = op.slice_view(tape, op.slice_view(tape, student, constant(self.row)), constant(self.answer))
        probabilities = op.softmax(tape, op.scale(tape, completion), on_cuda=True, float32=False)
        del named[:1]
        scaled = tape.empty(theirs, student.width)
        known = tape.empty(theirs, student.width)
        del scaled, named[:1]
        aligned = rows_one_by_one(tape, probabilities)
        del named[:1]
        known_aligned = tape.empty(theirs, student.width)
        del named[:1]
        ordered = sort(tape, aligned, self.answer_tokens)
        del named[:1]
        known_ordered = sort(tape, known_aligned, self.answer_tokens)
        named.clear()
        longer = constant(max(self.answer, self.teacher_answer))
        ordered, known_ordered = padded(tape, ordered, longer), padded(tape, known_ordered, longer)
        named += [probabilities, known, aligned, known_aligned, ordered, known_ordered]
        distance = op.subtract(tape, ordered, known_ordered)
        return op.sum_last(tape, op.unary(tape, distance, "input", temporaries=1), NOTHING)


def constant(words: int) -> Size:
    """The size of so many words, whatever the tokens."""
    return (0, 0, words)


def rows_one_by_one(tape: Tape, x: Tensor) -> Tensor:
    """zeros, into which each row of x is copied; two rows stand for all.

    The backward pass copies the whole gradient for each row, beside zeros with the row's, which it adds up.
    Source: torch 2.13, torch/csrc/autograd/functions/tensor.cpp, `CopySlices::apply` (`new_empty_strided`),
    FunctionsManual.cpp, `select_backward`.
    """
    elements, width = x.elements, x.width

    def backward(gradient: Tensor) -> list[Tensor | None]:
        added = tape.empty(elements, width)
        copied = tape.empty(elements, width)
        gradient = tape.empty(elements, width)  # the next row's copy beside that of this one
        del copied, gradient
        return [added]

    return tape.output(tape.empty(elements, width), (x,), [], backward)


def sort(tape: Tape, x: Tensor, rows: int) -> Tensor:
    """x.sort(dim=-1).values: keeps the order, int64; the gradient is scattered into zeros.

    Beside values and order CUDA's kernels take 8 + w + 8 bytes an element of w bytes: the order before, and a copy of
    what is sorted. Of 2 to 127 rows they sort all at once: twice a pair of int32, w, and w + 8.
    Source: torch 2.13, aten/src/ATen/native/cuda/SortStable.cu, `segmented_sort_pairs_by_full_sort`,
    `segmented_sort_pairs`; cub's DeviceRadixSort. On an emulated card 1 row takes 20.4 bytes of float32, 31 rows 32.5
    and 128 rows 20.0; of bfloat16 31 rows 29.2 and 128 rows 18.0.
    """
    order_width = 8
    values, order = tape.empty(x.elements, x.width), tape.empty(x.elements, order_width)
    at_once = 1 < rows < SORTED_APART
    tape.empty(x.elements, (3 * order_width + 2 * x.width) if at_once else (2 * order_width + x.width))
    saved = tape.save(order) if x.requires_grad else []
    return tape.output(values, (x,), saved, op.same_size_backward(tape, x))


def padded(tape: Tape, x: Tensor, elements: Size) -> Tensor:
    """F.pad of the words: x itself if it is as long."""
    if x.elements == elements:
        return x
    return tape.output(tape.empty(elements, x.width), (x,), [], op.same_size_backward(tape, x))


def teacher_logits(tape: Tape, widths: LogitWidths, words: Size = EVERY) -> Tensor:
    """A frozen teacher's logits as the trainer gets them; see `model_logits`."""
    computed = tape.empty(words, widths.computed)
    return computed if widths.given == widths.computed else tape.empty(words, widths.given)


def jensen_shannon(tape: Tape, widths: LogitWidths) -> Tensor:
    """GKD for 0 < beta < 1: the divergences of both models from their mixture.

    Source: trl 1.16, experimental/gkd/gkd_trainer.py, `GKDTrainer.compute_loss`, `generalized_jsd_loss`; torch 2.13,
    aten/src/ATen/native/Loss.cpp, `kl_div`.
    """
    student, teacher = model_logits(tape, widths), tape.empty(EVERY, widths.given)
    scaled = op.scale(tape, student), op.scale(tape, teacher)
    p, q = op.log_softmax(tape, scaled[0]), op.log_softmax(tape, scaled[1])
    mixture = op.logsumexp(tape, op.cat(tape, (op.add_number(tape, p), op.add_number(tape, q))), EVERY)
    from_q, from_p = op.kl_div(tape, mixture, q), op.kl_div(tape, mixture, p)
    return op.add(tape, op.scale(tape, from_q), op.scale(tape, from_p))

"""Memory of the output head and the loss, for each way in which TRL computes them.

Letters in the formulas: T tokens of the forward pass, N of them with a label, V vocabulary, H hidden size, h bytes of a
hidden state, w bytes of a head weight, c bytes of the compute dtype, norm the bytes that the final norm saves.
"""

from collections.abc import Callable

from msgspec import Struct
from msgspec.structs import replace

from planner.memory.losses.programs import (
    LogitWidths,
    Program,
    UniversalLogits,
    causal_lm,
    causal_lm_and_accuracy,
    chosen_and_all,
    completion_logits,
    completions,
    jensen_shannon,
    logits_memory,
    most_likely,
    sampled,
    scored,
    triple,
    weighted,
)
from planner.methods import Loss

# Sizes of a tile of logits. Source: trl 1.16, kernels/chunked_logprob.py, `TOKEN_CHUNK_SIZE` and trainer/utils.py,
# `_CHUNKED_LOGPROB_CHUNK_SIZE`; kernels/chunked_divergence.py, `TOKEN_CHUNK_SIZE`.
TOKEN_CHUNK = 4096
VOCABULARY_CHUNK = 32768
CHUNKED_NLL_TOKENS = 256  # trl 1.7 to 1.14, trainer/utils.py, `chunked_nll`'s default chunk size
FLOAT32 = 4


class Head(Struct, frozen=True, kw_only=True):
    """Sizes that the memory of a loss depends on. Widths are bytes of one number."""

    tokens: int
    labelled_tokens: int
    logit_tokens: int  # tokens of which a loss builds logits, if it does
    vocab_size: int
    hidden_size: int
    hidden_width: int
    weight_width: int
    compute_width: int
    trainable: bool
    norm_bytes: int  # that the final norm saves for each token, less its input if that is freed
    rows: int = 1
    teacher_vocab_size: int = 0  # of a teacher whose logits the trainer gets
    softcapped: bool = False
    converted: bool = True  # under autocast accelerate gives the trainer float32 copies of 16-bit logits
    autocasts_loss: bool = False  # the trainer computes the loss under autocast, whoever runs the model
    copies_half: bool = False  # autocast copies the 16-bit weight into its own, other 16-bit dtype
    # DDP that looks for unused parameters clones what the model returns; it matters for `log_softmax` only, since other
    # losses hold more at another moment
    cloned: bool = False
    liger_cross_entropy: bool = False  # Liger's kernel computes `F.cross_entropy`

    @property
    def weight_elements(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def weight_cast_bytes(self) -> int:
        """Bytes of autocast's copy of the head: of a float32 one, or of one of the other 16-bit dtype."""
        return self.word_cast_bytes * self.vocab_size

    @property
    def word_cast_bytes(self) -> int:
        """Bytes of that copy for each word of the vocabulary."""
        copies = self.weight_width != self.compute_width or self.copies_half
        return self.compute_width * self.hidden_size if copies else 0

    @property
    def saved_hidden_bytes(self) -> int:
        """Return the bytes of its input that a plain nn.Linear head saves in the compute dtype: all, if trained."""
        return self.compute_width * self.tokens * self.hidden_size if self.trainable else 0

    @property
    def final_norm_bytes(self) -> int:
        """Bytes that the final norm saves."""
        return self.tokens * self.norm_bytes


class LossMemory(Struct, frozen=True, kw_only=True):
    """Bytes of head and loss on one GPU.

    `forward`: the most while the loss is computed. `saved`: alive until its backward pass. `backward`: the most during
    that, with `saved` and the gradient of the head.
    """

    forward: int
    saved: int
    backward: int
    frozen: int | None = None  # without gradients; None: forward - saved
    beside: int | None = None  # alive while a frozen model computes the same; None: saved
    evaluated: int | None = None  # `forward` without gradients; None: forward
    in_model: int | None = None  # the most until it returns its logits; None: the model computes the loss
    head_backward: int | None = None  # `backward` once the gradient of the logits is there; None: there are no logits

    @property
    def beside_bytes(self) -> int:
        """Alive of the policy's head while a frozen model runs after it."""
        return self.saved if self.beside is None else self.beside

    @property
    def evaluated_bytes(self) -> int:
        """The most while the loss of an evaluation is computed."""
        return self.forward if self.evaluated is None else self.evaluated

    @property
    def frozen_bytes(self) -> int:
        """The most while a frozen model computes the same: it saves nothing, not even autocast's copy of the head."""
        return self.forward - self.saved if self.frozen is None else self.frozen


def fused(head: Head) -> LossMemory:
    """TRL >= 1.15: log-probabilities of labelled tokens, computed in tiles, without logits of all of them.

        saved    = norm + h N H + 32 N
        forward  = saved + h T H (last hidden state) + 28 N + c n 32768
                 + (w != c) c min(32768, V) H + (h != c) c n H
        backward = saved + c n 32768 + 4 N H + (trainable) 4 V H + the larger of
                     (w != c) c v H + (h != c) c n H
                     (h != 4) h N H + (trainable, w != 4) w V H: casts of the gradients

    with n = min(N, 4096) and v = `named_columns`.

    Source: trl 1.16, kernels/chunked_logprob.py, `ChunkedLogProbFunction`, trainer/utils.py,
    `add_fused_lm_head._fused_forward`.

    Example: Qwen3-8B trained in full: 4 x 151,936 x 4,096 = 2.32 GiB for the head's gradient, whatever the batch.

    Leaves out the scatter of the labelled tokens' gradient into zeros of all tokens: the layers' backward pass needs
    more.
    """
    tile = tile_bytes(head, head.compute_width)
    labelled = head.labelled_tokens * head.hidden_size
    hidden_chunk = (
        head.compute_width * chunk_tokens(head) * head.hidden_size if head.hidden_width != head.compute_width else 0
    )
    saved = head.final_norm_bytes + labelled * head.hidden_width + 32 * head.labelled_tokens
    last_hidden = head.tokens * head.hidden_size * head.hidden_width
    forward = (
        saved
        + last_hidden
        + 28 * head.labelled_tokens
        + tile
        + head.word_cast_bytes * min(VOCABULARY_CHUNK, head.vocab_size)
        + hidden_chunk
    )
    return LossMemory(
        forward=forward,
        saved=saved,
        backward=saved + tile + tiled_gradients(head),
        frozen=forward - head.final_norm_bytes,
    )


def tiled_gradients(head: Head, loop_bytes: int = 0, end_bytes: int = 0) -> int:
    """Bytes of the gradients that a loop over tiles adds up in float32: 4 N H + (trainable) 4 V H + the larger of

    (w != c) c v H + (h != c) c n H + `loop_bytes`: in the loop
    (h != 4) h N H + (trainable, w != 4) w V H + `end_bytes`: casts of the gradients after it
    """
    labelled = head.labelled_tokens * head.hidden_size
    hidden_chunk = (
        head.compute_width * chunk_tokens(head) * head.hidden_size if head.hidden_width != head.compute_width else 0
    )
    casts = (head.hidden_width * labelled if head.hidden_width != FLOAT32 else 0) + (
        head.weight_width * head.weight_elements if head.trainable and head.weight_width != FLOAT32 else 0
    )
    sums = FLOAT32 * labelled + (FLOAT32 * head.weight_elements if head.trainable else 0)
    return sums + max(head.word_cast_bytes * named_columns(head) + hidden_chunk + loop_bytes, casts + end_bytes)


def divergence(head: Head) -> LossMemory:
    """TRL's distillation: tiles of the student's and the teacher's logits side by side, in float32.

    As `fused`, with two float32 tiles in place of one in the compute dtype, the teacher's last hidden state, and in the
    backward pass the gradient of a tile in the compute dtype: n x `named_columns`, and n x `last_columns` at the end.

    Source: trl 1.16, kernels/chunked_divergence.py, `ChunkedDivergenceFunction`.
    """
    alone = fused(head)
    extra = 2 * tile_bytes(head, FLOAT32) - tile_bytes(head, head.compute_width)
    teacher = head.labelled_tokens * head.hidden_size * head.hidden_width
    per_column = head.compute_width * chunk_tokens(head) if head.compute_width != FLOAT32 else 0
    return LossMemory(
        forward=alone.forward + extra + teacher,
        saved=alone.saved + teacher,
        backward=alone.saved
        + 2 * tile_bytes(head, FLOAT32)
        + teacher
        + tiled_gradients(head, per_column * named_columns(head), per_column * last_columns(head)),
    )


def named_columns(head: Head) -> int:
    """Words of the vocabulary whose chunks are alive at once in a loop: two chunks.

    The variable of the loop holds the last chunk while the next one is computed.

    Source: trl 1.16, kernels/chunked_logprob.py, `w_chunk`; kernels/chunked_divergence.py, `grad_tile`.
    """
    if head.vocab_size <= VOCABULARY_CHUNK:
        return head.vocab_size * (2 if head.labelled_tokens > TOKEN_CHUNK else 1)
    return min(head.vocab_size, 2 * VOCABULARY_CHUNK)


def last_columns(head: Head) -> int:
    """Words of the vocabulary in the last chunk."""
    return head.vocab_size - (head.vocab_size - 1) // VOCABULARY_CHUNK * VOCABULARY_CHUNK


def chunk_tokens(head: Head) -> int:
    """Labelled tokens of one tile."""
    return min(head.labelled_tokens, TOKEN_CHUNK)


def tile_bytes(head: Head, width: int) -> int:
    """Bytes of a tile of logits, which is 32,768 wide even if the vocabulary is smaller."""
    return width * chunk_tokens(head) * VOCABULARY_CHUNK


def chunked_nll(head: Head) -> LossMemory:
    """SFT of TRL 1.13 and 1.14: cross entropy of 256 labelled tokens at a time, recomputed in the backward pass.

        saved    = norm + h T H: the hidden states, labelled ones first
        forward  = norm + 2 h T H + max(16 n V, cast + c n V, and with a cast c n H)
        backward = norm + 2 h T H + max(16 n V + cast + (trainable) w V H, (trainable) 3 w V H + h n H)

    with n = min(N, 256) and cast = (w != c) c V H, autocast's copy of the head. The 16 bytes per logit are logits,
    log_softmax, its exponential and the entropy's terms, in float32. The three gradients of the head are those of a
    chunk, of all chunks before it, and their sum.

    Source: trl 1.14, trainer/sft_trainer.py, `_chunk` (checkpointed per chunk).
    """
    tokens = min(CHUNKED_NLL_TOKENS, head.labelled_tokens)
    chunk, hidden = tokens * head.vocab_size, head.tokens * head.hidden_size * head.hidden_width
    gradient = head.weight_width * head.weight_elements if head.trainable else 0
    entropy, cast = 4 * FLOAT32 * chunk, head.weight_cast_bytes
    product = cast + head.compute_width * (chunk + (tokens * head.hidden_size if cast else 0))
    added = 3 * gradient + head.hidden_width * tokens * head.hidden_size if head.trainable else 0
    return LossMemory(
        forward=head.final_norm_bytes + 2 * hidden + max(entropy, product),
        saved=head.final_norm_bytes + hidden,
        backward=head.final_norm_bytes + 2 * hidden + max(entropy + cast + gradient, added),
    )


def candidates(head: Head) -> LossMemory:
    """async-distillation: as `chunked_float32` outside autocast, whose recomputation ends before the entropy.

    The backward pass of a chunk has its log_softmax, and the gradients of that and of the logits.

    Source: trl 1.16, experimental/async_distillation/async_distillation_trainer.py, `_jsd_loss_chunk` (the entropy is
    under `no_grad`), `_chunked_jsd_loss`; torch 2.13, utils/checkpoint.py, `_checkpoint_without_reentrant_generator`
    (`early_stop`).
    """
    memory = chunked_float32(replace(head, converted=False, autocasts_loss=False), 3 * FLOAT32)
    return replace(memory, in_model=memory.saved)  # autocast's copies of weights go with the backbone


def chunked_float32(head: Head, recomputed: int = 0) -> LossMemory:
    """SFT of TRL 1.7 to 1.12: as `chunked_nll`, of a float32 copy of the head, which autocast copies once more.

        saved    = norm + h T H
        forward  = norm + 2 h T H + max((12 + l) n V, copy + cast + l n V + n H (4 if h != 4, and l under autocast))
        backward = norm + 2 h T H + (trainable) w V H
                   + max((12 + l) n V + cast or else copy, the second one of `forward`,
                         (trainable) the gradient's ways through both copies)

    with n = min(N, 256), l = 2 under autocast, else 4, copy = (w != 4) 4 V H and cast = (autocast) 2 V H.

    Example: Qwen2.5-7B in 16 bits has copies of 6 x 152,064 x 3,584 = 3.05 GiB, whatever the batch.

    `recomputed`: bytes per logit in the backward pass, where they are fewer.

    Source: trl 1.12, trainer/sft_trainer.py, `_chunk` (`h.float() @ w.float().t()`).
    """
    autocasts = head.converted or head.autocasts_loss
    width = head.compute_width if autocasts else FLOAT32
    tokens = min(CHUNKED_NLL_TOKENS, head.labelled_tokens)
    chunk, hidden = tokens * head.vocab_size, head.tokens * head.hidden_size * head.hidden_width
    copy = FLOAT32 * head.weight_elements if head.weight_width != FLOAT32 else 0
    cast = width * head.weight_elements if width != FLOAT32 else 0
    hidden_copies = (FLOAT32 if head.hidden_width != FLOAT32 else 0) + (width if cast else 0)
    product = copy + cast + width * chunk + hidden_copies * tokens * head.hidden_size
    softmax = (3 * FLOAT32 + width) * chunk
    most = max((recomputed * chunk or softmax) + (cast or copy), product)
    gradient = head.weight_width * head.weight_elements if head.trainable else 0
    if head.trainable:
        first, last, in_float32 = (each * head.weight_elements for each in (width, head.weight_width, FLOAT32))
        through_product = width * (chunk + (2 if hidden_copies else 1) * tokens * head.hidden_size)
        later = max(in_float32 + (cast and first), in_float32 + (copy and last), 2 * last)
        most = max(
            most, first + (cast or copy) + through_product, later + head.hidden_width * tokens * head.hidden_size
        )
    outside = head.final_norm_bytes + 2 * hidden
    return LossMemory(
        forward=outside + max(softmax, product),
        saved=head.final_norm_bytes + hidden,
        backward=outside + gradient + most,
    )


def liger(head: Head) -> LossMemory:
    """Liger's fused linear cross entropy: computes gradients in the forward pass, one chunk of logits at a time.

        chunk    = next power of two of T / (V / H)
        saved    = norm + h T H + gradients of it h T H + (trainable) w V H
        forward  = saved + c chunk V + the larger of
                     c chunk V + (w != c) c V H: the previous chunk, and autocast's copy of the weight
                     (trainable) c V H + (c != 4) 4 V H: a chunk's gradient of the weight, and its float32 copy

    Source: liger-kernel 0.6.4, ops/fused_linear_cross_entropy.py, `fused_linear_cross_entropy_forward` (the gradient of
    the logits overwrites them; `grad_weight += torch.mm(..).float()`; a variable holds the last chunk until the next
    one's gradient is there).
    """
    chunk = head.compute_width * liger_chunk_tokens(head) * head.vocab_size
    hidden = head.tokens * head.hidden_size * head.hidden_width
    gradients = hidden + (head.weight_width * head.weight_elements if head.trainable else 0)
    saved = head.final_norm_bytes + hidden + gradients
    upcast = FLOAT32 if head.compute_width != FLOAT32 else 0
    product = (head.compute_width + upcast) * head.weight_elements if head.trainable else 0
    return LossMemory(
        forward=saved + chunk + max(chunk + head.weight_cast_bytes, product), saved=saved, backward=saved + gradients
    )


def cut(head: Head) -> LossMemory:
    """Cut cross entropy: kernels make tiles of logits on the chip, in the forward pass and again in the backward pass.

        forward = saved = norm + h T H
        backward        = saved + gradients of the hidden states h T H + (trainable) w V H

    Source: axolotl-ai-cloud/ml-cross-entropy 5f0c7a7, cut_cross_entropy/cce.py, `LinearCrossEntropyFunction`,
    cce_backward.py, `cce_backward_kernel` (`accum_c_fp32` off, as in
    transformers/patch.py); on an emulated card: results/tool_trainers.md.

    Leaves out a few numbers for each token and each word of the vocabulary: sums of exponentials, their order, locks.
    """
    hidden = head.tokens * head.hidden_size * head.hidden_width
    gradients = hidden + (head.weight_width * head.weight_elements if head.trainable else 0)
    saved = head.final_norm_bytes + hidden
    return LossMemory(forward=saved, saved=saved, backward=saved + gradients)


def liger_chunk_tokens(head: Head) -> int:
    """Tokens of one of Liger's chunks: the next power of two of T / ceil(V / H), at most T."""
    factor = -(-head.vocab_size // head.hidden_size)
    wanted = -(-head.tokens // factor)
    return min(1 << max(0, (wanted - 1).bit_length()), head.tokens)


def on_tape(head: Head, program: Program, sliced: int) -> LossMemory:
    """Memory of a loss that builds the logits of T tokens: `program` on the tape, beside the head of the model.

        kept     = norm + (trainable) c T H + (w != c) c V H + (softcapped) c T V
        beside   = kept + the logits that the trainer gets, before the loss is computed
        in_model = kept + c T V
        backward = kept + the larger of the program's and `linear_backward`

    Autocast's copy of a float32 head is alive from the forward pass until the head's backward pass, as for every
    projection (layers/linear.py). A soft cap (gemma 2: cap x tanh(logits / cap)) saves tanh's output.

    Example: Qwen3-8B in float32, whatever the batch: 2 x 151,936 x 4,096 = 1.16 GiB for that copy.
    """
    memory = logits_memory(program, widths_of(head))
    every = head.logit_tokens * head.vocab_size
    capped = head.compute_width * every if head.softcapped else 0
    kept = head.final_norm_bytes + head.saved_hidden_bytes + head.weight_cast_bytes + capped
    product = head.weight_cast_bytes + head.compute_width * every  # the copy goes before the model returns
    head_backward = kept + linear_backward(head, every)
    return LossMemory(
        forward=kept + memory.forward.at(every, sliced)[0],
        saved=kept + memory.saved[0] * every + memory.saved[1] * sliced + memory.saved[2],
        backward=max(kept + memory.backward.at(every, sliced)[0], head_backward),
        head_backward=head_backward,
        beside=kept + given_width(head) * every,
        evaluated=head.final_norm_bytes + max(product, memory.inference.at(every, sliced)[0]) + capped,
        in_model=kept + head.compute_width * every,
    )


def widths_of(head: Head) -> LogitWidths:
    """Bytes of the logits of a head; see `LogitWidths`."""
    given = given_width(head)
    return LogitWidths(
        computed=head.compute_width,
        given=given,
        summed=FLOAT32 if head.autocasts_loss else given,
        cloned=head.cloned,
        by_liger=head.liger_cross_entropy,
    )


def given_width(head: Head) -> int:
    """Bytes of one logit that the trainer gets."""
    return FLOAT32 if head.converted else head.compute_width


def linear_backward(head: Head, logits: int) -> int:
    """Bytes of the backward pass of a plain nn.Linear head, after that of the loss.

    c T V + c T H + (trainable) c V H: gradients of the logits, of the input and of the weight
    (trainable, w != c) c V H + w V H, less autocast's copy and the saved input, which are freed by then: the cast of
    the weight's gradient
    """
    inputs = head.compute_width * head.tokens * head.hidden_size
    if not head.trainable:
        return head.compute_width * logits + inputs
    weight = head.compute_width * head.weight_elements
    product = head.compute_width * logits + inputs + weight
    if not head.weight_cast_bytes:
        return product
    freed = head.weight_cast_bytes + head.saved_hidden_bytes
    return max(product, inputs + weight + head.weight_width * head.weight_elements - freed)


def logits(head: Head) -> LossMemory:
    """CPO and ORPO, of which half of the rows is chosen; taken for earlier losses over all logits, too."""
    return on_tape(head, chosen_and_all, head.logit_tokens * head.vocab_size // 2)


def model_loss(head: Head) -> LossMemory:
    """Transformers' Trainer, whose model computes the loss."""
    return replace(on_tape(head, causal_lm, 0), in_model=None)


def logits_cross_entropy(head: Head) -> LossMemory:
    """SFT of TRL 1.0 to 1.4, whose model computes the loss."""
    return replace(on_tape(head, causal_lm_and_accuracy, 0), in_model=None)


def log_softmax(head: Head) -> LossMemory:
    """Online DPO: after it the policy keeps log_softmax, and a frozen model makes a copy of the head of its own."""
    alone = logits_memory(completions, replace(widths_of(head), cloned=False)).inference
    every, completion = head.tokens * head.vocab_size, head.labelled_tokens * head.vocab_size
    frozen = max(alone.at(every, completion)[0], head.weight_cast_bytes + head.compute_width * every)
    memory = on_tape(head, completions, completion)
    return replace(memory, frozen=frozen, beside=None)


def self_distillation(head: Head, program: Program) -> LossMemory:
    """SDFT and SDPO: the teacher's logits and their multiple are beside the student's multiple."""
    every, given = head.logit_tokens * head.vocab_size, given_width(head)
    memory = on_tape(head, program, 0)
    product = head.weight_cast_bytes + head.compute_width * every
    return replace(memory, frozen=max(2 * given * every, product, (head.compute_width + given) * every))


def preference(head: Head) -> LossMemory:
    """LLaMA-Factory's DPO: the same of all tokens, whose logits stay beside the reference for a metric.

    The trainer makes the logits float32 itself, so that DeepSpeed, which gives 16-bit ones, does not halve them.
    Source: llamafactory 0.9.5, train/dpo/trainer.py, `CustomDPOTrainer.concatenated_forward` and
    `get_batch_loss_metrics`; train/trainer_utils.py, `get_batch_logps`.
    """
    every = head.tokens * head.vocab_size
    memory = log_softmax(replace(head, labelled_tokens=head.tokens, converted=True))
    return replace(memory, beside=memory.saved + FLOAT32 * every)


def unpaired(head: Head) -> LossMemory:
    """LLaMA-Factory's KTO: the same, and a frozen model's logits stay beside its pass over the KL batch.

    Copies of the rows' logits, chosen and rejected ones, take the place of the logits themselves.
    Source: llamafactory 0.9.5, train/kto/trainer.py, `CustomKTOTrainer.forward`, `concatenated_forward`
    (`target_logits`), `compute_reference_log_probs`.
    """
    memory = preference(head)
    return replace(memory, frozen=memory.frozen_bytes + FLOAT32 * head.tokens * head.vocab_size)


def universal(head: Head) -> LossMemory:
    """GOLD with `use_uld_loss`; the last word of a completion is left out (`uld_skip_student_eos`)."""
    row, answer = head.logit_tokens // head.rows, max(head.labelled_tokens // head.rows - 1, 1)
    program = UniversalLogits(
        rows=head.rows,
        row=row * head.vocab_size,
        answer=answer * head.vocab_size,
        answer_tokens=answer,
        teacher=head.logit_tokens * head.teacher_vocab_size,
        teacher_answer=answer * head.teacher_vocab_size,
    )
    return on_tape(head, program, 0)


def score(head: Head) -> LossMemory:
    """Reward: one number per row, computed from the last hidden state of all tokens.

        forward = norm + 2 h T H, the norm's input and output;  saved = norm + h T H;  backward = norm + 2 h T H

    Source: transformers 5.23, modeling_layers.py, `GenericForSequenceClassification`.
    """
    hidden = head.tokens * head.hidden_size * head.hidden_width
    return LossMemory(
        forward=head.final_norm_bytes + 2 * hidden,
        saved=head.final_norm_bytes + hidden,
        backward=head.final_norm_bytes + 2 * hidden,
    )


FORMULAS: dict[Loss, Callable[[Head], LossMemory]] = {
    "fused": fused,
    "divergence": divergence,
    "chunked_nll": chunked_nll,
    "chunked_float32": chunked_float32,
    "candidates": candidates,
    "cut": cut,
    "liger": liger,
    "score": score,
    "logits": logits,
    "completion_logits": lambda head: on_tape(head, completion_logits, 0),
    "triple": lambda head: on_tape(head, triple, head.logit_tokens * head.vocab_size // 3),
    "preference": preference,
    "unpaired": unpaired,
    "causal_lm": model_loss,
    "logits_cross_entropy": logits_cross_entropy,
    "log_softmax": log_softmax,
    "most_likely": lambda head: self_distillation(head, most_likely),
    "sampled": lambda head: self_distillation(head, sampled),
    "jsd": lambda head: on_tape(head, jensen_shannon, 0),
    "universal": universal,
    "scored": lambda head: on_tape(head, scored, head.labelled_tokens * head.vocab_size),
    "weighted": lambda head: on_tape(head, weighted, head.labelled_tokens * head.vocab_size),
}

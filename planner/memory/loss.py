"""The head and the loss: what lies between the last decoder layer and the first gradient, by the way TRL computes it.

Letters in the formulas: T tokens of the forward pass, N of them with a label, V vocabulary, H hidden size, h bytes of a hidden state,
w bytes of a head weight, c bytes of the compute dtype.
"""

from collections.abc import Callable
from dataclasses import dataclass

from planner.cache_keys import TrainingInput
from planner.methods import LIGER_LEAVES_THE_LOSS, Loss, release

# trl 1.16, kernels/chunked_logprob.py:31 and trainer/utils.py:1506; kernels/chunked_divergence.py:33-34.
TOKEN_CHUNK = 4096
VOCABULARY_CHUNK = 32768
CHUNKED_NLL_TOKENS = 256  # trl 1.5 to 1.14, trainer/utils.py, `chunked_nll`'s default chunk size
FLOAT32 = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """Sizes that the loss depends on. `completion_tokens`: tokens of completions only, for losses that slice before they compute."""

    tokens: int
    labelled_tokens: int
    logit_tokens: int  # of which a loss that builds logits builds them
    vocab_size: int
    hidden_size: int
    hidden_width: int
    weight_width: int
    compute_width: int
    trainable: bool
    softcapped: bool = False

    @property
    def weight_elements(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def weight_cast_bytes(self) -> int:
        """Autocast's 16-bit copy of a float32 head."""
        return self.compute_width * self.weight_elements if self.weight_width != self.compute_width else 0

    @property
    def final_norm_bytes(self) -> int:
        """What the final RMSNorm keeps: x in float32 (x itself where it is float32 already) and, if its weight learns, the normalised x."""
        upcast = FLOAT32 if self.hidden_width != FLOAT32 else 0
        return self.tokens * self.hidden_size * (upcast + (self.hidden_width if self.trainable else 0))


@dataclass(frozen=True, kw_only=True, slots=True)
class LossMemory:
    """Bytes on one GPU. `forward`: the most while the loss is computed; `saved`: kept until its backward pass; `backward`: the most
    then, what was saved included. The gradient of the head is part of `backward` and stays as `.grad` of `head_gradient` bytes."""

    forward: int
    saved: int
    backward: int
    frozen: int | None = None  # None: as `forward`, but without what is saved

    @property
    def frozen_bytes(self) -> int:
        """The most while a model that is only read computes the same: nothing is kept, and autocast's copy of the head is gone by then."""
        return self.forward - self.saved if self.frozen is None else self.frozen


def fused(head: Head) -> LossMemory:
    """TRL >= 1.15: log-probabilities without logits, in tiles, over labelled tokens only.

        forward  = norm + h T H (last hidden state) + h N H + 16 N + 28 N + c n 32768 + (w != c) c 32768 H + (h != c) c n H
        backward = norm + h N H + 32 N + c n 32768 + 4 N H + (trainable) 4 V H
                   + the most of (w != c) c v H + (h != c) c n H and of the casts: (h = 2) h N H + (trainable, w = 2) w V H

    with n = min(N, 4096), v = `named_columns`. Source: trl 1.16, kernels/chunked_logprob.py:311-462, trainer/utils.py:1599-1660.
    Example: Qwen3-8B trained in full: 4 x 151,936 x 4,096 = 2.32 GiB for the head's gradient, whatever the batch.
    Leaves out the scatter of the labelled rows' gradient into zeros of all rows, which the first layer's backward outweighs.
    """
    tile = tile_bytes(head, head.compute_width)
    labelled = head.labelled_tokens * head.hidden_size
    cast_weight = (
        head.compute_width * head.hidden_size if head.weight_width != head.compute_width else 0
    )  # bytes a word
    hidden_chunk = (
        head.compute_width * chunk_tokens(head) * head.hidden_size if head.hidden_width != head.compute_width else 0
    )
    saved = head.final_norm_bytes + labelled * head.hidden_width + 32 * head.labelled_tokens
    last_hidden = head.tokens * head.hidden_size * head.hidden_width
    gradients = FLOAT32 * labelled + (FLOAT32 * head.weight_elements if head.trainable else 0)
    casts = (head.hidden_width * labelled if head.hidden_width != FLOAT32 else 0) + (
        head.weight_width * head.weight_elements if head.trainable and head.weight_width != FLOAT32 else 0
    )
    return LossMemory(
        forward=saved
        + last_hidden
        + 28 * head.labelled_tokens
        + tile
        + cast_weight * min(VOCABULARY_CHUNK, head.vocab_size)
        + hidden_chunk,
        saved=saved,
        backward=saved + tile + gradients + max(cast_weight * named_columns(head) + hidden_chunk, casts),
    )


def divergence(head: Head) -> LossMemory:
    """TRL's distillation: student and teacher tiles in float32 side by side (trl 1.16, kernels/chunked_divergence.py:417 and :537).

    As `fused`, with two float32 tiles in place of one in the compute dtype, the teacher's last hidden state kept, and in the backward pass
    the gradient of a tile in the compute dtype, n x `named_columns`.
    """
    alone = fused(head)
    extra = 2 * tile_bytes(head, FLOAT32) - tile_bytes(head, head.compute_width)
    teacher = head.labelled_tokens * head.hidden_size * head.hidden_width
    gradient_tile = (
        head.compute_width * chunk_tokens(head) * named_columns(head) if head.compute_width != FLOAT32 else 0
    )
    return LossMemory(
        forward=alone.forward + extra + teacher,
        saved=alone.saved + teacher,
        backward=alone.backward + extra + teacher + gradient_tile,
    )


def named_columns(head: Head) -> int:
    """Words whose chunk of something is alive at once in a loop over chunks that gives it a name: the next is made before the name lets go of the last.

    Source: `w_chunk`, trl 1.16, kernels/chunked_logprob.py:423; `grad_tile`, kernels/chunked_divergence.py.
    """
    if head.vocab_size <= VOCABULARY_CHUNK:
        return head.vocab_size * (2 if head.labelled_tokens > TOKEN_CHUNK else 1)
    return min(head.vocab_size, 2 * VOCABULARY_CHUNK)


def chunk_tokens(head: Head) -> int:
    return min(head.labelled_tokens, TOKEN_CHUNK)


def tile_bytes(head: Head, width: int) -> int:
    """The tile of logits: its full width even where the vocabulary is smaller."""
    return width * chunk_tokens(head) * VOCABULARY_CHUNK


def chunked_nll(head: Head) -> LossMemory:
    """TRL 1.5 to 1.14 SFT: cross entropy over 256 labelled tokens at a time, each chunk recomputed in the backward pass.

        forward = norm + 2 h T H + (c + 8) 256 V;  backward = the same and the head's gradient, twice while it is accumulated

    Source: trl 1.14, trainer/utils.py, `chunked_cross_entropy` (checkpointed per chunk).
    """
    chunk = (head.compute_width + 2 * FLOAT32) * min(CHUNKED_NLL_TOKENS, head.labelled_tokens) * head.vocab_size
    saved = head.final_norm_bytes + 2 * head.tokens * head.hidden_size * head.hidden_width
    gradient = 2 * head.weight_width * head.weight_elements if head.trainable else 0
    return LossMemory(forward=saved + chunk, saved=saved, backward=saved + 2 * chunk + gradient)


def liger(head: Head) -> LossMemory:
    """Liger's fused linear cross entropy: gradients are made in the forward pass, one chunk of logits at a time.

        chunk = next power of two of T / (V / H)
        forward = norm + h T H + gradients h T H + (trainable) w V H + c chunk V + the larger of: the chunk before, c chunk V, with
                  (w != c) autocast's copy of the weight c V H | (trainable) a chunk's product for the weight, c V H, and its float32 copy, 4 V H

    Source: liger-kernel 0.6.4, ops/fused_linear_cross_entropy.py, `fused_linear_cross_entropy_forward` (the gradient of the logits takes
    their place; `grad_weight += torch.mm(..).float()`; the last chunk goes when the next one's gradient is bound).
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


def liger_chunk_tokens(head: Head) -> int:
    factor = -(-head.vocab_size // head.hidden_size)
    wanted = -(-head.tokens // factor)
    return min(1 << max(0, (wanted - 1).bit_length()), head.tokens)


def whole_logits(forward_width: int, saved_width: int, backward_width: int) -> Callable[[Head], LossMemory]:
    """A loss that builds the logits of every token: so many bytes for each of T x V numbers.

        forward  = norm + h T H + (w != c) c V H + forward_width T V
        backward = norm + h T H + (w != c) c V H + the larger of: backward_width T V | c T V + h T H + (trainable) w V H + (w != c) c V H

    The head's own backward comes after the loss': its input, the logits' gradient, and if it learns its own, which autocast makes in 16 bits
    first. Autocast's copy of a float32 head is kept from the forward pass to then (as for every projection: modules/linear.py).
    A soft cap (gemma 2: cap x tanh(logits / cap)) keeps tanh's output in the compute dtype, and holds one more copy on the way.
    Example: Qwen3-8B in float32, whatever the batch: 2 x 151,936 x 4,096 = 1.16 GiB for that copy.
    """

    def memory(head: Head) -> LossMemory:
        logits = head.logit_tokens * head.vocab_size
        capped = head.compute_width * logits if head.softcapped else 0
        hidden = head.tokens * head.hidden_size * head.hidden_width
        kept = head.final_norm_bytes + hidden + head.weight_cast_bytes
        gradient = head.weight_width * head.weight_elements + head.weight_cast_bytes if head.trainable else 0
        own = head.compute_width * logits + hidden + gradient
        return LossMemory(
            forward=kept + forward_width * logits + 2 * capped,
            saved=kept + saved_width * logits + capped,
            backward=kept + max(backward_width * logits, own) + capped,
        )

    return memory


# Bytes for each number of the logits under 16-bit autocast: while the loss is computed, kept for its backward pass, and the most then.
# accelerate hands the trainer float32 copies of 16-bit logits (accelerator.py:1824-1835).
LOGITS_BYTES: dict[str, tuple[int, int, int]] = {
    # accelerate's float32 copy of the logits, the kept log_softmax, and a shifted copy for the accuracy: trl 1.0, trainer/sft_trainer.py:1333;
    # as much in transformers before 4.46 (modeling_llama.py `logits.float()`, `shift_logits`, log_softmax). Backward: log_softmax, the
    # gradient that nll_loss makes and the one that log_softmax makes of it, all float32 (torch, nn/functional.py `cross_entropy`; measured
    # with torch 2.13's profiler on the CPU: 12.00 bytes for each of 512 x 8,192 logits of transformers' ForCausalLMLoss).
    "logits_cross_entropy": (12, 4, 12),
    # 16-bit logits and their float32 copy; float32 logits and, for the chosen half, log_softmax of the NLL term; then the gradients of both.
    # Source: trl 1.16, experimental/cpo/cpo_trainer.py:824-861, trainer/utils.py selective_log_softmax (kernels/logprob_entropy.py).
    "logits": (6, 6, 10),
    # Both models' logits in float32 and generalized_jsd_loss's own: trl 1.16, experimental/gkd/gkd_trainer.py:271-297. 60 bytes an
    # element on top of 8 measured on the CPU for 0 < beta < 1.
    "jsd": (40, 36, 68),
}


def log_softmax(head: Head) -> LossMemory:
    """Online DPO: whole logits and accelerate's float32 copy of them, then log_softmax of the completion's N only, which alone is kept.

        forward  = norm + h T H + V x max((c + 4) T, 4 T + 4 N);  saved: 4 N V
        backward = norm + h T H + V x max(12 N, 4 T + 4 N, (4 + c) T): log_softmax and two gradients, the slice spread into all rows, the cast

    Source: trl 1.16, experimental/online_dpo/online_dpo_trainer.py:1126-1138; accelerate 1.15, accelerator.py:1824-1835.
    """
    kept = head.final_norm_bytes + head.tokens * head.hidden_size * head.hidden_width + head.weight_cast_bytes
    every, completion, converted = (
        head.tokens * head.vocab_size,
        head.labelled_tokens * head.vocab_size,
        FLOAT32 + head.compute_width,
    )
    gradient = head.weight_width * head.weight_elements + head.weight_cast_bytes if head.trainable else 0
    kept += head.compute_width * every if head.softcapped else 0  # tanh's output
    return LossMemory(
        forward=kept + max(converted * every, FLOAT32 * (every + completion)),
        saved=kept + FLOAT32 * completion,
        backward=kept
        + max(
            3 * FLOAT32 * completion,
            FLOAT32 * (every + completion),
            converted * every,
            head.compute_width * every + gradient,
        ),
        frozen=max(converted * every, FLOAT32 * (every + completion)),
    )


def score(head: Head) -> LossMemory:
    """Reward: one number a row from the last hidden state (modeling_layers.py, GenericForSequenceClassification)."""
    hidden = head.tokens * head.hidden_size * head.hidden_width
    return LossMemory(
        forward=head.final_norm_bytes + 2 * hidden,
        saved=head.final_norm_bytes + hidden,
        backward=head.final_norm_bytes + 3 * hidden,
    )


FORMULAS: dict[Loss, Callable[[Head], LossMemory]] = {
    "fused": fused,
    "divergence": divergence,
    "chunked_nll": chunked_nll,
    "liger": liger,
    "score": score,
    "logits": whole_logits(*LOGITS_BYTES["logits"]),
    "logits_cross_entropy": whole_logits(*LOGITS_BYTES["logits_cross_entropy"]),
    "log_softmax": log_softmax,
    "jsd": whole_logits(*LOGITS_BYTES["jsd"]),
}

# Losses whose head is a plain nn.Linear.
LINEAR_HEAD: frozenset[Loss] = frozenset({"logits", "logits_cross_entropy", "log_softmax", "jsd"})


def loss_of(candidate: TrainingInput) -> Loss:
    """The loss that the TRL release in force computes for this method."""
    if (
        candidate.use_liger_kernel
        and candidate.method_row.liger_loss
        and release(candidate.trl_version) < LIGER_LEAVES_THE_LOSS
    ):
        return "liger"
    for last, loss in candidate.method_row.earlier_losses:
        if release(candidate.trl_version) <= last:
            return loss
    return candidate.method_row.loss

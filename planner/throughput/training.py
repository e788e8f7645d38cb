"""The training pass: what one micro-step costs on one card."""

from dataclasses import dataclass
from functools import lru_cache

from planner.cache_keys import TrainingInput
from planner.gpus.cluster import Gpu
from planner.memory.loss import loss_of
from planner.methods import Loss
from planner.models.shape import ModelShape
from planner.throughput.rates import attention_rate, float32_rate, matmul_rate, memory_rate
from planner.throughput.smooth import either
from planner.throughput.work import BACKWARD_LAUNCHES, Work, frozen_work

BACKWARD_ELEMENTWISE = (
    2.0  # of the forward's traffic: each kernel reads a gradient and what was saved, and writes a gradient
)

# Backward of attention over its forward: five products against two (arXiv 2307.08691, section 2.3.2); eager saves its scores: four against two.
FLASH_BACKWARD = 2.5
EAGER_BACKWARD = 2.0
# Bytes that eager attention moves per score in a forward pass in 16 bits; its backward moves as many again and saved ones: twice that.
# Source: transformers 5.23, models/llama/modeling_llama.py `eager_attention_forward`: product 2, scale 4, mask 6, softmax in float32 2 + 4,
# cast 4 + 2, product 2.
ATTENTION_SCORE_BYTES = 26
# A bool mask becomes a 16-bit one in every layer, and the kernel reads it for every head: 1 read, 2 written, 2 read (internals.md 0.6).
MASK_BYTES = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadCost:
    """Products of the output head with each scored token, in units of 2 x vocabulary x hidden; bytes moved per logit, both ways together."""

    forward: float
    backward: float
    backward_trainable: float  # when the head itself learns
    logit_bytes: float
    all_tokens: bool  # prompts and padding as well


# Source: trl 1.16, kernels/chunked_logprob.py (forward writes and reads a tile; backward builds it again: 4 + 8 bytes a logit),
# kernels/chunked_divergence.py (two float32 tiles, twice); logits: 16-bit logits, their float32 copy by accelerate, log-softmax and the
# gradients of each (internals.md 1.4); log_softmax 16 and jsd 60 bytes beyond the logits (internals.md 1.4, measured peaks).
HEAD_COSTS: dict[Loss, HeadCost] = {
    "fused": HeadCost(forward=1, backward=2, backward_trainable=1, logit_bytes=12, all_tokens=False),
    "chunked_nll": HeadCost(forward=1, backward=2, backward_trainable=1, logit_bytes=24, all_tokens=False),
    "logits": HeadCost(forward=1, backward=1, backward_trainable=1, logit_bytes=24, all_tokens=True),
    "logits_cross_entropy": HeadCost(forward=1, backward=1, backward_trainable=1, logit_bytes=28, all_tokens=True),
    "log_softmax": HeadCost(forward=1, backward=1, backward_trainable=1, logit_bytes=40, all_tokens=True),
    "divergence": HeadCost(forward=1, backward=2, backward_trainable=1, logit_bytes=32, all_tokens=False),
    "jsd": HeadCost(forward=1, backward=1, backward_trainable=1, logit_bytes=76, all_tokens=True),
    "liger": HeadCost(forward=2, backward=0, backward_trainable=1, logit_bytes=12, all_tokens=False),
    "score": HeadCost(forward=0, backward=0, backward_trainable=0, logit_bytes=0, all_tokens=False),
}

FLASH = frozenset({"flash_attention_2", "flash_attention_3"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One micro-batch on one card: `rows` of `length` tokens, of which `scored` in all bear a loss; one long row where `flattened`."""

    rows: int
    length: int
    scored: int
    flattened: bool
    kernel: str

    @property
    def tokens(self) -> int:
        return self.rows * self.length


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """Seconds of some forwards: the card's products and traffic, its attention, and the CPU's launches beside them."""

    compute: float
    attention: float
    launch: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroStep:
    """Seconds of one micro-step. `elapsed` is the longer of the card's computation and the CPU's launches; `backward` the part of
    it that follows the forward, loss and recomputation included: gradients' communication can hide behind it."""

    compute: float
    recompute: float
    attention: float
    elapsed: float
    backward: float


def micro_batch(candidate: TrainingInput, gpu: Gpu) -> Batch:
    """The batch of the policy's training pass."""
    flattened, kernel = candidate.flattened, attention_kernel(candidate, gpu.supports_flash_attention_2)
    return Batch(
        rows=candidate.rows,
        length=candidate.row_tokens,
        scored=candidate.labelled_tokens,
        flattened=flattened and kernel not in FLASH,
        kernel=kernel,
    )


def attention_kernel(candidate: TrainingInput, flash: bool) -> str:
    """What attention costs as: sdpa takes FlashAttention where the card has it, numbers have 16 bits and there is no mask.

    Without a mask keys are not copied to every head, so that elsewhere nothing but plain products knows them where they are fewer than the queries'.
    Source: `planner.memory.stack_recipe.kernel`, which says where it is from.
    """
    if candidate.attn_implementation != "sdpa":
        return candidate.attn_implementation
    if candidate.pads or candidate.flattened:
        return "sdpa-masked"
    if flash and (candidate.precision != "no" or candidate.dtype != "float32"):
        return "sdpa"
    return "eager" if shares_keys(candidate.model) else "sdpa-efficient"


@lru_cache(maxsize=1024)
def shares_keys(model: ModelShape) -> bool:
    """Whether some layer has fewer keys than queries."""
    return any(
        layer.attention.num_key_value_heads < layer.attention.num_attention_heads for layer, _ in model.layer_kinds
    )


def forward_seconds(work: Work, gpu: Gpu, rate: float, batch: Batch) -> float:
    """One card's forward through the decoder layers, attention and head left out.

        products x tokens / rate + weights / bandwidth + element-wise traffic x tokens / bandwidth (+ casts, + unpacking of 4-bit weights)

    The second term is why small micro-batches are slow: at 153 tokens on an A100 (312e12 / 2.04e12) it is as large as the first.

    Example: Qwen2.5-7B, 1024 tokens, A100-80G: 54.9 ms + 8.5 ms + 10.9 ms.
    """
    bandwidth = memory_rate(gpu)
    traffic = (
        (work.elementwise_bytes + work.adapter_bytes) * batch.tokens
        + work.weight_bytes
        + work.cast_bytes
        + work.unpack_bytes
    )
    products = (work.linear_flops + work.adapter_flops) / rate + work.float32_flops / float32_rate(gpu)
    return products * batch.tokens + traffic / bandwidth


def backward_seconds(work: Work, gpu: Gpu, rate: float, batch: Batch) -> float:
    """One card's backward through the decoder layers.

        full: gradients of inputs and of weights, 2 x the forward's products; weights are read and their gradients written
        LoRA: gradients of inputs, 1 x, since frozen weights have none; the adapters have both

    Unpacking happens again. Source: bitsandbytes 0.50.2, autograd/_functions.py:384.
    """
    bandwidth = memory_rate(gpu)
    sides = 1 if work.adapter_only else 2
    products = (sides * work.linear_flops + 2 * work.adapter_flops) / rate + sides * work.float32_flops / float32_rate(
        gpu
    )
    traffic = BACKWARD_ELEMENTWISE * work.elementwise_bytes + work.adapter_backward_bytes
    return (
        products * batch.tokens + (traffic * batch.tokens + sides * work.weight_bytes + work.unpack_bytes) / bandwidth
    )


def attention_seconds(work: Work, gpu: Gpu, batch: Batch) -> float:
    """One card's attention in a forward pass: 4 x pairs x width for the two products, over all layers.

        pairs of a row of S tokens: S^2 / 2 (causal), with a window w < S: w S - w^2 / 2; S^2 where a mask is computed with (eager, masked sdpa)

    Example: Qwen2.5-7B, 8192 tokens in a row, flash-attention 2 on an A100: 28 x 4 x 3584 x 8192^2 / 2 = 13.5e12 FLOP, 86 ms.
    """
    rows, length = (1, batch.tokens) if batch.flattened else (batch.rows, batch.length)
    masked = batch.kernel in ("eager", "sdpa-masked")
    rate, bandwidth = attention_rate(gpu, batch.kernel), memory_rate(gpu)
    seconds = 0.0
    for window, flops, heads in work.attention:
        pairs = float(length * length)
        if not masked:
            pairs = window * length - window * window / 2 if 0 < window < length else pairs / 2
        seconds += rows * pairs * flops / rate
        if batch.kernel == "eager":
            seconds += rows * pairs * heads * ATTENTION_SCORE_BYTES / bandwidth
    if batch.kernel == "sdpa-masked":
        seconds += work.layers * rows * length * length * MASK_BYTES / bandwidth
    return seconds


def head_seconds(
    work: Work, gpu: Gpu, rate: float, cost: HeadCost, scored: int, products: float, share: float = 1.0
) -> float:
    """The output head on one card: `products` times the scored tokens, and `share` of the logits' traffic."""
    traffic = (
        products * work.head_bytes + share * cost.logit_bytes * scored * work.vocab_size if work.head_flops else 0.0
    )
    return products * work.head_flops * scored / rate + traffic / memory_rate(gpu)


def scoring(work: Work, gpu: Gpu, rate: float, batch: Batch, count: float) -> Pass:
    """`count` gradient-free forwards with log-probabilities by the fused head."""
    head = head_seconds(work, gpu, rate, HEAD_COSTS["fused"], batch.scored, 1, share=1 / 3)
    compute = forward_seconds(work, gpu, rate, batch) + head
    return Pass(
        compute=count * compute,
        attention=count * attention_seconds(work, gpu, batch),
        launch=count * work.launch_seconds,
    )


def micro_step(candidate: TrainingInput, work: Work, gpu: Gpu, batch: Batch) -> MicroStep:
    """Forward, loss, recomputation and backward of the policy, and the gradient-free forwards that go with them, on one card.

    A value model (PPO) is trained like a second policy without head. Checkpointing runs every `checkpoint_every_n_layers`-th
    layer's forward a second time.
    """
    rate, method = matmul_rate(gpu, candidate), candidate.method_row
    cost = HEAD_COSTS[loss_of(candidate)]
    trained = 2 if method.value_model else 1
    again = 1 / candidate.checkpoint_every_n_layers if candidate.gradient_checkpointing else 0.0
    forward, attention = (
        trained * forward_seconds(work, gpu, rate, batch),
        trained * attention_seconds(work, gpu, batch),
    )
    attention_back = attention * (EAGER_BACKWARD if batch.kernel == "eager" else FLASH_BACKWARD)
    products = cost.forward + cost.backward + (0 if work.adapter_only else cost.backward_trainable)
    head = head_seconds(work, gpu, rate, cost, batch.tokens if cost.all_tokens else batch.scored, products)
    compute = forward + trained * backward_seconds(work, gpu, rate, batch) + head
    launch, attention_all = trained * work.launch_seconds, attention * (1 + again) + attention_back
    frozen = _gradient_free(candidate, work, gpu, rate, batch)
    before = either(forward + attention + frozen.compute + frozen.attention, launch + frozen.launch)
    busy = compute + again * forward + attention_all + frozen.compute + frozen.attention
    elapsed = either(busy, launch * (1 + again + BACKWARD_LAUNCHES) + frozen.launch)
    return MicroStep(
        compute=compute + frozen.compute,
        recompute=again * forward,
        attention=attention_all + frozen.attention,
        elapsed=elapsed,
        backward=elapsed - before,
    )


def _gradient_free(candidate: TrainingInput, work: Work, gpu: Gpu, rate: float, batch: Batch) -> Pass:
    """The policy's extra forwards, a teacher's (every micro-step) and a reward model's (every row once: see `reuses`)."""
    passes = []
    if count := extra_forwards(candidate):
        passes.append(scoring(work, gpu, rate, batch, count))
    if candidate.method_row.teacher:
        passes.append(scoring(frozen_work(candidate.teacher_model or candidate.model, candidate), gpu, rate, batch, 1))
    if candidate.reward_model is not None or candidate.method_row.reward_model == "always":
        reward, share = frozen_work(candidate.reward_model or candidate.model, candidate), 1 / reuses(candidate)
        compute, attention = forward_seconds(reward, gpu, rate, batch), attention_seconds(reward, gpu, batch)
        passes.append(Pass(compute=share * compute, attention=share * attention, launch=share * reward.launch_seconds))
    if not passes:
        return NOTHING
    return Pass(
        compute=sum(p.compute for p in passes),
        attention=sum(p.attention for p in passes),
        launch=sum(p.launch for p in passes),
    )


NOTHING = Pass(compute=0.0, attention=0.0, launch=0.0)
PPO_EPOCHS = 4  # trl 1.12, experimental/ppo/ppo_config.py, num_ppo_epochs


def reuses(candidate: TrainingInput) -> int:
    """How many times a generated row is trained on: what is computed once a rollout is divided by it."""
    if candidate.method == "ppo":
        return PPO_EPOCHS
    return candidate.num_iterations if candidate.method_row.grouped_completions else 1


def extra_forwards(candidate: TrainingInput) -> float:
    """Gradient-free forwards of the policy's size for each micro-step.

    The reference (without beta, or with log-probabilities computed beforehand, there is none), KTO's KL batch, and the
    log-probabilities of the sampling policy: RLOO and PPO always; GRPO with vLLM (importance sampling correction) or where
    generation does not end with an optimizer step. PPO's value model scores the rollout as well.
    Source: trl 1.16, trainer/grpo_trainer.py:2642-2647, trainer/rloo_trainer.py:1600, trainer/kto_trainer.py:1306; trl 1.12 for PPO.
    """
    method = candidate.method_row
    reference = (
        1
        if (method.reference == "always" and not candidate.precompute_ref_log_probs)
        or (method.reference == "beta" and candidate.beta)
        else 0
    )
    if not method.generates:
        return reference * (1 + method.extra_forward_rows) + method.extra_forward_rows
    aligned = candidate.gradient_accumulation_steps % (candidate.steps_per_generation * candidate.num_iterations) == 0
    sampling = {"rloo": 1, "ppo": 2}.get(candidate.method, 0)
    if candidate.method == "grpo" and (candidate.vllm != "off" or not aligned):
        sampling = 1
    return (reference + sampling) / reuses(candidate)

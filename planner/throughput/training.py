"""Seconds of one micro-step on one GPU: forward, loss, recomputation and backward."""

from msgspec import Struct
from msgspec.structs import replace

from planner.cache_keys import TrainingInput
from planner.candidate import FLASH
from planner.gpus.cluster import Gpu
from planner.memory.dtypes import FLOAT32_BYTES
from planner.memory.stack_recipe import shares_keys
from planner.methods import Loss
from planner.models.image_tower import image_tower
from planner.throughput.rates import attention_rate, float32_rate, matmul_rate, memory_rate
from planner.throughput.rows import mean_micro_batch, slowest_tokens
from planner.throughput.smooth import smooth_max
from planner.throughput.work import BACKWARD_LAUNCHES, Folded, Work, frozen_work, trained_models

# Memory traffic of element-wise kernels in the backward pass, as a multiple of the forward pass: each kernel reads a
# gradient and a saved tensor, and writes a gradient.
BACKWARD_ELEMENTWISE = 2.0

# Seconds of attention's backward pass as a multiple of its forward pass: five matrix products against two (arXiv
# 2307.08691, section 2.3.2); eager attention saves its scores and has four against two.
FLASH_BACKWARD = 2.5
EAGER_BACKWARD = 2.0
# Bytes that eager attention moves per score in a forward pass in 16 bits; the backward pass moves twice as many.
# Source: transformers 5.23, models/llama/modeling_llama.py, `eager_attention_forward`: product 2, scale 4, mask 6,
# softmax in float32 2 + 4, cast 4 + 2, product 2.
ATTENTION_SCORE_BYTES = 26
# Bytes that sdpa moves per element of a mask in each layer: it reads the bool mask (1), writes it in 16 bits (2), and
# the kernel reads that (2). Source: pytorch 2.13, aten/src/ATen/native/transformers/attention.cpp,
# `convert_boolean_attn_mask`.
MASK_BYTES = 5


class HeadCost(Struct, frozen=True, kw_only=True):
    """Cost of the output head per scored token.

    `forward`, `backward`, `backward_trainable`: matrix products, in units of 2 x vocabulary x hidden FLOP.
    `logit_bytes`: bytes moved per logit, forward and backward together.
    """

    forward: float
    backward: float
    backward_trainable: float  # when the head itself learns
    logit_bytes: float
    all_tokens: bool  # scores prompts and padding too
    pair_bytes: float = 0.0  # for each two tokens of a row that are scored, and each word


# Source: "fused": trl 1.16, kernels/chunked_logprob.py (the forward pass writes and reads a tile of logits, the
# backward pass builds it again: 4 + 8 bytes per logit). "divergence": kernels/chunked_divergence.py (two float32 tiles,
# twice). "logits": 16-bit logits, the float32 copy that accelerate makes (accelerate 1.15, utils/operations.py,
# `convert_outputs_to_fp32`), log_softmax and the gradient of each (trl 1.16, experimental/cpo/cpo_trainer.py,
# `CPOTrainer.concatenated_forward`). "cut": tiles stay on the chip.
# "log_softmax" and "jsd": 16 and 60 bytes beyond the logits, the peaks that torch's
# profiler shows on the CPU for log_softmax with gather and for `generalized_jsd_loss` (trl 1.16,
# experimental/gkd/gkd_trainer.py, `GKDTrainer.generalized_jsd_loss`).
# "most_likely": of either model 16-bit logits and their float32 copy (8 bytes), and logsumexp: a maximum, a
# difference, its exponential and their sum (24; torch 2.13, aten/src/ATen/native/ReduceOps.cpp, `logsumexp_out_impl`).
# "sampled": of either model 16-bit logits and their float32 copy (8), their multiple (8) and the kernel that reads it
# (4); of the student its gradient (8), and those of the multiple (8) and in 16 bits (6): 62.
# "weighted": of either model 16-bit logits and their float32 copy (8), their multiple (8) and log_softmax (8); of the
# student gradients of gather (4), log_softmax (12), the multiple (8), the slice (8) and in 16 bits (6). "scored": the
# student's alone.
# Of the student also topk, four passes of 8 bits and one that gathers (20; native/cuda/TensorTopK.cu), and gradients:
# of logsumexp (24; torch/csrc/autograd/FunctionsManual.cpp, `logsumexp_backward`), of topk (4), their sum (12), in 16
# bits (6). Operators: trl 1.16, experimental/sdft/loss_utils.py, `compute_topk_self_distillation_loss`.
# "universal": of either model 16-bit logits and their float32 copy (8), gradients of the slice (8) and in 16 bits (6).
# For each token of a completion autograd copies the gradient of all of them (8), makes zeros (4) and adds them (12;
# torch 2.13, torch/csrc/autograd/functions/tensor.cpp, `CopySlices`); sorting is little beside it, left out.
HEAD_COSTS: dict[Loss, HeadCost] = {
    "fused": HeadCost(forward=1, backward=2, backward_trainable=1, logit_bytes=12, all_tokens=False),
    "chunked_nll": HeadCost(forward=1, backward=2, backward_trainable=1, logit_bytes=24, all_tokens=False),
    "chunked_float32": HeadCost(forward=1, backward=2, backward_trainable=1, logit_bytes=24, all_tokens=False),
    "logits": HeadCost(forward=1, backward=1, backward_trainable=1, logit_bytes=24, all_tokens=True),
    "candidates": HeadCost(forward=1, backward=2, backward_trainable=1, logit_bytes=24, all_tokens=False),
    "completion_logits": HeadCost(forward=1, backward=1, backward_trainable=1, logit_bytes=24, all_tokens=False),
    "triple": HeadCost(forward=1, backward=1, backward_trainable=1, logit_bytes=24, all_tokens=True),
    "preference": HeadCost(forward=1, backward=1, backward_trainable=1, logit_bytes=40, all_tokens=True),
    "unpaired": HeadCost(forward=1, backward=1, backward_trainable=1, logit_bytes=40, all_tokens=True),
    "causal_lm": HeadCost(forward=1, backward=1, backward_trainable=1, logit_bytes=28, all_tokens=True),
    "logits_cross_entropy": HeadCost(forward=1, backward=1, backward_trainable=1, logit_bytes=28, all_tokens=True),
    "log_softmax": HeadCost(forward=1, backward=1, backward_trainable=1, logit_bytes=40, all_tokens=True),
    "most_likely": HeadCost(forward=1, backward=1, backward_trainable=1, logit_bytes=130, all_tokens=False),
    "scored": HeadCost(forward=1, backward=1, backward_trainable=1, logit_bytes=62, all_tokens=True),
    "sampled": HeadCost(forward=1, backward=1, backward_trainable=1, logit_bytes=62, all_tokens=False),
    "divergence": HeadCost(forward=1, backward=2, backward_trainable=1, logit_bytes=32, all_tokens=False),
    "jsd": HeadCost(forward=1, backward=1, backward_trainable=1, logit_bytes=76, all_tokens=True),
    "universal": HeadCost(forward=1, backward=1, backward_trainable=1, logit_bytes=30, all_tokens=True, pair_bytes=24),
    "weighted": HeadCost(forward=1, backward=1, backward_trainable=1, logit_bytes=86, all_tokens=True),
    "cut": HeadCost(forward=1, backward=2, backward_trainable=1, logit_bytes=0, all_tokens=False),
    "liger": HeadCost(forward=2, backward=0, backward_trainable=1, logit_bytes=12, all_tokens=False),
    "score": HeadCost(forward=0, backward=0, backward_trainable=0, logit_bytes=0, all_tokens=False),
}


class Batch(Struct, frozen=True, kw_only=True):
    """One micro-batch on one GPU: `rows` of `length` tokens. `scored`: tokens of all rows with a label.

    `flattened`: attention sees one long row, without FlashAttention's kernel for rows of different lengths.
    `lengths`: (tokens of a row that attention sees, how many of them there are), where rows differ; empty: `rows` of
    `length`.
    """

    rows: int
    length: float
    scored: float
    flattened: bool
    kernel: str
    row_gpus: int = 1  # GPUs that share each row
    causal: bool = True  # a token sees the tokens before it; the patches of an image see all others
    lengths: tuple[tuple[float, float], ...] = ()

    @property
    def tokens(self) -> float:
        return self.rows * (self.length / self.row_gpus if self.lengths else -(-self.length // self.row_gpus))

    @property
    def seen(self) -> tuple[tuple[float, float], ...]:
        """Return the rows that attention sees, as (tokens, how many)."""
        whole = (self.rows * self.length, 1.0) if self.flattened else (self.length, self.rows)
        return self.lengths or (whole,)


class Pass(Struct, frozen=True, kw_only=True):
    """Seconds of forward passes: matrix products and memory traffic, attention, and the CPU's launches."""

    compute: float
    attention: float
    launch: float


class MicroStep(Struct, frozen=True, kw_only=True):
    """Seconds of one micro-step.

    `elapsed`: the longer of the GPU's computation and the CPU's launches. `backward`: the part of `elapsed` after the
    forward pass, with loss and recomputation; DDP communicates gradients during it.
    """

    compute: float
    recompute: float
    attention: float
    elapsed: float
    backward: float

    @property
    def forward(self) -> float:
        """Seconds of the forward passes, those without gradients included."""
        return self.elapsed - self.backward


def micro_batch(candidate: TrainingInput, gpu: Gpu) -> Batch:
    """The batch of the policy's training pass: with lengths of rows the mean one, else full rows."""
    flattened, kernel = candidate.flattened, attention_kernel(candidate, gpu.supports_flash_attention_2)
    full = Batch(
        rows=candidate.rows,
        length=candidate.row_tokens,
        scored=candidate.labelled_tokens,
        flattened=flattened and kernel not in FLASH,
        kernel=kernel,
        row_gpus=candidate.row_gpus,
    )
    mean = mean_micro_batch(candidate)
    if mean is None:
        return full
    # Of sampled rows the head computes completions with their padding.
    prompts = -(-candidate.rows // candidate.num_generations) if candidate.path_tokens else candidate.rows
    sampled = mean.computed - prompts * candidate.prompt_length
    scored = (sampled if candidate.method_row.generates else mean.tokens) / candidate.row_gpus
    return replace(full, length=mean.computed / candidate.rows, scored=scored, lengths=mean.seen)


def slowest_batch(candidate: TrainingInput, batch: Batch) -> Batch:
    """Return the batch of the GPU that the others wait for; the same one where rows are full."""
    mean = mean_micro_batch(candidate)
    if mean is None:
        return batch
    more = slowest_tokens(candidate, mean) / mean.computed
    lengths = tuple((tokens, more * count) for tokens, count in batch.lengths)
    return replace(batch, length=more * batch.length, scored=more * batch.scored, lengths=lengths)


def attention_kernel(candidate: TrainingInput, flash: bool) -> str:
    """Name of the attention kernel in `ATTENTION_FRACTION`.

    sdpa runs cuDNN or FlashAttention ("sdpa", by card) if the GPU has it (`flash`), the dtype has 16 bits and there is
    no mask; with a mask cuDNN or the memory-efficient kernel ("sdpa-masked"). Without a mask and without
    FlashAttention, models with fewer key heads than query heads run plain matrix products up to torch 2.13, since only
    those support them. Source: see `planner.memory.stack_recipe.kernel`.
    """
    if candidate.attn_implementation != "sdpa":
        return candidate.attn_implementation
    if candidate.pads or candidate.flattened:
        return "sdpa-masked"
    if flash and (candidate.precision != "no" or candidate.dtype != "float32"):
        return "sdpa"
    composed = shares_keys(candidate.model) and not candidate.groups_efficiently
    return "eager" if composed else "sdpa-efficient"


def forward_seconds(work: Work, gpu: Gpu, rate: float, batch: Batch) -> float:
    """Seconds of one forward pass through the decoder layers on one GPU, without attention and head.

        products x tokens / rate + (weights + casts + unpacking) / bandwidth + element-wise traffic x tokens / bandwidth

    The second term makes small micro-batches slow: with 153 tokens on an A100 (312e12 / 2.04e12) it equals the first.

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
    return products * batch.tokens + traffic / bandwidth + folding_seconds(work.folded, gpu, rate)


def backward_seconds(work: Work, gpu: Gpu, rate: float, batch: Batch) -> float:
    """Seconds of one backward pass through the decoder layers on one GPU, without attention and head.

        full    gradients of inputs and weights: 2 x the forward's products; reads the weights, writes their gradients
        LoRA    gradients of inputs: 1 x the forward's products; for the adapters both gradients; of experts with
                adapters the gradient of the weights too, from which those of the adapters are made

    Quantized weights are unpacked again. Source: bitsandbytes 0.50.2, autograd/_functions.py, `MatMul4Bit.backward`.
    """
    bandwidth = memory_rate(gpu)
    sides = 1 if work.adapter_only else 2
    products = (sides * work.linear_flops + 2 * work.adapter_flops) / rate + sides * work.float32_flops / float32_rate(
        gpu
    )
    folded, own_rate = work.folded, _rate_of_weights(work.folded, gpu, rate)
    once = (2 * folded.active * batch.tokens + 2 * folded.flops) / own_rate + folded.backward_bytes / bandwidth
    traffic = BACKWARD_ELEMENTWISE * work.elementwise_bytes + work.adapter_backward_bytes
    moved = traffic * batch.tokens + sides * work.weight_bytes + work.unpack_bytes
    return products * batch.tokens + moved / bandwidth + once


def folding_seconds(folded: Folded, gpu: Gpu, rate: float) -> float:
    """Seconds in which a pass folds the adapters of fused experts into their weights; 0 without them.

    Example: Qwen3-30B-A3B, r 16 on all-linear, H100: 29.0e9 weights, 116e9 bytes, 46 ms, and 2 ms of products.
    """
    return folded.flops / _rate_of_weights(folded, gpu, rate) + folded.forward_bytes / memory_rate(gpu)


def _rate_of_weights(folded: Folded, gpu: Gpu, rate: float) -> float:
    """Return the FLOP/s of products with folded weights, which autocast leaves in float32 where they are stored so."""
    return float32_rate(gpu) if folded.width == FLOAT32_BYTES else rate


def attention_seconds(work: Work, gpu: Gpu, batch: Batch) -> float:
    """Seconds of attention in one forward pass on one GPU, all layers: 4 x pairs x width FLOP for its two products.

        pairs in a row of S tokens = S^2 / 2 (causal) | w S - w^2 / 2 (window w < S) | S^2 (given masks, images)
                                   | w S (windows of w patches of an image)

    Eager attention and masked sdpa also move scores and masks through memory. GPUs that share a row share its pairs
    equally: a part of the queries each (context parallel), or of the heads (Ulysses).
    Leaves out the exchange of keys and values, or of heads.

    Example: Qwen2.5-7B, 8192 tokens in a row, flash-attention 2 on an A100: 28 x 4 x 3584 x 8192^2 / 2 = 13.5e12 FLOP,
    86 ms.
    """
    rate, bandwidth = attention_rate(gpu, batch.kernel), memory_rate(gpu)
    seconds = 0.0
    for window, flops, heads in work.attention:
        pairs = sum(rows * _pairs(length, window, batch) for length, rows in batch.seen)
        seconds += pairs * flops / rate
        if batch.kernel == "eager":
            seconds += pairs * heads * ATTENTION_SCORE_BYTES / bandwidth
    if batch.kernel == "sdpa-masked":
        squares = sum(rows * length * length for length, rows in batch.seen)
        seconds += work.layers * squares * MASK_BYTES / bandwidth
    return seconds / batch.row_gpus


def _pairs(length: float, window: int, batch: Batch) -> float:
    """Return the pairs of tokens in a row that a kernel computes; see `attention_seconds`."""
    if batch.causal and batch.kernel not in ("eager", "sdpa-masked"):
        return window * length - window * window / 2 if 0 < window < length else length * length / 2
    return window * length if not batch.causal and 0 < window < length else length * length


def head_seconds(
    work: Work, gpu: Gpu, rate: float, cost: HeadCost, scored: float, products: float, share: float = 1.0
) -> float:
    """Seconds of the output head on one GPU: `products` x `scored` tokens, and `share` of the logits' traffic."""
    traffic = (
        products * work.head_bytes + share * cost.logit_bytes * scored * work.vocab_size if work.head_flops else 0.0
    )
    return products * work.head_flops * scored / rate + traffic / memory_rate(gpu)


def scoring(work: Work, gpu: Gpu, rate: float, batch: Batch, count: float) -> Pass:
    """Seconds of `count` forward passes without gradients, with log-probabilities by the fused head."""
    head = head_seconds(work, gpu, rate, HEAD_COSTS["fused"], batch.scored, 1, share=1 / 3)
    compute = forward_seconds(work, gpu, rate, batch) + head
    return Pass(
        compute=count * compute,
        attention=count * attention_seconds(work, gpu, batch),
        launch=count * work.launch_seconds,
    )


def micro_step(candidate: TrainingInput, work: Work, gpu: Gpu, batch: Batch) -> MicroStep:
    """Seconds of one micro-step on one GPU: the policy's passes, and the forward passes without gradients.

        elapsed = smooth_max(products + recomputation + attention + head, launches)

    Checkpointing runs the forward pass of every n-th layer again (`checkpoint_every_n_layers`). PPO trains its value
    model in full beside the policy; images pass a vision tower.
    """
    rate = matmul_rate(gpu, candidate)
    cost = HEAD_COSTS[candidate.loss]
    models = [(each, batch) for each in trained_models(candidate, work)] + image_batches(candidate, batch)
    again = 1 / candidate.checkpoint_every_n_layers if candidate.gradient_checkpointing else 0.0
    forward = sum(forward_seconds(each, gpu, rate, rows) for each, rows in models)
    attention = sum(attention_seconds(each, gpu, rows) for each, rows in models)
    attention_back = attention * (EAGER_BACKWARD if batch.kernel == "eager" else FLASH_BACKWARD)
    products = cost.forward + cost.backward + (cost.backward_trainable if work.trains_head else 0)
    head = head_seconds(work, gpu, rate, cost, batch.tokens if cost.all_tokens else batch.scored, products)
    pairs = batch.scored * batch.scored / max(batch.rows, 1)
    head += cost.pair_bytes * pairs * work.vocab_size / memory_rate(gpu)
    compute = forward + sum(backward_seconds(each, gpu, rate, rows) for each, rows in models) + head
    launch, attention_all = sum(each.launch_seconds for each, _ in models), attention * (1 + again) + attention_back
    frozen = _gradient_free(candidate, work, gpu, rate, batch)
    before = smooth_max(forward + attention + frozen.compute + frozen.attention, launch + frozen.launch)
    busy = compute + again * forward + attention_all + frozen.compute + frozen.attention
    elapsed = smooth_max(busy, launch * (1 + again + BACKWARD_LAUNCHES) + frozen.launch)
    return MicroStep(
        compute=compute + frozen.compute,
        recompute=again * forward,
        attention=attention_all + frozen.attention,
        elapsed=elapsed,
        backward=elapsed - before,
    )


def image_batches(candidate: TrainingInput, batch: Batch) -> list[tuple[Work, Batch]]:
    """The work of a vision tower with its batch: a row of patches for each image; empty for rows of text.

    Leaves out the tower's adapters, and that a tower without adapters may have no backward pass.
    """
    tower = image_tower(candidate.model, candidate.image_size) if candidate.images_per_row else None
    if tower is None:
        return []
    images = candidate.rows * candidate.images_per_row
    kernel = "sdpa" if batch.kernel == "sdpa-masked" and not tower.one_row else batch.kernel
    rows = Batch(
        rows=1 if tower.one_row else images,
        length=tower.patches * (images if tower.one_row else 1),
        scored=0,
        flattened=False,
        kernel=kernel,
        causal=False,
    )
    own = replace(frozen_work(tower.stack, candidate), adapter_only=candidate.tuning == "lora")
    return [(own, rows)]


def _gradient_free(candidate: TrainingInput, work: Work, gpu: Gpu, rate: float, batch: Batch) -> Pass:
    """Seconds per micro-step of passes without gradients: the policy's extra ones, the teacher's, the reward model's.

    A reward model scores each row once, however often the row is trained on (`reuses`).
    """
    passes = []
    if count := extra_forwards(candidate):
        passes.append(scoring(work, gpu, rate, batch, count))
        passes += [scoring(tower, gpu, rate, rows, count) for tower, rows in image_batches(candidate, batch)]
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


def epochs_per_step(candidate: TrainingInput) -> int:
    """Return how often the rows of a step are trained on within it.

    PPO's trainer counts one step for a rollout and all its epochs, each of which ends with an optimizer step (trl 1.12,
    experimental/ppo/ppo_trainer.py); GRPO's and RLOO's count every optimizer step.
    """
    return candidate.method_row.epochs_per_rollout or 1


def reuses(candidate: TrainingInput) -> int:
    """Return how many times a generated row is trained on; seconds spent once per rollout are divided by it."""
    return candidate.num_iterations if candidate.method_row.grouped_completions else epochs_per_step(candidate)


def extra_forwards(candidate: TrainingInput) -> float:
    """Forward passes without gradients, of the policy's size, per micro-step.

        reference           1; 0 without beta (GRPO, RLOO) or with precompute_ref_log_probs
        KTO's KL batch      1, and 1 more for the reference
        sampling policy     1 for RLOO; 2 for PPO, with its value model; 1 for GRPO with vLLM (importance sampling
                            correction) or if generations do not end with an optimizer step; else 0

    Methods that generate divide the sum by `reuses`.

    Source: trl 1.16, trainer/grpo_trainer.py, `GRPOTrainer._generate_and_score_completions`, trainer/rloo_trainer.py,
    `RLOOTrainer._generate_and_score_completions`, trainer/kto_trainer.py, `KTOTrainer.compute_ref_log_probs`; trl 1.12
    for PPO.
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
    return (reference + method.sampling_forwards + candidate.rescores_samples) / reuses(candidate)

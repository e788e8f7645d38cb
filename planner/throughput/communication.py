"""Links: gradients and parameters between cards, and what goes to the host and back."""

from planner.cache_keys import TrainingInput
from planner.candidate import Sharding
from planner.gpus.cluster import Cluster
from planner.throughput.rates import host_rate, link_rate
from planner.throughput.training import Batch, MicroStep, extra_forwards
from planner.throughput.work import Work

# Share of the backward (and, with prefetch, of the whole micro-step) that communication hides behind.
# Source: DDP and FSDP overlap by design (arXiv 2006.15704, section 3.2.3; arXiv 2304.11277, section 3.3), and on two RTX 4090 LoRA under FSDP
# takes 481 s where DDP takes 437 (AnswerDotAI/fsdp_qlora, benchmarks_03_2024.md). ZeRO-3 is taken not to overlap: LoRA on Qwen-72B with
# 4 x A100-80G needs 2.20 s for 256 tokens, the sum of its gathers (1.6 s) and of its products, not the larger (QwenLM/Qwen, README.md).
OVERLAP: dict[Sharding, float] = {"none": 0.0, "ddp": 1.0, "zero1": 0.0, "zero2": 0.0, "zero3": 0.0, "fsdp2": 1.0}

# How often each micro-step gathers all parameters: forward and backward, and ZeRO-3 also before recomputation (internals.md section 5).
GATHERS: dict[Sharding, int] = {"zero3": 2, "fsdp2": 2}

# DeepSpeed's CPU Adam with its copies: full fine-tuning of Qwen2.5-3B (3.09e9) on 2 x A100-40G takes 3.08 s a step with ZeRO offload on a host
# of 128 cores; all of it is charged here, so this is a lower bound. Source: deepspeedai/DeepSpeed, pull request 7474.
CPU_ADAM_PARAMS_PER_SECOND = 1.0e9

SAVED_MLP_BYTES = (
    8  # a token and inner element, without checkpointing (internals.md section 3: 16TH + 8TF and attention's 8TH)
)
SAVED_HIDDEN_BYTES = 24


def communication_seconds(candidate: TrainingInput, cluster: Cluster, work: Work, step: MicroStep) -> float:
    """Time of one optimizer step that one card waits for others.

        DDP: all-reduce of the trained gradients, 2 (n - 1) / n x bytes / link, once, hidden behind the last backward
        ZeRO-1, ZeRO-2: reduce-scatter of 16-bit gradients ((n - 1) / n), ZeRO-2 in every micro-step, and all-gather of the trained parameters
        ZeRO-3, FSDP2: all-gather of all stored parameters forward and backward in every micro-step, reduce-scatter of the gradients

    Example: LoRA on Qwen-72B, ZeRO-3, 4 x A100-80G: 3 x 144e9 x 3/4 / 207e9 = 1.57 s a micro-step.

    Leaves out latency, gathers of a teacher or reward model, and the small messages of metrics.
    """
    n, sharding = candidate.num_processes, candidate.sharding
    if n == 1 or sharding == "none":
        return 0.0
    link = link_rate(cluster, candidate.num_nodes)
    portion = (n - 1) / n
    accumulation = candidate.gradient_accumulation_steps
    gradient_bytes = work.trainable_params * (
        4.0 if sharding == "ddp" and (work.adapter_only or candidate.dtype == "float32") else 2.0
    )
    if sharding in GATHERS:
        gathers = _gathers(candidate)
        once = portion * (gathers * work.stored_bytes + gradient_bytes) / link
        return accumulation * max(0.0, once - OVERLAP[sharding] * step.elapsed)
    if sharding == "ddp":
        return max(0.0, 2 * portion * gradient_bytes / link - OVERLAP[sharding] * step.backward)
    reductions = accumulation if sharding == "zero2" else 1
    return portion * (reductions + 1) * gradient_bytes / link


def offload_seconds(candidate: TrainingInput, cluster: Cluster, work: Work, batch: Batch, step: MicroStep) -> float:
    """Time of one optimizer step that a card waits for its host.

    Optimizer: gradients down, 16-bit parameters up, and Adam on the CPU, shared by the cards of a node. Parameters: each card's
    share up for every gather. Activations: what is saved, down and up, as far as the micro-step does not hide it.

    Example: Qwen2.5-7B, full, ZeRO-2 on 8 cards: 7.6 s for Adam and 0.15 s for copies.
    """
    seconds, host = 0.0, host_rate(cluster.gpu)
    accumulation, n = candidate.gradient_accumulation_steps, candidate.num_processes
    if candidate.offload_optimizer:
        seconds += 4.0 * work.trainable_params / n / host
        seconds += work.trainable_params / CPU_ADAM_PARAMS_PER_SECOND / max(1, min(candidate.num_nodes, n))
    if candidate.offload_param:
        seconds += accumulation * _gathers(candidate) * work.stored_bytes / n / host
    if candidate.activation_offloading or candidate.checkpoint_offload:
        saved = _saved_bytes(candidate, work) * batch.tokens
        seconds += accumulation * max(0.0, 2 * saved / host - step.elapsed)
    return seconds


def _gathers(candidate: TrainingInput) -> float:
    """How often a micro-step gathers the policy: forward, backward, ZeRO-3's recomputation, and each gradient-free forward of its size."""
    again = 1 if candidate.sharding == "zero3" and candidate.gradient_checkpointing else 0
    return GATHERS.get(candidate.sharding, 2) + again + extra_forwards(candidate)


def _saved_bytes(candidate: TrainingInput, work: Work) -> float:
    """Bytes a token that go to the host: the checkpoints, or without checkpointing what all layers save."""
    width = 4 if candidate.dtype == "float32" else 2
    if candidate.gradient_checkpointing:
        return float(width * work.hidden_size * work.layers)
    return float(work.layers * (SAVED_HIDDEN_BYTES * work.hidden_size + SAVED_MLP_BYTES * work.inner_size))

"""Throughput: how long an optimizer step takes and what it spends its time on.

The model is a roofline with the launches of an eager framework on top. Every micro-step multiplies tokens with weights
(2 FLOP a weight forward; backward 4 for full fine-tuning, 2 under LoRA, whose frozen weights have no gradient; 2 again for
recomputation), reads those weights once a pass, moves activations through memory in element-wise kernels, and computes
attention over pairs of tokens. Products run at a stated fraction of the data sheet's rate, traffic at a stated fraction of
its bandwidth (`rates.py`); so small models and small micro-batches fall below the peak because of their bytes, not by a table of
utilizations. The CPU launches kernels meanwhile; the longer of both counts (`smooth.py`). To that come communication that no
computation hides, the optimizer's traffic, offloading, and for methods that generate: prefill, decode and weight sync. The trainer
and a vLLM server take turns, as TRL's do.

Figures rank candidates. They are estimates of padded tokens at full length: rows are taken to have all of `max_length`, completions to
run to `max_completion_length`. Left out: data loading, logging, evaluation, saving, reward functions, stragglers, and thermal limits.
Predicted against published speeds: `results/throughput.md`.
"""

from planner.cache_keys import TrainingInput
from planner.candidate import Candidate
from planner.gpus.cluster import Cluster
from planner.quantities import Throughput
from planner.throughput.communication import communication_seconds, offload_seconds
from planner.throughput.generation import generation_seconds, rollouts, weight_sync_seconds
from planner.throughput.optimizer_step import optimizer_seconds
from planner.throughput.training import micro_batch, micro_step
from planner.throughput.work import policy_work


def throughput(candidate: Candidate, cluster: Cluster, concurrency: float) -> Throughput:
    """Speed of `candidate` on its cards of `cluster`; `concurrency`: sequences that the vLLM engine decodes at once.

        step = accumulation x either(computation, launches) + communication + optimizer + offload + rollouts x (generation + weight sync)
        tokens per second = rows x row tokens x accumulation x processes / step

    `launch` in `seconds` is what the CPU's launches add to the card's computation.
    """
    return with_generation(training_seconds(candidate, cluster), candidate, cluster, concurrency)


def with_generation(
    training: dict[str, float], candidate: Candidate, cluster: Cluster, concurrency: float
) -> Throughput:
    """Speed of `candidate`, whose `training_seconds` are given: the seconds of its rollouts are added."""
    seconds = training.copy()
    if candidate.method_row.generates:
        rollout = generation_seconds(candidate, cluster, policy_work(candidate), concurrency)
        seconds["generation"] = rollouts(candidate)[1] * rollout
    step_seconds = sum(seconds.values())
    tokens = candidate.tokens * candidate.gradient_accumulation_steps * candidate.num_processes
    return Throughput(
        tokens_per_second=tokens / step_seconds, step_seconds=step_seconds, seconds=seconds, evidence="estimated"
    )


def training_seconds(candidate: TrainingInput, cluster: Cluster) -> dict[str, float]:
    """Seconds of an optimizer step by cause, without the rollouts: `generation` is 0."""
    gpu = cluster.gpu
    accumulation = candidate.gradient_accumulation_steps
    work, batch = policy_work(candidate), micro_batch(candidate, gpu)
    step = micro_step(candidate, work, gpu, batch)
    generates = candidate.method_row.generates
    return {
        "compute": accumulation * step.compute,
        "recompute": accumulation * step.recompute,
        "attention": accumulation * step.attention,
        "launch": accumulation * (step.elapsed - step.compute - step.recompute - step.attention),
        "communication": communication_seconds(candidate, cluster, work, step),
        "optimizer": optimizer_seconds(candidate, gpu, work),
        "offload": offload_seconds(candidate, cluster, work, batch, step),
        "generation": 0.0,
        "weight_sync": rollouts(candidate)[1] * weight_sync_seconds(candidate, cluster, work) if generates else 0.0,
    }

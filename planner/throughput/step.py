"""Throughput: the seconds of an optimizer step, by cause.

The model is a roofline plus the time in which an eager framework launches its kernels:

- Matrix products: 2 FLOP per weight and token forward; backward 4 for full fine-tuning and 2 under LoRA, whose frozen
  weights have no gradient; 2 more for recomputation. They run at a fraction of the data sheet's rate (`rates.py`).
- Memory traffic: each pass reads the weights once, and element-wise kernels read and write activations. It runs at a
  fraction of the data sheet's bandwidth. Small models and small micro-batches stay below the peak because of it; there
  is no table of utilizations.
- Attention over pairs of tokens.
- Launches: the CPU launches kernels at the same time; the longer of both counts (`smooth.py`).
- Communication and offloading as far as computation does not hide them, and the optimizer's memory traffic.
- For methods that generate: prefill, decode and weight sync. The trainer and a vLLM server take turns, as in TRL, but
  for an asynchronous one, where the slower side decides.

The seconds rank candidates. Without the lengths of rows they count full ones: all rows have `row_tokens` tokens, all
completions have `max_completion_length`. With them a micro-batch has its mean number of tokens, padding included, and
GPUs wait for the one with most of them (`waiting`). They leave out data loading, logging, evaluation, saving, reward
functions, stragglers and thermal limits. Predicted against published speeds: `results/throughput.md`.
"""

from planner.cache_keys import TrainingInput
from planner.candidate import Candidate
from planner.gpus.cluster import Cluster
from planner.quantities import Throughput
from planner.throughput.communication import communication_seconds, offload_seconds
from planner.throughput.generation import generation_seconds, rollouts, teacher_seconds, weight_sync_seconds
from planner.throughput.optimizer_step import optimizer_seconds
from planner.throughput.rows import epoch, mean_micro_batch
from planner.throughput.training import epochs_per_step, micro_batch, micro_step, slowest_batch
from planner.throughput.work import policy_work


def throughput(candidate: Candidate, cluster: Cluster, concurrency: float) -> Throughput:
    """Speed of a candidate on its GPUs. `concurrency`: rows that the vLLM engine decodes at once, 0 without vLLM.

        step = epochs x (accumulation x smooth_max(computation, launches) + communication + optimizer + offload)
             + rollouts x (generation + weight sync)
        asynchronous: max(the rest, generation) + weight sync, during which the server is paused
        a teacher's server scores after each rollout, an asynchronous one meanwhile
        tokens per second = rows x row tokens x accumulation x batches / step

    `epochs` is 1 but for PPO. A token counts once a step, and padding not at all where the lengths of rows are given:
    the first factors are then the tokens of the rows. `launch` in `seconds` is the time that the CPU's launches add
    to the GPU's computation.
    """
    return with_generation(training_seconds(candidate, cluster), candidate, cluster, concurrency)


def with_generation(
    training: dict[str, float], candidate: Candidate, cluster: Cluster, concurrency: float
) -> Throughput:
    """Speed of a candidate from its `training_seconds`, which lack the seconds of its rollouts."""
    seconds = training.copy()
    if candidate.method_row.generates:
        rollout = generation_seconds(candidate, cluster, policy_work(candidate), concurrency)
        scoring = teacher_seconds(candidate, cluster)
        seconds["generation"] = rollouts(candidate)[1] * (rollout + scoring)
        if candidate.method_row.asynchronous:  # only the part that the trainer waits for
            trained = sum(training.values()) - training["weight_sync"]
            seconds["generation"] = max(rollout - trained, scoring - trained, 0.0)
    step_seconds = sum(seconds.values())
    mean = mean_micro_batch(candidate)
    batch_tokens = candidate.tokens * candidate.row_gpus if mean is None else mean.tokens
    tokens = batch_tokens * candidate.gradient_accumulation_steps * candidate.batches
    return Throughput(
        tokens_per_second=tokens / step_seconds,
        step_seconds=step_seconds,
        seconds=seconds,
        evidence="estimated",
        epoch=epoch(candidate),
    )


def training_seconds(candidate: TrainingInput, cluster: Cluster) -> dict[str, float]:
    """Seconds of a step by cause. `generation` is 0: it depends on the engine (`with_generation`).

    A step ends with one optimizer step; PPO's has one for each epoch (`epochs_per_step`).
    """
    gpu = cluster.gpu
    epochs = epochs_per_step(candidate)
    passes = epochs * candidate.gradient_accumulation_steps
    work, batch = policy_work(candidate), micro_batch(candidate, gpu)
    step = micro_step(candidate, work, gpu, batch)
    generates = candidate.method_row.generates
    slowest = micro_step(candidate, work, gpu, slowest_batch(candidate, batch)) if candidate.rows_differ else step
    waiting = {"waiting": passes * (slowest.elapsed - step.elapsed)} if candidate.rows_differ else {}
    return {
        "compute": passes * step.compute,
        "recompute": passes * step.recompute,
        "attention": passes * step.attention,
        "launch": passes * (step.elapsed - step.compute - step.recompute - step.attention),
        "communication": epochs * communication_seconds(candidate, cluster, work, step),
        "optimizer": epochs * optimizer_seconds(candidate, gpu, work),
        "offload": epochs * offload_seconds(candidate, cluster, work, batch, step),
        **waiting,
        "generation": 0.0,
        "weight_sync": rollouts(candidate)[1] * weight_sync_seconds(candidate, cluster, work) if generates else 0.0,
    }

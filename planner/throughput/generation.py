"""Rollouts: prefill and decode by generate() or by vLLM, and the weights' way to the engine."""

from planner.cache_keys import TrainingInput
from planner.candidate import DTYPE_BYTES, Candidate
from planner.gpus.cluster import Cluster, Gpu
from planner.throughput.rates import attention_rate, host_rate, link_rate, matmul_rate, memory_rate, sixteen_bit_rate
from planner.throughput.smooth import either
from planner.throughput.training import PPO_EPOCHS
from planner.throughput.work import Work

# A decode step of vLLM beyond reading its weights: Qwen2.5-0.5B (24 layers) 3.21 ms a token of which 0.65 is reading, 7B (28) 11.9 and 9.2,
# 14B (48) 21.6 and 18.3: 0.07 to 0.12 ms a layer. Source: QwenLM/Qwen2.5, docs/source/benchmark/speed_benchmark.rst (vLLM 0.6.3, A100-80G).
ENGINE_LAYER_SECONDS = 0.09e-3
# HF attention under a mask repeats keys and values to all heads at every token, and DynamicCache concatenates them: 5 times the repeated cache
# goes over the bus. At a context of 31,700 tokens a token takes 53 ms for 7B (7 query heads a key head), 122 for 14B and 179 for 32B (5 each).
# Source: as above, transformers 4.46.
HF_CACHE_PASSES = 5
# sleep(level=2) after, wake_up before: the shortest level 2 wake of the vLLM blog, "Zero-Reload Model Switching with vLLM Sleep Mode"
# (2025-10-26: 0.8 to 2.6 s); what is longer there is the weights' reading, counted as weight sync here.
SLEEP_SECONDS = 0.8
MERGE_PASSES = 6  # LoRA: read and write each weight and its delta to merge (peft 0.21.2, tuners/lora/layer.py `merge`, `unmerge`), twice
GKD_ON_POLICY = 0.5  # trl 1.16, experimental/gkd/gkd_config.py, lmbda


def rollouts(candidate: TrainingInput) -> tuple[float, float]:
    """Rows that one trainer process generates at a time, and how often in an optimizer step.

    GRPO and RLOO fill a buffer of steps_per_generation micro-batches and train on it num_iterations times; distillation fills one of an
    optimizer step's; online DPO and GKD generate for every micro-batch, GKD for half of them; PPO trains PPO_EPOCHS on a rollout.
    Source: trl 1.16, trainer/grpo_trainer.py:1538, trainer/distillation_trainer.py:1775, experimental/gkd/gkd_trainer.py:416.
    """
    rows = candidate.rows
    accumulation = candidate.gradient_accumulation_steps
    if candidate.method_row.grouped_completions:
        steps = candidate.steps_per_generation
        return float(rows * steps), accumulation / (steps * candidate.num_iterations)
    if candidate.method_row.generates_ahead:
        return float(rows * accumulation), 1.0
    if candidate.method == "ppo":
        return float(rows * accumulation), 1 / PPO_EPOCHS
    return float(rows), accumulation * (GKD_ON_POLICY if candidate.method == "gkd" else 1.0)


def generation_seconds(candidate: Candidate, cluster: Cluster, work: Work, concurrency: float) -> float:
    """One rollout, as the trainer waits for it."""
    rows, _ = rollouts(candidate)
    if candidate.vllm == "off":
        return _generate_seconds(candidate, cluster, work, rows)
    server = candidate.vllm == "server"
    rows *= (
        candidate.num_processes / candidate.vllm_data_parallel_size if server else candidate.vllm_tensor_parallel_size
    )
    return _engine_seconds(candidate, cluster.gpu, work, rows, concurrency)


def _prefill_seconds(candidate: Candidate, gpu: Gpu, work: Work, rows: float, rate: float) -> float:
    """Prompts of `rows` through the model, as on one card: products and causal attention."""
    tokens = rows * candidate.prompt_length
    pairs = sum(flops for _, flops, _ in work.attention) * tokens * candidate.prompt_length / 2
    compute = (work.linear_flops + work.float32_flops + work.adapter_flops) * tokens / rate + pairs / attention_rate(
        gpu, "sdpa"
    )
    return compute + (work.elementwise_bytes * tokens + work.weight_bytes) / memory_rate(gpu)


def _touched(work: Work, rows: float) -> float:
    """Share of the weights that a decode step of `rows` tokens reads: an expert nobody is sent to stays unread."""
    unread: float = (1 - work.expert_chance) ** rows
    return 1 - work.expert_share * unread


def _generate_seconds(candidate: Candidate, cluster: Cluster, work: Work, rows: float) -> float:
    """HF generate(): every token waits for the longer of the CPU (launches) and the card (weights, cache, logits).

        token = either(launches, (weights + cache) / bandwidth + products / rate); all rows to the longest completion

    ZeRO-3 with ds3_gather_for_generation=False gathers every parameter for every token: that is its price. With it, once.

    Example: Qwen2.5-7B, A100, 8 rows of 512 + 512 tokens: 24.6 ms of launches a token against 17.9 ms of the card, 26.2 ms together.
    """
    gpu, length = cluster.gpu, candidate.max_completion_length
    bandwidth, rate = memory_rate(gpu), matmul_rate(gpu, candidate)
    context = candidate.prompt_length + length / 2
    cache_width = 2 if candidate.dtype == "float32" else 1  # float32 under autocast: internals.md 0.10
    cache = rows * context * work.expanded_kv_bytes * HF_CACHE_PASSES * cache_width
    weights = (work.stored_bytes - DTYPE_BYTES[candidate.dtype] * work.lookup_params) * _touched(
        work, rows
    ) + work.cast_bytes * 2 / 3
    step = (weights + cache) / bandwidth + rows * (
        work.linear_flops + work.float32_flops + work.adapter_flops + work.head_flops
    ) / rate
    token = either(work.launch_seconds, step)
    gather = 0.0
    if candidate.sharding in ("zero3", "fsdp2") and candidate.num_processes > 1:
        whole = (
            (candidate.num_processes - 1)
            / candidate.num_processes
            * work.stored_bytes
            / link_rate(cluster, candidate.num_nodes)
        )
        gather = whole * (1 if candidate.ds3_gather_for_generation and candidate.sharding == "zero3" else length)
    if candidate.offload_param:
        gather += (
            work.stored_bytes
            / candidate.num_processes
            / host_rate(gpu)
            * (1 if candidate.ds3_gather_for_generation else length)
        )
    return _prefill_seconds(candidate, gpu, work, rows, rate) + length * token + gather


def _engine_seconds(candidate: Candidate, gpu: Gpu, work: Work, rows: float, concurrency: float) -> float:
    """vLLM on `tensor_parallel` cards: as many rows at once as the KV cache holds, the next as soon as one ends.

        steps = completion x max(1, rows / concurrency); step = layers x 0.09 ms + (weights + batch x context x cache) / bandwidth + products

    Example: Qwen2.5-7B, A100, 64 rows of 512 + 512 tokens, all at once: 2.5 + 9.2 + 1.8 + 3.7 ms a step, 8.9 s, and 2.1 s of prefill.

    Leaves out the all-reduces of tensor parallelism, prefix caching, and that completions end early.
    """
    cards = candidate.vllm_tensor_parallel_size
    bandwidth, rate = memory_rate(gpu) * cards, sixteen_bit_rate(gpu)
    batch = min(rows, max(concurrency, 1.0))
    context = candidate.prompt_length + candidate.max_completion_length / 2
    # The policy in 16 bits, or as its quantized checkpoint: vLLM narrows float32 weights (internals.md 1.6).
    weights = (min(work.stored_bytes, 2.0 * work.params) - 2 * work.lookup_params) * _touched(work, batch)
    step = work.layers * ENGINE_LAYER_SECONDS + (weights + batch * context * work.kv_bytes) / bandwidth
    step += batch * (work.linear_flops + work.float32_flops + work.head_flops) / rate / cards
    return (
        _prefill_seconds(candidate, gpu, work, rows, rate) / cards
        + candidate.max_completion_length * (rows / batch) * step
    )


def weight_sync_seconds(candidate: TrainingInput, cluster: Cluster, work: Work) -> float:
    """Moving the trained weights into the engine once.

        colocated: read and written on the card; server: 16-bit weights over the link; ZeRO-3 and FSDP2 gather them first;
        LoRA is merged before and taken out after; sleep mode: what falling asleep and waking take besides

    Example: Qwen2.5-7B on an A100: 31e9 / 1.53e12 = 20 ms colocated; over PCIe to a server 0.77 s.
    """
    if candidate.vllm == "off":
        return 0.0
    gpu, width = cluster.gpu, min(DTYPE_BYTES[candidate.dtype], 2)
    weights = float(width * work.params)
    link = link_rate(cluster, candidate.num_nodes)
    seconds = (
        2 * weights / memory_rate(gpu) if candidate.vllm == "colocate" else weights / link_rate(cluster, cluster.nodes)
    )
    if candidate.sharding in ("zero3", "fsdp2") and candidate.num_processes > 1:
        seconds += (candidate.num_processes - 1) / candidate.num_processes * work.stored_bytes / link
    if work.adapter_only:
        seconds += MERGE_PASSES * weights / memory_rate(gpu)
    return seconds + (SLEEP_SECONDS if candidate.vllm == "colocate" and candidate.vllm_enable_sleep_mode else 0.0)

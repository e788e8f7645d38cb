"""Seconds of rollouts: prefill and decode by `generate` or by vLLM, and moving the weights into the engine."""

from functools import lru_cache

from planner.cache_keys import TrainingInput
from planner.candidate import Candidate
from planner.gpus.cluster import Cluster, Gpu
from planner.memory.dtypes import DTYPE_BYTES, SIXTEEN_BIT_BYTES
from planner.models.layers import layer_elements
from planner.models.shape import ModelShape
from planner.quantizations import ENGINE_QUANTIZATIONS
from planner.throughput.rates import (
    HOPPER_MAJOR,
    attention_rate,
    host_rate,
    link_rate,
    matmul_rate,
    memory_rate,
    shard_link_rate,
    sixteen_bit_rate,
)
from planner.throughput.rows import completions, longest_completion, mean_samples
from planner.throughput.smooth import smooth_max
from planner.throughput.training import folding_seconds
from planner.throughput.work import Work, frozen_work

# Seconds per layer of a vLLM decode step beside reading the weights, up to Ada and from Hopper on.
# A100: Qwen2.5-0.5B (24 layers) takes 3.21 ms per token, 0.65 of them for reading; 7B (28 layers) 11.9 and 9.2; 14B (48
# layers) 21.6 and 18.3: 0.07 to 0.12 ms per layer. Source: QwenLM/Qwen2.5, docs/source/benchmark/speed_benchmark.rst
# (vLLM 0.6.3, A100-80G).
# H100: Qwen3-8B (36 layers) takes 7.38 ms per token of 4 rows, 6.0 of them for reading (gpustack/gpustack,
# docs/performance-lab/qwen3-8b/h100-latency.md, vLLM 0.11); Llama-3-70B (80 layers) on eight 11.2 ms, 6.9 for reading
# and 1.4 for all-reduces (LambdaLabsML/vllm-benchmark, results/prompt_10, vLLM 0.6.0 with ten steps scheduled at once):
# 0.04 ms. Nothing was found for later cards, nor for earlier ones with a later vLLM.
ENGINE_LAYER_SECONDS = 0.09e-3
ENGINE_LAYER_SECONDS_FROM_HOPPER = 0.04e-3
# Least seconds of a decode step: its host schedules it and reads the tokens. Source: as above, Qwen2.5-0.5B;
# Qwen3-0.6B on an A100 takes 4.2 ms with vLLM 0.9 (tenstorrent/tt-inference-server#340).
ENGINE_STEP_SECONDS = 3.2e-3
# Seconds of one all-reduce of a small message between the GPUs of a tensor-parallel group by vLLM's own kernel, which
# it runs over NVLink, and between two GPUs over PCIe (vllm 0.31, distributed/device_communicators/
# custom_all_reduce.py, `CustomAllreduce.__init__`: "not supported on more than two PCIe-only GPUs"). Source:
# sgl-project/sglang#2904 (H100, up to 32 KiB: 8.7 to 11.8 us for 2 to 8 GPUs); vllm-project/vllm#24532 (four H100: 10
# us for 0.5 MiB, 14 for 1, 21 for 2; predicted are 11.5, 14.1 and 19.1).
CUSTOM_ALL_REDUCE_SECONDS = 9e-6
CUSTOM_ALL_REDUCE_PCIE_GPUS = 2
# The same by NCCL over PCIe, for each of the 2 (n - 1) hops of a ring of n GPUs. Source: haohervchb/sglang-V100#2 (four
# V100 in a CUDA graph: 19.4 us for 4 KiB, 3.2 a hop); NVIDIA/nccl#1530 (eight RTX 4090: 42 us, 3.0), nccl#1439 (eight
# RTX 3090: 54 us, 3.9); vllm-project/vllm#50576 (eight A800 on two sockets, 8 KiB: 57 us, 4.1).
NCCL_HOP_SECONDS = (3.2 + 3.0 + 3.9 + 4.1) / 4 * 1e-6
# All-reduces of a layer, after attention and after the feed-forward block, and one of the embedding. Source: vllm 0.31,
# model_executor/layers/linear.py, `RowParallelLinear.forward`, vocab_parallel_embedding.py, `forward`.
ALL_REDUCES_PER_LAYER = 2
# Passes of a decode step of `generate` over the cache, with keys and values repeated to all heads: attention under a
# mask repeats them for every token, and DynamicCache concatenates them. With a context of 31,700 tokens a token takes
# 53 ms for 7B (7 query heads per key head), 122 ms for 14B and 179 ms for 32B (5 per key head).
# Source: as above, transformers 4.46.
HF_CACHE_PASSES = 5
# Passes over the states of Mamba and linear attention for each token: read and written. PyTorch's own functions, which
# transformers runs where no kernels are installed, make copies besides, which are left out.
# Source: transformers 5.23, models/qwen3_next/modeling_qwen3_next.py, `torch_recurrent_gated_delta_rule`.
STATE_PASSES = 2
# Seconds of `sleep(level=2)` and `wake_up` per rollout: the shortest wake from level 2 (0.8 to 2.6 s) in the vLLM blog,
# "Zero-Reload Model Switching with vLLM Sleep Mode" (2025-10-26). Longer ones read weights, counted as weight sync
# here.
SLEEP_SECONDS = 0.8
# Passes over the weights to merge LoRA and to take it out again: each reads weight and delta and writes the weight.
# Source: peft 0.21.2, tuners/lora/layer.py, `merge` and `unmerge`.
MERGE_PASSES = 6
# Rows from which bitsandbytes' 4-bit layers unpack the weights to 16 bits and multiply these, by compute capability, if
# a matrix has at least as many blocks of 64 columns as the GPU has multiprocessors. One kernel serves fewer rows; at
# this number the two cost the same.
# Source: bitsandbytes 0.50.2, backends/cuda/ops.py, `_gemm_4bit_use_custom_cuda`, measured by its authors.
UNPACKING_ROWS: dict[tuple[int, int], int] = {
    (7, 5): 64, (8, 0): 32, (8, 6): 128, (8, 9): 128, (9, 0): 32, (10, 0): 8, (12, 0): 64
}  # fmt: skip
UNPACKING_ROWS_ELSEWHERE = 8


def rollouts(candidate: TrainingInput) -> tuple[float, float]:
    """(Rows that one process generates at once, rollouts per step).

        GRPO, RLOO     rows x steps_per_generation; accumulation / (steps_per_generation x num_iterations)
        async-grpo     completions of a packed row x accumulation; 1
        distillation   rows x accumulation; 1
        PPO            rows x accumulation; 1: a step is a rollout with its 4 epochs (`epochs_per_step`)
        GKD            rows; accumulation x lmbda: it generates for this share of the micro-batches
        online DPO     rows; accumulation

    Source: trl 1.16, trainer/grpo_trainer.py, `GRPOTrainer._prepare_inputs`, trainer/distillation_trainer.py,
    `DistillationTrainer._prepare_inputs`, experimental/gkd/gkd_trainer.py, `GKDTrainer.training_step`; trl 1.12,
    experimental/ppo/ppo_config.py (`num_ppo_epochs`).

    Example: GRPO, 8 rows, accumulation 4, steps_per_generation 8, num_iterations 2: 64 rows, 4 / 16 = 0.25 rollouts.
    """
    method, rows = candidate.method_row, candidate.rows
    accumulation = candidate.gradient_accumulation_steps
    if method.asynchronous:
        return mean_samples(candidate) * accumulation, 1.0
    if method.grouped_completions:
        steps = candidate.steps_per_generation
        return float(rows * steps), accumulation / (steps * candidate.num_iterations)
    by_batch = method.generates_by_batch and candidate.vllm == "off"
    if (method.generates_ahead and not by_batch) or method.epochs_per_rollout:
        return float(rows * accumulation) * candidate.generated_share, 1.0
    return float(rows), accumulation * candidate.generated_share


def generation_seconds(candidate: Candidate, cluster: Cluster, work: Work, concurrency: float) -> float:
    """Seconds that the trainer waits for one rollout.

    A colocated engine on t GPUs samples the rows of t processes; a server splits the rows of all processes between its
    data-parallel replicas. `concurrency`: rows that the engine's KV cache holds at once, each with its own tokens.
    """
    rows, _ = rollouts(candidate)
    if candidate.vllm == "off":
        return _generate_seconds(candidate, cluster, work, rows)
    server = candidate.vllm == "server"
    rows *= (
        candidate.num_processes / candidate.vllm_data_parallel_size if server else candidate.vllm_tensor_parallel_size
    )
    return _engine_seconds(candidate, cluster, work, rows, concurrency)


def teacher_seconds(candidate: Candidate, cluster: Cluster) -> float:
    """Seconds in which a teacher's server scores the rows of one rollout of all processes: their matrix products.

    Leaves out attention, and the way of the log-probabilities over HTTP. 0 for a server elsewhere.
    """
    teacher, gpus = candidate.teacher_server_model, candidate.teacher_server_gpus
    if teacher is None or not gpus:
        return 0.0
    work = frozen_work(teacher, candidate)
    tokens = rollouts(candidate)[0] * candidate.num_processes * candidate.row_tokens
    return tokens * (work.linear_flops + work.head_flops) / (sixteen_bit_rate(cluster.gpu) * gpus)


def _prefill_seconds(candidate: Candidate, gpu: Gpu, work: Work, rows: float, rate: float, length: float = 0) -> float:
    """Seconds of one forward pass on one GPU: matrix products, causal attention, memory traffic.

    `length`: tokens of a row; 0: those of a prompt.
    """
    length = length or candidate.prompt_length
    tokens = rows * length
    pairs = sum(flops for _, flops, _ in work.attention) * tokens * length / 2
    compute = (work.linear_flops + work.float32_flops + work.adapter_flops) * tokens / rate + pairs / attention_rate(
        gpu, "sdpa"
    )
    return compute + (work.elementwise_bytes * tokens + work.weight_bytes + work.rounded_bytes / 2) / memory_rate(gpu)


def _touched(work: Work, rows: float) -> float:
    """Share of the weights that a decode step of `rows` tokens reads: experts without a token stay unread."""
    unread: float = (1 - work.expert_chance) ** rows
    return 1 - work.expert_share * unread


def _unpacked_bytes(work: Work, gpu: Gpu, rows: float) -> float:
    """Bytes that a decode step of `rows` tokens moves to unpack 4-bit weights, at least; 0 for other weights.

    One row reads the packed weights. From `UNPACKING_ROWS` on a 16-bit copy is written and read; in between, the price
    rises from the one to the other.

    Example: 64 short rows of Llama-3.2-1B in vLLM on an A100 take 1.39 times as long as in 16 bits; 71 and 45 s are
    published (vllm-project/vllm#9535, lengths unknown).
    """
    limit = UNPACKING_ROWS.get(gpu.compute_capability, UNPACKING_ROWS_ELSEWHERE)
    return work.rounded_bytes * min(1.0, max(rows - 1, 0.0) / (limit - 1))


def _generate_seconds(candidate: Candidate, cluster: Cluster, work: Work, rows: float) -> float:
    """Seconds of a rollout by Hugging Face `generate` on one GPU, all rows to the longest completion of any process.

        token   = smooth_max(launches, (weights + cache) / bandwidth + products / rate)
        rollout = prefill + completion tokens x token + gathers

    Without a cache every token takes a forward pass over the whole row, of half the completion on average. ZeRO-3
    gathers all parameters once per rollout; with ds3_gather_for_generation=False, like FSDP2, once per token.

    Example: Qwen2.5-7B, A100, 8 rows of 512 + 512 tokens: launches take 24.6 ms per token, the GPU 17.9 ms, both 26.2
    ms.
    """
    gpu, length = cluster.gpu, longest_completion(candidate, rows * candidate.num_processes)
    bandwidth, rate = memory_rate(gpu), matmul_rate(gpu, candidate)
    context = candidate.prompt_length + length / 2
    # A float32 model has a float32 cache under autocast too, since rotary embeddings promote the keys
    # (transformers 5.23, cache_utils.py, `DynamicLayer.lazy_initialization`; planner/memory/generation.py).
    cache_width = 2 if candidate.dtype == "float32" else 1
    cache = rows * context * work.expanded_kv_bytes * HF_CACHE_PASSES * cache_width
    cache += rows * work.state_bytes * STATE_PASSES
    weights = (work.stored_bytes - DTYPE_BYTES[candidate.dtype] * work.lookup_params) * _touched(
        work, rows
    ) + work.cast_bytes * 2 / 3
    weights += _unpacked_bytes(work, gpu, rows)
    step = (weights + cache) / bandwidth + rows * (
        work.linear_flops + work.float32_flops + work.adapter_flops + work.head_flops
    ) / rate
    folding = folding_seconds(work.folded, gpu, rate)
    token = smooth_max(work.launch_seconds, step + folding)
    gather = 0.0
    if candidate.scheme_row.shards_weights and candidate.num_processes > 1:
        shards = candidate.shard_gpus
        whole = (shards - 1) / shards * work.stored_bytes / shard_link_rate(cluster, shards, candidate.num_nodes)
        gather = whole * (
            1 if candidate.ds3_gather_for_generation and candidate.scheme_row.gathers_to_generate else length
        )
    if candidate.offload_param:
        gather += (
            work.stored_bytes
            / candidate.shard_gpus
            / host_rate(gpu)
            * (1 if candidate.ds3_gather_for_generation else length)
        )
    if candidate.generates_without_cache:
        token = max(token, _prefill_seconds(candidate, gpu, work, rows, rate, context))
    return _prefill_seconds(candidate, gpu, work, rows, rate) + folding + length * token + gather


def _engine_seconds(candidate: Candidate, cluster: Cluster, work: Work, rows: float, concurrency: float) -> float:
    """Seconds of a rollout by vLLM on one tensor-parallel group, with as many rows at once as its KV cache holds.

        step    = layers x 0.09 or 0.04 ms + (weights / n + batch x context x own cache) / bandwidth
                  + products / n / rate + `all_reduce_seconds` and `gathered_logits_seconds` of batch tokens
        rollout = prefill + all-reduces of all prompts + mean completion x rows / batch x max(step, 3.2 ms)

    `batch`: `decoding_rows` in min(rows, concurrency) slots. Beside an asynchronous trainer rows are those of one step
    of `max_staleness` that are sampled at a time (trl 1.16, experimental/async_grpo/async_grpo_trainer.py,
    `max_inflight_tasks`).

    Example: Qwen2.5-7B, A100, 64 rows of 512 + 512 tokens, all at once: a step takes 2.5 + 9.2 + 1.8 + 3.7 ms, all
    steps 8.9 s, the prefill 2.1 s.

    Leaves out prefix caching.
    """
    gpu, gpus = cluster.gpu, candidate.vllm_tensor_parallel_size
    bandwidth, rate = memory_rate(gpu), sixteen_bit_rate(gpu)
    sampled = completions(candidate)
    ahead = max(candidate.max_staleness, 1) if candidate.method_row.asynchronous else 1
    slots = min(rows * ahead, max(concurrency, 1.0))
    engines = candidate.vllm_data_parallel_size if candidate.vllm == "server" else candidate.num_processes / gpus
    batch = decoding_rows(candidate, rows, slots, engines)
    context = candidate.prompt_length + sampled.before
    # vLLM loads float32 weights in 16 bits (vllm/config/model.py, `_get_and_verify_dtype`), a quantized checkpoint as
    # it is.
    sixteen_bit = SIXTEEN_BIT_BYTES * work.params
    packed = ENGINE_QUANTIZATIONS[candidate.engine_quantization or "none"].quantized
    stored = min(work.stored_bytes, sixteen_bit) if packed else sixteen_bit
    weights = (stored - SIXTEEN_BIT_BYTES * work.lookup_params) * _touched(work, batch)
    weights += _unpacked_bytes(work, gpu, batch) if packed else 0.0
    cache = batch * context * work.kv_bytes * _cache_share(candidate.model, gpus)
    cache += batch * work.state_bytes * STATE_PASSES / gpus
    modern = gpu.compute_capability[0] >= HOPPER_MAJOR
    step = work.layers * (ENGINE_LAYER_SECONDS_FROM_HOPPER if modern else ENGINE_LAYER_SECONDS)
    step += (weights / gpus + cache) / bandwidth
    step += batch * (work.linear_flops + work.float32_flops + work.head_flops) / rate / gpus
    step += all_reduce_seconds(cluster, work, gpus, batch) + gathered_logits_seconds(cluster, work, gpus, batch)
    prefill = _prefill_seconds(candidate, gpu, work, rows, rate) / gpus
    prefill += all_reduce_seconds(cluster, work, gpus, rows * candidate.prompt_length)
    return prefill + sampled.mean * (rows / batch) * max(step, ENGINE_STEP_SECONDS)


def decoding_rows(candidate: Candidate, rows: float, slots: float, engines: float) -> float:
    """Mean number of rows that an engine decodes at once in a rollout of `rows` rows: `slots` if all have one length.

        steps = mean completion x rows / slots + longest completion - mean completion
        batch = mean completion x rows / steps

    A row that ends makes room for the next (vllm/v1/core/sched/scheduler.py, `Scheduler.schedule`). When none is left
    to start, slots empty one by one. The trainer waits for the longest of these last rows in all `engines`; an
    asynchronous one has the next rows started meanwhile.
    """
    if candidate.method_row.asynchronous:
        return slots
    tokens = completions(candidate).mean
    longest = longest_completion(candidate, slots * engines)
    return slots / (1 + slots / rows * (longest / tokens - 1))


@lru_cache(maxsize=1024)
def _cache_share(model: ModelShape, gpus: int) -> float:
    """Share of a row's cache that each of `gpus` tensor-parallel GPUs reads: its key heads, at least one; all of MLA's.

    Source: as `page_bytes`, planner/memory/engine/blocks.py. Example: Qwen2.5-1.5B has 2 key heads: 1/2 on 4 GPUs.
    """
    whole = part = 0.0
    for kind, count in model.layer_kinds:
        block = kind.attention
        elements = count * layer_elements(block)
        heads = block.num_key_value_heads or 1  # none where a layer caches nothing, as linear attention: 0 elements
        whole += elements
        part += elements * (1.0 if block.kv_latent_dim else max(1, heads // gpus) / heads)
    return part / whole if whole else 1.0


def all_reduce_seconds(cluster: Cluster, work: Work, gpus: int, tokens: float) -> float:
    """Seconds of all all-reduces of one pass over `tokens` tokens in a tensor-parallel group; 0 for one GPU.

        (2 x layers + 1) x (latency + 2 (n - 1) / n x tokens x hidden x 2 bytes / link)

    Example: Qwen2.5-1.5B (28 layers, 1536 wide), 4 H100, 256 rows: 57 x (9 us + 1.5 x 0.79e6 / 310e9) = 0.73 ms a step,
    while a step that reads a quarter of the weights saves 0.9 ms.
    """
    if gpus == 1:
        return 0.0
    custom = cluster.gpu.nvlink_bytes_per_second or gpus <= CUSTOM_ALL_REDUCE_PCIE_GPUS
    latency = CUSTOM_ALL_REDUCE_SECONDS if custom else 2 * (gpus - 1) * NCCL_HOP_SECONDS
    message = tokens * work.hidden_size * SIXTEEN_BIT_BYTES
    moved = 2 * (gpus - 1) / gpus * message / link_rate(cluster, 1)
    return (ALL_REDUCES_PER_LAYER * work.layers + 1) * (latency + moved)


def gathered_logits_seconds(cluster: Cluster, work: Work, gpus: int, rows: float) -> float:
    """Seconds of gathering each row's logits, 2 bytes a word, on all GPUs of a tensor-parallel group.

        (n - 1) / n x rows x vocabulary x 2 bytes / link

    Source: vllm 0.31, model_executor/layers/logits_processor.py, `LogitsProcessor._gather_logits`. Example: 32 rows of
    Qwen3-4B on four L40S: 0.75 x 9.7e6 / 20e9 = 0.37 ms a step.
    """
    return (gpus - 1) / gpus * rows * work.vocab_size * SIXTEEN_BIT_BYTES / link_rate(cluster, 1)


def weight_sync_seconds(candidate: TrainingInput, cluster: Cluster, work: Work) -> float:
    """Seconds to move the trained weights into the vLLM engine once; 0 without vLLM.

        colocate        2 x weights / bandwidth: read and written on the GPU
        server          weights / link; 0 if it loads adapters from a folder
        ZeRO-3, FSDP2   + (n - 1) / n x stored bytes / link, to gather them
        LoRA            + 6 x weights / bandwidth, to merge the adapters and to take them out again
        sleep mode      + 0.8 s, colocated engines only

    Source: trl 1.16, generation/vllm_generation.py, `sync_weights`. Weights are counted in 16 bits.

    Example: Qwen2.5-7B on an A100: 31e9 / 1.53e12 = 20 ms colocated; over PCIe to a server 0.77 s.
    """
    if candidate.vllm == "off" or candidate.sends_adapters:
        return 0.0
    gpu, width = cluster.gpu, min(DTYPE_BYTES[candidate.dtype], 2)
    weights = float(width * work.params)
    seconds = (
        2 * weights / memory_rate(gpu) if candidate.vllm == "colocate" else weights / link_rate(cluster, cluster.nodes)
    )
    if candidate.scheme_row.shards_weights and candidate.num_processes > 1:
        shards = candidate.shard_gpus
        link = shard_link_rate(cluster, shards, candidate.num_nodes)
        seconds += (shards - 1) / shards * work.stored_bytes / link
    if work.adapter_only:
        seconds += MERGE_PASSES * weights / memory_rate(gpu)
    return seconds + (SLEEP_SECONDS if candidate.vllm == "colocate" and candidate.vllm_enable_sleep_mode else 0.0)

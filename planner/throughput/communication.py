"""Seconds that a GPU waits for its links: gradients and parameters between GPUs, and copies to the host and back."""

from planner.cache_keys import TrainingInput
from planner.candidate import DTYPE_BYTES, Sharding
from planner.gpus.cluster import Cluster
from planner.throughput.rates import host_rate, link_rate, shard_link_rate
from planner.throughput.training import Batch, MicroStep, extra_forwards
from planner.throughput.work import Work, trained_models

# Share of a computation that communication runs beside: of the backward pass (DDP), of the whole micro-step (FSDP2).
# Source: DDP and FSDP overlap by design (arXiv 2006.15704, section 3.2.3; arXiv 2304.11277, section 3.3), and on two
# RTX 4090 LoRA takes 481 s under FSDP and 437 s under DDP (AnswerDotAI/fsdp_qlora, benchmarks_03_2024.md). ZeRO-3 is
# counted without overlap: LoRA on Qwen-72B with 4 x A100-80G takes 2.20 s for 256 tokens, which is the sum of its
# gathers (1.6 s) and its matrix products, not the larger of the two (QwenLM/Qwen, README.md).
OVERLAP: dict[Sharding, float] = {"none": 0.0, "ddp": 1.0, "zero1": 0.0, "zero2": 0.0, "zero3": 0.0, "fsdp2": 1.0}

# How often a micro-step gathers all parameters: before the forward and the backward pass of each layer.
# Source: deepspeed 0.19.8, runtime/zero/parameter_offload.py, `_pre_forward_module_hook` and
# `_pre_backward_module_hook`; torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param_group.py, `pre_forward` and
# `pre_backward`. ZeRO-3's gather for recomputation is added in `_gathers`.
GATHERS: dict[Sharding, int] = {"zero3": 2, "fsdp2": 2}

# Parameters per second of DeepSpeed's Adam on the CPU, with its copies. Full fine-tuning of Qwen2.5-3B (3.09e9
# parameters) on 2 x A100-40G takes 3.08 s per step with ZeRO offload on a host of 128 cores. The rate counts the whole
# step as Adam, so that it is a lower bound. Source: deepspeedai/DeepSpeed, pull request 7474.
CPU_ADAM_PARAMS_PER_SECOND = 1.0e9

# Bytes per token that a layer saves without checkpointing, with 16-bit weights and as many key heads as query heads:
# for each hidden element two norms of 8 (input in float32 4, normalised input 2, output 2) and 8 of attention (query,
# key, value, output); for each element of the feed-forward block 8 (gate, activation, up, product).
# Source: transformers 5.23, models/llama/modeling_llama.py, `LlamaRMSNorm`, `LlamaAttention`, `LlamaMLP`.
SAVED_HIDDEN_BYTES = 24
SAVED_MLP_BYTES = 8
FLOAT32_BYTES = 4


def communication_seconds(candidate: TrainingInput, cluster: Cluster, work: Work, step: MicroStep) -> float:
    """Seconds per optimizer step that one of n GPUs waits for the others.

        DDP             max(0, 2 (n - 1) / n x gradients / link - last backward pass): all-reduce once per step
        ZeRO-1          2 (n - 1) / n x gradients / link: reduce-scatter, and all-gather of the trained parameters
        ZeRO-2          (accumulation + 1) (n - 1) / n x gradients / link: a reduce-scatter in every micro-step
        ZeRO-3, FSDP2   accumulation x max(0, (s - 1) / s x (gathers x stored + gradients) / link - overlap);
                        FSDP2 without `sync_each_batch`: gradients in the last micro-step only
        HSDP            in that overlap also 2 (r - 1) / r x gradients / network, of r copies of the model
        + accumulation x `row_exchange_seconds` where GPUs share a row

    `gradients` and `stored` are bytes of the gradients and of all parameters as stored, s the GPUs that hold one copy
    of the model (n but for HSDP). Gradients are counted in 16 bits, under DDP in their own dtype. The GPUs of a node
    share its network: together they reduce all gradients.

    Example: LoRA on Qwen-72B, ZeRO-3, 4 x A100-80G: 3 x 144e9 x 3/4 / 207e9 = 1.57 s per micro-step.

    Leaves out latency, gathers of a teacher or reward model, the small messages of metrics, and that DDP, too, reduces
    in every micro-step with `sync_each_batch`.
    """
    n, sharding = candidate.num_processes, candidate.sharding
    if n == 1 or sharding == "none":
        return 0.0
    link = link_rate(cluster, candidate.num_nodes)
    portion = (n - 1) / n
    accumulation = candidate.gradient_accumulation_steps
    models = trained_models(candidate, work)
    stored_bytes = sum(each.stored_bytes for each in models)
    gradient_bytes = sum(
        each.trainable_params
        * (4.0 if sharding == "ddp" and (each.adapter_only or candidate.dtype == "float32") else 2.0)
        for each in models
    )
    if sharding in GATHERS:
        shard_gpus, copies = candidate.shard_gpus, n // candidate.shard_gpus
        inner = shard_link_rate(cluster, shard_gpus, candidate.num_nodes)
        portion = (shard_gpus - 1) / shard_gpus
        gathering = portion * _gathers(candidate) * stored_bytes / inner
        reducing = portion * gradient_bytes / inner + 2 * (copies - 1) / copies * gradient_bytes / link
        beside = OVERLAP[sharding] * step.elapsed
        exposed = max(0.0, gathering + reducing - beside)
        earlier = max(0.0, gathering - beside) if candidate.keeps_whole_gradients else exposed
        exchanged = accumulation * row_exchange_seconds(candidate, cluster)
        return exposed + (accumulation - 1) * earlier + exchanged
    if sharding == "ddp":
        return max(0.0, 2 * portion * gradient_bytes / link - OVERLAP[sharding] * step.backward)
    reductions = accumulation if sharding == "zero2" else 1
    return portion * (reductions + 1) * gradient_bytes / link


def row_exchange_seconds(candidate: TrainingInput, cluster: Cluster) -> float:
    """Seconds per micro-step in which n GPUs that share a row exchange it, in all layers; 0 without them.

        cp_size   forward: (n - 1) kv / link, once more to recompute; backward: ((n - 1) kv + n kv in float32) / link
        sp_size   forward and backward: (n - 1) / n x (2 q + kv) / link, once more to recompute

    q, kv and sources as in `row_exchange_bytes`, planner/memory/communication.py. Neighbours share a row: within a node
    if n is at most its GPUs. Counted without overlap, so that it is an upper bound.
    """
    n = candidate.row_gpus
    if n == 1:
        return 0.0
    forwards = 2 if candidate.gradient_checkpointing else 1
    link = link_rate(cluster, candidate.num_nodes if n > cluster.gpus_per_node else 1)
    width = 2 if candidate.precision != "no" else DTYPE_BYTES[candidate.dtype]
    moved = 0.0
    for kind, count in candidate.model.layer_kinds:
        q, kv = kind.attention.q_dim, kind.attention.k_dim + kind.attention.v_dim
        if candidate.sharding == "fsdp2":
            moved += count * kv * ((forwards + 1) * (n - 1) * width + n * FLOAT32_BYTES)
        else:
            moved += count * (forwards + 1) * (n - 1) / n * (2 * q + kv) * width
    return candidate.tokens * moved / link


def offload_seconds(candidate: TrainingInput, cluster: Cluster, work: Work, batch: Batch, step: MicroStep) -> float:
    """Seconds per optimizer step that one of n GPUs waits for its host.

        offload_optimizer   4 bytes x trained / n / host (16-bit gradients down, parameters up)
                            + trained / (1e9 x nodes), Adam on the CPU, which the GPUs of a node share
        offload_param       gathers x stored bytes / n / host, in every micro-step
        activations         max(0, 2 x saved bytes / host - the micro-step), in every micro-step: down and up, beside it
        checkpoints         2 x checkpoints / host, in every micro-step: the copies run on the compute stream
                            (transformers 5.23, modeling_utils.py, `activation_checkpointing_enable`)

    Example: Qwen2.5-7B, full, ZeRO-2 on 8 GPUs of one node: 7.6 s for Adam and 0.15 s for copies.
    """
    seconds, host = 0.0, host_rate(cluster.gpu)
    accumulation, n = candidate.gradient_accumulation_steps, candidate.num_processes
    models = trained_models(candidate, work)
    if candidate.offload_optimizer:
        trained = sum(each.trainable_params for each in models)
        seconds += 4.0 * trained / n / host
        seconds += trained / CPU_ADAM_PARAMS_PER_SECOND / max(1, min(candidate.num_nodes, n))
    if candidate.offload_param:
        stored_bytes = sum(each.stored_bytes for each in models)
        seconds += accumulation * _gathers(candidate) * stored_bytes / candidate.shard_gpus / host
    copies = 2 * _saved_bytes(candidate, work) * batch.tokens / host
    if candidate.activation_offloading:
        seconds += accumulation * max(0.0, copies - step.elapsed)
    elif candidate.checkpoint_offload and candidate.gradient_checkpointing:
        seconds += accumulation * copies
    return seconds


def _gathers(candidate: TrainingInput) -> float:
    """Gathers of the policy's parameters per micro-step: forward, backward, recomputation (ZeRO-3), extra forwards."""
    recomputation = 1 if candidate.sharding == "zero3" and candidate.gradient_checkpointing else 0
    return GATHERS.get(candidate.sharding, 2) + recomputation + extra_forwards(candidate)


def _saved_bytes(candidate: TrainingInput, work: Work) -> float:
    """Bytes per token that offloading copies to the host: checkpoints, or all saved activations without them."""
    width = 4 if candidate.dtype == "float32" else 2
    if candidate.gradient_checkpointing:
        return float(width * work.hidden_size * work.layers)
    return float(work.layers * (SAVED_HIDDEN_BYTES * work.hidden_size + SAVED_MLP_BYTES * work.inner_size))

"""Seconds that a GPU waits for its links: gradients and parameters between GPUs, and copies to the host and back."""

from collections.abc import Iterable

from planner.cache_keys import TrainingInput
from planner.gpus.cluster import Cluster
from planner.memory.dtypes import DTYPE_BYTES, FLOAT32_BYTES, SIXTEEN_BIT_BYTES
from planner.memory.schemes.contract import Traffic
from planner.memory.schemes.table import scheme_of
from planner.memory.schemes.zero import accumulates_in_float32
from planner.throughput.rates import HOPPER_MAJOR, host_rate, link_rate, memory_rate, shard_link_rate
from planner.throughput.training import Batch, MicroStep, extra_forwards
from planner.throughput.work import Work, trained_models

# Gathers of all parameters in a micro-step: each layer's before its forward and before its backward pass.
# Source: deepspeed 0.19.8, runtime/zero/parameter_offload.py, `_pre_forward_module_hook` and
# `_pre_backward_module_hook`; torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param_group.py, `pre_forward` and
# `pre_backward`. ZeRO-3's gather for recomputation is added in `_gathers`.
GATHERS = 2

# Parameters per second that DeepSpeed's Adam updates on one core of the host: 10e9 take 2.57 s on a DGX-2's two Xeon
# 8168, 48 cores. Source: arXiv 2101.06840, table 4, and section 6.1 for the host.
CPU_ADAM_PARAMS_PER_SECOND_PER_CORE = 81e6
# Cores of a usual host for each of its GPUs. Source: AWS p4d.24xlarge (8 A100) has
# 96 hardware threads, 48 cores, and p5.48xlarge (8 H100) 192, 96 cores; Google a2-highgpu and a3-highgpu are alike.
# A run uses them only with `OMP_NUM_THREADS` at that number: without it `accelerate launch` and torchrun give each
# process one thread (accelerate 1.15, commands/launch.py, `_validate_launch_command`; torch 2.13, distributed/run.py).
HOST_CORES_PER_GPU = 6
HOST_CORES_PER_GPU_FROM_HOPPER = 12

# Bytes per token that a layer saves without checkpointing, with 16-bit weights and as many key heads as query heads:
# for each hidden element two norms of 8 (input in float32 4, normalised input 2, output 2) and 8 of attention (query,
# key, value, output); for each element of the feed-forward block 8 (gate, activation, up, product).
# Source: transformers 5.23, models/llama/modeling_llama.py, `LlamaRMSNorm`, `LlamaAttention`, `LlamaMLP`.
SAVED_HIDDEN_BYTES = 24
SAVED_MLP_BYTES = 8


def communication_seconds(candidate: TrainingInput, cluster: Cluster, work: Work, step: MicroStep) -> float:
    """Seconds per optimizer step that one of n GPUs waits for the others: its scheme's exchanges, and shared rows.

    The GPUs of a node share its network: together they reduce all gradients.

    Leaves out latency, gathers of a teacher or reward model, the small messages of metrics, and that DDP, too, reduces
    in every micro-step with `sync_each_batch`.
    """
    if candidate.num_processes == 1 or not candidate.scheme_row.launched:
        return 0.0
    models = trained_models(candidate, work)
    traffic = Traffic(
        gradient_bytes=_gradient_bytes(candidate, models),
        stored_bytes=sum(each.stored_bytes for each in models),
        embedding_bytes=float(SIXTEEN_BIT_BYTES * work.vocab_size * work.hidden_size),
        gathers=_gathers(candidate),
        link=link_rate(cluster, candidate.num_nodes),
        shard_link=shard_link_rate(cluster, candidate.shard_gpus * candidate.layer_gpus, candidate.num_nodes),
        layer_link=shard_link_rate(cluster, candidate.layer_gpus, candidate.num_nodes),
        memory=memory_rate(cluster.gpu),
        layers=work.layers,
        adapter_only=work.adapter_only,
        forward=step.forward,
        backward=step.backward,
    )
    exchanged = candidate.gradient_accumulation_steps * row_exchange_seconds(candidate, cluster)
    return exchanged + scheme_of(candidate).seconds(candidate, traffic)


def _gradient_bytes(candidate: TrainingInput, models: Iterable[Work]) -> float:
    """Bytes of all gradients as they are reduced: in 16 bits, under DDP in their own dtype, or added up in float32."""
    if accumulates_in_float32(candidate):
        return sum(each.trainable_params * 4.0 for each in models)
    own = candidate.scheme_row.reducer
    return sum(
        each.trainable_params * (4.0 if own and (each.adapter_only or candidate.dtype == "float32") else 2.0)
        for each in models
    )


def row_exchange_seconds(candidate: TrainingInput, cluster: Cluster) -> float:
    """Seconds per micro-step in which n GPUs that share a row exchange it, in all layers; 0 without them.

        cp_size   forward: (n - 1) kv / link, once more to recompute; backward: ((n - 1) kv + n kv in float32) / link
        sp_size   forward and backward: (n - 1) / n x (2 q + kv) / link, once more to recompute

    q, kv and sources as in `exchanged_bytes`, planner/memory/layers/attention.py. Neighbours share a row: within a node
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
        if candidate.scheme_row.ring:
            moved += count * kv * ((forwards + 1) * (n - 1) * width + n * FLOAT32_BYTES)
        else:
            moved += count * (forwards + 1) * (n - 1) / n * (2 * q + kv) * width
    return candidate.tokens * moved / link


def offload_seconds(candidate: TrainingInput, cluster: Cluster, work: Work, batch: Batch, step: MicroStep) -> float:
    """Seconds per optimizer step that one of n GPUs waits for its host.

        offload_optimizer   4 bytes x trained / n / host (16-bit gradients down, parameters up)
                            + trained / (81e6 x cores of all hosts), Adam on the CPU
                            + ZeRO: 16-bit gradients kept on the host between micro-steps, down and up again:
                            (accumulation - 1) x 4 bytes x trained / host; ZeRO-3: of its own 1 / n
        offload_param       gathers x stored bytes / n / host, in every micro-step
        activations         max(0, 2 x saved bytes / host - the micro-step), in every micro-step: down and up, beside it
        checkpoints         2 x checkpoints / host, in every micro-step: the copies run on the compute stream
                            (transformers 5.23, modeling_utils.py, `activation_checkpointing_enable`)

    Source of the gradients kept on the host: deepspeed 0.19.8, runtime/zero/stage_1_and_2.py,
    `async_accumulate_grad_in_cpu_via_gpu` (each process keeps the gradients of all parameters), and stage3.py,
    `partition_grads`.

    Example: Qwen2.5-7B, full, ZeRO-2 on 8 A100 of one node: 7.6e9 / (48 x 81e6) = 1.96 s for Adam, 0.15 s for copies.
    """
    seconds, host = 0.0, host_rate(cluster.gpu)
    accumulation, n = candidate.gradient_accumulation_steps, candidate.num_processes
    models = trained_models(candidate, work)
    if candidate.offload_optimizer:
        trained = sum(each.trainable_params for each in models)
        seconds += 4.0 * trained / n / host
        seconds += trained / (CPU_ADAM_PARAMS_PER_SECOND_PER_CORE * _host_cores(candidate, cluster))
        if candidate.scheme_row.stage:
            kept = trained / n if candidate.scheme_row.shards_weights else trained
            seconds += (accumulation - 1) * 4.0 * kept / host
    if candidate.offload_param:
        stored_bytes = sum(each.stored_bytes for each in models)
        seconds += accumulation * _gathers(candidate) * stored_bytes / candidate.shard_gpus / host
    copies = 2 * _saved_bytes(candidate, work) * batch.tokens / host
    if candidate.activation_offloading:
        seconds += accumulation * max(0.0, copies - step.elapsed)
    elif candidate.checkpoint_offload and candidate.gradient_checkpointing:
        seconds += accumulation * copies
    return seconds


def _host_cores(candidate: TrainingInput, cluster: Cluster) -> int:
    """Return the cores of the hosts on which the job's processes run, shared by the GPUs of a node."""
    hopper = cluster.gpu.compute_capability[0] >= HOPPER_MAJOR
    each = HOST_CORES_PER_GPU_FROM_HOPPER if hopper else HOST_CORES_PER_GPU
    return each * cluster.gpus_per_node * max(1, min(candidate.num_nodes, candidate.num_processes))


def _gathers(candidate: TrainingInput) -> float:
    """Gathers of the policy's parameters per micro-step: forward, backward, recomputation (ZeRO-3), extra forwards."""
    recomputation = 1 if candidate.scheme_row.regathers and candidate.gradient_checkpointing else 0
    return GATHERS + recomputation + extra_forwards(candidate)


def _saved_bytes(candidate: TrainingInput, work: Work) -> float:
    """Bytes per token that offloading copies to the host: checkpoints, or all saved activations without them."""
    width = 4 if candidate.dtype == "float32" else 2
    if candidate.gradient_checkpointing:
        return float(width * work.hidden_size * work.layers)
    return float(work.layers * (SAVED_HIDDEN_BYTES * work.hidden_size + SAVED_MLP_BYTES * work.inner_size))

"""Memory of the vLLM engine besides weights and KV cache: activations, buffers, memory outside torch, CUDA graphs.

vLLM measures these at start-up with a forward pass on dummy data, its profile run.
"""

from functools import lru_cache

from msgspec import Struct

from planner.memory.dtypes import SIXTEEN_BIT_BYTES
from planner.models.architectures.states import RecurrentState
from planner.models.layers import Experts, Layer, Mlp
from planner.models.recurrent import MIXER, recurrent_state
from planner.models.shape import ModelShape
from planner.settings.vllm_releases import BLACKWELL_OF_DATA_CENTRES, RunnerName, VllmVersion, vllm_has
from planner.units import GIB


class Runner(Struct, frozen=True, kw_only=True):
    """One generation of vLLM's model runner.

    Bytes alive at once in the sampler of the profile run, for each of max_num_seqs x vocabulary logits:
    `bytes_per_sorted_logit` where it sorts them, else `bytes_per_logit`.
    """

    bytes_per_logit: int
    bytes_per_sorted_logit: int
    keeps_penalties: bool  # keeps the count of every token of every sequence on the GPU


RUNNERS: dict[RunnerName, Runner] = {
    # Sorts the logits, which copies them. 39 is the median of the 7 rows of tests/data/vllm.jsonl that print the number
    # of sequences and an activation peak caused by the sampler (38.6 to 41.0). Without a sort the 16-bit logits, a
    # float32 copy, and as much for probabilities and for noise: vllm 0.27, v1/sample/sampler.py, `Sampler.forward`,
    # v1/sample/ops/topk_topp_sampler.py, `TopKTopPSampler.forward_native`, `random_sample`.
    "v1": Runner(bytes_per_logit=SIXTEEN_BIT_BYTES + 3 * 4, bytes_per_sorted_logit=39, keeps_penalties=False),
    # 16-bit logits and one float32 copy; top-k and top-p work in place (vllm/v1/worker/gpu/sample/sampler.py,
    # apply_sampling_params; v1/sample/ops/topk_topp_triton.py). The profile run of vLLM 0.31 has the 16-bit logits
    # only.
    "v2": Runner(
        bytes_per_logit=SIXTEEN_BIT_BYTES + 4, bytes_per_sorted_logit=SIXTEEN_BIT_BYTES + 4, keeps_penalties=True
    ),
}
# Rows of logits from which on the sampler works in place, by Triton, in releases that do. Source: vllm 0.22,
# v1/sample/ops/topk_topp_sampler.py, `apply_top_k_top_p`.
ROWS_IN_PLACE = 8

# Memory that the engine takes outside torch's allocator: kernels, workspaces. Median of the 13 single-GPU rows of
# tests/data/vllm.jsonl that print it (0.01 to 0.16 GiB).
NON_TORCH_BYTES = round(0.05 * GIB)
# NCCL's buffers of an engine on several GPUs: the two rows of tests/data/vllm.jsonl with tensor parallelism print 0.20
# GiB, less the median above. They are outside the budget with runner "v2", since vLLM then takes its baseline after
# NCCL has started (v1/worker/gpu_worker.py, init_device).
NCCL_BYTES = round(0.15 * GIB)

# Bytes of one CUDA graph, with its share of the graph memory pool: the median of the 4 rows of tests/data/vllm.jsonl
# whose engine captured the 67 default sizes of its release (0.96, 1.12, 1.15, 1.44 GiB; 14.7 to 22.0 MiB per size). The
# model's depth and the attention backend change it; no row shows by how much.
CUDA_GRAPH_BYTES_PER_SIZE = round((1.12 + 1.15) / 2 * GIB / 67)
# Batch sizes of the captured graphs: 1, 2, 4, then steps of 8 below 256 and of 16 from there to 2 x max_num_seqs, at
# most 512, on Blackwell of data centres 1,024. Source: vllm/config/vllm.py, _set_cudagraph_sizes.
LARGEST_GRAPH = 512
LARGEST_GRAPH_OF_BLACKWELL = 1024
FIRST_GRAPHS = (1, 2, 4)
FINE_STEP, COARSE_STEP, COARSE_FROM = 8, 16, 256

# Bytes of sampling state per sequence on the GPU, int32 each: allowed tokens 1024, logit bias 2 x 1024, stop tokens
# 128, bad words 1024 + 129, requested log-probabilities 128 (vllm/v1/worker/gpu/sample/logit_bias.py,
# bad_words.py, logprob.py, vllm/envs.py).
SAMPLING_STATE_BYTES = 4 * (1024 + 2 * 1024 + 128 + 1024 + 129 + 128)
# Token id, position and padding flag of each token of a batch (vllm/v1/worker/gpu/input_batch.py, InputBuffers).
INPUT_BYTES_PER_TOKEN = 4 + 8 + 1


@lru_cache(maxsize=16384)
def activation_peak_bytes(
    model: ModelShape,
    tensor_parallel_size: int,
    tokens: int,
    rows: int,
    runner: RunnerName,
    dequantizes: bool,
    version: VllmVersion,
) -> int:
    """Peak of temporaries in vLLM's profile run on each GPU: the larger of its forward pass and its sampler.

        forward = tokens x bytes per token of the largest layer (`_layer_bytes_per_token`)
                  + 2 x largest projection / tp, if the engine dequantizes weights (bitsandbytes)
        sampler = rows x vocabulary x bytes per logit + 2 x tokens x hidden

    Source: vllm/v1/worker/gpu/model_runner.py (a batch of max_num_batched_tokens `tokens`, then max_num_seqs
    `rows` of logits).
    Example: Qwen2.5-7B, 4096 tokens: 4096 x 2 x (3 x 3584 + 3 x 18944) = 0.516 GiB.

    Leaves out vision encoders (`encoder_peak_bytes`), and the buffers that torch.compile reuses (the real peak is
    lower).
    """
    keeps_workspace = vllm_has(version, "workspace")
    forward = tokens * max(
        _layer_bytes_per_token(layer, recurrent_state(model, layer), tensor_parallel_size, not keeps_workspace)
        for layer, _ in model.layer_kinds
    )
    if dequantizes:
        forward += (
            SIXTEEN_BIT_BYTES
            * max(linear.weight_params for layer, _ in model.layer_kinds for linear in layer.linears)
            // tensor_parallel_size
        )
    row, in_place = RUNNERS[runner], rows >= ROWS_IN_PLACE and vllm_has(version, "sorts_nothing")
    sampler = (
        rows * model.vocab_size * (row.bytes_per_logit if in_place else row.bytes_per_sorted_logit)
        + SIXTEEN_BIT_BYTES * tokens * model.hidden_size
    )
    return max(forward, sampler)


def autotune_peak_bytes(model: ModelShape, tokens: int, table_bytes: int) -> int:
    """Peak on one GPU while torch.compile chooses the first kernel's configuration, inside vLLM's profile run.

        peak = 16-bit embedding table + 2 x tokens x hidden x 2

    Inductor times each Triton kernel on made-up arguments of full size, all of one piece of the graph at a time. On one
    GPU the first kernel joins the embedding with the first norm, so that its arguments hold a second table.
    Source: torch, _inductor/standalone_compile.py (`_standalone_context`) and codegen/wrapper.py
    (`generate_and_run_autotune_block`); results/emulated_engine.md.
    Example: Qwen2.5-7B, 4,096 tokens: 2 x 3,584 x (152,064 + 2 x 4,096) = 1.070 GiB, twice its forward pass.

    Leaves out what flushes the L2 cache between timings (40 MiB on an A100), and that a start which finds the graph in
    vLLM's cache of compiled graphs times nothing.
    """
    return table_bytes + SIXTEEN_BIT_BYTES * model.hidden_size * 2 * tokens


def _layer_bytes_per_token(layer: Layer, state: RecurrentState | None, tensor_parallel_size: int, routed: bool) -> int:
    """Bytes alive at once for one token on each GPU, 16-bit, in the larger of a layer's two blocks.

        attention   input, residual, output (3 x hidden) + (q + k + v + attention output) / tp
        mixer       3 x hidden + (outputs of in_proj + the convolution's channels + the input of out_proj) / tp
        MLP         input, residual, output (3 x hidden) + (gate and up, 2 F + product, F) / tp; without a gate 2 F / tp
        experts     3 x hidden + F of the shared expert as for an MLP
                    + with `routed`, k x (max(2 F, hidden) + max(F, hidden)), F divided by tp; k experts per token

    F is the intermediate size. A mixer is a layer of Mamba or linear attention, which computes no state in this run.
    Source: vllm/model_executor/models/llama.py, which similar models follow; layers/mamba/mamba_mixer2.py;
    fused_moe/experts/triton_moe.py, `workspace_shapes`.
    """
    attention, feed_forward, hidden = layer.attention, layer.feed_forward, layer.hidden_size
    heads = attention.q_dim + attention.k_dim + attention.v_dim + attention.num_attention_heads * attention.v_head_dim
    if state is not None and state.channels:
        heads = state.channels + sum(
            linear.out_features if linear.name.startswith(MIXER) else linear.in_features
            for linear in layer.attention.linears
        )
    feeding = _feed_forward_elements(feed_forward, tensor_parallel_size)
    feeding += _routed_elements(feed_forward, hidden, tensor_parallel_size) if routed else 0
    inside = max(heads // tensor_parallel_size, feeding)
    return SIXTEEN_BIT_BYTES * (3 * hidden + inside)


def _feed_forward_elements(feed_forward: Mlp | Experts, tensor_parallel_size: int) -> int:
    """Elements alive at once for one token in an MLP or in a shared expert on each GPU (`_layer_bytes_per_token`)."""
    if isinstance(feed_forward, Mlp):
        return (3 if feed_forward.gated else 2) * feed_forward.intermediate_size // tensor_parallel_size
    return _feed_forward_elements(feed_forward.shared, tensor_parallel_size) if feed_forward.shared else 0


def _routed_elements(feed_forward: Mlp | Experts, hidden: int, tensor_parallel_size: int) -> int:
    """Elements of one token's work in its routed experts on each GPU: k x (max(2 F, hidden) + max(F, hidden))."""
    if isinstance(feed_forward, Mlp):
        return 0
    intermediate = feed_forward.moe_intermediate_size // tensor_parallel_size
    return feed_forward.num_experts_per_tok * (max(2 * intermediate, hidden) + max(intermediate, hidden))


def expert_workspace_bytes(model: ModelShape, tensor_parallel_size: int, tokens: int, version: VllmVersion) -> int:
    """Bytes of the buffer in which routed experts compute, on each GPU; it stays from the profile run on, asleep too.

        workspace = 2 x tokens x k x (max(2 F, hidden) + max(F, hidden)), F divided by tp; k experts per token

    F is the intermediate size of an expert. All layers share the buffer; it has grown to max_num_batched_tokens.
    Source: vllm 0.31, v1/worker/workspace.py, `WorkspaceManager`; model_executor/layers/fused_moe/modular_kernel.py,
    `_allocate_buffers`; fused_moe/experts/triton_moe.py, `workspace_shapes`.
    Example: Qwen3-30B-A3B on 4 GPUs, 4,096 tokens: 2 x 4,096 x 8 x (2,048 + 2,048) = 256 MiB, as on an emulated GPU
    (results/emulated_engine.md).

    Leaves out kernels other than Triton's. Releases before "workspace" free it after each layer: 0 bytes.
    """
    if not vllm_has(version, "workspace"):
        return 0
    return (
        SIXTEEN_BIT_BYTES
        * tokens
        * max(
            _routed_elements(layer.feed_forward, layer.hidden_size, tensor_parallel_size)
            for layer, _ in model.layer_kinds
        )
    )


def persistent_buffer_bytes(
    model: ModelShape, max_num_seqs: int, max_num_batched_tokens: int, runner: RunnerName
) -> int:
    """Bytes of the sampler's and the input batch's buffers on each GPU, allocated at start-up.

        buffers = max_num_seqs x (4 x vocabulary + 2 x 4 x ceil(vocabulary / 32) + sampling state)
                  + 13 x max_num_batched_tokens

    Terms: output-token counts, prompt and grammar bit masks, SAMPLING_STATE_BYTES, INPUT_BYTES_PER_TOKEN.
    Source: vllm/v1/worker/gpu/sample/penalties.py, structured_outputs.py.
    Example: 1,024 sequences of Qwen2.5-7B: 1024 x (4 x 152,064 + ...) = 0.64 GiB; TRL's 8 sequences: 5 MiB.

    Leaves out a few bytes per sequence. Runner "v1" keeps this state on the host: 0 bytes.
    """
    if not RUNNERS[runner].keeps_penalties:
        return 0
    bytes_per_sequence = 4 * model.vocab_size + 2 * 4 * -(-model.vocab_size // 32) + SAMPLING_STATE_BYTES
    return max_num_seqs * bytes_per_sequence + INPUT_BYTES_PER_TOKEN * max_num_batched_tokens


def non_torch_bytes(model: ModelShape, tensor_parallel_size: int, version: VllmVersion) -> tuple[int, int]:
    """Bytes outside torch's allocator on each GPU of the engine, as (within its budget, before vLLM's baseline).

    A model with experts has a second NCCL communicator, of its expert parallel group, which is made of the same GPUs
    without expert parallelism too. Source: vllm 0.31, distributed/parallel_state.py, `initialize_model_parallel`. Of
    releases before "baseline_after_nccl" the one row of a mixture in tests/data/vllm.jsonl shows no second one.
    """
    nccl = NCCL_BYTES if tensor_parallel_size > 1 else 0
    if not vllm_has(version, "baseline_after_nccl"):
        return NON_TORCH_BYTES + nccl, 0
    experts = any(isinstance(layer.feed_forward, Experts) for layer, _ in model.layer_kinds)
    return NON_TORCH_BYTES, 2 * nccl if experts else nccl


@lru_cache(maxsize=4096)
def cuda_graph_bytes(
    max_num_seqs: int, max_num_batched_tokens: int, version: VllmVersion, largest: int = LARGEST_GRAPH
) -> int:
    """Bytes of the CUDA graphs on each GPU: captured batch sizes x CUDA_GRAPH_BYTES_PER_SIZE.

    Example: TRL's 8 sequences capture 1, 2, 4, 8, 16: 5 x 17.3 MiB = 87 MiB; 256 or more sequences capture 51 sizes:
    0.86 GiB.
    """
    return graph_sizes(max_num_seqs, max_num_batched_tokens, version, largest) * CUDA_GRAPH_BYTES_PER_SIZE


def largest_graph(compute_capability: tuple[int, int], version: VllmVersion) -> int:
    """Largest batch size of a CUDA graph on a GPU."""
    blackwell = compute_capability[0] == BLACKWELL_OF_DATA_CENTRES
    return LARGEST_GRAPH_OF_BLACKWELL if blackwell and vllm_has(version, "graphs_of_1024") else LARGEST_GRAPH


def graph_sizes(
    max_num_seqs: int, max_num_batched_tokens: int, version: VllmVersion, largest_size: int = LARGEST_GRAPH
) -> int:
    """Number of batch sizes for which vLLM captures a CUDA graph (vllm/config/vllm.py, _set_cudagraph_sizes)."""
    largest = min(2 * max_num_seqs, largest_size, max_num_batched_tokens)
    sizes = {size for size in FIRST_GRAPHS if size <= largest}
    sizes.update(range(FINE_STEP, min(largest + 1, COARSE_FROM), FINE_STEP))
    sizes.update(range(COARSE_FROM, largest + 1, COARSE_STEP))
    off_steps = (max_num_seqs,) if vllm_has(version, "graph_of_all_sequences") else ()
    sizes.update(size for size in (*off_steps, max_num_batched_tokens) if size <= largest)
    return len(sizes)

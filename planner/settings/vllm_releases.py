"""vLLM by release: since when a fact of its memory holds, and which releases a release of TRL takes."""

from bisect import bisect_right
from typing import Literal, get_args

from planner.models.layers import Experts
from planner.models.recurrent import states_of
from planner.models.shape import ModelShape

# A minor release. "0.11" stands for older ones, too: its facts are those of the start-up logs in tests/data/vllm.jsonl.
VllmVersion = Literal[
    "0.11", "0.12", "0.13", "0.14", "0.15", "0.16", "0.17", "0.18", "0.19", "0.20", "0.21", "0.22", "0.23", "0.24",
    "0.25", "0.26", "0.27", "0.28", "0.29", "0.30", "0.31", "0.32", "0.33",
]  # fmt: skip
# newest: of those that the run's TRL takes and that load its weights
VllmChoice = Literal["newest", VllmVersion]
VLLM_VERSIONS: tuple[VllmVersion, ...] = get_args(VllmVersion)

RunnerName = Literal["v1", "v2"]  # vLLM's two model runners
VllmFact = Literal[
    "baseline_after_nccl",
    "workspace",
    "sorts_nothing",
    "graphs_in_budget",
    "tunes_kernels",
    "second_runner_quantized",
    "second_runner_dense",
    "windows_in_flight",
    "keeps_tuned_table",
    "counts_free_memory",
    "second_runner_for_mixtures",
    "second_runner_measures_graphs",
    "refines_blocks",
    "large_server_batch",
    "graphs_of_1024",
    "no_bitsandbytes",
    "stateful_transfer",
    "prefixes_of_hybrids",
    "graph_of_all_sequences",
    "returns_tuned_table",
    "workspace_discarded",
    "small_spark",
]
# The first release with a fact, read in the wheels of 0.12, 0.14, 0.17 to 0.33 (the newest patch of each).
SINCE_VLLM: dict[VllmFact, VllmVersion] = {
    # NCCL has started before the memory baseline is taken: v1/worker/gpu_worker.py, `Worker.init_device`.
    "baseline_after_nccl": "0.12",
    # Experts compute in a buffer that stays: v1/worker/workspace.py (0.12 has none, 0.13 was not read).
    "workspace": "0.14",
    # Top-k and top-p of 8 rows and more work in place: v1/sample/ops/topk_topp_triton.py. (0.14 has none, 0.15 and 0.16
    # were not read.)
    "sorts_nothing": "0.17",
    # CUDA graphs are measured first and subtracted from the KV cache: envs.py,
    # VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS. vLLM's log says "since v0.21.0", 0.20.2 does so already.
    "graphs_in_budget": "0.20",
    # torch 2.11, whose Inductor times kernels while it compiles: seven engines of 0.22 and 0.26 in
    # results/emulated_engine.md. The logs of older releases show none.
    "tunes_kernels": "0.20",
    # Model runner 2 of a model whose architecture is listed, though it is quantized or a mixture: config/vllm.py,
    # `VllmConfig._is_default_v2_model_runner_model` (`Architecture.second_runner_since` has the list).
    "second_runner_quantized": "0.24",
    # The same for every dense model without recurrent states.
    "second_runner_dense": "0.25",
    # A sliding window's share of blocks holds the tokens of both batches in flight: v1/kv_cache_interface.py,
    # `SlidingWindowSpec.max_admission_blocks_per_request`; config/vllm.py, `VllmConfig.max_in_flight_tokens`.
    "windows_in_flight": "0.26",
    # The second table of embeddings on which Inductor has timed a kernel stays, until "returns_tuned_table": with torch
    # 2.13 and not with 2.11 (0.26), results/emulated_engine.md.
    "keeps_tuned_table": "0.27",
    # The KV cache is sized by the card's free memory, not by PyTorch's reserved bytes, among which is what the pool of
    # sleep mode has unmapped: 0.26, utils/mem_utils.py, `memory_profiling` (`non_torch_increase`),
    # device_allocator/cumem.py, `use_memory_pool` (`unmap_and_release`); results/emulated_engine.md.
    "counts_free_memory": "0.27",
    # `vllm serve` takes 16,384 tokens a batch on cards of 160 GiB: engine/arg_utils.py, `get_batch_defaults`.
    "large_server_batch": "0.28",
    # No layers of bitsandbytes, with which TRL has vLLM load a 4-bit base: vllm 0.27.1 and 0.28.0,
    # model_executor/layers/quantization/__init__.py; trl 1.16, generation/vllm_generation.py,
    # `VLLMGeneration._init_vllm`.
    "no_bitsandbytes": "0.28",
    # A class of its own sends weights to a server: distributed/weight_transfer/nccl_engine.py, which has no
    # `trainer_init` and `trainer_send_weights` any more.
    "stateful_transfer": "0.28",
    # Graphs of up to 1,024 sequences on Blackwell of data centres (compute capability 10): config/vllm.py,
    # `VllmConfig._set_cudagraph_sizes`.
    "graphs_of_1024": "0.28",
    # Prefix caching is on for models with recurrent states, two of which a sequence then keeps: engine/arg_utils.py,
    # `_set_default_chunked_prefill_and_prefix_caching_args`; v1/kv_cache_interface.py, `MambaSpec`.
    "prefixes_of_hybrids": "0.28",
    # Model runner 2 of every model: config/vllm.py, `VllmConfig.use_v2_model_runner`.
    "second_runner_for_mixtures": "0.29",
    # Its graphs are measured first, too: v1/worker/gpu/model_runner.py, `profile_cudagraph_memory` (returns 0 before).
    "second_runner_measures_graphs": "0.29",
    # Routed experts of an FP8 checkpoint get smaller blocks of scales where GPUs part those of 128 x 128 weights:
    # model_executor/layers/fused_moe/oracle/fp8.py, `resolve_fp8_moe_weight_block_shape` (a tiny Qwen3-MoE of 192
    # features of an expert on two emulated H100s: "refined from [128, 128] to [64, 64]").
    "refines_blocks": "0.29",
    # The profile run splits no large block, so that none stays for a small tensor in it: v1/worker/gpu_worker.py,
    # `_scoped_allocator_max_split` in `Worker.determine_available_memory`. Before, the table on which Inductor has
    # tuned a kernel stays: results/emulated_engine.md.
    "returns_tuned_table": "0.31",
    # A graph of max_num_seqs sequences, whatever the steps: config/vllm.py, `VllmConfig._set_cudagraph_sizes`.
    "graph_of_all_sequences": "0.31",
    # The experts' buffer is discarded on sleep: v1/worker/gpu_worker.py, `Worker.init_device` (`alloc_context` of
    # `init_workspace_manager`).
    "workspace_discarded": "0.32",
    # A DGX Spark has the batches of a small card: engine/arg_utils.py, `get_batch_defaults` (`is_gb10`).
    "small_spark": "0.33",
}

# Cards that some facts are about: GiB of memory, and compute capabilities.
LARGE_BATCH_GIB = 160
BLACKWELL_OF_DATA_CENTRES = 10  # 10.0 and 10.3: B200, B300, GB300
SPARK = (12, 1)  # `is_gb10`

# First release of TRL, and the oldest and the newest vLLM that it takes; each holds until the next row.
# Source: the wheels of trl 1.0 to 1.16, METADATA (extra `vllm`) and import_utils.py, `is_vllm_available`, which only
# warns.
TAKEN_BY_TRL: tuple[tuple[tuple[int, int], VllmVersion, VllmVersion], ...] = (
    ((1, 0), "0.11", "0.17"),  # from 0.10.2
    ((1, 2), "0.11", "0.18"),
    ((1, 3), "0.12", "0.18"),
    ((1, 6), "0.12", "0.19"),
    ((1, 7), "0.14", "0.23"),
    ((1, 8), "0.16", "0.23"),
    ((1, 9), "0.17", "0.25"),
    ((1, 10), "0.17", "0.26"),
    ((1, 11), "0.19", "0.27"),
    ((1, 13), "0.19", "0.28"),
    ((1, 14), "0.20", "0.30"),
    ((1, 15), "0.21", "0.31"),
    ((1, 16), "0.22", "0.31"),
)
NEWEST_TAKEN = TAKEN_BY_TRL[-1][2]  # by the newest TRL: the release that the formulas were compared with
# The torch that vLLM requires, from a release on. Source: the wheels' METADATA.
TORCH_OF_VLLM: tuple[tuple[VllmVersion, str], ...] = (
    ("0.11", "2.9"), ("0.17", "2.10"), ("0.20", "2.11"), ("0.27", "2.13"), ("0.33", "2.14"),
)  # fmt: skip
# The first transformers that vLLM refuses, from a release on; "": it has no upper bound. Source: the wheels' METADATA.
TRANSFORMERS_BELOW: tuple[tuple[VllmVersion, str], ...] = (
    ("0.11", "5"), ("0.19", ""), ("0.31", "5.18"), ("0.32", "5.20"), ("0.33", "5.21"),
)  # fmt: skip


def vllm_has(version: VllmVersion, fact: VllmFact) -> bool:
    """Return whether a release of vLLM has a fact."""
    return is_since(version, SINCE_VLLM[fact])


def last_before(fact: VllmFact) -> VllmVersion:
    """Return the newest release of vLLM without a fact."""
    return VLLM_VERSIONS[VLLM_VERSIONS.index(SINCE_VLLM[fact]) - 1]


def measures_graphs(version: VllmVersion, runner: RunnerName) -> bool:
    """Return whether a release of vLLM subtracts CUDA graphs from the KV cache, by its model runner."""
    return vllm_has(version, "graphs_in_budget" if runner == "v1" else "second_runner_measures_graphs")


def is_since(version: str, first: str) -> bool:
    """Return whether a release of vLLM is no older than another."""
    known: tuple[str, ...] = VLLM_VERSIONS
    return known.index(version) >= known.index(first)


def taken_by_trl(trl: tuple[int, int]) -> tuple[VllmVersion, VllmVersion]:
    """Return the oldest and the newest release of vLLM that a release of TRL takes."""
    _, oldest, newest = TAKEN_BY_TRL[max(0, bisect_right(TAKEN_BY_TRL, trl, key=lambda row: row[0]) - 1)]
    return oldest, newest


def required(version: VllmVersion, rows: tuple[tuple[VllmVersion, str], ...]) -> str:
    """Return what a release of vLLM requires by `TORCH_OF_VLLM` or `TRANSFORMERS_BELOW`."""
    return next((bound for first, bound in reversed(rows) if is_since(version, first)), "")


def runner_of(model: ModelShape, quantized: bool, version: VllmVersion) -> RunnerName:
    """Return the model runner with which a release of vLLM runs a model.

        0.22, 0.23   "v2" for the types that `Architecture.second_runner_since` lists, unless quantized
        0.24         for those, quantized or not
        0.25         for those and all dense models without recurrent states
        0.29         for all

    Source: vllm 0.22 to 0.29, config/vllm.py, `VllmConfig.use_v2_model_runner`.

    Leaves out settings of vLLM that TRL does not give, with which it keeps the first one.
    """
    if vllm_has(version, "second_runner_for_mixtures"):
        return "v2"
    dense = not any(isinstance(layer.feed_forward, Experts) for layer, _ in model.layer_kinds)
    since = model.architecture.second_runner_since
    listed = bool(since) and is_since(version, since)
    if vllm_has(version, "second_runner_dense"):
        return "v2" if listed or (dense and not states_of(model)) else "v1"
    return "v2" if listed and (not quantized or vllm_has(version, "second_runner_quantized")) else "v1"

"""Memory of the vLLM engine on one GPU: budget, weights and buffers, KV cache, and the part that stays during sleep.

Paths and lines are those of vLLM 0.33.0. The formulas were compared with vLLM 0.31.0, the newest release that trl 1.16
accepts (trl/import_utils.py, `is_vllm_available`), and with logs of 0.7 to 0.11. What differs between releases is in
planner/settings/vllm_releases.py, from their sources.
"""

from bisect import bisect_left
from functools import lru_cache
from math import ceil, floor
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from planner.errors import NothingFits, UnknownArchitecture
from planner.gpus.cluster import Gpu
from planner.memory.dtypes import SIXTEEN_BIT_BYTES
from planner.memory.engine.blocks import BLOCK_SIZE, STATE_BLOCKS, BlockLayout, block_layout
from planner.memory.engine.encoder import encoder_peak_bytes
from planner.memory.engine.profile_run import (
    activation_peak_bytes,
    autotune_peak_bytes,
    cuda_graph_bytes,
    expert_workspace_bytes,
    largest_graph,
    non_torch_bytes,
    persistent_buffer_bytes,
)
from planner.memory.engine.weights import engine_weight_bytes, lora_slot_bytes
from planner.models.division import nearest_size, undivided
from planner.models.image_tower import has_image_tower
from planner.models.layers import layer_elements
from planner.models.recurrent import cache_is_known, states_of
from planner.models.shape import ModelShape
from planner.quantizations import ENGINE_QUANTIZATIONS, EngineQuantization
from planner.settings.vllm_releases import (
    NEWEST_TAKEN,
    RunnerName,
    VllmVersion,
    measures_graphs,
    runner_of,
    vllm_has,
)
from planner.units import MIB, format_count, format_gib

# Batches in flight: the scheduler prepares one while the GPU runs another (vllm/config/vllm.py).
BATCHES_IN_FLIGHT = 2
# Proposed values of `gpu_memory_utilization` are multiples of this.
UTILIZATION_STEP = 0.01
# Lower bound of the memory that a sleeping engine keeps on its GPU, beside the CUDA context of the process: loaded
# kernels, workspaces, buffers. Source: AgileRL/AgileRL's published NVML figures of Qwen2.5-7B with vLLM 0.26, a trainer
# with the engine asleep less the same trainer without one: 0.71 GiB on an A100, 0.67 on an L4. Which allocations it
# consists of is not known.
ASLEEP_BYTES = 706 * MIB


# CUDA graphs are captured without adapters and with them: an emulated server of Qwen2.5-0.5B captured 102 piecewise
# graphs for 51 sizes. Source: vllm 0.31, v1/worker/gpu/lora_utils.py, `get_lora_capture_cases`.
ADAPTER_CASES = 2


class SettingNames(Struct, frozen=True):
    """Names of the settings that a refusal proposes: an engine's that samples, or those of a teacher's server."""

    share: str = "vllm_gpu_memory_utilization"
    gpus: str = "vllm_tensor_parallel_size"
    length: str = "vllm_max_model_length"


class EngineSettings(Struct, frozen=True, kw_only=True):
    """The engine's settings, named as in vLLM's EngineArgs. `sleep` is the level of sleep mode, 0 for none."""

    gpu_memory_utilization: float
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    tensor_parallel_size: int = 1
    kv_dtype_bytes: int = 2  # 1: an fp8 KV cache
    quantization: EngineQuantization | None = "none"  # None: one that vLLM does not have
    enforce_eager: bool = False
    sleep: Literal[0, 1, 2] = 0
    max_lora_rank: int = 0
    max_loras: int = 0  # 0: the engine serves no adapters
    version: VllmVersion = NEWEST_TAKEN
    names: SettingNames = SettingNames()

    @property
    def in_flight_tokens(self) -> int:
        """Tokens that are scheduled and whose results are pending, where blocks are counted for a sliding window."""
        batches = BATCHES_IN_FLIGHT if vllm_has(self.version, "windows_in_flight") else 1
        return batches * self.max_num_batched_tokens

    @property
    def state_blocks(self) -> int:
        """Blocks of a sequence in a group of layers with states."""
        return STATE_BLOCKS if vllm_has(self.version, "prefixes_of_hybrids") else 1


class EngineMemory(Struct, frozen=True, kw_only=True):
    """The engine's memory on each GPU of its tensor-parallel group.

    `asleep_bytes` stays while the trainer trains: the remainder at sleep level 1 or 2, or all but the activation peak
    if the engine has no sleep mode.
    """

    budget_bytes: int
    weights_bytes: int  # with LoRA slots
    activation_peak_bytes: int  # reserved for the temporaries of one forward pass or sampling step
    non_torch_bytes: int
    cuda_graph_bytes: int
    persistent_buffer_bytes: int
    expert_workspace_bytes: int  # stays asleep
    tuned_table_bytes: int  # stays asleep: see `_tuned_table_bytes`
    dropped_head_bytes: int  # of the KV cache, beyond the budget: see `_dropped_head_bytes`
    outside_budget_bytes: int  # allocated before vLLM's baseline, or after it sized the KV cache
    kv_cache_bytes: int
    kv_tokens: int
    max_concurrency: float  # sequences of max_model_len that fit at once
    block_size: int
    max_model_len: int
    asleep_bytes: int

    @property
    def total_bytes(self) -> int:
        """The engine's bytes on each GPU while it generates."""
        return self.budget_bytes + self.outside_budget_bytes

    @property
    def resident_bytes(self) -> int:
        """The engine's bytes on each GPU while it is awake and idle: all but the activation peak."""
        return self.total_bytes - self.activation_peak_bytes

    @property
    def weights_awake_bytes(self) -> int:
        """The engine's bytes on each GPU while the trainer copies new weights into it.

        An engine with sleep mode has woken up with `wake_up(tags=["weights"])`, without its KV cache.
        """
        return min(self.resident_bytes, self.asleep_bytes + self.weights_bytes + self.persistent_buffer_bytes)


class EngineRefusal(Struct, frozen=True, kw_only=True):
    """Why vLLM would not start. `reason` is one line with both numbers and the nearest setting that works.

    `max_model_len_that_fits` and `utilization_that_fits` are 0 if no value helps.
    """

    reason: str
    max_model_len_that_fits: int = 0
    utilization_that_fits: float = 0.0


class EngineDoesNotFit(NothingFits):
    """vLLM would refuse to start with these settings."""

    def __init__(self, refusal: EngineRefusal) -> None:
        super().__init__(refusal.reason)
        self.refusal = refusal


def engine_memory(model: ModelShape, gpu: Gpu, settings: EngineSettings) -> EngineMemory:
    """The engine's memory on each GPU of its tensor-parallel group.

    Raises:
        EngineDoesNotFit: vLLM would refuse to start; `engine_or_refusal` returns the reason instead.
    """
    answer = engine_or_refusal(model, gpu, settings)
    if isinstance(answer, EngineRefusal):
        raise EngineDoesNotFit(answer)
    return answer


@lru_cache(maxsize=16384)
def engine_or_refusal(model: ModelShape, gpu: Gpu, settings: EngineSettings) -> EngineMemory | EngineRefusal:
    """The engine's memory on each GPU of its tensor-parallel group, or the reason why vLLM would not start.

        budget = ceil(total x gpu_memory_utilization)
        KV     = budget - weights - persistent buffers - experts' workspace - non-torch - activation peak - CUDA graphs
        blocks = KV // bytes_per_block;  tokens = blocks / blocks_per_request x max_model_len

    Source: vllm/v1/worker/utils.py, `request_memory` (budget), utils/mem_utils.py, `memory_profiling`, and
    v1/worker/gpu_worker.py, `Worker.determine_available_memory` (KV), v1/core/kv_cache_planning.py (blocks),
    v1/core/kv_cache_utils.py (tokens).

    vLLM subtracts a baseline that contains the trainer's memory on the same GPU: gpu_memory_utilization is the size of
    the engine's own share, not a limit for all processes on the GPU.

    Example: Llama-3.1-8B at 0.5 on 79.15 GiB: budget 39.58, weights 14.99, leaves about 24 GiB, 196,000 tokens of 128
    KiB.

    Leaves out vision encoders without formulas, speculative decoding and pipeline parallelism.
    """
    if refusal := _wrong_settings(model, gpu, settings):
        return refusal
    budget_bytes = _budget_bytes(gpu, settings)
    memory = _before_kv(model, gpu, settings, budget_bytes)
    layout = _layout(model, settings)
    in_flight_tokens = settings.in_flight_tokens
    needed_blocks = (
        layout.blocks_per_request(settings.max_model_len, in_flight_tokens) + 1
    )  # one is never handed out (kv_cache_planning.py, check_memory)
    if memory.kv_cache_bytes < needed_blocks * layout.bytes_per_block:
        return _too_small(gpu, settings, memory, layout)
    kv_tokens, max_concurrency = layout.tokens_and_concurrency(
        memory.kv_cache_bytes, settings.max_model_len, in_flight_tokens
    )
    return replace(memory, kv_tokens=kv_tokens, max_concurrency=max_concurrency)


def rows_at_once(model: ModelShape, settings: EngineSettings, memory: EngineMemory, row_tokens: int) -> float:
    """Rows of `row_tokens` tokens that the engine decodes at once: as many as its KV cache holds, max_num_seqs at most.

        rows = min(max_num_seqs, blocks / blocks of a row)

    Blocks are handed out as a row grows, up to its own tokens; max_model_len only limits it.
    Source: vllm/v1/core/kv_cache_manager.py, `allocate_slots`.

    Example: 4,096 blocks of 16 tokens hold 42 rows of 1,536 tokens, and 2 of a max_model_len of 32,768.
    """
    layout = _layout(model, settings)
    blocks = layout.blocks_per_request(min(row_tokens, settings.max_model_len), settings.in_flight_tokens)
    return min(float(settings.max_num_seqs), memory.kv_cache_bytes // layout.bytes_per_block / blocks)


def _budget_bytes(gpu: Gpu, settings: EngineSettings) -> int:
    """Bytes that vLLM takes on each GPU: ceil(total x gpu_memory_utilization).

    Source: vllm/v1/worker/utils.py, `request_memory`.
    """
    return ceil(gpu.total_bytes * settings.gpu_memory_utilization)


def _layout(model: ModelShape, settings: EngineSettings) -> BlockLayout:
    return block_layout(model, settings.tensor_parallel_size, settings.kv_dtype_bytes, settings.state_blocks)


def _before_kv(model: ModelShape, gpu: Gpu, settings: EngineSettings, budget_bytes: int) -> EngineMemory:
    """The engine's memory on each GPU without the numbers of KV-cache tokens and sequences, which are 0.

    `kv_cache_bytes` is negative if the rest exceeds the budget.
    """
    assert settings.quantization is not None
    tensor_parallel_size = settings.tensor_parallel_size
    weights_bytes = engine_weight_bytes(model, tensor_parallel_size, settings.quantization)
    weights_bytes += lora_slot_bytes(model, tensor_parallel_size, settings.max_lora_rank, settings.max_loras)
    sequences, tokens, version = settings.max_num_seqs, settings.max_num_batched_tokens, settings.version
    runner = runner_of(model, ENGINE_QUANTIZATIONS[settings.quantization].quantized, version)
    activation = _profile_peak_bytes(model, settings, runner)
    keeps_table = vllm_has(version, "keeps_tuned_table") and not vllm_has(version, "returns_tuned_table")
    tuned = _tuned_table_bytes(model, settings) if keeps_table else 0
    persistent = persistent_buffer_bytes(model, sequences, tokens, runner)
    workspace = expert_workspace_bytes(model, tensor_parallel_size, tokens, version)
    non_torch, before_baseline = non_torch_bytes(model, tensor_parallel_size, version)
    largest = largest_graph(gpu.compute_capability, version)
    graphs = 0 if settings.enforce_eager else cuda_graph_bytes(sequences, tokens, version, largest)
    graphs *= ADAPTER_CASES if settings.max_loras else 1
    graphs_in_budget = graphs if measures_graphs(version, runner) else 0
    tables = _block_table_bytes(_layout(model, settings), settings)
    kept_workspace = 0 if vllm_has(version, "workspace_discarded") else workspace
    dropped = _dropped_head_bytes(model, settings)
    outside_budget_bytes = before_baseline + tables + graphs - graphs_in_budget + dropped
    awake_bytes = budget_bytes + outside_budget_bytes - activation
    return EngineMemory(
        budget_bytes=budget_bytes,
        weights_bytes=weights_bytes,
        activation_peak_bytes=activation,
        non_torch_bytes=non_torch,
        cuda_graph_bytes=graphs,
        persistent_buffer_bytes=persistent,
        expert_workspace_bytes=workspace,
        tuned_table_bytes=tuned,
        dropped_head_bytes=dropped,
        outside_budget_bytes=outside_budget_bytes,
        kv_cache_bytes=budget_bytes
        - weights_bytes
        - activation
        - non_torch
        - persistent
        - workspace
        - tuned
        - graphs_in_budget
        + dropped,
        kv_tokens=0,
        max_concurrency=0.0,
        block_size=BLOCK_SIZE,
        max_model_len=settings.max_model_len,
        asleep_bytes=(
            _asleep_bytes(non_torch + before_baseline, graphs, tables, kept_workspace) + tuned
            if settings.sleep
            else awake_bytes
        ),
    )


def _profile_peak_bytes(model: ModelShape, settings: EngineSettings, runner: RunnerName) -> int:
    """Peak of the temporaries in vLLM's profile run on each GPU: the language model's, the autotuner's or an encoder's.

    A vision-language model gets embeddings, which are looked up before the compiled graph, where nothing is tuned.
    """
    gpus, tokens, rows = settings.tensor_parallel_size, settings.max_num_batched_tokens, settings.max_num_seqs
    assert settings.quantization is not None
    dequantizes = ENGINE_QUANTIZATIONS[settings.quantization].dequantizes
    peak = activation_peak_bytes(model, gpus, tokens, min(rows, tokens), runner, dequantizes, settings.version)
    if table := _tuned_table_bytes(model, settings):
        peak = max(peak, autotune_peak_bytes(model, tokens, table))
    return max(peak, encoder_peak_bytes(model, gpus, tokens, rows, settings.max_model_len, settings.enforce_eager))


def _tuned_table_bytes(model: ModelShape, settings: EngineSettings) -> int:
    """Bytes of a second embedding table on each GPU, on which torch.compile tunes the first kernel; 0 if it does not.

    On several GPUs the table is looked up outside of the kernel, and those of a layer need no more than it. Source: see
    `autotune_peak_bytes`.
    """
    tunes = vllm_has(settings.version, "tunes_kernels") and not settings.enforce_eager
    alone = settings.tensor_parallel_size == 1 and not has_image_tower(model)
    return SIXTEEN_BIT_BYTES * model.hidden_size * model.vocab_size if tunes and alone else 0


def _dropped_head_bytes(model: ModelShape, settings: EngineSettings) -> int:
    """Bytes of a tied head, made and dropped while loading, that the KV cache has beyond the engine's budget.

    Sleep mode's pool unmaps it, PyTorch still counts it as reserved, and vLLM takes it for memory that others freed.
    Source: see `SINCE_VLLM`, "counts_free_memory"; `Architecture.engine_drops_head`.

    Example: Llama-3.2-1B in vLLM 0.22 and 0.26: 2 x 128,256 x 2,048 = 501 MiB (emulated: 502).
    """
    counted = vllm_has(settings.version, "counts_free_memory") or not settings.sleep
    if counted or not (model.tied and model.architecture.engine_drops_head):
        return 0
    return SIXTEEN_BIT_BYTES * model.hidden_size * model.vocab_size // settings.tensor_parallel_size


def _block_table_bytes(layout: BlockLayout, settings: EngineSettings) -> int:
    """Bytes of the block tables on each GPU, allocated after the KV cache was sized.

        tables = groups x (2 x 4 x max_num_seqs x ceil(max_model_len / 16) + 8 x max_num_batched_tokens)

    Per group two int32 tables of a block number per sequence and block, and one int64 slot per token of a batch.
    Source: vllm/v1/worker/gpu/block_table.py, BlockTables.
    """
    blocks = settings.max_num_seqs * -(-settings.max_model_len // BLOCK_SIZE)
    return len(layout.groups) * (2 * 4 * blocks + 8 * settings.max_num_batched_tokens)


def _asleep_bytes(outside_torch_bytes: int, graphs_bytes: int, tables_bytes: int, workspace_bytes: int) -> int:
    """Bytes that stay on each GPU while the engine sleeps, the same at level 1 and at level 2.

        asleep = the larger of memory outside torch + CUDA graphs + block tables, and ASLEEP_BYTES
                 + the experts' workspace, which the models of ASLEEP_BYTES' source do not have; 0 since 0.32

    Level 1 copies the weights to the host, level 2 discards them; both discard the KV cache. CUDA graphs are outside
    the memory pool that sleep frees, unless `sleep_mode_offload_cudagraph` is set (vllm/config/vllm.py); TRL
    does not set it.
    Source: vllm/device_allocator/sleep_mode_backend.py, v1/worker/gpu_worker.py
    (`_maybe_get_memory_pool_context`).
    """
    return max(outside_torch_bytes + graphs_bytes + tables_bytes, ASLEEP_BYTES) + workspace_bytes


def _wrong_settings(model: ModelShape, gpu: Gpu, settings: EngineSettings) -> EngineRefusal | None:
    """The reason why vLLM refuses the settings before it loads the model; None if it accepts them.

    Raises:
        UnknownArchitecture: the model's layers have no shapes here.
    """
    if not model.known:
        raise UnknownArchitecture(f"The KV cache of {model.id} has no formula here. Try --set use_vllm=false.")
    if reason := _unknown_cache(model):
        return EngineRefusal(reason=reason)
    if settings.quantization is None:  # trl/generation/vllm_generation.py, `VLLMGeneration._init_vllm`
        return EngineRefusal(reason="vLLM does not quantize to 8 bits in flight. Try load_in_4bit, or no quantization.")
    gpus = settings.tensor_parallel_size
    if part := undivided(model, gpus):
        nearest = nearest_size(model, gpus)
        return EngineRefusal(reason=f"{part} do not divide over {gpus} GPUs. Try tensor parallel {nearest}.")
    if settings.max_model_len > model.max_position_embeddings:
        return EngineRefusal(
            reason=f"{settings.names.length} {format_count(settings.max_model_len)} is more than the "
            f"{format_count(model.max_position_embeddings)} positions"
            f" of {model.id}. Try {format_count(model.max_position_embeddings)}.",
            max_model_len_that_fits=model.max_position_embeddings,
        )
    budget_bytes = _budget_bytes(gpu, settings)
    if budget_bytes > gpu.free_bytes:  # vllm/v1/worker/utils.py, request_memory
        utilization = _utilization(gpu.free_bytes / gpu.total_bytes, down=True)
        return EngineRefusal(
            reason=f"vLLM's budget at utilization {settings.gpu_memory_utilization:g} is {format_gib(budget_bytes)}, "
            f"but only {format_gib(gpu.free_bytes)}"
            f" of {gpu.name} are free. Try {settings.names.share} {utilization:g}.",
            utilization_that_fits=utilization,
        )
    return None


def _unknown_cache(model: ModelShape) -> str:
    """The error text if it is not known what vLLM keeps of a sequence for a model's layers; empty if it is."""
    if not cache_is_known(model) or not any(layer_elements(layer.attention) for layer, _ in model.layer_kinds):
        return (
            f"{model.id} ({model.model_type}) has layers that keep no keys and values; what vLLM keeps for them has "
            "no formula here."
        )
    if any(layer.attention.index_head_dim for layer, _ in model.layer_kinds):
        return f"{model.id} caches the keys of an indexer, which have no formula in vLLM's pages. Try use_vllm=false."
    if any(state.groups for state, _ in states_of(model)):
        # The reference implementation of transformers 5.17 multiplies [rows, chunks, l, s, heads, state size] out in
        # float32 (models/granitemoehybrid/modeling_granitemoehybrid.py, `mamba2_chunk_scan`): 32 GiB for 4 rows of
        # 1,024 tokens of granite-4.0-h-micro, in an emulated run. That of 5.23, whose layers are measured, does not.
        return (
            f"{model.id} trains beside vLLM with transformers below 5.18 (vLLM 0.31 needs it), whose Mamba 2 layers "
            "take many times the memory that is planned. Try use_vllm=false."
        )
    return ""


def _too_small(gpu: Gpu, settings: EngineSettings, memory: EngineMemory, layout: BlockLayout) -> EngineRefusal:
    """The refusal if the KV cache holds no sequence of `max_model_len`: sizes, and settings that would fit."""
    in_flight_tokens = settings.in_flight_tokens
    needed_bytes = (layout.blocks_per_request(settings.max_model_len, in_flight_tokens) + 1) * layout.bytes_per_block
    needed_budget_bytes = memory.budget_bytes - memory.kv_cache_bytes + needed_bytes
    utilization = _utilization(needed_budget_bytes / gpu.total_bytes)
    if ceil(gpu.total_bytes * utilization) > gpu.free_bytes:
        utilization = 0.0
    fitting_len = _fitting_len(
        memory.kv_cache_bytes // layout.bytes_per_block - 1, settings.max_model_len, in_flight_tokens, layout
    )
    available_bytes = memory.kv_cache_bytes
    engine = f"vLLM at utilization {settings.gpu_memory_utilization:g} ({format_gib(memory.budget_bytes)})"
    if available_bytes <= 0:
        reason = (
            f"{engine} has no room for a KV cache: weights and buffers alone need "
            f"{format_gib(memory.budget_bytes - available_bytes)}."
        )
    else:
        tokens = format_count(settings.max_model_len)
        reason = (
            f"{engine} leaves {format_gib(available_bytes)} for the KV cache; one sequence of {tokens} tokens needs "
            f"{format_gib(needed_bytes)}."
        )
    names = settings.names
    changes = [f"{names.length} {format_count(fitting_len)}"] if fitting_len else []
    changes += [f"{names.share} {utilization:g}"] if utilization else []
    advice = f" Try {', or '.join(changes)}." if changes else f" Try a larger GPU, or {names.gpus}."
    return EngineRefusal(reason=reason + advice, max_model_len_that_fits=fitting_len, utilization_that_fits=utilization)


def _fitting_len(usable_blocks: int, max_model_len: int, in_flight_tokens: int, layout: BlockLayout) -> int:
    """The largest max_model_len of which one sequence fits into `usable_blocks`; 0 if none does.

    Uses binary search, as vLLM does: the number of lengths from 1 on before the first that does not fit.
    """
    return bisect_left(
        range(1, max_model_len + 1),
        True,
        key=lambda length: layout.blocks_per_request(length, in_flight_tokens) > usable_blocks,
    )


def _utilization(share: float, down: bool = False) -> float:
    """`share` rounded up (or down) to a multiple of UTILIZATION_STEP."""
    steps = share / UTILIZATION_STEP
    return round((floor(steps) if down else ceil(steps)) * UTILIZATION_STEP, 2)

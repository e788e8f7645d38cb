"""The settings with which TRL starts a candidate's vLLM engine, in the trainer's process or as a server."""

from planner.candidate import Candidate
from planner.gpus.cluster import Gpu
from planner.memory.engine.budget import EngineSettings, SettingNames
from planner.models.shape import ModelShape
from planner.settings.vllm_releases import LARGE_BATCH_GIB, SPARK, VllmVersion, vllm_has
from planner.units import GIB

# Source: trl/generation/vllm_generation.py, `VLLMGeneration._init_vllm`,
# trl/experimental/online_dpo/online_dpo_trainer.py, `OnlineDPOTrainer.__init__`.
COLOCATE_MAX_NUM_BATCHED_TOKENS = 4096
# Batch defaults of `vllm serve`, which `trl vllm-serve` does not override, as (least GiB of the GPU,
# max_num_batched_tokens, max_num_seqs). An A100 gets the last row, even with 80 GB. Source:
# vllm/engine/arg_utils.py, `get_batch_defaults`.
LARGE_BATCH = (LARGE_BATCH_GIB, 16384, 1024)
SERVER_BATCHES = (LARGE_BATCH, (70, 8192, 1024), (0, 2048, 256))
SMALL_BATCH_GPU = "a100"


def engine_settings(candidate: Candidate, gpu: Gpu) -> EngineSettings:
    """The engine settings of TRL 1.16 for a candidate: `LLM(...)` in colocate mode, `trl vllm-serve` in server mode."""
    server = candidate.vllm == "server"
    tokens, sequences = (
        _server_batch(gpu, candidate.vllm_release)
        if server
        else (COLOCATE_MAX_NUM_BATCHED_TOKENS, _colocate_sequences(candidate))
    )
    max_lora_rank, max_loras = candidate.adapter_slots
    return EngineSettings(
        gpu_memory_utilization=candidate.vllm_gpu_memory_utilization,
        max_model_len=_max_model_len(candidate),
        max_num_seqs=sequences,
        max_num_batched_tokens=tokens,
        tensor_parallel_size=candidate.vllm_tensor_parallel_size,
        quantization=candidate.engine_quantization,
        max_lora_rank=max_lora_rank,
        max_loras=max_loras,
        sleep=2 if candidate.vllm_enable_sleep_mode and not server else 0,
        version=candidate.vllm_release,
    )


TEACHER_NAMES = SettingNames(
    share="teacher_server_gpu_memory_utilization",
    gpus="teacher_server_gpus",
    length="prompt_length + max_completion_length",
)


def teacher_settings(candidate: Candidate, teacher: ModelShape, gpu: Gpu) -> EngineSettings:
    """The engine settings of a teacher's `vllm serve`, whose requests are whole rows and one token more.

    Log-probabilities of prompts need nothing more: vLLM makes 16-bit logits of 1,024 tokens at a time, less than the
    profile run's of max_num_seqs rows. Source: vllm 0.31, v1/worker/gpu/sample/prompt_logprob.py, `CHUNK_SIZE`,
    `compute_prompt_logprobs_with_chunking`; of runner "v1" they are not counted.
    """
    tokens, sequences = _server_batch(gpu, candidate.vllm_release)
    return EngineSettings(
        gpu_memory_utilization=candidate.teacher_server_gpu_memory_utilization,
        max_model_len=candidate.teacher_row_tokens,
        max_num_seqs=sequences,
        max_num_batched_tokens=tokens,
        tensor_parallel_size=candidate.teacher_server_gpus,
        quantization=teacher.quantization_row.engine,
        version=candidate.vllm_release,
        names=TEACHER_NAMES,
    )


def _colocate_sequences(candidate: Candidate) -> int:
    """max_num_seqs of a colocated engine: batch size x tensor_parallel_size x micro-batches of a generation.

    Source: trl 1.16, trainer/grpo_trainer.py, `GRPOTrainer.__init__` (steps_per_generation),
    trainer/distillation_trainer.py, `DistillationTrainer.__init__` (gradient_accumulation_steps),
    experimental/online_dpo/online_dpo_trainer.py, `OnlineDPOTrainer.__init__` (one).
    """
    row, steps = candidate.method_row, 1
    if row.grouped_completions:
        steps = candidate.steps_per_generation
    elif row.generates_ahead:
        steps = candidate.gradient_accumulation_steps
    return candidate.per_device_train_batch_size * candidate.vllm_tensor_parallel_size * steps


def _max_model_len(candidate: Candidate) -> int:
    """max_model_len of the engine: vllm_max_model_length if set, else the model's whole context.

    In colocate mode online DPO passes max_length + max_new_tokens (`Method.builds_engine`), GOLD max_length
    (`Method.row_long_engine`).
    """
    if candidate.method_row.builds_engine and candidate.vllm == "colocate":
        return candidate.max_length + candidate.max_completion_length
    if candidate.method_row.row_long_engine and candidate.vllm == "colocate":
        return candidate.vllm_max_model_length or candidate.max_length
    return candidate.vllm_max_model_length or candidate.model.max_position_embeddings


def _server_batch(gpu: Gpu, version: VllmVersion) -> tuple[int, int]:
    """max_num_batched_tokens and max_num_seqs that `vllm serve` chooses for a GPU (SERVER_BATCHES)."""
    small = SMALL_BATCH_GPU in gpu.name.lower() and gpu.total_bytes < LARGE_BATCH[0] * GIB
    small = small or (gpu.compute_capability == SPARK and vllm_has(version, "small_spark"))
    batches = SERVER_BATCHES if vllm_has(version, "large_server_batch") else SERVER_BATCHES[1:]
    gib = 0 if small else gpu.total_bytes / GIB
    return next((tokens, sequences) for least, tokens, sequences in batches if gib >= least)

"""Host memory of one node while its training processes load and train."""

from functools import lru_cache

from msgspec.structs import replace

from planner.cache_keys import StateInput, StateSettings, TrainingInput, state_settings
from planner.candidate import Dtype
from planner.gpus.cluster import Cluster
from planner.memory.activations import EXISTING, stack_memory
from planner.memory.dtypes import DTYPE_BYTES, FLOAT32_BYTES
from planner.memory.optimizer import host_states_bytes, paged_states_bytes
from planner.memory.parameters.policy import frozen_tensors, loaded_models, policy_parameters
from planner.memory.parameters.quantized import whole_quantized_bytes
from planner.memory.parameters.tensors import TensorSet
from planner.memory.schemes.table import scheme_of
from planner.memory.stack_recipe import stack_recipe
from planner.memory.weights import adapters_bytes, policy_weights_bytes
from planner.models.shape import ModelShape

# Resident memory of a Python process after PyTorch has started CUDA: 2,056,600 kB.
# Source: pytorch/pytorch#113326 (RTX 3090, CUDA 11.8). Not measured by us.
PROCESS_BYTES = 2_056_600 * 1024


def host_peak_bytes(candidate: TrainingInput, cluster: Cluster) -> int:
    """Bytes of host memory at the peak on one training node.

        peak = processes x PROCESS_BYTES + max(models being loaded,
                                               processes x offloaded bytes + the larger of weights being saved and
                                               processes x logits of the evaluation)

    Source: see `loading_bytes`, `training_bytes`, `saving_bytes` and `metric_logits_bytes`.

    Leaves out data sets, data loader workers, the file cache, and vLLM's own processes (TRL uses sleep level 2, which
    keeps no copy of the weights: trl 1.16, generation/vllm_generation.py, `VLLMGeneration._init_vllm`).
    """
    processes = min(-(-candidate.num_processes // candidate.num_nodes), cluster.gpus_per_node)
    kept, saved, loaded = _without_batch(state_settings(candidate), processes)
    kept += offloaded_activation_bytes(candidate, cluster)
    saved = max(saved, processes * metric_logits_bytes(candidate))
    return processes * PROCESS_BYTES + max(loaded, processes * kept + saved)


@lru_cache(maxsize=8192)
def _without_batch(settings: StateSettings, processes: int) -> tuple[int, int, int]:
    """Return `training_bytes`, `saving_bytes` and `loading_bytes`, which no batch changes."""
    return training_bytes(settings), saving_bytes(settings, processes), loading_bytes(settings, processes)


def metric_logits_bytes(candidate: TrainingInput) -> int:
    """Bytes of the logits that a function of metrics gets, on the host of each process.

        logits = 2 x rows of the evaluation x tokens x vocabulary x 4: joined, and the arrays that are joined

    Source: transformers 5.23, trainer_pt_utils.py, `EvalLoopContainer.to_cpu_and_numpy` (`np.concatenate`).

    Example: 1,000 rows of 1,024 tokens of Qwen2.5-7B: 1.2 TB.
    """
    rows = candidate.kept_eval_rows * candidate.method_row.rows_per_sample
    return 2 * rows * candidate.row_tokens * candidate.model.vocab_size * FLOAT32_BYTES


def loading_bytes(candidate: StateInput, processes: int) -> int:
    """Bytes of models in host memory on one node while they are loaded.

        no launcher, bitsandbytes   0: weights stream to the GPU, but with a device map alone (`policy_loader`)
        DDP, ZeRO-1, ZeRO-2, FSDP2  processes x copied parameters of every model x loaded dtype
        ZeRO-3                      0: sharded while loading
        Transformers' own FSDP2     0: each process reads the slices of its shards to its GPU

    Parameters in the dtype of their checkpoint are not copied: they are pages of its file, which the processes share
    and the kernel can drop. Experts are copied in any dtype, since they are merged into one tensor a layer. A policy
    in GPTQ, AWQ, FP8 or MXFP4 counts as it is stored.

    Source: trl 1.16, trainer/sft_trainer.py, `SFTTrainer.__init__` (`device_map=None` when distributed); transformers
    5.23, modeling_utils.py, `PreTrainedModel._load_pretrained_model` (`backend="mmap"`) and
    `get_init_context` (`deepspeed.zero.Init`), core_model_loading.py (`_materialize_copy`, `spawn_materialize`,
    whose `DtensorShardOperation` slices what it reads). Measured (RssAnon after
    `from_pretrained` on the CPU, bfloat16 checkpoints): a Llama of 727 MiB takes 2 MiB, in float32 1,457 of 1,455 MiB;
    a Mixtral with 384 MiB of experts 386. Of two processes with FSDP_CPU_RAM_EFFICIENT_LOADING both take 547 MiB for a
    Llama of 506 in float32: that variable spares none of them the weights (huggingface/transformers#43749).

    Example: Qwen2.5-7B in float32 with DDP on eight GPUs: 243.7 GB.
    """
    row = candidate.scheme_row
    streams = not row.launched and candidate.method_row.policy_loader == "trainer"
    if candidate.quantization_row.bitsandbytes or row.creates_sharded or row.loads_divided or streams:
        return 0
    policy = policy_parameters(candidate)
    copied = _copied_params(policy.unquantized_tensors, candidate.model, candidate.dtype)
    for model in loaded_models(candidate)[1:]:
        copied += _copied_params(frozen_tensors(model), model, candidate.dtype)
    whole = copied * DTYPE_BYTES[candidate.dtype] + whole_quantized_bytes(candidate)
    return whole * processes


def _copied_params(tensors: TensorSet, model: ModelShape, dtype: Dtype) -> int:
    """Parameters that loading copies: all if the dtype changes, else those of experts."""
    return (tensors.only("expert") if dtype == model.dtype else tensors).params


def saving_bytes(candidate: StateInput, processes: int) -> int:
    """Bytes of weights in host memory of the first node while the trainer saves, of `processes` on that node.

    Example: LoRA of Llama-3.1-70B under ZeRO-2 on eight GPUs: 1.13 TB; under ZeRO-3 0.4 GB.
    """
    policy, adapters = policy_weights_bytes(candidate), adapters_bytes(candidate)
    return scheme_of(candidate).saving(candidate, processes, policy, adapters)


def training_bytes(candidate: StateInput) -> int:
    """Bytes that one process keeps in host memory during training, without activations.

        bytes = offloaded optimizer + paged states + offloaded parameters

    Source: see `host_states_bytes`, `paged_states_bytes` and `Scheme.offloaded_parameters`.
    """
    return (
        host_states_bytes(candidate)
        + paged_states_bytes(candidate)
        + scheme_of(candidate).offloaded_parameters(candidate)
    )


def offloaded_activation_bytes(candidate: TrainingInput, cluster: Cluster) -> int:
    """Bytes of saved activations in pinned memory of one process: all of them with offloading, else 0.

    Source: trl 1.16, models/activation_offloading.py; transformers 5.23, modeling_utils.py,
    `PreTrainedModel.activation_checkpointing_enable` (`offload` of checkpoints). Counts the few tensors that are still
    on the GPU too (`max_fwd_stash_size` 5).

    Leaves out that each tensor takes a power of two (`pinned_bytes`), less than twice its size.
    """
    recipe = stack_recipe(candidate, cluster.gpu.supports_flash_attention_2)
    if recipe.offloads == "nothing":
        return 0
    # the bytes that the GPU would hold without offloading
    saved = stack_memory(candidate.model, replace(recipe, offloads="nothing"), EXISTING, 0).saved
    return dict(saved.kinds)["activations"][0] * candidate.tokens

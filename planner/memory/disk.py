"""Disk: the models as they are downloaded, and the checkpoints that the trainer writes."""

from planner.cache_keys import StateInput
from planner.memory.dtypes import DTYPE_BYTES
from planner.memory.parameters.optimizer_states import state_bytes
from planner.memory.parameters.policy import frozen_tensors, loaded_models, policy_parameters
from planner.memory.parameters.quantized import whole_quantized_bytes
from planner.memory.parameters.widths import adapter_dtype_bytes

# The one that is written, and the one before, which `save_total_limit: 1` deletes only then. Without the setting all
# are kept. Source: transformers 5.23, trainer.py, `_save_checkpoint`.
CHECKPOINTS = 2


def disk_bytes(candidate: StateInput) -> int:
    """Bytes of disk that a run needs for its models.

        disk = every model once, in its checkpoint's dtype + CHECKPOINTS x (trained weights + optimizer states)

    Example: LoRA of Qwen2.5-7B: 15.2 GB and two checkpoints of 0.5 GB.

    Leaves out the environment, the data and its cache, and the float32 masters that DeepSpeed saves of 16-bit weights.
    """
    policy = policy_parameters(candidate)
    models = dict.fromkeys(loaded_models(candidate))
    downloads = {model: frozen_tensors(model).params * DTYPE_BYTES[model.dtype] for model in models}
    if candidate.quantization_row.quantized and not candidate.quantization_row.bitsandbytes:
        kept = policy.unquantized_params * DTYPE_BYTES[candidate.model.dtype]
        downloads[candidate.model] = whole_quantized_bytes(candidate) + kept
    width = adapter_dtype_bytes(candidate) if candidate.tuning == "lora" else DTYPE_BYTES[candidate.dtype]
    states = state_bytes(policy.trainable_tensors, width, candidate.optim, paged=False)
    return sum(downloads.values()) + CHECKPOINTS * (policy.trainable * width + states)

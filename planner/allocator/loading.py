"""Model loading leaves one free block in the allocator, as large as the weights, before a trace's first tensor."""

from planner.allocator.trace import Trace
from planner.candidate import Candidate
from planner.gpus.cluster import Gpu
from planner.units import GIB

# Tensors stored beside quantized weights that are no parameters, by the ends of their names.
# Source: bitsandbytes 0.50.2, functional.py `QuantState`, nn/modules.py.
QUANTIZATION_STATISTICS = ("absmax", "code", "offset", "SCB")
# Bytes of a GPU that Transformers' warm-up does not take. Source: transformers 5.23, modeling_utils.py,
# `caching_allocator_warmup`.
WARM_UP_SPARED_BYTES = int(1.2 * GIB)


def warm_up_bytes(trace: Trace, candidate: Candidate, gpu: Gpu) -> int:
    """Bytes of the one block that Transformers allocates and frees before it loads the weights into that segment.

    It does so if the model is loaded directly to the GPU: TRL loads with `device_map="auto"` in one process, and
    without a device map in several; then this is 0.
    Source: transformers 5.23, modeling_utils.py `caching_allocator_warmup`; trl 1.16, trainer/utils.py,
    `create_model_from_path`, trainer/grpo_trainer.py, `GRPOTrainer.__init__`. Leaves out that a reference, a reward
    model and a teacher are loaded one after the other, each with a block of its own.
    """
    if candidate.num_processes > 1 or candidate.scheme_row.launched:
        return 0
    weights = (
        each
        for each in trace.allocations
        if each.component == "weights" and each.phase == "load" and not each.module.endswith(QUANTIZATION_STATISTICS)
    )
    return min(sum(each.size_bytes for each in weights), max(gpu.total_bytes - WARM_UP_SPARED_BYTES, 0))

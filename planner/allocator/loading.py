"""What loading leaves in the allocator before the first tensor of a trace: one free block as large as the weights."""

from planner.allocator.trace import Trace
from planner.candidate import Candidate
from planner.gpus.cluster import Gpu
from planner.units import GIB

# What is stored with quantized weights and is no parameter, by the ends of its names: bitsandbytes 0.50.2, functional.py `QuantState`, nn/modules.py.
STATISTICS = ("absmax", "code", "offset", "SCB")
# Transformers leaves so much of a card alone. Source: transformers 5.23, modeling_utils.py:5220.
LEFT_ALONE_BYTES = int(1.2 * GIB)


def warm_up_bytes(trace: Trace, candidate: Candidate, gpu: Gpu) -> int:
    """Bytes that Transformers takes in one piece and gives back before it loads the weights, so that they lie side by side in one segment.

    It does so where the model goes straight to the card: TRL loads with `device_map="auto"` in one process, and with none in several.
    Source: transformers 5.23, modeling_utils.py:5149 `caching_allocator_warmup`; trl 1.16, trainer/utils.py:1351, trainer/grpo_trainer.py:343.
    Leaves out that a reference, a reward model and a teacher are loaded one after the other: their segments are taken for one.
    """
    if candidate.num_processes > 1 or candidate.sharding != "none":
        return 0
    weights = (
        each
        for each in trace.allocations
        if each.component == "weights" and each.phase == "load" and not each.module.endswith(STATISTICS)
    )
    return min(sum(each.size_bytes for each in weights), max(gpu.total_bytes - LEFT_ALONE_BYTES, 0))

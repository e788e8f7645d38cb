"""Optimizer: states from the first optimizer step to the last, and temporaries of a step."""

from planner.cache_keys import StateInput
from planner.memory.parameters.optimizer_states import state_bytes
from planner.memory.schemes.table import scheme_of


def optimizer_states_bytes(candidate: StateInput) -> int:
    """Bytes of optimizer states on one of G GPUs after the first step, with DeepSpeed's float32 master weights.

        states = sum over the tensors that the optimizer updates of the buffers in their row of OPTIMIZERS, each in its
                 dtype, + master weights

    Example: full fine-tuning of Qwen2.5-7B, float32, adamw_torch_fused: 2 x 7,615,616,512 x 4 = 60.9 GB = 56.74 GiB;
    adamw_8bit: 2.03 bytes a parameter, but 8 on the embedding, which transformers keeps in float32 (trainer.py,
    `Trainer.create_optimizer`).

    Leaves out paged states, which the driver moves to the host when the GPU is full (`paged_states_bytes`).
    """
    scheme = scheme_of(candidate)
    if scheme.steps_on_host(candidate):
        return 0
    states = sum(state_bytes(tensors, size, candidate.optim, False) for tensors, size in scheme.optimized(candidate))
    return states + scheme.masters(candidate).kept


def paged_states_bytes(candidate: StateInput) -> int:
    """Bytes of one GPU's optimizer states in CUDA managed memory: on the GPU while there is room, else on the host.

    They count as host memory, because the driver moves them out when the GPU is full.
    Source: bitsandbytes 0.50.2, optim/optimizer.py, `Optimizer8bit.get_state_buffer`.
    """
    groups = scheme_of(candidate).optimized(candidate)
    return sum(state_bytes(tensors, size, candidate.optim, True) for tensors, size in groups)


def host_states_bytes(candidate: StateInput) -> int:
    """Bytes of states that one process keeps in host memory: those of an optimizer there, and those of GrokAdamW."""
    scheme = scheme_of(candidate)
    groups = scheme.optimized(candidate)
    kept = sum(candidate.optimizer_row.host_buffers * tensors.params * size for tensors, size in groups)
    if not scheme.steps_on_host(candidate):
        return kept
    states = sum(state_bytes(tensors, size, candidate.optim, False) for tensors, size in groups)
    return kept + states + scheme.offloaded_states(candidate)


def step_temporaries_bytes(candidate: StateInput) -> int:
    """Bytes that exist only while the optimizer steps, on one GPU; for lomo and adalomo see `update_in_backward_bytes`.

    Leaves out cuSOLVER's workspace in GaLore's decomposition, and Adafactor's update of the tensor before the largest,
    which a variable still holds.
    """
    scheme = scheme_of(candidate)
    if scheme.steps_on_host(candidate) or candidate.optimizer_row.fused_backward:
        return 0
    return scheme.step_temporaries(candidate)

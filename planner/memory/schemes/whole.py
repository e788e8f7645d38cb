"""One GPU, and DDP: every GPU has the whole model and all its states."""

from planner.cache_keys import StateInput
from planner.memory.parameters.optimizer_states import step_bytes
from planner.memory.parameters.quantized import whole_quantized_bytes
from planner.memory.parameters.tensors import TensorSet, tensor_bytes
from planner.memory.parameters.trained import Group, learning_groups
from planner.memory.schemes.contract import Gradients, Masters, Scheme


class Whole(Scheme):
    """A model that is not divided."""

    def stored(self, tensors: TensorSet, bytes_per_param: int, candidate: StateInput, *, trained: bool) -> int:
        return tensor_bytes(tensors, bytes_per_param)

    def stored_quantized(self, candidate: StateInput) -> int:
        return whole_quantized_bytes(candidate)

    def optimized(self, candidate: StateInput) -> tuple[Group, ...]:
        return learning_groups(candidate)

    def gradients(self, candidate: StateInput) -> Gradients:
        """Trained parameters x dtype.

        Example: Qwen2.5-7B in full, float32: 30.46 GB = 28.37 GiB; LoRA r 16 on it: 161 MB.

        Leaves out DDP's second copy (`buffers`).
        """
        size = sum(tensor_bytes(tensors, size) for tensors, size in learning_groups(candidate))
        return Gradients(after_backward=size, accumulated=size, at_step=size, norm_of_offloaded=0)

    def masters(self, candidate: StateInput) -> Masters:
        return Masters(0, 0)

    def steps_on_host(self, candidate: StateInput) -> bool:
        return False

    def offloaded_parameters(self, candidate: StateInput) -> int:
        return 0

    def offloaded_states(self, candidate: StateInput) -> int:
        return 0

    def step_temporaries(self, candidate: StateInput) -> int:
        """Copies of all trained parameters at once with foreach optimizers, of the largest tensor with others.

        Source: the rows of OPTIMIZERS. Example: LoRA r 16 on Qwen2.5-7B with adamw_torch: 161 MB; with the fused
        default nothing.
        """
        return sum(step_bytes(tensors, size, candidate.optim) for tensors, size in learning_groups(candidate))

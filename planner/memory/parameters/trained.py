"""Trained tensors: the model or its adapters and copied modules, and PPO's value model."""

from planner.cache_keys import StateInput
from planner.memory.parameters.policy import Parameters, parameters, policy_parameters
from planner.memory.parameters.tensors import TensorSet
from planner.memory.parameters.widths import adapter_dtype_bytes, base_dtype_bytes, copied_dtype_bytes

Group = tuple[TensorSet, int]  # tensors, and the bytes of one of their parameters


def value_parameters(candidate: StateInput) -> Parameters:
    """The parameters of PPO's value model, all of them trained."""
    return parameters(candidate.reward_model or candidate.model, "full", 1, (), "none", "score")


def trained_groups(candidate: StateInput) -> tuple[Group, ...]:
    """Trained tensors of one model replica with bytes per parameter.

    They are the model or its adapters and PEFT's copies of whole modules, and PPO's value model.
    """
    counted = policy_parameters(candidate)
    if candidate.tuning == "full":
        groups = [(counted.base_tensors, base_dtype_bytes(candidate))]
    else:
        groups = [
            (counted.adapter_tensors, adapter_dtype_bytes(candidate)),
            (counted.copied_tensors, copied_dtype_bytes(candidate)),
        ]
    if candidate.method_row.value_model:
        groups.append((value_parameters(candidate).base_tensors, base_dtype_bytes(candidate)))
    return tuple(group for group in groups if group[0].kinds)


def learning_groups(candidate: StateInput) -> tuple[Group, ...]:
    """Trained tensors that get gradients and optimizer states, with bytes per parameter.

        DeepSpeed   all trained tensors: its flat buffers have room for each of them
        else        those that the batches pass: without images `.grad` of a vision tower stays None, and optimizers
                    skip it

    Source: torch 2.13, optim/adam.py `_init_group` (`if p.grad is not None`); deepspeed 0.19.8,
    zero/stage_1_and_2.py, `DeepSpeedZeroOptimizer.__init__`.
    Example: Qwen2.5-VL-3B in full, float32: its tower's 668,684,288 parameters need no 4 + 8 bytes each, 7.5 GiB.
    """
    groups = trained_groups(candidate)
    if candidate.scheme_row.stage or candidate.images_per_row:
        return groups
    return tuple((tensors.passed, size) for tensors, size in groups if tensors.passed.kinds)


def policy_groups(candidate: StateInput) -> tuple[Group, ...]:
    """All unquantized tensors of the policy, adapters and copied modules too, with bytes per parameter."""
    counted = policy_parameters(candidate)
    return (
        (counted.unquantized_tensors, base_dtype_bytes(candidate)),
        (counted.adapter_tensors, adapter_dtype_bytes(candidate)),
        (counted.copied_tensors, copied_dtype_bytes(candidate)),
    )

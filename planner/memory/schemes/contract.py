"""The contract of a scheme: the questions that every way to distribute a model and its states answers.

There are no default answers. tests/test_schemes.py asks each scheme all of them.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple

from planner.cache_keys import StateInput
from planner.memory.parameters.tensors import TensorSet
from planner.memory.parameters.trained import Group


class Gradients(NamedTuple):
    """Bytes of gradients on one GPU, on the rank with the most, for an optimizer that steps after the backward pass."""

    after_backward: int  # at the end of a backward pass, beside those of earlier micro-steps
    accumulated: int  # between two backward passes of a step
    at_step: int  # during the optimizer's step
    norm_of_offloaded: int  # at most, for the norm of a gradient before it goes to the host


class Masters(NamedTuple):
    """Bytes of float32 master weights on one GPU, and of a second copy while they are made."""

    kept: int
    copy: int


class Scheme(ABC):
    """Bytes on one of G GPUs under a way to distribute a model."""

    @abstractmethod
    def stored(self, tensors: TensorSet, bytes_per_param: int, candidate: StateInput, *, trained: bool) -> int:
        """Bytes of model tensors while no layer uses them."""

    @abstractmethod
    def stored_quantized(self, candidate: StateInput) -> int:
        """Bytes of the policy's quantized weights, with their scales, while no layer uses them."""

    @abstractmethod
    def optimized(self, candidate: StateInput) -> tuple[Group, ...]:
        """Return the tensors that the optimizer on one GPU updates, with bytes per parameter."""

    @abstractmethod
    def gradients(self, candidate: StateInput) -> Gradients:
        """Bytes of gradients at the moments of a step."""

    @abstractmethod
    def masters(self, candidate: StateInput) -> Masters:
        """Bytes of master weights from the start of training, and while they are made."""

    @abstractmethod
    def steps_on_host(self, candidate: StateInput) -> bool:
        """Return whether the optimizer's states are in host memory and its step runs there."""

    @abstractmethod
    def step_temporaries(self, candidate: StateInput) -> int:
        """Bytes that exist only while the optimizer steps on the GPU."""

    @abstractmethod
    def offloaded_parameters(self, candidate: StateInput) -> int:
        """Bytes of weights of every model that one process keeps in host memory with `offload_param`."""

    @abstractmethod
    def offloaded_states(self, candidate: StateInput) -> int:
        """Bytes in host memory of one process for an optimizer that steps there, beside the states themselves."""

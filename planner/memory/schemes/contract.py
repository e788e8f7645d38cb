"""The contract of a scheme: the questions that every way to distribute a model and its states answers.

There are no default answers. tests/test_schemes.py calls all of them on each scheme.
"""

from abc import ABC, abstractmethod
from typing import Literal, NamedTuple, get_args

from msgspec import Struct

from planner.cache_keys import StateInput, TrainingInput
from planner.memory.dtypes import DTYPE_BYTES, SIXTEEN_BIT_BYTES
from planner.memory.parameters.tensors import TensorSet
from planner.memory.parameters.trained import Group
from planner.quantities import Phase

# Phases in which the layers of a model run, and FSDP2 gathers them.
PASSES: frozenset[Phase] = frozenset({"rollout", "score", "forward", "loss", "backward", "evaluation"})


class Gradients(NamedTuple):
    """Bytes of gradients on the rank that holds the most, for an optimizer that steps after the backward pass."""

    after_backward: int  # at the end of a backward pass, beside those of earlier micro-steps
    accumulated: int  # between two backward passes of a step
    at_step: int  # during the optimizer's step
    norm_of_offloaded: int  # most bytes to compute the norm of a gradient before it goes to the host
    norm_in_layers: int = 0  # the same for the largest tensor of a layer


class Masters(NamedTuple):
    """Bytes of float32 master weights on one GPU, and of a second copy while they are made."""

    kept: int
    copy: int


# Where a pass gathers parameters or reduces gradients: the embedding's forward pass, layers, head and loss, the head's
# backward pass, layers, the first layer (FSDP2 gathers an untied embedding then), the embedding's backward pass.
GatherMoment = Literal[
    "embedding", "forward", "loss", "head_backward", "backward", "first_layer_backward", "embedding_backward"
]


class Buffers(NamedTuple):
    """Bytes of communication buffers: kept all the time, and extra ones while rank 0 sends the model."""

    kept: int  # from the first step to the last
    broadcast: int


class Traffic(NamedTuple):
    """Sizes in bytes of what GPUs exchange, rates in bytes per second, and seconds of computation in a micro-step."""

    gradient_bytes: float  # of all trained models, in the dtype in which they are reduced
    stored_bytes: float  # of all parameters of these models
    embedding_bytes: float
    gathers: float  # how often a micro-step gathers all parameters
    link: float  # between all GPUs
    shard_link: float  # between those that hold one copy of the model
    layer_link: float  # between those that share each layer
    memory: float
    layers: int
    adapter_only: bool
    forward: float
    backward: float


class FrozenGather(NamedTuple):
    """Bytes gathered on one GPU while a reference or teacher runs: at its embedding, in its layers, at its head."""

    embedding: int
    layers: int
    head: int


class GenerationGather(NamedTuple):
    """Bytes gathered on one GPU while `generate` runs: at the embedding of the prompt, in its layers, and afterwards.

    `after`: at the head of the prompt, and while later tokens pass through the model one by one. Under ZeRO-3 without
    `ds3_gather_for_generation`, `embedding` is 0 and `prompt` includes it. `layers_after`: of `after`, what is gathered
    while layers run.
    """

    embedding: int
    prompt: int
    after: int
    layers_after: int


def is_local(candidate: StateInput) -> bool:
    """Return whether one process holds all parameters and states on its own GPU: no peers, no offloading."""
    return candidate.num_processes == 1 and not (candidate.offload_optimizer or candidate.offload_param)


def late_embedding_bytes(candidate: TrainingInput, phase: Phase) -> int:
    """Bytes that no tensor can use in the backward pass of full fine-tuning, as the embedding's gradient comes last.

        bytes = embedding x width of the computation, also of float32 weights under autocast

    The gradients and recomputed activations of the layers have split the blocks that are large enough for it, such as
    that of the head's gradient, so it takes a new segment. 0 without checkpoints, where most is allocated before there
    are gradients, and with several micro-steps, whose gradients stay in their blocks.
    Source: c10/cuda/CUDACachingAllocator.cpp, `get_free_block`; the allocator's history of Qwen2.5-1.5B, and least
    absolute deviations of 130 runs on one GPU: 0.92 embeddings, beside 9 % of the bytes that a step allocates and frees
    (results/emulated.jsonl).

    Example: Qwen2.5-1.5B in bfloat16: 0.43 GiB (two emulated runs left 0.55 and 1.33 unused in all).
    """
    if candidate.tuning != "full" or phase != "backward" or candidate.accumulates:
        return 0
    width = SIXTEEN_BIT_BYTES if candidate.precision != "no" else DTYPE_BYTES[candidate.dtype]
    return candidate.model.embed_params * width if candidate.gradient_checkpointing else 0


class Gathers(Struct, frozen=True, kw_only=True):
    """Most bytes of gathered parameters and of gradients being reduced on one GPU."""

    at: dict[GatherMoment, int]
    in_backward: tuple[int, ...] = ()  # of each layer, the last one first; empty: all alike
    computing: tuple[int, ...] = ()  # the same, only while the layer's modules compute
    beside: FrozenGather = FrozenGather(0, 0, 0)  # while a frozen model runs after the policy, whose graph is alive
    of_reference: FrozenGather = FrozenGather(0, 0, 0)  # while a separate reference runs before the policy
    generation: GenerationGather = GenerationGather(0, 0, 0, 0)
    weight_sync: int = 0  # to send the weights to vLLM
    copied_gradients: int = 0  # until a backward pass ends
    last_unit: int = 0  # of the unit whose gradients are reduced last, if more than the embedding is in it
    teacher_head: int = 0  # gathered by the loss
    first_loss: int = 0  # gathered by the loss of the first step, before there are optimizer states
    head_in_loss: bool = False  # the loss gathers an untied head itself, in the dtype of its shards
    kept_head: int = 0  # the policy's head, kept while the same modules run as reference
    left_head: int = 0  # the head that `generate` leaves gathered until the next backward pass ends
    scored: int = 0  # at the embedding of the pass after `generate`
    # From the end of the model's forward pass to the gradient of its logits; None: as at `loss` and `head_backward`.
    outside: int | None = None


NOTHING_GATHERED = Gathers(at=dict.fromkeys(get_args(GatherMoment), 0))


class Scheme(ABC):
    """Bytes on one of G GPUs under a way to distribute a model."""

    @abstractmethod
    def stored(self, tensors: TensorSet, bytes_per_param: int, candidate: StateInput, *, trained: bool) -> int:
        """Bytes of model tensors while no layer uses them."""

    @abstractmethod
    def stored_quantized(self, candidate: StateInput) -> int:
        """Bytes of the policy's quantized weights, with their scales, while no layer uses them."""

    @abstractmethod
    def unsharded_while_loading(self, candidate: StateInput, policy_bytes: int) -> int:
        """Bytes beyond the sharded weights while models are loaded, not yet sharded.

        `policy_bytes`: bytes of the policy's sharded weights.
        """

    @abstractmethod
    def optimized(self, candidate: StateInput) -> tuple[Group, ...]:
        """Return the tensors that the optimizer on one GPU updates, with bytes per parameter."""

    @abstractmethod
    def masters(self, candidate: StateInput) -> Masters:
        """Bytes of master weights from the start of training, and while they are made."""

    @abstractmethod
    def gathered(self, candidate: StateInput) -> Gathers:
        """Bytes of gathered parameters and of gradients being reduced at each moment of a step."""

    @abstractmethod
    def kept_by_graph(self, candidate: TrainingInput) -> int:
        """Bytes of gathered weights that only the autograd graph of a micro-step keeps."""

    @abstractmethod
    def gradients(self, candidate: StateInput) -> Gradients:
        """Bytes of gradients at the moments of a step."""

    @abstractmethod
    def step_temporaries(self, candidate: StateInput) -> int:
        """Bytes that exist only while the optimizer steps on the GPU."""

    @abstractmethod
    def split_blocks(self, candidate: TrainingInput, phase: Phase) -> int:
        """Bytes of large cached blocks that smaller tensors have split, so that no tensor of the old size fits."""

    @abstractmethod
    def buffers(self, candidate: StateInput) -> Buffers:
        """Bytes of buffers for communication, without NCCL's."""

    @abstractmethod
    def steps_on_host(self, candidate: StateInput) -> bool:
        """Return whether the optimizer's states are in host memory and its step runs there."""

    @abstractmethod
    def offloaded_states(self, candidate: StateInput) -> int:
        """Bytes in host memory of one process for an optimizer that steps there, beside the states themselves."""

    @abstractmethod
    def offloaded_parameters(self, candidate: StateInput) -> int:
        """Bytes of weights of every model that one process keeps in host memory with `offload_param`."""

    @abstractmethod
    def saving(self, candidate: StateInput, processes: int, policy_bytes: int, adapters_bytes: int) -> int:
        """Bytes of weights in host memory of the first node, which runs `processes`, while the trainer saves.

        `policy_bytes`, `adapters_bytes`: what one GPU holds of the policy's weights, and of its adapters.
        """

    @abstractmethod
    def seconds(self, candidate: TrainingInput, traffic: Traffic) -> float:
        """Seconds per optimizer step that one of n > 1 GPUs waits for the others, without those of shared rows."""

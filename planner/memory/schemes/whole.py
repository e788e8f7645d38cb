"""One GPU, and DDP: every GPU has the whole model and all its states."""

from collections.abc import Iterator
from functools import lru_cache

from planner.cache_keys import StateInput, TrainingInput
from planner.memory.parameters.broadcast import SentTensor, largest_buckets_bytes
from planner.memory.parameters.copied_modules import copied_tensors
from planner.memory.parameters.lora import AdaptersKey, adapters_key, lora_in_order
from planner.memory.parameters.optimizer_states import step_bytes
from planner.memory.parameters.policy import converted_parts, policy_parameters
from planner.memory.parameters.quantized import whole_quantized_bytes
from planner.memory.parameters.tensors import EqualTensors, TensorSet, tensor_bytes, tensors_in_order
from planner.memory.parameters.trained import Group, learning_groups, trained_groups
from planner.memory.parameters.widths import adapter_dtype_bytes, base_dtype_bytes, copied_dtype_bytes
from planner.memory.schemes.contract import (
    NOTHING_GATHERED,
    Buffers,
    Gathers,
    Gradients,
    Masters,
    Scheme,
    Traffic,
    late_embedding_bytes,
)
from planner.memory.schemes.overlap import exposed_seconds
from planner.methods import Head
from planner.models.shape import ModelShape
from planner.quantities import Phase
from planner.quantizations import Quantization, tensor_sizes

# Largest file of a saved model, but for one tensor that is larger. Source: transformers 5.23, modeling_utils.py,
# `PreTrainedModel.save_pretrained`.
SAVED_FILE_BYTES = 50 * 10**9


class Whole(Scheme):
    """A model that is not divided."""

    def stored(self, tensors: TensorSet, bytes_per_param: int, candidate: StateInput, *, trained: bool) -> int:
        return tensor_bytes(tensors, bytes_per_param)

    def stored_quantized(self, candidate: StateInput) -> int:
        return whole_quantized_bytes(candidate)

    def unsharded_while_loading(self, candidate: StateInput, policy_bytes: int) -> int:
        return 0

    def optimized(self, candidate: StateInput) -> tuple[Group, ...]:
        return learning_groups(candidate)

    def masters(self, candidate: StateInput) -> Masters:
        return Masters(0, 0)

    def gathered(self, candidate: StateInput) -> Gathers:
        return NOTHING_GATHERED

    def kept_by_graph(self, candidate: TrainingInput) -> int:
        return 0

    def gradients(self, candidate: StateInput) -> Gradients:
        """Trained parameters x dtype.

        Example: Qwen2.5-7B in full, float32: 30.46 GB = 28.37 GiB; LoRA r 16 on it: 161 MB.

        Leaves out DDP's second copy (`buffers`).
        """
        size = sum(tensor_bytes(tensors, size) for tensors, size in learning_groups(candidate))
        return Gradients(after_backward=size, accumulated=size, at_step=size, norm_of_offloaded=0)

    def step_temporaries(self, candidate: StateInput) -> int:
        """Copies of all trained parameters at once with foreach optimizers, of the largest tensor with others.

        Source: the rows of OPTIMIZERS. Example: LoRA r 16 on Qwen2.5-7B with adamw_torch: 161 MB; with the fused
        default nothing.
        """
        return sum(step_bytes(tensors, size, candidate.optim) for tensors, size in learning_groups(candidate))

    def split_blocks(self, candidate: TrainingInput, phase: Phase) -> int:
        return late_embedding_bytes(candidate, phase)

    def buffers(self, candidate: StateInput) -> Buffers:
        """Under DDP a second copy of all gradients, its buckets; before that, the buckets that broadcast the model.

        The latter are `largest_buckets_bytes` of all tensors, frozen ones included, less the buckets of gradients.
        Source: torch 2.13, nn/parallel/distributed.py (gradient_as_bucket_view False, which neither accelerate nor
        Trainer change).

        Example: Qwen2.5-7B in full on two GPUs: 30.46 GB. Qwen2.5-0.5B with LoRA in bfloat16: 0.42 GiB to send the
        model, 0.03 of gradients.

        Leaves out of the model that is sent: torch buffers, the scales of quantized weights, PPO's value model.
        """
        if candidate.num_processes == 1 or not candidate.scheme_row.reducer:
            return Buffers(kept=0, broadcast=0)
        head = candidate.method_row.head
        lora = adapters_key(candidate)
        width, adapter_width = base_dtype_bytes(candidate), adapter_dtype_bytes(candidate)
        copies = (candidate.lora_modules_to_save, copied_dtype_bytes(candidate)) if lora else ((), width)
        sent = _broadcast_bytes(candidate.model, head, candidate.quantization, width, lora, adapter_width, copies)
        kept = sum(tensors.params * size for tensors, size in trained_groups(candidate))
        return Buffers(kept=kept, broadcast=max(0, sent - kept))

    def steps_on_host(self, candidate: StateInput) -> bool:
        return False

    def offloaded_states(self, candidate: StateInput) -> int:
        return 0

    def offloaded_parameters(self, candidate: StateInput) -> int:
        return 0

    def saving(self, candidate: StateInput, processes: int, policy_bytes: int, adapters_bytes: int) -> int:
        """The trained weights, at most a file of SAVED_FILE_BYTES.

        Source: transformers 5.23, trainer.py, `Trainer.save_model`; safetensors 0.8, torch.py (`_to_ndarray`: tensors
        of a file are copied to the CPU and kept until it is written).
        """
        whole = policy_parameters(candidate).base * base_dtype_bytes(candidate)
        return adapters_bytes if candidate.tuning == "lora" else min(whole, SAVED_FILE_BYTES)

    def seconds(self, candidate: TrainingInput, traffic: Traffic) -> float:
        """The exposed part of 2 (n - 1) / n x gradients / link beside the last backward pass.

        DDP reduces beside the backward pass (arXiv 2006.15704, section 3.2.3), gradients in their own dtype.
        """
        n = candidate.num_processes
        passes = (n - 1) / n * traffic.gradient_bytes / traffic.link
        return exposed_seconds(0.0, 2 * passes, traffic.backward, traffic.layers)


@lru_cache(maxsize=1024)
def _broadcast_bytes(
    model: ModelShape,
    head: Head,
    quantization: Quantization,
    width: int,
    lora: AdaptersKey | tuple[()],
    adapter_width: int,
    copies: tuple[tuple[str, ...], int],
) -> int:
    """Bytes of the two buckets in which the model's tensors are sent.

    Adapters are assumed to lie evenly among the weights of a tower and of layers. `copies`: the modules that PEFT
    copies, each right after its original, and the bytes of one of their parameters.
    """

    def sent(place: float, tensor: EqualTensors) -> SentTensor:
        if tensor.part in converted_parts(model, quantization):
            packed = tensor_sizes(tensor.shape, quantization, model.quantization_group_size)[0]
            return SentTensor(place=place, kind=quantization, size_bytes=packed)
        size = adapter_width if tensor.part == "adapter" else width
        return SentTensor(place=place, kind=f"{size} bytes", size_bytes=tensor.elements * size)

    tower, language = _each(tensors_in_order(model, head))
    on_tower, on_language = _each(lora_in_order(model, *lora)) if lora else ([], [])
    base, embedding = [*tower, *language], len(tower)  # place of the embedding, the first tensor after the tower
    places = [*enumerate(base), *_spread(on_tower, 0, embedding), *_spread(on_language, embedding + 1, len(base))]
    copied = [
        SentTensor(
            place=embedding + 0.5 if kind.part == "embedding" else len(base),
            kind=f"{copies[1]} bytes",
            size_bytes=kind.elements * copies[1],
        )
        for kind in copied_tensors(model, head, copies[0])
        if kind.part != "score"
    ]
    return largest_buckets_bytes([*(sent(place, tensor) for place, tensor in places), *copied])


def _each(kinds: tuple[EqualTensors, ...]) -> tuple[list[EqualTensors], list[EqualTensors]]:
    """Return the tensors of a tower, which Transformers' classes create first, and of the language model.

    Source: transformers 5.23, models/qwen3_5, gemma3, paligemma and mistral3, `self.visual` or `self.vision_tower`
    before `self.language_model`. Leaves out that Gemma 4's projectors come last.
    """
    every = [kind for kind in kinds for _ in range(kind.count)]
    return [each for each in every if not each.passed], [each for each in every if each.passed]


def _spread(tensors: list[EqualTensors], start: int, stop: int) -> Iterator[tuple[float, EqualTensors]]:
    """Yield tensors with places that lie evenly between two others."""
    return ((start + (number + 0.5) * (stop - start) / len(tensors), each) for number, each in enumerate(tensors))

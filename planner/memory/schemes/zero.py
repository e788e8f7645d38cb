"""ZeRO-1 and ZeRO-2: whole weights; gradients and optimizer states in flat partitions."""

from functools import lru_cache
from typing import NamedTuple

from msgspec.structs import replace

from planner.cache_keys import StateInput, TrainingInput
from planner.memory.dtypes import FLOAT32_BYTES, FLOAT64_BYTES, SIXTEEN_BIT_BYTES
from planner.memory.parameters.copied_modules import copies_head
from planner.memory.parameters.lora import AdaptersKey, adapters_key, lora_in_order
from planner.memory.parameters.optimizer_states import pinned_tensors_bytes, step_bytes
from planner.memory.parameters.quantized import whole_quantized_bytes
from planner.memory.parameters.tensors import (
    EqualTensors,
    TensorSet,
    pinned_bytes,
    rounded_bytes,
    tensor_bytes,
    tensors_in_order,
)
from planner.memory.parameters.trained import Group, learning_groups, trained_groups
from planner.memory.parameters.widths import adapter_dtype_bytes, base_dtype_bytes, compute_weight_width
from planner.memory.schemes.contract import NOTHING_GATHERED, Buffers, Gathers, Gradients, Masters, Scheme, Traffic
from planner.memory.schemes.deepspeed import bucket_bytes, decay_groups, reduce_bucket_elements, split_in_step_bytes
from planner.methods import Head
from planner.models.shape import ModelShape
from planner.quantities import Phase

# Elements. Source: deepspeed 0.19.8, zero/stage_1_and_2.py, `DeepSpeedZeroOptimizer.__init__`
# (`nccl_start_alignment_factor`).
START_ALIGNMENT = 2


class Partition(NamedTuple):
    """Elements of the tensors that one rank's partition has a part of, and of the largest part (ZeRO-1, ZeRO-2)."""

    touched: int
    largest_part: int


class Partitioned(Scheme):
    """Whole weights; float32 masters and states in one flat piece per optimizer group: ZeRO-1 and ZeRO-2."""

    def stored(self, tensors: TensorSet, bytes_per_param: int, candidate: StateInput, *, trained: bool) -> int:
        """All elements; trained tensors share one buffer per optimizer group, any other has its own allocation.

        Source: deepspeed 0.19.8, stage_1_and_2.py, `DeepSpeedZeroOptimizer.__init__`
        (`flatten_dense_tensors_aligned`). tests/test_sharded_runs.py compares the bytes with two real processes.
        """
        if not trained:
            return tensor_bytes(tensors, bytes_per_param)
        return sum(
            rounded_bytes(flat_elements(group.params, candidate.num_processes) * bytes_per_param)
            for group in decay_groups(tensors)
        )

    def stored_quantized(self, candidate: StateInput) -> int:
        return whole_quantized_bytes(candidate)

    def unsharded_while_loading(self, candidate: StateInput, policy_bytes: int) -> int:
        return 0

    def optimized(self, candidate: StateInput) -> tuple[Group, ...]:
        """Flat float32 pieces of params / G elements, one for each optimizer group.

        A flat buffer has one dimension, so that a factored optimizer keeps its full state for it.
        """
        processes = candidate.num_processes
        return tuple((flat_pieces(tensors, processes), FLOAT32_BYTES) for tensors, _ in learning_groups(candidate))

    def masters(self, candidate: StateInput) -> Masters:
        """4 x ceil(params / G) from the start of training, and once more: gradients of every partition, zeros.

        Source: deepspeed 0.19.8, zero/stage_1_and_2.py, `DeepSpeedZeroOptimizer.__init__` (`clone().float().detach()`,
        for float32 models too), `initialize_optimizer_states`.

        Example: Qwen2.5-1.5B in full on 8 GPUs, ZeRO-2: 772 MB of masters and 772 MB of zeros.

        Leaves out the second copy of the model while it is made flat, which DeepSpeed does on the host if the GPU has
        no room (`flatten_on_accelerator`).
        """
        if candidate.offload_optimizer:
            return Masters(0, 0)
        kept = sum(tensor_bytes(tensors, FLOAT32_BYTES) for tensors, _ in self.optimized(candidate))
        return Masters(kept, kept)

    def kept_by_graph(self, candidate: TrainingInput) -> int:
        return 0

    def step_temporaries(self, candidate: StateInput) -> int:
        """The optimizer's copies; flattened gradients and their float32 copy, (2 + 4) x ceil(params / G).

        Or, before that, the partition's largest part of a tensor's gradient in float64, for the norm. Gradients that
        are added up in float32 are flat.

        Source: the rows of OPTIMIZERS; deepspeed 0.19.8, zero/stage_1_and_2.py, `DeepSpeedZeroOptimizer.step` and
        `get_grad_norm_direct` (`get_norm_dtype`).

        The rank with the largest part may keep fewer gradients than the rank with the most: these are the bytes by
        which the heavier of all ranks exceeds the most gradients.
        """
        flat, width = accumulates_in_float32(candidate), _gradient_width(candidate)
        found = 0
        for tensors, size in self.optimized(candidate):
            found += step_bytes(tensors, size, candidate.optim)
            found += 0 if flat else tensors.params * (width + FLOAT32_BYTES)
        if flat:
            return max(found, *(each.largest_part * FLOAT64_BYTES for each in partitions(candidate)))
        heaviest = max(
            touched_bytes(each, candidate) + max(found, each.largest_part * FLOAT64_BYTES)
            for each in partitions(candidate)
        )
        return heaviest - touched_gradients_bytes(candidate)

    def buffers(self, candidate: StateInput) -> Buffers:
        """The largest trained tensor, with an offloaded optimizer.

        Source: deepspeed 0.19.8, zero/stage_1_and_2.py, `DeepSpeedZeroOptimizer.__init__`.
        """
        largest = max(tensors.largest * size for tensors, size in trained_groups(candidate))
        return Buffers(kept=largest if candidate.offload_optimizer else 0, broadcast=0)

    def steps_on_host(self, candidate: StateInput) -> bool:
        return candidate.offload_optimizer

    def offloaded_states(self, candidate: StateInput) -> int:
        """With n = params / G of each optimizer group (see `pinned_bytes`), on the host:

            master weights and gradients, 2 x pinned(4 n); 16-bit weights on their way back, pinned(2 n);
            with several micro-steps 16-bit gradients, pinned(2 x elements) of each tensor / G

        Source: deepspeed 0.19.8, zero/stage_1_and_2.py, `DeepSpeedZeroOptimizer.__init__`,
        `initialize_optimizer_states` and `async_accumulate_grad_in_cpu_via_gpu`.
        """
        half = _gradient_width(candidate)
        flat = [kind.elements for tensors, _ in self.optimized(candidate) for kind in tensors.kinds]
        buffers = sum(2 * pinned_bytes(FLOAT32_BYTES * pieces) + pinned_bytes(half * pieces) for pieces in flat)
        whole = sum(pinned_tensors_bytes(tensors, half) for tensors, _ in learning_groups(candidate))
        return buffers + (whole // candidate.num_processes if candidate.accumulates else 0)

    def offloaded_parameters(self, candidate: StateInput) -> int:
        return 0

    def saving(self, candidate: StateInput, processes: int, policy_bytes: int, adapters_bytes: int) -> int:
        """Processes x the weights with their adapters: every process copies them all.

        Source: accelerate 1.15, accelerator.py, `Accelerator.get_state_dict` (`clone_tensors_for_torch_save`, to the
        CPU, on all processes).
        """
        return processes * (policy_bytes + adapters_bytes)


class Zero1(Partitioned):
    """ZeRO-1: gradients are whole until the step, because they are reduced after the last backward pass."""

    def gathered(self, candidate: StateInput) -> Gathers:
        return _gathers(candidate, _bucket_bytes(candidate, float32=True))

    def gradients(self, candidate: StateInput) -> Gradients:
        """All gradients; at the step only those of the rank's partition, since the others are dropped.

        Without mixed precision 16-bit weights have float32 gradients. Offloaded optimizers keep gradients on the host
        after the last reduction.
        Source: deepspeed 0.19.8, zero/stage_1_and_2.py, `DeepSpeedZeroOptimizer.step`
        (`free_grad_in_param_list(self.params_not_in_partition[i])`).

        Leaves out that small gradients of other partitions are dropped by the end of the backward pass.
        """
        float32 = accumulates_in_float32(candidate)
        every = sum(
            tensor_bytes(tensors, FLOAT32_BYTES if float32 else size) for tensors, size in trained_groups(candidate)
        )
        return Gradients(
            after_backward=every,
            accumulated=every,
            at_step=partition_gradients_bytes(candidate),
            norm_of_offloaded=norm_of_offloaded_bytes(candidate),
        )

    def split_blocks(self, candidate: TrainingInput, phase: Phase) -> int:
        return split_in_step_bytes(self.optimized(candidate), candidate, phase)

    def seconds(self, candidate: TrainingInput, traffic: Traffic) -> float:
        """2 (n - 1) / n x gradients / link: a reduce-scatter, and an all-gather of the trained parameters."""
        return 2 * _pass_seconds(candidate, traffic)


class Zero2(Partitioned):
    """ZeRO-2: gradients are reduced in the backward pass, and a rank keeps those of its partition."""

    def gathered(self, candidate: StateInput) -> Gathers:
        return _gathers(candidate, _bucket_bytes(candidate, float32=False))

    def gradients(self, candidate: StateInput) -> Gradients:
        """The full size of every tensor of which a part lies in the rank's partition.

        When accumulating also the new gradients of the rank's partition. Without mixed precision 16-bit weights have
        gradients that are added up in float32 (`float32_partition_bytes`). Offloaded optimizers keep gradients on the
        host (a bucket stays on the GPU).

        Source: deepspeed 0.19.8, zero/stage_1_and_2.py, `DeepSpeedZeroOptimizer.copy_grads_in_partition`
        (`grads_in_partition`) and `independent_gradient_partition_epilogue` (`all_grad_tensors`).

        Example: bfloat16 on 64 GPUs: a partition of Qwen2.5-7B has 119 million parameters, but one that holds a part
        of the embedding has gradients for all of its 545 million: 1.28 GB instead of 0.24, 2.57 when accumulating.
        """
        kept, new = partition_gradients_bytes(candidate), 0
        if accumulates_in_float32(candidate):  # smaller gradients are in the bucket
            largest = max(tensors.largest for tensors, _ in trained_groups(candidate))
            new = touched_gradients_bytes(candidate) if largest > reduce_bucket_elements(candidate) else 0
        elif candidate.accumulates:
            new = touched_gradients_bytes(candidate)
        return Gradients(
            after_backward=kept + new,
            accumulated=kept,
            at_step=kept,
            norm_of_offloaded=norm_of_offloaded_bytes(candidate),
        )

    def split_blocks(self, candidate: TrainingInput, phase: Phase) -> int:
        """Twice what ZeRO-1 breaks, because gradients arrive one by one.

        Seven emulated runs needed 1.0 to 3.1 times `split_in_step_bytes`, 2.0 in the median (ZeRO-1: 1.0 to 1.3 in
        five).
        """
        return 2 * split_in_step_bytes(self.optimized(candidate), candidate, phase)

    def seconds(self, candidate: TrainingInput, traffic: Traffic) -> float:
        """(accumulation + 1) (n - 1) / n x gradients / link: a reduce-scatter in every micro-step, an all-gather."""
        return _pass_seconds(candidate, traffic) * (candidate.gradient_accumulation_steps + 1)


def flat_elements(params: int, num_processes: int) -> int:
    """Elements of a flat buffer of ZeRO-1 or ZeRO-2 over all ranks, padded to a multiple of 2 G.

    Source: deepspeed 0.19.8, zero/stage_1_and_2.py, `DeepSpeedZeroOptimizer.__init__` (`nccl_start_alignment_factor *
    world_size`).
    """
    unit = START_ALIGNMENT * num_processes
    return -(-params // unit) * unit


def accumulates_in_float32(candidate: StateInput) -> bool:
    """Return whether ZeRO-1 or ZeRO-2, without mixed precision, adds up 16-bit gradients in float32 on the GPU.

    Source: deepspeed 0.19.8, runtime/engine.py, `DeepSpeedEngine.get_data_types`; zero/stage_1_and_2.py,
    `_use_compact_grad_partition_buffer`.
    """
    return (
        candidate.scheme_row.flat_partitions
        and candidate.precision == "no"
        and _trained_width(candidate) == SIXTEEN_BIT_BYTES
    )


def float32_partition_bytes(candidate: StateInput) -> int:
    """Bytes of the float32 buffer in which ZeRO-1 and ZeRO-2 add up the 16-bit gradients of one partition.

    Source: see `accumulates_in_float32`. Example: Qwen2.5-0.5B in bfloat16 with `bf16: false` on two GPUs: 942 MiB.
    """
    groups, processes = trained_groups(candidate), candidate.num_processes
    flat = [flat_elements(group.params, processes) for tensors, _ in groups for group in decay_groups(tensors)]
    return sum(rounded_bytes(elements // processes * FLOAT32_BYTES) for elements in flat)


def touched_gradients_bytes(candidate: StateInput) -> int:
    """Bytes of the gradients of one partition under ZeRO-1 and ZeRO-2: the full size of every tensor partly in it.

    Source: deepspeed 0.19.8, zero/stage_1_and_2.py, `DeepSpeedZeroOptimizer.copy_grads_in_partition` and
    `get_partition_info`.

    Example: see `Zero2.gradients`.
    """
    if candidate.offload_optimizer:
        return 0
    return max(touched_bytes(partition, candidate) for partition in partitions(candidate))


def touched_bytes(partition: Partition, candidate: StateInput) -> int:
    """Bytes of the gradients of all tensors with a part in a partition."""
    return rounded_bytes(partition.touched * _trained_width(candidate))


def _trained_width(candidate: StateInput) -> int:
    return adapter_dtype_bytes(candidate) if candidate.tuning == "lora" else base_dtype_bytes(candidate)


def partitions(candidate: StateInput) -> tuple[Partition, ...]:
    """Return each rank's partition under ZeRO-1 and ZeRO-2."""
    others = tuple(tensors for tensors, _ in trained_groups(candidate)[1:])
    lora = adapters_key(candidate)
    return _partitions(candidate.model, candidate.method_row.head, lora, others, candidate.num_processes)


@lru_cache(maxsize=1024)
def _partitions(
    model: ModelShape,
    head: Head,
    lora: AdaptersKey | tuple[()],
    others: tuple[TensorSet, ...],
    num_processes: int,
) -> tuple[Partition, ...]:
    """Return each rank's partition. Each of the optimizer's parameter groups is cut into partitions of its own."""
    ordered = lora_in_order(model, *lora) if lora else tensors_in_order(model, head)
    touched, largest = [0] * num_processes, [0] * num_processes
    every = TensorSet(kinds=(*ordered, *(kind for tensors in others for kind in tensors.kinds)))
    for group in decay_groups(every):
        piece, start = flat_elements(group.params, num_processes) // num_processes, 0
        for kind in group.kinds:
            # parameters without known shapes count as many small tensors
            whole = len(kind.shape) > 1 or kind.part == "vector"
            for _ in range(kind.count):
                for rank in range(start // piece, (start + kind.elements - 1) // piece + 1):
                    part = min(start + kind.elements, (rank + 1) * piece) - max(start, rank * piece)
                    touched[rank] += kind.elements if whole else part
                    largest[rank] = max(largest[rank], part if whole else 0)
                start += kind.elements
    return tuple(map(Partition, touched, largest))


def _pass_seconds(candidate: TrainingInput, traffic: Traffic) -> float:
    n = candidate.num_processes
    return (n - 1) / n * traffic.gradient_bytes / traffic.link


def _gradient_width(candidate: StateInput) -> int:
    return SIXTEEN_BIT_BYTES if candidate.precision != "no" else FLOAT32_BYTES


def partition_gradients_bytes(candidate: StateInput) -> int:
    """Bytes of the gradients of one partition, as they are kept for the step; in float32 offloaded, too."""
    flat = accumulates_in_float32(candidate)
    return float32_partition_bytes(candidate) if flat else touched_gradients_bytes(candidate)


def norm_of_offloaded_bytes(candidate: StateInput) -> int:
    """Bytes of a float64 copy of the gradient's part in one partition, for its norm, before it goes to the host.

    Source: deepspeed 0.19.8, zero/stage_1_and_2.py, `set_norm_for_param_grad_in_gpu`; zero/utils.py, `get_norm_dtype`.
    Example: an embedding of 51.5 million parameters in 16 bits: 393 MiB.
    """
    if not candidate.offload_optimizer:
        return 0
    return FLOAT64_BYTES * max(partition.largest_part for partition in partitions(candidate))


@lru_cache(maxsize=4096)
def flat_pieces(tensors: TensorSet, num_processes: int) -> TensorSet:
    """The flat buffers that one rank optimizes, one per optimizer group: params / G elements, one dimension."""
    pieces = (flat_elements(group.params, num_processes) // num_processes for group in decay_groups(tensors))
    return TensorSet(kinds=tuple(EqualTensors(part="other", shape=(piece,)) for piece in pieces))


def _bucket_bytes(candidate: StateInput, *, float32: bool) -> int:
    """Bytes of DeepSpeed's reduce bucket, which it allocates whole even if fewer parameters are trained.

    Where 16-bit gradients are added up in float32, ZeRO-1's bucket is in float32, too (`float32`), and ZeRO-2 makes two
    copies of a full bucket: one of 16 bits, flattened, and one of that in float32.
    Source: deepspeed 0.19.8, zero/stage_1_and_2.py, `_gradient_reduction_buffer_dtype`, `allreduce_bucket`.
    """
    if not accumulates_in_float32(candidate):
        return bucket_bytes(candidate)
    elements = reduce_bucket_elements(candidate)
    if float32:
        return elements * FLOAT32_BYTES
    trained = sum(tensors.params for tensors, _ in trained_groups(candidate))
    return bucket_bytes(candidate) + min(elements, trained) * (compute_weight_width(candidate) + FLOAT32_BYTES)


def _gathers(candidate: StateInput, bucket: int) -> Gathers:
    """Return one bucket in the backward pass, from the first gradient on, with one process too.

    Source: deepspeed 0.19.8, zero/stage_1_and_2.py, `setup_buckets`. Example: Qwen2.5-0.5B with LoRA and ZeRO-2 on one
    GPU, 2e8 elements: 0.37 GiB.
    """
    copied = copies_head(candidate.lora_modules_to_save, candidate.method_row.head)
    first = bucket if candidate.tuning == "full" or copied else 0
    return replace(NOTHING_GATHERED, at={**NOTHING_GATHERED.at, "head_backward": first, "backward": bucket})

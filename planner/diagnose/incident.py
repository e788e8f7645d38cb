"""`Incident`: one out-of-memory error that a log reports."""

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from planner.diagnose.beside import Beside
from planner.quantities import Phase
from planner.units import MIB

IncidentKind = Literal[
    "gpu",  # PyTorch's allocator found no block
    "library",  # cuBLAS, cuDNN or the CUDA runtime, whose messages have no sizes
    "communication",  # NCCL
    "engine_start",  # vLLM: gpu_memory_utilization is more than the GPU's free memory
    "engine_cache",  # vLLM: gpu_memory_utilization leaves no memory for a KV cache
    "engine_length",  # vLLM: the KV cache holds no sequence of max_model_len tokens
    "engine_pool",  # vLLM: sleep mode does not work with expandable segments
    "engine_wake",  # vLLM: memory that it freed to sleep was not free when it woke up
    "engine_profile",  # vLLM: another process freed memory during the profile run
    "engine_preempts",  # vLLM: its KV cache is full, and sequences wait; only if nothing else is said
    "engine_swap",  # vLLM: preempted sequences did not fit into its swap space
    "dispatched",  # Transformers: the model does not fit beside what the GPU holds, and parts went to the CPU
    "engine_sampler",  # vLLM: the sampler's warm-up ran out of memory
    "sglang",  # SGLang: mem_fraction_static leaves no memory for its pools
    "host",  # the node's host memory
    "kernel",  # a Triton kernel that needs more shared memory than a multiprocessor has: no lack of GPU memory
    "shared_memory",  # /dev/shm, through which data loaders and NCCL pass tensors
    "killed",  # signal 9, and nobody says why: host memory, or somebody ended the process
    "unsaid",  # the log ends before the line that says what happened: a cut traceback, or a launcher that ended
    "foreign",  # an allocator that is neither PyTorch's CUDA nor its ROCm one: MPS, NPU, XPU, JAX, TensorFlow
]

# What the traceback shows beside its phase.
Activity = Literal[
    "",
    "attends",  # eager attention, which makes a tensor of all pairs of tokens
    "makes_logits",  # a model makes the logits of all tokens
    "converts_logits",  # Megatron makes the logits of all tokens anew, in float32
    "masks",  # a model makes a mask of all pairs of tokens
    "gathers",  # ZeRO-3 gathers parameters
    "joins_logits",  # an evaluation joins the logits of a batch to those of earlier ones
    "predicts",  # predict() keeps the logits of all rows, which it returns
    "engine_loads",  # vLLM loads its model
    "engine_encodes",  # vLLM encodes images, also in its profile run
    "engine_profiles",  # vLLM runs with as many tokens as it may take at once, to measure what is left
    "engine_starts",  # vLLM measures what is free, or takes its KV cache
    "engine_captures",  # vLLM captures CUDA graphs
    "engine",  # a process of vLLM, which prints no traceback, or one of functions that are not known
    "engine_wakes",  # vLLM takes back the memory that it freed to sleep
    "engine_runs",  # vLLM generates
    "engine_samples",  # vLLM samples, as it starts or as it generates
    "pins",  # page-locked host memory is taken, of which CUDA says "out of memory" as of the GPU's
    "forks",  # a process is started by fork
    "spawns",  # a process that was spawned reads what it is given
    "fills_bucket",  # DeepSpeed takes a bucket in which it reduces gradients
    "sglang",  # SGLang runs
    "sglang_loads",  # SGLang loads its model
    "data_parallel",  # torch.nn.DataParallel, which the Trainer takes for several GPUs without a launcher
    "loads_best",  # the Trainer loads its best checkpoint at the end of a training
    "prepares",  # the dataset is read or prepared, before a training
    "builds",  # Megatron makes its share of the weights
    "makes_master",  # DeepSpeed makes the float32 copy of the weights that it trains
    "offloads",  # DeepSpeed puts the optimizer's states into host memory
    "loads_data",  # a data loader's worker reads rows
    "wraps_ddp",  # DistributedDataParallel takes its buckets
    "resumes",  # a checkpoint is read to go on from it
    "merges",  # PEFT merges adapters into the base model
    "reorders",  # bitsandbytes puts weights of 8 bits into another order to save them
    "syncs_reference",  # TRL mixes the policy into the reference model
    "calibrates",  # a whole model is quantized with rows
    "quantizes",  # weights are quantized, as they load
    "infers",  # a forward pass of a run that does not train
    "trains",  # a part of a training step, of which the log does not show which
    "first_call",  # the process's first use of the GPU
]

WORKER_ENDED = "exited unexpectedly"  # a data loader's worker, which does not say why
# PyTorch asks the driver for at least this much, so that a few bytes more than the request are no room.
# Source: pytorch 2.13, c10/core/AllocatorConfig.h, `kSmallBuffer`.
DRIVER_PAGE_BYTES = 2 * MIB
# Of a GPU: unused or free memory up to which it counts as full. Judged, not measured.
FULL_SHARE = 0.01
# Of a GPU: free memory up to which a run lacks memory, whatever one request asked for. Judged, not measured.
NEARLY_FULL_SHARE = 0.05
# Of a GPU: memory that the allocator holds unused, from which fragments are the likeliest cause. Judged.
LARGE_FRAGMENTS_SHARE = 0.1
# Of a request: memory that the allocator holds unused, below which fragments are not the cause. Judged.
LEAST_OF_REQUEST = 0.05


class Incident(Struct, frozen=True, kw_only=True):
    """One out-of-memory error. `sizes` and `numbers` are the figures of its message, by the names of messages.py.

    `where` is the innermost frame of the traceback that is more than a forwarding call (`tracebacks.innermost`).
    """

    kind: IncidentKind
    line: int  # of the log, from 1
    rank: str  # as the log marks its lines, empty if it does not
    gpu: int | None
    phase: Phase | None
    where: str
    sizes: Mapping[str, int]  # bytes
    numbers: Mapping[str, float]
    message: str
    activity: Activity = ""
    sharding: str = ""  # the library in the traceback that shards the model: zero2, zero3, fsdp; empty if none
    adapters: bool = False  # the traceback shows PEFT's layers
    checkpoints: bool = False  # the traceback shows gradient checkpointing
    last_trl: str = ""  # the last TRL that prints the traceback's frames; empty: the newest may
    old_python: bool = False  # a Python that no newer PyTorch runs in
    frames: tuple[str, ...] = ()  # of the traceback, as printed, outermost first
    beside: Beside = Beside()
    same_on: int = 1  # GPUs on which the same was asked for beside the same tensors
    finished: int = 0  # line of the log in which the run ended well all the same; 0 if none says so
    earlier_error: str = ""  # another error of the log, before this one, with its line

    @property
    def of_engine(self) -> bool:
        """True if it is vLLM or SGLang that ran out of memory."""
        return self.kind.startswith("engine") or self.activity.startswith(("engine", "sglang"))

    @property
    def outside_bytes(self) -> int:
        """Memory of this process outside PyTorch's allocator: CUDA context, NCCL, the pools of a colocated engine.

        0 if the message does not have the figures.
        """
        known = {"process", "allocated", "unallocated"} <= self.sizes.keys()
        return max(self.sizes["process"] - self.sizes["allocated"] - self.sizes["unallocated"], 0) if known else 0

    @property
    def others_bytes(self) -> int:
        """Memory that was neither free nor held by PyTorch's allocator; 0 if the message does not have the figures."""
        known = {"total", "free", "reserved"} <= self.sizes.keys()
        return self.sizes["total"] - self.sizes["free"] - self.sizes["reserved"] if known else 0

    @property
    def lacking_bytes(self) -> int:
        """Bytes of the request that were not free."""
        return max(self.sizes.get("tried", 0) - self.sizes.get("free", 0), 0)

    @property
    def limited(self) -> bool:
        """True if the process may use less of the GPU than all."""
        return 0 < self.sizes.get("allowed", 0) < self.sizes.get("total", 0) * (1 - FULL_SHARE)

    @property
    def had_room(self) -> bool:
        """True if more was free than requested and the message names no limit of the process.

        Then the error has another cause than too little memory, unless the GPU was full.
        """
        room = self.sizes.get("free", 0) - self.sizes.get("tried", 0)
        return not self.limited and "tried" in self.sizes and room >= DRIVER_PAGE_BYTES

    @property
    def before_torch_2_1(self) -> bool:
        """True if the message has its figures in brackets; expandable segments came with 2.1."""
        return " total capacity; " in self.message

    @property
    def was_full(self) -> bool:
        """True if so little of the GPU was free that the run lacks memory, though this request was smaller."""
        return self.sizes.get("free", 0) <= NEARLY_FULL_SHARE * self.sizes.get("total", 0)

    @property
    def held_bytes(self) -> int:
        """Memory that PyTorch's allocator says it holds: tensors, and blocks that it keeps unused."""
        return self.sizes.get("allocated", 0) + self.sizes.get("unallocated", 0)

    @property
    def impossible(self) -> bool:
        """True if PyTorch's allocator says that it holds more than the GPU has.

        Windows and unified memory move a part to host memory without an error.
        """
        return self.held_bytes > self.sizes.get("total", self.held_bytes)

    @property
    def fragmented(self) -> bool:
        """True if what the allocator held unused and what was free are together as large as the request.

        Expandable segments can give back the pages of unused blocks and take others in one piece. Not of a GPU that is
        full of tensors: a few unused pages last for a few steps.
        """
        unused = self.sizes.get("unallocated", 0)
        tried = self.sizes.get("tried", 0)
        if self.phase == "load" and not self.largely_unused:  # weights that follow need more than the fragments
            return False
        if self.activity == "reorders":  # and copies of all other weights
            return False
        is_enough = 0 < tried <= unused + self.sizes.get("free", 0) and unused >= LEAST_OF_REQUEST * tried
        return is_enough and unused > FULL_SHARE * self.sizes.get("total", 0) and not self.impossible

    @property
    def largely_unused(self) -> bool:
        """True if the allocator held so much unused that fragments are the likeliest cause."""
        return self.sizes.get("unallocated", 0) >= LARGE_FRAGMENTS_SHARE * self.sizes.get("total", 0)


def completed(first: Incident, again: Incident) -> Incident:
    """The first incident with the traceback or the figures of its repetition, where it has none itself."""
    is_cut = first.kind == "gpu" and not first.sizes and again.sizes  # or printed by Ray, before the whole error
    if is_cut or (WORKER_ENDED in first.message and WORKER_ENDED not in again.message):
        return again
    if not first.where and again.where:
        first = replace(
            first,
            where=again.where,
            frames=again.frames,
            phase=again.phase,
            activity=again.activity,
            sharding=again.sharding,
            checkpoints=again.checkpoints,
            adapters=again.adapters,
            last_trl=again.last_trl,
        )
    if first.phase is None and (
        again.phase is not None or again.activity == "trains"
    ):  # a traceback from further out, of an error that it caused
        activity = again.activity if first.activity in ("", "engine") else first.activity
        first = replace(first, phase=again.phase, activity=activity, sharding=first.sharding or again.sharding)
    if first.line == again.line and not first.beside.step:  # the same error, with the bar that follows it
        first = replace(first, beside=replace(first.beside, step=again.beside.step, steps=again.beside.steps))
    first = replace(first, beside=first.beside.with_settings(again.beside))
    if not first.sizes and again.sizes:
        first = replace(first, sizes=again.sizes, numbers=again.numbers, message=again.message)
    return first

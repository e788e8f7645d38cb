"""The knobs as a table: what a search may turn, with the rules of the libraries between them.

What the job pins stays. Nothing here changes what is learned but the class of tuning, which has its name, and 16-bit weights in full
fine-tuning, which the plan says when it comes to them.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

from planner.candidate import Candidate
from planner.gpus.cluster import Cluster
from planner.jobs.base_candidate import base_candidate
from planner.jobs.job import DEQUANTIZED, Job
from planner.methods import METHODS
from planner.models.shape import FLASH_HEAD_DIM
from planner.quantities import Estimate

TuningClass = Literal["full", "lora", "qlora"]
CLASSES: tuple[TuningClass, ...] = ("full", "lora", "qlora")  # in the order in which they are recommended
Change = Mapping[str, object]  # Candidate fields and values, chosen together
Changes = tuple[Change, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SearchProblem:
    """One tuning class of a job on a cluster. Compared by identity.

    `offload`: whether states may be offloaded to the host. `residual`: the share by which a dry run exceeded the estimate of this class.
    """

    job: Job
    cluster: Cluster
    tuning_class: TuningClass
    offload: bool = False
    residual: float = 0.0

    @property
    def processes(self) -> int:
        pinned = self.job.pinned.get("num_processes", self.cluster.num_gpus)
        assert isinstance(pinned, int)
        return pinned


def tuning_class_of(candidate: Candidate) -> TuningClass:
    """The tuning class of a candidate: "qlora" is LoRA on quantized weights."""
    if candidate.tuning == "full":
        return "full"
    return "lora" if candidate.quantization == "none" else "qlora"


# -- the knobs ---------------------------------------------------------------------------------------------------------


def tuning(problem: SearchProblem) -> Changes:
    """A checkpoint that is quantized already keeps its quantization; QLoRA is nf4 otherwise."""
    published = "none" if problem.job.model.quantization in DEQUANTIZED else problem.job.model.quantization
    if problem.tuning_class == "full":
        return ({"tuning": "full", "quantization": "none"},)
    if problem.tuning_class == "qlora" and published == "none":
        return ({"tuning": "lora", "quantization": "nf4"},)
    return ({"tuning": "lora", "quantization": published},)


def load_dtype(problem: SearchProblem) -> Changes:
    """Full fine-tuning keeps TRL's float32 weights while they fit; a frozen base is loaded in 16 bits.

    Weights in float16 cannot be trained in full: torch/amp/grad_scaler.py refuses to unscale float16 gradients.
    """
    half = "bfloat16" if problem.cluster.gpu.supports_bf16 else "float16"
    if problem.tuning_class != "full":
        return ({"dtype": half},)
    return ({"dtype": "float32"}, {"dtype": half}) if half == "bfloat16" else ({"dtype": "float32"},)


# Ways to let the host help, the least first. Adapters' states are too small to be worth it, 4-bit weights cannot be partitioned.
OFFLOADED: dict[TuningClass, Changes] = {
    "full": (
        {"sharding": "zero2", "offload_optimizer": True},
        {"sharding": "zero3", "offload_optimizer": True},
        {"sharding": "zero3", "offload_optimizer": True, "offload_param": True},
    ),
    "lora": ({"sharding": "zero3", "offload_optimizer": True, "offload_param": True},),
    "qlora": (),
}


def sharding(problem: SearchProblem) -> Changes:
    """bitsandbytes weights stay whole under ZeRO and FSDP2 (accelerate 1.15, utils/fsdp_utils.py:799-811): data parallel only."""
    if problem.offload:
        return OFFLOADED[problem.tuning_class]
    if problem.processes == 1:
        return ({"sharding": "none"},)
    if problem.tuning_class == "qlora":
        return ({"sharding": "ddp"},)
    return tuple({"sharding": name} for name in ("ddp", "zero2", "zero3", "fsdp2"))


def checkpointing(problem: SearchProblem) -> Changes:
    return ({"gradient_checkpointing": False}, {"gradient_checkpointing": True})


def attention(problem: SearchProblem) -> Changes:
    """FlashAttention 2 where the card and the heads allow it: sdpa needs a mask of rows x length squared for padded batches."""
    layers = [layer.attention for layer, _ in problem.job.model.layer_kinds]
    if any(layer.softcap or layer.sink_params for layer in layers):
        return ({"attn_implementation": "eager"},)
    flash = problem.cluster.gpu.supports_flash_attention_2 and all(
        layer.head_dim == layer.v_head_dim <= FLASH_HEAD_DIM for layer in layers
    )
    return (
        ({"attn_implementation": "sdpa"}, {"attn_implementation": "flash_attention_2"})
        if flash
        else ({"attn_implementation": "sdpa"},)
    )


def generation(problem: SearchProblem) -> Changes:
    """Who samples: `generate` in the trainer, a colocated vLLM engine (asleep in between or not), or a server on GPUs of its own."""
    row, cluster = METHODS[problem.job.method], problem.cluster
    segments = {"expandable_segments": True}
    if not row.generates:
        return (segments,)
    found: list[Change] = [{"vllm": "off", **segments}]
    if problem.cluster.num_gpus > 1:
        found.append({"vllm": "off", "ds3_gather_for_generation": False, **segments})
    if not row.supports_vllm:
        return tuple(found)
    if any(name.startswith("vllm_") for name in problem.job.pinned):
        found.clear()  # who sets up an engine wants one
    for size in dict.fromkeys((1, cluster.gpus_per_node)):
        awake = {"vllm": "colocate", "vllm_tensor_parallel_size": size}
        found.append({**awake, "vllm_enable_sleep_mode": False, **segments})
        found.append(
            {**awake, "vllm_enable_sleep_mode": True, "expandable_segments": False}
        )  # vLLM's cumem allocator refuses expandable segments
    found += [
        {
            "vllm": "server",
            "vllm_tensor_parallel_size": size,
            "num_processes": cluster.num_gpus - size,
            "vllm_gpu_memory_utilization": 0.9,
            **segments,
        }
        for size in server_sizes(problem)
    ]
    return tuple(found)


def server_sizes(problem: SearchProblem) -> list[int]:
    """GPUs of a vLLM server: powers of two up to half the cluster, within one node; what a pinned num_processes leaves."""
    pinned = problem.job.pinned.get("num_processes")
    sizes = [
        size
        for size in (1, 2, 4, 8)
        if size <= problem.cluster.num_gpus // 2 and size <= problem.cluster.gpus_per_node
    ]
    if isinstance(pinned, int):
        return [size for size in sizes if pinned + size <= problem.cluster.num_gpus]
    return sizes


KNOBS: dict[str, Callable[[SearchProblem], Changes]] = {
    "tuning": tuning,
    "load dtype": load_dtype,
    "sharding": sharding,
    "checkpointing": checkpointing,
    "attention": attention,
    "generation": generation,
}


def allowed(changes: Changes, pinned: Mapping[str, object]) -> Changes:
    """The choices that agree with every pin, each without the pinned fields; a pin outside the table is a choice of its own."""
    agreeing = [change for change in changes if all(pinned.get(name, value) == value for name, value in change.items())]
    unpinned = [{name: value for name, value in change.items() if name not in pinned} for change in agreeing]
    return tuple(unpinned) or ({},)


def structures(problem: SearchProblem) -> Iterator[Candidate]:
    """Every combination of the knobs that is consistent, with the batch and the engine's share still at their defaults."""
    base = base_candidate(problem.job, problem.cluster)
    choices = [allowed(knob(problem), problem.job.pinned) for knob in KNOBS.values()]
    seen = set()
    for combination in product(*choices):
        fields: dict[str, Any] = {}
        for change in combination:
            fields.update(change)
        candidate = completed(replace(base, **fields), problem)
        if consistent(candidate, problem) and candidate not in seen:
            seen.add(candidate)
            yield candidate


def completed(candidate: Candidate, problem: SearchProblem) -> Candidate:
    """Settings that follow from others: one process is not sharded; the engine's longest sequence is the row."""
    changes: dict[str, Any] = {}
    if (
        candidate.num_processes == 1
        and candidate.sharding != "none"
        and not candidate.offload_optimizer
        and "sharding" not in problem.job.pinned
    ):
        changes["sharding"] = "none"
    if candidate.vllm != "off" and "vllm_max_model_length" not in problem.job.pinned:
        changes["vllm_max_model_length"] = candidate.row_tokens
    return replace(candidate, **changes) if changes else candidate


def consistent(candidate: Candidate, problem: SearchProblem) -> bool:
    """Whether the libraries would run it, and whether it says anything that its simpler twin does not."""
    quantized = candidate.quantization not in ("none", "mxfp4")
    of_class = {
        "full": candidate.tuning == "full",
        "lora": candidate.tuning == "lora",
        "qlora": candidate.tuning == "lora" and quantized,
    }
    sharded_dtype_twin = (
        candidate.tuning == "full" and candidate.dtype != "float32" and candidate.sharding.startswith(("zero", "fsdp"))
    )
    ungathered_twin = not candidate.ds3_gather_for_generation and (
        candidate.sharding != "zero3" or candidate.vllm != "off"
    )
    server = candidate.server_gpus
    # DeepSpeed would cast a frozen float32 base to 16 bits, and nothing would remember what was asked for
    broken_pin = (
        candidate.tuning == "lora"
        and problem.job.pinned.get("dtype") == "float32"
        and candidate.sharding.startswith("zero")
    )
    return (
        of_class[problem.tuning_class]
        and not broken_pin
        and not (sharded_dtype_twin and "dtype" not in problem.job.pinned)
        and not (ungathered_twin and "ds3_gather_for_generation" not in problem.job.pinned)
        and candidate.num_processes + server <= problem.cluster.num_gpus
        and not (candidate.vllm == "colocate" and candidate.num_processes % candidate.vllm_tensor_parallel_size)
    )


def problem_of(job: Job, cluster: Cluster, answer: Estimate) -> SearchProblem:
    """The search problem that a single candidate answers: its job and cluster with its tuning class."""
    return SearchProblem(job=job, cluster=cluster, tuning_class=tuning_class_of(answer.candidate))

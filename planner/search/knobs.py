"""The settings that a search varies: a table of functions (`KNOBS`), and the candidates that they make.

A pinned setting keeps its value. Two choices change what the model learns, and the plan names both: the tuning class,
and 16-bit weights in full fine-tuning.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Literal

from msgspec import Struct

from planner.candidate import Candidate
from planner.gpus.cluster import Cluster
from planner.jobs.job import Job, loaded_quantization
from planner.methods import LINEAR_HEAD, METHODS
from planner.models.division import tensor_parallel_sizes
from planner.models.image_tower import image_tower
from planner.models.layers import FLASH_HEAD_DIM
from planner.quantities import Estimate
from planner.quantizations import QLORA
from planner.schemes import SCHEMES
from planner.settings.table import has_setting, searched_as

TuningClass = Literal["full", "lora", "qlora"]
TUNING_CLASSES: tuple[TuningClass, ...] = ("full", "lora", "qlora")  # the first that fits is recommended
Change = Mapping[str, object]  # Candidate fields and values, chosen together
Changes = tuple[Change, ...]


class SearchProblem(Struct, frozen=True, kw_only=True, eq=False):
    """One tuning class of a job on a cluster. Compared by identity.

    `offload`: what needs more than the GPUs or another launcher: offload the optimizer, the parameters or checkpoints
    to the host, DeepSpeed for one process, shards of QLoRA's 4-bit weights. `residual`: the share by which a dry run
    exceeded the estimate of this tuning class; estimates are raised by it. `faster_than`: tokens per second below which
    a candidate is of no interest. `practical`: leave out impractical candidates (planner/search/fit.py).
    """

    job: Job
    cluster: Cluster
    tuning_class: TuningClass
    offload: bool = False
    residual: float = 0.0
    faster_than: float = 0.0
    practical: bool = False

    @property
    def processes(self) -> int:
        """Training processes: pinned, or one on each GPU."""
        pinned = self.job.pinned.get("num_processes", self.cluster.num_gpus)
        assert isinstance(pinned, int)
        return pinned


def tuning_classes(job: Job) -> tuple[TuningClass, ...]:
    """Return the tuning classes that the job allows, in the order of recommendation."""
    published = job.model.quantization_row
    if job.tuning != "auto":
        return (job.tuning,)
    tuning, quantization = job.pinned.get("tuning"), job.pinned.get("quantization")
    if tuning == "full":
        return ("full",)
    if quantization not in (None, "none"):
        return ("qlora",)
    if published.kept:
        return ("lora",)
    without_full = TUNING_CLASSES if tuning is None else TUNING_CLASSES[1:]
    return tuple(name for name in without_full if name != "qlora" or quantization is None)


def tuning_class_of(candidate: Candidate, job: Job) -> TuningClass:
    """Return the tuning class in whose search a candidate of the job is found.

    It is "qlora" if weights are quantized at load: LoRA on a checkpoint that is published quantized is "lora", unless
    the job asks for "qlora".
    """
    if candidate.tuning == "full":
        return "full"
    as_published = not candidate.quantization_row.bitsandbytes or candidate.quantization == job.model.quantization
    found: TuningClass = "lora" if as_published else "qlora"
    allowed = tuning_classes(job)
    return found if found in allowed else next((name for name in allowed if name != "full"), found)


# -- the knobs ---------------------------------------------------------------------------------------------------------


def tuning(problem: SearchProblem) -> Changes:
    """Return tuning and quantization of the class. A quantized checkpoint stays as it is; QLoRA is nf4 or as pinned."""
    published = loaded_quantization(problem.job.model)
    if problem.tuning_class == "full":
        return ({"tuning": "full", "quantization": "none"},)
    if problem.tuning_class == "qlora" and published == "none":
        return ({"tuning": "lora", "quantization": problem.job.pinned.get("quantization", QLORA)},)
    return ({"tuning": "lora", "quantization": published},)


def load_dtype(problem: SearchProblem) -> Changes:
    """Return the dtypes of the loaded weights: 16 bits for a frozen base, float32 or bfloat16 for full fine-tuning.

    fp16 trains float32 weights only: torch/amp/grad_scaler.py cannot unscale 16-bit gradients. Full fine-tuning of
    16-bit weights rounds small updates away, so that a job that leaves the tuning open does not get it.
    """
    half = "bfloat16" if problem.cluster.gpu.supports_bf16 else "float16"
    if problem.tuning_class != "full":
        return ({"dtype": half},)
    scaled = problem.job.pinned.get("precision", "bf16" if half == "bfloat16" else "fp16") == "fp16"
    is_open = problem.job.tuning == "auto" and "tuning" not in problem.job.pinned
    return ({"dtype": "float32"},) if scaled or is_open else ({"dtype": "float32"}, {"dtype": half})


# Ways to offload to the host, the smallest first. Optimizer states of adapters are too small to be worth it, and ZeRO-1
# differs from ZeRO-2 by gradients that stay on the GPU.
OFFLOADING: dict[str, Changes] = {
    "full": (
        {"sharding": "zero2", "offload_optimizer": True},
        {"sharding": "zero3", "offload_optimizer": True},
        {"sharding": "zero3", "offload_optimizer": True, "offload_param": True},
    ),
    "lora": ({"sharding": "zero3", "offload_optimizer": True, "offload_param": True},),
}
OFFLOADED_ADAPTERS: Changes = ({"sharding": "zero2", "offload_optimizer": True},)
# DeepSpeed for one process shards nothing, but keeps 16-bit weights beside float32 copies of the trained ones, where
# autocast casts float32 weights again and again. Source: planner/memory/weights.py, planner/throughput/work.py.
ONE_PROCESS: Changes = ({"sharding": "zero2", "offload_optimizer": False},)
# Every n-th layer is checkpointed: the larger n, the fewer layers are recomputed, and the more activations stay.
CHECKPOINTED = (1, 2, 4)
CHECKPOINTING = {"gradient_checkpointing", "checkpoint_every_n_layers", "checkpoint_offload"}
SHARDED_QLORA: Change = {"sharding": "fsdp2", "bnb_4bit_quant_storage": "bfloat16"}


def sharding(problem: SearchProblem) -> Changes:
    """Return the kinds of data parallelism, with what each offloads to the host.

    `checkpoint_offload` of transformers 5.23 keeps the inputs of checkpointed layers there. TRL's
    `activation_offloading` leaves more on the GPU (planner/memory/activations.py, `OffloadedInputs`) and stands in for
    it where a method does not keep it.
    """
    if not problem.offload:
        return _without_offloading(problem)
    offloaded = _with_offloading(problem)
    all_kinds = (*_without_offloading(problem), *offloaded)
    for activations in ("checkpoint_offload", "activation_offloading"):
        if has_setting(problem.job.method, activations):
            offloaded = (*offloaded, *({**change, activations: True} for change in all_kinds))
            break
    return (*offloaded, *_divided_experts(problem))


def _without_offloading(problem: SearchProblem) -> Changes:
    """Return the kinds of data parallelism without offloading.

    On several nodes FSDP2 may keep a copy of the model on each (hybrid sharding), so that only gradients cross them.

    ZeRO-1 reduces gradients once a step where ZeRO-2 does so in every micro-step, but keeps them whole: it may be the
    fastest where several micro-steps wait for large gradients, those of full fine-tuning. ZeRO-3 with a copy of the
    16-bit weights on each node (ZeRO++, `zero_hpz_partition_size`) would be faster than the plan in 3 of 54 jobs on 2
    to 8 nodes, by 6 to 7 %, where the optimizer is on the host.

    QLoRA has DDP and ZeRO-2, which shards what a value model trains.
    """
    if problem.processes == 1:
        return ({"sharding": "none"}, *(ONE_PROCESS if copies_logits(problem) else ()))
    if problem.tuning_class == "qlora":
        asked = _asked_for_floats(problem) or "bnb_4bit_quant_storage" in problem.job.pinned
        return ({"sharding": "ddp"}, {"sharding": "zero2"}, *(_sharded_qlora(problem) if asked else ()))
    full = problem.tuning_class == "full"
    pinned = problem.job.pinned.get("sharding")
    rows = ((name, row) for name, row in SCHEMES.items() if row.launched and (name == pinned or row.searched))
    whole = tuple({"sharding": name} for name, row in rows if full or not row.reduces_after)
    if problem.cluster.nodes == 1 or problem.cluster.gpus_per_node == 1:
        return whole
    return (*whole, {"sharding": "fsdp2", "dp_replicate_size": problem.cluster.nodes})


def copies_logits(problem: SearchProblem) -> bool:
    """Return whether the loss reads whole logits, which accelerate copies to float32 except under DeepSpeed.

    GKD of Qwen3-4B on one L4 runs 2.6 times as fast with DeepSpeed, without checkpoints. Source: accelerate 1.15,
    accelerator.py, `prepare_model` (`convert_outputs_to_fp32`, of models that DeepSpeed does not wrap).
    """
    return METHODS[problem.job.method].loss in LINEAR_HEAD


def _with_offloading(problem: SearchProblem) -> Changes:
    """Return the ways to offload the optimizer or the parameters; QLoRA shards its weights instead.

    For the longest rows the optimizer states of adapters count too: a few hundred tokens.
    """
    adapters = OFFLOADED_ADAPTERS if problem.job.optimize == "max-length" else ()
    if problem.tuning_class == "qlora":
        return (*_sharded_qlora(problem), *adapters)
    ways = OFFLOADING[problem.tuning_class]
    return (
        *(ONE_PROCESS if problem.processes == 1 else ()),
        *(adapters if problem.tuning_class == "lora" else ()),
        *ways,
    )


def _divided_experts(problem: SearchProblem) -> Changes:
    """Return Transformers' own FSDP2 with experts divided among all GPUs, or among those of a node.

    It is for jobs that do not fit without: no layer's experts are gathered, but a run cannot go on from its checkpoints
    (transformers 5.23, trainer.py, `Trainer.__init__`).
    """
    if not METHODS[problem.job.method].distributes:
        return ()
    sizes = sorted({problem.processes, problem.cluster.gpus_per_node} - {1})
    return tuple({"sharding": "distributed", "ep_size": size} for size in sizes)


def _sharded_qlora(problem: SearchProblem) -> Changes:
    """Return FSDP2, or FSDP 1 if the job has it, with 4-bit weights that it shards, stored as bfloat16.

    None where method or GPU cannot.

    It is for jobs that do not fit without: every process loads all weights first (see
    `unsharded_while_loading_bytes`), and accelerate calls its way a temporary fix (1.15, utils/fsdp_utils.py,
    `fsdp2_prepare_model`).
    """
    is_nf4 = not problem.job.model.quantization_row.kept
    can_shard = is_nf4 and METHODS[problem.job.method].shards_qlora and problem.cluster.gpu.supports_bf16
    asked = {"sharding": problem.job.pinned["sharding"]} if _asked_for_floats(problem) else {}
    return ({**SHARDED_QLORA, **asked},) if can_shard and problem.processes > 1 else ()


def _asked_for_floats(problem: SearchProblem) -> bool:
    """Return whether the job has a sharding that shards 4-bit weights as floating-point numbers."""
    asked = problem.job.pinned.get("sharding")
    return any(name == asked and row.shards_4bit == "as floats" for name, row in SCHEMES.items())


def checkpointing(problem: SearchProblem) -> Changes:
    """Return gradient checkpointing off, of all layers, and of every second or fourth layer.

    `every_n_layers` is new in transformers 5.23 (modeling_utils.py, `activation_checkpointing_enable`). vLLM sets its
    own bounds on transformers, so that beside it all layers or none are checkpointed (`is_consistent`).
    """
    counts = CHECKPOINTED if has_setting(problem.job.method, "checkpoint_every_n_layers") else (1,)
    return (
        {"gradient_checkpointing": False},
        *({"gradient_checkpointing": True, "checkpoint_every_n_layers": each} for each in counts),
    )


def masks_images(job: Job) -> bool:
    """Return whether the rows of a job have images whose tokens see one another in the language model."""
    if not job.pinned.get("images_per_row"):
        return False
    tower = image_tower(job.model, job.pinned.get("image_size", ""))
    return tower is not None and tower.masks_text


def attention(problem: SearchProblem) -> Changes:
    """Return the attention implementations that the model and the GPU support.

    FlashAttention needs no mask; sdpa needs one of rows x length squared for padded batches. On Hopper it is release 3,
    which needs no more memory than release 2 and is faster (flash-attention, hopper/flash_api.cpp, `mha_bwd`:
    accumulates the gradients of keys in float32 for the key heads, release 2 in 16 bits for all query heads). Models
    with softcaps have no sdpa. Those with attention sinks have eager attention and the build of FlashAttention 3 that
    knows sinks (transformers 5.23, models/gpt_oss/modeling_gpt_oss.py, `_compatible_flash_implementations`).
    FlashAttention drops the mask with which the tokens of an image see one another in gemma 3 (transformers 5.23,
    masking_utils.py, `flash_attention_mask`), so it is not offered there. Layers without formulas are not measured with
    it for a search, which would wait for that; a pinned one is planned.
    Source: planner/memory/stack_recipe.py, `with_data`.
    """
    gpu, layers = problem.cluster.gpu, [layer.attention for layer, _ in problem.job.model.layer_kinds]
    measured = problem.job.model.has_measured_layers
    sinks = any(layer.sink_params for layer in layers)
    other = problem.job.model.default_attention
    context_parallel = problem.job.pinned.get("cp_size", 1) != 1  # needs sdpa: planner/jobs/rules.py
    flash = (
        (gpu.supports_flash_attention_3 if sinks else gpu.supports_flash_attention_2)
        and not context_parallel
        and not masks_images(problem.job)
        and problem.job.model.supports_flash_attention
        and not measured
        and all(layer.head_dim == layer.v_head_dim <= FLASH_HEAD_DIM for layer in layers)
    )
    release = "flash_attention_3" if gpu.supports_flash_attention_3 else "flash_attention_2"
    return tuple({"attn_implementation": name} for name in ((other, release) if flash else (other,)))


def packing(problem: SearchProblem) -> Changes:
    """Return rows as they are and packed ones, where the lengths of rows are known; else the trainer's default.

    Rows of the dataset do not see one another in a packed row, whatever the attention: TRL gives their positions and
    the places where they begin (trl 1.16, trainer/sft_trainer.py, `DataCollatorForLanguageModeling.torch_call`), from
    which FlashAttention takes its rows and sdpa and eager attention a mask (transformers 5.23, masking_utils.py,
    `find_packed_sequence_indices`). TRL refuses packing for images and for rows that GPUs share.
    """
    pinned = problem.job.pinned
    apart = pinned.get("padding_free") or pinned.get("images_per_row")
    shared = pinned.get("cp_size", 1) != 1 or pinned.get("sp_size", 1) != 1
    if pinned.get("lengths") is None or not METHODS[problem.job.method].packs or apart or shared:
        return ({},)
    return ({"packing": False}, {"packing": True})


def ways_to_generate(problem: SearchProblem) -> Changes:
    """Return the ways to sample completions, with the allocator setting of each.

    `generate` in the trainer (with or without gathering ZeRO-3's weights), a colocated vLLM engine (with or without
    sleep mode, on every number of a node's GPUs that it can divide the model among, and no process on GPUs that are
    left over), or a vLLM server on GPUs of its
    own. A pinned setting of vLLM excludes the trainer's `generate`.
    """
    row, cluster = METHODS[problem.job.method], problem.cluster
    segments = {"expandable_segments": True}
    if not row.generates:
        return (segments,)
    found: list[Change] = [{"vllm": "off", **segments}]
    if cluster.num_gpus > 1 and not row.always_gathers:
        found.append({"vllm": "off", "ds3_gather_for_generation": False, **segments})
    if not row.supports_vllm:
        return tuple(found)
    if any(name.startswith("vllm_") for name in problem.job.pinned):
        found.clear()  # a pinned setting of vLLM means that vLLM is wanted
    for size, processes in colocated_engines(problem):
        awake = {"vllm": "colocate", "vllm_tensor_parallel_size": size, **processes}
        # An engine of several GPUs dies with expandable segments when its custom all-reduce shares the buffers of CUDA
        # graphs: cudaIpcGetMemHandle refuses mapped memory ("custom_all_reduce.cuh: invalid argument" on 3090, 5090,
        # H100 and H200). Source: vllm-project/vllm#42609 and #56193, open in 0.31.
        found.append({**awake, "vllm_enable_sleep_mode": False, "expandable_segments": size == 1})
        # Sleep mode uses vLLM's cumem allocator, which refuses expandable segments.
        found.append({**awake, "vllm_enable_sleep_mode": True, "expandable_segments": False})
    found += [
        {
            "vllm": "server",
            "vllm_tensor_parallel_size": tensor_parallel,
            "vllm_data_parallel_size": data_parallel,
            "num_processes": processes,
            "vllm_gpu_memory_utilization": 0.9,
            **segments,
        }
        for tensor_parallel, data_parallel, processes in server_splits(problem)
    ]
    return tuple(found)


def colocated_engines(problem: SearchProblem) -> Iterator[tuple[int, Change]]:
    """Yield the tensor parallel sizes of a colocated engine, with `num_processes` where engines leave GPUs over.

    Example: 28 heads on 5 GPUs: size 1 on all, sizes 2 and 4 on four.
    """
    cluster = problem.cluster
    for size in range(1, cluster.gpus_per_node + 1):
        used = cluster.gpus_per_node // size * size
        if size in tensor_parallel_sizes(problem.job.model, used):
            yield size, {} if used == cluster.gpus_per_node else {"num_processes": cluster.nodes * used}


def server_splits(problem: SearchProblem) -> Iterator[tuple[int, int, int]]:
    """Yield how a vLLM server and the trainer can share the GPUs: tensor and data parallel size, training processes.

    A pinned `num_processes` keeps its GPUs. On several nodes a pinned data parallel size may leave GPUs of the server's
    node unused, and so does a base into which adapters are not merged: only a server without replicas takes adapters.
    """
    cluster, pinned = problem.cluster, problem.job.pinned
    unmerged = None if problem.job.model.quantization_row.merges else 1
    wanted, engines = pinned.get("num_processes"), pinned.get("vllm_data_parallel_size", unmerged)
    for size, processes in cluster.server_shares:
        if isinstance(wanted, int) and wanted > processes:
            continue
        for tensor_parallel in tensor_parallel_sizes(problem.job.model, size):
            most = size // tensor_parallel
            data_parallel = engines if isinstance(engines, int) and cluster.nodes > 1 and engines < most else most
            yield tensor_parallel, data_parallel, wanted if isinstance(wanted, int) else processes


# Candidate fields that a search decides unless they are pinned: those of `KNOBS`, of `with_derived_settings` and of the
# batch (planner/search/search.py).
SEARCHED = searched_as("choice", "size", "derived")
KNOBS: dict[str, Callable[[SearchProblem], Changes]] = {
    "tuning": tuning,
    "load dtype": load_dtype,
    "sharding": sharding,
    "checkpointing": checkpointing,
    "attention": attention,
    "packing": packing,
    "generation": ways_to_generate,
}


def allowed_by_pins(changes: Changes, pinned: Mapping[str, object]) -> Changes:
    """Return the changes that agree with every pinned setting, each without the pinned fields.

    If none agrees, the result is one empty change: the pinned settings decide alone. Without changes there are none.
    """
    agreeing = [change for change in changes if all(pinned.get(name, value) == value for name, value in change.items())]
    unpinned = [{name: value for name, value in change.items() if name not in pinned} for change in agreeing]
    return tuple(unpinned) or ({},) * bool(changes)


def problem_of_estimate(job: Job, cluster: Cluster, answer: Estimate) -> SearchProblem:
    """Return the search problem of a single candidate: its job and cluster, with its tuning class."""
    return SearchProblem(job=job, cluster=cluster, tuning_class=tuning_class_of(answer.candidate, job))

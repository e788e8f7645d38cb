"""What a job pins, against the method, the model and the cluster: what contradicts is refused before anything is searched, in one line with a way out."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import lcm
from typing import Any

from planner.candidate import Candidate
from planner.errors import InputError
from planner.gpus.cluster import Cluster
from planner.jobs.job import DEFAULT_BATCH_SIZE, DEQUANTIZED, Job, server_gpus
from planner.methods import METHODS, Method, MethodName
from planner.units import format_count

# Settings that only some methods have, as Candidate fields. Source: trl 1.16, trainer/*_config.py and experimental/*/*_config.py.
READ_BY: dict[str, Callable[[Method], bool]] = {
    "packing": lambda method: method.packs,
    "padding_free": lambda method: method.padding_free,
    "activation_offloading": lambda method: method.offloads_activations,
    "precompute_ref_log_probs": lambda method: method.precomputes_reference,
    "beta": lambda method: method.has_beta,
    "num_generations": lambda method: method.grouped_completions,
    "steps_per_generation": lambda method: method.grouped_completions,
    "num_iterations": lambda method: method.grouped_completions,
    "reward_model": lambda method: method.reward_model != "none",
    "teacher_model": lambda method: method.teacher,
    "ds3_gather_for_generation": lambda method: method.generates,
    "vllm_gpu_memory_utilization": lambda method: method.supports_vllm,
    "vllm_tensor_parallel_size": lambda method: method.supports_vllm,
    "vllm_data_parallel_size": lambda method: method.supports_vllm,
    "vllm_max_model_length": lambda method: method.supports_vllm,
    "vllm_enable_sleep_mode": lambda method: method.supports_vllm,
}
# What the data is like: said of methods that have no such limit, it is not wrong, but of no use.
LENGTHS: dict[str, Callable[[Method], bool]] = {
    "max_length": lambda method: not method.generates or method.bounded_rows,
    "prompt_length": lambda method: method.generates,
    "max_completion_length": lambda method: method.generates,
}
LORA_FIELDS = ("lora_r", "lora_target_modules", "lora_dropout", "autocast_adapter_dtype")
ENGINE_FIELDS = tuple(field for field in READ_BY if field.startswith("vllm_"))
DETAILS_OFF: dict[str, Any] = {"checkpoint_every_n_layers": 1, "checkpoint_offload": False}
ALIASED = {"checkpoint_every_n_layers": "every_n_layers", "checkpoint_offload": "offload"}
OFF: dict[str, Any] = {
    "packing": False,
    "padding_free": False,
    "activation_offloading": False,
    "precompute_ref_log_probs": False,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A job and its cluster, and what is pinned by the name of each field."""

    job: Job
    cluster: Cluster

    @property
    def pinned(self) -> Mapping[str, Any]:
        return self.job.pinned

    @property
    def full(self) -> bool:
        return self.job.tuning == "full" or self.pinned.get("tuning") == "full"


def refuse_contradictions(job: Job, cluster: Cluster) -> None:
    """Checks what is pinned before it is searched around.

    Raises:
        InputError: the first contradiction found.
    """
    asked = Asked(job=job, cluster=cluster)
    for rule in RULES:
        for problem in rule(asked):
            raise InputError(problem)


def reads(method: MethodName, field: str) -> bool:
    """Whether a method has that setting; what is not in the tables, every method has."""
    rule = READ_BY.get(field) or LENGTHS.get(field)
    return rule is None or rule(METHODS[method])


def unread_lengths(job: Job) -> list[str]:
    """A sentence for each length that the method has no use for."""
    row = METHODS[job.method]
    limits = "max_length" if LENGTHS["max_length"](row) else "prompt_length and max_completion_length"
    return [
        f"{field} is not used: the rows of {job.method} are {limits}"
        for field in LENGTHS
        if field in job.pinned and not reads(job.method, field)
    ]


# -- the rules ---------------------------------------------------------------------------------------------------------


def method_problems(asked: Asked) -> Iterator[str]:
    """A setting that the method does not have would be dropped in silence."""
    method = asked.job.method
    for field, value in asked.pinned.items():
        if field in READ_BY and not reads(method, field) and value != OFF.get(field, ...):
            others = [name for name in METHODS if reads(name, field)]
            yield f"{method} has no {field}, which is a setting of {', '.join(others)}. Drop it."


def tuning_problems(asked: Asked) -> Iterator[str]:
    """The class of tuning against use_peft, adapters and quantization."""
    tuning, pinned, model = asked.job.tuning, asked.pinned, asked.job.model
    use_peft = {"full": False, "lora": True}.get(pinned.get("tuning", ""))
    if use_peft is not None and tuning != "auto" and use_peft == (tuning == "full"):
        yield f"--tuning {tuning} contradicts use_peft={str(use_peft).lower()}. Drop one of them."
    lora = [field for field in LORA_FIELDS if field in pinned]
    if asked.full and lora:
        yield f"{lora[0]} needs adapters, and full fine-tuning has none. Use --tuning lora or --tuning qlora."
    quantization = pinned.get("quantization", "none")
    if tuning == "lora" and quantization not in ("none", model.quantization):
        yield "--tuning lora contradicts a quantized load. Use --tuning qlora."
    if asked.full and model.quantization not in ("none", *DEQUANTIZED):
        yield f"{model.id} is quantized ({model.quantization}), and quantized weights do not learn. Use --tuning lora, or the model that was not quantized."


def quantization_problems(asked: Asked) -> Iterator[str]:
    """A published quantization cannot be changed, nor another's be asked for."""
    model, quantization = asked.job.model, asked.pinned.get("quantization")
    if quantization is None or quantization == model.quantization:
        return
    if model.quantization not in ("none", *DEQUANTIZED):
        yield f"{model.id} is quantized already ({model.quantization}), and cannot be loaded as {quantization}. Drop that setting, or use the original model."
    elif quantization in ("gptq", "awq", *DEQUANTIZED):
        yield f"{model.id} is not a {quantization} checkpoint, and is not made one at load. Use load_in_4bit=true, or a model that was published so."


def precision_problems(asked: Asked) -> Iterator[str]:
    """bfloat16 that the card has not; float16 gradients, which the scaler refuses (torch/amp/grad_scaler.py, `_unscale_grads_`)."""
    gpu, pinned = asked.cluster.gpu, asked.pinned
    if pinned.get("dtype") == "bfloat16" and not gpu.supports_bf16:
        yield f"{gpu.name} has no bfloat16, so dtype=bfloat16 cannot be had there. Use --set dtype=float16, or leave it out."
    if asked.full and pinned.get("dtype") == "float16":
        yield "float16 weights cannot be trained in full: their gradients cannot be unscaled. Use --set dtype=float32, or --tuning lora."
    sinks = any(layer.attention.sink_params for layer, _ in asked.job.model.layer_kinds)
    if (
        sinks and pinned.get("attn_implementation") == "sdpa"
    ):  # transformers 5.23, models/gpt_oss/modeling_gpt_oss.py:379
        yield f"{asked.job.model.id} has attention sinks, which sdpa does not know. Use --set attn_implementation=eager."


def checkpointing_problems(asked: Asked) -> Iterator[str]:
    """Details of checkpointing without checkpointing."""
    details = [
        field
        for field in ("checkpoint_every_n_layers", "checkpoint_offload")
        if asked.pinned.get(field, DETAILS_OFF[field]) != DETAILS_OFF[field]
    ]
    if asked.pinned.get("gradient_checkpointing") is False and details:
        yield f"{ALIASED[details[0]]} is a detail of gradient_checkpointing, which is false. Use --set gradient_checkpointing=true."


def length_problems(asked: Asked) -> Iterator[str]:
    """Learned positions end where their table ends."""
    model, positions = asked.job.model, asked.job.model.max_position_embeddings
    for field in LENGTHS:
        length = asked.pinned.get(field, 0)
        if model.position_params and reads(asked.job.method, field) and length > positions:
            yield f"{field} {format_count(length)} is longer than the {format_count(positions)} positions that {model.id} has learned. Use {positions}."


def sharding_problems(asked: Asked) -> Iterator[str]:
    """Offloading against what can offload; the launch against the cluster."""
    pinned, cluster = asked.pinned, asked.cluster
    sharding = pinned.get("sharding")
    if pinned.get("offload_param") and sharding not in ("zero3", "fsdp2"):
        yield f"Only ZeRO-3 and FSDP move parameters to the host{_beside(sharding)}. Add --set zero_stage=3."
    if pinned.get("offload_optimizer") and sharding not in ("zero1", "zero2", "zero3"):
        way = "Use --set fsdp_offload_params=true" if sharding == "fsdp2" else "Add --set zero_stage=2"
        yield f"Only DeepSpeed moves the optimizer alone to the host{_beside(sharding)}. {way}."
    if sharding == "none" and pinned.get("num_processes", cluster.num_gpus) > 1:
        yield f"distributed_type=NO is one process, and there are {cluster.num_gpus} GPUs. Add --set num_processes=1, or use distributed_type=MULTI_GPU."
    if pinned.get("num_nodes", cluster.nodes) != cluster.nodes:
        yield f"num_machines {pinned['num_nodes']} contradicts --gpus, which has {cluster.nodes}: write the nodes there, as in 4x8xH100."


def _beside(sharding: str | None) -> str:
    return f", not {sharding}" if sharding else ""


def engine_problems(asked: Asked) -> Iterator[str]:
    """A vLLM engine against the GPUs and the heads that its tensor parallel must divide."""
    pinned, cluster, model = asked.pinned, asked.cluster, asked.job.model
    mode, size = pinned.get("vllm"), pinned.get("vllm_tensor_parallel_size", 1)
    unused = [field for field in ENGINE_FIELDS if field in pinned]
    if mode == "off" and unused:
        yield f"{unused[0]} is read with vLLM only, and use_vllm is false. Use --set use_vllm=true."
    needed = server_gpus(pinned)
    if mode == "server" and pinned.get("vllm_enable_sleep_mode"):
        yield "vllm_enable_sleep_mode is for a colocated engine: a server has its GPUs to itself. Drop it, or use --set vllm_mode=colocate."
    if mode == "server" and needed >= cluster.num_gpus:
        yield (
            f"A vLLM server on {needed} of {cluster.num_gpus} GPUs leaves none for the trainer. "
            f"Use --set vllm_mode=colocate{', or fewer GPUs for the server' if needed > 1 else ''}."
        )
    if size > cluster.num_gpus:
        yield f"vllm_tensor_parallel_size {size} needs as many GPUs, and there are {cluster.num_gpus}. Use {cluster.num_gpus}."
    # vllm/model_executor/models/qwen2.py:137-148, as in every model there
    heads = {layer.attention.num_attention_heads for layer, _ in model.layer_kinds}
    if any(count % size for count in heads):
        fitting = largest_divisor(min(heads), min(size, min(heads)))
        yield f"vllm_tensor_parallel_size {size} does not divide the {min(heads)} attention heads of {model.id}. Use {fitting}."
    processes = pinned.get("num_processes", cluster.num_gpus)
    if mode != "server" and processes % size and (mode == "colocate" or needed >= cluster.num_gpus):
        yield f"vllm_tensor_parallel_size {size} does not divide the {processes} processes. Use {largest_divisor(processes, min(size, processes))}."


def batch_problems(asked: Asked) -> Iterator[str]:
    """The effective batch in whole micro-batches on every process, and in whole groups (trl 1.16, grpo_config.py:1131)."""
    wanted, pinned = asked.job.effective_batch_size, asked.pinned
    processes, group = _processes(asked), _group(asked.job)
    batch, accumulation = pinned.get("per_device_train_batch_size"), pinned.get("gradient_accumulation_steps")
    share = (batch or 1) * (accumulation or 1)
    if wanted is None:
        if not (batch and accumulation):
            yield from _split_groups(share if batch else share * DEFAULT_BATCH_SIZE, processes, group)
    elif batch and accumulation and wanted not in [count * share for count in processes]:
        yield (
            f"--effective-batch-size {wanted} contradicts per_device_train_batch_size {batch} and gradient_accumulation_steps {accumulation} on {processes[0]} "
            f"GPUs, which make {processes[0] * share}. Drop one of the three."
        )
    elif all(wanted % lcm(count * share, group) for count in processes):
        unit = lcm(processes[0] * share, group)
        near = [size for size in (wanted // unit * unit, (wanted // unit + 1) * unit) if size]
        parts = f"micro-batches of {share}" if share > 1 else "samples"
        groups = f" and groups of {group}" if group > 1 else ""
        yield f"--effective-batch-size {wanted} is not made of whole {parts} on {processes[0]} GPUs{groups}. Use {' or '.join(map(str, near))}."


def _split_groups(share: int, processes: list[int], group: int) -> Iterator[str]:
    """Groups that no number of processes keeps together at `share` completions a process."""
    if any(share * count % group == 0 for count in processes):
        return
    size = share * processes[0]
    divisor = largest_divisor(size, min(group, size))
    instead = f", or num_generations {divisor}" if divisor > 1 else ""
    yield (
        f"num_generations {group} does not divide the {size} completions of an optimizer step ({share} on each of {processes[0]} GPUs). "
        f"Use --effective-batch-size {lcm(size, group)}{instead}."
    )


def _group(job: Job) -> int:
    """Completions of one prompt, which stay together; generation batches of another size than a step's are checked when they are built."""
    if not reads(job.method, "num_generations") or "steps_per_generation" in job.pinned:
        return 1
    group = job.pinned.get(
        "num_generations", METHODS[job.method].defaults.get("num_generations", 8)
    )  # trl 1.16, grpo_config.py:480
    assert isinstance(group, int)
    return group


def _processes(asked: Asked) -> list[int]:
    """The numbers of training processes there can be, the likeliest first."""
    pinned, cluster = asked.pinned, asked.cluster
    if "num_processes" in pinned:
        return [pinned["num_processes"]]
    whole = [cluster.num_gpus] if pinned.get("vllm") != "server" else []
    if not METHODS[asked.job.method].supports_vllm or pinned.get("vllm") in ("off", "colocate"):
        return whole
    sizes = (
        [server_gpus(pinned)]
        if {"vllm_tensor_parallel_size", "vllm_data_parallel_size"} & pinned.keys()
        else [1, 2, 4, 8]
    )
    return whole + [cluster.num_gpus - size for size in sizes if size < cluster.num_gpus]


RULES: tuple[Callable[[Asked], Iterator[str]], ...] = (
    method_problems, tuning_problems, quantization_problems, precision_problems, checkpointing_problems, length_problems, sharding_problems,
    engine_problems, batch_problems,
)  # fmt: skip


def check(candidate: Candidate, job: Job, cluster: Cluster) -> None:
    """Refuse what cannot run, with the reason and the nearest thing that can.

    Raises:
        InputError: the first contradiction found.
    """
    for problem in (
        *unusable_on_card(candidate, cluster),
        *unplaceable(candidate, cluster),
        *unusable_by_method(candidate, job),
    ):
        raise InputError(problem)


def unusable_on_card(candidate: Candidate, cluster: Cluster) -> list[str]:
    """bf16 needs Ampere; quantized weights do not learn."""
    found = []
    if candidate.precision == "bf16" and not cluster.gpu.supports_bf16:
        major, minor = cluster.gpu.compute_capability
        found.append(
            f"{cluster.gpu.name} has no bfloat16 (compute capability {major}.{minor}; it needs 8.0). Use --set fp16=true --set bf16=false."
        )
    if (
        candidate.attn_implementation in ("flash_attention_2", "flash_attention_3")
        and not cluster.gpu.supports_flash_attention_2
    ):
        found.append(
            f"{candidate.attn_implementation} does not run on {cluster.gpu.name}. Use --set attn_implementation=sdpa."
        )
    return found


def unplaceable(candidate: Candidate, cluster: Cluster) -> list[str]:
    """Processes, engines and GPUs must add up."""
    server = candidate.server_gpus
    if candidate.num_processes > cluster.num_gpus:
        return [
            f"num_processes {candidate.num_processes} needs as many GPUs, and there are {cluster.num_gpus}. Use num_processes={cluster.num_gpus}."
        ]
    if server and candidate.num_processes + server > cluster.num_gpus:
        return [
            f"num_processes {candidate.num_processes} and a vLLM server on {server} of the same {cluster.num_gpus} GPUs would share cards: the server keeps "
            f"{candidate.vllm_gpu_memory_utilization:.0%} of its card for itself and the trainer runs out of memory there. "
            f"Use num_processes={max(1, cluster.num_gpus - server)}, or vllm_mode=colocate."
        ]
    if candidate.vllm == "colocate" and candidate.num_processes % candidate.vllm_tensor_parallel_size:
        return [
            f"vllm_tensor_parallel_size {candidate.vllm_tensor_parallel_size} does not divide num_processes {candidate.num_processes}."
        ]
    return []


def unusable_by_method(candidate: Candidate, job: Job) -> list[str]:
    """What the method itself refuses."""
    row, found = candidate.method_row, []
    smallest = row.smallest_batch
    if candidate.per_device_train_batch_size < smallest:
        found.append(
            f"{candidate.method} needs a per_device_train_batch_size of at least {smallest}, not {candidate.per_device_train_batch_size}."
        )
    if candidate.vllm != "off" and not row.supports_vllm:
        found.append(f"{candidate.method} does not generate with vLLM. Drop use_vllm.")
    if row.bounded_rows and candidate.max_completion_length >= candidate.max_length:
        lengths = f"max_new_tokens {candidate.max_completion_length} leaves no room for a prompt in max_length {candidate.max_length}"
        found.append(f"{lengths}. Raise --max-length.")
    pinned_batch = {"per_device_train_batch_size", "gradient_accumulation_steps"} <= job.pinned.keys()
    if row.grouped_completions and pinned_batch and generation_batch(candidate) % candidate.num_generations:
        batch = generation_batch(candidate)
        made_of = (
            f"{candidate.per_device_train_batch_size} x {candidate.num_processes} x {candidate.steps_per_generation}"
        )
        found.append(
            f"A generation batch of {batch} completions (per_device_train_batch_size x num_processes x steps_per_generation = {made_of}) is no "
            f"multiple of num_generations {candidate.num_generations}. Use num_generations={largest_divisor(batch, candidate.num_generations)}, "
            "or a batch that is."
        )
    return found


def generation_batch(candidate: Candidate) -> int:
    """Completions sampled at once over all processes (trl 1.16, grpo_config.py:1100)."""
    return candidate.per_device_train_batch_size * candidate.num_processes * candidate.steps_per_generation


def largest_divisor(number: int, at_most: int) -> int:
    return next(divisor for divisor in range(at_most, 0, -1) if number % divisor == 0)

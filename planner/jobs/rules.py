"""Contradictions between the settings that a job pins, refused with a remedy before anything is computed.

Contradictions of a complete candidate are in candidate_rules.py, combinations at which a library stops in stops.py.
"""

from collections.abc import Callable, Iterator
from math import lcm
from typing import Any

from planner.candidate import DEFAULTS, PREPARATIONS
from planner.errors import InputError
from planner.gpus.cluster import Cluster
from planner.jobs.image_rules import image_problems
from planner.jobs.job import DEFAULT_BATCH_SIZE, Job, PinnedJob, server_gpus
from planner.jobs.settings import setting_field
from planner.methods import METHODS
from planner.models.division import nearest_size, undivided
from planner.quantities import Note
from planner.quantizations import QUANTIZATIONS
from planner.schemes import SCHEMES, SHARDING_OF_SHARED_ROWS
from planner.settings.table import (
    LENGTH_SETTINGS,
    SETTING_OF,
    SETTINGS,
    STAGE_3_SIZES,
    ZERO_SIZES,
    details_of,
    has_setting,
)
from planner.units import format_count

LORA_FIELDS = details_of("tuning")
ENGINE_FIELDS = details_of("vllm")
# A method without the setting behaves as with these values, so they are not refused.
OFF: dict[str, Any] = {
    "packing": False,
    "padding_free": False,
    "activation_offloading": False,
    "precompute_ref_log_probs": False,
    "prediction_loss_only": False,
    "compute_metrics": False,
    "eval_accumulation_steps": 0,
    "eval_rows": 0,
    "num_generations_eval": 0,
}


def refuse_contradictions(job: Job, cluster: Cluster) -> None:
    """Check what a job pins against its method, model and cluster.

    Raises:
        InputError: the first contradiction found.
    """
    pinned_job = PinnedJob(job=job, cluster=cluster)
    for rule in RULES:
        for problem in rule(pinned_job):
            raise InputError(problem)


def unused_lengths(job: Job) -> list[Note]:
    """Return one warning for each pinned length that the method does not use."""
    limits = ("max_length",) if has_setting(job.method, "max_length") else ("prompt_length", "max_completion_length")
    return [
        Note("length_not_used", {"setting": field, "method": job.method, "limits": limits})
        for field in LENGTH_SETTINGS
        if field in job.pinned and not has_setting(job.method, field)
    ]


# -- rules about pinned settings ---------------------------------------------------------------------------------------


def method_problems(pins: PinnedJob) -> Iterator[str]:
    """Refuse a setting that the method does not have; TRL would drop it silently."""
    method = pins.job.method
    names = {setting_field(name): name for name in pins.job.given}
    for field, value in pins.pinned.items():
        refused = field not in LENGTH_SETTINGS and not has_setting(method, field)
        if refused and value != OFF.get(field, ...):
            name = names.get(field) or SETTING_OF[field].written or field
            others = [other for other in METHODS if has_setting(other, field)]
            served = field == "teacher_model" and METHODS[method].teacher_server
            instead = "Use --set teacher_server_model" if served else "Drop it"
            yield f"{method} has no {name}, which is a setting of {', '.join(others)}. {instead}."


def tuning_problems(pins: PinnedJob) -> Iterator[str]:
    """Refuse a tuning class that contradicts use_peft, settings of LoRA or the quantization."""
    tuning, pinned, model = pins.job.tuning, pins.pinned, pins.job.model
    use_peft = {"full": False, "lora": True}.get(pinned.get("tuning", ""))
    if use_peft is not None and tuning != "auto" and use_peft == (tuning == "full"):
        yield f"--tuning {tuning} contradicts use_peft={str(use_peft).lower()}. Drop one of them."
    lora = [field for field in LORA_FIELDS if field in pinned]
    if pins.full and lora:
        ways = f"{pins.way(tuning='lora')}, or {pins.way(tuning='qlora')}"
        yield f"{lora[0]} needs adapters, and full fine-tuning has none. Use {ways}."
    quantization = pinned.get("quantization", "none")
    if tuning == "lora" and quantization != model.quantization and QUANTIZATIONS[quantization].bitsandbytes:
        yield "--tuning lora contradicts a quantized load. Use --tuning qlora."
    if pins.full and model.quantization_row.kept:
        yield (
            f"{model.id} is quantized ({model.quantization}), and quantized weights do not learn. "
            f"Use {pins.way(tuning='lora')}, or the model that was not quantized."
        )


def quantization_problems(pins: PinnedJob) -> Iterator[str]:
    """Refuse another quantization than that of a quantized checkpoint, and one that is not possible at load."""
    model, quantization = pins.job.model, pins.pinned.get("quantization")
    if quantization is None or quantization == model.quantization:
        return
    if model.quantization_row.kept:
        yield (
            f"{model.id} is quantized already ({model.quantization}), and cannot be loaded as {quantization}. "
            "Drop that setting, or use the original model."
        )
    elif (row := QUANTIZATIONS[quantization]).published:
        at_load = next(name for name, other in QUANTIZATIONS.items() if other.bitsandbytes and other.bits == row.bits)
        yield (
            f"{model.id} is no {row.words} checkpoint, and is not made one at load. "
            f"Use {pins.way(tuning='qlora', quantization=at_load)}, or a model that was published so."
        )


def quant_storage_problems(pins: PinnedJob) -> Iterator[str]:
    """Refuse a dtype of the storage of 4-bit weights where they would not be sharded."""
    pinned, storage = pins.pinned, pins.pinned.get("bnb_4bit_quant_storage", "uint8")
    if storage == "uint8":
        return
    name = f"bnb_4bit_quant_storage={storage}"
    if pins.job.tuning != "qlora" and not QUANTIZATIONS[pinned.get("quantization", "none")].four_bit:
        yield f"{name} is how 4-bit weights are stored. Use {pins.way(tuning='qlora')}, or drop it."
    row = SCHEMES[pinned.get("sharding", "none")]
    if row.flat_partitions:
        ways = f"{pins.way(sharding='zero3')}, or {pins.way(sharding='fsdp2')}"
        yield f"{name} shards nothing under {row.words}. Use {ways}, or drop it."


def kbit_problems(pins: PinnedJob) -> Iterator[str]:
    """Refuse the preparation of a bitsandbytes base, or of its adapters, without one."""
    quantized = pins.job.tuning == "qlora" or QUANTIZATIONS[pins.pinned.get("quantization", "none")].bitsandbytes
    for name in (name for name in PREPARATIONS if pins.pinned.get(name)):
        if not quantized:
            way = pins.way(tuning="qlora")
            yield f"{name} is about a base that bitsandbytes quantizes. Use {way}, or drop it."


def adapter_problems(pins: PinnedJob) -> Iterator[str]:
    """Refuse adapters on a module that is copied: it gets none (peft 0.21.2, utils/other.py, `_set_trainable`)."""
    for name in pins.pinned.get("lora_modules_to_save", ()):
        if name in pins.pinned.get("lora_target_modules", ()):
            yield f"{name} in lora_modules_to_save is copied, without adapters. Drop it from lora_target_modules."


def checkpointing_problems(pins: PinnedJob) -> Iterator[str]:
    """Refuse a detail of gradient checkpointing while gradient_checkpointing is false."""
    pinned = pins.pinned
    for row in SETTINGS:
        is_set = row.file == "checkpointing" and pinned.get(row.field, DEFAULTS[row.field]) != DEFAULTS[row.field]
        if is_set and pinned.get("gradient_checkpointing") is False:
            yield (
                f"{row.aliases[0]} is a detail of gradient_checkpointing, which is false. "
                f"Use {pins.way(gradient_checkpointing=True)}."
            )


def evaluation_problems(pins: PinnedJob) -> Iterator[str]:
    """Refuse an evaluation that the trainer cannot make, and kept logits of an unknown number of rows."""
    job, pinned = pins.job, pins.pinned
    if pinned.get("eval_strategy", "no") == "no":
        return
    if not METHODS[job.method].evaluates:
        yield f"{METHODS[job.method].trainer} evaluates no rows of text. Use {pins.way(eval_strategy='no')}."
    kept = pinned.get("compute_metrics") and not pinned.get("prediction_loss_only")
    if kept and not pinned.get("eval_rows") and not pinned.get("eval_accumulation_steps"):
        yield (
            "compute_metrics keeps the logits of all rows of the evaluation. "
            f"Add their number, such as {pins.way(eval_rows=100)}, or {pins.way(eval_accumulation_steps=1)}."
        )


def length_problems(pins: PinnedJob) -> Iterator[str]:
    """Refuse rows that are longer than the model's table of positions."""
    model, positions = pins.job.model, pins.job.model.max_position_embeddings
    if not positions or not model.architecture.table_of_positions:
        return
    for field in LENGTH_SETTINGS:
        length = pins.pinned.get(field, 0)
        if has_setting(pins.job.method, field) and length > positions:
            yield (
                f"{field} {format_count(length)} is longer than the {format_count(positions)} positions of "
                f"{model.id}. Use {pins.way(**{field: positions})}."
            )
    prompt, completion = (pins.pinned.get(field, 0) for field in ("prompt_length", "max_completion_length"))
    if METHODS[pins.job.method].generates and prompt < positions < prompt + completion:
        yield (
            f"prompt_length {format_count(prompt)} and max_completion_length {format_count(completion)} are more than "
            f"the {format_count(positions)} positions of {model.id}. "
            f"Use {pins.way(prompt_length=positions - completion)}."
        )


def _instead(pins: PinnedJob) -> str:
    """Return the words for the pinned sharding, where another one is needed; empty without a pin."""
    sharding = pins.pinned.get("sharding")
    return f" (here: {SCHEMES[sharding].words})" if sharding else ""


def sharding_problems(pins: PinnedJob) -> Iterator[str]:
    """Refuse offloading without a sharding that can offload, and processes or nodes that contradict the cluster."""
    pinned, cluster = pins.pinned, pins.cluster
    sharding = pinned.get("sharding")
    instead, row = _instead(pins), SCHEMES[sharding or "ddp"]
    if pinned.get("offload_param") and not row.shards_weights:
        yield f"Only ZeRO-3 and FSDP move parameters to the host{instead}. Use {pins.way(sharding='zero3')}."
    if pinned.get("offload_optimizer") and not row.stage:
        together = pins.way(offload_param=True, offload_optimizer=False)
        way = together if row.offload_setting else pins.way(sharding="zero2")
        yield f"Only DeepSpeed moves the optimizer alone to the host{instead}. Use {way}."
    for name in ZERO_SIZES:
        where = "DeepSpeed's stage 3" if name in STAGE_3_SIZES else "DeepSpeed"
        if name in pinned and not (row.traces_modules if name in STAGE_3_SIZES else row.stage):
            yield f"{name} is read by {where} only{instead}. Use {pins.way(sharding='zero3')}."
    if not row.launched and pinned.get("num_processes", cluster.num_gpus) > 1:
        yield (
            f"distributed_type=NO is one process, and there are {cluster.num_gpus} GPUs. "
            f"Use {pins.way(num_processes=1)}, or {pins.way(sharding='ddp')}."
        )
    if pinned.get("num_nodes", cluster.nodes) != cluster.nodes:
        yield (
            f"num_machines {pinned['num_nodes']} contradicts --gpus, which has {cluster.nodes}: "
            "write the nodes there, as in 4x8xH100."
        )


def mesh_problems(pins: PinnedJob) -> Iterator[str]:
    """Refuse `ep_size` and `tp_size` without Transformers' `distributed_config`."""
    sharding = pins.pinned.get("sharding")
    for name in ("ep_size", "tp_size"):
        if pins.pinned.get(name, 1) > 1 and not SCHEMES[sharding or "ddp"].divides_experts:
            way = pins.way(sharding="distributed")
            yield f"{name} is read in Transformers' distributed_config{_instead(pins)}. Use {way}."


def hybrid_sharding_problems(pins: PinnedJob) -> Iterator[str]:
    """Refuse copies of a sharded model where FSDP2 has none, or that leave no equal groups of several processes.

    Source: accelerate 1.15, parallelism_config.py.
    """
    pinned, sharding = pins.pinned, pins.pinned.get("sharding")
    copies, processes = pinned.get("dp_replicate_size", 1), pinned.get("num_processes", pins.cluster.num_gpus)
    if copies == 1:
        return
    if sharding != "fsdp2":
        way = pins.way(sharding="fsdp2")
        yield f"dp_replicate_size {copies} is FSDP2's hybrid sharding{_instead(pins)}. Use {way}."
    if pinned.get("cp_size", 1) > 1:
        yield "dp_replicate_size and cp_size are not planned together. Drop one of them."
    if processes % copies or copies == processes:
        groups = [size for size in range(1, processes // 2 + 1) if processes % size == 0 and size <= copies]
        yield (
            f"dp_replicate_size {copies} leaves no equal groups of several of the {processes} processes. "
            f"Use {pins.way(dp_replicate_size=max(groups, default=1))}."
        )


def row_sharing_problems(pins: PinnedJob) -> Iterator[str]:
    """Refuse context and sequence parallel where the libraries refuse them.

    Source: accelerate 1.15, parallelism_config.py (`__post_init__`); transformers 5.23, trainer.py
    (`_prepare_context_parallel_inputs`: sdpa); trl 1.16, sft_trainer.py (no packing with context parallel),
    grpo_config.py, rloo_config.py, distillation_config.py; torch 2.13,
    distributed/tensor/experimental/_context_parallel/_attention.py (2 x cp_size, load balancing); deepspeed 0.19.8,
    runtime/sequence_parallel/ulysses_sp.py. Only SFT makes the position_ids that Ulysses needs and a loss of pieces.
    """
    pinned = pins.pinned
    cp_size, sp_size = pinned.get("cp_size", 1), pinned.get("sp_size", 1)
    if cp_size == sp_size == 1:
        return
    name, size = ("cp_size", cp_size) if cp_size > 1 else ("sp_size", sp_size)
    sharding = SHARDING_OF_SHARED_ROWS[name]
    if cp_size > 1 and sp_size > 1:
        yield "accelerate has either cp_size or sp_size above 1. Drop one of them."
    if not METHODS[pins.job.method].shares_rows:
        able = " or ".join(each for each, row in METHODS.items() if row.shares_rows)
        yield (
            f"{name} {size} shares rows between GPUs, which TRL's {able} does, not {pins.job.method}. "
            f"Use --method {able}."
        )
    if pinned.get("sharding") != sharding:
        yield f"{name} {size} is planned with {SCHEMES[sharding].words} only. Use {pins.way(sharding=sharding)}."
    processes = pinned.get("num_processes", pins.cluster.num_gpus)
    if processes % size:
        way = pins.way(**{name: largest_divisor(processes, size)})
        yield f"{name} {size} does not divide num_processes {processes}. Use {way}."
    yield from _row_attention_problems(pins, cp_size, sp_size)


def _row_attention_problems(pins: PinnedJob, cp_size: int, sp_size: int) -> Iterator[str]:
    """Refuse the attention, packing, heads and lengths that cannot be shared."""
    pinned = pins.pinned
    if cp_size > 1 and not pins.job.model.supports_sdpa:
        yield f"{pins.job.model.id} does not run with sdpa, which cp_size {cp_size} needs. Drop cp_size."
    if cp_size > 1 and pinned.get("packing"):
        way = pins.way(packing=False)
        yield f"cp_size drops the mask between packed documents, so TRL refuses packing with it. Use {way}."
    for heads in {layer.attention.num_attention_heads for layer, _ in pins.job.model.layer_kinds}:
        if heads % sp_size:
            way = pins.way(sp_size=largest_divisor(heads, sp_size))
            yield f"sp_size {sp_size} does not divide {heads} heads. Use {way}."
    pieces, length = (2 * cp_size if cp_size > 1 else sp_size), pinned.get("max_length", 0)
    if length % pieces:
        way = pins.way(max_length=max(length // pieces, 1) * pieces)
        yield f"max_length {length} is no multiple of {pieces}. Use {way}."


def engine_problems(pins: PinnedJob) -> Iterator[str]:
    """Refuse a vLLM engine that does not fit the cluster, and settings of an engine without one.

    Its GPUs are at most those of the cluster; its tensor parallel size divides the attention heads and the processes.
    """
    pinned, cluster, model = pins.pinned, pins.cluster, pins.job.model
    mode, size = pinned.get("vllm"), pinned.get("vllm_tensor_parallel_size", 1)
    unused = [field for field in ENGINE_FIELDS if field in pinned]
    if mode == "off" and unused:
        yield f"{unused[0]} is read with vLLM only, and use_vllm is false. Use {pins.way(vllm='colocate')}."
    needed = server_gpus(pinned)
    if mode == "server" and pinned.get("vllm_enable_sleep_mode"):
        yield (
            "vllm_enable_sleep_mode is for a colocated engine: a server has its GPUs to itself. "
            f"Drop it, or use {pins.way(vllm='colocate')}."
        )
    if mode == "server" and needed >= cluster.num_gpus:
        ways = [] if "vllm" in METHODS[pins.job.method].fixed else [str(pins.way(vllm="colocate"))]
        ways += ["fewer GPUs for the server"] if needed > 1 else []
        yield (
            f"A vLLM server on {needed} of {cluster.num_gpus} GPUs leaves none for the trainer. "
            f"Use {', or '.join(ways or ['more GPUs'])}."
        )
    if size > cluster.num_gpus:
        yield (
            f"vllm_tensor_parallel_size {size} needs as many GPUs, and there are {cluster.num_gpus}. "
            f"Use {pins.way(vllm_tensor_parallel_size=cluster.num_gpus)}."
        )
    processes = pinned.get("num_processes", cluster.num_gpus)
    if part := undivided(model, size):
        fitting = nearest_size(model, size, None if mode == "server" else processes)
        yield f"{part} do not divide over {size} GPUs. Use {pins.way(vllm_tensor_parallel_size=fitting)}."
    if mode != "server" and processes % size and (mode == "colocate" or needed >= cluster.num_gpus):
        fitting = largest_divisor(processes, min(size, processes))
        way = pins.way(vllm_tensor_parallel_size=fitting)
        yield f"vllm_tensor_parallel_size {size} does not divide the {processes} processes. Use {way}."


def batch_problems(pins: PinnedJob) -> Iterator[str]:
    """Refuse an effective batch that is not made of whole micro-batches and groups.

    Source: trl 1.16, grpo_config.py, `GRPOConfig.__post_init__`.
    """
    wanted, pinned = pins.job.effective_batch_size, pins.pinned
    processes, group = _process_counts(pins), _group(pins.job)
    if not processes:
        return  # refused by engine_problems or with the whole candidate
    batch, accumulation = pinned.get("per_device_train_batch_size"), pinned.get("gradient_accumulation_steps")
    share = (batch or 1) * (accumulation or 1)
    batches = [pins.batches(count) for count in processes]
    if wanted is None:
        if not (batch and accumulation):
            yield from _split_groups(pins, share if batch else share * DEFAULT_BATCH_SIZE, processes, group)
    elif batch and accumulation and wanted not in [count * share for count in batches]:
        yield (
            f"--effective-batch-size {wanted} contradicts per_device_train_batch_size {batch} and "
            f"gradient_accumulation_steps {accumulation} on {processes[0]} GPUs, which make {batches[0] * share}. "
            "Drop one of the three."
        )
    elif all(wanted % lcm(count * share, group) for count in batches):
        unit = lcm(batches[0] * share, group)
        near = [size for size in (wanted // unit * unit, (wanted // unit + 1) * unit) if size]
        parts = f"micro-batches of {share}" if share > 1 else "samples"
        groups = f" and groups of {group}" if group > 1 else ""
        yield (
            f"--effective-batch-size {wanted} is not made of whole {parts} on {processes[0]} GPUs{groups}. "
            f"Use {' or '.join(map(str, near))}."
        )


def _split_groups(pins: PinnedJob, share: int, processes: list[int], group: int) -> Iterator[str]:
    """Refuse `share` completions per process that are no whole groups with any of the numbers of processes."""
    if any(share * count % group == 0 for count in processes):
        return
    size = share * processes[0]
    divisor = largest_divisor(size, min(group, size))
    instead = f", or {pins.way(num_generations=divisor)}" if divisor > 1 else ""
    yield (
        f"num_generations {group} does not divide the {size} completions of an optimizer step ({share} on each of "
        f"{processes[0]} GPUs). Use --effective-batch-size {lcm(size, group)}{instead}."
    )


def _group(job: Job) -> int:
    """Return the completions of one prompt, which stay in one optimizer step; 1 if steps_per_generation is pinned.

    Generation batches of another size than an optimizer step are checked with the whole candidate.
    """
    if not has_setting(job.method, "num_generations") or "steps_per_generation" in job.pinned:
        return 1
    # trl 1.16, grpo_config.py, `GRPOConfig.num_generations`
    default = METHODS[job.method].defaults_in(job.trl_version).get("num_generations", 8)
    group = job.pinned.get("num_generations", default)
    assert isinstance(group, int)
    return group


def _process_counts(pins: PinnedJob) -> list[int]:
    """Return the possible numbers of training processes, the likeliest first; none if a server leaves no GPU."""
    pinned, cluster = pins.pinned, pins.cluster
    if "num_processes" in pinned:
        return [pinned["num_processes"]]
    whole = [cluster.num_gpus] if pinned.get("vllm") != "server" else []
    if not METHODS[pins.job.method].supports_vllm or pinned.get("vllm") in ("off", "colocate"):
        return whole
    needed = server_gpus(pinned)  # a size that is not pinned is 1 here
    return whole + [processes for size, processes in cluster.server_shares if size % needed == 0 or cluster.nodes > 1]


def largest_divisor(number: int, at_most: int) -> int:
    """Return the largest divisor of `number` that is not above `at_most`."""
    return next(divisor for divisor in range(at_most, 0, -1) if number % divisor == 0)


# A rule yields an error message for each contradiction that it finds.
RULES: tuple[Callable[[PinnedJob], Iterator[str]], ...] = (
    method_problems,
    image_problems,
    tuning_problems,
    quantization_problems,
    quant_storage_problems,
    kbit_problems,
    adapter_problems,
    checkpointing_problems,
    evaluation_problems,
    length_problems,
    sharding_problems,
    mesh_problems,
    hybrid_sharding_problems,
    row_sharing_problems,
    engine_problems,
    batch_problems,
)

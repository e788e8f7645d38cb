"""Contradictions of one complete candidate with its GPU, its cluster and its method.

Those between the settings that a job pins, and texts that both need, are in rules.py.
"""

from collections.abc import Iterator
from math import lcm

from planner.candidate import FLASH, Candidate
from planner.errors import InputError
from planner.gpus.cluster import Cluster
from planner.jobs.image_rules import IMAGES_EXPANDED_TWICE
from planner.jobs.job import Job
from planner.jobs.rules import (
    OFFLOADED_TWICE,
    OTHER_OPTIMIZER,
    PACKED_FOR_SERVER,
    TOWER_WITHOUT_IMAGES,
    UNKEPT_DTYPE,
    WEIGHTS_OFFLOADED,
    largest_divisor,
    whole_only,
)


def refuse_candidate(candidate: Candidate, job: Job, cluster: Cluster) -> None:
    """Check a complete candidate against the GPU, the cluster and its method.

    Raises:
        InputError: the first contradiction found.
    """
    for problem in (
        *card_problems(candidate, cluster),
        *placement_problems(candidate, cluster),
        *candidate_method_problems(candidate, job),
    ):
        raise InputError(problem)


def card_problems(candidate: Candidate, cluster: Cluster) -> Iterator[str]:
    """Refuse bf16, TF32 and FlashAttention on a GPU below compute capability 8.0."""
    gpu = cluster.gpu
    if candidate.tf32 and gpu.compute_capability < (8, 0):
        yield f"{gpu.name} has no TF32 (compute capability {gpu.compute_capability[0]}; it needs 8.0). Drop tf32."
    if candidate.precision == "bf16" and not gpu.supports_bf16:
        major, minor = gpu.compute_capability
        yield (
            f"{gpu.name} has no bfloat16 (compute capability {major}.{minor}; it needs 8.0). "
            "Use --set fp16=true --set bf16=false."
        )
    cast = candidate.scheme_row.casts == "module" and candidate.precision == "fp16"  # DeepSpeed casts the teacher
    teacher = "" if cast or not candidate.method_row.teacher else candidate.teacher_load_dtype
    if teacher == "bfloat16" and not gpu.supports_bf16:
        yield f"{gpu.name} has no bfloat16, in which the teacher is loaded. Use --set teacher_dtype=float16."
    flash = candidate.attn_implementation in FLASH
    if flash and not gpu.supports_flash_attention_2:
        yield f"{candidate.attn_implementation} does not run on {gpu.name}. Use --set attn_implementation=sdpa."


def refuse_single_candidate(candidate: Candidate) -> None:
    """Check one candidate for what its kernels and libraries stop at, and that groups of completions stay whole.

    A search leaves out such candidates itself.

    Raises:
        InputError: FlashAttention would get float32, eager attention a piece of a row, ZeRO-3 would have the head on
            its way, offloaded weights or another dtype, the optimizer would stop, DDP would wait for a tower, vLLM
            would not get weights, the reference would be read on the CPU, or a group would be split.
    """
    for problems in (group_problems, sharded_model_problems, engine_stops, attention_problems):
        for problem in problems(candidate):
            raise InputError(problem)


def sharded_model_problems(candidate: Candidate) -> Iterator[str]:
    """Refuse what DDP, FSDP2, ZeRO or the optimizer stop at in the first steps, and a dtype that ZeRO-3 changes."""
    adapted = candidate.tuning == "lora" and candidate.scheme_row.prepares_late
    if candidate.method_row.precomputes_reference and candidate.precompute_ref_log_probs and adapted:
        yield (
            "precompute_ref_log_probs stops under FSDP2 with adapters: their model is still on the CPU when TRL 1.16 "
            "computes them. Use --set precompute_ref_log_probs=false, or --set zero_stage=3."
        )
    if candidate.prefetches_read_head:
        yield (
            f"{candidate.method} in full with ds3_gather_for_generation=false stops where ZeRO-3 gathers ahead: "
            "the head is on its way when TRL's loss gathers it. Use --set stage3_prefetch_bucket_size=0."
        )
    if candidate.optimizer_stop:
        yield f"{candidate.optimizer_stop} {OTHER_OPTIMIZER}"
    if candidate.activation_offloading_stops:
        yield WEIGHTS_OFFLOADED
    if candidate.keeps_offloaded_twice:
        yield OFFLOADED_TWICE
    if candidate.unkept_dtype:
        yield UNKEPT_DTYPE.format(dtype=candidate.dtype)
    if candidate.waits_for_tower:
        yield TOWER_WITHOUT_IMAGES.format(model=candidate.model.id)


def engine_stops(candidate: Candidate) -> Iterator[str]:
    """Refuse what a vLLM engine does not get, or gets wrong."""
    if candidate.engine_spoils_images:
        yield IMAGES_EXPANDED_TWICE
    if candidate.engine_refuses_base:
        yield candidate.quantization_row.engine_stop or PACKED_FOR_SERVER


def attention_problems(candidate: Candidate) -> Iterator[str]:
    """Refuse attention that cannot share a row, or has no kernel for the dtype."""
    if candidate.row_gpus > 1 and candidate.attn_implementation == "eager":
        yield (
            f"{candidate.model.id} runs with eager attention, which cannot share a row between GPUs. "
            "Use --set attn_implementation=flash_attention_2."
        )
    if candidate.attn_implementation in FLASH and candidate.float32_attention:
        yield (
            f"{candidate.attn_implementation} has kernels for 16 bits only, and {candidate.method} computes attention "
            "in float32 here. Use --set dtype=bfloat16, or --set attn_implementation=sdpa."
        )


def placement_problems(candidate: Candidate, cluster: Cluster) -> Iterator[str]:
    """Refuse more training processes and GPUs of a vLLM server than the cluster has GPUs."""
    processes, server, size = candidate.num_processes, candidate.server_gpus, candidate.vllm_tensor_parallel_size
    if processes > cluster.num_gpus:
        yield (
            f"num_processes {processes} needs as many GPUs, and there are {cluster.num_gpus}. "
            f"Use num_processes={cluster.num_gpus}."
        )
    elif server and processes + server > cluster.num_gpus:
        yield (
            f"num_processes {processes} and a vLLM server on {server} of the same {cluster.num_gpus} GPUs would share "
            f"cards: the server keeps {candidate.vllm_gpu_memory_utilization:.0%} of its card for itself and the "
            "trainer runs out of memory there. "
            f"Use num_processes={cluster.trainer_gpus(server)}, or vllm_mode=colocate."
        )
    elif server and cluster.nodes > 1 and processes > cluster.trainer_gpus(server):
        yield (
            f"num_processes {processes} and a vLLM server do not fit {cluster.nodes} nodes of {cluster.gpus_per_node}: "
            f"the server has a node of its own. Use num_processes={cluster.trainer_gpus(server)}."
        )
    elif candidate.vllm == "colocate" and processes % size:
        yield f"vllm_tensor_parallel_size {size} does not divide num_processes {processes}."


def candidate_method_problems(candidate: Candidate, job: Job) -> Iterator[str]:
    """Refuse a batch below the method's smallest, no room for a prompt, split groups, and vLLM without support."""
    row, batch = candidate.method_row, candidate.per_device_train_batch_size
    if batch < row.smallest_batch:
        yield (f"{candidate.method} needs a per_device_train_batch_size of at least {row.smallest_batch}, not {batch}.")
    if not candidate.scheme_row.whole and candidate.whole_model_setting:
        yield whole_only(candidate.whole_model_setting, candidate.sharding)
    if candidate.vllm != "off" and not row.supports_vllm:
        yield f"{candidate.method} does not generate with vLLM. Drop use_vllm."
    if row.bounded_rows and candidate.max_completion_length >= candidate.max_length:
        yield (
            f"max_new_tokens {candidate.max_completion_length} leaves no room for a prompt in max_length "
            f"{candidate.max_length}. Raise --max-length."
        )
    if {"per_device_train_batch_size", "gradient_accumulation_steps"} <= job.pinned.keys():
        yield from group_problems(candidate)


def group_problems(candidate: Candidate) -> Iterator[str]:
    """Refuse a generation batch, of the training or of an evaluation, that is not made of whole groups of completions.

    Source: trl 1.16, trainer/grpo_config.py, `GRPOConfig.__post_init__`.
    """
    evaluated = candidate.per_device_eval_batch_size * candidate.num_processes
    group = candidate.num_generations_eval or candidate.num_generations
    if candidate.method_row.grouped_completions and candidate.eval_strategy != "no" and evaluated % group:
        fitting = lcm(candidate.num_processes, group) // candidate.num_processes
        yield (
            f"per_device_eval_batch_size {candidate.per_device_eval_batch_size} on {candidate.num_processes} GPUs is "
            f"no multiple of {group} completions per prompt. Use --set per_device_eval_batch_size={fitting}."
        )
    batch, size = candidate.per_device_train_batch_size, generation_batch(candidate)
    if candidate.method_row.grouped_completions and size % candidate.num_generations:
        fitting = largest_divisor(size, candidate.num_generations)
        yield (
            f"A generation batch of {size} completions (per_device_train_batch_size x num_processes x "
            f"steps_per_generation = {batch} x {candidate.num_processes} x {candidate.steps_per_generation}) is no "
            f"multiple of num_generations {candidate.num_generations}. "
            f"Use num_generations={fitting}, or a batch that is."
        )


def generation_batch(candidate: Candidate) -> int:
    """Return the completions sampled at once over all processes.

    Source: trl 1.16, grpo_config.py, `GRPOConfig.__post_init__`.
    """
    return candidate.per_device_train_batch_size * candidate.num_processes * candidate.steps_per_generation

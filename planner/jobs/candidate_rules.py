"""Contradictions of one complete candidate with its GPU, its cluster and its method.

Those between the settings that a job pins, and texts that both need, are in rules.py.
"""

from collections.abc import Iterator
from itertools import chain
from math import lcm

from planner.candidate import Candidate
from planner.errors import InputError
from planner.gpus.cluster import Cluster
from planner.jobs.job import Job, PinnedJob
from planner.jobs.rules import largest_divisor
from planner.jobs.stops import STOPS


def refuse_candidate(candidate: Candidate, job: Job, cluster: Cluster) -> None:
    """Check a complete candidate against the cluster and its method.

    Raises:
        InputError: the first contradiction found.
    """
    for problem in (
        *placement_problems(candidate, PinnedJob(job=job, cluster=cluster)),
        *candidate_method_problems(candidate, PinnedJob(job=job, cluster=cluster)),
    ):
        raise InputError(problem)


def refuse_single_candidate(candidate: Candidate, job: Job, cluster: Cluster) -> None:
    """Refuse a candidate that splits a group of completions or meets a stop; a search never proposes one.

    Raises:
        InputError: names the group or the stop.
    """
    pins = PinnedJob(job=job, cluster=cluster)
    for problem in chain(group_problems(candidate, pins), stop_problems(candidate, pins)):
        raise InputError(problem)


def stop_problems(candidate: Candidate, pins: PinnedJob) -> Iterator[str]:
    """Yield the sentence of each stop that a candidate meets, unless the stop is estimated all the same."""
    for stop in STOPS:
        if not stop.estimated and stop.when(candidate, pins.cluster):
            yield stop.sentence(candidate, pins.cluster, pins.job.given)


def placement_problems(candidate: Candidate, pins: PinnedJob) -> Iterator[str]:
    """Refuse more training processes and GPUs of a vLLM server than the cluster has GPUs."""
    cluster = pins.cluster
    processes, server, size = candidate.num_processes, candidate.server_gpus, candidate.vllm_tensor_parallel_size
    if processes > cluster.num_gpus:
        yield (
            f"num_processes {processes} needs as many GPUs, and there are {cluster.num_gpus}. "
            f"Use {pins.way(num_processes=cluster.num_gpus)}."
        )
    elif server and processes + server > cluster.num_gpus:
        yield (
            f"num_processes {processes} and a vLLM server on {server} of the same {cluster.num_gpus} GPUs would share "
            f"cards: the server keeps {candidate.vllm_gpu_memory_utilization:.0%} of its card for itself and the "
            "trainer runs out of memory there. "
            f"Use {pins.way(num_processes=cluster.trainer_gpus(server))}, or {pins.way(vllm='colocate')}."
        )
    elif server and cluster.nodes > 1 and processes > cluster.trainer_gpus(server):
        yield (
            f"num_processes {processes} and a vLLM server do not fit {cluster.nodes} nodes of {cluster.gpus_per_node}: "
            f"the server has a node of its own. Use {pins.way(num_processes=cluster.trainer_gpus(server))}."
        )
    elif candidate.vllm == "colocate" and processes % size:
        way = pins.way(vllm_tensor_parallel_size=largest_divisor(processes, min(size, processes)))
        yield f"vllm_tensor_parallel_size {size} does not divide num_processes {processes}. Use {way}."


def candidate_method_problems(candidate: Candidate, pins: PinnedJob) -> Iterator[str]:
    """Refuse a batch below the method's smallest, no room for a prompt, split groups, and vLLM without support."""
    row, batch = candidate.method_row, candidate.per_device_train_batch_size
    if batch < candidate.smallest_batch:
        way = pins.way(per_device_train_batch_size=candidate.smallest_batch)
        yield (
            f"{candidate.method} needs a per_device_train_batch_size of at least {candidate.smallest_batch}, "
            f"not {batch}. Use {way}."
        )
    if candidate.vllm != "off" and not row.supports_vllm:
        yield f"{candidate.method} does not generate with vLLM. Drop use_vllm."
    if row.bounded_rows and candidate.max_completion_length >= candidate.max_length:
        yield (
            f"max_new_tokens {candidate.max_completion_length} leaves no room for a prompt in max_length "
            f"{candidate.max_length}. Raise --max-length."
        )
    # Source: trl 1.16, experimental/async_grpo/async_grpo_trainer.py, `TokenBudgetBatcher`.
    sample = min(candidate.row_tokens, candidate.vllm_max_model_length or candidate.row_tokens)
    if 0 < candidate.token_budget < sample:
        yield (
            f"token_budget {candidate.token_budget} leaves out every sample of {sample} tokens (prompt and "
            f"completion). Use {pins.way(token_budget=sample)}, or shorter completions."
        )
    if {"per_device_train_batch_size", "gradient_accumulation_steps"} <= pins.pinned.keys():
        yield from group_problems(candidate, pins)


def group_problems(candidate: Candidate, pins: PinnedJob) -> Iterator[str]:
    """Refuse a generation batch, of the training or of an evaluation, that is not made of whole groups of completions.

    Source: trl 1.16, trainer/grpo_config.py, `GRPOConfig.__post_init__`.
    """
    evaluated = candidate.per_device_eval_batch_size * candidate.num_processes
    group = candidate.num_generations_eval or candidate.num_generations
    if candidate.method_row.grouped_completions and candidate.eval_strategy != "no" and evaluated % group:
        fitting = lcm(candidate.num_processes, group) // candidate.num_processes
        yield (
            f"per_device_eval_batch_size {candidate.per_device_eval_batch_size} on {candidate.num_processes} GPUs is "
            f"no multiple of {group} completions per prompt. Use {pins.way(per_device_eval_batch_size=fitting)}."
        )
    batch = candidate.per_device_train_batch_size
    size = batch * candidate.num_processes * candidate.steps_per_generation
    if candidate.method_row.grouped_completions and size % candidate.num_generations:
        fitting = largest_divisor(size, candidate.num_generations)
        way = f"Use {pins.way(num_generations=fitting)}, or " if fitting > 1 else "Use "
        yield (
            f"A generation batch of {size} completions (per_device_train_batch_size x num_processes x "
            f"steps_per_generation = {batch} x {candidate.num_processes} x {candidate.steps_per_generation}) is no "
            f"multiple of num_generations {candidate.num_generations}. "
            f"{way}a batch that is."
        )

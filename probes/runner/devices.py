"""The devices that probes run on. A device is a function that takes a candidate and returns its measurement."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from msgspec import Struct, field
from msgspec.structs import replace

from planner.candidate import Candidate
from planner.errors import InputError
from planner.estimation import worst_batch
from planner.gpus.cluster import Cluster
from planner.gpus.local import NAME_A_CARD
from planner.launch.placement import placement
from planner.measurements.measurement import USUAL_STEPS, DeviceName, Measurement
from planner.memory.parameters.trained import trained_groups
from planner.units import GIB, format_gib
from probes.runner.command import worker_command
from probes.runner.gpus_in_use import Card, tolerated_bytes, visible_cards
from probes.runner.runner import Command, WorkerLimits, no_cards, run_probe
from probes.task import Rendezvous, Task, WorkerDevice, usual_steps

Probe = Callable[[Candidate], Measurement]

# Processes that an emulated probe starts: as many as the cores of a small machine. Of more, the first stands for all.
REAL_PROCESSES = 2
CHECKPOINT_BYTES_PER_PARAMETER = 12  # a weight and two states of AdamW in float32
LARGEST_CHECKPOINT_BYTES = 4 * GIB


class DeviceOptions(Struct, frozen=True, kw_only=True):
    """Settings of how probes run, for all candidates.

    `logs`: folder that keeps the workers' logs. `folder`: where a worker's files lie while it runs; empty for the
    system's temporary folder.
    """

    logs: Path
    folder: str = ""
    limits: WorkerLimits = field(default_factory=WorkerLimits)
    steps: int = USUAL_STEPS
    weights: Literal["random", "hub"] = "random"
    save: bool = True
    evaluate: bool = False
    resume: bool = True
    seed: int = 0
    say: Callable[[str], None] = lambda _: None  # called with each phase that a worker enters
    command: Command = worker_command
    rendezvous: Rendezvous | None = None  # of several nodes that run one probe


def device(name: DeviceName, cluster: Cluster, options: DeviceOptions) -> Probe:
    """Return the probe function of a device, with the GPUs of a cluster.

    `cuda` uses this machine's GPUs, `emulated` the same programs on a driver without a GPU, `cpu` this machine's main
    memory with a GPU's capacity as limit.

    Raises:
        InputError: this machine has fewer or smaller GPUs than the cluster.
    """
    return DEVICES[name](cluster, options)


def cuda(cluster: Cluster, options: DeviceOptions) -> Probe:
    """Return a probe on this machine's GPUs; of larger GPUs workers use only the capacity of the cluster's.

    Not yet run on a GPU.
    """
    refuse_several_nodes(cluster)
    capacity_bytes = capacity_limit_bytes(cluster, visible_cards(cluster.gpus_per_node))
    limits = replace(options.limits, free_gpu_bytes=cluster.gpu.free_bytes)

    def cards(task: Task) -> tuple[Card, ...]:
        return visible_cards(placement(task.candidate).gpus_per_node)

    def probe(candidate: Candidate) -> Measurement:
        task = replace(
            _task(worst_batch(candidate, cluster), "cuda", capacity_bytes, options),
            card_bytes=cluster.gpu.total_bytes if capacity_bytes else 0,
        )
        found = run_probe(task, limits, options.logs, options.command, cards, options.say)
        return replace(found, candidate=candidate)

    return probe


def emulated(cluster: Cluster, options: DeviceOptions) -> Probe:
    """Return a probe on emulated GPUs of the cluster: the CUDA stack, with a driver that counts and runs no kernel.

    Of more than `REAL_PROCESSES` processes only rank 0 runs, unless they have a vLLM engine, which waits for the
    others. A checkpoint above `LARGEST_CHECKPOINT_BYTES` is not written: its bytes are real.

    Raises:
        InputError: the libraries cannot be built here; the message names the reason.
    """
    from probes.emulated_gpu.build import built_libraries
    from probes.emulated_gpu.machine import Machine
    from probes.emulated_gpu.start import machine_environment

    built_libraries()  # so that what is lacking is said now

    def variables(task: Task) -> dict[str, str]:
        machine = Machine(gpu=cluster.gpu, cards=placement(task.candidate).gpus_per_node, one_of_many=task.one_of_many)
        return machine_environment(machine, Path(task.folder))

    def probe(candidate: Candidate) -> Measurement:
        saves = options.save and checkpoint_bytes(candidate) <= LARGEST_CHECKPOINT_BYTES
        task = replace(
            _task(worst_batch(candidate, cluster), "emulated", 0, options),
            save=saves,
            one_of_many=candidate.num_processes > REAL_PROCESSES and candidate.vllm == "off",
        )
        found = run_probe(task, options.limits, options.logs, options.command, no_cards, options.say, variables)
        return replace(found, candidate=candidate)

    return probe


def checkpoint_bytes(candidate: Candidate) -> int:
    """Return about the bytes of a checkpoint: trained parameters and two optimizer states, in float32 at most."""
    parameters = sum(tensors.params for tensors, _ in trained_groups(candidate))
    return parameters * CHECKPOINT_BYTES_PER_PARAMETER


def cpu(cluster: Cluster, options: DeviceOptions) -> Probe:
    """Return a probe on the CPU: real training steps whose tensors may not exceed the capacity of the cluster's GPU."""
    refuse_several_nodes(cluster)

    def probe(candidate: Candidate) -> Measurement:
        task = _task(candidate, "cpu", cluster.gpu.free_bytes, options)
        return run_probe(task, options.limits, options.logs, options.command, no_cards, options.say)

    return probe


DEVICES: dict[DeviceName, Callable[[Cluster, DeviceOptions], Probe]] = {
    "cuda": cuda,
    "cpu": cpu,
    "emulated": emulated,
}


def refuse_several_nodes(cluster: Cluster) -> None:
    """Raise InputError for a cluster of several nodes."""
    if cluster.nodes > 1:
        raise InputError(
            f"A probe runs on one machine, the cluster has {cluster.nodes}. Probe all of them as nodes of a Ray "
            f"cluster with --ray auto, or one with --gpus {cluster.gpus_per_node}x{cluster.gpu.name}."
        )


def capacity_limit_bytes(cluster: Cluster, cards: tuple[Card, ...]) -> int:
    """Return the bytes that a worker may use of each GPU: the cluster's capacity if this machine's is larger, else 0.

    0 means no limit.

    Raises:
        InputError: this machine has fewer GPUs than the cluster, or smaller ones.
    """
    wanted = cluster.gpu.free_bytes
    if len(cards) < cluster.gpus_per_node:
        raise InputError(
            f"The plan is for {cluster.gpus_per_node} GPUs, this machine shows {len(cards)}. "
            f"Plan with --gpus local. {NAME_A_CARD}"
        )
    smaller = [card for card in cards if card.total_bytes < wanted - tolerated_bytes(card)]
    if smaller:
        has = format_gib(smaller[0].total_bytes)
        raise InputError(
            f"The plan is for GPUs with {format_gib(wanted)}, GPU {smaller[0].index} of this machine has {has}. "
            "Plan with --gpus local."
        )
    larger = any(wanted < card.total_bytes - tolerated_bytes(card) for card in cards)
    return wanted if larger else 0


def _task(candidate: Candidate, name: WorkerDevice, capacity_bytes: int, options: DeviceOptions) -> Task:
    return Task(
        candidate=candidate,
        device=name,
        folder=options.folder,
        steps=max(options.steps, usual_steps(candidate)),
        weights=options.weights,
        save=options.save,
        evaluate=options.evaluate,
        resume=options.resume,
        capacity_bytes=capacity_bytes,
        seed=options.seed,
        rendezvous=options.rendezvous,
    )

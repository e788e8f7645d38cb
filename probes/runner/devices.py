"""The devices that a probe runs on. A device is a function: a candidate in, its measurement out."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from planner.candidate import Candidate
from planner.errors import InputError
from planner.gpus.cluster import Cluster
from planner.gpus.local import NAME_A_CARD
from planner.launch.placement import placement
from planner.measurements.measurement import DeviceName, Measurement
from planner.units import format_gib
from probes.runner.command import worker_command
from probes.runner.gpus_in_use import Card, unnoticed_bytes, visible_cards
from probes.runner.runner import Command, Limits, no_cards, run_probe
from probes.runner.verdict import Stop, nothing_measured
from probes.task import Task

# Source: accelerate 1.15, state.py:986-1013: `fsdp_plugin` counts where `distributed_type` is that of several accelerators; else every process has all.
NOT_SHARDED = Stop(
    outcome="crashed",
    message="accelerate shards with FSDP2 on accelerators only, not on the CPU: probe zero3 instead, or on the GPUs",
)

Probe = Callable[[Candidate], Measurement]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceOptions:
    """How probes run, whichever the candidate. `logs` is kept; `folder`, empty for the system's temporary one, holds a worker's files while it runs."""

    logs: Path
    folder: str = ""
    limits: Limits = field(default_factory=Limits)
    steps: int = 2
    weights: Literal["random", "hub"] = "random"
    save: bool = True
    evaluate: bool = False
    resume: bool = True
    seed: int = 0
    say: Callable[[str], None] = lambda _: None  # told each phase when a worker enters it
    command: Command = worker_command


def device(name: DeviceName, cluster: Cluster, options: DeviceOptions) -> Probe:
    """A device whose cards are those of a cluster: `cuda` the GPUs of this machine, `cpu` its main memory as if it were such cards, `simulated` none.

    Raises:
        InputError: this machine cannot stand for the cluster.
    """
    return DEVICES[name](cluster, options)


def cuda(cluster: Cluster, options: DeviceOptions) -> Probe:
    """The GPUs of this machine; on larger or freer ones than the cluster's a worker keeps to what these have. Not yet run on a GPU."""
    refuse_several_nodes(cluster)
    capacity_bytes = capacity_to_keep_to(cluster, visible_cards(cluster.gpus_per_node))
    limits = replace(options.limits, free_gpu_bytes=cluster.gpu.free_bytes)

    def cards(task: Task) -> tuple[Card, ...]:
        return visible_cards(placement(task.candidate).gpus_per_node)

    def probe(candidate: Candidate) -> Measurement:
        task = replace(
            _task(candidate, "cuda", capacity_bytes, options),
            card_bytes=cluster.gpu.total_bytes if capacity_bytes else 0,
        )
        return run_probe(task, limits, options.logs, options.command, cards, options.say)

    return probe


def cpu(cluster: Cluster, options: DeviceOptions) -> Probe:
    """Real runs anywhere: the bytes of tensors are counted, and may not be more than a card of the cluster has."""
    refuse_several_nodes(cluster)

    def probe(candidate: Candidate) -> Measurement:
        task = _task(candidate, "cpu", cluster.gpu.free_bytes, options)
        if candidate.sharding == "fsdp2":
            return nothing_measured(task, NOT_SHARDED, 0.0, "")
        return run_probe(task, options.limits, options.logs, options.command, no_cards, options.say)

    return probe


def simulated(cluster: Cluster, options: DeviceOptions) -> Probe:
    from probes.runner.simulated_card import (
        simulated_probe,
    )  # imports torch, which the processes of the other devices do for themselves

    return lambda candidate: simulated_probe(candidate, cluster)


DEVICES: dict[DeviceName, Callable[[Cluster, DeviceOptions], Probe]] = {
    "cuda": cuda,
    "cpu": cpu,
    "simulated": simulated,
}


def refuse_several_nodes(cluster: Cluster) -> None:
    if cluster.nodes > 1:
        raise InputError(
            f"A probe runs on one machine, the cluster has {cluster.nodes}. Probe one node with --gpus {cluster.gpus_per_node}x{cluster.gpu.name}, or write "
            "the launch files with plan export and run its slurm.sh for a few steps: it gives each node its --machine_rank."
        )


def capacity_to_keep_to(cluster: Cluster, cards: tuple[Card, ...]) -> int:
    """What a worker may use of each card: that of the cluster where the card here has more, 0 for all of it.

    Raises:
        InputError: fewer cards here than the cluster has, or smaller ones.
    """
    wanted = cluster.gpu.free_bytes
    if len(cards) < cluster.gpus_per_node:
        raise InputError(
            f"The plan is for {cluster.gpus_per_node} GPUs, this machine shows {len(cards)}. Plan with --gpus local. {NAME_A_CARD}"
        )
    smaller = [card for card in cards if card.total_bytes < wanted - unnoticed_bytes(card)]
    if smaller:
        has = format_gib(smaller[0].total_bytes)
        raise InputError(
            f"The plan is for GPUs with {format_gib(wanted)}, GPU {smaller[0].index} of this machine has {has}. Plan with --gpus local."
        )
    larger = any(wanted < card.total_bytes - unnoticed_bytes(card) for card in cards)
    return wanted if larger else 0


def _task(candidate: Candidate, name: Literal["cuda", "cpu"], capacity_bytes: int, options: DeviceOptions) -> Task:
    return Task(
        candidate=candidate, device=name, folder=options.folder, steps=options.steps, weights=options.weights, save=options.save, evaluate=options.evaluate,
        resume=options.resume, capacity_bytes=capacity_bytes, seed=options.seed,
    )  # fmt: skip

"""Run probes as tasks on the nodes of a Ray cluster, on GPUs that a placement group reserves.

Ray chooses the nodes and waits for their GPUs. On a node the task runs the device of devices.py: in its own process,
with its limits and its verdict, and removes everything afterwards. On several nodes the launchers of the tasks meet, as
those of slurm.sh do. A probe that loses a worker or a node runs again, on all its nodes.
"""

import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeAlias

import ray
from msgspec import Struct
from msgspec.structs import replace
from ray.exceptions import NodeDiedError, OutOfMemoryError, RayError, RayTaskError, WorkerCrashedError
from ray.util import get_node_ip_address
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from planner.candidate import Candidate
from planner.errors import InputError, PlanError, one_line
from planner.gpus.cluster import Cluster
from planner.launch.placement import placement
from planner.measurements.measurement import DeviceName, Measurement, Outcome, without_memory
from planner.units import format_seconds
from probes.runner.devices import DeviceOptions, Probe, device
from probes.runner.verdict import MESSAGE_CHARACTERS
from probes.task import Rendezvous, free_port

ATTEMPTS = 4  # of a probe that loses a worker or node, as a Ray task's by default (`max_retries` 3)
# How long a probe waits where no node is alive that has its GPUs.
# Source: ray 2.60, autoscaler/_private/constants.py, AUTOSCALER_NODE_START_WAIT_S.
NODE_START_SECONDS = 900.0
GOES_ON = "The same command goes on when it is back."
LOOK_SECONDS = 5.0  # between two looks at the nodes
# How long the other nodes of a probe may run on when one has failed: torchrun gives its processes 30 s to end, and Ray
# finds out in 25 s that a node is lost. Source: torch 2.13, distributed/elastic/multiprocessing/api.py, `close`; ray
# 2.60, RayConfig: health_check_period_ms x health_check_failure_threshold + health_check_timeout_ms.
LAST_WORDS_SECONDS = 60.0
END_SECONDS = 10.0  # how long to wait for the end of a task whose placement group is gone
SERVER_APART = "A vLLM server on a node of its own is not probed: probe one node, or run slurm.sh of plan export."
THREADS = "OMP_NUM_THREADS"  # Ray sets it to a task's CPUs (_private/utils.py, set_omp_num_threads_if_unset)
Started: TypeAlias = "ray.ObjectRef[Any]"  # of a task that runs on a node


def ray_device(name: DeviceName, cluster: Cluster, options: DeviceOptions, address: str) -> Probe:
    """Return the probe function of a device on the nodes of a Ray cluster; it may be called from several threads.

    `address`: of the cluster, as in `ray.init`: "auto" for the one that this machine belongs to.

    Raises:
        InputError: there is no Ray cluster at this address, or none of its nodes has the GPUs of one node of `cluster`.
    """
    _connect(address)
    _refuse_smaller_nodes(cluster)
    there = replace(options, say=_say_nothing)

    def probe(candidate: Candidate) -> Measurement:
        if placement(candidate).server_apart:
            return without_memory(candidate, name, "crashed", SERVER_APART)
        found = _measured(name, candidate, cluster, there)
        refuse_other_releases(found)
        return replace(found, candidate=candidate)

    return probe


def _measured(name: DeviceName, candidate: Candidate, cluster: Cluster, options: DeviceOptions) -> Measurement:
    """Run a probe, again after a lost worker or node.

    Raises:
        PlanError: Ray itself is lost, or the nodes are for too long.
    """
    for attempt in range(ATTEMPTS):
        try:
            return _measured_once(name, candidate, cluster, options)
        except RayTaskError as error:  # raised on the node
            raise error.cause from None
        except OutOfMemoryError as error:  # the host memory of the node
            return _lost(candidate, name, "host_out_of_memory", str(error))
        except (NodeDiedError, WorkerCrashedError) as error:
            if attempt + 1 == ATTEMPTS:
                return _lost(candidate, name, "killed", f"{ATTEMPTS} times {error}")
        except RayError as error:
            raise PlanError(f"The Ray cluster is lost ({_reason(error)}). {GOES_ON}") from error
    raise AssertionError


def _measured_once(name: DeviceName, candidate: Candidate, cluster: Cluster, options: DeviceOptions) -> Measurement:
    """Run a probe on the nodes that a placement group holds for it. Nothing of it is left at the end."""
    needed = _Nodes(gpus=placement(candidate).gpus_per_node, count=candidate.num_nodes)
    group = placement_group(
        [{"GPU": needed.gpus}] * needed.count, strategy="STRICT_PACK" if needed.count == 1 else "STRICT_SPREAD"
    )

    def start(function: Callable[..., Any], gpus: int, node: int, *arguments: object) -> Started:
        where = PlacementGroupSchedulingStrategy(group, node)
        options = {"num_cpus": 0, "num_gpus": gpus, "max_retries": 0, "scheduling_strategy": where}
        started: Started = ray.remote(**options)(function).remote(*arguments)
        return started

    tasks: list[Started] = []
    try:
        meetings: list[Rendezvous | None] = [None]
        if needed.count > 1:
            address = start(_free_address, 0, 0)
            _wait([address], needed)
            ip, port = ray.get(address)
            meetings = [
                Rendezvous(machine_rank=rank, main_process_ip=ip, main_process_port=port)
                for rank in range(needed.count)
            ]
        threads = os.environ.get(THREADS)
        tasks = [
            start(_on_node, needed.gpus, node, name, candidate, cluster, replace(options, rendezvous=meeting), threads)
            for node, meeting in enumerate(meetings)
        ]
        return decisive(_ended(tasks, needed))
    finally:
        remove_placement_group(group)  # ends what still runs
        for task in tasks:  # Ray prints errors that nobody asked for
            with suppress(RayError):
                ray.get(task, timeout=END_SECONDS)


def _ended(tasks: list[Started], needed: "_Nodes") -> list[Measurement]:
    """Return the measurements of a probe's nodes, in the order in which they ended.

    After one that does not fit, the others have a moment to say why themselves: of processes that wait for one another
    the first to end is not always the one that failed.
    """
    found: list[Measurement] = []
    waiting, until = tasks, math.inf
    while waiting:
        done, waiting = _wait(waiting, needed, until)
        if not done:
            break
        found += ray.get(done)
        if found[-1].outcome != "fits":
            until = min(until, time.monotonic() + LAST_WORDS_SECONDS)
    return found


def decisive(found: list[Measurement]) -> Measurement:
    """Return the measurement that decides of those of a probe's nodes, of which the first to end is the first.

    Each has the memory of all ranks, unless one ran out of memory. A shortage decides, then what the node itself found;
    processes that lost another one only crash.
    """
    shortages = [each for each in found if each.outcome == "out_of_memory"]
    causes = [each for each in found if each.outcome not in ("fits", "crashed")]
    return (*shortages, *causes, *(each for each in found if each.outcome != "fits"), *found)[0]


def refuse_other_releases(found: Measurement) -> None:
    """Raise InputError if a node measured another release of a library than is installed here.

    Builds of one release, such as 2.13.0+cpu, count as the same.
    """
    for name, there in found.versions.items():
        with suppress(PackageNotFoundError):  # no library: CUDA, the GPU
            here = version(name)
            if here.partition("+")[0] != there.partition("+")[0]:
                raise InputError(
                    f"A node of the Ray cluster has {name} {there}, this machine {here}. Install one release on all."
                )


def room(cluster: Cluster) -> int:
    """Return how many probes of the cluster's candidates the nodes that are alive can run at a time."""
    return sum(int(gpus // cluster.gpus_per_node) for gpus in _gpus_of_nodes()) // cluster.nodes


def _on_node(
    name: DeviceName, candidate: Candidate, cluster: Cluster, options: DeviceOptions, threads: str | None
) -> Measurement:
    """Run this node's part of a probe. `threads`: the driver's OMP_NUM_THREADS."""
    os.environ.pop(THREADS, None)
    if threads is not None:
        os.environ[THREADS] = threads
    found = device(name, replace(cluster, nodes=1), options)(candidate)
    return replace(found, log=f"{get_node_ip_address()}:{found.log}") if found.log else found


def _free_address() -> tuple[str, int]:
    """Return the address of this node and a free port of it, as Ray Train does for PyTorch.

    Source: ray 2.60, train/_internal/utils.py, `get_address_and_port`.
    """
    address = get_node_ip_address()
    return address, free_port(address)


def _say_nothing(phase: str) -> None:
    """Drop the name of a phase: a node does not reach the driver's terminal."""


def _connect(address: str) -> None:
    """Connect to a Ray cluster, unless this process is connected to one."""
    if ray.is_initialized():
        return
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise InputError(
            f"--ray {address} is no Ray cluster that can be joined ({_reason(error)}). "
            "Start one with ray start --head, and give --ray auto."
        ) from error


def _refuse_smaller_nodes(cluster: Cluster) -> None:
    """Raise InputError if too few nodes have the GPUs of one of the cluster's nodes."""
    nodes, wanted = _gpus_of_nodes(), cluster.gpus_per_node
    if sum(gpus >= wanted for gpus in nodes) >= cluster.nodes:
        return
    most = int(max(nodes, default=0))
    nearest = f"Plan with --gpus {most}x{cluster.gpu.name}" if most else "Start a node with ray start --num-gpus"
    raise InputError(
        f"The plan is for {cluster.nodes} node{'s' if cluster.nodes > 1 else ''} of {wanted} GPUs, the largest of the "
        f"{len(nodes)} nodes of the Ray cluster has {most}. {nearest}."
    )


def _gpus_of_nodes() -> list[float]:
    """Return the number of GPUs of each node that is alive."""
    return [node["Resources"].get("GPU", 0.0) for node in ray.nodes() if node["Alive"]]


class _Nodes(Struct, frozen=True, kw_only=True):
    """Nodes that a probe needs: `count` nodes with `gpus` GPUs each."""

    gpus: int
    count: int

    @property
    def alive(self) -> bool:
        return sum(each >= self.gpus for each in _gpus_of_nodes()) >= self.count


def _wait(tasks: list[Started], needed: _Nodes, until: float = math.inf) -> tuple[list[Started], list[Started]]:
    """Wait for the end of one task, at most until a moment of the monotonic clock; return the ended and the others.

    Raises:
        PlanError: for `NODE_START_SECONDS` not enough nodes were alive.
    """
    last_node = time.monotonic()
    while time.monotonic() < until:
        done, others = ray.wait(tasks, timeout=LOOK_SECONDS)
        if done:
            return done, others
        if needed.alive:
            last_node = time.monotonic()
        elif time.monotonic() - last_node > NODE_START_SECONDS:
            waited = format_seconds(NODE_START_SECONDS)
            raise PlanError(
                f"For {waited} fewer than {needed.count} nodes of the Ray cluster were alive that have {needed.gpus} "
                f"GPUs. {GOES_ON}"
            )
    return [], tasks


def _reason(error: Exception) -> str:
    """Return an error's name and the beginning of its text, in one line."""
    return f"{type(error).__name__}: {one_line(str(error))}"[:MESSAGE_CHARACTERS]


def _lost(candidate: Candidate, name: DeviceName, outcome: Outcome, message: str) -> Measurement:
    """Return the measurement of a probe that Ray could not run to its end."""
    return without_memory(candidate, name, outcome, one_line(f"Ray: {message}")[:MESSAGE_CHARACTERS])

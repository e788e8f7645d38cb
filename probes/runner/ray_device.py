"""Run probes on the nodes of a Ray cluster. Each is a Ray task, on GPUs that a placement group holds for it alone.

Ray chooses the node, waits for its GPUs, and runs a task again whose worker or node is lost. On the node the task runs
the device of devices.py as it is: a process of its own, its limits, its verdict, and nothing left of it.
"""

import os
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import ray
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
from probes.runner.devices import DeviceOptions, Probe, device, refuse_several_nodes
from probes.runner.verdict import MESSAGE_CHARACTERS

MAX_RETRIES = 3  # after a lost worker or node, as Ray's own default for tasks
# How long a probe waits where no node is alive that has its GPUs.
# Source: ray 2.60, autoscaler/_private/constants.py, AUTOSCALER_NODE_START_WAIT_S.
NODE_START_SECONDS = 900.0
GOES_ON = "The same command goes on when it is back."
LOOK_SECONDS = 5.0  # between two looks at the nodes
THREADS = "OMP_NUM_THREADS"  # Ray sets it to a task's CPUs (_private/utils.py, set_omp_num_threads_if_unset)


def ray_device(name: DeviceName, cluster: Cluster, options: DeviceOptions, address: str) -> Probe:
    """Return the probe function of a device on the nodes of a Ray cluster; it may be called from several threads.

    `address`: of the cluster, as in `ray.init`: "auto" for the one that this machine belongs to.

    Raises:
        InputError: there is no Ray cluster at this address, or none of its nodes has the GPUs of one node of `cluster`.
    """
    if name != "simulated":
        refuse_several_nodes(cluster)
    _connect(address)
    _refuse_smaller_nodes(cluster)
    remote = ray.remote(max_retries=MAX_RETRIES, num_cpus=0)(_on_node)
    there = replace(options, say=_say_nothing)

    def probe(candidate: Candidate) -> Measurement:
        gpus = placement(candidate).gpus_per_node
        lost = partial(_lost, candidate, name)
        group = placement_group(
            [{"GPU": gpus}] * candidate.num_nodes,
            strategy="STRICT_PACK" if candidate.num_nodes == 1 else "STRICT_SPREAD",
        )
        where = PlacementGroupSchedulingStrategy(group, 0)
        task = remote.options(num_gpus=gpus, scheduling_strategy=where).remote(
            name, candidate, cluster, there, os.environ.get(THREADS)
        )
        try:
            _wait(task, gpus)
            found: Measurement = ray.get(task)
        except RayTaskError as error:  # raised on the node
            raise error.cause from None
        except OutOfMemoryError as error:  # the main memory of the node
            found = lost("host_out_of_memory", str(error))
        except (NodeDiedError, WorkerCrashedError) as error:
            found = lost("killed", f"{MAX_RETRIES + 1} times {error}")
        except RayError as error:
            raise PlanError(f"The Ray cluster is lost ({_reason(error)}). {GOES_ON}") from error
        finally:
            remove_placement_group(group)  # ends the task if it still runs
        refuse_other_releases(found)
        return replace(found, candidate=candidate)

    return probe


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
    """Run a probe on this node. `threads`: the driver's OMP_NUM_THREADS."""
    os.environ.pop(THREADS, None)
    if threads is not None:
        os.environ[THREADS] = threads
    found = device(name, cluster, options)(candidate)
    return replace(found, log=f"{get_node_ip_address()}:{found.log}") if found.log else found


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


def _wait(task: "ray.ObjectRef[Measurement]", gpus: int) -> None:
    """Wait for a task's end.

    Raises:
        PlanError: for `NODE_START_SECONDS` no node was alive that has the task's GPUs.
    """
    last_node = time.monotonic()
    while not ray.wait([task], timeout=LOOK_SECONDS)[0]:
        if any(each >= gpus for each in _gpus_of_nodes()):
            last_node = time.monotonic()
        elif time.monotonic() - last_node > NODE_START_SECONDS:
            waited = format_seconds(NODE_START_SECONDS)
            raise PlanError(f"For {waited} no node of the Ray cluster was alive that has {gpus} GPUs. {GOES_ON}")


def _reason(error: Exception) -> str:
    """Return an error's name and the beginning of its text, in one line."""
    return f"{type(error).__name__}: {one_line(str(error))}"[:MESSAGE_CHARACTERS]


def _lost(candidate: Candidate, name: DeviceName, outcome: Outcome, message: str) -> Measurement:
    """Return the measurement of a probe that Ray could not run to its end."""
    return without_memory(candidate, name, outcome, one_line(f"Ray: {message}")[:MESSAGE_CHARACTERS])

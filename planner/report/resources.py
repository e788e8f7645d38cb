"""What a plan needs of rented machines: cards on which it fits as it is, memory, disk and hours."""

from collections.abc import Iterator

from planner.candidate import Candidate
from planner.errors import PlanError
from planner.estimation import disk_bytes_of, estimate
from planner.gpus import hf_jobs
from planner.gpus.catalogue import load_gpu
from planner.gpus.cluster import Cluster
from planner.gpus.host_memory import with_usual_host
from planner.jobs.stops import STOPS
from planner.launch.placement import placement
from planner.launch.requirements import requirements
from planner.launch.site import LEAST_CAPABILITY, SKYPILOT, Site
from planner.quantities import DEFAULT_RISK, Estimate
from planner.report.documents import ResourcesReport


def site_of(best: Estimate, cluster: Cluster, risk: float = DEFAULT_RISK) -> Site:
    """Return the machines that the launch files of an estimate are written for."""
    epoch = best.throughput.epoch
    return Site(
        cluster=cluster,
        host_bytes=best.host_peak_bytes,
        gpu_bytes=max(gpu.peak_bytes + gpu.headroom_bytes for gpu in best.gpus),
        disk_bytes=disk_bytes_of(best.candidate),
        epoch_seconds=epoch.steps * best.throughput.step_seconds if epoch is not None and epoch.rows else 0.0,
        cards=tuple(fitting_cards(best.candidate, cluster, risk)),
    )


def fitting_cards(candidate: Candidate, cluster: Cluster, risk: float) -> Iterator[str]:
    """Yield the cards that clouds rent and a candidate fits as it is, in nodes of their usual main memory.

    The smallest card comes first, and of two of a size the slower one: what costs less, as a rule. No prices are known.
    """
    cards = sorted(
        map(load_gpu, {**SKYPILOT, **dict.fromkeys(hf_jobs.CARDS)}), key=lambda gpu: (gpu.total_bytes, gpu.bf16_flops)
    )
    for gpu in cards:
        if gpu.compute_capability < LEAST_CAPABILITY:
            continue
        rented = with_usual_host(Cluster(gpu=gpu, nodes=cluster.nodes, gpus_per_node=cluster.gpus_per_node))
        try:
            fits = not any(stop.when(candidate, rented) for stop in STOPS) and estimate(candidate, rented, risk).fits
        except PlanError:
            continue  # a vLLM engine that would not start there
        if fits:
            yield gpu.name


def resources_report(candidate: Candidate, site: Site) -> ResourcesReport:
    """Return the resources of a candidate as a document.

    Raises:
        InputError: as `placement`.
    """
    return ResourcesReport(
        nodes=candidate.num_nodes,
        gpus_per_node=placement(candidate).gpus_per_node,
        gpu_bytes=site.gpu_bytes,
        host_bytes=site.host_bytes,
        disk_bytes=site.disk_bytes,
        cards=site.cards,
        epoch_seconds=site.epoch_seconds or None,
        packages=tuple(requirements(candidate).split()),
    )

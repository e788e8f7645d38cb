"""The machines to rent for a plan: the cards on which it fits unchanged, memory, disk and hours."""

from planner.candidate import Candidate
from planner.estimation import disk_bytes_of
from planner.gpus import hf_jobs
from planner.gpus.catalogue import load_gpu
from planner.gpus.cluster import Cluster, Gpu
from planner.launch.placement import placement
from planner.launch.requirements import requirements
from planner.launch.site import LEAST_CAPABILITY, SKYPILOT, Site
from planner.quantities import DEFAULT_RISK, Estimate
from planner.report.documents.plans import ResourcesReport
from planner.search.fit import fitting_cards


def site_of(best: Estimate, cluster: Cluster, risk: float = DEFAULT_RISK) -> Site:
    """Return the machines that the launch files of an estimate are written for."""
    epoch = best.throughput.epoch
    return Site(
        cluster=cluster,
        host_bytes=best.host_peak_bytes,
        gpu_bytes=max(gpu.peak_bytes + gpu.headroom_bytes for gpu in best.gpus),
        disk_bytes=disk_bytes_of(best.candidate),
        epoch_seconds=epoch.steps * best.throughput.step_seconds if epoch is not None and epoch.rows else 0.0,
        cards=tuple(fitting_cards(best.candidate, cluster, rented_cards(), risk)),
    )


def rented_cards() -> list[Gpu]:
    """Return the cards that clouds rent and the pinned torch runs on."""
    cards = map(load_gpu, {**SKYPILOT, **dict.fromkeys(hf_jobs.CARDS)})
    return [gpu for gpu in cards if gpu.compute_capability >= LEAST_CAPABILITY]


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

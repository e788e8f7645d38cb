"""Remedies for a job that does not fit: the smallest changes of the job or the cluster with which it fits."""

from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from planner.errors import PlanError
from planner.gpus.catalogue import is_gpu_name, is_whole_card, load_gpu
from planner.gpus.cluster import Cluster
from planner.gpus.host_memory import size_with_room, with_given_host, with_usual_host
from planner.jobs.job import SPLITS, Job
from planner.jobs.rules import refuse_contradictions
from planner.jobs.settings import settings_of_fields
from planner.quantities import Estimate, Note
from planner.search.knobs import SearchProblem, TuningClass
from planner.search.search import search
from planner.search.sizes import LENGTH_STEP, largest, length_field
from planner.search.variations import Variation, offloading_notes
from planner.settings.table import with_role

MAX_REMEDIES = 4  # a report with more is not read
MORE_GPUS = (2, 4, 8)  # factors on the number of GPUs
GPUS_PER_NODE = 8  # of usual machines; beyond it the number of nodes grows
USUAL_CARDS = ("RTX-4090", "A100-40G", "L40S", "H100", "H200", "B200")  # cards to rent, the smallest first
LARGEST_CARDS = ("H100", "B200")
WHOLE_NODES = (1, 2, 4, 8, 16, 32, 64)
PAGED_OPTIMIZER = "paged_adamw_8bit"


class Proposal(Struct, frozen=True, kw_only=True):
    """A change that may be a remedy, the changed job and cluster, and what it takes."""

    change: Note
    job: Job
    cluster: Cluster
    takes: tuple[Note, ...] = ()
    last: bool = False  # if it fits, stop: the proposals after it cost more


def remedies(job: Job, cluster: Cluster, problem: SearchProblem, nearest: Estimate) -> tuple[Variation, ...]:
    """Return the first four proposals that fit, in the order of `proposals`. Each is searched in full."""
    found: list[Variation] = []
    for proposal in proposals(job, cluster, problem, nearest):
        answer = search_proposal(proposal, problem)
        if answer is not None and answer.fits:
            takes = proposal.takes or offloading_notes(answer)
            found.append(Variation(change=proposal.change, estimate=answer, takes=takes))
        if len(found) == MAX_REMEDIES or (proposal.last and answer is not None and answer.fits):
            break
    return tuple(found) or first_node_that_fits(job, cluster, problem)


def first_node_that_fits(job: Job, cluster: Cluster, problem: SearchProblem) -> tuple[Variation, ...]:
    """Return the smallest number of whole nodes on which the job fits: of its own GPUs, else of the largest usual ones.

    4-bit weights are not sharded, so that a job that leaves the tuning open gets LoRA there.
    """
    opened = job.tuning == "auto" and problem.tuning_class == "qlora" and "quantization" not in job.pinned
    wanted, tuning = (replace(job, tuning="lora"), {"tuning": "lora"}) if opened else (job, {})
    own = (cluster.gpu.name,) if is_gpu_name(cluster.gpu.name) and is_whole_card(cluster.gpu.name) else ()
    for name in dict.fromkeys((*own, *LARGEST_CARDS)):
        for nodes in WHOLE_NODES:
            larger = with_usual_host(Cluster(gpu=load_gpu(name), nodes=nodes, gpus_per_node=GPUS_PER_NODE))
            change = Note("whole_nodes", {"nodes": nodes, "gpus_per_node": GPUS_PER_NODE, "card": name, **tuning})
            answer = search_proposal(Proposal(change=change, job=wanted, cluster=larger), problem)
            if answer is not None and answer.fits:
                return (Variation(change=change, estimate=answer, takes=offloading_notes(answer)),)
    return ()


def search_proposal(proposal: Proposal, problem: SearchProblem) -> Estimate | None:
    """Search a changed job; return None if nothing could start or the change contradicts a pinned setting.

    Where the problem offloads to the host, offloading is tried if the job does not fit without.
    """
    names: dict[str, TuningClass] = {"full": "full", "lora": "lora", "qlora": "qlora"}
    tuning_class = names.get(proposal.job.tuning, problem.tuning_class)
    changed = replace(problem, job=proposal.job, cluster=proposal.cluster, tuning_class=tuning_class, offload=False)
    try:
        refuse_contradictions(proposal.job, proposal.cluster)
        answer = search(changed)
        if problem.offload and (answer is None or not answer.fits):
            return search(replace(changed, offload=True)) or answer
        return answer
    except PlanError:  # the change contradicts another pinned setting
        return None


def proposals(job: Job, cluster: Cluster, problem: SearchProblem, nearest: Estimate) -> Iterator[Proposal]:
    """Yield changes of the job and the cluster, the cheapest for the user first.

    Order: a smaller micro-batch, drop a pinned setting, a cheaper tuning class, an 8-bit optimizer, shorter rows, more
    host memory, more or larger GPUs.
    """
    yield from smaller_batches(job, cluster, problem, nearest)
    yield from without_one_pin(job, cluster)
    yield from cheaper_tuning(job, cluster)
    if nearest.candidate.tuning == "full" and "optim" not in job.pinned:
        yield Proposal(
            change=Note("with_settings", {"settings": {"optim": PAGED_OPTIMIZER}}),
            job=with_pins(job, optim=PAGED_OPTIMIZER),
            cluster=cluster,
            takes=(Note("states_in_8_bit"),),
        )
    yield from shorter_rows(job, cluster, problem, nearest)
    yield from more_host_memory(job, cluster, nearest)
    yield from larger_clusters(job, cluster)


def smaller_batches(job: Job, cluster: Cluster, problem: SearchProblem, nearest: Estimate) -> Iterator[Proposal]:
    """Yield the largest part of a pinned micro-batch that fits, accumulated to as many samples per optimizer step."""
    batch, steps = (getattr(nearest.candidate, name) for name in SPLITS)
    for parts in range(2, batch + 1) if SPLITS[0] in job.pinned else ():
        if batch % parts:
            continue
        sizes = dict(zip(SPLITS, (batch // parts, steps * parts), strict=True))
        change = Note("with_settings", {"settings": sizes})
        proposal = Proposal(change=change, job=with_pins(job, **sizes), cluster=cluster)
        answer = search_proposal(proposal, problem)
        if answer is not None and answer.fits:
            yield proposal
            return


def without_one_pin(job: Job, cluster: Cluster) -> Iterator[Proposal]:
    """Yield the job without one pinned setting, for each but facts of the data, the effective batch's and the tool.

    Without one of those the answer would be about another job.
    """
    kept = with_role("data").union(SPLITS, ("tool",))
    for name in job.pinned:
        if name in kept:
            continue
        change = Note("setting_not_pinned", {"settings": settings_of_fields({name: job.pinned[name]})})
        others = {key: value for key, value in job.pinned.items() if key != name}
        yield Proposal(change=change, job=replace(job, pinned=others), cluster=cluster)


def cheaper_tuning(job: Job, cluster: Cluster) -> Iterator[Proposal]:
    """Yield LoRA and QLoRA for full fine-tuning, and QLoRA for LoRA."""
    cheaper: dict[str, tuple[TuningClass, ...]] = {"full": ("lora", "qlora"), "lora": ("qlora",)}
    for name in cheaper.get(job.tuning, ()):
        kept = {key: value for key, value in job.pinned.items() if key not in ("tuning", "quantization", "dtype")}
        change = Note("with_option", {"option": "--tuning", "value": name})
        yield Proposal(change=change, job=replace(job, tuning=name, pinned=kept), cluster=cluster)


def shorter_rows(job: Job, cluster: Cluster, problem: SearchProblem, nearest: Estimate) -> Iterator[Proposal]:
    """Yield the longest row that fits, in steps of 256 tokens, by binary search."""
    name = length_field(nearest.candidate)
    length = getattr(nearest.candidate, name)

    def proposal(shorter: int) -> Proposal:
        return Proposal(
            change=Note("with_option", {"option": f"--{name.replace('_', '-')}", "value": shorter}),
            job=with_pins(job, **{name: shorter}),
            cluster=cluster,
            takes=(Note("length_asked", {"length": length}),),
        )

    def fits(steps: int) -> bool:
        answer = search_proposal(proposal(steps * LENGTH_STEP), problem)
        return answer is not None and answer.fits

    longest = largest(1, (length - 1) // LENGTH_STEP, fits) * LENGTH_STEP
    if longest:
        yield proposal(longest)


def more_host_memory(job: Job, cluster: Cluster, nearest: Estimate) -> Iterator[Proposal]:
    """Yield the host memory in whole GiB in which the nearest candidate leaves enough, if its GPUs have enough.

    Host memory that is the GPU's as well cannot grow.
    """
    if nearest.over_bytes <= 0 and is_whole_card(cluster.gpu.name):
        size = size_with_room(nearest.host_peak_bytes)
        change = Note("with_option", {"option": "--host-memory", "value": size})
        yield Proposal(change=change, job=job, cluster=with_given_host(cluster, size))


def larger_clusters(job: Job, cluster: Cluster) -> Iterator[Proposal]:
    """Yield more of the same GPUs, then as many larger GPUs, up to the first that fits.

    Host memory that was assumed grows with them, host memory that was given stays.
    """
    for times in MORE_GPUS if is_whole_card(cluster.gpu.name) else ():
        within = cluster.gpus_per_node * times <= GPUS_PER_NODE
        more = (
            replace(cluster, gpus_per_node=cluster.gpus_per_node * times)
            if within
            else replace(cluster, nodes=cluster.nodes * times)
        )
        change = Note("more_gpus", {"gpus": more.num_gpus})
        yield Proposal(change=change, job=job, cluster=with_usual_host(more))
    for name in USUAL_CARDS:
        card = load_gpu(name)
        if card.total_bytes > cluster.gpu.total_bytes:
            larger = with_usual_host(replace(cluster, gpu=card))
            change = Note("larger_cards", {"gpus": cluster.num_gpus, "card": name})
            yield Proposal(change=change, job=job, cluster=larger, last=True)


def with_pins(job: Job, **fields: str | int) -> Job:
    """Return the job with more pinned settings, by Candidate field."""
    return replace(job, pinned={**job.pinned, **fields})

"""A job that does not fit -> the cheapest changes that would make it fit, each tried."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from planner.binary_search import largest
from planner.errors import PlanError
from planner.gpus.catalogue import load_gpu
from planner.gpus.cluster import Cluster
from planner.jobs.job import Job
from planner.jobs.settings import settings_of_fields, settings_text
from planner.quantities import Estimate
from planner.search.knobs import SearchProblem, TuningClass
from planner.search.search import LENGTH_STEP, length_field, search
from planner.units import format_count

SHOWN = 4  # more remedies than these nobody reads
MORE_GPUS = (2, 4, 8)  # times as many
GPUS_PER_NODE = 8  # of the machines that are sold; more of them are more nodes
USUAL_CARDS = ("RTX-4090", "A100-40G", "L40S", "H100", "H200", "B200")  # that one can rent, the smallest first
HALF_OPTIMIZER = "paged_adamw_8bit"
ABOUT_DATA = frozenset(
    {"max_length", "prompt_length", "max_completion_length", "padded", "num_generations"}
)  # not ours to drop


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """A change that was tried and makes a job fit that did not."""

    change: str
    estimate: Estimate
    note: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One change: what to say of it, and the job and cluster it makes."""

    change: str
    job: Job
    cluster: Cluster
    note: str = ""
    enough: bool = False  # once this fits, what comes after is only dearer


def remedies(job: Job, cluster: Cluster, problem: SearchProblem, nearest: Estimate) -> tuple[Remedy, ...]:
    """The first few changes that fit, the least invasive first."""
    found: list[Remedy] = []
    for trial in trials(job, cluster, problem, nearest):
        answer = tried(trial, problem)
        if answer is not None and answer.fits:
            found.append(Remedy(change=trial.change, estimate=answer, note=trial.note))
        if len(found) == SHOWN or (trial.enough and answer is not None and answer.fits):
            break
    return tuple(found)


def tried(trial: Trial, problem: SearchProblem) -> Estimate | None:
    names: dict[str, TuningClass] = {"full": "full", "lora": "lora", "qlora": "qlora"}
    tuning_class = names.get(trial.job.tuning, problem.tuning_class)
    try:
        return search(replace(problem, job=trial.job, cluster=trial.cluster, tuning_class=tuning_class))
    except PlanError:  # a change can contradict another pin; then it is no remedy
        return None


def trials(job: Job, cluster: Cluster, problem: SearchProblem, nearest: Estimate) -> Iterator[Trial]:
    """Changes in the order of what they cost the user: a pin, the class of tuning, the optimizer, the length, more cards."""
    yield from unpinned(job, cluster)
    yield from other_classes(job, cluster)
    if nearest.candidate.tuning == "full" and "optim" not in job.pinned:
        note = "8-bit states, paged to the host under pressure"
        yield Trial(
            change=f"--set optim={HALF_OPTIMIZER}", job=pinning(job, optim=HALF_OPTIMIZER), cluster=cluster, note=note
        )
    if nearest.candidate.method_row.offloads_activations and "activation_offloading" not in job.pinned:
        change = pinning(job, activation_offloading=True)
        yield Trial(
            change="--set activation_offloading=true",
            job=change,
            cluster=cluster,
            note="what is saved waits in host memory",
        )
    yield from shorter(job, cluster, problem, nearest)
    yield from larger_clusters(job, cluster)


def unpinned(job: Job, cluster: Cluster) -> Iterator[Trial]:
    """Each pin that is ours to choose, dropped."""
    for name in job.pinned:
        if name in ABOUT_DATA:
            continue
        spelled = settings_text(settings_of_fields({name: job.pinned[name]}))
        kept = {key: value for key, value in job.pinned.items() if key != name}
        yield Trial(change=f"{spelled} not pinned", job=replace(job, pinned=kept), cluster=cluster)


def other_classes(job: Job, cluster: Cluster) -> Iterator[Trial]:
    """LoRA for a job that asks for full fine-tuning, QLoRA for either."""
    cheaper: dict[str, tuple[TuningClass, ...]] = {"full": ("lora", "qlora"), "lora": ("qlora",)}
    for name in cheaper.get(job.tuning, ()):
        kept = {key: value for key, value in job.pinned.items() if key not in ("tuning", "quantization", "dtype")}
        yield Trial(change=f"--tuning {name}", job=replace(job, tuning=name, pinned=kept), cluster=cluster)


def shorter(job: Job, cluster: Cluster, problem: SearchProblem, nearest: Estimate) -> Iterator[Trial]:
    """The longest row that fits, found by halving."""
    name = length_field(nearest.candidate)
    length = getattr(nearest.candidate, name)

    def fits(steps: int) -> bool:
        answer = tried(Trial(change="", job=pinning(job, **{name: steps * LENGTH_STEP}), cluster=cluster), problem)
        return answer is not None and answer.fits

    longest = largest(1, (length - 1) // LENGTH_STEP, fits) * LENGTH_STEP
    if longest:
        flag = name.replace("_", "-")
        yield Trial(
            change=f"--{flag} {longest}",
            job=pinning(job, **{name: longest}),
            cluster=cluster,
            note=f"{format_count(length)} tokens asked for",
        )


def larger_clusters(job: Job, cluster: Cluster) -> Iterator[Trial]:
    """More of the same cards, then the smallest usual card that is larger."""
    for times in MORE_GPUS:
        within = cluster.gpus_per_node * times <= GPUS_PER_NODE
        more = (
            replace(cluster, gpus_per_node=cluster.gpus_per_node * times)
            if within
            else replace(cluster, nodes=cluster.nodes * times)
        )
        yield Trial(change=f"{more.num_gpus} GPUs", job=job, cluster=more)
    for name in USUAL_CARDS:
        card = load_gpu(name)
        if card.total_bytes > cluster.gpu.total_bytes:
            yield Trial(change=f"{cluster.num_gpus} x {name}", job=job, cluster=replace(cluster, gpu=card), enough=True)


def pinning(job: Job, **fields: str | int) -> Job:
    return replace(job, pinned={**job.pinned, **fields})

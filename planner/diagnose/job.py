"""An incident beside the job it befell: what was to be expected of its settings, and what fits instead."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.diagnose.incident import Incident
from planner.errors import PlanError
from planner.estimate import estimate
from planner.gpus.cluster import Cluster
from planner.jobs.base_candidate import single_candidate
from planner.jobs.job import Job
from planner.plan import Plan, plan
from planner.quantities import Estimate, Phase, PhaseMemory
from planner.search.knobs import problem_of

# Settings that are ours to choose again; the data's lengths, the adapters, the losses and the optimizer stay as the run had them.
CHOSEN_AGAIN = frozenset(
    {"per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "gradient_checkpointing", "checkpoint_every_n_layers",
     "checkpoint_offload", "attn_implementation", "sharding", "offload_optimizer", "offload_param", "ds3_gather_for_generation", "num_processes",
     "expandable_segments", "activation_offloading", "vllm", "vllm_gpu_memory_utilization", "vllm_tensor_parallel_size", "vllm_data_parallel_size",
     "vllm_enable_sleep_mode"}
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """The incidents of a log; where the job is known also what was expected of it, and the plan for the same data. `why_none`: why there is no plan."""

    incidents: tuple[Incident, ...]
    expected: Estimate | None = None
    instead: Plan | None = None
    cluster: Cluster | None = None
    why_none: str = ""

    @property
    def expected_phase(self) -> PhaseMemory | None:
        """The phase in which the run stopped, as it was to be expected; None where the log does not say, or nothing was asked."""
        where: Phase | None = next((incident.phase for incident in self.incidents if incident.phase is not None), None)
        phases = self.expected.gpus[0].phases if self.expected is not None else ()
        return next((phase for phase in phases if phase.name == where), None)


def of_job(incidents: Sequence[Incident], job: Job, cluster: Cluster) -> Diagnosis:
    """The incidents beside what is expected of the job's settings, and what fits of the same data and as large an optimizer step.

    Raises:
        InputError: the settings contradict each other.
    """
    expected = estimate(single_candidate(job, cluster), cluster, job.risk)
    known = Diagnosis(incidents=tuple(incidents), expected=expected, cluster=cluster)
    try:
        return replace(known, instead=plan(_as_free_as_possible(job, cluster, expected), cluster))
    except PlanError as error:
        return replace(known, why_none=str(error))


def _as_free_as_possible(job: Job, cluster: Cluster, expected: Estimate) -> Job:
    kept = {name: value for name, value in job.pinned.items() if name not in CHOSEN_AGAIN}
    return replace(
        job,
        pinned=kept,
        tuning=problem_of(job, cluster, expected).tuning_class,
        effective_batch_size=expected.candidate.effective_batch_size,
    )

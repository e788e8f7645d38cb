"""Compare the incidents of a log with the estimate of its job, and plan settings that fit."""

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from planner.diagnose.advice import INCIDENT_KINDS
from planner.diagnose.incident import Incident
from planner.errors import PlanError
from planner.estimation import estimate
from planner.gpus.cluster import Cluster
from planner.jobs.base_candidate import single_candidate
from planner.jobs.job import Job
from planner.planning import Plan, plan
from planner.quantities import Estimate, Phase, PhaseMemory
from planner.search.knobs import problem_of_estimate
from planner.settings.table import SETTING_OF, SETTINGS

# Settings that the new plan may change, with their details. Lengths, adapters, losses and the optimizer stay as in the
# run.
REPLANNED_SETTINGS = frozenset(
    row.field
    for row in SETTINGS
    if row.role == "run" and (row.search != "never" or SETTING_OF.get(row.owner, row).search != "never")
)
NOTHING_LIGHTER = "no settings with the same rows need less than those that ran out of memory"
# Settings that move memory of a GPU to the host.
TAKES_HOST_MEMORY = ("checkpoint_offload", "activation_offloading", "offload_optimizer", "offload_param")


class Diagnosis(Struct, frozen=True, kw_only=True):
    """The incidents of a log and, if the job is known, its estimate and a plan that fits the same data.

    `no_plan_reason` says why there is no such plan; empty if there is one, or if the job is unknown. `job_error` says
    why the job itself is not estimated; `misread`: since its flags or files could not be read.
    """

    incidents: tuple[Incident, ...]
    expected: Estimate | None = None
    fitting_plan: Plan | None = None
    cluster: Cluster | None = None
    no_plan_reason: str = ""
    job_error: str = ""
    misread: bool = False

    @property
    def expected_phase(self) -> PhaseMemory | None:
        """The estimate of the phase in which the run stopped; None if the phase or the job is unknown."""
        where: Phase | None = next((incident.phase for incident in self.incidents if incident.phase is not None), None)
        phases = self.expected.gpus[0].phases if self.expected is not None else ()
        return next((phase for phase in phases if phase.name == where), None)


def diagnose_job(incidents: Sequence[Incident], job: Job, cluster: Cluster) -> Diagnosis:
    """Estimate the job's settings, and plan settings that fit with the same data and the same effective batch size.

    Raises:
        InputError: the settings contradict each other.
    """
    expected = estimate(single_candidate(job, cluster), cluster, job.risk)
    known = Diagnosis(incidents=tuple(incidents), expected=expected, cluster=cluster)
    again = _job_to_replan(job, cluster, expected, incidents)
    try:
        found = plan(again, cluster)
    except PlanError as error:
        return replace(known, no_plan_reason=str(error))
    if not incidents or INCIDENT_KINDS[incidents[0].kind].of_host or _peak_bytes(found.best) < _peak_bytes(expected):
        return replace(known, fitting_plan=found)
    try:
        lighter = plan(again, _with_less(cluster, _peak_bytes(expected)))
    except PlanError:
        return replace(known, no_plan_reason=NOTHING_LIGHTER)
    return replace(
        known, fitting_plan=replace(found, best=estimate(lighter.best.candidate, cluster, job.risk), remedies=())
    )


def _peak_bytes(expected: Estimate) -> int:
    """The peak of the fullest GPU, without those that a vLLM server fills up to a share."""
    return max(gpu.peak_bytes for gpu in expected.gpus if not gpu.serves or len(expected.gpus) == 1)


def _with_less(cluster: Cluster, free_bytes: int) -> Cluster:
    """The cluster with at most so much memory on each GPU, in which what is lighter than a failed run fits."""
    return replace(cluster, gpu=replace(cluster.gpu, free_bytes=min(free_bytes, cluster.gpu.free_bytes)))


def _job_to_replan(job: Job, cluster: Cluster, expected: Estimate, incidents: Sequence[Incident]) -> Job:
    """The job without its REPLANNED_SETTINGS, with the run's tuning class and effective batch size.

    After a lack of host memory nothing is offloaded to it.
    """
    kept = {name: value for name, value in job.pinned.items() if name not in REPLANNED_SETTINGS}
    if incidents and INCIDENT_KINDS[incidents[0].kind].of_host:
        kept |= dict.fromkeys(TAKES_HOST_MEMORY, False)
    return replace(
        job,
        pinned=kept,
        tuning=problem_of_estimate(job, cluster, expected).tuning_class,
        effective_batch_size=expected.candidate.effective_batch_size,
    )

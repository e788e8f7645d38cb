"""What the commands ask of `probes/`: layers without formulas, dry runs, probes and studies. Imported inside the commands that need it."""

import contextlib
import io
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from planner.allocator.simulation import Simulation, with_reserved
from planner.candidate import Candidate
from planner.commands.options import Probing, Proving
from planner.errors import (
    EXIT_OTHER,
    EXIT_PLANNED,
    EXIT_PROBE_CONTRADICTS,
    DryRunUnsupported,
    InputError,
    ProbeFailed,
    UnknownArchitecture,
)
from planner.files.cache import cache_root
from planner.gpus.cluster import Cluster, Gpu
from planner.jobs.job import Job
from planner.measurements.corrected_estimate import heaviest_rank
from planner.measurements.corrected_plan import confirmed, contradiction_of
from planner.measurements.measurement import DeviceName, Measurement
from planner.measurements.own_results import keep_new
from planner.models.shape import ModelShape
from planner.plan import Plan
from planner.quantities import Estimate
from planner.search.knobs import SearchProblem, attention
from planner.units import format_size, parse_seconds

Say = Callable[[str], None]
Probe = Callable[[Candidate], Measurement]

DRY_RUN_PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets")
PROBE_PACKAGES = (*DRY_RUN_PACKAGES, "optuna", "psutil")
DEVICE_NAMES: dict[str, DeviceName] = {"cuda": "cuda", "cpu": "cpu", "simulated": "simulated"}
# Endings of a study (probes/study/study.py) that the user has to do something about.
BROKEN_OFF = frozenset({"interrupted", "environment", "failing", "set aside"})
SET_ASIDE = "probes of better candidates failed for another reason than memory; the proof names them"
FLASH = {"attn_implementation": "flash_attention_2"}


def can_dry_run() -> bool:
    """Whether the packages of a dry run are installed."""
    return all(find_spec(name) is not None for name in DRY_RUN_PACKAGES)


# -- the simulated rung ------------------------------------------------------------------------------------------------


def simulated(answer: Estimate, cluster: Cluster, say: Say) -> Simulation:
    """The dry run on a card of the cluster, as `traced` makes it.

    Raises:
        DryRunUnsupported: as `traced`.
    """
    return with_reserved(traced(answer, say, cluster.gpu), cluster.gpu)


def traced(answer: Estimate, say: Say, gpu: Gpu | None = None) -> Simulation:
    """The dry run with a card's kernels, or without a card with those that a probe on the CPU runs. What its libraries print is kept from the streams.

    Raises:
        DryRunUnsupported: a setting that a dry run cannot show, or the packages are not installed.
    """
    say(f"simulating the step: {answer.candidate.method} of {answer.candidate.model.id} ...")
    with _libraries_kept_silent():
        try:
            from probes.dryrun.simulate import simulate_on
        except ImportError as error:
            raise DryRunUnsupported(f"A dry run needs {_missing('dryrun', DRY_RUN_PACKAGES, error)}") from error
        return simulate_on(answer, gpu)


def with_layers(say: Say) -> Callable[[ModelShape], ModelShape]:
    """What completes a model whose layers have no formulas: they are measured on fake tensors, where that was not done before."""
    announced = set[str]()

    def completed(model: ModelShape) -> ModelShape:
        @contextlib.contextmanager
        def measuring() -> Iterator[None]:
            if model.id not in announced:
                say(f"no formulas for {model.model_type}: measuring the layers of {model.id} ...")
            announced.add(model.id)
            with _libraries_kept_silent():
                yield

        if model.known:
            return model
        try:
            from probes.layers.coefficients import measured

            return measured(model, measuring)
        except ImportError as error:
            reason = f"{model.id} ({model.model_type}) has no formulas here, and measuring its layers needs {_missing('dryrun', DRY_RUN_PACKAGES, error)}"
            raise UnknownArchitecture(reason) from error

    return completed


# -- the measured rung -------------------------------------------------------------------------------------------------


def runnable_here(job: Job, cluster: Cluster, options: Probing) -> tuple[Job, tuple[str, ...]]:
    """The job without what probes on this device could not run, and what to say of that.

    FlashAttention 2 has no CPU kernels; on GPUs it needs flash-attn, or kernels for that of the Hub (transformers 5.23, modeling_flash_attention_utils.py).
    """
    installed = options.device == "cuda" and any(find_spec(name) is not None for name in ("flash_attn", "kernels"))
    if options.device == "simulated" or installed or "attn_implementation" in job.pinned:
        return job, ()
    if FLASH not in attention(SearchProblem(job=job, cluster=cluster, tuning_class="lora")):
        return job, ()
    where = "has no CPU kernels" if options.device == "cpu" else "is not installed here (pip install flash-attn)"
    return replace(job, pinned={**job.pinned, "attn_implementation": "sdpa"}), (
        f"attn_implementation sdpa: flash_attention_2 {where}",
    )


def prober(cluster: Cluster, options: Probing, tick: Say) -> Probe:
    """The device that probes run on, as a function; `tick` is told each phase that a worker enters.

    Raises:
        InputError: no such device, this machine cannot stand for the cluster, or the packages are not installed.
    """
    if options.device not in DEVICE_NAMES:
        raise InputError(f"--device {options.device} is none of {', '.join(DEVICE_NAMES)}.")
    seconds = parse_seconds(options.time_limit)
    with _libraries_kept_silent():
        try:
            from probes.runner.devices import DeviceOptions, device
            from probes.runner.runner import Limits
        except ImportError as error:
            raise InputError(f"A probe needs {_missing('probe', PROBE_PACKAGES, error)}") from error
        chosen = DeviceOptions(
            logs=Path(options.logs) if options.logs else cache_root() / "logs",
            limits=Limits(seconds=seconds),
            weights="hub" if options.hub_weights else "random",
            evaluate=options.evaluate,
            say=tick,
        )
        probe = device(DEVICE_NAMES[options.device], cluster, chosen)

    def silent(candidate: Candidate) -> Measurement:
        """A dry run's libraries print where it runs, which is here."""
        with _libraries_kept_silent():
            return probe(candidate)

    return silent if options.device == "simulated" else probe


def probed(candidate: Candidate, probe: Probe, gpu: str) -> Measurement:
    """One probe, kept among the user's own results.

    Raises:
        ProbeFailed: it says nothing about memory; the message says what happened.
    """
    measurement = probe(candidate)
    if not measurement.decided:
        log = f" Its log: {measurement.log}" if measurement.log else ""
        raise ProbeFailed(
            f"The probe says nothing about memory: {measurement.outcome.replace('_', ' ')}. {measurement.message}{log}"
        )
    keep_new([measurement], gpu)
    return measurement


@dataclass(frozen=True, kw_only=True, slots=True)
class ProvenPlan:
    """A plan after its probes. `reason` says in a line why the exit code is not 0."""

    plan: Plan
    exit_code: int
    reason: str


def proven(plan: Plan, probe: Probe, options: Proving, say: Say) -> ProvenPlan:
    """The plan as a study's probes leave it.

    Raises:
        InputError: the storage or the budget cannot be used.
    """
    from probes.study.certificate import certificate_lines, certificate_report
    from probes.study.study import StudyOptions, prove

    budget = parse_seconds(options.budget) if options.budget is not None else math.inf
    chosen = StudyOptions(
        device=DEVICE_NAMES[options.device], storage=options.storage or "", budget_seconds=budget, say=say
    )
    study = prove(plan, probe, chosen)
    keep_new(study.measurements, plan.cluster.gpu.name)
    report = {
        **certificate_report(study.certificate),
        "study": study.study_name,
        "storage": study.storage,
        "ending": study.ending,
    }
    lines = (*certificate_lines(study.certificate), *([f"{study.ending}: {study.reason}"] if study.reason else []))
    best = study.best.candidate if study.best is not None else None
    corrected = confirmed(plan, best, study.measurements, lines, report)
    wrong = contradiction_of(plan, study.measurements)
    if study.ending in BROKEN_OFF:
        return ProvenPlan(
            plan=corrected,
            exit_code=EXIT_OTHER,
            reason=f"The probes ended early ({study.ending}): {study.reason or SET_ASIDE}.",
        )
    if wrong:
        return ProvenPlan(
            plan=corrected, exit_code=EXIT_PROBE_CONTRADICTS, reason=f"The probes contradict the plan: {wrong}."
        )
    return ProvenPlan(plan=corrected, exit_code=EXIT_PLANNED, reason="")


def beside_a_dry_run(expected: Estimate, measurement: Measurement, say: Say) -> tuple[str, ...]:
    """On the CPU other kernels run than the answer is about: a dry run with these beside the measurement, in tensors' bytes, phase by phase."""
    if measurement.device != "cpu" or measurement.outcome != "fits":
        return ()
    try:
        trace = traced(expected, say).trace
    except DryRunUnsupported as error:
        return (f"no dry run of it on the CPU: {error}",)
    seen = {phase.name: phase.allocated_bytes for phase in heaviest_rank(measurement).phases}
    resumed = {"load": " (it also loads a checkpoint)"}  # a dry run resumes from none
    apart = [
        f"{phase.name.replace('_', ' ')} {seen[phase.name] / phase.total_bytes - 1:+.2%}{resumed.get(phase.name, '')}"
        for phase in trace.phases
        if seen.get(phase.name, 0)
    ]
    return (
        f"a dry run with the CPU's kernels peaks at {format_size(trace.peak_bytes)}, the probe at {format_size(max(seen.values()))}; by phase the probe is "
        f"at {', '.join(apart)}",
    )


# -- the packages ------------------------------------------------------------------------------------------------------


def _missing(extra: str, packages: Sequence[str], error: Exception) -> str:
    missing = [name for name in packages if find_spec(name) is None]
    what = f"{type(error).__name__}: {' '.join(str(error).split())}"
    reason = f"{', '.join(missing)} not installed" if missing else what
    return f"the extra {extra} (pip install 'finetune-plan[{extra}]'): {reason}."


@contextlib.contextmanager
def _libraries_kept_silent() -> Iterator[None]:
    """Keep what the libraries print from stdout and stderr."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield

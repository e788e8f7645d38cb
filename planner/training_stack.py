"""The only module that imports `probes`: layers without formulas, dry runs, probes and studies.

Commands import it inside the function that needs it, since most answers need none of these.
"""

import contextlib
import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from planner.candidate import FLASH, Candidate
from planner.errors import InputError, PlanError, ProbeFailed, UnknownArchitecture
from planner.files.cache import cache_root
from planner.gpus.cluster import Cluster, Gpu
from planner.jobs.base_candidate import base_candidate
from planner.jobs.job import Job
from planner.jobs.setting_values import field_types
from planner.jobs.settings import is_shown
from planner.measurements.corrected_estimate import why_undecided
from planner.measurements.corrected_plan import correct_plan, plan_contradiction
from planner.measurements.dry_run import DryRun, dry_run_of
from planner.measurements.measurement import USUAL_STEPS, DeviceName, Measurement
from planner.measurements.own_results import save_new_results
from planner.models.shape import ModelShape
from planner.planning import Plan
from planner.quantities import Estimate, Note
from planner.report.sentences import sentence
from planner.search.knobs import SearchProblem, attention
from planner.search.structures import with_liger
from planner.settings.setting import Value

if TYPE_CHECKING:
    from planner.memory.layers.measured_layers import LayerResult
    from planner.memory.layers.recipe import Recipe

Say = Callable[[str], None]  # prints one line of progress
Probe = Callable[[Candidate], Measurement]  # runs a candidate on a device

TRAINING_PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets")
PROBE_PACKAGES = (*TRAINING_PACKAGES, "optuna", "psutil")
RAY_PACKAGES = (*PROBE_PACKAGES, "ray")
DRY_RUN_PACKAGES = (*TRAINING_PACKAGES, "psutil", "numpy")
DRY_RUN_SECONDS = 1800.0  # after which a dry run is ended
LIBRARY_MISSING = "cannot open shared object file"  # glibc, of a library that another needs
# Endings of a study (probes/study/study.py) on which the user has to act.
BROKEN_OFF = frozenset({"interrupted", "environment", "failing", "set aside"})
SET_ASIDE = "probes of better candidates failed for another reason than memory; the proof names them"


def import_torch() -> None:
    """Import PyTorch; where it was installed without NVIDIA's libraries, with the emulated ones.

    Raises:
        ImportError: it is not installed, or neither libraries are there.
    """
    try:
        import torch
    except ImportError as error:
        if LIBRARY_MISSING not in str(error):
            raise
        from probes.emulated_gpu.start import lend_libraries

        with contextlib.suppress(PlanError, OSError, RuntimeError):
            lend_libraries()
        try:
            import torch  # noqa: F401
        except ImportError:
            raise error from None


# -- the training libraries --------------------------------------------------------------------------------------------


def count_tokens(dataset: str, split: str, text_field: str, tokenizer: str, say: Say) -> tuple[int, ...]:
    """Return the tokens of every row of a dataset, tokenized as TRL does. Output of the libraries is dropped.

    Raises:
        InputError: the packages are not installed, or the dataset or the tokenizer cannot be read.
    """
    say(f"counting the tokens of {dataset} ...")
    with _silent_libraries():
        try:
            import_torch()
            from probes.row_counts import row_counts
        except ImportError as error:
            raise InputError(f"plan lengths needs {_missing('training', TRAINING_PACKAGES, error)}") from error
        return row_counts(dataset, split, text_field, tokenizer)


def complete_models(say: Say, permit: Callable[[], None] = lambda: None) -> Callable[[ModelShape], ModelShape]:
    """Return a function that completes a model without formulas with its measured layers.

    Layers that neither ship with the package nor are in the user's cache are measured on this machine, which needs the
    extra training. Before that `permit` is called, which may raise, and `say`. The function raises UnknownArchitecture
    if the extra is not installed or the layers cannot be measured.
    """
    announced = set[str]()

    def complete(model: ModelShape) -> ModelShape:
        @contextlib.contextmanager
        def measuring() -> Iterator[None]:
            permit()
            if model.id not in announced:
                say(f"no formulas for {model.model_type}: measuring the layers of {model.id} ...")
            announced.add(model.id)
            import_torch()
            with _silent_libraries():
                yield

        if model.known:
            return model
        from planner.memory.layers.measured_layers import complete_shipped  # imports msgspec and lzma

        shipped = complete_shipped(model, partial(_measure_missing, model, measuring))
        if shipped is not None:
            return shipped
        try:
            from probes.layers.coefficients import complete_by_measuring

            return complete_by_measuring(model, measuring)
        except ImportError as error:
            raise UnknownArchitecture(_unmeasured(model, "here", error)) from error

    return complete


def _measure_missing(
    model: ModelShape, measuring: Callable[[], contextlib.AbstractContextManager[None]], recipe: "Recipe"
) -> "LayerResult":
    """Measure layers under a recipe that does not ship with the package; refuse it without the extra training."""
    try:
        from probes.layers.coefficients import load_or_measure

        return load_or_measure(model, recipe, measuring)
    except ImportError as error:
        from planner.memory.layers.measured_layers import MeasuringRefused

        return MeasuringRefused(reason=_unmeasured(model, "with these settings", error))


def _unmeasured(model: ModelShape, where: str, error: ImportError) -> str:
    """Return the error message for layers that cannot be measured without the extra training."""
    extra = _missing("training", TRAINING_PACKAGES, error)
    return f"{model.id} ({model.model_type}) has no formulas {where}, and measuring its layers needs {extra}"


# -- a trainer's own settings ------------------------------------------------------------------------------------------


def trainer_job(trainer: Any, settings: Mapping[str, Value]) -> Job:
    """Return the job of a TRL trainer that is built, with every setting pinned that it shows.

    `settings`: what a trainer does not show, such as `prompt_length` of methods that generate.

    Raises:
        InputError: it is no trainer, a setting that memory depends on cannot be read, or a package is not installed.
    """
    try:
        from probes.callback.candidate_of_run import candidate_of_run
    except ImportError as error:
        raise InputError(f"Reading a trainer needs {_missing('training', TRAINING_PACKAGES, error)}") from error
    try:
        arguments, model = trainer.args, trainer.model
    except AttributeError as error:
        given = type(trainer).__name__
        raise InputError(f"job_from_trainer takes a TRL trainer, such as SFTTrainer(...), not {given}.") from error
    candidate = candidate_of_run(arguments, model, settings)
    pinned = {name: getattr(candidate, name) for name in field_types() if name != "model" and is_shown(candidate, name)}
    return Job(model=candidate.model, method=candidate.method, pinned=pinned, trl_version=candidate.trl_version)


# -- probes ------------------------------------------------------------------------------------------------------------


class ProbeSettings(Struct, frozen=True, kw_only=True):
    """Settings of probes.

    `seconds`: time limit of one probe; `ends_at`: of `time.monotonic`, when a probe that runs is ended; `logs`: folder
    of the workers' logs; `hub_weights`: load real weights instead of random ones; `evaluate`: also run one evaluation
    batch; `resume`: train one more step from the checkpoint, in a second process; `steps`: optimizer steps; `ray`:
    address of the Ray cluster whose nodes run the probes, empty for this machine.
    """

    device: DeviceName
    seconds: float
    logs: Path
    hub_weights: bool = False
    evaluate: bool = False
    resume: bool = True
    steps: int = USUAL_STEPS
    ray: str = ""
    ends_at: float = math.inf


def runnable_here(job: Job, cluster: Cluster, device: DeviceName) -> tuple[Job, tuple[Note, ...]]:
    """Return the job without what probes on this device cannot run, and a warning about each change.

    FlashAttention has no CPU kernels; on GPUs it needs flash-attn, or the Hub's kernels for it
    (transformers 5.23, modeling_flash_attention_utils.py). Liger's kernels are Triton's.
    """
    job, attention_changes = _with_attention_of(job, cluster, device)
    problem = SearchProblem(job=job, cluster=cluster, tuning_class="lora")
    on_gpu = device in ("cuda", "emulated")
    if not with_liger(base_candidate(job, cluster), problem).use_liger_kernel or "use_liger_kernel" in job.pinned:
        return job, attention_changes
    if on_gpu and find_spec("liger_kernel") is not None:
        return job, attention_changes
    without = replace(job, pinned={**job.pinned, "use_liger_kernel": False})
    return without, (*attention_changes, Note("liger_not_installed", {"device": device}))


def _with_attention_of(job: Job, cluster: Cluster, device: DeviceName) -> tuple[Job, tuple[Note, ...]]:
    """Return the job with an attention kernel that probes on this device have, and a warning if it differs."""
    installed = device in ("cuda", "emulated") and any(
        find_spec(name) is not None for name in ("flash_attn", "kernels")
    )
    if installed or "attn_implementation" in job.pinned:
        return job, ()
    choices = attention(SearchProblem(job=job, cluster=cluster, tuning_class="lora"))
    flash = next((name for change in choices if (name := change["attn_implementation"]) in FLASH), None)
    if flash is None:
        return job, ()
    other = choices[0]["attn_implementation"]
    changed = replace(job, pinned={**job.pinned, "attn_implementation": other})
    values = {"device": device, "attn_implementation": other, "missing": flash}
    return changed, (Note("attention_not_installed", values),)


def open_device(cluster: Cluster, settings: ProbeSettings, report_phase: Say) -> Probe:
    """Return the function that runs a probe on a device.

    The function calls `report_phase` with each phase that a worker enters.

    Raises:
        InputError: this machine, or the Ray cluster, has not the GPUs of the cluster, or the packages are not
            installed.
    """
    with _silent_libraries():
        try:
            from probes.runner.devices import DeviceOptions, device
            from probes.runner.runner import WorkerLimits
        except ImportError as error:
            raise InputError(f"A probe needs {_missing('probe', PROBE_PACKAGES, error)}") from error
        options = DeviceOptions(
            logs=settings.logs,
            # Another machine of a Ray cluster has another clock: there the study only begins no probe after the end.
            limits=WorkerLimits(seconds=settings.seconds, ends_at=math.inf if settings.ray else settings.ends_at),
            weights="hub" if settings.hub_weights else "random",
            evaluate=settings.evaluate,
            resume=settings.resume,
            steps=settings.steps,
            say=report_phase,
        )
        if settings.ray:
            on_ray: Probe = _ray().ray_device(settings.device, cluster, options, settings.ray)
            return on_ray
        return device(settings.device, cluster, options)


def open_dry_run(cluster: Cluster, report_phase: Say) -> Probe:
    """Return the function that runs a candidate once on an emulated GPU of a cluster.

    The function calls `report_phase` with each phase that the worker enters.

    Raises:
        InputError: this is not Linux on x86-64, a package is missing, or PyTorch is no build for CUDA.
    """
    from probes.emulated_gpu.machine import refuse_elsewhere

    refuse_elsewhere()
    for name in DRY_RUN_PACKAGES:
        if find_spec(name) is None:
            missing = _missing("dryrun", DRY_RUN_PACKAGES, ModuleNotFoundError(name=name))
            raise InputError(f"A dry run needs {missing}")
    settings = ProbeSettings(device="emulated", seconds=DRY_RUN_SECONDS, logs=cache_root() / "logs", resume=False)
    return open_device(cluster, settings, report_phase)


def dry_run(expected: Estimate, gpu: Gpu, run: Probe, say: Say) -> DryRun:
    """Run an estimate's candidate; `run`: of `open_dry_run`.

    Raises:
        ProbeFailed: the run ended without a result; the message says why.
    """
    candidate = expected.candidate
    say(f"running {candidate.method} of {candidate.model.id} on an emulated {gpu.name} ...")
    measurement = decided(run(candidate), "The dry run")
    if reason := why_undecided(expected, measurement):
        raise ProbeFailed(reason)
    return dry_run_of(expected, measurement, gpu)


def probe_room(cluster: Cluster, settings: ProbeSettings) -> Callable[[], int]:
    """Return a function that returns how many probes may run at a time, on the device that `open_device` opened."""
    return partial(_ray().room, cluster) if settings.ray else lambda: 1


def _ray() -> ModuleType:
    """Import the device on Ray's nodes; raise InputError if the packages are not installed."""
    try:
        from probes.runner import ray_device
    except ImportError as error:
        raise InputError(f"--ray needs {_missing('ray', RAY_PACKAGES, error)}") from error
    return ray_device


def probe(candidate: Candidate, run: Probe, gpu: str, say: Say) -> Measurement:
    """Run one probe and keep its measurement among the user's own results; if that fails, `say` why.

    Raises:
        ProbeFailed: the probe measured no memory; the message says why.
    """
    measurement = decided(run(candidate), "The probe")
    _keep([measurement], gpu, "", say)
    return measurement


def decided(measurement: Measurement, what: str) -> Measurement:
    """Return a measurement that decides whether its candidate fits.

    Raises:
        ProbeFailed: it does not; the message begins with `what` and says why.
    """
    if measurement.decided:
        return measurement
    log = f" Its log: {measurement.log}" if measurement.log else ""
    outcome = measurement.outcome.replace("_", " ")
    raise ProbeFailed(f"{what} says nothing about memory: {outcome}. {measurement.message.rstrip('.')}.{log}")


def _keep(measurements: Iterable[Measurement], gpu: str, storage: str, say: Say) -> None:
    """Add measurements to the user's own results; a full disk or a lost server costs later plans, not this answer."""
    try:
        save_new_results(measurements, gpu, storage)
    except PlanError as error:
        say(f"not kept for later plans: {error}")


ProofEnding = Literal["proven", "contradicted", "broken off"]


class ProvenPlan(Struct, frozen=True, kw_only=True):
    """A plan after its probes. `reason`: one line that says why it is not proven; empty if it is."""

    plan: Plan
    ending: ProofEnding
    reason: str


def prove(
    plan: Plan,
    run: Probe,
    *,
    device: DeviceName,
    storage: str,
    budget_seconds: float,
    began: float,
    say: Say,
    room: Callable[[], int] = lambda: 1,
) -> ProvenPlan:
    """Run an Optuna study of probes and return the plan corrected by its measurements.

    `storage`: a database's URL, which keeps the measurements too; empty: files in the user's cache. `began`: of
    `time.monotonic`, from when the budget counts. `room`: how many probes may run at a time.

    Raises:
        InputError: the storage cannot be used.
    """
    from probes.study import study as studies
    from probes.study.certificate import certificate_lines, certificate_report

    options = studies.StudyOptions(
        device=device, storage=storage, budget_seconds=budget_seconds, began=began, say=say, room=room
    )
    study = studies.prove(plan, run, options)
    _keep(study.measurements, plan.cluster.gpu.name, storage, say)
    report = {
        **certificate_report(study.certificate),
        "study": study.study_name,
        "storage": study.storage,
        "ending": study.ending,
    }
    lines = (*certificate_lines(study.certificate), *([f"{study.ending}: {study.reason}"] if study.reason else []))
    best = study.best.candidate if study.best is not None else None
    corrected = correct_plan(plan, best, study.measurements, lines, report)
    if study.ending in BROKEN_OFF:
        reason = f"The probes ended early ({study.ending}): {study.reason or SET_ASIDE}."
        return ProvenPlan(plan=corrected, ending="broken off", reason=reason)
    if wrong := plan_contradiction(plan, study.measurements):
        reason = f"The probes contradict the plan: {sentence(wrong)}."
        return ProvenPlan(plan=corrected, ending="contradicted", reason=reason)
    return ProvenPlan(plan=corrected, ending="proven", reason="")


# -- the packages ------------------------------------------------------------------------------------------------------


def _missing(extra: str, packages: Sequence[str], error: Exception) -> str:
    """Return which extra to install: the packages that are missing or, if all are there, the import error."""
    missing = [name for name in packages if find_spec(name) is None]
    what = f"{type(error).__name__}: {' '.join(str(error).split())}"
    reason = f"{', '.join(missing)} not installed" if missing else what
    return f"the extra {extra} (pip install 'finetune-plan[{extra}]'): {reason}."


@contextlib.contextmanager
def _silent_libraries() -> Iterator[None]:
    """Drop everything that is printed to stdout and stderr inside the `with` block."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield

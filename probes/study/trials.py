"""The trials of a study: their measurement stored, their end, and the ones that an earlier process left running."""

from collections.abc import Callable

import optuna
from optuna.trial import Trial, TrialState

from planner.errors import PlanError
from planner.measurements.documents import measurement_line, stored_measurement
from planner.measurements.measurement import Measurement
from probes.study.sampler import INTERRUPTED, MEASUREMENT, OWNER, REASON, text_of
from probes.study.space import GridPoint, Space
from probes.study.storage import Heartbeats, alive, parts_of, this_process

BYTES_OVER = "bytes_over_budget"  # the trials' constraint: positive if the candidate ran out of memory


def record(study: optuna.Study, trial: Trial, measurement: Measurement, space: Space) -> None:
    """Store a trial's measurement, then finish the trial. The probe is never repeated once it is stored."""
    trial.set_user_attr(MEASUREMENT, measurement_line(measurement))
    finish(study, trial, measurement, space)


def finish(study: optuna.Study, trial: Trial, measurement: Measurement, space: Space) -> None:
    """Finish a trial. Out of memory is a completed trial that violates a constraint: samplers ignore failed trials."""
    if not measurement.decided:
        fail(study, trial, f"{measurement.outcome} {measurement.message}".rstrip())
        return
    if BYTES_OVER not in trial.constraints:
        trial.set_constraint(BYTES_OVER, float(over_bytes(measurement, space)))
    point = space.point(trial.params)
    assert point is not None
    study.tell(trial.number, objective(measurement, space, point))


def fail(study: optuna.Study, trial: Trial, reason: str) -> None:
    """Finish a trial as failed, with the reason as an attribute."""
    trial.set_user_attr(REASON, reason)
    study.tell(trial.number, state=TrialState.FAIL)


def objective(measurement: Measurement, space: Space, point: GridPoint) -> float:
    """Return a trial's objective: the value of the job's goal if the candidate ran, else 0."""
    if measurement.outcome != "fits":
        return 0.0
    goal, candidate = space.problem.job.optimize, measurement.candidate
    if goal == "max-length":
        return float(candidate.row_tokens)
    return float(candidate.per_device_train_batch_size) if goal == "batch-size" else speed(measurement, space, point)


def speed(measurement: Measurement, space: Space, point: GridPoint) -> float:
    """Return tokens per second, measured; estimated for the emulated device, which has no clock."""
    answer = space.estimate(point)
    return measurement.tokens_per_second or (answer.throughput.tokens_per_second if answer is not None else 0.0)


def over_bytes(measurement: Measurement, space: Space) -> int:
    """Return the bytes by which a candidate exceeded the GPU: positive if it ran out of memory, else not."""
    if measurement.outcome == "out_of_memory":
        return measurement.shortage.over_bytes if measurement.shortage is not None else 1
    return min(measurement.peak_bytes - space.problem.cluster.gpu.free_bytes, 0)


def adopt(
    study: optuna.Study,
    space: Space,
    say: Callable[[str], None],
    beats: Heartbeats | None = None,
    own: frozenset[int] = frozenset(),
) -> None:
    """Finish the trials that an earlier process left running: completed if they have a measurement, else failed.

    On a shared storage (`beats`) the trials of living processes stay. One of another host lives while its heart beats.
    `own`: numbers of the trials that this session runs.

    Raises:
        PlanError: the storage is not shared, and the process that started one is still alive.
    """
    stopped = beats.stopped(study) if beats is not None else set()
    for left in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        if left.number in own:
            continue
        owner = text_of(left, OWNER)
        lives = owner not in ("", this_process()) and left._trial_id not in stopped and alive(owner)
        if beats is not None and lives:
            continue
        trial = Trial(study, left._trial_id)
        if MEASUREMENT in left.user_attrs:
            finish(study, trial, stored_measurement(text_of(left, MEASUREMENT)), space)
            say(f"probe {left.number + 1}: was measured before the last session ended")
            continue
        if lives:
            host, process, _ = parts_of(owner)
            raise PlanError(
                f"Process {process} on {host} is still running this study. "
                "Wait for it, end it, or give another --storage."
            )
        fail(study, trial, INTERRUPTED)
        say(f"probe {left.number + 1}: was interrupted, and is repeated if it is still the most informative one")

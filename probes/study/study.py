"""The study: which candidate to probe next, until the best one has run and nothing better is open."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Literal

import optuna
from optuna.trial import FrozenTrial, Trial, TrialState

from planner.candidate import Candidate
from planner.errors import PlanError
from planner.measurements.corrected_estimate import differences
from planner.measurements.measurement import DeviceName, Measurement, Outcome, measurement_line, measurement_of
from planner.plan import Plan
from planner.quantities import Estimate
from planner.search.knobs import SearchProblem, TuningClass
from planner.search.search import attempt
from planner.units import format_count, format_seconds, format_size
from probes.study.certificate import Certificate, certificate, learned, learned_line
from probes.study.sampler import INTERRUPTED, MEASUREMENT, OWNER, REASON, PlanSampler
from probes.study.space import Attempt, Place, Space, space_of
from probes.study.state import Knowledge
from probes.study.storage import (
    alive,
    default_storage,
    library_versions,
    open_study,
    shown,
    storage_errors,
    study_name,
    this_process,
)

Probe = Callable[[Candidate], Measurement]
Say = Callable[[str], None]
# Why a study ended: "environment" what would happen to every other candidate too, "failing" too many probes that say nothing about memory.
Ending = Literal["certified", "nothing fits", "set aside", "budget", "interrupted", "environment", "failing"]

BYTES_OVER = "bytes_over_budget"  # the constraint: above 0 where memory did not suffice
OF_THE_ENVIRONMENT: frozenset[Outcome] = frozenset({"gpu_in_use", "disk_full"})
MOST_FAILURES = 6  # in one session


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyOptions:
    """How a study runs. `storage`: a URL of Optuna's, empty for a file of the user's own; `versions`: of what is measured, empty for what is installed."""

    device: DeviceName = "cuda"
    storage: str = ""
    budget_seconds: float = math.inf
    versions: dict[str, str] = field(default_factory=dict)
    say: Say = lambda _: None  # told a line whenever something is known
    attempt: Attempt = attempt  # a candidate's answer from the rungs below
    clock: Callable[[], float] = monotonic


@dataclass(frozen=True, kw_only=True, slots=True)
class Proven:
    """What a study has shown so far. `best`: the measurement of the best candidate that ran, None where none has."""

    problem: SearchProblem
    best: Measurement | None
    measurements: tuple[Measurement, ...]  # that say something about memory, in the order of their probes
    probes: int  # of this session
    certificate: Certificate
    ending: Ending
    reason: str  # of an ending that is none of the study's own; else empty
    study_name: str
    storage: str


def prove(asked: SearchProblem | Plan, probe: Probe, options: StudyOptions | None = None) -> Proven:
    """Probe until the best candidate of a class has run and nothing better is open; or the budget is spent, or Ctrl-C ends it.

    The same problem goes on where it was left: what was measured is not measured again.

    Raises:
        PlanError: the storage cannot be used, or another process is at this study.
    """
    options = options or StudyOptions()
    problem = problem_of(asked) if isinstance(asked, Plan) else asked
    url = options.storage or default_storage()
    name = study_name(problem, options.device, options.versions or library_versions())
    sampler = PlanSampler(space_of(problem, options.device, options.attempt))
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with storage_errors(url):
        study = open_study(url, name, sampler)
        adopt(study, sampler.space, options.say)
        if before := len(sampler.knowledge(study).measured):
            options.say(
                f"{format_count(before)} probe{'s' if before != 1 else ''} of this problem {'were' if before != 1 else 'was'} measured before: {shown(url)}"
            )
        session = Session(study=study, sampler=sampler, probe=probe, options=options, began=options.clock())
        ending, reason = session.run()
        knowledge = sampler.knowledge(study)
    best = best_measurement(knowledge)
    return Proven(
        problem=problem,
        best=best,
        measurements=tuple(knowledge.measured.values()),
        probes=session.count,
        certificate=certificate(knowledge),
        ending=ending,
        reason=reason,
        study_name=name,
        storage=shown(url),
    )


def problem_of(plan: Plan) -> SearchProblem:
    """The class of tuning that a plan recommends, as a problem: with its rank, and with the host's help where it needs that."""
    candidate, job = plan.best.candidate, plan.job
    tuning_class: TuningClass = (
        "full" if candidate.tuning == "full" else "lora" if candidate.quantization in ("none", "mxfp4") else "qlora"
    )
    if tuning_class == "qlora" and job.model.quantization == candidate.quantization:
        tuning_class = "lora"  # as published: planner/search/knobs.py `tuning`
    if job.lora_ranks and candidate.tuning == "lora":
        job = replace(job, pinned={**job.pinned, "lora_r": candidate.lora_r}, lora_ranks=())
    helped = (candidate.offload_optimizer or candidate.offload_param) and not {
        "offload_optimizer",
        "offload_param",
    } & job.pinned.keys()
    return SearchProblem(job=job, cluster=plan.cluster, tuning_class=tuning_class, offload=helped)


def best_measurement(knowledge: Knowledge) -> Measurement | None:
    """Of the candidates that ran, the one with most of what the job asks for; of its speed, as measured."""
    goal, space = knowledge.space.problem.job.optimize, knowledge.space

    def worth(place: Place) -> tuple[float, ...]:
        precise, *asked = space.merit(place)
        return (
            (precise, speed(knowledge.measured[place], space, place), *asked)
            if goal == "throughput"
            else (precise, *asked)
        )

    return knowledge.measured[max(knowledge.ran, key=worth)] if knowledge.ran else None


# -- one session -------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class Session:
    """From the start of the command to its end. `count`: probes so far, `failures`: those of them that say nothing about memory."""

    study: optuna.Study
    sampler: PlanSampler
    probe: Probe
    options: StudyOptions
    began: float
    count: int = 0
    failures: int = 0
    seconds: float = 0.0  # of the longest probe

    def run(self) -> tuple[Ending, str]:
        """Probe after probe, to the end and its reason. Ctrl-C ends it wherever it comes; a trial that it leaves behind is adopted next time."""
        try:
            return self._probe_after_probe()
        except KeyboardInterrupt:
            return "interrupted", "the same command goes on from here"

    def _probe_after_probe(self) -> tuple[Ending, str]:
        while (place := self.sampler.propose(self.study)) is not None:
            if not self._affordable():
                return (
                    "budget",
                    f"{format_seconds(self.options.budget_seconds)} are spent, or the next probe would not fit into what is left",
                )
            began = self.options.clock()
            measurement = self._probed(place)
            self.count, self.seconds = self.count + 1, max(self.seconds, self.options.clock() - began)
            if measurement is None or measurement.decided:
                continue
            self.failures += 1
            if measurement.outcome in OF_THE_ENVIRONMENT:
                return "environment", f"{measurement.outcome.replace('_', ' ')}: {measurement.message}"
            if self.failures >= MOST_FAILURES:
                return (
                    "failing",
                    f"{self.failures} probes said nothing about memory; the last one: {measurement.outcome} {measurement.message}".rstrip(),
                )
        return self._own_ending(), ""

    def _own_ending(self) -> Ending:
        knowledge = self.sampler.knowledge(self.study)
        if knowledge.set_aside:
            return "set aside"
        return "certified" if knowledge.ran else "nothing fits"

    def _affordable(self) -> bool:
        """Whether a probe as long as the longest so far ends within the budget; the first one always may."""
        spent = self.options.clock() - self.began
        return (
            spent + self.seconds <= self.options.budget_seconds if self.count else spent <= self.options.budget_seconds
        )

    def _probed(self, proposed: Place) -> Measurement | None:
        """One trial. None: its parameters, which others may queue, are no candidate's."""
        sampler, say = self.sampler, self.options.say
        trial = self.study.ask(fixed_distributions=sampler.knobs(proposed))
        trial.set_user_attr(OWNER, this_process())
        place = sampler.space.place(trial.params)
        if place is None or not sampler.space.starts(place):
            fail(self.study, trial, "no candidate has these settings")
            return None
        say(f"probe {trial.number + 1}: {asked_line(sampler.knowledge(self.study), place)}")
        try:
            measurement = self.probe(sampler.space.candidate(place))
        except BaseException as error:
            fail(
                self.study,
                trial,
                INTERRUPTED if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}",
            )
            raise
        record(self.study, trial, measurement, sampler.space)
        say(f"probe {trial.number + 1}: {seen_line(measurement, sampler.space.estimate(place))}")
        if measurement.decided:
            say(learned_line(learned(sampler.knowledge(self.study).belief)))
        return measurement


# -- trials ------------------------------------------------------------------------------------------------------------


def record(study: optuna.Study, trial: Trial, measurement: Measurement, space: Space) -> None:
    """Write a measurement down, first of all: from then on the probe is not repeated, whatever happens to this process."""
    trial.set_user_attr(MEASUREMENT, measurement_line(measurement))
    finish(study, trial, measurement, space)


def finish(study: optuna.Study, trial: Trial, measurement: Measurement, space: Space) -> None:
    """What did not fit is a completed trial that breaks a constraint: samplers learn nothing from trials that failed."""
    if not measurement.decided:
        fail(study, trial, f"{measurement.outcome} {measurement.message}".rstrip())
        return
    if BYTES_OVER not in trial.constraints:
        trial.set_constraint(BYTES_OVER, float(over_bytes(measurement, space)))
    place = space.place(trial.params)
    assert place is not None
    study.tell(trial.number, objective(measurement, space, place))


def fail(study: optuna.Study, trial: Trial, reason: str) -> None:
    trial.set_user_attr(REASON, reason)
    study.tell(trial.number, state=TrialState.FAIL)


def objective(measurement: Measurement, space: Space, place: Place) -> float:
    """What the job asks for, of a candidate that ran; nothing of one that did not."""
    if measurement.outcome != "fits":
        return 0.0
    goal, candidate = space.problem.job.optimize, measurement.candidate
    if goal == "max-length":
        return float(candidate.row_tokens)
    return float(candidate.per_device_train_batch_size) if goal == "batch-size" else speed(measurement, space, place)


def speed(measurement: Measurement, space: Space, place: Place) -> float:
    """Tokens per second: measured, or estimated where a device has no time (`simulated`)."""
    answer = space.estimate(place)
    return measurement.tokens_per_second or (answer.throughput.tokens_per_second if answer is not None else 0.0)


def over_bytes(measurement: Measurement, space: Space) -> int:
    """Bytes over the card: what was missing at least, or the most that was taken less what there is. Never above 0 for what ran."""
    if measurement.outcome == "out_of_memory":
        return measurement.shortage.over_bytes if measurement.shortage is not None else 1
    return min(measurement.peak_bytes - space.problem.cluster.gpu.free_bytes, 0)


def adopt(study: optuna.Study, space: Space, say: Say) -> None:
    """Trials that a process left behind: those with a measurement are finished, the others failed without a word about their candidates.

    Raises:
        PlanError: the process that started one still runs.
    """
    for left in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        trial = Trial(study, left._trial_id)
        if MEASUREMENT in left.user_attrs:
            finish(study, trial, measurement_of_trial(left), space)
            say(f"probe {left.number + 1}: was measured before the last session ended")
            continue
        owner = left.user_attrs.get(OWNER, "")
        if owner and owner != this_process() and alive(owner):
            host, process, _ = owner.split(":")
            raise PlanError(
                f"Process {process} on {host} is at this study. Wait for it, end it, or give another --storage."
            )
        fail(study, trial, INTERRUPTED)
        say(f"probe {left.number + 1}: was interrupted, and is asked again if it still decides most")


def measurement_of_trial(trial: FrozenTrial) -> Measurement:
    return measurement_of(json.loads(trial.user_attrs[MEASUREMENT]))


# -- progress ----------------------------------------------------------------------------------------------------------


def asked_line(knowledge: Knowledge, place: Place) -> str:
    return f"{knowledge.space.shown(place)} (fits with {knowledge.chance(place):.0%})"


def seen_line(measurement: Measurement, answer: Estimate | None) -> str:
    """The same figures as in the report: what the heaviest phase needed, and a speed only of a GPU."""
    took = format_seconds(measurement.wall_seconds)
    if measurement.outcome == "fits":
        needed = (
            max((phase.needed_bytes for phase in differences(answer, measurement)), default=0)
            if answer is not None
            else 0
        )
        rate = (
            f", {format_count(round(measurement.tokens_per_second))} tokens/s" if measurement.device == "cuda" else ""
        )
        return f"fits, needed {format_size(needed or measurement.peak_bytes)}{rate} ({took})"
    if measurement.shortage is not None:
        shortage = measurement.shortage
        return f"out of memory in the {shortage.phase.replace('_', ' ')} phase, {format_size(shortage.over_bytes)} too much at least ({took})"
    return f"{measurement.outcome.replace('_', ' ')}: {measurement.message} ({took})"

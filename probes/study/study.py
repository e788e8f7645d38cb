"""Run a study: probe candidate after candidate, until the best one has run and no better one is open."""

import math
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from threading import Thread
from time import monotonic, sleep
from typing import Literal, NamedTuple

import optuna
from msgspec import Struct, field
from msgspec.structs import replace
from optuna.trial import Trial, TrialState

from planner.candidate import Candidate
from planner.errors import PlanError
from planner.files.database import hide_password
from planner.measurements.corrected_estimate import heaviest_rank, phase_differences
from planner.measurements.measurement import DeviceName, Measurement, Outcome
from planner.planning import Plan
from planner.quantities import Estimate
from planner.search.fit import estimate_or_none
from planner.search.knobs import SearchProblem, tuning_class_of
from planner.units import format_count, format_seconds, format_size
from probes.study.certificate import MOST_OFF, Certificate, certificate, learned_constants, learned_line, off_share
from probes.study.sampler import INTERRUPTED, OWNER, PlanSampler
from probes.study.space import Estimator, GridPoint, space_of
from probes.study.state import Knowledge
from probes.study.storage import (
    Heartbeats,
    default_storage,
    is_shared,
    library_versions,
    open_study,
    outlast,
    storage_errors,
    study_name,
    this_process,
    turn,
)
from probes.study.trials import adopt, fail, record, speed

Probe = Callable[[Candidate], Measurement]
NoTrial = Literal["ended", "unaffordable", "wait"]  # why a session begins no trial
Say = Callable[[str], None]
# Why a study ended. "not certified": on a CPU, whose peak is too far from the estimate. "environment": an error that
# every other candidate would meet too, such as a full disk; "failing": too many probes that failed for another reason
# than memory.
Ending = Literal[
    "certified", "not certified", "nothing fits", "set aside", "budget", "interrupted", "environment", "failing"
]

ENVIRONMENT_OUTCOMES: frozenset[Outcome] = frozenset({"gpu_in_use", "disk_full"})
WAIT_SECONDS = 1.0  # between two looks for the end of other processes' trials
MOST_FAILURES = 6  # probes in one session that fail for another reason than memory, before it ends


class StudyOptions(Struct, frozen=True, kw_only=True):
    """Settings of a study.

    `storage`: an Optuna storage URL; empty for a file in the user's cache folder.
    `began`: by `clock`, from when the budget counts.
    `versions`: of the libraries that are measured; empty for the installed ones.
    `room`: how many probes may run at a time, read again before each. The device must be safe to call from threads if
    it is above 1.
    """

    device: DeviceName = "cuda"
    storage: str = ""
    budget_seconds: float = math.inf
    began: float | Literal["now"] = "now"
    versions: dict[str, str] = field(default_factory=dict)
    say: Say = lambda _: None  # called with each line of progress
    estimator: Estimator = estimate_or_none  # estimates a candidate; None if its engine would not start
    clock: Callable[[], float] = monotonic
    room: Callable[[], int] = lambda: 1


class StudyResult(Struct, frozen=True, kw_only=True):
    """The result of a study so far. `best`: the measurement of the best candidate that ran; None if none has."""

    problem: SearchProblem
    best: Measurement | None
    measurements: tuple[Measurement, ...]  # of the probes that fitted or ran out of memory, in order
    probes: int  # number of probes in this session
    certificate: Certificate
    ending: Ending
    reason: str  # why the study ended early; empty if it is complete
    study_name: str
    storage: str


def prove(target: SearchProblem | Plan, probe: Probe, options: StudyOptions | None = None) -> StudyResult:
    """Probe candidates until the best one has run and no better one is open, the budget is spent, or Ctrl-C is pressed.

    A study of the same problem continues where it was left: no probe is repeated.

    Args:
        target: a problem, or a plan, whose recommended tuning class is probed.
        probe: runs one candidate and returns its measurement.
        options: how the study runs.

    Raises:
        PlanError: the storage cannot be used, or another process runs this study.
    """
    options = options or StudyOptions()
    problem = problem_of(target) if isinstance(target, Plan) else target
    url = options.storage or default_storage()
    name = study_name(problem, options.device, options.versions or library_versions())
    sampler = PlanSampler(space_of(problem, options.device, options.estimator))
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # a WARNING repeats the SQL of each error that follows
    with storage_errors(url):
        study = open_study(url, name, sampler)
        beats = Heartbeats(url) if is_shared(url) else None
        with turn(url, name):
            adopt(study, sampler.space, options.say, beats)
        if before := len(sampler.knowledge(study).measured):
            probes = "probe of this study was" if before == 1 else "probes of this study were"
            options.say(f"{format_count(before)} {probes} measured before: {hide_password(url)}")
        began = options.clock() if options.began == "now" else options.began
        session = Session(study=study, sampler=sampler, probe=probe, options=options, url=url, beats=beats, began=began)
        ending, reason = session.run()
        knowledge = outlast(lambda: sampler.knowledge(study), url, options.say)
    best = best_measurement(knowledge)
    return StudyResult(
        problem=problem,
        best=best,
        measurements=tuple(knowledge.measured.values()),
        probes=session.count,
        certificate=certificate(knowledge),
        ending=ending,
        reason=reason,
        study_name=name,
        storage=hide_password(url),
    )


def problem_of(plan: Plan) -> SearchProblem:
    """Return the search problem of the tuning class that a plan recommends, with its LoRA rank and its offloading."""
    candidate, job = plan.best.candidate, plan.job
    tuning_class = tuning_class_of(candidate, job)
    if job.lora_ranks and candidate.tuning == "lora":
        job = replace(job, pinned={**job.pinned, "lora_r": candidate.lora_r}, lora_ranks=())
    offload = (candidate.offload_optimizer or candidate.offload_param) and not {
        "offload_optimizer",
        "offload_param",
    } & job.pinned.keys()
    return SearchProblem(job=job, cluster=plan.cluster, tuning_class=tuning_class, offload=offload)


def best_measurement(knowledge: Knowledge) -> Measurement | None:
    """Return the measurement of the best candidate that ran, by the job's goal; speed counts as measured."""
    goal, space = knowledge.space.problem.job.optimize, knowledge.space

    def worth(point: GridPoint) -> tuple[float, ...]:
        precise, *rest = space.merit(point)
        return (
            (precise, speed(knowledge.measured[point], space, point), *rest)
            if goal == "throughput"
            else (precise, *rest)
        )

    return knowledge.measured[max(knowledge.ran, key=worth)] if knowledge.ran else None


# -- one session -------------------------------------------------------------------------------------------------------


class Session(Struct, kw_only=True):
    """One run of a study by one process. `failures`: probes that failed for another reason than memory."""

    study: optuna.Study
    sampler: PlanSampler
    probe: Probe
    options: StudyOptions
    began: float
    url: str = ""  # of the storage; empty: in memory
    beats: Heartbeats | None = None  # of a shared storage
    count: int = 0  # probes so far
    failures: int = 0
    seconds: float = 0.0  # duration of the longest probe
    own: set[int] = field(default_factory=set)  # numbers of the trials that this session began

    def run(self) -> tuple[Ending, str]:
        """Run probes until the study ends; return why it ended.

        Ctrl-C ends it at any moment. The next session completes a trial that was left running (`adopt`).
        """
        try:
            return self._run_probes()
        except KeyboardInterrupt:
            return "interrupted", "the same command goes on from here"

    def _run_probes(self) -> tuple[Ending, str]:
        """Run probes until no point is open, the budget is spent, or too many fail; return the ending and why.

        Probes that run when the study ends for another reason are waited for, as each may decide something.
        """
        running: dict[Future[Measurement], _Started] = {}
        ended: tuple[Ending, str] | None = None
        while True:
            none_left = "ended" if ended else self._fill(running)
            if none_left == "unaffordable":
                ended = self._over_budget()
            complete = none_left == "ended" and not running  # a probe that runs may yet open points
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                failure = self._finish(running.pop(future), future)
                ended = ended or failure
            if complete or (ended and not running):
                return ended or (self._own_ending(), "")
            if not running and none_left == "wait":
                sleep(WAIT_SECONDS)

    def _fill(self, running: "dict[Future[Measurement], _Started]") -> "NoTrial | Literal['']":
        """Start probes while there is room; return why there is no more trial, empty if there is no more room."""
        while len(running) < max(self.options.room(), 1):
            claimed = outlast(self._claim, self.url, self.options.say)
            if not isinstance(claimed, Trial):
                return claimed
            self._start(claimed, running)
        return ""

    def _claim(self) -> "Trial | NoTrial":
        """Begin a trial, or say why there is none: other processes may still run trials that decide.

        No other process of a shared storage chooses meanwhile, so that two never probe one candidate.
        """
        with turn(self.url, self.study.study_name):
            if self.beats is not None:
                adopt(self.study, self.sampler.space, self.options.say, self.beats, frozenset(self.own))
            proposed = self.sampler.propose(self.study)
            elsewhere = self._runs_elsewhere()
            if proposed is None and not elsewhere:
                return "ended"
            if self._over_budget() is not None:
                return "unaffordable"
            if proposed is None:
                return "wait"
            trial = self.study.ask(fixed_distributions=self.sampler.knobs(proposed))
            if self.beats is not None:
                self.beats.beat(trial)
            trial.set_user_attr(OWNER, this_process())
            self.own.add(trial.number)
            return trial

    def _runs_elsewhere(self) -> bool:
        """Return whether other processes of a shared storage run trials."""
        if self.beats is None:
            return False
        running = self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        return any(trial.number not in self.own for trial in running)

    def _start(self, trial: Trial, running: "dict[Future[Measurement], _Started]") -> None:
        """Start the probe of a trial, unless the trial's parameters, which users may set, are no candidate."""
        sampler, began = self.sampler, self.options.clock()
        point = sampler.space.point(trial.params)
        if point is None or not sampler.space.starts(point):
            self.count += 1
            fail(self.study, trial, "no candidate has these settings")
            return
        before = outlast(lambda: sampler.knowledge(self.study), self.url, self.options.say)
        chance = f"fits with a probability of {before.chance(point):.0%}"
        self.options.say(f"probe {trial.number + 1}: {before.space.describe(point)} ({chance})")
        start = run_now if self.options.room() <= 1 else run_beside
        running[start(self._with_heartbeat(trial), sampler.space.candidate(point))] = _Started(trial, point, began)

    def _with_heartbeat(self, trial: Trial) -> Probe:
        """Return the probe with a heartbeat of its trial while it runs, on a shared storage."""
        beats, probe = self.beats, self.probe
        if beats is None:
            return probe

        def beating(candidate: Candidate) -> Measurement:
            with beats.beating(trial):
                return probe(candidate)

        return beating

    def _finish(self, started: "_Started", probe: Future[Measurement]) -> tuple[Ending, str] | None:
        """Record the measurement of a probe that has ended; return why the study ends with it, None if it goes on."""
        (trial, point, began), space = started, self.sampler.space
        try:
            measurement = probe.result()
        except BaseException as error:
            elsewhere = isinstance(error, KeyboardInterrupt | PlanError)  # PlanError: the Ray cluster is lost
            fail(self.study, trial, INTERRUPTED if elsewhere else f"{type(error).__name__}: {error}")
            raise
        if measurement.outcome == "hung" and self.options.clock() - self.began >= self.options.budget_seconds:
            fail(self.study, trial, INTERRUPTED)  # the budget ended it, which says nothing about the candidate
            self.options.say(f"probe {trial.number + 1}: ended with the budget")
            return self._over_budget() or ("budget", "")
        outlast(lambda: self._record(trial, measurement), self.url, self.options.say)
        self.count += 1
        self.seconds = max(self.seconds, self.options.clock() - began)
        self.options.say(f"probe {trial.number + 1}: {probe_line(measurement, space.estimate(point))}")
        if measurement.decided:
            after = outlast(lambda: self.sampler.knowledge(self.study), self.url, self.options.say)
            self.options.say(learned_line(learned_constants(after.belief)))
            return None
        self.failures += 1
        if measurement.outcome in ENVIRONMENT_OUTCOMES:
            return "environment", f"{measurement.outcome.replace('_', ' ')}: {measurement.message}"
        if self.failures >= MOST_FAILURES:
            last = f"{measurement.outcome} {measurement.message}".rstrip()
            return "failing", f"{self.failures} probes said nothing about memory; the last one: {last}"
        return None

    def _own_ending(self) -> Ending:
        """Return how the study ended when no open point is left."""
        knowledge = self.sampler.knowledge(self.study)
        if knowledge.set_aside:
            return "set aside"
        if not knowledge.ran:
            return "nothing fits"
        return "certified" if abs(off_share(knowledge)) <= MOST_OFF else "not certified"

    def _over_budget(self) -> tuple[Ending, str] | None:
        """Return the ending if a probe as long as the longest so far would not end within the budget.

        The first probe always may begin.
        """
        spent = self.options.clock() - self.began
        needed = spent + self.seconds if self.count else spent
        if needed < self.options.budget_seconds:
            return None
        budget = format_seconds(self.options.budget_seconds)
        return "budget", f"{budget} are spent, or the next probe would not fit into what is left"

    def _record(self, trial: Trial, measurement: Measurement) -> None:
        """Store a trial's measurement, unless the server did so before it was lost."""
        if self.study.get_trials(deepcopy=False)[trial.number].state == TrialState.RUNNING:
            record(self.study, trial, measurement, self.sampler.space)


class _Started(NamedTuple):
    """A trial whose probe runs."""

    trial: Trial
    point: GridPoint
    began: float


def run_now(probe: Probe, candidate: Candidate) -> Future[Measurement]:
    """Run a probe in this thread, and return it as a future that is done."""
    ended: Future[Measurement] = Future()
    _run_into(ended, probe, candidate)
    return ended


def run_beside(probe: Probe, candidate: Candidate) -> Future[Measurement]:
    """Run a probe in a thread of its own, which does not keep this process from ending."""
    ended: Future[Measurement] = Future()
    Thread(target=_run_into, args=(ended, probe, candidate), daemon=True).start()
    return ended


def _run_into(ended: Future[Measurement], probe: Probe, candidate: Candidate) -> None:
    try:
        ended.set_result(probe(candidate))
    except BaseException as error:  # Ctrl-C too: it is raised where the result is read
        ended.set_exception(error)


# -- progress ----------------------------------------------------------------------------------------------------------


def probe_line(measurement: Measurement, answer: Estimate | None) -> str:
    """Return the line on a probe's result: bytes as in the report (of the heaviest phase), and the speed on a GPU."""
    took = format_seconds(measurement.wall_seconds)
    if measurement.outcome == "fits":
        needed = (
            max((phase.needed_bytes for phase in phase_differences(answer, measurement)), default=0)
            if answer is not None
            else 0
        )
        rate = (
            f", {format_count(round(measurement.tokens_per_second))} tokens/s" if measurement.device == "cuda" else ""
        )
        where = _on_rank(measurement, heaviest_rank(measurement).rank)
        return f"fits, needed {format_size(needed or measurement.peak_bytes)}{where}{rate} ({took})"
    if measurement.shortage is not None:
        phase = measurement.shortage.phase.replace("_", " ")
        over, where = format_size(measurement.shortage.over_bytes), _on_rank(measurement, measurement.shortage.rank)
        return f"out of memory in the {phase} phase{where}, {over} too much at least ({took})"
    return f"{measurement.outcome.replace('_', ' ')}: {measurement.message} ({took})"


def _on_rank(measurement: Measurement, rank: int) -> str:
    """Name the process that decided, of several that ran."""
    several = measurement.candidate.num_processes > 1
    return f" on rank {rank}" if several else ""

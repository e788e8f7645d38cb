"""Trainer callback: compare the memory of a run's first steps with the plan, and keep the measurement for later plans.

    from probes import MemoryPlanCallback

    trainer = SFTTrainer(..., callbacks=[MemoryPlanCallback("plan.json")])

It prints one line if the memory is outside the expected interval. It reads PyTorch's counters and changes nothing: the
peak statistics are not reset, so a peak is attributed to the phase at whose end it was first seen. It never raises into
a run: an error is printed in one line, and the callback does nothing from then on. Only the first process prints. Not
yet run on a GPU.
"""

import importlib.metadata
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from planner.candidate import Candidate
from planner.errors import InputError, PlanError
from planner.estimation import estimate
from planner.gpus.cluster import Cluster
from planner.jobs.settings import settings_text
from planner.measurements.corrected_estimate import heaviest_rank, needed_peak_bytes
from planner.measurements.corrected_plan import changed_settings
from planner.measurements.fingerprint import candidate_key
from planner.measurements.measurement import Measurement, PhasePeak, RankMemory
from planner.measurements.own_results import save_result
from planner.planning import Plan
from planner.quantities import Estimate, Phase
from planner.requests.saved_report import read_plan
from planner.settings.setting import Value
from planner.units import format_gib
from probes.callback.candidate_of_run import candidate_of_run
from probes.callback.memory_of_run import RunMemory, cuda_memory

# The first step creates the optimizer's states, the second is the first with all memory, the third confirms it.
FIRST_STEPS = 3
LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate")


def to_stderr(line: str) -> None:
    """Print a line to stderr."""
    print(f"plan: {line}", file=sys.stderr, flush=True)


class PeakRecorder:
    """Records the memory peaks of one process, phase by phase, and compares them with an estimate."""

    def __init__(self, expected: Estimate, candidate: Candidate, memory: RunMemory) -> None:
        self.expected = expected
        self.candidate = candidate
        self._memory = memory
        self._peaks: dict[Phase, PhasePeak] = {}
        self._highest = (0, 0)  # peaks of the allocated and the reserved bytes before the current phase
        self._allocator: dict[str, int] = {}
        self._began = self._last = time.monotonic()

    def record(self, phase: Phase) -> None:
        """Read the process's peaks at the end of a phase; they belong to this phase if they have risen during it."""
        now, reading = time.monotonic(), self._memory.read()
        seconds, self._last = now - self._last, now
        peaks = (reading.peak_allocated_bytes, reading.peak_reserved_bytes)
        self._allocator = reading.allocator
        if not any(new > old for new, old in zip(peaks, self._highest, strict=True)):
            return
        self._highest = peaks
        driver = reading.peak_reserved_bytes + reading.outside_bytes if reading.outside_bytes else 0
        self._peaks[phase] = PhasePeak(
            name=phase,
            allocated_bytes=reading.peak_allocated_bytes,
            reserved_bytes=reading.peak_reserved_bytes,
            driver_bytes=driver,
            seconds=seconds,
        )

    def measurement(self, step_seconds: float) -> Measurement:
        """Return the recorded peaks as the measurement of rank 0."""
        gpu = self._memory.gpu
        rank = RankMemory(
            rank=0,
            phases=tuple(self._peaks.values()),
            state_bytes={},
            capacity_bytes=gpu.total_bytes,
            allocator=self._allocator,
        )
        versions = {name: importlib.metadata.version(name) for name in LIBRARIES} | {"gpu": gpu.name}
        return Measurement(
            candidate=self.candidate,
            device="cuda",
            outcome="fits",
            ranks=(rank,),
            shortage=None,
            step_seconds=step_seconds,
            tokens_per_second=0.0,
            wall_seconds=time.monotonic() - self._began,
            message="",
            log="",
            versions=versions,
        )

    def verdict(self, steps: int, finished: bool) -> str:
        """Return a line if the peak is outside the expected interval, else an empty text.

        A peak below the interval counts only when all steps are done (`finished`).
        """
        measured = self.measurement(0.0)
        gpu = self.expected.gpus[0]
        needed, (low, high) = needed_peak_bytes(gpu, measured), gpu.interval_bytes
        phase = heaviest_rank(measured).peak_phase.replace("_", " ")
        expected = f"{format_gib(low, 1)} to {format_gib(high, 1)} {self.expected.evidence}"
        took = f"{_count(steps)} needed {format_gib(needed, 1)} of {self._memory.gpu.name}"
        if needed > high:
            return f"{took}, more than the {expected}; the peak was before the end of the {phase}"
        if finished and needed < low:
            return f"{took}, less than the {expected}: rows of full length may still come"
        return ""


class MemoryPlanCallback(TrainerCallback):
    """Callback for a TRL trainer that compares the memory of the first steps with the plan."""

    def __init__(
        self,
        plan: Plan | Estimate | Path | str | None = None,
        *,
        gpus: str | None = None,
        settings: Mapping[str, Value] | None = None,
        steps: int = FIRST_STEPS,
        memory: RunMemory | None = None,
        say: Callable[[str], None] = to_stderr,
    ) -> None:
        """
        Args:
            plan: the expected memory: a plan, an estimate, or a file of one (`plan --out`, `--json`). None: it is
                estimated from the trainer's own settings.
            gpus: the GPUs of a file that holds an estimate, such as 2xA100-40G; a plan's file names them itself.
            settings: settings that a trainer does not have: `prompt_length` for methods that generate, `padded`.
            steps: number of optimizer steps to record.
            memory: the memory to read; None: the process's current CUDA device.
            say: called with each line of text.
        """
        self._plan = plan
        self._gpus = gpus
        self._settings = dict(settings or {})
        self._steps = steps
        self._memory = memory
        self._say = say
        self._recorder: PeakRecorder | None = None  # None before training and after the last recorded step
        self._done = 0  # finished steps
        self._warned = False
        self._first_step_end = 0.0  # time at which the first step ended

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            self._safely(lambda: self._begin(args, kwargs["model"]))

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._safely(lambda: self._record("backward"))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._safely(self._step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._safely(self._finish)

    def _safely(self, action: Callable[[], None]) -> None:
        """Run an action; on any exception print one line and stop recording, so that the training run goes on."""
        try:
            action()
        except Exception as error:
            self._recorder = None
            reason = str(error) if isinstance(error, PlanError) else f"{type(error).__name__}: {error}"
            self._say(f"this run is not watched: {' '.join(reason.split())}")

    def _begin(self, args: TrainingArguments, model: Any) -> None:
        """Start recording: read the run's candidate, and the plan or an estimate of the candidate."""
        memory = self._memory or cuda_memory()
        if memory is None:
            self._say("this run is not watched: there is no GPU whose memory could be measured")
            return
        expected = self._expected(memory)
        try:
            known = (
                {}
                if expected is None
                else {"prompt_length": expected.candidate.prompt_length, "padded": expected.candidate.padded}
            )
            candidate = candidate_of_run(args, model, {**known, **self._settings})
        except InputError:
            if expected is None:
                raise
            candidate = expected.candidate  # the trainer does not show all settings: assume the planned ones
        if expected is None:
            expected = estimate(candidate, _cluster(candidate, memory))
        elif candidate_key(candidate) != candidate_key(expected.candidate):
            self._say(f"the run is not what was planned: {_differences(expected.candidate, candidate)}")
        self._recorder = PeakRecorder(expected, candidate, memory)
        self._recorder.record("load")

    def _expected(self, memory: RunMemory) -> Estimate | None:
        """Return the estimate that the user gave, as an object or a file; None if there is none."""
        if isinstance(self._plan, Plan):
            return self._plan.best
        if isinstance(self._plan, Estimate) or self._plan is None:
            return self._plan
        report = Path(self._plan)
        candidate, cluster = read_plan(report, self._gpus, None, lambda shape: shape)
        return estimate(candidate, cluster)

    def _record(self, phase: Phase) -> None:
        if self._recorder is not None:
            self._recorder.record(phase)

    def _step(self) -> None:
        """Record the end of an optimizer step, and print a line if the memory is outside the interval."""
        if self._recorder is None:
            return
        self._recorder.record("optimizer_step")
        self._done += 1
        if self._done == 1:
            self._first_step_end = time.monotonic()
        self._warn(self._recorder.verdict(self._done, finished=self._done >= self._steps))
        if self._done >= self._steps:
            self._finish()

    def _warn(self, line: str) -> None:
        """Print the first non-empty line of a run, and no other."""
        if line and not self._warned:
            self._warned = True
            self._say(line)

    def _finish(self) -> None:
        """Stop recording, and keep the measurement among the user's own results."""
        recorder, self._recorder = self._recorder, None
        if recorder is None or not self._done:
            return
        later = self._done - 1
        seconds = (time.monotonic() - self._first_step_end) / later if later else 0.0
        measurement = recorder.measurement(seconds)
        save_result(measurement, measurement.versions["gpu"], "run")


def _cluster(candidate: Candidate, memory: RunMemory) -> Cluster:
    """Return the cluster of a run: its processes' GPUs, and those of a vLLM server."""
    server = candidate.server_gpus
    return Cluster(
        gpu=memory.gpu,
        nodes=candidate.num_nodes,
        gpus_per_node=-(-candidate.num_processes // candidate.num_nodes) + server,
    )


def _differences(planned: Candidate, run: Candidate) -> str:
    """Return the settings in which a run differs from its plan, as text."""
    return (
        settings_text(changed_settings(planned, replace(run, model=planned.model)))
        or f"its model has other layers than {planned.model.id}"
    )


def _count(steps: int) -> str:
    return "the first step" if steps == 1 else f"the first {steps} steps"

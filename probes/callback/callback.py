"""A callback for the user's own run: the first steps' memory against the plan, one line where they leave it, the measurement kept for later plans.

    from probes import MemoryPlanCallback

    trainer = SFTTrainer(..., callbacks=[MemoryPlanCallback("plan.json")])

It reads counters and changes nothing, the user's statistics included: a peak is put down to the phase at whose end it was first seen. It never raises
into a run: what it cannot do it says in a line, and is silent from then on. Only the first process speaks. Not yet run on a GPU.
"""

import importlib.metadata
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from planner.candidate import Candidate
from planner.errors import InputError, PlanError
from planner.estimate import RISK, estimate
from planner.gpus.cluster import Cluster
from planner.jobs.spellings import Value
from planner.measurements.corrected_estimate import heaviest_rank, needed_peak_bytes
from planner.measurements.corrected_plan import changed_settings
from planner.measurements.fingerprint import candidate_key
from planner.measurements.measurement import Measurement, PhasePeak, RankMemory
from planner.measurements.own_results import save_result
from planner.plan import Plan
from planner.quantities import Estimate, Phase
from planner.report.read_json import read_plan
from planner.units import format_gib
from probes.callback.candidate_of_run import candidate_of_run
from probes.callback.memory_of_run import RunMemory, cuda_memory

FIRST_STEPS = 3  # the first makes the optimizer's states, the second is the first with all there is, the third shows that it stays so
LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate")


def to_stderr(line: str) -> None:
    print(f"plan: {line}", file=sys.stderr, flush=True)


class Watch:
    """What one process' card has been seen to hold, beside what was expected of it."""

    def __init__(self, expected: Estimate, candidate: Candidate, memory: RunMemory) -> None:
        self.expected = expected
        self.candidate = candidate
        self._memory = memory
        self._peaks: dict[Phase, PhasePeak] = {}
        self._highest = (0, 0)  # allocated and reserved bytes that were seen before
        self._allocator: dict[str, int] = {}
        self._began = self._last = time.monotonic()

    def seen(self, phase: Phase) -> None:
        """A phase has ended. Where it has raised the process' peaks they are its own; else it was lighter than what came before."""
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
        """What was seen so far, of the first process."""
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
            candidate=self.candidate, device="cuda", outcome="fits", ranks=(rank,), shortage=None, step_seconds=step_seconds, tokens_per_second=0.0,
            wall_seconds=time.monotonic() - self._began, message="", log="", versions=versions,
        )  # fmt: skip

    def verdict(self, steps: int, finished: bool) -> str:
        """Where the steps so far leave the expected interval, in a line; empty where they do not. Too little is told only when all were seen."""
        seen = self.measurement(0.0)
        gpu = self.expected.gpus[0]
        needed, (low, high) = needed_peak_bytes(gpu, seen), gpu.interval_bytes
        phase = heaviest_rank(seen).peak_phase.replace("_", " ")
        said = f"{format_gib(low, 1)} to {format_gib(high, 1)} {self.expected.evidence}"
        took = f"{_count(steps)} needed {format_gib(needed, 1)} of {self._memory.gpu.name}"
        if needed > high:
            return f"{took}, more than the {said}; the peak was before the end of the {phase}"
        if finished and needed < low:
            return f"{took}, less than the {said}: rows of full length may still come"
        return ""


class MemoryPlanCallback(TrainerCallback):
    """Watches the first steps of a run."""

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
            plan: what is expected: a plan, an estimate, or the file of one (`plan --out`, `--json`); None: it is estimated from the trainer itself.
            gpus: the cards that a file of an estimate is about, such as 2xA100-40G; a plan's file says it.
            settings: what no trainer says: `prompt_length` for methods that generate, `padded`.
            steps: optimizer steps that are watched.
            memory: what is read; None: the process' CUDA device.
            say: where lines go.
        """
        self._plan = plan
        self._gpus = gpus
        self._settings = dict(settings or {})
        self._steps = steps
        self._memory = memory
        self._say = say
        self._watch: Watch | None = None  # None: nothing is watched, not yet or no more
        self._done = 0
        self._said = False
        self._first_over = 0.0  # when the first step was over

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            self._safely(lambda: self._begin(args, kwargs["model"]))

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._safely(lambda: self._seen("backward"))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._safely(self._step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._safely(self._finish)

    def _safely(self, action: Callable[[], None]) -> None:
        """A run is worth more than its measurement: whatever goes wrong here ends the watching, and is said."""
        try:
            action()
        except Exception as error:
            self._watch = None
            reason = str(error) if isinstance(error, PlanError) else f"{type(error).__name__}: {error}"
            self._say(f"this run is not watched: {' '.join(reason.split())}")

    def _begin(self, args: TrainingArguments, model: Any) -> None:
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
            candidate = expected.candidate  # what the trainer does not show is as the plan has it
        if expected is None:
            expected = estimate(candidate, _cluster(candidate, memory), RISK)
        elif candidate_key(candidate) != candidate_key(expected.candidate):
            self._say(f"the run is not what was planned: {_differences(expected.candidate, candidate)}")
        self._watch = Watch(expected, candidate, memory)
        self._watch.seen("load")

    def _expected(self, memory: RunMemory) -> Estimate | None:
        if isinstance(self._plan, Plan):
            return self._plan.best
        if isinstance(self._plan, Estimate) or self._plan is None:
            return self._plan
        report = Path(self._plan)
        candidate, cluster = read_plan(report, self._gpus, None, lambda shape: shape)
        return estimate(candidate, cluster, RISK)

    def _seen(self, phase: Phase) -> None:
        if self._watch is not None:
            self._watch.seen(phase)

    def _step(self) -> None:
        if self._watch is None:
            return
        self._watch.seen("optimizer_step")
        self._done += 1
        if self._done == 1:
            self._first_over = time.monotonic()
        self._tell(self._watch.verdict(self._done, finished=self._done >= self._steps))
        if self._done >= self._steps:
            self._finish()

    def _tell(self, line: str) -> None:
        """One line a run."""
        if line and not self._said:
            self._said = True
            self._say(line)

    def _finish(self) -> None:
        """Keeps what was seen, once."""
        watch, self._watch = self._watch, None
        if watch is None or not self._done:
            return
        later = self._done - 1
        seconds = (time.monotonic() - self._first_over) / later if later else 0.0
        measurement = watch.measurement(seconds)
        save_result(measurement, measurement.versions["gpu"], "run")


def _cluster(candidate: Candidate, memory: RunMemory) -> Cluster:
    server = candidate.server_gpus
    return Cluster(
        gpu=memory.gpu,
        nodes=candidate.num_nodes,
        gpus_per_node=-(-candidate.num_processes // candidate.num_nodes) + server,
    )


def _differences(planned: Candidate, run: Candidate) -> str:
    return changed_settings(planned, replace(run, model=planned.model)) or f"its model has other layers than {planned.model.id}"


def _count(steps: int) -> str:
    return "the first step" if steps == 1 else f"the first {steps} steps"

"""One probe, in the process (or the processes, under any launcher) that runs it: `python -m probes.worker.worker TASK.json`.

The real trainer's steps, a checkpoint, an evaluation batch, and from the checkpoint one step more. The last line on stdout is the measurement; everything
that libraries print goes to stderr.
"""

import contextlib
import gc
import importlib.metadata
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from transformers import TrainerCallback

from planner.candidate import Candidate
from planner.measurements.measurement import Measurement, RankMemory, Shortage, measurement_line
from planner.units import format_gib
from probes.step.phases import phases_told
from probes.step.rollouts import whole_rollout
from probes.step.stage import Stage
from probes.substitution import substituted
from probes.task import ANSWER_PREFIX, Task, read_task
from probes.worker.engines import engine, engine_phases_told, keep_own_gpus, with_share_of_this_card
from probes.worker.random_weights import random_weights
from probes.worker.shortage import lacks_memory
from probes.worker.states import States, zero_steps_told
from probes.worker.watch import Clock, Watch, watch_of
from probes.worker.workload import model_path, workload

# Methods whose trainer has no evaluation of its own: transformers' is not one for rows of text (trl 1.16, online_dpo_trainer.py has no `prediction_step`).
NOT_EVALUATED = frozenset({"online-dpo"})
LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "bitsandbytes", "deepspeed", "vllm")


def measure(task: Task) -> Measurement:
    """Runs the task in this process and says what it saw; of several processes, each one gets the measurement of all.

    Running out of memory is a measurement. It is that of this process alone where there are several: the others wait for it.
    """
    started = time.monotonic()
    watch = watch_of(task)
    probe = _Probe(task, watch)
    shortage = None
    try:
        with random_weights() if task.weights == "random" else contextlib.nullcontext():
            probe.run()
    except Exception as error:
        if not lacks_memory(error):
            raise
        shortage = watch.shortage(error, PartialState().process_index)
    mine = probe.memory()
    ranks = (mine,) if shortage is not None else tuple(sorted(gather_object([mine]), key=lambda rank: rank.rank))
    seconds = step_seconds(task.candidate, watch.clock)
    return Measurement(
        candidate=task.candidate, device=task.device, outcome="fits" if shortage is None else "out_of_memory", ranks=ranks, shortage=shortage,
        step_seconds=seconds, tokens_per_second=tokens_of_a_step(task.candidate) / seconds if seconds else 0.0, wall_seconds=time.monotonic() - started,
        message="" if shortage is None else describe(shortage), log="", versions=versions(task),
    )  # fmt: skip


class _Probe(TrainerCallback):
    """The course of one probe, and what is seen on the way."""

    def __init__(self, task: Task, watch: Watch) -> None:
        self._task, self._watch = task, watch
        self._stage: Stage | None = None
        self._states = States()

    def run(self) -> None:
        self._train(self._task, None)
        checkpoint = Path(self._task.folder) / "checkpoints" / f"checkpoint-{self._task.steps}"
        if (
            self._task.save and self._task.resume and self._task.candidate.vllm == "off"
        ):  # a process has room for one engine only
            self._stage = None
            gc.collect()
            self._watch.forget()
            self._watch.enter_phase("load")
            self._train(replace(self._task, steps=self._task.steps + 1, save=False, evaluate=False), checkpoint)

    def _train(self, task: Task, checkpoint: Path | None) -> None:
        candidate = with_share_of_this_card(task.candidate, task.card_bytes)
        task = replace(task, candidate=candidate)
        with contextlib.ExitStack() as stack:
            found = stack.enter_context(engine(candidate, model_path(task, candidate.model), task.weights == "random"))
            self._stage = stage = workload(task, found)
            stage.trainer.add_callback(self)
            stack.enter_context(self._watch.watching(stage))
            stack.enter_context(engine_phases_told(self._watch, stage, candidate))
            stack.enter_context(phases_told(self._watch, stage, padded=False, rollout=whole_rollout(candidate)))
            stack.enter_context(_saving(stage, self._watch))
            stack.enter_context(zero_steps_told(stage, self._zero_steps))
            stage.trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
            if task.evaluate and candidate.method not in NOT_EVALUATED:
                stage.trainer.evaluate()
        self._watch.clock.step_begins()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._watch.settle()
        self._watch.clock.step_begins()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._watch.settle()
        self._watch.clock.step_ends()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The states are made, the gradients not yet gone."""
        if self._stage is not None:
            self._states.count(self._stage)

    def _zero_steps(self, gradients: Iterable[torch.Tensor | None]) -> None:
        self._watch.enter_phase("optimizer_step")
        self._states.count_gradients(gradients)

    def memory(self) -> RankMemory:
        return RankMemory(
            rank=PartialState().process_index, phases=self._watch.peaks, state_bytes=self._states.bytes, capacity_bytes=self._watch.capacity_bytes,
            allocator=self._watch.allocator,
        )  # fmt: skip


@contextlib.contextmanager
def _saving(stage: Stage, watch: Watch) -> Iterator[None]:
    """A checkpoint is a phase of its own."""
    save: Callable[..., Any] = stage.trainer._save_checkpoint

    def saved(*args: Any, **kwargs: Any) -> Any:
        watch.enter_phase("save")
        return save(*args, **kwargs)

    with substituted(stage.trainer, "_save_checkpoint", saved):
        yield


# -- what is told ------------------------------------------------------------------------------------------------------


def step_seconds(candidate: Candidate, clock: Clock) -> float:
    """Seconds of an optimizer step after the first, with its share of a rollout; of the first where there is no other, 0 where there is none.

    A rollout serves `steps_per_generation x num_iterations / gradient_accumulation_steps` optimizer steps (trl 1.16, grpo_trainer.py, `_prepare_inputs`).
    """
    steps = clock.steps[1:] or clock.steps
    if not steps:
        return 0.0
    alone = sum(seconds - rollout for seconds, rollout in steps) / len(steps)
    rollouts = [rollout for _, rollout in clock.steps if rollout]
    if not rollouts:
        return alone
    steps_a_rollout = max(
        1.0, candidate.steps_per_generation * candidate.num_iterations / candidate.gradient_accumulation_steps
    )
    return alone + rollouts[-1] / (steps_a_rollout if candidate.method_row.grouped_completions else 1.0)


def tokens_of_a_step(candidate: Candidate) -> int:
    """Tokens of the training passes of an optimizer step, over all processes: what `planner/throughput` counts."""
    return candidate.tokens * candidate.gradient_accumulation_steps * candidate.num_processes


def describe(shortage: Shortage) -> str:
    return (
        f"out of memory in the {shortage.phase.replace('_', ' ')}: tried {format_gib(shortage.tried_bytes)}, {format_gib(shortage.free_bytes)} free, "
        f"{format_gib(shortage.allocated_bytes)} allocated"
    )


def versions(task: Task) -> dict[str, str]:
    found = {}
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    if task.device == "cuda":
        found |= {"cuda": str(torch.version.cuda), "gpu": torch.cuda.get_device_name()}
    return found


# -- the process -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def answer_only() -> Iterator[int]:
    """While inside, what is printed goes to stderr; yields the descriptor of the real stdout."""
    sys.stdout.flush()
    answer = os.dup(1)
    os.dup2(2, 1)
    try:
        yield answer
    finally:
        sys.stdout.flush()
        os.dup2(answer, 1)
        os.close(answer)


def main(task_file: str) -> int:
    """The exit code: that of a process that ran out of memory is 0, unless others wait for it, which only its failure ends."""
    with answer_only() as answer:
        task = read_task(Path(task_file))
        if task.device == "cuda":
            keep_own_gpus(task.candidate)
        try:
            measurement = measure(task)
        finally:
            for left in ("checkpoints", "models"):
                shutil.rmtree(Path(task.folder) / left, ignore_errors=True)
        short = measurement.outcome == "out_of_memory"
        if short or PartialState().is_main_process:
            os.write(answer, f"{ANSWER_PREFIX}{measurement_line(measurement)}\n".encode())
    sys.stderr.flush()
    if short and PartialState().num_processes > 1:
        os.kill(os.getpid(), signal.SIGTERM)  # without waiting for the other ranks, as an exit would
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

"""The process of one probe, or one of its processes under a launcher: `python -m probes.worker.worker TASK.json`.

It runs the real trainer's steps, from a checkpoint or not, writes a checkpoint, and evaluates a batch. The last
line on stdout is the measurement; everything that libraries print goes to stderr.
"""

import contextlib
import importlib.metadata
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate import PartialState
from msgspec.structs import replace
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import TrainerCallback

from planner.candidate import Candidate
from planner.measurements.documents import measurement_line
from planner.measurements.measurement import USUAL_STEPS, Measurement, RankMemory, Shortage, StepMemory
from planner.units import format_gib
from probes.emulated_gpu.peers import answer_for_peers, even_experts, peers_on_the_cpu, wait_for_watchdog
from probes.emulated_gpu.values import small_values_on_host
from probes.layers.cuda.flash_attention import attention_of_packed_rows
from probes.step.built_trainer import BuiltTrainer
from probes.step.phases import mark_phases
from probes.step.rollouts import whole_rollout
from probes.substitution import substituted
from probes.task import ANSWER_PREFIX, Task, WorkerDevice, read_task
from probes.worker.completions import ProbedCompletions
from probes.worker.cpu_accelerators import cpu_accelerators, needs_accelerators
from probes.worker.engines import engine, mark_engine_phases, mark_sleep, with_share_of_this_card
from probes.worker.random_weights import random_weights
from probes.worker.shortage import lacks_memory
from probes.worker.states import RankStates, report_zero_gradients
from probes.worker.watch import Clock, MemoryWatch, memory_watch
from probes.worker.workload import model_path, trainer_of_task

LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "bitsandbytes", "deepspeed", "vllm")


def measure(task: Task) -> Measurement:
    """Run the task in this process and return the measurement of all processes.

    Running out of memory is a measurement too, but of this process alone: the others still wait for it.
    """
    started = time.monotonic()
    watch = memory_watch(task)
    probe = _Probe(task, watch)
    shortage = None
    try:
        with contextlib.ExitStack() as stack:
            if needs_accelerators(task):
                stack.enter_context(cpu_accelerators())
            if task.device == "emulated":
                stack.enter_context(small_values_on_host())
                stack.enter_context(attention_of_packed_rows(task.candidate.method_row))
                if task.candidate.ep_size > 1:
                    stack.enter_context(even_experts())
            if task.weights == "random":
                stack.enter_context(random_weights(written=task.device != "emulated"))
            probe.run()
    except Exception as error:
        if not lacks_memory(error):
            raise
        shortage = watch.shortage(error, PartialState().process_index)
    mine = probe.memory()
    alone = shortage is not None or task.one_of_many
    ranks = (mine,) if alone else of_all_ranks(mine)
    if task.draws_rows or task.draws_completions:
        del watch.clock.steps[:-1]  # only the last step has the tokens that are counted for its speed
    # no kernel runs on an emulated card: its steps take the host's time
    seconds = 0.0 if task.device == "emulated" else step_seconds(task.candidate, watch.clock)
    return Measurement(
        candidate=task.candidate,
        device=task.device,
        outcome="fits" if shortage is None else "out_of_memory",
        ranks=ranks,
        shortage=shortage,
        step_seconds=seconds,
        tokens_per_second=tokens_of_a_step(task.candidate) / seconds if seconds else 0.0,
        wall_seconds=time.monotonic() - started,
        message="" if shortage is None else describe(shortage),
        log="",
        versions=versions(task),
    )


class _Probe(TrainerCallback):
    """Runs the steps of one probe, and is the trainer's callback meanwhile."""

    def __init__(self, task: Task, watch: MemoryWatch) -> None:
        self._task, self._watch = task, watch
        self._built: BuiltTrainer | None = None
        self._states = RankStates()
        self._steps: list[StepMemory] = []
        self._stepped = False  # the optimizer did, in the step that runs
        self._skipped = 0  # steps of the trainer in which it did not

    def run(self) -> None:
        """Train the task's steps, from its checkpoint if it has one.

        Raise RuntimeError if the optimizer skipped a step: without its states the peak is not that of a real training.
        With float16 on a real GPU nothing is raised: its scaler skips the first steps while its scale is too large.
        """
        candidate = with_share_of_this_card(self._task.candidate, self._task.card_bytes)
        task = replace(self._task, candidate=candidate)
        with contextlib.ExitStack() as stack:
            model = model_path(task, candidate.model)
            engine_arguments = stack.enter_context(engine(candidate, model, task.weights == "random"))
            stack.enter_context(mark_sleep(self._watch, candidate))
            self._built = built = trainer_of_task(task, engine_arguments)
            built.trainer.add_callback(self)
            stack.enter_context(self._watch.watching(built))
            completions = ProbedCompletions(task, built.trainer)
            stack.enter_context(mark_engine_phases(self._watch, built, candidate, completions))
            stack.enter_context(mark_phases(self._watch, built, whole_rollout(completions)))
            stack.enter_context(_mark_saving(built, self._watch))
            stack.enter_context(report_zero_gradients(built, self._on_zero_step))
            stack.callback(register_optimizer_step_post_hook(self._after_optimizer_step).remove)
            built.trainer.train(**resume_arguments(task))
            if task.evaluates:
                built.trainer.evaluate()
        self._watch.clock.step_begins()
        if not built.trainer.state.global_step:
            raise RuntimeError("the trainer made no step")
        if self._skipped and (self._task.device == "emulated" or candidate.precision != "fp16"):
            raise RuntimeError(f"the optimizer skipped {self._skipped} of {self._task.steps} steps")

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._watch.settle()
        self._watch.clock.step_begins()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._watch.settle()
        if self._task.device == "emulated":
            wait_for_watchdog()
        self._watch.clock.step_ends()
        # accelerate calls no step of an optimizer that has updated within the backward pass
        self._skipped += not self._stepped and not self._task.candidate.optimizer_row.fused_backward
        self._stepped = False
        if self._task.steps > USUAL_STEPS:
            self._steps.append(memory_after_step(self._task.device))

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count what stays between steps: the optimizer has its states, and the gradients still exist."""
        if self._built is not None:
            self._states.count(self._built)

    def _after_optimizer_step(self, *_: Any) -> None:
        self._stepped = True

    def _on_zero_step(self, gradients: Iterable[torch.Tensor | None]) -> None:
        self._watch.enter_phase("optimizer_step")
        self._states.count_gradients(gradients)

    def memory(self) -> RankMemory:
        """Return the memory of this process."""
        return RankMemory(
            rank=PartialState().process_index,
            phases=self._watch.peaks,
            state_bytes=self._states.bytes,
            capacity_bytes=self._watch.capacity_bytes,
            allocator=self._watch.allocator,
            steps=tuple(self._steps),
        )


def resume_arguments(task: Task) -> dict[str, Any]:
    """Return the arguments of `train`, which has none in a trainer that does not resume."""
    return {"resume_from_checkpoint": task.from_checkpoint or None} if task.candidate.method_row.resumes else {}


def memory_after_step(device: WorkerDevice) -> StepMemory:
    """Return what this process holds now."""
    on_gpu = device != "cpu"
    return StepMemory(
        allocated_bytes=torch.cuda.memory_allocated() if on_gpu else 0,
        reserved_bytes=torch.cuda.memory_reserved() if on_gpu else 0,
        host_bytes=psutil.Process().memory_info().rss,
    )


@contextlib.contextmanager
def _mark_saving(built: BuiltTrainer, watch: MemoryWatch) -> Iterator[None]:
    """Report the writing of a checkpoint as a phase inside the block."""
    save: Callable[..., Any] = built.trainer._save_checkpoint

    def marked_save(*args: Any, **kwargs: Any) -> Any:
        watch.enter_phase("save")
        return save(*args, **kwargs)

    with substituted(built.trainer, "_save_checkpoint", marked_save):
        yield


# -- the measurement ---------------------------------------------------------------------------------------------------


def of_all_ranks(mine: RankMemory) -> tuple[RankMemory, ...]:
    """Return the memory of every rank, in the order of ranks, gathered over the CPU.

    Over a GPU PyTorch compares the sizes of what ranks send by kernels, which an emulated GPU does not run.
    """
    if not torch.distributed.is_initialized():
        return (mine,)
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, mine, group=torch.distributed.new_group(backend="gloo"))
    return tuple(found)


def step_seconds(candidate: Candidate, clock: Clock) -> float:
    """Seconds of an optimizer step, with its share of a rollout.

        seconds = mean of (step - its rollout) over the steps after the first + last rollout / steps that it serves
        steps that it serves = steps_per_generation x num_iterations / gradient_accumulation_steps, at least 1

    Source: trl 1.16, grpo_trainer.py, `_prepare_inputs`; rollouts of methods without groups serve one step. If there is
    only one step, it counts; if there is none, the result is 0.
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
    """Return the tokens of a step's training passes over all processes, as planner/throughput counts them."""
    return candidate.tokens * candidate.row_gpus * candidate.gradient_accumulation_steps * candidate.batches


def describe(shortage: Shortage) -> str:
    """Return a shortage as one line of text."""
    return (
        f"out of memory in the {shortage.phase.replace('_', ' ')}: tried {format_gib(shortage.tried_bytes)}, "
        f"{format_gib(shortage.free_bytes)} free, {format_gib(shortage.allocated_bytes)} allocated"
    )


def versions(task: Task) -> dict[str, str]:
    """Return the versions of the installed libraries, and the GPU's name if there is one."""
    installed = {}
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    if task.device != "cpu":
        installed |= {"cuda": str(torch.version.cuda), "gpu": torch.cuda.get_device_name()}
    return installed


# -- the process -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def stdout_for_answer() -> Iterator[int]:
    """Redirect stdout to stderr inside the block; yield the file descriptor of the real stdout."""
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
    """Run the task in the file, print its measurement, and return the exit code.

    The code is 0 even if memory ran out. But if other processes wait for this one, it kills itself, so that the
    launcher ends them.
    """
    with stdout_for_answer() as answer, contextlib.ExitStack() as stack:
        task = read_task(Path(task_file))
        if task.one_of_many:
            answer_for_peers()
            stack.enter_context(peers_on_the_cpu())
        measurement = measure(task)
        # After an error the runner removes the folder: other ranks may still read from it.
        for left in ("models",) if task.resumes else ("checkpoints", "models"):
            shutil.rmtree(Path(task.folder) / left, ignore_errors=True)
        short = measurement.outcome == "out_of_memory"
        if short or PartialState().is_local_main_process:  # one on each node
            os.write(answer, f"{ANSWER_PREFIX}{measurement_line(measurement)}\n".encode())
    sys.stderr.flush()
    if short and PartialState().num_processes > 1 and not task.one_of_many:
        os.kill(os.getpid(), signal.SIGTERM)  # without waiting for the other ranks, as an exit would
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

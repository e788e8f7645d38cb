"""The task of a worker: one candidate, one device, and how many steps to run.

It is stored as a JSON file, so that it can be run again by hand.
"""

import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import asdict, fields, replace

from planner.candidate import Candidate
from planner.measurements.documents import candidate_of_report, candidate_report
from planner.measurements.measurement import USUAL_STEPS

# The last line of a worker's stdout that starts with this is its measurement; everything else is only logged.
ANSWER_PREFIX = "@plan-measurement "
# File in the worker's folder with the name of the running phase: where a worker was that ended without a measurement.
PHASE_FILE = "phase"
# Environment variable of a worker: the runner's CUDA_VISIBLE_DEVICES, of which the worker may see one GPU only.
GIVEN_GPUS = "PLAN_GIVEN_GPUS"
WorkerDevice = Literal["cuda", "cpu", "emulated"]  # "emulated": `cuda` on another driver (probes/emulated_gpu)


class Rendezvous(Struct, frozen=True, kw_only=True):
    """One of several nodes that run a probe, and where their launchers meet. Named as in `accelerate launch`."""

    machine_rank: int
    main_process_ip: str
    main_process_port: int


SHORTEST = 4  # tokens of a row: a prompt, a completion and its end
MOST_STEPS = 17  # optimizer steps that a probe makes unasked


class Task(Struct, frozen=True, kw_only=True):
    """One probe. Checkpoints and caches go to `folder`, which belongs to this worker and which the runner removes."""

    candidate: Candidate
    device: WorkerDevice
    folder: str
    steps: int = USUAL_STEPS  # optimizer steps
    weights: Literal["random", "hub"] = "random"
    save: bool = True  # write a checkpoint after the last step
    evaluate: bool = False  # evaluate one batch after the last step
    resume: bool = True  # train one more step from the checkpoint
    from_checkpoint: str = ""  # folder of the checkpoint to begin with; empty: the models' weights
    one_of_many: bool = False  # only rank 0 runs; its peers do not exist (probes/emulated_gpu/peers.py)
    capacity_bytes: int = 0  # memory of each device that may be used; 0: all of it
    card_bytes: int = 0  # memory of the planned GPU, of which vLLM takes a share; 0: of the GPU that is installed
    seed: int = 0
    rendezvous: Rendezvous | None = None  # None: one node runs it

    @property
    def draws_rows(self) -> bool:
        """Return whether the steps before the last have rows as long as those of the candidate's dataset."""
        drawn = self.candidate.lengths is not None and not self.candidate.method_row.generates
        return drawn and self.steps > USUAL_STEPS

    @property
    def draws_completions(self) -> bool:
        """Return whether the rollouts before the last have completions as long as the candidate's."""
        drawn = self.candidate.completion_lengths is not None and self.candidate.method_row.generates
        return drawn and self.steps > USUAL_STEPS

    @property
    def evaluates(self) -> bool:
        """Return whether an evaluation follows the last step: asked for, or of a candidate that evaluates."""
        wanted = self.evaluate or self.candidate.eval_strategy != "no"
        return wanted and not self.from_checkpoint and self.candidate.method_row.evaluates

    @property
    def resumes(self) -> bool:
        """Return whether a step from the checkpoint follows, in a process of its own.

        In the same process the first trainer is not all gone: DeepSpeed's engine outlives it, and bitsandbytes' scales.
        With vLLM there is none: its start takes longer than all else.
        """
        return self.save and self.resume and self.candidate.vllm == "off"

    @property
    def checkpoint(self) -> str:
        """The folder of the checkpoint that the last step writes."""
        return str(Path(self.folder) / "checkpoints" / f"checkpoint-{self.steps}")


def usual_steps(candidate: Candidate) -> int:
    """Return the optimizer steps of a probe: enough for a rollout after the optimizer has its states.

    One rollout serves `steps_per_generation` x `num_iterations` micro-steps. Where the next one comes after
    `MOST_STEPS`, the probe makes its usual steps and does not reach it.
    Source: trl 1.16, trainer/grpo_trainer.py, `GRPOTrainer._prepare_inputs` (`generate_every`).

    One step more under ZeRO-3 if the reference is precomputed: the first step's backward pass drops the trace of those
    passes, and the second one records another (planner/memory/schemes/zero3/coordinator.py, `FirstCoordinator`).
    """
    if candidate.precomputes and candidate.scheme_row.traces_modules:
        return USUAL_STEPS + 1
    if not candidate.method_row.grouped_completions:
        return USUAL_STEPS
    served = candidate.steps_per_generation * candidate.num_iterations
    needed = served // candidate.gradient_accumulation_steps + 1
    return needed if USUAL_STEPS < needed <= MOST_STEPS else USUAL_STEPS


def resumed(task: Task) -> Task:
    """Return the task that trains one more step from a task's checkpoint."""
    return replace(
        task, steps=task.steps + 1, from_checkpoint=task.checkpoint, save=False, evaluate=False, resume=False
    )


def write_task(task: Task, path: Path) -> None:
    """Write the task to a file, the whole file or none: it is written beside its place and then renamed."""
    values: dict[str, object] = {field.name: getattr(task, field.name) for field in fields(Task)}
    part = path.with_name(f"{path.name}.part")
    part.write_text(
        json.dumps(
            {
                **values,
                "candidate": candidate_report(task.candidate),
                "rendezvous": asdict(task.rendezvous) if task.rendezvous else None,
            },
            sort_keys=True,
        ),
        encoding="utf-8",
    )
    part.replace(path)


def read_task(path: Path) -> Task:
    """Read a task that `write_task` has written."""
    values: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    meeting = values["rendezvous"]
    return Task(
        **{
            **values,
            "candidate": candidate_of_report(values["candidate"]),
            "rendezvous": Rendezvous(**meeting) if meeting else None,
        }
    )


def free_port(address: str = "127.0.0.1") -> int:
    """Return a TCP port of an address of this machine that no process listens on."""
    with socket.socket() as listener:
        listener.bind((address, 0))
        return int(listener.getsockname()[1])

"""What a worker is told: one candidate, one device, and how far to go. As JSON it is a file, so that it can be run again by hand."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from planner.candidate import Candidate
from planner.measurements.documents import candidate_of_report, candidate_report

# A worker's answer is the last line of its stdout that starts so; what libraries print besides is only logged.
ANSWER_PREFIX = "@plan-measurement "
# In its folder a worker writes here the name of each phase when it enters it: where a worker was that did not come to answer.
PHASE_FILE = "phase"


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One probe. `folder` is the worker's own: checkpoints and caches go there, the runner removes it."""

    candidate: Candidate
    device: Literal["cuda", "cpu"]
    folder: str
    steps: int = 2  # optimizer steps: the first one makes the states, the second runs beside them
    weights: Literal["random", "hub"] = "random"
    save: bool = True  # a checkpoint after the last step
    evaluate: bool = False  # one batch
    resume: bool = True  # from the checkpoint, for one step more
    capacity_bytes: int = 0  # of each device; 0: all there is
    card_bytes: int = 0  # what an engine's share is a share of; 0: of the card that is there
    seed: int = 0


def write_task(task: Task, path: Path) -> None:
    """The whole file or none."""
    values: dict[str, object] = {field.name: getattr(task, field.name) for field in fields(Task)}
    part = path.with_name(f"{path.name}.part")
    part.write_text(
        json.dumps({**values, "candidate": candidate_report(task.candidate)}, sort_keys=True), encoding="utf-8"
    )
    part.replace(path)


def read_task(path: Path) -> Task:
    values: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return Task(**{**values, "candidate": candidate_of_report(values["candidate"])})

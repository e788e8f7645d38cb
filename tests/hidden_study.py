"""A problem and a hidden card for the tests of the study; as a script, a study that ends itself at one of its stages.

python tests/hidden_study.py STORAGE STAGE COUNT SIGNAL    sends itself SIGNAL when it comes to STAGE the COUNT-th time
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import optuna  # noqa: E402
from hidden_cards import HiddenCard, HiddenProbe, formulas_alone  # noqa: E402

from planner.candidate import Candidate  # noqa: E402
from planner.commands import main  # noqa: E402
from planner.gpus.parse import parse_cluster  # noqa: E402
from planner.jobs.job import Job  # noqa: E402
from planner.measurements.measurement import Measurement  # noqa: E402
from planner.models.catalogue import load_model  # noqa: E402
from planner.search.knobs import SearchProblem  # noqa: E402
from probes.study.certificate import certificate  # noqa: E402
from probes.study.sampler import MEASUREMENT  # noqa: E402
from probes.study.space import GridPoint, Space, space_of  # noqa: E402
from probes.study.state import Knowledge, knowledge_of, next_point  # noqa: E402
from probes.study.study import StudyOptions, StudyResult, prove  # noqa: E402

# The best length needs one probe out of memory and two that fit.
CARD = HiddenCard(seed=7, context_bytes=180e6, slack=0.03, activations=0.04, speed=0.9)
VERSIONS = {"hidden card": "1"}


def problem() -> SearchProblem:
    job = Job(
        model=load_model("Qwen2.5-7B"),
        method="sft",
        pinned={"lora_r": 16, "gradient_checkpointing": True},
        optimize="max-length",
    )
    return SearchProblem(job=job, cluster=parse_cluster("1xA100-40G", None), tuning_class="lora")


def space(asked: SearchProblem) -> Space:
    return space_of(asked, "cuda", formulas_alone)


def options(storage: str, **others: Any) -> StudyOptions:
    return StudyOptions(storage=storage, versions=VERSIONS, estimator=formulas_alone, **others)


def proven(storage: str, probe: Callable[[Candidate], Measurement] | None = None, **others: Any) -> StudyResult:
    asked = problem()
    return prove(asked, probe or HiddenProbe(card=CARD, space=space(asked)), options(storage, **others))


class Run(NamedTuple):
    """A study that has ended. `right`: it is certified, and its best candidate has the merit of the truly best."""

    rounds: int
    probes: int
    right: bool


def run(space: Space, card: HiddenCard, best: GridPoint | None, room: int) -> Run:
    """Probe in rounds of at most `room` candidates until none is open."""
    probe, measured, rounds = HiddenProbe(card=card, space=space), dict[GridPoint, Measurement](), 0
    while batch := batch_of(knowledge := knowledge_of(space, measured, {}), room):
        measured |= {point: probe.at(point) for point in batch}
        rounds += 1
    ran = knowledge.ran[0] if knowledge.ran else None
    if ran is None or best is None:
        return Run(rounds, len(measured), right=ran is best)
    return Run(rounds, len(measured), right=certificate(knowledge).holds and space.merit(ran) == space.merit(best))


def batch_of(knowledge: Knowledge, room: int) -> list[GridPoint]:
    """The probes that a study starts before any of them has ended."""
    batch: list[GridPoint] = []
    while len(batch) < room and (point := next_point(knowledge, batch)) is not None:
        batch.append(point)
    return batch


def die() -> None:
    os.kill(os.getpid(), signal.Signals[sys.argv[4]])


def dying(
    function: Callable[..., Any], count: int, wanted: Callable[..., bool] = lambda *_: True, before: bool = False
) -> Callable[..., Any]:
    """Wrap a function so that the process gets its signal before or after the count-th call."""
    calls = [0]

    def wrapped(*arguments: Any, **named: Any) -> Any:
        calls[0] += wanted(*arguments)
        last = calls[0] == count and wanted(*arguments)
        if last and before:
            die()
        answer = function(*arguments, **named)
        if last:
            die()
        return answer

    return wrapped


def is_measurement(trial: object, key: str, *_: object) -> bool:
    return key == MEASUREMENT


STAGES: dict[str, Callable[[int], None]] = {
    "created": lambda count: setattr(optuna.Trial, "__init__", dying(optuna.Trial.__init__, count)),
    "suggested": lambda count: setattr(optuna.Trial, "_suggest", dying(optuna.Trial._suggest, 6 * count - 3)),
    "before it was written": lambda count: setattr(
        optuna.Trial, "set_user_attr", dying(optuna.Trial.set_user_attr, count, is_measurement, before=True)
    ),
    "written": lambda count: setattr(
        optuna.Trial, "set_user_attr", dying(optuna.Trial.set_user_attr, count, is_measurement)
    ),
    "constrained": lambda count: setattr(optuna.Trial, "set_constraint", dying(optuna.Trial.set_constraint, count)),
    "told": lambda count: setattr(optuna.Study, "tell", dying(optuna.Study.tell, count)),
}


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, main._interrupt)
    STAGES[sys.argv[2]](int(sys.argv[3]))
    print(proven(sys.argv[1]).ending)

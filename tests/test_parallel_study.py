"""Several probes of a study at a time: which ones, that none is measured twice, and what ends them."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

optuna = pytest.importorskip("optuna", minversion="5.0")

import ray_probes  # noqa: E402, I001
from hidden_study import CARD, VERSIONS, HiddenProbe, problem, proven, run, space  # noqa: E402
from hidden_cards import exhaustive_best, truly_fits  # noqa: E402

from planner.candidate import Candidate  # noqa: E402
from planner.errors import PlanError  # noqa: E402
from planner.measurements.measurement import Measurement  # noqa: E402
from probes.study.space import GridPoint  # noqa: E402
from probes.study.state import knowledge_of, next_point, open_points  # noqa: E402
from probes.study.study import StudyOptions, prove  # noqa: E402


def storage(folder: Path) -> str:
    return f"sqlite:///{folder / 'study.db'}"


class Cards:
    """Hidden cards of which `together` must be in use before any of them answers, the first time."""

    def __init__(self, together: int, answer: Callable[[Candidate], Measurement] | None = None) -> None:
        self.probe = answer or HiddenProbe(card=CARD, space=space(problem()))
        self.asked: list[Candidate] = []
        self._all_here = threading.Barrier(together, timeout=30)
        self._first = together
        self._lock = threading.Lock()

    def __call__(self, candidate: Candidate) -> Measurement:
        with self._lock:
            self.asked.append(candidate)
            waits = len(self.asked) <= self._first
        if waits:
            self._all_here.wait()
        return self.probe(candidate)


@pytest.mark.slow
def test_probes_at_a_time_certify_the_candidate_of_one_at_a_time_and_none_twice(tmp_path: Path) -> None:
    alone = proven(storage(tmp_path / "alone"))
    cards = Cards(together=3)
    beside = proven(storage(tmp_path / "beside"), cards, room=lambda: 3)
    assert alone.best is not None and beside.best is not None
    assert (beside.ending, beside.best.candidate) == ("certified", alone.best.candidate)
    assert len(set(cards.asked)) == len(cards.asked) == beside.probes


@pytest.mark.slow
def test_a_point_that_the_last_probe_opens_is_probed(tmp_path: Path) -> None:
    """While the last probes run no trial is left to begin, but what they show may open more points."""

    def probe(candidate: Candidate) -> Measurement:
        threading.Event().wait(0.05)  # so that the study comes to wait for it
        return ray_probes.answer(candidate, 1.02, 1.02)

    options = StudyOptions(device="cpu", storage=storage(tmp_path), versions=VERSIONS, room=lambda: 2)
    found = prove(problem(), probe, options)
    assert (found.ending, found.certificate.still_open) == ("certified", 0)


def test_no_more_probes_run_at_a_time_than_there_is_room_for(tmp_path: Path) -> None:
    card, running, most = HiddenProbe(card=CARD, space=space(problem())), list[Candidate](), [0]

    def probe(candidate: Candidate) -> Measurement:
        running.append(candidate)
        most[0] = max(most[0], len(running))
        found = card(candidate)
        running.remove(candidate)
        return found

    assert proven(storage(tmp_path), Cards(together=2, answer=probe), room=lambda: 2).ending == "certified"
    assert most[0] <= 2


@pytest.mark.slow
def test_probes_that_run_when_another_ends_the_study_are_recorded(tmp_path: Path) -> None:
    card = HiddenProbe(card=CARD, space=space(problem()))
    ended = threading.Event()

    def probe(candidate: Candidate) -> Measurement:
        found = card(candidate)
        if candidate == cards.asked[0]:
            ended.set()
            return replace(found, outcome="disk_full", ranks=(), shortage=None, message="full")
        ended.wait(30)
        return found

    cards = Cards(together=2, answer=probe)
    answer = proven(storage(tmp_path), cards, room=lambda: 2)
    assert (answer.ending, answer.probes, len(answer.measurements)) == ("environment", 2, 1)
    again = proven(storage(tmp_path))
    assert again.ending == "certified"
    assert again.measurements[0].candidate == cards.asked[1]


def test_after_ctrl_c_the_probes_that_ran_are_repeated_and_no_others(tmp_path: Path) -> None:
    card = HiddenProbe(card=CARD, space=space(problem()))

    def probe(candidate: Candidate) -> Measurement:
        if candidate != cards.asked[0]:
            threading.Event().wait(0.5)
            raise KeyboardInterrupt
        return card(candidate)

    cards = Cards(together=2, answer=probe)
    stopped = proven(storage(tmp_path), cards, room=lambda: 2)
    assert (stopped.ending, len(stopped.measurements)) == ("interrupted", 1)
    again = Cards(together=1)
    assert proven(storage(tmp_path), again).ending == "certified"
    assert cards.asked[0] not in again.asked


@pytest.mark.slow
def test_a_cluster_that_is_lost_says_nothing_about_the_candidate(tmp_path: Path) -> None:
    def lost(candidate: Candidate) -> Measurement:
        raise PlanError("The Ray cluster is lost.")

    for _ in range(3):
        with pytest.raises(PlanError, match=r"^The Ray cluster is lost\.$"):
            proven(storage(tmp_path), lost)
    assert proven(storage(tmp_path)).ending == "certified"


def test_every_open_point_is_proposed_once_before_none_is() -> None:
    knowledge, proposed = knowledge_of(space(problem()), {}, {}), list[GridPoint]()
    while (point := next_point(knowledge, proposed)) is not None:
        proposed.append(point)
    assert len(set(proposed)) == len(proposed)
    assert set(proposed) == set(open_points(knowledge))
    assert proposed[0] == next_point(knowledge)


def test_a_study_takes_fewer_rounds_with_eight_probes_at_a_time() -> None:
    candidates = space(problem())
    best = exhaustive_best(candidates, lambda point: truly_fits(CARD, candidates, point))
    alone, beside = (run(candidates, CARD, best, room) for room in (1, 8))
    assert alone.right and beside.right
    assert (alone.rounds, beside.rounds) == (5, 2)

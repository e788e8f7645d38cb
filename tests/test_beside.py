"""Work beside this process comes back whole, with its exceptions, and leaves nothing behind."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from planner.trace.samples import Ambiguous
from probes.process import beside
from probes.process.beside import Beside


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest's workers have threads of their own, which hold nothing that is needed here."""
    monkeypatch.setattr(beside, "forks_well", lambda: True)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "forks_well", lambda: False)


def test_the_result_comes_from_another_process(forks: None) -> None:
    with Beside(lambda: (os.getpid(), list(range(200_000)))) as other:
        pid, numbers = other.result()
    assert pid != os.getpid() and numbers == list(range(200_000))
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def test_a_result_is_there_before_the_next_one_is_done(forks: None, tmp_path: Path) -> None:
    """However much of it there is: the other process goes on while nobody reads."""
    asked, began = tmp_path / "asked", tmp_path / "began"

    def waits() -> int:
        began.touch()
        while not asked.exists():
            time.sleep(0.01)
        return os.getpid()

    with Beside[Any](lambda: list(range(200_000)), waits) as other:
        while not began.exists():
            time.sleep(0.01)
        assert other.result() == list(range(200_000))
        asked.touch()
        assert other.result() != os.getpid()


def test_of_several_works_those_that_could_not_be_done_are_done_here(forks: None) -> None:
    here = os.getpid()

    def killed_elsewhere() -> int:
        if os.getpid() != here:
            os.kill(os.getpid(), 9)
        return os.getpid()

    with Beside(lambda: 1, killed_elsewhere, os.getpid) as other:
        assert [other.result(), other.result(), other.result()] == [1, here, here]


def test_an_exception_is_raised_here(forks: None) -> None:
    def fails() -> None:
        raise Ambiguous("two sizes")

    with Beside(fails) as other, pytest.raises(Ambiguous, match=r"^two sizes$"):
        other.result()


def test_what_the_other_process_could_not_do_is_done_here(forks: None) -> None:
    here = os.getpid()

    def killed_elsewhere() -> int:
        if os.getpid() != here:
            os.kill(os.getpid(), 9)
        return os.getpid()

    def fails_elsewhere() -> int:
        if os.getpid() != here:
            raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing.")
        return os.getpid()

    for work in (killed_elsewhere, fails_elsewhere):
        with Beside(work) as other:
            assert other.result() == here


def test_no_more_processes_is_no_reason_to_fail(forks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    open_before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "fork", none_left)
    with Beside(os.getpid) as other:
        assert other.result() == os.getpid()
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_who_does_not_wait_leaves_nothing_behind(forks: None) -> None:
    began = time.monotonic()
    with pytest.raises(KeyError), Beside(lambda: time.sleep(60)):
        raise KeyError
    assert time.monotonic() - began < 10
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_where_nothing_can_be_forked_the_work_is_done_here(alone: None) -> None:
    with Beside(os.getpid) as other:
        assert other.result() == os.getpid()


def test_a_process_with_other_threads_is_not_forked() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        assert not beside.forks_well()
    finally:
        stop.set()
        thread.join()

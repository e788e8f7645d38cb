"""Work done in a forked process beside this one: half the wait where it takes seconds and the machine has another core."""

import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, BinaryIO, Generic, TypeVar

import torch

Result = TypeVar("Result")


class Beside(Generic[Result]):
    """`with Beside(work) as other: ...; other.result()`. Where no process can be forked, the work is done here when its result is asked for."""

    def __init__(self, work: Callable[[], Result]) -> None:
        self._work = work
        self._pid = 0
        self._answer: BinaryIO | None = None

    def __enter__(self) -> "Beside[Result]":
        if forks_well():
            self._pid, self._answer = _forked(self._work)
        return self

    def result(self) -> Result:
        """What the work returns, or the exception that it raises."""
        if self._answer is None:
            return self._work()
        succeeded, found = _read(self._answer)
        if not succeeded:
            raise found
        result: Result = found
        return result

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        """Nothing is left behind, whether anybody waited or not."""
        if self._answer is not None:
            self._answer.close()
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)


def forks_well() -> bool:
    """Whether a fork of this process can compute: on Linux, with a core to itself, where no other thread could hold a lock and no GPU is in use."""
    alone = threading.active_count() == 1 and not torch.cuda.is_initialized()
    return sys.platform == "linux" and len(os.sched_getaffinity(0)) > 1 and alone


def _forked(work: Callable[[], Any]) -> tuple[int, BinaryIO]:
    """The other process and the pipe that its answer comes through."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, os.fdopen(reading, "rb")
    try:  # from here on it is the other process, which returns to nobody
        os.close(reading)
        _compute_alone()
        with os.fdopen(writing, "wb") as answer:
            answer.write(_answered(work))
    finally:
        os._exit(0)


def _compute_alone() -> None:
    """With one thread: a fork has none of the others that its parent computed with, and OpenMP would wait for them."""
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _answered(work: Callable[[], Any]) -> bytes:
    """Whether the work succeeded, and its result or exception."""
    try:
        return pickle.dumps((True, work()), protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        try:
            answer = pickle.dumps((False, error))
            pickle.loads(answer)
            return answer
        except Exception:  # an exception of another library that cannot be made again
            return pickle.dumps((False, RuntimeError(f"{type(error).__name__}: {error}")))


def _read(answer: BinaryIO) -> tuple[bool, Any]:
    """What the other process said.

    Raises:
        RuntimeError: it ended without a word.
    """
    said = answer.read()
    if not said:
        raise RuntimeError("A forked process ended without an answer.")
    found: tuple[bool, Any] = pickle.loads(said)
    return found

"""Work done in a forked process beside this one: half the wait where it takes seconds and the machine has another core."""

import contextlib
import os
import pickle
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, BinaryIO, Generic, TypeVar

Result = TypeVar("Result")


class Beside(Generic[Result]):
    """`with Beside(work, more) as other: ...; other.result(); other.result()`. Each result is there as soon as it is done.

    What the other process could not do, for whatever reason, is done here when it is asked for.

    On a machine with a GPU a fork cannot run a backward pass once its parent has run one (torch 2.13, autograd/engine.cpp, `track_bad_autograd_forks`).
    """

    def __init__(self, *works: Callable[[], Result]) -> None:
        self._works = works
        self._told = 0
        self._pid = 0
        self._answer: BinaryIO | None = None

    def __enter__(self) -> "Beside[Result]":
        if forks_well():
            with contextlib.suppress(OSError):  # no more processes or descriptors
                self._pid, self._answer = _forked(self._works)
        return self

    def result(self) -> Result:
        """What the next work returns, or the exception that it raises."""
        work = self._works[self._told]
        self._told += 1
        if self._answer is not None:
            with contextlib.suppress(EOFError, pickle.UnpicklingError):  # nothing came, or not all of it
                result: Result = pickle.load(self._answer)
                return result
        return work()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        """Nothing is left behind, whether anybody waited or not."""
        if self._answer is not None:
            self._answer.close()
            with contextlib.suppress(ProcessLookupError, ChildProcessError):  # somebody else waits for all children
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)


def forks_well() -> bool:
    """Whether a fork of this process can compute: on Linux, with a core to itself, where no other thread could hold a lock and no GPU is in use."""
    torch = sys.modules.get("torch")
    alone = threading.active_count() == 1 and (torch is None or not torch.cuda.is_initialized())
    return sys.platform == "linux" and len(os.sched_getaffinity(0)) > 1 and alone


def _forked(works: Sequence[Callable[[], Any]]) -> tuple[int, BinaryIO]:
    """The other process and the pipe that its answers come through, which ends where it has none."""
    reading, writing = os.pipe()
    try:
        with warnings.catch_warnings():  # Python 3.12 warns of threads that only compute, and hold no lock now
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
    except OSError:
        os.close(reading)
        os.close(writing)
        raise
    if pid:
        os.close(writing)
        return pid, os.fdopen(reading, "rb")
    try:  # from here on it is the other process, which returns to nobody
        os.close(reading)
        _compute_alone()
        with os.fdopen(writing, "wb") as answer, ThreadPoolExecutor(max_workers=1) as telling:  # a pipe is full until somebody reads
            for work in works:
                telling.submit(_tell, answer, pickle.dumps(work(), protocol=pickle.HIGHEST_PROTOCOL))
    finally:
        os._exit(0)


def _tell(answer: BinaryIO, result: bytes) -> None:
    answer.write(result)
    answer.flush()


def _compute_alone() -> None:
    """With one thread: a fork has none of the others that its parent computed with, and OpenMP would wait for them."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"

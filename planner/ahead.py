"""Libraries imported in another process while this one still searches; what they are needed for is then done there.

Imports only the standard library: the process is forked before anything else is imported.
"""

import contextlib
import importlib
import io
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

Run = Callable[..., Any]  # run(module, function, *arguments)
NICENESS = 5  # a third of another process's share of a core (Linux, kernel/sched/core.c, `sched_prio_to_weight`: 335 of 1024)
_OF_THE_COMMAND = threading.Event()


class CannotImport(ImportError):
    """A module whose import fails, for whatever reason: the message names its class."""


def this_process_only_plans() -> None:
    """Said by the console script: this process and its forks make no more than plans, and may leave out for good what only training needs."""
    _OF_THE_COMMAND.set()


def only_plans() -> bool:
    return _OF_THE_COMMAND.is_set()


def run_here(module: str, function: str, *arguments: Any) -> Any:
    """Calls a function of a module, which is imported if need be.

    Raises:
        CannotImport: the module cannot be imported.
    """
    try:
        imported = importlib.import_module(module)
    except Exception as error:
        raise CannotImport(f"{type(error).__name__}: {' '.join(str(error).split())}") from error
    return getattr(imported, function)(*arguments)


@contextlib.contextmanager
def ahead(module: str) -> Iterator[Run]:
    """Imports a module in a forked process and yields how to run functions there: what cannot be run there, for whatever reason, is run here.

    Nothing of it is left when the block ends, whether anything was run or not.
    """
    context = multiprocessing.get_context("fork")
    mine, its = context.Pipe()
    process = context.Process(target=_serve, args=(module, mine, its), daemon=True)
    try:
        with contextlib.suppress(OSError, AssertionError):  # no more processes, or this is one that may have none of its own
            process.start()
            _give_way()
        its.close()
        yield lambda *call: _run_there(mine, *call)
    finally:
        mine.close()
        if process.pid is not None:
            process.kill()
            process.join()


def _give_way() -> None:
    """Where cores are few the other process goes first: it is waited for. None can take that back, so that only a command does it."""
    if only_plans():
        os.nice(NICENESS)


def forks_ahead() -> bool:
    """Whether a fork is a gain: on Linux, with a core to itself, where no other thread could hold a lock and PyTorch is not yet imported."""
    return sys.platform == "linux" and len(os.sched_getaffinity(0)) > 1 and threading.active_count() == 1 and "torch" not in sys.modules


def _run_there(pipe: Connection, *call: Any) -> Any:
    try:
        pipe.send(call)
        done, result = pipe.recv()
    except Exception:  # it has ended, or what it says cannot be read
        return run_here(*call)
    if done:
        return result
    raise result


def _serve(module: str, its: Connection, mine: Connection) -> None:
    """The other process: what it is told to run, until the first one is gone. `its` is the first one's end of the pipe."""
    its.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the first one's
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(Exception):
        importlib.import_module(module)
        while True:
            mine.send(_outcome(mine.recv()))
    os._exit(0)


def _outcome(call: tuple[Any, ...]) -> tuple[bool, Any]:
    try:
        return True, run_here(*call)
    except Exception as error:
        return False, error

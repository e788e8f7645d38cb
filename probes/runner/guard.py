"""Stands between the runner and a worker: however either ends, nothing that the worker started is left.

The guard takes the worker's descendants in when their parents end, those with a session of their own too, and the kernel tells it when the runner
dies. It is a script of the standard library alone: it starts in a few hundredths of a second and holds almost no memory.

    python guard.py RUNNER_PID GRACE_SECONDS FOLDER COMMAND...

It ends as the worker did: with its exit code, or by the same signal. Without Linux's /proc and prctl (macOS) only the worker's process group is
ended, and only while the runner lives.
"""

import contextlib
import ctypes
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Iterator

END, END_NOW = signal.SIGTERM, signal.SIGQUIT  # from the runner: with time to tidy up, and without
RUNNER_DIED = signal.SIGHUP  # from the kernel
SIGNALS = (signal.SIGCHLD, END, END_NOW, RUNNER_DIED)
# Source: linux, include/uapi/linux/prctl.h.
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LINUX = sys.platform == "linux"
OOM_SCORE = "/proc/self/oom_score_adj"
FIRST_TO_GO = (
    "1000"  # for the kernel when the host has no memory left: rather the worker than the user's other programs
)
LOOK_AGAIN_SECONDS = 0.05


def main(runner: int, grace_seconds: float, folder: str, command: list[str]) -> int:
    """The wait status of the worker."""
    signal.signal(signal.SIGCHLD, lambda *_: None)  # macOS drops it where nothing handles it
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    _told_of_the_runners_death()
    ended: dict[int, int] = {}
    if os.getppid() == runner:  # else it died before it could be watched
        with _first_to_go():
            worker = os.posix_spawnp(command[0], command, os.environ, setsigmask=(), setsigdef=(signal.SIGPIPE,))
        reason = _wait(worker, ended)
        _end_all(ended, 0.0 if reason == END_NOW else grace_seconds)
        if reason != RUNNER_DIED:
            return ended[worker]
    shutil.rmtree(folder, ignore_errors=True)  # the runner would have done it
    return 0


def end_as(status: int) -> None:
    """Ends this process as another one did."""
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the worker has left its own
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (number,))
        os.kill(os.getpid(), number)
    sys.exit(os.waitstatus_to_exitcode(status))


def _wait(worker: int, ended: dict[int, int]) -> int:
    """The signal that ends the wait; SIGCHLD: the worker's own end."""
    while True:
        _reap(ended)
        if worker in ended:
            return signal.SIGCHLD
        received = signal.sigwait(SIGNALS)
        if received != signal.SIGCHLD:
            return received


def _end_all(ended: dict[int, int], grace_seconds: float) -> None:
    """Ends all descendants. As their new parent the guard has children for as long as there is one of them."""
    deadline = time.monotonic() + grace_seconds
    if _reap(ended):
        _signal_all(signal.SIGTERM)
    while _reap(ended):
        if time.monotonic() >= deadline:
            _signal_all(signal.SIGKILL)
        received = _signal_within(LOOK_AGAIN_SECONDS)
        if received == END_NOW:
            deadline = 0.0


def _signal_within(seconds: float) -> int:
    """The next signal, 0 where none comes. macOS has no `sigtimedwait`."""
    if sys.platform != "linux":
        time.sleep(seconds)
        return 0
    received = signal.sigtimedwait(SIGNALS, seconds)
    return 0 if received is None else received.si_signo


def _reap(ended: dict[int, int]) -> bool:
    """Notes the children that have ended; whether any is left."""
    while True:
        try:
            process, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if not process:
            return True
        ended[process] = status


def _signal_all(number: int) -> None:
    for process in _descendants() if LINUX else [0]:  # 0: the guard's own group
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def _descendants() -> list[int]:
    children: dict[int, list[int]] = {}
    for process, parent in _parents():
        children.setdefault(parent, []).append(process)
    found = children.get(os.getpid(), [])
    for process in found:
        found += children.get(process, [])
    return found


def _parents() -> Iterator[tuple[int, int]]:
    """(process, parent) of all processes. Source: proc(5), /proc/pid/stat: the name in brackets may hold anything, blanks and brackets too."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                yield int(name), int(file.read().rpartition(b")")[2].split()[1])


@contextlib.contextmanager
def _first_to_go() -> Iterator[None]:
    """What is started here is the first to be ended when the host has no memory left."""
    if not LINUX:
        yield
        return
    with open(OOM_SCORE, encoding="ascii") as file:
        usual = file.read()
    _write(OOM_SCORE, FIRST_TO_GO)
    try:
        yield
    finally:
        _write(OOM_SCORE, usual)


def _write(path: str, text: str) -> None:
    with contextlib.suppress(PermissionError), open(path, "w", encoding="ascii") as file:
        file.write(text)


def _told_of_the_runners_death() -> None:
    if LINUX:
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_PDEATHSIG, RUNNER_DIED, 0, 0, 0)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


if __name__ == "__main__":
    end_as(main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3], sys.argv[4:]))

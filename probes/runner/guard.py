"""Parent process of a worker: when the worker or the runner ends, it ends every process that the worker has started.

    python guard.py RUNNER_PID GRACE_SECONDS FOLDER COMMAND...

The guard is a child subreaper: a descendant of the worker whose parent ends becomes a child of the guard, even from
another session. The kernel sends the guard a signal when the runner dies. It is a script that uses the standard library
only, so it starts in a few hundredths of a second and needs almost no memory.

It exits with the worker's exit code, or by the same signal. Without Linux's /proc and prctl (macOS) it ends only the
worker's process group, and only while the runner lives.
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

END, END_NOW = signal.SIGTERM, signal.SIGQUIT  # sent by the runner: end the worker after a grace period, or at once
RUNNER_DIED = signal.SIGHUP  # sent by the kernel
SIGNALS = (signal.SIGCHLD, END, END_NOW, RUNNER_DIED)
# Source: linux, include/uapi/linux/prctl.h.
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LINUX = sys.platform == "linux"
OOM_SCORE = "/proc/self/oom_score_adj"
# The highest score: when the host runs out of memory, the kernel kills the worker before the user's other programs.
KILLED_FIRST = "1000"
LOOK_AGAIN_SECONDS = 0.05


def main(runner: int, grace_seconds: float, folder: str, command: list[str]) -> int:
    """Run a worker to its end, and return its wait status (`os.waitpid`)."""
    signal.signal(signal.SIGCHLD, lambda *_: None)  # macOS drops the signal if it has no handler
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    _adopt_orphans()
    ended: dict[int, int] = {}
    if os.getppid() == runner:  # else the runner died before the kernel was asked to report its death
        with _killed_first():
            worker = os.posix_spawnp(command[0], command, os.environ, setsigmask=(), setsigdef=(signal.SIGPIPE,))
        reason = _wait(worker, ended)
        _end_all(ended, 0.0 if reason == END_NOW else grace_seconds)
        if reason != RUNNER_DIED:
            return ended[worker]
    shutil.rmtree(folder, ignore_errors=True)  # in place of the runner
    return 0


def end_as(status: int) -> None:
    """End this process with the wait status of another one: the same exit code or the same signal."""
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no second core dump
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (number,))
        os.kill(os.getpid(), number)
    sys.exit(os.waitstatus_to_exitcode(status))


def _wait(worker: int, ended: dict[int, int]) -> int:
    """Wait for the worker's end or a signal to end it; return the signal, SIGCHLD if the worker ended by itself."""
    while True:
        _reap(ended)
        if worker in ended:
            return signal.SIGCHLD
        received = signal.sigwait(SIGNALS)
        if received != signal.SIGCHLD:
            return received


def _end_all(ended: dict[int, int], grace_seconds: float) -> None:
    """End all descendants, by SIGTERM, and after the grace period by SIGKILL.

    Orphans become children of the guard, so it has children as long as any descendant is alive.
    """
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
    """Return the next signal within some seconds, 0 if none arrives. macOS has no `sigtimedwait` and only sleeps."""
    if sys.platform != "linux":
        time.sleep(seconds)
        return 0
    received = signal.sigtimedwait(SIGNALS, seconds)
    return 0 if received is None else received.si_signo


def _reap(ended: dict[int, int]) -> bool:
    """Store the wait status of each child that has ended; return whether any child is left."""
    while True:
        try:
            process, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if not process:
            return True
        ended[process] = status


def _signal_all(number: int) -> None:
    """Send a signal to all descendants; without /proc to the guard's process group."""
    for process in _descendants() if LINUX else [0]:  # 0: the guard's own group
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def _descendants() -> list[int]:
    """Return the process ids of all descendants of this process."""
    children: dict[int, list[int]] = {}
    for process, parent in _parents():
        children.setdefault(parent, []).append(process)
    found = children.get(os.getpid(), [])
    for process in found:
        found += children.get(process, [])
    return found


def _parents() -> Iterator[tuple[int, int]]:
    """Yield the pair (process id, parent's id) of every process.

    Source: proc(5), /proc/pid/stat. The name in brackets may contain blanks and brackets, so the last bracket counts.
    """
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                yield int(name), int(file.read().rpartition(b")")[2].split()[1])


@contextlib.contextmanager
def _killed_first() -> Iterator[None]:
    """Give processes started inside the block the score with which the kernel kills them first when memory runs out."""
    if not LINUX:
        yield
        return
    with open(OOM_SCORE, encoding="ascii") as file:
        usual = file.read()
    _write(OOM_SCORE, KILLED_FIRST)
    try:
        yield
    finally:
        _write(OOM_SCORE, usual)


def _write(path: str, text: str) -> None:
    with contextlib.suppress(PermissionError), open(path, "w", encoding="ascii") as file:
        file.write(text)


def _adopt_orphans() -> None:
    """Ask the kernel for a signal when the runner dies, and to make this process the parent of orphaned descendants."""
    if LINUX:
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_PDEATHSIG, RUNNER_DIED, 0, 0, 0)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


if __name__ == "__main__":
    end_as(main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3], sys.argv[4:]))

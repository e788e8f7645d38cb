"""Turn a worker's exit into a measurement: the one that it printed, else an outcome with a one-line reason."""

import json
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from planner.errors import InputError
from planner.measurements.documents import candidate_report, measurement_of
from planner.measurements.measurement import Measurement, Outcome, PhasePeak, without_memory
from planner.units import MIB
from probes.task import ANSWER_PREFIX, Task

TAIL_BYTES = 1 * MIB  # end of the log that is read: the tracebacks of all ranks are shorter
MESSAGE_CHARACTERS = 300  # longest message
LEAST_FREE_BYTES = 1 * MIB  # with less free disk a worker cannot write its error message

# Outcomes, with a pattern of the errors that libraries write when disk or memory is full. The last match in the log
# decides.
# Source: strerror(3) of ENOSPC and EDQUOT; pytorch 2.13, caffe2/serialize/inline_container.cc and
# c10/core/impl/alloc_cpu.cpp; c10/cuda/CUDACachingAllocator.cpp and CUDAException.cpp; libstdc++.
KNOWN_ERRORS: tuple[tuple[Outcome, str], ...] = (
    ("disk_full", r"No space left on device|Disk quota exceeded|PytorchStreamWriter failed writing"),
    (
        "host_out_of_memory",
        r"^MemoryError\b|: MemoryError\b|DefaultCPUAllocator: |Cannot allocate memory|std::bad_alloc",
    ),
    ("out_of_memory", r"CUDA out of memory|OutOfMemoryError|CUDA error: out of memory"),
)
# Signals of a crash inside the process; any other signal was sent by someone else.
OWN_SIGNALS = frozenset(
    {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS}
)
# The last line of a traceback, after the prefix that a launcher adds.
EXCEPTION = re.compile(r"^(?:\[rank\d+\]:\s*)?((?:\w+\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Warning)\b.*)$")
# Exceptions of a launcher, which say only that a worker failed.
LAUNCHER_EXCEPTIONS = ("ChildFailedError", "CalledProcessError", "SignalException")
# Source: pytorch 2.13, torch/distributed/elastic/multiprocessing/errors/__init__.py, `_FAILURE_FORMAT_TEMPLATE`.
FIRST_FAILURE = re.compile(r"Root Cause \(first observed failure\):.*?exitcode\s*:\s*(-?\d+)", re.DOTALL)
ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class WorkerStop(Struct, frozen=True, kw_only=True):
    """Why the runner ended a worker."""

    outcome: Outcome
    message: str


class WorkerExit(Struct, frozen=True, kw_only=True):
    """End of a worker. A negative `exit_code` is a signal, as in `subprocess`."""

    exit_code: int
    stopped: WorkerStop | None  # why the runner ended it; None: it ended by itself
    phase: str  # the last phase that it entered; empty if none
    stdout: Path
    stderr: Path
    kernel_kills: int  # processes of the host that the kernel killed for lack of memory meanwhile
    wall_seconds: float


def verdict(task: Task, worker_exit: WorkerExit) -> Measurement:
    """Return the measurement of a worker that has ended, however it ended."""
    answered = printed_answer(task, worker_exit)
    if isinstance(answered, Measurement):
        return replace(
            answered,
            wall_seconds=worker_exit.wall_seconds,
            log=str(worker_exit.stderr),
            message=answered.message or _message_after_answer(worker_exit),
        )
    stop = worker_exit.stopped or _failure(worker_exit) or WorkerStop(outcome="garbage", message=answered)
    where = f" (in the {worker_exit.phase.replace('_', ' ')})" if worker_exit.phase else ""
    return nothing_measured(
        task, replace(stop, message=f"{stop.message}{where}"), worker_exit.wall_seconds, str(worker_exit.stderr)
    )


def with_resumed(first: Measurement, second: Measurement) -> Measurement:
    """Return a probe's measurement with the peaks of the process that went on from its checkpoint.

    If that process did not fit or failed, its own measurement is the probe's.
    """
    if second.outcome != "fits":
        return second
    peaks = {rank.rank: {peak.name: peak for peak in rank.phases} for rank in second.ranks}
    ranks = tuple(
        replace(rank, phases=tuple(_heavier(peak, peaks[rank.rank].get(peak.name, peak)) for peak in rank.phases))
        for rank in first.ranks
    )
    return replace(first, ranks=ranks, wall_seconds=second.wall_seconds)


def _heavier(one: PhasePeak, other: PhasePeak) -> PhasePeak:
    return replace(
        one,
        allocated_bytes=max(one.allocated_bytes, other.allocated_bytes),
        reserved_bytes=max(one.reserved_bytes, other.reserved_bytes),
        driver_bytes=max(one.driver_bytes, other.driver_bytes),
    )


def nothing_measured(task: Task, stop: WorkerStop, wall_seconds: float, log: str) -> Measurement:
    """Return a measurement without memory: its outcome and message only."""
    found = without_memory(task.candidate, task.device, stop.outcome, stop.message)
    return replace(found, wall_seconds=wall_seconds, log=log)


def printed_answer(task: Task, worker_exit: WorkerExit) -> Measurement | str:
    """Return the measurement that a worker printed, or a message that says what is wrong with its output.

    Of several ranks' measurements it is one that ran out of memory, if any did, else the last.
    """
    lines = [line.removeprefix(ANSWER_PREFIX) for line in _lines(worker_exit.stdout) if line.startswith(ANSWER_PREFIX)]
    if not lines:
        return "it printed no measurement"
    read: list[Measurement] = []
    for line in lines:
        try:
            found = measurement_of(json.loads(line))
        except (ValueError, InputError) as error:
            return f"its measurement cannot be read: {error}"
        if _measured(found) != _measured(task):
            return "it measured another candidate or device than it was told"
        read.append(replace(found, candidate=task.candidate))
    return next((found for found in read if found.outcome == "out_of_memory"), read[-1])


def _measured(of: Measurement | Task) -> str:
    """Return a device and a candidate as text."""
    return of.device + json.dumps(candidate_report(of.candidate), sort_keys=True)


def _message_after_answer(worker_exit: WorkerExit) -> str:
    """Return a message if a worker that printed its measurement did not end well; the measurement stays valid."""
    if worker_exit.stopped is not None:
        return f"it answered and did not end: {worker_exit.stopped.message}"
    return f"it answered, then {_describe_exit(worker_exit.exit_code)}" if worker_exit.exit_code else ""


def _failure(worker_exit: WorkerExit) -> WorkerStop | None:
    """Return why a worker failed, by its exit code and its log; None if it ended well."""
    lines = _lines(worker_exit.stderr)
    code = _first_failure(lines) or worker_exit.exit_code
    if not code:
        return None
    if code < 0 and -code not in OWN_SIGNALS:
        return _killed(worker_exit, code)
    if shutil.disk_usage(worker_exit.stderr.parent).free < LEAST_FREE_BYTES:
        return WorkerStop(outcome="disk_full", message=f"no space is left on the device of {worker_exit.stderr.parent}")
    return _known_error(lines) or WorkerStop(outcome="crashed", message=_last_error(lines, code))


def _killed(worker_exit: WorkerExit, code: int) -> WorkerStop:
    """Return why a worker was killed by a signal that this program did not send."""
    if -code == signal.SIGKILL and worker_exit.kernel_kills:
        return WorkerStop(
            outcome="host_out_of_memory", message="the kernel ended it with SIGKILL: the host had no memory left"
        )
    return WorkerStop(outcome="killed", message=f"{_describe_exit(code)} that was not ours")


def _first_failure(lines: list[str]) -> int:
    """Return the exit code of the rank that failed first, from torchrun's report in the log; 0 if there is none."""
    found = FIRST_FAILURE.findall("\n".join(lines))
    return int(found[-1]) if found else 0


def _known_error(lines: list[str]) -> WorkerStop | None:
    """Return the outcome of the last line that matches `KNOWN_ERRORS`, if any."""
    for line in reversed(lines):
        for outcome, pattern in KNOWN_ERRORS:
            if re.search(pattern, line):
                return WorkerStop(outcome=outcome, message=_shorten(line))
    return None


def _last_error(lines: list[str], code: int) -> str:
    """Return the last line of the last traceback, else the last line of the log."""
    exceptions = (match.group(1) for match in map(EXCEPTION.match, reversed(lines)) if match)
    last = next((text for text in exceptions if not any(name in text for name in LAUNCHER_EXCEPTIONS)), "")
    ended = _describe_exit(code)
    if last:
        return _shorten(last)
    return f"{ended}: {_shorten(lines[-1])}" if lines else ended


def _describe_exit(code: int) -> str:
    return f"it was ended by {signal.Signals(-code).name}" if code < 0 else f"it ended with exit code {code}"


def _shorten(line: str) -> str:
    return line if len(line) <= MESSAGE_CHARACTERS else f"{line[:MESSAGE_CHARACTERS]}..."


def _lines(path: Path) -> list[str]:
    """Return the non-empty lines at the end of a log, without terminal colours."""
    return [line for line in _tail_lines(path) if line]


def _tail_lines(path: Path) -> Iterator[str]:
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - TAIL_BYTES, 0))
        for line in file.read().decode("utf-8", errors="replace").splitlines():
            yield ESCAPES.sub("", line).strip()

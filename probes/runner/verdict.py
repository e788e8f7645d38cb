"""How a worker ended -> a measurement: its own where it printed one, else what went wrong, in one line."""

import json
import re
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from planner.errors import InputError
from planner.measurements.documents import candidate_report, measurement_of
from planner.measurements.measurement import Measurement, Outcome
from planner.units import MIB
from probes.task import ANSWER_PREFIX, Task

TAIL_BYTES = 1 * MIB  # of the log: a traceback of every rank is shorter
MESSAGE_CHARACTERS = 300  # what is shown of a line
LEAST_FREE_BYTES = 1 * MIB  # with less a worker could not even write down what stopped it

# What libraries write when they stop for want of something, the outcome that it is. The last such line of the log decides.
# Source: strerror(3) of ENOSPC and EDQUOT; pytorch 2.13, caffe2/serialize/inline_container.cc and c10/core/impl/alloc_cpu.cpp;
# c10/cuda/CUDACachingAllocator.cpp and CUDAException.cpp; libstdc++.
COMPLAINTS: tuple[tuple[Outcome, str], ...] = (
    ("disk_full", r"No space left on device|Disk quota exceeded|PytorchStreamWriter failed writing"),
    (
        "host_out_of_memory",
        r"^MemoryError\b|: MemoryError\b|DefaultCPUAllocator: |Cannot allocate memory|std::bad_alloc",
    ),
    ("out_of_memory", r"CUDA out of memory|OutOfMemoryError|CUDA error: out of memory"),
)
# A process that ended by one of these broke by itself; by any other, someone ended it.
OWN_SIGNALS = frozenset(
    {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS}
)
# The last line of a traceback, before it what a launcher puts there.
EXCEPTION = re.compile(r"^(?:\[rank\d+\]:\s*)?((?:\w+\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Warning)\b.*)$")
LAUNCHERS_OWN = (
    "ChildFailedError",
    "CalledProcessError",
    "SignalException",
)  # they say no more than that a worker failed
# Source: pytorch 2.13, torch/distributed/elastic/multiprocessing/errors/__init__.py, `_FAILURE_FORMAT_TEMPLATE`.
FIRST_FAILURE = re.compile(r"Root Cause \(first observed failure\):.*?exitcode\s*:\s*(-?\d+)", re.DOTALL)
ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """Why the runner ended a worker."""

    outcome: Outcome
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """What is left of a worker. `exit_code` below 0 is a signal, as in `subprocess`."""

    exit_code: int
    stopped: Stop | None  # None: it ended by itself
    phase: str  # the last that it entered; empty: it did not come so far
    stdout: Path
    stderr: Path
    kernel_kills: int  # of any process, while it ran
    wall_seconds: float


def verdict(task: Task, ending: Ending) -> Measurement:
    """The measurement of a worker that has ended, whichever way."""
    answered = answer(task, ending)
    if isinstance(answered, Measurement):
        return replace(
            answered,
            wall_seconds=ending.wall_seconds,
            log=str(ending.stderr),
            message=answered.message or _after_the_answer(ending),
        )
    stop = ending.stopped or _failure(ending) or Stop(outcome="garbage", message=answered)
    where = f" (in the {ending.phase.replace('_', ' ')})" if ending.phase else ""
    return nothing_measured(
        task, replace(stop, message=f"{stop.message}{where}"), ending.wall_seconds, str(ending.stderr)
    )


def nothing_measured(task: Task, stop: Stop, wall_seconds: float, log: str) -> Measurement:
    return Measurement(
        candidate=task.candidate, device=task.device, outcome=stop.outcome, ranks=(), shortage=None, step_seconds=0.0, tokens_per_second=0.0,
        wall_seconds=wall_seconds, message=stop.message, log=log, versions={},
    )  # fmt: skip


def answer(task: Task, ending: Ending) -> Measurement | str:
    """The worker's measurement; else what is wrong with what it printed. Of several processes' the one that ran out of memory counts."""
    lines = [line.removeprefix(ANSWER_PREFIX) for line in _lines(ending.stdout) if line.startswith(ANSWER_PREFIX)]
    if not lines:
        return "it printed no measurement"
    read: list[Measurement] = []
    for line in lines:
        try:
            found = measurement_of(json.loads(line))
        except (ValueError, InputError) as error:
            return f"its measurement cannot be read: {error}"
        if _report(found) != _report_of(task):
            return "it measured another candidate or device than it was told"
        read.append(replace(found, candidate=task.candidate))
    return next((found for found in read if found.outcome == "out_of_memory"), read[-1])


def _report(found: Measurement) -> str:
    return found.device + json.dumps(candidate_report(found.candidate), sort_keys=True)


def _report_of(task: Task) -> str:
    return task.device + json.dumps(candidate_report(task.candidate), sort_keys=True)


def _after_the_answer(ending: Ending) -> str:
    """A measurement is whole when it is printed; how the process ended afterwards is only told."""
    if ending.stopped is not None:
        return f"it answered and did not end: {ending.stopped.message}"
    return f"it answered, then {_how_it_ended(ending.exit_code)}" if ending.exit_code else ""


def _failure(ending: Ending) -> Stop | None:
    """What a worker's end and its log say went wrong, None where it ended well."""
    lines = _lines(ending.stderr)
    code = _first_failure(lines) or ending.exit_code
    if not code:
        return None
    if code < 0 and -code not in OWN_SIGNALS:
        return _killed(ending, code)
    if shutil.disk_usage(ending.stderr.parent).free < LEAST_FREE_BYTES:
        return Stop(outcome="disk_full", message=f"no space is left on the device of {ending.stderr.parent}")
    return _complaint(lines) or Stop(outcome="crashed", message=_last_words(lines, code))


def _killed(ending: Ending, code: int) -> Stop:
    if -code == signal.SIGKILL and ending.kernel_kills:
        return Stop(
            outcome="host_out_of_memory", message="the kernel ended it with SIGKILL: the host had no memory left"
        )
    return Stop(outcome="killed", message=f"{_how_it_ended(code)} that was not ours")


def _first_failure(lines: list[str]) -> int:
    """The exit code of the process that failed first, as the launcher of several writes it; 0 where there is none."""
    found = FIRST_FAILURE.findall("\n".join(lines))
    return int(found[-1]) if found else 0


def _complaint(lines: list[str]) -> Stop | None:
    for line in reversed(lines):
        for outcome, pattern in COMPLAINTS:
            if re.search(pattern, line):
                return Stop(outcome=outcome, message=_short(line))
    return None


def _last_words(lines: list[str], code: int) -> str:
    """The last line of the traceback, else the last line of the log."""
    exceptions = (match.group(1) for match in map(EXCEPTION.match, reversed(lines)) if match)
    said = next((text for text in exceptions if not any(name in text for name in LAUNCHERS_OWN)), "")
    ended = _how_it_ended(code)
    if said:
        return _short(said)
    return f"{ended}: {_short(lines[-1])}" if lines else ended


def _how_it_ended(code: int) -> str:
    return f"it was ended by {signal.Signals(-code).name}" if code < 0 else f"it ended with exit code {code}"


def _short(line: str) -> str:
    return line if len(line) <= MESSAGE_CHARACTERS else f"{line[:MESSAGE_CHARACTERS]}..."


def _lines(path: Path) -> list[str]:
    """The last lines of a log that say anything, without colours."""
    return [line for line in _texts(path) if line]


def _texts(path: Path) -> Iterator[str]:
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - TAIL_BYTES, 0))
        for line in file.read().decode("utf-8", errors="replace").splitlines():
            yield ESCAPES.sub("", line).strip()

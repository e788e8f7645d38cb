"""Find the out-of-memory errors in the log of a run, of one process or of several in one stream."""

import io
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TextIO

from planner.diagnose.incident import Incident
from planner.diagnose.messages import MESSAGES, Message, figures
from planner.diagnose.tracebacks import Frame, gathers_parameters, innermost, phase_of
from planner.errors import InputError
from planner.files.read import regular_file

# Prefixes of a line by launchers and vLLM: [rank0]:, [default3]:, (EngineCore pid=71), ERROR 09-18 07:56:28
# [core.py:390].
PREFIX = re.compile(
    r"^\s*(?:(?P<rank>\[(?:rank|default)\d+\]):?|\((?P<worker>\w+(?: [\w=]+)?) "
    r"pid=\d+[^)]*\)|(?:ERROR|INFO|WARNING|CRITICAL) [\d-]+ [\d:.]+ \[[^\]]*\])\s?"
)
FRAME = re.compile(r'^\s*File "(?P<path>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')
# After a long path, rich prints the function on the next line.
RICH_FRAME = re.compile(r"^\W*(?P<path>/[^\s:]+\.py):(?P<line>\d+) in *(?P<function>\w*)")
PYTEST_FRAME = re.compile(r"^\s*(?P<path>[\w./-]+\.py):(?P<line>\d+): in (?P<function>\S+)")
BEGIN = "Traceback (most recent call last)"
# Found in the first line of every message of MESSAGES, even if a terminal wrapped it: a fast test that skips most
# lines.
HINT = re.compile(
    r"(?:CUDA|HIP) ?(?:$|[oeE])|Cuda|CUBLAS_|CUDNN_|cudaError|calloc|Killed|killed d|SIGKILL|exitcode *:? ?(?:$|-)|"
    r"code:? ?(?:=|$|1)|oom|OOM|Free mem|serve at|seq len|No avail|Error in mem|Expandable|CPUAlloc|allocate mem|"
    r"Out of m|low on mem"
)
ANY_MESSAGE = re.compile("|".join(f"(?:{message.pattern})" for message in MESSAGES))
MESSAGE_LINES = 8  # most lines over which a message is wrapped
OPENING_CHARACTERS = 200  # at least those of each pattern of MESSAGES
LINE_CHARACTERS = 4000  # a longer line is read in pieces; the longest message has 1,000
MAX_INCIDENTS = 1000  # of a log that are looked at: later ones are consequences of the first
MAX_FRAMES, MAX_RANKS = 200, 4096  # of a traceback, and of processes whose tracebacks are kept

# Parts of every line that matters: frames of tracebacks, and what HINT looks for.
WORDS = (
    BEGIN, ".py", "CUDA", "HIP", "Cuda", "CUBLAS_", "CUDNN_", "cudaError", "calloc", "illed", "SIGKILL", "code", "oom",
    "OOM", "Free mem", "serve at", "seq len", "No avail", "Error in mem", "Expandable", "CPUAlloc", "allocate mem",
    "Out of m", "low on mem",
)  # fmt: skip
RawLine = tuple[int, str]  # number in the log, text


def read_incidents(path: str) -> tuple[Incident, ...]:
    """The incidents of a log file; `-` reads stdin.

    Raises:
        InputError: the file cannot be read, or reports no out-of-memory error.
    """
    if path == "-":
        found = incidents(sys.stdin)
    else:
        try:
            with regular_file(Path(path)) as file, io.TextIOWrapper(file, encoding="utf-8", errors="replace") as text:
                found = incidents(text)
        except InputError as error:
            raise InputError(f"{error} Give a log file, or - for stdin.") from error
    if not found:
        raise InputError(
            f"{'stdin' if path == '-' else path} reports no out-of-memory error. "
            "The messages of PyTorch, vLLM, NCCL and the kernel are known."
        )
    return found


def incidents(log: TextIO) -> tuple[Incident, ...]:
    """Every out-of-memory error of a log, in order; of several of one kind, rank and GPU only the first.

    When one rank ends, the others end too, so that later errors are often consequences of the first. Reads the log once
    and keeps a few lines of it.
    """
    found: dict[tuple[str, str, int | None], Incident] = {}
    for incident in islice(_all(log), MAX_INCIDENTS):
        found.setdefault((incident.kind, incident.rank, incident.gpu), incident)
    first = {incident.kind for incident in found.values()}
    # A process that is killed after an error of another kind was killed by its launcher: no lack of main memory.
    return tuple(
        incident
        for incident in found.values()
        if incident.kind != "host" or first == {"host"} or "-9" not in incident.message
    )


def _windows(log: TextIO) -> Iterator[Sequence[RawLine]]:
    """Every line that may matter with those after it, MESSAGE_LINES in all; fewer at the end of the log.

    A line without end comes in pieces of LINE_CHARACTERS.
    """
    ahead: deque[RawLine] = deque()
    number = 1
    while piece := log.readline(LINE_CHARACTERS):
        ahead.append((number, piece))
        number += piece.endswith("\n")
        if len(ahead) == MESSAGE_LINES:
            if any(word in ahead[0][1] for word in WORDS):
                yield ahead
            ahead.popleft()
    while ahead:
        yield ahead
        ahead.popleft()


def _all(log: TextIO) -> Iterator[Incident]:
    """Every message of MESSAGES in the log, repetitions included."""
    frames: dict[str, deque[Frame]] = {}
    for ahead in _windows(log):
        rank, line = _stripped(ahead[0][1])
        if rank not in frames and len(frames) < MAX_RANKS:
            frames[rank] = deque(maxlen=MAX_FRAMES)
        own = frames.get(rank, deque())
        if BEGIN in line:
            own.clear()
        elif frame := _frame(line, ahead):
            own.append(frame)
        if HINT.search(line) and (incident := _incident_at(ahead, own)):
            yield incident


def _frame(line: str, ahead: Sequence[RawLine]) -> Frame | None:
    """The frame of a traceback that a line holds, as Python, pytest or rich prints it; None if it holds none."""
    if match := FRAME.match(line) or PYTEST_FRAME.match(line):
        return Frame(**match.groupdict())
    if match := RICH_FRAME.match(line):
        following = re.search(r"\w+", _stripped(ahead[1][1])[1]) if not match["function"] and len(ahead) > 1 else None
        return Frame(match["path"], match["line"], following[0] if following else match["function"])
    return None


def _stripped(line: str) -> tuple[str, str]:
    """The rank or worker that printed a line (empty if unknown), and the line without its prefixes."""
    rank, line = "", line.rstrip("\n")
    while match := PREFIX.match(line):
        rank = (match["rank"] or "").strip("[]") or match["worker"] or rank
        line = line[match.end() :]
    return rank, line


def _incident_at(ahead: Sequence[RawLine], frames: Iterable[Frame]) -> Incident | None:
    """The incident of a message that begins in the first of these lines; None if none does.

    Joins the following lines of the same rank, with and without a space, since a terminal may have wrapped the message
    between words or inside one, and takes the text with more figures.
    """
    number, (rank, line), *rest = ahead[0][0], *(_stripped(text) for _, text in ahead)
    following = [text for other_rank, text in rest if other_rank in (rank, "") and BEGIN not in text]
    wrapped = [re.sub(r"[ \t]+", " ", between.join([line, *following])) for between in (" ", "")]
    end = len(line) + OPENING_CHARACTERS
    if not any((match := ANY_MESSAGE.search(whole, 0, end)) and match.start() < len(line) for whole in wrapped):
        return None
    for message in MESSAGES:
        begun = [each for each in wrapped if (match := re.search(message.pattern, each)) and match.start() < len(line)]
        if begun:
            text = max(begun, key=lambda whole: sum(len(each) for each in figures(message, whole)))
            return _incident(message, text, number, rank, tuple(frames))
    return None


def _incident(message: Message, text: str, number: int, rank: str, frames: Sequence[Frame]) -> Incident:
    """The incident of a message whose text begins in line `number` (from 1), after the traceback `frames`."""
    sizes, numbers = figures(message, text)
    gpu = numbers.pop("gpu", None)
    if "bytes" in numbers:
        sizes["tried"] = int(numbers.pop("bytes"))
    return Incident(
        kind=message.kind,
        line=number,
        rank=rank,
        gpu=None if gpu is None else int(gpu),
        phase=phase_of(frames),
        where=innermost(frames),
        sizes=sizes,
        numbers=numbers,
        message=text,
        gathers=gathers_parameters(frames),
    )

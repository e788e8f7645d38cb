"""Find the out-of-memory errors in the log of a run, of one process or of several in one stream."""

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from planner.diagnose.incident import Incident
from planner.diagnose.messages import MESSAGES, Message, figures
from planner.diagnose.tracebacks import Frame, gathers_parameters, innermost, phase_of
from planner.errors import InputError

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
# Found in the first line of every message of MESSAGES: a fast test that skips most lines.
HINT = re.compile(
    r"memory|CUBLAS|CUDNN|cuda|Cuda|calloc|Killed|SIGKILL|exitcode|serve at least|seq len|cache "
    r"blocks|oom-kill|Expandable"
)
MESSAGE_LINES = 8  # most lines over which a message is wrapped


def read_incidents(path: str) -> tuple[Incident, ...]:
    """The incidents of a log file; `-` reads stdin.

    Raises:
        InputError: the file cannot be read, or reports no out-of-memory error.
    """
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}. Give a log file, or - for stdin.") from error
    found = incidents(text)
    if not found:
        raise InputError(
            f"{'stdin' if path == '-' else path} reports no out-of-memory error. "
            "The messages of PyTorch, vLLM, NCCL and the kernel are known."
        )
    return found


def incidents(text: str) -> tuple[Incident, ...]:
    """Every out-of-memory error of a log, in order; of several of one kind, rank and GPU only the first.

    When one rank ends, the others end too, so that later errors are often consequences of the first.
    """
    found: dict[tuple[str, str, int | None], Incident] = {}
    for incident in _all(text):
        found.setdefault((incident.kind, incident.rank, incident.gpu), incident)
    first = {incident.kind for incident in found.values()}
    # A process that is killed after an error of another kind was killed by its launcher: no lack of main memory.
    return tuple(
        incident
        for incident in found.values()
        if incident.kind != "host" or first == {"host"} or "-9" not in incident.message
    )


def _all(text: str) -> Iterator[Incident]:
    """Every message of MESSAGES in the log, repetitions included."""
    lines = [_stripped(line) for part in text.splitlines() for line in part.split("\r")]
    frames: dict[str, list[Frame]] = {}
    for number, (rank, line) in enumerate(lines):
        if BEGIN in line:
            frames[rank] = []
        elif frame := _frame(lines, number):
            frames.setdefault(rank, []).append(frame)
        for message in MESSAGES if HINT.search(line) else ():
            if found := _found(message, lines, number):
                yield _incident(message, found, number, rank, frames.get(rank, []))
                break


def _frame(lines: Sequence[tuple[str, str]], number: int) -> Frame | None:
    """The frame of a traceback that a line holds, as Python, pytest or rich prints it; None if it holds none."""
    line = lines[number][1]
    if match := FRAME.match(line) or PYTEST_FRAME.match(line):
        return Frame(**match.groupdict())
    if match := RICH_FRAME.match(line):
        following = (
            re.search(r"\w+", lines[number + 1][1]) if not match["function"] and number + 1 < len(lines) else None
        )
        return Frame(match["path"], match["line"], following[0] if following else match["function"])
    return None


def _stripped(line: str) -> tuple[str, str]:
    """The rank or worker that printed a line (empty if unknown), and the line without its prefixes."""
    rank = ""
    while match := PREFIX.match(line):
        rank = (match["rank"] or "").strip("[]") or match["worker"] or rank
        line = line[match.end() :]
    return rank, line


def _found(message: Message, lines: Sequence[tuple[str, str]], number: int) -> str:
    """The whole text of a message that begins in this line; empty if none does.

    Joins the following lines of the same rank, with and without a space, since a terminal may have wrapped the message
    between words or inside one, and takes the text with more figures.
    """
    rank, line = lines[number]
    if not line.strip():
        return ""
    following = [
        other
        for other_rank, other in lines[number + 1 : number + MESSAGE_LINES]
        if other_rank in (rank, "") and BEGIN not in other
    ]
    wrapped = [re.sub(r"[ \t]+", " ", between.join([line, *following])) for between in (" ", "")]
    begun = [whole for whole in wrapped if (match := re.search(message.pattern, whole)) and match.start() < len(line)]
    return max(begun, key=lambda whole: sum(len(each) for each in figures(message, whole)), default="")


def _incident(message: Message, text: str, number: int, rank: str, frames: Sequence[Frame]) -> Incident:
    """The incident of a message whose text begins in line `number`, after the traceback `frames`."""
    sizes, numbers = figures(message, text)
    gpu = numbers.pop("gpu", None)
    if "bytes" in numbers:
        sizes["tried"] = int(numbers.pop("bytes"))
    return Incident(
        kind=message.kind,
        line=number + 1,
        rank=rank,
        gpu=None if gpu is None else int(gpu),
        phase=phase_of(frames),
        where=innermost(frames),
        sizes=sizes,
        numbers=numbers,
        message=text,
        gathers=gathers_parameters(frames),
    )

"""Find the out-of-memory errors in the log of a run, of one process or of several in one stream.

The log is read in blocks, in memory that does not grow with it, and in time linear in its length: blocks without a word
of a message or of a traceback are skipped unread.
"""

import io
import re
import stat
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TextIO

from planner.diagnose.incident import Incident
from planner.diagnose.messages import MESSAGES, Message, figures
from planner.diagnose.tracebacks import Frame, gathers_parameters, innermost, phase_of
from planner.errors import InputError

# Prefixes of a line by launchers and vLLM: [rank0]:, [default3]:, (EngineCore pid=71), ERROR 09-18 07:56:28
# [core.py:390], 192.168.1.51: (DeepSpeed on several nodes).
PREFIX = re.compile(
    r"^\s*(?:(?P<rank>\[(?:rank|default)\d+\]):?|\((?P<worker>\w{1,64}(?: [\w=]{1,64})?) "
    r"pid=\d+[^)]*\)|(?:ERROR|INFO|WARNING|CRITICAL) [\d-]+ [\d:.]+ \[[^\]]*\]|"
    r"(?P<host>\d{1,3}(?:\.\d{1,3}){3}):(?= ))\s?"
)
PREFIX_BEGINS = frozenset(" \t[(EIWC0123456789")  # a line that begins otherwise has no prefix
FRAME = re.compile(r'^\s*File "(?P<path>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')
IPYTHON_FRAME = re.compile(r"^File (?P<path>[^\s:]+\.py):(?P<line>\d+), in (?:\w+\.)*(?P<function>\w+)\(")
# After a long path, rich prints the function on the next line.
RICH_FRAME = re.compile(r"^[\s│|❱>]*(?P<path>(?:/|[A-Z]:)[^\s:]+\.py):(?P<line>\d+) in *(?P<function>\w*)")
PYTEST_FRAME = re.compile(r"^\s*(?P<path>[\w./-]+\.py):(?P<line>\d+): in (?P<function>\S+)")
BEGIN = "Traceback (most recent call last)"
FRAME_WORDS = ('", line ', ".py:")
WORDS = (BEGIN, *FRAME_WORDS, *dict.fromkeys(word for message in MESSAGES for word in message.words))
MESSAGE_LINES = 8  # most lines over which a message is wrapped
MESSAGE_LENGTH = 4096  # characters of a message; PyTorch's with 40 processes on the GPU
PIECE = 2048  # characters; longer lines are cut into pieces
BLOCK = 1 << 16  # characters that are read at once
FRAMES = 1000  # most frames of a traceback that are kept: Python's limit of recursion


class Line(NamedTuple):
    """A line of the log: its number from 1, the rank or worker that printed it, its text without prefixes."""

    number: int
    rank: str
    text: str


def read_incidents(path: str) -> tuple[Incident, ...]:
    """The incidents of a log file; `-` reads stdin.

    Raises:
        InputError: the file cannot be read, is no regular file, or reports no out-of-memory error.
    """
    try:
        found = _read(path)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}. Give a log file, or - for stdin.") from error
    if not found:
        raise InputError(
            f"{'stdin' if path == '-' else path} reports no out-of-memory error. "
            "The messages of PyTorch, vLLM, NCCL, launchers and the kernel are known."
        )
    return found


def _read(path: str) -> tuple[Incident, ...]:
    if path == "-":
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")
        return _first_of_each(_all(sys.stdin))
    if not stat.S_ISREG(Path(path).stat().st_mode):  # opening a FIFO would wait, /dev/zero has no end
        raise InputError(f"{path} is no regular file. Give a log file, or - for stdin.")
    with open(path, encoding="utf-8", errors="replace", newline="\n") as log:
        return _first_of_each(_all(log))


def incidents(text: str) -> tuple[Incident, ...]:
    """Every out-of-memory error of a log, in order; of several of one kind, rank and GPU only the first.

    When one rank ends, the others end too, so that later errors are often consequences of the first.
    """
    return _first_of_each(_all(io.StringIO(text, newline="\n")))


def _first_of_each(all_incidents: Iterator[Incident]) -> tuple[Incident, ...]:
    found: dict[tuple[str, str, int | None], Incident] = {}
    for incident in all_incidents:
        found.setdefault((incident.kind, incident.rank, incident.gpu), incident)
    kinds = {incident.kind for incident in found.values()}
    # A process that is killed beside an error of another kind was killed by its launcher: no lack of main memory.
    return tuple(incident for incident in found.values() if incident.kind != "killed" or kinds == {"killed"})


def _all(log: TextIO) -> Iterator[Incident]:
    """The messages of MESSAGES in the log; repetitions of a line's text in one rank are skipped."""
    lines = _lines(log)
    window = deque(islice(lines, MESSAGE_LINES))
    frames: dict[str, deque[Frame]] = {}
    seen: set[tuple[str, str]] = set()
    while window:
        line, following = window[0], list(islice(window, 1, None))
        if BEGIN in line.text:
            frames[line.rank] = deque(maxlen=FRAMES)
        elif frame := _frame(line, following):
            frames.setdefault(line.rank, deque(maxlen=FRAMES)).append(frame)
        if (line.rank, line.text) not in seen and (
            incident := _incident_at(line, following, tuple(frames.get(line.rank, ())))
        ):
            seen.add((line.rank, line.text))
            yield incident
        window.popleft()
        window.extend(islice(lines, 1))


def _incident_at(line: Line, following: Sequence[Line], frames: Sequence[Frame]) -> Incident | None:
    """The incident whose message begins in this line; None if none does."""
    for message in MESSAGES:
        if any(word in line.text for word in message.words) and (found := _found(message, line, following)):
            return _incident(message, found, line, frames)
    return None


def _lines(log: TextIO) -> Iterator[Line]:
    """The lines of the blocks that contain a word of WORDS, and of the block after each."""
    number, wanted_before = 1, False
    while block := log.read(BLOCK):
        block += log.readline(BLOCK)
        wanted = any(word in block for word in WORDS)
        if wanted or wanted_before:
            for offset, line in enumerate(block.split("\n")):
                yield from (_stripped(number + offset, piece) for piece in _pieces(line))
        number += block.count("\n")
        wanted_before = wanted


def _pieces(line: str) -> Iterator[str]:
    """The parts of a line that a progress bar has overwritten, each cut after a space into pieces of PIECE."""
    for part in line.split("\r"):
        start = 0
        while len(part) - start > PIECE:
            end = part.rfind(" ", start, start + PIECE) + 1 or start + PIECE
            yield part[start:end]
            start = end
        yield part[start:]


def _frame(line: Line, following: Sequence[Line]) -> Frame | None:
    """The frame of a traceback that a line holds, as Python, IPython, pytest or rich prints it; None if it has none."""
    text = line.text
    if not any(word in text for word in FRAME_WORDS):
        return None
    if match := FRAME.match(text) or PYTEST_FRAME.match(text) or IPYTHON_FRAME.match(text):
        return Frame(**match.groupdict())
    if match := RICH_FRAME.match(text):
        next_word = re.search(r"\w+", following[0].text) if not match["function"] and following else None
        path = match["path"].replace("\\", "/")
        return Frame(path, match["line"], next_word[0] if next_word else match["function"])
    return None


def _stripped(number: int, text: str) -> Line:
    """The line without its prefixes, and the rank or worker in them (empty if there is none)."""
    rank = ""
    while text[:1] in PREFIX_BEGINS and (match := PREFIX.match(text)):
        rank = (match["rank"] or "").strip("[]") or match["worker"] or match["host"] or rank
        text = text[match.end() :]
    return Line(number, rank, text)


def _found(message: Message, line: Line, following: Sequence[Line]) -> str:
    """The whole text of a message that begins in this line; empty if none does.

    Joins the following lines of the same rank, with and without a space, since a terminal may have wrapped the message
    between words or inside one, and takes the text with more figures.
    """
    joined = [line.text]
    for other in following:
        if other.rank in (line.rank, "") and BEGIN not in other.text:
            joined.append(other.text)
    wrapped = [re.sub(r"[ \t]+", " ", between.join(joined)[: 2 * MESSAGE_LENGTH]) for between in (" ", "")]
    begun = [
        whole[:MESSAGE_LENGTH]
        for whole in (line.text, *wrapped)
        if (match := re.search(message.pattern, whole)) and match.start() < len(line.text)
    ]
    return max(begun, key=lambda whole: sum(len(each) for each in figures(message, whole)), default="")


def _incident(message: Message, text: str, line: Line, frames: Sequence[Frame]) -> Incident:
    """The incident of a message whose text begins in `line`, after the traceback `frames`."""
    sizes, numbers = figures(message, text)
    gpu = numbers.pop("gpu", None)
    if "bytes" in numbers:
        sizes["tried"] = int(numbers.pop("bytes"))
    return Incident(
        kind=message.kind,
        line=line.number,
        rank=line.rank,
        gpu=None if gpu is None else int(gpu),
        phase=phase_of(frames),
        where=innermost(frames),
        sizes=sizes,
        numbers=numbers,
        message=text,
        gathers=gathers_parameters(frames),
    )

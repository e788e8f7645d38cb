"""Find the out-of-memory errors in the log of a run, of one process or of several in one stream.

The log is read in blocks, in memory that does not grow with it, and in time linear in its length: blocks without a word
of a message or of a traceback are skipped unread.
"""

import io
import re
import sys
from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from itertools import islice, takewhile
from pathlib import Path
from typing import NamedTuple, TextIO

from msgspec.structs import replace

from planner.diagnose.advice_by_phase import ray_lists
from planner.diagnose.beside import COLOCATED, Beside, BesideReader
from planner.diagnose.beside import WORDS as BESIDE_WORDS
from planner.diagnose.code_phases import SAID_FUNCTIONS, TRAINING, TRAINS, VLLM, phase_of, said_frame
from planner.diagnose.frames import BEGIN, MODULE, Frame, TracebackLine, begins, frames_of, may_hold_frame
from planner.diagnose.frames import WORDS as FRAME_WORDS
from planner.diagnose.incident import WORKER_ENDED, Activity, Incident, IncidentKind, completed
from planner.diagnose.lines import cleaned, pieces, stripped
from planner.diagnose.messages import (
    GPU,
    LACK_WORDS,
    MESSAGES,
    NO_FILE,
    NO_LACK,
    NO_SEGMENT,
    RAY_TASK,
    Message,
    figures,
    in_own_words,
    without_begin,
)
from planner.diagnose.releases import last_trl
from planner.diagnose.tracebacks import activity_of, checkpoints, innermost, old_python, sharding_of
from planner.errors import InputError, one_line, without_middle
from planner.files.read import open_regular
from planner.quantities import Phase

# Processes of vLLM, as it names them. Source: vllm 0.33, v1/executor/multiproc_executor.py and v1/engine/core.py.
VLLM_WORKER = re.compile(r"Vllm|Worker_|EngineCore|RayWorkerWrapper")
CHAINED = "above exception"  # Python: a traceback of an error follows that this one caused, or whose handling failed
# Transformers' Trainer logs it at the end of `train` (trainer.py, `speed_metrics`).
FINISHED = "train_runtime"
# SLURM ends a job for a reason that is not memory, and kills its processes.
CANCELLED = r"CANCELLED AT \S{1,40} DUE TO (?:TIME LIMIT|PREEMPTION|NODE FAILURE)"
# torch 2.13, distributed/elastic/agent/server/api.py: a launcher that got a signal from outside
DEATH_SIGNAL = r"Received (?:1|2|15) death signal"
# bash and zsh, of a process that ended by a signal
SHELL_CRASH = (
    r"(?:: line \d{1,9}: +|^ *(?:\[\d{1,3}\] *)?[+-]? *)\d{1,10} "
    r"(?:[Ss]egmentation fault|Aborted|abort|[Ii]llegal instruction|[Ff]loating point exception)\b"
)
# An error that is none of MESSAGES: an exception's last line, NCCL's watchdog, two of NCCL's ranks on one GPU, an
# assertion of a kernel, vLLM's csrc/cumem_allocator.cpp, a crash, bitsandbytes' csrc/ops.cu, an exception of C++, a
# signal that ended a process under DeepSpeed; C prints it on the line of a bar.
ERROR_WORDS = (
    "Error",
    "CUDA error",
    "Exception",
    "Watchdog caught",
    "ssertion `",
    "egmentation fault",
    "death signal",
    "uncaught exception of type",
    "what():",
    "return code = -",
    "Duplicate GPU detected",
    "low on resource: ephemeral-storage",
    "exitcode",
    "(core dumped)",
    "KeyboardInterrupt",
    "CANCELLED AT",
    "corrupted ",
    "invalid pointer",
    "Memory access fault by GPU",
    "(0xC0",
    "attaching to shared memory",
    "open failed",
    "Resource temporarily unavailable",
)
ERROR = re.compile(
    r"^(?:.{0,300}(?:it/s|s/it)\])?(?:ERROR:? +)?"
    r"((?:[A-Za-z_]\w{0,60}\.){0,6}(?:nccl)?(?:[A-Z]\w{0,60}(?:Error|Exception)|Exception(?=:))\b(?!  ).*|"
    r".*Watchdog caught .*|"
    rf".*NCCL WARN (?:Duplicate GPU detected|Error while attaching to shared memory.*{NO_SEGMENT}).*|"
    rf".*{NO_FILE}.*|"
    r"(?:.* )?CUDA [Ee]rror: (?!out of memory).*|"
    r".*node was low on resource: ephemeral-storage.*|Memory access fault by GPU.*|.*exit code -\d{9,10} \(0xC0.*|"
    rf"KeyboardInterrupt\b.*|.*{CANCELLED}.*|"
    r".*\bexitcode *: ?-(?:4|6|8|11|15)\b.*|Aborted \(core dumped\).*|(?:free|malloc|munmap_chunk)\(\): .*|"
    r"corrupted (?:size vs\. prev_size|double-linked list).*|"
    r".*\b[Aa]ssertion `[^`']{1,200}['`] failed.*|(?:Fatal Python error: )?Segmentation fault.*|"
    r"Error (?!out of memory)[a-z][\w ]{3,80} at line \d{1,6} in file .*|"
    r".*\bOSError: \[Errno (?:28|122)\] .*|.*(?:[Tt]hread|\bfork\b).{0,80}Resource temporarily unavailable.*|"
    rf".*{DEATH_SIGNAL}.*|.*terminating (?:due to|with) uncaught exception of type .*|"
    rf".*{SHELL_CRASH}.*|"
    r" *what\(\): .*|.*return code = -(?![79]\b)\d.*)"
)
# Launchers that end the other processes when one has ended. Source: torch 2.13, distributed/elastic/multiprocessing/
# api.py, `MultiprocessContext._close`; deepspeed 0.19.8, launcher/launch.py, `sigkill_handler`.
ENDING_WORDS = ("closing signal SIGTERM", "Killing subprocess")
WORDS = tuple(
    dict.fromkeys(
        (
            *FRAME_WORDS,
            FINISHED,
            CHAINED,
            *BESIDE_WORDS,
            *ERROR_WORDS,
            *ENDING_WORDS,
            *SAID_FUNCTIONS,
            *LACK_WORDS,
            *(word for each in MESSAGES for word in each.words),
        )
    )
)
QUIET_WORDS = {*FRAME_WORDS, CHAINED, *BESIDE_WORDS, *ERROR_WORDS, *ENDING_WORDS, *SAID_FUNCTIONS, *LACK_WORDS} - {
    word for each in MESSAGES for word in each.words
}
MESSAGE_LINES = 8  # most lines over which a message is wrapped
REACH = 300  # characters around a message's word in which its pattern matches
INDENTED = re.compile(r"\s{4}\s*\S")  # a line of code, of a rank that prints into another one's message
GPU_NUMBER = re.compile(r"GPU (\d{1,15})")
MESSAGE_LENGTH = 4096  # characters of a message; PyTorch's with 40 processes on the GPU
INTERRUPTS = rf"{re.escape(BEGIN)}|\d%\|"  # lines that continue no message: tracebacks and bars
BLOCK = 1 << 16  # characters that are read at once
FOLLOWING = 3  # lines after a line of a traceback that are kept: the rest of it, and the frame's code
PRECEDING = 6  # lines before an error, which may be code whose frames were cut
LATER_LINES = (
    300  # of the log after an error without a phase, in which tracebacks of its caller or of other ranks stand
)
BAR_LINES = 5  # after an error, in which its bar may be printed again
TRACEBACK_LINES = 5000  # last lines of tracebacks that are kept, of all ranks together
ERROR_CHARACTERS = 300  # of an error that is repeated
HAVE_PHASES = (
    "gpu",
    "library",
    "communication",
    "host",
    "killed",
    "foreign",
    "shared_memory",
)  # kinds whose advice depends on it
REPETITIONS = 3  # of a message of one kind, rank and GPU, which may have a traceback or figures that the first has not
MESSAGES_READ = 500  # most messages that are read in full, as many ranks and GPUs may fail


class LogLine(NamedTuple):
    """A line of the log that has `words` of WORDS: its number from 1, its text, and the lines after it."""

    number: int
    text: str
    words: Sequence[str]
    following: Sequence[str]
    preceding: Sequence[str] = ()


# verl's and EasyR1's function in Ray's list of the processes that hold most.
RAY_RUNS = re.compile(r"Top 10 memory users:.{0,200}?ray::\w{1,40}\.\w{0,40}generate_sequences")
OF_CALLERS = (
    "reorders",
    "merges",
    "predicts",
    "calibrates",
    "wraps_ddp",
    "trains",
)  # that a traceback after the error tells, too
RAY_SAVES = re.compile(r"Top 10 memory users:.{0,200}ray::\w{1,40}\.\w{0,40}save_checkpoint")
# python's and Rust's OSError; pytorch 2.13, caffe2/serialize/inline_container.cc
DISK = (
    r"No space left on device|StorageFull|PytorchStreamWriter failed writing file|Disk quota exceeded|"
    r"inline_container\.cc:\d{1,5}\] ?\. unexpected pos|resource: ephemeral-storage|OutOfDiskError"
)
# The exception in the first line of IPython's traceback, whose last line may be cut -> the kind.
HEADER = re.compile(r"^(?:\w{1,60}\.){0,5}(OutOfMemoryError|MemoryError) {2,200}Traceback \(most recent call last\)")
HEADERS: dict[str, IncidentKind] = {"OutOfMemoryError": "gpu", "MemoryError": "host"}
DISK_FULL = (
    "That is a disk which is full, or its quota: save_total_limit keeps fewer checkpoints, save_only_model=true writes "
    "no optimizer states, output_dir names another disk, HF_DATASETS_CACHE one for a dataset that is prepared."
)
CRASH = (
    rf"Segmentation fault|{SHELL_CRASH}|SIG(?:SEGV|ABRT)|signal: Aborted|0xC0000|exitcode *: ?-(?:4|6|11)\b|"
    r"core dumped|corrupted |\): .*invalid pointer"
)
THREADS = r"can't start new thread|Resource temporarily unavailable"
# Assertions of a kernel, after which every call of CUDA's libraries fails with an error of its own.
KERNEL_FAILED = r"block: \[[\d,]{1,30}\].*[Aa]ssertion `|device-side assert|illegal memory access"
# Errors that are often taken for a lack of memory -> the cause. Source: CUDA's driver_types.h, `cudaError`; torch 2.13,
# distributed/c10d/ProcessGroupNCCL.cpp, utils/data/dataloader.py; POSIX' signals.
NO_MEMORY = {
    r"illegal memory access|device-side assert|misaligned address|unspecified launch failure|[Aa]ssertion `": (
        "That is no lack of memory: a kernel read past its data, by an index that is too large (a token id beyond the "
        "vocabulary, a label beyond the classes), by a bug, or by versions that do not go together. "
        "CUDA_LAUNCH_BLOCKING=1 shows which call it was."
    ),
    r"Memory access fault by GPU|uncorrectable ECC error": (
        "That is no lack of memory: the GPU read where it may not, by a bug of a kernel or by defective memory."
    ),
    f"{NO_SEGMENT}|{NO_FILE}": (
        "That is no lack of memory: a segment that another rank was to make is not there, or is another user's. Ranks "
        "of one node must share /dev/shm (one container, or --ipc=host) and the version of NCCL; NCCL_SHM_DISABLE=1 "
        "goes without it."
    ),
    r"Too many open files|items of ancdata": (
        "That is a limit of open files, not of memory: ulimit -n 65536, or "
        "torch.multiprocessing.set_sharing_strategy('file_system')."
    ),
    THREADS: (
        "That is a limit of processes and threads, not of memory: ulimit -u, the container's own (docker run "
        "--pids-limit, Kubernetes' podPidsLimit), or fewer threads (OMP_NUM_THREADS=1)."
    ),
    r"unhandled cuda error|unhandled system error|ncclInternalError": (
        "NCCL_DEBUG=INFO says which call failed, and whether it was for memory."
    ),
    r"Engine core initialization failed|Engine process failed to start|EngineDeadError|EngineCore encountered": (
        "The process of the engine has said why, further up in the log."
    ),
    r"ChildFailedError|CalledProcessError.* exit status 1\b": (
        "That says only that a process ended: its own error is further up, or in the log of that rank."
    ),
    r"Watchdog caught|collective operation timeout|Timed out waiting": (
        "That is no lack of memory by itself: a rank waited for another one. The log of the rank that stopped first "
        "says why, which may be memory."
    ),
    r"exited unexpectedly with exit code": (
        "A worker that is killed for memory ends by a signal, this one by an error of its own: "
        "dataloader_num_workers=0 shows it."
    ),
    CRASH: (
        "That is a crash of native code, not a lack of memory: most often versions that do not go together, or a file "
        "that is damaged. PYTHONFAULTHANDLER=1 shows where."
    ),
    r"Received 1 death": (
        "That is SIGHUP, no lack of memory: the terminal or the session in which the launcher was started has ended. "
        "Start it in tmux or screen, with setsid, or by a scheduler, and go on from the last checkpoint."
    ),
    r"Received 15 death": (
        "That is SIGTERM, no lack of memory: the launcher was stopped from outside, by a scheduler, a container, or "
        "the program that started it, as when a process beside it has failed: the logs of those say why."
    ),
    r"\[METAL\] Command buffer execution failed: Internal": (
        "Metal does not say whether memory ran out. It may have: see whether it goes away with less (a batch of 1, "
        "shorter rows, fewer layers that train, a smaller or quantized model), and watch memory pressure and swap; "
        "else a newer macOS or MLX."
    ),
    r"exitcode *: ?-15\b|KeyboardInterrupt|CANCELLED AT": "It was ended from outside, not for a lack of memory.",
}
# python's multiprocessing/synchronize.py, whose semaphores are files of /dev/shm
SEMAPHORE = "_multiprocessing.SemLock("
SHARED_FULL = (
    "That is /dev/shm, in which semaphores lie, not a disk: docker run --shm-size=16g or --ipc=host; Kubernetes: an "
    "emptyDir with medium: Memory at /dev/shm; df -h /dev/shm shows its use."
)


class OtherError(NamedTuple):
    """The first error of a log that is none of MESSAGES. `ended`: the line of a launcher that ended the processes."""

    line: int
    text: str
    of_semaphore: bool = False
    ended: int = 0


# TensorFlow's name of the node that failed, and names of those of a model.
NODE = re.compile(r"\{\{node (\S{1,300})\}\}")
LAYER_NODES = (
    r"(?:^|/)(?:model|bert|transformer|encoder|decoder|embeddings?|attention|h\d{1,3}|layers?_?\d{0,3})(?:/|_|$)"
)
CAUSES = rf"{THREADS}|{KERNEL_FAILED}"  # errors that others follow, which say less
RAY_WRAPPER = r"(?:ray\.)?(?:exceptions\.)?RayTaskError\(\w{1,99}\): ray::"
# Ray's list of what may have ended a worker, which names a crash
RAY_CAUSES = r"potential root causes\. \(1\).{0,300}unexpected errors\."
CUT = 0  # the line of an error that was cut from the log


class _Finished(NamedTuple):
    """The run ended well in this line."""

    line: int


_Event = Incident | OtherError | _Finished


def read_incidents(path: str) -> tuple[Incident, ...]:
    """The incidents of a log file; `-` reads stdin.

    Raises:
        InputError: the file cannot be read, is no regular file, or reports no out-of-memory error.
    """
    if path == "-":
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")
        return _reported(sys.stdin, "stdin")
    with (
        open_regular(Path(path)) as file,
        io.TextIOWrapper(file, encoding="utf-8", errors="replace", newline="\n") as log,
    ):
        return _reported(log, path)


def reported_incidents(text: str) -> tuple[Incident, ...]:
    """The incidents of a log; raise InputError if it reports no out-of-memory error."""
    return _reported(io.StringIO(text, newline="\n"), "The log")


def incidents(text: str) -> tuple[Incident, ...]:
    """Every out-of-memory error of a log, in order; of several of one kind, rank and GPU only the first.

    When one rank ends, the others end too, so that later errors are often consequences of the first.
    """
    return _first_of_each(_all(io.StringIO(text, newline="\n")))[0]


def _reported(log: TextIO, source: str) -> tuple[Incident, ...]:
    found, other = _first_of_each(_all(log))
    if found:
        return found
    if other is None:
        raise InputError(
            f"{source} reports no out-of-memory error. "
            "The messages of PyTorch, vLLM, NCCL, launchers and the kernel are known."
        )
    if other.ended:
        raise InputError(
            f"{source} reports no out-of-memory error: its launcher ended the processes (line {other.ended}), as one "
            "had ended, and does not say why. The exit code of that one, or dmesg, does: -9 is most often host memory."
        )
    if other.line == CUT:
        raise InputError(
            f"{source} reports no out-of-memory error: its last traceback is at {other.text}, and its last line, which "
            "says what happened, is missing. Give the log with it."
        )
    full = f". {SHARED_FULL if other.of_semaphore else DISK_FULL}" if re.search(DISK, other.text) else ""
    about = next((f". {said}" for sign, said in NO_MEMORY.items() if re.search(sign, other.text)), "")
    shown = _shown(other).removesuffix(".") + (full or about)
    raise InputError(f"{source} reports no out-of-memory error; its first error is another, in {shown}")


def _shown(error: OtherError) -> str:
    return f"line {error.line}: {without_middle(one_line(error.text), ERROR_CHARACTERS)}"


def _first_of_each(
    found: Iterator[Incident | OtherError | _Finished],
) -> tuple[tuple[Incident, ...], OtherError | None]:
    """The first incident of each kind, rank and GPU, and the first other error.

    An error before a line in which the run finished was caught. It counts only if no other one ended a run.
    """
    first: dict[tuple[str, str, int | None], Incident] = {}
    caught: list[Incident] = []
    other = None
    for each in islice(found, MESSAGES_READ):
        if isinstance(each, Incident):
            key = (each.kind, each.rank, each.gpu)
            first[key] = completed(first[key], each) if key in first else each
        elif isinstance(each, OtherError):
            other = each if other is None or not re.search(CAUSES, other.text) else other
        else:
            caught += [replace(incident, finished=each.line) for incident in first.values()]
            first.clear()
    if not first:
        return tuple(caught), other
    kinds = {incident.kind for incident in first.values()}
    if kinds != {"engine_preempts"}:  # a warning, which counts if nothing else is said
        first = {key: each for key, each in first.items() if each.kind != "engine_preempts"}
    repeated = {(each.kind, each.gpu, *each.sizes.items()) for each in first.values() if each.rank and each.sizes}
    ended_by = re.sub(RAY_CAUSES, "", other.text) if other else ""
    samplers = {each.rank for each in first.values() if each.kind == "engine_sampler"}  # vLLM says what it was
    same_on = Counter(_of_tensors(each) for each in {one.gpu: one for one in first.values()}.values())
    # A process that is killed beside an error of another kind was killed by its launcher: no lack of host memory.
    # Python prints an error, and torchrun prints it again with the rank.
    return tuple(
        replace(
            each,
            earlier_error=_shown(other) if other and other.line < each.line else "",
            same_on=max(same_on[_of_tensors(each)], 1),
        )
        for each in first.values()
        if (
            each.kind != "killed"
            or (kinds == {"killed"} and not re.search(f"{CANCELLED}|{CRASH}|{DEATH_SIGNAL}", ended_by))
        )
        and (WORKER_ENDED not in each.message or len(first) == 1)  # others say why
        and not (other and _follows(each, other))
        and (each.kind != "gpu" or each.rank not in samplers)
        and (each.rank or (each.kind, each.gpu, *each.sizes.items()) not in repeated)
        and not _is_cut(each, first.values())
    ), other


def _of_tensors(incident: Incident) -> tuple[int, int]:
    """What was asked for, and what tensors held."""
    return incident.sizes.get("tried", 0), incident.sizes.get("allocated", 0)


def _follows(incident: Incident, error: OtherError) -> bool:
    """True if an incident is what an error of another kind leads to: a dead worker, a library that cannot go on."""
    if incident.kind == "killed":
        return re.search(THREADS, error.text) is not None
    return (
        incident.kind == "library"
        and "out of memory" not in incident.message
        and re.search(KERNEL_FAILED, error.text) is not None
    )


def _is_cut(incident: Incident, found: Collection[Incident]) -> bool:
    """True if other incidents say more of an error whose message has no figures.

    What Ray says of a task is of a GPU, or of the host if the task's own task ran out of it.
    """
    if incident.kind != "gpu" or incident.sizes:
        return False
    of_ray = RAY_TASK in incident.message
    return any(each is not incident and (of_ray or (each.kind == "gpu" and each.sizes)) for each in found)


class _LogReader:
    """Reads a log line by line, and keeps the lines of its tracebacks."""

    def __init__(self) -> None:
        self._beside = BesideReader()
        self._has_other = False  # an error that is none of MESSAGES was found
        self._has_cause = False  # one of CAUSES was
        self._in_wrapper = False  # it is Ray's, and the error that a task raised follows
        self._traceback: deque[tuple[str, TracebackLine]] = deque(maxlen=TRACEBACK_LINES)
        self._seen: Counter[tuple[str, str, str]] = Counter()
        self._last: dict[str, Incident] = {}  # of each rank
        self._causes: dict[str, Incident] = {}  # of each rank: of the error that the next traceback ends in
        self._unknown: Incident | None = None  # the first one, if no frame before it tells its phase
        self._later: list[TracebackLine] = []  # tracebacks after it
        self._said: list[Frame] = []  # of lines of vLLM after it
        self._own_words: Incident | None = None  # of a line that is no exception's
        self._last_line = 0  # that was read
        self._header = ""  # the exception that IPython names before its traceback
        self._ended = 0  # line in which a launcher ended the processes, and nothing before says why; 0 if none did
        self._ended_in = Beside()  # what ran then

    def read(self, line: LogLine) -> Iterator[_Event]:
        """Yield the messages of MESSAGES without most repetitions, the first other error, and where a run finished."""
        if FINISHED in line.words:
            self._finished()
            yield _Finished(line.number)
            return
        rank, text = stripped(line.text)
        self._beside.read(text, line.words, line.number)
        self._last_line = line.number
        if not FRAME_WORDS.isdisjoint(line.words):
            self._traceback.append((rank, TracebackLine(text, line.following[:FOLLOWING])))
            self._header = named[1] if (named := HEADER.match(text)) else self._header
            unknown = self._unknown or self._own_words
            if unknown and line.number <= unknown.line + LATER_LINES:
                self._later.append(self._traceback[-1][1])
        known = [] if QUIET_WORDS.issuperset(line.words) else list(self._incidents(line, rank))
        yield from known
        self._read_end(line)
        self._read_said(line)
        match = ERROR.match(text)
        if not known:
            yield from self._in_own_words(line, rank, match[1] if match else text, match is not None)
        if CHAINED in line.words and rank in self._last:
            self._causes[rank] = self._last.pop(rank)
        elif match and rank in self._causes:
            cause = self._causes.pop(rank)
            yield replace(cause, phase=phase_of(_frames(self._traceback, rank, line.following)))
        if match:
            yield from self._others(line, match[1])

    def _finished(self) -> None:
        """Forget what was read, as the run has ended well."""
        self._seen.clear()
        self._traceback.clear()
        self._ended = 0
        self._own_words = None
        self._beside = BesideReader("save")  # which follows a training

    def _incidents(self, line: LogLine, rank: str) -> Iterator[Incident]:
        """Yield the incident that begins in this line, if one does."""
        for message in MESSAGES:
            if (found := _found(message, line, self._seen)) and not _has_no_segment(found, line.preceding):
                yield self._incident(message, found, line, rank)
                return

    def _incident(self, message: Message, found: str, line: LogLine, rank: str) -> Incident:
        """The incident of a message that begins in this line, which is kept for tracebacks that follow."""
        frames = _frames(self._traceback, rank, line.following)
        incident = _incident(message, found, line, frames, self._beside.said())
        if not self._last and incident.phase is None and message.kind in HAVE_PHASES:
            self._unknown = incident
        self._last[rank] = incident
        return incident

    def finish(self) -> Iterator[Incident]:
        """Yield again the first incident if what follows tells more of it: its phase, settings of the command."""
        if self._unknown:
            told = self._told(self._unknown)
            # A launcher prints the command of a process that ended.
            later = self._beside.said()
            told = replace(told, beside=told.beside.with_settings(later))
            # A bar is printed again as the process ends.
            if told.phase is None and told.line < later.step_line <= told.line + BAR_LINES and not told.beside.step:
                told = replace(told, beside=replace(told.beside, step=later.step, steps=later.steps))
            if told != self._unknown:
                yield told

    def _told(self, incident: Incident) -> Incident:
        """The incident with the phase that what follows tells: a traceback of its caller, lines of vLLM."""
        frames = (*frames_of(_stripped(self._later), ()), *self._said)
        phase, ran = phase_of(frames), activity_of(frames)
        if incident.phase is not None or (phase is None and ran != "trains"):
            return incident
        activity = ran if ran.startswith("engine") or ran in OF_CALLERS else incident.activity
        tells = bool(frames[-1].line) and phase is not None and phase_of(frames[-1:]) == phase
        where = incident.where or (innermost(frames[-1:]) if tells else "")
        shown = incident.frames or tuple(frame.shown for frame in frames if frame.line)
        return replace(incident, phase=phase, activity=activity, where=where, frames=shown)

    def _read_said(self, line: LogLine) -> None:
        """Take a line in which vLLM says what ran, of the first error whose phase is unknown or after it."""
        if self._unknown and line.number <= self._unknown.line + LATER_LINES:
            frames = (said_frame(line.text, word) for word in line.words if word in SAID_FUNCTIONS)
            self._said += filter(None, frames)

    def _in_own_words(self, line: LogLine, rank: str, text: str, is_error: bool) -> Iterator[Incident]:
        """Yield the incident of an error that says in words of its own that memory ran out.

        A line that is no exception's is kept: it counts if the log says nothing else.
        """
        if is_error and not self._last and (message := in_own_words(text)):
            yield self._incident(message, text, line, rank)
        elif is_error or self._own_words or set(LACK_WORDS).isdisjoint(line.words):
            return
        elif message := without_begin(text) or (None if NO_LACK.search(text) else in_own_words(text)):
            frames = _frames(self._traceback, rank, line.following)
            self._own_words = _incident(message, text, line, frames, self._beside.said())

    def _read_end(self, line: LogLine) -> None:
        """Take a line of a launcher that ends the processes."""
        if not self._ended and not set(ENDING_WORDS).isdisjoint(line.words):
            self._ended, self._ended_in = line.number, self._beside.said()

    def cut(self) -> Iterator[_Event]:
        """Yield what the log shows of an error that may have been cut from it: a launcher's end, the last traceback."""
        if self._has_other or self._last:
            return
        if self._own_words:
            yield self._told(self._own_words)
        elif self._ended:
            unsaid = _unsaid(self._ended, (), self._ended_in, "ended by its launcher")
            yield unsaid if unsaid.phase else OtherError(CUT, "", ended=self._ended)
        elif self._traceback:
            yield from self._cut_traceback()
        elif (said := self._beside.said()).phase or said.activity:
            yield _unsaid(self._last_line, (), said)

    def _cut_traceback(self) -> Iterator[_Event]:
        """Yield what the last traceback shows, whose last line is missing."""
        frames = _frames(self._traceback, self._traceback[-1][0], ())
        unsaid = _unsaid(self._last_line, frames, self._beside.said())
        if self._header:
            yield replace(unsaid, kind=HEADERS[self._header], message=self._header)
        elif unsaid.phase:
            yield unsaid
        elif unsaid.where:
            yield OtherError(CUT, unsaid.where)

    def _others(self, line: LogLine, text: str) -> Iterator[OtherError]:
        """Yield the error of this line if it is the first one, or the first of CAUSES."""
        is_cause = not self._has_cause and re.search(CAUSES, text) is not None
        if is_cause or not self._has_other or self._in_wrapper:
            yield self._other(line, text)
            self._in_wrapper = re.match(RAY_WRAPPER, text.strip()) is not None
        self._has_other = True
        self._has_cause = self._has_cause or is_cause

    def _other(self, line: LogLine, text: str) -> OtherError:
        """The error of this line, with the next one if it ends with a colon."""
        lines = [*filter(None, map(str.strip, line.following))]
        rest = next(iter(lines), "") if text.rstrip().endswith(":") else ""
        if "NCCL error" in text:  # whose own log says which call of CUDA failed
            rest = next((said for said in lines if said.startswith("Cuda failure")), rest)
        last = islice(reversed(self._traceback), 3)
        of_semaphore = any(SEMAPHORE in following for _, each in last for following in each.following[:1])
        return OtherError(line.number, f"{text.strip()} {rest}".rstrip(), of_semaphore)


def _unsaid(line: int, frames: Sequence[Frame], beside: Beside, message: str = "") -> Incident:
    """Return the incident of a log that ends before the line that says what happened."""
    return Incident(
        kind="unsaid",
        line=line,
        rank="",
        gpu=None,
        phase=phase_of(frames) if frames else beside.phase,
        where=innermost(frames),
        frames=tuple(frame.shown for frame in frames),
        sizes={},
        numbers={},
        message=message,
        activity=activity_of(frames) or beside.activity,
        sharding=sharding_of(frames),
        checkpoints=checkpoints(frames),
        adapters=any("peft/tuners/" in frame.path for frame in frames),
        last_trl=last_trl(frames),
        old_python=old_python(frames),
        beside=beside,
    )


def _all(log: TextIO) -> Iterator[_Event]:
    """All that a reader finds in a log."""
    reader = _LogReader()
    for line in _lines(log):
        yield from reader.read(line)
    yield from reader.finish()
    yield from reader.cut()


def _lines(log: TextIO) -> Iterator[LogLine]:
    """The lines that contain a word of WORDS."""
    number, kept = 1, ""
    while block := log.read(BLOCK):
        block = kept + block + log.readline(BLOCK)
        block = cleaned(block)
        searched = block.replace('\\"', '"') if '\\"' in block else block
        present = [word for word in WORDS if word in searched]
        last = max(0, len(block) - 1)
        for _ in range(MESSAGE_LINES):  # the last lines are read with the next block, which may continue a message
            last = max(block.rfind("\n", 0, last), 0)
        kept = block[last + 1 :] if 0 < last > len(block) - 2 * BLOCK else ""
        yield from _lines_of(block, len(block) - len(kept), number, present)
        number += block.count("\n", 0, len(block) - len(kept))
    yield from _lines_of(kept, len(kept), number, WORDS)


def _lines_of(block: str, end: int, number: int, present: Sequence[str]) -> Iterator[LogLine]:
    """The lines of a block that begin before `end` and contain one of the words that are present."""
    if not present:
        return
    numbered = [(place, piece) for place, line in enumerate(block.split("\n"), number) for piece in pieces(line)]
    before = block.count("\n", 0, end) + number
    for index, (place, text) in enumerate(numbered):
        if place >= before and end < len(block):
            return
        words = [word for word in present if word in text]
        if words and (words != [MODULE] or may_hold_frame(text)):
            following = [other for _, other in numbered[index + 1 : index + MESSAGE_LINES]]
            preceding = [other for _, other in numbered[max(index - PRECEDING, 0) : index]]
            yield LogLine(place, text, words, following, preceding)


def _frames(traceback: deque[tuple[str, TracebackLine]], rank: str, following: Sequence[str]) -> tuple[Frame, ...]:
    """The frames of the last traceback of a rank; `following` are the lines after its error."""
    lines: list[TracebackLine] = []
    for printed_by, line in reversed(traceback):
        if printed_by == rank:
            lines.append(line)
            if begins(line.text):
                break
    return frames_of(_stripped(lines[::-1]), [stripped(text)[1] for text in following])


def _stripped(lines: Sequence[TracebackLine]) -> list[TracebackLine]:
    """Strip the prefixes of collectors and ranks from the lines that follow each line of a traceback."""
    return [line._replace(following=[stripped(text)[1] for text in line.following]) for line in lines]


def _found(message: Message, line: LogLine, seen: Counter[tuple[str, str, str]]) -> str:
    """The whole text of a message that begins in this line; empty if none does, or one was seen.

    Joins the following lines of the same rank, with and without a space, since a terminal may have wrapped the message
    between words or inside one, and takes the text with more figures.
    """
    word = next((word for word in message.words if word in line.words), "")
    if not word:
        return ""
    rank, text = stripped(line.text)
    gpu = GPU_NUMBER.search(text)
    key = (message.kind, rank, gpu[1] if gpu else "")
    if seen[key] >= REPETITIONS or not (wholes := _wholes(message, text, word, _continued(line.following, rank))):
        return ""
    if gpu or message is not GPU:
        seen[key] += 1
    return max(wholes, key=lambda whole: sum(len(each) for each in figures(message, whole)))


def _continued(following: Sequence[str], rank: str) -> list[str]:
    """The lines that may continue a message of a rank: its own, and those of no rank."""
    lines = [stripped(other) for other in following]
    return [text for other_rank, text in lines if other_rank in (rank, "") and not re.search(INTERRUPTS, text)]


def _wholes(message: Message, text: str, word: str, continued: Sequence[str]) -> list[str]:
    """The texts in which the message begins in the line `text`: alone, joined with a space, joined without one."""
    start = max(text.find(word) - REACH, 0)
    wholes = []
    for whole in (text[start:], *(between.join([text[start:], *continued]) for between in (" ", ""))):
        squeezed = re.sub(r"[ \t]+", " ", whole) if "  " in whole[:MESSAGE_LENGTH] else whole
        match = re.search(message.pattern, squeezed[: 3 * REACH])
        if match and match.start() < len(text) - start:
            wholes.append(squeezed[:MESSAGE_LENGTH])
    return wholes


def _has_no_segment(text: str, preceding: Sequence[str]) -> bool:
    """True if NCCL could not attach to a segment since, as the line before says, there is none."""
    return "attaching to shared memory" in text and any(re.search(NO_FILE, line) for line in preceding)


def _phase_of_node(following: Sequence[str]) -> Phase | None:
    """The phase of the node of TensorFlow's graph that the lines after an error name; None if they name none."""
    node = next(filter(None, (NODE.search(text) for text in following[:FOLLOWING])), None)
    if node is None:
        return None
    return "backward" if "gradient" in node[1] else "forward" if re.search(LAYER_NODES, node[1]) else None


def _phase(frames: Sequence[Frame], beside: Beside) -> Phase | None:
    """The phase of a traceback; an evaluation if lines before it say so and only a model's frames are left of it."""
    phase = phase_of(frames)
    is_cut = phase in TRAINS and TRAINING.isdisjoint(frame.function for frame in frames)
    return beside.phase if is_cut and beside.phase == "evaluation" else phase


def _located(
    frames: Sequence[Frame], code: Sequence[Frame], rank: str, beside: Beside
) -> tuple[Phase | None, Activity]:
    """The phase and what ran: by the traceback, else by lines of code before the error, else by what lines said.

    An engine's forward pass is none of a training, so that it tells nothing.
    """
    of_engine = beside.serves or VLLM_WORKER.match(rank) or any(re.search(VLLM, frame.path) for frame in frames)
    shown, in_code = _phase(frames, beside), phase_of(code)
    shown = None if beside.serves and shown in TRAINS else shown
    is_code = not (of_engine and in_code in TRAINS)
    phase = shown or (in_code if is_code else None) or beside.phase
    ran: Activity = activity_of(frames) or (activity_of(code) if is_code and not shown else "")
    if not ran and (VLLM_WORKER.match(rank) or (beside.serves and phase is None)):
        ran = "sglang" if beside.serves == "sglang" else "engine"
    elif not ran and not shown:
        ran = beside.activity
    if beside.serving and phase is None and ran in ("engine", "engine_samples"):
        phase, ran = "rollout", "engine_runs"
    return phase, "" if ran == "trains" and (phase or of_engine) else ran


def _incident(message: Message, text: str, line: LogLine, frames: Sequence[Frame], beside: Beside) -> Incident:
    """The incident of a message whose text begins in `line`, after a traceback of these frames."""
    rank = stripped(line.text)[0]
    following = [stripped(other)[1] for other in line.following]
    after = takewhile(lambda other: not (begins(other) or CHAINED in other or 'File "' in other), following)
    lines = [*filter(INDENTED.match, after), *(stripped(before)[1] for before in line.preceding)]
    code = [Frame("", "", "", other) for other in lines]
    if message.kind == "host" and ray_lists(" ".join((text, *following))) and not ray_lists(text):
        text = " ".join((text, *following))
    if not beside.colocated and any(COLOCATED in other for other in line.following):
        beside = replace(beside, colocated=True)
    if beside.own_words and beside.phase == "load" and message.kind == "gpu" and not frames:
        beside = replace(beside, phase=None)  # a line before the error tells no end of the load
    phase, activity = _located(frames, code, rank, beside)
    sizes, numbers = figures(message, text)
    gpu = numbers.pop("gpu", None)
    if "bytes" in numbers:
        sizes["tried"] = int(numbers.pop("bytes"))
    return Incident(
        kind=message.kind,
        line=line.number,
        rank=rank,
        gpu=None if gpu is None else int(gpu),
        phase=phase
        or _phase_of_node(following)
        or ("save" if RAY_SAVES.search(text) else "rollout" if RAY_RUNS.search(text) else None),
        where=innermost(frames),
        frames=tuple(frame.shown for frame in frames),
        sizes=sizes,
        numbers=numbers,
        message=text,
        activity=activity,
        sharding=sharding_of(frames) or sharding_of([Frame(line.text, "", "")]),  # a warning names its file
        checkpoints=checkpoints(frames),
        adapters=any("peft/tuners/" in frame.path for frame in frames),
        last_trl=last_trl(frames),
        old_python=old_python(frames),
        beside=beside,
    )

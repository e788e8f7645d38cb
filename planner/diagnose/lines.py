"""Clean the lines of a log: colours, escapes of HTML and JSON, and the prefixes of those that collected the lines."""

import html
import json
import re
from collections.abc import Iterator

# Prefixes of a line by launchers, loggers and collectors of logs, several in a row.
LEVEL = r"(?:DEBUG|INFO|WARN|WARNING|ERROR|CRITICAL|FATAL)"
PREFIX = re.compile(
    r"^\s*(?:"
    # [rank0]: and [default3]: of torchrun, and its other roles; Rank 3: and [RANK:3] of loggers
    r"(?P<rank>\[(?:rank|default)\d+\]):?|(?P<role>\[[a-z_]{1,40}\d{1,5}\]):|"
    r"\[(?P<numbered>R(?:ANK|ank)[ :=]\d{1,5})\]:?|(?P<said>Rank \d{1,5}):(?= )|"
    # (EngineCore pid=71) of vLLM, (TaskRunner pid=71, ip=10.0.0.1), (pid=71) and (raylet) of Ray
    r"\((?P<worker>\w{1,64}(?: [\w=]{1,64})?) pid=\d+[^)]*\)|\((?P<pid>pid=\d+)[^)]{0,99}\)|"
    r"\((?:raylet|autoscaler)[^)]{0,99}\)|"
    # 192.168.1.51: and node01: of DeepSpeed on several nodes, 0: and node-1: of srun --label, trainer/0 of TorchX
    r"(?P<host>\d{1,3}(?:\.\d{1,3}){3}|[a-z][a-z_.-]{0,30}\d{1,5}):(?= )|"
    # 123: of grep -n, which puts no space after it
    r"\d{1,7}:(?= {2}File | {4}\S|[A-Za-z\[(])|"
    r"(?P<task>\d{1,5}|[a-z][\w.]{0,40}-\d{1,5}):(?= )|(?P<replica>[a-z]\w{0,40}/\d{1,5}) (?=\S| )|"
    # [1,0]<stderr>: of mpirun, [1,mpirank:0,algo-1]<stderr>: of SageMaker
    r"\[(?P<process>\d{1,5},[^\]]{1,99})\]<std(?:err|out)>:?|"
    # trainer-1  | of docker compose, [pod/trainer-0/pytorch] of kubectl logs --prefix, stderr F of Kubernetes' runtime
    # [12/train/34 (pid 71)] of Metaflow, identifiers of requests and sessions
    r"\[\d{1,19}/\w{1,64}/\d{1,19} \(pid \d{1,9}\)\]|\[[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\]|"
    r"(?:[\w.-]{1,64} {1,32})?\|(?= )|\[pod/[^\]]{1,200}\]|(?:stdout|stderr) [FP](?= )|"
    # [4711] of grep -n, > of a quotation, E of pytest
    r"\[\d{1,9}\](?= )|>(?= (?:\S| {1,4}(?:File |\S)))|E {3,6}(?=\w)|"
    # Times: 2024-05-01T12:00:00.123Z, [2024-05-01 12:00:00,123], [05/01/24 12:00:00], [12:00:00], Nov 28 05:09:55 of
    # syslog with its host and process, seconds and dates of dmesg
    r"\[?\d{4}[-/]\d\d[-/]\d\d[T ][\d:.,]{5,18}(?:Z|[+-]\d\d:?\d\d)?(?:\]|(?=\s))|"
    r"\[?\d\d/\d\d/\d\d(?:\d\d)? [\d:.,]{5,12}(?:\]|(?=\s))|"
    r"\[\d\d:\d\d:\d\d\](?=\s)|\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?=\s)|"
    r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \S{1,64} [\w./@-]{1,64}(?:\[\d{1,9}\])?:|"
    r"\[ {0,9}\d{1,8}\.\d{1,6}\]|\[[A-Z][a-z]{2} [A-Z][a-z]{2} [\d :]{10,20}\]|"
    # Levels and names of loggers: ERROR 09-18 07:56:28 [core.py:390], [INFO|trainer.py:71], [rank0] after a level,
    # ERROR:root:, - ERROR - root -, [__main__][ERROR] -, axolotl's [PID:71], glog's E0925 12:00:00.123456 71 a.cc:9]
    rf"{LEVEL} [\d-]{{1,10}} [\d:.]{{1,12}} (?:\[[^\]]{{0,99}}\]|[\w.]{{1,64}}:\d{{1,5}}\])|"
    rf"\[(?:{LEVEL}|Driver|stderr|stdout)(?:[|:][\w.:]{{1,64}})?\]|{LEVEL}:[\w.]{{1,64}}:|"
    rf"\[[\w.]{{1,64}}\]\[{LEVEL}\](?: -)?|- (?:[\w.]{{1,64}} - )?{LEVEL} - (?:[\w.]{{1,64}} - )?|"
    r"(?:INFO|ERROR|Error:)(?= (?:\d{4}-|\[rank))|\[(?:PID|pid):\d{1,9}\]|\[[\w.]{1,99}:\d{1,5}\](?=[ :])|"
    r"[EWIF]\d{4} [\d:.]{5,18} +\d{1,9} [\w./-]{1,99}:\d{1,5}\]|\[NeMo [EWI] [^\]]{1,99}\]|"
    r"[\w.]{1,64}:[\w<>]{1,64}:\d{1,5} - |"
    r"\[resource\.[^\]]{1,99}\])\s?"
)
RANKS = ("worker", "pid", "host", "task", "replica", "process", "said", "numbered")
MOST_PREFIXES = 8  # of a line: a collector's, a launcher's, a logger's and a rank's, twice at most
# Colours, and movements of the cursor; a paste may have lost the escape character, or print it in characters.
ESCAPE = r"(?:\x1b|\^\[|\\x1b|\\u001b|\\033|␛)"
ANSI = re.compile(
    rf"{ESCAPE}\[[\d;?]{{0,20}}[A-Za-z]|\ufffd?\[(?:[01]|22|39|3[0-7]|9[0-7]|\d{{1,3}}(?:;\d{{1,3}}){{1,6}})m"
)
TAG = re.compile(r"</?(?:a|b|code|div|font|li|p|pre|span)(?: [^<>]{0,300})?>")
ENTITIES = ("&nbsp;", "&quot;", "&lt;", "&gt;", "&#")
# A newline that is printed as "\n", as in JSON and in Python's repr, but not in a path of Windows.
NEWLINE = re.compile(r"(?<!\\)\\n(?=[ \t\"'\[(\\]|[A-Z][a-z]|[a-z_]+\.|$)")
HAS_TRACEBACK = re.compile(r"Traceback|\\n +File \\?\"")
# Keys of a record under which docker, Python's and Kubernetes' loggers, and clouds put the line or the traceback.
KEYS = frozenset(
    {"log", "message", "msg", "text", "textPayload", "line", "event", "exc_info", "exc_text", "exception", "error"}
    | {"stack_trace", "stack", "stacktrace", "traceback"}
)
WIDTHS = range(60, 251)  # columns of a terminal
LEAST_CUT = 3  # lines of the terminal's width that go on in the next one, from which all such lines are joined
CUT_ENDS, CUT_BEGINS = re.compile(r".*[\w/.,'\"(=]$").match, re.compile(r"[\w/.,'\")=]").match
PIECE = 2048  # characters; longer lines are cut into pieces


def cleaned(block: str) -> str:
    """The text without colours, HTML's tags and entities, spaces that do not break, and NULs (of UTF-16)."""
    block = block.replace("\r\n", "\n").replace("\0", "")
    if "</" in block:
        block = TAG.sub("", block)
    if any(entity in block for entity in ENTITIES):
        block = html.unescape(block)
    block = block.replace("\xa0", " ")
    return _unwrapped(ANSI.sub("", block) if "[" in block else block)


def _unwrapped(block: str) -> str:
    """The text with lines joined that a terminal cut at its width; as many empty lines follow as were joined.

    That is so if most of the longest lines are as long as each other, end in a word, and go on in the next line.
    """
    lines = block.split("\n")
    width = max(map(len, lines))
    if width not in WIDTHS:
        return block
    longest = [number for number, line in enumerate(lines[:-1]) if len(line) == width]
    cut = [number for number in longest if CUT_ENDS(lines[number]) and CUT_BEGINS(lines[number + 1])]
    if len(cut) < LEAST_CUT or 2 * len(cut) < len(longest):
        return block
    joined: list[str] = []
    empty = 0
    for number, line in enumerate(lines):
        if joined and len(lines[number - 1]) == width:
            joined[-1] += line
            empty += 1
        else:
            joined += [""] * empty
            joined.append(line)
            empty = 0
    return "\n".join(joined + [""] * empty)


def pieces(line: str) -> Iterator[str]:
    """The parts of a line: those that a progress bar has overwritten or HTML divides, and texts of a record of JSON."""
    for part in re.split(r"\r|<br ?/?>", line):
        for text in _unescaped(part):
            yield from _short(text)


def _short(text: str) -> Iterator[str]:
    """The text, cut after a space into pieces of PIECE."""
    start = 0
    while len(text) - start > PIECE:
        end = text.rfind(" ", start, start + PIECE) + 1 or start + PIECE
        yield text[start:end]
        start = end
    yield text[start:]


def _unescaped(line: str) -> list[str]:
    """The lines that a record of JSON, or a text with escaped newlines, holds; the line itself if it holds none."""
    if line[:1] in "{ " and line.lstrip()[:2] == '{"' and line.rstrip()[-1:] == "}":
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        texts = list(_texts(record, KEYS)) or [text for text in _texts(record, frozenset()) if "\n" in text]
        if texts:
            return cleaned("\n".join(text.rstrip("\n") for text in texts)).split("\n")
    if "\\n" in line and HAS_TRACEBACK.search(line):
        return cleaned(NEWLINE.sub("\n", line).replace('\\"', '"')).split("\n")
    return [line]


def _texts(value: object, keys: frozenset[str]) -> Iterator[str]:
    """The texts of these keys of a record, at any depth; all its texts if there are no keys."""
    if isinstance(value, str) and not keys:
        yield value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _texts(each, frozenset() if key in keys else keys)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each, keys)


def stripped(text: str) -> tuple[str, str]:
    """The rank or worker that printed a line (empty if unknown), and the line without its prefixes."""
    rank = ""
    for _ in range(MOST_PREFIXES):
        match = PREFIX.match(text)
        if match is None:
            break
        by = (match["rank"] or match["role"] or "").strip("[]")
        rank = by or next((match[name] for name in RANKS if match[name]), rank)
        text = text[match.end() :]
    return rank, text

"""Read the frames of a traceback, as Python, IPython, Jupyter, pytest, rich and Ray print them."""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Frame(NamedTuple):
    """One frame of a traceback."""

    path: str  # with "/", on Windows too
    line: str  # empty if IPython prints none
    function: str
    source: str = ""  # the line of code that follows the frame

    @property
    def shown(self) -> str:
        """File, line and function, as printed: "trainer.py:1234 in training_step"."""
        return f"{self.path.rpartition('/')[2]}{':' if self.line else ''}{self.line} in {self.function}"


class TracebackLine(NamedTuple):
    """A line that may belong to a traceback, without its prefixes, and the lines after it."""

    text: str
    following: Sequence[str]


BEGIN = "Traceback (most recent call last)"
REVERSED = "(most recent call first)"  # Python's faulthandler
PYTEST_BEGIN = "____ "
MODULE = ".py:"
# A line of a traceback has one of these words. Marks stand before the line of code that ran.
WORDS = frozenset(
    {BEGIN, REVERSED, PYTEST_BEGIN, MODULE, 'ile "', ".py in ", "/#) in ", "> in ", "Cell In", "Input In", "ray::"}
    | {"-> ", "❱ ", ">       ", "def "}
)
BEGINS = re.compile(
    rf"{re.escape(BEGIN)}|{re.escape(REVERSED)}|^_{{3,200}} \S.{{0,200}} _{{3,200}}$|^Fatal Python error"
)
# Paths may have spaces, a drive's letter and either slash.
PATH = r"(?P<path>(?:[A-Za-z]:[\\/]|[/~.\\])[^:\"\[\]()│|❱]{0,999}?\.pyx?)"
PYTHON = re.compile(
    r'(?:^|[\s>│|])[Ff]ile "(?P<path>[^"]{1,999})", line (?P<line>\d{1,9}),? in (?P<function><\w{1,20} op>|\S+)'
)
# IPython 8, also where VS Code makes a link of the path: `File ~/x.py:12, in Trainer.train(self)`.
LINK = r"(?:\]\([^)\s]{0,999}\))?"
QUALIFIED = r"(?:[\w<>]{1,200}\.){0,9}(?P<function>[\w<>]{1,200})"
IPYTHON = re.compile(rf"^\s*File \[?{PATH}:(?P<line>\d{{1,9}}){LINK}, in {QUALIFIED}\(")
# Before IPython 8, and Colab, which makes a link of the path.
OLD_IPYTHON = re.compile(rf"^\s*\[?{PATH}{LINK} in {QUALIFIED}\(")
CELL = re.compile(
    r"^\s*(?:(?P<path><ipython-input-[\w-]{1,99}>|(?:Cell|Input) In ?\[\d{1,6}\])(?:, line (?P<line>\d{1,9}))?"
    rf"(?:,? in (?:<cell line: \d{{1,9}}>|{QUALIFIED}))?)"
)
# After a long path, rich prints the function on the next line; of a path over two lines, the second one is read.
RICH = re.compile(
    r"^[\s│|❱>]*(?P<path>(?:/|[A-Z]:|(?<=[│|] )\w)[^\s:]{1,999}\.py):(?P<line>\d{1,9}) in *(?P<function>[\w<>]*)"
)
PYTEST = re.compile(
    r"^\s*(?P<path>(?:[A-Z]:)?[\w./\\~@+-]{1,999}\.py):(?P<line>\d{1,9}): (?:in (?P<function>\S+)|\w{0,99}\s*$)"
)
# A method of an actor, or a task: ray::WorkerDict.actor_rollout_update_actor(). verl puts the worker's roles before it.
RAY = re.compile(
    r"ray::(?P<actor>(?:\w{1,99}\.){0,4})(?:(?:actor|rollout|ref|critic|rm)_){0,4}(?P<function>\w{1,99})\(\)"
)
RAY_PATH = "ray/"
OTHERS = (IPYTHON, OLD_IPYTHON, CELL, RICH, PYTEST)
MARKED = re.compile(r"^[\s│|]*(?:-{1,5}>|❱|>)(?: *\d{1,6}(?=\s|$)|(?= {7}))(?P<code>.*)")
DEFINES = re.compile(r"^\s*(?:\d{1,6} +)?(?:async )?def (?P<function>\w{1,200})\(")
ALONE = re.compile(r"^[\w<>]{1,200}\s*$")  # the rest of a function's name that a terminal has wrapped
WIDTH = 79  # narrowest terminal


def may_hold_frame(text: str) -> bool:
    """True unless the only word of a line, MODULE, is of a logger: "trainer.py:2078] ..." is no frame."""
    return " in" in text or PYTEST.match(text) is not None


def begins(text: str) -> bool:
    """True if a traceback begins in this line."""
    return BEGINS.search(text) is not None


def frames_of(lines: Sequence[TracebackLine], following: Sequence[str]) -> tuple[Frame, ...]:
    """The frames of one traceback, outermost first; `following` are the lines after its error.

    pytest prints the place of a frame after its code, that of the innermost one after the error.
    """
    frames: list[Frame] = []
    function = code = ""
    for line in (*lines, *(TracebackLine(text, ()) for text in following if PYTEST.match(text))):
        found = tuple(_frames_in(line))
        if len(found) == 1 and not found[0].function:
            found = (found[0]._replace(function=function or "<module>", source=code),)
        if found:
            frames += found
            function = code = ""
        elif marked := MARKED.match(line.text):
            code = marked["code"].strip(" │|\t")
            if frames and _is_marked_after(frames[-1]):
                frames[-1] = frames[-1]._replace(source=code)
        elif defines := DEFINES.match(line.text):
            function = defines["function"]
    if lines and REVERSED in lines[0].text:
        frames.reverse()
    return tuple(frames)


def _is_marked_after(frame: Frame) -> bool:
    """True if a frame has no line of code yet, so that a marked line below it supplies one."""
    return not frame.source or not frame.source[0].isalpha()


def _frames_in(line: TracebackLine) -> Iterator[Frame]:
    """The frames that a line holds; several if lines were joined. The function is empty where pytest prints none."""
    _, begin, rest = line.text.rpartition(BEGIN)
    text = rest if begin else line.text
    following = [other for other in line.following if other.strip(" │|")]
    next_text = following[0] if following else ""
    found = tuple(PYTHON.finditer(text))
    if not found and 'ile "' in text:  # it may be cut by a terminal's width
        joined = (tuple(PYTHON.finditer(text + between + next_text.strip())) for between in ("", " "))
        found = next((matches for matches in joined if matches), ())
        following = following[1:]
    if found:
        function = found[-1]["function"]
        if len(text.rstrip()) >= WIDTH and text.rstrip().endswith(function) and ALONE.match(next_text):
            function, following = function + next_text.strip(), following[1:]
        for each in found[:-1]:
            yield Frame(_slashes(each["path"]), each["line"], each["function"])
        source = following[0].strip() if following else ""
        yield Frame(_slashes(found[-1]["path"]), found[-1]["line"], function, source)
        return
    if ray := RAY.search(text):
        yield Frame(RAY_PATH + ray["actor"].rstrip("."), "", ray["function"])
    match = next(filter(None, (pattern.match(text) for pattern in OTHERS)), None)
    if match is None:
        return
    function = match["function"] or ("<module>" if match.re is CELL else "")
    if not function and match.re is RICH:
        next_word = re.search(r"\w+", next_text)
        function = next_word[0] if next_word else ""
        following = following[1:]
    named = match.re is not PYTEST or function
    source = following[0].strip() if following and named else ""
    yield Frame(_slashes(match["path"]), match.groupdict().get("line") or "", function, source)


def _slashes(path: str) -> str:
    return path.replace("\\\\", "/").replace("\\", "/")

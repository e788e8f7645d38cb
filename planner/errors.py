"""The exception tree.

    PlanError            the user can act: one line on stderr, no traceback
    ├── InputError               wrong input
    │   ├── UnknownName          a model, GPU, method or setting that is in no table
    │   └── UnknownArchitecture  a model without formulas for its activations
    │       └── NotMeasured      and without measurements with these settings
    ├── ProbeFailed              a probe that ended without a measurement
    └── NothingFits              no candidate fits

Any other exception is a bug of ours and keeps its traceback. The command's exit codes: planner/commands/exit_codes.py.
"""

import difflib
import re
import unicodedata
from collections.abc import Iterable
from typing import ClassVar, Literal

# Of a suggestion: difflib's ratio, with which learning_rate is not like padding_free; characters of a part of a name.
LEAST_SIMILARITY, SHORTEST_PART = 0.65, 4
LETTERS_PER_EDIT = 3  # of a name: a similar one differs by at most one edit for each so many letters
SHOWN_CHARACTERS = 80  # of input that a message repeats
LONGEST_WORD = 200  # characters of a path that a message repeats whole
LONGEST_MESSAGE = 1000  # characters; the longest of our own lists 40 model types
# Unicode's categories of characters that move a terminal's cursor, or change the order of what it shows: control,
# format, surrogate, line and paragraph separators.
INVISIBLE = ("Cc", "Cf", "Cs", "Zl", "Zp")
# The class of an error as a word, as `--json` prints it.
ErrorCode = Literal[
    "failed",
    "wrong_input",
    "unknown_name",
    "unknown_architecture",
    "not_measured",
    "probe_failed",
    "nothing_fits",
]


class PlanError(Exception):
    """An error that the user can act on. The message is one line and names the setting to change.

    code: the class of the error as a word. nearest: known names that are similar to an unknown one, best first.
    """

    code: ClassVar[ErrorCode] = "failed"
    nearest: tuple[str, ...] = ()

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class InputError(PlanError):
    """Input that cannot be planned: settings that contradict each other, a wrong value, an unreadable file."""

    code: ClassVar[ErrorCode] = "wrong_input"


class UnknownName(InputError):
    """A name that is in no table. The message ends with the nearest known names."""

    code: ClassVar[ErrorCode] = "unknown_name"

    def __init__(self, kind: str, name: str, known: Iterable[str], hint: str = "") -> None:
        near = nearest(name, known) if len(name) <= LONGEST_WORD else []
        suggestion = f" Did you mean {' or '.join(near)}?" if near else ""
        self.nearest = tuple(near)
        super().__init__(f"Unknown {kind} {shortened(name)!r}.{suggestion}{' ' + hint if hint else ''}")


class UnknownArchitecture(InputError):
    """A model whose layers have no formulas here: its parameters are counted, its activations are unknown."""

    code: ClassVar[ErrorCode] = "unknown_architecture"


class NotMeasured(UnknownArchitecture):
    """A layer without formulas or measurements for a candidate's settings. A search skips such candidates."""

    code: ClassVar[ErrorCode] = "not_measured"


class ProbeFailed(PlanError):
    """A probe that ended without a result. The message says how it ended."""

    code: ClassVar[ErrorCode] = "probe_failed"


class NothingFits(PlanError):
    """No candidate fits. The message says by how much, and which change would help."""

    code: ClassVar[ErrorCode] = "nothing_fits"


def shortened(value: object) -> str:
    """Return input as text of at most `SHOWN_CHARACTERS`, as an error message repeats it."""
    try:
        text = str(value)
    except ValueError:  # Python refuses to write an int of more than 4,300 digits
        return f"a number of more than {SHOWN_CHARACTERS} digits"
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."


def visible(text: str) -> str:
    """Return text with its control characters escaped, such as `\\x1b`; a line feed and a tab stay.

    A name from a file could otherwise move the terminal's cursor or change its title.
    """
    if text.isascii() and text.replace("\n", "").replace("\t", "").isprintable():
        return text
    return "".join(_visible_character(character) for character in text)


def printable(name: str) -> bool:
    """Return True if a name has no control characters and can be written as UTF-8."""
    return visible(name) == name and not {"\n", "\t"} & set(name)


def _visible_character(character: str) -> str:
    if character in "\n\t" or unicodedata.category(character) not in INVISIBLE:
        return character
    return (
        character.encode("ascii", "backslashreplace").decode() if ord(character) > 127 else f"\\x{ord(character):02x}"
    )


def one_line(message: str) -> str:
    """Return an error message on one line, escaped, with long words cut in the middle, so that no input floods it."""
    words = visible(" ".join(message.split())).split(" ")
    return without_middle(" ".join(without_middle(word, LONGEST_WORD) for word in words), LONGEST_MESSAGE)


def without_middle(text: str, most: int) -> str:
    """Return text of at most `most` characters: where it is longer, its begin and its end."""
    return text if len(text) <= most else f"{text[: most // 2]}...{text[len(text) - most // 2 + 3 :]}"


def _steps(name: str) -> int:
    """Return the length of a name in steps of four letters."""
    return len(name) // 4


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The known names most similar to `name`, best first: those that it begins, shortest first, then others.

    Names that contain it come next, those of about the same length in their own order; similar ones only if there are
    none of both. Case and organisation prefixes are ignored.
    """
    by_key: dict[str, str] = {}
    for candidate in known:
        by_key.setdefault(candidate.lower(), candidate)
        by_key.setdefault(candidate.lower().rsplit("/", 1)[-1], candidate)
    own = name.lower().rsplit("/", 1)[-1]
    begun = sorted((key for key in by_key if own and key.startswith(own)), key=len)
    if not begun and len(own) >= SHORTEST_PART:
        begun = sorted((key for key in by_key if _begins(own, key)), key=len)
    within = sorted((key for key in by_key if len(own) >= SHORTEST_PART and own in key), key=_steps)
    similar = () if begun or within else difflib.get_close_matches(own, by_key, n=2 * count, cutoff=LEAST_SIMILARITY)
    found = begun + within + [key for key in similar if _is_like(own, key)]
    return list(dict.fromkeys(by_key[key] for key in found))[:count]


def _begins(name: str, known: str) -> bool:
    """Return whether a name without its marks begins a known one, as llama3 does Llama-3.1-8B, but not llama-30b."""
    pattern = r"[-._ ]*".join(map(re.escape, filter(str.isalnum, name)))
    return bool(pattern) and re.match(rf"{pattern}(?!(?<=\d)\d)", known) is not None


def _is_like(name: str, known: str) -> bool:
    """Return whether a name is a misspelt or an abbreviated one: few edits away, or its letters in the same order."""
    letters = iter(known)
    return edits(name, known) <= max(len(name) // LETTERS_PER_EDIT, 1) or all(letter in letters for letter in name)


def edits(first: str, second: str) -> int:
    """Return the least number of letters to insert, drop, replace or swap with the next that turn a text into another.

    It is the distance of Damerau and Levenshtein between texts whose swapped letters are not edited again.
    """
    before, row = list[int](), list(range(len(second) + 1))
    for place, letter in enumerate(first, 1):
        two_above, before, row = before, row, [place]
        for number, other in enumerate(second, 1):
            ways = [before[number] + 1, row[-1] + 1, before[number - 1] + (letter != other)]
            if place > 1 and number > 1 and letter == second[number - 2] and first[place - 2] == other:
                ways.append(two_above[number - 2] + 1)
            row.append(min(ways))
    return row[-1]

"""The exception tree and the exit codes.

    PlanError            the user can act: one line on stderr, no traceback
    ├── InputError       the question is wrong                          exit 2
    │   ├── UnknownName  a model, GPU, method or setting nobody knows   exit 2
    │   └── UnknownArchitecture  its activations have no formula here   exit 2
    │       └── NotMeasured  nor are they measured with such settings   exit 2
    ├── DryRunUnsupported  what a dry run cannot simulate           exit 2
    ├── ProbeFailed      a probe ended and says nothing about memory   exit 1
    └── NothingFits      the question is right, the answer is no        exit 3

Everything else is a bug of ours and keeps its traceback (exit 1).
"""

import difflib
from collections.abc import Iterable

EXIT_PLANNED = 0
EXIT_OTHER = 1
EXIT_WRONG_INPUT = 2
EXIT_NOTHING_FITS = 3
EXIT_PROBE_CONTRADICTS = 4


class PlanError(Exception):
    """Something the user can change. The message is one line and names what to change."""

    exit_code = EXIT_OTHER


class InputError(PlanError):
    """The question cannot be answered as it was asked."""

    exit_code = EXIT_WRONG_INPUT


class UnknownName(InputError):
    """A name that is in no table; the message ends with the nearest ones that are."""

    def __init__(self, kind: str, name: str, known: Iterable[str], hint: str = "") -> None:
        near = nearest(name, known)
        suggestion = f" Did you mean {' or '.join(near)}?" if near else ""
        super().__init__(f"Unknown {kind} {name!r}.{suggestion}{' ' + hint if hint else ''}")


class UnknownArchitecture(InputError):
    """A model whose layers have no formula here: its parameters are counted, its activations are not known."""


class NotMeasured(UnknownArchitecture):
    """A layer without formulas whose passes cannot be run with a candidate's settings. A search takes such a candidate for refused."""


class DryRunUnsupported(PlanError):
    """A setting that a dry run cannot simulate. The message names it."""

    exit_code = EXIT_WRONG_INPUT


class ProbeFailed(PlanError):
    """A probe that ended without saying whether its candidate fits. The message says how it ended."""


class NothingFits(PlanError):
    """No candidate fits. The message says by how much, and what would."""

    exit_code = EXIT_NOTHING_FITS


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The known names most like `name`, best first, compared without case and without an organisation prefix."""
    by_key: dict[str, str] = {}
    for candidate in known:
        by_key.setdefault(candidate.lower(), candidate)
        by_key.setdefault(candidate.lower().rsplit("/", 1)[-1], candidate)
    found = difflib.get_close_matches(name.lower().rsplit("/", 1)[-1], by_key, n=2 * count, cutoff=0.5)
    return list(dict.fromkeys(by_key[key] for key in found))[:count]

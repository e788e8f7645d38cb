"""Two releases of the training stack to compare, and the facts that differ between them for a candidate."""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from planner.candidate import TORCH_VERSIONS, Candidate, TorchVersion, usual_values
from planner.errors import InputError
from planner.files.read import MAX_DOCUMENT_BYTES, open_regular
from planner.methods import NEWEST_TRL, OLDEST_TRL, Loss, release

Library = Literal["trl", "torch"]
# A pin leaves one minor release: == or ===, or ~= with three numbers.
PINNED = r"(?m)^\s*{library}(?:\[[^\]]*\])?\s*(?:===?|~=(?=\s*\d+\.\d+\.\d))\s*(\d+\.\d+)"


class Releases(Struct, frozen=True, kw_only=True):
    """The releases of a run. `torch`: the planned release whose facts hold for the run's torch (see `known_torch`)."""

    trl: str
    torch: TorchVersion | None = None  # None: not given
    pinned_torch: str | None = None


def read_releases(text: str) -> Releases:
    """Return the releases that a text names: a release of TRL, or the path of a requirements file that pins it.

    Raises:
        InputError: it is neither, or the file cannot be read or pins no TRL, or the release is not planned.
    """
    if re.fullmatch(r"\d+\.\d+(\.\d+)?", text):
        return Releases(trl=_planned(text))
    try:
        with open_regular(Path(text), MAX_DOCUMENT_BYTES) as file:
            pins = file.read().decode("utf-8", errors="replace")
    except InputError as error:
        raise InputError(f"{error} Name a release of TRL, such as {NEWEST_TRL}, or a requirements file.") from error
    trl = re.search(PINNED.format(library="trl"), pins)
    if trl is None:
        raise InputError(f"{text} pins no release of TRL: it has no line such as trl==1.16.0.")
    torch = re.search(PINNED.format(library="torch"), pins)
    if torch is None:
        return Releases(trl=_planned(trl[1]))
    return Releases(trl=_planned(trl[1]), torch=known_torch(torch[1]), pinned_torch=torch[1])


def _planned(trl: str) -> str:
    if release(trl) < release(OLDEST_TRL):
        raise InputError(f"TRL {trl} is older than {OLDEST_TRL}, the oldest release whose facts are known.")
    return trl


def known_torch(version: str) -> TorchVersion:
    """Return the planned release whose facts hold for a torch: the newest that is no newer, else the oldest."""
    return TORCH_VERSIONS[max(0, bisect_right(TORCH_VERSIONS, release(version), key=release) - 1)]


class Fact(Struct, frozen=True, kw_only=True):
    """A fact that depends on a library's release. `value`: reads it from a candidate, as the formulas do.

    `words`: a sentence; `{now}` is the value with the later release, `{before}` with the one before.
    """

    library: Library
    value: Callable[[Candidate], object]
    words: str


LOSSES: dict[Loss, str] = {
    "fused": "in chunks that build no logits",
    "chunked_nll": "256 labelled tokens at a time",
    "chunked_float32": "256 labelled tokens at a time, with a float32 copy of the head",
    "logits": "with whole logits",
    "logits_cross_entropy": "with whole logits and a copy of them for the accuracy",
    "divergence": "in tiles of student and teacher that build no logits",
    "jsd": "with whole logits of student and teacher",
    "liger": "by Liger, with the logits of a chunk at a time",
}
# Sources: the columns and properties that the values read.
FACTS = (
    Fact(
        library="trl",
        value=lambda at: LOSSES.get(at.loss, at.loss),
        words="the loss is computed {now}, not {before}",
    ),
    Fact(
        library="trl",
        value=lambda at: at.use_dora and at.spares_magnitudes,
        words="DoRA's magnitudes stay in float32 where adapters are cast to bfloat16",
    ),
    Fact(
        library="trl",
        value=lambda at: usual_values(at.method_row, at.trl_version)["max_completion_length"],
        words="max_completion_length is {now} where nothing sets it, not {before}",
    ),
    Fact(
        library="trl",
        value=attrgetter("engine_needs_bitsandbytes"),
        words="a colocated engine of a 4-bit model is asked for bitsandbytes, which the vLLM that TRL accepts lacks",
    ),
    Fact(
        library="torch",
        value=lambda at: at.attn_implementation == "sdpa" and at.groups_efficiently,
        words="on a card without FlashAttention's kernels, sdpa has one for fewer heads of keys than of queries",
    ),
)


class Change(Struct, frozen=True, kw_only=True):
    """A fact of a candidate that changed: `since` is the first release of `library` with the new value."""

    library: Library
    since: str
    words: str


def changes(one: Candidate, other: Candidate) -> Iterator[Change]:
    """Yield the facts that differ between the releases of two candidates of one job, in the order of the releases."""
    first, last = sorted((one, other), key=lambda each: release(each.trl_version))
    steps = [replace(first, trl_version=name) for name in trl_releases(first.trl_version, last.trl_version)]
    yield from _changes("trl", steps, attrgetter("trl_version"))
    known = sorted(map(TORCH_VERSIONS.index, (one.torch_version, other.torch_version)))
    steps = [replace(last, torch_version=name) for name in TORCH_VERSIONS[known[0] : known[1] + 1]]
    yield from _changes("torch", steps, attrgetter("torch_version"))


def trl_releases(first: str, last: str) -> list[str]:
    """Return the minor releases of TRL from one to another of the same major number."""
    (major, start), (_, end) = release(first), release(last)
    return [f"{major}.{minor}" for minor in range(start, end + 1)]


def _changes(library: Library, steps: Sequence[Candidate], since: Callable[[Candidate], str]) -> Iterator[Change]:
    """Yield the facts of a library that differ between candidates of consecutive releases."""
    for before, now in pairwise(steps):
        for fact in FACTS:
            values = fact.value(before), fact.value(now)
            if fact.library == library and values[0] != values[1]:
                words = fact.words.format(before=values[0], now=values[1])
                yield Change(library=library, since=since(now), words=words)

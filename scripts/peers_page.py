"""Write results/peers.md: other packages' answers, as they were given, beside today's estimates.

    python -m scripts.peers_page

The answers of the others are stored (results/peers.jsonl); only our column is computed.
"""

import json
import statistics
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from msgspec import Struct

from planner.units import GIB
from scripts import compare_published

RESULTS = Path(__file__).resolve().parents[1] / "results"
ROWS, PAGE = RESULTS / "peers.jsonl", RESULTS / "peers.md"
TITLES: dict[str, tuple[compare_published.Quantity, ...]] = {
    "All figures": ("allocated", "reserved", "process"),
    "Allocated by PyTorch": ("allocated",),
    "Reserved, or shown by nvidia-smi": ("reserved", "process"),
}
HEAD = """# Memory estimators side by side

The other packages were asked on 2026-11-23, with the code of commit 7a0b0a0 (`benchmarks/peers.py`,
`peer_packages.py`): each the release that the table names, in an environment of its own, without a model hub and
without a GPU. Our column is today's, written by `python -m scripts.peers_page`. The questions are figures that others
measured, up to three of each group of [published.md](published.md).

An answer is compared with the kind of figure that was measured: allocated bytes without the package's shares for
fragmentation and CUDA context, reserved bytes without the context, nvidia-smi with both. A package that gives both
shares as one figure keeps it in reserved bytes. It is scored only on questions that it can express; settings that it
has no word for take its nearest (adapters on attention only, for instance). *ours there*: our mean absolute error on
the same questions. Under: the share of answers that are too low by more than 3 %. agilerl-arena describes another
trainer than TRL's in all rows, and accelerate and deepspeed claim the states alone.
"""


class Question(Struct, frozen=True, kw_only=True):
    """A published figure with our estimate of today, and the stored answer of each package: bytes, or why none."""

    compared: compare_published.Compared
    answers: dict[str, dict[str, Any]]

    def error(self, package: str) -> float:
        """Return a package's error: its bytes over the measured ones, less one."""
        row = self.compared.row
        return comparable_bytes(self.answers[package], row.quantity) / row.measured_bytes - 1


@lru_cache(maxsize=1)
def questions() -> tuple[Question, ...]:
    """The stored questions, estimated anew."""
    ours = {one.row.id: one for one in compare_published.all_compared()[0]}
    rows = map(json.loads, ROWS.read_text(encoding="utf-8").splitlines())
    return tuple(Question(compared=ours[row["id"]], answers=row["answers"]) for row in rows)


def comparable_bytes(answer: dict[str, Any], quantity: str) -> float:
    """The part of a package's total that a quantity measures.

    Allocated bytes hold neither fragmentation nor the CUDA context, reserved bytes only fragmentation, and the bytes of
    the process (nvidia-smi) both.
    """
    total = float(answer["bytes"])
    if quantity == "process":
        return total
    total -= answer["context_bytes"]
    return total - answer["slack_bytes"] if quantity == "allocated" else total


def score(errors: Sequence[float]) -> str:
    """Median error, mean absolute error, worst error and the share of answers below the truth by more than 3 %."""
    if not errors:
        return "| | | |"
    mean = statistics.mean(map(abs, errors))
    return f"{statistics.median(errors):+.1%} | {mean:.1%} | {max(errors, key=abs):+.1%} | {too_low(errors):.0%}"


def too_low(errors: Sequence[float]) -> float:
    """The share of answers below the truth by more than 3 %."""
    return sum(error < -0.03 for error in errors) / len(errors)


def score_table(quantities: Sequence[compare_published.Quantity]) -> list[str]:
    """A Markdown table of the errors of each package, and ours on the same questions."""
    asked = [one for one in questions() if one.compared.row.quantity in quantities]
    lines = [
        "| | answered | median error | mean absolute | worst | under | ours there |",
        "|---|---|---|---|---|---|---|",
        f"| **plan** | all {len(asked)} | {score([one.compared.error for one in asked])} | |",
    ]
    for package in asked[0].answers:
        answered = [one for one in asked if "bytes" in one.answers[package]]
        ours = [one.compared.error for one in answered]
        there = f"{statistics.mean(map(abs, ours)):.1%}, {too_low(ours):.0%} under" if ours else ""
        errors = score([one.error(package) for one in answered])
        lines.append(f"| {package} | {len(answered)} of {len(asked)} | {errors} | {there} |")
    return lines


def expression_table() -> list[str]:
    """A Markdown table of the reasons why a package did not answer."""
    lines = ["| package | cannot express (questions) |", "|---|---|"]
    for package in questions()[0].answers:
        reasons = Counter(one.answers[package].get("cannot") for one in questions())
        said = "; ".join(f"{reason} ({count})" for reason, count in reasons.most_common() if reason)
        lines.append(f"| {package} | {said.replace('|', '/')} |")
    return lines


def matrix() -> list[str]:
    """A Markdown table of the error of each package in each question."""
    packages = list(questions()[0].answers)
    lines = [f"| | kind | GiB | plan | {' | '.join(packages)} |", "|---" * (4 + len(packages)) + "|"]
    for one in questions():
        row = one.compared.row
        cells = [f"{one.error(package):+.1%}" if "bytes" in one.answers[package] else "" for package in packages]
        measured = f"{row.measured_bytes / GIB:.2f}"
        lines.append(f"| {row.id} | {row.quantity} | {measured} | {one.compared.error:+.1%} | {' | '.join(cells)} |")
    return lines


def page() -> str:
    """The page."""
    lines = [HEAD]
    for title, quantities in TITLES.items():
        lines += [f"## {title}", "", *score_table(quantities), ""]
    lines += ["## What a package cannot express", "", *expression_table(), ""]
    return "\n".join([*lines, "## Row by row (error; empty: cannot express)", "", *matrix()]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

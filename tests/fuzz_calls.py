"""Calls of the Python functions with values of wrong types, for `test_wrong_types.py` and `scripts/fuzz.py`."""

import random
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy
from msgspec.structs import fields

from planner import Job, estimate, load_model, plan
from planner.jobs.settings import setting_names
from planner.requests.options import CandidateOptions, SearchOptions

WRONG: tuple[Any, ...] = (
    None, True, 0, -1, 7, 2**70, 10**5000, 1.16, float("nan"), float("inf"), -0.5, 1j, "", " ", "x", "1e3", b"x", "é\n",
    [], ["x"], [1, 2], [["x"]], (), (1, "x"), {}, {"a": 1}, {1, 2}, frozenset(), object(), int, len, Path("x"),
    Decimal("2.5"), Fraction(1, 3), numpy.int64(3), numpy.float32(0.5), numpy.array([1, 2]), iter([1]), ...,
)  # fmt: skip


def calls(seed: int, count: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Calls of `plan`, `estimate` and `Job` with one to three wrong values beside a right job."""
    chosen = random.Random(seed)
    for _ in range(count):
        name = chosen.choice(["plan", "estimate", "Job"])
        kind = SearchOptions if name == "plan" else CandidateOptions
        own = [field.name for field in fields(Job if name == "Job" else kind)]
        names = own if name == "Job" else [*own, *chosen.sample(sorted(setting_names()), 8)]
        wrong = chosen.sample(names, chosen.randint(1, 3))
        yield name, {argument: chosen.choice(WRONG) for argument in wrong}


def call(name: str, wrong: dict[str, Any]) -> None:
    if name == "Job":
        Job(**{"model": load_model("Qwen2.5-0.5B"), "method": "sft", **wrong})
    elif name == "plan":
        plan(**{"model": "Qwen2.5-0.5B", "gpus": "1xL4", "method": "sft", **wrong})
    else:
        estimate("Qwen2.5-0.5B", "1xL4", **{"method": "sft", **wrong})

"""Traces of one recipe at several sizes: what a profile is fitted to."""

import re
from dataclasses import dataclass
from functools import cached_property, lru_cache

from planner.trace.in_step import beside
from planner.trace.profile import NoProfile
from planner.trace.terms import Values
from planner.trace.timeline import Trace

_LAYER = re.compile(r"\.\d+")  # its number in a module's name


class Ambiguous(NoProfile):
    """At the sizes that were drawn two expressions have one value, so that another trace tells otherwise: other sizes may tell them apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A trace of `layers` layers at given sizes (`rows`, `tokens`, ..), in bytes as asked for, not rounded to blocks."""

    values: tuple[tuple[str, int], ...]
    layers: int
    trace: Trace

    @property
    def sizes(self) -> Values:
        return dict(self.values)

    @property
    def accumulation(self) -> int:
        return self.sizes.get("accumulation", 1)

    @property
    def generated(self) -> int:
        """Rows that are generated at once; 0 where none are."""
        return self.sizes.get("generated", 0)


@dataclass(frozen=True, kw_only=True)
class Samples:
    """What a profile is fitted to: traces of one depth at several sizes, and what they are with more of all that repeats."""

    alike: tuple[Sample, ...]  # with the same births in the same order
    deeper: Sample  # of the first one's sizes, with a period of layers more
    longer: Sample | None = None  # of more micro-steps and rows that are generated ahead; None where a recipe's sizes fix both

    @property
    def first(self) -> Sample:
        return self.alike[0]

    @property
    def sized(self) -> tuple[Sample, ...]:
        """Those of one depth."""
        return self.alike if self.longer is None else (*self.alike, self.longer)

    @cached_property
    def places(self) -> list[list[int]]:
        """For each of `sized` which of its births each birth of the first one is.

        Raises:
            NoProfile: their sequences differ by more than what the longer one has more of.
        """
        for sample in self.alike[1:]:
            check_order(self.first.trace, sample.trace)
        same = list(range(len(self.first.trace.allocations)))
        longer = [] if self.longer is None else [beside(named(self.first.trace), named(self.longer.trace))]
        return [same] * len(self.alike) + longer


@lru_cache(maxsize=4096)
def of_any_layer(module: str) -> str:
    """A module's name without the numbers of layers."""
    return _LAYER.sub(".*", module)


def named(trace: Trace) -> list[tuple[str, ...]]:
    """Births by all but their sizes."""
    return [(made.phase, made.component, made.operator, of_any_layer(made.module)) for made in trace.allocations]


def check_order(one: Trace, other: Trace) -> None:
    """That two traces are the same but for sizes.

    Raises:
        NoProfile: they are not.
    """
    shapes = _shape_of(one), _shape_of(other)
    if shapes[0] == shapes[1]:
        return
    birth = next((index for index, (mine, its) in enumerate(zip(*shapes, strict=False)) if mine != its), min(map(len, shapes)) - 1)
    made = one.allocations[birth]
    raise NoProfile(f"The order of allocations differs between sizes, first before {made.operator} in {made.module or 'no module'}, {made.phase}.")


def _shape_of(trace: Trace) -> tuple[tuple[int, ...], ...]:
    """The births and deaths of a trace without their sizes. The order of deaths between two births says nothing: it is sorted away."""
    shape: list[tuple[int, ...]] = []
    dead: list[int] = []
    for index, size_bytes in trace.events:
        if size_bytes > 0:
            shape.append(tuple(sorted(dead)))
            dead = []
        else:
            dead.append(index)
    return tuple(shape)

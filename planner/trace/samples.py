"""Traces of one recipe at several sizes: what a profile is fitted to."""

from dataclasses import dataclass

from planner.trace.profile import NoProfile
from planner.trace.terms import Values
from planner.trace.timeline import Trace


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

"""Which expression the size of every allocation is: of the samples' own, and of what deeper and longer traces have more of."""

from collections.abc import Sequence
from dataclasses import dataclass

from planner.quantities import Component, Phase
from planner.trace.fit_sizes import Expressions
from planner.trace.profile import NoProfile
from planner.trace.samples import Ambiguous, Samples, of_any_layer
from planner.trace.timeline import Allocation, Trace

NEAR = 2  # births before and after one, by which it is told from another of its size: fewer than the shortest run, of a tensor for each of MANY_ROWS

Key = tuple[Component, int]  # component, expression
_Signature = tuple[str, str, Phase, Component, int]
_Table = dict[_Signature, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Keys:
    """For each allocation of the traces its component and expression; equal operators of equal size are taken for the same."""

    first: list[Key]
    deeper: list[Key]
    longer: list[Key]  # empty where there is no longer trace


def keys_of(samples: Samples, expressions: Expressions) -> Keys:
    """Those of the samples' allocations.

    Raises:
        Ambiguous: two of them cannot be told apart.
        NoProfile: a size is no product of terms, or only in the deeper or longer trace.
    """
    first, deeper = samples.first.trace, samples.deeper.trace
    known = _Likes(first, range(len(first.allocations)), [expressions.of(index) for index in range(len(first.allocations))])
    growing, grown = _growing(first, deeper, known, expressions)
    keys, longer_keys = known.keys(first, growing), list[Key]()
    if samples.longer is not None:
        longer = samples.longer.trace
        longer_keys = _Likes(longer, samples.places[-1], [expression for _, expression in keys]).keys(longer, {})
    return Keys(first=keys, deeper=known.keys(deeper, grown), longer=longer_keys)


def _growing(first: Trace, deeper: Trace, known: "_Likes", expressions: Expressions) -> tuple[_Table, _Table]:
    """What is larger in a deeper trace, such as a stack of one norm a parameter: in the first and in the deeper."""
    before, after = _missing(first, deeper), _missing(deeper, first)
    if len(before) != len(after):
        raise NoProfile("The deeper trace has sizes that the shallower has not.")
    tables: tuple[_Table, _Table] = ({}, {})
    for short, long in zip(before, after, strict=True):
        if short.operator != long.operator:
            raise NoProfile(f"A size appears only in the deeper trace: {long.operator} of {long.size_bytes} bytes.")
        grown = expressions.growing(known.alone(short), long.size_bytes - short.size_bytes)
        tables[0][_signature(short)] = tables[1][_signature(long)] = grown
    return tables


class _Likes:
    """The expressions of allocations by what equal ones of equal layers are known by: operator, module and size, and where that says too little also
    the operators around."""

    def __init__(self, trace: Trace, places: Sequence[int], expressions: list[int]) -> None:
        """`expressions` are those of the allocations at `places`."""
        self._plain: _Table = {}
        self._unclear: set[_Signature] = set()
        self._among: dict[tuple[_Signature, tuple[str, ...]], int] = {}
        made = trace.allocations
        for place, expression in zip(places, expressions, strict=True):
            if self._plain.setdefault(_signature(made[place]), expression) != expression:
                self._unclear.add(_signature(made[place]))
        for place, expression in zip(places, expressions, strict=True):
            signature = _signature(made[place])
            if signature in self._unclear and self._among.setdefault((signature, _around(trace, place)), expression) != expression:
                raise Ambiguous(f"Two sizes cannot be told apart: {made[place].operator} of {made[place].size_bytes} bytes.")

    def alone(self, made: Allocation) -> int:
        """The one expression of an operator, module and size.

        Raises:
            Ambiguous: it has several.
        """
        if _signature(made) in self._unclear:
            raise Ambiguous(f"Two sizes cannot be told apart: {made.operator} of {made.size_bytes} bytes.")
        return self._plain[_signature(made)]

    def keys(self, trace: Trace, growing: _Table) -> list[Key]:
        """Of every allocation of a trace of the same sizes; `growing`: those that are known by themselves."""
        return [(made.component, self._of(trace, place, growing)) for place, made in enumerate(trace.allocations)]

    def _of(self, trace: Trace, place: int, growing: _Table) -> int:
        made = trace.allocations[place]
        signature = _signature(made)
        if signature in growing:
            return growing[signature]
        try:
            return self._among[signature, _around(trace, place)] if signature in self._unclear else self._plain[signature]
        except KeyError:
            raise Ambiguous(f"Nothing is known to be like {made.operator} of {made.size_bytes} bytes in {made.module or 'no module'}, {made.phase}.") from None


def _around(trace: Trace, place: int) -> tuple[str, ...]:
    """The operators of the births before and after one."""
    near = (*range(max(place - NEAR, 0), place), *range(place + 1, min(place + 1 + NEAR, len(trace.allocations))))
    return tuple(trace.allocations[index].operator for index in near)


def _missing(one: Trace, other: Trace) -> list[Allocation]:
    """The allocations of one trace whose like the other has not."""
    present = {_signature(allocation) for allocation in other.allocations}
    return [allocation for allocation in one.allocations if _signature(allocation) not in present]


def _signature(allocation: Allocation) -> _Signature:
    """By what equal allocations of equal layers are known."""
    return allocation.operator, of_any_layer(allocation.module), allocation.phase, allocation.component, allocation.size_bytes

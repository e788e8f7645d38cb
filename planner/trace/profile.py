"""Profiles: one small set of traces answers for every size and depth of its recipe.

The allocations of a recipe (architecture, method, tuning, precision, library versions) come in the same order whatever the rows, tokens
and widths are; each size is a product of them, such as 2 x rows x tokens x hidden. And they repeat over layers. So a few traces of few
layers give, for each moment of the step, how many allocations of which size are alive, as `count + per_layer x layers` (`fit.py`); a
moment that never has more of anything than another of its phase is dropped. What is left is evaluated in a millisecond, to the byte.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter, mul

from planner.quantities import Component, Phase, PhaseMemory
from planner.trace.terms import FURTHER_LAYERS, ONE, WIDTHS, Values, size_terms, width_terms

PROFILE_SCHEMA = 3
MANY_ANSWERS = 4096  # a profile remembers so many


class NoProfile(Exception):
    """A recipe has no profile: it is not simulated, its sequences differ, a size is no product of terms, or a held-back trace is not reproduced."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Expression:
    """A size in bytes: a sum of coefficients times a size term and a width term of `terms.py`, by name."""

    parts: tuple[tuple[str, str, int, int], ...]  # size term, width term, numerator, denominator


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """What is alive at a moment of the step: for each (component, expression) a count, one a period of layers more, one a micro-step more."""

    phase: Phase
    alive: tuple[tuple[Component, int, int, int, int], ...]  # component, expression, count, count per further period, per further micro-step


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A recipe's allocations with sizes as expressions. `block_bytes`: what the device rounds sizes up to; `period`: layers that repeat."""

    layers: int
    block_bytes: int
    expressions: tuple[Expression, ...]
    moments: tuple[Moment, ...]
    period: int = 1
    accumulation: int = 1  # micro-steps that were traced
    versions: tuple[tuple[str, str], ...] = ()

    @cached_property
    def _models(self) -> dict[tuple[int, ...], "_OfModel"]:
        """The profile at the widths and depths that were asked for: a search asks for many sizes of one model."""
        return {}

    @cached_property
    def _answers(self) -> dict[tuple[int, ...], tuple[PhaseMemory, ...]]:
        """What was answered: a search asks again for one size beside engines of many shares."""
        return {}

    def further(self, layers: int) -> int:
        """Periods of layers beyond the traced ones.

        Raises:
            NoProfile: the profile does not speak of that depth.
        """
        further, rest = divmod(layers - self.layers, self.period)
        if rest or further < 0:
            raise NoProfile(f"The profile is of {self.layers} layers and multiples of {self.period} more, not of {layers}.")
        return further

    def _of_model(self, values: Values, layers: int) -> "_OfModel":
        micro_steps = values.get("accumulation", self.accumulation) - self.accumulation
        key = (layers, micro_steps, *(values.get(width, 0) for width in WIDTHS))
        if key not in self._models:
            further = self.further(layers)
            self._models[key] = _OfModel(
                parts=tuple(_scaled(expression, width_terms(values)) for expression in self.expressions),
                sums=tuple(_sum_of(moment, further, micro_steps) for moment in self.moments),
                further=further,
                micro_steps=micro_steps,
                block_bytes=self.block_bytes,
            )
        return self._models[key]

    def peak_bytes(self, values: Values, layers: int) -> int:
        """The peak of a step of these sizes in a model of so many layers."""
        model = self._of_model(values, layers)
        return max(model.totals(model.sizes(values)))

    def phases(self, values: Values, layers: int) -> tuple[PhaseMemory, ...]:
        """As `Trace.phases`: for each phase the components at its heaviest moment."""
        key = (layers, *values.values())
        if key not in self._answers:
            if len(self._answers) >= MANY_ANSWERS:
                self._answers.clear()
            self._answers[key] = self._phases(self._of_model(values, layers), values)
        return self._answers[key]

    def _phases(self, model: "_OfModel", values: Values) -> tuple[PhaseMemory, ...]:
        sizes, heaviest = model.sizes(values), dict[Phase, int]()
        totals = model.totals(sizes)
        for index, moment in enumerate(self.moments):
            if moment.phase not in heaviest or totals[index] > totals[heaviest[moment.phase]]:
                heaviest[moment.phase] = index
        return tuple(PhaseMemory(name=phase, components=_components(self.moments[index], sizes, model)) for phase, index in heaviest.items())


_Part = tuple[str, int, int]  # size term, numerator with the width in it, denominator
_Sum = tuple[Callable[[list[int]], tuple[int, ...]], tuple[int, ...]]  # picks a moment's sizes; how many there are of each


@dataclass(frozen=True, kw_only=True, slots=True)
class _OfModel:
    """A profile at a model's widths and depth: what is left are rows and lengths."""

    parts: tuple[tuple[_Part, ...], ...]  # of each expression
    sums: tuple[_Sum, ...]  # of each moment
    further: int  # periods of layers
    micro_steps: int  # further ones
    block_bytes: int

    def sizes(self, values: Values) -> list[int]:
        """The bytes of every expression, in whole blocks."""
        terms, block = size_terms(values), self.block_bytes
        terms[FURTHER_LAYERS] = self.further
        return [-(-sum([terms[term] * top // bottom for term, top, bottom in parts]) // block) * block for parts in self.parts]

    def totals(self, sizes: list[int]) -> list[int]:
        return [sum(map(mul, counts, picked(sizes))) for picked, counts in self.sums]


def _scaled(expression: Expression, widths: Mapping[str, int]) -> tuple[_Part, ...]:
    return tuple((size, widths[width] * top, bottom) for size, width, top, bottom in expression.parts)


def _sum_of(moment: Moment, further: int, micro_steps: int) -> _Sum:
    """A moment at one depth and accumulation, components taken together."""
    counts = {0: 0, 1: 0}  # `itemgetter` of two or more gives a tuple
    for _, expression, count, per_period, per_step in moment.alive:
        counts[expression] = counts.get(expression, 0) + count + per_period * further + per_step * micro_steps
    return itemgetter(*counts), tuple(counts.values())


def _components(moment: Moment, sizes: list[int], model: _OfModel) -> dict[Component, int]:
    components: dict[Component, int] = {}
    for component, expression, count, per_period, per_step in moment.alive:
        size_bytes = (count + per_period * model.further + per_step * model.micro_steps) * sizes[expression]
        components[component] = components.get(component, 0) + size_bytes
    return {component: size_bytes for component, size_bytes in components.items() if size_bytes}


def profile_to_json(profile: Profile) -> str:
    """A profile as one line of JSON, the same for the same profile. What is alive is five columns, which compress well."""
    return json.dumps(
        {
            "schema": PROFILE_SCHEMA, "layers": profile.layers, "period": profile.period, "accumulation": profile.accumulation,
            "block_bytes": profile.block_bytes, "versions": profile.versions,
            "expressions": [expression.parts for expression in profile.expressions],
            "moments": [[moment.phase, *zip(*moment.alive, strict=True)] for moment in profile.moments],
        },
        separators=(",", ":"),
    )  # fmt: skip


def profile_from_json(text: str) -> Profile:
    """What `profile_to_json` wrote.

    Raises:
        NoProfile: it is of another version of this program.
    """
    held = json.loads(text)
    if held["schema"] != PROFILE_SCHEMA:
        raise NoProfile(f"The profile is of schema {held['schema']}, this program reads {PROFILE_SCHEMA}.")
    return Profile(
        layers=held["layers"], period=held["period"], accumulation=held["accumulation"], block_bytes=held["block_bytes"],
        versions=tuple((name, version) for name, version in held["versions"]),
        expressions=tuple(Expression(parts=tuple((size, width, top, bottom) for size, width, top, bottom in parts)) for parts in held["expressions"]),
        moments=tuple(Moment(phase=phase, alive=tuple(zip(*columns, strict=True))) for phase, *columns in held["moments"]),
    )  # fmt: skip


def constant(size_bytes: int) -> Expression:
    """A size that nothing changes."""
    return Expression(parts=((ONE, ONE, size_bytes, 1),))

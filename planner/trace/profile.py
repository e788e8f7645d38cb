"""Profiles: one small set of traces answers for every size and depth of its recipe.

The allocations of a recipe (architecture, method, tuning, precision, library versions) come in the same order whatever the rows, tokens
and widths are; each size is a product of them, such as 2 x rows x tokens x hidden. And they repeat over layers, over micro-steps, and in
lists over generated rows. So a few traces of few layers give, for each moment of the step, how many allocations of which size are alive, as
`count + per_layer x layers + per_step x steps + per_row x rows` (`fit.py`); a moment that never has more of anything than another of its
phase is dropped. What is left is evaluated in a millisecond, to the byte.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter, mul

from planner.quantities import Component, Phase, PhaseMemory
from planner.trace.terms import FURTHER_LAYERS, ONE, WIDTHS, Values, size_terms, width_terms

PROFILE_SCHEMA = 4
MANY_ANSWERS = 4096  # a profile remembers so many


class NoProfile(Exception):
    """A recipe has no profile: it is not simulated, its sequences differ, a size is no product of terms, or a held-back trace is not reproduced."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Expression:
    """A size in bytes: a sum of coefficients times a size term and a width term of `terms.py`, by name."""

    parts: tuple[tuple[str, str, int, int], ...]  # size term, width term, numerator, denominator


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """What is alive at a moment of the step: for each (component, expression) a count, and how many more a period of layers, a micro-step and a row make."""

    phase: Phase
    alive: tuple[tuple[Component, int, int, int, int, int], ...]  # component, expression, count; per further period, micro-step, generated row


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A recipe's allocations with sizes as expressions. `block_bytes`: what the device rounds sizes up to; `period`: layers that repeat."""

    layers: int
    block_bytes: int
    expressions: tuple[Expression, ...]
    moments: tuple[Moment, ...]
    period: int = 1
    accumulation: int = 1  # micro-steps that were traced
    generated: int = 0  # rows that were generated at once
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
        key = (layers, *(values.get(width, 0) for width in WIDTHS))
        if key not in self._models:
            periods = self.further(layers)
            self._models[key] = _OfModel(
                parts=tuple(_scaled(expression, width_terms(values)) for expression in self.expressions),
                sums=tuple(_sum_of(moment, periods) for moment in self.moments),
                repeated=tuple(each for index, moment in enumerate(self.moments) if (each := _repeated(moment, index)) is not None),
                periods=periods,
                block_bytes=self.block_bytes,
            )
        return self._models[key]

    def _repeats(self, values: Values) -> tuple[int, int]:
        """Micro-steps and generated rows beyond those that were traced."""
        return values.get("accumulation", self.accumulation) - self.accumulation, values.get("generated", self.generated) - self.generated

    def peak_bytes(self, values: Values, layers: int) -> int:
        """The peak of a step of these sizes in a model of so many layers."""
        model = self._of_model(values, layers)
        return max(model.totals(model.sizes(values), *self._repeats(values)))

    def phases(self, values: Values, layers: int) -> tuple[PhaseMemory, ...]:
        """As `Trace.phases`: for each phase the components at its heaviest moment."""
        key = (layers, *values.values())
        if key not in self._answers:
            if len(self._answers) >= MANY_ANSWERS:
                self._answers.clear()
            self._answers[key] = self._phases(self._of_model(values, layers), values)
        return self._answers[key]

    def _phases(self, model: "_OfModel", values: Values) -> tuple[PhaseMemory, ...]:
        sizes, repeats, heaviest = model.sizes(values), self._repeats(values), dict[Phase, int]()
        totals = model.totals(sizes, *repeats)
        for index, moment in enumerate(self.moments):
            if moment.phase not in heaviest or totals[index] > totals[heaviest[moment.phase]]:
                heaviest[moment.phase] = index
        further = (model.periods, *repeats)
        return tuple(PhaseMemory(name=phase, components=_components(self.moments[index], sizes, further)) for phase, index in heaviest.items())


_Part = tuple[str, int, int]  # size term, numerator with the width in it, denominator
_Pick = Callable[[list[int]], tuple[int, ...]]  # a moment's sizes
_Sum = tuple[_Pick, tuple[int, ...]]  # and how many there are of each
_Repeated = tuple[int, _Pick, tuple[int, ...], tuple[int, ...]]  # of which moment; how many more of each size a micro-step makes, and a row


@dataclass(frozen=True, kw_only=True, slots=True)
class _OfModel:
    """A profile at a model's widths and depth: what is left are rows and lengths, and how often a step does what it does again."""

    parts: tuple[tuple[_Part, ...], ...]  # of each expression
    sums: tuple[_Sum, ...]  # of each moment
    repeated: tuple[_Repeated, ...]  # of moments that have any
    periods: int  # of layers, beyond those that were traced
    block_bytes: int

    def sizes(self, values: Values) -> list[int]:
        """The bytes of every expression, in whole blocks."""
        terms, block = size_terms(values), self.block_bytes
        terms[FURTHER_LAYERS] = self.periods
        return [-(-sum([terms[term] * top // bottom for term, top, bottom in parts]) // block) * block for parts in self.parts]

    def totals(self, sizes: list[int], steps: int, rows: int) -> list[int]:
        """What is alive at each moment."""
        found = [sum(map(mul, counts, picked(sizes))) for picked, counts in self.sums]
        if steps or rows:
            for moment, picked, per_step, per_row in self.repeated:
                each = picked(sizes)
                found[moment] += steps * sum(map(mul, per_step, each)) + rows * sum(map(mul, per_row, each))
        return found


def _scaled(expression: Expression, widths: Mapping[str, int]) -> tuple[_Part, ...]:
    return tuple((size, widths[width] * top, bottom) for size, width, top, bottom in expression.parts)


def _sum_of(moment: Moment, periods: int) -> _Sum:
    """A moment at one depth, components taken together."""
    counts = {0: 0, 1: 0}  # `itemgetter` of two or more gives a tuple
    for _, expression, count, per_period, *_ in moment.alive:
        counts[expression] = counts.get(expression, 0) + count + per_period * periods
    return itemgetter(*counts), tuple(counts.values())


def _repeated(moment: Moment, index: int) -> _Repeated | None:
    """What a moment has more of with every micro-step and row; None where it has nothing."""
    steps, rows = {0: 0, 1: 0}, {0: 0, 1: 0}
    for _, expression, _, _, per_step, per_row in moment.alive:
        if per_step or per_row:
            steps[expression] = steps.get(expression, 0) + per_step
            rows[expression] = rows.get(expression, 0) + per_row
    return (index, itemgetter(*steps), tuple(steps.values()), tuple(rows.values())) if any(steps.values()) or any(rows.values()) else None


def _components(moment: Moment, sizes: list[int], further: tuple[int, ...]) -> dict[Component, int]:
    components: dict[Component, int] = {}
    for component, expression, count, *more in moment.alive:
        components[component] = components.get(component, 0) + (count + sum(map(mul, more, further))) * sizes[expression]
    return {component: size_bytes for component, size_bytes in components.items() if size_bytes}


def profile_to_json(profile: Profile) -> str:
    """A profile as one line of JSON, the same for the same profile. What is alive is six columns, which compress well."""
    return json.dumps(
        {
            "schema": PROFILE_SCHEMA, "layers": profile.layers, "period": profile.period, "accumulation": profile.accumulation,
            "generated": profile.generated, "block_bytes": profile.block_bytes, "versions": profile.versions,
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
        layers=held["layers"], period=held["period"], accumulation=held["accumulation"], generated=held["generated"], block_bytes=held["block_bytes"],
        versions=tuple((name, version) for name, version in held["versions"]),
        expressions=tuple(Expression(parts=tuple((size, width, top, bottom) for size, width, top, bottom in parts)) for parts in held["expressions"]),
        moments=tuple(Moment(phase=phase, alive=tuple(zip(*columns, strict=True))) for phase, *columns in held["moments"]),
    )  # fmt: skip


def constant(size_bytes: int) -> Expression:
    """A size that nothing changes."""
    return Expression(parts=((ONE, ONE, size_bytes, 1),))

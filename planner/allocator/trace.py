"""A trace: the allocations of a training step, each with the events at which it is made and freed."""

from collections.abc import Iterable
from functools import cached_property

from msgspec import Struct

from planner.quantities import Component, Phase, PhaseMemory

STAYS = 2**62  # the value of `died` for an allocation that is not freed within the trace


class Allocation(Struct, frozen=True, kw_only=True):
    """One storage of a tensor.

    `born` and `died` are the indices of the trace's events that allocate and free it; all events are counted, from 0.
    `operator` allocated it (`aten.mm.default`), inside `module` (`model.layers.3.mlp`; empty outside of any).
    `accumulated` is the event from which a gradient is complete: sharding may reduce and free it from then on.
    """

    size_bytes: int
    born: int
    died: int
    phase: Phase
    component: Component
    operator: str
    module: str
    accumulated: int = STAYS


class Holding(Struct, frozen=True, kw_only=True):
    """A row of the table of the largest allocations at the peak: equal allocations of all layers, summed."""

    component: Component
    phase: Phase
    module: str
    operator: str
    count: int
    size_bytes: int


class Trace(Struct, frozen=True, kw_only=True, dict=True):
    """All allocations of a step, ordered by `born`. `phase_starts`: the events at which phases began, in order."""

    allocations: tuple[Allocation, ...]
    phase_starts: tuple[tuple[int, Phase], ...]
    substitutions: tuple[str, ...] = ()  # names of the kernels that were substituted (probes/dryrun)
    versions: tuple[tuple[str, str], ...] = ()

    @cached_property
    def events(self) -> tuple[tuple[int, int], ...]:
        """The events in order: pairs (index of the allocation, +bytes when it is made or -bytes when it is freed)."""
        found: list[tuple[int, int, int]] = []
        for index, allocation in enumerate(self.allocations):
            found.append((allocation.born, index, allocation.size_bytes))
            if allocation.died < STAYS:
                found.append((allocation.died, index, -allocation.size_bytes))
        found.sort()
        return tuple((index, size_bytes) for _, index, size_bytes in found)

    @cached_property
    def _totals(self) -> list[int]:
        """The bytes that are allocated after each event."""
        total, totals = 0, []
        for _, size_bytes in self.events:
            total += size_bytes
            totals.append(total)
        return totals

    @cached_property
    def peak_bytes(self) -> int:
        """The most bytes that are allocated at once."""
        return max(self._totals, default=0)

    @cached_property
    def peak_event(self) -> int:
        """Index of the event after which most bytes are allocated; the first of equals."""
        return self._totals.index(self.peak_bytes) if self._totals else 0

    @property
    def peak_phase(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.total_bytes).name

    @cached_property
    def phases(self) -> tuple[PhaseMemory, ...]:
        """Return each phase's memory by component, at the event after which the phase has most bytes allocated.

        Only events that allocate count. A phase that occurs in several steps counts once, at its heaviest event.
        """
        return tuple(
            PhaseMemory(name=phase, components=_by_component(self.alive(event)))
            for phase, event in self.heaviest_events.items()
        )

    @cached_property
    def heaviest_events(self) -> dict[Phase, int]:
        """Index of the event of each phase after which most bytes are allocated; the first of equals."""
        heaviest: dict[Phase, tuple[int, int]] = {}
        for event, (index, size_bytes) in enumerate(self.events):
            phase = self.allocations[index].phase
            if size_bytes > 0 and (phase not in heaviest or self._totals[event] > heaviest[phase][0]):
                heaviest[phase] = (self._totals[event], event)
        return {phase: event for phase, (_, event) in heaviest.items()}

    def alive(self, event: int) -> list[Allocation]:
        """Return the allocations that exist right after an event."""
        return [allocation for allocation in self.allocations if allocation.born <= event < allocation.died]

    def holdings_at_peak(self, count: int = 20) -> tuple[Holding, ...]:
        """Return the largest allocations at the peak; those of all layers are summed (`model.layers.*.mlp`)."""
        groups: dict[tuple[Component, Phase, str, str], tuple[int, int]] = {}
        for allocation in self.alive(self.peak_event):
            module = ".".join("*" if part.isdigit() else part for part in allocation.module.split("."))
            key = (allocation.component, allocation.phase, module, allocation.operator)
            number, size_bytes = groups.get(key, (0, 0))
            groups[key] = (number + 1, size_bytes + allocation.size_bytes)
        largest = sorted(groups.items(), key=lambda group: -group[1][1])[:count]
        return tuple(
            Holding(
                component=component, phase=phase, module=module, operator=operator, count=number, size_bytes=size_bytes
            )
            for (component, phase, module, operator), (number, size_bytes) in largest
        )


def _by_component(allocations: Iterable[Allocation]) -> dict[Component, int]:
    components: dict[Component, int] = {}
    for allocation in allocations:
        components[allocation.component] = components.get(allocation.component, 0) + allocation.size_bytes
    return components

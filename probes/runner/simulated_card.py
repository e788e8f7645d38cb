"""The simulated device: a candidate's dry run in an allocator with a card's capacity. Its measurements say `simulated` wherever they go.

The step's allocations are replayed in what the card has left beside what no replay shows: what lies outside PyTorch, and what sharding and a vLLM
engine put in the place of what one process has (planner/allocator/simulation.py). The dry run makes optimizer states first, so that a card too small for
them runs out in the optimizer step. Nothing runs for a time, so there is no speed.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from planner.allocator.caching_allocator import Allocator, AllocatorSettings, Block, OutOfMemory
from planner.allocator.loading import warm_up_bytes
from planner.allocator.simulation import OUTSIDE, STATES, Simulation, without_states
from planner.allocator.trace import STAYS, Trace
from planner.candidate import SHARDED, Candidate
from planner.errors import NothingFits, PlanError
from planner.estimate import estimate
from planner.gpus.cluster import Cluster, Gpu
from planner.measurements.measurement import Measurement, Outcome, PhasePeak, RankMemory, Shortage
from planner.quantities import Component, Phase, PhaseMemory
from planner.units import format_size
from probes.dryrun.simulate import simulate, ways_on

Components = dict[Component, int]
# What PyTorch's allocator does not count, and what is no tensor of the trainer (planner/quantities.py).
NOT_RESERVED: frozenset[Component] = frozenset({"runtime"})
NOT_ALLOCATED: frozenset[Component] = frozenset({"runtime", "engine", "fragmentation"})
SLACK: frozenset[Component] = frozenset({"fragmentation"})  # the replay shows its own


def simulated_probe(candidate: Candidate, cluster: Cluster) -> Measurement:
    """The first training GPU of a candidate, simulated; all are alike. Never raises for what the candidate asks."""
    started = time.monotonic()
    try:
        found = on_card(simulate(estimate(candidate, cluster), ways_on(cluster.gpu)), cluster.gpu)
    except NothingFits as error:  # a vLLM engine that would refuse to start does not say how much it lacks
        found = _without_memory(candidate, "out_of_memory", str(error))
    except PlanError as error:
        found = _without_memory(candidate, "crashed", str(error))
    return replace(found, wall_seconds=time.monotonic() - started)


def on_card(simulation: Simulation, gpu: Gpu) -> Measurement:
    """What a simulation does to a card."""
    card_bytes = gpu.free_bytes
    card = _Card(
        simulation=simulation,
        card_bytes=card_bytes,
        warm_up_bytes=warm_up_bytes(simulation.trace, simulation.candidate, gpu),
    )
    before, run, after = card.composed_shortage("load"), card.run(), card.composed_shortage("")
    shortage = before or run.shortage or after
    peaks = tuple(card.peaks({} if before else run.peaks, shortage))
    statistics = {
        "allocated_bytes.all.peak": max(peak.allocated_bytes for peak in peaks),
        "reserved_bytes.all.peak": max(peak.reserved_bytes for peak in peaks),
        "num_ooms": int(shortage is not None),
    }
    rank = RankMemory(
        rank=0, phases=peaks, state_bytes=card.state_bytes, capacity_bytes=card_bytes, allocator=statistics
    )
    message = (
        ""
        if shortage is None
        else f"a dry run needs at least {format_size(shortage.over_bytes)} more in the {shortage.phase.replace('_', ' ')}"
    )
    found = _without_memory(simulation.candidate, "fits" if shortage is None else "out_of_memory", message)
    return replace(found, ranks=(rank,), shortage=shortage, versions=dict(simulation.trace.versions))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """The traced phases, up to where the card ran out."""

    peaks: dict[Phase, PhasePeak]
    shortage: Shortage | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Card:
    """A simulation on a card. A phase of it is traced, with something of the estimate around it, or wholly the estimate's."""

    simulation: Simulation
    card_bytes: int
    warm_up_bytes: int = 0  # planner/allocator/loading.py

    @property
    def sharded(self) -> bool:
        return self.simulation.candidate.sharding in SHARDED

    @property
    def composed(self) -> dict[Phase, PhaseMemory]:
        """The phases that are the estimate's own."""
        own = {id(phase) for phase in self.simulation.estimated}
        return {phase.name: phase for phase in self.simulation.simulated if id(phase) in own}

    @property
    def around(self) -> dict[Phase, Components]:
        """What is on the card in each traced phase beside what the trace has."""
        kept, composed = (OUTSIDE | STATES if self.sharded else OUTSIDE) - SLACK, self.composed
        traced = (phase for phase in self.simulation.simulated if phase.name not in composed)
        return {phase.name: {name: size for name, size in phase.components.items() if name in kept} for phase in traced}

    @property
    def trace(self) -> Trace:
        """What is replayed: where states are sharded without them, and without the phases that the estimate has."""
        trace, composed = self.simulation.trace, self.composed
        trace = without_states(trace) if self.sharded else trace
        return replace(trace, allocations=tuple(each for each in trace.allocations if each.phase not in composed))

    @property
    def state_bytes(self) -> Components:
        """What stays between steps."""
        if self.sharded:
            forward = next(phase for phase in self.simulation.estimated if phase.name == "forward")
            return {name: size for name, size in forward.components.items() if name in STATES and size}
        found: Components = {}
        for allocation in self.simulation.trace.allocations:
            if allocation.component in STATES and allocation.died == STAYS:
                found[allocation.component] = found.get(allocation.component, 0) + allocation.size_bytes
        return found

    def run(self) -> _Run:
        """The trace's allocations one after the other, in what each phase leaves to them."""
        trace, around, peaks = self.trace, self.around, dict[Phase, PhasePeak]()
        allocator = Allocator(0, AllocatorSettings(expandable_segments=self.simulation.candidate.expandable_segments))
        live: dict[int, Block] = {}
        if self.warm_up_bytes and (block := _allocated(allocator, self.warm_up_bytes, self.card_bytes)) is not None:
            allocator.free(block)
        for event, (index, size_bytes) in enumerate(trace.events):
            if size_bytes < 0:
                allocator.free(live.pop(index))
                continue
            phase = trace.allocations[index].phase
            block = _allocated(allocator, size_bytes, max(self.card_bytes - sum(around[phase].values()), 0))
            if block is None:
                return _Run(
                    peaks=peaks, shortage=_shortage(phase, allocator.out_of_memory(event, size_bytes), around[phase])
                )
            live[index] = block
            peaks[phase] = _heavier(
                peaks.get(phase), _peak(phase, allocator.allocated_bytes, allocator.reserved_bytes, around[phase])
            )
        return _Run(peaks=peaks, shortage=None)

    def composed_shortage(self, name: Phase | Literal[""]) -> Shortage | None:
        """The first of the estimate's own phases that the card has no room for; of that name, where one is given."""
        for phase in self.composed.values():
            over_bytes = phase.total_bytes - self.card_bytes
            if over_bytes > 0 and name in ("", phase.name):
                held = _peak(phase.name, 0, 0, phase.components)
                return Shortage(
                    rank=0, phase=phase.name, tried_bytes=over_bytes, free_bytes=0, allocated_bytes=max(held.allocated_bytes - over_bytes, 0),
                    reserved_bytes=max(held.reserved_bytes - over_bytes, 0),
                )  # fmt: skip
        return None

    def peaks(self, traced: dict[Phase, PhasePeak], shortage: Shortage | None) -> Iterator[PhasePeak]:
        """All phases that were reached, in their order."""
        for phase in self.simulation.simulated:
            if phase.name in traced:
                yield traced[phase.name]
            elif shortage is not None and phase.name == shortage.phase:
                yield _peak(phase.name, shortage.allocated_bytes, shortage.reserved_bytes, {})
            elif phase.name in self.composed and phase.total_bytes <= self.card_bytes:
                yield _peak(phase.name, 0, 0, phase.components)


def _allocated(allocator: Allocator, size_bytes: int, room_bytes: int) -> Block | None:
    """A block where the allocator has so much room now; what others have taken since, it gives back first."""
    allocator.card_bytes = room_bytes
    if allocator.reserved_bytes > room_bytes:
        allocator.empty_cache()
    return allocator.allocate(size_bytes) if allocator.reserved_bytes <= room_bytes else None


def _shortage(phase: Phase, failure: OutOfMemory, around: Components) -> Shortage:
    return Shortage(
        rank=0, phase=phase, tried_bytes=failure.tried_bytes, free_bytes=max(failure.free_bytes, 0),
        allocated_bytes=failure.allocated_bytes + _beside(around, NOT_ALLOCATED),
        reserved_bytes=failure.allocated_bytes + failure.unallocated_bytes + _beside(around, NOT_RESERVED),
    )  # fmt: skip


def _peak(phase: Phase, allocated_bytes: int, reserved_bytes: int, around: Components) -> PhasePeak:
    return PhasePeak(
        name=phase, allocated_bytes=allocated_bytes + _beside(around, NOT_ALLOCATED), reserved_bytes=reserved_bytes + _beside(around, NOT_RESERVED),
        driver_bytes=0, seconds=0.0,
    )  # fmt: skip


def _heavier(before: PhasePeak | None, now: PhasePeak) -> PhasePeak:
    if before is None:
        return now
    allocated, reserved = (
        max(before.allocated_bytes, now.allocated_bytes),
        max(before.reserved_bytes, now.reserved_bytes),
    )
    return replace(now, allocated_bytes=allocated, reserved_bytes=reserved)


def _beside(components: Components, left_out: frozenset[Component]) -> int:
    return sum(size for name, size in components.items() if name not in left_out)


def _without_memory(candidate: Candidate, outcome: Outcome, message: str) -> Measurement:
    return Measurement(
        candidate=candidate, device="simulated", outcome=outcome, ranks=(), shortage=None, step_seconds=0.0, tokens_per_second=0.0, wall_seconds=0.0,
        message=message, log="", versions={},
    )  # fmt: skip

"""The simulated device: replay a candidate's dry run in an allocator with a GPU's capacity.

The allocations of the step are replayed in the memory that the estimate's components leave: those outside
PyTorch, and those of sharding and a vLLM engine (planner/allocator/simulation.py). The dry run creates optimizer states
first, so a GPU too small for them runs out of memory in the optimizer step. Its measurements have the device
"simulated" and no speed.
"""

import time
from collections.abc import Iterator
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from planner.allocator.caching_allocator import Allocator, Block, OutOfMemory
from planner.allocator.loading import warm_up_bytes
from planner.allocator.simulation import STATES, Simulation, beside_trace, rank_trace
from planner.allocator.trace import STAYS, Trace
from planner.candidate import Candidate
from planner.errors import NothingFits, PlanError
from planner.estimation import estimate
from planner.gpus.cluster import Cluster, Gpu
from planner.measurements.measurement import Measurement, Outcome, PhasePeak, RankMemory, Shortage, without_memory
from planner.quantities import Component, Phase, PhaseMemory
from planner.units import format_size
from probes.dryrun.simulate import kernels_of, simulate

Components = dict[Component, int]
# Components that PyTorch's allocator does not reserve, and those that are no tensors of the trainer.
NOT_RESERVED: frozenset[Component] = frozenset({"runtime"})
NOT_ALLOCATED: frozenset[Component] = frozenset({"runtime", "engine", "fragmentation"})
SLACK: frozenset[Component] = frozenset({"fragmentation"})  # replaced by the replay's own


def simulated_probe(candidate: Candidate, cluster: Cluster) -> Measurement:
    """Return the simulated measurement of a candidate's first training GPU; all are alike.

    Settings that a dry run cannot show give the outcome "crashed", with the reason as message; nothing is raised.
    """
    started = time.monotonic()
    try:
        found = on_card(simulate(estimate(candidate, cluster), kernels_of(cluster.gpu)), cluster.gpu)
    except NothingFits as error:  # a vLLM engine that would refuse to start does not say how much it lacks
        found = without_memory(candidate, "simulated", "out_of_memory", str(error))
    except PlanError as error:
        found = without_memory(candidate, "simulated", "crashed", str(error))
    return replace(found, wall_seconds=time.monotonic() - started)


def on_card(simulation: Simulation, gpu: Gpu) -> Measurement:
    """Return the measurement of a simulation on a GPU."""
    card_bytes = gpu.free_bytes
    card = _Card(
        simulation=simulation,
        card_bytes=card_bytes,
        warm_up_bytes=warm_up_bytes(simulation.trace, simulation.candidate, gpu),
    )
    before, run, after = card.estimated_shortage("load"), card.run(), card.estimated_shortage("")
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
    message = ""
    if shortage is not None:
        over, phase = format_size(shortage.over_bytes), shortage.phase.replace("_", " ")
        message = f"a dry run needs at least {over} more in the {phase}"
    outcome: Outcome = "fits" if shortage is None else "out_of_memory"
    found = without_memory(simulation.candidate, "simulated", outcome, message)
    return replace(found, ranks=(rank,), shortage=shortage, versions=dict(simulation.trace.versions))


class _Run(Struct, frozen=True, kw_only=True):
    """The peaks of the replayed phases, up to the one that ran out of memory."""

    peaks: dict[Phase, PhasePeak]
    shortage: Shortage | None


class _Card(Struct, frozen=True, kw_only=True):
    """A simulation on a GPU. Each phase is replayed, beside some estimated components, or wholly estimated."""

    simulation: Simulation
    card_bytes: int
    warm_up_bytes: int = 0  # planner/allocator/loading.py

    @property
    def sharded(self) -> bool:
        return not self.simulation.candidate.scheme_row.whole

    @property
    def estimated_phases(self) -> dict[Phase, PhaseMemory]:
        """The phases that are wholly taken from the estimate."""
        own = {id(phase) for phase in self.simulation.estimated}
        return {phase.name: phase for phase in self.simulation.simulated if id(phase) in own}

    @property
    def other_components(self) -> dict[Phase, Components]:
        """The components on the GPU in each replayed phase that are not in the trace."""
        simulation, estimated = self.simulation, {phase.name: phase for phase in self.simulation.estimated}
        forward = estimated["forward"]
        replayed = (phase.name for phase in simulation.simulated if phase.name not in self.estimated_phases)
        found = {name: beside_trace(simulation.candidate, estimated.get(name, forward), forward) for name in replayed}
        return {
            name: {part: size for part, size in parts.items() if part not in SLACK} for name, parts in found.items()
        }

    @property
    def trace(self) -> Trace:
        """The trace to replay: without sharded states, and without the phases that are wholly estimated."""
        simulation, estimated = self.simulation, self.estimated_phases
        trace = rank_trace(simulation.candidate, simulation.trace, simulation.estimated)
        return replace(trace, allocations=tuple(each for each in trace.allocations if each.phase not in estimated))

    @property
    def state_bytes(self) -> Components:
        """The weights, gradients and optimizer states that exist between steps."""
        if self.sharded:
            forward = next(phase for phase in self.simulation.estimated if phase.name == "forward")
            return {name: size for name, size in forward.components.items() if name in STATES and size}
        found: Components = {}
        for allocation in self.simulation.trace.allocations:
            if allocation.component in STATES and allocation.died == STAYS:
                found[allocation.component] = found.get(allocation.component, 0) + allocation.size_bytes
        return found

    def run(self) -> _Run:
        """Replay the trace, each allocation in the memory that its phase's other components leave."""
        trace, other_components, peaks = self.trace, self.other_components, dict[Phase, PhasePeak]()
        expandable = self.simulation.candidate.expandable_segments
        allocator = Allocator(0, expandable, total_bytes=self.card_bytes)
        live: dict[int, Block] = {}
        if self.warm_up_bytes and (block := _allocate(allocator, self.warm_up_bytes, self.card_bytes)) is not None:
            allocator.free(block)
        for event, (index, size_bytes) in enumerate(trace.events):
            if size_bytes < 0:
                allocator.free(live.pop(index))
                continue
            phase = trace.allocations[index].phase
            block = _allocate(allocator, size_bytes, max(self.card_bytes - sum(other_components[phase].values()), 0))
            if block is None:
                return _Run(
                    peaks=peaks,
                    shortage=_shortage(phase, allocator.out_of_memory(event, size_bytes), other_components[phase]),
                )
            live[index] = block
            peaks[phase] = _heavier(
                peaks.get(phase),
                _peak(phase, allocator.allocated_bytes, allocator.reserved_bytes, other_components[phase]),
            )
        return _Run(peaks=peaks, shortage=None)

    def estimated_shortage(self, name: Phase | Literal[""]) -> Shortage | None:
        """Return the shortage in the first wholly estimated phase that exceeds the GPU, if any.

        With a name, only the phase of that name is checked.
        """
        for phase in self.estimated_phases.values():
            over_bytes = phase.total_bytes - self.card_bytes
            if over_bytes > 0 and name in ("", phase.name):
                peak = _peak(phase.name, 0, 0, phase.components)
                return Shortage(
                    rank=0,
                    phase=phase.name,
                    tried_bytes=over_bytes,
                    free_bytes=0,
                    allocated_bytes=max(peak.allocated_bytes - over_bytes, 0),
                    reserved_bytes=max(peak.reserved_bytes - over_bytes, 0),
                )
        return None

    def peaks(self, replayed: dict[Phase, PhasePeak], shortage: Shortage | None) -> Iterator[PhasePeak]:
        """Yield the peaks of all phases that were reached, in order."""
        for phase in self.simulation.simulated:
            if phase.name in replayed:
                yield replayed[phase.name]
            elif shortage is not None and phase.name == shortage.phase:
                yield _peak(phase.name, shortage.allocated_bytes, shortage.reserved_bytes, {})
            elif phase.name in self.estimated_phases and phase.total_bytes <= self.card_bytes:
                yield _peak(phase.name, 0, 0, phase.components)


def _allocate(allocator: Allocator, size_bytes: int, room_bytes: int) -> Block | None:
    """Allocate a block while the allocator may reserve `room_bytes`; None if it does not fit.

    Cached segments are freed first if other components have grown into them.
    """
    allocator.card_bytes = room_bytes
    if allocator.reserved_bytes > room_bytes:
        allocator.empty_cache()
    return allocator.allocate(size_bytes) if allocator.reserved_bytes <= room_bytes else None


def _shortage(phase: Phase, failure: OutOfMemory, other_components: Components) -> Shortage:
    return Shortage(
        rank=0,
        phase=phase,
        tried_bytes=failure.tried_bytes,
        free_bytes=max(failure.free_bytes, 0),
        allocated_bytes=failure.allocated_bytes + _sum_without(other_components, NOT_ALLOCATED),
        reserved_bytes=failure.allocated_bytes
        + failure.unallocated_bytes
        + _sum_without(other_components, NOT_RESERVED),
    )


def _peak(phase: Phase, allocated_bytes: int, reserved_bytes: int, other_components: Components) -> PhasePeak:
    return PhasePeak(
        name=phase,
        allocated_bytes=allocated_bytes + _sum_without(other_components, NOT_ALLOCATED),
        reserved_bytes=reserved_bytes + _sum_without(other_components, NOT_RESERVED),
        driver_bytes=0,
        seconds=0.0,
    )


def _heavier(before: PhasePeak | None, now: PhasePeak) -> PhasePeak:
    """Return the maximum of two peaks of a phase, for allocated and for reserved bytes separately."""
    if before is None:
        return now
    allocated, reserved = (
        max(before.allocated_bytes, now.allocated_bytes),
        max(before.reserved_bytes, now.reserved_bytes),
    )
    return replace(now, allocated_bytes=allocated, reserved_bytes=reserved)


def _sum_without(components: Components, left_out: frozenset[Component]) -> int:
    """Return the sum of the components, without those left out."""
    return sum(size for name, size in components.items() if name not in left_out)

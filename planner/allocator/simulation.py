"""One process' trace made into the memory of a rank: what sharding, buckets and an engine change is put in the place of what one process has.

Activations, temporaries and the loss are simulated; what a rank keeps of weights, gradients and optimizer states, what it gathers, what the engine
takes and what lies outside PyTorch are the planner's components (planner/memory/states.py, planner/memory/peak.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from planner.allocator.reserved import Reserved, reserved_of
from planner.allocator.trace import STAYS, Allocation, Trace
from planner.candidate import SHARDED, Candidate
from planner.gpus.cluster import Gpu
from planner.quantities import Component, Estimate, GpuMemory, Phase, PhaseMemory

Components = dict[Component, int]
# What sharding cuts: of a trace's step these are taken out, of the rank's estimate put in.
STATES: frozenset[Component] = frozenset({"weights", "adapters", "gradients", "optimizer_states"})
# What no single process has in its trace.
OUTSIDE: frozenset[Component] = frozenset({"communication", "engine", "runtime", "fragmentation"})
# Phases of a rank that one process does not go through in the same way: the sharded optimizer's own step, and what the engine does.
OF_THE_RANK: tuple[Phase, ...] = ("load", "optimizer_step", "save")
OF_THE_ENGINE: tuple[Phase, ...] = ("weight_sync", "rollout")


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """A dry run's answer for one GPU of the trainer. `estimated` and `simulated` are the same phases, in order."""

    candidate: Candidate
    trace: Trace
    estimated: tuple[PhaseMemory, ...]
    simulated: tuple[PhaseMemory, ...]
    composed: bool  # whether the planner's components stand in for sharding or an engine
    reserved: Reserved | None = (
        None  # by the allocator; None where it is composed, which has no order in which all is allocated
    )

    @property
    def peak(self) -> PhaseMemory:
        return max(self.simulated, key=lambda phase: phase.total_bytes)

    @property
    def estimated_peak(self) -> PhaseMemory:
        return max(self.estimated, key=lambda phase: phase.total_bytes)

    @property
    def difference(self) -> float:
        """Of the estimated peak from the simulated one, as a share of it; below 0 the estimate is too small."""
        return self.estimated_peak.total_bytes / self.peak.total_bytes - 1


def exceeded_by(simulation: Simulation, answer: Estimate) -> float:
    """The share by which a dry run exceeds an estimate's peak, if it exceeds the interval's upper end or the card; else 0.

    Compares training GPUs: the simulated peak with `answer.gpus[0]`.
    """
    train, peak_bytes = answer.gpus[0], simulation.peak.total_bytes
    if peak_bytes <= min(train.interval_bytes[1], train.capacity_bytes):
        return 0.0
    return max(peak_bytes / train.peak_bytes - 1, 0.0)


def single_process(candidate: Candidate) -> Candidate:
    """One process whose layers compute as a rank's do: gathered weights have 16 bits, under DeepSpeed and FSDP2's mixed precision adapters too.

    Source: deepspeed 0.19.8, runtime/engine.py (`module.bfloat16()`); accelerate 1.15, utils/fsdp_utils.py (`MixedPrecisionPolicy`).
    """
    one = replace(
        candidate, sharding="none", num_processes=1, num_nodes=1, offload_optimizer=False, offload_param=False
    )
    if candidate.sharding not in SHARDED or candidate.precision == "no":
        return one
    return replace(one, dtype="float16" if candidate.precision == "fp16" else "bfloat16", autocast_adapter_dtype=False)


def compose(candidate: Candidate, trace: Trace, estimated: GpuMemory) -> Simulation:
    """The simulated phases of a training GPU beside its estimated ones."""
    sharded = candidate.sharding in SHARDED
    return Simulation(
        candidate=candidate,
        trace=trace,
        estimated=estimated.phases,
        simulated=composed(candidate, (without_states(trace) if sharded else trace).phases, estimated.phases),
        composed=sharded or candidate.vllm != "off",
    )


def with_reserved(simulation: Simulation, gpu: Gpu) -> Simulation:
    """The simulation with what its step reserves on a card, and the step's own fragmentation in the place of the estimated one."""
    if simulation.composed:
        return simulation
    outside = max(
        phase.components.get("runtime", 0) + phase.components.get("communication", 0) for phase in simulation.simulated
    )
    reserved = reserved_of(simulation.trace, simulation.candidate, gpu, outside)
    phases = (
        PhaseMemory(name=phase.name, components={**phase.components, "fragmentation": reserved.slack[phase.name]})
        if phase.name in reserved.slack
        else phase
        for phase in simulation.simulated
    )
    return replace(simulation, simulated=tuple(phases), reserved=reserved)


def composed(
    candidate: Candidate, traced: tuple[PhaseMemory, ...], estimated: tuple[PhaseMemory, ...]
) -> tuple[PhaseMemory, ...]:
    """The phases of one process as a rank has them. `traced` are without states where the candidate shards them."""
    return tuple(
        _phases(
            candidate, {phase.name: phase.components for phase in traced}, {phase.name: phase for phase in estimated}
        )
    )


def _phases(
    candidate: Candidate, traced: dict[Phase, Components], rows: dict[Phase, PhaseMemory]
) -> Iterator[PhaseMemory]:
    sharded = candidate.sharding in SHARDED
    replaced = (*(OF_THE_RANK if sharded else ()), *(OF_THE_ENGINE if candidate.vllm != "off" else ()))
    kept = OUTSIDE | STATES if sharded else OUTSIDE
    usual = rows["forward"]
    for name in (*rows, *(name for name in traced if name not in rows)):
        if name in replaced or name not in traced:
            if name in rows:
                yield rows[name]
            continue
        around = {component: size for component, size in rows.get(name, usual).components.items() if component in kept}
        yield PhaseMemory(name=name, components={**traced[name], **around})


def without_states(trace: Trace) -> Trace:
    """The trace without weights, adapters and optimizer states, and with gradients as temporaries.

    A parameter's gradient is there until it is whole: only then it is reduced to the rank that keeps it.
    """
    events: list[tuple[int, int, int]] = []
    for index, allocation in enumerate(trace.allocations):
        gradient = allocation.component == "gradients"
        if allocation.component in STATES and not gradient:
            continue
        died = min(allocation.died, allocation.accumulated) if gradient else allocation.died
        events.append((allocation.born, index, 1))
        if died < STAYS:
            events.append((died, index, -1))
    times: dict[int, list[int]] = {}
    for time, (_, index, sign) in enumerate(sorted(events)):
        times.setdefault(index, [time, STAYS])[0 if sign > 0 else 1] = time
    allocations = tuple(_moved(trace.allocations[index], born, died) for index, (born, died) in times.items())
    return Trace(allocations=allocations, phase_starts=(), substitutions=trace.substitutions, versions=trace.versions)


def _moved(made: Allocation, born: int, died: int) -> Allocation:
    """An allocation at other times; a gradient is temporary. `dataclasses.replace` takes several times as long."""
    component: Component = "transients" if made.component == "gradients" else made.component
    return Allocation(
        size_bytes=made.size_bytes, born=born, died=died, phase=made.phase, component=component, operator=made.operator, module=made.module,
        accumulated=made.accumulated,
    )  # fmt: skip

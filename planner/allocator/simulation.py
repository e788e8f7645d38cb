"""Compose a single process's trace into the memory of one rank, with sharding and a vLLM engine.

Activations, temporaries and the loss come from the trace. The rank's shard of weights, gradients and optimizer states,
its gathered parameters and buckets, the engine and the memory outside PyTorch come from the estimate
(planner/memory/states.py, planner/memory/step.py).
"""

from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from planner.allocator.reserved import Reserved, reserved_of
from planner.allocator.trace import STAYS, Allocation, Trace
from planner.candidate import Candidate
from planner.gpus.cluster import Gpu
from planner.quantities import Component, Estimate, GpuMemory, Phase, PhaseMemory

Components = dict[Component, int]
# Components that sharding divides among the ranks: taken from the estimate instead of the trace.
STATES: frozenset[Component] = frozenset({"weights", "adapters", "gradients", "optimizer_states"})
# Components that are never in a trace: taken from the estimate.
OUTSIDE: frozenset[Component] = frozenset({"communication", "engine", "runtime", "fragmentation"})
# Phases taken from the estimate as a whole, since a single process does other things in them: with sharding (the
# sharded optimizer has a step of its own), and with a vLLM engine.
SHARDED_PHASES: tuple[Phase, ...] = ("load", "optimizer_step", "save")
ENGINE_PHASES: tuple[Phase, ...] = ("weight_sync", "rollout")


class Simulation(Struct, frozen=True, kw_only=True):
    """The memory of one training GPU, by a dry run and by the estimate: the same phases in the same order."""

    candidate: Candidate
    trace: Trace
    estimated: tuple[PhaseMemory, ...]
    simulated: tuple[PhaseMemory, ...]
    composed: bool  # parts come from the estimate, because of sharding or an engine
    # What the allocator reserves; None if `composed`: parts that come from the estimate have no order of allocations.
    reserved: Reserved | None = None

    @property
    def peak(self) -> PhaseMemory:
        return max(self.simulated, key=lambda phase: phase.total_bytes)

    @property
    def estimated_peak(self) -> PhaseMemory:
        return max(self.estimated, key=lambda phase: phase.total_bytes)

    @property
    def difference(self) -> float:
        """Return the error of the estimated peak as a share of the simulated one; negative if it is too small."""
        return self.estimated_peak.total_bytes / self.peak.total_bytes - 1


def exceeded_by(simulation: Simulation, answer: Estimate) -> float:
    """Return the share by which the simulated peak exceeds the estimated one; 0 if it is within the interval and the
    GPU.

    Compares training GPUs: the simulated peak with `answer.gpus[0]`.
    """
    train, peak_bytes = answer.gpus[0], simulation.peak.total_bytes
    if peak_bytes <= min(train.interval_bytes[1], train.capacity_bytes):
        return 0.0
    return max(peak_bytes / train.peak_bytes - 1, 0.0)


def single_process(candidate: Candidate) -> Candidate:
    """Return the candidate as one process without sharding whose layers compute as those of a rank do.

    Sharded ranks compute with gathered weights in 16 bits, LoRA adapters included (DeepSpeed, FSDP2's mixed precision).
    Source: deepspeed 0.19.8, runtime/engine.py (`module.bfloat16()`); accelerate 1.15, utils/fsdp_utils.py
    (`MixedPrecisionPolicy`).
    """
    one = replace(
        candidate, sharding="none", num_processes=1, num_nodes=1, offload_optimizer=False, offload_param=False
    )
    if candidate.scheme_row.whole or candidate.precision == "no":
        return one
    return replace(one, dtype="float16" if candidate.precision == "fp16" else "bfloat16", autocast_adapter_dtype=False)


def compose(candidate: Candidate, trace: Trace, estimated: GpuMemory) -> Simulation:
    """Compose the phases of a training GPU from a trace and its estimate."""
    return Simulation(
        candidate=candidate,
        trace=trace,
        estimated=estimated.phases,
        simulated=composed_phases(candidate, rank_trace(candidate, trace, estimated.phases).phases, estimated.phases),
        composed=not candidate.scheme_row.whole or candidate.vllm != "off",
    )


def with_reserved(simulation: Simulation, gpu: Gpu) -> Simulation:
    """Add what the allocator reserves on a GPU to a simulation; its slack replaces the estimated fragmentation.

    A composed simulation is returned unchanged.
    """
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


def composed_phases(
    candidate: Candidate, traced: tuple[PhaseMemory, ...], estimated: tuple[PhaseMemory, ...]
) -> tuple[PhaseMemory, ...]:
    """Return a rank's phases from those of a trace and of the estimate.

    `traced`: of `rank_trace`.
    """
    return tuple(
        _phases(
            candidate, {phase.name: phase.components for phase in traced}, {phase.name: phase for phase in estimated}
        )
    )


def _phases(
    candidate: Candidate, traced: dict[Phase, Components], rows: dict[Phase, PhaseMemory]
) -> Iterator[PhaseMemory]:
    """Yield a rank's phases. A phase comes from the trace with some estimated components, or wholly from the estimate.

    A phase that only the trace has gets the estimated components of the forward phase.
    """
    sharded = not candidate.scheme_row.whole
    replaced = (*(SHARDED_PHASES if sharded else ()), *(ENGINE_PHASES if candidate.vllm != "off" else ()))
    forward = rows["forward"]
    for name in (*rows, *(name for name in traced if name not in rows)):
        if name in replaced or name not in traced:
            if name in rows:
                yield rows[name]
            continue
        parts = (traced[name], beside_trace(candidate, rows.get(name, forward), forward))
        found = {component: sum(part.get(component, 0) for part in parts) for part in parts for component in part}
        yield PhaseMemory(name=name, components=found)


def beside_trace(candidate: Candidate, phase: PhaseMemory, forward: PhaseMemory) -> Components:
    """Return the components of an estimated phase that `rank_trace` leaves out; `forward`: the forward phase.

    ZeRO-2's gradients are in the trace from where the backward pass allocates them: only earlier ones are returned.
    """
    kept = OUTSIDE | STATES if not candidate.scheme_row.whole else OUTSIDE
    found = {component: size for component, size in phase.components.items() if component in kept}
    if candidate.sharding == "zero2":
        found["gradients"] = forward.components.get("gradients", 0)
    return {component: size for component, size in found.items() if size}


def rank_trace(candidate: Candidate, trace: Trace, estimated: tuple[PhaseMemory, ...]) -> Trace:
    """Return the part of a single process's trace that one rank has, too; `estimated`: the phases of its estimate."""
    if candidate.scheme_row.whole:
        return trace
    return without_states(trace, late_gradient_bytes(candidate, estimated))


def late_gradient_bytes(candidate: Candidate, estimated: tuple[PhaseMemory, ...]) -> int:
    """Return the bytes of gradients that a rank of ZeRO-2 allocates only at the first reduction of a backward pass.

    Source: deepspeed 0.19.8, runtime/zero/stage_1_and_2.py, `copy_grads_in_partition`.
    """
    if candidate.sharding != "zero2":
        return 0
    forward, backward = (
        next((phase.components.get("gradients", 0) for phase in estimated if phase.name == name), 0)
        for name in ("forward", "backward")
    )
    return backward - forward


def without_states(trace: Trace, late_gradients: int = 0) -> Trace:
    """Return the trace without weights, adapters and optimizer states, and with gradients as temporaries.

    With sharding a gradient is freed as soon as it is complete: it is reduced to the rank that keeps it.
    `late_gradients`: bytes of what the rank keeps of them, from when the first one is complete.
    """
    events: list[tuple[int, int, int]] = []
    found = [_not_kept(allocation) for allocation in trace.allocations]
    if late_gradients:
        first = min(trace.allocations, key=lambda allocation: allocation.accumulated)
        later = (each for each in trace.allocations if each.born > first.accumulated)
        step = min((each.born for each in later if each.phase == "optimizer_step"), default=STAYS)
        found.append(replace(first, size_bytes=late_gradients))
        events += [(first.accumulated, len(found) - 1, 1), (step, len(found) - 1, -1)]
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
    allocations = tuple(replace(found[index], born=born, died=died) for index, (born, died) in times.items())
    return Trace(allocations=allocations, phase_starts=(), substitutions=trace.substitutions, versions=trace.versions)


def _not_kept(allocation: Allocation) -> Allocation:
    """Return an allocation, as a temporary if it is a gradient: the rank that computes it does not keep it."""
    return replace(allocation, component="transients") if allocation.component == "gradients" else allocation

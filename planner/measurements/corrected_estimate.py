"""A measurement put over an estimate: the answer on the measured rung, and a plan corrected by what its probes saw.

A measured phase keeps the components that the lower rung has for it, and its own total:

    total = what the driver counted; where it counts nothing (cpu, simulated): reserved + runtime, or allocated + fragmentation + runtime, these
            as the lower rung has them;  fragmentation = reserved - allocated
    what is left over is `unexplained`; where less was measured than expected it is missing, and the least sure components are cut, in order

Nothing is scaled. `simulated` probes give a simulated answer, never a measured one.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

from planner.confidence import fit_probability, quantile, sigma_bytes
from planner.errors import PlanError
from planner.estimate import RISK
from planner.measurements.measurement import DeviceName, Measurement, PhasePeak, RankMemory, Shortage
from planner.memory.runtime import SLACK_THOUSANDTHS
from planner.quantities import Component, Estimate, GpuMemory, Phase, PhaseDifference, PhaseMemory, Throughput
from planner.units import MIB, format_gib

# How far apart the peaks of two runs of one candidate may be: the last segment of the allocator's small and of its large pool, which another
# order of allocations fills or not. Source: pytorch, c10/cuda/CUDACachingAllocator.cpp `kSmallBuffer`, `kLargeBuffer` (2 MiB and 20 MiB). Derived,
# not yet measured on a GPU.
RUN_TO_RUN_BYTES = 22 * MIB

# What a probe without a driver does not see; a simulated card's allocator is replayed, so its fragmentation is seen.
UNSEEN: dict[DeviceName, tuple[Component, ...]] = {
    "cuda": (),
    "cpu": ("fragmentation", "runtime"),
    "simulated": ("runtime",),
}
# Where less was measured than expected: what is cut first is what an estimate is least sure of (planner/confidence.py), states last.
LEAST_SURE_FIRST: tuple[Component, ...] = (
    "transients", "loss", "activations", "attention_scores", "autocast_copies", "runtime", "communication", "kv_cache", "engine", "optimizer_states",
    "gradients", "adapters", "weights", "unexplained", "fragmentation",
)  # fmt: skip
# What a phase holds that the lower rung does not have: it stays through the whole run.
STAYS: tuple[Component, ...] = ("weights", "adapters", "optimizer_states", "runtime")
DEVICE_WORDS = {"cuda": "on the GPU", "cpu": "on the CPU", "simulated": "in a simulated card"}
CPU_REASON = "the probe ran on the CPU, where tensors' bytes are counted: what CUDA takes besides ({}) and the speed are still {}"


def measured_estimate(estimate: Estimate, measurement: Measurement, risk: float = RISK) -> Estimate:
    """The answer for a candidate with its training GPUs as a probe saw them; a vLLM server's cards stay as they were expected.

    It has the phases that the probe tells apart: what happens in another one is within these. Of a candidate that ran out of memory it has those
    that were reached, the last with what it would have needed at least.

    Raises:
        PlanError: the probe says nothing about memory on such a card.
    """
    train, *others = estimate.gpus
    if said := silence(estimate, measurement):
        raise PlanError(said)
    order = in_order(train)
    phases = tuple(sorted(_phases(train, measurement), key=lambda phase: order.index(phase.name)))
    heaviest = max(phases, key=lambda phase: phase.total_bytes)
    gpu = replace(train, phases=phases, interval_bytes=_interval(train, measurement, heaviest, risk))
    ran = measurement.outcome == "fits" and gpu.interval_bytes[1] <= gpu.capacity_bytes
    return replace(
        estimate,
        fits=ran and all(other.interval_bytes[1] <= other.capacity_bytes for other in others),
        fit_probability=_probability(gpu, measurement, ran),
        evidence=measurement.evidence,
        device=measurement.device,
        gpus=(gpu, *others),
        throughput=_throughput(estimate.throughput, measurement),
        reasons=(*estimate.reasons, *_reasons(estimate, gpu, measurement)),
        versions=tuple(sorted(measurement.versions.items())),
    )


def silence(estimate: Estimate, measurement: Measurement) -> str:
    """Why a measurement says nothing about an answer's card; empty where it says something."""
    gpu = estimate.gpus[0]
    if not measurement.decided:
        return f"The probe says nothing about memory ({measurement.outcome.replace('_', ' ')}): {measurement.message}"
    if measurement.outcome == "fits" and not any(rank.phases for rank in measurement.ranks):
        return "The probe ran to its end and has measured no process."
    if measurement.outcome == "out_of_memory" and lacking_bytes(gpu, measurement) <= gpu.capacity_bytes:
        return f"The probe ran out of memory on a smaller card than one of {format_gib(gpu.capacity_bytes, 1)}."
    return ""


def differences(estimate: Estimate, measurement: Measurement) -> tuple[PhaseDifference, ...]:
    """The phases that the estimate and the measurement both have; those of a run that ended early are no full ones. On the CPU, of tensors alone."""
    if measurement.outcome != "fits":
        return ()
    expected = {phase.name: phase for phase in estimate.gpus[0].phases}
    order = in_order(estimate.gpus[0])
    peaks = sorted(heaviest_rank(measurement).phases, key=lambda peak: order.index(peak.name))
    return tuple(_difference(peak, expected[peak.name], measurement) for peak in peaks if peak.name in expected)


def _difference(peak: PhasePeak, expected: PhaseMemory, measurement: Measurement) -> PhaseDifference:
    if measurement.device == "cpu":
        tensors = expected.total_bytes - _unseen(expected, "cpu").total_bytes
        return PhaseDifference(
            name=peak.name,
            expected_bytes=tensors,
            measured_bytes=peak.allocated_bytes,
            needed_bytes=peak.allocated_bytes,
        )
    return PhaseDifference(
        name=peak.name,
        expected_bytes=expected.total_bytes,
        measured_bytes=_total_bytes(peak, expected),
        needed_bytes=needed_bytes(peak, expected),
    )


def in_order(gpu: GpuMemory) -> tuple[Phase, ...]:
    """Every phase, in the order that was expected."""
    return tuple(dict.fromkeys((*(phase.name for phase in gpu.phases), *get_args(Phase))))


def heaviest_rank(measurement: Measurement) -> RankMemory:
    return max(measurement.ranks, key=lambda rank: rank.peak_bytes)


def needed_bytes(peak: PhasePeak, expected: PhaseMemory) -> int:
    """Bytes that a phase needs on one GPU: tensors, the slack that the allocator cannot give away, and what is outside PyTorch.

    A run with room to spare keeps segments that it would give back before it ran out (results/allocator_slack.md), so of what was reserved beside
    tensors no more counts than the lower rung's fragmentation. Leaves nothing else out.
    """
    slack = expected.components.get("fragmentation", 0)
    engine = _engine_bytes(peak, expected)
    if peak.reserved_bytes:
        slack = min(slack, max(peak.reserved_bytes - peak.allocated_bytes - engine, 0))
    outside = (
        peak.driver_bytes - peak.reserved_bytes if peak.driver_bytes else engine + expected.components.get("runtime", 0)
    )
    return peak.allocated_bytes + slack + outside


def needed_peak_bytes(gpu: GpuMemory, measurement: Measurement) -> int:
    """The most that a phase of the heaviest process needed."""
    return max(needed_bytes(peak, _expected(gpu, peak)) for peak in heaviest_rank(measurement).phases)


def lacking_bytes(gpu: GpuMemory, measurement: Measurement) -> int:
    """How large a card would have to be at least for what did not fit."""
    shortage = shortage_of(gpu, measurement)
    capacities = [
        rank.capacity_bytes for rank in measurement.ranks if rank.rank == shortage.rank and rank.capacity_bytes
    ]
    alike = not capacities or abs(capacities[0] - gpu.capacity_bytes) <= _unnoticed_bytes(gpu)
    return (gpu.capacity_bytes if alike else capacities[0]) + shortage.over_bytes


def shortage_of(gpu: GpuMemory, measurement: Measurement) -> Shortage:
    """Where memory ran out; of a run whose message was lost: in the phase that was expected to be the heaviest."""
    if measurement.shortage is not None:
        return measurement.shortage
    return Shortage(rank=0, phase=gpu.peak_phase, tried_bytes=0, free_bytes=0, allocated_bytes=0, reserved_bytes=0)


# -- phases ------------------------------------------------------------------------------------------------------------


def _phases(train: GpuMemory, measurement: Measurement) -> Iterator[PhaseMemory]:
    shortage = shortage_of(train, measurement) if measurement.outcome == "out_of_memory" else None
    for peak in heaviest_rank(measurement).phases if measurement.ranks else ():
        if shortage is None or peak.name != shortage.phase:
            expected = _expected(train, peak)
            whole = not _larger_card(train, measurement)
            yield _phase(peak, expected, _total_bytes(peak, expected) if whole else needed_bytes(peak, expected))
    if shortage is not None:
        peak = PhasePeak(
            name=shortage.phase,
            allocated_bytes=shortage.allocated_bytes,
            reserved_bytes=shortage.reserved_bytes,
            driver_bytes=0,
            seconds=0.0,
        )
        yield _phase(peak, _expected(train, peak), lacking_bytes(train, measurement))


def _phase(peak: PhasePeak, expected: PhaseMemory, total_bytes: int) -> PhaseMemory:
    parts = dict(expected.components)
    if peak.reserved_bytes:
        parts["fragmentation"] = min(
            max(peak.reserved_bytes - peak.allocated_bytes - _engine_bytes(peak, expected), 0), total_bytes
        )
    missing = sum(parts.values()) - total_bytes
    if missing < 0:
        parts["unexplained"] = -missing
    for component in LEAST_SURE_FIRST if missing > 0 else ():
        cut = min(parts.get(component, 0), missing)
        missing -= cut
        parts[component] = parts.get(component, 0) - cut
    return PhaseMemory(name=peak.name, components={name: size for name, size in parts.items() if size})


def _expected(train: GpuMemory, peak: PhasePeak) -> PhaseMemory:
    """What the lower rung has for a phase; where it has no such phase, what stays through the run."""
    found = next((phase for phase in train.phases if phase.name == peak.name), None)
    if found is not None:
        return found
    return PhaseMemory(
        name=peak.name, components={name: size for name, size in train.peak.components.items() if name in STAYS}
    )


def _total_bytes(peak: PhasePeak, expected: PhaseMemory) -> int:
    runtime = expected.components.get("runtime", 0)
    if peak.driver_bytes:
        return peak.driver_bytes
    return (peak.reserved_bytes or peak.allocated_bytes + expected.components.get("fragmentation", 0)) + runtime


def _engine_bytes(peak: PhasePeak, expected: PhaseMemory) -> int:
    """The engine of a simulated card: reserved, and of no tensor (probes/runner/simulated_card.py). A driver counts a real one by itself."""
    return 0 if peak.driver_bytes or not peak.reserved_bytes else expected.components.get("engine", 0)


# -- how sure ----------------------------------------------------------------------------------------------------------


def _larger_card(gpu: GpuMemory, measurement: Measurement) -> bool:
    """Whether the probe had more room than the card has, and so may have kept what it would give back there."""
    return any(rank.capacity_bytes - gpu.capacity_bytes > _unnoticed_bytes(gpu) for rank in measurement.ranks)


def _unnoticed_bytes(gpu: GpuMemory) -> int:
    """Cards of one kind differ by what their drivers keep; less than the allocator's own slack is no other card."""
    return gpu.capacity_bytes * SLACK_THOUSANDTHS // 1000


def _interval(gpu: GpuMemory, measurement: Measurement, heaviest: PhaseMemory, risk: float) -> tuple[int, int]:
    """Around the peak: from run to run, and what was not seen. What ran on such a card stays within it."""
    peak = heaviest.total_bytes
    if measurement.outcome == "out_of_memory":
        return peak, max(peak, gpu.interval_bytes[1])
    reach = RUN_TO_RUN_BYTES
    if measurement.device != "cuda":
        reach = int(quantile(risk) * sigma_bytes(_unseen(heaviest, measurement.device)))
    high = peak + reach
    ran_here = measurement.device == "cuda" and not _larger_card(gpu, measurement)
    return max(peak - reach, 0), max(peak, min(high, gpu.capacity_bytes)) if ran_here else high


def _unseen(phase: PhaseMemory, device: DeviceName) -> PhaseMemory:
    return PhaseMemory(
        name=phase.name, components={name: size for name, size in phase.components.items() if name in UNSEEN[device]}
    )


def _probability(gpu: GpuMemory, measurement: Measurement, ran: bool) -> float:
    """1 or 0 for what ran on the GPU or ran out there; elsewhere what was not seen decides."""
    if measurement.device == "cuda" or measurement.outcome == "out_of_memory":
        return float(ran)
    unseen = _unseen(gpu.peak, measurement.device)
    return fit_probability(unseen, gpu.capacity_bytes - (gpu.peak_bytes - unseen.total_bytes))


def _throughput(expected: Throughput, measurement: Measurement) -> Throughput:
    """As measured on GPUs; a CPU's or a simulated card's speed says nothing about theirs."""
    if measurement.device != "cuda" or measurement.outcome != "fits" or not measurement.step_seconds:
        return expected
    phases = heaviest_rank(measurement).phases
    return Throughput(
        tokens_per_second=measurement.tokens_per_second,
        step_seconds=measurement.step_seconds,
        seconds={peak.name: peak.seconds for peak in phases if peak.seconds},
        evidence="measured",
    )


def _reasons(estimate: Estimate, gpu: GpuMemory, measurement: Measurement) -> Iterator[str]:
    """What the figures are not."""
    if measurement.device == "cpu":
        yield CPU_REASON.format(
            format_gib(sum(gpu.peak.components.get(name, 0) for name in UNSEEN["cpu"]), 1), estimate.evidence
        )
    if measurement.outcome == "out_of_memory":
        shortage = shortage_of(estimate.gpus[0], measurement)
        where = f"{DEVICE_WORDS[measurement.device]} in the {shortage.phase.replace('_', ' ')}"
        yield f"it ran out of memory {where}, {format_gib(shortage.over_bytes, 2)} short at least; phases that it did not reach are not listed"
    if len(estimate.gpus) > 1:
        yield f"the vLLM server's cards are still {estimate.evidence}"
    if measurement.outcome == "fits" and _larger_card(gpu, measurement):
        yield "the probe had a larger card: what its allocator kept to spare is left out"

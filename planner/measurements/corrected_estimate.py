"""An estimate corrected by a measurement of its candidate.

A measured phase has its own total and the components of the estimate for that phase:

    total on cuda, emulated = the driver's figure
    total on cpu       = allocated + fragmentation + runtime
    fragmentation      = reserved - allocated, if the device reserves
    unexplained        = total - sum of the components, if it is above 0

Fragmentation and runtime on CPUs are the estimate's. If less was measured than the components sum up to, components are
cut in the order of `LEAST_SURE_FIRST`. Nothing is scaled.
Probes of emulated cards give such an answer, never a measured one: the CUDA context, NCCL's memory and the order in
which the memory of other streams becomes free are assumed there.
"""

from collections.abc import Iterator, Sequence
from typing import get_args

from msgspec.structs import replace

from planner.confidence import EDGE_RISK, fit_probability_of, interval_bytes, margin_units, run_probability
from planner.errors import PlanError
from planner.measurements.measurement import Measurement, PhasePeak, RankMemory, Shortage
from planner.memory.runtime import SLACK_THOUSANDTHS
from planner.quantities import (
    DEFAULT_RISK,
    Component,
    Estimate,
    GpuMemory,
    Note,
    Phase,
    PhaseDifference,
    PhaseMemory,
    Throughput,
)
from planner.units import MIB, format_gib

# Largest difference of the peaks of two runs of one candidate: the last segment of the allocator's small and of its
# large pool, which another order of allocations fills or not. Source: pytorch, c10/cuda/CUDACachingAllocator.cpp
# `kSmallBuffer`, `kLargeBuffer` (2 MiB and 20 MiB). Derived, not yet measured on a GPU.
RUN_TO_RUN_BYTES = 22 * MIB

# Components that a CPU does not have.
NOT_ON_A_CPU: tuple[Component, ...] = ("fragmentation", "runtime")
NOT_COMPARED_ON_A_CPU: frozenset[Phase] = frozenset({"load"})
# The order in which components are cut: those that estimates are least sure of first (planner/confidence.py).
LEAST_SURE_FIRST: tuple[Component, ...] = (
    "transients",
    "loss",
    "activations",
    "attention_scores",
    "autocast_copies",
    "runtime",
    "communication",
    "kv_cache",
    "engine",
    "optimizer_states",
    "gradients",
    "adapters",
    "weights",
    "unexplained",
    "fragmentation",
)
# Components of a measured phase that the estimate does not have: they stay through the whole run.
STAYS: tuple[Component, ...] = ("weights", "adapters", "optimizer_states", "runtime")


def correct_estimate(estimate: Estimate, measurement: Measurement, risk: float = DEFAULT_RISK) -> Estimate:
    """Return an estimate with the memory of its training GPUs and its speed as measured.

    The cards of a vLLM server keep their estimate. The phases are those that the probe distinguishes; the memory of any
    other phase is within these. A candidate that ran out of memory has the phases that it reached; the last of them has
    the memory that it would have needed at least. A candidate that ran on an emulated card within its size is tight at
    least, however likely what emulation does not see is to break it: a probe that ran is an answer.

    Raises:
        PlanError: the probe does not decide whether the candidate fits such a card.
    """
    train, *others = estimate.gpus
    if reason := why_undecided(estimate, measurement):
        raise PlanError(reason)
    order = phase_order(train)
    phases = tuple(sorted(_phases(train, measurement), key=lambda phase: order.index(phase.name)))
    heaviest = max(phases, key=lambda phase: phase.total_bytes)
    gpu = replace(train, phases=phases, interval_bytes=_interval(train, measurement, heaviest, risk))
    ran = measurement.outcome == "fits" and gpu.interval_bytes[1] <= gpu.capacity_bytes
    others_fit = all(other.interval_bytes[1] <= other.capacity_bytes for other in others)
    host_fits = estimate.host_over_bytes <= 0
    fits = ran and others_fit and host_fits and not estimate.host_tight
    probability = _probability(train, others, measurement, ran) if host_fits else 0.0
    within = host_fits and measurement.outcome == "fits" and measurement.evidence == "emulated"
    held = within and heaviest.total_bytes <= gpu.capacity_bytes
    return replace(
        estimate,
        fits=fits,
        tight=not fits and others_fit and (held or probability >= 1 - EDGE_RISK),
        fit_probability=probability,
        evidence=measurement.evidence,
        device=measurement.device,
        gpus=(gpu, *others),
        throughput=_throughput(estimate.throughput, measurement),
        reasons=(*estimate.reasons, *_left_out(estimate, gpu, measurement)),
        versions=tuple(sorted(measurement.versions.items())),
    )


def why_undecided(estimate: Estimate, measurement: Measurement) -> str:
    """Return why a measurement does not decide whether its candidate fits the estimate's card; empty if it does."""
    gpu = estimate.gpus[0]
    if not measurement.decided:
        return f"The probe says nothing about memory ({measurement.outcome.replace('_', ' ')}): {measurement.message}"
    if measurement.outcome == "fits" and not any(rank.phases for rank in measurement.ranks):
        return "The probe ran to its end and has measured no process."
    if measurement.outcome == "out_of_memory" and lacking_bytes(gpu, measurement) <= gpu.capacity_bytes:
        usable, wanted = _usable_bytes(gpu, measurement), format_gib(gpu.capacity_bytes, 1)
        if usable < _capacity_bytes(gpu, measurement):
            left = format_gib(usable, 1)
            return (
                f"The probe ran out of memory on a card that others share: it could use {left} of {wanted}. "
                f"End the other processes, or plan with --free-memory {left.replace(' ', '')}."
            )
        return f"The probe ran out of memory on a smaller card than one of {wanted}."
    return ""


def phase_differences(estimate: Estimate, measurement: Measurement) -> tuple[PhaseDifference, ...]:
    """Return the phases of both the estimate and the measurement; on the CPU, their tensors only, and not the load.

    There the tensors of the checkpoint's file lie on the device too.

    A probe that ran out of memory has none: its last phase is not complete.
    """
    if measurement.outcome != "fits":
        return ()
    expected = {phase.name: phase for phase in estimate.gpus[0].phases}
    order = phase_order(estimate.gpus[0])
    peaks = sorted(phases_of(estimate.gpus[0], measurement), key=lambda peak: order.index(peak.name))
    left_out = NOT_COMPARED_ON_A_CPU if measurement.device == "cpu" else frozenset[Phase]()
    compared = [peak for peak in peaks if peak.name in expected and peak.name not in left_out]
    return tuple(_difference(peak, expected[peak.name], measurement) for peak in compared)


def _difference(peak: PhasePeak, expected: PhaseMemory, measurement: Measurement) -> PhaseDifference:
    if measurement.device == "cpu":
        tensors = expected.total_bytes - sum(expected.components.get(name, 0) for name in NOT_ON_A_CPU)
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


def phase_order(gpu: GpuMemory) -> tuple[Phase, ...]:
    """Return every phase: first those of the estimate in its order."""
    return tuple(dict.fromkeys((*(phase.name for phase in gpu.phases), *get_args(Phase))))


def heaviest_rank(measurement: Measurement) -> RankMemory:
    return max(measurement.ranks, key=lambda rank: rank.peak_bytes)


def phases_of(gpu: GpuMemory, measurement: Measurement) -> tuple[PhasePeak, ...]:
    """Return the peaks of the heaviest process, with a reference's in the loss where the estimate has them.

    A run enters "score" wherever a model is called without gradients (probes/step/phases.py); an estimate has that
    phase where it comes before the forward pass only.
    """
    peaks = heaviest_rank(measurement).phases if measurement.ranks else ()
    passes = [peak for peak in peaks if peak.name in ("score", "loss")]
    if len(passes) < 2 or any(phase.name == "score" for phase in gpu.phases):
        return peaks
    heavier = replace(max(passes, key=lambda peak: peak.allocated_bytes), name="loss")
    return (*(peak for peak in peaks if peak not in passes), heavier)


def needed_bytes(peak: PhasePeak, expected: PhaseMemory) -> int:
    """Return the bytes that a phase needs on one GPU.

        need = allocated + slack + memory outside PyTorch
        slack = min(estimated fragmentation, reserved - allocated)

    A run with room to spare keeps segments that it would give back before it ran out of memory
    (results/allocator_slack.md): of the reserved memory without tensors, at most the estimated fragmentation counts.
    """
    slack = expected.components.get("fragmentation", 0)
    if peak.reserved_bytes:
        slack = min(slack, max(peak.reserved_bytes - peak.allocated_bytes, 0))
    outside = peak.driver_bytes - peak.reserved_bytes if peak.driver_bytes else expected.components.get("runtime", 0)
    return peak.allocated_bytes + slack + outside


def needed_peak_bytes(gpu: GpuMemory, measurement: Measurement) -> int:
    """Return the need of the heaviest phase of the heaviest process."""
    return max(needed_bytes(peak, expected_phase(gpu, peak)) for peak in phases_of(gpu, measurement))


def lacking_bytes(gpu: GpuMemory, measurement: Measurement) -> int:
    """Return a lower bound of the card size that a candidate which ran out of memory needs."""
    usable = _usable_bytes(gpu, measurement)
    same_kind = abs(usable - gpu.capacity_bytes) <= _tolerance_bytes(gpu)
    return (gpu.capacity_bytes if same_kind else usable) + shortage_of(gpu, measurement).over_bytes


def _usable_bytes(gpu: GpuMemory, measurement: Measurement) -> int:
    """Return the memory that the process which ran out of it could use: the card, or what others left of it.

        left = reserved by PyTorch + outside PyTorch + free

    The free bytes in PyTorch's message are those of the card, of which other processes may hold a part. The process
    itself holds outside PyTorch what the driver counted in earlier phases, and a CUDA context at least. So does every
    other process: where less than a context is missing, nobody shares the card.
    Source: torch 2.13, c10/cuda/CUDACachingAllocator.cpp, `cudaMemGetInfo` in the message of `OutOfMemoryError`.

    Example: a card of 79.2 GiB of which others hold 66.2: 10.5 + 0.5 + 2.0 = 13.0 GiB.
    """
    capacity, shortage = _capacity_bytes(gpu, measurement), shortage_of(gpu, measurement)
    if measurement.device != "cuda" or not shortage.reserved_bytes:
        return capacity
    ranks = [rank for rank in measurement.ranks if rank.rank == shortage.rank]
    seen = [peak.driver_bytes - peak.reserved_bytes for rank in ranks for peak in rank.phases if peak.driver_bytes]
    context = gpu.peak.components.get("runtime", 0)
    left = shortage.reserved_bytes + max([context, *seen]) + shortage.free_bytes
    return left if capacity - left > context else capacity


def _capacity_bytes(gpu: GpuMemory, measurement: Measurement) -> int:
    """Return the memory of the card of the process that ran out of it; the planned one's if that is not known."""
    rank = shortage_of(gpu, measurement).rank
    found = [each.capacity_bytes for each in measurement.ranks if each.rank == rank and each.capacity_bytes]
    return found[0] if found else gpu.capacity_bytes


def shortage_of(gpu: GpuMemory, measurement: Measurement) -> Shortage:
    """Return where memory ran out; if PyTorch's message is lost, the phase that was expected to be the heaviest."""
    if measurement.shortage is not None:
        return measurement.shortage
    return Shortage(rank=0, phase=gpu.peak_phase, tried_bytes=0, free_bytes=0, allocated_bytes=0, reserved_bytes=0)


# -- phases ------------------------------------------------------------------------------------------------------------


def _phases(train: GpuMemory, measurement: Measurement) -> Iterator[PhaseMemory]:
    shortage = shortage_of(train, measurement) if measurement.outcome == "out_of_memory" else None
    for peak in phases_of(train, measurement):
        if shortage is None or peak.name != shortage.phase:
            expected = expected_phase(train, peak)
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
        yield _phase(peak, expected_phase(train, peak), lacking_bytes(train, measurement))


def _phase(peak: PhasePeak, expected: PhaseMemory, total_bytes: int) -> PhaseMemory:
    parts = dict(expected.components)
    if peak.reserved_bytes:
        parts["fragmentation"] = min(max(peak.reserved_bytes - peak.allocated_bytes, 0), total_bytes)
    missing = sum(parts.values()) - total_bytes
    if missing < 0:
        parts["unexplained"] = -missing
    for component in LEAST_SURE_FIRST if missing > 0 else ():
        cut = min(parts.get(component, 0), missing)
        missing -= cut
        parts[component] = parts.get(component, 0) - cut
    return PhaseMemory(name=peak.name, components={name: size for name, size in parts.items() if size})


def expected_phase(train: GpuMemory, peak: PhasePeak) -> PhaseMemory:
    """Return the estimated components of a phase; if the estimate lacks the phase, those that stay through the run."""
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


# -- how sure ----------------------------------------------------------------------------------------------------------


def _larger_card(gpu: GpuMemory, measurement: Measurement) -> bool:
    """Return whether the probe's card was larger, so that its allocator may have kept memory that it must free here."""
    return any(rank.capacity_bytes - gpu.capacity_bytes > _tolerance_bytes(gpu) for rank in measurement.ranks)


def _tolerance_bytes(gpu: GpuMemory) -> int:
    """Return the difference in capacity up to which two cards are of one kind: drivers keep different amounts."""
    return gpu.capacity_bytes * SLACK_THOUSANDTHS // 1000


def _interval(gpu: GpuMemory, measurement: Measurement, heaviest: PhaseMemory, risk: float) -> tuple[int, int]:
    """Return bounds of the peak: the difference from run to run, or the error that the device does not see.

    A candidate that ran on such a card stays within it.
    """
    peak = heaviest.total_bytes
    if measurement.outcome == "out_of_memory":
        return peak, max(peak, gpu.interval_bytes[1])
    if measurement.device != "cuda":
        low, high = interval_bytes(_needs(gpu, measurement), "unseen", risk)
        return min(low, peak), max(high, peak)
    high = peak + RUN_TO_RUN_BYTES
    ran_here = not _larger_card(gpu, measurement)
    return max(peak - RUN_TO_RUN_BYTES, 0), max(peak, min(high, gpu.capacity_bytes)) if ran_here else high


def _needs(gpu: GpuMemory, measurement: Measurement) -> tuple[PhaseMemory, ...]:
    """Return the phases of the heaviest process with what they need, without cached blocks."""
    found = ((peak, expected_phase(gpu, peak)) for peak in phases_of(gpu, measurement))
    return tuple(_phase(peak, expected, needed_bytes(peak, expected)) for peak, expected in found)


def _probability(gpu: GpuMemory, others: Sequence[GpuMemory], measurement: Measurement, ran: bool) -> float:
    """Return 1 or 0 for a candidate that ran on the GPU or ran out of memory, else the probability that it runs.

    Emulation removes the formulas' share of the error. The driver, the kernels and how the allocator's cache fragments
    over time stay uncertain until something is measured.
    """
    if measurement.device == "cuda" or measurement.outcome == "out_of_memory":
        return float(ran)
    probed = run_probability(margin_units(_needs(gpu, measurement), "unseen", gpu.capacity_bytes))
    return min(probed, fit_probability_of(others, "server")) if others else probed


def _throughput(expected: Throughput, measurement: Measurement) -> Throughput:
    """Return the speed as measured on GPUs; a CPU and an emulated card do not measure it.

    A probe trains on full rows, so that it does not measure the speed of rows whose lengths are given either.
    """
    if (
        expected.epoch is not None
        or measurement.device != "cuda"
        or measurement.outcome != "fits"
        or not measurement.step_seconds
    ):
        return expected
    phases = heaviest_rank(measurement).phases
    return Throughput(
        tokens_per_second=measurement.tokens_per_second,
        step_seconds=measurement.step_seconds,
        seconds={peak.name: peak.seconds for peak in phases if peak.seconds},
        evidence="measured",
    )


def _left_out(estimate: Estimate, gpu: GpuMemory, measurement: Measurement) -> Iterator[Note]:
    """Note what the corrected figures leave out."""
    if measurement.device == "cpu":
        unmeasured_bytes = sum(gpu.peak.components.get(name, 0) for name in NOT_ON_A_CPU)
        yield Note("cpu_counts_tensors", {"unmeasured_bytes": unmeasured_bytes, "evidence": estimate.evidence})
    if measurement.outcome == "out_of_memory":
        shortage = shortage_of(estimate.gpus[0], measurement)
        values = {"device": measurement.device, "phase": shortage.phase, "over_bytes": shortage.over_bytes}
        yield Note("ran_out_of_memory", values)
    if len(estimate.gpus) > 1:
        yield Note("server_not_measured", {"evidence": estimate.evidence})
    if measurement.outcome == "fits" and _larger_card(gpu, measurement):
        yield Note("larger_card_probed")

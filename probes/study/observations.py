"""Turn a measurement into observations of the device's constants, phase by phase."""

from collections.abc import Iterator, Mapping

from msgspec.structs import replace

from planner.measurements.measurement import Measurement, PhasePeak, RankMemory, Shortage
from planner.memory.slack import LAST_SEGMENTS_BYTES
from planner.quantities import Phase
from planner.units import MIB
from probes.study.posterior import (
    KNOWN,
    LIGHT_SHARE,
    RESIDUAL_BYTES,
    BoundKind,
    Coefficients,
    Observation,
    PhaseModel,
    residual_bytes,
)

# Standard deviation between two readings of the driver: small allocations of other processes and libraries.
DRIVER_NOISE_BYTES = 16 * MIB
# Standard deviation of the allocator's slack between two moments, as a share of the allocated bytes, beyond the unused
# part of each pool's last page.
SLACK_NOISE_SHARE = 0.002
UNIFORM = 12**0.5  # the range of a uniform distribution divided by its standard deviation
# Constants that are no bytes of the trainer's tensors.
NOT_TENSORS = frozenset({"runtime", "slack", "engine"})


def observations(measurement: Measurement, phases: tuple[PhaseModel, ...], label: str) -> tuple[Observation, ...]:
    """Return what one probe says about the constants of its candidate's phases. `label` names the probe.

    A rank that ran to the end has shown its heaviest step, so the bytes of its tensors are exact. Of the bytes that the
    allocator kept beside them, some could have been returned to the GPU: they give an upper bound.
    A rank that ran out of memory may have done only the first step, before any optimizer state: it gives lower bounds.
    With a colocated engine torch counts the engine's tensors too. How many is a constant of that probe ("counted"), one
    while the engine is awake and another while it sleeps.
    """
    trainer = {phase.phase: phase for phase in phases if phase.gpus == 0}
    heaviest = max(measurement.ranks, key=lambda rank: rank.peak_bytes, default=None)
    counted = f"counted:{label}" if measurement.candidate.vllm == "colocate" else ""
    found = list(_phase_observations(heaviest, trainer, measurement.outcome == "fits", counted))
    if measurement.shortage is not None:
        gpus = gpus_of_rank(measurement, measurement.shortage.rank)
        same_gpus = {phase.phase: phase for phase in phases if phase.gpus == gpus}
        found += _shortage_observations(measurement.shortage, heaviest, same_gpus, alone=not counted and not gpus)
    known = KNOWN[measurement.device]
    kept = (
        replace(each, coefficients={name: size for name, size in each.coefficients.items() if name not in known})
        for each in found
    )
    return tuple(each for each in kept if each.coefficients)


def gpus_of_rank(measurement: Measurement, rank: int) -> int:
    """Return a rank's index in `Estimate.gpus`: 0 for the trainer's ranks, 1 for those of a vLLM server after them."""
    return 0 if rank < measurement.candidate.num_processes else 1


def _phase_observations(
    rank: RankMemory | None, phases: Mapping[Phase, PhaseModel], finished: bool, counted: str
) -> Iterator[Observation]:
    """Yield what a rank's phases say.

    `finished`: the rank ran to the end; `counted`: the constant of a colocated engine, else empty.
    """
    heaviest_bytes = max(phase.total_bytes for phase in phases.values())
    for peak in rank.phases if rank is not None else ():
        if peak.name not in phases:
            continue
        phase = phases[peak.name]
        heavy = phase.total_bytes >= LIGHT_SHARE * heaviest_bytes
        if peak.allocated_bytes and (finished or not counted):
            value = peak.allocated_bytes - phase.allocated_bytes
            kind: BoundKind = "equal" if finished else "at_least"
            yield Observation(
                kind=kind,
                coefficients=_tensor_coefficients(
                    phase, f"{counted}:{phase.engine_bytes:.0f}" if counted else "", heavy
                ),
                value=value,
                noise=residual_bytes(phase.allocated_bytes),
            )
        if finished:
            yield Observation(
                kind="at_most",
                coefficients=phase.coefficients,
                value=phase.capacity_bytes - phase.total_bytes,
                noise=RESIDUAL_BYTES,
            )
        if not counted:
            yield from _reserved_observations(peak, phase, finished, heavy)


def _reserved_observations(peak: PhasePeak, phase: PhaseModel, finished: bool, heavy: bool) -> Iterator[Observation]:
    """Yield what the reserved bytes of one phase say about "runtime" and, in a heavy phase, about "slack".

    In a light phase the unused part of the pools' last pages hides the slack, which is a share of the allocated bytes.
    """
    if peak.driver_bytes and peak.reserved_bytes:
        outside = peak.driver_bytes - peak.reserved_bytes - phase.outside_bytes
        kind: BoundKind = "equal" if finished else "at_least"  # CUDA loads each kernel when it is first used
        yield Observation(kind=kind, coefficients={"runtime": 1.0}, value=outside, noise=DRIVER_NOISE_BYTES)
    if heavy and peak.reserved_bytes and peak.allocated_bytes:
        slack = peak.reserved_bytes - peak.allocated_bytes - phase.slack_bytes
        yield Observation(
            kind="at_most",
            coefficients={"slack": peak.allocated_bytes},
            value=slack,
            noise=_slack_noise_bytes(peak.allocated_bytes),
        )


def _shortage_observations(
    shortage: Shortage, rank: RankMemory | None, phases: Mapping[Phase, PhaseModel], alone: bool
) -> Iterator[Observation]:
    """Yield what an out-of-memory error says: the phase needs more than the GPU has.

    If only the trainer was on the GPU (`alone`), PyTorch's message also gives the tensors' bytes, slack and runtime.
    """
    if shortage.phase not in phases:
        return
    phase, allocated = phases[shortage.phase], shortage.allocated_bytes
    yield Observation(
        kind="at_least",
        coefficients=phase.coefficients,
        value=phase.capacity_bytes - phase.total_bytes,
        noise=RESIDUAL_BYTES,
    )
    if not alone or not shortage.reserved_bytes:
        return
    yield Observation(
        kind="at_least",
        coefficients=_tensor_coefficients(phase, ""),
        value=allocated + shortage.tried_bytes - phase.allocated_bytes,
        noise=residual_bytes(phase.allocated_bytes),
    )
    slack = shortage.reserved_bytes - allocated - phase.slack_bytes
    yield Observation(kind="equal", coefficients={"slack": allocated}, value=slack, noise=_slack_noise_bytes(allocated))
    capacity = phase.capacity_bytes
    if rank is not None and rank.capacity_bytes:
        capacity = min(rank.capacity_bytes, capacity)
    outside = capacity - shortage.free_bytes - shortage.reserved_bytes
    # Not positive if the limit was torch's own (torch.cuda.set_per_process_memory_fraction), which leaves out the
    # runtime.
    if outside > 0:
        yield Observation(
            kind="equal", coefficients={"runtime": 1.0}, value=outside - phase.outside_bytes, noise=DRIVER_NOISE_BYTES
        )


def _tensor_coefficients(phase: PhaseModel, counted: str, heavy: bool = True) -> Coefficients:
    """Return a phase's coefficients for the bytes of tensors, with the constant `counted` added if there is one.

    A light phase, such as loading, says nothing about "formulas": a few MiB are a large share of it.
    """
    left_out = NOT_TENSORS if heavy else NOT_TENSORS | {"formulas"}
    coefficients = {name: size for name, size in phase.coefficients.items() if name not in left_out}
    return {**coefficients, counted: 1.0} if counted else coefficients


def _slack_noise_bytes(allocated_bytes: float) -> float:
    """Return the standard deviation of an observation of the allocator's slack."""
    return LAST_SEGMENTS_BYTES / UNIFORM + SLACK_NOISE_SHARE * allocated_bytes

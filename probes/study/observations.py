"""A measurement -> what it says about the device's constants, phase by phase."""

from collections.abc import Iterator, Mapping

from planner.measurements.measurement import Measurement, PhasePeak, RankMemory, Shortage
from planner.memory.runtime import EXPANDABLE_SLACK_BYTES
from planner.quantities import Phase
from planner.units import MIB
from probes.study.posterior import KNOWN, LIGHT, RESIDUAL_BYTES, Coefficients, Kind, Observation, Row, residual_bytes

# How far apart two readings of the driver may be: other processes' and libraries' small change.
DRIVER_NOISE_BYTES = 16 * MIB
SLACK_NOISE_SHARE = (
    0.002  # of what is allocated, beside the last pages of the pools: the slack at one moment is not that at the next
)
UNIFORM = 12**0.5  # a range over the standard deviation of what may lie anywhere in it
NOT_TENSORS = frozenset({"runtime", "slack", "engine"})


def observations(measurement: Measurement, rows: tuple[Row, ...], label: str) -> tuple[Observation, ...]:
    """What one probe says of the constants in its candidate's rows. `label` names the probe.

    A rank that ran to the end has shown its heaviest step, so what tensors held is exact; of what the allocator kept beside them, some could
    have been given back. One that ran out may have done only the first step, which has no optimizer states yet: it shows what is needed at
    least. Where an engine lives in the same process, torch counts its tensors too, by how much is a constant of that probe while
    the engine is awake, and another while it sleeps.
    """
    trainer = {row.phase: row for row in rows if row.gpus == 0}
    heaviest = max(measurement.ranks, key=lambda rank: rank.peak_bytes, default=None)
    apart = f"counted:{label}" if measurement.candidate.vllm == "colocate" else ""
    found = list(_of_phases(heaviest, trainer, measurement.outcome == "fits", apart))
    if measurement.shortage is not None:
        gpus = gpus_of_rank(measurement, measurement.shortage.rank)
        short = {row.phase: row for row in rows if row.gpus == gpus}
        found += _of_shortage(measurement.shortage, heaviest, short, apart or ("server" if gpus else ""))
    known = KNOWN[measurement.device]
    kept = (_without(each, known) for each in found)
    return tuple(each for each in kept if each.coefficients)


def gpus_of_rank(measurement: Measurement, rank: int) -> int:
    """Index in an estimate's gpus: ranks after the trainer's are a server's."""
    return 0 if rank < measurement.candidate.num_processes else 1


def _of_phases(rank: RankMemory | None, rows: Mapping[Phase, Row], whole: bool, apart: str) -> Iterator[Observation]:
    heaviest_bytes = max(row.total_bytes for row in rows.values())
    for peak in rank.phases if rank is not None else ():
        if peak.name not in rows:
            continue
        row = rows[peak.name]
        if peak.allocated_bytes and (whole or not apart):
            value = peak.allocated_bytes - row.allocated_bytes
            kind: Kind = "equal" if whole else "at_least"
            yield Observation(
                kind=kind,
                coefficients=_tensors(row, f"{apart}:{row.engine_bytes:.0f}" if apart else ""),
                value=value,
                noise=residual_bytes(row.allocated_bytes),
            )
        if whole:
            yield Observation(
                kind="at_most",
                coefficients=row.coefficients,
                value=row.capacity_bytes - row.total_bytes,
                noise=RESIDUAL_BYTES,
            )
        if not apart:
            yield from _of_reserved(peak, row, whole, row.total_bytes >= LIGHT * heaviest_bytes)


def _of_reserved(peak: PhasePeak, row: Row, whole: bool, heavy: bool) -> Iterator[Observation]:
    """Slack is a share of what is allocated where much is; the last pages of a light phase say nothing about it."""
    if peak.driver_bytes and peak.reserved_bytes:
        outside = peak.driver_bytes - peak.reserved_bytes - row.outside_bytes
        kind: Kind = "equal" if whole else "at_least"  # kernels are loaded when they are first used
        yield Observation(kind=kind, coefficients={"runtime": 1.0}, value=outside, noise=DRIVER_NOISE_BYTES)
    if heavy and peak.reserved_bytes and peak.allocated_bytes:
        kept = peak.reserved_bytes - peak.allocated_bytes - row.slack_bytes
        yield Observation(
            kind="at_most",
            coefficients={"slack": peak.allocated_bytes},
            value=kept,
            noise=_slack_noise_bytes(peak.allocated_bytes),
        )


def _of_shortage(
    shortage: Shortage, rank: RankMemory | None, rows: Mapping[Phase, Row], apart: str
) -> Iterator[Observation]:
    """The phase needs more than there is. Without an engine the message also says what torch could not give, and what is not torch's."""
    if shortage.phase not in rows:
        return
    row, allocated = rows[shortage.phase], shortage.allocated_bytes
    yield Observation(
        kind="at_least", coefficients=row.coefficients, value=row.capacity_bytes - row.total_bytes, noise=RESIDUAL_BYTES
    )
    if apart or not shortage.reserved_bytes:
        return
    asked = allocated + shortage.tried_bytes - row.allocated_bytes
    yield Observation(
        kind="at_least", coefficients=_tensors(row, ""), value=asked, noise=residual_bytes(row.allocated_bytes)
    )
    slack = shortage.reserved_bytes - allocated - row.slack_bytes
    yield Observation(kind="equal", coefficients={"slack": allocated}, value=slack, noise=_slack_noise_bytes(allocated))
    capacity = (
        min(rank.capacity_bytes, row.capacity_bytes) if rank is not None and rank.capacity_bytes else row.capacity_bytes
    )
    outside = capacity - shortage.free_bytes - shortage.reserved_bytes
    if (
        outside > 0
    ):  # else torch kept to a limit of its own (torch.cuda.set_per_process_memory_fraction), which does not count what is not torch's
        yield Observation(
            kind="equal", coefficients={"runtime": 1.0}, value=outside - row.outside_bytes, noise=DRIVER_NOISE_BYTES
        )


def _tensors(row: Row, apart: str) -> Coefficients:
    held = {name: size for name, size in row.coefficients.items() if name not in NOT_TENSORS}
    return {**held, apart: 1.0} if apart else held


def _slack_noise_bytes(allocated_bytes: float) -> float:
    return EXPANDABLE_SLACK_BYTES / UNIFORM + SLACK_NOISE_SHARE * allocated_bytes


def _without(seen: Observation, known: frozenset[str]) -> Observation:
    kept = {name: size for name, size in seen.coefficients.items() if name not in known}
    return Observation(kind=seen.kind, coefficients=kept, value=seen.value, noise=seen.noise)

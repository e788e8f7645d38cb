"""A dry run: one emulated run of a candidate beside its estimate, phase by phase."""

from collections.abc import Iterator

from msgspec import Struct

from planner.gpus.cluster import Gpu
from planner.measurements.corrected_estimate import (
    expected_phase,
    lacking_bytes,
    needed_bytes,
    phase_order,
    phases_of,
    shortage_of,
)
from planner.measurements.measurement import Measurement, PhasePeak
from planner.measurements.validate import counted_bytes
from planner.quantities import Estimate, Phase


class DryRunPhase(Struct, frozen=True, kw_only=True):
    """One phase of the heaviest process."""

    peak: PhasePeak
    needed_bytes: int
    estimated_allocated_bytes: int  # 0 if the estimate lacks the phase

    @property
    def difference(self) -> float:
        """Return estimated / emulated bytes of tensors - 1; below 0, too little is estimated."""
        return self.estimated_allocated_bytes / self.peak.allocated_bytes - 1


class DryRun(Struct, frozen=True, kw_only=True):
    """One emulated run of an estimate's candidate, which ran or ran out of memory: its training GPUs."""

    expected: Estimate
    measurement: Measurement
    gpu: Gpu
    phases: tuple[DryRunPhase, ...]  # that the run went through, in the estimate's order
    peak_bytes: int  # memory that the GPU must have; a lower bound if memory ran out
    peak_phase: Phase

    @property
    def fits(self) -> bool:
        return self.measurement.outcome == "fits"

    @property
    def difference(self) -> float:
        """Return estimated / emulated peak - 1; below 0, too little is estimated."""
        return self.expected.gpus[0].peak_bytes / self.peak_bytes - 1

    @property
    def exceeded_by(self) -> float:
        """Return the share by which the peak exceeds the estimated one; 0 within its interval and the GPU."""
        train = self.expected.gpus[0]
        if self.peak_bytes <= min(train.interval_bytes[1], train.capacity_bytes):
            return 0.0
        return max(self.peak_bytes / train.peak_bytes - 1, 0.0)


def dry_run_of(expected: Estimate, measurement: Measurement, gpu: Gpu) -> DryRun:
    """Return a decided measurement of an emulated GPU beside the estimate of its candidate."""
    train, phases = expected.gpus[0], tuple(_phases(expected, measurement, gpu))
    if measurement.outcome == "out_of_memory":
        peak_bytes, peak_phase = lacking_bytes(train, measurement), shortage_of(train, measurement).phase
    else:
        heaviest = max(phases, key=lambda phase: phase.needed_bytes)
        peak_bytes, peak_phase = heaviest.needed_bytes, heaviest.peak.name
    return DryRun(
        expected=expected,
        measurement=measurement,
        gpu=gpu,
        phases=phases,
        peak_bytes=peak_bytes,
        peak_phase=peak_phase,
    )


def _phases(expected: Estimate, measurement: Measurement, gpu: Gpu) -> Iterator[DryRunPhase]:
    train = expected.gpus[0]
    order, estimated = phase_order(train), {phase.name: phase for phase in train.phases}
    for peak in sorted(phases_of(train, measurement), key=lambda peak: order.index(peak.name)):
        own = estimated.get(peak.name)
        yield DryRunPhase(
            peak=peak,
            needed_bytes=needed_bytes(peak, expected_phase(train, peak)),
            estimated_allocated_bytes=counted_bytes(own, "allocated", expected.candidate, gpu) if own else 0,
        )

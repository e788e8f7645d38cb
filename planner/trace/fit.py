"""Traces -> profile: sizes fitted as products of terms, moments as straight lines in the number of layers, both checked on every trace."""

from planner.quantities import Phase
from planner.trace.fit_moments import moments_of
from planner.trace.fit_sizes import Expressions, keys_of
from planner.trace.profile import NoProfile, Profile
from planner.trace.samples import Ambiguous, Sample, check_order
from planner.trace.timeline import Trace


def fit_profile(samples: tuple[Sample, ...], deeper: tuple[Sample, Sample], held_back: tuple[Sample, ...], block_bytes: int) -> Profile:
    """A profile from traces of one depth at several sizes, and of one and two periods of layers more at the first sample's sizes.

    Raises:
        NoProfile: a sequence differs between the samples, a size is no product of terms, or a held-back trace peaks elsewhere.
    """
    first, period = samples[0], deeper[0].layers - samples[0].layers
    for sample in samples[1:]:
        check_order(first.trace, sample.trace)
    if [(sample.values, sample.layers - first.layers) for sample in deeper] != [(first.values, period), (first.values, 2 * period)]:
        raise NoProfile("The deeper traces must be of one and two periods more, at the sizes of the first sample.")
    expressions = Expressions(samples)
    traces = (first.trace, deeper[0].trace, deeper[1].trace)
    moments = moments_of(traces, keys_of(traces, expressions), first.accumulation)
    profile = Profile(
        layers=first.layers, period=period, accumulation=first.accumulation, block_bytes=block_bytes, expressions=tuple(expressions.found),
        moments=tuple(moments), versions=first.trace.versions,
    )  # fmt: skip
    for sample in (*samples, *deeper, *held_back):
        check(profile, sample)
    return profile


def check(profile: Profile, sample: Sample) -> None:
    """That the profile gives a trace's peak in every phase.

    Raises:
        Ambiguous: it does not.
    """
    expected = rounded_phase_peaks(sample.trace, profile.block_bytes)
    for phase in profile.phases(sample.sizes, sample.layers):
        if phase.total_bytes != expected.get(phase.name, 0):
            raise Ambiguous(
                f"At {sample.sizes} and {sample.layers} layers the profile's {phase.name} peaks at {phase.total_bytes:,} bytes, "
                f"the trace's at {expected.get(phase.name, 0):,}."
            )


def rounded_phase_peaks(trace: Trace, block_bytes: int) -> dict[Phase, int]:
    """For each phase the most that is alive after a birth in it, when every size is rounded up to whole blocks."""
    peaks: dict[Phase, int] = {}
    total = 0
    for index, size_bytes in trace.events:
        blocks = -(-abs(size_bytes) // block_bytes) * block_bytes
        total += blocks if size_bytes > 0 else -blocks
        phase = trace.allocations[index].phase
        if size_bytes > 0 and total > peaks.get(phase, 0):
            peaks[phase] = total
    return peaks

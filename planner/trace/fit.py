"""Traces -> profile: sizes fitted as products of terms, moments as straight lines in layers, micro-steps and rows, both checked on every trace."""

from planner.quantities import Phase
from planner.trace.fit_keys import keys_of
from planner.trace.fit_moments import moments_of
from planner.trace.fit_sizes import Expressions
from planner.trace.profile import NoProfile, Profile
from planner.trace.samples import Ambiguous, Sample, Samples
from planner.trace.timeline import Trace


def fit_profile(samples: Samples, held_back: tuple[Sample, ...], block_bytes: int) -> Profile:
    """A profile from traces of several sizes, of one more period of layers, and of more micro-steps.

    Raises:
        NoProfile: a sequence differs between the samples, a size is no product of terms, or a held-back trace peaks elsewhere.
    """
    first, deeper = samples.first, samples.deeper
    if deeper.values != first.values or deeper.layers <= first.layers:
        raise NoProfile("The deeper trace must be of more layers, at the sizes of the first sample.")
    expressions = Expressions(samples)
    moments = moments_of(samples, keys_of(samples, expressions))
    profile = Profile(
        layers=first.layers, period=deeper.layers - first.layers, accumulation=first.accumulation, generated=first.generated, block_bytes=block_bytes,
        expressions=tuple(expressions.found), moments=tuple(moments), versions=first.trace.versions,
    )  # fmt: skip
    for sample in (*samples.sized, deeper, *held_back):
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

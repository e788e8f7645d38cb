"""A plan after its probes: the proven candidate in its place, and how wrong the plan was."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

from planner.candidate import Candidate
from planner.estimate import estimate
from planner.jobs.settings import settings_of_fields, settings_text
from planner.measurements.corrected_estimate import (
    DEVICE_WORDS,
    differences,
    measured_estimate,
    needed_peak_bytes,
    silence,
)
from planner.measurements.fingerprint import candidate_key
from planner.measurements.measurement import Measurement
from planner.plan import Plan, Proof
from planner.quantities import Estimate
from planner.units import format_size


def contradicts(plan: Plan, measurements: Sequence[Measurement]) -> bool:
    """Whether a probe of the recommended candidate says otherwise than the plan: exit code 4."""
    return bool(contradiction_of(plan, measurements))


def contradiction_of(plan: Plan, measurements: Sequence[Measurement]) -> str:
    """The first contradiction between a plan and the probes of what it recommends, in a line; empty where there is none."""
    best = as_expected(plan).best
    return next(
        filter(None, (contradiction(best, measurement) for measurement in _of(best.candidate, measurements))), ""
    )


def as_expected(plan: Plan) -> Plan:
    """The plan as the rungs below probes have it: with the user's earlier measurements in it, a proof would compare them with themselves."""
    if plan.best.device == "none":
        return plan
    best = replace(estimate(plan.best.candidate, plan.cluster, plan.job.risk), reasons=plan.best.reasons)
    return replace(plan, best=best, verdict="fits" if best.fits else "does_not_fit")


def contradiction(answer: Estimate, measurement: Measurement) -> str:
    """How a measurement contradicts an answer, in a line; empty where it does not, or says nothing.

    It does where one says that the candidate fits and the other that it does not, and where more was needed than the interval allows. What the
    allocator kept to spare is no need (`measured.needed_bytes`). That less was needed than the interval's lower end is no contradiction of "fits".
    """
    if silence(answer, measurement):
        return ""
    seen = measured_estimate(answer, measurement)
    device = DEVICE_WORDS[measurement.device]
    expected = answer.gpus[0]
    if measurement.outcome == "out_of_memory":
        said = f"{answer.evidence}: it fits in {format_size(expected.peak_bytes)}"
        return (
            f"the candidate ran out of memory {device} in the {seen.gpus[0].peak_phase.replace('_', ' ')} ({said})"
            if answer.fits
            else ""
        )
    if not answer.fits:
        return f"the candidate fits {device}, which the plan had denied" if seen.fits else ""
    needed, high = needed_peak_bytes(expected, measurement), expected.interval_bytes[1]
    if needed <= high:
        return ""
    return f"the candidate needs {format_size(needed)} {device}, more than the {format_size(high)} that were {answer.evidence} at most"


def confirmed(
    plan: Plan,
    best: Candidate | None,
    measurements: Sequence[Measurement],
    lines: Sequence[str],
    report: Mapping[str, object],
) -> Plan:
    """The plan as its probes leave it.

    Args:
        best: the candidate that is proven; None: none was.
        measurements: of every probe, in their order; of one candidate the last that says something counts.
        lines: the certificate, for people.
        report: the certificate, as a JSON object.
    """
    plan = as_expected(plan)
    expected = (
        plan.best
        if best is None or candidate_key(best) == candidate_key(plan.best.candidate)
        else _expected(plan, best)
    )
    seen = decided_of(expected, measurements)
    answer = measured_estimate(expected, seen, plan.job.risk) if seen is not None else expected
    proof = Proof(
        evidence=seen.evidence if seen is not None else expected.evidence,
        device=seen.device if seen is not None else "none",
        lines=tuple(lines),
        report=report,
        expected=expected.evidence,
        differences=differences(expected, seen) if seen is not None else (),
    )
    return replace(
        plan,
        verdict="fits" if answer.fits else "does_not_fit",
        best=answer,
        alternatives=tuple(
            replace(other, estimate=_over(other.estimate, measurements, plan.job.risk)) for other in plan.alternatives
        ),
        remedies=()
        if answer.fits
        else tuple(
            replace(other, estimate=_over(other.estimate, measurements, plan.job.risk)) for other in plan.remedies
        ),
        more=plan.more
        if expected is plan.best
        else (),  # it spoke of what was recommended; the certificate speaks of what is proven
        warnings=(*_corrections(plan, expected, seen, measurements), *plan.warnings),
        versions={**plan.versions, **dict(answer.versions)},
        proof=proof,
    )


def decided_of(answer: Estimate, measurements: Sequence[Measurement]) -> Measurement | None:
    """The last measurement of an answer's candidate that says something about its card; None where none does."""
    return next((each for each in reversed(_of(answer.candidate, measurements)) if not silence(answer, each)), None)


def _expected(plan: Plan, best: Candidate) -> Estimate:
    """What the plan says of the proven candidate, or would have said."""
    others = [other.estimate for other in plan.alternatives] + [remedy.estimate for remedy in plan.remedies]
    known = next((other for other in others if candidate_key(other.candidate) == candidate_key(best)), None)
    return known or estimate(best, plan.cluster, plan.job.risk)


def _of(candidate: Candidate, measurements: Sequence[Measurement]) -> list[Measurement]:
    key = candidate_key(candidate)
    return [measurement for measurement in measurements if candidate_key(measurement.candidate) == key]


def _over(answer: Estimate, measurements: Sequence[Measurement], risk: float) -> Estimate:
    seen = decided_of(answer, measurements)
    return answer if seen is None else measured_estimate(answer, seen, risk)


def _corrections(
    plan: Plan, expected: Estimate, seen: Measurement | None, measurements: Sequence[Measurement]
) -> list[str]:
    """How wrong the plan was, and what stands in its place."""
    of_best = decided_of(plan.best, measurements)
    said = [wrong] if of_best is not None and (wrong := contradiction(plan.best, of_best)) else []
    if expected is not plan.best:
        said.append(f"proven instead of what was recommended: {changed(plan.best.candidate, expected.candidate)}")
    return said + ([agreement(expected, seen)] if seen is not None and seen.outcome == "fits" else [])


def agreement(expected: Estimate, seen: Measurement) -> str:
    """Peak against peak, in whichever phases they are."""
    found = differences(expected, seen)
    if not found:
        return f"the probe {DEVICE_WORDS[seen.device]} has no phase that was expected"
    heaviest, before = max(found, key=lambda each: each.needed_bytes), max(each.expected_bytes for each in found)
    what = " of tensors" if seen.device == "cpu" else ""
    return (
        f"the probe {DEVICE_WORDS[seen.device]} needed {format_size(heaviest.needed_bytes)}{what}, its peak in the {heaviest.name.replace('_', ' ')}; "
        f"{expected.evidence}: {format_size(before)} ({before / heaviest.needed_bytes - 1:+.1%})"
    )


def changed(before: Candidate, after: Candidate) -> str:
    """The settings of the second candidate that the first one has otherwise."""
    names = [field.name for field in fields(Candidate) if getattr(before, field.name) != getattr(after, field.name)]
    return settings_text(settings_of_fields({name: getattr(after, name) for name in names}))

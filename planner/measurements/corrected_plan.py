"""A plan corrected by its probes: the proven candidate becomes the best, and notes say how wrong the plan was."""

from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import replace

from planner.candidate import FIELDS, Candidate
from planner.estimation import accepted, estimate
from planner.jobs.settings import is_shown, settings_of_fields
from planner.measurements.corrected_estimate import (
    correct_estimate,
    heaviest_rank,
    needed_peak_bytes,
    phase_differences,
    why_undecided,
)
from planner.measurements.fingerprint import candidate_key
from planner.measurements.measurement import USUAL_STEPS, Measurement
from planner.planning import Plan, Proof
from planner.quantities import Estimate, Evidence, Note, PhaseDifference


def plan_contradiction(plan: Plan, measurements: Sequence[Measurement]) -> Note | None:
    """Return the first contradiction of a plan by probes of its best candidate; None: they agree."""
    best = plan_before_measurements(plan).best
    found = (contradiction(best, measurement) for measurement in _measurements_of(best.candidate, measurements))
    return next(filter(None, found), None)


def plan_before_measurements(plan: Plan) -> Plan:
    """Return the plan with the estimate of its best candidate.

    The user's earlier measurements may have corrected it (own_results.py): a proof must not compare these with
    themselves.
    """
    if plan.best.device == "none":
        return plan
    again = estimate(plan.best.candidate, plan.cluster, plan.job.risk)
    best = accepted(replace(again, reasons=plan.best.reasons))
    return replace(plan, best=best)


def contradiction(answer: Estimate, measurement: Measurement) -> Note | None:
    """Return how a measurement contradicts an estimate; None if it does not, or decides nothing.

    It does if only one of both says that the candidate fits, or if more was needed than the interval's upper bound.
    The allocator's cache is not needed (`corrected_estimate.needed_bytes`). A need below the lower bound is no
    contradiction. A probe on the CPU runs other kernels than the plan is about, so it contradicts nothing.
    """
    if measurement.device == "cpu" or why_undecided(answer, measurement):
        return None
    measured = correct_estimate(answer, measurement)
    expected = answer.gpus[0]
    of_probe = {"device": measurement.device, "evidence": answer.evidence}
    if measurement.outcome == "out_of_memory":
        if not answer.fits:
            return None
        values = {**of_probe, "phase": measured.gpus[0].peak_phase, "expected_bytes": expected.peak_bytes}
        return Note("probe_ran_out_of_memory", values)
    if not answer.fits:
        return Note("probe_fits", {"device": measurement.device}) if measured.fits else None
    needed, most = needed_peak_bytes(expected, measurement), expected.interval_bytes[1]
    if needed <= most:
        return None
    return Note("probe_needs_more", {**of_probe, "needed_bytes": needed, "most_bytes": most})


def correct_plan(
    plan: Plan,
    best: Candidate | None,
    measurements: Sequence[Measurement],
    lines: Sequence[str],
    report: Mapping[str, object],
) -> Plan:
    """Return the plan corrected by its probes.

    Args:
        best: the proven candidate; None: no candidate was proven.
        measurements: of every probe in order; the last decisive measurement of a candidate counts.
        lines: the certificate as text.
        report: the certificate as a JSON object.
    """
    plan = plan_before_measurements(plan)
    expected = (
        plan.best
        if best is None or candidate_key(best) == candidate_key(plan.best.candidate)
        else _expected(plan, best)
    )
    measured = decisive_measurement(expected, measurements)
    answer = accepted(correct_estimate(expected, measured, plan.job.risk) if measured is not None else expected)
    proof = Proof(
        evidence=measured.evidence if measured is not None else expected.evidence,
        device=measured.device if measured is not None else "none",
        lines=tuple(lines),
        report=report,
        expected=expected.evidence,
        differences=phase_differences(expected, measured) if measured is not None else (),
    )
    return replace(
        plan,
        best=answer,
        alternatives=tuple(
            replace(other, estimate=_correct(other.estimate, measurements, plan.job.risk))
            for other in plan.alternatives
        ),
        remedies=()
        if answer.fits
        else tuple(
            replace(other, estimate=_correct(other.estimate, measurements, plan.job.risk)) for other in plan.remedies
        ),
        # `more` is about the recommended candidate, the certificate about the proven one.
        more=plan.more if expected is plan.best else (),
        warnings=(*_corrections(plan, expected, measured, measurements), *plan.warnings),
        versions={**plan.versions, **dict(answer.versions)},
        proof=proof,
    )


def decisive_measurement(answer: Estimate, measurements: Sequence[Measurement]) -> Measurement | None:
    """Return the last measurement that decides whether an estimate's candidate fits; None if there is none."""
    own = reversed(_measurements_of(answer.candidate, measurements))
    return next((each for each in own if not why_undecided(answer, each)), None)


def _expected(plan: Plan, best: Candidate) -> Estimate:
    """Return the plan's estimate of the proven candidate, or estimate it now."""
    others = [other.estimate for other in plan.alternatives] + [remedy.estimate for remedy in plan.remedies]
    known = next((other for other in others if candidate_key(other.candidate) == candidate_key(best)), None)
    return known or estimate(best, plan.cluster, plan.job.risk)


def _measurements_of(candidate: Candidate, measurements: Sequence[Measurement]) -> list[Measurement]:
    key = candidate_key(candidate)
    return [measurement for measurement in measurements if candidate_key(measurement.candidate) == key]


def _correct(answer: Estimate, measurements: Sequence[Measurement], risk: float) -> Estimate:
    measured = decisive_measurement(answer, measurements)
    return answer if measured is None else correct_estimate(answer, measured, risk)


def _corrections(
    plan: Plan, expected: Estimate, measured: Measurement | None, measurements: Sequence[Measurement]
) -> list[Note]:
    """Return notes: how wrong the plan was, and the settings that the proven candidate changes."""
    of_best = decisive_measurement(plan.best, measurements)
    notes = [wrong] if of_best is not None and (wrong := contradiction(plan.best, of_best)) else []
    if expected is not plan.best:
        settings = changed_settings(plan.best.candidate, expected.candidate)
        notes.append(Note("proven_instead", {"settings": settings}))
    if measured is not None and measured.outcome == "fits":
        notes.append(compare_peaks(expected, measured))
    return notes


def probe_notes(expected: Estimate, measured: Measurement) -> tuple[Note, ...]:
    """Return a single probe beside the estimate of its candidate: a note on both peaks, then one for each phase.

    A probe on the CPU runs other kernels than those of the estimate: it has no notes here.
    """
    if measured.device == "cpu":
        return ()
    if measured.outcome != "fits":
        return tuple(steps_note(measured))
    differences = phase_differences(expected, measured)
    phases = phase_notes(differences, measured.evidence, expected.evidence)
    return (compare_peaks(expected, measured), *steps_note(measured), *phases)


def steps_note(measured: Measurement) -> Iterator[Note]:
    """Yield a note on the heaviest rank's memory over the steps of a long probe; nothing for one of `USUAL_STEPS`."""
    steps = heaviest_rank(measured).steps if measured.ranks else ()
    if len(steps) <= USUAL_STEPS:
        return
    most = max(range(USUAL_STEPS - 1, len(steps)), key=lambda index: steps[index].reserved_bytes)
    last = len(steps)
    shown = sorted({USUAL_STEPS, *(max(USUAL_STEPS, last * quarter // 4) for quarter in (1, 2, 3, 4)), most + 1})
    yield Note(
        "memory_over_steps",
        {
            "steps": shown,
            "reserved_bytes": [steps[step - 1].reserved_bytes for step in shown],
            "grown_bytes": steps[-1].allocated_bytes - steps[USUAL_STEPS - 1].allocated_bytes,
            "host_grown_bytes": steps[-1].host_bytes - steps[USUAL_STEPS - 1].host_bytes,
        },
    )


def compare_peaks(expected: Estimate, measured: Measurement) -> Note:
    """Return a note with the measured and the expected peak, which may be in different phases."""
    found = phase_differences(expected, measured)
    if not found:
        return Note("probe_has_no_phase", {"device": measured.device})
    heaviest = max(found, key=lambda each: each.needed_bytes)
    return Note(
        "probe_peak",
        {
            "device": measured.device,
            "phase": heaviest.name,
            "needed_bytes": heaviest.needed_bytes,
            "evidence": expected.evidence,
            "expected_bytes": max(each.expected_bytes for each in found),
        },
    )


def phase_notes(differences: Sequence[PhaseDifference], evidence: Evidence, expected: Evidence) -> tuple[Note, ...]:
    """Return a note for each phase of a probe beside the expectation, each with its evidence."""
    return tuple(
        Note(
            "phase_measured",
            {
                "phase": each.name,
                "needed_bytes": each.needed_bytes,
                "evidence": evidence,
                "spare_bytes": each.measured_bytes - each.needed_bytes,
                "expected_bytes": each.expected_bytes,
                "expected": expected,
            },
        )
        for each in differences
    )


def changed_settings(before: Candidate, after: Candidate) -> dict[str, object]:
    """Return the settings that the second candidate reads and that differ from the first, by the libraries' names."""
    names = [field for field in FIELDS if getattr(before, field) != getattr(after, field) and is_shown(after, field)]
    return settings_of_fields({name: getattr(after, name) for name in names})

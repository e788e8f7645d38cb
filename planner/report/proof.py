"""What probes said of a plan, as lines of the table and as a part of the JSON report."""

from planner.measurements.corrected_estimate import differences
from planner.measurements.corrected_plan import agreement
from planner.measurements.measurement import Measurement
from planner.plan import Proof
from planner.quantities import Estimate, PhaseDifference
from planner.units import MIB, format_size

DECIMALS = 6
LEAST_SPARE_BYTES = 5 * MIB  # less is the rounding of two figures in GiB
FIRST_LINES = {
    "simulated": ("nothing here was measured: the probes ran in simulated cards",),
    "cpu": ("no GPU was measured: the probes ran on the CPU, where the bytes of tensors are counted",),
}


def proof_lines(proof: Proof) -> tuple[str, ...]:
    """The certificate; one that is not a GPU's says so in its first line."""
    return (*FIRST_LINES.get(proof.device, ()), *proof.lines)


def difference_lines(proof: Proof) -> tuple[str, ...]:
    """A line a phase: as it was seen, without what the allocator kept to spare, and as it was expected."""
    return tuple(_difference(proof, each) for each in proof.differences)


def seen_lines(expected: Estimate, seen: Measurement) -> tuple[str, ...]:
    """A single probe beside what was expected of its candidate: peak against peak, then a line a phase."""
    if seen.outcome != "fits":
        return ()
    phases = differences(expected, seen)
    proof = Proof(
        evidence=seen.evidence, device=seen.device, lines=(), report={}, expected=expected.evidence, differences=phases
    )
    return (agreement(expected, seen), *difference_lines(proof))


def proof_report(proof: Proof) -> dict[str, object]:
    return {
        "evidence": proof.evidence,
        "device": proof.device,
        "expected": proof.expected,
        "lines": list(proof_lines(proof)),
        "differences": [
            {
                "name": each.name, "expected_bytes": each.expected_bytes, "measured_bytes": each.measured_bytes, "needed_bytes": each.needed_bytes,
                "error": round(each.error, DECIMALS),
            }
            for each in proof.differences
        ],
        "report": dict(proof.report),
    }  # fmt: skip


def _difference(proof: Proof, each: PhaseDifference) -> str:
    spare = each.measured_bytes - each.needed_bytes
    kept = f" and {format_size(spare)} kept to spare" if spare >= LEAST_SPARE_BYTES else ""
    needed, expected = format_size(each.needed_bytes), format_size(each.expected_bytes)
    return f"{each.name.replace('_', ' ')} {needed} {proof.evidence}{kept}; {expected} {expected_words(proof)} ({each.error:+.1%})"


def expected_words(proof: Proof) -> str:
    """The lower rung's word; where both have the same one, which of them it was."""
    return f"{proof.expected} before" if proof.expected == proof.evidence else proof.expected

"""The result of probes as lines of text."""

from planner.measurements.corrected_estimate import phase_differences
from planner.measurements.corrected_plan import compare_peaks
from planner.measurements.measurement import Measurement
from planner.plan import Proof
from planner.quantities import Estimate, PhaseDifference
from planner.units import MIB, format_size

LEAST_SPARE_BYTES = 5 * MIB  # a smaller difference is the rounding of two figures in GiB
FIRST_LINES = {
    "simulated": ("nothing here was measured: the probes ran in simulated cards",),
    "emulated": ("no GPU was measured: the probes ran the CUDA stack on emulated cards, which count memory only",),
    "cpu": ("no GPU was measured: the probes ran on the CPU, where the bytes of tensors are counted",),
}


def proof_lines(proof: Proof) -> tuple[str, ...]:
    """Return the certificate; that of another device than a GPU begins with a line that says so."""
    return (*FIRST_LINES.get(proof.device, ()), *proof.lines)


def difference_lines(proof: Proof) -> tuple[str, ...]:
    """Return a line for each phase: its measured need, what the allocator kept to spare, and the expected memory."""
    return tuple(_difference(proof, each) for each in proof.differences)


def probe_lines(expected: Estimate, measured: Measurement) -> tuple[str, ...]:
    """Return a single probe beside the estimate of its candidate: a line with both peaks, then one for each phase.

    A probe on the CPU runs other kernels than those of the estimate: it has no lines here.
    """
    if measured.outcome != "fits" or measured.device == "cpu":
        return ()
    proof = Proof(
        evidence=measured.evidence,
        device=measured.device,
        lines=(),
        report={},
        expected=expected.evidence,
        differences=phase_differences(expected, measured),
    )
    return (compare_peaks(expected, measured), *difference_lines(proof))


def _difference(proof: Proof, each: PhaseDifference) -> str:
    spare = each.measured_bytes - each.needed_bytes
    kept = f" and {format_size(spare)} kept to spare" if spare >= LEAST_SPARE_BYTES else ""
    needed, expected = format_size(each.needed_bytes), format_size(each.expected_bytes)
    phase = each.name.replace("_", " ")
    return f"{phase} {needed} {proof.evidence}{kept}; {expected} {_expected_words(proof)} ({each.error:+.1%})"


def _expected_words(proof: Proof) -> str:
    """Return the evidence of the expected figures; "before" tells it from equal evidence of the probes."""
    return f"{proof.expected} before" if proof.expected == proof.evidence else proof.expected

"""What probes have said of a plan: the certificate of a study, and the phases of the answer as they were expected beside as they were seen."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from planner.quantities import Evidence, Phase


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseDifference:
    """One phase of a probed candidate on its heaviest GPU.

    `measured_bytes` is all that was taken; `needed_bytes` is that without what the allocator kept and would have given back, which is what an
    estimate speaks of.
    """

    name: Phase
    expected_bytes: int
    measured_bytes: int
    needed_bytes: int

    @property
    def error(self) -> float:
        """Of what was expected, as a share of what was needed; below 0 too little was expected."""
        return self.expected_bytes / self.needed_bytes - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """Why a plan is believed. `lines` are for people, `report` is the study's own JSON object; `expected` names the rung of `expected_bytes`."""

    evidence: Evidence  # "simulated" where the probes were
    device: Literal["none", "cuda", "cpu", "simulated"]  # what the best candidate's probe ran on; "none": it was not probed
    lines: tuple[str, ...]
    report: Mapping[str, object]
    expected: Evidence
    differences: tuple[PhaseDifference, ...]  # of the best candidate; none where it was not probed

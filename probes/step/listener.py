"""The interface of whatever watches the phases of a training step."""

from typing import Protocol

from planner.quantities import Phase


class PhaseListener(Protocol):
    """Watches a training step: a reader of a GPU's memory counters, or of the CPU allocator's reports."""

    phase: Phase  # the running phase

    def enter_phase(self, phase: Phase) -> None:
        """Count what is allocated from now on in `phase`."""

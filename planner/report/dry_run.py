"""A dry run beside the estimate, as text and as JSON: both peaks of each phase, and the memory alive at the peak."""

from collections.abc import Iterator

from msgspec import UNSET
from rich.text import Text

from planner.allocator.reserved import Reserved
from planner.allocator.simulation import Simulation
from planner.gpus.cluster import Cluster
from planner.quantities import Component, Note, PhaseMemory
from planner.report.documents import SCHEMA, DryRunPhase, DryRunReport, EstimatedPhases, OutOfMemory
from planner.report.json import DECIMALS, settings_report
from planner.report.words import describe_candidate, describe_cluster, readable
from planner.units import MIB, format_gib

NOTABLE_DIFFERENCE = 0.03  # share of the peak: a larger difference is explained in a line
HOLDINGS = 15  # rows of the list of what is alive at the peak
PHASE_WIDTH, NUMBER_WIDTH, COUNT_WIDTH, COMPONENT_WIDTH = 20, 12, 7, 18


def dry_run_note(simulation: Simulation) -> Note:
    """Return how far the dry run's peak is from the estimate's.

    Beyond `NOTABLE_DIFFERENCE` the note also names the phase that differs most.
    """
    trl = {"trl": dict(simulation.trace.versions)["trl"]}
    for note in difference_notes(simulation):
        return Note(note.code, {**trl, **note.values})
    return Note("dry_run_agrees", {**trl, "difference": simulation.difference})


def difference_notes(simulation: Simulation) -> tuple[Note, ...]:
    """Return a note on both peaks and the phase that differs most; empty within `NOTABLE_DIFFERENCE`."""
    if abs(simulation.difference) <= NOTABLE_DIFFERENCE:
        return ()
    estimated = {phase.name: phase.total_bytes for phase in simulation.estimated}
    phase = max(
        (phase for phase in simulation.simulated if phase.name in estimated),
        key=lambda phase: abs(phase.total_bytes - estimated[phase.name]),
    )
    values = {
        "peak_bytes": simulation.peak.total_bytes,
        "peak_phase": simulation.peak.name,
        "above": simulation.peak.total_bytes / simulation.estimated_peak.total_bytes - 1,
        "phase": phase.name,
        "simulated_bytes": phase.total_bytes,
        "estimated_bytes": estimated[phase.name],
    }
    return (Note("dry_run_differs", values),)


def dry_run_table(simulation: Simulation, cluster: Cluster) -> Text:
    """Return the table of phases, simulated and estimated, then the memory alive at the peak by module and operator."""
    candidate = simulation.candidate
    lines = [
        Text.assemble(
            (f"{candidate.model.id} · {candidate.method} · {describe_cluster(cluster)}", "bold"),
            "  ",
            ("simulated", "italic"),
        ),
        Text(describe_candidate(candidate)),
        Text(_libraries(simulation), style="dim"),
        Text(),
        *_phases(simulation),
        *_shortfall(simulation.reserved),
        Text(),
        *_holdings(simulation),
    ]
    return Text("\n").join(lines)


def dry_run_report(simulation: Simulation) -> DryRunReport:
    """Return the document of `plan dry-run --json`."""
    reserved = simulation.reserved
    return DryRunReport(
        schema=SCHEMA,
        evidence="simulated",
        settings=settings_report(simulation.candidate),
        peak_bytes=simulation.peak.total_bytes,
        peak_phase=simulation.peak.name,
        phases=tuple(_dry_run_phase(phase, reserved) for phase in simulation.simulated),
        reserved_peak_bytes=reserved.peak_bytes if reserved is not None else None,
        out_of_memory=_out_of_memory(reserved),
        estimated=EstimatedPhases(
            peak_bytes=simulation.estimated_peak.total_bytes,
            phases=tuple(_dry_run_phase(phase, None) for phase in simulation.estimated),
        ),
        difference=round(simulation.difference, DECIMALS),
        composed=simulation.composed,
        alive_at_peak=simulation.trace.holdings_at_peak(HOLDINGS),
        substitutions=simulation.trace.substitutions,
        versions=dict(simulation.trace.versions),
    )


def _libraries(simulation: Simulation) -> str:
    versions = " ".join(f"{name} {version}" for name, version in simulation.trace.versions)
    composed = "; sharding and engine composed onto one process' step" if simulation.composed else ""
    return f"a step of the installed trainer on fake tensors ({versions}){composed}"


def _phases(simulation: Simulation) -> Iterator[Text]:
    """One row for each phase; the peak is marked, and its components stand under its row."""
    reserved = simulation.reserved
    heads = ("simulated", "estimated", "difference", *(("reserved",) if reserved is not None else ()))
    yield Text(f"{'GiB':<{PHASE_WIDTH}}" + "".join(f"{head:>{NUMBER_WIDTH}}" for head in heads), style="dim")
    estimated = {phase.name: phase.total_bytes for phase in simulation.estimated}
    for phase in simulation.simulated:
        is_peak = phase.name == simulation.peak.name
        other = estimated.get(phase.name, 0)
        cells = [_gib(phase.total_bytes), _gib(other) if other else "-", _percent(phase.total_bytes, other)]
        if reserved is not None:
            cells.append(_gib(reserved.most[phase.name]) if phase.name in reserved.most else "-")
        numbers = "".join(f"{cell:>{NUMBER_WIDTH}}" for cell in cells)
        yield Text(
            f"{readable(phase.name):<{PHASE_WIDTH}}{numbers}{' ◂ peak' if is_peak else ''}",
            style="bold" if is_peak else "",
        )
        for component, size in _largest_components(simulation.peak) if is_peak else ():
            yield Text(f"  {readable(component):<{PHASE_WIDTH - 2}}{_gib(size):>{NUMBER_WIDTH}}", style="dim")


def _shortfall(reserved: Reserved | None) -> Iterator[Text]:
    if reserved is not None and reserved.shortfall is not None:
        yield Text(
            f"runs out in the {readable(reserved.shortfall.phase)}: {reserved.shortfall.figures.message}", style="red"
        )


def _largest_components(phase: PhaseMemory) -> list[tuple[Component, int]]:
    return sorted(((name, size) for name, size in phase.components.items() if size >= MIB), key=lambda item: -item[1])


def _holdings(simulation: Simulation) -> Iterator[Text]:
    """The largest holdings of one process; a composed candidate shards them afterwards."""
    yield Text(f"alive at the peak of the step{' of one process' if simulation.composed else ''}", style="bold")
    yield Text(
        f"{'MiB':>{NUMBER_WIDTH}}{'count':>{COUNT_WIDTH}}  {'component':<{COMPONENT_WIDTH}}module, operator",
        style="dim",
    )
    for holding in simulation.trace.holdings_at_peak(HOLDINGS):
        size = f"{holding.size_bytes / MIB:,.1f}"
        place = f"{holding.module or '-'}, {holding.operator}"
        yield Text(
            f"{size:>{NUMBER_WIDTH}}{holding.count:>{COUNT_WIDTH}}  "
            f"{readable(holding.component):<{COMPONENT_WIDTH}}{place}"
        )


def _gib(size_bytes: int) -> str:
    return format_gib(size_bytes, 2).removesuffix(" GiB")


def _percent(simulated: int, estimated: int) -> str:
    return f"{estimated / simulated - 1:+.1%}" if estimated and simulated else "-"


def _dry_run_phase(phase: PhaseMemory, reserved: Reserved | None) -> DryRunPhase:
    """Return one phase without components of 0 bytes, with what the allocator reserves in it, if it is known."""
    return DryRunPhase(
        name=phase.name,
        total_bytes=phase.total_bytes,
        components={name: size for name, size in phase.components.items() if size},
        reserved_bytes=UNSET if reserved is None or phase.name not in reserved.most else reserved.most[phase.name],
    )


def _out_of_memory(reserved: Reserved | None) -> OutOfMemory | None:
    """Return the figures of the message that PyTorch would raise; None if the step fits or nothing is reserved."""
    if reserved is None or reserved.shortfall is None:
        return None
    figures = reserved.shortfall.figures
    return OutOfMemory(
        phase=reserved.shortfall.phase,
        tried_bytes=figures.tried_bytes,
        total_bytes=figures.total_bytes,
        free_bytes=figures.free_bytes,
        allocated_bytes=figures.allocated_bytes,
        unallocated_bytes=figures.unallocated_bytes,
        message=figures.message,
    )

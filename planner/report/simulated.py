"""A dry run beside the estimate: both rungs phase by phase, and what was alive at the peak."""

import math
from collections.abc import Iterator

from rich.text import Text

from planner.allocator.reserved import Reserved
from planner.allocator.simulation import Simulation
from planner.gpus.cluster import Cluster
from planner.jobs.settings import settings_of
from planner.quantities import Component, Evidence, Phase, PhaseMemory
from planner.report.words import cards, describe, words
from planner.units import MIB, format_gib

SCHEMA = 1
WORTH_SAYING = 0.03  # of the peak: where the rungs differ by more, a line says where
HOLDINGS = 15  # rows of the table of what was alive
HINT = "add --dry-run to check this with the installed trl, in about 15 s"
SIMULATED: Evidence = "simulated"
PHASE_WIDTH, NUMBER_WIDTH, COUNT_WIDTH, COMPONENT_WIDTH = 20, 12, 7, 18


def agreement(simulation: Simulation) -> str:
    """One line: by how much the dry run's peak differs from the estimate's, rounded up; beyond `WORTH_SAYING` also in which phase most."""
    trl = dict(simulation.trace.versions)["trl"]
    if apart := disagreement(simulation):
        return apart[0].replace("a dry run of the step", f"a dry run with the installed trl {trl}")
    return f"a dry run with the installed trl {trl} agrees within {max(math.ceil(abs(simulation.difference) * 1000), 1) / 10:.1f} %"


def searched_again(residual: float) -> str:
    """One line: the plan was searched again because the dry run needed more than the estimate allowed."""
    return f"searched again with {residual:.1%} more memory for this tuning class, which the dry run needed above the estimate"


def disagreement(simulation: Simulation) -> tuple[str, ...]:
    """A line where the rungs differ: by how much, and in which phase most."""
    if abs(simulation.difference) <= WORTH_SAYING:
        return ()
    estimated = {phase.name: phase.total_bytes for phase in simulation.estimated}
    phase = max(
        (phase for phase in simulation.simulated if phase.name in estimated),
        key=lambda phase: abs(phase.total_bytes - estimated[phase.name]),
    )
    apart = simulation.peak.total_bytes / simulation.estimated_peak.total_bytes - 1
    return (
        f"a dry run of the step peaks at {format_gib(simulation.peak.total_bytes, 1)} in the {words(simulation.peak.name)}, "
        f"{abs(apart):.1%} {'more' if apart > 0 else 'less'} than estimated; they differ most in the {words(phase.name)}: "
        f"{format_gib(phase.total_bytes, 1)} simulated, {format_gib(estimated[phase.name], 1)} estimated",
    )


def simulation_table(simulation: Simulation, cluster: Cluster) -> Text:
    """Phases with both rungs and their difference, then what was alive at the peak by module and operator."""
    candidate = simulation.candidate
    lines = [
        Text.assemble(
            (f"{candidate.model.id} · {candidate.method} · {cards(cluster)}", "bold"), "  ", (SIMULATED, "italic")
        ),
        Text(describe(candidate)),
        Text(_stack(simulation), style="dim"),
        Text(),
        *_phases(simulation),
        *_shortfall(simulation.reserved),
        Text(),
        *_holdings(simulation),
    ]
    return Text("\n").join(lines)


def simulation_report(simulation: Simulation) -> dict[str, object]:
    """What `plan dry-run --json` prints."""
    return {
        "schema": SCHEMA,
        "evidence": SIMULATED,
        "settings": settings_of(simulation.candidate),
        "peak_bytes": simulation.peak.total_bytes,
        "peak_phase": simulation.peak.name,
        "phases": [_phase(phase) | _reserved(simulation.reserved, phase.name) for phase in simulation.simulated],
        "reserved_peak_bytes": simulation.reserved.peak_bytes if simulation.reserved is not None else None,
        "out_of_memory": _out_of_memory(simulation.reserved),
        "estimated": {"peak_bytes": simulation.estimated_peak.total_bytes, "phases": [_phase(phase) for phase in simulation.estimated]},
        "difference": round(simulation.difference, 6),
        "composed": simulation.composed,
        "alive_at_peak": [
            {
                "component": holding.component, "phase": holding.phase, "module": holding.module, "operator": holding.operator, "count": holding.count,
                "size_bytes": holding.size_bytes,
            }
            for holding in simulation.trace.holdings_at_peak(HOLDINGS)
        ],
        "substitutions": list(simulation.trace.substitutions),
        "versions": dict(simulation.trace.versions),
    }  # fmt: skip


def _phase(phase: PhaseMemory) -> dict[str, object]:
    return {
        "name": phase.name,
        "total_bytes": phase.total_bytes,
        "components": {name: size for name, size in phase.components.items() if size},
    }


def _reserved(reserved: Reserved | None, phase: Phase) -> dict[str, object]:
    return {"reserved_bytes": reserved.most[phase]} if reserved is not None and phase in reserved.most else {}


def _out_of_memory(reserved: Reserved | None) -> dict[str, object] | None:
    """The figures of the message that PyTorch would raise; None where the step fits, or has no order in which all is allocated."""
    if reserved is None or reserved.shortfall is None:
        return None
    figures = reserved.shortfall.figures
    return {
        "phase": reserved.shortfall.phase, "tried_bytes": figures.tried_bytes, "total_bytes": figures.total_bytes, "free_bytes": figures.free_bytes,
        "allocated_bytes": figures.allocated_bytes, "unallocated_bytes": figures.unallocated_bytes, "message": figures.message,
    }  # fmt: skip


def _stack(simulation: Simulation) -> str:
    versions = " ".join(f"{name} {version}" for name, version in simulation.trace.versions)
    composed = "; sharding and engine composed onto one process' step" if simulation.composed else ""
    return f"a step of the installed trainer on fake tensors ({versions}){composed}"


def _phases(simulation: Simulation) -> Iterator[Text]:
    reserved = simulation.reserved
    column = f"{'reserved':>{NUMBER_WIDTH}}" if reserved is not None else ""
    yield Text(
        f"{'GiB':<{PHASE_WIDTH}}{'simulated':>{NUMBER_WIDTH}}{'estimated':>{NUMBER_WIDTH}}{'difference':>{NUMBER_WIDTH}}{column}",
        style="dim",
    )
    estimated = {phase.name: phase.total_bytes for phase in simulation.estimated}
    for phase in simulation.simulated:
        peak = phase.name == simulation.peak.name
        other = estimated.get(phase.name, 0)
        shown = (_gib(phase.total_bytes), _gib(other) if other else "-", _percent(phase.total_bytes, other))
        numbers = "".join(f"{each:>{NUMBER_WIDTH}}" for each in shown)
        if reserved is not None:
            numbers += f"{_gib(reserved.most[phase.name]) if phase.name in reserved.most else '-':>{NUMBER_WIDTH}}"
        yield Text(
            f"{words(phase.name):<{PHASE_WIDTH}}{numbers}{' ◂ peak' if peak else ''}", style="bold" if peak else ""
        )
    for component, size in _largest(simulation.peak):
        yield Text(f"  {words(component):<{PHASE_WIDTH - 2}}{_gib(size):>{NUMBER_WIDTH}}", style="dim")


def _shortfall(reserved: Reserved | None) -> Iterator[Text]:
    if reserved is not None and reserved.shortfall is not None:
        yield Text(
            f"runs out in the {words(reserved.shortfall.phase)}: {reserved.shortfall.figures.message}", style="red"
        )


def _largest(phase: PhaseMemory) -> list[tuple[Component, int]]:
    return sorted(((name, size) for name, size in phase.components.items() if size >= MIB), key=lambda item: -item[1])


def _holdings(simulation: Simulation) -> Iterator[Text]:
    """What one process held; of a composed candidate it is cut up afterwards."""
    yield Text(f"alive at the peak of the step{' of one process' if simulation.composed else ''}", style="bold")
    yield Text(
        f"{'MiB':>{NUMBER_WIDTH}}{'count':>{COUNT_WIDTH}}  {'component':<{COMPONENT_WIDTH}}module, operator",
        style="dim",
    )
    for holding in simulation.trace.holdings_at_peak(HOLDINGS):
        size = f"{holding.size_bytes / MIB:,.1f}"
        where = f"{holding.module or '-'}, {holding.operator}"
        yield Text(
            f"{size:>{NUMBER_WIDTH}}{holding.count:>{COUNT_WIDTH}}  {words(holding.component):<{COMPONENT_WIDTH}}{where}"
        )


def _gib(size_bytes: int) -> str:
    return format_gib(size_bytes, 2).removesuffix(" GiB")


def _percent(simulated: int, estimated: int) -> str:
    return f"{estimated / simulated - 1:+.1%}" if estimated and simulated else "-"

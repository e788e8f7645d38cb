"""A dry run beside the estimate, as text, as JSON and as a note."""

from collections.abc import Iterator

from rich.text import Text

from planner.gpus.cluster import Cluster
from planner.measurements.dry_run import DryRun, DryRunPhase
from planner.quantities import Note
from planner.report.documents.fields import SCHEMA
from planner.report.documents.plans import DryRunReport, EmulatedPhase, EstimatedPhases, OutOfMemory
from planner.report.json import DECIMALS, phase_report, settings_report
from planner.report.words import bare_gib, describe_candidate, describe_cluster, readable
from planner.units import format_gib

PHASE_WIDTH, NUMBER_WIDTH = 20, 12
SHOWN_LIBRARIES = ("torch", "transformers", "trl")


def dry_run_note(run: DryRun) -> Note:
    """Return what the dry run needed beside the estimate, or that memory ran out."""
    return Note(
        "dry_run" if run.fits else "dry_run_ran_out",
        {
            "trl": run.measurement.versions.get("trl", ""),
            "phase": run.peak_phase,
            "needed_bytes": run.peak_bytes,
            "expected_bytes": run.expected.gpus[0].peak_bytes,
        },
    )


def dry_run_table(run: DryRun, cluster: Cluster) -> Text:
    """Return the table of phases, emulated and estimated, and whether the GPU is large enough."""
    candidate = run.expected.candidate
    heads = ("emulated", "estimated", "difference", "reserved")
    lines = [
        Text.assemble(
            (f"{candidate.model.id} · {candidate.method} · {describe_cluster(cluster)}", "bold"),
            "  ",
            ("emulated", "italic"),
        ),
        Text(describe_candidate(candidate)),
        Text(_libraries(run), style="dim"),
        Text(),
        Text(f"{'GiB':<{PHASE_WIDTH}}" + "".join(f"{head:>{NUMBER_WIDTH}}" for head in heads), style="dim"),
        *(_phase(phase, phase.peak.name == run.peak_phase) for phase in run.phases),
        Text(),
        *_verdict(run),
    ]
    return Text("\n").join(lines)


def _libraries(run: DryRun) -> str:
    found = run.measurement.versions
    versions = " ".join(f"{name} {found[name]}" for name in SHOWN_LIBRARIES if name in found)
    return f"bytes of tensors in the installed trainer, on a GPU that runs no kernels ({versions})"


def _phase(phase: DryRunPhase, is_peak: bool) -> Text:
    estimated = phase.estimated_allocated_bytes
    cells = (
        _gib(phase.peak.allocated_bytes),
        _gib(estimated) if estimated else "-",
        f"{phase.difference:+.1%}" if estimated else "-",
        _gib(phase.peak.reserved_bytes),
    )
    numbers = "".join(f"{cell:>{NUMBER_WIDTH}}" for cell in cells)
    return Text(
        f"{readable(phase.peak.name):<{PHASE_WIDTH}}{numbers}{' ◂ peak' if is_peak else ''}",
        style="bold" if is_peak else "",
    )


def _verdict(run: DryRun) -> Iterator[Text]:
    """With what the driver and the allocator need besides tensors: the need of the estimate too."""
    expected, capacity = run.expected.gpus[0].peak_bytes, bare_gib(run.gpu.free_bytes)
    estimated = f"estimated: {format_gib(expected, 2)} ({run.difference:+.1%})"
    if run.fits:
        yield Text(f"fits: {_gib(run.peak_bytes)} of {capacity} GiB are needed, {estimated}", style="green")
    else:
        yield Text(f"runs out in the {readable(run.peak_phase)}: {run.measurement.message}", style="red")
        yield Text(f"at least {_gib(run.peak_bytes)} of {capacity} GiB are needed, {estimated}")


def _gib(size_bytes: int) -> str:
    return format_gib(size_bytes, 2).removesuffix(" GiB")


def dry_run_report(run: DryRun) -> DryRunReport:
    """Return the document of `plan dry-run --json`."""
    expected = run.expected.gpus[0]
    return DryRunReport(
        schema=SCHEMA,
        evidence="emulated",
        settings=settings_report(run.expected.candidate),
        fits=run.fits,
        peak_bytes=run.peak_bytes,
        peak_phase=run.peak_phase,
        phases=tuple(
            EmulatedPhase(
                name=phase.peak.name,
                total_bytes=phase.needed_bytes,
                allocated_bytes=phase.peak.allocated_bytes,
                estimated_allocated_bytes=phase.estimated_allocated_bytes,
                reserved_bytes=phase.peak.reserved_bytes,
                driver_bytes=phase.peak.driver_bytes,
            )
            for phase in run.phases
        ),
        reserved_peak_bytes=max((phase.peak.reserved_bytes for phase in run.phases), default=0),
        out_of_memory=_out_of_memory(run),
        estimated=EstimatedPhases(
            peak_bytes=expected.peak_bytes, phases=tuple(phase_report(phase) for phase in expected.phases)
        ),
        difference=round(run.difference, DECIMALS),
        versions=run.measurement.versions,
    )


def _out_of_memory(run: DryRun) -> OutOfMemory | None:
    """Return the figures of the message that PyTorch raised; None if it raised none."""
    found = run.measurement.shortage
    if found is None:
        return None
    return OutOfMemory(
        phase=found.phase,
        tried_bytes=found.tried_bytes,
        total_bytes=run.gpu.total_bytes,
        free_bytes=found.free_bytes,
        allocated_bytes=found.allocated_bytes,
        unallocated_bytes=max(found.reserved_bytes - found.allocated_bytes, 0),
        message=run.measurement.message,
    )

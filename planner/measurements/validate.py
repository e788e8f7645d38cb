"""Predicted against measured: the estimate and the dry run of cases that somebody has measured, or that a device measures now."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from planner.allocator.simulation import Simulation
from planner.candidate import Candidate
from planner.errors import InputError, PlanError
from planner.estimate import estimate
from planner.files.journal import append_line, lines_of
from planner.gpus.catalogue import load_gpu
from planner.gpus.cluster import Cluster, Gpu
from planner.measurements.cases import Case, Cases, LeftOut, Quantity, case_of_measurement
from planner.measurements.fingerprint import candidate_key
from planner.measurements.measurement import Measurement, measurement_line, measurement_of
from planner.memory.communication import nccl_bytes
from planner.memory.runtime import context_bytes
from planner.quantities import Estimate, Evidence, PhaseMemory

Probe = Callable[[Candidate], Measurement]
Simulate = Callable[[Estimate, Gpu], Simulation]
Say = Callable[[str], None]

UNDER = 0.03  # what is predicted too small by more than this share is counted: that is what runs out of memory
ANY_CARD = "A100-80G"  # where only tensors are compared, which are the same on every card
ALL = "all"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One measured figure and what each rung says of it; `simulated` is in `predicted` only if a dry run was made."""

    case: Case
    quantity: Quantity
    measured_bytes: int
    predicted: Mapping[Evidence, int]

    def error(self, rung: Evidence) -> float:
        """Predicted over measured, less one: below 0 too little."""
        return self.predicted[rung] / self.measured_bytes - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """A case that ran out of memory: whether each rung had said that it does not fit."""

    case: Case
    foreseen: Mapping[Evidence, bool]


@dataclass(frozen=True, kw_only=True, slots=True)
class Validation:
    rows: tuple[Row, ...]
    endings: tuple[Ending, ...]
    left_out: tuple[LeftOut, ...]
    interrupted: bool  # by Ctrl-C: what was not measured by then is left out


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """The signed errors of one group, quantity and rung. `under`: how many were predicted too small by more than `UNDER`."""

    group: str
    quantity: Quantity
    rung: Evidence
    count: int
    mean: float
    mean_absolute: float
    worst: float
    under: int


def validate(
    cases: Cases,
    cluster: Cluster | None = None,
    *,
    probe: Probe | None = None,
    simulate: Simulate | None = None,
    record: Path | None = None,
    say: Say = lambda line: None,
) -> Validation:
    """Compares every case; those that nobody has measured are measured first.

    Args:
        cluster: the card of cases that name none; None: they must.
        probe: a device that measures a candidate; None: what is not measured is left out.
        simulate: a dry run of an estimate; None: cases are compared with the estimate alone.
        record: the file that each new measurement is added to, and in which those of an earlier, interrupted run are found.
        say: told of the progress, a line each. Ctrl-C ends the measuring, not the comparison.

    Raises:
        InputError: a case names no card, and there is no cluster.
    """
    known, interrupted = _probed(cases, probe, record, say)
    measured, left_out = _filled(cases, known, cluster)
    placed = [(case, _cluster_of(case, cluster)) for case in measured]
    rows: list[Row] = []
    endings: list[Ending] = []
    for number, (case, its_cluster) in enumerate(placed, 1):
        say(f"{number}/{len(placed)} {case.label}")
        try:
            phases, fits = _predicted(case, its_cluster, simulate, say)
        except PlanError as error:
            left_out.append(LeftOut(line=case.line, why=str(error)))
            continue
        rows += _rows(case, phases, its_cluster.gpu)
        endings += (
            [Ending(case=case, foreseen={rung: not fit for rung, fit in fits.items()})]
            if case.outcome == "out_of_memory"
            else []
        )
    return Validation(rows=tuple(rows), endings=tuple(endings), left_out=tuple(left_out), interrupted=interrupted)


def part_bytes(phase: PhaseMemory, quantity: Quantity, candidate: Candidate, gpu: Gpu) -> int:
    """What of a phase on one GPU a measured quantity contains.

        driver = all; reserved = less the CUDA context and NCCL; allocated = less the allocator's slack too; tensors = less cuBLAS workspaces too

    Source: PyTorch's torch.cuda.memory_stats counts what its allocator gives out; cuBLAS workspaces are given out by it
    (planner/memory/runtime.py), contexts and NCCL's buffers are not.
    """
    if quantity == "driver":
        return phase.total_bytes
    slack = phase.components.get("fragmentation", 0)
    if quantity == "tensors":
        return phase.total_bytes - slack - phase.components.get("runtime", 0)
    outside = context_bytes(gpu) + nccl_bytes(candidate, gpu)
    return phase.total_bytes - outside - (slack if quantity == "allocated" else 0)


def summaries(validation: Validation) -> list[Summary]:
    """Per method and tuning, then over all, for each quantity and rung."""
    groups: dict[tuple[Quantity, str], list[Row]] = {}
    for row in validation.rows:
        groups.setdefault((row.quantity, group_of(row.case.candidate)), []).append(row)
    for quantity in dict.fromkeys(row.quantity for row in validation.rows):
        groups[quantity, ALL] = [row for row in validation.rows if row.quantity == quantity]
    return [summary for (quantity, group), rows in groups.items() for summary in _summaries(group, quantity, rows)]


def group_of(candidate: Candidate) -> str:
    tuning = "qlora" if candidate.tuning == "lora" and candidate.quantization != "none" else candidate.tuning
    return f"{candidate.method} {tuning}"


# -- measuring ---------------------------------------------------------------------------------------------------------


def _probed(cases: Cases, probe: Probe | None, record: Path | None, say: Say) -> tuple[dict[str, Measurement], bool]:
    """What there is of the cases that nobody has measured, by candidate, and whether Ctrl-C ended it. Each is written down before the next one begins."""
    known = _recorded(record)
    if probe is None:
        return known, False
    for case in cases.cases:
        key = candidate_key(case.candidate)
        if case.outcome != "not measured" or key in known:
            continue
        say(f"measuring {case.label}")
        try:
            known[key] = probe(case.candidate)
        except KeyboardInterrupt:
            say("interrupted: the same command goes on from here" if record is not None else "interrupted")
            return known, True
        if (
            record is not None and known[key].outcome != "gpu_in_use"
        ):  # nothing was measured, so it is asked again another time
            append_line(record, measurement_line(known[key]))
    return known, False


def _filled(
    cases: Cases, known: Mapping[str, Measurement], cluster: Cluster | None
) -> tuple[list[Case], list[LeftOut]]:
    """The cases with their figures, and what is left out because it has none."""
    read = [_with_figures(case, known, cluster) if case.outcome == "not measured" else case for case in cases.cases]
    return [case for case in read if isinstance(case, Case)], [
        *cases.left_out,
        *(case for case in read if isinstance(case, LeftOut)),
    ]


def _recorded(record: Path | None) -> dict[str, Measurement]:
    """What an earlier run has measured, by candidate. A line that was cut off is none.

    Raises:
        InputError: the file holds something else; nothing is added to such a file.
    """
    found: dict[str, Measurement] = {}
    for number, line in enumerate(lines_of(record) if record is not None else (), 1):
        try:
            measurement = measurement_of(json.loads(line))
        except ValueError:
            continue
        except InputError as error:
            raise InputError(f"{record}, line {number}: {error}") from error
        found[candidate_key(measurement.candidate)] = measurement
    return found


def _with_figures(case: Case, known: Mapping[str, Measurement], cluster: Cluster | None) -> Case | LeftOut:
    measurement = known.get(candidate_key(case.candidate))
    if measurement is None:
        return LeftOut(line=case.line, why="not measured")
    seen = case_of_measurement(measurement, case.line, case.gpu or (cluster.gpu if cluster is not None else None))
    return replace(seen, label=case.label, candidate=case.candidate) if isinstance(seen, Case) else seen


# -- predicting --------------------------------------------------------------------------------------------------------


def _predicted(
    case: Case, cluster: Cluster, simulate: Simulate | None, say: Say
) -> tuple[dict[Evidence, tuple[PhaseMemory, ...]], dict[Evidence, bool]]:
    """The estimate of a case and, if wanted, its dry run: phases of the training GPU by rung, and whether each says that it fits."""
    answer = estimate(case.candidate, cluster)
    phases: dict[Evidence, tuple[PhaseMemory, ...]] = {"estimated": answer.gpus[0].phases}
    fits: dict[Evidence, bool] = {"estimated": answer.fits}
    if simulate is not None:
        try:
            simulation = simulate(answer, cluster.gpu)
        except PlanError as error:
            say(f"line {case.line} is not simulated: {error}")
        else:
            phases["simulated"], fits["simulated"] = (
                simulation.simulated,
                simulation.peak.total_bytes <= cluster.gpu.free_bytes,
            )
    return phases, fits


def _rows(case: Case, phases: Mapping[Evidence, tuple[PhaseMemory, ...]], gpu: Gpu) -> Iterator[Row]:
    for quantity, size in case.measured.items():
        sizes = {
            rung: max(part_bytes(phase, quantity, case.candidate, gpu) for phase in found)
            for rung, found in phases.items()
        }
        yield Row(case=case, quantity=quantity, measured_bytes=size, predicted=sizes)


def _cluster_of(case: Case, cluster: Cluster | None) -> Cluster:
    """As many of the case's cards as it needs."""
    gpu = case.gpu or (cluster.gpu if cluster is not None else None)
    if gpu is None and case.measured.keys() <= {"tensors"} and case.outcome == "fits":
        gpu = load_gpu(ANY_CARD)
    if gpu is None:
        raise InputError(f"Line {case.line} names no GPU. Say which one with --gpus, such as --gpus 1xA100-80G.")
    candidate = case.candidate
    server = candidate.server_gpus
    return Cluster(
        gpu=gpu, nodes=candidate.num_nodes, gpus_per_node=-(-candidate.num_processes // candidate.num_nodes) + server
    )


def _summaries(group: str, quantity: Quantity, rows: list[Row]) -> Iterator[Summary]:
    rungs: tuple[Evidence, ...] = ("estimated", "simulated")
    for rung in rungs:
        errors = [row.error(rung) for row in rows if rung in row.predicted]
        if errors:
            yield Summary(
                group=group,
                quantity=quantity,
                rung=rung,
                count=len(errors),
                mean=fmean(errors),
                mean_absolute=fmean(map(abs, errors)),
                worst=max(errors, key=abs),
                under=sum(error < -UNDER for error in errors),
            )

"""Predictions compared with measurements: the estimate and the dry run of cases that are measured, or measured now."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import fmean

from msgspec import Struct
from msgspec.structs import replace

from planner.candidate import Candidate
from planner.errors import InputError, PlanError
from planner.estimation import estimate
from planner.files.journal import append_line, lines_of
from planner.gpus.catalogue import load_gpu
from planner.gpus.cluster import Cluster, Gpu
from planner.measurements.cases import Case, Cases, LeftOut, case_of_measurement, figures_of
from planner.measurements.documents import measurement_line, measurement_of
from planner.measurements.fingerprint import candidate_key
from planner.measurements.measurement import Measurement, Quantity
from planner.memory.communication import nccl_bytes
from planner.memory.runtime import context_bytes
from planner.quantities import Estimate, Evidence, GpuMemory, PhaseMemory

Probe = Callable[[Candidate], Measurement]
DryRun = Callable[[Estimate, Cluster], Measurement]
Say = Callable[[str], None]

UNDER = 0.03  # predictions too small by more than this share are counted: those run out of memory
ANY_CARD = "A100-80G"  # for cases with figures of tensors only, which are the same on every card
ALL = "all"


class ComparedFigure(Struct, frozen=True, kw_only=True):
    """One measured figure and its predictions; `predicted` has "emulated" only after a dry run."""

    case: Case
    quantity: Quantity
    measured_bytes: int
    predicted: Mapping[Evidence, int]

    def error(self, evidence: Evidence) -> float:
        """Return predicted / measured - 1: below 0, too little was predicted."""
        return self.predicted[evidence] / self.measured_bytes - 1


class OutOfMemoryCase(Struct, frozen=True, kw_only=True):
    """A case that ran out of memory. `foreseen`: whether each prediction says that it does not fit."""

    case: Case
    foreseen: Mapping[Evidence, bool]


class Validation(Struct, frozen=True, kw_only=True):
    """The result of comparing a file of cases."""

    figures: tuple[ComparedFigure, ...]
    out_of_memory: tuple[OutOfMemoryCase, ...]
    left_out: tuple[LeftOut, ...]
    interrupted: bool  # by Ctrl-C: cases that were not measured before it are left out


class GroupErrors(Struct, frozen=True, kw_only=True):
    """Signed errors of one group, quantity and evidence. `under`: predictions too small by more than `UNDER`."""

    group: str
    quantity: Quantity
    evidence: Evidence
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
    dry_run: DryRun | None = None,
    record: Path | None = None,
    say: Say = lambda line: None,
) -> Validation:
    """Compare every case with its predictions; measure first the cases without a measurement.

    Args:
        cluster: the card of cases that name none; None: every case must name one.
        probe: measures a candidate; None: cases without a measurement are left out.
        dry_run: runs an estimate's candidate on an emulated GPU; None: cases are compared with the estimate only.
        record: file that new measurements are appended to; those of an interrupted earlier call are read from it.
        say: receives progress lines. Ctrl-C ends the measuring, not the comparison.

    Raises:
        InputError: a case names no card and there is no cluster, or `record` holds something else.
    """
    known, interrupted = _probe_cases(cases, probe, record, say)
    measured, left_out = _add_figures(cases, known, cluster)
    placed = [(case, _cluster_of(case, cluster)) for case in measured]
    figures: list[ComparedFigure] = []
    out_of_memory: list[OutOfMemoryCase] = []
    for number, (case, own_cluster) in enumerate(placed, 1):
        say(f"{number}/{len(placed)} {case.label}")
        try:
            predicted, fits = _predict(case, own_cluster, dry_run, say)
        except PlanError as error:
            left_out.append(LeftOut(line=case.line, why=str(error)))
            continue
        figures += _compare(case, predicted)
        if case.outcome == "out_of_memory":
            foreseen = {evidence: not fit for evidence, fit in fits.items()}
            out_of_memory.append(OutOfMemoryCase(case=case, foreseen=foreseen))
    return Validation(
        figures=tuple(figures),
        out_of_memory=tuple(out_of_memory),
        left_out=tuple(left_out),
        interrupted=interrupted,
    )


def predicted_bytes(memory: GpuMemory, quantity: Quantity, candidate: Candidate, gpu: Gpu) -> int:
    """Return what is predicted for a measured quantity of a run.

    driver = what nvidia-smi shows, the allocator's cache included
    reserved = driver - CUDA context - NCCL
    allocated, tensors = `counted_bytes` of the heaviest phase
    """
    if quantity in ("allocated", "tensors"):
        return max(counted_bytes(phase, quantity, candidate, gpu) for phase in memory.phases)
    outside = context_bytes(gpu) + nccl_bytes(candidate) if quantity == "reserved" else 0
    return memory.nvidia_smi_bytes - outside


def counted_bytes(phase: PhaseMemory, quantity: Quantity, candidate: Candidate, gpu: Gpu) -> int:
    """Return the bytes of a phase on one GPU that a measured quantity counts.

        driver = all components
        reserved = driver - CUDA context - NCCL
        allocated = reserved - fragmentation
        tensors = allocated - cuBLAS workspaces

    Source: torch.cuda.memory_stats counts what PyTorch's allocator gives out; it gives out cuBLAS workspaces
    (planner/memory/runtime.py), but not CUDA contexts and NCCL's buffers.
    """
    if quantity == "driver":
        return phase.total_bytes
    slack = phase.components.get("fragmentation", 0)
    if quantity == "tensors":
        return phase.total_bytes - slack - phase.components.get("runtime", 0)
    outside = context_bytes(gpu) + nccl_bytes(candidate)
    return phase.total_bytes - outside - (slack if quantity == "allocated" else 0)


def summaries(validation: Validation) -> list[GroupErrors]:
    """Return the errors by method and tuning, then of all cases, for each quantity and kind of prediction."""
    groups: dict[tuple[Quantity, str], list[ComparedFigure]] = {}
    for figure in validation.figures:
        groups.setdefault((figure.quantity, group_name(figure.case.candidate)), []).append(figure)
    for quantity in dict.fromkeys(figure.quantity for figure in validation.figures):
        groups[quantity, ALL] = [figure for figure in validation.figures if figure.quantity == quantity]
    return [summary for (quantity, group), found in groups.items() for summary in _summarize(group, quantity, found)]


def group_name(candidate: Candidate) -> str:
    """Return the group of a case in summaries, such as `grpo qlora`."""
    tuning = "qlora" if candidate.tuning == "lora" and candidate.quantization_row.quantized else candidate.tuning
    return f"{candidate.method} {tuning}"


# -- measuring ---------------------------------------------------------------------------------------------------------


def _probe_cases(
    cases: Cases, probe: Probe | None, record: Path | None, say: Say
) -> tuple[dict[str, Measurement], bool]:
    """Probe the cases without a measurement; return measurements by candidate, and whether Ctrl-C ended the probing.

    Each measurement is written to `record` before the next probe begins.
    """
    known = _read_record(record)
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
        # A GPU in use measured nothing: without a line in the record the next call probes this candidate again.
        if record is not None and known[key].outcome != "gpu_in_use":
            append_line(record, measurement_line(known[key]))
    return known, False


def _add_figures(
    cases: Cases, known: Mapping[str, Measurement], cluster: Cluster | None
) -> tuple[list[Case], list[LeftOut]]:
    """Return the cases with their figures, and the lines that have none."""
    read = [_with_figures(case, known, cluster) if case.outcome == "not measured" else case for case in cases.cases]
    return [case for case in read if isinstance(case, Case)], [
        *cases.left_out,
        *(case for case in read if isinstance(case, LeftOut)),
    ]


def _read_record(record: Path | None) -> dict[str, Measurement]:
    """Return the measurements of earlier calls by candidate; skip lines that were cut off.

    Raises:
        InputError: the file holds something else; nothing is appended to such a file.
    """
    found: dict[str, Measurement] = {}
    for number, line in enumerate(lines_of(record) if record is not None else (), 1):
        try:
            measurement = measurement_of(json.loads(line))
        except (ValueError, RecursionError):
            continue
        except InputError as error:
            raise InputError(f"{record}, line {number}: {error}") from error
        found[candidate_key(measurement.candidate)] = measurement
    return found


def _with_figures(case: Case, known: Mapping[str, Measurement], cluster: Cluster | None) -> Case | LeftOut:
    measurement = known.get(candidate_key(case.candidate))
    if measurement is None:
        return LeftOut(line=case.line, why="not measured")
    gpu = case.gpu or (cluster.gpu if cluster is not None else None)
    measured = case_of_measurement(measurement, case.line, gpu)
    return replace(measured, label=case.label, candidate=case.candidate) if isinstance(measured, Case) else measured


# -- predicting --------------------------------------------------------------------------------------------------------


def _predict(
    case: Case, cluster: Cluster, dry_run: DryRun | None, say: Say
) -> tuple[dict[Evidence, Mapping[Quantity, int]], dict[Evidence, bool]]:
    """Return the training GPU's figures by evidence, and whether the estimate and a dry run say that the case fits."""
    answer = estimate(case.candidate, cluster)
    of_estimate = {
        quantity: predicted_bytes(answer.gpus[0], quantity, case.candidate, cluster.gpu) for quantity in case.measured
    }
    predicted: dict[Evidence, Mapping[Quantity, int]] = {"estimated": of_estimate}
    fits: dict[Evidence, bool] = {"estimated": answer.fits or answer.tight}
    if dry_run is not None:
        try:
            emulated = dry_run(answer, cluster)
        except PlanError as error:
            say(f"line {case.line} is not emulated: {error}")
        else:
            predicted["emulated"] = figures_of(emulated) if emulated.outcome == "fits" else {}
            fits["emulated"] = emulated.outcome == "fits"
    return predicted, fits


def _compare(case: Case, predicted: Mapping[Evidence, Mapping[Quantity, int]]) -> Iterator[ComparedFigure]:
    for quantity, measured_bytes in case.measured.items():
        figures = {evidence: each[quantity] for evidence, each in predicted.items() if quantity in each}
        yield ComparedFigure(case=case, quantity=quantity, measured_bytes=measured_bytes, predicted=figures)


def _cluster_of(case: Case, cluster: Cluster | None) -> Cluster:
    """Return as many of the case's cards as its candidate needs."""
    gpu = case.gpu or (cluster.gpu if cluster is not None else None)
    if gpu is None and case.measured.keys() <= {"tensors"} and case.outcome == "fits":
        gpu = load_gpu(ANY_CARD)
    if gpu is None:
        raise InputError(f"Line {case.line} names no GPU. Say which one with --gpus, such as --gpus 1xA100-80G.")
    candidate = case.candidate
    training = -(-candidate.num_processes // candidate.num_nodes)
    return Cluster(gpu=gpu, nodes=candidate.num_nodes, gpus_per_node=training + candidate.server_gpus)


def _summarize(group: str, quantity: Quantity, figures: list[ComparedFigure]) -> Iterator[GroupErrors]:
    evidences: tuple[Evidence, ...] = ("estimated", "emulated")
    for evidence in evidences:
        errors = [figure.error(evidence) for figure in figures if evidence in figure.predicted]
        if errors:
            yield GroupErrors(
                group=group,
                quantity=quantity,
                evidence=evidence,
                count=len(errors),
                mean=fmean(errors),
                mean_absolute=fmean(map(abs, errors)),
                worst=max(errors, key=abs),
                under=sum(error < -UNDER for error in errors),
            )

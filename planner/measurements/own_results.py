"""The user's own measurements, kept from probe to plan: one file that grows by lines, and what later plans make of it.

A plan is still a function of what goes in: these measurements are read by whoever asks, and a plan that has used some says so in its notes.
A probe's measurement of a candidate takes the place of what was expected of it on the same kind of card. One of a real run, whose rows are as long
as the data happen to be, and what CUDA took beside PyTorch, are told in a note and change no figure.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

from planner.errors import InputError, UnknownName
from planner.files.cache import cache_root
from planner.files.journal import append_line, lines_of
from planner.gpus.catalogue import load_gpu
from planner.gpus.cluster import Gpu
from planner.measurements.corrected_estimate import heaviest_rank, measured_estimate, needed_peak_bytes, silence
from planner.measurements.fingerprint import candidate_key
from planner.measurements.measurement import SCHEMA as MEASUREMENT_SCHEMA
from planner.measurements.measurement import Measurement, measurement_line, measurement_of, measurement_report
from planner.memory.runtime import context_bytes
from planner.plan import Plan
from planner.quantities import Estimate
from planner.units import MIB, format_gib

SCHEMA = 1  # of a line, and of `candidate_key`, which is in it
Source = Literal["probe", "run"]
WORTH_SAYING_BYTES = 64 * MIB  # between the context as it was seen and as it is estimated
NEWEST = 50  # measurements of a kind of card that its context is told from


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnResult:
    """One line: a measurement, the card that it is of, and whether its batches were the longest that the settings allow (a probe's are)."""

    source: Source
    gpu: str
    key: str
    report: dict[str, Any]  # the measurement's; most are never asked for, and to read one takes a millisecond

    @property
    def measurement(self) -> Measurement:
        try:
            return measurement_of(self.report)
        except InputError as error:
            raise InputError(
                f"One of your own measurements of {self.gpu} cannot be read ({error}). Remove its line from {results_file()}."
            ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnResults:
    """What the file holds, oldest first. `unread`: lines that this release cannot read."""

    path: Path
    results: tuple[OwnResult, ...]
    unread: int

    def of_gpu(self, gpu: Gpu) -> list[OwnResult]:
        return [result for result in self.results if result.gpu == gpu.name]


def results_file() -> Path:
    """Where the user's own measurements are: `measurements` within the user's cache."""
    return cache_root() / "measurements" / f"schema-{SCHEMA}.jsonl"


def keep(measurement: Measurement, gpu: str, source: Source) -> Path:
    """Adds a measurement of a card to the user's own. `gpu` is the name that the driver gives it, or the catalogue.

    Raises:
        PlanError: the file cannot be written.
        ValueError: a simulated measurement, which is none.
    """
    if measurement.evidence != "measured":
        raise ValueError("only what was measured is kept")
    path = results_file()
    line = {
        "schema": SCHEMA,
        "source": source,
        "gpu": kind_of(gpu),
        "key": candidate_key(measurement.candidate),
        "measurement": measurement_report(measurement),
    }
    append_line(path, json.dumps(line, sort_keys=True, allow_nan=False))
    return path


def keep_new(measurements: Iterable[Measurement], gpu: str) -> int:
    """Adds a study's measurements of a card that are not there yet, as they are when it goes on; returns how many.

    What says nothing about a card is passed over: CPUs, simulated cards, probes that ended otherwise.
    """
    there = {json.dumps(result.report, sort_keys=True) for result in own_results().results}
    new = [
        each for each in measurements if each.device == "cuda" and each.decided and measurement_line(each) not in there
    ]
    for measurement in new:
        keep(measurement, gpu, "probe")
    return len(new)


def own_results(path: Path | None = None) -> OwnResults:
    """All that is there; nothing where nobody has measured yet."""
    path = results_file() if path is None else path
    read = [_read(line) for line in lines_of(path)]
    return OwnResults(
        path=path,
        results=tuple(result for result in read if result is not None),
        unread=sum(result is None for result in read),
    )


def kind_of(gpu: str) -> str:
    """The catalogue's name of a card, its own where the catalogue does not know it."""
    try:
        return load_gpu(gpu).name
    except UnknownName:
        return gpu


def with_own_results(plan: Plan, own: OwnResults) -> Plan:
    """The plan with every candidate that was probed on such a card on the measured rung, and with notes of what was used.

    A candidate that ran out of memory keeps its estimate and gets a note: to search again around it is what `plan probe` does.
    """
    gpu = plan.cluster.gpu
    if not own.of_gpu(gpu):
        return plan
    best = own_answer(plan.best, gpu, own, plan.job.risk)
    return replace(
        plan,
        best=best,
        verdict="fits" if best.fits else "does_not_fit",
        alternatives=tuple(
            replace(other, estimate=own_answer(other.estimate, gpu, own, plan.job.risk)) for other in plan.alternatives
        ),
        remedies=tuple(
            replace(remedy, estimate=own_answer(remedy.estimate, gpu, own, plan.job.risk)) for remedy in plan.remedies
        ),
        warnings=(*own_notes(plan.best, gpu, own), *plan.warnings),
    )


def own_answer(answer: Estimate, gpu: Gpu, own: OwnResults, risk: float) -> Estimate:
    """The answer as the user's own probes have it; unchanged where there are none of its candidate on such a card, or one ran out of memory."""
    fitting, short = _probed(answer, gpu, own)
    if short or not fitting:
        return answer
    heaviest = max(fitting, key=lambda measurement: needed_peak_bytes(answer.gpus[0], measurement))
    return measured_estimate(answer, heaviest, risk)


def own_notes(answer: Estimate, gpu: Gpu, own: OwnResults) -> tuple[str, ...]:
    """What the user's own measurements say of an answer, as it was before them; nothing where there are none of such a card."""
    return tuple(_notes(answer, gpu, own))


def _notes(answer: Estimate, gpu: Gpu, own: OwnResults) -> Iterator[str]:
    fitting, short = _probed(answer, gpu, own)
    train = answer.gpus[0]
    expected = f"{answer.evidence}: {format_gib(train.peak_bytes, 1)}"
    if short:
        phase = short[-1].shortage.phase.replace("_", " ") if short[-1].shortage is not None else "step"
        yield (
            f"your own probe of this candidate on {gpu.name} ran out of memory in the {phase} ({expected}): take a smaller batch or length, or let "
            "plan --probe find the largest that fits"
        )
    elif fitting:
        needed = max(needed_peak_bytes(train, measurement) for measurement in fitting)
        yield f"measured by {_count(len(fitting), 'probe')} of your own on {gpu.name}: {format_gib(needed, 1)} needed at most ({expected})"
    runs = [run for run in _of(answer, gpu, own, "run") if run.outcome == "fits" and run.ranks]
    if runs:
        needed = max(needed_peak_bytes(train, run) for run in runs)
        yield f"{_count(len(runs), 'run')} of your own on {gpu.name} needed {format_gib(needed, 1)} in the first steps, with your data ({expected})"
    yield from _about_the_context(gpu, own)
    if own.unread:
        yield f"{_count(own.unread, 'line')} of {own.path} cannot be read"


def _about_the_context(gpu: Gpu, own: OwnResults) -> Iterator[str]:
    """What CUDA took beside PyTorch in single processes without an engine, where that is not what is estimated."""
    recent = _measurements(result for result in own.of_gpu(gpu)[-NEWEST:])
    alone = [
        each for each in recent if each.candidate.num_processes == 1 and each.candidate.vllm == "off" and each.ranks
    ]
    peaks = [max(heaviest_rank(each).phases, key=lambda peak: peak.driver_bytes, default=None) for each in alone]
    outside = [
        peak.driver_bytes - peak.reserved_bytes
        for peak in peaks
        if peak is not None and peak.driver_bytes and peak.reserved_bytes
    ]
    if outside and abs(median(outside) - context_bytes(gpu)) >= WORTH_SAYING_BYTES:
        yield (
            f"CUDA took {format_gib(median(outside), 2)} beside PyTorch on your {gpu.name} (median of {_count(len(outside), 'measurement')}); "
            f"{format_gib(context_bytes(gpu), 2)} are estimated"
        )


def _probed(answer: Estimate, gpu: Gpu, own: OwnResults) -> tuple[list[Measurement], list[Measurement]]:
    """The user's probes of an answer's candidate that fitted such a card, and those that ran out of its memory."""
    probes = [probe for probe in _of(answer, gpu, own, "probe") if not silence(answer, probe)]
    return [probe for probe in probes if probe.outcome == "fits"], [
        probe for probe in probes if probe.outcome == "out_of_memory"
    ]


def _of(answer: Estimate, gpu: Gpu, own: OwnResults, source: Source) -> list[Measurement]:
    key = candidate_key(answer.candidate)
    return _measurements(result for result in own.of_gpu(gpu) if result.source == source and result.key == key)


def _measurements(results: Iterable[OwnResult]) -> list[Measurement]:
    """What GPUs have measured: a CPU says nothing about a card."""
    return [measurement for result in results if (measurement := result.measurement).device == "cuda"]


def _read(line: str) -> OwnResult | None:
    """One line; None where it is of another schema, or torn."""
    try:
        row = json.loads(line)
        if row["schema"] != SCHEMA or row["measurement"]["schema"] != MEASUREMENT_SCHEMA:
            return None
        return OwnResult(source=row["source"], gpu=row["gpu"], key=row["key"], report=row["measurement"])
    except (ValueError, KeyError, TypeError):
        return None


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'s' if number != 1 else ''}"

"""The user's own measurements, in a file of the cache or a team's database, and the corrections taken from them.

`planner.planning.plan` does not read them: commands do, and a corrected plan says so in its notes. A probe's
measurement replaces the estimate of the same candidate on the same kind of card. Two measurements become notes and
change no figure: real runs, whose rows are as long as the user's data, and the memory that CUDA takes outside PyTorch.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from planner.errors import InputError, UnknownName
from planner.estimation import accepted
from planner.files.cache import cache_root
from planner.files.database import hide_password, storage_url
from planner.files.journal import append_line, lines_of, rewrite_lines
from planner.gpus.catalogue import load_gpu
from planner.gpus.cluster import Gpu
from planner.measurements.corrected_estimate import correct_estimate, heaviest_rank, needed_peak_bytes, why_undecided
from planner.measurements.fingerprint import candidate_key
from planner.measurements.measurement import SCHEMA as MEASUREMENT_SCHEMA
from planner.measurements.measurement import Measurement
from planner.memory.runtime import context_bytes
from planner.planning import Plan
from planner.quantities import Estimate, Note
from planner.units import MIB

SCHEMA: Literal[1] = 1  # of a line, `candidate_key` included
Source = Literal["probe", "run"]
NOTABLE_BYTES = 64 * MIB  # difference of the measured CUDA context from the estimated one
ID_CHARACTERS = 12  # of a line's SHA-256
NEWEST = 50  # measurements of a kind of card that its context is computed from


class OwnResult(Struct, frozen=True, kw_only=True):
    """One line of the file: a measurement and its card.

    A probe's batches are the longest that the settings allow, those of a run are the user's data.
    """

    schema: Literal[1]
    source: Source
    gpu: str
    key: str  # `candidate_key` of the measurement's candidate
    measurement: dict[str, Any]  # as JSON: `decode` takes a millisecond, and most lines are of other candidates

    def decode(self) -> Measurement | None:
        """Return the measurement; None if the line holds none."""
        from planner.measurements.documents import measurement_of  # imports msgspec

        try:
            return measurement_of(self.measurement)
        except InputError:
            return None


class OwnResults(Struct, frozen=True, kw_only=True):
    """The lines of the file or database, oldest first.

    `unread`: how many this release cannot read. `skipped`: the database of $PLAN_STORAGE was not read.
    """

    path: Path | str  # of the file; of a database the URL without its password
    results: tuple[OwnResult, ...]
    unread: int
    skipped: bool = False

    def of_gpu(self, gpu: Gpu) -> list[OwnResult]:
        return [result for result in self.results if result.gpu == gpu.name]


def results_file() -> Path:
    """Return the path of the file with the user's own measurements."""
    return cache_root() / "measurements" / f"schema-{SCHEMA}.jsonl"


def save_result(measurement: Measurement, gpu: str, source: Source, storage: str = "") -> Path | str:
    """Add a measurement to the database, or to the file if there is no database; return its path or URL.

    `gpu` is the card's name, of the driver or of the catalogue. `storage`: the database; empty: $PLAN_STORAGE.

    Raises:
        PlanError: the file or database cannot be written.
        ValueError: the measurement is of an emulated card.
    """
    line = result_line(measurement, gpu, source)
    if url := storage_url(storage):
        from planner.measurements.team_results import add_lines

        add_lines(url, [line])
        return hide_password(url)
    append_line(results_file(), line)
    return results_file()


def result_line(measurement: Measurement, gpu: str, source: Source) -> str:
    """Return a measurement as one line of JSON; raise ValueError if the measurement is of an emulated card."""
    from planner.measurements.documents import measurement_report

    if measurement.evidence != "measured":
        raise ValueError("only what was measured is kept")
    line = {
        "schema": SCHEMA,
        "source": source,
        "gpu": catalogue_name(gpu),
        "key": candidate_key(measurement.candidate),
        "measurement": measurement_report(measurement),
    }
    return json.dumps(line, sort_keys=True, allow_nan=False)


def save_new_results(measurements: Iterable[Measurement], gpu: str, storage: str = "") -> int:
    """Add a study's measurements on GPUs that the file or database does not have yet; return how many.

    Measurements that do not decide about a card are skipped: those of CPUs, of emulated cards, and of failed probes.
    """
    from planner.measurements.documents import measurement_line

    saved = {json.dumps(result.measurement, sort_keys=True) for result in read_own_results(storage).results}
    new = [
        each for each in measurements if each.device == "cuda" and each.decided and measurement_line(each) not in saved
    ]
    for measurement in new:
        save_result(measurement, gpu, "probe", storage)
    return len(new)


def result_lines(storage: str = "") -> list[str]:
    """Return the lines of the database, or of the file if there is no database, oldest first.

    Raises:
        PlanError: the database cannot be read.
    """
    if url := storage_url(storage):
        from planner.measurements.team_results import team_lines

        return team_lines(url)
    return list(lines_of(results_file()))


def listed_results(storage: str = "") -> Iterator[tuple[str, str, OwnResult | None]]:
    """Yield the id, the line and the result of each line; None for one that this release cannot read.

    Raises:
        PlanError: the database cannot be read.
    """
    for line in result_lines(storage):
        yield hashlib.sha256(line.encode()).hexdigest()[:ID_CHARACTERS], line, read_result(line)


def forget_results(lines: Iterable[str], storage: str = "") -> int:
    """Remove lines from the database, or from the file if there is no database; return how many it had.

    Raises:
        PlanError: the file or database cannot be written.
    """
    if url := storage_url(storage):
        from planner.measurements.team_results import remove_lines

        return remove_lines(url, lines)
    return rewrite_lines(results_file(), set(lines))


def read_own_results(storage: str = "") -> OwnResults:
    """Read the database, or the file if there is no database; without a file there are no results.

    Without the extra storage the database of $PLAN_STORAGE is not read: the file is, and `skipped` says so.

    Raises:
        InputError: `storage` is given without the extra storage.
        PlanError: the database cannot be read.
    """
    url = storage_url(storage)
    skipped = bool(url and not storage and find_spec("sqlalchemy") is None)
    url = "" if skipped else url
    read = [read_result(line) for line in (lines_of(results_file()) if skipped else result_lines(storage))]
    return OwnResults(
        skipped=skipped,
        path=hide_password(url) if url else results_file(),
        results=tuple(result for result in read if result is not None),
        unread=sum(result is None for result in read),
    )


def catalogue_name(gpu: str) -> str:
    """Return the catalogue's name of a card, or the given name if the catalogue does not have the card."""
    try:
        return load_gpu(gpu).name
    except UnknownName:
        return gpu


def apply_own_results(plan: Plan, own: OwnResults) -> Plan:
    """Correct every candidate of a plan that was probed on the same kind of card, and add notes about it.

    A candidate that ran out of memory keeps its estimate and gets a note: `plan --probe` searches around it.
    """
    gpu, risk = plan.cluster.gpu, plan.job.risk
    if own.skipped:
        plan = replace(plan, warnings=(Note("own_storage_not_read"), *plan.warnings))
    if not own.of_gpu(gpu):
        return plan
    best = accepted(correct_by_own_probes(plan.best, gpu, own, risk))
    return replace(
        plan,
        best=best,
        alternatives=tuple(
            replace(other, estimate=correct_by_own_probes(other.estimate, gpu, own, risk))
            for other in plan.alternatives
        ),
        remedies=tuple(
            replace(remedy, estimate=correct_by_own_probes(remedy.estimate, gpu, own, risk)) for remedy in plan.remedies
        ),
        warnings=(*own_result_notes(plan.best, gpu, own), *plan.warnings),
    )


def correct_by_own_probes(answer: Estimate, gpu: Gpu, own: OwnResults, risk: float) -> Estimate:
    """Correct an estimate by the heaviest of the user's probes of its candidate on the same kind of card.

    Return it unchanged if there is no such probe, or if one of them ran out of memory.
    """
    fitting, out_of_memory = _probes(answer, gpu, own)
    if out_of_memory or not fitting:
        return answer
    heaviest = max(fitting, key=lambda measurement: needed_peak_bytes(answer.gpus[0], measurement))
    return correct_estimate(answer, heaviest, risk)


def own_result_notes(answer: Estimate, gpu: Gpu, own: OwnResults) -> tuple[Note, ...]:
    """Return notes about the user's measurements on such a card. `answer` is the estimate before correction."""
    return tuple(_notes(answer, gpu, own))


def _notes(answer: Estimate, gpu: Gpu, own: OwnResults) -> Iterator[Note]:
    fitting, out_of_memory = _probes(answer, gpu, own)
    train = answer.gpus[0]
    expected = {"gpu": gpu.name, "evidence": answer.evidence, "expected_bytes": train.peak_bytes}
    if out_of_memory:
        shortage = out_of_memory[-1].shortage
        phase = shortage.phase if shortage is not None else "step"
        yield Note("own_probe_ran_out_of_memory", {**expected, "phase": phase})
    elif fitting:
        needed = max(needed_peak_bytes(train, measurement) for measurement in fitting)
        yield Note("own_probes", {**expected, "probes": len(fitting), "needed_bytes": needed})
    runs = [run for run in _measurements_of(answer, gpu, own, "run") if run.outcome == "fits" and run.ranks]
    if runs:
        needed = max(needed_peak_bytes(train, run) for run in runs)
        yield Note("own_runs", {**expected, "runs": len(runs), "needed_bytes": needed})
    recent = [result.decode() for result in own.of_gpu(gpu)[-NEWEST:]]
    yield from _context_note(gpu, _of_cards(recent))
    if unread := own.unread + recent.count(None):
        yield Note("own_lines_unread", {"lines": unread, "path": str(own.path)})


def _context_note(gpu: Gpu, recent: Iterable[Measurement]) -> Iterator[Note]:
    """The memory outside PyTorch in single processes without an engine, if it differs from the estimated context."""
    alone = [
        each for each in recent if each.candidate.num_processes == 1 and each.candidate.vllm == "off" and each.ranks
    ]
    peaks = [max(heaviest_rank(each).phases, key=lambda peak: peak.driver_bytes, default=None) for each in alone]
    outside = [
        peak.driver_bytes - peak.reserved_bytes
        for peak in peaks
        if peak is not None and peak.driver_bytes and peak.reserved_bytes
    ]
    if outside and abs(median(outside) - context_bytes(gpu)) >= NOTABLE_BYTES:
        yield Note(
            "own_context",
            {
                "gpu": gpu.name,
                "measured_bytes": median(outside),
                "measurements": len(outside),
                "estimated_bytes": context_bytes(gpu),
            },
        )


def _probes(answer: Estimate, gpu: Gpu, own: OwnResults) -> tuple[list[Measurement], list[Measurement]]:
    """Return the user's probes of an estimate's candidate: those that fit such a card, and those out of memory."""
    probes = [probe for probe in _measurements_of(answer, gpu, own, "probe") if not why_undecided(answer, probe)]
    return [probe for probe in probes if probe.outcome == "fits"], [
        probe for probe in probes if probe.outcome == "out_of_memory"
    ]


def _measurements_of(answer: Estimate, gpu: Gpu, own: OwnResults, source: Source) -> list[Measurement]:
    of_source = [result for result in own.of_gpu(gpu) if result.source == source]
    key = candidate_key(answer.candidate) if of_source else ""
    return _of_cards(result.decode() for result in of_source if result.key == key)


def _of_cards(measurements: Iterable[Measurement | None]) -> list[Measurement]:
    """Return the measurements without unreadable ones, and those of CPUs, which do not decide about a card."""
    return [each for each in measurements if each is not None and each.device == "cuda"]


def read_result(line: str) -> OwnResult | None:
    """Read one line; None if the line is cut off, is no result, or has another schema."""
    from planner.files.decode import decode_json  # imports msgspec, which a plan without own results does not need

    try:
        result = decode_json(line, OwnResult, "That is no own result")
    except InputError:
        return None
    return result if result.measurement.get("schema") == MEASUREMENT_SCHEMA else None

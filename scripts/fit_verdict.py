"""Fit the verdict: how a margin between need and card becomes a probability to run.

python -m scripts.fit_verdict    writes planner/data/verdict.json, planner/data/outcomes.jsonl, results/verdict.md, .svg

The runs are those of tests/data/published.jsonl and tests/data/outcomes.jsonl (other people's runs, with the figures
that they printed or with the word that memory ran out). Run scripts/compare_published.py first where formulas changed.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from planner.confidence import (
    EDGE_RISK,
    FIT,
    OUTCOMES,
    Fit,
    PublishedOutcome,
    UnitKind,
    fit,
    kind_of,
    outcomes,
    reach,
    unit_kind,
)
from planner.estimation import estimate
from planner.quantities import DEFAULT_RISK, PASS, GpuMemory
from planner.units import GIB
from scripts import compare_published

ROOT = Path(__file__).resolve().parent.parent
REPORT, DIAGRAM = ROOT / "results" / "verdict.md", ROOT / "results" / "verdict.svg"
EMULATED = (("emulated_gpu_t4.jsonl", "measured", "reserved"), ("emulated_gpu_a100.jsonl", "published", "driver"))

KINDS: tuple[UnitKind, ...] = ("whole", "gathered", "engine")
# A unit is drawn towards the others as by so many residuals of theirs: its logarithm, with this variance.
SHRINKAGE = 10
# A location of several units is not believed: standard deviation of its normal prior.
LOCATION_SPREAD = 1.0
BANDS = (0.0, 0.6, 0.8, 0.9, 1.0, 1.1, math.inf)  # of need over card
PROBABILITIES = (0.0, 0.05, 0.5, 0.8, 0.95, 0.99, 1.0)  # of the reliability diagram
RISKS = (0.2, 0.05, 0.01)


class Residual(Struct, frozen=True, kw_only=True):
    """A published figure over ours, less one. `unseen`: it includes what emulation does not see (driver, cache)."""

    source: str
    kind: UnitKind
    error: float
    unseen: bool


class Evidence(Struct, frozen=True, kw_only=True):
    """All that the fit rests on.

    `unseen`: the unit of what emulation does not see, as a share; `passes`: errors of allocated bytes as shares of what
    the pass allocates.
    """

    outcomes: tuple[PublishedOutcome, ...]
    residuals: tuple[Residual, ...]
    unseen: float
    passes: tuple[float, ...]

    def without(self, source: str) -> "Evidence":
        return replace(
            self,
            outcomes=tuple(run for run in self.outcomes if run.source != source),
            residuals=tuple(one for one in self.residuals if one.source != source),
        )


# -- the runs ----------------------------------------------------------------------------------------------------------


def read_evidence() -> Evidence:
    runs, residuals = list[PublishedOutcome](), list[Residual]()
    for row in compare_published.outcome_rows():
        run, found = _published_run(row)
        runs.append(run)
        residuals += found
    done, _ = compare_published.all_compared()
    runs += [_compared_run(one) for one in done]
    needs = [one for one in compare_published.evidence(done) if one.figure == "need"]
    residuals += [
        Residual(source=_project(one.source), kind=one.kind, error=one.miss, unseen=one.kind == "gathered")
        for one in needs
    ]
    allocated = {one.id for one in needs if one.kind == "whole"}
    return Evidence(
        outcomes=_unique(runs),
        residuals=tuple(residuals),
        unseen=logistic_scale(_emulated_errors()),
        passes=tuple(
            _pass_error(one)
            for one in (*done, *compare_published.outcomes_compared())
            if one.row.id in allocated and one.row.quantity == "allocated"
        ),
    )


@lru_cache(maxsize=1)
def held_out() -> tuple[PublishedOutcome, ...]:
    """The runs that came after the fit."""
    return tuple(_published_run(row)[0] for row in compare_published.outcome_rows(compare_published.HELD_OUT))


def _pass_error(one: compare_published.Compared) -> float:
    """Return measured less computed bytes as a share of what the pass allocates by the estimate."""
    passed = sum(size for name, size in one.phase.components.items() if name in PASS)
    return (one.row.measured_bytes - one.computed_bytes) / passed


def _published_run(row: Mapping[str, Any]) -> tuple[PublishedOutcome, list[Residual]]:
    """Return a row of outcomes.jsonl as a run, with the residual of its vLLM engine if it has one."""
    candidate, cluster = compare_published.outcome_job(row)
    answer, source, differs = estimate(candidate, cluster), _project(row["source"]), row.get("differs", "")
    gpus = (compare_published.with_kept(answer.gpus[0], candidate, row.get("keeps", "")), *answer.gpus[1:])
    run = _outcome(row["id"], source, kind_of(candidate), gpus, row["outcome"] == "ran", differs)
    engines = [gpu for gpu in answer.gpus if gpu.role == "vllm" and "rollout" in row["figures_gib"]]
    return run, [
        Residual(
            source=source, kind="engine", error=row["figures_gib"]["rollout"] * GIB / gpu.peak_bytes - 1, unseen=True
        )
        for gpu in engines
    ]


def _compared_run(one: compare_published.Compared) -> PublishedOutcome:
    row = one.row
    gpus = estimate(row.candidate, row.cluster).gpus
    ran = row.quantity != "over"
    differs = compare_published.DIFFERS.get(row.group, "")
    return _outcome(row.id.partition("#")[0], _project(row.source), kind_of(row.candidate), gpus, ran, differs)


def _outcome(
    name: str, source: str, kind: UnitKind, gpus: Sequence[GpuMemory], ran: bool, differs: str
) -> PublishedOutcome:
    fullest = max(gpus, key=lambda gpu: gpu.peak_bytes / gpu.capacity_bytes)
    own = unit_kind(fullest, kind)
    return PublishedOutcome(
        id=name,
        source=source,
        kind="engine" if own == "server" else own,
        need_bytes=fullest.peak_bytes,
        card_bytes=fullest.capacity_bytes,
        ran=ran,
        differs=differs,
    )


def _project(source: str) -> str:
    """Return the project that published a run: `huggingface/trl` of any of its files and issues."""
    return source.partition(":")[0].partition("#")[0].partition(" ")[0]


def _unique(runs: Iterable[PublishedOutcome]) -> tuple[PublishedOutcome, ...]:
    return tuple({run.id: run for run in runs}.values())


def _emulated_errors() -> list[float]:
    """Real over emulated, less one, of what the driver or the allocator showed: what emulation does not see."""
    found = list[float]()
    for name, real, figure in EMULATED:
        for row in map(json.loads, (ROOT / "results" / name).read_text(encoding="utf-8").splitlines()):
            if "emulated" in row:
                found.append(row[real][figure] / row["emulated"][figure] - 1)
    return found


# -- the fit -----------------------------------------------------------------------------------------------------------


def logistic(z: float) -> float:
    return 1 / (1 + math.exp(-min(max(z, -700.0), 700.0)))


def logistic_scale(errors: Sequence[float]) -> float:
    """Scale of a logistic distribution around 0 by the median of absolute errors, which is ln 3 of it."""
    ordered = sorted(map(abs, errors))
    return ordered[len(ordered) // 2] / math.log(3)


def margin(run: PublishedOutcome, fitted: Fit) -> float:
    return (run.card_bytes / run.need_bytes - 1) / fitted.units[run.kind]


def probability(run: PublishedOutcome, fitted: Fit) -> float:
    return logistic(margin(run, fitted) - fitted.location)


def loss(fitted: Fit, evidence: Evidence) -> float:
    """Negative log likelihood of residuals (densities) and outcomes (censored: it fitted or did not), with priors.

    An allocated figure has no part in what emulation does not see: its scale is the rest of the unit.
    """
    total = (fitted.location / LOCATION_SPREAD) ** 2 / 2
    logs = [math.log(fitted.units[kind]) for kind in KINDS]
    total += SHRINKAGE * sum((value - fmean(logs)) ** 2 for value in logs) / 2
    for one in evidence.residuals:
        unit = fitted.units[one.kind]
        scale = unit if one.unseen else math.sqrt(max(unit**2 - evidence.unseen**2, 1e-6))
        p = logistic(one.error / scale - fitted.location)
        total -= math.log(max(p * (1 - p), 1e-300) / scale)
    for run in evidence.outcomes:
        if not run.differs:
            p = probability(run, fitted)
            total -= math.log(max(p if run.ran else 1 - p, 1e-300))
    return total


def fit_of(evidence: Evidence) -> Fit:
    """Return the location and units of the least loss, by coordinate descent: four parameters."""
    units: dict[UnitKind, float] = {**dict.fromkeys(KINDS, 0.04), "unseen": evidence.unseen}
    best = Fit(location=0.0, units=units, pass_unit=round(logistic_scale(evidence.passes), 4))
    least, step = loss(best, evidence), 0.4
    while step > 0.002:
        moved = False
        for change in _changes(best, step):
            if (value := loss(change, evidence)) < least - 1e-9:
                best, least, moved = change, value, True
        step = step if moved else step / 2
    rounded: dict[UnitKind, float] = {kind: round(unit, 4) for kind, unit in best.units.items()}
    return replace(best, location=round(best.location, 3), units=rounded)


def _changes(fitted: Fit, step: float) -> Iterator[Fit]:
    for sign in (step, -step):
        yield replace(fitted, location=fitted.location + sign)
        for kind in KINDS:
            yield replace(fitted, units=fitted.units | {kind: fitted.units[kind] * math.exp(sign)})


def left_out(evidence: Evidence) -> dict[str, float]:
    """Return the probability of each run by the fit without its source."""
    fits = {source: fit_of(evidence.without(source)) for source in sorted({run.source for run in evidence.outcomes})}
    return {run.id: probability(run, fits[run.source]) for run in evidence.outcomes}


# -- the report --------------------------------------------------------------------------------------------------------

Probability = Callable[[PublishedOutcome], float]
HEAD = """# The verdict: what a margin is worth

Written by `python -m scripts.fit_verdict`. The runs are other people's: each ran or ran out of memory on a known card
(`tests/data/published.jsonl`, `tests/data/outcomes.jsonl`: sources, settings, assumptions). Needs are ours.

The error of a need is logistic. Its unit is a share of the need by kind of memory, its location is common to all:

    P(runs) = 1 / (1 + exp(location - (card - need) / unit)), headroom(risk) = unit x (location + ln(1 / risk - 1))

Four parameters: the location and three units, of the greatest likelihood of published figures (densities; allocated
bytes where a kind has them, else the driver's) and of outcomes (that the error was below or above the margin). Units of
kinds with few figures are drawn towards the others, by ten. *Unseen* is what the emulated GPU misses of the real
driver's or allocator's figure (`emulated_gpu_t4.jsonl`, `emulated_gpu_a100.jsonl`; half of the rows are within 1.1
units): what stays uncertain after an emulated probe. It is part of each unit.

A study begins with the same (`probes/study/posterior.py`): *unseen* is what it believes of the allocator, *engine* of
the engine, the unit of a pass of activations, and of the formulas what is left of *whole* or *gathered*.

A plan *fits* if it runs with the accepted risk, is *tight* if it is more likely to run than not, and else does not fit.
"""


def report(evidence: Evidence, fitted: Fit, others: Mapping[str, float]) -> str:
    runs = evidence.outcomes
    own: Probability = lambda run: probability(run, fitted)  # noqa: E731
    foreign: Probability = lambda run: others[run.id]  # noqa: E731
    rule: Probability = lambda run: float(run.need_bytes <= run.card_bytes)  # noqa: E731
    described = [run for run in runs if not run.differs]
    lines = [HEAD, f"Location {fitted.location:.3f} units.", ""]
    lines += [
        "| memory | figures | unit, of the need | " + " | ".join(f"headroom at {risk:g}" for risk in RISKS) + " |",
        "|---" * (3 + len(RISKS)) + "|",
    ]
    for kind in KINDS:
        count = sum(one.kind == kind for one in evidence.residuals)
        lines.append(f"| {kind} | {count} | {fitted.units[kind]:.2%} | {_headrooms(fitted, kind)} |")
    lines.append(
        f"| unseen | {len(_emulated_errors())} | {fitted.units['unseen']:.2%} | {_headrooms(fitted, 'unseen')} |"
    )
    count = len(evidence.passes)
    lines += ["", f"Of what a forward and backward pass allocates ({count} figures): unit {fitted.pass_unit:.2%}."]
    lines += ["", "## Outcomes by need over card", "", *_by_band(runs, own)]
    lines += ["", "## Verdicts", "", *_verdicts(runs, (("all runs", own), ("source left out", foreign)))]
    lines += ["", "Runs that came after the fit, and are no part of it (`tests/data/held_out.jsonl`):", ""]
    lines += _verdicts(held_out(), (("held out", own),))
    lines += [
        "",
        "## Brier scores",
        "",
        "| | runs | need <= card | fitted | source left out |",
        "|---|---|---|---|---|",
    ]
    for name, some in (("all", runs), ("described by their settings", described)):
        scores = " | ".join(f"{brier(some, each):.4f}" for each in (rule, own, foreign))
        lines.append(f"| {name} | {len(some)} | {scores} |")
    lines += ["", "## Reliability", "", "![Reliability](verdict.svg)", "", *_reliability(runs, own, foreign)]
    lines += ["", "## Runs that a verdict is wrong about", "", *_wrong(runs, own)]
    lines += ["", "## Sources", "", "| source | ran | out of memory |", "|---|---|---|"]
    for source in sorted({run.source for run in runs}):
        some = [run.ran for run in runs if run.source == source]
        lines.append(f"| {source} | {sum(some)} | {len(some) - sum(some)} |")
    return "\n".join(lines) + "\n"


def summary() -> str:
    """Return what docs/accuracy.md says of the verdict, by the stored fit."""
    ran, out = ([verdict(probability(run, fit())) for run in outcomes() if run.ran is value] for value in (True, False))
    later = [verdict(probability(run, fit())) for run in held_out() if run.ran]
    rooms = (f"{fit().units['whole'] * reach(risk):.0%} of the need at {risk:g}" for risk in RISKS)
    return (
        f"- {len(ran) + len(out)} runs of others are known to have run or to have run out of memory on a known card.\n"
        f"- Of the {len(ran)} that ran, {1 - ran.count('does not fit') / len(ran):.0%} fit or are tight.\n"
        f"- Of the {len(out)} that ran out of memory, {out.count('fits')} fit and {out.count('tight')} are tight.\n"
        f"- Of {len(later)} runs that came after the fit and ran, {later.count('fits')} fit, {later.count('tight')} "
        f"are tight and {later.count('does not fit')} do not fit.\n"
        f"- Room that a plan leaves free on one GPU: {', '.join(rooms)}."
    )


def _headrooms(fitted: Fit, kind: UnitKind) -> str:
    return " | ".join(f"{fitted.units[kind] * (fitted.location + math.log(1 / risk - 1)):.1%}" for risk in RISKS)


def brier(runs: Sequence[PublishedOutcome], claimed: Probability) -> float:
    return fmean((claimed(run) - run.ran) ** 2 for run in runs)


def _by_band(runs: Sequence[PublishedOutcome], claimed: Probability) -> Iterator[str]:
    yield "| need over card | ran | of | mean probability | Brier score |"
    yield "|---|---|---|---|---|"
    for low, high in pairwise(BANDS):
        some = [run for run in runs if low <= run.need_bytes / run.card_bytes < high]
        name = f"{low:.0%} to {high:.0%}" if math.isfinite(high) else f"over {low:.0%}"
        mean = fmean(map(claimed, some))
        yield f"| {name} | {sum(run.ran for run in some)} | {len(some)} | {mean:.2f} | {brier(some, claimed):.3f} |"


def verdict(p: float) -> str:
    """Return the verdict at the default risk."""
    return "fits" if p >= 1 - DEFAULT_RISK else "tight" if p >= 1 - EDGE_RISK else "does not fit"


def _verdicts(runs: Sequence[PublishedOutcome], claims: Iterable[tuple[str, Probability]]) -> Iterator[str]:
    yield f"At the default risk of {DEFAULT_RISK:g}:"
    yield ""
    yield "| | outcome | runs | fits | tight | does not fit |"
    yield "|---|---|---|---|---|---|"
    for name, claimed in claims:
        for ran in (True, False):
            said = [verdict(claimed(run)) for run in runs if run.ran is ran]
            counts = " | ".join(str(said.count(word)) for word in ("fits", "tight", "does not fit"))
            yield f"| {name} | {'ran' if ran else 'out of memory'} | {len(said)} | {counts} |"


def bins(runs: Sequence[PublishedOutcome], claimed: Probability) -> Iterator[tuple[str, int, float, float]]:
    """Yield each bin of probabilities: its name, runs, mean probability and share that ran."""
    for low, high in pairwise(PROBABILITIES):
        some = [run for run in runs if low <= claimed(run) < high or claimed(run) == high == 1.0]
        if some:
            yield f"{low:g} to {high:g}", len(some), fmean(map(claimed, some)), fmean(run.ran for run in some)


def _reliability(runs: Sequence[PublishedOutcome], own: Probability, foreign: Probability) -> Iterator[str]:
    yield "| | probability | runs | mean | ran |"
    yield "|---|---|---|---|---|"
    for name, claimed in (("fitted", own), ("source left out", foreign)):
        for bounds, count, mean, ran in bins(runs, claimed):
            yield f"| {name} | {bounds} | {count} | {mean:.3f} | {ran:.3f} |"


def _wrong(runs: Sequence[PublishedOutcome], claimed: Probability) -> Iterator[str]:
    yield "| run | need over card | verdict | outcome | why the settings do not describe it |"
    yield "|---|---|---|---|---|"
    for run in runs:
        said = verdict(claimed(run))
        if (said == "does not fit") if run.ran else (said == "fits"):
            share, outcome = run.need_bytes / run.card_bytes, "ran" if run.ran else "out of memory"
            yield f"| {run.id} | {share:.2f} | {said} | {outcome} | {run.differs or 'not known'} |"


SIZE, EDGE = 320, 40  # of the diagram in pixels


def diagram(runs: Sequence[PublishedOutcome], claims: Mapping[str, Probability]) -> str:
    """Return the reliability diagram as SVG: the share that ran over the probability claimed, a circle a bin."""
    inner = SIZE - 2 * EDGE

    def place(x: float, y: float) -> tuple[float, float]:
        return EDGE + inner * x, SIZE - EDGE - inner * y

    (left, bottom), (right, top) = place(0, 0), place(1, 1)
    shapes = [
        f'<rect x="{left:g}" y="{top:g}" width="{inner}" height="{inner}" fill="none" stroke="#888"/>',
        f'<line x1="{left:g}" y1="{bottom:g}" x2="{right:g}" y2="{top:g}" stroke="#bbb" stroke-dasharray="4"/>',
        f'<text x="{SIZE / 2:g}" y="{SIZE - 8}" text-anchor="middle">probability to run</text>',
        f'<text x="14" y="{SIZE / 2:g}" text-anchor="middle" transform="rotate(-90 14 {SIZE / 2:g})">ran</text>',
    ]
    for (name, claimed), colour in zip(claims.items(), ("#3b6fb6", "#d9a21b"), strict=True):
        for bounds, count, mean, ran in bins(runs, claimed):
            x, y = place(mean, ran)
            radius = 3 + 2 * math.log10(count)
            title = f"{name}, {bounds}: {count} runs, mean {mean:.3f}, ran {ran:.3f}"
            shapes.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="none" stroke="{colour}" stroke-width="2">'
                f"<title>{title}</title></circle>"
            )
    legend = [
        f'<text x="{left + 8:g}" y="{top + 18 + 16 * row:g}" fill="{colour}">{name}</text>'
        for row, (name, colour) in enumerate(zip(claims, ("#3b6fb6", "#d9a21b"), strict=True))
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SIZE} {SIZE}" font-family="sans-serif" font-size="12">'
    )
    return "\n".join([head, *shapes, *legend, "</svg>"]) + "\n"


def main() -> None:
    evidence = read_evidence()
    fitted = fit_of(evidence)
    others = left_out(evidence)
    FIT.write_bytes(msgspec.json.format(msgspec.json.encode(fitted), indent=2) + b"\n")
    OUTCOMES.write_bytes(b"".join(msgspec.json.encode(run) + b"\n" for run in evidence.outcomes))
    REPORT.write_text(report(evidence, fitted, others), encoding="utf-8")
    claims: dict[str, Probability] = {
        "fitted": lambda run: probability(run, fitted),
        "source left out": lambda run: others[run.id],
    }
    DIAGRAM.write_text(diagram(evidence.outcomes, claims), encoding="utf-8")
    print(REPORT.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()

"""Why the best candidate of a study is the best: what is larger or faster, and how each of them is known not to fit."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Literal

from planner.binary_search import largest
from planner.measurements.measurement import DeviceName
from planner.quantities import Phase
from planner.search.search import length_field
from planner.units import format_count, format_size
from probes.study.posterior import PRIORS, Belief, Row
from probes.study.space import FEW_SIZES, SHARE_KNOB, Place
from probes.study.state import LEAST_CHANCE, MOST_SIZES, Knowledge, open_places

# How something larger is known not to be better.
Verdict = Literal[
    "probe",  # it ran out of memory, or one of its structure did that needs no more
    "belief",  # what it needs exceeds the card in all but LEAST_CHANCE of what the probes leave possible
    "no start",  # its engine would refuse
    "limit",  # the knob ends here
    "no gain",  # it gives no more of what the job asks for
    "set aside",  # its probes failed for another reason than memory
    "open",  # nothing has been shown
]
DEVIATIONS = 2.5758  # of the interval: 0.5 % beyond each end, as LEAST_CHANCE
SHOWN = 6  # neighbours in the text


@dataclass(frozen=True, kw_only=True, slots=True)
class Neighbour:
    """Something larger on one knob, or another structure. Bytes are of its heaviest phase by what the probes have taught; 0: not computed."""

    knob: str
    value: str
    settings: Mapping[str, bool | int | float | str]
    verdict: Verdict
    phase: Phase | Literal[""]
    needs_bytes: int
    interval_bytes: tuple[int, int]
    capacity_bytes: int
    fit_chance: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Certificate:
    """`holds`: the best candidate ran and nothing better is open. Counts are of candidates of more merit than the best."""

    holds: bool
    device: DeviceName  # "simulated": nothing ran
    best: Mapping[str, bool | int | float | str]
    probes: int
    neighbours: tuple[Neighbour, ...]
    excluded_by_probe: int
    excluded_by_belief: int
    still_open: int
    set_aside: tuple[str, ...]
    unavailable: tuple[str, ...]  # why some structures cannot run here; the certificate is about the others
    learned: Mapping[str, tuple[float, float]]  # constants: mean and standard deviation


def certificate(knowledge: Knowledge) -> Certificate:
    """Of what a study knows, whether or not it has ended."""
    best = knowledge.ran[0] if knowledge.ran else None
    better = list(_frontier(knowledge))
    still_open = len(open_places(knowledge))
    by_probe = sum(count for place, count in better if knowledge.refuted(place))
    return Certificate(
        device=knowledge.space.device,
        holds=best is not None and not still_open and not knowledge.set_aside,
        best={} if best is None else knowledge.space.knobs(best),
        probes=len(knowledge.measured),
        neighbours=tuple(_neighbours(knowledge, best, [place for place, _ in better])),
        excluded_by_probe=by_probe,
        excluded_by_belief=sum(count for _, count in better) - by_probe,
        still_open=still_open,
        set_aside=tuple(f"{knowledge.space.shown(place)}: {reason}" for place, reason in knowledge.set_aside.items()),
        unavailable=tuple(dict.fromkeys(knowledge.unavailable.values())),
        learned=learned(knowledge.belief),
    )


def learned(belief: Belief) -> dict[str, tuple[float, float]]:
    """Constants of device and runtime that something was seen of."""
    return {
        name: belief.constant(name) for name in belief.names if name.partition(":")[0] not in ("counted", "structure")
    }


# -- what is better than the best --------------------------------------------------------------------------------------


def _frontier(knowledge: Knowledge) -> Iterator[tuple[Place, int]]:
    """Of each line the smallest candidates of more merit that are excluded, and how many stand behind each."""
    for line in (line for line in range(len(knowledge.space.lines)) if line not in knowledge.unavailable):
        count = len(knowledge.space.lines[line].sizes)
        if count <= FEW_SIZES:
            for size in range(count):
                yield from _of_shares(knowledge, line, size)
            continue
        top = largest(0, count - 1, lambda size: knowledge.may_fit(knowledge.space.leanest(line, size)))  # noqa: B023
        first = 1 + largest(0, count - 1, lambda size: not _better(knowledge, knowledge.space.leanest(line, size)))  # noqa: B023
        beyond = max(top + 1, first)
        if beyond < count and knowledge.space.starts(knowledge.space.leanest(line, beyond)):
            yield knowledge.space.leanest(line, beyond), count - beyond
        for size in range(max(first - 1, 0), min(top + 1, first + MOST_SIZES)):
            yield from _of_shares(knowledge, line, size)


def _better(knowledge: Knowledge, place: Place) -> bool:
    return knowledge.space.starts(place) and knowledge.space.merit(place) > knowledge.floor


def _of_shares(knowledge: Knowledge, line: int, size: int) -> Iterator[tuple[Place, int]]:
    low, high = knowledge.space.shares(line, size)
    if low > high or not _better(knowledge, Place(line, size, high)):
        return
    first = 1 + largest(low, high, lambda share: not _better(knowledge, Place(line, size, share)))
    first = max(first, 1 + largest(low, high, lambda share: knowledge.may_fit(Place(line, size, share))))
    if first <= high:
        yield Place(line, size, first), high - first + 1


def _neighbours(knowledge: Knowledge, best: Place | None, excluded: list[Place]) -> Iterator[Neighbour]:
    if best is not None:
        yield _larger_size(knowledge, best)
        if best.share:
            yield _larger_share(knowledge, best)
    nearest: dict[int, Place] = {}
    for place in excluded:
        if best is not None and place.line == best.line:
            continue
        if place.line not in nearest or _over_bytes(knowledge, place) < _over_bytes(knowledge, nearest[place.line]):
            nearest[place.line] = place
    for place in sorted(nearest.values(), key=lambda place: _over_bytes(knowledge, place)):
        yield _neighbour(knowledge, place, "structure", knowledge.space.shown(place, best))


def _larger_size(knowledge: Knowledge, best: Place) -> Neighbour:
    space, sizes = knowledge.space, knowledge.space.lines[best.line].sizes
    goal = knowledge.space.problem.job.optimize
    knob = length_field(space.candidate(best)) if goal == "max-length" else "per_device_train_batch_size"
    if best.size + 1 >= len(sizes):
        return _not_computed(knob, str(getattr(space.candidate(best), knob)), "limit")
    place = Place(best.line, best.size + 1, space.shares(best.line, best.size + 1)[0])
    return _neighbour(knowledge, place, knob, str(getattr(sizes[place.size], knob)))


def _larger_share(knowledge: Knowledge, best: Place) -> Neighbour:
    place = best._replace(share=best.share + 1)
    if place.share > knowledge.space.shares(best.line, best.size)[1]:
        return _not_computed(SHARE_KNOB, f"{best.share / 100:g}", "limit")
    return _neighbour(knowledge, place, SHARE_KNOB, f"{place.share / 100:g}")


def _not_computed(knob: str, value: str, verdict: Verdict) -> Neighbour:
    return Neighbour(
        knob=knob,
        value=value,
        settings={},
        verdict=verdict,
        phase="",
        needs_bytes=0,
        interval_bytes=(0, 0),
        capacity_bytes=0,
        fit_chance=0.0,
    )


def _neighbour(knowledge: Knowledge, place: Place, knob: str, value: str) -> Neighbour:
    if not knowledge.space.starts(place):
        return _not_computed(knob, value, "no start")
    row, mean, deviation = _heaviest(knowledge, place)
    return Neighbour(
        knob=knob,
        value=value,
        settings=knowledge.space.knobs(place),
        verdict=_verdict(knowledge, place),
        phase=row.phase,
        needs_bytes=int(mean),
        interval_bytes=(int(mean - DEVIATIONS * deviation), int(mean + DEVIATIONS * deviation)),
        capacity_bytes=row.capacity_bytes,
        fit_chance=knowledge.chance(place),
    )


def _verdict(knowledge: Knowledge, place: Place) -> Verdict:
    if knowledge.refuted(place):
        return "probe"
    if knowledge.chance(place) <= LEAST_CHANCE:
        return "belief"
    if knowledge.space.merit(place) <= knowledge.floor:
        return "no gain"
    return "set aside" if knowledge.decided(place) else "open"


def _heaviest(knowledge: Knowledge, place: Place) -> tuple[Row, float, float]:
    """The phase that most likely does not fit, with what it needs."""
    needs = [(row, *knowledge.belief.needs(row)) for row in knowledge.space.heavy_rows(place)]
    return max(needs, key=lambda each: (each[1] - each[0].capacity_bytes) / each[2])


def _over_bytes(knowledge: Knowledge, place: Place) -> float:
    row, mean, _ = _heaviest(knowledge, place)
    return mean - row.capacity_bytes


# -- as text and JSON --------------------------------------------------------------------------------------------------


def certificate_report(found: Certificate) -> dict[str, object]:
    """A certificate as a JSON object."""
    report: dict[str, object] = {entry.name: getattr(found, entry.name) for entry in fields(Certificate)}
    neighbours = [{entry.name: getattr(each, entry.name) for entry in fields(Neighbour)} for each in found.neighbours]
    known = {name: {"mean": mean, "deviation": deviation} for name, (mean, deviation) in found.learned.items()}
    return report | {
        "neighbours": [each | {"interval_bytes": list(each["interval_bytes"])} for each in neighbours],
        "learned": known,
    }


SENTENCES: dict[Verdict, str] = {
    "probe": "ran out of memory in a probe",
    "belief": "excluded: {low} to {high} in the {phase} phase, of {capacity}",
    "no start": "its engine would not start",
    "limit": "is as large as it goes",
    "no gain": "would gain nothing",
    "set aside": "set aside: its probes failed for another reason than memory",
    "open": "open: {low} to {high} in the {phase} phase, of {capacity}; fits with {chance:.0%}",
}


def certificate_lines(found: Certificate) -> tuple[str, ...]:
    """For people: a few lines."""
    if not found.best:
        return (
            (f"no candidate has run; {found.still_open} are open",)
            if found.still_open
            else ("no candidate fits: all are excluded",)
        )
    state = ("certified" if found.holds else "not certified") + ("" if found.device == "cuda" else f" ({found.device})")
    ran = f"{state}: the best candidate ran, after {format_count(found.probes)} probe{'s' if found.probes != 1 else ''}"
    counts = f"better ones: {format_count(found.excluded_by_probe)} excluded by probe, {format_count(found.excluded_by_belief)} by belief"
    counts += f", {found.still_open} open" if found.still_open else ""
    shown = [neighbour_line(each) for each in found.neighbours[:SHOWN]]
    more = (
        [f"and {len(found.neighbours) - SHOWN} structures that miss by more"] if len(found.neighbours) > SHOWN else []
    )
    apart = [
        *(f"set aside: {each}" for each in found.set_aside),
        *(f"cannot run here: {each}" for each in found.unavailable),
    ]
    return (ran, counts, *shown, *more, *apart, learned_line(found.learned))


def neighbour_line(each: Neighbour) -> str:
    low, high = (format_size(max(size, 0)) for size in each.interval_bytes)
    said = SENTENCES[each.verdict].format(
        low=low,
        high=high,
        capacity=format_size(each.capacity_bytes),
        phase=each.phase.replace("_", " "),
        chance=each.fit_chance,
    )
    name = each.value if each.knob == "structure" else f"{each.knob} {each.value}"
    return f"{name}: {said}"


def learned_line(known: Mapping[str, tuple[float, float]]) -> str:
    """The constants whose spread the probes have at least halved."""
    parts = []
    for name, (mean, deviation) in known.items():
        prior = PRIORS[name.partition(":")[0]]
        if deviation > prior.deviation / 2:
            continue
        if name == "runtime":
            parts.append(f"outside torch {mean / 2**20:+,.0f} ± {deviation / 2**20:,.0f} MiB")
        else:
            parts.append(f"{name} {mean:+.1%} ± {deviation:.1%}")
    return "learned of the device: " + (", ".join(parts) if parts else "nothing certain yet")

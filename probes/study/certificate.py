"""The certificate of a study: the larger or faster neighbours of the best candidate, and how each was excluded."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Literal

from msgspec import Struct
from msgspec.structs import fields

from planner.measurements.corrected_estimate import phase_differences
from planner.measurements.measurement import DeviceName
from planner.quantities import Phase
from planner.search.sizes import largest, length_field
from planner.units import format_count, format_size
from probes.study.posterior import PRIORS, Belief, PhaseModel
from probes.study.space import FEW_SIZES, SHARE_KNOB, GridPoint
from probes.study.state import LEAST_CHANCE, MOST_SIZES, Knowledge, open_points

# Why a larger candidate is not better.
Verdict = Literal[
    "probe",  # a probe of it ran out of memory, or one of a candidate that needs no more
    "belief",  # it fits with a probability of at most LEAST_CHANCE, by what the probes have shown
    "no start",  # its vLLM engine would refuse to start, or a node cannot hold it
    "limit",  # the setting has no larger value
    "no gain",  # it is no better by the job's goal
    "set aside",  # its probes failed for another reason than memory
    "open",  # it may fit, and no probe has shown otherwise
]
# A CPU's peak that is further than this share from the estimate certifies nothing: what it excludes may fit on a GPU.
MOST_OFF = 0.10
NOT_IN_A_STEP: frozenset[Phase] = frozenset({"load", "save"})
DEVIATIONS = 2.5758  # half the interval in standard deviations: 0.5 % beyond each end, as LEAST_CHANCE
SHOWN = 6  # neighbours that the text shows


class Neighbour(Struct, frozen=True, kw_only=True):
    """A candidate that is larger in one setting (`knob`), or has another structure.

    Bytes are those of its least likely phase, predicted from the probes; 0 if they were not computed.
    """

    knob: str
    value: str
    settings: Mapping[str, bool | int | float | str]
    verdict: Verdict
    phase: Phase | Literal[""]
    needs_bytes: int
    interval_bytes: tuple[int, int]
    capacity_bytes: int
    fit_chance: float


class Certificate(Struct, frozen=True, kw_only=True):
    """The proof that a study's best candidate is the best that fits.

    `holds`: the best candidate ran, no better one is open or set aside, and a CPU's peak is within `MOST_OFF` of the
    estimate. The counts are of candidates better than it.
    """

    holds: bool
    device: DeviceName
    off_share: float  # of the best candidate's peak on a CPU from the estimate, which is of a GPU; 0 on other devices
    best: Mapping[str, bool | int | float | str]
    probes: int
    neighbours: tuple[Neighbour, ...]
    excluded_by_probe: int
    excluded_by_belief: int
    still_open: int
    set_aside: tuple[str, ...]
    unavailable: tuple[str, ...]  # why some structures cannot run here; the certificate leaves them out
    learned: Mapping[str, tuple[float, float]]  # the device's constants: mean and standard deviation


def certificate(knowledge: Knowledge) -> Certificate:
    """Build the certificate of a study's state, finished or not."""
    best = knowledge.ran[0] if knowledge.ran else None
    better = list(_excluded_better(knowledge))
    still_open = len(open_points(knowledge))
    by_probe = sum(count for point, count in better if knowledge.refuted(point))
    return Certificate(
        device=knowledge.space.device,
        off_share=(off := off_share(knowledge)),
        holds=best is not None and not still_open and not knowledge.set_aside and abs(off) <= MOST_OFF,
        best={} if best is None else knowledge.space.knobs(best),
        probes=len(knowledge.measured),
        neighbours=tuple(_neighbours(knowledge, best, [point for point, _ in better])),
        excluded_by_probe=by_probe,
        excluded_by_belief=sum(count for _, count in better) - by_probe,
        still_open=still_open,
        set_aside=tuple(
            f"{knowledge.space.describe(point)}: {reason}" for point, reason in knowledge.set_aside.items()
        ),
        unavailable=tuple(dict.fromkeys(knowledge.unavailable.values())),
        learned=learned_constants(knowledge.belief),
    )


def off_share(knowledge: Knowledge) -> float:
    """Return the share by which the best candidate's peak on a CPU exceeds the estimate, which is of a GPU's kernels.

    0 on other devices, whose kernels are the GPU's. Loading and saving do not count: on a CPU the file's tensors are on
    the device too.
    """
    best = knowledge.ran[0] if knowledge.ran else None
    expected = knowledge.space.estimate(best) if best is not None else None
    if knowledge.space.device != "cpu" or best is None or expected is None:
        return 0.0
    phases = phase_differences(expected, knowledge.measured[best])
    steps = [phase for phase in phases if phase.name not in NOT_IN_A_STEP]
    peak = max(steps, key=lambda phase: phase.measured_bytes, default=None)
    return peak.measured_bytes / peak.expected_bytes - 1 if peak is not None else 0.0


def learned_constants(belief: Belief) -> dict[str, tuple[float, float]]:
    """Return mean and standard deviation of the device's constants that were observed."""
    return {
        name: belief.constant(name) for name in belief.names if name.partition(":")[0] not in ("counted", "structure")
    }


# -- better candidates -------------------------------------------------------------------------------------------------


def _excluded_better(knowledge: Knowledge) -> Iterator[tuple[GridPoint, int]]:
    """Yield the smallest excluded points of each line that are better than the best, and how many each stands for."""
    space = knowledge.space
    for line in (line for line in range(len(space.lines)) if line not in knowledge.unavailable):
        count = len(space.lines[line].sizes)
        smallest = partial(space.with_smallest_share, line)  # size -> its point with the smallest share
        if count <= FEW_SIZES:
            for size in range(count):
                yield from _excluded_shares(knowledge, line, size)
            continue
        top = largest(0, count - 1, lambda size: knowledge.may_fit(smallest(size)))  # noqa: B023
        first = 1 + largest(0, count - 1, lambda size: not _better(knowledge, smallest(size)))  # noqa: B023
        beyond = max(top + 1, first)
        if beyond < count and space.starts(smallest(beyond)):
            yield smallest(beyond), count - beyond
        for size in range(max(first - 1, 0), min(top + 1, first + MOST_SIZES)):
            yield from _excluded_shares(knowledge, line, size)


def _better(knowledge: Knowledge, point: GridPoint) -> bool:
    """Return whether a point is better than the best that ran."""
    return knowledge.space.starts(point) and knowledge.space.merit(point) > knowledge.floor


def _excluded_shares(knowledge: Knowledge, line: int, size: int) -> Iterator[tuple[GridPoint, int]]:
    """Yield the smallest excluded share of one size that is better than the best, and how many it stands for."""
    low, high = knowledge.space.shares(line, size)
    if low > high or not _better(knowledge, GridPoint(line, size, high)):
        return
    first = 1 + largest(low, high, lambda share: not _better(knowledge, GridPoint(line, size, share)))
    first = max(first, 1 + largest(low, high, lambda share: knowledge.may_fit(GridPoint(line, size, share))))
    if first <= high:
        yield GridPoint(line, size, first), high - first + 1


def _neighbours(knowledge: Knowledge, best: GridPoint | None, excluded: list[GridPoint]) -> Iterator[Neighbour]:
    """Yield the next larger size and share of the best point, then the nearest excluded point of each other line."""
    if best is not None:
        yield _larger_size(knowledge, best)
        if best.share:
            yield _larger_share(knowledge, best)
    nearest: dict[int, GridPoint] = {}
    for point in excluded:
        if best is not None and point.line == best.line:
            continue
        if point.line not in nearest or _over_bytes(knowledge, point) < _over_bytes(knowledge, nearest[point.line]):
            nearest[point.line] = point
    for point in sorted(nearest.values(), key=lambda point: _over_bytes(knowledge, point)):
        yield _neighbour(knowledge, point, "structure", knowledge.space.describe(point, best))


def _larger_size(knowledge: Knowledge, best: GridPoint) -> Neighbour:
    """Return the neighbour of the next larger size."""
    space, sizes = knowledge.space, knowledge.space.lines[best.line].sizes
    goal = knowledge.space.problem.job.optimize
    knob = length_field(space.candidate(best)) if goal == "max-length" else "per_device_train_batch_size"
    if best.size + 1 >= len(sizes):
        return _not_computed(knob, str(getattr(space.candidate(best), knob)), "limit")
    point = GridPoint(best.line, best.size + 1, space.shares(best.line, best.size + 1)[0])
    return _neighbour(knowledge, point, knob, str(getattr(sizes[point.size], knob)))


def _larger_share(knowledge: Knowledge, best: GridPoint) -> Neighbour:
    """Return the neighbour of the next larger share of the GPU for the engine."""
    point = best._replace(share=best.share + 1)
    if point.share > knowledge.space.shares(best.line, best.size)[1]:
        return _not_computed(SHARE_KNOB, f"{best.share / 100:g}", "limit")
    return _neighbour(knowledge, point, SHARE_KNOB, f"{point.share / 100:g}")


def _not_computed(knob: str, value: str, verdict: Verdict) -> Neighbour:
    """Return a neighbour without bytes: one that does not exist, or does not start."""
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


def _neighbour(knowledge: Knowledge, point: GridPoint, knob: str, value: str) -> Neighbour:
    """Describe a point as a neighbour of the best one, with its verdict."""
    if not knowledge.space.starts(point):
        return _not_computed(knob, value, "no start")
    phase, mean, deviation = _heaviest(knowledge, point)
    return Neighbour(
        knob=knob,
        value=value,
        settings=knowledge.space.knobs(point),
        verdict=_verdict(knowledge, point),
        phase=phase.phase,
        needs_bytes=int(mean),
        interval_bytes=(int(mean - DEVIATIONS * deviation), int(mean + DEVIATIONS * deviation)),
        capacity_bytes=phase.capacity_bytes,
        fit_chance=knowledge.chance(point),
    )


def _verdict(knowledge: Knowledge, point: GridPoint) -> Verdict:
    """Return why a point is not better than the best, or that it is open."""
    if knowledge.refuted(point):
        return "probe"
    if knowledge.chance(point) <= LEAST_CHANCE:
        return "belief"
    if knowledge.space.merit(point) <= knowledge.floor:
        return "no gain"
    return "set aside" if knowledge.decided(point) else "open"


def _heaviest(knowledge: Knowledge, point: GridPoint) -> tuple[PhaseModel, float, float]:
    """Return the phase of a point that is least likely to fit, with mean and standard deviation of its bytes."""
    needs = [(phase, *knowledge.belief.needs(phase)) for phase in knowledge.space.heavy_phases(point)]
    return max(needs, key=lambda each: (each[1] - each[0].capacity_bytes) / each[2])


def _over_bytes(knowledge: Knowledge, point: GridPoint) -> float:
    """Return by how many bytes a point's least likely phase exceeds its GPU, in the mean."""
    phase, mean, _ = _heaviest(knowledge, point)
    return mean - phase.capacity_bytes


# -- as text and JSON --------------------------------------------------------------------------------------------------


def certificate_report(found: Certificate) -> dict[str, object]:
    """Return a certificate as a JSON object."""
    report: dict[str, object] = {entry.name: getattr(found, entry.name) for entry in fields(Certificate)}
    neighbours = [{entry.name: getattr(each, entry.name) for entry in fields(Neighbour)} for each in found.neighbours]
    constants = {name: {"mean": mean, "deviation": deviation} for name, (mean, deviation) in found.learned.items()}
    return report | {
        "neighbours": [each | {"interval_bytes": list(each["interval_bytes"])} for each in neighbours],
        "learned": constants,
    }


# The text of each verdict; intervals are of the bytes that the phase needs.
SENTENCES: dict[Verdict, str] = {
    "probe": "ran out of memory in a probe",
    "belief": "does not fit, judged by the probes: needs {low} to {high} of {capacity} in the {phase}",
    "no start": "its vLLM engine would not start, or a node has too little host memory",
    "limit": "has no larger value",
    "no gain": "is no better",
    "set aside": "not decided: its probes failed for another reason than memory",
    "open": "not decided: needs {low} to {high} of {capacity} in the {phase}, fits with a probability of {chance:.0%}",
}


def certificate_lines(found: Certificate) -> tuple[str, ...]:
    """Return a certificate as a few lines of text."""
    undecided = _counted(found.still_open, "configuration")
    if not found.best:
        if found.still_open:
            return (f"no probe has run to its end; {undecided} may fit",)
        return ("nothing fits: no configuration is left that could",)
    device = "" if found.device == "cuda" else f" ({found.device})"
    probes = _counted(found.probes, "probe")
    headline = (
        f"proven{device}: this configuration ran, and none that is better fits; {probes}"
        if found.holds
        else f"not proven{device}: this configuration ran, and better ones are not decided; {probes}"
    )
    if abs(found.off_share) > MOST_OFF:
        headline += (
            f"; its peak is {found.off_share:+.0%} from the estimate, more than {MOST_OFF:.0%}: a CPU's kernels keep "
            "other tensors than a GPU's"
        )
    by_probe, by_belief = format_count(found.excluded_by_probe), format_count(found.excluded_by_belief)
    counts = (
        f"better ones that do not fit: {by_probe} ran out of memory in a probe, {by_belief} need too much by what the "
        "probes showed"
    )
    counts += f"; {undecided} not decided" if found.still_open else ""
    shown = [neighbour_line(each) for each in found.neighbours[:SHOWN]]
    more = (
        [f"and {len(found.neighbours) - SHOWN} others, which need still more"] if len(found.neighbours) > SHOWN else []
    )
    not_probed = [
        *(f"not decided, as its probes failed: {each}" for each in found.set_aside),
        *(f"cannot run here: {each}" for each in found.unavailable),
    ]
    return (headline, counts, *shown, *more, *not_probed, learned_line(found.learned))


def _counted(number: int, word: str) -> str:
    return f"{format_count(number)} {word}{'s' if number != 1 else ''}"


def neighbour_line(each: Neighbour) -> str:
    """Return a neighbour as a line of text."""
    low, high = (format_size(max(size, 0)) for size in each.interval_bytes)
    sentence = SENTENCES[each.verdict].format(
        low=low,
        high=high,
        capacity=format_size(each.capacity_bytes),
        phase=each.phase.replace("_", " "),
        chance=each.fit_chance,
    )
    name = each.value if each.knob == "structure" else f"{each.knob} {each.value}"
    return f"{name}: {sentence}"


# What a constant of the device scales (probes/study/posterior.py, `PRIORS`), in a reader's words.
CONSTANT_WORDS = {"slack": "PyTorch's allocator", "runtime": "the CUDA context"}


def learned_line(constants: Mapping[str, tuple[float, float]]) -> str:
    """Return a line with the constants whose standard deviation the probes have at least halved.

    Example: `measured beside the formulas: activations -0.5% ± 1.7%, the CUDA context +12 ± 4 MiB`.
    """
    parts = []
    for name, (mean, deviation) in constants.items():
        prior = PRIORS[name.partition(":")[0]]
        if deviation > prior.deviation / 2:
            continue
        kind, _, detail = name.partition(":")
        words = CONSTANT_WORDS.get(kind, kind.replace("_", " ")) + (f" ({detail})" if detail else "")
        if name == "runtime":
            parts.append(f"{words} {mean / 2**20:+,.0f} ± {deviation / 2**20:,.0f} MiB")
        else:
            parts.append(f"{words} {mean:+.1%} ± {deviation:.1%}")
    return "measured beside the formulas: " + (", ".join(parts) if parts else "nothing is certain yet")

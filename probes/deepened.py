"""The dry run of a model of many layers from dry runs of a few: every layer is there, with all that it allocates, and few of them are run."""

from dataclasses import dataclass, replace

from planner.candidate import Candidate
from planner.trace.architecture import FEWEST_LAYERS
from planner.trace.deeper import COPIES, Repeating, same_step
from planner.trace.profile import NoProfile
from planner.trace.timeline import Trace
from probes.dryrun import Ways, block_bytes_of, dry_run
from probes.layers.few_layers import layer_kinds, with_layers
from probes.process.beside import Beside

CHECKED = COPIES + 1  # copies of what repeats, in the trace that is held back to check
WORTH = 2  # times as many layers as are traced one after the other, from which on this is quicker than to run them all


@dataclass(frozen=True, kw_only=True, slots=True)
class Pattern:
    """So many layers that repeat every `period`th, between others that come once, such as dense ones before those of experts."""

    before: int
    repeating: int
    after: int
    period: int

    @property
    def whole(self) -> int:
        return self.before + self.repeating + self.after

    @property
    def fewest(self) -> int:
        """Repeating layers of the first trace, in which the pattern ends as in the whole model."""
        least = FEWEST_LAYERS + (self.repeating - FEWEST_LAYERS) % self.period
        return least if least >= self.period else least + self.period

    @property
    def copies(self) -> int:
        """Of a period, in the whole model besides those of the first trace."""
        return (self.repeating - self.fewest) // self.period

    def kept(self, copies: int) -> list[int]:
        """The layers of a trace with so many copies."""
        return [*range(self.before + self.fewest + copies * self.period), *range(self.whole - self.after, self.whole)]


def deepened(candidate: Candidate, ways: Ways) -> Trace:
    """Two optimizer steps of a candidate's trainer, as `dry_run` with `steps=1` traces them.

    Raises:
        NoProfile: its layers do not repeat, are few, or do not repeat to the byte: a dry run of all of them tells.
    """
    pattern = pattern_of(candidate)
    if pattern.whole < WORTH * (len(pattern.kept(0)) + len(pattern.kept(COPIES))):
        raise NoProfile("All layers are run as quickly.")
    first, second, checked = (_cut(candidate, pattern.kept(copies)) for copies in (0, COPIES, CHECKED))
    with Beside(lambda: dry_run(checked, ways, block_bytes=1, steps=1)) as other:
        repeating = Repeating(*(dry_run(case, ways, block_bytes=1, steps=1) for case in (first, second)))
        expected = repeating.trace(CHECKED)
        found = other.result()
    if not same_step(expected, found):
        raise NoProfile("What a few layers allocate does not follow from what fewer do.")
    return repeating.trace(pattern.copies, block_bytes_of(ways))


def pattern_of(candidate: Candidate) -> Pattern:
    """How the layers of a candidate's model repeat.

    Raises:
        NoProfile: they do not, or are not of one model.
    """
    model = candidate.model
    if candidate.activation_offloading or candidate.reward_model is not None:
        raise NoProfile("Activations on the host go there by their number, and a reward model has its own layers.")
    if candidate.teacher_model is not None and candidate.teacher_model.config != model.config:
        raise NoProfile("The teacher has other layers.")
    try:
        kinds = layer_kinds(dict(model.config))
    except Exception as error:  # whatever a config lacks
        raise NoProfile(f"Nobody knows which layers {model.id} has: {type(error).__name__}: {error}") from error
    of_layers = dict(sorted((place, kind) for kind, places in enumerate(kinds) for place in places))
    return shortest_pattern(list(of_layers.values()), candidate.checkpoint_every_n_layers)


def shortest_pattern(kinds: list[int], every: int = 1) -> Pattern:
    """The pattern that the fewest layers show twice, from the kind of each layer; its period is a multiple of `every`.

    Raises:
        NoProfile: there is none.
    """
    found: list[tuple[int, Pattern]] = []
    for period in range(every, len(kinds) // 2 + 1, every):
        start = 0
        for place in range(len(kinds) - period + 1):
            if place == len(kinds) - period or kinds[place] != kinds[place + period]:
                if place - start >= period:
                    after = len(kinds) - place - period
                    pattern = Pattern(before=start, repeating=place + period - start, after=after, period=period)
                    found.append((start + COPIES * period + after, pattern))
                start = place + 1
    if not found:
        raise NoProfile("The layers are of kinds that do not repeat.")
    return min(found, key=lambda each: each[0])[1]


def _cut(candidate: Candidate, kept: list[int]) -> Candidate:
    """The candidate with these layers of its model only; a teacher of the same shape keeps it."""
    model = replace(candidate.model, config=with_layers(dict(candidate.model.config), kept))
    return replace(candidate, model=model, teacher_model=None if candidate.teacher_model is None else model)

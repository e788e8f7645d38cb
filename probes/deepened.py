"""The dry run of a model of many layers from dry runs of a few: every layer is there, with all that it allocates, and few of them are run."""

from dataclasses import dataclass
from math import lcm

from planner.candidate import Candidate
from planner.trace.architecture import FEWEST_LAYERS, period
from planner.trace.deeper import COPIES, Repeating, same_step
from planner.trace.profile import NoProfile
from planner.trace.timeline import Trace
from probes.dryrun import Ways, block_bytes_of, dry_run
from probes.process.beside import Beside
from probes.small_sizes import with_layers

CHECKED = COPIES + 1  # copies of what repeats, in the trace that is held back to check
NEEDED_FIELDS = ("num_hidden_layers", "hidden_size", "vocab_size")
WORTH = 2  # times as many layers as are traced one after the other, from which on this is quicker than to run them all


@dataclass(frozen=True, slots=True)
class Depths:
    """Layers of the traces: `first`, and so many more a period."""

    first: int
    period: int
    whole: int

    @property
    def second(self) -> int:
        return self.first + COPIES * self.period

    @property
    def checked(self) -> int:
        return self.first + CHECKED * self.period

    @property
    def copies(self) -> int:
        """Of what repeats, in the whole model."""
        return (self.whole - self.first) // self.period


def deepened(candidate: Candidate, ways: Ways) -> Trace:
    """Two optimizer steps of a candidate's trainer, as `dry_run` with `steps=1` traces them.

    Raises:
        NoProfile: its layers are not all alike, are few, or do not repeat to the byte: a dry run of all of them tells.
    """
    depths = depths_of(candidate)
    if depths.whole < WORTH * (depths.first + depths.second):
        raise NoProfile("All layers are run as quickly.")
    cases = [with_layers(candidate, layers) for layers in (depths.first, depths.second, depths.checked)]
    with Beside(lambda: dry_run(cases[2], ways, block_bytes=1, steps=1)) as other:
        repeating = Repeating(*(dry_run(case, ways, block_bytes=1, steps=1) for case in cases[:2]))
        expected = repeating.trace(CHECKED)
        found = other.result()
    if not same_step(expected, found):
        raise NoProfile("What a few layers allocate does not follow from what fewer do.")
    return repeating.trace(depths.copies, block_bytes_of(ways))


def depths_of(candidate: Candidate) -> Depths:
    """How many layers to run.

    Raises:
        NoProfile: the layers are of several kinds, or the models are.
    """
    model = candidate.model
    whole = model.config.get("num_hidden_layers")
    if not isinstance(whole, int) or any(not isinstance(model.config.get(name), int) for name in NEEDED_FIELDS):
        raise NoProfile(f"The config of {model.id} does not say its depth as other models' do.")
    repeat = period(model)
    if repeat == 1 and len(set(model.layers)) != 1:
        raise NoProfile(f"The layers of {model.id} are of several kinds, or of kinds that nobody knows here.")
    if candidate.activation_offloading or candidate.reward_model is not None:
        raise NoProfile("Activations on the host go there by their number, and a reward model has its own layers.")
    if candidate.teacher_model is not None and candidate.teacher_model.config != model.config:
        raise NoProfile("The teacher has other layers.")
    repeat = lcm(repeat, candidate.checkpoint_every_n_layers)
    least = FEWEST_LAYERS + (whole - FEWEST_LAYERS) % repeat
    return Depths(first=least if least >= repeat else least + repeat, period=repeat, whole=whole)

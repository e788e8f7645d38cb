"""A sampler for Optuna that knows what it asks about: the estimate is its prior, the device's constants are what it learns."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from planner.measurements.measurement import Measurement, measurement_of
from probes.study.space import NO_SHARE, SHARE_KNOB, Place, Space
from probes.study.state import SEED, Knowledge, known, next_place

# A trial's attributes. The measurement is written first: a trial that has one was probed, whatever else is missing.
MEASUREMENT, REASON, OWNER = "measurement", "reason", "owner"
TRIES = 2  # of a candidate whose probe ends without saying anything about memory
# How a missing package says so, and which candidates need it: by a word of the message, a field and its values.
MISSING = r"ImportError|ModuleNotFoundError|PackageNotFoundError"
PACKAGES: dict[str, tuple[str, frozenset[str]]] = {
    r"flash.?att": ("attn_implementation", frozenset({"flash_attention_2", "flash_attention_3"})),
    r"deepspeed": ("sharding", frozenset({"zero1", "zero2", "zero3"})),
    r"\bvllm\b": ("vllm", frozenset({"colocate", "server"})),
}
INTERRUPTED = "interrupted"  # by whoever ran the study: says nothing about the candidate


class PlanSampler(BaseSampler):
    """Proposes, of a space's open candidates, the one whose probe decides most. Holds nothing that the study's trials do not say.

    Parameters that are no knobs of the space are drawn at random, as Optuna's own samplers draw what they have no model of.
    """

    def __init__(self, space: Space, seed: int = SEED) -> None:
        self.space = space
        self.distributions = distributions_of(space)
        self._seed = seed
        self._other = RandomSampler(seed=seed)
        self._read: dict[str, Measurement] = {}
        self._proposed: tuple[int, Place | None] = (-1, None)

    def knowledge(self, study: Study) -> Knowledge:
        """What the finished trials of a study say."""
        trials = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.FAIL))
        return known(self.space, self._measured(trials), set_aside(self.space, trials), unavailable(self.space, trials))

    def propose(self, study: Study) -> Place | None:
        """The candidate to probe next; None: nothing that is open could be better."""
        finished = len(study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.FAIL)))
        if self._proposed[0] != finished:
            self._proposed = finished, next_place(self.knowledge(study), seed=self._seed)
        return self._proposed[1]

    def knobs(self, place: Place) -> dict[str, BaseDistribution]:
        """What to suggest for a candidate."""
        return {name: self.distributions[name] for name in self.space.knobs(place)}

    def _measured(self, trials: Sequence[FrozenTrial]) -> dict[Place, Measurement]:
        found: dict[Place, Measurement] = {}
        for trial in trials:
            place = self.space.place(trial.params) if trial.state == TrialState.COMPLETE else None
            if place is not None and MEASUREMENT in trial.user_attrs and self.space.starts(place):
                found[place] = self._measurement(trial.user_attrs[MEASUREMENT], place)
        return found

    def _measurement(self, line: str, place: Place) -> Measurement:
        """With the space's own candidate: models are compared by identity."""
        if line not in self._read:
            self._read[line] = replace(measurement_of(json.loads(line)), candidate=self.space.candidate(place))
        return self._read[line]

    # -- Optuna's interface

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        self._raise_error_if_multi_objective(study)
        place = self.propose(study)
        return {} if place is None else self.knobs(place)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        place = self.propose(study)
        proposed = {} if place is None else self.space.knobs(place)
        return {
            name: proposed[name]
            if name in proposed and self.distributions[name] == distribution
            else self._random(study, trial, name, distribution)
            for name, distribution in search_space.items()
        }

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        self._raise_error_if_multi_objective(study)
        return self._random(study, trial, param_name, param_distribution)

    def reseed_rng(self) -> None:
        self._other.reseed_rng()

    def _random(self, study: Study, trial: FrozenTrial, name: str, distribution: BaseDistribution) -> Any:
        return self._other.sample_independent(study, trial, name, distribution)


def set_aside(space: Space, trials: Sequence[FrozenTrial]) -> dict[Place, str]:
    """Candidates that were tried often enough, with the last reason why no probe said anything."""
    failed: dict[Place, list[str]] = {}
    for trial in trials:
        reason = trial.user_attrs.get(REASON, INTERRUPTED)
        place = space.place(trial.params) if trial.state == TrialState.FAIL and reason != INTERRUPTED else None
        if place is not None:
            failed.setdefault(place, []).append(reason)
    return {place: reasons[-1] for place, reasons in failed.items() if len(reasons) >= TRIES}


def unavailable(space: Space, trials: Sequence[FrozenTrial]) -> dict[int, str]:
    """Lines of a space that need a package which a probe has missed, and how it said so."""
    found: dict[int, str] = {}
    for trial in trials:
        reason = trial.user_attrs.get(REASON, "")
        for package, (field, values) in PACKAGES.items():
            if (
                trial.state == TrialState.FAIL
                and re.search(MISSING, reason)
                and re.search(package, reason, re.IGNORECASE)
            ):
                found |= {
                    number: reason
                    for number, line in enumerate(space.lines)
                    if getattr(line.structure, field) in values
                }
    return found


def distributions_of(space: Space) -> dict[str, BaseDistribution]:
    """Every knob of a space with the values it can have, the same for every trial of a study."""
    values: dict[str, set[Any]] = {}
    for number, line in enumerate(space.lines):
        for size in ends(len(line.sizes)):
            for name, value in space.knobs(Place(number, size, NO_SHARE)).items():
                values.setdefault(name, set()).add(value)
    return {name: _distribution(found) for name, found in values.items()} | {SHARE_KNOB: FloatDistribution(0.0, 1.0)}


def ends(count: int) -> Sequence[int]:
    """Sizes whose settings bound all others': the product of a micro-batch and its accumulation is the same in all of them."""
    return (0, count - 1) if count > 1 else (0,)


def _distribution(values: set[Any]) -> BaseDistribution:
    if all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        return IntDistribution(min(values), max(values))
    return CategoricalDistribution(sorted(values, key=str))

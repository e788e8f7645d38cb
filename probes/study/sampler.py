"""An Optuna sampler whose prior is the estimate, and which learns the device's constants from the trials."""

import re
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from planner.errors import PlanError, shortened
from planner.measurements.documents import stored_measurement
from planner.measurements.measurement import Measurement
from probes.study.space import NO_SHARE, SHARE_KNOB, GridPoint, Space
from probes.study.state import SEED, Knowledge, knowledge_of, next_point

# User attributes of a trial. The measurement is written first: a trial with one was probed, even if it never finished.
MEASUREMENT, REASON, OWNER = "measurement", "reason", "owner"
TRIES = 2  # probes of a candidate that fail for another reason than memory, before it is set aside
# A message with this pattern says that a package is missing. By pattern of the package's name: the field of a
# candidate, and its values, that need the package.
MISSING = r"ImportError|ModuleNotFoundError|PackageNotFoundError"
PACKAGES: dict[str, tuple[str, frozenset[str]]] = {
    r"flash.?att": ("attn_implementation", frozenset({"flash_attention_2", "flash_attention_3"})),
    r"deepspeed": ("sharding", frozenset({"zero1", "zero2", "zero3"})),
    r"\bvllm\b": ("vllm", frozenset({"colocate", "server"})),
}
INTERRUPTED = "interrupted"  # the reason of a trial that the user interrupted: says nothing about the candidate


class PlanSampler(BaseSampler):
    """Proposes the open candidate whose probe decides most. All its knowledge is read from the study's trials.

    Parameters that are not in the space are sampled at random, as Optuna's own samplers do with unknown parameters.
    """

    def __init__(self, space: Space, seed: int = SEED) -> None:
        self.space = space
        self.distributions = distributions_of(space)
        self._seed = seed
        self._random_sampler = RandomSampler(seed=seed)
        self._parsed: dict[str, Measurement] = {}
        self._proposed: tuple[tuple[int, frozenset[GridPoint]], GridPoint | None] = ((-1, frozenset()), None)

    def knowledge(self, study: Study) -> Knowledge:
        """Return what the finished trials of a study say."""
        trials = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.FAIL))
        return knowledge_of(
            self.space, self._measured(trials), set_aside(self.space, trials), unavailable(self.space, trials)
        )

    def propose(self, study: Study) -> GridPoint | None:
        """Return the point to probe next, beside those of the running trials.

        None if no other open point could be better than the best that ran.
        """
        trials = study.get_trials(deepcopy=False)
        points = {self.space.point(trial.params) for trial in trials if trial.state == TrialState.RUNNING}
        running = frozenset(point for point in points if point is not None)
        key = sum(trial.state.is_finished() for trial in trials), running
        if self._proposed[0] != key:
            self._proposed = key, next_point(self.knowledge(study), running, seed=self._seed)
        return self._proposed[1]

    def knobs(self, point: GridPoint) -> dict[str, BaseDistribution]:
        """Return the Optuna distributions of a point's parameters."""
        return {name: self.distributions[name] for name in self.space.knobs(point)}

    def _measured(self, trials: Sequence[FrozenTrial]) -> dict[GridPoint, Measurement]:
        """Return the measurements of completed trials, by point, in the order of the trials."""
        found: dict[GridPoint, Measurement] = {}
        for trial in trials:
            point = self.space.point(trial.params) if trial.state == TrialState.COMPLETE else None
            if point is not None and MEASUREMENT in trial.user_attrs and self.space.starts(point):
                found[point] = self._measurement(text_of(trial, MEASUREMENT), point)
        return found

    def _measurement(self, line: str, point: GridPoint) -> Measurement:
        """Parse a measurement, and give it the space's own candidate: model shapes are compared by identity."""
        if line not in self._parsed:
            self._parsed[line] = replace(stored_measurement(line), candidate=self.space.candidate(point))
        return self._parsed[line]

    # -- Optuna's interface

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        self._raise_error_if_multi_objective(study)
        point = self.propose(study)
        return {} if point is None else self.knobs(point)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        point = self.propose(study)
        proposed = {} if point is None else self.space.knobs(point)
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
        self._random_sampler.reseed_rng()

    def _random(self, study: Study, trial: FrozenTrial, name: str, distribution: BaseDistribution) -> Any:
        return self._random_sampler.sample_independent(study, trial, name, distribution)


def text_of(trial: FrozenTrial, name: str) -> str:
    """Return a user attribute of a trial that is text; empty if the trial has none.

    Raises:
        PlanError: it is no text, which somebody else has written.
    """
    value = trial.user_attrs.get(name, "")
    if not isinstance(value, str):
        raise PlanError(
            f"Trial {trial.number} of the study has the {name} {shortened(repr(value))}, which is no text: the study "
            "was altered. Give another --storage."
        )
    return value


def set_aside(space: Space, trials: Sequence[FrozenTrial]) -> dict[GridPoint, str]:
    """Return the points that failed `TRIES` times for another reason than memory, with the last reason."""
    failed: dict[GridPoint, list[str]] = {}
    for trial in trials:
        reason = text_of(trial, REASON) or INTERRUPTED
        point = space.point(trial.params) if trial.state == TrialState.FAIL and reason != INTERRUPTED else None
        if point is not None:
            failed.setdefault(point, []).append(reason)
    return {point: reasons[-1] for point, reasons in failed.items() if len(reasons) >= TRIES}


def unavailable(space: Space, trials: Sequence[FrozenTrial]) -> dict[int, str]:
    """Return the lines of a space that need a package which a probe found missing, with the probe's message."""
    found: dict[int, str] = {}
    for trial in trials:
        reason = text_of(trial, REASON)
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
    """Return the Optuna distribution of every setting of a space, the same for every trial of a study."""
    values: dict[str, set[Any]] = {}
    for number, line in enumerate(space.lines):
        for size in ends(len(line.sizes)):
            for name, value in space.knobs(GridPoint(number, size, NO_SHARE)).items():
                values.setdefault(name, set()).add(value)
    return {name: _distribution(found) for name, found in values.items()} | {SHARE_KNOB: FloatDistribution(0.0, 1.0)}


def ends(count: int) -> Sequence[int]:
    """Return the indices of the first and the last size: their settings bound those of all sizes between them.

    The product of micro-batch and accumulation steps is the same for all sizes.
    """
    return (0, count - 1) if count > 1 else (0,)


def _distribution(values: set[Any]) -> BaseDistribution:
    if all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        return IntDistribution(min(values), max(values))
    return CategoricalDistribution(sorted(values, key=str))

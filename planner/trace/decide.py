"""The deciding rung: the answer of a candidate is the estimate, its training GPUs as the profile of its recipe has them where there is one."""

from dataclasses import replace
from functools import lru_cache

from planner.candidate import Candidate
from planner.cluster import Cluster
from planner.confidence import fit_probability, interval_bytes
from planner.errors import DryRunUnsupported
from planner.estimate import estimate
from planner.quantities import TOTAL_BYTES, Estimate
from planner.trace.architecture import numbers
from planner.trace.compose import composed, refuse_other_kernels
from planner.trace.profile import NoProfile, Profile
from planner.trace.sizes import sizes_of
from planner.trace.store import load_profile


def answer_of(candidate: Candidate, cluster: Cluster, risk: float) -> Estimate:
    """What the planner says of a candidate: simulated where a profile speaks of it, else estimated. Takes a millisecond at most, no torch.

    Raises:
        EngineDoesNotFit: the vLLM engine would refuse to start.
    """
    answer = _estimated(candidate, cluster, risk)
    try:
        refuse_other_kernels(candidate, cluster.gpu)
    except DryRunUnsupported:
        return answer
    return decided(answer, risk)


@lru_cache(maxsize=4096)
def _estimated(candidate: Candidate, cluster: Cluster, risk: float) -> Estimate:
    """Remembered: a search asks again when a profile has been made."""
    return estimate(candidate, cluster, risk)


def decided(answer: Estimate, risk: float) -> Estimate:
    """The estimate with its training GPUs simulated; the estimate itself where no profile speaks of the candidate.

        a phase = what the profile's heaviest moment holds + the estimate's components outside the trainer's tensors (compose.OUTSIDE);
                  where states are sharded the moment is the heaviest without them, and the estimate's states are put in (compose.STATES)

    Phases that one process does not go through, and those of a vLLM engine, stay as estimated. What is simulated has the spread of what is
    estimated: the two are equal to within a percent, so what formulas miss of published figures a dry run misses too (planner/confidence.py),
    and no dry run of ours has been compared with a GPU yet.
    """
    profile = load_profile(answer.candidate)
    return answer if profile is None else simulated(answer, profile, risk)


def simulated(answer: Estimate, profile: Profile, risk: float) -> Estimate:
    """The estimate as its candidate's profile decides it; the estimate itself where the profile does not speak of the model's depth."""
    candidate, (train, *others) = answer.candidate, answer.gpus
    try:
        phases = profile.phases(sizes_of(candidate), numbers(candidate.model.config, "num_hidden_layers")[0])
    except NoProfile:
        return answer
    rows = composed(candidate, phases, train.phases)
    heaviest = max(rows, key=TOTAL_BYTES)
    gpu = replace(train, phases=rows, interval_bytes=interval_bytes(heaviest, risk))
    probabilities = [fit_probability(each.peak, each.capacity_bytes) for each in (gpu, *others)]
    fits = all(each.interval_bytes[1] <= each.capacity_bytes for each in (gpu, *others))
    return replace(answer, gpus=(gpu, *others), evidence="simulated", versions=profile.versions, fit_probability=min(probabilities), fits=fits)

"""Profiles from dry runs: the few small traces that answer for every size of a recipe."""

import random
from importlib.metadata import version

from planner.candidate import Candidate
from planner.errors import DryRunUnsupported, PlanError
from planner.memory.sharding import SHARDED
from planner.quantities import Estimate
from planner.trace.architecture import base_layers, period
from planner.trace.compose import single_process, without_states
from planner.trace.decide import simulated
from planner.trace.fit import check, fit_profile
from planner.trace.profile import NoProfile, Profile
from planner.trace.samples import Ambiguous, Sample, Samples
from planner.trace.sizes import sizes_of
from planner.trace.store import LIBRARIES, load_profile, save_profile
from probes.fake.substitutions import CUDA_BLOCK_BYTES
from probes.process.beside import Beside
from probes.simulate import dry_run, stopped_at
from probes.small_sizes import QUANTIZED_WIDTHS, WIDTHS, SmallSizes, narrowed, repeats_of, with_layers
from probes.step.tracker import collector_off

SEED = 20261120
DRAWS = 3  # of sizes, where two of the first cannot be told apart


def profile_of(candidate: Candidate) -> Profile:
    """The profile of a candidate's recipe, in the regime of the candidate's sizes, for every model of its architecture.

    The traces are of models of other widths; one of the candidate's own, deeper and of other lengths, is held back to check.

    Raises:
        NoProfile: the recipe is not one that a profile stands for, its allocations do not follow the terms, or a held-back trace is not reproduced.
    """
    for draw in range(DRAWS):
        try:
            with collector_off():
                return _fitted(candidate, SmallSizes(candidate, random.Random(SEED + draw)))
        except Ambiguous:
            if draw == DRAWS - 1:
                raise
    raise AssertionError


def _fitted(candidate: Candidate, sizes: SmallSizes) -> Profile:
    """The profile from traces of sizes that are drawn."""
    layers, repeat = base_layers(candidate.model), period(candidate.model)
    repeats, widths = repeats_of(candidate), WIDTHS if candidate.quantization == "none" else QUANTIZED_WIDTHS
    longer = repeats.longer != repeats.most
    cases = [narrowed(sizes.drawn(each), width) for each, width in zip((repeats.most, repeats.most, repeats.longer), widths, strict=True)]
    held_back = sizes.drawn(repeats.held_back)
    with Beside(lambda: _sample(cases[0], layers + repeat), lambda: _sample(held_back, layers + 2 * repeat)) as other:
        *alike, third = [_sample(case, layers) for case in cases]
        samples = Samples(alike=tuple(alike if longer else [*alike, third]), deeper=other.result(), longer=third if longer else None)
        profile = fit_profile(samples, (), CUDA_BLOCK_BYTES)
        check(profile, other.result())
    return profile


def kept_profile(candidate: Candidate) -> Profile:
    """The profile of a candidate's recipe from the user's cache or the package; made and kept where there is none of the installed libraries.

    Raises:
        NoProfile: as `profile_of`.
    """
    profile = load_profile(candidate)
    if profile is None or dict(profile.versions) != {name: version(name) for name in LIBRARIES}:
        profile = profile_of(candidate)
        save_profile(candidate, profile)
    return profile


def simulated_answer(answer: Estimate, risk: float) -> Estimate:
    """An estimate as the profile of its candidate's recipe decides it, which is made and kept where there is none yet: seconds, then milliseconds.

    An answer that stands on a profile of the installed libraries is as it was.

    Raises:
        DryRunUnsupported: no profile stands for the candidate, or the installed libraries stop at it.
    """
    try:
        return simulated(answer, kept_profile(answer.candidate), risk)
    except NoProfile as error:
        raise DryRunUnsupported(str(error)) from error
    except PlanError:
        raise
    except Exception as error:  # whatever the installed libraries raise is the answer that they cannot run this
        raise stopped_at(error) from error


def _sample(candidate: Candidate, layers: int) -> Sample:
    """A trace of one process; without states where the candidate shards them."""
    case = with_layers(candidate, layers)
    trace = dry_run(single_process(case), block_bytes=1, steps=1)
    return Sample(values=tuple(sizes_of(case).items()), layers=layers, trace=without_states(trace) if case.sharding in SHARDED else trace)

"""Profiles from dry runs: the few small traces that answer for every size of a recipe."""

from dataclasses import replace

from planner.candidate import Candidate
from planner.model import ModelShape
from planner.trace.profile import Profile, Sample, fit_profile
from planner.trace.terms import TOKEN_CHUNK
from probes.dryrun import dry_run
from probes.substitutions import CUDA_BLOCK_BYTES, EFFICIENT_BIAS_ALIGNMENT

LAYERS = 3  # a first layer, a last one, and one between
HELD_BACK_LAYERS = 7
# (rows, tokens): not multiples of one another nor, but for `EFFICIENT_BIAS_ALIGNMENT`, of what kernels round to, so that terms can be told apart.
# The last of each is held back.
Sizes = tuple[tuple[int, int], ...]
REGIMES: dict[tuple[str, bool], Sizes] = {
    ("one row", False): ((1, 203), (1, 325), (1, 443), (1, 141), (1, 250)),
    ("one row", True): ((1, 208), (1, 336), (1, 432), (1, 144), (1, 272)),
    ("rows", False): ((7, 203), (3, 325), (5, 141), (2, 443), (4, 250)),
    ("rows", True): ((7, 208), (3, 336), (5, 144), (2, 432), (4, 272)),
    ("chunks", False): ((7, 843), (5, 1001), (6, 1163), (9, 701), (8, 813)),
    ("chunks", True): ((7, 848), (5, 1008), (6, 1168), (9, 704), (8, 816)),
}


def profile_of(candidate: Candidate) -> Profile:
    """The profile of a candidate's recipe, in the regime of the candidate's rows and tokens.

    Raises:
        NoProfile: the recipe's allocations are not those of a profile, or a held-back trace is not reproduced.
    """
    *sizes, held_back = REGIMES[regime(candidate)]
    samples = tuple(_sample(candidate, size, LAYERS) for size in sizes)
    deeper = (_sample(candidate, sizes[0], LAYERS + 1), _sample(candidate, sizes[0], LAYERS + 2))
    return fit_profile(samples, deeper, (_sample(candidate, held_back, HELD_BACK_LAYERS),), CUDA_BLOCK_BYTES)


def regime(candidate: Candidate) -> tuple[str, bool]:
    """Which sizes stand for a candidate's.

    One row copies less than two; more tokens than a chunk of TRL's loss are scored in a loop; a mask whose length is no multiple of 16
    is padded for the memory-efficient kernel.
    """
    rows, tokens = candidate.per_device_train_batch_size, candidate.max_length
    chunked = candidate.rows * (tokens - 1) > TOKEN_CHUNK
    return "one row" if rows == 1 else "chunks" if chunked else "rows", tokens % EFFICIENT_BIAS_ALIGNMENT == 0


def sizes_of(candidate: Candidate) -> dict[str, int]:
    """What a profile is asked with."""
    return {"rows": candidate.per_device_train_batch_size, "tokens": candidate.max_length}


def _sample(candidate: Candidate, size: tuple[int, int], layers: int) -> Sample:
    rows, tokens = size
    case = replace(candidate, model=with_layers(candidate.model, layers), per_device_train_batch_size=rows, max_length=tokens)
    return Sample(values=(("rows", rows), ("tokens", tokens)), layers=layers, trace=dry_run(case, block_bytes=1))


def with_layers(shape: ModelShape, layers: int) -> ModelShape:
    """The same model with fewer or more layers."""
    config = dict(shape.config)
    config["num_hidden_layers"] = layers
    config.pop("layer_types", None)
    return replace(shape, config=config)

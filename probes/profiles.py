"""Profiles from dry runs: the few small traces that answer for every size of a recipe."""

import random
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version

from planner.candidate import Candidate
from planner.errors import DryRunUnsupported, PlanError
from planner.memory.sharding import SHARDED
from planner.model import ModelShape
from planner.quantities import Estimate
from planner.trace.architecture import MANY_TILES, base_layers, numbers, period
from planner.trace.compose import single_process, without_states
from planner.trace.decide import simulated
from planner.trace.fit import fit_profile
from planner.trace.fit_sizes import told_apart
from planner.trace.profile import NoProfile, Profile
from planner.trace.recipe import key_of, recipe_of
from planner.trace.samples import Ambiguous, Sample
from planner.trace.sizes import sizes_of
from planner.trace.store import LIBRARIES, load_profile, save_profile
from planner.trace.terms import VOCAB_CHUNK
from probes.fake.substitutions import CUDA_BLOCK_BYTES
from probes.simulate import REASON_LENGTH, dry_run

# Widths that are no multiples of one another nor, but for what kernels want of a head, of what they round to; hidden is one of heads, as
# Llama wants it. In order: heads, key heads, size of a head, hidden, intermediate, words in the vocabulary's last tile, rank.
WIDTHS: tuple[tuple[int, int, int, int, int, int, int], ...] = (
    (6, 2, 40, 186, 440, 11000, 12),
    (12, 3, 24, 228, 616, 17416, 20),
    (10, 5, 56, 310, 712, 23560, 28),
)
# The same where weights are quantized: products of two are whole blocks of statistics (probes/fake/quantized.py, BLOCK x NESTED_BLOCK).
QUANTIZED_WIDTHS: tuple[tuple[int, int, int, int, int, int, int], ...] = (
    (48, 16, 40, 2688, 2176, 11000, 12),
    (64, 32, 24, 896, 3712, 17416, 20),
    (80, 16, 56, 1920, 2432, 23560, 28),
)
ATTEMPTS = 20_000  # draws of rows and lengths before a regime is given up
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
            return _fitted(candidate, random.Random(SEED + draw))
        except Ambiguous:
            if draw == DRAWS - 1:
                raise
    raise AssertionError


def _fitted(candidate: Candidate, draw: random.Random) -> Profile:
    """The profile from traces of sizes that are drawn."""
    layers, repeat = base_layers(candidate.model), period(candidate.model)
    draws = _draws(candidate, draw)
    cases = [_narrowed(next(draws), widths) for widths in (WIDTHS if candidate.quantization == "none" else QUANTIZED_WIDTHS)]
    samples = tuple(_sample(case, layers) for case in cases)
    first = told_apart(samples)
    samples = (samples[first], *samples[:first], *samples[first + 1 :])
    deeper = (_sample(cases[first], layers + repeat), _sample(cases[first], layers + 2 * repeat))
    held_back = _sample(_with_more_steps(next(draws)), layers + 3 * repeat)
    return fit_profile(samples, deeper, (held_back,), CUDA_BLOCK_BYTES)


def _with_more_steps(candidate: Candidate) -> Candidate:
    """One micro-step more than the traces have, where any number of them has one profile."""
    steps = candidate.gradient_accumulation_steps
    return candidate if steps == 1 or candidate.method_row.generates else replace(candidate, gradient_accumulation_steps=steps + 1)


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
        reason = " ".join(str(error).split())[:REASON_LENGTH]
        raise DryRunUnsupported(f"The installed libraries stop at it: {type(error).__name__}: {reason}") from error


def _sample(candidate: Candidate, layers: int) -> Sample:
    """A trace of one process; without states where the candidate shards them."""
    case = with_layers(candidate, layers)
    trace = dry_run(single_process(case), block_bytes=1, steps=1)
    return Sample(values=tuple(sizes_of(case).items()), layers=layers, trace=without_states(trace) if case.sharding in SHARDED else trace)


def with_layers(candidate: Candidate, layers: int) -> Candidate:
    """The same candidate with a model of fewer or more layers; a teacher of the same shape keeps it."""
    config = dict(candidate.model.config)
    config["num_hidden_layers"] = layers
    config.pop("layer_types", None)
    return _with_config(candidate, config)


def _with_config(candidate: Candidate, config: dict[str, object]) -> Candidate:
    model = _shaped(candidate.model, config)
    return replace(candidate, model=model, teacher_model=None if candidate.teacher_model is None else model)


def _shaped(shape: ModelShape, config: dict[str, object]) -> ModelShape:
    hidden, vocabulary = numbers(config, "hidden_size", "vocab_size")
    return replace(shape, config=config, hidden_size=hidden, vocab_size=vocabulary)


def _narrowed(candidate: Candidate, widths: tuple[int, int, int, int, int, int, int]) -> Candidate:
    """The candidate with a model of other widths, in the same regime of heads and of the vocabulary's tiles."""
    heads, key_heads, head, hidden, intermediate, last_tile, rank = widths
    config = dict(candidate.model.config)
    own_heads, own_key_heads, vocabulary = numbers(config, "num_attention_heads", "num_key_value_heads", "vocab_size")
    config.update(
        hidden_size=hidden, intermediate_size=intermediate, num_attention_heads=heads, head_dim=head,
        num_key_value_heads=1 if own_key_heads == 1 else heads if own_key_heads == own_heads else key_heads,
        vocab_size=min((vocabulary - 1) // VOCAB_CHUNK, MANY_TILES - 1) * VOCAB_CHUNK + last_tile,
    )  # fmt: skip
    return _with_config(replace(candidate, lora_r=rank), config)


def _draws(candidate: Candidate, draw: random.Random) -> Iterator[Candidate]:
    """The candidate with other rows and lengths of the same regime, no two alike."""
    wanted = key_of(recipe_of(candidate))
    used = {width for widths in (*WIDTHS, *QUANTIZED_WIDTHS) for width in widths}
    for _ in range(ATTEMPTS):
        case = _drawn(candidate, draw)
        lengths = [case.row_tokens, case.prompt_length, case.max_completion_length] if case.method_row.generates else [case.row_tokens]
        counts = {times * length for length in lengths for times in (1, case.per_device_train_batch_size, case.rows, case.generation_rows)}
        if used & counts or len(set(lengths)) < len(lengths) or not _of(wanted, case):
            continue
        used.update(lengths)
        yield case
    raise NoProfile("No small sizes of the candidate's regime were found.")


def _of(key: str, candidate: Candidate) -> bool:
    """Whether a candidate is of a recipe."""
    try:
        return key_of(recipe_of(candidate)) == key
    except NoProfile:
        return False


def _drawn(candidate: Candidate, draw: random.Random) -> Candidate:
    """Small rows and lengths: up to four chunks of tokens, half of the lengths multiples of what kernels pad to."""
    own = candidate.per_device_train_batch_size
    rows = own if own == 1 or candidate.method_row.generates else draw.randint(2, 9)
    scored = int(2 ** draw.uniform(8, 14.2)) // (rows * candidate.method_row.rows_per_sample)
    prompt = draw.randint(80, 300)
    if draw.random() < 0.5:
        scored, prompt = (scored // 32 * 32 if candidate.method_row.generates else _odd(scored)), _odd(prompt)  # so that all of a row is odd as well
    scored = max(scored, 24)
    if not candidate.method_row.generates:
        return replace(candidate, per_device_train_batch_size=rows, max_length=scored, gradient_accumulation_steps=_accumulation(candidate))
    return replace(candidate, prompt_length=prompt, max_completion_length=scored, max_length=prompt + scored)


def _accumulation(candidate: Candidate) -> int:
    return min(candidate.gradient_accumulation_steps, 2)


def _odd(length: int) -> int:
    """An odd multiple of 16, so that what rounds up to 32 or more can be told from the length."""
    return length // 32 * 32 + 16

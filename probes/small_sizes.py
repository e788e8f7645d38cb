"""Small sizes and narrow models of a candidate's recipe, drawn at random: what its profile is traced with."""

import random
from dataclasses import dataclass, replace

from planner.candidate import Candidate
from planner.model import ModelShape
from planner.trace.architecture import MANY_TILES, numbers
from planner.trace.profile import NoProfile
from planner.trace.recipe import key_of, recipe_of
from planner.trace.sizes import (
    GENERATING_AHEAD,
    MANY_ROWS,
    SEVERAL_STEPS,
    beyond_window,
    for_a_step,
    sizes_of,
    traced_accumulation,
    traced_rows,
    window_of,
)  # fmt: skip
from planner.trace.terms import VOCAB_CHUNK

Widths = tuple[int, int, int, int, int, int, int]

# Widths that are no multiples of one another nor, but for what kernels want of a head, of what they round to; hidden is one of heads, as
# Llama wants it. In order: heads, key heads, size of a head, hidden, intermediate, words in the vocabulary's last tile, rank.
WIDTHS: tuple[Widths, Widths, Widths] = (
    (6, 2, 40, 186, 440, 11000, 12),
    (12, 3, 24, 228, 616, 17416, 20),
    (10, 5, 56, 310, 712, 23560, 28),
)
# The same where weights are quantized: products of two are whole blocks of statistics (probes/fake/quantized.py, BLOCK x NESTED_BLOCK).
QUANTIZED_WIDTHS: tuple[Widths, Widths, Widths] = (
    (48, 16, 40, 2688, 2176, 11000, 12),
    (64, 32, 24, 896, 3712, 17416, 20),
    (80, 16, 56, 1920, 2432, 23560, 28),
)
# Of the longer trace and of the one held back, where MANY_ROWS are traced: so many more rows are generated than a micro-step has tensors of one kind,
# and each number of them makes groups of equal size.
LONGER_ROWS, HELD_BACK_ROWS = 9, 6
ATTEMPTS = 20_000  # draws of rows and lengths before a regime is given up


@dataclass(frozen=True, kw_only=True, slots=True)
class Repeats:
    """How often a step does what it does again. `rows` None: any, from 2 on."""

    rows: int | None
    accumulation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RepeatsOfTraces:
    """Those of a profile's traces: of most, of the longer one, of the one that is held back."""

    most: Repeats
    longer: Repeats
    held_back: Repeats


def repeats_of(candidate: Candidate) -> RepeatsOfTraces:
    """As few as stand for a candidate's; more of whatever its profile has any number of. What is held back lies between."""
    steps = traced_accumulation(candidate)
    more = steps // SEVERAL_STEPS if for_a_step(candidate) else 0
    all_rows: tuple[int | None, ...] = (1 if candidate.per_device_train_batch_size == 1 else None,) * 3
    if candidate.method in GENERATING_AHEAD:
        rows = traced_rows(candidate)
        all_rows = (rows, LONGER_ROWS, HELD_BACK_ROWS) if rows == MANY_ROWS and for_a_step(candidate) else (rows,) * 3
    most, longer, held_back = (Repeats(rows=count, accumulation=steps + times * more) for times, count in zip((0, 2, 1), all_rows, strict=True))
    return RepeatsOfTraces(most=most, longer=longer, held_back=held_back)


class SmallSizes:
    """Candidates of one regime with other rows and lengths, no two alike."""

    def __init__(self, candidate: Candidate, draw: random.Random) -> None:
        self._candidate, self._draw = candidate, draw
        self._wanted = key_of(recipe_of(candidate))
        self._used = {width for widths in (*WIDTHS, *QUANTIZED_WIDTHS) for width in widths}

    def drawn(self, repeats: Repeats) -> Candidate:
        """The next one.

        Raises:
            NoProfile: there is none.
        """
        for _ in range(ATTEMPTS):
            case = _drawn(self._candidate, repeats, self._draw)
            lengths = [case.row_tokens, case.prompt_length, case.max_completion_length] if case.method_row.generates else [case.row_tokens]
            counts = {times * length for length in lengths for times in (1, case.per_device_train_batch_size, case.rows, case.generation_rows)}
            if not (self._used & counts) and len({_without_twos(length) for length in lengths}) == len(lengths) and _of(self._wanted, case):
                self._used.update(lengths)
                return case
        raise NoProfile("No small sizes of the candidate's regime were found.")


def narrowed(candidate: Candidate, widths: Widths) -> Candidate:
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


def _of(key: str, candidate: Candidate) -> bool:
    """Whether a candidate is of a recipe."""
    try:
        return key_of(recipe_of(candidate)) == key
    except NoProfile:
        return False


def _drawn(candidate: Candidate, repeats: Repeats, draw: random.Random) -> Candidate:
    """Small rows and lengths: up to four chunks of tokens, half of the lengths multiples of what kernels pad to."""
    rows = repeats.rows or draw.randint(2, 9)
    scored = int(2 ** draw.uniform(8, 14.2)) // (rows * candidate.method_row.rows_per_sample)
    prompt = draw.randint(80, 300) + (window_of(candidate.model) if beyond_window(candidate) == "shorter" else 0)
    if draw.random() < 0.5:
        scored, prompt = (scored // 32 * 32 if candidate.method_row.generates else _odd(scored)), _odd(prompt)  # so that all of a row is odd as well
    scored = max(scored, 24)
    case = replace(candidate, per_device_train_batch_size=rows, gradient_accumulation_steps=repeats.accumulation)
    if not candidate.method_row.generates:
        return replace(case, max_length=scored)
    case = replace(case, prompt_length=prompt, max_completion_length=scored, max_length=prompt + scored)
    return _in_groups(case, candidate, draw) if candidate.method in ("grpo", "rloo") else case


def _in_groups(case: Candidate, candidate: Candidate, draw: random.Random) -> Candidate:
    """What is generated at once in one group, or in several pairs or more where the candidate has several prompts."""
    case = replace(case, steps_per_generation=case.gradient_accumulation_steps if for_a_step(candidate) else candidate.steps_per_generation)
    generated = case.generation_rows
    sizes = [size for size in range(2, generated // 2 + 1) if generated % size == 0]
    return replace(case, num_generations=draw.choice(sizes) if sizes and sizes_of(candidate)["groups"] > 1 else generated)


def _without_twos(length: int) -> int:
    """Equal where one length is another so many times that a wider number makes the same bytes of it."""
    return length // (length & -length)


def _odd(length: int) -> int:
    """An odd multiple of 16, so that what rounds up to 32 or more can be told from the length."""
    return length // 32 * 32 + 16

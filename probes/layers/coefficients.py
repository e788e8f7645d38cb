"""Memory of layers without formulas, as polynomials of tokens and scores fitted to passes on fake tensors.

One layer of each kind runs forward and backward in a few small batches. Three of them determine the bytes per token,
per score and constant; the fourth checks the fit. Layers that pad rows to chunks also have bytes per token of padded
rows and per row, for which there are two batches more. `layers/store.py` keeps the results in the user's cache. Only
the functions that measure import torch.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import deepcopy
from fractions import Fraction
from functools import lru_cache
from operator import mul
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from planner.errors import NotMeasured
from planner.memory.layers.measured_layers import (
    BatchSize,
    ChunkedBytes,
    ChunkedMeasurements,
    ChunkedMemory,
    LayerResult,
    LayerShapes,
    MeasuringRefused,
    complete_model,
    possible_peaks,
)
from planner.memory.layers.recipe import Recipe
from planner.models.shape import ModelShape
from probes.layers.store import load_result, load_shapes, save_layer_result, save_shapes

if TYPE_CHECKING:
    from probes.layers.passes import BytesByKind, LayerHarness, MeasuredPass

TOKENS, SCORES, CONSTANT, PADDED, ROWS = range(5)  # the coefficients of a `BatchSize`


class Batch(Struct, frozen=True):
    """Rows of one length, padded to a length by the layers."""

    rows: int
    length: int
    padded: int

    @property
    def terms(self) -> BatchSize:
        """Return the numbers by which the coefficients of a `BatchSize` are multiplied."""
        return (self.rows * self.length, self.rows * self.length**2, 1, self.rows * self.padded, self.rows)


class Fit(Struct, frozen=True):
    """Batches of the measured passes, and the coefficients that as many of them determine; the others check the fit.

    `of_loops` are those of the heaviest moment, if passes differ in their moments, and `of_equal_loops` those of each
    moment of the first passes, see `_fit_loop`.
    """

    batches: tuple[Batch, ...]
    terms: tuple[int, ...]
    of_loops: tuple[int, ...]
    of_equal_loops: tuple[int, ...]


# Lengths are multiples of 128, to which kernels round them, and long enough for the peak to be in the layer and not in
# the copies of its weights. One row is measured apart: tensors that are copied for several rows can stay views.
SEVERAL_ROWS = Fit(
    tuple(Batch(rows, length, length) for rows, length in ((2, 512), (4, 512), (2, 1024), (3, 768))),
    (TOKENS, SCORES, CONSTANT), (TOKENS, SCORES, CONSTANT), (TOKENS, CONSTANT),
)  # fmt: skip
ONE_ROW = replace(SEVERAL_ROWS, batches=tuple(Batch(1, length, length) for length in (512, 1024, 1536, 1280)))
SHORTEST_UNIT = 256  # tokens: the batches of padded rows have about the lengths of the others
# Largest error of the fit at the other batches. Kernels that loop over blocks of tokens have a smaller last block.
CHECKED_WITHIN = 0.02


def padded_rows(chunk: int, several_rows: bool) -> Fit:
    """Batches of rows that layers pad to chunks: all end in padding, without which a pass has fewer moments.

    The first have one number of chunks.
    """
    unit = -(-SHORTEST_UNIT // chunk) * chunk
    rows = ((2, 2, 2), (4, 2, 2), (2, 2, 4), (2, 4, 2), (2, 3, 2), (3, 3, 4)) if several_rows else (
        (1, 4, 2), (1, 4, 4), (1, 6, 2), (1, 3, 2), (1, 5, 4)
    )  # fmt: skip
    batches = tuple(Batch(count, units * unit - chunk // part, units * unit) for count, units, part in rows)
    if several_rows:
        return Fit(
            batches, (TOKENS, SCORES, CONSTANT, PADDED, ROWS), (TOKENS, CONSTANT, PADDED, ROWS),
            (TOKENS, CONSTANT, PADDED),
        )  # fmt: skip
    return Fit(batches, (TOKENS, SCORES, CONSTANT, PADDED), (TOKENS, CONSTANT, PADDED), (TOKENS, CONSTANT, PADDED))


Measuring = Callable[[], AbstractContextManager[None]]


def complete_by_measuring(model: ModelShape, measuring: Measuring) -> ModelShape:
    """Complete a model without formulas: read its layers off its modules, and measure their memory when it is needed.

    `measuring` returns the context in which the slow work runs, such as one that prints a line.

    Raises:
        UnknownArchitecture: transformers cannot build it, its layers are not in one list, or they share parameters.
        ImportError: the extra training is not installed.
    """
    if model.known:
        return model
    shapes = load_shapes(model)
    if shapes is None:
        with measuring():
            shapes = read_shapes(model)
        save_shapes(model, shapes)
    loadable = model if model.auto_class else replace(model, auto_class=shapes.auto_class)
    return complete_model(model, shapes, lambda recipe: load_or_measure(loadable, recipe, measuring))


def read_shapes(model: ModelShape) -> LayerShapes:
    """Build the model without weights and return the shapes of its layers.

    Raises:
        UnknownArchitecture: transformers cannot build it, or its layers are not in one list.
        ImportError: the extra training is not installed.
    """
    from probes.layers.shapes import shapes_of_layers

    return shapes_of_layers(_with_own_config(model))


def load_or_measure(model: ModelShape, recipe: Recipe, measuring: Measuring) -> LayerResult:
    """Return the result under one recipe from the user's cache; measure the layers and keep it if it is not there.

    Raises:
        ImportError: the extra training is not installed.
    """
    result = load_result(model, recipe)
    if result is None:
        with measuring():
            result = measure_layers(model, recipe)
        save_layer_result(model, recipe, result)
    return result


def measure_layers(model: ModelShape, recipe: Recipe) -> LayerResult:
    """Run one layer of each kind under the recipe; all kinds together, so that the model is built once.

    Raises:
        ImportError: the extra training is not installed.
    """
    from probes.layers.passes import layer_harness
    from probes.layers.shapes import chunk_length, padded_kinds

    chunk = chunk_length(model)
    try:
        with layer_harness(_with_own_config(model), recipe) as harness:
            padded = padded_kinds(model) if chunk else frozenset[int]()
            whole = frozenset(range(len(harness.one_of_each))) - padded
            memory = {
                **_measure_kinds(model, harness, whole, SEVERAL_ROWS if recipe.several_rows else ONE_ROW),
                **(_measure_kinds(model, harness, padded, padded_rows(chunk, recipe.several_rows)) if padded else {}),
            }
        without, existing = zip(*(memory[kind] for kind in sorted(memory)), strict=True)
        measured = ChunkedMeasurements(chunk=chunk or 1, without_gradients=without, with_gradients=existing)
        return measured if padded else measured.at(0)
    except NotMeasured as error:
        return MeasuringRefused(reason=str(error))
    except (RuntimeError, ValueError, AttributeError, TypeError, KeyError, IndexError, NotImplementedError) as error:
        first_line = (str(error).splitlines() or [""])[0][:200]
        return MeasuringRefused(reason=_refusal(model, recipe, f"{type(error).__name__}: {first_line}"))


def _refusal(model: ModelShape, recipe: Recipe, error: str) -> str:
    if recipe.kernel == "flash_varlen" and "Flash" in error:
        return f"{model.id} does not run with FlashAttention: {error}. Use --set attn_implementation=sdpa."
    if not recipe.lora_targets:
        return f"The layers of {model.id} do not run here: {error}"
    targets = ", ".join(sorted(recipe.lora_targets))
    return (
        f"The layers of {model.id} do not run here with adapters on {targets}: {error}. "
        "Set lora_target_modules to others."
    )


def _with_own_config(model: ModelShape) -> ModelShape:
    """The model with a copy of its config: transformers' config classes write into the dicts that they are given."""
    return replace(model, config=deepcopy(model.config))


# -- from bytes to coefficients ---------------------------------------------------------------------------------------


def _measure_kinds(
    model: ModelShape, harness: "LayerHarness", kinds: frozenset[int], fit: Fit
) -> dict[int, tuple[ChunkedMemory, ChunkedMemory]]:
    """Measure layers of some kinds in all batches of a fit: the memory without and with existing gradients."""
    by_batch = [harness.measure_kinds(batch.rows, batch.length, kinds) for batch in fit.batches]
    return {
        kind: (
            _fit_layer(model, fit, [batch[kind][0] for batch in by_batch]),
            _fit_layer(model, fit, [batch[kind][1] for batch in by_batch]),
        )
        for kind in kinds
    }


def _fit_layer(model: ModelShape, fit: Fit, passes: "list[MeasuredPass]") -> ChunkedMemory:
    """Fit each part of a layer's memory to its passes in all batches."""

    def fit_moment(part: "Callable[[MeasuredPass], BytesByKind]") -> ChunkedBytes:
        return _fit_moments(model, fit.batches, fit.terms, [[part(each)] for each in passes])[0]

    def fit_pass(part: "Callable[[MeasuredPass], list[BytesByKind]]") -> tuple[ChunkedBytes, ...]:
        return _fit_peak(model, fit, [part(each) for each in passes])

    return ChunkedMemory(
        saved=fit_moment(lambda each: each.saved),
        checkpoint=fit_moment(lambda each: each.checkpoint),
        forward=fit_pass(lambda each: each.forward),
        checkpointed_forward=fit_pass(lambda each: each.checkpointed_forward),
        backward=fit_pass(lambda each: each.backward),
        checkpointed_backward=fit_pass(lambda each: each.checkpointed_backward),
        inference=fit_pass(lambda each: each.inference),
    )


def _fit_peak(model: ModelShape, fit: Fit, passes: "list[list[BytesByKind]]") -> tuple[ChunkedBytes, ...]:
    """Fit every moment of a pass that can be its peak.

    Passes that loop over blocks of tokens (linear attention) have more moments in longer rows, see `_fit_loop`.
    """
    if len({len(moments) for moments in passes}) > 1:
        return _fit_loop(model, fit, passes)
    return _fit_moments(model, fit.batches, fit.terms, passes)


def _fit_loop(model: ModelShape, fit: Fit, passes: "list[list[BytesByKind]]") -> tuple[ChunkedBytes, ...]:
    """Fit the heaviest moment of each batch. Where that is not the same moment, fit each moment of equally long loops.

    These are the first batches, without scores, which such a pass does not have; the others check it.
    """
    try:
        heaviest = [[max(moments, key=_total)] for moments in passes]
        return _fit_moments(model, fit.batches, fit.of_loops, heaviest)
    except NotMeasured:
        if len({len(moments) for moments in passes[: len(fit.of_equal_loops)]}) > 1:
            raise
    return _fit_moments(model, fit.batches, fit.of_equal_loops, passes)


def _fit_moments(
    model: ModelShape, batches: tuple[Batch, ...], terms: tuple[int, ...], passes: "list[list[BytesByKind]]"
) -> tuple[ChunkedBytes, ...]:
    """Fit moments to as many batches as there are terms, and check the heaviest one in the other batches.

    Raises:
        NotMeasured: the bytes differ by more than CHECKED_WITHIN.
    """
    count = len(terms)
    fitted = possible_peaks(
        [_fit_bytes(batches[:count], terms, list(same)) for same in zip(*passes[:count], strict=True)]
    )
    for batch, moments in zip(batches[count:], passes[count:], strict=True):
        expected = max(sum(map(mul, moment.total, batch.terms)) for moment in fitted)
        found = max(map(_total, moments))
        if abs(expected - found) > CHECKED_WITHIN * found:
            raise NotMeasured(
                f"The layers of {model.id} are not measured with these settings: their memory does not grow evenly "
                f"with the batch ({found:,} bytes for {batch.rows} rows of {batch.length} tokens, {expected:,} by the "
                "other sizes)."
            )
    return fitted


def _fit_bytes(batches: tuple[Batch, ...], terms: tuple[int, ...], moments: "list[BytesByKind]") -> ChunkedBytes:
    """The polynomial, by kind, through one moment in these batches, its coefficients rounded to whole bytes."""
    kinds = tuple(dict.fromkeys(kind for moment in moments for kind in moment))
    inverse = _inverse(batches, terms)

    def solved(measured: list[int]) -> BatchSize:
        found = dict.fromkeys(range(ROWS + 1), 0)
        found |= {term: round(sum(map(mul, row, measured))) for term, row in zip(terms, inverse, strict=True)}
        return (found[TOKENS], found[SCORES], found[CONSTANT], found[PADDED], found[ROWS])

    return ChunkedBytes(tuple((kind, solved([moment.get(kind, 0) for moment in moments])) for kind in kinds))


@lru_cache(maxsize=64)
def _inverse(batches: tuple[Batch, ...], terms: tuple[int, ...]) -> list[list[Fraction]]:
    """The inverse of the matrix of batches and their terms, by elimination."""
    count = len(terms)
    rows = [
        [*(Fraction(batch.terms[term]) for term in terms), *(Fraction(i == j) for j in range(count))]
        for i, batch in enumerate(batches)
    ]
    for i in range(count):
        pivot = next(row for row in rows[i:] if row[i])
        rows.remove(pivot)
        rows.insert(i, [value / pivot[i] for value in pivot])
        rows = [
            row if j == i else [value - row[i] * head for value, head in zip(row, rows[i], strict=True)]
            for j, row in enumerate(rows)
        ]
    return [row[count:] for row in rows]


def _total(moment: "BytesByKind") -> int:
    return sum(moment.values())

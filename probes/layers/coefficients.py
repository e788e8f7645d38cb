"""Memory of layers without formulas, as polynomials of tokens and scores fitted to passes on fake tensors.

One layer of each kind runs forward and backward at four small batch sizes. Three of them determine the bytes per token,
per score and constant; the fourth checks the fit. `layers/store.py` keeps the results in the user's cache. Only the
functions that measure import torch.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from fractions import Fraction
from typing import TYPE_CHECKING

from msgspec.structs import replace

from planner.errors import NotMeasured
from planner.memory.layers.autograd import LiveBytes, Size
from planner.memory.layers.measured_layers import (
    LayerMeasurements,
    LayerResult,
    LayerShapes,
    MeasuringRefused,
    complete_model,
)
from planner.memory.layers.one_layer import LayerMemory, PassPeak, upper_envelope
from planner.memory.layers.recipe import Recipe
from planner.models.shape import ModelShape
from probes.layers.store import load_result, load_shapes, save_layer_result, save_shapes

if TYPE_CHECKING:
    from probes.layers.passes import BytesByKind, MeasuredPass

# (rows, length) of the passes; the last is the check. Lengths are multiples of 128, to which kernels round them, and
# long enough for the peak to be in the layer and not in the copies of its weights. One row is measured apart: tensors
# that are copied for several rows can stay views.
SEVERAL_ROWS = ((2, 512), (4, 512), (2, 1024), (3, 768))
ONE_ROW = ((1, 512), (1, 1024), (1, 1536), (1, 1280))
# Largest error of the fit at the fourth size. Kernels that loop over blocks of tokens have a smaller last block.
CHECKED_WITHIN = 0.02

BatchSizes = tuple[tuple[int, int], ...]
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

    sizes = SEVERAL_ROWS if recipe.several_rows else ONE_ROW
    try:
        with layer_harness(_with_own_config(model), recipe) as harness:
            by_size = [harness.measure_kinds(rows, length) for rows, length in sizes]
        kinds = range(len(by_size[0]))
        return LayerMeasurements(
            without_gradients=tuple(_fit_layer(model, sizes, [size[kind][0] for size in by_size]) for kind in kinds),
            with_gradients=tuple(_fit_layer(model, sizes, [size[kind][1] for size in by_size]) for kind in kinds),
        )
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


def _fit_layer(model: ModelShape, sizes: BatchSizes, passes: "list[MeasuredPass]") -> LayerMemory:
    """Fit each part of a layer's memory to its passes at the four sizes."""

    def fit_moment(part: "Callable[[MeasuredPass], BytesByKind]") -> LiveBytes:
        fitted = _fit_live_bytes(sizes[:3], [part(each) for each in passes[:3]])
        return _checked(model, sizes[3], PassPeak((fitted,)), part(passes[3])).snapshots[0]

    def fit_pass(part: "Callable[[MeasuredPass], list[BytesByKind]]") -> PassPeak:
        return _fit_peak(model, sizes, [part(each) for each in passes])

    return LayerMemory(
        saved=fit_moment(lambda each: each.saved),
        checkpoint=fit_moment(lambda each: each.checkpoint),
        forward=fit_pass(lambda each: each.forward),
        checkpointed_forward=fit_pass(lambda each: each.checkpointed_forward),
        backward=fit_pass(lambda each: each.backward),
        checkpointed_backward=fit_pass(lambda each: each.checkpointed_backward),
        inference=fit_pass(lambda each: each.inference),
    )


def _fit_peak(model: ModelShape, sizes: BatchSizes, passes: "list[list[BytesByKind]]") -> PassPeak:
    """Fit every moment of a pass that can be its peak.

    Passes that loop over blocks of tokens (linear attention, state spaces) have more moments in longer rows, see
    `_fit_loop`.
    """
    if len({len(moments) for moments in passes}) > 1:
        return _fit_loop(model, sizes, passes)
    return _fit_moments(model, sizes[:3], passes[:3], [(sizes[3], passes[3])])


def _fit_loop(model: ModelShape, sizes: BatchSizes, passes: "list[list[BytesByKind]]") -> PassPeak:
    """Fit the heaviest moment of each size. Where that is not the same moment, fit each moment of rows of one length.

    That is the first two sizes, without scores, which such a pass does not have; the other two check it.
    """
    try:
        heaviest = [[max(moments, key=_total)] for moments in passes]
        return _fit_moments(model, sizes[:3], heaviest[:3], [(sizes[3], passes[3])])
    except NotMeasured:
        if len(passes[0]) != len(passes[1]):
            raise
    return _fit_moments(model, sizes[:2], passes[:2], list(zip(sizes[2:], passes[2:], strict=True)))


def _fit_moments(
    model: ModelShape,
    sizes: BatchSizes,
    passes: "list[list[BytesByKind]]",
    checks: "list[tuple[tuple[int, int], list[BytesByKind]]]",
) -> PassPeak:
    fitted = upper_envelope([_fit_live_bytes(sizes, list(same)) for same in zip(*passes, strict=True)])
    for size, moments in checks:
        _checked(model, size, fitted, max(moments, key=_total))
    return fitted


def _fit_live_bytes(sizes: BatchSizes, moments: "list[BytesByKind]") -> LiveBytes:
    """The polynomial, by kind and in total, through one moment at these sizes."""
    kinds = tuple(dict.fromkeys(kind for moment in moments for kind in moment))
    by_kind = tuple((kind, _coefficients(sizes, [moment.get(kind, 0) for moment in moments])) for kind in kinds)
    total = (
        sum(size[0] for _, size in by_kind),
        sum(size[1] for _, size in by_kind),
        sum(size[2] for _, size in by_kind),
    )
    return LiveBytes(total, by_kind)


def _checked(model: ModelShape, size: tuple[int, int], fitted: PassPeak, measured: "BytesByKind") -> PassPeak:
    """Return the fit if it agrees with the measured bytes at a size that is not part of it.

    Raises:
        NotMeasured: they differ by more than CHECKED_WITHIN.
    """
    rows, length = size
    expected, found = fitted.at(rows * length, rows * length**2)[0], _total(measured)
    if abs(expected - found) > CHECKED_WITHIN * found:
        raise NotMeasured(
            f"The layers of {model.id} are not measured with these settings: their memory does not grow evenly with "
            f"the batch ({found:,} bytes for {rows} rows of {length} tokens, {expected:,} by the other sizes)."
        )
    return fitted


def _total(moment: "BytesByKind") -> int:
    return sum(moment.values())


def _coefficients(sizes: BatchSizes, measured: list[int]) -> Size:
    """Solve bytes = a tokens + b scores + c for three sizes (Cramer's rule), rounded to whole bytes.

    Two sizes: without scores.
    """
    if len(sizes) == 2:
        (first, last), (low, high) = [rows * length for rows, length in sizes], measured
        slope = Fraction(high - low, last - first)
        return (round(slope), 0, round(low - slope * first))
    rows = [(rows * length, rows * length**2, 1) for rows, length in sizes]
    denominator = _determinant(rows)
    tokens, scores, constant = (
        Fraction(
            _determinant([(*row[:i], value, *row[i + 1 :]) for row, value in zip(rows, measured, strict=True)]),
            denominator,
        )
        for i in range(3)
    )
    return (round(tokens), round(scores), round(constant))


def _determinant(matrix: Sequence[tuple[int, ...]]) -> int:
    (a, b, c), (d, e, f), (g, h, i) = matrix
    return a * (e * i - f * h) - b * (d * i - f * g) + c * (d * h - e * g)

"""Architectures without formulas: the shapes of their layers from the real modules, their memory from the layers' own passes on fake tensors.

One layer of each kind runs forward and backward at four small batches: three give bytes per token, per score and constant, the fourth is
held back and must come out. `layer_memory` then answers for them as it does for the families it has formulas for.
"""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache, partial

from planner.errors import UnknownArchitecture
from planner.memory.activations import LayerMemory, Peaks, envelope
from planner.memory.autograd import Moment, Size
from planner.memory.modules import Recipe
from planner.model import ModelShape
from probes.layer_passes import Bytes, Seen, layer_stage
from probes.layer_shapes import with_shapes

# (rows, length) of the passes. Lengths are multiples of what kernels round them to (128), long enough for the layer to be
# the peak and not its weights' copies. One row is a regime of its own: views stand where several rows need copies.
SEVERAL_ROWS = ((2, 512), (4, 512), (2, 1024), (3, 768))
ONE_ROW = ((1, 512), (1, 1024), (1, 1536), (1, 1280))
HELD_BACK_WITHIN = 0.02  # chunked kernels loop over blocks of tokens, whose last one is smaller

Sizes = tuple[tuple[int, int], ...]


class NotMeasured(UnknownArchitecture):
    """A layer's passes cannot be run, or do not grow with tokens and scores."""


def measured(model: ModelShape) -> ModelShape:
    """A model without formulas with the layers that its own modules show; their memory is measured when it is asked for.

    Raises:
        UnknownArchitecture: transformers cannot build it, or its layers are no list of modules.
    """
    return model if model.known else with_shapes(model, lambda kind: partial(measured_layer, model, kind))


def measured_layer(model: ModelShape, kind: int, recipe: Recipe, gradients_exist: bool) -> LayerMemory:
    """What `planner.memory.activations.layer_memory` answers, for the layers of a kind.

    Raises:
        NotMeasured: the layers cannot be run so.
    """
    return _layers(model, replace(recipe, lora_targets=frozenset(recipe.lora_targets)), gradients_exist)[kind]


@lru_cache(maxsize=256)
def _layers(model: ModelShape, recipe: Recipe, gradients_exist: bool) -> tuple[LayerMemory, ...]:
    """One layer of each kind, measured together: the model is built once."""
    if recipe.quantized != "none" or recipe.liger or recipe.kernel == "flash_varlen":
        raise NotMeasured(f"{model.id} has no formulas, and its layers are not measured with quantized weights, Liger's kernels or flash-attention's package.")
    try:
        with layer_stage(model, recipe) as run:
            sizes = SEVERAL_ROWS if recipe.several_rows else ONE_ROW
            seen = [run.layers(rows, length, gradients_exist) for rows, length in sizes]
    except (RuntimeError, ValueError, AttributeError, TypeError, KeyError, IndexError, NotImplementedError) as error:
        raise NotMeasured(f"The layers of {model.id} do not run here: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}") from error
    return tuple(_fitted(model, sizes, [layers[kind] for layers in seen]) for kind in range(len(seen[0])))


# -- from bytes to coefficients ------------------------------------------------------------------------------------------


def _fitted(model: ModelShape, sizes: Sizes, seen: list[Seen]) -> LayerMemory:
    def moment(of: Callable[[Seen], Bytes]) -> Moment:
        return _checked(model, sizes, Peaks((_moment(sizes, [of(each) for each in seen]),)), of(seen[3])).moments[0]

    def peaks(of: Callable[[Seen], list[Bytes]]) -> Peaks:
        return _peaks(model, sizes, [of(each) for each in seen])

    return LayerMemory(
        saved=moment(lambda each: each.saved),
        checkpoint=moment(lambda each: each.checkpoint),
        forward=peaks(lambda each: each.forward),
        checkpointed_forward=peaks(lambda each: each.checkpointed_forward),
        backward=peaks(lambda each: each.backward),
        checkpointed_backward=peaks(lambda each: each.checkpointed_backward),
        inference=peaks(lambda each: each.inference),
    )


def _peaks(model: ModelShape, sizes: Sizes, passes: list[list[Bytes]]) -> Peaks:
    """All moments that can be the peak, where the passes of all sizes have the same; where they loop over tokens, each one's heaviest."""
    if len({len(moments) for moments in passes}) > 1:
        passes = [[max(moments, key=_total)] for moments in passes]
    fitted = envelope([_moment(sizes, list(alike)) for alike in zip(*passes, strict=True)])
    return _checked(model, sizes, fitted, max(passes[3], key=_total))


def _moment(sizes: Sizes, seen: list[Bytes]) -> Moment:
    """The coefficients that the first three sizes determine."""
    kinds = tuple(dict.fromkeys(kind for each in seen for kind in each))
    coefficients = tuple((kind, _coefficients(sizes[:3], [each.get(kind, 0) for each in seen[:3]])) for kind in kinds)
    total = (sum(size[0] for _, size in coefficients), sum(size[1] for _, size in coefficients), sum(size[2] for _, size in coefficients))
    return Moment(total, coefficients)


def _checked(model: ModelShape, sizes: Sizes, fitted: Peaks, held_back: Bytes) -> Peaks:
    rows, length = sizes[3]
    found, expected = fitted.at(rows * length, rows * length**2)[0], _total(held_back)
    if abs(found - expected) > HELD_BACK_WITHIN * expected:
        raise NotMeasured(f"A layer of {model.id} needs {expected:,} bytes for {rows} rows of {length} tokens, where {found:,} were expected of its like.")
    return fitted


def _total(alive: Bytes) -> int:
    return sum(alive.values())


def _coefficients(sizes: Sizes, found: list[int]) -> Size:
    """a tokens + b scores + c through three points (Cramer's rule), to the nearest byte."""
    rows = [(rows * length, rows * length**2, 1) for rows, length in sizes]

    def determinant(matrix: list[tuple[int, int, int]]) -> int:
        (a, b, c), (d, e, f), (g, h, i) = matrix
        return a * (e * i - f * h) - b * (d * i - f * g) + c * (d * h - e * g)

    whole = determinant(rows)
    answers = []
    for column in range(3):
        replaced = [tuple(found[i] if j == column else value for j, value in enumerate(row)) for i, row in enumerate(rows)]
        answers.append(round(Fraction(determinant(replaced), whole)))  # type: ignore[arg-type]
    return (answers[0], answers[1], answers[2])

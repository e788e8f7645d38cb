"""Architectures without formulas: the shapes of their layers from the real modules, their memory from the layers' own passes on fake tensors.

One layer of each kind runs forward and backward at four small batches: three give bytes per token, per score and constant, the fourth is
held back and must come out. `layer_memory` then answers for them as it does for the families it has formulas for. What was found is kept
(`layers/store.py`); torch is imported only where something has to be measured.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from planner.errors import NotMeasured, UnknownArchitecture
from planner.memory.layers.autograd import LiveBytes, Size
from planner.memory.layers.one_layer import LayerMemory, PassPeak, upper_envelope
from planner.memory.layers.recipe import Recipe
from planner.models.shape import ModelShape
from probes.layers.store import Layers, Measured, Refused, load_layers, load_measured, save_layers, save_measured

if TYPE_CHECKING:
    from probes.layers.passes import Bytes, Seen

# (rows, length) of the passes. Lengths are multiples of what kernels round them to (128), long enough for the layer to be
# the peak and not its weights' copies. One row is a regime of its own: views stand where several rows need copies.
SEVERAL_ROWS = ((2, 512), (4, 512), (2, 1024), (3, 768))
ONE_ROW = ((1, 512), (1, 1024), (1, 1536), (1, 1280))
HELD_BACK_WITHIN = 0.02  # chunked kernels loop over blocks of tokens, whose last one is smaller

Sizes = tuple[tuple[int, int], ...]
Measuring = Callable[[], AbstractContextManager[None]]


def measured(model: ModelShape, measuring: Measuring) -> ModelShape:
    """A model without formulas with the layers that its own modules show; their memory is measured when it is asked for.

    A model that the catalogue does not have is counted, too.

    `measuring` is entered around what takes seconds.

    Raises:
        UnknownArchitecture: transformers cannot build it, its layers are no list of modules, or they share parameters.
        ImportError: the extra dryrun is not installed.
    """
    if model.known:
        return model
    found = load_layers(model)
    if found is None:
        with measuring():
            from probes.layers.shapes import layers_of

            found = layers_of(_own(model))
        save_layers(model, found)
    return _with_layers(_with_counts(model, found), found, measuring)


def _own(model: ModelShape) -> ModelShape:
    """The model with a config of its own: transformers' config classes write into the dicts that they are given."""
    return replace(model, config=deepcopy(model.config))


def _with_counts(model: ModelShape, found: Layers) -> ModelShape:
    """The model with what its modules count; the catalogue's figures stay where it has them."""
    counts = found.counts
    model = replace(
        model,
        vision_params=counts.vision,
        outer_linears=found.outer_linears,
        vision_linears=found.vision_linears,
        embed_norm=found.embed_norm,
    )
    if model.params:
        return model
    return replace(
        model, params=counts.params, embed_params=counts.embed, lm_head_params=counts.lm_head, tied=counts.lm_head == 0, auto_class=found.auto_class,
        hidden_size=found.hidden_size, vocab_size=found.vocab_size, max_position_embeddings=found.max_position_embeddings,
    )  # fmt: skip


def _with_layers(model: ModelShape, found: Layers, measuring: Measuring) -> ModelShape:
    layers = [
        replace(layer, measure=partial(measured_layer, model, measuring, kind))
        for kind, layer in enumerate(found.of_each_kind)
    ]
    kinds = {place: layer for layer, places in zip(layers, found.places, strict=True) for place in places}
    in_order = tuple(kinds[place] for place in sorted(kinds))
    norm_params = model.embed_norm.params if model.embed_norm else 0
    rest = (
        model.params
        - model.embed_params
        - model.lm_head_params
        - model.vision_params
        - norm_params
        - sum(layer.params for layer in in_order)
    )
    if rest < 0:
        raise UnknownArchitecture(
            f"{model.id} ({model.model_type}): its layers share parameters, which are counted once for each layer here."
        )
    note = (
        f"no formulas for the layers of {model.model_type}: their activations were measured by running one of each kind on fake tensors here, "
        "as PyTorch's own kernels compute them"
    )
    return replace(model, layers=in_order, other_params=rest, notes=(note,))


def measured_layer(
    model: ModelShape, measuring: Measuring, kind: int, recipe: Recipe, gradients_exist: bool
) -> LayerMemory:
    """What `planner.memory.layers.one_layer.layer_memory` answers, for the layers of a kind.

    Raises:
        NotMeasured: the layers cannot be run so.
    """
    answer = _layers(model, measuring, replace(recipe, lora_targets=frozenset(recipe.lora_targets)))
    if isinstance(answer, Refused):
        raise NotMeasured(answer.reason)
    return answer.with_gradients[kind] if gradients_exist else answer.without_gradients[kind]


@lru_cache(maxsize=256)
def _layers(model: ModelShape, measuring: Measuring, recipe: Recipe) -> Measured | Refused:
    """One layer of each kind, measured together: the model is built once."""
    if recipe.quantized != "none" or recipe.liger or recipe.kernel == "flash_varlen":
        return Refused(reason=f"The layers of {model.id} have no formulas and are not measured with {_unlike(recipe)}.")
    found = load_measured(model, recipe)
    if found is None:
        with measuring():
            found = _measured_now(_own(model), recipe)
        save_measured(model, recipe, found)
    return found


def _unlike(recipe: Recipe) -> str:
    return (
        "quantized weights"
        if recipe.quantized != "none"
        else "Liger's kernels"
        if recipe.liger
        else "flash-attention's package"
    )


def _measured_now(model: ModelShape, recipe: Recipe) -> Measured | Refused:
    from probes.layers.passes import layer_stage

    sizes = SEVERAL_ROWS if recipe.several_rows else ONE_ROW
    try:
        with layer_stage(model, recipe) as run:
            seen = [run.layers(rows, length) for rows, length in sizes]
        kinds = range(len(seen[0]))
        return Measured(
            without_gradients=tuple(_fitted(model, sizes, [layers[kind][0] for layers in seen]) for kind in kinds),
            with_gradients=tuple(_fitted(model, sizes, [layers[kind][1] for layers in seen]) for kind in kinds),
        )
    except NotMeasured as error:
        return Refused(reason=str(error))
    except (RuntimeError, ValueError, AttributeError, TypeError, KeyError, IndexError, NotImplementedError) as error:
        said = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
        if not recipe.lora_targets:
            return Refused(reason=f"The layers of {model.id} do not run here: {said}")
        targets = ", ".join(sorted(recipe.lora_targets))
        return Refused(
            reason=f"The layers of {model.id} do not run here with adapters on {targets}: {said}. Set lora_target_modules to others."
        )


# -- from bytes to coefficients ------------------------------------------------------------------------------------------


def _fitted(model: ModelShape, sizes: Sizes, seen: "list[Seen]") -> LayerMemory:
    def moment(of: "Callable[[Seen], Bytes]") -> LiveBytes:
        fitted = _moment(sizes, [of(each) for each in seen])
        return _checked(model, sizes, PassPeak((fitted,)), of(seen[3])).snapshots[0]

    def peaks(of: "Callable[[Seen], list[Bytes]]") -> PassPeak:
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


def _peaks(model: ModelShape, sizes: Sizes, passes: "list[list[Bytes]]") -> PassPeak:
    """All moments that can be the peak, where the passes of all sizes have the same; where they loop over tokens, each one's heaviest."""
    if len({len(moments) for moments in passes}) > 1:
        passes = [[max(moments, key=_total)] for moments in passes]
    fitted = upper_envelope([_moment(sizes, list(alike)) for alike in zip(*passes, strict=True)])
    return _checked(model, sizes, fitted, max(passes[3], key=_total))


def _moment(sizes: Sizes, seen: "list[Bytes]") -> LiveBytes:
    """The coefficients that the first three sizes determine."""
    kinds = tuple(dict.fromkeys(kind for each in seen for kind in each))
    coefficients = tuple((kind, _coefficients(sizes[:3], [each.get(kind, 0) for each in seen[:3]])) for kind in kinds)
    total = (
        sum(size[0] for _, size in coefficients),
        sum(size[1] for _, size in coefficients),
        sum(size[2] for _, size in coefficients),
    )
    return LiveBytes(total, coefficients)


def _checked(model: ModelShape, sizes: Sizes, fitted: PassPeak, held_back: "Bytes") -> PassPeak:
    rows, length = sizes[3]
    found, expected = fitted.at(rows * length, rows * length**2)[0], _total(held_back)
    if abs(found - expected) > HELD_BACK_WITHIN * expected:
        raise NotMeasured(
            f"A layer of {model.id} needs {expected:,} bytes for {rows} rows of {length} tokens, where {found:,} were expected of its like."
        )
    return fitted


def _total(alive: "Bytes") -> int:
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
        replaced = [
            tuple(found[i] if j == column else value for j, value in enumerate(row)) for i, row in enumerate(rows)
        ]
        answers.append(round(Fraction(determinant(replaced), whole)))  # type: ignore[arg-type]
    return (answers[0], answers[1], answers[2])

"""Layers without formulas: their measured memory as stored data, and models completed with it.

`scripts/measure_layers.py` runs one layer of each kind of such a model on fake tensors (`probes/layers`) and writes the
results to `planner/data/layers/`, one compressed file for each architecture of the catalogue. Reading them needs no
torch. What the files lack is measured on the user's machine, if the extra training is installed.
"""

import hashlib
import json
import lzma
import re
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from planner.errors import InputError, NotMeasured, UnknownArchitecture
from planner.memory.layers.autograd import LiveBytes, MemoryKind, Size
from planner.memory.layers.one_layer import LayerMemory, PassPeak, upper_envelope
from planner.memory.layers.recipe import KEEPS_WEIGHT, Kernel, Recipe
from planner.models.from_config import Counts
from planner.models.layers import Attention, Experts, Layer, Linear, Mlp, Norm
from planner.models.shape import ModelShape

SHIPPED_FOLDER = Path(__file__).parents[2] / "data" / "layers"

# Coefficients of the bytes of layers that pad rows to chunks: per token, per score, constant, per token of padded rows,
# per row.
BatchSize = tuple[int, int, int, int, int]

# The kernels that a measurement tells apart: which attention runs follows from the mask and the card, as in PyTorch.
MEASURED_KERNELS: dict[Kernel, Kernel] = {
    "eager": "eager",
    "eager_masked": "eager_masked",
    "efficient": "efficient",  # sdpa with a mask
    "flash": "flash",  # sdpa without a mask on a card with FlashAttention's kernels (compute capability 8.0)
    "flash_varlen": "flash_varlen",  # flash-attention's package, with padding
    "tree": "flash_varlen",  # the same, which gathers keys and values, too
    "efficient_unmasked": "efficient_unmasked",  # sdpa without a mask and without FlashAttention's kernels
    "efficient_grouped": "efficient_unmasked",  # the same, with fewer heads of keys than of queries
    "math": "efficient_unmasked",  # the same, where the heads do not suit the memory-efficient kernel
}


class MeasuredLayer(Struct, frozen=True, kw_only=True):
    """Shape of one decoder layer without formulas: a `Layer` whose block is an MLP, or experts, never both."""

    hidden_size: int
    attention: Attention
    mlp: Mlp | None  # None: the layer has experts
    experts: Experts | None  # None: the layer has a dense MLP, or none: one without projections
    norms: tuple[Norm, ...]
    passed: bool

    def layer(self, measure: Callable[[Recipe, bool], LayerMemory] | None = None) -> Layer:
        """The `Layer` whose memory `measure(recipe, gradients_exist)` returns."""
        block = self.experts or self.mlp
        assert block is not None
        return Layer(
            program="measured", hidden_size=self.hidden_size, attention=self.attention, feed_forward=block,
            norms=self.norms, passed=self.passed, measure=measure,
        )  # fmt: skip


class LayerShapes(Struct, frozen=True, kw_only=True):
    """Shapes of a model's layers, one of each kind, and the parameters outside the layers.

    `places` are the indices of the layers of each kind. `auto_class` is the transformers class that loads the model.
    `counts` is of the whole model; its `vision` is the part that text does not pass. `outer_linears` and
    `vision_linears` are `nn.Linear` modules outside the layers, except the output head, each with its count.
    """

    of_each_kind: tuple[MeasuredLayer, ...]
    places: tuple[tuple[int, ...], ...]
    auto_class: str
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    counts: Counts
    embed_norm: Norm | None  # None: the embedding goes straight into the first layer
    outer_linears: tuple[tuple[Linear, int], ...]
    vision_linears: tuple[tuple[Linear, int], ...]
    has_dropout: bool  # of activations while training, in the layers

    @property
    def linear_names(self) -> frozenset[str]:
        """Names of the `nn.Linear` modules of the layers, which adapters can be on."""
        return frozenset(linear.name for kind in self.of_each_kind for linear in kind.layer().linears)


class ChunkedBytes(Struct, frozen=True):
    """Bytes alive at one moment of a pass, by kind."""

    kinds: tuple[tuple[MemoryKind, BatchSize], ...]

    @property
    def total(self) -> BatchSize:
        """The bytes of all kinds."""
        token, score, constant, padded, row = (sum(size[i] for _, size in self.kinds) for i in range(5))
        return (token, score, constant, padded, row)

    def at(self, row_length: int, padded: int) -> LiveBytes:
        """The bytes in rows of `row_length` tokens, padded to `padded`: all but scores grow with tokens.

        per token = per token + (per padded token x padded + per row) / row_length
        """
        kinds = tuple((kind, _in_rows(size, row_length, padded)) for kind, size in self.kinds)
        sizes = [size for _, size in kinds]
        total = (sum(size[0] for size in sizes), sum(size[1] for size in sizes), sum(size[2] for size in sizes))
        return LiveBytes(total, kinds)


def _in_rows(size: BatchSize, row_length: int, padded: int) -> Size:
    token, score, constant, padded_token, row = size
    return (token + round((padded_token * padded + row) / row_length) if row_length else token, score, constant)


class ChunkedMemory(Struct, frozen=True, kw_only=True):
    """The parts of a `LayerMemory`; a pass is its moments that can be its peak."""

    saved: ChunkedBytes
    checkpoint: ChunkedBytes
    forward: tuple[ChunkedBytes, ...]
    checkpointed_forward: tuple[ChunkedBytes, ...]
    backward: tuple[ChunkedBytes, ...]
    checkpointed_backward: tuple[ChunkedBytes, ...]
    inference: tuple[ChunkedBytes, ...]

    def at(self, row_length: int, padded: int) -> LayerMemory:
        """The memory in rows of `row_length` tokens, padded to `padded`."""

        def peak(moments: tuple[ChunkedBytes, ...]) -> PassPeak:
            return upper_envelope([moment.at(row_length, padded) for moment in moments])

        return LayerMemory(
            saved=self.saved.at(row_length, padded),
            checkpoint=self.checkpoint.at(row_length, padded),
            forward=peak(self.forward),
            checkpointed_forward=peak(self.checkpointed_forward),
            backward=peak(self.backward),
            checkpointed_backward=peak(self.checkpointed_backward),
            inference=peak(self.inference),
        )


def possible_peaks(moments: list[ChunkedBytes]) -> tuple[ChunkedBytes, ...]:
    """Drop every moment for which another one is at least as large in rows of any length, number and padding."""
    kept: dict[BatchSize, ChunkedBytes] = {}
    for moment in sorted(moments, key=_growth, reverse=True):
        growth = _growth(moment)
        if not any(all(a >= b for a, b in zip(other, growth, strict=True)) for other in kept):
            kept[growth] = moment
    return tuple(kept.values())


def _growth(moment: ChunkedBytes) -> BatchSize:
    """Total bytes per token, score, constant, token of padding, and row: each of these can be 0 while others grow."""
    token, score, constant, padded, row = moment.total
    return (token + padded, score, constant, padded, row)


class LayerMeasurements(msgspec.Struct, frozen=True, kw_only=True, tag="measured"):
    """Memory of one layer of each kind under one recipe, before the gradients of its weights exist and after."""

    without_gradients: tuple[LayerMemory, ...]
    with_gradients: tuple[LayerMemory, ...]


class ChunkedMeasurements(msgspec.Struct, frozen=True, kw_only=True, tag="chunked"):
    """`LayerMeasurements` of a model whose layers pad each row to a multiple of `chunk` tokens."""

    chunk: int
    without_gradients: tuple[ChunkedMemory, ...]
    with_gradients: tuple[ChunkedMemory, ...]

    def at(self, row_length: int) -> LayerMeasurements:
        """The memory in rows of `row_length` tokens."""
        padded = -(-row_length // self.chunk) * self.chunk
        return LayerMeasurements(
            without_gradients=tuple(layer.at(row_length, padded) for layer in self.without_gradients),
            with_gradients=tuple(layer.at(row_length, padded) for layer in self.with_gradients),
        )


class MeasuringRefused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """Reason why the layers do not run under a recipe."""

    reason: str


LayerResult = LayerMeasurements | ChunkedMeasurements | MeasuringRefused
MeasureRecipe = Callable[[Recipe], LayerResult]


class ShippedLayers(Struct, frozen=True, kw_only=True):
    """One file of `planner/data/layers/`: a model's layers and their memory under each measured recipe."""

    shapes: LayerShapes
    results: tuple[tuple[Recipe, LayerResult], ...]


# -- files -------------------------------------------------------------------------------------------------------------


FILE_NAME = re.compile(r"\w{1,64}")  # a model type that may be part of a file's name


def shipped_path(model: ModelShape) -> Path:
    """The file of a model's layers, named by a hash of the model's config.

    Raises:
        TypeError: the config holds values that JSON does not have.
    """
    content = json.dumps([model.config, model.auto_class], sort_keys=True)
    return SHIPPED_FOLDER / f"{model.model_type}-{hashlib.sha256(content.encode()).hexdigest()[:12]}.json.xz"


def load_shipped(model: ModelShape) -> ShippedLayers | None:
    """Read the layers of a model that ship with the package; None if the model is not among them.

    Raises:
        InputError: the file is damaged.
    """
    if FILE_NAME.fullmatch(model.model_type) is None:
        return None
    path = shipped_path(model)
    if not path.exists():
        return None
    try:
        return msgspec.json.decode(lzma.decompress(path.read_bytes()), type=ShippedLayers)
    except (OSError, lzma.LZMAError, msgspec.MsgspecError) as error:
        raise InputError(
            f"{path}, a file of this package, is damaged: {error}. Install finetune-plan again."
        ) from error


def recipe_key(recipe: Recipe) -> str:
    """A recipe as text: equal for equal recipes, in every process."""
    return msgspec.json.encode(recipe, order="deterministic").decode()


# -- models ------------------------------------------------------------------------------------------------------------


def complete_shipped(model: ModelShape, measure_missing: MeasureRecipe) -> ModelShape | None:
    """Complete a model without formulas with the layers that ship with the package; None if it is not among them.

    `measure_missing` answers for recipes that the file lacks.

    Raises:
        InputError: the file is damaged.
    """
    shipped = load_shipped(model)
    if shipped is None:
        return None
    results = dict(shipped.results)

    def measure(recipe: Recipe) -> LayerResult:
        return results.get(recipe) or measure_missing(recipe)

    return complete_model(model, shipped.shapes, measure)


def complete_model(model: ModelShape, shapes: LayerShapes, measure: MeasureRecipe) -> ModelShape:
    """Complete a model without formulas: its layers, whose memory `measure` returns, and the parameters around them.

    The catalogue's parameter counts stay where it has them.

    Raises:
        UnknownArchitecture: the layers share parameters, which are counted once for each layer here.
    """
    measure_once = lru_cache(maxsize=256)(measure)
    layers = [
        kind.layer(partial(measured_memory, model.id, shapes, measure_once, index))
        for index, kind in enumerate(shapes.of_each_kind)
    ]
    by_place = {place: layer for layer, places in zip(layers, shapes.places, strict=True) for place in places}
    in_order = tuple(by_place[place] for place in sorted(by_place))
    counted = _with_counts(model, shapes)
    norm_params = shapes.embed_norm.params if shapes.embed_norm else 0
    outside = counted.embed_params + counted.lm_head_params + counted.vision_params + norm_params
    rest = counted.params - outside - sum(layer.params for layer in in_order)
    if rest < 0:
        raise UnknownArchitecture(
            f"{model.id} ({model.model_type}): its layers share parameters, which are counted once for each layer here."
        )
    note = (
        f"the layers of {model.model_type} have no formulas here: what one of each kind keeps was measured without a "
        "GPU, as PyTorch's own kernels compute it"
    )
    return replace(counted, layers=in_order, other_params=rest, notes=(note,))


def _with_counts(model: ModelShape, shapes: LayerShapes) -> ModelShape:
    """The model with the counts of its modules; a model of the catalogue keeps the catalogue's counts."""
    counts = shapes.counts
    model = replace(
        model,
        vision_params=counts.vision,
        outer_linears=shapes.outer_linears,
        vision_linears=shapes.vision_linears,
        embed_norm=shapes.embed_norm,
    )
    if model.params:
        return model
    return replace(
        model, params=counts.params, embed_params=counts.embed, lm_head_params=counts.lm_head, tied=counts.lm_head == 0,
        auto_class=shapes.auto_class, hidden_size=shapes.hidden_size, vocab_size=shapes.vocab_size,
        max_position_embeddings=shapes.max_position_embeddings,
    )  # fmt: skip


def measured_memory(
    model_id: str, shapes: LayerShapes, measure: MeasureRecipe, kind: int, recipe: Recipe, gradients_exist: bool
) -> LayerMemory:
    """Memory of one layer of a kind, whose parts `planner.memory.layers.one_layer.layer_passes` returns.

    Raises:
        NotMeasured: the layers do not run under the recipe, or were not measured under it.
    """
    unmeasured = unmeasured_setting(recipe)
    if unmeasured != "none":
        raise NotMeasured(f"The layers of {model_id} have no formulas and are not measured with {unmeasured}.")
    answer = measure(measured_recipe(recipe, shapes))
    if isinstance(answer, MeasuringRefused):
        raise NotMeasured(answer.reason)
    if isinstance(answer, ChunkedMeasurements):
        answer = answer.at(recipe.row_length)
    return answer.with_gradients[kind] if gradients_exist else answer.without_gradients[kind]


def unmeasured_setting(
    recipe: Recipe,
) -> Literal["none", "quantized checkpoints", "use_dora", "k-bit preparation"]:
    """The setting of a recipe under which layers are never measured.

    k-bit preparation leaves float32 norms beside 16-bit embeddings, so that the first layer is unlike the others.
    """
    if recipe.quantized in ("dequantized", *KEEPS_WEIGHT):
        return "quantized checkpoints"
    if recipe.magnitude_width:
        return "use_dora"
    prepared = recipe.quantized != "none" and recipe.quantized_width not in (0, recipe.weight_width)
    return "k-bit preparation" if prepared else "none"


def measured_recipe(recipe: Recipe, shapes: LayerShapes) -> Recipe:
    """The recipe without the settings that do not change the memory of these layers: many recipes, one measurement.

    DeepSpeed's linear is left out, which keeps a little more where adapters are few or float32 (`saves_frozen_inputs`).
    """
    adapted = recipe.lora_r > 0
    return replace(
        recipe,
        half=False,  # bfloat16 is measured, whose eager softmax has a float32 copy of the scores more
        lora_targets=recipe.lora_targets & shapes.linear_names if adapted else frozenset(),
        lora_experts=recipe.lora_experts and adapted,
        adapter_width=recipe.adapter_width if adapted else 4,
        lora_dropout=recipe.lora_dropout and adapted,
        adapter_kernels=frozenset(),  # PEFT's layers are measured
        saves_frozen_inputs=False,
        reentrant=False,  # non-reentrant checkpoints are measured, which keep up to two outputs of a layer less
        dropout=recipe.dropout or not shapes.has_dropout,
        kernel=MEASURED_KERNELS[recipe.kernel],
        quantized_width=0,
        expert_width=0,
        expert_scratch=0.0,
        mixes_halves=False,  # measured in one dtype: a float32 stream is left out
        input_width=0,
        input_learns=True,
        row_length=0,
        ring_gpus=1,
        ulysses_gpus=1,
        device="cuda",
    )

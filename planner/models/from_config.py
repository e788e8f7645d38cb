"""`ModelShape` from a Hugging Face `config.json`, by our own formulas; reads no files and imports no transformers."""

from msgspec import Struct

from planner.errors import InputError, UnknownArchitecture
from planner.models import vision
from planner.models.architectures.architecture import Architecture
from planner.models.architectures.fields import Fields
from planner.models.architectures.parts import ACTIVATIONS, norm
from planner.models.architectures.published import Published, from_config
from planner.models.architectures.table import KNOWN_MODEL_TYPES, architecture_of
from planner.models.layers import Layer, Norm
from planner.models.shape import ModelShape

_NO_NORM = Norm(kind="none", features=0, params=0)


class Counts(Struct, frozen=True, kw_only=True):
    """Parameters of a model without formulas, counted elsewhere. `vision`: the parameters that text does not pass."""

    params: int
    embed: int
    lm_head: int
    vision: int = 0


# Counts of a model that is not in the catalogue, until `probes.layers.shapes` builds the model and counts.
NOT_COUNTED = Counts(params=0, embed=0, lm_head=0)


def shape_of(
    config: dict[str, object],
    *,
    id: str,
    counts: Counts | None = None,
    dtype: str = "",
    auto_class: str = "",
    published: Published | None = None,
) -> ModelShape:
    """Return the shape of the model that a `config.json` describes.

    Args:
        config: the parsed file; `text_config` holds the language model of a multimodal model.
        id: the name to show.
        counts: used if the layers have no formulas (`ModelShape.known` is then False).
        dtype: dtype of the published weights if the config has none.
        auto_class: the class that loads the model; "" for `AutoModelForCausalLM`.
        published: quantization of the checkpoint; None: as the config says.

    Raises:
        UnknownArchitecture: no formulas for the model type, and no counts either.
        InputError: a size is missing or is not a number.
    """
    fields = _fields(config, id)
    if _model_type(config, id) not in KNOWN_MODEL_TYPES and counts is None:
        raise UnknownArchitecture(
            f"{id} is of model type {fields.model_type!r}, whose layers have no formula here, "
            f"and it is not in the catalogue. Known model types: {', '.join(sorted(KNOWN_MODEL_TYPES))}."
        )
    reason = _unknown_because(config, fields)
    if not reason:
        return _shape_from_formulas(
            config, fields, dtype, auto_class, from_config(config, id) if published is None else published
        )
    if counts is None:
        raise UnknownArchitecture(f"{id} {reason}, which has no formula here, and it is not in the catalogue.")
    return _shape_from_counts(
        config, fields, counts, reason, dtype, auto_class, from_config(config, id) if published is None else published
    )


def _unknown_because(config: dict[str, object], fields: Fields) -> str:
    """The reason why the layers of a model have no formulas; "" if they have formulas."""
    if _model_type(config, fields.id) not in KNOWN_MODEL_TYPES:
        return f"is of model type {fields.model_type!r}"
    row = architecture_of(fields.model_type)
    switched_on = [key for key in row.unknown_if if fields.flag(key)]
    if switched_on:
        return f"sets {' and '.join(switched_on)} on {fields.model_type!r}"
    act = fields.text(row.act_key)
    return "" if act in ACTIVATIONS else f"has the activation {act!r}"


def _model_type(config: dict[str, object], model_id: str) -> str:
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise InputError(f"The config.json of {model_id} has no model_type, so it is not a Hugging Face model config.")
    return model_type


def _fields(config: dict[str, object], model_id: str) -> Fields:
    """The keys of the language model: those of `text_config` if it exists, with the model type's defaults."""
    outer = _model_type(config, model_id)
    inner = config.get("text_config")
    values = dict(inner) if isinstance(inner, dict) else dict(config)
    model_type = architecture_of(outer).text_type or str(values.get("model_type", outer))
    row = architecture_of(model_type)
    spelled = {
        usual: values[other] for usual, other in row.spellings.items() if other in values and usual not in values
    }
    return Fields(id=model_id, model_type=model_type, values={**row.defaults, **values, **spelled})


def _shape_from_formulas(
    config: dict[str, object], fields: Fields, dtype: str, auto_class: str, published: Published
) -> ModelShape:
    """The shape of a model whose layers have formulas."""
    row = architecture_of(fields.model_type)
    layers = _layers(row, fields)
    tied = _tied(config, fields)
    width = (
        fields.positive("word_embed_proj_dim") if fields.has("word_embed_proj_dim") else fields.positive("hidden_size")
    )
    embed_params = fields.positive("vocab_size") * width
    final_norm = row.final_norm(fields) if row.final_norm else norm(row.norm, fields.positive("hidden_size"))
    head_bias = fields.positive("vocab_size") if row.lm_head_bias else 0
    tower = _tower(config, fields)
    projections = (
        2 * width * fields.positive("hidden_size") if width != fields.positive("hidden_size") else 0
    )  # opt-350m: project_in and project_out
    other = projections + (vision.gemma3_projector_params(tower, fields.positive("hidden_size")) if tower else 0)
    positions = _position_params(row, fields)
    vision_params = tower.params if tower else 0
    parts = (embed_params, 0 if tied else embed_params, head_bias, positions, other, vision_params, final_norm.params)
    return ModelShape(
        id=fields.id,
        model_type=_model_type(config, fields.id),
        dtype=_dtype(config, dtype),
        hidden_size=fields.positive("hidden_size"),
        vocab_size=fields.positive("vocab_size"),
        max_position_embeddings=fields.positive("max_position_embeddings"),
        layers=layers,
        embed_params=embed_params,
        position_params=positions,
        lm_head_params=0 if tied else embed_params,
        lm_head_bias_params=head_bias,
        final_norm=final_norm,
        other_params=other,
        vision_params=vision_params,
        vision_linear_params=tower.linear_params if tower else 0,
        tied=tied,
        params=sum(parts) + sum(layer.params for layer in layers),
        auto_class=auto_class or ("AutoModelForImageTextToText" if tower else "AutoModelForCausalLM"),
        quantization=published.quantization,
        quantization_group_size=published.group_size,
        scaled_logits=row.scaled_logits or fields.has("final_logit_softcapping"),
        embed_dropout=fields.number(row.embed_dropout_key),
        scaled_embeddings=row.scaled_embeddings,
        notes=_notes(config, dtype, published),
        config=config,
    )


def _shape_from_counts(
    config: dict[str, object],
    fields: Fields,
    counts: Counts,
    reason: str,
    dtype: str,
    auto_class: str,
    published: Published,
) -> ModelShape:
    """The shape of a model whose layers have no formulas: its counts, and no layers.

    Sizes that the config names otherwise are 0; `planner.training_stack.complete_models` reads them off the modules.
    """
    counted = "its parameters are counted" if counts.params else "its parameters are not counted"
    return ModelShape(
        id=fields.id,
        model_type=_model_type(config, fields.id),
        dtype=_dtype(config, dtype),
        hidden_size=_size(fields, "hidden_size", "n_embd"),
        vocab_size=_size(fields, "vocab_size"),
        max_position_embeddings=_size(fields, "max_position_embeddings", "n_positions"),
        layers=(),
        embed_params=counts.embed,
        lm_head_params=counts.lm_head,
        final_norm=_NO_NORM,
        other_params=counts.params - counts.embed - counts.lm_head - counts.vision,
        vision_params=counts.vision,
        tied=counts.lm_head == 0,
        params=counts.params,
        auto_class=auto_class if auto_class or not counts.params else "AutoModelForCausalLM",
        quantization=published.quantization,
        quantization_group_size=published.group_size,
        notes=(f"It {reason}: its activations are not known by formula, {counted}.",),
        config=config,
    )


def _size(fields: Fields, *names: str) -> int:
    return next((fields.positive(name) for name in names if fields.has(name)), 0)


def _layers(row: Architecture, fields: Fields) -> tuple[Layer, ...]:
    """Every decoder layer in order; equal layers are the same object."""
    assert row.layer is not None
    distinct: dict[Layer, Layer] = {}
    layers = (row.layer(row, fields, index) for index in range(fields.positive("num_hidden_layers")))
    return tuple(distinct.setdefault(layer, layer) for layer in layers)


def _position_params(row: Architecture, fields: Fields) -> int:
    """Parameters of learned positions."""
    if row.position_offset is None:
        return 0
    return (fields.positive("max_position_embeddings") + row.position_offset) * fields.positive("hidden_size")


def _tied(config: dict[str, object], fields: Fields) -> bool:
    """Return whether the head shares the embedding's weight.

    For a multimodal model the outer config decides (modeling_gemma3.py `_tied_weights_keys` of the outer class).
    """
    outer = config.get("tie_word_embeddings")
    return outer if isinstance(outer, bool) else fields.flag("tie_word_embeddings")


def _tower(config: dict[str, object], fields: Fields) -> vision.VisionTower | None:
    inner = config.get("vision_config")
    if architecture_of(_model_type(config, fields.id)).tower != "siglip" or not isinstance(inner, dict):
        return None
    values = {**vision.SIGLIP_DEFAULTS, **inner}
    return vision.siglip(Fields(id=fields.id, model_type=fields.model_type, values=values))


def _dtype(config: dict[str, object], otherwise: str) -> str:
    inner = config.get("text_config")
    inner = inner if isinstance(inner, dict) else {}
    for stated in (config.get("dtype"), config.get("torch_dtype"), inner.get("dtype"), inner.get("torch_dtype")):
        if isinstance(stated, str):
            return stated.removeprefix("torch.")
    return otherwise or "bfloat16"


def _notes(config: dict[str, object], dtype: str, published: Published) -> tuple[str, ...]:
    stated = dtype or any(key in config for key in ("dtype", "torch_dtype")) or "text_config" in config
    notes = [] if stated else ["The config.json names no dtype; its weights are taken to be bfloat16."]
    return tuple(notes + ([f"Quantization {published.note}."] if published.note else []))

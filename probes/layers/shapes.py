"""Shapes of an architecture without formulas, read off the modules that transformers builds."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy

import torch
import transformers
from msgspec.structs import replace
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from planner.candidate import Candidate
from planner.errors import UnknownArchitecture, nearest
from planner.memory.layers.measured_layers import LayerShapes, MeasuredLayer
from planner.models.from_config import Counts
from planner.models.layers import Attention, Experts, Linear, Mlp, Norm
from planner.models.shape import ModelShape
from probes.layers.fake_tensors.models import build_model, quiet
from probes.layers.few_layers import Config, depth_of, few_layers, layer_kinds, with_default_keys

# Parts of names: a module whose path has one of them belongs to a feed-forward block.
FEED_FORWARD = ("mlp", "feed_forward", "ffn", "expert", "moe")
WINDOWED = ("sliding_attention", "local", "chunked_attention")  # kinds of layers that see a window of tokens
# Kinds of layers that cache keys and values, by their names in configs. Source: transformers 5.23,
# configuration_utils.py, ALLOWED_LAYER_TYPES, and gpt_neo.
ATTENDING = ("full_attention", "attention", "global", *WINDOWED)
UNPADDED = (*ATTENDING, "mlp", "moe")  # the last two: nemotron_h
# Sparse attention, which caches its indexer's keys too: of these model types beside a latent, one key for each token.
INDEXERS = ("index_head_dim", "index_n_heads")
INDEXED = ("deepseek_v32", "glm_moe_dsa")
ROTARY = ("rope_parameters", "rope_theta", "rotary_dim")
DECODERS = (
    "gpt_neox",
)  # its config class has the field `is_decoder` as those of bert and bart have; it does not read it
Counted = tuple[tuple[Linear, int], ...]
EXPERT_DIMENSIONS = 3  # experts are fused parameters [experts, out, in] (transformers 5.23, integrations/moe.py)


def _auto_class(model: ModelShape) -> str:
    """The auto class that loads the model as TRL does, with the tower for images if it has one.

    Source: trl 1.16, trainer/utils.py, `create_model_from_path`.

    Raises:
        UnknownArchitecture: transformers does not know the model type, or has no causal language model of it.
    """
    if model.auto_class:
        return model.auto_class
    if model.model_type not in CONFIG_MAPPING:
        near = " or ".join(nearest(model.model_type, sorted(CONFIG_MAPPING)))
        hint = f" Did you mean {near}?" if near else ""
        raise UnknownArchitecture(
            f"{model.id} is of model type {model.model_type!r}, which transformers {transformers.__version__} "
            f"does not know either.{hint}"
        )
    config = CONFIG_MAPPING[model.model_type]
    if config in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and (
        "vision_config" in model.config or config not in MODEL_FOR_CAUSAL_LM_MAPPING
    ):
        return "AutoModelForImageTextToText"
    if config in MODEL_FOR_CAUSAL_LM_MAPPING:
        return "AutoModelForCausalLM"
    raise UnknownArchitecture(
        f"{model.id} is of model type {model.model_type!r}, of which transformers {transformers.__version__} "
        "has no causal language model."
    )


def shapes_of_layers(model: ModelShape) -> LayerShapes:
    """Build the model without weights; return one layer of each kind and what is outside the layers.

    Raises:
        UnknownArchitecture: transformers does not know the model type or cannot build the model, or its layers are not
            in one list.
    """
    model = replace(model, auto_class=_auto_class(model))
    config, candidate = dict(model.config), Candidate(model=model, method="sft", dtype="bfloat16")
    with _built_here(model):
        full, kinds = with_default_keys(config), layer_kinds(config)
        if full.get("is_decoder") is False and model.model_type not in DECODERS:
            raise ValueError("it is no decoder (is_decoder is false)")
        few = build_model(few_layers(model, of_a_kind=1), candidate)
        whole = build_model(replace(model, config=deepcopy(config)), candidate)
        modules = decoder_layers(few, len(kinds))
        _check_kinds(model, decoder_layers(whole, depth_of(full)), modules, kinds)
        inside = {id(linear) for module in modules for linear in module.modules()}
        passed, idle = _outer_linears(few, inside)
        return LayerShapes(
            of_each_kind=tuple(_layer(module, full, places[0]) for module, places in zip(modules, kinds, strict=True)),
            places=kinds, auto_class=model.auto_class, hidden_size=int(full["hidden_size"]),
            vocab_size=int(full["vocab_size"]), max_position_embeddings=int(full.get("max_position_embeddings") or 0),
            has_dropout=any(map(_has_dropout, modules)),
            counts=_counts(whole), embed_norm=_embed_norm(whole), outer_linears=passed, vision_linears=idle,
        )  # fmt: skip


def chunk_length(model: ModelShape) -> int:
    """Tokens to a multiple of which layers pad each row; 0: they do not (`Architecture.chunk`)."""
    chunk = model.architecture.chunk
    return chunk if isinstance(chunk, int) else int(with_default_keys(dict(model.config))[chunk])


def padded_kinds(model: ModelShape) -> frozenset[int]:
    """The kinds of layers that may pad rows: those that the config calls neither attention nor feed-forward blocks."""
    full, kinds = with_default_keys(dict(model.config)), layer_kinds(dict(model.config))
    return frozenset(kind for kind, places in enumerate(kinds) if _kind(full, places[0]) not in UNPADDED)


def _check_kinds(
    model: ModelShape,
    whole: list[torch.nn.Module],
    of_each_kind: list[torch.nn.Module],
    kinds: tuple[tuple[int, ...], ...],
) -> None:
    """Compare the parameters of all layers with those of their kind.

    Raises:
        UnknownArchitecture: a layer differs from its kind.
    """
    for module, places in zip(of_each_kind, kinds, strict=True):
        for place in places:
            if _parameters(whole[place]) != _parameters(module):
                raise UnknownArchitecture(
                    f"{model.id} ({model.model_type}): layer {place} is unlike layer {places[0]}, "
                    "and its config does not show why."
                )


def _parameters(layer: torch.nn.Module) -> list[tuple[str, torch.Size]]:
    return [(name, parameter.shape) for name, parameter in layer.named_parameters()]


def _has_dropout(layer: torch.nn.Module) -> bool:
    return any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in layer.modules())


@contextmanager
def _built_here(model: ModelShape) -> Iterator[None]:
    """Turn the errors of building a model into `UnknownArchitecture`."""
    try:
        with quiet():
            yield
    except (
        ArithmeticError, ValueError, AttributeError, TypeError, LookupError, StopIteration, ImportError, RuntimeError
    ) as error:  # fmt: skip
        raise UnknownArchitecture(
            f"{model.id} ({model.model_type}) cannot be built here: {(str(error).splitlines() or [''])[0][:200]}"
        ) from error


def _text_modules(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The modules that text passes: the decoder with its embedding, and the output head."""
    return [
        module
        for module in (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
        if module is not None
    ]


def _counts(model: PreTrainedModel) -> Counts:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    text = {id(parameter) for module in _text_modules(model) for parameter in module.parameters()}
    own_head = head is not None and head.weight is not embedding.weight
    return Counts(
        params=_param_count(model), embed=embedding.weight.numel(), lm_head=head.weight.numel() if own_head else 0,
        vision=sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in text),
    )  # fmt: skip


def _embed_norm(model: PreTrainedModel) -> Norm | None:
    """The norm after the embedding (bloom: `word_embeddings_layernorm`); None if there is none."""
    norms = [
        child
        for name, child in model.get_decoder().named_children()
        if isinstance(child, torch.nn.LayerNorm) and "embed" in name
    ]
    return Norm(kind="layer", features=norms[0].normalized_shape[0], params=_param_count(norms[0])) if norms else None


def _outer_linears(model: PreTrainedModel, inside: set[int]) -> tuple[Counted, Counted]:
    """Projections outside the layers and the head, with their counts: those that text passes, and those of towers."""
    text = {id(module) for part in _text_modules(model) for module in part.modules()}
    passed, idle = dict[Linear, int](), dict[Linear, int]()
    for path, module in model.named_modules():
        if (
            isinstance(module, torch.nn.Linear)
            and module is not model.get_output_embeddings()
            and id(module) not in inside
        ):
            counts, linear = passed if id(module) in text else idle, _linear(path, module)
            counts[linear] = counts.get(linear, 0) + 1
    return tuple(passed.items()), tuple(idle.items())


def decoder_layers(model: torch.nn.Module, count: int) -> list[torch.nn.Module]:
    """The language model's layers: of the module lists with `count` modules, the one with the most parameters.

    Raises:
        UnknownArchitecture: there is no such list.
    """
    lists: list[torch.nn.ModuleList] = [
        module for module in model.modules() if isinstance(module, torch.nn.ModuleList) and len(module) == count
    ]
    if not lists:
        raise UnknownArchitecture(f"{type(model).__name__} has no list of its layers.")
    return list(max(lists, key=_param_count))


def _param_count(module: torch.nn.Module) -> int:
    return sum(int(parameter.numel()) for parameter in module.parameters())


def _layer(module: torch.nn.Module, config: Config, index: int) -> MeasuredLayer:
    hidden_size = int(config["hidden_size"])
    linears = {
        path: _linear(path, found) for path, found in module.named_modules() if isinstance(found, torch.nn.Linear)
    }
    dense = tuple(linear for path, linear in linears.items() if _feeds_forward(path))
    experts = [
        parameter
        for parameter in module.parameters()
        if parameter.dim() == EXPERT_DIMENSIONS and parameter.size(0) > 1 and _is_expert(parameter, config)
    ]
    widest = max((linear.out_features for linear in dense), default=0)
    mlp = Mlp(linears=dense, intermediate_size=widest, gated=len(dense) > 2, activation="silu")
    measured = MeasuredLayer(
        hidden_size=hidden_size, mlp=None if experts else mlp, norms=(),
        attention=_attention(config, index, tuple(linears[path] for path in linears if not _feeds_forward(path))),
        experts=Experts(
            num_experts=experts[0].size(0), num_experts_per_tok=int(config.get("num_experts_per_tok") or 1),
            moe_intermediate_size=_inner(experts[-1], hidden_size), activation="silu", router_params=0,
            expert_params=sum(parameter.numel() for parameter in experts), shared=mlp if dense else None,
        ) if experts else None,
        passed=index not in (config.get("cross_attention_layers") or ()),
    )  # fmt: skip
    rest = sum(parameter.numel() for parameter in module.parameters()) - measured.layer().params
    return replace(measured, norms=(Norm(kind="none", features=rest, params=rest),) if rest > 0 else ())


def _linear(path: str, module: torch.nn.Linear) -> Linear:
    return Linear(
        name=path.rsplit(".", 1)[-1],
        in_features=module.in_features,
        out_features=module.out_features,
        bias=module.bias is not None,
    )


def _feeds_forward(path: str) -> bool:
    return any(part in path.lower() for part in FEED_FORWARD)


def _is_expert(parameter: torch.nn.Parameter, config: Config) -> bool:
    """Return whether a 3-D parameter is a fused expert matrix, not a convolution's kernel ([channels, 1, width])."""
    return parameter.size(1) > 1 and parameter.size(0) in {
        config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    }


def _inner(down: torch.nn.Parameter, hidden_size: int) -> int:
    """The width of an expert, from its `down_proj`: [experts, hidden_size, width], or [experts, width, hidden_size]."""
    return int(down.size(1) if down.size(2) == hidden_size else down.size(2))


def _attention(config: Config, index: int, linears: tuple[Linear, ...]) -> Attention:
    """Attention heads of a layer, from the config and the widths of its projections.

    There are 0 key heads if the layer caches something else than keys and values, or more than them.
    """
    head_count = config.get("num_attention_heads") or config.get("n_head")  # mamba has no attention
    heads, kind = int(head_count or 1), _kind(config, index)
    attends = bool(head_count) and (kind is None or kind in ATTENDING) and not any(config.get(key) for key in INDEXERS)
    if config.get("kv_lora_rank") and (attends or config.get("model_type") in INDEXED):
        return _latent_attention(config, linears, heads)
    key_heads = int(config.get("num_key_value_heads") or heads) if attends else 0
    widths = {linear.name: linear.out_features for linear in linears}
    usual = int(config.get("head_dim") or config["hidden_size"] // heads)
    head_dim = widths.get("k_proj", usual * key_heads) // key_heads if key_heads else usual
    window = config.get("sliding_window") or config.get("window_size")
    return Attention(
        num_attention_heads=heads, num_key_value_heads=key_heads, head_dim=head_dim,
        v_head_dim=widths.get("v_proj", head_dim * key_heads) // key_heads if key_heads else usual, linears=linears,
        sliding_window=int(window) if kind in WINDOWED and isinstance(window, int) else None,
        rotary=any(key in config for key in ROTARY),
    )  # fmt: skip


def _latent_attention(config: Config, linears: tuple[Linear, ...], heads: int) -> Attention:
    """Multi-head latent attention; with an indexer (`wk`) of its own where attention is sparse."""
    rope, indexes = int(config["qk_rope_head_dim"]), any(linear.name == "wk" for linear in linears)
    return Attention(
        num_attention_heads=heads, num_key_value_heads=heads, head_dim=int(config["qk_nope_head_dim"]) + rope,
        v_head_dim=int(config["v_head_dim"]), linears=linears, rotary=True,
        kv_latent_dim=int(config["kv_lora_rank"]) + rope,
        index_heads=int(config["index_n_heads"]) if indexes else 0,
        index_head_dim=int(config["index_head_dim"]) if indexes else 0,
    )  # fmt: skip


def _kind(config: Config, index: int) -> str | None:
    """The config's name for the kind of a layer; None if the config does not tell layers apart."""
    for key in ("layer_types", "layers_block_type", "attention_layers"):
        if isinstance(config.get(key), (list, tuple)):
            return str(config[key][index])
    return None

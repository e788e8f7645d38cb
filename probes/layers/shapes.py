"""An architecture without formulas as `planner.models.shape` describes models: read off the modules that transformers builds."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from planner.candidate import Candidate
from planner.errors import UnknownArchitecture, nearest
from planner.models.from_config import Counts
from planner.models.shape import Attention, Experts, Layer, Linear, Mlp, ModelShape, Norm
from probes.dryrun.fake_models import build_model
from probes.dryrun.quiet_libraries import quiet
from probes.layers.few_layers import Config, depth_of, described, few_layers, layer_kinds
from probes.layers.store import Layers

FEED_FORWARD = (
    "mlp",
    "feed_forward",
    "ffn",
    "expert",
    "moe",
)  # what the names of a feed-forward block's modules have in them
WINDOWED = ("sliding_attention", "local", "chunked_attention")  # kinds of layers that see a window of tokens
# Kinds of layers that keep keys and values, by their names in configs. Source: transformers 5.23, configuration_utils.py, ALLOWED_LAYER_TYPES, and gpt_neo.
ATTENDING = ("full_attention", "attention", "global", *WINDOWED)
INDEXERS = (
    "index_head_dim",
    "index_n_heads",
)  # deepseek_v32, glm_moe_dsa: the indexer's keys are cached beside the latent
ROTARY = ("rope_parameters", "rope_theta", "rotary_dim")
Counted = tuple[tuple[Linear, int], ...]
EXPERT_DIMENSIONS = 3  # experts are fused parameters [experts, out, in] (transformers 5.23, integrations/moe.py)


def _auto_class(model: ModelShape) -> str:
    """TRL takes the class that `architectures` names; where that is the one with images, its auto class has it (trl 1.16, trainer/utils.py:1344)."""
    if model.auto_class:
        return model.auto_class
    if model.model_type not in CONFIG_MAPPING:
        near = " or ".join(nearest(model.model_type, sorted(CONFIG_MAPPING)))
        hint = f" Did you mean {near}?" if near else ""
        raise UnknownArchitecture(
            f"{model.id} is of model type {model.model_type!r}, which transformers {transformers.__version__} does not know either.{hint}"
        )
    config = CONFIG_MAPPING[model.model_type]
    if config in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and (
        "vision_config" in model.config or config not in MODEL_FOR_CAUSAL_LM_MAPPING
    ):
        return "AutoModelForImageTextToText"
    if config in MODEL_FOR_CAUSAL_LM_MAPPING:
        return "AutoModelForCausalLM"
    raise UnknownArchitecture(
        f"{model.id} is of model type {model.model_type!r}, of which transformers {transformers.__version__} has no causal language model."
    )


def layers_of(model: ModelShape) -> Layers:
    """The model's layers, without what answers for their memory, and what is outside them.

    Raises:
        UnknownArchitecture: transformers does not know the model type or cannot build the model, or it has no list of layers.
    """
    model = replace(model, auto_class=_auto_class(model))
    config, candidate = dict(model.config), Candidate(model=model, method="sft", dtype="bfloat16")
    with _built_here(model):
        full, kinds = described(config), layer_kinds(config)
        if full.get("is_decoder") is False:  # bert and bart, whose config classes alone have such a field
            raise ValueError("it is no decoder (is_decoder is false)")
        few = build_model(few_layers(model, of_a_kind=1), candidate, "fake", model.auto_class)
        whole = build_model(replace(model, config=deepcopy(config)), candidate, "fake", model.auto_class)
        modules = decoder_layers(few, len(kinds))
        _check_kinds(model, decoder_layers(whole, depth_of(full)), modules, kinds)
        inside = {id(linear) for module in modules for linear in module.modules()}
        passed, idle = _outer_linears(few, inside)
        return Layers(
            of_each_kind=tuple(_layer(module, full, places[0]) for module, places in zip(modules, kinds, strict=True)), places=kinds,
            auto_class=model.auto_class, hidden_size=int(full["hidden_size"]), vocab_size=int(full["vocab_size"]),
            max_position_embeddings=int(full.get("max_position_embeddings") or 0),
            counts=_counts(whole), embed_norm=_embed_norm(whole), outer_linears=passed, vision_linears=idle,
        )  # fmt: skip


def _check_kinds(
    model: ModelShape,
    whole: list[torch.nn.Module],
    of_each_kind: list[torch.nn.Module],
    kinds: tuple[tuple[int, ...], ...],
) -> None:
    """Whether the layers really are of the kinds that the config tells apart."""
    for module, places in zip(of_each_kind, kinds, strict=True):
        for place in places:
            if _parameters(whole[place]) != _parameters(module):
                raise UnknownArchitecture(
                    f"{model.id} ({model.model_type}): layer {place} is unlike layer {places[0]}, and its config does not show why."
                )


def _parameters(layer: torch.nn.Module) -> list[tuple[str, torch.Size]]:
    return [(name, parameter.shape) for name, parameter in layer.named_parameters()]


@contextmanager
def _built_here(model: ModelShape) -> Iterator[None]:
    try:
        with quiet():
            yield
    except (ValueError, AttributeError, TypeError, KeyError, StopIteration, ImportError) as error:
        raise UnknownArchitecture(
            f"{model.id} ({model.model_type}) cannot be built here: {(str(error).splitlines() or [''])[0][:200]}"
        ) from error


def _text_modules(model: PreTrainedModel) -> list[torch.nn.Module]:
    """What text runs through: the decoder with its embedding, and the output head."""
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
        params=_weight(model), embed=embedding.weight.numel(), lm_head=head.weight.numel() if own_head else 0,
        vision=sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in text),
    )  # fmt: skip


def _embed_norm(model: PreTrainedModel) -> Norm | None:
    """The norm behind the embedding (bloom: `word_embeddings_layernorm`)."""
    found = [
        child
        for name, child in model.get_decoder().named_children()
        if isinstance(child, torch.nn.LayerNorm) and "embed" in name
    ]
    return Norm(kind="layer", features=found[0].normalized_shape[0], params=_weight(found[0])) if found else None


def _outer_linears(model: PreTrainedModel, inside: set[int]) -> tuple[Counted, Counted]:
    """Projections outside the layers and the head: those that text passes, and those of towers."""
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
    """The language model's layers: the heaviest list of so many modules."""
    lists: list[torch.nn.ModuleList] = [
        module for module in model.modules() if isinstance(module, torch.nn.ModuleList) and len(module) == count
    ]
    if not lists:
        raise UnknownArchitecture(f"{type(model).__name__} has no list of its layers.")
    return list(max(lists, key=_weight))


def _weight(module: torch.nn.Module) -> int:
    return sum(int(parameter.numel()) for parameter in module.parameters())


def _layer(module: torch.nn.Module, config: Config, index: int) -> Layer:
    hidden_size = int(config["hidden_size"])
    linears = dict(_linears(module))
    dense = tuple(linear for path, linear in linears.items() if _feeds_forward(path))
    experts = [
        parameter
        for parameter in module.parameters()
        if parameter.dim() == EXPERT_DIMENSIONS and parameter.size(0) > 1 and _is_expert(parameter, config)
    ]
    block: Mlp | Experts = Mlp(linears=dense, intermediate_size=_widest(dense), gated=len(dense) > 2, activation="silu")
    if experts:
        block = Experts(
            num_experts=experts[0].size(0), num_experts_per_tok=int(config.get("num_experts_per_tok") or 1),
            moe_intermediate_size=_inner(experts[-1], hidden_size), activation="silu", router_params=0,
            expert_params=sum(parameter.numel() for parameter in experts), shared=block if isinstance(block, Mlp) and dense else None,
        )  # fmt: skip
    layer = Layer(
        program="measured", hidden_size=hidden_size, attention=_attention(config, index, tuple(linears[path] for path in linears if not _feeds_forward(path))),
        feed_forward=block, norms=(), passed=index not in (config.get("cross_attention_layers") or ()),
    )  # fmt: skip
    rest = sum(parameter.numel() for parameter in module.parameters()) - layer.params
    return replace(layer, norms=(Norm(kind="none", features=rest, params=rest),) if rest > 0 else ())


def _linears(module: torch.nn.Module) -> Iterator[tuple[str, Linear]]:
    for path, found in module.named_modules():
        if isinstance(found, torch.nn.Linear):
            yield path, _linear(path, found)


def _linear(path: str, found: torch.nn.Linear) -> Linear:
    return Linear(
        name=path.rsplit(".", 1)[-1],
        in_features=found.in_features,
        out_features=found.out_features,
        bias=found.bias is not None,
    )


def _feeds_forward(path: str) -> bool:
    return any(part in path.lower() for part in FEED_FORWARD)


def _is_expert(parameter: torch.nn.Parameter, config: Config) -> bool:
    """A fused expert matrix, not the kernel of a convolution ([channels, 1, width])."""
    return parameter.size(1) > 1 and parameter.size(0) in {
        config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    }


def _inner(down: torch.nn.Parameter, hidden_size: int) -> int:
    """The width of an expert: its `down_proj` is [experts, hidden_size, width], in some families [experts, width, hidden_size]."""
    return int(down.size(1) if down.size(2) == hidden_size else down.size(2))


def _widest(linears: tuple[Linear, ...]) -> int:
    return max((linear.out_features for linear in linears), default=0)


def _attention(config: Config, index: int, linears: tuple[Linear, ...]) -> Attention:
    """Heads for the KV cache: as the config and the width of the projections say. 0 where a layer keeps something else, or something more."""
    named = config.get("num_attention_heads") or config.get("n_head")  # mamba has no attention
    heads, kind = int(named or 1), _kind(config, index)
    attends = bool(named) and (kind is None or kind in ATTENDING) and not any(config.get(key) for key in INDEXERS)
    key_heads = int(config.get("num_key_value_heads") or heads) if attends else 0
    widths = {linear.name: linear.out_features for linear in linears}
    usual = int(config.get("head_dim") or config["hidden_size"] // heads)
    head_dim = widths.get("k_proj", usual * key_heads) // key_heads if key_heads else usual
    window = config.get("sliding_window") or config.get("window_size")
    return Attention(
        num_attention_heads=heads, num_key_value_heads=key_heads, head_dim=head_dim,
        v_head_dim=widths.get("v_proj", head_dim * key_heads) // key_heads if key_heads else usual, linears=linears,
        sliding_window=int(window) if kind in WINDOWED and isinstance(window, int) else None, rotary=any(key in config for key in ROTARY),
        kv_latent_dim=int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"]) if attends and config.get("kv_lora_rank") else 0,
    )  # fmt: skip


def _kind(config: Config, index: int) -> str | None:
    """What the config calls a layer; None where all are alike."""
    for key in ("layer_types", "layers_block_type", "attention_layers"):
        if isinstance(config.get(key), (list, tuple)):
            return str(config[key][index])
    return None

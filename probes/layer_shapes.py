"""The layers of an architecture without formulas as `planner.model` describes layers: read off the modules that transformers builds."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from planner.candidate import Candidate
from planner.errors import UnknownArchitecture
from planner.model import Attention, Experts, Layer, Linear, Mlp, ModelShape, Norm
from probes.coefficient_store import Layers
from probes.dryrun import quiet
from probes.fake_trainer import build_model
from probes.few_layers import Config, described, few_layers, layer_kinds

FEED_FORWARD = ("mlp", "feed_forward", "ffn", "expert", "moe")  # what the names of a feed-forward block's modules have in them
WINDOWED = ("sliding_attention", "local", "chunked_attention")  # kinds of layers that see a window of tokens
# Kinds of layers that keep keys and values, by their names in configs. Source: transformers 5.23, configuration_utils.py, ALLOWED_LAYER_TYPES, and gpt_neo.
ATTENDING = ("full_attention", "attention", "global", *WINDOWED)
INDEXERS = ("index_head_dim", "index_n_heads")  # deepseek_v32, glm_moe_dsa: the indexer's keys are cached beside the latent
ROTARY = ("rope_parameters", "rope_theta", "rotary_dim")
EXPERT_DIMENSIONS = 3  # experts are fused parameters [experts, out, in] (transformers 5.23, integrations/moe.py)


def layers_of(model: ModelShape) -> Layers:
    """The model's layers, without what answers for their memory.

    Raises:
        UnknownArchitecture: transformers cannot build the model, or it has no list of layers.
    """
    config = dict(model.config)
    try:
        full, kinds = described(config), layer_kinds(config)
        with quiet():
            built = build_model(few_layers(model, of_a_kind=1), Candidate(model=model, method="sft", dtype="bfloat16"), "fake", model.auto_class)
    except (ValueError, AttributeError, TypeError, KeyError, StopIteration) as error:
        raise UnknownArchitecture(f"{model.id} ({model.model_type}) cannot be built here: {(str(error).splitlines() or [''])[0][:200]}") from error
    modules = decoder_layers(built, len(kinds))
    return Layers(of_each_kind=tuple(_layer(module, full, places[0]) for module, places in zip(modules, kinds, strict=True)), places=kinds)


def decoder_layers(model: torch.nn.Module, count: int) -> list[torch.nn.Module]:
    """The language model's layers: the heaviest list of so many modules."""
    lists: list[torch.nn.ModuleList] = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList) and len(module) == count]
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
        parameter for parameter in module.parameters() if parameter.dim() == EXPERT_DIMENSIONS and parameter.size(0) > 1 and _is_expert(parameter, config)
    ]
    block: Mlp | Experts = Mlp(linears=dense, intermediate_size=_widest(dense), gated=len(dense) > 2, activation="silu")
    if experts:
        block = Experts(
            num_experts=experts[0].size(0), num_experts_per_tok=int(config.get("num_experts_per_tok") or 1),
            moe_intermediate_size=experts[-1].size(2), activation="silu", router_params=0,
            expert_params=sum(parameter.numel() for parameter in experts), shared=block if isinstance(block, Mlp) and dense else None,
        )  # fmt: skip
    layer = Layer(
        program="measured", hidden_size=hidden_size, attention=_attention(config, index, tuple(linears[path] for path in linears if not _feeds_forward(path))),
        feed_forward=block, norms=(),
    )  # fmt: skip
    rest = sum(parameter.numel() for parameter in module.parameters()) - layer.params
    return replace(layer, norms=(Norm(kind="none", features=rest, params=rest),) if rest > 0 else ())


def _linears(module: torch.nn.Module) -> Iterator[tuple[str, Linear]]:
    for path, found in module.named_modules():
        if isinstance(found, torch.nn.Linear):
            yield path, Linear(name=path.rsplit(".", 1)[-1], in_features=found.in_features, out_features=found.out_features, bias=found.bias is not None)


def _feeds_forward(path: str) -> bool:
    return any(part in path.lower() for part in FEED_FORWARD)


def _is_expert(parameter: torch.nn.Parameter, config: Config) -> bool:
    """A fused expert matrix, not the kernel of a convolution ([channels, 1, width])."""
    return parameter.size(1) > 1 and parameter.size(0) in {
        config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    }


def _widest(linears: tuple[Linear, ...]) -> int:
    return max((linear.out_features for linear in linears), default=0)


def _attention(config: Config, index: int, linears: tuple[Linear, ...]) -> Attention:
    """Heads for the KV cache: as the config and the width of the projections say. 0 where a layer keeps something else, or something more."""
    heads = int(config.get("num_attention_heads") or config["n_head"])
    kind = _kind(config, index)
    attends = (kind is None or kind in ATTENDING) and not any(config.get(key) for key in INDEXERS)
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

"""Families whose decoder layer is norm, attention, norm, MLP in some order: a table of their differences.

Source of every row: transformers 5.23, models/<folder>/modeling_<folder>.py, the classes `...Attention`, `...MLP`,
`...DecoderLayer` and `...RMSNorm`; <folder> is the model type (`gemma3_text` lives in gemma3).
"""

from collections.abc import Callable
from typing import Literal

from msgspec import Struct

from planner.models.architectures import experts, positions, windows
from planner.models.architectures.fields import Fields
from planner.models.architectures.parts import PARAMS_PER_FEATURE, activation, gated_mlp, norm, plain_mlp
from planner.models.layers import Attention, Experts, Layer, LayerProgram, Linear, Mlp, NormKind

QkNorm = Literal["none", "head", "full", "per_head_weight"]


class Family(Struct, frozen=True, kw_only=True):
    """Differences of one family. A bias is the same for the whole family (bool) or set by a config key (str)."""

    program: LayerProgram = "llama"
    norm: NormKind = "rms"
    norms_per_layer: int = 2
    qkv_bias: bool | str = "attention_bias"
    out_bias: bool | str = "attention_bias"
    out_name: str = "o_proj"
    fused_qkv: bool = False
    qk_norm: QkNorm = "none"
    qk_norm_each: bool = False  # queries are normalised before keys are projected
    qk_norm_if: str = ""  # config key that enables the norm; "": always enabled
    mlp_names: tuple[str, str] | None = None  # None: gated
    mlp_bias: bool | str = False
    fused_mlp: bool = False
    act_key: str = "hidden_act"
    window: windows.WindowRule = windows.no_window
    rotary: windows.RotaryRule = windows.all_rotary
    softcap_key: str = ""
    sinks: bool = False
    residual_scaled: bool = False
    experts: Callable[[Fields, int], Experts] | None = None  # None: dense
    lm_head_bias: bool = False
    scaled_embeddings: bool = False
    scaled_logits: bool = False
    residual_dropout_key: str = ""
    unknown_if: tuple[str, ...] = ()  # config keys that change the layer into one without formulas


_OLMO2 = Family(program="olmo2", norm="rms_fp32_weight", qk_norm="full", qk_norm_each=True)
_GLM = Family(out_bias=False, fused_mlp=True)

FAMILIES: dict[str, Family] = {
    "llama": Family(mlp_bias="mlp_bias"),
    "qwen2": Family(qkv_bias=True, out_bias=False, window=windows.upper_layers),
    "qwen3": Family(qk_norm="head", qk_norm_each=True, window=windows.upper_layers),
    "mistral": Family(qkv_bias=False, out_bias=False, window=windows.every_layer),
    "gemma": Family(norm="rms_gemma", scaled_embeddings=True),
    "gemma2": Family(
        program="gemma2",
        norm="rms_gemma",
        norms_per_layer=4,
        act_key="hidden_activation",
        window=windows.alternating,
        softcap_key="attn_logit_softcapping",
        scaled_embeddings=True,
        scaled_logits=True,
    ),
    "gemma3_text": Family(
        program="gemma2",
        norm="rms_gemma",
        norms_per_layer=4,
        qk_norm="head",
        act_key="hidden_activation",
        window=windows.by_pattern,
        softcap_key="attn_logit_softcapping",
        scaled_embeddings=True,
    ),
    "phi3": Family(
        qkv_bias=False,
        out_bias=False,
        fused_qkv=True,
        fused_mlp=True,
        window=windows.every_layer,
        residual_dropout_key="resid_pdrop",
    ),
    "olmo": Family(norm="layer_unweighted", unknown_if=("clip_qkv",)),
    "olmo2": _OLMO2,
    "olmo3": Family(
        program="olmo2", norm="rms_fp32_weight", qk_norm="full", qk_norm_each=True, window=windows.three_of_four
    ),
    "olmoe": Family(qk_norm="full", qk_norm_each=True, experts=experts.olmoe, unknown_if=("clip_qkv",)),
    "mixtral": Family(qkv_bias=False, out_bias=False, window=windows.every_layer, experts=experts.mixtral),
    "qwen2_moe": Family(qkv_bias="qkv_bias", out_bias=False, window=windows.upper_layers, experts=experts.qwen2_moe),
    "qwen3_moe": Family(qk_norm="head", qk_norm_each=True, window=windows.if_used, experts=experts.qwen3_moe),
    "gpt_oss": Family(
        program="gpt_oss", norm="rms_fp32_weight", window=windows.alternating, sinks=True, experts=experts.gpt_oss
    ),
    "smollm3": Family(mlp_bias="mlp_bias", window=windows.without_rotary, rotary=windows.listed_rotary),
    "granite": Family(mlp_bias="mlp_bias", residual_scaled=True, scaled_embeddings=True, scaled_logits=True),
    "cohere": Family(
        program="parallel",
        norm="layer_cohere",
        norms_per_layer=1,
        qk_norm="per_head_weight",
        qk_norm_if="use_qk_norm",
        scaled_logits=True,
    ),
    "cohere2": Family(
        program="parallel",
        norm="layer_cohere",
        norms_per_layer=1,
        window=windows.by_pattern,
        rotary=windows.rotary_in_windows,
        scaled_logits=True,
    ),
    "phi": Family(
        program="parallel",
        norm="layer",
        norms_per_layer=1,
        qkv_bias=True,
        out_bias=True,
        out_name="dense",
        qk_norm="head",
        qk_norm_if="qk_layernorm",
        mlp_names=("fc1", "fc2"),
        mlp_bias=True,
        lm_head_bias=True,
        residual_dropout_key="resid_pdrop",
    ),
    "starcoder2": Family(
        norm="layer",
        qkv_bias="use_bias",
        out_bias="use_bias",
        mlp_names=("c_fc", "c_proj"),
        mlp_bias="use_bias",
        window=windows.every_layer,
        residual_dropout_key="residual_dropout",
    ),
    # stablelm-2-12b has no formulas: with `qk_layernorm` each head has a norm module of its own, and with
    # `use_parallel_residual` one norm feeds both blocks.
    "stablelm": Family(
        program="stablelm",
        norm="layer",
        qkv_bias="use_qkv_bias",
        out_bias=False,
        residual_dropout_key="hidden_dropout",
        unknown_if=("qk_layernorm", "use_parallel_residual"),
    ),
    "glm": _GLM,
    "glm4": Family(program="gemma2", norms_per_layer=4, out_bias=False, fused_mlp=True),
    "exaone4": Family(
        program="olmo2",
        qkv_bias=False,
        out_bias=False,
        qk_norm="head",
        window=windows.by_pattern,
        rotary=windows.rotary_unless_hybrid,
    ),
    "seed_oss": Family(out_bias="attention_out_bias", mlp_bias="mlp_bias", residual_dropout_key="residual_dropout"),
    "ernie4_5": Family(qkv_bias="use_bias", out_bias="use_bias", mlp_bias="use_bias"),
}


def layer_of(family: Family, fields: Fields, index: int) -> Layer:
    """Decoder layer `index` of a model of this family."""
    hidden_size = fields.positive("hidden_size")
    return Layer(
        program=family.program,
        hidden_size=hidden_size,
        attention=_attention(family, fields, index),
        feed_forward=_feed_forward(family, fields, index),
        norms=(norm(family.norm, hidden_size),) * family.norms_per_layer,
        residual_dropout=fields.number(family.residual_dropout_key) if family.residual_dropout_key else 0.0,
        residual_scaled=family.residual_scaled,
    )


def heads(fields: Fields) -> tuple[int, int, int]:
    """Number of query heads, number of key and value heads, features of a head."""
    query_heads = fields.positive("num_attention_heads")
    key_heads = fields.positive("num_key_value_heads") if fields.has("num_key_value_heads") else query_heads
    head_dim = fields.positive("head_dim") if fields.has("head_dim") else fields.positive("hidden_size") // query_heads
    return query_heads, key_heads, head_dim


def _bias(fields: Fields, rule: bool | str) -> bool:
    return fields.flag(rule) if isinstance(rule, str) else rule


def _attention(family: Family, fields: Fields, index: int) -> Attention:
    query_heads, key_heads, head_dim = heads(fields)
    with_norm = family.qk_norm != "none" and (not family.qk_norm_if or fields.flag(family.qk_norm_if))
    features = {
        "none": 0,
        "head": 2 * head_dim,
        "full": (query_heads + key_heads) * head_dim,
        "per_head_weight": (query_heads + key_heads) * head_dim,
    }
    return Attention(
        num_attention_heads=query_heads,
        num_key_value_heads=key_heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        linears=_projections(family, fields),
        qk_norm="none" if not with_norm else "full" if family.qk_norm == "full" else "head",
        qk_norm_kind=family.norm if with_norm else "none",
        qk_norm_params=PARAMS_PER_FEATURE[family.norm] * features[family.qk_norm] if with_norm else 0,
        sliding_window=windows.window(fields, family.window, index),
        rotary=family.rotary(fields, index),
        rotary_style=positions.rotary_style(fields),
        rotary_dim=positions.rotary_dim(fields, head_dim),
        qkv_layout="slices" if family.fused_qkv else "separate",
        qk_norm_each=family.qk_norm_each,
        softcap=bool(family.softcap_key) and fields.has(family.softcap_key),
        sink_params=query_heads if family.sinks else 0,
        dropout=fields.number("attention_dropout"),
    )


def _projections(family: Family, fields: Fields) -> tuple[Linear, ...]:
    hidden_size = fields.positive("hidden_size")
    query_heads, key_heads, head_dim = heads(fields)
    query, key = query_heads * head_dim, key_heads * head_dim
    bias = _bias(fields, family.qkv_bias)
    widths = (
        (("qkv_proj", query + 2 * key),) if family.fused_qkv else (("q_proj", query), ("k_proj", key), ("v_proj", key))
    )
    inward = tuple(Linear(name=name, in_features=hidden_size, out_features=width, bias=bias) for name, width in widths)
    return (
        *inward,
        Linear(name=family.out_name, in_features=query, out_features=hidden_size, bias=_bias(fields, family.out_bias)),
    )


def _feed_forward(family: Family, fields: Fields, index: int) -> Mlp | Experts:
    if family.experts is not None and experts.is_sparse(fields, index):
        return family.experts(fields, index)
    hidden_size, intermediate_size = fields.positive("hidden_size"), fields.positive("intermediate_size")
    act, bias = activation(fields, family.act_key), _bias(fields, family.mlp_bias)
    if family.mlp_names is not None:
        return plain_mlp(hidden_size, intermediate_size, act, names=family.mlp_names, bias=bias)
    return gated_mlp(hidden_size, intermediate_size, act, bias=bias, fused=family.fused_mlp)

"""The usual decoder layer: norm, attention, norm, MLP in some order; its differences are columns of `Architecture`.

Source: transformers 5.23, models/<folder>/modeling_<folder>.py, the classes `...Attention`, `...MLP`,
`...DecoderLayer` and `...RMSNorm`.
"""

from planner.errors import InputError, shortened
from planner.models.architectures import experts, windows
from planner.models.architectures.architecture import Architecture
from planner.models.architectures.fields import Fields
from planner.models.architectures.parts import PARAMS_PER_FEATURE, activation, gated_mlp, norm, plain_mlp
from planner.models.layers import Attention, Experts, Layer, Linear, Mlp


def usual_layer(row: Architecture, fields: Fields, index: int) -> Layer:
    """Decoder layer `index`: norm, attention, norm, MLP or experts in the order of the row's program."""
    hidden_size = fields.positive("hidden_size")
    return Layer(
        program=row.program,
        hidden_size=hidden_size,
        attention=_attention(row, fields, index),
        feed_forward=_feed_forward(row, fields, index),
        norms=(norm(row.norm, hidden_size),) * row.norms_per_layer,
        residual_dropout=fields.number(row.residual_dropout_key) if row.residual_dropout_key else 0.0,
        residual_scaled=row.residual_scaled,
    )


def heads(fields: Fields) -> tuple[int, int, int]:
    """Number of query heads, number of key and value heads, features of a head."""
    query_heads = fields.positive("num_attention_heads")
    key_heads = fields.positive("num_key_value_heads") if fields.has("num_key_value_heads") else query_heads
    head_dim = fields.positive("head_dim") if fields.has("head_dim") else fields.positive("hidden_size") // query_heads
    return query_heads, key_heads, head_dim


def _bias(fields: Fields, rule: bool | str) -> bool:
    return fields.flag(rule) if isinstance(rule, str) else rule


def _attention(row: Architecture, fields: Fields, index: int) -> Attention:
    query_heads, key_heads, head_dim = heads(fields)
    with_norm = row.qk_norm != "none" and (not row.qk_norm_if or fields.flag(row.qk_norm_if))
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
        linears=_projections(row, fields),
        qk_norm="none" if not with_norm else "full" if row.qk_norm == "full" else "head",
        qk_norm_kind=row.norm if with_norm else "none",
        qk_norm_params=PARAMS_PER_FEATURE[row.norm] * features[row.qk_norm] if with_norm else 0,
        sliding_window=windows.window(fields, row.window, index),
        rotary=row.rotary(fields, index),
        rotary_style=row.rotary_style,
        rotary_dim=rotary_dim(row, fields, head_dim),
        qkv_layout="slices" if row.fused_qkv else "separate",
        qk_norm_each=row.qk_norm_each,
        softcap=bool(row.softcap_key) and fields.has(row.softcap_key),
        sink_params=query_heads if row.sinks else 0,
        dropout=fields.number("attention_dropout"),
    )


def _projections(row: Architecture, fields: Fields) -> tuple[Linear, ...]:
    hidden_size = fields.positive("hidden_size")
    query_heads, key_heads, head_dim = heads(fields)
    query, key = query_heads * head_dim, key_heads * head_dim
    bias = _bias(fields, row.qkv_bias)
    widths = (
        (("qkv_proj", query + 2 * key),) if row.fused_qkv else (("q_proj", query), ("k_proj", key), ("v_proj", key))
    )
    inward = tuple(Linear(name=name, in_features=hidden_size, out_features=width, bias=bias) for name, width in widths)
    return (
        *inward,
        Linear(name=row.out_name, in_features=query, out_features=hidden_size, bias=_bias(fields, row.out_bias)),
    )


def _feed_forward(row: Architecture, fields: Fields, index: int) -> Mlp | Experts:
    if row.experts is not None and experts.is_sparse(fields, index):
        return row.experts(row, fields)
    hidden_size, intermediate_size = fields.positive("hidden_size"), fields.positive("intermediate_size")
    act, bias = activation(fields, row.act_key), _bias(fields, row.mlp_bias)
    if row.mlp_names is not None:
        return plain_mlp(hidden_size, intermediate_size, act, names=row.mlp_names, bias=bias)
    return gated_mlp(hidden_size, intermediate_size, act, bias=bias, fused=row.fused_mlp)


def rotary_dim(row: Architecture, fields: Fields, head_dim: int) -> int:
    """Features of a head that are rotated. Transformers 5 writes the share into `rope_parameters`.

    Raises:
        InputError: the share is not between 0 and 1.
    """
    parameters = fields.values.get("rope_parameters")
    stated = parameters.get("partial_rotary_factor") if isinstance(parameters, dict) else None
    for share in (stated, fields.values.get("partial_rotary_factor"), fields.values.get("rotary_pct")):
        if isinstance(share, (int, float)):
            if not 0 <= share <= 1:
                raise InputError(
                    f"The config.json of {fields.id} rotates {shortened(share)} of each head. Give a share from 0 to 1."
                )
            return int(head_dim * share)
    return int(head_dim * row.rotary_share)

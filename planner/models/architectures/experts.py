"""Experts behind a router, in transformers 5: 3-D parameters `gate_up_proj` [E, 2F, H] and `down_proj` [E, H, F].

E experts, hidden size H, width F of an expert. Source: transformers 5.23, models/<folder>/modeling_<folder>.py,
`...Experts`, `...TopKRouter`, `...SparseMoeBlock`. A bias that only corrects the routing (`e_score_correction_bias`) is
a buffer there, not a parameter.
"""

from planner.models.architectures.architecture import Architecture
from planner.models.architectures.fields import Fields
from planner.models.architectures.parts import activation, gated_mlp
from planner.models.layers import Experts, Mlp

PROJECTIONS = 3  # gate, up, down: hidden_size x moe_intermediate_size elements each


def is_sparse(fields: Fields, index: int) -> bool:
    """Return whether a layer has experts. In families other than qwen2_moe, qwen3_moe and glm4_moe every layer has.

    Source: modeling_qwen2_moe.py `Qwen2MoeDecoderLayer`, modeling_glm4_moe.py `Glm4MoeDecoderLayer`.
    """
    dense = fields.integer("first_k_dense_replace") if fields.has("first_k_dense_replace") else 0
    if index < dense or index in fields.sequence("mlp_only_layers"):
        return False
    return not fields.has("decoder_sparse_step") or (index + 1) % fields.positive("decoder_sparse_step") == 0


def routed_experts(
    row: Architecture,
    fields: Fields,
    *,
    count_key: str,
    intermediate_key: str,
    shared: Mlp | None = None,
    shared_gate_params: int = 0,
) -> Experts:
    """Experts and a router `hidden_size -> num_experts`, all without biases."""
    hidden_size, count, intermediate_size = (
        fields.positive("hidden_size"),
        fields.positive(count_key),
        fields.positive(intermediate_key),
    )
    return Experts(
        num_experts=count,
        num_experts_per_tok=fields.positive("num_experts_per_tok"),
        moe_intermediate_size=intermediate_size,
        activation=activation(fields, "hidden_act"),
        router_params=count * hidden_size,
        expert_params=count * PROJECTIONS * hidden_size * intermediate_size,
        shared=shared,
        shared_gate_params=shared_gate_params,
        router=row.router,
        router_normalised=row.router_normalised or fields.flag("norm_topk_prob"),
        router_groups=_groups(row, fields),
    )


def _groups(row: Architecture, fields: Fields) -> int:
    """Groups that experts are chosen from, 0 for none: deepseek_v3 always has them, v2 if `topk_method` says so."""
    grouped = row.router_grouped or fields.values.get("topk_method") == "group_limited_greedy"
    return fields.positive("n_group") if grouped and fields.has("n_group") else 0


def mixtral(row: Architecture, fields: Fields) -> Experts:
    return routed_experts(row, fields, count_key="num_local_experts", intermediate_key="intermediate_size")


def olmoe(row: Architecture, fields: Fields) -> Experts:
    return routed_experts(row, fields, count_key="num_experts", intermediate_key="intermediate_size")


def qwen3_moe(row: Architecture, fields: Fields) -> Experts:
    return routed_experts(row, fields, count_key="num_experts", intermediate_key="moe_intermediate_size")


def qwen2_moe(row: Architecture, fields: Fields) -> Experts:
    """Experts and a shared expert that every token passes, with a gate (`shared_expert_gate`, hidden_size -> 1)."""
    hidden_size = fields.positive("hidden_size")
    shared = gated_mlp(
        hidden_size, fields.positive("shared_expert_intermediate_size"), activation(fields, "hidden_act")
    )
    return routed_experts(
        row,
        fields,
        count_key="num_experts",
        intermediate_key="moe_intermediate_size",
        shared=shared,
        shared_gate_params=hidden_size,
    )


def deepseek(row: Architecture, fields: Fields) -> Experts:
    """Experts and a shared MLP that is `n_shared_experts` times as wide (modeling_deepseek_v3.py `DeepseekV3MoE`)."""
    width = fields.positive("moe_intermediate_size") * fields.positive("n_shared_experts")
    shared = gated_mlp(fields.positive("hidden_size"), width, activation(fields, "hidden_act"))
    return routed_experts(
        row, fields, count_key="n_routed_experts", intermediate_key="moe_intermediate_size", shared=shared
    )


def gpt_oss(row: Architecture, fields: Fields) -> Experts:
    """Experts with biases on the router and on both projections (modeling_gpt_oss.py `GptOssExperts`)."""
    hidden_size, intermediate_size, count = (
        fields.positive("hidden_size"),
        fields.positive("intermediate_size"),
        fields.positive("num_local_experts"),
    )
    return Experts(
        num_experts=count,
        num_experts_per_tok=fields.positive("num_experts_per_tok"),
        moe_intermediate_size=intermediate_size,
        activation="silu",  # gate * sigmoid(alpha * gate), clamped: SiLU's shape
        router_params=count * hidden_size + count,
        expert_params=count * (PROJECTIONS * hidden_size * intermediate_size + 2 * intermediate_size + hidden_size),
        router=row.router,
        clamped=True,
    )

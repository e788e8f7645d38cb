"""Rows of text models with experts whose layers have formulas."""

from msgspec.structs import replace

from planner.models.architectures import experts, special_layers, windows
from planner.models.architectures.architecture import MIXTRAL_NAMES, QWEN2_MOE_NAMES, SILU, Architecture
from planner.models.architectures.usual_layers import usual_layer

_DEEPSEEK_V3 = Architecture(
    layer=special_layers.deepseek,
    defaults={
        **SILU, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
        "v_head_dim": 128, "n_shared_experts": 1, "first_k_dense_replace": 3, "max_position_embeddings": 4096,
    },
    spellings={"n_routed_experts": "num_local_experts"},
    rotary_style="pairs",
    router="float32_sigmoid",
    router_grouped=True,
    converted_names=QWEN2_MOE_NAMES,
    saved_buffers=True,
    liger_blocks=frozenset({"norm", "mlp", "experts"}),
)  # fmt: skip

MIXTURES: dict[str, Architecture] = {
    "mixtral": Architecture(
        layer=usual_layer,
        defaults={**SILU, "num_key_value_heads": 8, "sliding_window": None, "max_position_embeddings": 131072},
        qkv_bias=False,
        out_bias=False,
        window=windows.every_layer,
        experts=experts.mixtral,
        gathered_block=True,
        router_normalised=True,
        converted_names=MIXTRAL_NAMES,
        liger_blocks=frozenset({"norm", "rotary", "experts"}),
    ),
    "olmoe": Architecture(
        layer=usual_layer,
        defaults={**SILU, "clip_qkv": None, "max_position_embeddings": 4096},
        unknown_if=("clip_qkv",),
        qk_norm="full",
        qk_norm_each=True,
        experts=experts.olmoe,
        router="softmax_cast",
        converted_names=QWEN2_MOE_NAMES,
        classifier=False,
    ),
    "qwen2_moe": Architecture(
        layer=usual_layer,
        defaults={
            **SILU, "num_key_value_heads": 16, "qkv_bias": True, "use_sliding_window": False, "sliding_window": 4096,
            "max_window_layers": 28, "decoder_sparse_step": 1, "mlp_only_layers": [], "num_experts": 60,
            "num_experts_per_tok": 4, "max_position_embeddings": 32768,
        },
        qkv_bias="qkv_bias",
        out_bias=False,
        window=windows.upper_layers,
        experts=experts.qwen2_moe,
        gathered_block=True,
        router="softmax_cast",
    ),
    "qwen3_moe": Architecture(
        layer=usual_layer,
        defaults={
            **SILU, "num_key_value_heads": 4, "use_sliding_window": False, "sliding_window": 4096,
            "decoder_sparse_step": 1, "mlp_only_layers": [], "num_experts": 128, "num_experts_per_tok": 8,
            "max_position_embeddings": 32768,
        },
        spellings={"num_experts": "num_local_experts"},
        qk_norm="head",
        qk_norm_each=True,
        window=windows.if_used,
        experts=experts.qwen3_moe,
        gathered_block=True,
        router="softmax_cast",
        converted_names=QWEN2_MOE_NAMES,
        overflows_float16=True,
        liger_blocks=frozenset({"norm", "query_norm", "rotary", "experts"}),
    ),
    "gpt_oss": Architecture(
        layer=usual_layer,
        program="gpt_oss",
        defaults={
            **SILU, "attention_bias": True, "head_dim": 64, "sliding_window": 128, "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
        },
        norm="rms_fp32_weight",
        window=windows.alternating,
        sinks=True,
        rotary_style="halves",
        experts=experts.gpt_oss,
        router="topk_softmax",
        router_name="router.weight",
        sdpa=False,
        overflows_float16=True,
        liger_blocks=frozenset({"norm", "rotary"}),
        float32_rotary=True,
    ),
    "deepseek_v2": replace(
        _DEEPSEEK_V3,
        defaults={
            **_DEEPSEEK_V3.defaults, "n_shared_experts": 2, "first_k_dense_replace": 0,
            "max_position_embeddings": 2048,
        },
        spellings={"n_routed_experts": "num_experts"},
        rotary_style="complex",
        router="float32_softmax",
        router_grouped=False,
        saved_buffers=False,
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "glm4_moe": Architecture(
        layer=usual_layer,
        defaults={
            **SILU, "num_key_value_heads": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "use_qk_norm": False,
            "max_position_embeddings": 131072,
        },
        spellings={"n_routed_experts": "num_local_experts"},
        out_bias=False,
        qk_norm="head",
        qk_norm_if="use_qk_norm",
        rotary_style="partial",
        rotary_share=0.5,
        experts=experts.deepseek,
        router="float32_sigmoid",
        router_grouped=True,
        converted_names=QWEN2_MOE_NAMES,
        classifier=False,
        saved_buffers=True,
        overflows_float16=True,
        float32_router=True,
    ),
}  # fmt: skip

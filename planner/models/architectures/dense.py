"""Rows of dense text models of llama's kind: root-mean-square norms, rotary positions and a gated MLP in most."""

from msgspec.structs import replace

from planner.models.architectures import windows
from planner.models.architectures.architecture import LIGER_ALL, LIGER_USUAL, QUERY_VALUE, SILU, Architecture
from planner.models.architectures.usual_layers import usual_layer

_GEMMA_DEFAULTS: dict[str, object] = {
    "tie_word_embeddings": True,
    "attention_bias": False,
    "head_dim": 256,
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
}
_GEMMA2_DEFAULTS = {
    **_GEMMA_DEFAULTS,
    "hidden_activation": "gelu_pytorch_tanh",
    "num_key_value_heads": 4,
    "sliding_window": 4096,
}
_QWEN_DEFAULTS = {
    **SILU,
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "max_position_embeddings": 32768,
}

LLAMA = Architecture(
    layer=usual_layer,
    divides_layers=True,
    defaults={**SILU, "vocab_size": 32000, "max_position_embeddings": 2048},
    mlp_bias="mlp_bias",
    lora_targets=QUERY_VALUE,
    liger_blocks=LIGER_USUAL,
    wrapped_as_text=("LlamaDecoderLayer",),
)
_QWEN2 = Architecture(
    layer=usual_layer,
    divides_layers=True,
    defaults=_QWEN_DEFAULTS,
    qkv_bias=True,
    out_bias=False,
    window=windows.upper_layers,
    lora_targets=QUERY_VALUE,
    liger_blocks=LIGER_USUAL,
    wrapped_as_text=("Qwen2DecoderLayer",),
)
_GEMMA = Architecture(
    layer=usual_layer,
    divides_layers=True,
    defaults={**_GEMMA_DEFAULTS, "num_key_value_heads": 16, "hidden_act": "gelu_pytorch_tanh"},
    norm="rms_gemma",
    scaled_embeddings=True,
    lora_targets=QUERY_VALUE,
    liger_blocks=LIGER_USUAL,
    wrapped_as_text=("GemmaDecoderLayer",),
)
_GEMMA2 = replace(
    _GEMMA,
    program="gemma2",
    defaults={**_GEMMA2_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    norms_per_layer=4,
    act_key="hidden_activation",
    window=windows.alternating,
    softcap_key="attn_logit_softcapping",
    scaled_logits=True,
    sdpa=False,
    wrapped_as_text=("Gemma2DecoderLayer",),
)
_OLMO2 = Architecture(
    layer=usual_layer,
    program="olmo2",
    defaults={**SILU, "max_position_embeddings": 2048},
    norm="rms_fp32_weight",
    qk_norm="full",
    qk_norm_each=True,
    rotary_style="half_cast_back",
    liger_blocks=LIGER_USUAL,  # norms of queries and keys stay
    refuses_lora_kernels=True,
)
_COHERE2 = Architecture(
    layer=usual_layer,
    divides_layers=True,
    program="parallel",
    defaults={
        "hidden_act": "silu", "tie_word_embeddings": True, "attention_bias": False, "sliding_window": 4096,
        "sliding_window_pattern": 4, "max_position_embeddings": 8192,
    },
    norm="layer_cohere",
    norms_per_layer=1,
    window=windows.by_pattern,
    rotary=windows.rotary_in_windows,
    rotary_style="float32",
    scaled_logits=True,
    classifier=False,
)  # fmt: skip
_GLM = Architecture(
    layer=usual_layer,
    defaults={
        **SILU, "num_key_value_heads": 2, "attention_bias": True, "head_dim": 128, "max_position_embeddings": 131072,
    },
    out_bias=False,
    fused_mlp=True,
    rotary_style="partial_interleaved",
    rotary_share=0.5,
)  # fmt: skip

DENSE: dict[str, Architecture] = {
    "llama": replace(LLAMA, second_runner_since="0.23"),
    "qwen2": _QWEN2,
    "qwen3": Architecture(
        layer=usual_layer,
        divides_layers=True,
        defaults={**_QWEN_DEFAULTS, "head_dim": 128},
        qk_norm="head",
        qk_norm_each=True,
        window=windows.upper_layers,
        lora_targets=QUERY_VALUE,
        liger_blocks=LIGER_ALL,
        second_runner_since="0.22",
    ),
    "mistral": Architecture(
        layer=usual_layer,
        second_runner_since="0.23",
        divides_layers=True,
        defaults={
            **SILU, "num_key_value_heads": 8, "sliding_window": 4096, "vocab_size": 32000,
            "max_position_embeddings": 131072,
        },
        qkv_bias=False,
        out_bias=False,
        window=windows.every_layer,
        lora_targets=QUERY_VALUE,
        liger_blocks=LIGER_USUAL,
        wrapped_as_text=("MistralDecoderLayer",),
    ),
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    # The Hub's gemma-3-4b-it writes only what differs from these (configuration_gemma3.py, `Gemma3TextConfig`).
    "gemma3_text": replace(
        _GEMMA2,
        defaults={
            **_GEMMA2_DEFAULTS, "vocab_size": 262208, "num_attention_heads": 8, "sliding_window_pattern": 6,
            "max_position_embeddings": 131072,
        },
        qk_norm="head",
        window=windows.by_pattern,
        scaled_logits=False,
        sdpa=True,
        overflows_float16=True,
        liger_blocks=LIGER_ALL,
        liger_refuses_classifier=True,
        local_rotary=True,
        wrapped_as_text=("Gemma3DecoderLayer",),
    ),
    "phi3": Architecture(
        layer=usual_layer,
        defaults={
            **SILU, "sliding_window": None, "vocab_size": 32064, "max_position_embeddings": 4096, "resid_pdrop": 0.0,
        },
        qkv_bias=False,
        out_bias=False,
        fused_qkv=True,
        fused_mlp=True,
        window=windows.every_layer,
        residual_dropout_key="resid_pdrop",
        rotary_style="partial_summed",
        liger_blocks=LIGER_USUAL,
        refuses_lora_kernels=True,
    ),
    "olmo": Architecture(
        layer=usual_layer,
        divides_layers=True,
        defaults={**SILU, "clip_qkv": None, "max_position_embeddings": 2048},
        unknown_if=("clip_qkv",),
        norm="layer_unweighted",
        rotary_style="half_cast_back",
        refuses_lora_kernels=True,
    ),
    "olmo2": _OLMO2,
    "olmo3": replace(_OLMO2, defaults={**_OLMO2.defaults, "sliding_window": 4096}, window=windows.three_of_four),
    "smollm3": Architecture(
        layer=usual_layer,
        divides_layers=True,
        defaults={
            **SILU, "tie_word_embeddings": True, "no_rope_layer_interval": 4, "use_sliding_window": False,
            "sliding_window": None, "num_key_value_heads": 4, "max_position_embeddings": 32768,
        },
        mlp_bias="mlp_bias",
        window=windows.without_rotary,
        rotary=windows.listed_rotary,
        liger_blocks=LIGER_USUAL,
    ),
    "granite": Architecture(
        layer=usual_layer,
        divides_layers=True,
        defaults={**SILU, "max_position_embeddings": 2048},
        mlp_bias="mlp_bias",
        residual_scaled=True,
        scaled_embeddings=True,
        scales_outside=True,
        scaled_logits=True,
        classifier=False,
        liger_blocks=LIGER_USUAL,
        liger_cross_entropy=True,
    ),
    "cohere": replace(
        _COHERE2,
        divides_layers=False,  # its norms of queries and keys have weights of all heads, which stay whole
        defaults={
            "hidden_act": "silu", "tie_word_embeddings": True, "attention_bias": False, "use_qk_norm": False,
            "max_position_embeddings": 8192,
        },
        qk_norm="per_head_weight",
        refuses_lora_kernels=True,
        qk_norm_if="use_qk_norm",
        window=windows.no_window,
        rotary=windows.all_rotary,
    ),
    "cohere2": _COHERE2,
    "glm": _GLM,
    "glm4": replace(_GLM, program="gemma2", norms_per_layer=4, liger_blocks=frozenset({"norm", "mlp"})),
    # `LlamaForCausalLM` under other names. Source: transformers 5.24, models/exaone/configuration_exaone.py,
    # models/auto/modeling_auto.py.
    "exaone": replace(
        LLAMA,
        divides_layers=False,  # has a plan from Transformers 5.24 on
        defaults={**LLAMA.defaults, "num_key_value_heads": 8, "vocab_size": 102400, "max_position_embeddings": 4096},
        spellings={"num_hidden_layers": "num_layers", "hidden_act": "activation_function"},
        classifier=False,
        lora_targets=(),
        liger_blocks=frozenset(),
    ),
    "exaone4": Architecture(
        layer=usual_layer,
        divides_layers=True,
        program="olmo2",
        defaults={
            **SILU, "num_key_value_heads": 32, "sliding_window": 4096, "sliding_window_pattern": 4,
            "max_position_embeddings": 2048,
        },
        qkv_bias=False,
        out_bias=False,
        qk_norm="head",
        window=windows.by_pattern,
        rotary=windows.rotary_unless_hybrid,
        liger_blocks=LIGER_ALL,
    ),
    "seed_oss": Architecture(
        layer=usual_layer,
        divides_layers=True,
        defaults={
            **SILU, "num_key_value_heads": 8, "attention_bias": True, "attention_out_bias": False, "head_dim": 128,
            "max_position_embeddings": 524288, "attention_dropout": 0.1, "residual_dropout": 0.1,
        },
        out_bias="attention_out_bias",
        mlp_bias="mlp_bias",
        residual_dropout_key="residual_dropout",
        functional_dropout=True,
    ),
    "ernie4_5": Architecture(
        layer=usual_layer,
        divides_layers=True,
        defaults={
            "num_key_value_heads": 2, "hidden_act": "silu", "tie_word_embeddings": True, "use_bias": False,
            "head_dim": 128, "max_position_embeddings": 131072,
        },
        qkv_bias="use_bias",
        out_bias="use_bias",
        mlp_bias="use_bias",
        rotary_style="float32_interleaved",
        classifier=False,
    ),
}  # fmt: skip

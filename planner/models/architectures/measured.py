"""Rows of text models whose layers are measured. A type without a row is `Architecture()`: the usual in everything."""

from msgspec.structs import replace

from planner.models.architectures.architecture import (
    LIGER_NO_ROTARY,
    MIXTRAL_NAMES,
    QUERY_VALUE,
    QWEN2_MOE_NAMES,
    Architecture,
)
from planner.models.architectures.states import (
    GATED_DELTA_CHUNK,
    gated_delta_net,
    granite_mamba,
    nemotron_mamba,
    short_convolution,
)

_CONVERTED = Architecture(converted_names=QWEN2_MOE_NAMES)
_DEEPSEEK_V32 = replace(_CONVERTED, classifier=False, flash_attention=False, saved_buffers=True)
_INPUT_LINEAR = Architecture(expert_names="other")
_DELTA = Architecture(chunk=GATED_DELTA_CHUNK)
_EAGER = Architecture(sdpa=False, flash_attention=False)
_GPT_NEO = Architecture(table_of_positions=True, embedding_name="wte", sdpa=False, lora_targets=QUERY_VALUE)
_LFM2 = Architecture(state=short_convolution, mixer_kernels=("causal-conv1d",), classifier=False)

MEASURED: dict[str, Architecture] = {
    "afmoe": _CONVERTED,
    "apertus": Architecture(classifier=False, saved_buffers=True),
    **dict.fromkeys(("bailing_hybrid", "glm5_next_text", "kimi_linear", "olmo_hybrid"), _DELTA),
    "bamba": Architecture(chunk="mamba_chunk_size"),
    "bloom": replace(_EAGER, embedding_name="word_embeddings", lora_targets=("query_key_value",)),
    "chatglm": Architecture(lora_targets=("query_key_value",)),
    "codegen": replace(_EAGER, table_of_positions=True, lora_targets=("qkv_proj",)),
    "cohere2_moe": _CONVERTED,
    "dbrx": _INPUT_LINEAR,
    "deepseek_v32": _DEEPSEEK_V32,
    "deepseek_v4": Architecture(
        stops_at_router_loss=True,
        classifier=False,
        sdpa=False,
        flash_attention=False,
        saved_buffers=True,
        liger_blocks=frozenset({"norm"}),
    ),
    "dots1": _CONVERTED,
    "ernie4_5_moe": replace(_CONVERTED, classifier=False),
    "exaone_moe": _CONVERTED,
    "falcon_h1": Architecture(stops_all_linear="out_proj", chunk="mamba_chunk_size"),
    "flex_olmo": _CONVERTED,
    "glm4_moe_lite": _CONVERTED,
    "glm_moe_dsa": _DEEPSEEK_V32,
    "gpt_bigcode": Architecture(table_of_positions=True, lora_targets=("c_attn",)),
    "gpt_neo": _GPT_NEO,
    "gptj": _GPT_NEO,
    "granitemoe": replace(_INPUT_LINEAR, second_runner_since="0.24"),
    "granitemoehybrid": replace(
        _INPUT_LINEAR,
        state=granite_mamba,
        mixer_kernels=("mamba-ssm", "causal-conv1d"),
        chunk="mamba_chunk_size",
        stops_at_router_loss=True,
        classifier=False,
    ),
    "granitemoeshared": _INPUT_LINEAR,
    "hunyuan_v1_moe": _CONVERTED,
    "jamba": _INPUT_LINEAR,
    "lfm2": _LFM2,
    "lfm2_moe": replace(_LFM2, expert_block="feed_forward", saved_buffers=True),
    "longcat_flash": _CONVERTED,
    "minimax": Architecture(converted_names=MIXTRAL_NAMES),
    "minimax_m2": Architecture(converted_names=MIXTRAL_NAMES, classifier=False, saved_buffers=True),
    "mpt": replace(_EAGER, lora_targets=("Wqkv",)),
    "nemotron_h": Architecture(
        embedding_name="embeddings",
        expert_block="mixer",
        expert_names="ungated",
        state=nemotron_mamba,
        mixer_kernels=("mamba-ssm", "causal-conv1d"),
        chunk="chunk_size",
        classifier=False,
        saved_buffers="n_routed_experts",
        lora_targets=("q_proj", "k_proj", "v_proj", "o_proj"),
        stops_all_linear="out_proj",
    ),
    "phimoe": Architecture(router_name="router.weight", stops_at_router_loss=True, stops_all_linear="router"),
    "qwen3_next": replace(
        _CONVERTED,
        rotary_share=0.25,
        state=gated_delta_net,
        mixer_kernels=("flash-linear-attention", "causal-conv1d"),
        liger_blocks=LIGER_NO_ROTARY | {"experts"},
        liger_refuses_classifier=True,
    ),
    "qwen3_omni_moe": _CONVERTED,
    "solar_open": _CONVERTED,
    **dict.fromkeys(("mamba2", "xlstm"), replace(_EAGER, chunk="chunk_size")),
    "zamba2": Architecture(chunk="chunk_size"),
    # Types of which only what their classes say of sdpa and FlashAttention is known here.
    **dict.fromkeys(
        (
            "big_bird", "bigbird_pegasus", "blip", "cpmant", "falcon_mamba", "git", "got_ocr2",
            "gpt_neox_japanese", "hy_v4", "inkling2", "inkling2_text", "mamba", "megatron-bert",
            "mvp", "openai-gpt", "pp_chart2table", "prophetnet", "reformer", "rembert", "roformer", "rwkv",
            "trocr", "xglm", "xlm", "xlnet",
        ),
        _EAGER,
    ),
    **dict.fromkeys(
        ("flint", "granite_swa", "granitemoe_swa", "mimo_v2_flash", "vaultgemma"),
        Architecture(sdpa=False),
    ),
    **dict.fromkeys(
        (
            "axk2", "blip-2", "blt", "deepseek_ocr2", "doge", "dots3_note", "dots3_note_text", "evolla",
            "idefics", "inkling_mm_model", "inkling_text", "kosmos-2", "llama4_text",
            "minimax_m3_vl", "minimax_m3_vl_text", "mistral_large4", "pix2struct", "pp_formulanet",
            "step3p7", "t5gemma2", "udop", "unlimited_ocr",
        ),
        Architecture(flash_attention=False),
    ),
    **dict.fromkeys(
        ("glm5_next", "qwen4_exp", "qwen4_exp_text"),
        replace(_DELTA, flash_attention=False),
    ),
}  # fmt: skip

"""Rows of dense text models with LayerNorms and a plain MLP of two projections."""

from planner.models.architectures import special_layers, windows
from planner.models.architectures.architecture import QUERY_VALUE, Architecture
from planner.models.architectures.usual_layers import usual_layer

PLAIN: dict[str, Architecture] = {
    "gpt2": Architecture(
        layer=special_layers.gpt2,
        defaults={
            "tie_word_embeddings": True, "n_inner": None, "activation_function": "gelu_new", "n_positions": 1024,
            "vocab_size": 50257, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1,
        },
        spellings={
            "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
        },
        act_key="activation_function",
        embed_dropout_key="embd_pdrop",
        norm="layer",
        position_offset=0,
        table_of_positions=True,
        embedding_name="wte",
        lora_targets=("c_attn",),
    ),
    "gpt_neox": Architecture(
        layer=special_layers.gpt_neox,
        defaults={
            "tie_word_embeddings": False, "hidden_act": "gelu", "attention_bias": True, "use_parallel_residual": True,
            "max_position_embeddings": 2048,
        },
        embed_dropout_key="hidden_dropout",
        norm="layer",
        rotary_style="partial",
        rotary_share=0.25,
        embedding_name="embed_in",
        uncast_parts=("embedding",),
        lora_targets=("query_key_value",),
    ),
    "opt": Architecture(
        layer=special_layers.opt,
        defaults={
            "tie_word_embeddings": True, "activation_function": "relu", "do_layer_norm_before": True,
            "enable_bias": True, "layer_norm_elementwise_affine": True, "_remove_final_layer_norm": False,
            "max_position_embeddings": 2048, "dropout": 0.1, "attention_dropout": 0.0,
        },
        act_key="activation_function",
        final_norm=special_layers.opt_final_norm,
        functional_dropout=True,
        position_offset=2,  # modeling_opt.py `OPTLearnedPositionalEmbedding`
        table_of_positions=True,
        uncast_parts=("position",),  # embed_positions
        lora_targets=QUERY_VALUE,
    ),
    "falcon": Architecture(
        layer=special_layers.falcon,
        defaults={
            "tie_word_embeddings": True, "activation": "gelu", "bias": False, "alibi": False, "multi_query": True,
            "new_decoder_architecture": False, "parallel_attn": True, "max_position_embeddings": 2048,
        },
        act_key="activation",
        norm="layer",
        subclassed_linears=True,  # `FalconLinear`
        embedding_name="word_embeddings",
        lora_targets=("query_key_value",),
    ),
    "phi": Architecture(
        layer=usual_layer,
        program="parallel",
        defaults={
            "hidden_act": "gelu_new", "tie_word_embeddings": False, "qk_layernorm": False,
            "max_position_embeddings": 2048, "resid_pdrop": 0.0,
        },
        norm="layer",
        norms_per_layer=1,
        refuses_lora_kernels=True,
        qkv_bias=True,
        out_bias=True,
        out_name="dense",
        qk_norm="head",
        qk_norm_if="qk_layernorm",
        mlp_names=("fc1", "fc2"),
        mlp_bias=True,
        lm_head_bias=True,
        residual_dropout_key="resid_pdrop",
        embed_dropout_key="embd_pdrop",
        rotary_style="partial_kept",
        rotary_share=0.5,
        lora_targets=("q_proj", "v_proj", "fc1", "fc2"),
    ),
    "starcoder2": Architecture(
        layer=usual_layer,
        defaults={
            "num_key_value_heads": 2, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True,
            "use_bias": True, "sliding_window": None, "max_position_embeddings": 4096, "residual_dropout": 0.0,
            "embedding_dropout": 0.0,
        },
        norm="layer",
        qkv_bias="use_bias",
        out_bias="use_bias",
        mlp_names=("c_fc", "c_proj"),
        mlp_bias="use_bias",
        window=windows.every_layer,
        residual_dropout_key="residual_dropout",
        embed_dropout_key="embedding_dropout",
    ),
    # stablelm-2-12b has no formulas: with `qk_layernorm` each head has a norm module of its own, and with
    # `use_parallel_residual` one norm feeds both blocks.
    "stablelm": Architecture(
        layer=usual_layer,
        program="stablelm",
        defaults={
            "num_key_value_heads": 32, "hidden_act": "silu", "tie_word_embeddings": False, "use_qkv_bias": False,
            "qk_layernorm": False, "use_parallel_residual": False, "max_position_embeddings": 4096,
        },
        unknown_if=("qk_layernorm", "use_parallel_residual"),
        norm="layer",
        refuses_lora_kernels=True,
        qkv_bias="use_qkv_bias",
        out_bias=False,
        residual_dropout_key="hidden_dropout",
        rotary_style="partial_kept",
        rotary_share=0.25,
        lora_targets=QUERY_VALUE,
    ),
}  # fmt: skip

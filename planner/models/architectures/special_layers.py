"""Decoder layers that the columns of `Architecture` do not describe: gpt2, gpt_neox, opt, falcon, deepseek v2 and v3.

Source: transformers 5.23, models/<folder>/modeling_<folder>.py, named at each function.
"""

from msgspec.structs import replace

from planner.models.architectures import experts
from planner.models.architectures.architecture import Architecture
from planner.models.architectures.fields import Fields
from planner.models.architectures.parts import activation, gated_mlp, norm, plain_mlp
from planner.models.architectures.usual_layers import heads, rotary_dim
from planner.models.layers import Attention, Layer, LayerProgram, Linear, Norm, QkvLayout


def gpt2(row: Architecture, fields: Fields, index: int) -> Layer:
    """`GPT2Block`: Conv1D projections, all with biases (modeling_gpt2.py)."""
    hidden_size = fields.positive("n_embd")
    query_heads = fields.positive("n_head")
    inner = fields.positive("n_inner") if fields.has("n_inner") else 4 * hidden_size
    return Layer(
        program="gpt2",
        hidden_size=hidden_size,
        attention=replace(
            _fused(hidden_size, query_heads, query_heads, names=("c_attn", "c_proj"), bias=True),
            rotary=False,
            qkv_layout="split",
            softmax_float32=False,
            dropout=fields.number("attn_pdrop"),
        ),
        feed_forward=plain_mlp(
            hidden_size, inner, activation(fields, row.act_key), names=("c_fc", "c_proj"), bias=True
        ),
        norms=(norm("layer", hidden_size),) * 2,
        residual_dropout=fields.number("resid_pdrop"),
    )


def gpt_neox(row: Architecture, fields: Fields, index: int) -> Layer:
    """`GPTNeoXLayer`: one norm of the input for each block; blocks in sequence without `use_parallel_residual`."""
    hidden_size, query_heads = fields.positive("hidden_size"), fields.positive("num_attention_heads")
    bias = fields.flag("attention_bias")
    act = activation(fields, "hidden_act")
    return Layer(
        program="parallel" if fields.flag("use_parallel_residual") else "llama",
        hidden_size=hidden_size,
        attention=replace(
            _fused(hidden_size, query_heads, query_heads, names=("query_key_value", "dense"), bias=bias),
            rotary_style=row.rotary_style,
            rotary_dim=rotary_dim(row, fields, hidden_size // query_heads),
            qkv_layout="heads_chunked",
            dropout=fields.number("attention_dropout"),
        ),
        feed_forward=plain_mlp(
            hidden_size, fields.positive("intermediate_size"), act, names=("dense_h_to_4h", "dense_4h_to_h"), bias=True
        ),
        norms=(norm("layer", hidden_size),) * 2,
        residual_dropout=fields.number("hidden_dropout"),
    )


def opt(row: Architecture, fields: Fields, index: int) -> Layer:
    """`OPTDecoderLayer`: norms before the blocks, or after them (`do_layer_norm_before` false, opt-350m)."""
    hidden_size = fields.positive("hidden_size")
    query_heads, key_heads, head_dim = heads(fields)
    bias = fields.flag("enable_bias")
    names = ("q_proj", "k_proj", "v_proj", "out_proj")
    kind = opt_norm(fields)
    return Layer(
        program="opt" if fields.flag("do_layer_norm_before") else "opt_post_norm",
        hidden_size=hidden_size,
        attention=Attention(
            num_attention_heads=query_heads,
            num_key_value_heads=key_heads,
            head_dim=head_dim,
            v_head_dim=head_dim,
            linears=tuple(
                Linear(name=name, in_features=hidden_size, out_features=hidden_size, bias=bias) for name in names
            ),
            rotary=False,
            query_scaled=True,
            dropout=fields.number("attention_dropout"),
        ),
        feed_forward=plain_mlp(
            hidden_size,
            fields.positive("ffn_dim"),
            activation(fields, row.act_key),
            names=("fc1", "fc2"),
            bias=bias,
        ),
        norms=(kind,) * 2,
        residual_dropout=fields.number("dropout"),
    )


def opt_final_norm(fields: Fields) -> Norm:
    """The norm before the head; none in opt-350m, whose layers end in a norm (modeling_opt.py `OPTDecoder`)."""
    present = fields.flag("do_layer_norm_before") and not fields.flag("_remove_final_layer_norm")
    return opt_norm(fields) if present else norm("none", 0)


def opt_norm(fields: Fields) -> Norm:
    hidden_size = fields.positive("hidden_size")
    return (
        norm("layer", hidden_size)
        if fields.flag("layer_norm_elementwise_affine")
        else Norm(kind="layer", features=hidden_size, params=0)
    )


def falcon(row: Architecture, fields: Fields, index: int) -> Layer:
    """`FalconDecoderLayer`: one norm for both blocks (7B) or one each; in sequence without `parallel_attn`."""
    hidden_size = fields.positive("hidden_size")
    query_heads = fields.positive("num_attention_heads")
    in_parallel = fields.flag("new_decoder_architecture") or fields.flag("parallel_attn")
    program: LayerProgram = "parallel" if in_parallel else "llama"
    inner = fields.positive("ffn_hidden_size") if fields.has("ffn_hidden_size") else 4 * hidden_size
    bias = fields.flag("bias")
    return Layer(
        program=program,
        hidden_size=hidden_size,
        attention=replace(
            _fused(hidden_size, query_heads, _falcon_key_heads(fields), names=("query_key_value", "dense"), bias=bias),
            rotary=not fields.flag("alibi"),
            qkv_layout=_falcon_layout(fields),
            softmax_float32=False,
            dropout=fields.number("attention_dropout"),
        ),
        feed_forward=plain_mlp(
            hidden_size, inner, activation(fields, row.act_key), names=("dense_h_to_4h", "dense_4h_to_h"), bias=bias
        ),
        norms=(norm("layer", hidden_size),) * _falcon_norms(fields),
        residual_dropout=fields.number("hidden_dropout"),
    )


def _falcon_key_heads(fields: Fields) -> int:
    """Key heads (`FalconAttention.__init__`): one for multi-query attention, except in the new architecture."""
    if fields.flag("multi_query") and not fields.flag("new_decoder_architecture"):
        return 1
    return fields.positive("num_kv_heads") if fields.has("num_kv_heads") else fields.positive("num_attention_heads")


def _falcon_layout(fields: Fields) -> QkvLayout:
    """Layout of the fused projection (`FalconAttention._split_heads`)."""
    if fields.flag("new_decoder_architecture"):
        return "grouped_repeated"
    return "multi_query" if fields.flag("multi_query") else "heads_selected"


def _falcon_norms(fields: Fields) -> int:
    """Norms of a layer (`FalconDecoderLayer.__init__`): `num_ln_in_parallel_attn`, 2 in the new architecture."""
    if not fields.flag("parallel_attn"):
        return 2
    if fields.has("num_ln_in_parallel_attn"):
        return 2 if fields.integer("num_ln_in_parallel_attn") == 2 else 1
    return 2 if fields.flag("new_decoder_architecture") else 1


def _fused(hidden_size: int, query_heads: int, key_heads: int, *, names: tuple[str, str], bias: bool) -> Attention:
    """Attention with one projection for query, key and value."""
    head_dim = hidden_size // query_heads
    width = (query_heads + 2 * key_heads) * head_dim
    return Attention(
        num_attention_heads=query_heads,
        num_key_value_heads=key_heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        linears=(
            Linear(name=names[0], in_features=hidden_size, out_features=width, bias=bias),
            Linear(name=names[1], in_features=query_heads * head_dim, out_features=hidden_size, bias=bias),
        ),
    )


def deepseek(row: Architecture, fields: Fields, index: int) -> Layer:
    """`DeepseekV3DecoderLayer`: multi-head latent attention; the first `first_k_dense_replace` layers have a dense MLP.

    `norms`: before attention, before the MLP, then the norms inside attention (`q_a_layernorm` with `q_lora_rank`, and
    `kv_a_layernorm`).
    """
    hidden_size = fields.positive("hidden_size")
    dense = _is_dense(fields, index)
    attention = _latent_attention(row, fields, index)
    index_norm = (norm("layer", attention.index_head_dim),) if attention.index_heads else ()
    latents = ([fields.positive("q_lora_rank")] if fields.has("q_lora_rank") else []) + [
        fields.positive("kv_lora_rank")
    ]
    act = activation(fields, "hidden_act")
    return Layer(
        program="mla",
        hidden_size=hidden_size,
        attention=attention,
        feed_forward=gated_mlp(hidden_size, fields.positive("intermediate_size"), act)
        if dense
        else experts.deepseek(row, fields),
        norms=(
            norm("rms", hidden_size),
            norm("rms", hidden_size),
            *(norm("rms", latent) for latent in latents),
            *index_norm,
        ),
    )


def _is_dense(fields: Fields, index: int) -> bool:
    """Return whether a layer has a dense MLP: by `mlp_layer_types` (glm_moe_dsa), or one of the first layers."""
    if fields.has("mlp_layer_types"):
        return fields.sequence("mlp_layer_types")[index] == "dense"
    return index < fields.integer("first_k_dense_replace")


def _has_indexer(fields: Fields, index: int) -> bool:
    """Return whether a layer of sparse attention has an indexer; a layer without takes the tokens of the one before.

    Source: modeling_glm_moe_dsa.py, `GlmMoeDsaAttention.__init__` (`skip_topk`); configuration_glm_moe_dsa.py,
    `GlmMoeDsaConfig.__post_init__`.
    """
    if fields.has("indexer_types"):
        return fields.sequence("indexer_types")[index] == "full"
    if fields.has("index_topk_pattern"):
        return fields.sequence("index_topk_pattern")[index] in ("F", "full")
    offset = fields.integer("index_skip_topk_offset") if fields.has("index_skip_topk_offset") else 2
    every = fields.integer("index_topk_freq") if fields.has("index_topk_freq") else 1
    return max(index - offset + 1, 0) % max(every, 1) == 0


def _indexer(fields: Fields) -> tuple[Linear, ...]:
    """Return the projections of `DeepseekV32Indexer` (modeling_deepseek_v32.py): queries, one key, weights of heads.

    They run under `no_grad`. Leaves out that `weights_proj` is kept in float32 (`_keep_in_fp32_modules`).
    """
    hidden_size, count = fields.positive("hidden_size"), fields.positive("index_n_heads")
    width, rank = fields.positive("index_head_dim"), fields.positive("q_lora_rank")
    return (
        Linear(name="wq_b", in_features=rank, out_features=count * width, learns=False),
        Linear(name="wk", in_features=hidden_size, out_features=width, learns=False),
        Linear(name="weights_proj", in_features=hidden_size, out_features=count, learns=False),
    )


def _latent_attention(row: Architecture, fields: Fields, index: int) -> Attention:
    """`DeepseekV3Attention.__init__` (modeling_deepseek_v3.py); `GlmMoeDsaIndexer.__init__` (modeling_glm_moe_dsa.py).

    An engine caches kv_lora_rank + qk_rope_head_dim elements for each token.
    """
    hidden_size, query_heads, latent = (
        fields.positive("hidden_size"),
        fields.positive("num_attention_heads"),
        fields.positive("kv_lora_rank"),
    )
    rope, v_head_dim = fields.positive("qk_rope_head_dim"), fields.positive("v_head_dim")
    nope = fields.positive("qk_nope_head_dim")
    head_dim, bias = nope + rope, fields.flag("attention_bias")
    query: tuple[Linear, ...] = (Linear(name="q_proj", in_features=hidden_size, out_features=query_heads * head_dim),)
    if fields.has("q_lora_rank"):
        rank = fields.positive("q_lora_rank")
        query = (
            Linear(name="q_a_proj", in_features=hidden_size, out_features=rank, bias=bias),
            Linear(name="q_b_proj", in_features=rank, out_features=query_heads * head_dim),
        )
    topk = fields.positive("index_topk") if fields.has("index_topk") else 0
    indexer = _indexer(fields) if topk and _has_indexer(fields, index) else ()
    return Attention(
        num_attention_heads=query_heads,
        num_key_value_heads=query_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        linears=(
            *query,
            Linear(name="kv_a_proj_with_mqa", in_features=hidden_size, out_features=latent + rope, bias=bias),
            Linear(name="kv_b_proj", in_features=latent, out_features=query_heads * (nope + v_head_dim)),
            Linear(name="o_proj", in_features=query_heads * v_head_dim, out_features=hidden_size, bias=bias),
            *indexer,
        ),
        rotary_style=row.rotary_style,
        rotary_dim=rope,
        kv_latent_dim=latent + rope,
        index_heads=fields.positive("index_n_heads") if indexer else 0,
        index_head_dim=fields.positive("index_head_dim") if indexer else 0,
        index_topk=topk,
        dropout=fields.number("attention_dropout"),
    )

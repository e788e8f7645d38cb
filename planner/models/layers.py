"""Decoder layers as shapes: projections, norms, attention, feed-forward blocks.

Sizes are named as in Hugging Face's `config.json`.
"""

from collections.abc import Callable
from typing import Any, Literal

from msgspec import Struct

# The largest head of the FlashAttention kernels, of the flash-attn package and of PyTorch alike.
# Source: pytorch 2.13, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, `check_head_dim_size_flash`.
FLASH_HEAD_DIM = 256

NormKind = Literal[
    "rms",  # LlamaRMSNorm: fp32 inside, cast back, then multiplied by the weight
    "rms_fp32_weight",  # Olmo2RMSNorm, GptOssRMSNorm: weight multiplied in fp32, then cast back
    "rms_gemma",  # GemmaRMSNorm, Gemma3RMSNorm: (1 + weight) in fp32, then cast back
    "rms_unweighted",  # no weight at all
    "layer",  # nn.LayerNorm, one fused kernel
    "layer_cohere",  # CohereLayerNorm: written out in fp32
    "layer_unweighted",  # OlmoLayerNorm: F.layer_norm in fp32 without weight
    "none",
]
Activation = Literal["silu", "gelu", "gelu_tanh", "gelu_new", "quick_gelu", "relu"]
RotaryStyle = Literal[
    "half",  # llama: x * cos + rotate_half(x) * sin
    "half_cast_back",  # olmo 2: the same, cast back to the projection's dtype
    "float32",  # cohere: in float32, cast back
    "float32_interleaved",  # ernie: the same with angles repeated in every layer
    "partial",  # gpt_neox: on the first rotary_dim features, the rest joined on
    "partial_interleaved",  # glm: the same with angles repeated in every layer
    "partial_kept",  # phi, stablelm: the turned features are kept beside the join
    "partial_summed",  # phi3: the sum inside the join
    "halves",  # gpt_oss: each half on its own, joined
    "pairs",  # deepseek_v3: even and odd features, joined
    "complex",  # deepseek_v2: as complex numbers in float32
]
QkvLayout = Literal[
    "separate",
    "slices",  # phi3: three slices of one projection
    "split",  # gpt2: one split of it
    "heads_chunked",  # gpt_neox: chunks of every head's share
    "heads_selected",  # falcon with as many keys as queries
    "multi_query",  # falcon-7b: one key and value head, taken by a list of indices
    "grouped_repeated",  # falcon-40b: keys and values repeated for every query head
    "unbound",  # vision towers of qwen: one projection, unbound along a dimension of three
]
RouterStyle = Literal[
    "softmax",  # mixtral: float32 weights
    "softmax_cast",  # qwen, olmoe: cast back to the logits' dtype
    "topk_softmax",  # gpt_oss: softmax over the chosen
    "float32_softmax",  # deepseek_v2: a float32 product
    "float32_sigmoid",  # deepseek_v3: and groups chosen by biased scores
]
LayerProgram = Literal[
    "llama",  # norm, attention, add, norm, MLP, add
    "gemma2",  # norms before and after both blocks (gemma 2, gemma 3)
    "olmo2",  # norms after both blocks only
    "parallel",  # attention and MLP read the same (or a second) norm of the input (gpt_neox, falcon, cohere, phi)
    "gpt2",  # Conv1D projections, learned positions
    "stablelm",  # as gpt2, and the first norm's output is kept
    "opt",  # learned positions, biases, ReLU
    "opt_post_norm",  # as opt, with norms after both blocks only (opt-350m)
    "mla",  # multi-head latent attention (deepseek v2 and v3)
    "gpt_oss",  # attention sinks, clamped SwiGLU experts
    "measured",  # no formulas: `Layer.measure` answers
]
# Parameters of a mixture of experts to which PEFT can add an adapter: gate and up in one, down, the router's weight.
ExpertPart = Literal["gate_up", "down", "router"]
# Parts that Liger replaces. norm: the layers' own norms; query_norm: those of queries and keys; rotary: rotary
# positions, for every model of the type that the process holds, as the module's function is replaced; mlp: activation
# and product of a gated MLP, shared experts included; experts: `LigerExperts`, one fused function, where the layers
# have experts.
LigerBlock = Literal["norm", "query_norm", "rotary", "mlp", "experts"]
LigerBlocks = frozenset[LigerBlock]
NO_BLOCKS: LigerBlocks = frozenset()


class Linear(Struct, frozen=True, kw_only=True):
    """One projection: `out = in @ weight.T + bias`. `name` is the module's own last name (`q_proj`)."""

    name: str
    in_features: int
    out_features: int
    bias: bool = False
    # Tensor parallelism: the GPU has a part of the outputs ("out") or of the inputs ("in"). The gradients of inputs, or
    # the outputs, are summed over the GPUs (transformers 5.23, distributed/tensor_parallel.py, "colwise", "rowwise").
    split: Literal["", "out", "in"] = ""
    learns: bool = True  # False: it runs without gradients, so that neither its weight nor an adapter on it gets one

    @property
    def weight_params(self) -> int:
        return self.in_features * self.out_features

    @property
    def params(self) -> int:
        return self.weight_params + (self.out_features if self.bias else 0)


class Norm(Struct, frozen=True, kw_only=True):
    """One normalisation over `features` elements. `params` counts its weight and bias."""

    kind: NormKind
    features: int
    params: int


class Attention(Struct, frozen=True, kw_only=True):
    """One attention block.

    `linears` in the order of the forward pass. For MLA `head_dim` is the query and key head (nope + rope) and
    `v_head_dim` the value head, which differ; `kv_latent_dim` is what the KV cache keeps (0 elsewhere). Sparse
    attention (deepseek_v32) sees `index_topk` tokens before each, which an indexer of `index_heads` chooses; it caches
    one key of `index_head_dim`. A layer without heads of its own takes those that the layer before chose (glm_moe_dsa).
    The indexer's projections are the last of `linears`.
    """

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    v_head_dim: int
    linears: tuple[Linear, ...]
    qk_norm: Literal["none", "head", "full"] = "none"
    qk_norm_kind: NormKind = "none"
    qk_norm_params: int = 0
    sliding_window: int | None = None  # None: every token sees all before it
    rotary: bool = True
    rotary_style: RotaryStyle = "half"
    rotary_dim: int = 0  # features of a head that turn; 0: all of them
    qkv_layout: QkvLayout = "separate"
    query_scaled: bool = False  # opt: queries times a number
    qk_norm_each: bool = False  # queries are normalised before keys are projected
    softmax_float32: bool = True  # eager attention's softmax
    softcap: bool = False
    dropout: float = 0.0  # of attention probabilities while training
    in_pieces: bool = False  # vision towers of qwen: each image or window runs the kernel apart
    sink_params: int = 0
    kv_latent_dim: int = 0
    index_heads: int = 0
    index_head_dim: int = 0
    index_topk: int = 0

    @property
    def q_dim(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def k_dim(self) -> int:
        return self.num_key_value_heads * self.head_dim

    @property
    def v_dim(self) -> int:
        return self.num_key_value_heads * self.v_head_dim

    @property
    def rope_head_dim(self) -> int:
        """qk_rope_head_dim of MLA: the rotary part of its cache, which the cache stores in place of values."""
        names = {linear.name: linear for linear in self.linears}
        return self.kv_latent_dim - (names["kv_b_proj"].in_features if "kv_b_proj" in names else self.kv_latent_dim)

    @property
    def shares_cache(self) -> bool:
        """Return whether the block projects queries only and reads another layer's keys and values (gemma 4)."""
        names = {linear.name for linear in self.linears}
        return "q_proj" in names and "k_proj" not in names and not self.kv_latent_dim


class Mlp(Struct, frozen=True, kw_only=True):
    """A dense MLP. `gated`: act(gate) * up. `linears` in the order of the forward pass."""

    linears: tuple[Linear, ...]
    intermediate_size: int
    gated: bool
    activation: Activation


class Experts(Struct, frozen=True, kw_only=True):
    """Experts behind a router, kept as 3-D parameters since transformers 5 (they are no `nn.Linear`).

    `shared` is a dense MLP that every token passes besides (qwen2_moe, deepseek), with `shared_gate_params`
    of a gate on it.
    """

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    activation: Activation
    router_params: int
    expert_params: int  # all experts of the layer together, biases included
    shared: Mlp | None = None  # None: there is no shared expert
    shared_gate_params: int = 0
    router: RouterStyle = "softmax"
    router_normalised: bool = True  # the chosen weights are divided by their sum
    router_groups: int = 0  # deepseek: experts are chosen within so many groups; 0: among all
    clamped: bool = False  # gpt_oss: biases, clamps and a written-out gate


class Layer(Struct, frozen=True, kw_only=True):
    """One decoder layer and the way its forward pass is written (`program`)."""

    program: LayerProgram
    hidden_size: int
    attention: Attention
    feed_forward: Mlp | Experts
    norms: tuple[Norm, ...]
    residual_dropout: float = 0.0  # of the output of each block while training (gpt2, opt)
    residual_scaled: bool = False  # granite: the output of each block times a number
    passed: bool = True  # text passes the layer; False: cross-attention to images (mllama)
    # Only for the program "measured": (Recipe, gradients_exist) -> LayerMemory, from memory/layers/measured_layers.py.
    measure: Callable[..., Any] | None = None

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Every `nn.Linear` of the layer that PEFT's `all-linear` would find, in forward order (routers are not)."""
        dense = self.feed_forward if isinstance(self.feed_forward, Mlp) else self.feed_forward.shared
        return self.attention.linears + (dense.linears if dense else ())

    @property
    def expert_params(self) -> int:
        return self.feed_forward.expert_params if isinstance(self.feed_forward, Experts) else 0

    @property
    def linear_params(self) -> int:
        """Elements of `nn.Linear` weights: what autocast copies and bitsandbytes quantizes."""
        return sum(linear.weight_params for linear in self.linears)

    @property
    def params(self) -> int:
        attention, rest = self.attention, 0
        if isinstance(self.feed_forward, Experts):
            rest = (
                self.feed_forward.expert_params + self.feed_forward.router_params + self.feed_forward.shared_gate_params
            )
        return (
            sum(linear.params for linear in self.linears)
            + sum(norm.params for norm in self.norms)
            + attention.qk_norm_params
            + attention.sink_params
            + rest
        )


def layer_elements(attention: Attention) -> int:
    """Numbers that a layer caches of each token: keys and values, or a latent, and an indexer's key; 0: a state."""
    return (attention.kv_latent_dim or attention.k_dim + attention.v_dim) + attention.index_head_dim

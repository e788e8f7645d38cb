"""Shapes of a model's layers: all properties of a model that memory and speed depend on.

A `ModelShape` is built by `planner/models/from_config.py` from any `config.json`; nothing here reads files.
Sizes are named as in Hugging Face's `config.json`.
"""

from collections.abc import Callable
from functools import cached_property
from math import prod
from typing import Any, Literal

from msgspec import Struct

# The largest head of the FlashAttention kernels, of the flash-attn package and of PyTorch alike.
# Source: pytorch 2.13, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, `check_head_dim_size_flash`.
FLASH_HEAD_DIM = 256
# Types without FlashAttention: Transformers refuses it for the model or a tower of it (gemma4: audio), or heads of 512
# are too wide for its kernels. Source: transformers 5.23, modeling_utils.py, `_flash_attn_can_dispatch`; the
# `_supports_flash_attn` of each class; flash-attention 2.8, csrc/flash_attn/flash_api.cpp (`head_size <= 256`).
WITHOUT_FLASH_ATTENTION = frozenset((
    "bloom", "deepseek_v32", "deepseek_v4", "gemma4", "gemma4_unified", "glm_moe_dsa", "llama4", "mllama",
))  # fmt: skip
# Types with images that `AutoModelForCausalLM` loads (`ModelShape.loads_as_causal_model`).
CAUSAL_WITH_IMAGES = frozenset((
    "gemma3", "gemma3n", "gemma4", "gemma4_unified", "llama4", "mllama", "qwen3_5", "qwen3_5_moe",
))  # fmt: skip
# Types with an embedding for each layer, and the keys of their configs whose product is its size.
WITH_PER_LAYER_EMBEDDING = frozenset(("gemma3n", "gemma4"))
PER_LAYER_EMBEDDING = ("vocab_size_per_layer_input", "num_hidden_layers", "hidden_size_per_layer_input")
# Types with buffers in their checkpoint: routers' biases, scales of layers, clamps of a tower. Source: transformers
# 5.23, models/<folder>/modeling_<folder>.py, `register_buffer`.
WITH_SAVED_BUFFERS = frozenset((
    "apertus", "deepseek_v3", "deepseek_v32", "deepseek_v4", "gemma4", "gemma4_unified", "glm4_moe", "glm_moe_dsa",
    "lfm2_moe", "minimax_m2",
))  # fmt: skip

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


class Linear(Struct, frozen=True, kw_only=True):
    """One projection: `out = in @ weight.T + bias`. `name` is the module's own last name (`q_proj`)."""

    name: str
    in_features: int
    out_features: int
    bias: bool = False

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
    attention (deepseek_v32) also has an indexer of `index_heads`, which caches one key of `index_head_dim`.
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


class ModelShape(Struct, frozen=True, kw_only=True, eq=False, dict=True):
    """A model as shapes. Compared by identity, so that a cache lookup with a model as key is cheap.

    `layers` has every decoder layer in order; equal layers are the same object. It is empty for an architecture
    without formulas until `planner.training_stack.complete_models` completes it.
    """

    id: str
    model_type: str
    dtype: str  # of the published weights
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    layers: tuple[Layer, ...]
    embed_params: int  # token embedding
    position_params: int = 0  # learned position embeddings
    lm_head_params: int  # 0 when tied
    lm_head_bias_params: int = 0
    final_norm: Norm
    embed_norm: Norm | None = None  # None: the embedding goes straight into the first layer
    other_params: int = 0  # projectors and adapters: outside embeddings, layers, final norm, head and vision tower
    vision_params: int = 0
    vision_linear_params: int = 0
    # Only for architectures without formulas: `nn.Linear` modules outside the layers, with counts.
    outer_linears: tuple[tuple[Linear, int], ...] = ()  # text passes them
    vision_linears: tuple[tuple[Linear, int], ...] = ()  # text does not pass them
    tied: bool
    params: int
    auto_class: str = "AutoModelForCausalLM"
    quantization: Literal["none", "gptq", "awq", "nf4", "nf4-double", "int8", "fp8", "mxfp4"] = (
        "none"  # of the published checkpoint
    )
    quantization_group_size: int = 128
    path: str = ""  # of the folder that it was read from; empty: it is loaded by its id
    scaled_logits: bool = False  # granite, cohere: logits are multiplied by a constant; gemma 2: soft-capped
    embed_dropout: float = 0.0  # of the embedding output while training (gpt2)
    scaled_embeddings: bool = False  # gemma, granite: the embedding output is multiplied by a constant
    notes: tuple[str, ...] = ()
    config: dict[str, object]

    def __repr__(self) -> str:
        return f"ModelShape({self.id!r})"

    @property
    def embedding_changed(self) -> bool:
        """True if the first layer gets another tensor than the embedding's output: positions added, or a multiple.

        Gemma multiplies inside its embedding module. Source: transformers 5.23, models/granite/modeling_granite.py.
        """
        return self.position_params > 0 or (self.scaled_embeddings and self.model_type.startswith("granite"))

    @cached_property
    def num_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def layer_kinds(self) -> tuple[tuple[Layer, int], ...]:
        """The distinct layers with their counts, in order of first appearance."""
        counts: dict[Layer, int] = {}
        for layer in self.layers:
            counts[layer] = counts.get(layer, 0) + 1
        return tuple(counts.items())

    @cached_property
    def linear_params(self) -> int:
        """Weights of every `nn.Linear` in the decoder layers."""
        return sum(layer.linear_params * count for layer, count in self.layer_kinds)

    @cached_property
    def expert_params(self) -> int:
        return sum(layer.expert_params * count for layer, count in self.layer_kinds)

    @property
    def idle_params(self) -> int:
        """Parameters outside the layers that text does not pass: towers for images and sound, gemma 3's projector."""
        return self.vision_params + (self.other_params if self.vision_linear_params else 0)

    @property
    def per_layer_embed_params(self) -> int:
        """Parameters of the embedding table that feeds every layer but lies outside of the layers; 0 without one.

        Source: transformers 5.23, models/gemma4/modeling_gemma4.py, `embed_tokens_per_layer`.
        Example: Gemma 4 E2B: 262,144 x 35 x 256, 4.4 GiB in 16 bits.
        """
        inner = self.config.get("text_config")
        text = inner if isinstance(inner, dict) else self.config
        sizes = [text.get(key) for key in PER_LAYER_EMBEDDING]
        if self.model_type not in WITH_PER_LAYER_EMBEDDING:
            return 0
        return prod(size if isinstance(size, int) else 0 for size in sizes)

    @cached_property
    def supports_sdpa(self) -> bool:
        """True if Transformers runs the model with sdpa. Models with soft caps or attention sinks are refused.

        Source: transformers 5.23, models/gemma2/modeling_gemma2.py, models/gpt_oss/modeling_gpt_oss.py,
        `_supports_sdpa`.
        """
        return not any(layer.attention.softcap or layer.attention.sink_params for layer, _ in self.layer_kinds)

    @property
    def loading_class(self) -> str:
        """The class of Transformers that loads the model with all of its parts, as TRL's stable trainers do.

        `AutoModelForCausalLM` leaves out the vision tower of some models and refuses others.
        Source: trl 1.16, trainer/utils.py, `create_model_from_path`; transformers 5.23, models/auto/modeling_auto.py,
        `MODEL_FOR_CAUSAL_LM_MAPPING_NAMES`.
        """
        return self.auto_class or "AutoModelForCausalLM"

    @property
    def loads_as_causal_model(self) -> bool:
        """True if `AutoModelForCausalLM` loads the model, with its vision tower or without it.

        Source: transformers 5.23, models/auto/modeling_auto.py, `MODEL_FOR_CAUSAL_LM_MAPPING_NAMES`.
        """
        return self.auto_class != "AutoModelForImageTextToText" or self.model_type in CAUSAL_WITH_IMAGES

    @property
    def has_saved_buffers(self) -> bool:
        """True if the checkpoint has buffers beside parameters, so that FSDP2 cannot send the model from one process.

        accelerate takes every saved tensor for a DTensor then and stops ("'Tensor' object has no attribute
        'device_mesh'"); it works if each process keeps what it loaded.
        Source: accelerate 1.15, utils/fsdp_utils.py, `fsdp2_load_full_state_dict`; seen on emulated GPUs.
        """
        routes = self.model_type == "nemotron_h" and bool(self.config.get("n_routed_experts"))
        return routes or self.model_type in WITH_SAVED_BUFFERS

    @property
    def supports_flash_attention(self) -> bool:
        """True if FlashAttention's kernels run the model, on a GPU that has them."""
        return self.model_type not in WITHOUT_FLASH_ATTENTION

    @property
    def known(self) -> bool:
        """Return whether the activations of this architecture have formulas."""
        return bool(self.layers)


def layer_elements(attention: Attention) -> int:
    """Numbers that a layer caches of each token: keys and values, or a latent, and an indexer's key; 0: a state."""
    return (attention.kv_latent_dim or attention.k_dim + attention.v_dim) + attention.index_head_dim

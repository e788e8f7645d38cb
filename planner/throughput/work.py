"""Work of one forward pass over a model per token: FLOP, bytes moved, kernels launched. Cached by model and tuning."""

from functools import lru_cache
from math import prod
from typing import NamedTuple

from msgspec import Struct

from planner.cache_keys import StateInput
from planner.candidate import Dtype
from planner.memory.dtypes import DTYPE_BYTES, FLOAT32_BYTES, SIXTEEN_BIT_BYTES
from planner.memory.parameters.copied_modules import copies_head
from planner.memory.parameters.lora import expert_ranks, module_matrices, target_names
from planner.memory.parameters.policy import parameters
from planner.memory.parameters.tensors import TensorSet, expert_shapes
from planner.memory.parameters.widths import adapter_dtype_bytes
from planner.methods import Head
from planner.models.layers import NO_BLOCKS, Attention, Experts, Layer, LigerBlocks, Mlp, Norm, NormKind, layer_elements
from planner.models.recurrent import states_of
from planner.models.shape import ModelShape
from planner.quantizations import QUANTIZATIONS, Quantization
from planner.throughput.rates import MEMORY_FRACTION

# Bytes that element-wise kernels read and write per element and token in a forward pass in 16 bits, without and with
# Liger; their backward pass moves twice as many. Source: transformers 5.23, models/llama/modeling_llama.py:
# `apply_rotary_pos_emb` (two products 8, rotate_half 8, add 6 = 22), `LlamaMLP` (silu and product 4 + 6), residual add
# 6; models/gpt_neox/modeling_gpt_neox.py, `apply_rotary_pos_emb` (join of turned and kept features, 2 + 2). Liger
# (arXiv 2410.10989, section 3.2) fuses each into one kernel.
ELEMENTWISE_BYTES: dict[bool, dict[str, int]] = {
    False: {"rotary": 22, "join": 4, "gated": 10, "plain": 4, "residual": 6},
    True: {"rotary": 4, "join": 0, "gated": 6, "plain": 4, "residual": 6},
}
# The same of each row that goes to an expert: gathered (2 + 2), weighted (2 + 2), put back in order (2 + 2) and read
# for the sum of a token's rows (2), which is written once (2). Source: transformers 5.23, integrations/moe.py,
# `grouped_mm_experts_forward`.
ROUTED_BYTES, SUM_BYTES = 14, 2
# The same of a normalisation. Source: transformers 5.23: `LlamaRMSNorm` (cast 2+4, square 4+4, mean 4, multiply 4+4,
# cast 4+2, weight 2+2 = 36), `Olmo2RMSNorm` and `GemmaRMSNorm` (the weight in float32: 40), `CohereLayerNorm` (cast 6,
# mean 4, difference 8, square 8, mean 4, difference 8, quotient 8, weight 8, cast 6 = 60), `OlmoLayerNorm` (casts 12,
# kernel 8). nn.LayerNorm is one kernel (2+2); autocast runs it in float32 (torch 2.13,
# aten/src/ATen/autocast_mode.h, AT_FORALL_FP32: cast 2+4, kernel 4+4) and casts its output for the next product (4+2).
NORM_BYTES: dict[NormKind, int] = {
    "rms": 36, "rms_fp32_weight": 40, "rms_gemma": 40, "rms_unweighted": 32, "layer": 4, "layer_cohere": 60,
    "layer_unweighted": 20, "none": 0,
}  # fmt: skip
LAYER_NORM_AUTOCAST_BYTES = 20
FUSED_NORM_BYTES = 4
# Element-wise traffic with float32 weights under autocast, as a multiple of that with 16-bit weights. It is assumed to
# grow like the saved bytes per token and hidden element of a layer without its attention kernel. 16-bit weights: two
# norms of 8 (input in float32 4, normalised input 2, output 2). Float32 weights: two norms of 8 (input 4, normalised
# input 4) and five 16-bit casts of the projections' inputs (query, key, value, gate, up).
# Source: transformers 5.23, models/llama/modeling_llama.py; real autograd saves as much: tests/test_activations.py.
FP32_RESIDUAL_FACTOR = 26 / 16
# Bytes per float32 weight that autocast moves in each forward pass: it reads 4 and writes 2.
# Source: torch 2.13, include/ATen/autocast_mode.h, `cached_cast`.
AUTOCAST_BYTES = 6
# Bytes that LoRA moves per element of a wrapped layer's input (by bytes of an adapter parameter) and output: (forward,
# backward). Float32 adapters: the input is cast to float32 and, by autocast, back (6 + 6). The output is scaled and
# added (4 + 6). Backward: the casts again, the sum of the input's two gradients (6), the scaled gradient of the output
# (4).
# Source: peft 0.21.2, tuners/lora/layer.py, `Linear.forward`.
LORA_INPUT_BYTES = {4: (12, 18), 2: (0, 6)}
LORA_OUTPUT_BYTES = (10, 4)
# The same of DoRA's outputs with float32 adapters, instead of LoRA's. Forward: magnitudes times the base's result (6)
# and LoRA's (6), its scaling (8), their sum (12), that added to the result (10), cast to 16 bits (6). Backward: the
# cast (6), both factors' gradients of two products (2 x (10 + 8)) with the sums over tokens (2 x 4), the scaling (8),
# casts of the gradients of both results (2 x 6). With 16-bit adapters half of each.
# Source: peft 0.21.2, tuners/lora/dora.py, `DoraLinearLayer.forward`.
DORA_OUTPUT_BYTES = (48, 70)
# Bytes of each adapted weight that a forward pass of DoRA moves for the norms, with float32 adapters: the product B A
# in 16 bits (2) and its cast (2 + 4), the weight's cast (2 + 4), the scaled product (4 + 4), the sum (4 + 4 + 4), its
# norm (4). With 16-bit adapters the casts fall away, and the rest is half. Source: `get_weight_norm` there.
DORA_WEIGHT_BYTES = {4: 38, 2: 14}

# Seconds of the CPU to launch one layer's forward pass in eager mode. `generate` with one row takes 21.1 ms per token
# for Qwen2.5-0.5B (24 layers), 25.2 for 1.5B (28), 40.4 for 14B (48), 57.0 for 32B (64): 0.84 to 0.90 ms per layer of
# any width (A100-80G, transformers 4.46). Source: QwenLM/Qwen2.5, docs/source/benchmark/speed_benchmark.rst.
LAYER_LAUNCH_SECONDS = 0.88e-3
# Seconds that each LoRA layer adds for its casts, products and sum; launches of a backward pass as a multiple of a
# forward pass. A step of 8 micro-steps of 256 tokens takes 1.0 s for 1.8B (24 layers), 1.2 s for 7B (32) and 1.6 s for
# 14B (40): about 5 ms per layer for forward, recomputation and backward with 5 LoRA layers each, data and optimizer
# included. (2 + 1.6) x (0.88 + 5 x 0.08) is 4.6. Source: QwenLM/Qwen, README.md, "Profiling of Memory and Speed".
LORA_LAUNCH_SECONDS = 0.08e-3
BACKWARD_LAUNCHES = 1.6


class Work(Struct, frozen=True, kw_only=True, eq=False):
    """Work of one forward pass through the decoder, per token unless a comment says "per pass".

    Compared by identity, which makes it a fast key.
    """

    linear_flops: float  # products with the weights of the decoder layers, active experts only
    float32_flops: float  # products that run in float32 under autocast too, not in linear_flops
    weight_bytes: float  # per pass: weights of the decoder layers in the compute dtype
    expert_share: float  # share of the experts in weight_bytes; 0 in a dense model
    expert_chance: float  # probability that a token is routed to a given expert
    elementwise_bytes: float
    adapter_flops: float  # of adapters on modules; those on experts are `folded`
    adapter_bytes: float
    adapter_backward_bytes: float
    folded: "Folded"
    cast_bytes: float  # per pass
    unpack_bytes: float  # per pass, scaled so that `memory_rate` gives the seconds of unpacking
    rounded_bytes: float  # per pass: 16-bit copies of 4-bit weights, written and read
    attention: tuple[tuple[int, float, int], ...]  # (window or 0, flops per query-key pair, heads), summed over layers
    kv_bytes: float  # per token of context, as an engine keeps it
    expanded_kv_bytes: float  # the same repeated to every head, as HF attention under a mask sees it
    state_bytes: float  # of a row, whatever its length: planner/models/recurrent.py
    launch_seconds: float  # per pass
    head_flops: float  # per scored token
    head_bytes: float  # per pass
    vocab_size: int
    hidden_size: int
    layers: int
    inner_size: int
    params: int
    stored_bytes: float  # weights as stored
    lookup_params: int  # an embedding that is not the head too: a pass reads one row of it per token
    trainable_params: int
    adapter_only: bool
    trains_head: bool


class Folded(NamedTuple):
    """Weights of experts into which PEFT folds their adapters in every pass, W + B A, whatever the tokens.

    Source: peft 0.21.2, tuners/lora/layer.py, `ParamWrapper._activate_lora` and `_LoraFactorsProxy.forward`.
    """

    weights: int = 0  # of all experts
    active: float = 0.0  # that one token is multiplied with: their gradient is that of full fine-tuning
    flops: float = 0.0  # of B A; the gradients of B and of A take as many each
    width: int = SIXTEEN_BIT_BYTES  # bytes of a weight, and of the result

    @property
    def forward_bytes(self) -> int:
        """Bytes of a pass: the weights are read, and the folded ones written."""
        return 2 * self.width * self.weights

    @property
    def backward_bytes(self) -> int:
        """Bytes of a backward pass: the gradient of the folded weights is written, and read for those of B and A."""
        return 3 * self.width * self.weights


class WorkSettings(NamedTuple):
    """Settings that the work of a pass depends on: the key of its cache."""

    model: ModelShape
    dtype: Dtype  # of the weights that the layers compute with
    autocast: bool
    use_liger_kernel: bool
    lora: bool = False
    lora_r: int = 1
    lora_target_modules: tuple[str, ...] = ()
    lora_modules_to_save: tuple[str, ...] = ()
    lora_target_parameters: tuple[str, ...] = ()
    use_dora: bool = False
    adapter_width: int = 0  # bytes of an adapter parameter
    quantization: Quantization = "none"
    head: Head = "lm_head"


def policy_work(candidate: StateInput) -> Work:
    """Work of the policy."""
    return work(
        WorkSettings(
            model=candidate.model,
            dtype=_dtype(candidate),
            autocast=candidate.precision != "no",
            use_liger_kernel=candidate.use_liger_kernel and candidate.method_row.takes_liger_kernels,
            lora=candidate.tuning == "lora",
            lora_r=candidate.lora_r,
            lora_target_modules=candidate.lora_target_modules,
            lora_modules_to_save=candidate.lora_modules_to_save,
            lora_target_parameters=candidate.lora_target_parameters,
            use_dora=candidate.tuning == "lora" and candidate.use_dora,
            adapter_width=adapter_dtype_bytes(candidate),
            quantization=candidate.quantization,
            head=candidate.method_row.head,
        )
    )


def value_work(candidate: StateInput) -> Work | None:
    """Work of PPO's value model, which is trained in full beside the policy; None for other methods."""
    if not candidate.method_row.value_model:
        return None
    return work(
        WorkSettings(
            model=candidate.reward_model or candidate.model,
            dtype=_dtype(candidate),
            autocast=candidate.precision != "no",
            use_liger_kernel=candidate.use_liger_kernel and candidate.method_row.takes_liger_kernels,
            head="score",
        )
    )


def trained_models(candidate: StateInput, policy: Work) -> tuple[Work, ...]:
    """Work of the models that the optimizer updates: the policy, and PPO's value model."""
    value = value_work(candidate)
    return (policy,) if value is None else (policy, value)


def frozen_work(model: ModelShape, candidate: StateInput) -> Work:
    """Work of a teacher or reward model, which is loaded in the policy's dtype without quantization."""
    return work(
        WorkSettings(
            model=model,
            dtype=_dtype(candidate),
            autocast=candidate.precision != "no",
            use_liger_kernel=False,  # replaces the layers of the trained model only
        )
    )


def _dtype(candidate: StateInput) -> Dtype:
    """Dtype of the weights that the layers compute with."""
    cast = candidate.scheme_row.casts != "autocast" and candidate.precision == "bf16"
    return "bfloat16" if cast else candidate.dtype


@lru_cache(maxsize=4096)
def work(settings: WorkSettings) -> Work:
    """Sum the work of all layers.

    Leaves out vision towers, which batches of text do not pass, norms of queries and keys, biases, the router's sort.
    """
    model, dtype, autocast = settings.model, settings.dtype, settings.autocast
    lora, lora_r, quantization = settings.lora, settings.lora_r, settings.quantization
    row = QUANTIZATIONS[quantization]
    has_head = settings.head == "lm_head"
    counts = parameters(
        model, "lora" if lora else "full", lora_r, settings.lora_target_modules, quantization, settings.head,
        settings.use_dora, settings.lora_modules_to_save, settings.lora_target_parameters,
    )  # fmt: skip
    kinds = model.layer_kinds
    active = sum(_active_params(layer) * n for layer, n in kinds)
    experts = sum(layer.expert_params * n for layer, n in kinds)
    linear = model.linear_params + experts
    wide = row.expert_width == FLOAT32_BYTES or (dtype == "float32" and autocast)
    float32_experts = _active_expert_params(model) if wide else 0.0
    width = DTYPE_BYTES[dtype] if not autocast else 2
    factor = FP32_RESIDUAL_FACTOR if dtype == "float32" else 1.0
    wrapped = sum(kind.count for kind in counts.adapter_tensors.kinds if len(kind.shape) > 1) // 2
    matrices = TensorSet(kinds=module_matrices(model, lora_r, settings.lora_target_modules) if lora else ())
    adapter_forward, adapter_backward = _adapter_bytes(matrices, settings) if lora else (0.0, 0.0)
    norms = DORA_WEIGHT_BYTES[settings.adapter_width] * _adapted_weights(settings) if settings.use_dora else 0
    replaced = model.architecture.liger_blocks if settings.use_liger_kernel else NO_BLOCKS
    unpacked = counts.quantized_params * (row.bytes_per_weight + 2) * MEMORY_FRACTION
    return Work(
        linear_flops=2.0 * ((active or model.params - model.embed_params) - float32_experts),
        float32_flops=2.0 * float32_experts,
        weight_bytes=float(width * (linear or model.params)),
        expert_share=experts / linear if linear else 0.0,
        expert_chance=_expert_chance(model),
        elementwise_bytes=factor * sum(_elementwise_bytes(layer, replaced, autocast) * n for layer, n in kinds),
        adapter_flops=2.0 * matrices.params,
        adapter_bytes=adapter_forward,
        adapter_backward_bytes=adapter_backward,
        folded=_folded(settings) if lora else Folded(),
        cast_bytes=norms + (AUTOCAST_BYTES * counts.unquantized_params if dtype == "float32" and autocast else 0.0),
        unpack_bytes=unpacked / row.unpack_fraction,
        rounded_bytes=2.0 * SIXTEEN_BIT_BYTES * counts.quantized_params if row.four_bit else 0.0,
        attention=_attention(model),
        kv_bytes=2.0 * sum(layer_elements(layer.attention) * n for layer, n in kinds),
        expanded_kv_bytes=2.0
        * sum(_pair_elements(layer.attention) * n for layer, n in kinds if layer_elements(layer.attention)),
        state_bytes=float(sum(n * (2 * state.convolution + 4 * state.matrices) for state, n in states_of(model))),
        launch_seconds=model.num_layers * LAYER_LAUNCH_SECONDS + wrapped * LORA_LAUNCH_SECONDS,
        head_flops=2.0 * model.vocab_size * model.hidden_size if has_head else 0.0,
        head_bytes=float(width * model.vocab_size * model.hidden_size) if has_head else 0.0,
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        layers=model.num_layers,
        inner_size=max((_inner_size(layer) for layer, _ in kinds), default=0),
        params=counts.base,
        stored_bytes=counts.quantized_params * row.bytes_per_weight + counts.unquantized_params * DTYPE_BYTES[dtype],
        lookup_params=0 if model.tied else model.embed_params,
        trainable_params=counts.trainable,
        adapter_only=lora,
        trains_head=not lora or copies_head(settings.lora_modules_to_save, settings.head),
    )


def _active_params(layer: Layer) -> float:
    """Weights of a layer that one token is multiplied with: of the experts, only those it is routed to."""
    block = layer.feed_forward
    if not isinstance(block, Experts):
        return layer.linear_params
    return (
        layer.linear_params + block.router_params + block.expert_params * block.num_experts_per_tok / block.num_experts
    )


def _active_expert_params(model: ModelShape) -> float:
    """Weights of the experts that one token is routed to, all layers.

    Float32 experts run in float32 under autocast too: grouped_mm is not autocast-enabled (transformers 5.23,
    integrations/moe.py, `_grouped_mm`).
    """
    blocks = [(layer.feed_forward, n) for layer, n in model.layer_kinds if isinstance(layer.feed_forward, Experts)]
    return sum(n * block.expert_params * block.num_experts_per_tok / block.num_experts for block, n in blocks)


def _expert_chance(model: ModelShape) -> float:
    for layer, _ in model.layer_kinds:
        if isinstance(layer.feed_forward, Experts):
            return layer.feed_forward.num_experts_per_tok / layer.feed_forward.num_experts
    return 1.0


def _inner_size(layer: Layer) -> int:
    """Width of the feed-forward block as one token sees it."""
    block = layer.feed_forward
    if isinstance(block, Mlp):
        return block.intermediate_size
    return block.moe_intermediate_size * block.num_experts_per_tok + (
        block.shared.intermediate_size if block.shared else 0
    )


def _elementwise_bytes(layer: Layer, replaced: LigerBlocks, autocast: bool) -> float:
    """Bytes that element-wise kernels of one layer move per token; Liger replaces those of some blocks."""
    cost = ELEMENTWISE_BYTES["mlp" in replaced]
    gated = not isinstance(layer.feed_forward, Mlp) or layer.feed_forward.gated
    norms = sum(_norm_bytes(norm, "norm" in replaced, autocast) * norm.features for norm in layer.norms)
    return (
        norms
        + _rotary_bytes(layer.attention, "rotary" in replaced)
        + 2 * ELEMENTWISE_BYTES[False]["residual"] * layer.hidden_size
        + cost["gated" if gated else "plain"] * _inner_size(layer)
        + _routing_bytes(layer)
    )


def _routing_bytes(layer: Layer) -> float:
    """Bytes per token to hand rows to experts and to sum what they return; 0 without experts."""
    block = layer.feed_forward
    if not isinstance(block, Experts):
        return 0.0
    return (ROUTED_BYTES * block.num_experts_per_tok + SUM_BYTES) * layer.hidden_size


def _norm_bytes(norm: Norm, liger: bool, autocast: bool) -> int:
    """Bytes per feature of a normalisation's forward pass."""
    if norm.kind == "none":
        return 0
    if liger:
        return FUSED_NORM_BYTES
    return LAYER_NORM_AUTOCAST_BYTES if norm.kind == "layer" and autocast else NORM_BYTES[norm.kind]


def _rotary_bytes(attention: Attention, liger: bool) -> float:
    """Bytes per token of rotary embeddings in one layer's forward pass: on `rotary_dim` features of a head, or on all.

    Example: GPT-NeoX turns a quarter of each head: 22 / 4 + 4 bytes per feature of queries and keys, not 22.
    """
    if not attention.rotary:
        return 0.0
    cost, features = ELEMENTWISE_BYTES[liger], attention.q_dim + attention.k_dim
    if not 0 < attention.rotary_dim < attention.head_dim:
        return float(cost["rotary"] * features)
    return (cost["rotary"] * attention.rotary_dim / attention.head_dim + cost["join"]) * features


def _adapter_bytes(adapters: TensorSet, settings: WorkSettings) -> tuple[float, float]:
    """Bytes that LoRA or DoRA moves per token, (forward, backward).

    A matrices are [r, in], B matrices [out, r]: their elements divided by r are the numbers of inputs and outputs.
    """
    lora_r, width = settings.lora_r, settings.adapter_width
    inputs = sum(kind.params for kind in adapters.kinds if kind.shape[0] == lora_r) / lora_r
    outputs = adapters.params / lora_r - inputs
    forward, backward = LORA_INPUT_BYTES[width]
    out_forward, out_backward = LORA_OUTPUT_BYTES
    if settings.use_dora:
        out_forward, out_backward = (size * width // FLOAT32_BYTES for size in DORA_OUTPUT_BYTES)
    return forward * inputs + out_forward * outputs, backward * inputs + out_backward * outputs


def _folded(settings: WorkSettings) -> Folded:
    """Sum the fused experts and routers that have adapters."""
    model, weights, active, flops = settings.model, 0, 0.0, 0.0
    ranks = expert_ranks(model, settings.lora_r, settings.lora_target_modules, settings.lora_target_parameters)
    for layer, of_layer in zip(model.layers, ranks, strict=True):
        block = layer.feed_forward
        if not isinstance(block, Experts):
            continue
        gate_up, down = expert_shapes(layer, block)
        sizes = {"gate_up": prod(gate_up), "down": prod(down), "router": block.router_params}
        for part, rank in of_layer.items():
            weights += sizes[part]
            active += sizes[part] * (1.0 if part == "router" else block.num_experts_per_tok / block.num_experts)
            flops += 2.0 * rank * sizes[part]
    return Folded(weights=weights, active=active, flops=flops, width=DTYPE_BYTES[settings.dtype])


def _adapted_weights(settings: WorkSettings) -> int:
    """Elements of the weights of the decoder layers that have adapters."""
    names = target_names(settings.model, settings.lora_target_modules)
    return sum(
        linear.weight_params * count
        for layer, count in settings.model.layer_kinds
        for linear in layer.linears
        if linear.name in names
    )


def _pair_elements(attention: Attention) -> int:
    return attention.num_attention_heads * (attention.head_dim + attention.v_head_dim)


def _attention(model: ModelShape) -> tuple[tuple[int, float, int], ...]:
    """(Window or 0, FLOP per query-key pair, heads), summed over the layers with the same window.

    A pair takes one product with the key and one with the value, each of the head's width.
    """
    found: dict[int, tuple[float, int]] = {}
    for layer, n in model.layer_kinds:
        window = layer.attention.sliding_window or 0
        flops, heads = found.get(window, (0.0, 0))
        found[window] = (
            flops + 2.0 * n * _pair_elements(layer.attention),
            heads + n * layer.attention.num_attention_heads,
        )
    return tuple((window, flops, heads) for window, (flops, heads) in found.items())

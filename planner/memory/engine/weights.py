"""The vLLM engine's copy of the model on one GPU of its tensor-parallel group: weights and LoRA slots.

vLLM loads weights in 16 bits: dtype "auto" casts a float32 checkpoint to bfloat16 (vllm/config/model.py,
`_get_and_verify_dtype`).
"""

from functools import lru_cache

from planner.memory.dtypes import SIXTEEN_BIT_BYTES
from planner.memory.engine.blocks import engine_attention
from planner.models.division import VOCAB_PADDING
from planner.models.layers import Attention, Experts, Layer, Linear, layer_elements
from planner.models.shape import ModelShape
from planner.quantizations import ENGINE_QUANTIZATIONS, EngineQuantization

# Projections of which every GPU of a tensor-parallel group keeps a full copy.
# Source: vllm/model_executor/models/deepseek_v2.py, ReplicatedLinear.
REPLICATED_LINEARS = frozenset({"q_a_proj", "kv_a_proj_with_mqa"})


def weight_bytes_each(model: ModelShape, quantization: EngineQuantization) -> float:
    """Bytes of one weight of a quantized projection, with its share of the scales."""
    row = ENGINE_QUANTIZATIONS[quantization]
    return row.bytes_per_weight + row.bytes_per_group / (
        model.quantization_group_size if model.quantization_group_size > 0 else model.hidden_size
    )


@lru_cache(maxsize=4096)
def engine_weight_bytes(model: ModelShape, tensor_parallel_size: int, quantization: EngineQuantization) -> int:
    """Bytes of the engine's weights on each GPU of its tensor-parallel group.

        weights = sum of projections x bytes / tp + 2 x (embedding + head, padded to 64 rows) / tp
                + 2 x (norms + routers, 4 with `float32_router`) + cos/sin table (2 x positions x head_dim)

    Source: vllm/model_executor/layers/linear.py and vocab_parallel_embedding.py. If there are fewer key-value heads
    than GPUs, every GPU has a copy of one head. The vision encoder is sharded, except with `whole_vision`.
    Example: Llama-3.1-8B: 2 x 8,030,261,248 + 2 x 131,072 x 128 = 14.989 GiB; vLLM printed 14.9888.

    Leaves out quantization workspaces (under 2 MiB) and `g_idx` of act-order GPTQ. Models that vLLM runs through
    Transformers (OLMo 2 and 3, SmolLM3, StarCoder 2) have no table: 1 to 16 MiB too much.
    """
    per_weight = weight_bytes_each(model, quantization)
    dense = SIXTEEN_BIT_BYTES if ENGINE_QUANTIZATIONS[quantization].experts_only else per_weight
    layers = sum(
        _layer_bytes(layer, engine_attention(model, layer.attention), tensor_parallel_size, dense, per_weight) * count
        for layer, count in model.layer_kinds
    )
    if model.architecture.float32_router:
        blocks = [(layer.feed_forward, count) for layer, count in model.layer_kinds]
        layers += sum(2 * block.router_params * count for block, count in blocks if isinstance(block, Experts))
    padding_rows = -model.vocab_size % VOCAB_PADDING
    padded_params = (
        model.embed_params
        + model.lm_head_params
        + padding_rows * (model.embed_params // model.vocab_size) * (1 if model.tied else 2)
    )
    sharded = padded_params + model.lm_head_bias_params
    embed_norm_params = model.embed_norm.params if model.embed_norm else 0
    whole = model.position_params + model.final_norm.params + embed_norm_params + model.other_params
    if model.architecture.whole_vision:
        whole += model.vision_params
    else:
        sharded += model.vision_params
    return round(layers + SIXTEEN_BIT_BYTES * (sharded / tensor_parallel_size + whole) + rotary_table_bytes(model))


def rotary_table_bytes(model: ModelShape) -> int:
    """Bytes of the cos/sin tables on each GPU, one for each size of rotated features, unsharded.

        table = max_position_embeddings x rotated features of a head x 2 (4 with `float32_rotary`)

    Source: vllm/model_executor/layers/rotary_embedding/base.py, `cos_sin_cache`.
    Example: gemma-3-4b, two bases: 2 x 131,072 x 256 x 2 = 128 MiB.
    """
    kinds = [
        layer.attention
        for layer, _ in model.layer_kinds
        if layer_elements(layer.attention) and not layer.attention.shares_cache
    ]
    blocks = [engine_attention(model, attention) for attention in kinds if attention.rotary]
    share = _rotated_share(model)
    tables = {
        (
            round(share * (block.rope_head_dim if block.kv_latent_dim else block.rotary_dim or block.head_dim)),
            model.architecture.local_rotary and block.sliding_window is not None,
        )
        for block in blocks
    }
    dtype_bytes = 4 if model.architecture.float32_rotary else SIXTEEN_BIT_BYTES
    return dtype_bytes * model.max_position_embeddings * sum(features for features, _ in tables)


def _rotated_share(model: ModelShape) -> float:
    """Share of a head's features in the table of a model with measured layers, which do not say it themselves."""
    measured = not model.architecture.has_formulas
    return (
        0.0
        if model.config.get("position_embedding_type") == "nope"
        else model.architecture.rotary_share
        if measured
        else 1.0
    )


def _layer_bytes(layer: Layer, attention: Attention, tensor_parallel_size: int, dense: float, expert: float) -> float:
    """Bytes of one layer's weights on each GPU, at `dense` bytes per weight of projections and `expert` of experts."""
    feed_forward = layer.feed_forward
    replicated = sum(linear.weight_params for linear in layer.linears if linear.name in REPLICATED_LINEARS)
    copied_heads = max(1, tensor_parallel_size // (attention.num_key_value_heads or tensor_parallel_size)) - 1
    copied = 0 if attention.kv_latent_dim else copied_heads * (attention.k_dim + attention.v_dim) * layer.hidden_size
    sharded = layer.linear_params - replicated + copied
    biases = sum(linear.out_features for linear in layer.linears if linear.bias)
    whole = sum(norm.params for norm in layer.norms) + attention.qk_norm_params
    if isinstance(feed_forward, Experts):
        whole += feed_forward.router_params + feed_forward.shared_gate_params
    small = whole + (biases + attention.sink_params) / tensor_parallel_size
    return (
        dense * (sharded / tensor_parallel_size + replicated)
        + expert * layer.expert_params / tensor_parallel_size
        + SIXTEEN_BIT_BYTES * small
    )


@lru_cache(maxsize=4096)
def lora_slot_bytes(model: ModelShape, tensor_parallel_size: int, max_lora_rank: int, max_loras: int) -> int:
    """Bytes of the adapter slots that vLLM allocates on each GPU at start-up, before any adapter is loaded.

        slots = max_loras x sum over projections of max_lora_rank x (in + out) x 2, the sharded side divided by tp

    Source: vllm/lora/layers/base_linear.py, `create_lora_weights`. AsyncGRPO's server has some (`adapter_slots`); other
    trainers of TRL merge adapters into the engine's weights.
    Example: Qwen3-8B, rank 32: 36 x 32 x 75,776 x 2 = 0.163 GiB.

    Leaves out slots of experts and of the head.
    """
    if max_loras == 0 or max_lora_rank == 0:
        return 0
    features = sum(
        sum(_lora_features(linear, layer.hidden_size, tensor_parallel_size) for linear in layer.linears) * count
        for layer, count in model.layer_kinds
    )
    return SIXTEEN_BIT_BYTES * max_loras * max_lora_rank * features


def _lora_features(linear: Linear, hidden_size: int, tensor_parallel_size: int) -> int:
    """in + out features of a projection's LoRA slot on each GPU.

    A row-parallel projection (its output is the residual stream) shards its input; the others shard their output.
    """
    if linear.out_features == hidden_size:
        return linear.in_features // tensor_parallel_size + linear.out_features
    return linear.in_features + linear.out_features // tensor_parallel_size

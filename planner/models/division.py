"""Parts of a model that vLLM divides among the GPUs of a tensor-parallel group, and stops at if they do not divide.

Paths are those of vLLM 0.31. What a quantization wants to divide beside these is a stop (planner/jobs/stops.py).
"""

from collections.abc import Iterator
from functools import lru_cache

from planner.models.image_tower import has_image_tower, image_tower
from planner.models.layers import Experts, Layer, Mlp
from planner.models.recurrent import states_of
from planner.models.shape import ModelShape

# Rows of the embedding and of the head are padded to a multiple of this.
VOCAB_PADDING = 64  # vllm/model_executor/layers/vocab_parallel_embedding.py, `DEFAULT_VOCAB_PADDING_SIZE`


@lru_cache(maxsize=4096)
def tensor_parallel_sizes(model: ModelShape, gpus: int) -> tuple[int, ...]:
    """The tensor parallel sizes that divide a number of GPUs and for which vLLM can divide the model."""
    return tuple(size for size in range(1, gpus + 1) if not gpus % size and not undivided(model, size))


def undivided(model: ModelShape, tensor_parallel_size: int) -> str:
    """The first part of the model that cannot be divided among the GPUs, as words; empty if all can.

        heads of attention and of states     keys' heads may also divide the GPUs, which then share one
        groups of Mamba 2                    or one group, of which every GPU has a copy
        features of an MLP, of an expert
        the vocabulary, padded to 64 rows
        heads and MLP of a vision encoder    unless every GPU has all of it

    Source: vllm/distributed/utils.py, `divide`, in model_executor/layers/linear.py, vocab_parallel_embedding.py,
    mamba/mamba_utils.py; linear.py, `MergedColumnParallelLinear.__init__`; fused_moe/config.py, `FusedMoEConfig`;
    mamba/mamba_mixer2.py, `MambaMixer2.__init__`; models/qwen2.py, `Qwen2Attention.__init__`, qwen2_5_vl.py.
    """
    return next(_undivided_parts(model, tensor_parallel_size), "")


def nearest_size(model: ModelShape, tensor_parallel_size: int, gpus: int | None = None) -> int:
    """The largest smaller size for which vLLM can divide the model, and which divides `gpus` if they are given."""
    smaller = range(tensor_parallel_size - 1, 0, -1)
    return next(size for size in smaller if not (gpus or size) % size and not undivided(model, size))


def _undivided_parts(model: ModelShape, gpus: int) -> Iterator[str]:
    yield from _undivided_states(model, gpus)
    for layer, _ in model.layer_kinds:
        attention = layer.attention
        heads, kv_heads = attention.num_attention_heads, attention.num_key_value_heads
        shared = bool(attention.kv_latent_dim) or kv_heads % gpus == 0 or gpus % kv_heads == 0
        if heads % gpus or not shared:
            yield f"The {heads} heads ({kv_heads} for keys) of {model.id}"
        yield from (f"The {size} features of {model.id}'s {name}" for size, name in _features(layer) if size % gpus)
    rows = model.vocab_size + -model.vocab_size % VOCAB_PADDING
    if rows % gpus:
        yield f"The {rows} rows of {model.id}'s vocabulary, padded to a multiple of {VOCAB_PADDING},"
    if has_image_tower(model) and not model.architecture.whole_vision:
        tower = image_tower(model, model.architecture.largest_image)
        assert tower is not None
        layer = tower.stack.layers[0]
        parts = (
            (layer.attention.num_attention_heads, "heads"),
            *((size, "MLP features") for size, _ in _features(layer)),
        )
        yield from (f"The {size} {name} of {model.id}'s vision encoder" for size, name in parts if size % gpus)


def _undivided_states(model: ModelShape, gpus: int) -> Iterator[str]:
    for state, _ in states_of(model):
        if state.heads % gpus or (not state.groups and state.channels % gpus):
            yield f"The {state.heads} heads of {model.id}'s states"
        if state.groups > 1 and state.groups % gpus:
            yield f"The {state.groups} groups of {model.id}'s states"


def _features(layer: Layer) -> Iterator[tuple[int, str]]:
    """Yield the features of a layer's MLP, or of its shared expert, and of its routed experts."""
    block = layer.feed_forward
    dense = block.shared if isinstance(block, Experts) else block
    if isinstance(dense, Mlp):
        yield dense.intermediate_size, "MLP"
    if isinstance(block, Experts):
        yield block.moe_intermediate_size, "experts"

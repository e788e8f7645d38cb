"""The vLLM engine's KV cache: bytes of one block, and blocks that one sequence takes."""

from functools import lru_cache
from itertools import groupby
from math import ceil

from msgspec import Struct
from msgspec.structs import replace

from planner.models.shape import Attention, ModelShape

# Tokens per block, unless the attention backend requires another size. Source: vllm/config/cache.py,
# DEFAULT_BLOCK_SIZE.
BLOCK_SIZE = 16
# The smaller kind of layers is padded to the number of the larger kind if the ratio of their numbers is below this.
# Source: vllm/v1/core/kv_cache_planning.py.
PADDING_RATIO = 1.5


class BlockGroup(Struct, frozen=True, kw_only=True):
    """Layers that share one block table. `sliding_window` is None if the layers keep every token (full attention)."""

    block_size: int
    sliding_window: int | None


class BlockLayout(Struct, frozen=True, kw_only=True):
    """One pool of equally large blocks, shared by all groups of layers."""

    bytes_per_block: int
    groups: tuple[BlockGroup, ...]

    def blocks_per_request(self, max_model_len: int, in_flight_tokens: int) -> int:
        """Upper bound of the blocks that one sequence of `max_model_len` tokens holds on one GPU, over all groups.

            full attention   ceil(max_model_len / block_size)
            sliding window   ceil(min(window - 1 + in_flight_tokens, max_model_len) / block_size) + 1

        Source: vllm/v1/kv_cache_interface.py, FullAttentionSpec.max_memory_usage_bytes and
        SlidingWindowSpec.max_admission_blocks_per_request. `in_flight_tokens` are scheduled, and their results are
        pending.
        """
        blocks = 0
        for group in self.groups:
            if group.sliding_window is None:
                blocks += -(-max_model_len // group.block_size)
            else:
                blocks += -(-min(group.sliding_window - 1 + in_flight_tokens, max_model_len) // group.block_size) + 1
        return blocks

    def tokens_and_concurrency(
        self, kv_cache_bytes: int, max_model_len: int, in_flight_tokens: int
    ) -> tuple[int, float]:
        """The two figures that vLLM logs for the KV cache of one GPU: its tokens, and its sequences of `max_model_len`.

            concurrency = (KV bytes // bytes_per_block) / blocks_per_request;  tokens = concurrency x max_model_len

        Source: vllm/v1/core/kv_cache_planning.py, v1/core/kv_cache_utils.py.
        """
        num_blocks = kv_cache_bytes // self.bytes_per_block
        concurrency = num_blocks / self.blocks_per_request(max_model_len, in_flight_tokens)
        return int(concurrency * max_model_len), concurrency


def page_bytes(attention: Attention, tensor_parallel_size: int, block_size: int, kv_dtype_bytes: int) -> int:
    """Bytes of one block of one layer on one GPU of the tensor-parallel group.

        attention   max(1, num_key_value_heads / tp) x block_size x (head_dim + v_head_dim) x bytes
        MLA         block_size x (kv_lora_rank + qk_rope_head_dim) x bytes, the same on every GPU

    Source: vllm/v1/kv_cache_interface.py, AttentionSpec.unpadded_page_size_bytes and MLAAttentionSpec (head_size_v =
    0). If there are fewer key-value heads than GPUs, every GPU has one head (vllm/model_executor/models/qwen2.py,
    `Qwen2Attention.__init__`).
    Example: Qwen2.5-7B, 4 heads of 128, bf16: 4 x 16 x 256 x 2 = 32,768 bytes.
    """
    if attention.kv_latent_dim:
        return block_size * attention.kv_latent_dim * kv_dtype_bytes
    heads = max(1, attention.num_key_value_heads // tensor_parallel_size)
    return heads * block_size * (attention.head_dim + attention.v_head_dim) * kv_dtype_bytes


def engine_attention(model: ModelShape, attention: Attention) -> Attention:
    """The attention block with the key-value heads that gemma 4 gives its full layers (`num_global_key_value_heads`).

    A measured layer has `num_key_value_heads` of the config, which is not divided over GPUs in the same way.
    Example: gemma-4-12B's full layers have 1 head of 512, not 8 of 64; every GPU keeps a copy of it.
    """
    text_config = model.config.get("text_config")
    heads = text_config.get("num_global_key_value_heads") if isinstance(text_config, dict) else None
    if heads is None or attention.sliding_window is not None:
        return attention
    return replace(
        attention,
        num_key_value_heads=heads,
        head_dim=attention.k_dim // heads,
        v_head_dim=attention.v_dim // heads,
    )


@lru_cache(maxsize=4096)
def block_layout(model: ModelShape, tensor_parallel_size: int, kv_dtype_bytes: int) -> BlockLayout:
    """vLLM's groups of layers for a model, and the bytes of one block (all layers of one group) on one GPU.

        one kind of layer   one group; block = sum of the layers' pages
        several kinds       groups of g layers each, g = layers of the rarest kind (of the commonest kind, if that has
                            fewer than 1.5 times as many); block = g x largest page; a kind whose page divides the
                            largest page puts that many times more tokens into a block

    Source: vllm/v1/core/kv_cache_planning.py, get_kv_cache_groups, unify_kv_cache_spec_page_size and
    _get_kv_cache_groups_uniform_page_size.
    Example: gemma-3-4b, 5 full and 29 sliding layers: g = 5, 1 + 6 groups (one layer of padding), block = 5 x (4 x 16 x
    512 x 2) = 327,680 bytes.

    Compared with vLLM 0.31's own planner for 60 models (results/vllm_planner.md).

    Leaves out Mamba and linear-attention layers, backends that require another block size (FlashAttention 4 with heads
    of 256 features on Blackwell), and Llama 4's chunked attention, which is counted as full attention.
    """
    blocks = [engine_attention(model, layer.attention) for layer in model.layers if not layer.attention.shares_cache]
    pages = [
        (attention.sliding_window, page_bytes(attention, tensor_parallel_size, BLOCK_SIZE, kv_dtype_bytes))
        for attention in blocks
    ]
    if len({window for window, _ in pages}) == 1:
        group = BlockGroup(block_size=BLOCK_SIZE, sliding_window=pages[0][0])
        return BlockLayout(bytes_per_block=sum(page for _, page in pages), groups=(group,))

    kinds = [(window, page, len(list(layers))) for (window, page), layers in groupby(sorted(pages, key=_window_first))]
    largest_page = max(page for _, page, _ in kinds)
    fewest, most = min(count for *_, count in kinds), max(count for *_, count in kinds)
    group_size = most if most < fewest * PADDING_RATIO else fewest
    groups = tuple(
        BlockGroup(
            block_size=BLOCK_SIZE * (largest_page // page if largest_page % page == 0 else 1), sliding_window=window
        )
        for window, page, count in kinds
        for _ in range(ceil(count / group_size))
    )
    return BlockLayout(bytes_per_block=group_size * largest_page, groups=groups)


def _window_first(kind: tuple[int | None, int]) -> tuple[int, int]:
    """Sort key of (sliding window, page bytes): full attention first, then by window."""
    return (kind[0] or 0, kind[1])

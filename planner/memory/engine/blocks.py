"""The vLLM engine's KV cache: bytes of one block, and blocks that one sequence takes."""

from functools import lru_cache
from itertools import groupby
from math import ceil

from msgspec import Struct
from msgspec.structs import replace

from planner.memory.dtypes import FLOAT32_BYTES, SIXTEEN_BIT_BYTES
from planner.models.architectures.states import RecurrentState
from planner.models.layers import Attention, layer_elements
from planner.models.recurrent import states_of
from planner.models.shape import ModelShape

# Tokens per block, unless the attention backend requires another size. Source: vllm/config/cache.py,
# DEFAULT_BLOCK_SIZE.
BLOCK_SIZE = 16
# The smaller kind of layers is padded to the number of the larger kind if the ratio of their numbers is below this.
# Source: vllm/v1/core/kv_cache_planning.py.
PADDING_RATIO = 1.5
# Blocks of a sequence in a group of Mamba or linear-attention layers: the state before and after the running block.
# Source: vllm/v1/kv_cache_interface.py, `MambaSpec.max_memory_usage_bytes` (cache mode "align", which prefix caching
# brings; it is on by default, and TRL leaves it so). Releases that leave it off keep one (`SINCE_VLLM`).
STATE_BLOCKS = 2


class BlockGroup(Struct, frozen=True, kw_only=True):
    """Layers that share one block table. `sliding_window` is None if the layers keep every token (full attention).

    `state`: the layers keep a state of constant size (Mamba, linear attention).
    """

    block_size: int
    sliding_window: int | None
    state: bool = False


class BlockLayout(Struct, frozen=True, kw_only=True):
    """One pool of equally large blocks, shared by all groups of layers."""

    bytes_per_block: int
    groups: tuple[BlockGroup, ...]
    state_blocks: int = STATE_BLOCKS

    def blocks_per_request(self, max_model_len: int, in_flight_tokens: int) -> int:
        """Upper bound of the blocks that one sequence of `max_model_len` tokens holds on one GPU, over all groups.

            full attention   ceil(max_model_len / block_size)
            sliding window   ceil(min(window - 1 + in_flight_tokens, max_model_len) / block_size) + 1
            state            STATE_BLOCKS, 1 in older releases

        Source: vllm/v1/kv_cache_interface.py, FullAttentionSpec.max_memory_usage_bytes and
        SlidingWindowSpec.max_admission_blocks_per_request. `in_flight_tokens` are scheduled, and their results are
        pending.
        """
        blocks = 0
        for group in self.groups:
            if group.state:
                blocks += self.state_blocks
            elif group.sliding_window is None:
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


def recurrent_state_bytes(state: RecurrentState, tensor_parallel_size: int) -> int:
    """Bytes of the state of one Mamba or linear-attention layer on one GPU of the tensor-parallel group.

        state = (kernel - 1) x channels / tp x 2 + heads / tp x head elements x (2, or 4 with `engine_float32`)

    Mamba 2 with fewer groups than GPUs copies groups. The convolution's running input is not kept.
    Source: vllm 0.31, model_executor/layers/mamba/mamba_utils.py, `MambaStateShapeCalculator` and
    `MambaStateDtypeCalculator`.

    Example: granite-4.0-h-micro: 3 x 4,352 x 2 + 64 x 8,192 x 2 = 1,074,688 bytes.
    """
    groups = state.groups
    extra = tensor_parallel_size - groups if groups and groups % tensor_parallel_size else 0
    channels = (state.channels + extra * state.group_channels) // tensor_parallel_size
    width = FLOAT32_BYTES if state.engine_float32 else SIXTEEN_BIT_BYTES
    matrices = state.heads // tensor_parallel_size * state.head_elements
    return (state.kernel - 1) * channels * SIXTEEN_BIT_BYTES + matrices * width


def aligned_block_size(model: ModelShape, attention: Attention, tensor_parallel_size: int, kv_dtype_bytes: int) -> int:
    """Tokens of a block of attention that is as large as the state of a Mamba or linear-attention layer, or larger.

    A multiple of 16. The state is padded to the size of the block.
    Source: vllm 0.31, platforms/interface.py, `_align_hybrid_block_size`.

    Example: granite-4.0-h-micro: a token has 2,048 bytes of keys and values a layer, so that a block has 528 tokens.
    """
    largest = max((recurrent_state_bytes(state, tensor_parallel_size) for state, _ in states_of(model)), default=0)
    smallest_page = page_bytes(attention, tensor_parallel_size, BLOCK_SIZE, kv_dtype_bytes)
    return BLOCK_SIZE * max(1, -(-largest // smallest_page))


@lru_cache(maxsize=4096)
def block_layout(
    model: ModelShape, tensor_parallel_size: int, kv_dtype_bytes: int, state_blocks: int = STATE_BLOCKS
) -> BlockLayout:
    """vLLM's groups of layers for a model, and the bytes of one block (all layers of one group) on one GPU.

        one kind of layer   one group; block = sum of the layers' pages
        several kinds       groups of g layers each, g = layers of the rarest kind (of the commonest kind, if that has
                            fewer than 1.5 times as many); block = g x largest page; a kind whose page divides the
                            largest page puts that many times more tokens into a block

    Source: vllm/v1/core/kv_cache_planning.py, get_kv_cache_groups, unify_kv_cache_spec_page_size and
    _get_kv_cache_groups_uniform_page_size.
    Example: gemma-3-4b, 5 full and 29 sliding layers: g = 5, 1 + 6 groups (one layer of padding), block = 5 x (4 x 16 x
    512 x 2) = 327,680 bytes.

    Layers with a state are one kind, whose page is that of attention (`aligned_block_size`). Example: Qwen3.5-4B, 8
    full layers and 24 with states: 4 groups of 8 layers.

    Compared with vLLM 0.31's own planner for 60 models (results/vllm_planner.md).

    Leaves out backends that require another block size (FlashAttention 4 with heads
    of 256 features on Blackwell), and Llama 4's chunked attention, which is counted as full attention.
    """
    states = sum(count for _, count in states_of(model))
    blocks = [
        engine_attention(model, layer.attention)
        for layer in model.layers
        if layer_elements(layer.attention) and not layer.attention.shares_cache
    ]
    if states:
        layout = _hybrid_layout(model, blocks, states, tensor_parallel_size, kv_dtype_bytes)
        return replace(layout, state_blocks=state_blocks)
    pages = [
        (attention.sliding_window, page_bytes(attention, tensor_parallel_size, BLOCK_SIZE, kv_dtype_bytes))
        for attention in blocks
    ]
    if len({window for window, _ in pages}) == 1:
        group = BlockGroup(block_size=BLOCK_SIZE, sliding_window=pages[0][0])
        return BlockLayout(bytes_per_block=sum(page for _, page in pages), groups=(group,))

    def full_first(kind: tuple[int | None, int]) -> tuple[int, int]:
        return kind[0] or 0, kind[1]

    kinds = [(window, page, len(list(layers))) for (window, page), layers in groupby(sorted(pages, key=full_first))]
    largest_page = max(page for _, page, _ in kinds)
    group_size = _group_size([count for *_, count in kinds])
    groups = tuple(
        BlockGroup(
            block_size=BLOCK_SIZE * (largest_page // page if largest_page % page == 0 else 1), sliding_window=window
        )
        for window, page, count in kinds
        for _ in range(ceil(count / group_size))
    )
    return BlockLayout(bytes_per_block=group_size * largest_page, groups=groups)


def _hybrid_layout(
    model: ModelShape, blocks: list[Attention], states: int, tensor_parallel_size: int, kv_dtype_bytes: int
) -> BlockLayout:
    """The layout of a model with `states` layers that keep a state, and `blocks` of full attention, which are alike."""
    block_size = aligned_block_size(model, blocks[0], tensor_parallel_size, kv_dtype_bytes)
    page = page_bytes(blocks[0], tensor_parallel_size, block_size, kv_dtype_bytes)
    group_size = _group_size([len(blocks), states])
    groups = (
        *(BlockGroup(block_size=block_size, sliding_window=None) for _ in range(ceil(len(blocks) / group_size))),
        *(BlockGroup(block_size=block_size, sliding_window=None, state=True) for _ in range(ceil(states / group_size))),
    )
    return BlockLayout(bytes_per_block=group_size * page, groups=groups)


def _group_size(counts: list[int]) -> int:
    """Return the layers of a group, from the number of layers of each kind."""
    fewest, most = min(counts), max(counts)
    return most if most < fewest * PADDING_RATIO else fewest

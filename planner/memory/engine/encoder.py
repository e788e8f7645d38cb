"""Memory of a vision encoder in vLLM's profile run, which shows it as many of the largest images as a batch may have.

Paths are those of vLLM 0.31, whose allocations were recorded on an emulated GPU: results/emulated_engine.md.
"""

from functools import lru_cache
from math import ceil

from planner.memory.dtypes import SIXTEEN_BIT_BYTES
from planner.models.image_tower import ImageTower, has_image_tower, image_tower
from planner.models.layers import Mlp
from planner.models.shape import ModelShape


@lru_cache(maxsize=1024)
def encoder_peak_bytes(
    model: ModelShape,
    tensor_parallel_size: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
    enforce_eager: bool,
) -> int:
    """Peak of the vision encoder's temporaries on each GPU in vLLM's profile run; 0 without formulas for the model.

        images = max_num_batched_tokens // tokens of the largest image, 1 at least
        peak   = images x patches x bytes of a patch in the heavier part of a block, attention or MLP

    Source: vllm/multimodal/encoder_budget.py, `MultiModalBudget` (images); v1/worker/gpu/mm/encoder_runner.py,
    `profile_encoder_cache`; model_executor/models/qwen2_vl.py, qwen2_5_vl.py, qwen3_vl.py, siglip.py, pixtral.py.

    Example: Qwen2-VL-2B shows itself one image of 65,536 patches: 65,536 x 2 x (3 x 5120 + 3 x 1280 + 1176) = 2.49 GiB.

    Leaves out videos that are longer than the largest image.
    """
    if not has_image_tower(model):
        return 0
    tower = image_tower(model, model.architecture.largest_image)
    assert tower is not None
    tokens = tower.text_tokens
    in_rows = max_num_seqs * max(1, max_model_len // tokens)
    images = max(1, min(max(max_num_batched_tokens, tokens) // tokens, in_rows))
    # Embeddings (or patches without them) live as long as the blocks.
    positions = tower.stack.hidden_size if tower.learned_positions else 0
    numbers = positions + _numbers_of_patch(tower, tensor_parallel_size, enforce_eager)
    return images * ceil(tower.patches * SIXTEEN_BIT_BYTES * numbers)


def _numbers_of_patch(tower: ImageTower, tensor_parallel_size: int, enforce_eager: bool) -> float:
    """16-bit numbers that are alive for a patch at the peak of a block.

    They are its pixels, the tokens that mergers inside the tower have made, and those of the heavier part of a block:

        attention   queries, keys and values (3 H), rotated queries and keys and a contiguous copy (4 H), output (1 H);
                    input, norm and projection (3 H)
        MLP         `_mlp_numbers`
    """
    hidden_size, mlp = tower.stack.hidden_size, tower.stack.layers[0].feed_forward
    assert isinstance(mlp, Mlp)
    attention = (8 if tower.angles else 4) * hidden_size // tensor_parallel_size + 3 * hidden_size
    inside = tower.deepstack * tower.text_hidden_size * tower.feature_tokens / tower.patches
    largest = max(attention, _mlp_numbers(mlp, hidden_size, tensor_parallel_size, enforce_eager))
    return tower.pixels / tower.patches + inside + largest


def _mlp_numbers(mlp: Mlp, hidden_size: int, tensor_parallel_size: int, enforce_eager: bool) -> int:
    """16-bit numbers that are alive for a patch in an MLP of F inner and H outer features.

        gated, eager mode      3 F + 3 H   gate and up, and their product, made by one kernel
        gated, compiled        4 F + 2 H   vLLM leaves its kernels to the compiler, which an encoder does not use: the
                                           activated gate is there besides, and the norm is gone
        quick_gelu             3 F + 3 H   x sigmoid(1.702 x): x, the sigmoid, the product
        others                 2 F + 3 H   input and output of the activation

    The H are the block's input, the attention's output and the norm of both.
    Source: vllm/config/compilation.py (`custom_ops`); results/emulated_engine.md.
    """
    inner = mlp.intermediate_size // tensor_parallel_size
    if mlp.gated:
        return (3 * inner + 3 * hidden_size) if enforce_eager else (4 * inner + 2 * hidden_size)
    return (3 if mlp.activation == "quick_gelu" else 2) * inner + 3 * hidden_size

"""Memory of a vision encoder in vLLM's profile run, which shows it as many of the largest images as a batch may have.

Paths are those of vLLM 0.31, whose allocations were recorded on an emulated GPU: results/emulated_engine.md.
"""

from functools import lru_cache
from math import ceil

from planner.memory.engine.weights import DTYPE_BYTES
from planner.models.architectures.image_tower import ImageTower, has_image_tower, image_tower
from planner.models.shape import Mlp, ModelShape

# The largest images that the published processors (preprocessor_config.json) let pass, in pixels a side: 28 x 28 x
# 16384 pixels for Qwen2-VL and Qwen2.5-VL, 4096 x 4096 for Qwen3-VL and Qwen3.5, 1540 for Mistral 3. Gemma 3 resizes.
LARGEST_IMAGE = {
    "qwen2_vl": "3584x3584",
    "qwen2_5_vl": "3584x3584",
    "qwen3_vl": "4096x4096",
    "qwen3_vl_moe": "4096x4096",
    "qwen3_5": "4096x4096",
    "qwen3_5_moe": "4096x4096",
    "mistral3": "1540x1540",
    "gemma3": "",
}
# Towers with learned positions, whose embeddings (or patches without them) live as long as the blocks.
LEARNED_POSITIONS = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "gemma3")


@lru_cache(maxsize=1024)
def encoder_peak_bytes(
    model: ModelShape,
    tensor_parallel_size: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
    enforce_eager: bool,
) -> int:
    """Peak of the vision encoder's temporaries on each GPU in the profile run; 0 for a model without formulas for it.

        images = max_num_batched_tokens // tokens of the largest image, 1 at least
        peak   = images x patches x bytes of a patch in the heavier part of a block, attention or MLP

    Source: vllm/multimodal/encoder_budget.py, `MultiModalBudget` (images); v1/worker/gpu/mm/encoder_runner.py,
    `profile_encoder_cache`; model_executor/models/qwen2_vl.py, qwen2_5_vl.py, qwen3_vl.py, siglip.py, pixtral.py.

    Example: Qwen2-VL-2B shows itself one image of 65,536 patches: 65,536 x 2 x (3 x 5120 + 3 x 1280 + 1176) = 2.49 GiB.

    Leaves out videos that are longer than the largest image.
    """
    if not has_image_tower(model):
        return 0
    tower = image_tower(model, LARGEST_IMAGE[model.model_type])
    assert tower is not None
    tokens = tower.text_tokens
    in_rows = max_num_seqs * max(1, max_model_len // tokens)
    images = max(1, min(max(max_num_batched_tokens, tokens) // tokens, in_rows))
    positions = tower.stack.hidden_size if model.model_type in LEARNED_POSITIONS else 0
    numbers = positions + _numbers_of_patch(tower, tensor_parallel_size, enforce_eager)
    return images * ceil(tower.patches * DTYPE_BYTES * numbers)


def _numbers_of_patch(tower: ImageTower, tensor_parallel_size: int, enforce_eager: bool) -> float:
    """Numbers of a patch at the peak of a block: its pixels, tokens of mergers inside the tower, and one of

    attention   queries, keys, values; two rotated, and these in one piece; the output; input, norm, projection
    MLP         `_mlp_numbers`
    """
    hidden_size, mlp = tower.stack.hidden_size, tower.stack.layers[0].feed_forward
    assert isinstance(mlp, Mlp)
    attention = (8 if tower.angles else 4) * hidden_size // tensor_parallel_size + 3 * hidden_size
    inside = tower.deepstack * tower.text_hidden_size * tower.feature_tokens / tower.patches
    largest = max(attention, _mlp_numbers(mlp, hidden_size, tensor_parallel_size, enforce_eager))
    return tower.pixels / tower.patches + inside + largest


def _mlp_numbers(mlp: Mlp, hidden_size: int, tensor_parallel_size: int, enforce_eager: bool) -> int:
    """Numbers of a patch that are alive in an MLP.

        gated            gate and up, then their product; without eager mode the activation of the gate besides
        quick_gelu       the input of x sigmoid(1.702 x), and both factors
        others           input and output of the activation

    Beside them the block's input, the attention's output and the norm of both. vLLM has a kernel for the first only in
    eager mode; the compiler is on otherwise, which an encoder does not use (config/compilation.py, `custom_ops`).
    """
    inner = mlp.intermediate_size // tensor_parallel_size
    if mlp.gated:
        return (3 * inner + 3 * hidden_size) if enforce_eager else (4 * inner + 2 * hidden_size)
    return (3 if mlp.activation == "quick_gelu" else 2) * inner + 3 * hidden_size

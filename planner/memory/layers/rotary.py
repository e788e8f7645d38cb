"""Rotary position embeddings, one function for each implementation in Transformers and Liger.

Sources: transformers 5.23 `models/<family>/modeling_<family>.py`, `apply_rotary_pos_emb` and `rotate_half`. All layers
share cos and sin, whose dtype is that of the residual stream; under autocast this makes queries and keys float32.

`angle` below stands for cos or sin: they have the same size, and only sizes matter here.
"""

from collections.abc import Callable

from planner.memory.layers import operators as op
from planner.memory.layers.autograd import Tape, Tensor
from planner.memory.layers.recipe import Recipe, tokens
from planner.models.layers import Attention, RotaryStyle

# Styles that end in torch.cat, so that queries lie in memory as [rows, heads, length, head_dim]; the other styles keep
# the memory order of the projection.
CONCATENATED_STYLES: frozenset[RotaryStyle] = frozenset(
    {"partial", "partial_interleaved", "partial_kept", "partial_summed", "halves", "pairs", "complex"}
)


def rotary(tape: Tape, recipe: Recipe, block: Attention, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    """Rotate queries and keys; return both, and after them the tensors that the model's code keeps in local variables.

    Liger rotates in place, in the backward pass too (ops/rope.py).
    """
    if "rotary" in recipe.liger_blocks and block.rotary_style in ("half", "half_cast_back"):
        return op.in_place(tape, q), op.in_place(tape, k)
    return STYLES[block.rotary_style](tape, recipe, block, q, k)


def angles(recipe: Recipe, features: int) -> Tensor:
    """cos or sin of the model, which takes no memory of the layer."""
    return Tensor(None, tokens(features), recipe.stream_width)


def rotate(tape: Tape, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """x * cos + rotate_half(x) * sin."""
    straight = op.mul(tape, x, cosine)
    crossed = op.mul(tape, rotate_half(tape, x), sine)
    return op.add(tape, straight, crossed)


def rotate_half(tape: Tape, x: Tensor) -> Tensor:
    """cat((-x2, x1)) of the halves of x; the backward pass copies each half's gradient into zeros of x's size."""
    half = tokens(x.elements[0] // 2)
    first, second = op.slice_view(tape, x, half), op.slice_view(tape, x, half)
    negated = op.scale(tape, second)
    return op.cat(tape, (negated, first))


def rotate_whole_heads(tape: Tape, recipe: Recipe, block: Attention, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate all features of every head, as llama does."""
    angle = angles(recipe, block.head_dim)
    return rotate(tape, q, angle, angle), rotate(tape, k, angle, angle)


def rotate_and_cast_back(tape: Tape, recipe: Recipe, block: Attention, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate all features of every head, and cast the results to the dtypes of q and k."""
    q_rotated, k_rotated = rotate_whole_heads(tape, recipe, block, q, k)
    return op.cast(tape, q_rotated, q.width), op.cast(tape, k_rotated, k.width)


def rotate_in_float32(tape: Tape, recipe: Recipe, block: Attention, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Cast q and k to float32, rotate all features, and cast back."""
    wide_q, wide_k = op.cast(tape, q, 4), op.cast(tape, k, 4)
    q_rotated, k_rotated = rotate_whole_heads(tape, recipe, block, wide_q, wide_k)
    return op.cast(tape, q_rotated, q.width), op.cast(tape, k_rotated, k.width)


def repeated_angles(tape: Tape, block: Attention, width: int) -> tuple[Tensor, Tensor]:
    """Allocate cos and sin for this layer alone (`repeat_interleave`).

    The model allocates them for one row; they are counted for every row.
    """
    cosine = tape.empty(tokens(block.rotary_dim), width)
    return cosine, tape.empty(tokens(block.rotary_dim), width)


def rotate_in_float32_interleaved(
    tape: Tape, recipe: Recipe, block: Attention, q: Tensor, k: Tensor
) -> tuple[Tensor, Tensor]:
    """Cast q and k to float32, rotate all features with the layer's own float32 cos and sin, and cast back."""
    cosine, sine = repeated_angles(tape, block, 4)
    q_rotated, k_rotated = rotate_one_in_float32(tape, q, cosine, sine), rotate_one_in_float32(tape, k, cosine, sine)
    return op.cast(tape, q_rotated, q.width), op.cast(tape, k_rotated, k.width)


def rotate_one_in_float32(tape: Tape, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """x.float() * cos + rotate_half(x).float() * sin."""
    straight = op.mul(tape, op.cast(tape, x, 4), cosine)
    crossed = op.mul(tape, op.cast(tape, rotate_half(tape, x), 4), sine)
    return op.add(tape, straight, crossed)


def split_rotary(tape: Tape, block: Attention, x: Tensor) -> tuple[Tensor, Tensor]:
    """Split the features of every head into those that are rotated and those that are not."""
    rotated_features = x.elements[0] * block.rotary_dim // block.head_dim
    if block.rotary_dim == block.head_dim:
        return op.view(tape, x), op.slice_view(tape, x, tokens(0))
    plain_features = x.elements[0] - rotated_features
    return op.slice_view(tape, x, tokens(rotated_features)), op.slice_view(tape, x, tokens(plain_features))


def rotate_part(tape: Tape, recipe: Recipe, block: Attention, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate `rotary_dim` features of every head with the model's cos and sin."""
    angle = angles(recipe, block.rotary_dim)
    return rotate_part_with(tape, block, q, k, angle, angle)


def rotate_part_and_keep(tape: Tape, recipe: Recipe, block: Attention, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    """Rotate `rotary_dim` features of every head as phi does, which keeps inputs and results in local variables."""
    angle = angles(recipe, block.rotary_dim)
    (q_rotary, q_plain), (k_rotary, k_plain) = split_rotary(tape, block, q), split_rotary(tape, block, k)
    q_rotated, k_rotated = rotate(tape, q_rotary, angle, angle), rotate(tape, k_rotary, angle, angle)
    q_all = op.cat(tape, (q_rotated, q_plain))
    return q_all, op.cat(tape, (k_rotated, k_plain)), q_rotated, k_rotated, q, k


def rotate_part_interleaved(
    tape: Tape, recipe: Recipe, block: Attention, q: Tensor, k: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotate `rotary_dim` features of every head with the layer's own cos and sin."""
    cosine, sine = repeated_angles(tape, block, recipe.stream_width)
    return rotate_part_with(tape, block, q, k, cosine, sine)


def rotate_part_with(
    tape: Tape, block: Attention, q: Tensor, k: Tensor, cosine: Tensor, sine: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotate part of q and part of k, then join each with its features that are not rotated."""
    q_rotary, q_plain = split_rotary(tape, block, q)
    k_rotary, k_plain = split_rotary(tape, block, k)
    q_rotated, k_rotated = rotate(tape, q_rotary, cosine, sine), rotate(tape, k_rotary, cosine, sine)
    q_rotated = op.cat(tape, (q_rotated, q_plain))
    k_rotated = op.cat(tape, (k_rotated, k_plain))
    return q_rotated, k_rotated


def rotate_part_by_join(tape: Tape, recipe: Recipe, block: Attention, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """cat((x1 * cos + rotate_half(x1) * sin, x2)) for q, then for k."""
    angle = angles(recipe, block.rotary_dim)
    (q_rotary, q_plain), (k_rotary, k_plain) = split_rotary(tape, block, q), split_rotary(tape, block, k)
    return rotate_and_join(tape, q_rotary, q_plain, angle), rotate_and_join(tape, k_rotary, k_plain, angle)


def rotate_and_join(tape: Tape, rotated_part: Tensor, plain_part: Tensor, angle: Tensor) -> Tensor:
    """Rotate one part of a head and join it with the other."""
    first = rotate(tape, rotated_part, angle, angle)
    return op.cat(tape, (first, plain_part))


def rotate_halves(tape: Tape, recipe: Recipe, block: Attention, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the two halves of every head as a pair, for q and k."""
    return rotate_halves_of(tape, recipe, block.head_dim, q), rotate_halves_of(tape, recipe, block.head_dim, k)


def rotate_halves_of(tape: Tape, recipe: Recipe, head_dim: int, x: Tensor) -> Tensor:
    """cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin)), x1 and x2 being the two halves of a head."""
    half = x.elements[0] // 2
    first, second = op.split(tape, x, (half, half))
    return rotate_pair(tape, recipe, head_dim, first, second)


def rotate_pair(tape: Tape, recipe: Recipe, features: int, first: Tensor, second: Tensor) -> Tensor:
    """cat((first * cos - second * sin, second * cos + first * sin))."""
    low = combine_products(tape, first, second, angles(recipe, features // 2), op.subtract)
    high = combine_products(tape, second, first, angles(recipe, features // 2), op.add)
    return op.cat(tape, (low, high))


def combine_products(
    tape: Tape, a: Tensor, b: Tensor, angle: Tensor, combined: Callable[[Tape, Tensor, Tensor], Tensor]
) -> Tensor:
    """`combined` (add or subtract) of a * cos and b * sin."""
    straight = op.mul(tape, a, angle)
    other = op.mul(tape, b, angle)
    return combined(tape, straight, other)


def rotate_even_odd(tape: Tape, recipe: Recipe, block: Attention, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the even and the odd features as a pair; they are strided views (`apply_rotary_pos_emb_interleave`)."""
    q_even, q_odd = even_and_odd(tape, q)
    k_even, k_odd = even_and_odd(tape, k)
    return rotate_pair(tape, recipe, block.rotary_dim, q_even, q_odd), rotate_pair(
        tape, recipe, block.rotary_dim, k_even, k_odd
    )


def even_and_odd(tape: Tape, x: Tensor) -> tuple[Tensor, Tensor]:
    """x[..., 0::2] and x[..., 1::2]."""
    half = tokens(x.elements[0] // 2)
    return op.slice_view(tape, x, half), op.slice_view(tape, x, half)


def rotate_complex(tape: Tape, recipe: Recipe, block: Attention, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """view_as_real(view_as_complex(x.float()) * freqs).type_as(x) (deepseek_v2, `apply_rotary_emb`)."""
    frequencies = Tensor(None, tokens(block.rotary_dim), 4)
    wide_q, wide_k = op.cast(tape, q, 4), op.cast(tape, k, 4)
    q_rotated = op.cast(tape, op.mul(tape, wide_q, frequencies), q.width)
    return q_rotated, op.cast(tape, op.mul(tape, wide_k, frequencies), k.width)


STYLES: dict[RotaryStyle, Callable[[Tape, Recipe, Attention, Tensor, Tensor], tuple[Tensor, ...]]] = {
    "half": rotate_whole_heads,
    "half_cast_back": rotate_and_cast_back,
    "float32": rotate_in_float32,
    "float32_interleaved": rotate_in_float32_interleaved,
    "partial": rotate_part,
    "partial_interleaved": rotate_part_interleaved,
    "partial_kept": rotate_part_and_keep,
    "partial_summed": rotate_part_by_join,
    "halves": rotate_halves,
    "pairs": rotate_even_odd,
    "complex": rotate_complex,
}

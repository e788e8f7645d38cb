"""Rotary positions, one function for each way they are written.

Sources: transformers 5.23 `models/<family>/modeling_<family>.py`, `apply_rotary_pos_emb` and `rotate_half`. cos and sin are shared by
the whole model; they are in the dtype of the residual stream, so that queries and keys become float32 under autocast.
"""

from collections.abc import Callable

from planner.memory.layers import operators as op
from planner.memory.layers.autograd import Tape, Tensor
from planner.memory.layers.recipe import Recipe, tokens
from planner.models.shape import Attention, RotaryStyle

# Styles that end in a join, whose queries are in the order [rows, heads, length, head_dim]; the others keep the projection's order.
JOINED: frozenset[RotaryStyle] = frozenset(
    {"partial", "partial_interleaved", "partial_kept", "partial_summed", "halves", "pairs", "complex"}
)


def rotary(tape: Tape, recipe: Recipe, block: Attention, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    """Queries and keys, and what the caller keeps besides. Liger turns both in place, backward too (ops/rope.py)."""
    if recipe.liger and block.rotary_style in ("half", "half_cast_back"):
        return op.in_place(tape, q), op.in_place(tape, k)
    return STYLES[block.rotary_style](tape, recipe, block, q, k)


def angles(recipe: Recipe, features: int) -> Tensor:
    """cos or sin: made once a model, counted there."""
    return Tensor(None, tokens(features), recipe.weight_width)


def turned(tape: Tape, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """x * cos + rotate_half(x) * sin."""
    straight = op.mul(tape, x, cosine)
    crossed = half_times_sine(tape, x, sine)
    return op.add(tape, straight, crossed)


def half_times_sine(tape: Tape, x: Tensor, sine: Tensor) -> Tensor:
    half = rotate_half(tape, x)
    return op.mul(tape, half, sine)


def rotate_half(tape: Tape, x: Tensor) -> Tensor:
    """cat((-x2, x1)); backward spreads each half into zeros of the whole."""
    half = tokens(x.elements[0] // 2)
    first, second = op.part(tape, x, half), op.part(tape, x, half)
    negated = op.scale(tape, second)
    return op.cat(tape, (negated, first))


def whole(tape: Tape, recipe: Recipe, block: Attention, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    angle = angles(recipe, block.head_dim)
    return turned(tape, q, angle, angle), turned(tape, k, angle, angle)


def cast_back(tape: Tape, recipe: Recipe, block: Attention, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    turned_q, turned_k = whole(tape, recipe, block, q, k)
    return op.cast(tape, turned_q, q.width), op.cast(tape, turned_k, k.width)


def in_float32(tape: Tape, recipe: Recipe, block: Attention, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    wide_q, wide_k = op.cast(tape, q, 4), op.cast(tape, k, 4)
    turned_q, turned_k = whole(tape, recipe, block, wide_q, wide_k)
    return op.cast(tape, turned_q, q.width), op.cast(tape, turned_k, k.width)


def repeated_angles(tape: Tape, block: Attention, width: int) -> tuple[Tensor, Tensor]:
    """cos and sin of this layer alone (`repeat_interleave`): one row for all rows, which is counted as if each had its own."""
    cosine = tape.empty(tokens(block.rotary_dim), width)
    return cosine, tape.empty(tokens(block.rotary_dim), width)


def in_float32_interleaved(tape: Tape, recipe: Recipe, block: Attention, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    cosine, sine = repeated_angles(tape, block, 4)
    turned_q, turned_k = turned_in_float32(tape, q, cosine, sine), turned_in_float32(tape, k, cosine, sine)
    return op.cast(tape, turned_q, q.width), op.cast(tape, turned_k, k.width)


def turned_in_float32(tape: Tape, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    straight = op.mul(tape, op.cast(tape, x, 4), cosine)
    crossed = wide_half_times_sine(tape, x, sine)
    return op.add(tape, straight, crossed)


def wide_half_times_sine(tape: Tape, x: Tensor, sine: Tensor) -> Tensor:
    half = op.cast(tape, rotate_half(tape, x), 4)
    return op.mul(tape, half, sine)


def two_shares(tape: Tape, block: Attention, x: Tensor) -> tuple[Tensor, Tensor]:
    """The features of every head that turn, and those that pass."""
    turning = x.elements[0] * block.rotary_dim // block.head_dim
    if block.rotary_dim == block.head_dim:
        return op.view(tape, x), op.part(tape, x, tokens(0))
    return op.part(tape, x, tokens(turning)), op.part(tape, x, tokens(x.elements[0] - turning))


def partial(tape: Tape, recipe: Recipe, block: Attention, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    angle = angles(recipe, block.rotary_dim)
    return joined(tape, block, q, k, angle, angle)


def partial_kept(tape: Tape, recipe: Recipe, block: Attention, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    """phi's attention keeps the turned features in local variables, and views of what it turned."""
    angle = angles(recipe, block.rotary_dim)
    (q_turning, q_passing), (k_turning, k_passing) = two_shares(tape, block, q), two_shares(tape, block, k)
    q_turned, k_turned = turned(tape, q_turning, angle, angle), turned(tape, k_turning, angle, angle)
    q_all = op.cat(tape, (q_turned, q_passing))
    return q_all, op.cat(tape, (k_turned, k_passing)), q_turned, k_turned, q, k


def partial_interleaved(tape: Tape, recipe: Recipe, block: Attention, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    cosine, sine = repeated_angles(tape, block, recipe.weight_width)
    return joined(tape, block, q, k, cosine, sine)


def joined(tape: Tape, block: Attention, q: Tensor, k: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
    """Both turn, then both are joined with what passes."""
    q_turning, q_passing = two_shares(tape, block, q)
    k_turning, k_passing = two_shares(tape, block, k)
    q_turned, k_turned = turned(tape, q_turning, cosine, sine), turned(tape, k_turning, cosine, sine)
    q_turned = op.cat(tape, (q_turned, q_passing))
    k_turned = op.cat(tape, (k_turned, k_passing))
    return q_turned, k_turned


def partial_summed(tape: Tape, recipe: Recipe, block: Attention, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """cat((x1 * cos + rotate_half(x1) * sin, x2))."""
    angle = angles(recipe, block.rotary_dim)
    (q_turning, q_passing), (k_turning, k_passing) = two_shares(tape, block, q), two_shares(tape, block, k)
    return summed(tape, q_turning, q_passing, angle), summed(tape, k_turning, k_passing, angle)


def summed(tape: Tape, turning: Tensor, passing: Tensor, angle: Tensor) -> Tensor:
    first = turned(tape, turning, angle, angle)
    return op.cat(tape, (first, passing))


def halves(tape: Tape, recipe: Recipe, block: Attention, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return of_halves(tape, recipe, block.head_dim, q), of_halves(tape, recipe, block.head_dim, k)


def of_halves(tape: Tape, recipe: Recipe, head_dim: int, x: Tensor) -> Tensor:
    """cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin)) of the two halves of a head."""
    half = x.elements[0] // 2
    first, second = op.split(tape, x, (half, half))
    return crossed_pair(tape, recipe, head_dim, first, second)


def crossed_pair(tape: Tape, recipe: Recipe, features: int, first: Tensor, second: Tensor) -> Tensor:
    low = crossed(tape, first, second, angles(recipe, features // 2), op.subtract)
    high = crossed(tape, second, first, angles(recipe, features // 2), op.add)
    return op.cat(tape, (low, high))


def crossed(
    tape: Tape, a: Tensor, b: Tensor, angle: Tensor, combined: Callable[[Tape, Tensor, Tensor], Tensor]
) -> Tensor:
    straight = op.mul(tape, a, angle)
    other = op.mul(tape, b, angle)
    return combined(tape, straight, other)


def pairs(tape: Tape, recipe: Recipe, block: Attention, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """The same of the even and the odd features, which are strided views (`apply_rotary_pos_emb_interleave`)."""
    q_even, q_odd = even_and_odd(tape, q)
    k_even, k_odd = even_and_odd(tape, k)
    return crossed_pair(tape, recipe, block.rotary_dim, q_even, q_odd), crossed_pair(
        tape, recipe, block.rotary_dim, k_even, k_odd
    )


def even_and_odd(tape: Tape, x: Tensor) -> tuple[Tensor, Tensor]:
    half = tokens(x.elements[0] // 2)
    return op.part(tape, x, half), op.part(tape, x, half)


def as_complex(tape: Tape, recipe: Recipe, block: Attention, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """view_as_real(view_as_complex(x.float()) * freqs).type_as(x) (deepseek_v2, `apply_rotary_emb`)."""
    frequencies = Tensor(None, tokens(block.rotary_dim), 4)
    wide_q, wide_k = op.cast(tape, q, 4), op.cast(tape, k, 4)
    turned_q = op.cast(tape, op.mul(tape, wide_q, frequencies), q.width)
    return turned_q, op.cast(tape, op.mul(tape, wide_k, frequencies), k.width)


STYLES: dict[RotaryStyle, Callable[[Tape, Recipe, Attention, Tensor, Tensor], tuple[Tensor, ...]]] = {
    "half": whole,
    "half_cast_back": cast_back,
    "float32": in_float32,
    "float32_interleaved": in_float32_interleaved,
    "partial": partial,
    "partial_interleaved": partial_interleaved,
    "partial_kept": partial_kept,
    "partial_summed": partial_summed,
    "halves": halves,
    "pairs": pairs,
    "complex": as_complex,
}

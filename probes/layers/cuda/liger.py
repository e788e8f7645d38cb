"""Liger's kernels: autograd functions that allocate and save what its Triton kernels do, and compute nothing.

Source: liger-kernel 0.8.5, ops/rms_norm.py (`LigerRMSNormFunction`), ops/swiglu.py (`LigerSiLUMulFunction`),
ops/geglu.py (`LigerGELUMulFunction`), ops/rope.py (`LigerRopeFunction`), ops/llama4_rope.py
(`LigerLlama4RopeFunction`), ops/fused_moe.py (`LigerFusedMoEFunction`); transformers/monkey_patch.py exchanges the
methods of the modules of a model that exists, and a function of its Python module for rotary positions.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch

from planner.models.layers import LigerBlocks
from probes.substitution import substituted

# The norms of a decoder layer that Liger replaces, by their names, and the types whose backward pass does not write
# into the gradient that it gets (`in_place=False`).
NORMS = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
    "post_self_attn_layernorm", "post_mlp_layernorm",
)  # fmt: skip
QUERY_NORMS = ("q_norm", "k_norm")
OUT_OF_PLACE = frozenset((
    "gemma2", "gemma3", "gemma3_text", "gemma4", "qwen3_next", "qwen3_5", "glm4", "olmo2", "olmo3", "exaone4",
))  # fmt: skip
ROTARY_FUNCTIONS = ("apply_rotary_pos_emb", "apply_rotary_emb")  # llama4 has the second
# Rows of float32 in which the gradient of a norm's weight is summed: one for each multiprocessor of an H100.
MULTIPROCESSORS = 132
TILE_TOKENS = 64  # of the fused experts: `BLOCK_M_TOKEN`
INDEX = torch.float32  # stands in for int32, see probes/layers/cuda/quantized.py


class _Norm(torch.autograd.Function):
    """Allocates what `LigerRMSNormFunction` does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, in_place: bool) -> torch.Tensor:
        rows = x.contiguous().view(-1, x.size(-1))
        result = torch.empty_like(rows)
        statistics = torch.empty(rows.size(0), dtype=torch.float32)
        ctx.save_for_backward(rows, weight, statistics)
        ctx.in_place = in_place
        return result.view(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight, _ = ctx.saved_tensors
        gradient, learned = gradient.contiguous(), None
        sums = torch.empty(MULTIPROCESSORS, rows.size(1), dtype=torch.float32) if ctx.needs_input_grad[1] else None
        of_input = gradient if ctx.in_place else torch.zeros_like(gradient)
        if sums is not None:
            learned = sums.sum(dim=0).to(weight.dtype)
        return of_input, learned, None


class _GatedProduct(torch.autograd.Function):
    """Allocates what `LigerSiLUMulFunction` and `LigerGELUMulFunction` do: gradients overwrite what was saved."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gradient.contiguous()
        gate, up = ctx.saved_tensors
        return gate, up


class _Rotary(torch.autograd.Function):
    """Rotates in place, as `LigerRopeFunction` does, in the backward pass too."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _as_stored(q), _as_stored(k)

    @staticmethod
    def backward(ctx: Any, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _as_stored(q), _as_stored(k)


def _as_stored(x: torch.Tensor) -> torch.Tensor:
    """[rows, heads, length, head] over memory in the order [rows, length, heads, head]; a copy if it is in another."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


class _FlatRotary(torch.autograd.Function):
    """Rotates [rows, length, heads, head] in place, as `LigerLlama4RopeFunction` does."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return q.contiguous().view_as(q), k.contiguous().view_as(k)

    @staticmethod
    def backward(ctx: Any, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return q.contiguous(), k.contiguous()


class _FusedExperts(torch.autograd.Function):
    """Allocates what `LigerFusedMoEFunction` does: the gradients of all experts' weights, also of frozen ones."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor
    ) -> torch.Tensor:
        rows, inner = chosen.numel(), gate_up.size(1) // 2
        tiles = rows // TILE_TOKENS + gate_up.size(0)
        indices = [torch.empty(size, dtype=INDEX) for size in (rows, rows, rows, tiles, tiles)]
        before = torch.empty(rows, 2 * inner, dtype=x.dtype)
        after = torch.empty(rows, inner, dtype=x.dtype)
        outputs = torch.empty(rows, x.size(1), dtype=x.dtype)
        flat = shares.flatten().contiguous()
        result = torch.empty(x.size(0), x.size(1), dtype=x.dtype)
        ctx.save_for_backward(x, gate_up, down, before, flat, *indices)
        ctx.shape = shares.shape
        del after, outputs
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, gate_up, down, before = ctx.saved_tensors[:4]
        gradient = gradient.contiguous()
        rows, dtype = before.size(0), gradient.dtype
        of_before, weighted = torch.empty_like(before, dtype=dtype), torch.empty(rows, before.size(1) // 2, dtype=dtype)
        of_shares = torch.zeros(rows, dtype=dtype)
        of_down = torch.zeros_like(down)
        expanded = torch.empty(rows, x.size(1), dtype=dtype)
        of_x = torch.zeros(x.size(0), x.size(1), dtype=dtype)
        of_gate_up = torch.zeros_like(gate_up)
        del of_before, weighted, expanded
        return of_x, of_gate_up, of_down, None, of_shares.view(ctx.shape)


def _norm(in_place: bool) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    def forward(module: Any, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = _Norm.apply(x, module.weight, in_place)
        return normed

    return forward


def _gated_mlp(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Replace the `forward` of an MLP with `gate_proj` and `up_proj`, which no variable holds."""
    output: torch.Tensor = module.down_proj(_GatedProduct.apply(module.gate_proj(x), module.up_proj(x)))
    return output


def _gated_mlp_of_one(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Replace the `forward` of an MLP whose gate and other half are one projection (phi3)."""
    halves = module.gate_up_proj(x)
    gate, up = halves.chunk(2, dim=-1)
    output: torch.Tensor = module.down_proj(_GatedProduct.apply(gate, up))
    return output


def _experts(module: Any, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Replace the `forward` of fused experts."""
    rows, width = x.view(-1, x.size(-1)), chosen.size(-1)
    indices = chosen.view(-1, width).to(torch.int32)
    output = _FusedExperts.apply(rows, module.gate_up_proj, module.down_proj, indices, shares.view(-1, width))
    return output.view(x.shape)


def _rotate(q: torch.Tensor, k: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace `apply_rotary_pos_emb`."""
    rotated: tuple[torch.Tensor, torch.Tensor] = _Rotary.apply(q, k)
    return rotated


def _rotate_flat(q: torch.Tensor, k: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace llama4's `apply_rotary_emb`."""
    rotated: tuple[torch.Tensor, torch.Tensor] = _FlatRotary.apply(q, k)
    return rotated


def decoder(model: Any) -> Any:
    """The module with the decoder layers of a transformers model, which llama4's `get_decoder` wraps in a head."""
    found = model.get_decoder()
    return getattr(found, "model", found)


@contextlib.contextmanager
def liger_kernels(model_type: str, blocks: LigerBlocks, layers: Any, final_norm: Any) -> Iterator[None]:
    """Exchange the methods of the layers as Liger does; rotary positions of every model of the type, inside the block.

    `final_norm`: the norm after the last layer.
    """
    norm = _norm(model_type not in OUT_OF_PLACE)
    if "norm" in blocks:
        final_norm.forward = MethodType(norm, final_norm)
    for layer in layers:
        for module, forward in _replaced(layer, blocks, norm):
            module.forward = MethodType(forward, module)
    with contextlib.ExitStack() as stack:
        if "rotary" in blocks:
            source = sys.modules[type(layers[0]).__module__]
            name = next(name for name in ROTARY_FUNCTIONS if hasattr(source, name))
            stack.enter_context(substituted(source, name, _rotate_flat if name == "apply_rotary_emb" else _rotate))
        yield


def _replaced(layer: Any, blocks: LigerBlocks, norm: Callable[..., Any]) -> Iterator[tuple[Any, Callable[..., Any]]]:
    """The modules of one layer that Liger replaces, with their methods."""
    children = dict(layer.named_children())
    if "norm" in blocks:
        yield from ((children[name], norm) for name in NORMS if name in children)
    attention = dict(children["self_attn"].named_children()) if "self_attn" in children else {}
    if "query_norm" in blocks:
        yield from ((attention[name], norm) for name in QUERY_NORMS if name in attention)
    block = children.get("mlp", children.get("feed_forward"))
    inside = dict(block.named_children()) if block is not None else {}
    shared = inside.get("shared_expert", inside.get("shared_experts"))
    if "mlp" in blocks and shared is not None:
        yield shared, _gated_mlp
    elif "mlp" in blocks and "down_proj" in inside and not getattr(layer, "enable_moe_block", False):
        yield block, _gated_mlp_of_one if "gate_up_proj" in inside else _gated_mlp
    if "experts" in blocks and "experts" in inside:
        yield inside["experts"], _experts

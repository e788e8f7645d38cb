"""The parameter tensors of a model, with equal ones grouped.

Some rules need the shape of each tensor: quantizers work in blocks, factored optimizers keep rows and columns, the
allocator rounds every allocation.
"""

from functools import cached_property, lru_cache
from math import prod
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from planner.models.layers import Experts, Layer, Linear, Norm
from planner.models.shape import ModelShape
from planner.quantities import CUDA_BLOCK_BYTES

Part = Literal[
    "embedding",
    "position",
    "linear",  # weights of nn.Linear and Conv1D in the decoder layers
    "vision_linear",
    "expert",  # 3-D parameters
    "router",
    "vector",  # norms and biases
    "head",
    "score",
    "other",  # parameters whose number is known, but not their shapes
    "adapter",
]


class EqualTensors(Struct, frozen=True, kw_only=True):
    """`count` parameter tensors of one `shape`."""

    part: Part
    shape: tuple[int, ...]
    count: int = 1
    # A text batch uses it. False (a vision tower, or a `Linear` that does not learn): its `.grad` stays None.
    passed: bool = True

    @property
    def elements(self) -> int:
        """Elements of one tensor."""
        return prod(self.shape)

    @property
    def params(self) -> int:
        """Elements of all `count` tensors."""
        return prod(self.shape) * self.count

    def times(self, factor: int, less: int = 0) -> "EqualTensors":
        """A copy with `count` x `factor` - `less` tensors."""
        return replace(self, count=self.count * factor - less)


def rounded_bytes(size_bytes: int) -> int:
    """Bytes that one allocation adds to `torch.cuda.memory_allocated`: `size_bytes` rounded up to a multiple of 512.

    Source: pytorch v2.13, c10/cuda/CUDACachingAllocator.cpp, `round_size`.
    Example: 896 parameters x 2 bytes = 1,792 bytes take 2,048.

    Leaves out the segments in which the allocator reserves memory (memory/runtime.py).
    """
    return -(-size_bytes // CUDA_BLOCK_BYTES) * CUDA_BLOCK_BYTES


def pinned_bytes(size_bytes: int) -> int:
    """Bytes of host memory that one page-locked allocation takes: `size_bytes` rounded up to a power of two.

    Source: torch 2.13, ATen/core/CachingHostAllocator.h (`PowerOf2Ceil`; no limit unless
    `pinned_max_round_threshold_mb` is set). Freed blocks stay in its cache.
    Example: Qwen2.5-7B's down_proj, 3,584 x 18,944 in bfloat16, is 135.8 MB and takes 256 MiB.
    """
    return 1 << (size_bytes - 1).bit_length() if size_bytes else 0


class TensorSet(Struct, frozen=True, kw_only=True, eq=False, dict=True):
    """Some tensors of a model. Compared by identity, which makes it a fast key for `lru_cache`."""

    kinds: tuple[EqualTensors, ...]

    @cached_property
    def params(self) -> int:
        """Elements of all tensors."""
        return sum(kind.params for kind in self.kinds)

    @cached_property
    def count(self) -> int:
        """Number of tensors."""
        return sum(kind.count for kind in self.kinds)

    @cached_property
    def largest(self) -> int:
        """Elements of the largest single tensor."""
        return max((kind.elements for kind in self.kinds), default=0)

    @cached_property
    def passed(self) -> "TensorSet":
        """The tensors that a text batch uses."""
        return (
            self
            if all(kind.passed for kind in self.kinds)
            else TensorSet(kinds=tuple(kind for kind in self.kinds if kind.passed))
        )

    def only(self, *parts: Part) -> "TensorSet":
        """The tensors of the given parts of the model."""
        return TensorSet(kinds=tuple(kind for kind in self.kinds if kind.part in parts))


@lru_cache(maxsize=4096)
def tensor_bytes(tensors: TensorSet, bytes_per_param: int) -> int:
    """Bytes on one GPU of tensors that are not sharded, each in its own allocation.

    bytes = sum over tensors of ceil(elements x bytes_per_param / 512) x 512
    """
    return sum(rounded_bytes(kind.elements * bytes_per_param) * kind.count for kind in tensors.kinds)


@lru_cache(maxsize=1024)
def model_tensors(model: ModelShape, head: Literal["lm_head", "score"]) -> tuple[EqualTensors, ...]:
    """Every parameter tensor of the model as loaded; `head` "score" is the one-output head of a reward model.

    With the language-model head the elements add up to exactly `model.params`.

    Source: transformers 5.23, modeling_layers.py, `GenericForSequenceClassification` (score is nn.Linear(hidden_size,
    num_labels, bias=False)).
    """
    return _tensors(model, head, model.layer_kinds)


@lru_cache(maxsize=256)
def tensors_in_order(model: ModelShape, head: Literal["lm_head", "score"]) -> tuple[EqualTensors, ...]:
    """The tensors of `model_tensors` layer by layer, in the order of `named_parameters`."""
    return _tensors(model, head, tuple((layer, 1) for layer in model.layers))


def _tensors(
    model: ModelShape, head: Literal["lm_head", "score"], layers: tuple[tuple[Layer, int], ...]
) -> tuple[EqualTensors, ...]:
    """Every parameter tensor of the model, with `layers` as (layer, number of equal layers)."""
    found = [EqualTensors(part="embedding", shape=_matrix(model.embed_params, model.vocab_size))]
    if model.position_params:
        found.append(
            EqualTensors(
                part="position", shape=_matrix(model.position_params, model.position_params // model.hidden_size)
            )
        )
    for layer, count in layers:
        found.extend(tensors.times(count) for tensors in _layer_tensors(layer))
    norms = (model.final_norm,) if model.embed_norm is None else (model.final_norm, model.embed_norm)
    found.extend(tensors for norm in norms for tensors in _norm_tensors(norm))
    for linear, count in outer_linears(model):
        found.extend(tensors.times(count) for tensors in _linear_tensors(linear, "linear"))
    for linear, count in vision_linears(model):
        found.extend(
            replace(tensors, passed=False).times(count) for tensors in _linear_tensors(linear, "vision_linear")
        )
    found.extend(score_tensors(model) if head == "score" else head_tensors(model))
    rest = (
        model.params
        - model.lm_head_params
        - model.lm_head_bias_params
        - sum(kind.params for kind in found if kind.part not in ("head", "score"))
    )
    if rest > 0:
        idle = model.idle_params - sum(
            kind.params for kind in found if not kind.passed and kind.part not in ("head", "score")
        )
        found.extend(_unnamed_tensors(model, rest, min(max(idle, 0), rest)))
    return tuple(kind for kind in found if kind.params)


def score_tensors(model: ModelShape) -> tuple[EqualTensors, ...]:
    """The score head of a reward model: one row of the width of the decoder's output."""
    return (EqualTensors(part="score", shape=(1, model.embedding_features)),)


def outer_linears(model: ModelShape) -> tuple[tuple[Linear, int], ...]:
    """`nn.Linear` modules outside the decoder layers that a text batch uses, with their counts; not the head.

    Source: transformers 5.23, models/opt/modeling_opt.py, `project_in` and `project_out`; for architectures without
    formulas `model.outer_linears`, read from the real modules.
    """
    projected = model.embedding_features
    if projected != model.hidden_size:
        return (
            (Linear(name="project_in", in_features=projected, out_features=model.hidden_size), 1),
            (Linear(name="project_out", in_features=model.hidden_size, out_features=projected), 1),
        )
    return model.outer_linears


def vision_linears(model: ModelShape) -> tuple[tuple[Linear, int], ...]:
    """`nn.Linear` modules of a vision tower, which a text batch does not use, with their counts.

    Source: transformers 5.23, models/siglip/modeling_siglip.py (`SiglipAttention`, `SiglipMLP`) for gemma 3; for
    architectures without formulas `model.vision_linears`, read from the real modules.
    """
    vision = model.config.get("vision_config")
    if model.architecture.tower == "siglip" and isinstance(vision, dict) and model.vision_params:
        hidden, inner, layers = (
            int(vision["hidden_size"]),
            int(vision["intermediate_size"]),
            int(vision["num_hidden_layers"]),
        )
        attention = tuple(
            (Linear(name=name, in_features=hidden, out_features=hidden, bias=True), layers)
            for name in ("q_proj", "k_proj", "v_proj", "out_proj")
        )
        up = Linear(name="fc1", in_features=hidden, out_features=inner, bias=True)
        down = Linear(name="fc2", in_features=inner, out_features=hidden, bias=True)
        return (*attention, (up, layers), (down, layers))
    return model.vision_linears


def decoder_linears(layer: Layer) -> tuple[Linear, ...]:
    """Every `nn.Linear` of a decoder layer: its projections, and the gate of a shared expert.

    Source: transformers 5.23, models/qwen2_moe/modeling_qwen2_moe.py, `shared_expert_gate = nn.Linear(hidden_size, 1)`.
    """
    experts = layer.feed_forward
    if isinstance(experts, Experts) and experts.shared_gate_params:
        return (
            *layer.linears,
            Linear(name="shared_expert_gate", in_features=experts.shared_gate_params, out_features=1),
        )
    return layer.linears


def expert_shapes(layer: Layer, experts: Experts) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Shapes [experts, out, in] of the fused `gate_up_proj` (`up_proj` for experts without a gate) and of `down_proj`.

    Source: transformers 5.23, integrations/moe.py; models/nemotron_h/modeling_nemotron_h.py has experts without gates.
    """
    inner, down = experts.moe_intermediate_size, (experts.num_experts, layer.hidden_size, experts.moe_intermediate_size)
    gated = experts.expert_params >= 3 * prod(down)
    return (experts.num_experts, 2 * inner if gated else inner, layer.hidden_size), down


def _layer_tensors(layer: Layer) -> list[EqualTensors]:
    """The parameter tensors of one decoder layer."""
    linears = decoder_linears(layer)
    found = [
        replace(tensors, passed=linear.learns) for linear in linears for tensors in _linear_tensors(linear, "linear")
    ]
    if isinstance(layer.feed_forward, Experts):
        found.extend(_expert_tensors(layer, layer.feed_forward))
    found.extend(tensors for norm in layer.norms for tensors in _norm_tensors(norm))
    found.extend(_qk_norm_tensors(layer))
    found.append(EqualTensors(part="vector", shape=(layer.attention.sink_params,)))
    return [replace(kind, passed=layer.passed and kind.passed) for kind in found if kind.params]


def _linear_tensors(linear: Linear, part: Part) -> list[EqualTensors]:
    """Weight and bias of an `nn.Linear`."""
    found = [EqualTensors(part=part, shape=(linear.out_features, linear.in_features))]
    if linear.bias:
        found.append(EqualTensors(part="vector", shape=(linear.out_features,)))
    return found


def _expert_tensors(layer: Layer, experts: Experts) -> list[EqualTensors]:
    """The fused weights of the experts, their biases, and the router."""
    gate_up, down = expert_shapes(layer, experts)
    biases = experts.expert_params - prod(gate_up) - prod(down)
    found = [EqualTensors(part="expert", shape=gate_up), EqualTensors(part="expert", shape=down)]
    if biases:  # gpt_oss: one row of biases per expert for each of the two
        found += [EqualTensors(part="vector", shape=gate_up[:2]), EqualTensors(part="vector", shape=down[:2])]
    if experts.router_params:
        found.append(EqualTensors(part="router", shape=(experts.num_experts, layer.hidden_size)))
    router_biases = experts.router_params - experts.num_experts * layer.hidden_size
    if router_biases > 0:
        found.append(EqualTensors(part="vector", shape=(router_biases,)))
    return found


def _norm_tensors(norm: Norm) -> list[EqualTensors]:
    """Weight, and bias if there is one, of a norm."""
    return (
        [EqualTensors(part="vector", shape=(norm.features,), count=norm.params // norm.features)] if norm.params else []
    )


def _qk_norm_tensors(layer: Layer) -> list[EqualTensors]:
    """Weights of the norms of queries and keys."""
    attention = layer.attention
    if not attention.qk_norm_params:
        return []
    widths = (
        (attention.q_dim, attention.k_dim)
        if attention.qk_norm_params == attention.q_dim + attention.k_dim
        else (attention.qk_norm_params // 2,) * 2
    )
    return [EqualTensors(part="vector", shape=(width,)) for width in widths]


def head_tensors(model: ModelShape, untied: bool = False) -> list[EqualTensors]:
    """Weight and bias of the language-model head; no weight if it is tied to the embedding, unless `untied`."""
    found = [EqualTensors(part="vector", shape=(model.lm_head_bias_params,))] if model.lm_head_bias_params else []
    weight = model.embed_params if untied and model.tied else model.lm_head_params
    if weight:
        found.append(EqualTensors(part="head", shape=_matrix(weight, model.vocab_size)))
    return found


def _unnamed_tensors(model: ModelShape, rest: int, idle: int) -> list[EqualTensors]:
    """The `rest` of the parameters, whose shapes are not known; a text batch does not use `idle` of them."""
    linear = 0 if vision_linears(model) else min(model.vision_linear_params, idle)
    return [
        EqualTensors(part="vision_linear", shape=(linear,), passed=False),
        EqualTensors(part="other", shape=(idle - linear,), passed=False),
        EqualTensors(part="other", shape=(rest - idle,)),
    ]


def _matrix(params: int, rows: int) -> tuple[int, ...]:
    """The shape [rows, params / rows]; [params] if that is no whole number."""
    return (rows, params // rows) if rows and params % rows == 0 else (params,)

"""Tensors: a model's parameters one by one, equal ones counted once.

Per-tensor shapes matter where a rule is per tensor: blocks of a quantizer, factored optimizers, rounding of the allocator.
"""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Literal

from planner.models.shape import Experts, Layer, Linear, ModelShape, Norm
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
    "other",  # counted by the catalogue, without shapes
    "adapter",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensors:
    """`count` parameter tensors of one `shape`."""

    part: Part
    shape: tuple[int, ...]
    count: int = 1
    passed: bool = True  # batches of text run through it; what they do not pass gets no gradient (`.grad` stays None)

    @property
    def elements(self) -> int:
        """Of one of them."""
        return prod(self.shape)

    @property
    def params(self) -> int:
        """Of all of them."""
        return prod(self.shape) * self.count

    def times(self, factor: int, less: int = 0) -> "Tensors":
        return replace(self, count=self.count * factor - less)


def rounded_bytes(size_bytes: int) -> int:
    """What one allocation of `size_bytes` takes in `torch.cuda.memory_allocated`: 896 x 2 bytes take 2048, nothing takes nothing.

    Source: pytorch, c10/cuda/CUDACachingAllocator.cpp `round_size`. Leaves out segments (see runtime.py).
    """
    return -(-size_bytes // CUDA_BLOCK_BYTES) * CUDA_BLOCK_BYTES


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorSet:
    """Some tensors of a model. Compared by identity, so that caches on it cost nothing."""

    kinds: tuple[Tensors, ...]

    @cached_property
    def params(self) -> int:
        return sum(kind.params for kind in self.kinds)

    @cached_property
    def count(self) -> int:
        return sum(kind.count for kind in self.kinds)

    @cached_property
    def largest(self) -> int:
        """Elements of the largest single tensor."""
        return max((kind.elements for kind in self.kinds), default=0)

    @cached_property
    def passed(self) -> "TensorSet":
        """The tensors that batches of text run through."""
        return (
            self
            if all(kind.passed for kind in self.kinds)
            else TensorSet(kinds=tuple(kind for kind in self.kinds if kind.passed))
        )

    def only(self, *parts: Part) -> "TensorSet":
        return TensorSet(kinds=tuple(kind for kind in self.kinds if kind.part in parts))


@lru_cache(maxsize=4096)
def tensor_bytes(tensors: TensorSet, bytes_per_param: int) -> int:
    """Bytes of tensors that each have an allocation of their own: the sum over them of elements x bytes, rounded up to 512."""
    return sum(rounded_bytes(kind.elements * bytes_per_param) * kind.count for kind in tensors.kinds)


@lru_cache(maxsize=1024)
def model_tensors(model: ModelShape, head: Literal["lm_head", "score"]) -> tuple[Tensors, ...]:
    """Every parameter tensor of the model as loaded; `score` replaces the language-model head by one output a row.

    Source: transformers 5.23, modeling_layers.py `GenericForSequenceClassification` (score is nn.Linear(hidden_size, num_labels,
    bias=False)). The sum equals `model.params` for the language-model head, to the unit.
    """
    return _tensors(model, head, model.layer_kinds)


@lru_cache(maxsize=256)
def tensors_in_order(model: ModelShape, head: Literal["lm_head", "score"]) -> tuple[Tensors, ...]:
    """The same tensors one layer after the other, as `named_parameters` has them."""
    return _tensors(model, head, tuple((layer, 1) for layer in model.layers))


def _tensors(
    model: ModelShape, head: Literal["lm_head", "score"], layers: tuple[tuple[Layer, int], ...]
) -> tuple[Tensors, ...]:
    found = [Tensors(part="embedding", shape=_matrix(model.embed_params, model.vocab_size))]
    if model.position_params:
        found.append(
            Tensors(part="position", shape=_matrix(model.position_params, model.position_params // model.hidden_size))
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
    found.extend(score_tensors(model) if head == "score" else _head_tensors(model))
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


def score_tensors(model: ModelShape) -> tuple[Tensors, ...]:
    """The score head of a sequence classifier: one row as wide as what the decoder returns."""
    return (Tensors(part="score", shape=(1, _output_features(model))),)


def outer_linears(model: ModelShape) -> tuple[tuple[Linear, int], ...]:
    """`nn.Linear` modules outside the decoder layers that text passes, with their counts; the output head is not among them.

    Source: transformers 5.23, models/opt/modeling_opt.py `project_in` and `project_out`; elsewhere what the modules themselves show.
    """
    projected = _output_features(model)
    if projected != model.hidden_size:
        return (
            (Linear(name="project_in", in_features=projected, out_features=model.hidden_size), 1),
            (Linear(name="project_out", in_features=model.hidden_size, out_features=projected), 1),
        )
    return model.outer_linears


def vision_linears(model: ModelShape) -> tuple[tuple[Linear, int], ...]:
    """`nn.Linear` modules of a tower that text does not pass, with their counts.

    Source: transformers 5.23, models/siglip/modeling_siglip.py (`SiglipAttention`, `SiglipMLP`) for gemma 3's; elsewhere what the modules show.
    """
    vision = model.config.get("vision_config")
    if model.model_type == "gemma3" and isinstance(vision, dict) and model.vision_params:
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
    """Every `nn.Linear` of a decoder layer: its projections and the gate on shared experts.

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
    """Shapes of the fused `gate_up_proj`, or of an `up_proj` without gate, and of `down_proj`: experts x out x in.

    Source: transformers 5.23, integrations/moe.py; models/nemotron_h/modeling_nemotron_h.py has experts without gates.
    """
    inner, down = experts.moe_intermediate_size, (experts.num_experts, layer.hidden_size, experts.moe_intermediate_size)
    gated = experts.expert_params >= 3 * prod(down)
    return (experts.num_experts, 2 * inner if gated else inner, layer.hidden_size), down


def _output_features(model: ModelShape) -> int:
    width = model.config.get("word_embed_proj_dim")  # OPT-350m embeds 512 and computes in 1024
    return width if isinstance(width, int) else model.hidden_size


def _layer_tensors(layer: Layer) -> list[Tensors]:
    found = [tensors for linear in decoder_linears(layer) for tensors in _linear_tensors(linear, "linear")]
    if isinstance(layer.feed_forward, Experts):
        found.extend(_expert_tensors(layer, layer.feed_forward))
    found.extend(tensors for norm in layer.norms for tensors in _norm_tensors(norm))
    found.extend(_qk_norm_tensors(layer))
    found.append(Tensors(part="vector", shape=(layer.attention.sink_params,)))
    return [replace(kind, passed=layer.passed) for kind in found if kind.params]


def _linear_tensors(linear: Linear, part: Part) -> list[Tensors]:
    found = [Tensors(part=part, shape=(linear.out_features, linear.in_features))]
    if linear.bias:
        found.append(Tensors(part="vector", shape=(linear.out_features,)))
    return found


def _expert_tensors(layer: Layer, experts: Experts) -> list[Tensors]:
    gate_up, down = expert_shapes(layer, experts)
    biases = experts.expert_params - prod(gate_up) - prod(down)
    found = [Tensors(part="expert", shape=gate_up), Tensors(part="expert", shape=down)]
    if biases:  # gpt_oss: one row of biases an expert for each of the two
        found += [Tensors(part="vector", shape=gate_up[:2]), Tensors(part="vector", shape=down[:2])]
    if experts.router_params:
        found.append(Tensors(part="router", shape=(experts.num_experts, layer.hidden_size)))
    router_biases = experts.router_params - experts.num_experts * layer.hidden_size
    if router_biases > 0:
        found.append(Tensors(part="vector", shape=(router_biases,)))
    return found


def _norm_tensors(norm: Norm) -> list[Tensors]:
    return [Tensors(part="vector", shape=(norm.features,), count=norm.params // norm.features)] if norm.params else []


def _qk_norm_tensors(layer: Layer) -> list[Tensors]:
    attention = layer.attention
    if not attention.qk_norm_params:
        return []
    widths = (
        (attention.q_dim, attention.k_dim)
        if attention.qk_norm_params == attention.q_dim + attention.k_dim
        else (attention.qk_norm_params // 2,) * 2
    )
    return [Tensors(part="vector", shape=(width,)) for width in widths]


def _head_tensors(model: ModelShape) -> list[Tensors]:
    found = [Tensors(part="vector", shape=(model.lm_head_bias_params,))] if model.lm_head_bias_params else []
    if model.lm_head_params:
        found.append(Tensors(part="head", shape=_matrix(model.lm_head_params, model.vocab_size)))
    return found


def _unnamed_tensors(model: ModelShape, rest: int, idle: int) -> list[Tensors]:
    """What is only counted; `idle` of it is not passed by text."""
    linear = 0 if vision_linears(model) else min(model.vision_linear_params, idle)
    return [
        Tensors(part="vision_linear", shape=(linear,), passed=False),
        Tensors(part="other", shape=(idle - linear,), passed=False),
        Tensors(part="other", shape=(rest - idle,)),
    ]


def _matrix(params: int, rows: int) -> tuple[int, ...]:
    return (rows, params // rows) if rows and params % rows == 0 else (params,)

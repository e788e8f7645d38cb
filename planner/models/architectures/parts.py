"""Parts of decoder layers: norms, activations, gated and plain MLPs."""

from planner.models.architectures.fields import Fields
from planner.models.layers import Activation, Linear, Mlp, Norm, NormKind

# Learned elements per feature. Source: transformers 5.23, the norm classes named in planner/models/layers.py
# (`CohereLayerNorm` has a weight and no bias; `nn.LayerNorm` has both).
PARAMS_PER_FEATURE: dict[NormKind, int] = {
    "rms": 1,
    "rms_fp32_weight": 1,
    "rms_gemma": 1,
    "rms_unweighted": 0,
    "layer": 2,
    "layer_cohere": 1,
    "layer_unweighted": 0,
    "none": 0,
}

# Source: transformers 5.23, activations.py, `ACT2CLS`.
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_new",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
}


def norm(kind: NormKind, features: int) -> Norm:
    return Norm(kind=kind, features=features, params=PARAMS_PER_FEATURE[kind] * features)


def activation(fields: Fields, key: str) -> Activation:
    """The activation under a config key; `shape_of` has refused the ones that are not in `ACTIVATIONS`."""
    return ACTIVATIONS[fields.text(key)]


def gated_mlp(
    hidden_size: int, intermediate_size: int, act: Activation, *, bias: bool = False, fused: bool = False
) -> Mlp:
    """The MLP `down(act(gate(x)) * up(x))`. `fused`: gate and up are one projection (phi3, glm)."""
    inward = (
        (Linear(name="gate_up_proj", in_features=hidden_size, out_features=2 * intermediate_size, bias=bias),)
        if fused
        else tuple(
            Linear(name=name, in_features=hidden_size, out_features=intermediate_size, bias=bias)
            for name in ("gate_proj", "up_proj")
        )
    )
    down = Linear(name="down_proj", in_features=intermediate_size, out_features=hidden_size, bias=bias)
    return Mlp(linears=(*inward, down), intermediate_size=intermediate_size, gated=True, activation=act)


def plain_mlp(hidden_size: int, intermediate_size: int, act: Activation, *, names: tuple[str, str], bias: bool) -> Mlp:
    """The MLP `second(act(first(x)))`."""
    first = Linear(name=names[0], in_features=hidden_size, out_features=intermediate_size, bias=bias)
    second = Linear(name=names[1], in_features=intermediate_size, out_features=hidden_size, bias=bias)
    return Mlp(linears=(first, second), intermediate_size=intermediate_size, gated=False, activation=act)

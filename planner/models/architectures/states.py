"""States of constant size that a mixer keeps of a sequence in place of keys and values: Mamba, linear attention."""

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

# "float32": in every dtype; "product": float32, but the autocast dtype where matrix products run under autocast.
StateDtype = Literal["float32", "product"]


class RecurrentState(Struct, frozen=True, kw_only=True):
    """State of a fixed size that a layer keeps of a sequence, however long; sizes count elements, not bytes.

    `channels` of a causal convolution of `kernel` tokens in the dtype of the hidden states, and a matrix of
    `head_elements` for each of `heads` (0: only the convolution). `group_channels` of the channels belong to each of
    `groups` (Mamba 2), of which each GPU of an engine has one at least. `engine_float32`: a vLLM engine keeps the
    matrices in float32, not in the dtype of the model.
    """

    channels: int
    kernel: int
    heads: int = 0
    head_elements: int = 0
    dtype: StateDtype = "float32"
    groups: int = 0
    group_channels: int = 0
    engine_float32: bool = False

    @property
    def convolution(self) -> int:
        return self.channels * self.kernel

    @property
    def matrices(self) -> int:
        return self.heads * self.head_elements


NOTHING_KEPT = RecurrentState(channels=0, kernel=0)


def gated_delta_net(config: Mapping[str, Any]) -> RecurrentState:
    """Qwen's linear attention: [2 x key heads x key dim + value heads x value dim, kernel], and key dim x value dim.

    Source: transformers 5.23, models/qwen3_next/modeling_qwen3_next.py, `Qwen3NextGatedDeltaNet` and
    `torch_chunk_gated_delta_rule` (float32); the same in qwen3_5 and qwen3_5_moe.
    """
    keys, values = config["linear_key_head_dim"], config["linear_value_head_dim"]
    key_heads, value_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    return RecurrentState(
        channels=2 * key_heads * keys + value_heads * values,
        kernel=config["linear_conv_kernel_dim"],
        heads=value_heads,
        head_elements=keys * values,
    )


def qwen3_5_delta_net(config: Mapping[str, Any]) -> RecurrentState:
    """Qwen3.5's linear attention: `gated_delta_net`, with matrices in float32 in an engine.

    Its published configs have mamba_ssm_dtype "float32", which the catalogue leaves out.

    Source: vllm 0.31, model_executor/models/config.py, `Qwen3_5ForConditionalGenerationConfig`.
    """
    wide = config.get("mamba_ssm_dtype", "float32") == "float32"
    return replace(gated_delta_net(config), engine_float32=wide)


def short_convolution(config: Mapping[str, Any]) -> RecurrentState:
    """LFM2's convolution: [hidden_size, conv_L_cache].

    Source: transformers 5.23, models/lfm2/modeling_lfm2.py, `Lfm2ShortConv`.
    """
    return RecurrentState(channels=config["hidden_size"], kernel=config["conv_L_cache"])


def granite_mamba(config: Mapping[str, Any]) -> RecurrentState:
    """Mamba 2 of granitemoehybrid, see `_mamba2`."""
    return _mamba2(
        inner=config["mamba_expand"] * config["hidden_size"],
        groups=config["mamba_n_groups"],
        heads=config["mamba_n_heads"],
        head_dim=config["mamba_d_head"],
        state_size=config["mamba_d_state"],
        kernel=config["mamba_d_conv"],
    )


def nemotron_mamba(config: Mapping[str, Any]) -> RecurrentState:
    """Mamba 2 of nemotron_h, see `_mamba2`.

    Source of the engine's dtype: vllm 0.31, model_executor/models/config.py, `NemotronHForCausalLMConfig`.
    """
    state = _mamba2(
        inner=config["mamba_num_heads"] * config["mamba_head_dim"],
        groups=config["n_groups"],
        heads=config["mamba_num_heads"],
        head_dim=config["mamba_head_dim"],
        state_size=config["ssm_state_size"],
        kernel=config["conv_kernel"],
    )
    return replace(state, engine_float32=config.get("mamba_ssm_cache_dtype", "float32") == "float32")


def _mamba2(inner: int, groups: int, heads: int, head_dim: int, state_size: int, kernel: int) -> RecurrentState:
    """Mamba 2: [inner + 2 x groups x state size, kernel], and heads x head dim x state size.

    Source: transformers 5.23, models/granitemoehybrid/modeling_granitemoehybrid.py, `GraniteMoeHybridMambaLayer`;
    models/nemotron_h/modeling_nemotron_h.py, `NemotronHMamba2Mixer`.
    """
    return RecurrentState(
        channels=inner + 2 * groups * state_size,
        kernel=kernel,
        heads=heads,
        head_elements=head_dim * state_size,
        dtype="product",
        groups=groups,
        group_channels=2 * state_size,
    )

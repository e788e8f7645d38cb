"""Shape of a model: all properties of a model that memory and speed depend on.

A `ModelShape` is built by `planner/models/from_config.py` from any `config.json`; nothing here reads files.
Sizes are named as in Hugging Face's `config.json`.
"""

from functools import cached_property
from math import prod
from typing import Literal

from msgspec import Struct

from planner.models.architectures.architecture import Architecture
from planner.models.architectures.table import architecture_of
from planner.models.layers import Layer, Linear, Norm
from planner.quantizations import QUANTIZATIONS, Quantization, QuantizationRow

# Keys of a config whose product is the size of an embedding for each layer.
PER_LAYER_EMBEDDING = ("vocab_size_per_layer_input", "num_hidden_layers", "hidden_size_per_layer_input")


class ModelShape(Struct, frozen=True, kw_only=True, eq=False, dict=True):
    """A model as shapes. Compared by identity, so that a cache lookup with a model as key is cheap.

    `layers` has every decoder layer in order; equal layers are the same object. It is empty for an architecture
    without formulas until `planner.training_stack.complete_models` completes it.
    """

    id: str
    model_type: str
    dtype: str  # of the published weights
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    layers: tuple[Layer, ...]
    embed_params: int  # token embedding
    position_params: int = 0  # learned position embeddings
    lm_head_params: int  # 0 when tied
    lm_head_bias_params: int = 0
    final_norm: Norm
    embed_norm: Norm | None = None  # None: the embedding goes straight into the first layer
    other_params: int = 0  # projectors and adapters: outside embeddings, layers, final norm, head and vision tower
    vision_params: int = 0
    vision_linear_params: int = 0
    # Only for architectures without formulas: `nn.Linear` modules outside the layers, with counts.
    outer_linears: tuple[tuple[Linear, int], ...] = ()  # text passes them
    vision_linears: tuple[tuple[Linear, int], ...] = ()  # text does not pass them
    tied: bool
    params: int
    auto_class: str = "AutoModelForCausalLM"
    quantization: Quantization = "none"  # of the published checkpoint
    quantization_group_size: int = 128
    path: str = ""  # of the folder that it was read from; empty: it is loaded by its id
    scaled_logits: bool = False  # granite, cohere: logits are multiplied by a constant; gemma 2: soft-capped
    embed_dropout: float = 0.0  # of the embedding output while training (gpt2)
    scaled_embeddings: bool = False  # gemma, granite: the embedding output is multiplied by a constant
    notes: tuple[str, ...] = ()
    config: dict[str, object]

    def __repr__(self) -> str:
        return f"ModelShape({self.id!r})"

    @cached_property
    def architecture(self) -> Architecture:
        """Return the row of the model type in the table ARCHITECTURES."""
        return architecture_of(self.model_type)

    @cached_property
    def text_architecture(self) -> Architecture:
        """Return the row of the text model inside a model with images; of a text model its own."""
        inner = self.config.get("text_config")
        return architecture_of(str(inner.get("model_type", ""))) if isinstance(inner, dict) else self.architecture

    @property
    def quantization_row(self) -> QuantizationRow:
        """The row of the published checkpoint's quantization in `QUANTIZATIONS`."""
        return QUANTIZATIONS[self.quantization]

    @property
    def embedding_changed(self) -> bool:
        """True if the first layer gets another tensor than the embedding's output: positions added, or a multiple.

        Gemma multiplies inside its embedding module. Source: transformers 5.23, models/granite/modeling_granite.py.
        """
        return self.position_params > 0 or (self.scaled_embeddings and self.architecture.scales_outside)

    @cached_property
    def num_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def layer_kinds(self) -> tuple[tuple[Layer, int], ...]:
        """The distinct layers with their counts, in order of first appearance."""
        counts: dict[Layer, int] = {}
        for layer in self.layers:
            counts[layer] = counts.get(layer, 0) + 1
        return tuple(counts.items())

    @cached_property
    def linear_params(self) -> int:
        """Weights of every `nn.Linear` in the decoder layers."""
        return sum(layer.linear_params * count for layer, count in self.layer_kinds)

    @cached_property
    def expert_params(self) -> int:
        return sum(layer.expert_params * count for layer, count in self.layer_kinds)

    @property
    def idle_params(self) -> int:
        """Parameters outside the layers that text does not pass: towers for images and sound, gemma 3's projector."""
        return self.vision_params + (self.other_params if self.vision_linear_params else 0)

    @property
    def per_layer_embed_params(self) -> int:
        """Parameters of the embedding table that feeds every layer but lies outside of the layers; 0 without one.

        Source: transformers 5.23, models/gemma4/modeling_gemma4.py, `embed_tokens_per_layer`.
        Example: Gemma 4 E2B: 262,144 x 35 x 256, 4.4 GiB in 16 bits.
        """
        inner = self.config.get("text_config")
        text = inner if isinstance(inner, dict) else self.config
        sizes = [text.get(key) for key in PER_LAYER_EMBEDDING]
        if not self.architecture.per_layer_embedding:
            return 0
        return prod(size if isinstance(size, int) else 0 for size in sizes)

    @property
    def embedding_features(self) -> int:
        """Width of the embedding and of the decoder's output, which the head takes."""
        width = self.config.get("word_embed_proj_dim")  # OPT-350m: embeddings of 512, layers of 1024
        return width if isinstance(width, int) else self.hidden_size

    @cached_property
    def supports_sdpa(self) -> bool:
        """True if Transformers runs the model, and the text model inside it, with sdpa."""
        return self.architecture.sdpa and self.text_architecture.sdpa

    @property
    def stops_at_named_sdpa(self) -> bool:
        """True if loading stops where a setting names sdpa: the model, or a part of it, has none."""
        return not self.supports_sdpa or self.config.get(self.architecture.eager_part) is not None

    @property
    def has_measured_layers(self) -> bool:
        """True if a layer has no formulas, so that what it needs is measured."""
        return any(layer.program == "measured" for layer, _ in self.layer_kinds)

    @property
    def default_attention(self) -> Literal["sdpa", "eager"]:
        """Return what Transformers runs without the setting `attn_implementation`.

        Source: transformers 5.23, modeling_utils.py, `get_correct_attn_implementation`.
        """
        return "sdpa" if self.supports_sdpa else "eager"

    @property
    def loading_class(self) -> str:
        """The class of Transformers that loads the model with all of its parts, as TRL's stable trainers do.

        `AutoModelForCausalLM` leaves out the vision tower of some models and refuses others.
        Source: trl 1.16, trainer/utils.py, `create_model_from_path`; transformers 5.23, models/auto/modeling_auto.py,
        `MODEL_FOR_CAUSAL_LM_MAPPING_NAMES`.
        """
        return self.auto_class or "AutoModelForCausalLM"

    @property
    def loads_as_causal_model(self) -> bool:
        """True if `AutoModelForCausalLM` loads the model, with its vision tower or without it.

        Source: transformers 5.23, models/auto/modeling_auto.py, `MODEL_FOR_CAUSAL_LM_MAPPING_NAMES`.
        """
        return self.auto_class != "AutoModelForImageTextToText" or self.architecture.causal_with_images

    @property
    def has_saved_buffers(self) -> bool:
        """True if the checkpoint has buffers beside parameters, so that FSDP2 cannot send the model from one process.

        accelerate takes every saved tensor for a DTensor then and stops ("'Tensor' object has no attribute
        'device_mesh'"); it works if each process keeps what it loaded. Packed weights of GPTQ and AWQ are buffers, too.
        Source: accelerate 1.15, utils/fsdp_utils.py, `fsdp2_load_full_state_dict`; gptqmodel 7.6,
        nn_modules/qlinear/__init__.py, `BaseQuantLinear` (`register_buffer`); seen on emulated GPUs.
        """
        saved = self.architecture.saved_buffers
        own = bool(self.config.get(saved)) if isinstance(saved, str) else saved
        return own or not self.quantization_row.nn_linear

    @property
    def supports_flash_attention(self) -> bool:
        """True if FlashAttention's kernels run the model, on a GPU that has them."""
        return self.architecture.flash_attention and self.text_architecture.flash_attention

    @property
    def known(self) -> bool:
        """Return whether the activations of this architecture have formulas."""
        return bool(self.layers)

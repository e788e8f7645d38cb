"""One row of the table of model types: all that differs between them, with the usual as default.

Sources, unless a column names others: transformers 5.23, models/<folder>/modeling_<folder>.py and
configuration_<folder>.py, where <folder> is the model type (`gemma3_text` lives in gemma3); peft 0.21.2;
liger-kernel 0.8.5; vllm 0.31.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from msgspec import Struct

from planner.models.architectures import windows
from planner.models.architectures.fields import Fields
from planner.models.architectures.states import RecurrentState
from planner.models.layers import (
    ExpertPart,
    Experts,
    Layer,
    LayerProgram,
    LigerBlocks,
    Norm,
    NormKind,
    RotaryStyle,
    RouterStyle,
)

QkNorm = Literal["none", "head", "full", "per_head_weight"]
# Vision towers with formulas (image_tower.py); "": none.
Tower = Literal["", "siglip", "pixtral", "qwen2_vit", "qwen2_5_vit", "qwen3_vit"]
LayerRule = Callable[["Architecture", Fields, int], Layer]


class Architecture(Struct, frozen=True, kw_only=True, eq=False, forbid_unknown_fields=True):
    """One model type. A bias is the same for the whole type (bool) or set by a config key (str)."""

    # -- config.json ---------------------------------------------------------------------------------------------------

    # Defaults of the config class for absent keys that shapes depend on; None: derived from other keys. Sizes that
    # every published config has (hidden_size, num_hidden_layers, ...) have none: a config without them is an error,
    # not a 7B model. Types of one kind share keys that some of them do not read.
    defaults: Mapping[str, object] = {}
    spellings: Mapping[str, str] = {}  # usual name of a size -> name in configs of this type (`attribute_map`)
    text_type: str = ""  # the type of the text model, where configs of a wrapper leave it out
    act_key: str = "hidden_act"
    residual_dropout_key: str = ""
    embed_dropout_key: str = "embed_dropout"
    unknown_if: tuple[str, ...] = ()  # config keys that change the layer into one without formulas

    # -- decoder layers ------------------------------------------------------------------------------------------------

    layer: LayerRule | None = None  # None: no formulas, layers are measured
    program: LayerProgram = "llama"
    norm: NormKind = "rms"  # of the layers, and before the head unless `final_norm` says otherwise
    norms_per_layer: int = 2
    final_norm: Callable[[Fields], Norm] | None = None
    qkv_bias: bool | str = "attention_bias"
    out_bias: bool | str = "attention_bias"
    out_name: str = "o_proj"
    fused_qkv: bool = False
    qk_norm: QkNorm = "none"
    qk_norm_each: bool = False  # queries are normalised before keys are projected
    qk_norm_if: str = ""  # config key that enables the norm; "": always enabled
    softcap_key: str = ""
    sinks: bool = False
    window: windows.WindowRule = windows.no_window
    mlp_names: tuple[str, str] | None = None  # None: gated
    mlp_bias: bool | str = False
    fused_mlp: bool = False
    residual_scaled: bool = False
    # Axolotl's LoRA kernels replace lines of the attention's source code, and stop where it has other lines.
    # Source: axolotl 0.21, monkeypatch/lora_kernels.py, `patch_self_attn_lora` (`QKV_PATCHES`); transformers 5.20.
    refuses_lora_kernels: bool = False
    functional_dropout: bool = False  # nn.functional.dropout, which TRL's `disable_dropout_in_model` leaves on
    subclassed_linears: bool = False  # bitsandbytes converts no subclasses (integrations/bitsandbytes.py)
    gathered_block: bool = False  # ZeRO-3 gathers router and experts at once (deepspeed, zero/leaf_module_config.py)

    # -- positions, embedding, head ------------------------------------------------------------------------------------

    rotary: windows.RotaryRule = windows.all_rotary
    rotary_style: RotaryStyle = "half"  # `apply_rotary_pos_emb`
    rotary_share: float = 1.0  # of a head's features, the default of `partial_rotary_factor` or `rotary_pct`
    position_offset: int | None = None  # rows of the learned positions before the first; None: no learned positions
    # A table of positions, learned or computed once (`create_sinusoidal_positions`): no row can be longer.
    table_of_positions: bool = False
    embedding_name: str = "embed_tokens"  # last name of the module (`get_input_embeddings`)
    scaled_embeddings: bool = False
    scales_outside: bool = False  # the model multiplies the embedding's output, not the embedding module
    per_layer_embedding: bool = False  # an embedding table for each layer (`embed_tokens_per_layer`)
    scaled_logits: bool = False
    lm_head_bias: bool = False
    # Parts that TRL's `peft_module_casting_to_bf16` does not find, as it casts modules named lm_head, embed_tokens, wte
    # and wpe.
    uncast_parts: tuple[Literal["embedding", "position"], ...] = ()

    # -- experts -------------------------------------------------------------------------------------------------------

    experts: Callable[["Architecture", Fields], Experts] | None = None  # None: dense
    router: RouterStyle = "softmax"  # `...TopKRouter.forward`
    router_normalised: bool = False  # the chosen weights are divided by their sum, whatever `norm_topk_prob` says
    router_grouped: bool = False  # experts are chosen within groups, whatever `topk_method` says
    # The module of a layer that holds the experts, and the router's weight in it; their 3-D parameters are named
    # "experts.gate_up_proj" and "experts.down_proj", or otherwise: "ungated" without a gate, "other" in a module
    # `input_linear`.
    expert_block: str = "mlp"
    router_name: str = "gate.weight"
    expert_names: Literal["usual", "ungated", "other"] = "usual"
    # Module names of transformers 4 -> the fused parameters of transformers 5 to which PEFT maps them. Source: peft,
    # utils/transformers_weight_conversion.py, `_MOE_TARGET_MODULE_MAPPING`, `_convert_peft_config_moe`; transformers,
    # conversion_mapping.py, `_MODEL_TO_CONVERSION_PATTERN` (qwen2_moe is not converted like its name).
    converted_names: Mapping[str, ExpertPart] = {}
    # The config has no `num_experts`, at which the auxiliary loss of TRL's fused head stops (AttributeError). Source:
    # trl 1.16, trainer/utils.py, `_fused_forward`.
    stops_at_router_loss: bool = False

    # -- states of constant size ---------------------------------------------------------------------------------------

    state: Callable[[Mapping[str, Any]], RecurrentState] | None = None  # of layers without keys and values
    # Packages whose kernels Transformers takes for the mixer if they are installed; else it runs its reference in
    # PyTorch, "correct but much slower", which stops at packed rows. Source: `use_kernel_func_from_hub_with_fallback`
    # (integrations/hub_kernels.py).
    mixer_kernels: tuple[str, ...] = ()
    # Tokens to a multiple of which that reference pads each row, or the config key of them; 0: it does not. Source:
    # `pad_size` in `torch_ssd_chunk_scan` and `torch_chunk_gated_delta_rule` (`chunk_size`).
    chunk: int | str = 0

    # -- images --------------------------------------------------------------------------------------------------------

    tower: Tower = ""
    # The largest image that the published processors let pass (`size` of preprocessor_config.json): as many pixels, of
    # the Qwen families, or a longer side of so many, of mistral 3. "": every image is resized to one size.
    largest_image: str = ""
    # The processor makes a tensor of a batch's texts unless told not to, and stops at the prompts of several lengths
    # that GRPO and RLOO hand it without padding. Source: transformers 5.23, models/pixtral/processing_pixtral.py
    # (`PixtralProcessor.text_kwargs`); trl 1.16, trainer/grpo_trainer.py, `GRPOTrainer._tokenize_prompts`.
    stacks_texts: bool = False
    # `generate` gives layers that share keys and values the last token of the prompt alone (models/gemma4/
    # modeling_gemma4.py, `_maybe_slice_kv_shared_inputs`; not with FlashAttention, whose masks it cannot cut).
    shared_layers_decode: bool = False
    causal_with_images: bool = False  # `AutoModelForCausalLM` loads the type, though it has a vision tower

    # -- what libraries do with the type -------------------------------------------------------------------------------

    # A class of Transformers for `AutoModelForSequenceClassification`: a reward model.
    classifier: bool = True
    # Transformers runs the type with sdpa (`_supports_sdpa` of the class); others stop at a setting that names it.
    sdpa: bool = True
    # Config key of a part that stops at a setting that names sdpa, while the text model runs it without that setting.
    eager_part: str = ""
    # FlashAttention's kernels run the type. No: Transformers refuses it for the model or a tower of it (gemma4: audio),
    # or heads of 512 are too wide. Source: modeling_utils.py, `_flash_attn_can_dispatch`, `_supports_flash_attn` of
    # each class; flash-attention 2.8, csrc/flash_attn/flash_api.cpp (`head_size <= 256`).
    flash_attention: bool = True
    # Buffers in the checkpoint (`register_buffer`): routers' biases, scales of layers, clamps of a tower. A text: with
    # this config key only.
    saved_buffers: bool | str = False
    # Overflows float16's 65,504, so that losses or gradients become nan. Source: unslothai/unsloth-zoo,
    # unsloth_zoo/model_lists.py, `FORCE_FLOAT32`, unslothai/unsloth, models/loader.py, `_FORCE_FLOAT32_FALLBACK`, both
    # of 2026; huggingface/transformers#39972 (gemma3).
    overflows_float16: bool = False
    # Transformers' tensor parallelism divides heads of attention, and features of MLPs and experts. False: it has no
    # plan for the type, or one that gathers a projection's outputs. Source: `base_model_tp_plan` of the config class.
    divides_layers: bool = False
    # PEFT's default `lora_target_modules`; (): it raises. Source: peft, utils/constants.py,
    # `TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING`.
    lora_targets: tuple[str, ...] = ()
    # A linear module at which PEFT or the layer stops with an adapter, though all-linear includes it: a router, which
    # is a subclass of nn.Linear and returns a tuple, or the projection that a Mamba kernel reads by itself (peft,
    # tuners/tuners_utils.py, `_check_lora_target_modules_mamba`).
    stops_all_linear: str = ""
    # Parts of the layers that Liger replaces. Source: liger-kernel, transformers/monkey_patch.py,
    # `MODEL_TYPE_TO_APPLY_LIGER_FN` and the function of each type with its defaults.
    liger_blocks: LigerBlocks = frozenset()
    # A class that Liger needs and transformers 5.23 has no more, at which it stops when training starts. Source:
    # liger-kernel, transformers/model/output_classes.py; the ImportError of `_apply_liger_kernel_to_instance`.
    liger_stops_at: str = ""
    # Liger replaces `F.cross_entropy` itself, as it has no fused loss for the type. Source: liger-kernel 0.8.5,
    # transformers/monkey_patch.py, `apply_liger_kernel_to_granite`.
    liger_cross_entropy: bool = False
    # Liger refuses a sequence classifier of the type ("The model must be Gemma3ForCausalLM.", a TypeError).
    liger_refuses_classifier: bool = False
    # vLLM: windowed layers have a table of rotary positions of their own; tables are float32, or weights of routers;
    # the vision encoder is whole on every GPU. Source: vllm, model_executor/models/gemma3.py, gemma4.py, gpt_oss.py,
    # glm4_moe.py (`GateLinear`), gemma4_mm.py; results/vllm_planner.md.
    local_rotary: bool = False
    float32_rotary: bool = False
    float32_router: bool = False
    whole_vision: bool = False
    # vLLM makes a head of its own and drops it where it is tied. Source: vllm 0.22, model_executor/models/llama.py and
    # others (`lm_head.tie_weights`, `lm_head.weight =`).
    engine_drops_head: bool = False
    # The first vLLM that runs the type by its second model runner before all of its kind; "": with its kind
    # (`SINCE_VLLM`). Source: vllm 0.22 to 0.28, config/vllm.py, `DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES`.
    second_runner_since: str = ""
    # Classes that FSDP2 wraps where the model's own list (`_no_split_modules`) has some that it lacks, at which
    # accelerate stops ("Could not find the transformer layer class"): of the type as a text model, as a tower, of a
    # wrapper's projector, and of a model without its audio tower. Source: accelerate 1.15, utils/fsdp_utils.py,
    # `fsdp2_prepare_auto_wrap_policy`.
    wrapped_as_text: tuple[str, ...] = ()
    wrapped_as_tower: tuple[str, ...] = ()
    wrapped_projector: tuple[str, ...] = ()
    wrapped_without_audio: tuple[str, ...] = ()
    note: str = ""  # why columns differ, for the readers of the table

    @property
    def has_formulas(self) -> bool:
        """Return whether decoder layers of the type have formulas."""
        return self.layer is not None or bool(self.text_type)

"""The policy's parameters: all tensors, the trained ones, and the ones that the quantizer converts.

The result depends on shapes only and is cached by model, tuning, LoRA targets and quantization.
"""

from functools import lru_cache
from typing import Literal

from msgspec import Struct

from planner.cache_keys import StateInput
from planner.errors import InputError
from planner.memory.parameters.copied_modules import copied_tensors
from planner.memory.parameters.lora import lora_tensors, wraps_parameters
from planner.memory.parameters.tensors import EqualTensors, TensorSet, decoder_linears, model_tensors
from planner.methods import Head
from planner.models.shape import ModelShape
from planner.quantizations import QUANTIZATIONS, Quantization


class Parameters(Struct, frozen=True, kw_only=True, eq=False):
    """Numbers of the policy's parameters (elements, not bytes), and the tensors behind them.

    `base` is the model as loaded, with the score head for a reward model. `total` adds the adapters and PEFT's copies
    of whole modules. Compared by identity, which makes it a fast key for `lru_cache`.
    """

    base: int
    total: int
    trainable: int
    adapter_params: int
    quantized_params: int
    unquantized_params: int  # of `base`
    largest_params: int  # of the largest single tensor of `base`
    base_tensors: TensorSet
    quantized_tensors: TensorSet
    unquantized_tensors: TensorSet
    adapter_tensors: TensorSet  # LoRA matrices
    copied_tensors: TensorSet  # PEFT's trained copies of whole modules (`modules_to_save`)
    trainable_tensors: TensorSet


def policy_parameters(candidate: StateInput) -> Parameters:
    """The parameters of the model that a candidate trains.

    Raises:
        InputError: as `parameters`, or adapters with dropout on fused parameters. Source: peft 0.21.2,
            tuners/lora/layer.py, `ParamWrapper.__init__`.
    """
    if candidate.lora_dropout and candidate.tuning == "lora" and wraps_parameters(candidate):
        raise InputError(
            f"PEFT has no dropout for adapters on the fused experts of {candidate.model.id}. Change lora_dropout to 0, "
            "or name lora_target_modules of the attention."
        )
    return parameters(
        candidate.model,
        candidate.tuning,
        candidate.lora_r,
        candidate.lora_target_modules,
        candidate.quantization,
        candidate.method_row.head,
        candidate.use_dora,
        candidate.lora_modules_to_save,
        candidate.lora_target_parameters,
    )


@lru_cache(maxsize=4096)
def parameters(
    model: ModelShape,
    tuning: Literal["full", "lora"],
    lora_r: int,
    lora_target_modules: tuple[str, ...],
    quantization: Quantization,
    method_head: Head,
    dora: bool = False,
    modules_to_save: tuple[str, ...] = (),
    target_parameters: tuple[str, ...] = (),
) -> Parameters:
    """Count the tensors of `model` as they are after TRL and PEFT have prepared it.

        full    trainable = base
        LoRA    trainable = sum over targeted projections of r x (in + out), + copied modules (`copied_tensors`);
                with DoRA also the outputs of those projections

    Source: peft 0.21.2, tuners/lora/layer.py (A is [r, in], B is [out, r]).

    Example: Qwen2.5-7B, r 16 on all linear layers: 40,370,176 of 7,655,986,688 parameters are trained.

    Leaves out the shapes of tensors of which only the number of elements is known (some vision towers and projectors):
    they are one tensor here.

    Raises:
        InputError: full fine-tuning of quantized weights (transformers refuses), LoRA targets that match nothing, or
            copied modules that are not counted.
    """
    if tuning == "full" and QUANTIZATIONS[quantization].quantized:
        raise InputError(
            f"{quantization} weights cannot be trained: transformers refuses full fine-tuning of a quantized model. "
            "Use --tuning lora."
        )
    base = model_tensors(model, method_head)
    quantized, kept = _split_by_quantization(model, base, quantization, method_head)
    adapters: tuple[EqualTensors, ...] = ()
    copies: tuple[EqualTensors, ...] = ()
    if tuning == "lora":
        adapters = lora_tensors(model, lora_r, lora_target_modules, dora, target_parameters)
        copies = copied_tensors(model, method_head, modules_to_save)
    base_set, adapter_set, copied_set = TensorSet(kinds=base), TensorSet(kinds=adapters), TensorSet(kinds=copies)
    trainable = base_set if tuning == "full" else TensorSet(kinds=adapters + copies)
    return Parameters(
        base=base_set.params,
        total=base_set.params + adapter_set.params + copied_set.params,
        trainable=trainable.params,
        adapter_params=adapter_set.params,
        quantized_params=quantized.params,
        unquantized_params=kept.params,
        largest_params=base_set.largest,
        base_tensors=base_set,
        quantized_tensors=quantized,
        unquantized_tensors=kept,
        adapter_tensors=adapter_set,
        copied_tensors=copied_set,
        trainable_tensors=trainable,
    )


def converted_parts(model: ModelShape, quantization: Quantization) -> tuple[str, ...]:
    """Return the parts of a model that the quantizer converts.

    bitsandbytes leaves subclasses of nn.Linear as they are, and Axolotl parameters without "expert" in their names.
    Source: transformers 5.23, integrations/bitsandbytes.py, `replace_with_bnb_linear`; axolotl 0.21,
    monkeypatch/moe_quant.py, `patch_moe_quantization_on_load`.
    """
    row, architecture = QUANTIZATIONS[quantization], model.architecture
    left = {"linear", "vision_linear"} if row.bitsandbytes and architecture.subclassed_linears else set()
    left |= {"expert"} if row.bitsandbytes and architecture.expert_names == "other" else set()
    return tuple(part for part in row.parts if part not in left)


def _split_by_quantization(
    model: ModelShape, base: tuple[EqualTensors, ...], quantization: Quantization, head: Head
) -> tuple[TensorSet, TensorSet]:
    """Split the tensors into those that the quantizer converts and those that it keeps.

    bitsandbytes skips the last module of a model as well. In OLMo 1 that is a projection, since its norms have no
    weights and its head is tied.
    """
    row, parts = QUANTIZATIONS[quantization], converted_parts(model, quantization)
    quantized = [kind for kind in base if kind.part in parts]
    kept = [kind for kind in base if kind.part not in parts]
    if quantized and row.bitsandbytes and head == "lm_head" and _ends_in_projection(model):
        last = decoder_linears(model.layers[-1])[-1]
        index = max(i for i, kind in enumerate(quantized) if kind.shape == (last.out_features, last.in_features))
        quantized[index] = quantized[index].times(1, less=1)
        kept.append(EqualTensors(part="linear", shape=(last.out_features, last.in_features)))
    return TensorSet(kinds=tuple(quantized)), TensorSet(kinds=tuple(kept))


def _ends_in_projection(model: ModelShape) -> bool:
    """True if the last module with parameters is a projection of the last layer (see `_split_by_quantization`)."""
    return (
        bool(model.layers)
        and model.tied
        and not model.final_norm.params
        and not any(norm.params for norm in model.layers[-1].norms)
    )


def loaded_models(candidate: StateInput) -> list[ModelShape]:
    """Every model that the trainer loads from a checkpoint, the policy first."""
    found, row = [candidate.model], candidate.method_row
    if candidate.separate_reference:
        found.append(candidate.model)
    reward = candidate.reward_model or (candidate.model if row.reward_model == "always" else None)
    value = (candidate.reward_model or candidate.model) if row.value_model else None
    return found + [model for model in (reward, value, candidate.teacher_model) if model is not None]


def frozen_tensors(model: ModelShape, head: Head = "lm_head") -> TensorSet:
    """The tensors of a model that is not quantized and has no adapters, such as a reference."""
    return parameters(model, "full", 1, (), "none", head).base_tensors

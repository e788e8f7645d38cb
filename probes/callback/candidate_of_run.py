"""Read the candidate of a trainer that is about to train, from its arguments, its model's config and its adapters."""

import json
import os
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from accelerate.state import AcceleratorState
from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from transformers import PretrainedConfig, PreTrainedModel, TrainingArguments

from planner.candidate import Candidate, TorchVersion, known_torch
from planner.errors import InputError
from planner.jobs.settings import candidate_fields, setting_names
from planner.memory.dtypes import DTYPE_BYTES
from planner.methods import METHODS, NEWEST_TRL, MethodName, method_of_config, release
from planner.models.from_config import shape_of
from planner.models.lora_targets import text_targets
from planner.models.shape import ModelShape
from planner.requests.launch_config import deepspeed_sizes
from planner.schemes import SCHEMES
from planner.settings.setting import Value
from planner.settings.vllm_releases import VLLM_VERSIONS, VllmChoice

GIVE_A_PLAN = "Give the callback a plan: MemoryPlanCallback('plan.json')."
# Arguments that are read from the model and the accelerator instead, which show what really runs.
READ_ELSEWHERE = frozenset(
    {
        "model_name_or_path",
        "model",
        "dtype",
        "torch_dtype",
        "attn_implementation",
        "teacher_model_name_or_path",
        "activation_checkpointing",
    }
)
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
ZERO_STAGES = {0: "ddp"} | {row.stage: name for name, row in SCHEMES.items() if row.stage}
ON_THE_GPU = (None, "none")  # devices of an `offload_optimizer` or `offload_param` of DeepSpeed's config
# Distributed types without sharding: each process holds the whole model. Source: accelerate 1.15, utils/dataclasses.py
# `DistributedType`.
REPLICATED = {"NO": "none", "MULTI_GPU": "ddp", "MULTI_CPU": "ddp"}
# LoRA options of PEFT that the estimate does not count. Source: peft 0.21, tuners/lora/config.py.
BEYOND_LORA = ("ensure_weight_tying", "rank_pattern", "layer_replication", "alora_invocation_tokens")
# Heads of a sequence classifier, such as a reward model, that PEFT trains as a whole.
# Source: peft 0.21, peft_model.py `PeftModelForSequenceClassification`.
HEADS = frozenset({"classifier", "score"})


def candidate_of_run(
    args: TrainingArguments, model: PreTrainedModel | PeftModel, settings: Mapping[str, Value]
) -> Candidate:
    """Return the candidate that a trainer runs.

    Args:
        args: the trainer's config.
        model: the trainer's model, with adapters if it has any.
        settings: settings that a trainer does not have: `prompt_length` of methods that generate, `padded`. They
        override
            what is read.

    Raises:
        InputError: a setting that memory depends on cannot be read from the trainer; the message names it.
    """
    method = method_of(args)
    if METHODS[method].generates and not METHODS[method].bounded_rows and "prompt_length" not in settings:
        raise InputError(
            f"A {type(args).__name__} has no setting for the length of prompts. "
            "Give it as settings={'prompt_length': 512}, or a plan."
        )
    if METHODS[method].teacher:
        raise InputError(f"A {METHODS[method].trainer} does not show its teacher to a callback. {GIVE_A_PLAN}")
    shape = _shape(model)
    given: dict[str, Any] = {
        **_arguments(args),
        **_of_model(model),
        **_adapters(model, shape),
        **_sharding(args),
        **settings,
    }
    chosen: dict[str, Any] = {**candidate_fields(given, shape.dtype), **_environment(args)}
    if METHODS[method].bounded_rows:
        chosen.setdefault("prompt_length", max(chosen["max_length"] - chosen["max_completion_length"], 1))
    chosen |= {"trl_version": _trl_version(), "torch_version": _torch_version()}
    chosen |= {"vllm_version": _vllm_version()} if chosen.get("vllm", "off") != "off" else {}
    return Candidate(model=shape, method=method, **chosen)


def method_of(args: TrainingArguments) -> MethodName:
    """Return the method of a trainer's config, by its class or the nearest base class.

    Raises:
        InputError: it is no config of a TRL method.
    """
    return method_of_config(type(args), GIVE_A_PLAN)


def _arguments(args: TrainingArguments) -> dict[str, Any]:
    """Return the arguments that are settings of a candidate, without vLLM's if no engine is used."""
    values = args.to_dict()
    if values.get("torch_compile"):
        raise InputError(f"torch_compile changes the saved activations, which is not counted. {GIVE_A_PLAN}")
    known = set(setting_names()) - READ_ELSEWHERE
    unused = () if values.get("use_vllm") else tuple(name for name in values if name.startswith("vllm_"))
    found = {
        name: value for name, value in values.items() if name in known and name not in unused and value is not None
    }
    accumulation = args.accelerator_config.gradient_accumulation_kwargs or {}
    return found | {"sync_each_batch": bool(accumulation.get("sync_each_batch", False))}


def _of_model(model: PreTrainedModel | PeftModel) -> dict[str, Any]:
    """Return a model's dtype, attention implementation and quantization as settings."""
    config = model.config
    weight = model.get_input_embeddings().weight
    if weight.dtype not in DTYPES:
        raise InputError(f"Weights of {weight.dtype} are not counted. {GIVE_A_PLAN}")
    found: dict[str, Any] = {"dtype": DTYPES[weight.dtype], "attn_implementation": config._attn_implementation}
    return found | quantization_of(plain(config))


def quantization_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the setting `quantization` of a model's config, by bitsandbytes or of the checkpoint; else nothing."""
    shape = shape_of(dict(config), id="the model") if config.get("quantization_config") else None
    if shape is None:
        return {}
    storage = config["quantization_config"].get("bnb_4bit_quant_storage")
    stored = (
        {"bnb_4bit_quant_storage": str(storage)} if storage in DTYPE_BYTES and shape.quantization_row.four_bit else {}
    )
    return {"quantization": shape.quantization, **stored}


def plain(config: PretrainedConfig) -> dict[str, Any]:
    """Return a config as the dict that its JSON file would contain."""
    fields: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return fields


def _shape(model: PreTrainedModel | PeftModel) -> ModelShape:
    """Return the shape of the model's checkpoint."""
    config = plain(model.config)
    if (config.get("quantization_config") or {}).get("quant_method") == "bitsandbytes":
        del config["quantization_config"]  # bitsandbytes quantizes while loading: the checkpoint is not quantized
    return shape_of(config, id=str(model.config._name_or_path or config["model_type"]))


def _adapters(model: PreTrainedModel | PeftModel, shape: ModelShape) -> dict[str, Any]:
    """Return the LoRA settings of a PEFT model; full fine-tuning without adapters.

    Raises:
        InputError: frozen weights without adapters, several adapters, or adapters that the estimate does not count.
    """
    if not isinstance(model, PeftModel):
        if not all(parameter.requires_grad for parameter in model.parameters()):
            raise InputError(f"A part of the model is frozen without adapters, which is not counted. {GIVE_A_PLAN}")
        return {"tuning": "full"}
    if len(model.peft_config) > 1:
        raise InputError(f"The model has several adapters ({', '.join(model.peft_config)}). {GIVE_A_PLAN}")
    (config,) = model.peft_config.values()
    if type(config) is not LoraConfig:
        raise InputError(f"Adapters of {type(config).__name__} are not counted, only LoRA. {GIVE_A_PLAN}")
    written = config.to_dict()
    beyond = [name for name in BEYOND_LORA if written.get(name)]
    if beyond:
        raise InputError(f"LoRA with {', '.join(beyond)} is not counted. {GIVE_A_PLAN}")
    return {
        "tuning": "lora",
        "lora_r": config.r,
        "lora_dropout": config.lora_dropout,
        "lora_modules_to_save": tuple(sorted(set(config.modules_to_save or ()) - HEADS)),
        "use_dora": config.use_dora,
        "lora_target_modules": _targets(model, shape),
        "lora_target_parameters": tuple(sorted(config.target_parameters or ())),
    }


def _targets(model: PeftModel, shape: ModelShape) -> tuple[str, ...]:
    """Return the last parts of the names of the layers with adapters; `all-linear` if all linear layers have one."""
    adapted = Counter(
        name.rsplit(".", 1)[-1]
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer) and not isinstance(module, ParamWrapper)
    )
    linears = Counter(linear.name for layer in shape.layers for linear in layer.linears)
    beside = bool(shape.vision_params) and all(count == linears[name] for name, count in adapted.items())
    if linears <= adapted and not beside:  # a vision tower's layers have adapters too
        return ("all-linear",)
    partly = [name for name, count in adapted.items() if count != linears[name]]
    if partly:
        raise InputError(f"Adapters on some layers only ({', '.join(partly)}) are not counted. {GIVE_A_PLAN}")
    names = tuple(sorted(adapted))
    return (text_targets(shape, names) or names) if beside else names


def _sharding(args: TrainingArguments) -> dict[str, Any]:
    """Return the sharding and offloading that accelerate's state shows.

    Raises:
        InputError: a distributed type that the estimate does not count.
    """
    state = AcceleratorState()
    kind = str(state.distributed_type.value)
    if kind == "DEEPSPEED":
        return zero_of(state.deepspeed_plugin.deepspeed_config)
    if kind == "FSDP":
        offload = state.fsdp_plugin.cpu_offload  # FSDP 1: `CPUOffload(offload_params=...)`
        return {
            "sharding": f"fsdp{state.fsdp_plugin.fsdp_version}",
            "offload_param": type(offload).__name__ == "CPUOffloadPolicy" or getattr(offload, "offload_params", False),
        }
    if kind not in REPLICATED:
        raise InputError(f"The memory of {kind} on each GPU is not counted. {GIVE_A_PLAN}")
    return {"sharding": REPLICATED[kind]}


def zero_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sharding, offloading and sizes of a DeepSpeed config; stage 0 replicates everything, as DDP does."""
    zero = config.get("zero_optimization") or {}
    offloaded = {
        f"offload_{part}": (zero.get(f"offload_{part}") or {}).get("device") not in ON_THE_GPU
        for part in ("optimizer", "param")
    }
    return {"sharding": ZERO_STAGES[int(zero.get("stage", 0))], **offloaded, **deepspeed_sizes(zero)}


def _environment(args: TrainingArguments) -> dict[str, Any]:
    """Return the settings in environment variables: processes, nodes, and the allocator's expandable segments."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", args.world_size))  # set by torchrun, which accelerate uses
    allocator = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", os.environ.get("PYTORCH_ALLOC_CONF", ""))
    return {
        "num_processes": args.world_size,
        "num_nodes": max(args.world_size // local, 1),
        "expandable_segments": "expandable_segments:True" in allocator,
    }


def _trl_version() -> str:
    """Return the installed TRL release; a newer one than `NEWEST_TRL` counts as that."""
    installed = ".".join(version("trl").split(".")[:2])
    return installed if release(installed) <= release(NEWEST_TRL) else NEWEST_TRL


def _torch_version() -> TorchVersion:
    """Return the installed torch release as the planned one that has its facts."""
    return known_torch(".".join(version("torch").split(".")[:2]))


def _vllm_version() -> VllmChoice:
    """Return the installed vLLM, whose torch the run has; "newest" where there is none, or one that is not planned."""
    try:
        installed = version("vllm").split(".")[:2]
    except PackageNotFoundError:
        return "newest"
    return next((known for known in VLLM_VERSIONS if known.split(".") == installed), "newest")

"""Reads a TRL config file, as `trl sft --config train.yaml` takes it: which settings it makes, and what in it the plan does not use."""

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from planner.errors import InputError
from planner.jobs.settings import setting_names
from planner.jobs.spellings import Value
from planner.models.lora_targets import DEFAULT_TARGETS

# Keys whose value is a mapping of further settings.
# Source: trl/scripts/utils.py:332 (env), transformers/training_args.py:908-925 and :1455, trl/trainer/base_config.py (model_init_kwargs).
NESTED = ("env", "model_init_kwargs", "gradient_checkpointing_kwargs", "activation_checkpointing_kwargs", "fsdp_config")

# What a key turned on without another one means in a file. Source: trl/trainer/model_config.py, trl/trainer/grpo_config.py.
FILE_DEFAULTS: dict[str, Value] = {
    "use_peft": False,
    "use_vllm": False,
    "bf16": True,
    "fp16": False,
    "lora_dropout": 0.05,
}

# Keys that change memory or speed and have no formula here: said louder than the rest.
UNCOVERED = (
    "auto_find_batch_size", "bnb_4bit_quant_storage", "cast_lm_head_to_fp32", "eval_strategy", "generation_batch_size",
    "include_num_input_tokens_seen", "label_smoothing_factor", "lora_modules_to_save", "lora_target_parameters", "neftune_noise_alpha", "optim_args",
    "router_aux_loss_coef", "sync_ref_model", "torch_compile", "torch_empty_cache_steps", "use_dora", "use_transformers_continuous_batching",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """A config file as settings. `ignored`: keys that memory does not depend on; `uncovered`: keys it may, and the plan does not know how."""

    settings: dict[str, Value]
    ignored: tuple[str, ...]
    uncovered: tuple[str, ...]

    @property
    def warnings(self) -> tuple[str, ...]:
        said = []
        if self.uncovered:
            said.append(f"the config sets what the plan does not count: {', '.join(self.uncovered)}")
        if self.ignored:
            said.append(f"not used by the plan: {', '.join(self.ignored)}")
        return tuple(said)


def load_train_config(path: Path) -> TrainConfig:
    """The settings of a YAML file with TRL's keys; what the file leaves out is as TRL would have it.

    Raises:
        InputError: the file cannot be read or is no mapping of keys to values.
    """
    pairs = dict(_flat(_mapping(path), path.parent))
    known = set(setting_names())
    settings = FILE_DEFAULTS | {name: value for name, value in pairs.items() if name in known and value is not None}
    unknown = sorted(name for name in pairs if name not in known)
    return TrainConfig(
        settings=_without_leftovers(settings, pairs),
        ignored=tuple(name for name in unknown if name not in UNCOVERED),
        uncovered=tuple(name for name in unknown if name in UNCOVERED and pairs[name] not in (None, False)),
    )


def default_targets(model_type: str) -> tuple[str, ...]:
    """The `lora_target_modules` that PEFT takes when the config names none.

    Raises:
        InputError: PEFT has no default for this kind of model, and would stop.
    """
    if model_type not in DEFAULT_TARGETS:
        raise InputError(
            f"PEFT has no default lora_target_modules for {model_type}. Name them in the config, such as lora_target_modules: all-linear."
        )
    return DEFAULT_TARGETS[model_type]


def _mapping(path: Path) -> dict[str, object]:
    import yaml  # 20 ms that only this command needs

    try:
        read = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(read, dict):
        raise InputError(
            f"{path} is no TRL config: it should hold keys and values, such as model_name_or_path: Qwen/Qwen2.5-7B."
        )
    return {str(name): value for name, value in read.items()}


def _flat(keys: Mapping[str, object], folder: Path) -> Iterator[tuple[str, Value]]:
    """Keys and plain values, nested ones brought up."""
    for name, value in keys.items():
        if name in NESTED and isinstance(value, Mapping):
            yield from _flat(value, folder)
        elif name == "deepspeed" and value:
            yield from _deepspeed(value, folder)
        elif name == "fsdp" and value:
            yield "distributed_type", "FSDP"
        elif isinstance(value, (list, tuple)):
            yield name, tuple(map(str, value))
        elif value is None or isinstance(value, (str, int, float, bool)):
            yield name, value
        else:
            yield name, str(value)


def _deepspeed(value: object, folder: Path) -> Iterator[tuple[str, Value]]:
    """The parts of a DeepSpeed configuration, a mapping or the path of a JSON file, that decide where memory lies."""
    zero = _deepspeed_mapping(value, folder).get("zero_optimization", {})
    if not isinstance(zero, Mapping):
        raise InputError("zero_optimization in the DeepSpeed config should hold keys and values, such as stage: 3.")
    stage = zero.get("stage", 0)
    yield (
        ("zero_stage", stage) if stage else ("distributed_type", "MULTI_GPU")
    )  # stage 0 replicates everything, as DDP does
    for part in ("offload_optimizer", "offload_param"):
        offload = zero.get(part)
        yield f"{part}_device", offload.get("device", "none") if isinstance(offload, Mapping) else "none"


def _deepspeed_mapping(value: object, folder: Path) -> Mapping[str, object]:
    if isinstance(value, Mapping):
        return value
    path = Path(
        str(value)
    )  # from where the command runs, as Transformers opens it; a file beside the config is meant as often
    path = path if path.exists() else folder / path
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"The DeepSpeed config {path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise InputError(f"The DeepSpeed config {path} is not JSON: {error}.") from error
    if not isinstance(read, Mapping):
        raise InputError(f"The DeepSpeed config {path} should hold keys and values.")
    return read


def _without_leftovers(settings: dict[str, Value], in_file: Collection[str]) -> dict[str, Value]:
    """Drops what the file mentions but TRL does not read: quantization details without quantization, vLLM's mode without vLLM, adapters without PEFT."""
    off = {
        "use_vllm": tuple(name for name in setting_names() if name.startswith("vllm_")),
        "use_peft": ("lora_r", "lora_dropout", "lora_target_modules"),
        "load_in_4bit": ("bnb_4bit_quant_type", "use_bnb_nested_quant"),
    }
    unread = {name for switch, names in off.items() if not settings.get(switch) for name in names}
    if settings.get("fp16") and "bf16" not in in_file:
        settings = settings | {"bf16": False}
    return {name: value for name, value in settings.items() if name not in unread}

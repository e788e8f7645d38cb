"""Read a TRL config file (YAML, as in `trl sft --config train.yaml`): its settings, and the keys that are not used."""

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.candidate import ZERO_SIZES
from planner.errors import InputError
from planner.jobs.settings import setting_names
from planner.jobs.spellings import Value
from planner.models.lora_targets import DEFAULT_TARGETS

# Keys whose value is a mapping of further settings.
# Source: trl/scripts/utils.py:332 (env), transformers/training_args.py:908-925 and :1455, trl/trainer/base_config.py
# (model_init_kwargs).
NESTED_KEYS = (
    "env",
    "model_init_kwargs",
    "gradient_checkpointing_kwargs",
    "activation_checkpointing_kwargs",
    "fsdp_config",
    "parallelism_config",
)

# Defaults of TRL's config classes for keys that a file leaves out. Source: trl/trainer/model_config.py,
# trl/trainer/grpo_config.py.
FILE_DEFAULTS: dict[str, Value] = {
    "use_peft": False,
    "use_vllm": False,
    "bf16": True,
    "fp16": False,
    "lora_dropout": 0.05,
}

# Sizes that DeepSpeed takes if its config does not name them, in elements. Source: deepspeed 0.19.8,
# runtime/zero/config.py, `DeepSpeedZeroConfig`.
DEEPSPEED_SIZES: dict[str, Value] = {
    "reduce_bucket_size": 500_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_param_persistence_threshold": 100_000,
    "stage3_max_live_parameters": 10**9,
    "stage3_max_reuse_distance": 10**9,
    "sub_group_size": 10**9,
}

# Keys that change memory or speed and are not modelled; the plan warns about them.
UNMODELLED = (
    "auto_find_batch_size", "cast_lm_head_to_fp32", "eval_strategy", "generation_batch_size",
    "include_num_input_tokens_seen", "label_smoothing_factor", "lora_modules_to_save", "lora_target_parameters",
    "neftune_noise_alpha", "optim_args", "router_aux_loss_coef", "sync_ref_model", "torch_compile",
    "torch_empty_cache_steps", "use_dora", "use_transformers_continuous_batching",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """The settings of a config file. `ignored`: keys without effect; `unmodelled`: keys with an unknown effect."""

    settings: dict[str, Value]
    ignored: tuple[str, ...]
    unmodelled: tuple[str, ...]

    @property
    def warnings(self) -> tuple[str, ...]:
        """One warning for the unmodelled keys and one for the ignored keys, if there are any."""
        lines = []
        if self.unmodelled:
            lines.append(f"the config sets what the plan does not count: {', '.join(self.unmodelled)}")
        if self.ignored:
            lines.append(f"not used by the plan: {', '.join(self.ignored)}")
        return tuple(lines)


def load_train_config(path: Path) -> TrainConfig:
    """Load a YAML file with TRL's keys; keys that the file leaves out have TRL's defaults.

    Raises:
        InputError: the file cannot be read, or does not map keys to values.
    """
    pairs = dict(_flatten(_load_yaml(path), path.parent))
    known = set(setting_names())
    settings = FILE_DEFAULTS | {name: value for name, value in pairs.items() if name in known and value is not None}
    unknown = sorted(name for name in pairs if name not in known)
    return TrainConfig(
        settings=_without_unread(settings, pairs),
        ignored=tuple(name for name in unknown if name not in UNMODELLED),
        unmodelled=tuple(name for name in unknown if name in UNMODELLED and pairs[name] not in (None, False)),
    )


def default_targets(model_type: str) -> tuple[str, ...]:
    """Return PEFT's default `lora_target_modules` for a model type.

    Raises:
        InputError: PEFT has no default for this model type and would raise.
    """
    if model_type not in DEFAULT_TARGETS:
        raise InputError(
            f"PEFT has no default lora_target_modules for {model_type}. "
            "Name them in the config, such as lora_target_modules: all-linear."
        )
    return DEFAULT_TARGETS[model_type]


def _load_yaml(path: Path) -> dict[str, object]:
    """Load a YAML file that maps keys to values; raise InputError if it does not."""
    import yaml  # takes 20 ms, and only --config needs it

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


def _flatten(keys: Mapping[str, object], folder: Path) -> Iterator[tuple[str, Value]]:
    """Yield the keys and plain values of a config, those of nested mappings and of DeepSpeed's config included."""
    for name, value in keys.items():
        if name in NESTED_KEYS and isinstance(value, Mapping):
            yield from _flatten(value, folder)
        elif name == "deepspeed" and value:
            yield from _deepspeed_settings(value, folder)
        elif name == "fsdp" and value:
            yield "distributed_type", "FSDP"
        elif isinstance(value, (list, tuple)):
            yield name, tuple(map(str, value))
        elif value is None or isinstance(value, (str, int, float, bool)):
            yield name, value
        else:
            yield name, str(value)


def _deepspeed_settings(value: object, folder: Path) -> Iterator[tuple[str, Value]]:
    """Yield the ZeRO stage, sizes and offloading of a DeepSpeed config: a mapping, or the path of a JSON file."""
    zero = _load_deepspeed_config(value, folder).get("zero_optimization", {})
    if not isinstance(zero, Mapping):
        raise InputError("zero_optimization in the DeepSpeed config should hold keys and values, such as stage: 3.")
    stage = zero.get("stage", 0)
    # Stage 0 replicates everything, as DDP does.
    yield ("zero_stage", stage) if stage else ("distributed_type", "MULTI_GPU")
    yield from deepspeed_sizes(zero).items()
    for part in ("offload_optimizer", "offload_param"):
        offload = zero.get(part)
        yield f"{part}_device", offload.get("device", "none") if isinstance(offload, Mapping) else "none"


def deepspeed_sizes(zero: Mapping[str, Any]) -> dict[str, Value]:
    """Return the sizes that the ZeRO stage in `zero_optimization` reads; DeepSpeed's defaults for missing ones."""
    stage = zero.get("stage", 0)
    read = ZERO_SIZES if stage == 3 else ("reduce_bucket_size",) if stage else ()
    return {name: zero.get(name, DEEPSPEED_SIZES[name]) for name in read}


def _load_deepspeed_config(value: object, folder: Path) -> Mapping[str, object]:
    """Return a DeepSpeed config, loaded from JSON if it is a path.

    A path is relative to the working directory, as in Transformers, or to the config file's folder.

    Raises:
        InputError: the file cannot be read, or does not map keys to values.
    """
    if isinstance(value, Mapping):
        return value
    path = Path(str(value))
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


def _without_unread(settings: dict[str, Value], file_keys: Collection[str]) -> dict[str, Value]:
    """Return the settings without those that TRL would not read.

    These are details of vLLM, LoRA or quantization while `use_vllm`, `use_peft` or `load_in_4bit` is off, and bf16's
    default while fp16 is on.
    """
    off = {
        "use_vllm": tuple(name for name in setting_names() if name.startswith("vllm_")),
        "use_peft": ("lora_r", "lora_dropout", "lora_target_modules"),
        "load_in_4bit": ("bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage"),
    }
    unread = {name for switch, names in off.items() if not settings.get(switch) for name in names}
    if settings.get("fp16") and "bf16" not in file_keys:
        settings = settings | {"bf16": False}
    return {name: value for name, value in settings.items() if name not in unread}

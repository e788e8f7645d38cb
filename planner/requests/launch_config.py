"""Read the files of a launcher: accelerate's config (`accelerate launch --config_file`) and DeepSpeed's JSON."""

from collections.abc import Iterator, Mapping
from os.path import isfile  # of a path that is too long it is false, where pathlib raises
from pathlib import Path
from typing import Any

from msgspec import Struct

from planner.errors import LONGEST_WORD, InputError, without_middle
from planner.files.read import read_json
from planner.settings.setting import Value
from planner.settings.table import ZERO_SIZES

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
CONFIG_FILE = "deepspeed_config_file"  # a key of accelerate's section deepspeed_config
OFFLOADED = ("offload_optimizer", "offload_param")
DEFAULT_STAGE = 2  # accelerate 1.15, utils/dataclasses.py, `DeepSpeedPlugin.zero_stage`

# Settings of the accelerate file that memory or speed depends on, besides the sections. In a TRL config they are
# arguments of `accelerate launch`, which win over the file.
PROCESSES = ("num_processes", "num_machines")
# TRL's own launch files, by the names that `trl <method> --accelerate_config` takes. They start 8 processes; here the
# GPUs of the cluster count. Source: trl 1.16, accelerate_configs/*.yaml, cli/accelerate_config.py.
PROFILES: dict[str, dict[str, object]] = {
    "single_gpu": {"distributed_type": "NO"},
    "multi_gpu": {"distributed_type": "MULTI_GPU"},
    "zero1": {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 1}},
    "zero2": {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2}},
    "zero3": {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}},
    "fsdp1": {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 1}},
    "fsdp2": {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}},
}
# Keys of the sections fsdp_config and parallelism_config -> settings.
IN_SECTIONS = {
    "fsdp_version": "fsdp_version",
    "fsdp_offload_params": "fsdp_offload_params",
    "parallelism_config_dp_replicate_size": "dp_replicate_size",
    "parallelism_config_cp_size": "cp_size",
    "parallelism_config_sp_size": "sp_size",
}
# Keys of the sections that are not modelled, with the values that change nothing. Source: accelerate 1.15,
# utils/dataclasses.py, `FullyShardedDataParallelPlugin`; parallelism_config.py.
UNMODELLED: dict[str, tuple[object, ...]] = {
    "fsdp_activation_checkpointing": (None, False),
    "fsdp_reshard_after_forward": (None, True, "FULL_SHARD"),
    "parallelism_config_tp_size": (None, 1),
}
DEFAULT_FSDP = 1  # accelerate 1.15, commands/launch.py, `--fsdp_version`
# In stages 1 and 2 it has a second bucket; stage 3 is planned with it.
# Source: deepspeed 0.19.8, runtime/zero/stage_1_and_2.py,
# `DeepSpeedZeroOptimizer.reduce_independent_p_g_buckets_and_remove_grads`.
OVERLAP_COMM = "zero_optimization.overlap_comm"
# Keys of a DeepSpeed config that change memory or speed and are not modelled, with the values that change nothing.
# Source: deepspeed 0.19.8, runtime/zero/config.py, runtime/zero/offload_config.py, runtime/precision_config.py,
# runtime/constants.py (`GRAD_ACCUM_DTYPE`, `TORCH_AUTOCAST`, `COMMUNICATION_DATA_TYPE`).
DEEPSPEED_UNMODELLED: dict[str, tuple[object, ...]] = {
    "zero_optimization.zero_hpz_partition_size": (None, 0, 1),
    "zero_optimization.zero_quantized_weights": (None, False),
    "zero_optimization.zero_quantized_nontrainable_weights": (None, False),
    "zero_optimization.zero_quantized_gradients": (None, False),
    "zero_optimization.contiguous_gradients": (None, True),
    "zero_optimization.memory_efficient_linear": (None, True),
    "zero_optimization.zenflow": (None,),
    "zero_optimization.offload_optimizer.ratio": (None, 1.0),
    "zero_optimization.offload_optimizer.super_offload": (None, False),
    "bf16.bf16_master_weights_and_grads": (None, False),
    "fp16.fp16_master_weights_and_grads": (None, False),
    "data_types.grad_accum_dtype": (None,),
    "torch_autocast.enabled": (None, False),
    "communication_data_type": (None,),
    OVERLAP_COMM: (None, False),
}


def load_mapping(path: Path, kind: str, example: str) -> dict[str, object]:
    """Load a YAML file that maps keys to values.

    Raises:
        InputError: the file cannot be read, or holds something else; the message calls it a `kind`.
    """
    from planner.files.yaml import read_yaml_text

    return parse_mapping(read_yaml_text(path), path, kind, example)


def parse_mapping(text: str, path: Path, kind: str, example: str) -> dict[str, object]:
    """Return the keys and values of a YAML text that was read from `path`.

    Raises:
        InputError: as `load_mapping`.
    """
    from planner.files.yaml import parse_yaml  # imports PyYAML, which takes 20 ms

    read = parse_yaml(text, str(path))
    if not isinstance(read, dict):
        raise InputError(f"{path} is no {kind}: it should hold keys and values, such as {example}.")
    return {str(name): value for name, value in read.items()}


class LaunchConfig(Struct, frozen=True, kw_only=True):
    """The settings of a launcher's files. `unmodelled`: keys with an effect that is not modelled.

    `mixed_precision`: accelerate's, which counts if the training sets none; empty if the file has none.
    """

    settings: dict[str, Value]
    mixed_precision: str = ""
    unmodelled: tuple[str, ...] = ()


def load_launch_config(accelerate: Path | None, deepspeed: Path | None) -> LaunchConfig:
    """Load accelerate's launch file, a DeepSpeed config, or both; without either there are no settings.

    `accelerate` may be the name of one of TRL's (`PROFILES`), such as zero3, if there is no such file. `deepspeed`
    replaces the DeepSpeed config that the launch file names or contains.

    Raises:
        InputError: a file cannot be read, or the launch file has another distributed_type than DEEPSPEED.
    """
    zero = _load_deepspeed_config(str(deepspeed), Path()) if deepspeed else None
    if accelerate is None:
        return LaunchConfig(settings={}) if zero is None else read_deepspeed_config(zero, Path())
    keys = PROFILES.get(str(accelerate), {})
    if not keys or isfile(accelerate):
        keys = load_mapping(accelerate, "accelerate config", "distributed_type: MULTI_GPU")
    _refuse_other_files(keys, accelerate)
    kind = str(keys["distributed_type"] or "NO")  # YAML reads a bare NO as false
    if zero is not None and kind != "DEEPSPEED":
        raise InputError(
            f"{accelerate} has distributed_type {kind}, so that it does not read {deepspeed}. Drop one of them."
        )
    settings: dict[str, Value] = {name: value for name in PROCESSES if isinstance(value := keys.get(name), (int, str))}
    if kind != "DEEPSPEED":
        settings["distributed_type"] = kind
    if kind == "NO":
        settings["num_processes"] = 1  # accelerate 1.15, commands/launch.py, `simple_launcher`
    fsdp = {"fsdp_version": DEFAULT_FSDP} | _section(keys, "fsdp_config") if kind == "FSDP" else {}
    unmodelled: tuple[str, ...] = ()
    if kind == "DEEPSPEED":
        section = _section(keys, "deepspeed_config")
        plugin = _plugin_config(section if zero is None else {CONFIG_FILE: zero}, accelerate.parent)
        settings |= plugin.settings
        unmodelled = plugin.unmodelled
    named = fsdp | _section(keys, "parallelism_config")
    settings |= {
        name: value for key, name in IN_SECTIONS.items() if isinstance(value := named.get(key), (bool, int, str))
    }
    precision = keys.get("mixed_precision")
    return LaunchConfig(
        settings=settings,
        mixed_precision=precision if isinstance(precision, str) else "",
        unmodelled=(*unmodelled, *(name for name, harmless in UNMODELLED.items() if named.get(name) not in harmless)),
    )


def _refuse_other_files(keys: Mapping[str, object], path: Path) -> None:
    """Refuse a file without accelerate's `distributed_type`, such as axolotl's, and numbers of processes below 1.

    Source: accelerate 1.15, commands/config/config_args.py, `BaseConfig` (a field without a default).

    Raises:
        InputError: names the key.
    """
    if "distributed_type" not in keys:
        raise InputError(f"{path} is no accelerate config: it has no distributed_type, such as MULTI_GPU.")
    for name in PROCESSES:
        value = keys.get(name)
        if isinstance(value, int) and value < 1:
            raise InputError(f"{path} has {name} {value}, which must be at least 1.")


def _section(keys: Mapping[str, object], name: str) -> dict[str, object]:
    """Return a nested mapping of a file; empty if the file has none."""
    section = keys.get(name)
    return {str(key): value for key, value in section.items()} if isinstance(section, Mapping) else {}


def _plugin_config(section: Mapping[str, object], folder: Path) -> LaunchConfig:
    """Return the config of accelerate's section `read_deepspeed_config`: of the file that it names, or its own.

    Without a file, accelerate writes no bucket sizes, so that DeepSpeed's defaults count.
    Source: accelerate 1.15, utils/dataclasses.py, `DeepSpeedPlugin.__post_init__`.
    """
    if section.get(CONFIG_FILE):
        return read_deepspeed_config(section[CONFIG_FILE], folder)
    zero: dict[str, object] = {"stage": section.get("zero_stage", DEFAULT_STAGE)}
    zero |= {part: {"device": section.get(f"{part}_device", "none")} for part in OFFLOADED}
    return read_deepspeed_config({"zero_optimization": zero}, folder)


def read_deepspeed_config(value: object, folder: Path) -> LaunchConfig:
    """Return the ZeRO stage, sizes and offloading of a DeepSpeed config: a mapping, or the path of a JSON file.

    Raises:
        InputError: the file cannot be read, or does not map keys to values.
    """
    keys = _load_deepspeed_config(value, folder)
    zero = keys.get("zero_optimization", {})
    if not isinstance(zero, Mapping):
        raise InputError("zero_optimization in the DeepSpeed config should hold keys and values, such as stage: 3.")
    stage = zero.get("stage", 0)
    # Stage 0 replicates everything, as DDP does.
    settings: dict[str, Value] = {"zero_stage": stage} if stage else {"distributed_type": "MULTI_GPU"}
    settings |= deepspeed_sizes(zero)
    for part in OFFLOADED:
        offload = zero.get(part)
        settings[f"{part}_device"] = offload.get("device", "none") if isinstance(offload, Mapping) else "none"
    return LaunchConfig(settings=settings, unmodelled=tuple(_unmodelled(keys, stage)))


def _unmodelled(keys: Mapping[str, object], stage: object) -> Iterator[str]:
    """Yield the keys of a DeepSpeed config whose values change memory or speed and are not modelled."""
    for name, harmless in DEEPSPEED_UNMODELLED.items():
        value: object = keys
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value not in (*harmless, "auto") and (name, stage) != (OVERLAP_COMM, 3):
            yield name


def deepspeed_sizes(zero: Mapping[str, Any]) -> dict[str, Value]:
    """Return the sizes that the ZeRO stage in `zero_optimization` reads; DeepSpeed's defaults for missing ones."""
    stage = zero.get("stage", 0)
    read = ZERO_SIZES if stage == 3 else ("reduce_bucket_size",) if stage else ()
    sizes = {name: zero.get(name, zero.get(name.removeprefix("stage3_"), DEEPSPEED_SIZES[name])) for name in read}
    return sizes | ({"sub_group_size": 1} if sizes.get("sub_group_size") == 0 else {})  # a group for each parameter


def _load_deepspeed_config(value: object, folder: Path) -> Mapping[str, object]:
    """Return a DeepSpeed config, loaded from JSON if it is a path.

    A path is relative to the working directory, as in Transformers, or to the config file's folder.

    Raises:
        InputError: the file cannot be read, or does not map keys to values.
    """
    if isinstance(value, Mapping):
        return value
    path = Path(str(value))
    try:
        path = path if path.exists() else folder / path
    except (OSError, ValueError):
        path = folder / path  # a name that no file can have, as the reader says
    try:
        read = read_json(path)
    except InputError as error:
        raise InputError(f"The DeepSpeed config {without_middle(str(error), LONGEST_WORD)}") from error
    if not isinstance(read, Mapping):
        raise InputError(f"The DeepSpeed config {path} should hold keys and values.")
    return read
